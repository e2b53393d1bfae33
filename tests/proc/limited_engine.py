"""The real engine with a limit on its address space from a chosen moment on: what then fails is real.

LIMIT_AT: moments, one a process ("load,,request": the first process at its load, the third at its first request; others
never). LIMIT_COUNT: a file that counts the processes. LIMIT_ROOM: bytes that are left at that moment.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdq_tui.engine import worker


def moment() -> str:
    counter = Path(os.environ["LIMIT_COUNT"])
    number = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (number + 1))
    moments = os.environ["LIMIT_AT"].split(",")
    return moments[number] if number < len(moments) else ""


def limited(before: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        from pdq_tui.engine.memory import status_bytes

        if (
            resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
        ):  # once: later calls stay under it
            limit = (status_bytes("VmSize") or 0) + int(os.environ["LIMIT_ROOM"])
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return before(*arguments, **more)

    return call


def main() -> None:
    at = moment()
    versions = worker.library_versions

    def prepare() -> dict[str, str]:
        """Called between the pipes being set up and the first command."""
        from pdq_tui.engine import bench, session

        if at == "load":
            session.load_model = limited(session.load_model)
        if at == "request":
            bench.run_request = limited(bench.run_request)
        return versions()

    worker.library_versions = prepare
    sys.exit(worker.main())


if __name__ == "__main__":
    main()
