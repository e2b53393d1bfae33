"""Child processes that never outlive their parent, whatever happens to it, and that can be left in the middle."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from pdq_tui.engine.cancel import POLL_S

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent (the thread that started it) ends; Linux only.

    ``parent``: the id it should have, by default the present one. The parent may have died before the request took
    effect, hence the second look.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected:
        os._exit(1)


def end_group_with_me() -> None:
    """Have every process of our group killed when this one ends, however it ends: compilers start helpers of their own,
    which neither know us nor ask the kernel to die with anyone.

    A shell in our group waits for the end of a pipe that only we hold. Only where this process leads its session, as
    workers do: in anybody else's group are others.
    """
    global _keeper
    if os.getsid(0) == os.getpid():
        _keeper = subprocess.Popen(
            ["/bin/sh", "-c", "trap '' HUP INT TERM; read -r _; kill -KILL 0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


_keeper: subprocess.Popen[bytes] | None = None


def run_module(
    module: str,
    arguments: Sequence[str],
    poll: Callable[[list[str]], None],
    *,
    given: str = "",
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> tuple[int | None, list[str]]:
    """Run ``python -m module PARENT arguments…`` to its end: (exit code, its lines on stdout).

    The module must begin with ``die_with_parent(int(sys.argv[1]))``, before it imports what takes long. ``given`` is
    its stdin; what it prints on stderr goes where ours goes. ``poll`` is called every POLL_S with the lines so far;
    whatever it raises ends the child at once and is passed on. The exit code is None where the child was ended because
    it ran past ``timeout_s``. To be called from a thread that lives as long as the child may.
    """
    began = time.monotonic()
    lines: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
        stdin.write(given)
        stdin.seek(0)
        # -P: a file named torch.py where the person happens to stand is not the library.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    assert child.stdout is not None
    reader = threading.Thread(target=_read, args=(child.stdout, lines), name=module, daemon=True)
    reader.start()
    late = False
    try:
        while child.poll() is None:
            poll(list(lines))
            late = timeout_s is not None and time.monotonic() - began > timeout_s
            if late:
                break
            time.sleep(POLL_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        reader.join()
        child.stdout.close()
    return (None if late else child.returncode), lines


def _read(stream: IO[str], lines: list[str]) -> None:
    lines.extend(line.strip() for line in stream)
