"""The log: bounded, literal, responsive, and the only place where library output is seen."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest
from small_app import NASTY, SmallApp, at_every_size, settle, text_of

from pdq_tui.host.view import NoteView
from pdq_tui.tui import log_tail
from pdq_tui.tui.lines import LineList
from pdq_tui.tui.log import LogScreen
from pdq_tui.tui.log_tail import Entry, LogTail, entry

NOTES = (
    NoteView("06:30:01", "info", "engine started"),
    NoteView("06:31:00", "warn", "2 of 253 Linear left in bf16", "see 3 Policies"),
    NoteView("06:32:00", "error", "the engine was killed, probably out of memory"),
)


@pytest.fixture
def app(tmp_path: Path) -> SmallApp:
    made = SmallApp(LogScreen, tmp_path, notes=NOTES)
    made.session.run_dir.mkdir(parents=True)
    return made


def log_file(app: SmallApp) -> Path:
    return app.session.run_dir / "stderr.log"


async def tick(app: SmallApp, pilot: object) -> LogScreen:
    screen = app.screen
    assert isinstance(screen, LogScreen)
    screen._tick()
    await settle(pilot)  # type: ignore[arg-type]
    return screen


# -- the tail --------------------------------------------------------------------------------------------------------


def test_S03_carriage_return_progress_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "stderr.log"
    file.write_bytes(b"start\n" + b"\r".join(b"%3d%%|####" % n for n in range(101)) + b"\r\nend\n 5%\r 6%")
    tail = LogTail(file)
    assert tail.read()
    assert [e.text for e in tail.entries] == ["start", "100%|####", "end"]
    assert tail.partial == Entry("", " 6%")
    with file.open("ab") as more:
        more.write(b"\r 7%\n2026-12-02T09:25:31.004 load  8%\r2026-12-02T09:25:32.004 decode  9%")
    assert tail.read()
    assert tail.entries[-1] == Entry("", " 7%") and tail.partial == Entry("09:25:32 decode", " 9%")


def test_tail_is_bounded_and_says_what_it_skipped(tmp_path: Path) -> None:
    file = tmp_path / "stderr.log"
    file.write_bytes(b"".join(b"line %d of a very long story\n" % n for n in range(100_000)))
    tail = LogTail(file)
    tail.read()
    assert len(tail.entries) == log_tail.KEPT_LINES and tail.entries[-1].text.startswith("line 99999")
    assert tail.skipped_bytes == file.stat().st_size - log_tail.READ_BYTES
    file.write_bytes(b"x" * (3 << 20))
    tail.read()
    assert tail.partial is not None and len(tail.partial.text) <= log_tail.LINE_CHARS + 2


def test_tail_starts_again_on_a_new_or_shortened_file_and_needs_none(tmp_path: Path) -> None:
    file = tmp_path / "stderr.log"
    tail = LogTail(file)
    tail.read()
    assert tail.error is None and not tail.entries
    file.write_bytes(b"one\ntwo\n")
    tail.read()
    file.write_bytes(b"new\n")
    tail.read()
    assert [e.text for e in tail.entries] == ["one", "two", "new"]
    assert not tail.read(), "nothing new is no change"


def test_tail_of_a_directory_is_a_sentence(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    tail.read()
    assert tail.error is not None and "cannot be read" in tail.error


@pytest.mark.parametrize("line", [b"", b"\r", b"\r\r\n", b"\xff\xfe\r\xff", b"a\x00b"])
def test_an_entry_takes_any_bytes(line: bytes) -> None:
    assert "\r" not in entry(line).text


# -- the screen ------------------------------------------------------------------------------------------------------


async def test_events_and_engine_log_with_levels_and_filter(app: SmallApp) -> None:
    log_file(app).write_bytes(b"old line\n")
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        shown = text_of(app)
        assert "06:31:00 ! 2 of 253 Linear left in bf16 (see 3 Policies)" in shown and "old line" in shown
        with log_file(app).open("ab") as more:
            more.write(b"2026-12-02T09:25:31.004 decode new line\n")
        await tick(app, pilot)
        new = next(row for row in text_of(app).splitlines() if "new line" in row)
        assert "09:25:31 decode new line" in new, "lines carry the time and stage they were marked with"
        await pilot.press("i")
        await pilot.pause()
        assert "engine started" not in text_of(app)
        await pilot.press("W", "E")
        await pilot.pause()
        assert "probably out of memory" not in text_of(app)
        await pilot.press("i", "W", "E", "slash", *"linear", "enter")
        await settle(pilot)
        shown = text_of(app)
        assert "253 Linear" in shown and "engine started" not in shown and "old line" not in shown
        await pilot.press("escape")
        await settle(pilot)
        assert "engine started" in text_of(app) and "old line" in text_of(app)
        await pilot.press("l")
        await settle(pilot)
        assert "old line" not in text_of(app)
        await pilot.press("l")
        await settle(pilot)
        assert "old line" in text_of(app)


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 36)])
async def test_a_long_event_is_read_to_its_end_at_every_size(tmp_path: Path, size: tuple[int, int]) -> None:
    why = " ".join(f"reason{n}" for n in range(12))
    hint = " ".join(f"way{n}" for n in range(12))
    app = SmallApp(LogScreen, tmp_path, notes=(NoteView("06:30:01", "error", why, hint), *NOTES))
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.resize_terminal(*size)
        await settle(pilot)
        box = app.screen.query_one("#events", LineList)
        box.focus()
        await pilot.press("g")
        await settle(pilot)
        rows = text_of(app).splitlines()[box.region.y + 1 : box.region.bottom - 1]
        told = " ".join(" ".join(row.strip("│▁▂▃▄▅▆▇█▔ ") for row in rows).split())
        assert f"06:30:01 ✗ {why} ({hint}) 06:30:01 engine started" in told
        assert ">" not in told
        assert str(box.border_subtitle).startswith("4 of 4"), "events are counted, not lines"


@pytest.mark.parametrize("count", [3, 60], ids=["all_seen", "scrolled"])
async def test_a_line_that_is_cut_says_so_beside_a_scroll_bar_too(app: SmallApp, count: int) -> None:
    log_file(app).write_bytes(b"".join(b"%d " % n + b"x" * 200 + b"\n" for n in range(count)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        box = app.screen.query_one("#engine", LineList)
        rows = text_of(app).splitlines()[box.region.y + 1 : box.region.bottom - 1]
        cut = [row for row in rows if "xxx" in row]
        place = -3 if count == 60 else -2  # the bar is between it and the frame
        assert cut and all(row[place] == ">" for row in cut)


async def test_it_follows_until_scrolled_up(app: SmallApp) -> None:
    log_file(app).write_bytes(b"".join(b"line %d\n" % n for n in range(200)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "line 199" in text_of(app)
        await pilot.press("g")
        await settle(pilot)
        with log_file(app).open("ab") as more:
            more.write(b"line 200\n")
        await tick(app, pilot)
        assert "line 0" in text_of(app) and "line 200" not in text_of(app)
        await pilot.press("G")
        await settle(pilot)
        assert "line 200" in text_of(app)


async def test_S03_twenty_thousand_lines_in_a_second_leave_the_keys_alive(app: SmallApp) -> None:
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        screen = await tick(app, pilot)
        # what other tests left behind is not the screen's: a collection of it would count as work of the loop
        gc.collect()
        gc.freeze()
        longest = 0.0
        for burst in range(4):
            with log_file(app).open("ab") as more:
                more.write(
                    b"".join(
                        b"burst %d: a warning of the usual length number %d\n" % (burst, n)
                        for n in range(5_000)
                    )
                )
            screen._tick()
            for _ in range(10):
                began = time.thread_time()
                await asyncio.sleep(0.01)
                longest = max(longest, time.thread_time() - began)
        await settle(pilot)
        await tick(app, pilot)
        assert screen.tail is not None and len(screen.tail.entries) <= log_tail.KEPT_LINES
        assert "number 4999" in text_of(app)
        gc.unfreeze()
        # CPU time of the loop's own thread: what others do to a shared machine is not the screen's doing
        assert longest < 0.2, f"the event loop worked {longest:.3f} s on end"


@pytest.mark.parametrize("text", NASTY)
async def test_S01_log_text_is_literal(text: str, tmp_path: Path) -> None:
    app = SmallApp(LogScreen, tmp_path, notes=(NoteView("06:30:01", "warn", text, text),))
    app.session.run_dir.mkdir(parents=True)
    log_file(app).write_bytes(text.encode("utf-8", "replace") + b"\n")
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        shown = text_of(app)
        assert "\x1b" not in shown
        if text.isascii() and text.isprintable():
            assert shown.count(text) >= 3


async def test_S01_a_run_directory_with_brackets_is_literal(tmp_path: Path) -> None:
    app = SmallApp(LogScreen, tmp_path / "[bold]" / "x[")
    app.session.run_dir.mkdir(parents=True)
    log_file(app).write_bytes(b"hello\n")
    async with app.run_test(size=(300, 30)) as pilot:
        await settle(pilot)
        assert "[bold]/x[" in text_of(app)


async def test_a_run_in_memory_has_no_log_file(tmp_path: Path) -> None:
    app = SmallApp(LogScreen, tmp_path)
    app.session.change(run_dir="memory only")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "6 LOG" in text_of(app)


async def test_S07_log_at_every_size(tmp_path: Path) -> None:
    await at_every_size(LogScreen, tmp_path, "6 LOG")
