"""What ``tune`` found on one machine: per format, layer shape and row range the fastest kernel of each layout.

A file beside the user's kernel tables (``<config>/kernels_cfg/<device kind>.tuned.toml``), with a stamp of everything the
times depend on. A table of another machine or version is not used, and this is said. What is chosen is still subject to
every limit of the kernel tables: a tuned table only puts the order right.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from pdq_tui import locations
from pdq_tui.core import toml
from pdq_tui.core.formats import Format, of_label
from pdq_tui.errors import PdqError, UsageError

SCHEMA: Final = 1
#: Row counts that are measured unless others are asked for: one token, a small batch, larger ones, a prompt.
ROWS: Final = (1, 4, 16, 64, 512)
#: Past the last measured row count its winner holds.
MANY: Final = 1_000_000
#: A candidate may win whose error against float64 is at most this many times the format's own.
MAX_ERROR_FACTOR: Final = 1.5
#: Kernels, and layouts, that differ by less than this share are equal, and the order of the kernel tables decides.
TIE: Final = 0.03
#: Keys of a stamp, and what people call them.
STAMP: Final[dict[str, str]] = {
    "cpu": "CPU",
    "gpu": "GPU",
    "isa": "instructions",
    "threads": "CPU threads",
    "torch": "torch",
    "bitsandbytes": "bitsandbytes",
    "kernels": "own CPU kernels",
    "candidates": "kernel table",
}

_HEAD: Final = """\
# Written by `pdq-tui tune`: the fastest kernel of each layout, by format, layer (n out, k in features) and rows, measured on
# the machine of [stamp]; elsewhere it is not used. Delete the file, or set engine.tuned = "off", to go back to the shipped
# order. microseconds: median of one call, weights read from memory; error: against float64, relative.
"""


def ranges(rows: Iterable[int]) -> list[tuple[int, tuple[int, int]]]:
    """(measured row count, inclusive range that it stands for), ascending. One row stands for itself; between two others
    the geometric middle divides; the last one reaches on."""
    counts = sorted(set(rows))
    found = []
    low = 1
    for i, count in enumerate(counts):
        if i + 1 == len(counts):
            high = MANY
        elif count == 1:
            high = 1
        else:
            high = max(count, math.isqrt(count * counts[i + 1]))
        found.append((count, (low, high)))
        low = high + 1
    return found


def range_words(rows: tuple[int, int]) -> str:
    """ "1 row", "2 to 8 rows", "from 182 rows"."""
    low, high = rows
    if low == high:
        return f"{low} row{'' if low == 1 else 's'}"
    return f"from {low} rows" if high >= MANY else f"{low} to {high} rows"


class Winner(msgspec.Struct, frozen=True, kw_only=True):
    """The fastest eligible kernel of one layout for a layer [N, K] and an inclusive range of row counts.

    format  label of the format, "dense" for the dense ones
    K       in features, columns of padding included
    us      median microseconds of one call at the measured row count
    error   relative, of the result against the float64 product with the unrounded weights
    """

    format: str
    dtype: str
    N: int
    K: int
    rows: tuple[int, int]
    layout: str
    kernel: str
    us: float
    error: float


def label_of(fmt: Format) -> str:
    return "dense" if fmt.dense else fmt.label


_Shape = tuple[str, str, int, int]  # format, dtype, N, K


@dataclass(frozen=True)
class TunedTable:
    """``device``: "cpu" or "cuda". ``stamp``: by STAMP's keys, what the times depend on. ``made``: when, ISO, UTC."""

    device: str
    stamp: Mapping[str, str]
    winners: tuple[Winner, ...] = ()
    made: str = ""
    _by_shape: dict[_Shape, list[Winner]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for w in self.winners:
            self._by_shape.setdefault((w.format, w.dtype, w.N, w.K), []).append(w)

    def kernel(self, fmt: Format, dtype: str, N: int, K: int, rows: int, layout: str | None) -> str | None:
        """The kernel to be tried first for this layer, row count and layout (None: the fastest of all); None where
        nothing was measured."""
        found = [
            w
            for w in self._by_shape.get((label_of(fmt), dtype, N, K), ())
            if w.rows[0] <= rows <= w.rows[1] and layout in (None, w.layout)
        ]
        return min(found, key=lambda w: w.us).kernel if found else None

    def costs(self, formats: Sequence[Format], dtype: str, N: int, K: int) -> dict[str, float]:
        """Layout → how much slower than the best layout it is, as the mean logarithm over what was measured. A layout is
        one for all ``formats``, which share the bytes, and for both stages, so all their rows count alike; one in which
        something was measured and has no kernel is left out."""
        by_case: dict[tuple[str, tuple[int, int]], dict[str, float]] = {}
        for label in dict.fromkeys(map(label_of, formats)):
            for w in self._by_shape.get((label, dtype, N, K), ()):
                by_case.setdefault((label, w.rows), {})[w.layout] = w.us
        layouts = {layout for case in by_case.values() for layout in case}
        return {
            layout: sum(math.log(case[layout] / min(case.values())) for case in by_case.values())
            / len(by_case)
            for layout in layouts
            if all(layout in case for case in by_case.values())
        }

    def words(self, fmt: Format) -> str:
        """For people: by measured range of rows, the kernels that were fastest and for how many layer shapes; "" where
        nothing was measured of ``fmt``."""
        fastest: dict[tuple[str, tuple[int, int]], list[str]] = {}
        for (label, dtype, _, _), winners in self._by_shape.items():
            if label != label_of(fmt):
                continue
            for rows in dict.fromkeys(w.rows for w in winners):
                best = min((w for w in winners if w.rows == rows), key=lambda w: w.us)
                fastest.setdefault((dtype, rows), []).append(best.kernel)
        dtypes = {dtype for dtype, _ in fastest}
        told = []
        for (dtype, rows), kernels in sorted(fastest.items()):
            each = [
                f"{name} {count}/{len(kernels)}" if count < len(kernels) else name
                for name, count in Counter(kernels).most_common()
            ]
            told.append(f"{dtype + ' ' if len(dtypes) > 1 else ''}{range_words(rows)} {', '.join(each)}")
        return "; ".join(told)

    def with_winners(self, winners: Sequence[Winner], made: str) -> TunedTable:
        """With these in place of what was known of their formats and shapes."""
        new = {(w.format, w.dtype, w.N, w.K) for w in winners}
        kept = (w for w in self.winners if (w.format, w.dtype, w.N, w.K) not in new)
        return TunedTable(self.device, self.stamp, (*kept, *winners), made)


def difference(made_on: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Why a table with the stamp ``made_on`` says nothing about ``here``; None where it does."""
    told = []
    for key, name in STAMP.items():
        before, now = made_on.get(key, ""), here.get(key, "")
        if before != now:
            if key in ("isa", "kernels", "candidates"):
                told.append(f"{'other' if before and now else 'without' if before else 'new'} {name}")
            else:
                told.append(f"{name} {before or 'none'}, here {now or 'none'}")
    return "; ".join(told) or None


# -- the file ----------------------------------------------------------------------------------------------------------


def tuned_file(device: str, folder: Path | None = None) -> Path:
    return (folder or locations.user_kernels()) / f"{device}.tuned.toml"


def read_tuned(path: Path) -> TunedTable | None:
    """None where there is no file. Raises UsageError for a damaged one."""
    try:
        text = toml.read_text(path)
    except FileNotFoundError:
        return None
    doc = toml.parse(text, str(path))
    if doc.get("schema") != SCHEMA:
        raise UsageError(f"{path}: schema: {doc.get('schema')!r} is not supported", f"legal: {SCHEMA}")
    try:
        body = msgspec.convert(doc, _File, strict=True)
        winners = tuple(w.winner() for w in body.best)
        for winner in winners:
            if winner.format != "dense":
                of_label(winner.format)
    except (msgspec.ValidationError, ValueError, UsageError) as error:
        raise UsageError(f"{path}: {error}", "`pdq-tui tune` writes it anew") from error
    return TunedTable(body.device, body.stamp, winners, body.made)


class _Best(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    dtype: str
    n: int
    k: int
    rows: tuple[int, int]
    layout: str
    kernel: str
    microseconds: float
    error: float

    def winner(self) -> Winner:
        if not (self.microseconds > 0 and math.isfinite(self.microseconds)):
            raise ValueError(f"microseconds: {self.microseconds!r} is no time")
        return Winner(
            format=self.format, dtype=self.dtype, N=self.n, K=self.k, rows=self.rows, layout=self.layout,
            kernel=self.kernel, us=self.microseconds, error=self.error,
        )  # fmt: skip


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    device: str
    stamp: dict[str, str]
    made: str = ""
    best: list[_Best] = []


def write_tuned(path: Path, table: TunedTable) -> None:
    """Raises PdqError where it cannot be written."""
    lines = [
        _HEAD,
        f"schema = {SCHEMA}",
        f"device = {_text(table.device)}",
        f"made = {_text(table.made)}",
        "",
    ]
    lines += ["[stamp]", *(f"{key} = {_text(value)}" for key, value in table.stamp.items())]
    for w in table.winners:
        lines += [
            "",
            "[[best]]",
            f"format = {_text(w.format)}",
            f"dtype = {_text(w.dtype)}",
            f"n = {w.N}",
            f"k = {w.K}",
            f"rows = [{w.rows[0]}, {w.rows[1]}]",
            f"layout = {_text(w.layout)}",
            f"kernel = {_text(w.kernel)}",
            f"microseconds = {float(f'{w.us:.4g}')!r}",
            f"error = {float(f'{w.error:.3g}')!r}",
        ]
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise PdqError(f"{path} cannot be written: {error.strerror}") from error


def _text(value: str) -> str:
    """A TOML basic string: JSON's escapes are a part of TOML's."""
    return msgspec.json.encode(value).decode("utf-8")


# -- what is in use ----------------------------------------------------------------------------------------------------


class InUse(msgspec.Struct, frozen=True):
    """Whether a tuned table counts here. ``table`` None: it does not. ``text`` and ``hint`` are for people; ``level``:
    "warn" where there is one that is not used."""

    table: TunedTable | None
    text: str
    level: str = "info"
    hint: str | None = None


def in_use(
    device: str, stamp: Mapping[str, str], *, wanted: str = "auto", folder: Path | None = None
) -> InUse:
    """The tuned table for a device with this stamp. ``wanted``: the setting engine.tuned. Never raises: a table that
    cannot be read or is of elsewhere is told, and the shipped order holds."""
    path = tuned_file(device, folder)
    measure = "`pdq-tui tune MODEL` measures the kernels here"
    if wanted == "off":
        there = f": {path} is there" if path.is_file() else ""
        return InUse(None, f"no tuned kernel table is used (engine.tuned = off){there}")
    try:
        table = read_tuned(path)
    except PdqError as error:
        return InUse(None, f"the tuned kernel table is not used: {error.message}", "warn", error.hint)
    if table is None:
        return InUse(
            None, f"no tuned kernel table ({path}): the shipped order of kernels holds", "info", measure
        )
    other = table.device != device
    why = f"it is for {table.device}" if other else difference(table.stamp, stamp)
    if why is not None:
        return InUse(
            None, f"the tuned kernel table is not used: it was measured elsewhere ({why})", "warn", measure
        )
    shapes = {(w.N, w.K) for w in table.winners}
    formats = sorted({w.format for w in table.winners})
    text = f"tuned kernel table of {table.made or 'an unknown day'}: {len(shapes)} layer shapes, {', '.join(formats)}"
    return InUse(table, text)
