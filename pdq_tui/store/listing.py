"""All snapshots at a glance, and the one that a word names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.store import series
from pdq_tui.store.snapshot import FOLDER, MANIFEST, SCHEMA, load

JOURNAL: Final = "events.jsonl"


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. ``id`` is "<run>/<nnn>". ``error``: why it cannot be read (damaged, or made by a newer
    version); then the other fields hold what could be found out."""

    id: str
    path: str
    run: str
    name: str
    arm: str = ""
    policy: str = ""
    model: str = ""
    note: str = ""
    created: str = ""
    requests: int | None = None
    error: str | None = None


class _Used(msgspec.Struct):
    used: int | None = None


class _Arm(msgspec.Struct):
    label: str = ""
    policy: str | None = None
    requests: _Used = msgspec.field(default_factory=_Used)


class _Model(msgspec.Struct):
    id: str = ""


class _Head(msgspec.Struct):
    """The few fields of a manifest that a list shows. What else is in it is passed over, not built: over a thousand
    snapshots that is the difference between a glance and a wait."""

    arm: _Arm
    schema: int | None = None
    run: str = ""
    note: str = ""
    created: str = ""
    model: _Model | None = None


_HEAD: Final = msgspec.json.Decoder(_Head)


def list_snapshots(runs_dir: Path) -> list[Listed]:
    """All snapshots under ``runs_dir``, oldest first. Damaged and newer ones are listed with their error."""
    found = []
    for run in _folders(runs_dir):
        where = runs_dir / run / FOLDER
        found += [_listed(where / name, run) for name in _folders(where) if not name.startswith(".")]
    return found


def _folders(path: Path) -> list[str]:
    """Names of the folders in ``path``, sorted; none where it is not there or may not be read."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir())
    except OSError:
        return []  # a stray file, or a run that somebody took away while we looked


def _listed(path: Path, run: str) -> Listed:
    try:
        head = _HEAD.decode((path / MANIFEST).read_bytes())
        there = {f.name for f in path.iterdir()}
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return _unlike(path, run)
    if head.schema is not None and head.schema > SCHEMA:
        return _unlike(path, run)
    run = head.run or run
    return Listed(
        id=f"{run}/{path.name}",
        path=str(path),
        run=run,
        name=path.name,
        arm=head.arm.label,
        policy=head.arm.policy or "",
        model=head.model.id if head.model else "",
        note=head.note,
        created=head.created,
        requests=head.arm.requests.used,
        error=_missing(there),
    )


def _unlike(path: Path, run: str) -> Listed:
    """One that is not as this version writes it: the tolerant reader's fields, or its reason."""
    try:
        s = load(path)
        there = {f.name for f in path.iterdir()}
    except (PdqError, OSError) as error:
        why = error.message if isinstance(error, PdqError) else f"cannot be read: {error.strerror or error}"
        return Listed(id=f"{run}/{path.name}", path=str(path), run=run, name=path.name, error=why)
    counted = s.arm.get("requests")
    used = counted.get("used") if isinstance(counted, dict) else None
    return Listed(
        id=s.id,
        path=str(path),
        run=s.run,
        name=s.name,
        arm=s.label,
        policy=s.policy,
        model=str(s.part("model").get("id") or ""),
        note=s.note,
        created=str(s.manifest.get("created") or ""),
        requests=used if isinstance(used, int) else None,
        error=_missing(there),
    )


def _missing(there: set[str]) -> str | None:
    names = [file for n in series.SERIES if (file := f"{n}.parquet") not in there]
    return f"damaged: {', '.join(names)} missing" if names else None


def runs_without(runs_dir: Path) -> list[str]:
    """Runs that have a journal and no snapshot, oldest first."""
    return [
        run
        for run in _folders(runs_dir)
        if (runs_dir / run / JOURNAL).is_file() and not _folders(runs_dir / run / FOLDER)
    ]


def resolve_run(word: str, runs_dir: Path) -> Path:
    """The directory of the run that ``word`` names: its id, the last four characters of it, a unique prefix, or a
    path. Raises UsageError naming what it could have been."""
    as_path = Path(word).expanduser()
    if (as_path / JOURNAL).is_file():
        return as_path.resolve()
    there = [run for run in _folders(runs_dir) if (runs_dir / run / JOURNAL).is_file()]
    near = [r for r in there if r == word] or [
        r for r in there if word and (r.startswith(word) or r[-4:] == word)
    ]
    if len(near) == 1:
        return runs_dir / near[0]
    if near:
        raise UsageError(f"{word!r} names {len(near)} runs", "which of " + ", ".join(near[:8]))
    hint = "the last ones: " + ", ".join(there[-3:]) if there else f"there is none in {runs_dir}"
    raise UsageError(f"no run is called {word!r}", hint)


def resolve(word: str, runs_dir: Path) -> Path:
    """The directory that ``word`` names: "<run>/<nnn>", the run's last four characters in its place, a unique prefix,
    "@last", or a path. Raises UsageError naming what it could have been."""
    as_path = Path(word).expanduser()
    if as_path.name == MANIFEST:
        as_path = as_path.parent
    if (as_path / MANIFEST).is_file():
        return as_path
    found = list_snapshots(runs_dir)
    if not found:
        raise UsageError(
            f"there is no snapshot in {runs_dir}", "make one with `pdq-tui run`, or with s in the app"
        )
    if word == "@last":
        return Path(max(found, key=lambda s: (s.created, s.id)).path)
    exact = [s for s in found if word in (s.id, f"{s.run[-4:]}/{s.name}")]
    near = exact or [s for s in found if word and (s.id.startswith(word) or s.run[-4:] == word)]
    if len(near) == 1:
        return Path(near[0].path)
    if near:
        twins = len({s.id for s in near}) < len(
            near
        )  # a run's directory was copied: only a path tells them apart
        raise UsageError(
            f"{word!r} names {len(near)} snapshots",
            "which of " + ", ".join(s.path if twins else s.id for s in near[:8]),
        )
    raise UsageError(
        f"no snapshot is called {word!r}", "the last ones: " + ", ".join(s.id for s in found[-3:])
    )
