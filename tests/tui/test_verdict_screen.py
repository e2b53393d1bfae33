"""The verdict screen: what an evaluation says with its evidence, one that runs, starting, stopping and opening one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_app import SmallApp, at_every_size, settle, text_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_evaluation

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError
from pdq_tui.host import begun
from pdq_tui.judge import marks, watching
from pdq_tui.judge.evaluation import Evaluation
from pdq_tui.judge.plan import STEPS
from pdq_tui.judge.scenarios import cards
from pdq_tui.report.evaluated import evaluated
from pdq_tui.tui import evaluating, verdict_lines
from pdq_tui.tui.app import Options
from pdq_tui.tui.ask import Ask, Pick
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.lines import LineList
from pdq_tui.tui.verdict import FOLDER, VerdictScreen
from pdq_tui.tui.verdict_answers import AnswersDialog
from pdq_tui.tui.verdict_evidence import Evidence

DONE = len(made_evaluation.found())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / FOLDER
    found.mkdir()
    return found


@pytest.fixture
def app(tmp_path: Path) -> SmallApp:
    return SmallApp(VerdictScreen, tmp_path / "runs")


def screen_of(app: SmallApp) -> VerdictScreen:
    return next(s for s in app.screen_stack if isinstance(s, VerdictScreen))


async def look(app: SmallApp, pilot: Any) -> VerdictScreen:
    screen = screen_of(app)
    screen._look()
    await settle(pilot)
    return screen


def words(app: SmallApp) -> str:
    return " ".join(text_of(app).replace("│", " ").split())


# -- what it shows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
@pytest.mark.parametrize("mode", ["colour", "no_color", "ascii"])
def test_verdict_picture(
    size: tuple[int, int], mode: str, folder: Path, snap_compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "no_color":
        monkeypatch.setenv("NO_COLOR", "1")
    made_evaluation.make(folder)
    app = SmallApp(VerdictScreen, folder.parent / "runs", plain=mode == "ascii")
    assert snap_compare(app, terminal_size=size, run_before=settle)


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
def test_running_picture(
    size: tuple[int, int], folder: Path, snap_compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_evaluation.make(folder, steps=4, running=True)
    body = json.loads((folder / "20261202T063000Z" / watching.RUNNING).read_text())
    monkeypatch.setattr(time, "time", lambda: body["began"] + 12.0)
    app = SmallApp(VerdictScreen, folder.parent / "runs")
    assert snap_compare(app, terminal_size=size, run_before=settle)


async def test_the_word_stands_with_reasons_gates_situations_and_map(app: SmallApp, folder: Path) -> None:
    made_evaluation.make(folder)
    source = evaluated(made_evaluation.SPEC, made_evaluation.found())
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        shown = words(app)
        assert source.verdict.word in shown and made_evaluation.STAGED in shown
        assert "CRITERIA" in shown and "FOUR SITUATIONS" in shown and "MAP" in shown and "STEPS" in shown
        for gate in source.verdict.gates:
            assert gate.name[:20] in shown
        for card in ("long prompt", "high concurrency", "tight memory", "decode-sensitive"):
            assert card in shown
        assert "-55*" in shown and "-320*~" in shown


async def test_enter_shows_what_a_row_rests_on(app: SmallApp, folder: Path) -> None:
    made_evaluation.make(folder)
    async with app.run_test(size=(100, 60)) as pilot:
        await settle(pilot)
        left = screen_of(app).query_one("#left", LineList)
        for key in [line.key for line in left.lines if line.key is not None]:
            left.move_to(key)
            await pilot.press("enter")
            await pilot.pause()
            assert isinstance(app.screen, Evidence)
            await pilot.press("escape")
        left.move_to(("gate", 0))
        await pilot.press("enter")
        await pilot.pause()
        shown = words(app)
        assert "speed: E2E against int8" in shown and "-20.0 %" in shown and "does staging gain" in shown


def test_cards_speak_from_what_was_measured() -> None:
    source = evaluated(made_evaluation.SPEC, made_evaluation.found())
    by = {c.name: c for c in cards(source.spec, source.found, source.verdict)}
    assert by["long prompt"].says == "neutral", "same against one, better against the other"
    assert by["decode-sensitive"].says == "against" and "int4 (worse)" in by["decode-sensitive"].because
    assert (
        by["tight memory"].says == "against" and "105.0 MiB less for KV cache" in by["tight memory"].because
    )
    assert by["high concurrency"].says == "unsure"
    assert (
        f"{made_evaluation.STAGED} meets the targets up to 4 at a time or more"
        in by["high concurrency"].because
    )
    assert "of int8 at 4 at a time" in by["high concurrency"].because
    empty = evaluated(made_evaluation.SPEC, {})
    assert {c.says for c in cards(empty.spec, empty.found, empty.verdict)} == {"not tested"}


async def test_every_size(folder: Path, tmp_path: Path) -> None:
    made_evaluation.make(folder)
    await at_every_size(VerdictScreen, tmp_path / "runs", "4 VERDICT")


async def test_a_damaged_evaluation_is_a_sentence(app: SmallApp, folder: Path) -> None:
    place = made_evaluation.make(folder)
    (place / "spec.json").write_text("{")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "cannot be read" in screen_of(app).said
        await pilot.press("enter", "e", "y")
        assert "no evaluation yet" in screen_of(app).said


async def test_none_yet_says_what_to_press(app: SmallApp, folder: Path) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "r runs the whole protocol" in words(app)
        for size in ((80, 24), (60, 20)):  # a newcomer reads the sentences to their ends
            await pilot.resize_terminal(*size)
            await settle(pilot)
            box = app.screen.query_one("#word", LineList)
            rows = text_of(app).splitlines()[box.region.y + 1 : box.region.bottom - 1]
            assert len(rows) == len(box.lines)
            told = " ".join(" ".join(row.strip("│ ") for row in rows).split())
            assert "one word with its evidence" in told and told.endswith("when the app is closed")
        await pilot.press("r")
        await settle(pilot)
        assert isinstance(app.screen, Pick)
        await pilot.press("escape")
        await pilot.press("o")
        await settle(pilot)
        assert "no evaluation yet" in screen_of(app).said


# -- one that runs -----------------------------------------------------------------------------------------------------


async def test_progress_and_what_is_left(app: SmallApp, folder: Path) -> None:
    place = made_evaluation.make(folder, steps=4, running=True)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        shown = words(app)
        assert f"step 4/{len(STEPS)}" in shown and "left" in shown and STEPS[4].title in shown
        assert "block 3 of 10" in shown, "what it printed last"
        (place / "steps" / "confirmation.json").write_text(json.dumps(made_evaluation.confirmation()))
        await look(app, pilot)
        assert f"step 5/{len(STEPS)}" in words(app)
        (place / watching.RUNNING).unlink()
        screen = await look(app, pilot)
        assert "it stopped" in screen.said and "r goes on" in screen.said


async def test_a_process_that_is_gone_does_not_run(folder: Path) -> None:
    place = made_evaluation.make(folder, steps=2, running=True)
    assert watching.watch(place).running
    body = json.loads((place / watching.RUNNING).read_text())
    (place / watching.RUNNING).write_text(json.dumps({**body, "start_ticks": body["start_ticks"] + 1}))
    seen = watching.watch(place)
    assert not seen.running and not seen.finished and not watching.stop(place)


async def test_r_stops_after_a_question(app: SmallApp, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_evaluation.make(folder, steps=2, running=True)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("r")
        await settle(pilot)
        assert isinstance(app.screen, Ask)
        await pilot.press("n")
        await settle(pilot)
        assert killed == []
        await pilot.press("r")
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
        assert killed == [(os.getpid(), signal.SIGINT)] and "stopping" in screen_of(app).said


async def test_r_starts_one_with_the_arms_and_stops_the_live_run(
    app: SmallApp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []

    def begin(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
        begun.append(argv)
        log.write_text("")
        child = subprocess.Popen(["true"])
        child.wait()
        return child

    monkeypatch.setattr(evaluating.begun, "begin", begin)
    app.options = Options(
        runs_dir=app.runs_dir, load=Load(model="/tmp/model"), workload=Workload(output_tokens=7)
    )  # type: ignore[attr-defined]
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("r")
        await settle(pilot)
        await pilot.press("enter")
        await settle(pilot)
        screen = screen_of(app)
        assert "started in" in screen.said and screen.place is not None
        assert begun == [["evaluate", "--resume", "--dir", str(screen.place)]]
        assert "stop" in [name for name, *_ in app.session.calls]
        spec = Evaluation.resume(screen.place).spec
        assert spec.workload.output_tokens == 7 and spec.plan.name == "quick" and spec.base.name == "bf16"
        assert "w8a8-prefill-int4-decode" in {p.name for p in spec.staged}


def test_prompts_of_their_own_length_are_refused() -> None:
    with pytest.raises(PdqError, match="exact length"):
        evaluating.make_spec(Load(model="m"), [], Workload(prompt_tokens=None), "quick", 0.01)


async def test_another_evaluation_is_opened_and_stays(app: SmallApp, folder: Path) -> None:
    made_evaluation.make(folder, "20261201T000000Z", steps=1)
    made_evaluation.make(folder, "20261202T000000Z")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert screen_of(app).place == folder / "20261202T000000Z", "the newest, if none was chosen"
        await pilot.press("o")
        await settle(pilot)
        assert isinstance(app.screen, Pick)
        await pilot.press("j", "enter")
        await settle(pilot)
        screen = await look(app, pilot)
        assert screen.place == folder / "20261201T000000Z" and "step 1/" in words(app)


async def test_readonly_looks_only(app: SmallApp, folder: Path) -> None:
    app.readonly = True
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "pdq-tui evaluate" in words(app)
        await pilot.press("r")
        await settle(pilot)
        assert isinstance(app.screen, VerdictScreen)


# -- to take home ------------------------------------------------------------------------------------------------------


async def test_export_and_copy(app: SmallApp, folder: Path) -> None:
    place = made_evaluation.make(folder)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("y")
        await settle(pilot)
        assert str(place) in screen_of(app).said
        [copied] = place.glob("copy-verdict-*.txt")
        assert screen_of(app).source.verdict.word in copied.read_text()  # type: ignore[union-attr]
        await pilot.press("e")
        await settle(pilot)
        assert isinstance(app.screen, ExportDialog)
        await pilot.press("enter")
        await settle(pilot)
        body = json.loads((place / "report.json").read_text())
        assert body["verdict"]["word"] and [s["name"] for s in body["steps"]] == [s.name for s in STEPS]


def test_the_map_fits_its_width_and_says_what_is_left_out() -> None:
    source = evaluated(made_evaluation.SPEC, made_evaluation.found())
    whole = "\n".join(line.text for line in verdict_lines.map_lines(source, 60))
    assert "11" in whole and "64" in whole and "more lengths" not in whole
    narrow = verdict_lines.map_lines(source, 20)
    assert "1 more lengths in the report" in " ".join(line.text for line in narrow)


# -- answers side by side ----------------------------------------------------------------------------------------------


async def test_answers_stand_side_by_side_and_are_marked(app: SmallApp, folder: Path) -> None:
    made_evaluation.make(folder)
    place = folder / "20261202T063000Z"
    async with app.run_test(size=(110, 34)) as pilot:
        await settle(pilot)
        await pilot.press("t")
        await pilot.pause()
        dialog = app.screen
        assert isinstance(dialog, AnswersDialog) and dialog.policy == made_evaluation.STAGED
        shown = words(app)
        # The first that parts: the base was right, the policy was not.
        assert "fact 23 · 24 of 40, 17 part, 0 of them marked" in shown and "not marked" in shown
        assert "Which word stands at place 23?" in shown and "wanted: word23" in shown
        assert "bf16 right" in shown and f"{made_evaluation.STAGED} wrong" in shown
        assert "first divergence: token 1 of 3" in shown and "I don't know." in shown
        await pilot.press("w")
        await pilot.pause()
        assert "fact 24 · 25 of 40, 17 part, 1 of them marked" in words(app), "on to the next without a mark"
        await pilot.press("s", "c")
        assert marks.counted(marks.read(place), made_evaluation.STAGED) == {
            "same": 1,
            "changed": 1,
            "worse": 1,
        }
        await pilot.press("left_square_bracket", "u")
        await pilot.pause()
        assert "fact 25" in words(app) and "not marked" in words(app)
        await pilot.press("escape")
        await settle(pilot)
        source = screen_of(app).source
        assert source is not None and len(source.marks) == 2
        table = next(t for t in source.page().tables if "Free run" in t.title)
        assert table.rows[0][5] == "1 / 0 / 1"
        assert source.page().texts[0].word.endswith("marked worse")


async def test_a_folder_that_cannot_be_written_is_told_and_readonly_marks_nothing(
    app: SmallApp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_evaluation.make(folder)
    place = folder / "20261202T063000Z"
    async with app.run_test(size=(110, 34)) as pilot:
        await settle(pilot)
        (place / marks.FILE).mkdir()
        screen_of(app).source = evaluated(made_evaluation.SPEC, made_evaluation.found())
        screen_of(app).action_texts()
        await pilot.pause()
        await pilot.press("w")
        await pilot.pause()
        assert "cannot be written" in words(app) and "not marked" in words(app)
        await pilot.press("escape")
        (place / marks.FILE).rmdir()
        monkeypatch.setattr("pdq_tui.tui.verdict_answers.is_readonly", lambda _app: True)
        screen_of(app).action_texts()
        await pilot.pause()
        await pilot.press("w")
        assert not (place / marks.FILE).exists()


async def test_I01_what_a_model_wrote_is_literal(
    app: SmallApp, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made_evaluation.found()
    hostile = "[bold]x[/bold] \x1b[31mred\x1b[0m \u202e rtl"
    found["tasks"]["answers"][made_evaluation.STAGED]["fact 23"]["text"] = hostile
    found["tasks"]["items"][23]["prompt"] = "[red]" + "long " * 400 + "\x1b]0;t\x07"
    made_evaluation.make(folder)
    (folder / "20261202T063000Z" / "steps" / "tasks.json").write_text(json.dumps(found["tasks"]))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("t")
        await pilot.pause()
        shown = words(app)
        assert "[bold]x[/bold]" in shown and "[red]long" in shown and "more lines" in shown
        assert "\x1b" not in text_of(app) and "\u202e" not in text_of(app)


async def test_before_the_tasks_there_is_nothing_to_read(app: SmallApp, folder: Path) -> None:
    made_evaluation.make(folder, steps=4)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.press("t")
        await pilot.pause()
        assert not isinstance(app.screen, AnswersDialog) and "not answered yet" in words(app)


# -- nothing runs beside one -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [True, False])
async def test_the_loop_a_burst_and_energy_wait_for_an_evaluation(
    tmp_path: Path, make_app: Any, session: Any, running: bool
) -> None:
    """Each would spoil the other's figures: a sentence says so, and how to have the one or the other."""
    made_evaluation.make(tmp_path / "evaluations", steps=4, running=running)
    session.change(running=False, wants_loop=False)
    app = make_app(load=Load(model="/a/model"), a=find_policy("int8"), b=find_policy("bf16"))
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        [start] = [c for c in session.calls if c[0] == "start"]
        assert start[-1] is not running, "at the app's own start as well"
        for keys in (("r",), ("J",), ("5", "t", "1")):
            await pilot.press(*keys)
            await settle(pilot)
        asked = [c[0] for c in session.calls if c[0] in ("start_loop", "trace", "measure_energy")]
        assert asked == ([] if running else ["start_loop", "measure_energy", "trace"])
        said = [n for n in session.view().notes if "the evaluation 20261202T063000Z runs" in n.text]
        if not running:
            assert said == []
            return
        assert {n.text.split(" is not started")[0] for n in said} == {
            "the workload",
            "measuring energy",
            "the burst",
        }
        assert all(n.hint and "4 shows it and r there stops it" in n.hint for n in said)


def test_an_evaluation_counts_as_running_from_the_moment_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_evaluation.make(tmp_path, steps=0)
    place = tmp_path / "20261202T063000Z"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(begun, "begin", lambda *_: child)
    try:
        assert watching.running_in(tmp_path) is None
        evaluating.go_on(place)
        assert watching.running_in(tmp_path) == (place, "starting")
    finally:
        child.communicate(b"\n", timeout=20)
    assert watching.running_in(tmp_path) is None
