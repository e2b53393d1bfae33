"""The judge's arithmetic on known answers: shares of time, break-even, quality over windows, gates and words."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.protocol import Scored
from pdq_tui.errors import UsageError
from pdq_tui.judge import breakeven, quality, traffic
from pdq_tui.judge.breakeven import Line
from pdq_tui.judge.traffic import Shape

# -- traffic -----------------------------------------------------------------------------------------------------------


def test_the_share_of_a_stage_bounds_what_staging_can_gain() -> None:
    """1000 ms of prefill and 99 tokens of 10 ms: half and half, nearly; the smaller half at no cost doubles the speed."""
    found = traffic.share([Shape(512, 100)], 512, 100, ttft_ms=1000.0, tpot_ms=10.0)
    assert (found.prefill_ms, found.decode_ms) == (1000.0, 990.0)
    assert found.prefill == pytest.approx(1000 / 1990)
    assert found.most_gain == pytest.approx(990 / 1000)
    assert not found.extrapolated
    longer = traffic.share([Shape(512, 100), Shape(1024, 100, 3)], 512, 100, 1000.0, 10.0)
    assert longer.prefill_ms == 7000.0 and longer.extrapolated


def test_one_token_answers_leave_staging_nothing_to_gain() -> None:
    assert traffic.share([Shape(512, 1)], 512, 64, 1000.0, 10.0).most_gain == 0.0


def test_traffic_is_read_from_a_table(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival,prompt_tokens,output_tokens\n0,10,5\n1,10,5\n2,7,1\n")
    assert traffic.read(str(file)) == [Shape(7, 1), Shape(10, 5, 2)]
    assert traffic.read("rag") == [Shape(8192, 256)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prompt_tokens\n3\n", "no column output_tokens"),
        ("prompt_tokens,output_tokens\n3,x\n", "line 2"),
        ("prompt_tokens,output_tokens\n3,4\n3,0\n", "line 3"),
        ("prompt_tokens,output_tokens\n", "holds no request"),
        ("", "no column"),
    ],
)
def test_X01_a_table_that_is_wrong_is_named_by_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        traffic.read(str(file))
    with pytest.raises(UsageError, match="is no preset"):
        traffic.read("nothing")


# -- break-even --------------------------------------------------------------------------------------------------------


def line(a: float, step: float, noise: float = 0.0, blocks: int = 20, seed: int = 0) -> Line:
    rng = random.Random(seed)
    return Line(
        staged="s",
        uniform="u",
        a=[a + rng.gauss(0, noise) for _ in range(blocks)],
        step=[step + rng.gauss(0, noise / 100) for _ in range(blocks)],
        longest=64,
    )


@pytest.mark.parametrize(
    ("a", "step", "side", "output"),
    [
        (-100.0, 2.0, breakeven.BELOW, 51),
        (100.0, -2.0, breakeven.ABOVE, 51),
        (-100.0, -2.0, breakeven.ALWAYS, None),
        (100.0, 2.0, breakeven.NEVER, None),
        (-100.0, 0.0, breakeven.OPEN, None),
    ],
)
def test_break_even_and_its_side(a: float, step: float, side: str, output: float | None) -> None:
    found = line(a, step, noise=1.0 if step else 0.0).break_even()
    assert found.side == side
    if output is None:
        assert found.output is None and found.ci95 is None
    else:
        assert found.output == pytest.approx(output, rel=0.02)
        assert found.ci95 and found.ci95[0] < found.output < found.ci95[1]


@given(st.floats(-500, 500), st.floats(-5, 5), st.integers(1, 5000))
def test_delta_is_a_line_in_the_answers_length(a: float, step: float, output: int) -> None:
    delta, ci = line(a, step).delta_ms(output)
    assert delta == pytest.approx(a + (output - 1) * step, abs=1e-6)
    assert ci is not None and ci[0] <= delta + 1e-6 and ci[1] >= delta - 1e-6


def test_the_sign_of_delta_on_either_side_of_break_even_is_right() -> None:
    """Half and twice N*, 200 draws of 10 noisy blocks each."""
    right = total = 0
    for seed in range(200):
        found = line(-200.0, 4.0, noise=20.0, blocks=10, seed=seed)
        at = 1 + 200 / 4
        for output, sign in ((at / 2, -1), (at * 2, 1)):
            total += 1
            right += math.copysign(1, found.delta_ms(round(output))[0]) == sign
    assert right / total >= 0.95


# -- quality -----------------------------------------------------------------------------------------------------------


def scored(kld: list[float | None], window: int = 0, **more: Any) -> Scored:
    fields: dict[str, Any] = {
        "arm": "x", "base": "bf16", "policy": "x", "policy_digest": "d", "path": "decode", "forced": "text",
        "window": window, "first": 0, "kld": kld, "same_top1": [True] * len(kld),
        "nll": [1.0] * len(kld), "base_nll": [0.9] * len(kld),
    }  # fmt: skip
    return Scored(**(fields | more))


def test_quality_is_a_mean_over_windows_by_path_and_position() -> None:
    windows = [scored([0.0, 0.01 * (i + 1)], i) for i in range(10)]
    found = quality.summarize(windows)
    assert found.kld.value == pytest.approx(0.0275) and found.kld.windows == 10
    assert found.kld.ci95 and found.kld.ci95[0] < 0.0275 < found.kld.ci95[1]
    assert found.ppl_ratio.value == pytest.approx(math.exp(0.1))
    assert [(at, e.value) for at, e in found.by_position] == [(0, 0.0), (1, pytest.approx(0.055))]
    assert found.kld_p99 is None, "20 positions have no p99"


def test_the_unit_is_a_window_and_not_a_token() -> None:
    """All of the spread lies between windows: a thousand tokens in ten windows are ten observations."""
    rng = random.Random(1)
    levels = [rng.uniform(0.0, 0.02) for _ in range(10)]
    few = quality.summarize([scored([v] * 2, i) for i, v in enumerate(levels)]).kld
    many = quality.summarize([scored([v] * 100, i) for i, v in enumerate(levels)]).kld
    assert few.ci95 and many.ci95
    assert many.ci95[1] - many.ci95[0] == pytest.approx(few.ci95[1] - few.ci95[0])


@pytest.mark.parametrize(
    ("values", "limit", "result"),
    [
        ([0.001, 0.002, 0.003, 0.002], 0.011, quality.PASS),
        ([0.05, 0.06, 0.07, 0.06], 0.011, quality.FAIL),
        ([0.001, 0.03, 0.001, 0.02], 0.011, quality.UNSURE),
        ([0.001], 0.011, quality.UNSURE),
        ([0.001, None, 0.001, 0.001], 0.011, quality.FAIL),
    ],
)
def test_the_gate_asks_for_the_upper_bound(values: list[float | None], limit: float, result: str) -> None:
    path = quality.summarize([scored([v], i) for i, v in enumerate(values)])
    assert quality.gate(path, limit).result == result


def test_what_cannot_be_judged_is_not_informative_but_broken_logits_fail() -> None:
    good = quality.summarize([scored([0.001], i) for i in range(4)])
    assert quality.gate(good, 0.01, uninformative="4 bits").result == quality.NOT_INFORMATIVE
    broken = quality.summarize([scored([None], i) for i in range(4)])
    assert quality.gate(broken, 0.01, uninformative="4 bits").result == quality.FAIL
