"""TOML files that people write: read with bounds, and refused in one sentence whatever is in them."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path
from typing import Any, Final

from pdq_tui.errors import UsageError

#: Bytes of the largest file that is read: a policy or a settings file has a few thousand.
LIMIT: Final = 1_000_000


def read_text(path: Path) -> str:
    """A regular file's text. Raises UsageError with its name; FileNotFoundError where nothing is there."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: cannot be read: it is no regular file")
        if found.st_size > LIMIT:
            raise UsageError(f"{path}: cannot be read: {found.st_size} bytes, at most {LIMIT} are read")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def parse(text: str, origin: str) -> dict[str, Any]:
    """Raises UsageError for what is no TOML, and for values nested deeper than the parser goes."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin}: not valid TOML: {error}") from error
    except RecursionError:
        raise UsageError(f"{origin}: not valid TOML: values are nested too deeply") from None
