"""The real app in a real terminal, killed: nothing of it is left."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from proc_gear import HERE, alive, wait_until

Tmux = Callable[..., str]


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    """A tmux server of this test's own; ended with it."""
    program = shutil.which("tmux")
    if program is None:
        pytest.skip("no tmux here")
    words = [program, "-S", str(tmp_path / "tmux"), "-f", os.devnull]

    def call(*more: str) -> str:
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    yield call
    subprocess.run([*words, "kill-server"], capture_output=True, check=False)


@pytest.mark.parametrize("after_s", [0.3, 4.0], ids=["while_importing", "later"])
def test_S02_S05_c_kill_9_of_the_app_in_tmux_leaves_no_process(
    tmux: Tmux, tmp_path: Path, after_s: float
) -> None:
    model = tmp_path / "tiny"
    subprocess.run([sys.executable, str(HERE / "tiny_model.py"), str(model)], check=True, capture_output=True)
    home = tmp_path / "home"
    app = shlex.join([sys.executable, "-P", "-m", "pdq_tui", str(model), "--device", "cpu"])
    tmux(
        "new-session",
        "-d",
        "-x",
        "100",
        "-y",
        "30",
        f"PDQ_HOME={shlex.quote(str(home))} PDQ_ENGINE_KERNELS=torch PDQ_ENGINE_LAYERS=eager exec {app}",
    )
    tmux("set-option", "-g", "remain-on-exit", "on")
    pid = int(tmux("display-message", "-p", "#{pane_pid}"))
    app_process = psutil.Process(pid)
    wait_until(lambda: len(app_process.children()) == 2, 60, "engine and sensors are started")
    wait_until(lambda: "STAGES" in tmux("capture-pane", "-p"), 60, "the screen is up")
    time.sleep(after_s)
    pids = [pid, *(child.pid for child in app_process.children(recursive=True))]
    assert len(pids) >= 3 and all(alive(p) for p in pids)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(alive(p) for p in pids), 20, "all of them are gone")
