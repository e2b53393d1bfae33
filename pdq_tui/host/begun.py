"""A command of this program, started beside the app and left to itself: it goes on when the app ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pdq_tui.errors import PdqError
from pdq_tui.host.process import worker_environment


def begin(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """``pdq-tui WORDS`` in a session of its own, what it prints for people in ``log``. Whoever keeps the result polls it
    now and then, or a zombie stays. Raises PdqError."""
    try:
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "pdq_tui", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                env=worker_environment(),
            )
    except OSError as error:
        raise PdqError(f"{words[0]} could not be started: {error.strerror or error}") from error
