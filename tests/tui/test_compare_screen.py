"""The compare screen: choosing, the table, what is refused a judgement, and pictures at the sizes people have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_snapshots import RUN, events, save_all
from small_app import NASTY, SmallApp, at_every_size, settle, text_of
from textual.pilot import Pilot

from pdq_tui.core.texts import Answers
from pdq_tui.report.pages import comparison_page
from pdq_tui.tui.compare import CompareScreen
from pdq_tui.tui.compare_detail import RowDetail
from pdq_tui.tui.compare_texts import TextsDialog, kept_lines, text_lines
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.lines import LineList, cells

OTHER = "20261201T050000Z-aaaa"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """This run with two snapshots and a damaged and a newer one; an older run on another model."""
    folder = tmp_path / "runs"
    save_all(folder)
    for name, body in (("003", "{"), ("004", '{"schema": 99, "arm": {}}')):
        (folder / RUN / "snapshots" / name).mkdir()
        (folder / RUN / "snapshots" / name / "manifest.json").write_text(body)
    save_all(folder, OTHER, made=events({"B": (130.0, 9.40), "A": (130.1, 9.41)}, model="other"))
    return folder


@pytest.fixture
def app(runs: Path) -> SmallApp:
    return SmallApp(CompareScreen, runs)


def of(app: SmallApp) -> CompareScreen:
    return next(s for s in app.screen_stack if isinstance(s, CompareScreen))


async def in_table(app: SmallApp, pilot: Pilot[None]) -> CompareScreen:
    await settle(pilot)
    screen = of(app)
    screen.query_one("#rows", LineList).focus()
    await settle(pilot)
    return screen


async def test_the_last_of_each_arm_is_compared_at_once_reference_first(app: SmallApp) -> None:
    async with app.run_test(size=(120, 50)) as pilot:
        screen = await in_table(app, pilot)
        assert screen.picks.picked == [f"{RUN}/001", f"{RUN}/002"]
        assert screen.comparison is not None and screen.comparison.reference.policy == "bf16"
        shown = text_of(app)
        for part in (
            "same setup?",
            "★ bf16",
            "Time to first token",
            "▼ better",
            "▲ worse",
            "= same",
            "speed",
        ):
            assert part in shown
        assert "is damaged" in shown and "newer version" in shown, "listed with the reason, not fatal"


async def test_the_least_effect_that_matters_is_the_apps(runs: Path) -> None:
    words = {}
    for least in (0.01, 0.9):
        app = SmallApp(CompareScreen, runs)
        app.min_effect = least
        async with app.run_test(size=(120, 36)) as pilot:
            screen = await in_table(app, pilot)
            assert screen.comparison is not None and screen.comparison.min_effect == least
            words[least] = {row.judgement for row in screen.comparison.rows}
    assert "better" in words[0.01] and "better" not in words[0.9]


async def test_space_and_star_pick_and_set_the_reference(app: SmallApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = of(app)
        picker = screen.query_one("#snapshots", LineList)
        picker.move_to(f"{RUN}/002")
        await pilot.press("asterisk")
        await settle(pilot)
        assert screen.picks.picked == [f"{RUN}/002", f"{RUN}/001"]
        assert screen.comparison is not None and screen.comparison.reference.id == f"{RUN}/002"
        await pilot.press("space")
        await settle(pilot)
        assert screen.picks.picked == [f"{RUN}/001"] and screen.comparison is None
        assert "space picks two or more" in screen.said
        await pilot.press("enter")  # without a comparison enter picks
        await settle(pilot)
        assert screen.comparison is not None
        await pilot.press("enter")  # with one it goes to the table
        assert app.focused is screen.query_one("#rows")


async def test_another_model_is_shown_without_a_judgement(app: SmallApp) -> None:
    async with app.run_test(size=(120, 50)) as pilot:
        await settle(pilot)
        screen = of(app)
        screen.query_one("#snapshots", LineList).move_to(f"{OTHER}/001")
        await pilot.press("space")
        await settle(pilot)
        assert screen.comparison is not None and len(screen.comparison.candidates) == 2
        assert "not comparable (model differ)" in screen.said
        await pilot.press("right_square_bracket")
        await settle(pilot)
        shown = text_of(app)
        assert (
            "pair 2 of 2" in shown and "✗ model" in shown and "? unsure ⚑" in shown and "better" not in shown
        )
        await pilot.press("left_square_bracket")
        await settle(pilot)
        assert "pair 1 of 2" in text_of(app)


async def test_differences_hidden_rows_and_filter(app: SmallApp) -> None:
    async with app.run_test(size=(120, 50)) as pilot:
        screen = await in_table(app, pilot)
        await pilot.press("H")
        assert "nothing is hidden" in screen.said
        await pilot.press("D")
        await pilot.pause()
        assert "Steady memory" not in text_of(app) and "H shows them" in text_of(app)
        await pilot.press("H")
        await pilot.pause()
        assert "Steady memory" in text_of(app) and "H hides them" in text_of(app)
        await pilot.press("D", "slash", *"token", "enter")
        await pilot.pause()
        keys = {line.key for line in screen.query_one("#rows", LineList).lines if line.key}
        assert {"ttft_ms", "tpot_ms", "kv_bytes_per_token"} == keys
        await pilot.press("escape")
        await pilot.pause()
        assert len(screen.query_one("#rows", LineList).lines) > 10


async def test_detail_says_formula_why_blocks_and_distribution(app: SmallApp) -> None:
    async with app.run_test(size=(120, 50)) as pilot:
        screen = await in_table(app, pilot)
        screen.query_one("#rows", LineList).move_to("tpot_ms")
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, RowDetail)
        shown = text_of(app)
        for part in (
            "(t_last − t_first) / (N − 1)",
            "How fast the answer flows",
            "paired blocks, 12 blocks",
            "n=24",
            "█",
        ):
            assert part in shown
        await pilot.press("escape")
        await pilot.pause()
        screen.query_one("#rows", LineList).move_to("stored_bytes")
        await pilot.press("enter")
        await settle(pilot)
        assert (
            "exact" in text_of(app)
            and "distribution" not in text_of(app.screen.app).split("why")[-1].split("esc")[0]
        )


async def test_a_row_reads_as_in_the_report(app: SmallApp) -> None:
    async with app.run_test(size=(160, 70)) as pilot:
        screen = await in_table(app, pilot)
        assert screen.comparison is not None
        table = comparison_page(screen.comparison).tables[0]
        for line, row in zip(
            [line for line in screen.query_one("#rows", LineList).lines if line.key is not None],
            table.rows,
            strict=True,
        ):
            _, unit, reference, value, delta, _, percent, interval, word = row
            shown = [" ".join(text.split()) for text, _ in line.parts]
            assert shown[1:] == [
                unit, reference, value, delta, percent.removesuffix(" %"), interval, word
            ]  # fmt: skip


def test_the_screen_is_up_before_the_store() -> None:
    code = "import sys, pdq_tui.tui.compare; print('polars' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


async def test_moving_in_the_table(app: SmallApp) -> None:
    async with app.run_test(size=(120, 50)) as pilot:
        screen = await in_table(app, pilot)
        rows = screen.query_one("#rows", LineList)
        await pilot.press("g")
        assert rows.key == "e2e_ms"
        await pilot.press("j", "j", "k")
        assert rows.key == "ttft_ms"
        await pilot.press("G")
        assert rows.key == "decode_explained"
        await pilot.press("pageup", "pagedown", "home", "end")
        assert rows.key == "decode_explained"


async def test_S11_copy_says_sent_and_names_the_file(app: SmallApp, runs: Path) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await in_table(app, pilot)
        screen.query_one("#rows", LineList).move_to("ttft_ms")
        await pilot.press("y")
        said = screen.said
        assert "sent to the terminal; also in" in said and "copied" not in said
        path = Path(said.split("also in ")[1])
        assert path.parent == runs / RUN
        text = path.read_text()  # noqa: ASYNC240
        assert "Time to first token [ms]" in text and "better" in text and text.strip() == app.clipboard


async def test_export_is_given_this_comparison(app: SmallApp, tmp_path: Path) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await in_table(app, pilot)
        await pilot.press("e")
        await settle(pilot)
        dialog = app.screen
        assert isinstance(dialog, ExportDialog) and dialog.subject is not None
        assert dialog.subject().source is screen.comparison


async def test_no_snapshot_is_a_sentence(tmp_path: Path) -> None:
    async with SmallApp(CompareScreen, tmp_path / "none").run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "no snapshot yet" in text_of(pilot.app)


async def test_a_snapshot_that_breaks_between_list_and_read_is_a_sentence(app: SmallApp, runs: Path) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = of(app)
        os.remove(runs / RUN / "snapshots" / "002" / "requests.parquet")  # noqa: PTH107
        screen._compare()
        await settle(pilot)
        assert "not compared" in screen.said and screen.comparison is None


@pytest.mark.parametrize("text", NASTY)
async def test_S01_text_from_snapshots_is_literal(text: str, tmp_path: Path) -> None:
    sent = text.encode("utf-8", "replace").decode()  # as the protocol's boundary makes it
    ids = save_all(tmp_path, note=sent, made=events(model=sent, text=sent, blocks=2))
    for number in ("001", "002"):
        file = tmp_path / RUN / "snapshots" / number / "manifest.json"
        body = json.loads(file.read_text())
        body["arm"]["policy"] = f"p{number}{text}"
        body["warnings"] = [text]
        file.write_text(json.dumps(body))
    app = SmallApp(CompareScreen, tmp_path)
    async with app.run_test(size=(120, 50)) as pilot:
        screen = await in_table(app, pilot)
        assert screen.picks.picked == ids and screen.comparison is not None
        shown = text_of(app)
        assert "\x1b" not in shown
        if text.isascii() and text.isprintable():
            assert f"p001{text}" in shown
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, RowDetail) and "\x1b" not in text_of(app)


async def test_S07_compare_at_every_size(runs: Path) -> None:
    await at_every_size(CompareScreen, runs, "2 COMPARE")


async def test_S07_detail_at_every_size(app: SmallApp) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await in_table(app, pilot)
        await pilot.press("enter")
        for size in ((1, 1), (2, 2), (10, 3), (20, 5), (300, 100), (80, 24)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            text_of(app)
        assert "lower is better" in text_of(app)


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
@pytest.mark.parametrize("mode", ["colour", "no_color", "ascii"])
def test_compare_picture(
    size: tuple[int, int], mode: str, tmp_path: Path, snap_compare: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "no_color":
        monkeypatch.setenv("NO_COLOR", "1")
    save_all(tmp_path)
    app = SmallApp(CompareScreen, tmp_path, plain=mode == "ascii")

    async def ready(pilot: Pilot[None]) -> None:
        screen = await in_table(app, pilot)
        screen.query_one("#rows", LineList).move_to("tpot_ms")
        await settle(pilot)

    assert snap_compare(app, terminal_size=size, run_before=ready)  # type: ignore[operator]


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
@pytest.mark.parametrize("plain", [False, True])
async def test_what_does_not_fit_is_seen_to_be_cut(
    size: tuple[int, int], plain: bool, tmp_path: Path
) -> None:
    """The keys of the table first; keys, set-up, title and picker end in a mark where they go on."""
    save_all(tmp_path, note="a note that is longer than any window has cells for it, and longer still " * 2)
    more = "..." if plain else "…"
    app = SmallApp(CompareScreen, tmp_path, plain=plain)
    async with app.run_test(size=size) as pilot:
        screen = await in_table(app, pilot)
        lines = text_of(app).split("\n")
        for key in ("space Pick", "* Reference", "D Diff only", "H Hidden"):
            assert key in lines[-1]
        assert lines[-1].rstrip().endswith("? Help" if size[0] == 120 else f"{more} ? Help")
        picker = [line for line in lines if "0f3a/00" in line]
        assert len(picker) == 2 and all(line[-2] == ">" for line in picker)
        if size[0] == 60:
            before = next(i for i, line in enumerate(lines) if "same setup?" in line)
            assert lines[before + 2].rstrip().endswith(more)
        # What the mark promises is there.
        screen.query_one("#snapshots", LineList).focus()
        for _ in range(300):
            screen.query_one("#snapshots", LineList).action_scroll_right()
        await settle(pilot)
        there = [line for line in text_of(app).split("\n") if "and longer still" in line]
        assert len(there) == 2 and all(line[1] == "<" and line[-2] != ">" for line in there)
        await pilot.press("tab", "D", "enter")
        await settle(pilot)
        assert isinstance(app.screen, RowDetail)
        assert "memory method" in " ".join(line.text for line in app.screen.query_one(LineList).lines)


async def test_the_table_says_that_it_shows_differences_only(app: SmallApp) -> None:
    async with app.run_test(size=(60, 20)) as pilot:
        await in_table(app, pilot)
        await pilot.press("D")
        await settle(pilot)
        assert "differences only" in text_of(app)


def test_ascii_pictures_hold_ascii_only(tmp_path: Path) -> None:
    import asyncio

    save_all(tmp_path)

    async def shown() -> str:
        app = SmallApp(CompareScreen, tmp_path, plain=True)
        async with app.run_test(size=(120, 36)) as pilot:
            await in_table(app, pilot)
            return text_of(app)

    odd = {c for c in asyncio.run(shown()) if not c.isascii()}
    assert not odd


# -- answers side by side ------------------------------------------------------------------------------------------------

SAID = {
    "B": [("one  and the same", [1, 2]), ("The answer to that is four, I think.\nYes.", [1, 2, 3, 4])],
    "A": [("one  and the same", [1, 2]), ("The answer to that is [red]4[/red]\x1b[31m", [1, 2, 9])],
}


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
async def test_answers_stand_side_by_side_and_the_parting_is_marked(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    save_all(tmp_path, made=events(answers=SAID))
    app = SmallApp(CompareScreen, tmp_path)
    async with app.run_test(size=size) as pilot:
        screen = await in_table(app, pilot)
        await pilot.press("t")
        await settle(pilot)
        assert isinstance(app.screen, TextsDialog)
        shown = text_of(app)
        # It opens where the answers part.
        assert "prompt 2 · 2 of 2, 1 of 2 part" in shown and "first divergence: token 3 of 3 and 4" in shown
        assert "four, I think.␊" in shown and "[red]4[/red]␛[31m" in shown and "\x1b" not in shown
        await pilot.press("left_square_bracket")
        await settle(pilot)
        assert "prompt 1" in text_of(app) and "the same to the end" in text_of(app)
        assert text_of(app).count("one  and the same") == 2, "blanks are kept"
        await pilot.press("n")
        await settle(pilot)
        assert "prompt 2" in text_of(app)
        await pilot.press("escape")
        await settle(pilot)
        assert app.screen is screen


async def test_without_texts_it_says_so(tmp_path: Path) -> None:
    made = events()
    for e in made:
        if hasattr(e, "token_ids"):
            e.text = None
    save_all(tmp_path, made=made)
    app = SmallApp(CompareScreen, tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await in_table(app, pilot)
        await pilot.press("t")
        assert "no prompt was answered by both" in screen.said


def test_every_line_fits_and_nothing_is_lost() -> None:
    text = "  one 日本語の文章 " + "x" * 40 + "\n\nend  "
    for width in (7, 20, 200):
        lines = kept_lines(text, width)
        assert "".join(lines).replace("␊", "\n") == text and all(cells(line) <= width for line in lines)
    assert kept_lines("", 10) == []
    pair = Answers(
        prompt=0, reference="ab cd", value="ab", same=False, recorded=True, token=2, at=2, tokens=(2, 1)
    )
    for width in (20, 49, 50, 51, 120):
        rows = text_lines(pair, ("一" * 60, "two"), width)
        assert all(cells(row.text) <= width for row in rows)
        assert any("one ends after token 1, the other after 2" in row.text for row in rows) or width < 50
