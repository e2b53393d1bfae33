"""Kernels and roofline: the table by stage, the points and their numbers, keys, sizes, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_traces import kernels_view
from fake_views import FakeSession, make_view, starting_view
from small_app import NASTY, SmallApp, at_every_size, settle, text_of

from pdq_tui.core.roofline import Roof, RoofPoint, roof_point
from pdq_tui.tui.kernels import KernelsScreen, snapshot_points
from pdq_tui.tui.lines import LineList
from pdq_tui.tui.roofline_plot import RoofPicture, draw_roof

ROOF = Roof(31.6, {"bf16": 0.42, "int8": 0.9})


def point(
    label: str = "A decode", flops: float = 2.8e8, read: int = 88_000_000, ms: float = 11.9
) -> RoofPoint:
    found = roof_point(*label.split(), "p", read, {"bf16": flops}, ms)
    assert found is not None
    return found


def app_of(tmp_path: Path, plain: bool = False, **changes: Any) -> SmallApp:
    app = SmallApp(KernelsScreen, tmp_path, plain=plain)
    app.session = FakeSession(kernels_view(**changes))
    return app


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_point_is_flops_over_bytes_and_over_time() -> None:
    p = point()
    assert p.intensity == pytest.approx(2.8e8 / 88e6)
    assert p.tflops == pytest.approx(2.8e8 / 11.9e-3 / 1e12)
    assert p.gbps == pytest.approx(88e6 / 11.9e-3 / 1e9)
    assert ROOF.ridge("bf16") == pytest.approx(420 / 31.6)
    assert ROOF.ridge("fp8") is None
    assert p.bound(ROOF) == "memory"
    assert point(flops=1.1e11).bound(ROOF) == "compute"
    assert p.bound(Roof(None, {})) is None
    assert p.bound(Roof(31.6, {"int8": 1.0})) is None


def test_each_dtype_counts_against_its_own_peak() -> None:
    mixed = roof_point("A", "prefill", "p", 10_000_000_000, {"int8": 2e11, "bf16": 1e9}, 100.0)
    assert mixed is not None
    memory_ms = 10e9 / 31.6e9 * 1e3
    compute_ms = (2e11 / 0.9e12 + 1e9 / 0.42e12) * 1e3
    assert (mixed.bound(ROOF) == "compute") == (compute_ms > memory_ms)
    assert mixed.dtype == "int8"


@pytest.mark.parametrize("missing", [{"read": None}, {"read": 0}, {"ms": None}, {"ms": 0.0}, {"flops": {}}])
def test_what_is_not_known_is_no_point(missing: dict[str, Any]) -> None:
    given: dict[str, Any] = {"read": 10, "flops": {"bf16": 1.0}, "ms": 1.0} | missing
    assert roof_point("A", "decode", "p", given["read"], given["flops"], given["ms"]) is None


# -- the drawing -----------------------------------------------------------------------------------------------------


def grid(picture: RoofPicture, width: int = 60, height: int = 16, marker: str = "ascii") -> list[str]:
    rows = draw_roof(picture, width, height, marker)
    return ["".join(text for text, _ in row) for row in rows]


def test_points_lie_where_their_numbers_say() -> None:
    slow, fast = point("A decode", ms=24.0), point("B decode", ms=6.0)
    dense = point("A prefill", flops=1.1e11, ms=300.0)
    text = grid(RoofPicture(ROOF, (("1", "a", slow), ("2", "b", fast), ("3", "a", dense))))
    at = {
        c: (x, y)
        for y, row in enumerate(text)
        for x, c in enumerate(row[8:-7])
        if c in "123" and "┬" not in row and y < 14
    }
    assert at["2"][1] < at["1"][1] and at["2"][0] == at["1"][0]
    assert at["3"][0] > at["1"][0] and at["3"][1] < at["2"][1]
    assert any("bf16" in row for row in text) and any("int8" in row for row in text)
    assert "FLOP/byte" in text[-1]


def test_the_chosen_point_is_marked_and_seen_where_others_lie_on_it() -> None:
    one, same = point("A decode"), point("B decode")
    text = "\n".join(grid(RoofPicture(ROOF, (("AD", "a", one), ("BD", "b", same)), "A decode")))
    assert "[AD]" in text and "[BD]" not in text


def test_the_slope_ends_at_the_highest_ceiling() -> None:
    text = grid(RoofPicture(ROOF, (("x", "a", point()),)))
    body = [row[8:-7] for row in text[:-2]]
    top = min(y for y, row in enumerate(body) if "." in row)
    assert body[top].rstrip().endswith(".")  # a ceiling, to the right end
    lowest = max(y for y, row in enumerate(body) if "." in row)
    assert body[lowest].index(".") < body[top].index(".")


@pytest.mark.parametrize("marker", ["braille", "block", "ascii"])
@pytest.mark.parametrize("size", [(0, 0), (1, 1), (10, 3), (24, 6), (60, 16), (200, 60)])
def test_any_size_is_filled_exactly(size: tuple[int, int], marker: str) -> None:
    for picture in (
        RoofPicture(ROOF, (("AD", "a", point()),)),
        RoofPicture(Roof(None, {})),
        RoofPicture(Roof(None, {}), (("AD", "a", point()),)),
    ):
        rows = draw_roof(picture, *size, marker)
        assert len(rows) == size[1] or size[0] == 0
        assert all(sum(len(t) for t, _ in row) == size[0] for row in rows)


# -- the screen ------------------------------------------------------------------------------------------------------


async def test_kernels_of_both_arms_by_stage_and_the_chosen_point(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    async with app.run_test(size=(140, 60)) as pilot:
        await settle(pilot)
        shown = text_of(app)
        for word in (
            "pdq_native::int8",
            "aten::mm",
            "between kernels",
            "profiler ×1.",
            "memory-bound",
            "compute-bound",
            "[AP]",
        ):
            assert word in shown, word
        app.screen.query_one("#points", LineList).focus()
        await pilot.press("j")
        await settle(pilot)
        shown = text_of(app)
        assert (
            "[AD]" in shown
            and "83.9 MiB" in shown
            and "turns compute-bound at 13.3 FLOP/byte" in " ".join(shown.split())
        )


async def test_groups_and_difference(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    async with app.run_test(size=(140, 60)) as pilot:
        await settle(pilot)
        await pilot.press("c")
        await settle(pilot)
        assert "weight GEMM" in text_of(app) and "pdq_native::causal" not in text_of(app)
        await pilot.press("c", "x")
        await settle(pilot)
        assert "came" in text_of(app) and "went" in text_of(app) and "prefill: B → A" in text_of(app)


async def test_the_key_asks_for_a_burst_of_the_active_arm(tmp_path: Path) -> None:
    app = app_of(tmp_path, bursts=False)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        assert "placed, not yet seen to run" in text_of(app)
        await pilot.press("t")
        assert ("trace", "A", 4) in app.session.calls
        await pilot.press("x")
        await settle(pilot)
        assert "needs a burst of both arms" in text_of(app)
    app = SmallApp(KernelsScreen, tmp_path)
    app.session = FakeSession(starting_view())
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("t")
        await settle(pilot)
        assert not app.session.calls and "not ready yet" in text_of(app)


async def test_what_is_said_of_a_burst_ends_when_it_is_there(tmp_path: Path) -> None:
    app = app_of(tmp_path, bursts=False)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("t")
        await settle(pilot)
        assert "profiling a burst of arm A" in text_of(app)
        app.session.change(traces=kernels_view().traces)
        app.screen._tick()
        await settle(pilot)
        assert "profiling a burst" not in text_of(app)


async def test_a_policy_that_runs_something_else_is_seen(tmp_path: Path) -> None:
    app = app_of(tmp_path, flagged=True)
    async with app.run_test(size=(160, 60)) as pilot:
        await settle(pilot)
        assert "not what the policy says" in text_of(app)


async def test_a_burst_of_an_earlier_policy_is_not_shown_as_todays(tmp_path: Path) -> None:
    view = kernels_view()
    view.traces["A"].policy_digest = "another"
    app = SmallApp(KernelsScreen, tmp_path)
    app.session = FakeSession(view)
    async with app.run_test(size=(140, 60)) as pilot:
        await settle(pilot)
        assert "placed, not yet seen to run" in text_of(app) and "aten::mm" in text_of(app)


async def test_foreign_names_are_literal(tmp_path: Path) -> None:
    view = kernels_view()
    for text in NASTY:
        view.traces["A"].stages[0].kernels[0].name = text
        app = SmallApp(KernelsScreen, tmp_path)
        app.session = FakeSession(view)
        async with app.run_test(size=(120, 36)) as pilot:
            await settle(pilot)
            assert "\x1b" not in text_of(app)


async def test_S07_kernels_at_every_size(tmp_path: Path) -> None:
    await at_every_size(KernelsScreen, tmp_path, "5 KERNELS")


def manifest(**changes: Any) -> dict[str, Any]:
    arm = {
        "policy": "int8",
        "prefill": {"bytes": 100, "flops": {"int8": 1e6}, "prefill_ms": {"median": 5.0}},
        "decode": {"bytes_per_step": 90, "flops": {"bf16": 1e3}, "step_ms": {"median": 1.0}},
    }
    return {"arm": arm | changes}


def test_snapshots_of_the_run_are_points_and_damaged_ones_are_not(tmp_path: Path) -> None:
    for name, body in (("001", manifest()), ("002", manifest(decode={"flops": None})), ("003", {"arm": 3})):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
        (tmp_path / "snapshots" / name / "manifest.json").write_text(json.dumps(body))
    assert [p.name for p in snapshot_points(tmp_path, "001")] == ["1 prefill", "1 decode"]
    assert [p.name for p in snapshot_points(tmp_path, "002")] == ["2 prefill"]
    assert snapshot_points(tmp_path, "003") == snapshot_points(tmp_path, "004") == []


async def test_readonly_names_no_key_that_profiles(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    app.readonly = True
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("t")
        assert not app.session.calls and "Profile" not in text_of(app)


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
@pytest.mark.parametrize("mode", ["colour", "no_color", "ascii"])
def test_kernels_picture(
    size: tuple[int, int], mode: str, tmp_path: Path, snap_compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "no_color":
        monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_of(tmp_path, plain=mode == "ascii"), terminal_size=size, run_before=settle)


def test_roofline_picture_where_one_side_fits(tmp_path: Path, snap_compare: Any) -> None:
    async def to_the_roofline(pilot: Any) -> None:
        await settle(pilot)
        await pilot.press("v")
        await settle(pilot)

    assert snap_compare(app_of(tmp_path), terminal_size=(80, 24), run_before=to_the_roofline)


def test_the_made_view_is_a_whole_one() -> None:
    assert make_view().traces == {}
