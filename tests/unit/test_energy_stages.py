"""Energy by stage from made counters: tokens, idle, closure, and every way to have none."""

from __future__ import annotations

import pytest

from pdq_tui.core.energy import joules_at, stage_energy, window_joules
from pdq_tui.core.protocol import EnergyWindow

S = 1_000_000_000


def window(kind: str, start_s: float, end_s: float, prompt: int = 0, made: int = 0) -> EnergyWindow:
    return EnergyWindow(
        arm="A", policy_digest="d", window=kind, start_ns=int(start_s * S), end_ns=int(end_s * S),
        prompt_tokens=prompt, output_tokens=made,
    )  # fmt: skip


def counter(*pieces: tuple[float, float], every_s: float = 0.1) -> list[tuple[int, float]]:
    """Pieces of (seconds, watt), one after the other, read every tenth of a second."""
    found, t, joules = [(0, 0.0)], 0.0, 0.0
    for seconds, watt in pieces:
        for _ in range(round(seconds / every_s)):
            t, joules = t + every_s, joules + every_s * watt
            found.append((round(t * S), joules))
    return found


#: idle 50 W, prefill 500 W, decode 300 W, and a mixed run of 6 s: 3 s prefill, 3 s decode.
READINGS = counter((7, 50), (7, 500), (7, 300), (3, 500), (3, 300), (1, 50))
WINDOWS = [
    window("idle", 0.5, 6.5),
    window("prefill", 7.5, 13.5, prompt=60_000),
    window("decode", 14.5, 20.5, made=600),
    window("mixed", 21, 27, prompt=30_000, made=300),
]


def test_gross_net_and_closure() -> None:
    found = stage_energy(WINDOWS, READINGS, "NVML", "none")
    assert found.prefill_j == pytest.approx(500 * 6 / 60_000)
    assert found.decode_j == pytest.approx(300 * 6 / 600)
    assert found.prefill_net_j == pytest.approx(450 * 6 / 60_000)
    assert found.decode_net_j == pytest.approx(250 * 6 / 600)
    assert found.idle_w == pytest.approx(50)
    assert found.closure == pytest.approx(0, abs=1e-6)
    assert not found.flagged and found.reason == ""


def test_a_mixed_run_that_is_not_its_stages_sum_flags_them() -> None:
    dear = counter((7, 50), (7, 500), (7, 300), (3, 560), (3, 360), (1, 50))
    found = stage_energy(WINDOWS, dear, "NVML", "none")
    assert found.closure == pytest.approx((920 * 3 - 800 * 3) / (920 * 3))
    assert found.flagged


def test_an_edge_between_two_samples_is_interpolated_and_one_beyond_them_is_not_known() -> None:
    readings = counter((10, 100), every_s=0.5)
    assert joules_at(readings, int(3.3 * S)) == pytest.approx(330)
    assert joules_at(readings, 0) == 0
    assert joules_at(readings, 11 * S) is None
    assert joules_at([(0, 0.0), (5 * S, 500.0)], 2 * S) is None  # the samples lie too far apart
    assert window_joules(readings, window("prefill", 1, 12)) is None


def test_a_counter_that_started_again_gives_nothing() -> None:
    fallen = [(t, j if t < 10 * S else j - 3000) for t, j in READINGS]
    found = stage_energy(WINDOWS, fallen, "NVML", "none")
    assert found.prefill_j is None
    assert found.decode_j == pytest.approx(3.0)
    assert found.closure is None


@pytest.mark.parametrize(
    ("windows", "readings", "words"),
    [
        ([], READINGS, "no stage-pure loop"),
        (WINDOWS, [], "the counter's own reason"),
        (WINDOWS, READINGS[:1], "the counter's own reason"),
        ([window("prefill", 7.5, 10, prompt=5), *WINDOWS[2:]], READINGS, "shorter than 5 s"),
        (WINDOWS, [(0, 0.0), (1, 1.0)], "no two counter readings"),
    ],
)
def test_without_a_figure_there_is_a_reason(
    windows: list[EnergyWindow], readings: list[tuple[int, float]], words: str
) -> None:
    found = stage_energy(windows, readings, "NVML", "the counter's own reason")
    assert (found.prefill_j, found.decode_j, found.closure) == (None, None, None)
    assert words in found.reason


def test_without_idle_there_is_gross_only() -> None:
    found = stage_energy(WINDOWS[1:], READINGS, "NVML", "none")
    assert found.prefill_j is not None and found.prefill_net_j is None
