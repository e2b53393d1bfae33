"""Child processes of the engine: gone with it, gone at once when cancelled, and nothing of theirs is believed twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pdq_tui.core.kernels import Candidate
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.convert import converted
from pdq_tui.engine.kernels import LABEL, Prober
from pdq_tui.engine.process import run_module
from pdq_tui.errors import PdqError

WANTED = [(Candidate("int8pack", "int8pack", "int8", "int8", probe=True), "bf16", 128, 128)]
PROBING = "from pdq_tui.engine.probe import probe_in_child\nprobe_in_child([{}], lambda: None)\n"
CONVERTING = (
    "from pathlib import Path\nfrom pdq_tui.engine.convert import converted\n"
    "converted(Path('a.gguf'), Path('copy'), lambda *_: None, lambda: False)\n"
)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("code", [PROBING, CONVERTING], ids=["kernel_probe", "gguf"])
@pytest.mark.parametrize("after_s", [0.0, 0.4], ids=["while_it_starts", "while_it_imports"])
def test_S05_f_a_child_dies_with_the_engine(code: str, after_s: float, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(60))
    engine = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while not (found := psutil.Process(engine.pid).children()):
            assert time.monotonic() < end and engine.poll() is None
            time.sleep(0.002)
        time.sleep(after_s)
        assert found[0].is_running()
    finally:
        engine.kill()
        engine.wait()
    end = time.monotonic() + 3
    while running(found[0]):
        assert time.monotonic() < end, "it was left behind"
        time.sleep(0.01)


def test_a_cancelled_probe_ends_at_the_next_look_and_says_what_it_does() -> None:
    stop = threading.Event()
    told: list[str] = []

    def progress(done: float, total: float | None, label: str) -> None:
        told.append(label)
        if len(told) == 5:
            stop.set()

    with pytest.raises(Cancelled):
        Prober().broken(WANTED, stop.is_set, progress)
    assert told == [LABEL] * 5 and not children(), "a look every POLL_S; importing torch takes many"


def test_a_cancelled_conversion_ends_at_the_next_look_and_leaves_nothing(tmp_path: Path) -> None:
    gguf, target = tmp_path / "a.gguf", tmp_path / "copy"
    gguf.write_bytes(b"GGUF" + bytes(60))
    stale = tmp_path / "copy.1.part"  # of an engine that was killed
    stale.mkdir()
    stop = threading.Event()
    told: list[str] = []

    def progress(done: float, total: float | None, label: str) -> None:
        told.append(label)
        if len(told) == 5:
            stop.set()

    with pytest.raises(Cancelled):
        converted(gguf, target, progress, stop.is_set)
    assert len(told) == 5
    assert not children() and not list(tmp_path.glob("*.part")) and not target.exists()
    with pytest.raises(PdqError, match="cannot be dequantized"):  # and the lock is free again
        converted(gguf, target, lambda *_: None, lambda: False)


def test_what_was_found_before_a_cancel_stays_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdq_tui.engine import kernels

    calls: list[int] = []

    def child(jobs: list[object], poll: object) -> list[str | None]:
        calls.append(len(jobs))
        if len(calls) == 2:
            raise Cancelled
        return []  # it died at the first

    monkeypatch.setattr(kernels, "probe_in_child", child)
    two = [*WANTED, (WANTED[0][0], "fp32", 128, 128)]
    with pytest.raises(Cancelled):
        Prober(tmp_path / "known.json").broken(two)
    monkeypatch.setattr(kernels, "probe_in_child", lambda jobs, poll: [None] * len(jobs))
    assert Prober(tmp_path / "known.json").broken(two) == {
        ("int8pack", "bf16", 128, 128): "it ended the process",
    }


def test_a_child_that_takes_too_long_is_ended_and_what_it_said_kept() -> None:
    code, lines = run_module("pdq_tui.engine.probe", [], lambda _: None, given="[]", timeout_s=0.2)
    assert (code, lines) == (None, []) and not children()


def test_a_file_named_torch_where_the_person_stands_is_not_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    code, lines = run_module("pdq_tui.engine.probe", [], lambda _: None, given="[]")
    assert (code, lines) == (0, [])


def test_a_killed_child_gives_its_signal() -> None:
    def poll(_: list[str]) -> None:
        for child in children():
            os.kill(child.pid, signal.SIGKILL)

    assert run_module("pdq_tui.engine.probe", [], poll, given="[]")[0] == -signal.SIGKILL
