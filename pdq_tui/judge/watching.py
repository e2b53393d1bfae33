"""An evaluation as it stands, seen from outside: what is done, what runs now, and how long the rest may take.

The process that runs one says so in ``running.json`` of its directory; a screen, or another shell, reads that and the
steps' files. Nothing here talks to an engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.errors import PdqError
from pdq_tui.host.runs import alive, stamp
from pdq_tui.judge import estimate
from pdq_tui.judge.evaluation import SPEC, Evaluation
from pdq_tui.judge.plan import STEPS, Spec
from pdq_tui.store import atomic

Json = dict[str, Any]
RUNNING: Final = "running.json"
#: What the process prints for people, where a screen started it.
PROGRESS: Final = "progress.log"
_TAIL_BYTES: Final = 4096


class Mark:
    """Kept while an evaluation runs. A directory that cannot be written loses the mark, not the evaluation."""

    def __init__(self, directory: Path, pid: int | None = None) -> None:
        """``pid``: of the process that runs it; this one's by default."""
        self._file, self._pid = directory / RUNNING, pid or os.getpid()

    def step(self, name: str, left_s: float | None) -> None:
        """``left_s``: estimated seconds to the end, None where nothing is known yet."""
        body = {**stamp(self._pid, "evaluation"), "step": name, "began": time.time(), "left_s": left_s}
        with contextlib.suppress(PdqError):
            atomic.write_file(self._file, json.dumps(body).encode(), force=True)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink()


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """``found``: what the steps that are done found, by name. ``step``: the one that runs now, since ``began`` (seconds of
    the wall clock); None where nothing runs. ``left_s``: estimated at its beginning. ``said``: the last line it printed."""

    directory: Path
    spec: Spec
    found: Json
    step: str | None = None
    began: float | None = None
    left_s: float | None = None
    said: str = ""

    @property
    def finished(self) -> bool:
        return all(s.name in self.found for s in STEPS) or any(f.get("stop") for f in self.found.values())

    @property
    def running(self) -> bool:
        return self.step is not None


def watch(directory: Path) -> Watched:
    """Raises PdqError where there is no evaluation, or it is damaged."""
    kept = Evaluation.resume(directory)
    found = kept.kept()
    now = _running(directory)
    if now is None:
        return Watched(directory=directory, spec=kept.spec, found=found, said=_last_line(directory))
    return Watched(
        directory=directory,
        spec=kept.spec,
        found=found,
        step=str(now.get("step")),
        began=_number(now.get("began")),
        left_s=_number(now.get("left_s")),
        said=_last_line(directory),
    )


def left_s(spec: Spec, found: Json) -> float | None:
    """Estimated seconds to the end; None before anything was timed."""
    rest = estimate.left(spec, found)
    return sum(rest.values()) if rest else None


def evaluations(folder: Path) -> list[Path]:
    """The evaluations in ``folder``, the newest first."""
    try:
        there = [p for p in folder.iterdir() if (p / SPEC).is_file()]
    except OSError:
        return []
    return sorted(there, key=lambda p: p.name, reverse=True)


def running_in(folder: Path) -> tuple[Path, str] | None:
    """The evaluation in ``folder`` that runs now, and its step; None where none does."""
    for place in evaluations(folder):
        now = _running(place)
        if now is not None:
            return place, str(now.get("step"))
    return None


def stop(directory: Path) -> bool:
    """Ask the process that runs it to stop, as Ctrl-C does: the step is given up, what is done stays. False where none
    runs. Raises PdqError where it may not be asked."""
    now = _running(directory)
    if now is None:
        return False
    try:
        os.kill(int(now["pid"]), signal.SIGINT)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise PdqError(f"the evaluation in {directory} belongs to another user") from error
    return True


def _running(directory: Path) -> Json | None:
    try:
        body = json.loads((directory / RUNNING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if alive(body) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _last_line(directory: Path) -> str:
    try:
        with (directory / PROGRESS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
