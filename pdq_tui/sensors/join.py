"""Which of NVML's GPUs is the engine's: by UUID or PCI bus id, never by index.

CUDA and NVML number GPUs differently (CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES, containers), so an index that means one
GPU here may mean another there. No device is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_BUS: Final = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f])?", re.IGNORECASE
)


@dataclass(frozen=True)
class Identity:
    """What NVML says a GPU, or a MIG slice of one, is. ``slice`` None: the whole GPU."""

    index: int
    uuid: str | None = None
    bus_id: str | None = None
    mig_mode: bool = False
    slice: int | None = None


@dataclass(frozen=True)
class Match:
    """``found`` None with the ``reason``."""

    found: Identity | None
    reason: str | None = None


def plain_uuid(text: str) -> str:
    """Lower case, without the ``GPU-`` or ``MIG-`` that NVML writes and torch leaves out."""
    lowered = text.strip().lower()
    return lowered[4:] if lowered.startswith(("gpu-", "mig-")) else lowered


def plain_bus(text: str) -> tuple[int, int, int] | None:
    """(domain, bus, device); NVML writes 8 hex digits of domain, CUDA 4, and people none."""
    found = _BUS.fullmatch(text.strip())
    if found is None:
        return None
    domain, bus, device = found.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16)


def match(devices: Sequence[Identity], uuid: str | None, bus_id: str | None) -> Match:
    """The device named by ``uuid`` (a unique prefix is enough) or, where NVML hides the UUID, by ``bus_id``."""
    if uuid:
        by_uuid = _by_uuid(devices, uuid)
        if by_uuid.found is not None:
            return _whole_or_slice(devices, by_uuid.found)
        unnamed = [d for d in devices if d.uuid is None or d.mig_mode]
        by_bus = _by_bus(unnamed, bus_id) if bus_id else Match(None)
        if by_bus.found is not None:
            return _whole_or_slice(devices, by_bus.found)
        return by_uuid
    if bus_id:
        by_bus = _by_bus(devices, bus_id)
        return _whole_or_slice(devices, by_bus.found) if by_bus.found is not None else by_bus
    return Match(None, "the engine named no GPU")


def _by_uuid(devices: Sequence[Identity], uuid: str) -> Match:
    wanted = plain_uuid(uuid)
    known = [(plain_uuid(d.uuid), d) for d in devices if d.uuid]
    hits = [d for text, d in known if text == wanted] or [d for text, d in known if text.startswith(wanted)]
    if len(hits) == 1 and wanted:
        return Match(hits[0])
    if len(hits) > 1:
        return Match(None, f"{uuid} is ambiguous: {len(hits)} GPUs begin so")
    return Match(None, f"NVML knows no GPU {uuid}")


def _by_bus(devices: Sequence[Identity], bus_id: str) -> Match:
    wanted = plain_bus(bus_id)
    if wanted is None:
        return Match(None, f"{bus_id!r} is not a PCI bus id")
    hits = [d for d in devices if d.slice is None and d.bus_id and plain_bus(d.bus_id) == wanted]
    return Match(hits[0]) if len(hits) == 1 else Match(None, f"NVML knows no GPU at PCI bus {bus_id}")


def _whole_or_slice(devices: Sequence[Identity], found: Identity) -> Match:
    """A GPU in MIG mode runs nothing itself: its numbers would be those of all its slices together."""
    if found.slice is not None or not found.mig_mode:
        return Match(found)
    slices = [d for d in devices if d.index == found.index and d.slice is not None]
    if len(slices) == 1:
        return Match(slices[0])
    return Match(
        None, f"GPU {found.index} is cut into {len(slices)} MIG slices and the engine's is not known"
    )


# -- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visible:
    """What CUDA shows. ``names``: NVML UUIDs, or bare indices in CUDA's order; None: everything is visible.
    ``reason``: where an entry was not accepted, or why nothing is visible."""

    names: tuple[str, ...] | None
    reason: str | None = None


def visible_devices(value: str | None, devices: Sequence[Identity]) -> Visible:
    """CUDA's own reading of ``CUDA_VISIBLE_DEVICES``: the list ends at the first entry that is not valid, and an entry
    given twice empties it. Entries are all indices or all UUIDs (unique prefixes are legal), by the first one.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if value is None:
        return Visible(None)
    entries = [entry.strip() for entry in value.split(",")]
    if entries == [""]:
        return Visible((), "CUDA_VISIBLE_DEVICES is empty: CUDA sees no GPU")
    by_uuid = entries[0].upper().startswith(("GPU-", "MIG-"))
    names: list[str] = []
    for entry in entries:
        name, reason = _uuid_entry(entry, devices) if by_uuid else _index_entry(entry, devices)
        if name is None:
            return Visible(tuple(names), f"CUDA_VISIBLE_DEVICES ends at {entry!r}: {reason}")
        if name in names:
            return Visible((), f"CUDA_VISIBLE_DEVICES names {entry!r} twice: CUDA sees no GPU")
        names.append(name)
    return Visible(tuple(names))


def _index_entry(entry: str, devices: Sequence[Identity]) -> tuple[str | None, str]:
    if not re.fullmatch(r"\+?\d+", entry):
        return None, "-1 means no GPU" if entry == "-1" else "not an index"
    whole = sum(d.slice is None for d in devices)
    index = int(entry)
    return (str(index), "") if index < whole else (None, f"there are {whole} GPUs")


def _uuid_entry(entry: str, devices: Sequence[Identity]) -> tuple[str | None, str]:
    prefix = entry[:4].upper()
    if prefix not in ("GPU-", "MIG-"):
        return None, "not a UUID"
    kind = [d for d in devices if (d.slice is not None) == (prefix == "MIG-")]
    found = _by_uuid(kind, entry)
    return (found.found.uuid, "") if found.found is not None else (None, found.reason or "unknown")
