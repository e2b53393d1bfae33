"""The app's own log: what Python and its libraries want to say while the terminal belongs to the screen."""

from __future__ import annotations

import logging
import logging.handlers

from pdq_tui import locations


def log_to_file(*, keep: bool = True) -> None:
    """Warnings and log records of this process go to pdq.log (1 MiB, one older kept). A place that cannot be written
    costs the log, never the run. ``keep`` False: they go nowhere, and no file is made."""
    logging.raiseExceptions = False
    handler: logging.Handler = logging.NullHandler()
    if keep:
        try:
            locations.log_file().parent.mkdir(parents=True, exist_ok=True)
            handler = logging.handlers.RotatingFileHandler(
                locations.log_file(),
                maxBytes=1 << 20,
                backupCount=1,
                encoding="utf-8",
                errors="replace",
                delay=True,
            )
        except OSError:
            pass
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
