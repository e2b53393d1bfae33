"""Copying over a terminal that may swallow the sequence: the same text always lies in a file as well."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Any

from textual.app import App

from pdq_tui.errors import PdqError
from pdq_tui.store.atomic import write_file
from pdq_tui.tui.lines import literal


def copy_text(app: App[Any], text: str, name: str, folder: Path) -> str:
    """Send ``text`` to the terminal's clipboard (OSC 52) and save it under ``folder``, the run's; of a run that is kept
    in memory only (no absolute path) under the system's temporary directory.

    Returns the sentence for the person. Nobody can know whether a terminal took an OSC 52 sequence, so it never says
    "copied". Call from the event loop: the file is small, and the run's own directory is where the journal goes too.
    """
    app.copy_to_clipboard(text.encode("utf-8", "replace").decode("utf-8"))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "text"
    if not folder.is_absolute():
        folder = Path(tempfile.gettempdir())
    path = folder / f"copy-{stem}-{time.strftime('%H%M%S')}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode("utf-8", "replace") + b"\n", force=True)
    except PdqError as error:
        return literal(f"sent to the terminal; no file: {error.message}")
    except OSError as error:
        return literal(f"sent to the terminal; no file: {folder}: {error.strerror}")
    return literal(f"sent to the terminal; also in {path}")
