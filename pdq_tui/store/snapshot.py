"""A snapshot: one arm of one run, frozen in a directory of its own.

``<run>/snapshots/<nnn>/``: manifest.json (the contract of one arm, its conditions, the schema version) and
requests.parquet, tokens.parquet, sensors.parquet. Written beside and renamed: a snapshot is there whole or not at all.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import polars as pl

from pdq_tui.core.caveats import warnings
from pdq_tui.core.document import arm_document, compared, complete_blocks, put, setup_document
from pdq_tui.core.facts import Facts, clocks, collect, other_load, samples_during, slowed
from pdq_tui.core.protocol import DeviceInfo, ModelInfo, Request
from pdq_tui.errors import PdqError
from pdq_tui.store import atomic, contract, series

SCHEMA: Final = series.SCHEMA
KIND: Final = "pdq-tui snapshot"
MANIFEST: Final = "manifest.json"
FOLDER: Final = "snapshots"


class Snapshot:
    """A snapshot read back. ``manifest`` is the JSON; the series are read when they are first asked for."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def id(self) -> str:
        return f"{self.run}/{self.name}"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run(self) -> str:
        return str(self.manifest.get("run") or _run_of(self.path))

    @property
    def label(self) -> str:
        return str(self.arm.get("label") or self.manifest.get("label") or "")

    @property
    def note(self) -> str:
        return str(self.manifest.get("note") or "")

    @property
    def arm(self) -> dict[str, Any]:
        """``arms[]`` of the contract for this arm; empty where the manifest has none."""
        return _table(self.manifest.get("arm"))

    @property
    def policy(self) -> str:
        return str(self.arm.get("policy") or "")

    def part(self, key: str) -> dict[str, Any]:
        """A table of the manifest (device, model, workload, conditions …); empty where it is missing."""
        return _table(self.manifest.get(key))

    @cached_property
    def requests_table(self) -> pl.DataFrame:
        return self._series("requests")

    @cached_property
    def tokens_table(self) -> pl.DataFrame:
        return self._series("tokens")

    @cached_property
    def sensors_table(self) -> pl.DataFrame:
        return self._series("sensors")

    def _series(self, name: str, only: Sequence[str] | None = None) -> pl.DataFrame:
        """Raises PdqError where the file is none of this snapshot's: another kind, or another number of rows."""
        file = self.path / f"{name}.parquet"
        table = series.read(file, series.SERIES[name], series.KEYS[name], only)
        said = _table(self.part("series").get(name)).get("rows")
        if said is not None and said != table.height:
            raise PdqError(f"{file} is not of this snapshot: {table.height} rows, its manifest says {said}")
        return table

    @cached_property
    def requests(self) -> list[Request]:
        """The arm's requests, all of them, marked as they were (warm-up, first use, invalid, control, solo)."""
        read = self.__dict__.get("tokens_table")  # whole already, where somebody looked at it
        tokens = self._series("tokens", series.STEPS) if read is None else read
        return series.requests_of(self.requests_table, tokens, self.label)

    @cached_property
    def device(self) -> DeviceInfo:
        """What the metrics need of the device."""
        d = self.part("device")
        return DeviceInfo(
            kind=str(d.get("kind") or ""),
            name=str(d.get("name") or ""),
            read_peak_gbps=d.get("read_peak_gbps"),
            compute_peak_tflops=_table(d.get("compute_peak_tflops")),
        )

    @cached_property
    def model(self) -> ModelInfo:
        return ModelInfo(id=str(self.part("model").get("id") or ""))

    def document(self) -> dict[str, Any]:
        """The contract's JSON document with this one arm in it."""
        return document([self])


def document(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """One contract document over snapshots, the first the reference; the setup is the first one's. ``ratios`` are
    those that were stored; ``store.compare`` makes new ones."""
    first = snapshots[0].manifest
    drop = {"arm", "label", "kind", "note", "name", "created", "series", "conditions", "ratios", "warnings"}
    doc = {k: v for k, v in first.items() if k not in drop}
    doc["arms"] = [s.arm for s in snapshots]
    labels = {s.label for s in snapshots}
    doc["ratios"] = [
        r
        for s in snapshots
        for r in s.manifest.get("ratios") or []
        if {r.get("arm"), r.get("reference")} <= labels
    ]
    doc["warnings"] = list(dict.fromkeys(w for s in snapshots for w in s.manifest.get("warnings") or []))
    doc["snapshots"] = [s.id for s in snapshots]
    doc["notes"] = [s.note for s in snapshots]
    return doc


# -- saving ------------------------------------------------------------------------------------------------------------


def save(
    run_dir: Path,
    events: Iterable[Any],
    arm: str,
    note: str = "",
    since_ns: int | None = None,
    *,
    reference: str | None = None,
    meta: Mapping[str, Any] | None = None,
    min_effect: float = 0.01,
) -> Path:
    """Freeze ``arm`` from a run's events into ``<run_dir>/snapshots/<nnn>``, and return that directory.

    ``since_ns``: only what was measured after it. ``meta`` defaults to the run's meta.json. Raises PdqError where
    there is nothing to freeze or it cannot be written; then no part of it is left on the disk.
    """
    facts = collect(events, since_ns)
    requests = facts.of(arm)
    if arm not in facts.arms and not requests:
        known = ", ".join(facts.labels()) or "none"
        raise PdqError(f"nothing was measured of arm {arm!r}", f"arms so far: {known}")
    if not requests:
        raise PdqError(f"arm {arm!r} has no request yet", "wait for the first one to end")
    known_meta = dict(meta) if meta is not None else read_meta(run_dir)
    known_meta.setdefault("id", run_dir.name)
    manifest = _manifest(known_meta, facts, arm, note, reference, min_effect)
    shown = samples_during(facts, requests)
    tables = {
        "requests": series.requests_frame(requests),
        "tokens": series.tokens_frame(requests),
        "sensors": series.sensors_frame(shown),
    }
    manifest["series"] = {
        name: {"file": f"{name}.parquet", "rows": table.height, "schema": SCHEMA}
        for name, table in tables.items()
    }
    files = {f"{name}.parquet": series.parquet_bytes(table) for name, table in tables.items()}
    return _write(run_dir / FOLDER, manifest, files)


def _manifest(
    meta: Mapping[str, Any], facts: Facts, arm: str, note: str, reference: str | None, min_effect: float
) -> dict[str, Any]:
    labels = facts.labels(reference)
    requests = facts.of(arm)
    everything = sorted((r for a in labels for r in facts.of(a)), key=lambda r: (r.t_ns, r.request))
    out = setup_document(meta, facts, len(complete_blocks(everything, labels)))
    out |= {"kind": KIND, "schema": SCHEMA, "label": arm, "note": note, "reference": labels[0]}
    out["created"] = datetime.now(UTC).isoformat(timespec="seconds")
    out["arm"] = arm_document(facts, arm)
    out["min_effect"] = min_effect
    found = compared(facts, everything, labels, min_effect)
    out["ratios"] = [r for r in found["ratios"] if r["arm"] == arm]
    out["noise_floor"] = found["noise_floor"]
    seen: dict[str, Any] = {}
    put(seen, "threads", facts.device.threads if facts.device else None)
    measured = clocks(facts, requests)
    put(seen, "clocks", measured, "no sensor sample fell into the measured windows")
    put(seen, "memory_version", (measured or {}).get("memory_version"), "memory was not read through NVML")
    seen["slowed"] = slowed(facts, requests)
    put(seen, "other_load", other_load(facts, requests), "no sensor sample fell into the measured windows")
    seen["eager_launch_bound"] = any(r.eager_launch_bound for r in requests)
    seen["devices"] = max((r.devices for r in requests), default=1)
    out["conditions"] = seen
    out["warnings"] = warnings(facts, [arm])
    return out


def read_meta(run_dir: Path) -> dict[str, Any]:
    """A run's meta.json; empty where there is none that can be read."""
    try:
        body = json.loads((run_dir / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # a run kept in memory, or a damaged meta file: its facts are missing, and said to be
    return body if isinstance(body, dict) else {}


def strict_json(body: Any) -> bytes:
    """Strict JSON in UTF-8: a number that is not finite becomes null, a lone surrogate is replaced."""
    return (
        json.dumps(_finite(body), ensure_ascii=False, allow_nan=False, indent=1).encode("utf-8", "replace")
        + b"\n"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _write(folder: Path, manifest: dict[str, Any], files: Mapping[str, bytes]) -> Path:
    spare = folder / f".{secrets.token_hex(4)}.tmp"
    try:
        spare.mkdir(parents=True)
        for file, data in files.items():
            atomic.put(spare / file, data)
        while True:
            target = folder / f"{_next_number(folder):03d}"
            (spare / MANIFEST).unlink(missing_ok=True)
            atomic.put(spare / MANIFEST, strict_json({**manifest, "name": target.name}))
            try:
                spare.rename(target)
            except OSError:
                if not target.exists():
                    raise
                continue  # another process took the number between the look and the rename
            return target
    except OSError as error:
        shutil.rmtree(spare, ignore_errors=True)
        raise atomic.failed(folder, error) from error


def _next_number(folder: Path) -> int:
    return 1 + max((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), default=0)


# -- reading -----------------------------------------------------------------------------------------------------------


def load(path: Path) -> Snapshot:
    """Read one snapshot's manifest. Raises PdqError where it is damaged or made by a newer version."""
    file = path / MANIFEST
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PdqError(f"{path} is no snapshot: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise PdqError(f"{file} is damaged: {error}") from error
    if not isinstance(body, dict):
        raise PdqError(f"{file} is damaged: not a JSON object")
    schema = body.get("schema")
    if schema is not None and (isinstance(schema, bool) or not isinstance(schema, (int, float))):
        raise PdqError(f"{file} is damaged: its schema is {schema!r}")
    if schema is not None and math.floor(schema) > SCHEMA:
        raise PdqError(
            f"{path} was made by a newer version (schema {schema}, this one reads {SCHEMA})", "update pdq-tui"
        )
    if not isinstance(body.get("arm"), dict):
        raise PdqError(f"{file} is damaged: it holds no arm")
    wrong = contract.check(body)
    if wrong is not None:
        raise PdqError(f"{file} is damaged: {wrong}")
    return Snapshot(path, body)


def _run_of(path: Path) -> str:
    return path.resolve().parent.parent.name


def remove(path: Path) -> None:
    """Delete one snapshot's directory. Raises PdqError where ``path`` is not one, or cannot be deleted."""
    if path.is_symlink() or path.parent.name != FOLDER or not path.is_dir():
        raise PdqError(f"{path} is not a snapshot's directory")
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise PdqError(f"{path} cannot be deleted: {error.strerror or error}") from error


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
