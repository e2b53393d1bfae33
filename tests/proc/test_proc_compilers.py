"""Compilers that the engine started: gone with it, and whatever they started themselves as well."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from proc_gear import HERE, alive, wait_until
from shared_peaks import share

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy

#: A compiler that answers questions, and hangs with a child of its own as soon as it has something to compile.
COMPILER = """#!/bin/sh
case " $* " in *" -o "*) ;; *) exec {real} "$@" ;; esac
sleep 600 &
echo $$ $! > {pids}.part
mv {pids}.part {pids}
wait
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run(
        [sys.executable, str(HERE / "tiny_model.py"), str(folder)], check=True, capture_output=True
    )
    return folder


@pytest.mark.parametrize("kernels", ["torch", "auto"], ids=["inductor", "own_kernels"])
def test_S05_a_compiler_and_its_helpers_die_with_the_engine(kernels: str, tiny: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.format(real=shutil.which("g++"), pids=pids))
    compiler.chmod(0o755)
    with (tmp_path / "log").open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, "-m", "pdq_tui.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | {"CXX": str(compiler)},
            start_new_session=True,
        )
    assert engine.stdin is not None
    started: list[int] = []
    try:
        for command in (
            p.Load(model=str(tiny), device="cpu", threads=1, cache_dir=share(tmp_path / "cache"),
                   kernels=kernels, layers="auto"),
            p.SetArm(arm="A", policy=find_policy("int8")),
        ):  # fmt: skip
            engine.stdin.write(p.encode(command))
        engine.stdin.flush()
        wait_until(lambda: pids.exists() or engine.poll() is not None, 150, "the compiler was started")
        assert engine.poll() is None, (tmp_path / "log").read_text()
        started = [int(word) for word in pids.read_text().split()]
        started += [child.pid for child in psutil.Process(engine.pid).children(recursive=True)]
        assert len(set(started)) >= 3 and all(alive(pid) for pid in started)
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in started), 1.0, "compilers and helpers are gone")
    finally:
        engine.kill()
        engine.wait()
        engine.stdin.close()
        for pid in started:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
