"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from pdq_tui.errors import PdqError


def write_file(path: Path, data: bytes, *, force: bool = False) -> None:
    """Write ``data`` beside ``path`` and move it there. Raises PdqError; then nothing is left behind.

    An existing file is kept unless ``force``. A device (such as /dev/full or /dev/stdout) is written in place.
    """
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise PdqError(f"{path} is a directory")
        _in_place(path, data)
        return
    if path.exists() and not force:
        raise PdqError(f"{path} is already there", "use --force to replace it")
    spare = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        put(spare, data)
        spare.replace(path)
    except OSError as error:
        _forget(spare)
        raise failed(path, error) from error


def put(path: Path, data: bytes) -> None:
    """A new file, flushed to the disk: a full disk shows here and not later. Raises OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def failed(path: Path, error: OSError) -> PdqError:
    """One sentence and a way out for the usual reasons why nothing can be written."""
    hints = {
        errno.ENOSPC: "make room, or give another place with --dir",
        errno.EDQUOT: "your quota is used up: make room, or give another place with --dir",
        errno.EROFS: "the file system is read-only: give another place with --dir",
        errno.EACCES: "no permission there: give another place with --dir",
    }
    what = error.strerror or type(error).__name__
    return PdqError(f"{path} cannot be written: {what}", hints.get(error.errno or 0))


def _in_place(path: Path, data: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(data)
    except OSError as error:
        raise failed(path, error) from error


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the disk that refused the file may refuse this as well; the first error is the one to tell
