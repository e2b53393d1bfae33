"""Ending with the process that started us, whatever happens to it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
