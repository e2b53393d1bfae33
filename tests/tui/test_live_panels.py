"""The live panels' rows: what must be read whole is read whole, at the widths that the layouts give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fake_views import BASE, STAGED, STATS_A, STATS_B, FakeSession, arm_view, make_view, ratio

from pdq_tui.core.energy import StageEnergy
from pdq_tui.core.formats import formats
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.protocol import Guarded
from pdq_tui.core.stats import Ratio
from pdq_tui.host.view import EnergyView, GuardView, SessionView
from pdq_tui.tui import device_panel, footing, heading, panels
from pdq_tui.tui.heading import Look
from pdq_tui.tui.lines import Row, cells

#: Inside of a stage's panel at 120x36, and of the table at 80x24 and 60x20.
FULL, MID, SMALL = 42, 78, 58
KERNELS = sorted({k.name for device in ("cpu", "cuda") for k in load_kernels(device).candidates})
CHECK = Guarded(
    request=9, arm="A", policy="x", policy_digest="d", base="B", base_policy="bf16", kld=0.02, same_top1=0.97
)
FORMATS = tuple(formats((64, 128)))


def text_of(line: Row) -> str:
    return "".join(text for text, _ in line)


def with_kernel(policy: Policy, name: str) -> SessionView:
    arm = arm_view("A", policy, STATS_A, 212)
    assert arm.ready is not None
    for coverage in arm.ready.coverage.values():
        coverage.kernels = {name: 210, "linear": 1}
    return make_view(arms={"A": arm, "B": arm_view("B", BASE, STATS_B, 208)})


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_named_whole_in_the_full_layout(kernel: str) -> None:
    for fmt in FORMATS:
        stage = StagePolicy(fmt.weights, fmt.activations, fmt.group_size)
        view = with_kernel(Policy("mine*", stage, stage), kernel)
        for look in (Look(), Look(plain=True)):
            shown = text_of(panels.stage_rows(view, "decode", FULL, look)[0])
            assert cells(shown) <= FULL and shown.rstrip().endswith(f" {kernel}") and fmt.label in shown


def test_there_are_kernels_and_a_short_one_stands_beside_its_words() -> None:
    assert len(KERNELS) > 10
    shown = text_of(panels.stage_rows(with_kernel(STAGED, "int4pack"), "decode", FULL, Look())[0])
    assert shown == " policy  A int4-g64  kernels ✓ int4pack"


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
@pytest.mark.parametrize("state", ["ready", "pending", "refused"])
def test_the_reference_is_marked_whatever_its_arm_does(width: int, state: str) -> None:
    """Also where B stores a second copy, or is being packed; nothing of the line is cut."""
    arms = {name: arm_view(name, STAGED, STATS_A, 12) for name in "AB"}
    changes = {"ready": {}, "pending": {"pending": True}, "refused": {"refused": "too large"}}[state]
    arms = {name: replace(arm, **changes) for name, arm in arms.items()}  # type: ignore[arg-type]
    line = text_of(heading.policy_line(make_view(arms=arms), width, Look()))
    assert cells(line) <= width and "~" not in line
    _, a, b = line.replace(" B ", " A ").split(" A ")
    for shown in (a, b):
        assert "w8a8" in shown and "int4-g64" in shown
    assert ("reference" in b or "base" in b) and "reference" not in a and "base" not in a
    word = {"ready": "51.5", "pending": "pack", "refused": "refused"}[state]
    assert word in a and word in b


def shown_word(found: Ratio, width: int) -> tuple[str, str]:
    """The word's text in the stage's own panel and in the table of both."""
    view = make_view(ratios={"tpot_ms": found})
    panel = text_of(panels.stage_rows(view, "decode", FULL, Look())[2])
    table = text_of(panels.both_rows(view, width, Look())[2])
    return panel[33:].strip(), table[47:].strip()


@pytest.mark.parametrize("width", [SMALL, MID])
def test_a_live_word_stays_with_the_blocks_that_decided_it(width: int) -> None:
    import msgspec

    decided = ratio("tpot_ms", 0.63, "better")
    for blocks in (12, 40, 41, 500):
        panel, table = shown_word(msgspec.structs.replace(decided, blocks=blocks, decided_at=40), width)
        assert panel == "better@40"
        assert table == ("better at 40 blocks" if width == MID else "better@40")
    undecided = ratio("tpot_ms", 0.99, "unsure", provisional=True)
    assert shown_word(msgspec.structs.replace(undecided, blocks=6), width) == (
        "prov. 6bl", "not decided at 6 blocks" if width == MID else "prov. 6bl",
    )  # fmt: skip
    # After the last look there is no other to wait for.
    over = msgspec.structs.replace(undecided, provisional=False, blocks=40)
    assert shown_word(over, width) == ("unsure", "unsure at 40 blocks" if width == MID else "unsure")


@pytest.mark.parametrize(
    ("guard", "told", "role"),
    [
        (GuardView(5, 0.031), "guard: 1 of 5 requests of A re-scored by B; none so far", "dim"),
        (
            GuardView(5, 0.031, checks=3, mean=0.0123, last=CHECK),
            "guard: 1 of 5 requests of A re-scored by B; KLD 0.0123 nats (limit 0.031), same top-1 97%, 3 checks",
            "dim",
        ),
        (
            GuardView(
                5, 0.031, checks=1, last=msgspec.structs.replace(CHECK, kld=None, reason="it does not fit")
            ),
            "guard: 1 of 5 requests of A re-scored by B; the last could not be: it does not fit",
            "warn",
        ),
        (GuardView(5, 0.031, "switched", "guard: A (x) gave way to B"), "guard: A (x) gave way to B", "bad"),
    ],
)
def test_what_the_guard_has_seen_is_one_line_above_the_notes(guard: GuardView, told: str, role: str) -> None:
    view = replace(make_view(), guard=guard)
    assert footing.guard_words(view) == (told, role)
    [line, *_] = footing.note_rows(view, 160, 4, Look())
    assert "".join(text for text, _ in line).strip(" !") == told


def test_I01_a_policy_name_in_the_guards_sentence_is_literal() -> None:
    view = replace(make_view(), guard=GuardView(5, 0.0, "switched", "guard: [bold]x[/]\x1b[31m gave way"))
    [line, *_] = footing.note_rows(view, 120, 4, Look())
    shown = "".join(text for text, _ in line)
    assert "[bold]x[/]" in shown and "\x1b" not in shown
    assert footing.guard_words(replace(view, guard=None)) is None


def test_the_subtitle_shows_energy_and_the_last_burst_s_age_as_far_as_they_fit() -> None:
    view = make_view()
    assert panels.stage_subtitle(view, "prefill", 80) == "device time"
    digest = view.arms["A"].ready.policy.digest  # type: ignore[union-attr]
    taken = StageEnergy(prefill_j=0.0112, decode_j=0.97, closure=0.12, source="NVML")
    view = make_view(
        trace_ages_s={"A": 34.2, "B": 400.0},
        energy={"A": EnergyView(digest, 125.0, taken), "B": EnergyView("of another policy", 1.0, taken)},
    )
    whole = "J/tok A 0.011! 2 min ago · burst A 34 s ago · device time"
    assert panels.stage_subtitle(view, "prefill", len(whole)) == whole
    assert panels.stage_subtitle(view, "prefill", 45) == "J/tok A 0.011! 2 min ago · burst A 34 s ago"
    assert panels.stage_subtitle(view, "prefill", 30) == "J/tok A 0.011! 2 min ago"
    assert panels.stage_subtitle(view, "prefill", 8) == "device time"
    assert panels.stage_subtitle(view, "decode", 30) == "J/tok A 0.97! 2 min ago"
    assert panels.burst_subtitle(view, 80).startswith(
        "P J/tok A 0.011! 2 min ago · D J/tok A 0.97! 2 min ago · burst"
    )
    assert (
        panels.burst_subtitle(view, 20) == "burst A 34 s ago" and panels.burst_subtitle(make_view(), 80) == ""
    )
    assert [panels.ago(s) for s in (-1, 99, 100, 5999, 7200)] == [
        "0 s ago",
        "99 s ago",
        "2 min ago",
        "100 min ago",
        "2 h ago",
    ]


@pytest.mark.parametrize(
    ("changes", "said", "asked"),
    [
        (
            {"energy_missing": "RAPL cannot be read: permission denied"},
            "no energy by stage: RAPL cannot be read",
            [],
        ),
        ({}, "energy by stage of arm A: half a minute", [("measure_energy", ["A"])]),
        ({"interleave": True}, "energy by stage of arm A and B", [("measure_energy", ["A", "B"])]),
        ({"workload": None}, "arm A is not ready yet", []),
    ],
)
async def test_energy_is_measured_on_a_key_or_refused_with_the_reason(
    changes: dict[str, Any], said: str, asked: list[Any], make_app: Callable[..., Any], session: FakeSession
) -> None:
    session.change(**changes)
    app = make_app()
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("J")
        await pilot.pause()
        assert said in session.view().notes[-1].text
        assert [c for c in session.calls if c[0] == "measure_energy"] == asked


def test_several_gpus_are_added_up_and_told_one_by_one() -> None:
    view = make_view(gpu=True)
    assert view.sensors is not None and view.sensor_state is not None
    first = view.sensors.gpus[0]
    second = msgspec.structs.replace(first, index=1, power_w=188.0, gpu_util=0.5, throttle=["thermal"])
    idle = msgspec.structs.replace(first, index=2, engine=False, power_w=90.0)
    view = replace(view, sensors=msgspec.structs.replace(view.sensors, gpus=[first, second, idle]))
    assert device_panel.device_title(view) == ("2 GPUs", "NVML")
    rows = [text_of(each) for each in device_panel.device_rows(view, FULL, Look())]
    assert rows[0].startswith(" util  74 %") and "700/1400 W" in rows[1]
    assert "thermal" in rows[4]
    assert rows[-2].rstrip() == " GPU 0 97 %  38.2 GiB  512 W"
    assert rows[-1].rstrip() == " GPU 1 50 %  38.2 GiB  188 W throttled"
