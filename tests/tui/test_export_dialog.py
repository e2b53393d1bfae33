"""Export and copy: files where they were asked for, and nothing lost where they cannot be."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
from made_snapshots import events, save_all
from small_app import NASTY, SmallApp, settle, text_of
from textual.screen import Screen
from textual.widgets import Input

from pdq_tui.store import atomic, compare, listing, snapshot
from pdq_tui.tui.copying import copy_text
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.lines import LineList


def app_with(tmp_path: Path, what: str = "this run", measured: bool = True) -> SmallApp:
    app = SmallApp(lambda: ExportDialog(what=what), tmp_path / "runs")
    app.session.run_dir.mkdir(parents=True)
    if measured:
        app.session.recorded = events(blocks=3)
    return app


def dialog(app: SmallApp) -> ExportDialog:
    assert isinstance(app.screen, ExportDialog)
    return app.screen


async def all_formats(app: SmallApp, pilot: object) -> None:
    box = app.screen.query_one(LineList)
    for name in ("csv", "parquet"):
        box.move_to(name)
        await pilot.press("space")  # type: ignore[attr-defined]


async def test_all_formats_of_this_run_are_written_and_named(tmp_path: Path) -> None:
    app = app_with(tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await all_formats(app, pilot)
        await pilot.press("enter")
        await settle(pilot)
        assert dialog(app).told.startswith("6 files in ") and "report-ratios.csv" in dialog(app).told
        assert dialog(app).told.endswith("esc close"), "the way out is said when all is done, too"
        folder = app.session.run_dir
        assert set(os.listdir(folder)) == {  # noqa: PTH208
            "report.md", "report.json", "report.csv", "report-ratios.csv", "report.parquet", "report-ratios.parquet",
        }  # fmt: skip
        assert json.loads((folder / "report.json").read_text())["arms"]
        await pilot.press("enter")
        await settle(pilot)
        assert "already there" in dialog(app).told, "nothing is written over at the first enter"
        await pilot.press("enter")
        await settle(pilot)
        assert dialog(app).told.startswith("6 files in ")


async def test_a_comparison_is_exported(tmp_path: Path) -> None:
    ids = save_all(tmp_path / "runs")
    found = compare.compare([snapshot.load(listing.resolve(i, tmp_path / "runs")) for i in ids])
    app = SmallApp(lambda: ExportDialog(lambda: found, "the comparison", tmp_path / "out"), tmp_path / "runs")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("enter")
        await settle(pilot)
        assert (
            "TTFT" in (tmp_path / "out" / "report.md").read_text()
            or "first token" in (tmp_path / "out" / "report.md").read_text()
        )


async def test_nothing_measured_and_no_format_are_sentences(tmp_path: Path) -> None:
    app = app_with(tmp_path, measured=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("enter")
        await settle(pilot)
        assert "nothing was measured yet" in dialog(app).told
        await pilot.press("g", "space", "j", "j", "space", "enter")
        await settle(pilot)
        assert "no format is on" in dialog(app).told
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(app.screen, ExportDialog)


async def test_X04_full_disk_keeps_the_dialog_and_another_directory_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_with(tmp_path)
    real = atomic.put

    def full(path: Path, data: bytes) -> None:
        if "other" not in path.parts:
            path.write_bytes(data[:10])
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(atomic, "put", full)
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await pilot.press("enter")
        await settle(pilot)
        told = dialog(app).told
        assert "No space left on device" in told and "another directory" in told
        assert os.listdir(app.session.run_dir) == [], "no partial file"  # noqa: PTH208
        await pilot.press("tab")
        box = dialog(app).query_one(Input)
        assert box.has_focus
        box.value = str(tmp_path / "other")
        await pilot.press("enter")
        await settle(pilot)
        assert dialog(app).told.startswith("2 files in ") and (tmp_path / "other" / "report.md").exists()


async def test_X04_a_file_in_the_way_and_dev_full_are_sentences(tmp_path: Path) -> None:
    app = app_with(tmp_path)
    (tmp_path / "file").write_text("")
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        for where in (tmp_path / "file" / "deeper", Path("/proc/none/at/all"), tmp_path / "file"):
            dialog(app).query_one(Input).value = str(where)
            await pilot.press("enter")
            await settle(pilot)
            assert "not exported" in dialog(app).told, where


class Empty(Screen[None]):
    pass


async def test_S11_copy_sends_osc52_and_never_says_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = SmallApp(Empty, tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        sent: list[str] = []
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", sent.append)
        said = copy_text(app, "TTFT 84.1 ms ü", "ttft [/] ../x", tmp_path / "run")
        assert said.startswith("sent to the terminal; also in ") and "copied" not in said
        path = Path(said.split("also in ")[1])
        assert path.parent == tmp_path / "run" and path.read_text(encoding="utf-8") == "TTFT 84.1 ms ü\n"  # noqa: ASYNC240
        payload = base64.b64encode("TTFT 84.1 ms ü".encode()).decode()
        assert f"\x1b]52;c;{payload}\a" in sent


async def test_S11_copy_without_a_place_still_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = SmallApp(Empty, tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "no file:" in copy_text(app, "x", "x", tmp_path / "file")
        assert str(tmp_path / "tmp") in copy_text(app, "x", "x", Path("memory only"))
        assert "sent to the terminal" in copy_text(app, "\ud800", "x", tmp_path)


@pytest.mark.parametrize("text", NASTY)
async def test_S01_export_names_are_literal(text: str, tmp_path: Path) -> None:
    app = app_with(tmp_path, what=text, measured=False)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        dialog(app).query_one(Input).value = f"/proc/{text}" if text.isprintable() else "/proc/x"
        await pilot.press("enter")
        await settle(pilot)
        shown = text_of(app)
        assert "\x1b" not in shown
        if text.isascii() and text.isprintable():
            assert f"{text}, as" in shown


async def test_S07_export_at_every_size(tmp_path: Path) -> None:
    app = app_with(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        for size in ((1, 1), (2, 2), (10, 3), (20, 5), (79, 24), (300, 100), (60, 20)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            await pilot.press("j", "space", "space", "tab")
            text_of(app)
        assert "parquet" in text_of(app)
