"""X04 and the run's directory: what a bad disk may cost, and what it may not."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pdq_tui.core.protocol import Note, RunEnded, VersionError, encode
from pdq_tui.host import runs
from pdq_tui.host.journal import Journal, ReadCounts, read_events
from pdq_tui.host.runs import new_run
from pdq_tui.host.session import Session


def note(n: int) -> bytes:
    return encode(Note(level="info", text=f"n{n}"))


def texts(events: list[Note]) -> list[str]:
    return [e.text for e in events]


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.write(note(1))
    assert texts(list(read_events(tmp_path / "events.jsonl"))) == ["n1"]
    assert journal.text == ""
    journal.close()


def test_X04_a_full_disk_keeps_everything_in_memory_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    journal = Journal(path)
    for n in range(3):
        journal.write(note(n))
    assert "No space left on device" in journal.text and "kept in memory" in journal.text
    assert texts(journal.events()) == ["n0", "n1", "n2"]
    journal.close()


def test_X04_the_disk_comes_back(tmp_path: Path) -> None:
    place = tmp_path / "run"
    journal = Journal(place / "events.jsonl", retry_s=0.0)
    journal.write(note(0))
    assert "No such file" in journal.text
    place.mkdir()
    journal.write(note(1))
    assert journal.text == "" and journal.retry()
    assert texts(list(read_events(place / "events.jsonl"))) == ["n0", "n1"]
    journal.close()


def test_X04_a_line_torn_by_a_full_disk_costs_that_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path, retry_s=0.0)
    journal.write(note(0))
    real, calls = os.write, []

    def short(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) == 1:
            return real(fd, bytes(data)[:10])
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", short)
    journal.write(note(1))
    journal.write(note(2))
    counts = ReadCounts()
    assert texts(list(read_events(path, counts))) == ["n0", "n1", "n2"]
    assert counts.torn == 1
    journal.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_X04_a_home_that_takes_no_writes_moves_the_run_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    home, real = tmp_path / "home", Path.mkdir

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path.is_relative_to(home):
            raise OSError(number, os.strerror(number))
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    run = new_run(home)
    assert os.strerror(number) in run.text and str(run.path) in run.text and run.path.is_dir()


def test_X04_no_place_for_the_run_moves_it_and_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = new_run(blocked)
    assert str(blocked) in run.text and str(run.path) in run.text
    assert json.loads((run.path / "meta.json").read_text())["id"] == run.id


def test_X04_no_place_at_all_keeps_the_run_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")

    def nowhere(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(runs.tempfile, "mkdtemp", nowhere)
    run = new_run(blocked)
    assert run.in_memory and run.place == "memory only" and "memory only" in run.text
    session = Session(run)
    session.journal.write(note(1))
    assert texts(session.events()) == ["n1"]
    assert session.view().notes[0].text == run.text
    run.track(os.getpid(), "engine")
    run.release()


def test_torn_and_unknown_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        note(1)
        + b'{"v":1,"type":"tomorrow"}\n\n'
        + encode(RunEnded(reason="done", requests=1))
        + b'{"v":1,"typ'
    )
    counts = ReadCounts()
    assert len(list(read_events(path, counts))) == 2
    assert (counts.torn, counts.unknown) == (1, 1)


def test_a_journal_of_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"v":7,"type":"note","level":"info","text":"x"}\n')
    with pytest.raises(VersionError, match="version 7"):
        list(read_events(path))


def test_meta_says_what_ran_where(tmp_path: Path) -> None:
    run = new_run(tmp_path, ["pdq-tui", "run", "demo"], seed=7)
    meta = json.loads((run.path / "meta.json").read_text())
    assert run.path == tmp_path / run.id
    assert meta["argv"] == ["pdq-tui", "run", "demo"] and meta["seed"] == 7
    assert meta["libraries"]["torch"] and meta["tool"]["version"]
    assert meta["host"]["threads"] >= 1 and meta["host"]["memory"] > 0 and meta["host"]["cpu"]
    assert len({new_run(tmp_path).id for _ in range(5)}) == 5
