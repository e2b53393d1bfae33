"""Every key of the app and the live screen, pressed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_snapshots
from fake_views import BASE, STAGED, FakeSession, demo_model, make_view, starting_view
from small_app import text_of
from textual.command import CommandPalette

from pdq_tui.core.kv import KvGeometry, KvPolicy
from pdq_tui.core.protocol import Load, SnapshotSaved
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError, UsageError
from pdq_tui.host.view import EngineView, TaskView
from pdq_tui.tui import keys
from pdq_tui.tui.ask import Ask, Pick, Write
from pdq_tui.tui.chart import Chart
from pdq_tui.tui.commands import PdqCommands
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.help import HelpScreen
from pdq_tui.tui.lines import LineList
from pdq_tui.tui.live import LiveScreen
from pdq_tui.tui.rows import Rows

Make = Callable[..., Any]
SIZE = (120, 36)


def only(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


def bottom(app: Any) -> str:
    return app.screen.query_one("#bottom", Rows).text


async def test_keys_r_starts_and_stops(make_app: Make, session: FakeSession) -> None:
    app = make_app(make_view(running=False))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("r")
        assert session.calls == [("start_loop",)]
        await pilot.press("r")
        assert session.calls == [("start_loop",), ("stop",)]


async def test_keys_shift_r_restarts_the_engine(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("R")
        assert session.calls == [("restart_engine",)]


async def test_keys_a_b_choose_the_arm_and_end_the_alternation(make_app: Make, session: FakeSession) -> None:
    app = make_app(make_view(interleave=True))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("b")
        assert session.calls == [("interleave", False), ("select", "B")]
        assert "[B]" in app.screen.query_one("#header", Rows).text
        await pilot.press("a")
        assert session.calls[-1] == ("select", "A")
        assert [letter for _, letter in app.screen.marks] == ["B", "A"]
        await pilot.press("c")
        assert app.screen.marks == []


async def test_keys_x_interleaves(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("x")
        assert "ABBA on" in app.screen.query_one("#header", Rows).text
        await pilot.press("x")
        assert session.calls == [("interleave", True), ("interleave", False)]


@pytest.mark.parametrize(("key", "stage"), [("p", "prefill"), ("d", "decode")])
async def test_keys_p_d_pick_a_format_for_the_active_arm(
    make_app: Make, session: FakeSession, key: str, stage: Any
) -> None:
    app = make_app(make_view(active="B"))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        assert isinstance(app.screen, Pick)
        app.screen.query_one(LineList).move_to("int8")
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, LiveScreen)
        name, arm, policy = session.calls[-1]
        assert (name, arm) == ("set_policy", "B")
        assert policy.name.endswith("*")
        assert policy.stage(stage).format.label == "int8"
        assert "*" in app.screen.query_one("#policies", Rows).text
        assert "packing" in app.screen.query_one("#policies", Rows).text


async def test_keys_p_then_escape_changes_nothing(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("p", "escape")
        assert isinstance(app.screen, LiveScreen)
        assert session.calls == []


async def test_keys_v_picks_the_kv_cache_of_the_active_arm(make_app: Make, session: FakeSession) -> None:
    app = make_app(make_view(active="B"))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("v", "enter")  # what it has already
        await pilot.pause()
        assert session.calls == []
        await pilot.press("v")
        assert isinstance(app.screen, Pick)
        await pilot.press("j", "j", "enter")
        await pilot.pause()
        name, arm, policy = session.calls[-1]
        assert (name, arm, policy.kv) == ("set_policy", "B", KvPolicy("bf16", "int8", "handoff"))
        assert policy.name == "bf16-kv-bf16-int8*"
        shown = app.screen.query_one("#policies", Rows).text
        assert "kv bf16/int8" in shown and "packing" in shown


async def test_Q11_keys_v_says_bytes_and_what_this_model_cannot_have(
    make_app: Make, session: FakeSession
) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("v")
        assert isinstance(app.screen, Pick)
        notes = {choice.value: choice.note for choice in app.screen.choices}
        assert "22.5 KiB a token" in notes["bf16"] and "11.6 KiB a token" in notes["bf16/int8"]
        assert not any(choice.refused for choice in app.screen.choices)
    odd = demo_model()
    odd.kv = KvGeometry(kv_heads=3, head_dim=80, dtype_bytes=2, windows=(None,) * 30)
    app = make_app(make_view(model=odd))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("v")
        assert isinstance(app.screen, Pick)
        refused = {choice.value: choice.refused for choice in app.screen.choices if choice.refused}
        assert refused == {"bf16/int4-g32": "groups of 32 do not divide this model's heads of 80"}
        assert "n/a: groups of 32" in str(app.screen.query_one("#choices", LineList).lines)
    odd.kv_refused = "only this program's own attention reads a quantized cache"
    app = make_app(make_view(model=odd))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("v", "j", "j", "enter")
        await pilot.pause()
        assert session.calls == []


async def test_keys_escape_cancels_packing(make_app: Make, session: FakeSession) -> None:
    app = make_app(make_view(tasks=(TaskView("pack", "A: int4 decode", 12.0, 30.0, "layers", 0.8),)))
    async with app.run_test(size=SIZE) as pilot:
        assert "pack  A: int4 decode" in bottom(app)
        assert "40 %" in bottom(app)
        await pilot.press("escape")
        assert session.calls == [("cancel",)]


def saving(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, str]]:
    from pdq_tui.store import snapshot

    asked: list[tuple[str, str]] = []

    def save(run_dir: Path, events: Any, arm: str, note: str = "", *, min_effect: float = 0.0) -> Path:
        assert min_effect == 0.01  # the app's own
        asked.append((arm, note))
        if isinstance(answer, Exception):
            raise answer
        return run_dir / "snapshots" / f"{len(asked):03d}"

    monkeypatch.setattr(snapshot, "save", save)
    return asked


async def test_keys_s_saves_a_snapshot_of_the_active_arm(
    make_app: Make, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = saving(monkeypatch, None)
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("s")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert asked == [("A", "")]
        assert isinstance(session.recorded[0], SnapshotSaved)
        assert "snapshots/001" in bottom(app)


async def test_keys_s_saves_both_arms_while_they_alternate(
    make_app: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = saving(monkeypatch, None)
    app = make_app(make_view(interleave=True))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("s")
        await app.workers.wait_for_complete()
        assert asked == [("A", ""), ("B", "")]


async def test_keys_shift_s_saves_with_a_note(make_app: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = saving(monkeypatch, None)
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("S")
        assert isinstance(app.screen, Write)
        await pilot.press("h", "i", "enter")
        await app.workers.wait_for_complete()
        assert asked == [("A", "hi")]


async def test_keys_s_on_a_full_disk_is_a_line_and_the_screen_stays(
    make_app: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving(monkeypatch, PdqError("the disk is full [/", "free some space"))
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("s")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "the disk is full [/ - free some space" in bottom(app)


async def test_keys_space_freezes_the_display_only(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("space")
        session.change(elapsed_s=session.picture.elapsed_s + 34, active="B")
        app.screen.redraw()
        header = app.screen.query_one("#header", Rows).text
        assert "PAUSED +34 s recorded" in header
        assert "[A]" in header
        await pilot.press("space")
        assert "[B]" in app.screen.query_one("#header", Rows).text


async def test_keys_m_changes_the_metric_of_the_focused_chart(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("m")
        assert app.screen.charts[0] == "bandwidth_gbps"
        await pilot.press("M")
        assert app.screen.charts[0] == "tpot_ms"
        app.screen.query_one("#chart3").focus()
        await pilot.press("m")
        assert app.screen.charts[3] == "tpot_ms"
        assert app.screen.help_metric == "tpot_ms"


async def test_keys_w_goes_through_the_windows(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        seen = []
        for _ in range(3):
            await pilot.press("w")
            seen.append(app.screen.window_s)
        assert seen == [None, 30.0, 120.0]


async def test_keys_z_zooms_the_focused_panel_and_back(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        app.screen.query_one("#chart2").focus()
        await pilot.press("z")
        await pilot.pause()
        assert app.screen.query_one("#chart2").size.width > 100
        assert not app.screen.query_one("#prefill").display
        await pilot.press("escape")
        await pilot.pause()
        assert app.screen.query_one("#prefill").display
        await pilot.press("z", "z")
        await pilot.pause()
        assert app.screen.zoomed is None


async def test_keys_tab_and_jk_move_the_focus(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("tab")
        assert app.screen.focused.id == "prefill"
        await pilot.press("j")
        assert app.screen.focused.id == "decode"
        await pilot.press("k")
        assert app.screen.focused.id == "prefill"


@pytest.mark.parametrize("key", ["question_mark", "f1"])
async def test_keys_help_knows_the_focused_panel(make_app: Make, key: str) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        app.screen.query_one("#decode").focus()
        await pilot.press(key)
        assert isinstance(app.screen, HelpScreen)
        assert app.screen.metric.id == "tpot_ms"
        await pilot.press("escape")
        assert isinstance(app.screen, LiveScreen)


@pytest.mark.parametrize("key", ["ctrl+p", "colon"])
async def test_keys_palette_finds_policies(make_app: Make, session: FakeSession, key: str) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        assert isinstance(app.screen, CommandPalette)
        await pilot.press(*"b: int4-pre")
        await app.workers.wait_for_complete()
        await pilot.pause(0.3)
        await pilot.press("enter", "enter")
        await pilot.pause(0.1)
        assert session.calls[-1][:2] == ("set_policy", "B")
        assert session.calls[-1][2].name == "int4-prefill-bf16-decode"


@pytest.mark.parametrize(("key", "mode"), [("2", "compare"), ("3", "policies"), ("6", "log")])
async def test_keys_digits_change_the_screen_and_back(make_app: Make, key: str, mode: str) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert app.showing == mode
        await pilot.press("1")
        await pilot.pause()
        assert app.showing == "live"
        assert isinstance(app.screen, LiveScreen)


async def test_key_five_shows_the_kernels(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("5")
        await pilot.pause()
        assert app.showing == "kernels" and type(app.screen).__name__ == "KernelsScreen"


async def test_keys_e_opens_the_export_dialog(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("e")
        assert isinstance(app.screen, ExportDialog)
        await pilot.press("escape")
        assert isinstance(app.screen, LiveScreen)


async def test_keys_y_sends_to_the_terminal_and_saves_a_file(
    make_app: Make, session: FakeSession, tmp_path: Path
) -> None:
    app = make_app(make_view(run_dir=str(tmp_path)))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("y")
        saved = only(tmp_path, "copy-live-*.txt")
        assert "TTFT" in saved.read_text(encoding="utf-8")
        assert app.clipboard.startswith(" pdq")
        assert "sent to the terminal" in bottom(app)


async def test_keys_t_changes_the_theme(make_app: Make) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        seen = [app.theme]
        for _ in range(3):
            await pilot.press("T")
            seen.append(app.theme)
        assert seen == ["pdq-dark", "pdq-light", "pdq-contrast", "pdq-dark"]


async def test_keys_f12_saves_a_picture(make_app: Make, tmp_path: Path) -> None:
    app = make_app(make_view(run_dir=str(tmp_path)))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("f12")
        saved = only(tmp_path, "screen-*.svg")
        assert "<svg" in saved.read_text(encoding="utf-8")


async def test_keys_q_asks_only_while_a_run_is_live(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("q")
        assert isinstance(app.screen, Ask)
        await pilot.press("n")
        assert not session.closed
        session.change(running=False)
        await pilot.press("q")
        await pilot.pause(0.2)
    assert session.closed
    assert app.return_code == 0


async def test_keys_q_then_y_stops_and_quits(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+q")
        await pilot.press("y")
        await pilot.pause(0.2)
    assert session.closed
    assert app.return_code == 0


async def test_keys_ctrl_c_stops_then_quits(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+c")
        assert session.calls == [("stop",)]
        assert "ctrl+c again" in bottom(app)
        assert not session.closed
        await pilot.press("ctrl+c")
        await pilot.pause(0.2)
    assert session.closed
    assert app.return_code == 130


async def test_keys_ctrl_c_works_in_a_dialog(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("S", "x")
        await pilot.press("ctrl+c")
        assert ("stop",) in session.calls


async def test_app_readonly_changes_nothing(make_app: Make, session: FakeSession) -> None:
    app = make_app(readonly=True)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("r", "R", "a", "b", "x", "p", "d", "v", "s", "S")
        await pilot.pause()
        assert isinstance(app.screen, LiveScreen)
        assert session.calls == []
        await pilot.press("m")
        assert app.screen.charts[0] == "bandwidth_gbps"


async def test_app_keys_can_be_moved_by_id(make_app: Make, session: FakeSession) -> None:
    app = make_app(keys={"live.interleave": "i"})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("i")
        assert session.calls == [("interleave", True)]
        await pilot.press("x")
        assert len(session.calls) == 1
        assert "i ABBA" in app.screen.query_one("#keys", Rows).text


def test_app_unknown_key_id_is_named_with_the_nearest(make_app: Make) -> None:
    with pytest.raises(UsageError, match=r"live\.interleve") as raised:
        make_app(keys={"live.interleve": "i"})
    assert "live.interleave" in str(raised.value)


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ({"live.run": "a"}, r"'a' would be both live\.arm_a and live\.run"),
        ({"live.run": "q"}, r"'q' would be both app\.quit and live\.run"),
        ({"app.help": "j"}, r"'j' would be both app\.help and l"),
        ({"policies.new": "c"}, r"'c' would be both policies\.clone and policies\.new"),
        ({"live.metric_next": "?"}, r"'question_mark' would be both app\.help and live\.metric_next"),
    ],
)
def test_app_a_key_with_two_meanings_names_both(make_app: Make, moved: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        make_app(keys=moved)
    assert "another key" in str(raised.value.hint)


def test_app_keys_that_swap_places_are_no_clash(make_app: Make) -> None:
    assert make_app(keys={"live.arm_a": "b", "live.arm_b": "a"})
    assert make_app(keys={"live.run": "i"}), "i means something on the log screen only"


async def test_keys_palette_has_metrics_snapshots_and_exports(make_app: Make, tmp_path: Path) -> None:
    [reference, candidate] = made_snapshots.save_all(tmp_path / "runs")
    app = make_app()
    async with app.run_test(size=SIZE) as pilot:
        provider = PdqCommands(app.screen)
        await provider.startup()
        await app.workers.wait_for_complete()
        by_name = {name: run for name, _, run in provider.commands}
        assert {"Metric: TTFT", "Export: html", "Export: md", f"Compare with: {reference}"} <= set(by_name)
        await by_name["Metric: TTFT"]()  # type: ignore[misc]
        await pilot.pause()
        assert app.screen.charts[0] == "ttft_ms"
        await by_name["Export: html"]()  # type: ignore[misc]
        await pilot.pause()
        assert isinstance(app.screen, ExportDialog) and app.screen.formats == {"html"}
        await pilot.press("escape")
        for name in (reference, candidate):
            await by_name[f"Compare with: {name}"]()  # type: ignore[misc]
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
        assert app.showing == "compare" and {reference, candidate} <= set(app.screen.picks.picked)


def test_app_unknown_theme_is_a_sentence(make_app: Make) -> None:
    with pytest.raises(UsageError, match="no theme"):
        make_app(theme="pink")


def test_app_every_key_has_an_id_a_tooltip_and_no_forbidden_chord() -> None:
    from textual.binding import Binding

    seen = set()
    for binding in (*keys.APP, *keys.LIVE):
        assert isinstance(binding, Binding)
        # one key that does another thing for who only looks has one id
        assert binding.id and binding.tooltip and (binding.id, binding.action) not in seen
        seen.add((binding.id, binding.action))
        for key in binding.key.split(","):
            assert not key.startswith("alt+")
            assert key not in (
                "ctrl+a",
                "ctrl+b",
                "ctrl+s",
                "ctrl+j",
                "ctrl+k",
                "ctrl+e",
                "f10",
                "f11",
            )


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
async def test_a_first_start_says_what_to_press(
    make_app: Make, session: FakeSession, size: tuple[int, int]
) -> None:
    words = ("both in turns", "is it worth it", "every number")
    for first in (True, False):
        session.picture = starting_view()
        session.change(tasks=())
        app = make_app(first=first, keys={"live.interleave": "i"})
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            picture = app.screen.query_one("#chart0", Chart).picture
            shown = text_of(app) if size[1] == 20 else picture.empty.replace("\n", " ")
            assert all((word in shown) == first for word in words[: 2 if size[1] == 20 else None])
            if first:
                assert "i: both in turns" in shown, "as the keys are bound here"
                session.picture = make_view()
                app.screen.redraw()
                await pilot.pause()
                assert "both in turns" not in text_of(app), "once there is something to see"


async def test_app_starts_the_session_after_the_first_frame(make_app: Make, session: FakeSession) -> None:
    load = Load(model="/models/x")
    app = make_app(starting_view(), load=load, a=STAGED, b=BASE, workload=Workload(output_tokens=16))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        assert session.calls == [("start", load, STAGED, BASE, Workload(output_tokens=16), "A", True)]


async def test_app_fetches_the_demo_with_progress_while_the_screen_is_up(
    make_app: Make, session: FakeSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import threading

    from pdq_tui.host import demo

    go_on, told = threading.Event(), threading.Event()

    def fetch(progress: Any = None, cancelled: Any = None) -> Path:
        progress(30e6, 92e6, "demo model [/")
        told.set()
        go_on.wait(5)
        return tmp_path

    monkeypatch.setattr(demo, "fetch", fetch)
    app = make_app(starting_view(), load=Load(model="demo"), a=STAGED, b=BASE)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        assert told.wait(5)
        app.screen.redraw()
        assert "demo model [/" in bottom(app)
        assert session.calls == []
        go_on.set()
        await app.workers.wait_for_complete()
        assert session.calls[0][1].source == str(tmp_path)


async def test_app_failed_fetch_is_a_line(
    make_app: Make, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdq_tui.host import demo

    def fetch(progress: Any = None, cancelled: Any = None) -> Path:
        raise PdqError("no network", "give a model directory")

    monkeypatch.setattr(demo, "fetch", fetch)
    app = make_app(starting_view(), load=Load(model="demo"), a=STAGED, b=BASE)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        app.screen.redraw()
        assert "no network - give a model directory" in bottom(app)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (EngineView("stalled", "no sign of life", 12.0), "WORKER STALLED 12 s"),
        (EngineView("dead", "killed, probably out of memory", 3.0), "ENGINE DEAD"),
        (EngineView("loading", "", 1.0), "LOADING"),
        (EngineView("restarting", "", 1.0), "RESTARTING"),
    ],
)
async def test_live_degraded_states_use_the_same_slot(make_app: Make, engine: EngineView, words: str) -> None:
    for size in ((120, 36), (80, 24), (60, 20)):
        async with make_app(make_view(engine=engine, running=False)).run_test(size=size) as pilot:
            assert words in pilot.app.screen.query_one("#header", Rows).text
