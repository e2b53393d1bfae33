"""The engine's process: ``python -m pdq_tui.engine.worker``, commands on stdin, events on what was stdout at start.

Libraries print, also from C++, so the event pipe is moved away from descriptor 1 before anything is imported, and 1
and 2 both lead to what was stderr: the log. The process ends with its parent whatever happens: the kernel kills it
when the thread that started it ends, and a thread of ours leaves when stdin closes. What it started ends with it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from importlib import metadata

from pdq_tui.core import protocol as p
from pdq_tui.engine import stops
from pdq_tui.engine.channel import EventWriter, Inbox
from pdq_tui.engine.process import die_with_parent, end_group_with_me

LIBRARIES = ("torch", "transformers", "accelerate", "safetensors", "torchao", "bitsandbytes", "pdq-tui")
#: How long the last events may take to leave, in seconds.
FLUSH_S = 2.0


def take_pipes() -> tuple[int, int]:
    """(descriptor of the commands, descriptor of the events), neither inherited by any child; 0 reads nothing from
    now on, and 1 goes where 2 goes."""
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, events


def library_versions() -> dict[str, str]:
    """Versions of what is installed, read without importing it."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    parent = os.getppid()
    commands, events = take_pipes()
    die_with_parent(parent)
    end_group_with_me()
    # Ctrl-C belongs to the app, which tells us what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stops.watch()
    faulthandler.enable(file=2)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    writer = EventWriter(events, on_broken=lambda: os._exit(1))
    inbox = Inbox(writer.send)
    writer.send(
        p.Hello(role="engine", pid=os.getpid(), python=sys.version.split()[0], libraries=library_versions())
    )
    threading.Thread(
        target=inbox.read, args=(os.fdopen(commands, "rb"), lambda: os._exit(0)), name="commands", daemon=True
    ).start()

    # Only now: seconds of import, during which a ping is answered and the app is up.
    from pdq_tui.engine.session import Fatal, Session

    session = Session(writer.send, inbox)
    code = 0
    while (taken := inbox.next()) is not None:
        try:
            session.handle(*taken)
        except Fatal:
            code = 1
            break
    writer.flush(FLUSH_S)
    # No orderly teardown: a thread may be inside a native call, and the device's memory goes with the process.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
