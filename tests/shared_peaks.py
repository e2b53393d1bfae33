"""This machine's peaks, measured once for all tests of a process: each engine that starts with an empty cache would take two
to four seconds for them, and they are not what most tests are about."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from pathlib import Path

_shared: Path | None = None


def share(cache: Path) -> str:
    """Let engines with this cache find the peaks that others have measured, and leave theirs to others. Returns it."""
    global _shared
    if _shared is None:
        _shared = Path(tempfile.mkdtemp(prefix="pdq-peaks-"))
        atexit.register(shutil.rmtree, _shared, ignore_errors=True)
    for file in _shared.glob("*.json"):
        _enough(file)
    place = cache / "peaks"
    with contextlib.suppress(OSError):  # some tests are about places that cannot be written
        cache.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(_shared)
    return str(cache)


def _enough(file: Path) -> None:
    """One look, disturbed by other tests or not, stands for the three that a machine in use is given."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    if len(stored["taken"]) < 3:
        look = stored["taken"][-1] | {"others": 0.0, "spread": 0.0}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(stored | {"taken": [look] * 3}), encoding="utf-8")
        part.replace(file)
