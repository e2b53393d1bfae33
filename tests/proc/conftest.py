"""A run in a temporary home for every process test, and a watch that no process is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdq_tui.host.runs import Run, new_run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDQ_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("FAKE_ENGINE", raising=False)
    return tmp_path / "home"


@pytest.fixture
def run(home: Path) -> Run:
    return new_run(argv=["pdq-tui", "demo"])


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test ends without a child process."""
    yield
    children = psutil.Process().children(recursive=True)
    left = [c for c in children if "fake_" in " ".join(_cmdline(c)) or "pdq_tui" in " ".join(_cmdline(c))]
    for process in left:
        process.kill()
    assert not left


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
