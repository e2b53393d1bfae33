"""What policies become in serving engines that are not this one's: tables that were read in their documentation.

A table a server (``servers_cfg/<name>.toml``): what each weight format and KV dtype is called there, what makes the
checkpoint, the commands of one server and of two pools, steps in and back, and what it cannot express, each with the
reason. ``version`` and ``checked`` say against what it was read. Every format and KV dtype of this program stands in it
once, with a way or with a reason.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Final

import msgspec

from pdq_tui import locations
from pdq_tui.core import toml
from pdq_tui.core.formats import GROUP_SIZES, Format, formats
from pdq_tui.core.kv import KV_DTYPES
from pdq_tui.errors import UsageError

SCHEMA: Final = 1
FOLDER: Final = "servers_cfg"

#: What a template may name. weights: the checkpoint's path; name: what the model is called to clients; kv: the lines that
#: set the cache dtype; tokens: the prompt's length; file, config, ignore, quant: of what makes a checkpoint.
PLACES: Final = frozenset(
    [
        "weights",
        "name",
        "port",
        "flags",
        "kv",
        "dtype",
        "tokens",
        "group",
        "model",
        "out",
        "checkpoint",
        "file",
        "config",
        "ignore",
        "quant",
    ]
)


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Maker(_Part, frozen=True):
    """What makes a checkpoint: packages of an environment of its own, a ``file`` with ``text``, and what runs it."""

    packages: tuple[str, ...]
    run: str
    file: str = ""
    text: str = ""


class Way(_Part, frozen=True):
    """How a weight format is served. ``label``: of ``Format`` without its group. ``make``: the maker's name, "" where the
    server makes it as it loads, or nothing has to be made. ``differs``: from what was measured here."""

    label: str
    scheme: str
    make: str = ""
    flags: tuple[str, ...] = ()
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    quant: str = ""
    groups: tuple[int, ...] = GROUP_SIZES
    groups_why: str = ""
    note: str = ""
    differs: str = ""


class NoWay(_Part, frozen=True):
    label: str
    why: str


class KvWay(_Part, frozen=True):
    """``bits`` of a number; 16 stands for the model's dtype. ``pools_why``: why it cannot go from one pool to another."""

    name: str
    value: str
    bits: int
    differs: str = ""
    pools_why: str = ""


class NoKv(_Part, frozen=True):
    name: str
    why: str


class KvOther(_Part, frozen=True):
    """Why keys by channel, and groups within a row, cannot be expressed."""

    channel: str
    groups: str


class KvTable(_Part, frozen=True):
    """``flag`` of the command line or ``yaml`` of a file. ``shared``: why two pools have one dtype."""

    shared: str
    dtype: tuple[KvWay, ...]
    other: KvOther
    flag: str = ""
    yaml: str = ""
    cannot: tuple[NoKv, ...] = ()


class Text(_Part, frozen=True):
    name: str
    text: str


class One(_Part, frozen=True):
    packages: tuple[str, ...]
    command: str
    deploy: tuple[str, ...]
    rollback: tuple[str, ...]
    file: tuple[Text, ...] = ()


class Pools(_Part, frozen=True):
    packages: tuple[str, ...]
    prefill: str
    decode: str
    router: str
    deploy: tuple[str, ...]
    rollback: tuple[str, ...]
    differs: tuple[str, ...] = ()
    file: tuple[Text, ...] = ()


class OneProcess(_Part, frozen=True):
    """What would have to be written to have both stages in one process."""

    change: str


class Server(_Part, frozen=True, kw_only=True):
    schema: int
    name: str
    title: str
    version: str
    checked: str
    sources: tuple[str, ...]
    maker: dict[str, Maker]
    format: tuple[Way, ...]
    cannot: tuple[NoWay, ...]
    kv: KvTable
    one: One
    pools: Pools
    in_one_process: OneProcess

    def way(self, fmt: Format) -> Way | NoWay:
        label = base_label(fmt)
        found = next((way for way in self.format if way.label == label), None)
        if found is None:
            return next(no for no in self.cannot if no.label == label)
        if fmt.group_size and fmt.group_size not in found.groups:
            return NoWay(label, f"groups of {fmt.group_size}: {found.groups_why}")
        return found

    def kv_way(self, dtype: str) -> KvWay | NoKv:
        found = next((way for way in self.kv.dtype if way.name == dtype), None)
        return found or next(no for no in self.kv.cannot if no.name == dtype)


def base_label(fmt: Format) -> str:
    """A format's label without its group."""
    return fmt.label.removesuffix(f"-g{fmt.group_size}") if fmt.group_size else fmt.label


#: Every weight format that a table has to know.
LABELS: Final = tuple(dict.fromkeys(base_label(fmt) for fmt in formats()))


def load_servers(folder: Path | None = None) -> Sequence[Server]:
    """All shipped tables, or those of ``folder``, by name. Raises UsageError where one is not as it should be."""
    return _shipped() if folder is None else _of(folder)


@cache
def _shipped() -> Sequence[Server]:
    return _of(locations.shipped(FOLDER))


def _of(place: Path) -> Sequence[Server]:
    files = sorted(place.glob("*.toml"))
    if not files:
        raise UsageError(f"there is no table of a server in {place}", "install again")
    found = [parse_server(toml.read_text(path), str(path)) for path in files]
    for path, server in zip(files, found, strict=True):
        if server.name != path.stem:
            raise UsageError(f"{path}: name: {server.name!r} is not the file's")
    return tuple(found)


def parse_server(text: str, origin: str) -> Server:
    """Validate one document. Raises UsageError naming file and key."""
    try:
        server = msgspec.convert(toml.parse(text, origin), Server)
    except msgspec.ValidationError as error:
        raise UsageError(f"{origin}: {error}") from error
    wrong = next(_wrong(server), None)
    if wrong is not None:
        raise UsageError(f"{origin}: {wrong}")
    return server


def _wrong(s: Server) -> Iterator[str]:
    if s.schema != SCHEMA:
        yield f"schema: {s.schema} is not supported, legal: {SCHEMA}"
    try:
        datetime.date.fromisoformat(s.checked)
    except ValueError:
        yield f"checked: {s.checked!r} is no date such as 2026-12-03"
    yield from _once(
        "format and cannot", [*(w.label for w in s.format), *(w.label for w in s.cannot)], LABELS
    )
    yield from _once(
        "kv.dtype and kv.cannot", [*(w.name for w in s.kv.dtype), *(w.name for w in s.kv.cannot)], KV_DTYPES
    )
    if bool(s.kv.flag) == bool(s.kv.yaml):
        yield "kv: either flag or yaml"
    for way in s.format:
        if way.make and way.make not in s.maker:
            yield f"format {way.label!r}: make: there is no maker {way.make!r}"
        if set(way.groups) - set(GROUP_SIZES):
            yield f"format {way.label!r}: groups: legal are {', '.join(map(str, GROUP_SIZES))}"
        if set(way.groups) < set(GROUP_SIZES) and not way.groups_why:
            yield f"format {way.label!r}: groups_why: is missing"
    for text in _templates(s):
        template = Template(text)
        unknown = set(template.get_identifiers()) - PLACES
        if unknown or not template.is_valid():
            yield f"{text.strip().splitlines()[0]!r} names {', '.join(sorted(unknown)) or 'a broken $'}"


def _once(where: str, found: list[str], legal: Sequence[str]) -> Iterator[str]:
    for name in legal:
        if found.count(name) != 1:
            yield f"{where}: {name!r} stands there {found.count(name)} times, not once"
    for name in found:
        if name not in legal:
            yield f"{where}: {name!r} is unknown, legal: {', '.join(legal)}"


def _templates(s: Server) -> Iterator[str]:
    yield from (text for m in s.maker.values() for text in (m.run, m.file, m.text) if text)
    yield from (text for way in s.format for text in (way.scheme, *way.flags))
    yield from (s.kv.flag, s.kv.yaml, s.one.command, s.pools.prefill, s.pools.decode, s.pools.router)
    yield from (*s.one.deploy, *s.one.rollback, *s.pools.deploy, *s.pools.rollback)
    yield from (file.text for file in (*s.one.file, *s.pools.file))
