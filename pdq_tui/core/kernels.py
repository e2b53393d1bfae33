"""Kernel tables: which of the candidates is best for a layer and a row count; and what runs the decoder layers around them.

The tables are data (``kernels_cfg/<device kind>.toml``, a user's file on top), validated as strictly as policies. What a
candidate is, and its limits, stands in ``core.candidates``.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from pdq_tui import locations
from pdq_tui.core import toml
from pdq_tui.core.candidates import ARITHMETIC as ARITHMETIC
from pdq_tui.core.candidates import ASSUMED_FEATURES as ASSUMED_FEATURES
from pdq_tui.core.candidates import DEVICES as DEVICES
from pdq_tui.core.candidates import DTYPES as DTYPES
from pdq_tui.core.candidates import FEATURES as FEATURES
from pdq_tui.core.candidates import LAYOUTS as LAYOUTS
from pdq_tui.core.candidates import MANY as MANY
from pdq_tui.core.candidates import OPS as OPS
from pdq_tui.core.candidates import RUNNERS as RUNNERS
from pdq_tui.core.candidates import WEIGHTS as WEIGHTS
from pdq_tui.core.candidates import WIDENING as WIDENING
from pdq_tui.core.candidates import Candidate as Candidate
from pdq_tui.core.candidates import Capability as Capability
from pdq_tui.core.candidates import Choice as Choice
from pdq_tui.core.candidates import LayerRunner as LayerRunner
from pdq_tui.core.candidates import RunnerChoice as RunnerChoice
from pdq_tui.core.candidates import feature_misfit
from pdq_tui.core.formats import ACTIVATIONS as ACTIVATIONS
from pdq_tui.core.formats import GROUP_SIZES, Format
from pdq_tui.core.policy import STAGES, Policy, Stage, can_be_transient
from pdq_tui.core.tuned import TIE, TunedTable
from pdq_tui.errors import UsageError

SCHEMA: Final = 1


class Use(msgspec.Struct, frozen=True):
    """What a stage makes of a layer: a format; ``widened``: dequantized one layer at a time for a dense product."""

    format: Format
    widened: bool = False

    def grouped(self, group_size: int) -> Use:
        """The same with groups of another size."""
        return Use(msgspec.structs.replace(self.format, group_size=group_size), self.widened)

    @property
    def label(self) -> str:
        """For a sentence."""
        return f"dequantized {self.format.label}" if self.widened else self.format.label


def uses_of(
    policy: Policy, module: str, stage: Stage, group_size: int, head: bool = False
) -> tuple[Use, Use | None]:
    """What ``stage`` makes of the linear layer ``module``, and what the other stage makes of the same bytes, where they must
    be the same and are used in another way. ``group_size``: of the groups that fit its columns; ``head``: it is the output
    head, whatever its name."""
    formats = {s: policy.format_for(module, s, head) for s in STAGES}
    transient = policy.storage == "transient" and can_be_transient(formats["prefill"], formats["decode"])
    uses = {s: Use(formats[s], transient and s == "prefill") for s in STAGES}
    mine, other = uses[stage], uses["decode" if stage == "prefill" else "prefill"]
    same = not policy.apart and not mine.format.dense and mine.format.storage_key == other.format.storage_key
    return mine.grouped(group_size), other.grouped(group_size) if same and mine != other else None


class KernelTable(msgspec.Struct, frozen=True):
    """All candidates of one kind of device."""

    device: str
    candidates: tuple[Candidate, ...]
    origins: tuple[str, ...] = ()
    layers: tuple[LayerRunner, ...] = ()
    #: The most rows of a prompt that run at once; None: it is never cut.
    prefill_rows: int | None = None
    #: What was measured on this very machine, in front of the ranks; None: nothing was.
    tuned: TunedTable | None = None

    @property
    def digest(self) -> str:
        """Of the candidates: changes whenever one is added, removed or changed."""
        return hashlib.sha256(msgspec.json.encode(sorted(self.candidates, key=lambda c: c.name))).hexdigest()[
            :16
        ]

    def runners(self, stage: str, rows: int, capability: Capability) -> RunnerChoice:
        """What may run the decoder layers of ``stage`` for so many rows on this machine; "eager" always can."""
        reasons: list[str] = []
        found: list[str] = []
        for entry in sorted(self.layers, key=lambda entry: (entry.rank, entry.name)):
            if stage not in entry.stages:
                continue
            reason = feature_misfit(entry.name, entry.needs, entry.lacks, capability)
            if reason is None and entry.max_rows is not None and rows > entry.max_rows:
                reason = f"{entry.name} takes up to {entry.max_rows} rows"
            if reason is None:
                found.append(entry.runner)
            else:
                reasons.append(reason)
        return RunnerChoice(tuple(found), tuple(reasons))

    def of(self, fmt: Format, layout: str | None = None) -> list[Candidate]:
        weights = "dense" if fmt.dense else fmt.weights
        return [
            c
            for c in self.candidates
            if c.weights == weights
            and c.activations == fmt.activations
            and (layout is None or c.layout == layout)
        ]

    def refusal(self, fmt: Format, dtype: str, capability: Capability) -> str | None:
        """Why no layer of any shape runs in ``fmt`` on this device; None where some do."""
        reasons: dict[str, str] = {}
        for c in sorted(self.of(fmt), key=lambda c: c.order(1)):
            reason = c.misfit(capability, dtype)
            if reason is None:
                return None
            reasons.setdefault(reason.removeprefix(c.name), reason)  # once for all kernels that lack the same
        return "; ".join(reasons.values()) or self._none_for(fmt)

    def _none_for(self, fmt: Format) -> str:
        with_them = "" if fmt.activations == "model" else f" with {fmt.activations} activations"
        return f"no kernel on {self.device} multiplies {fmt.weights} weights{with_them}"

    def layouts(
        self, use: Use, N: int, K: int, dtype: str, capability: Capability, beside: Use | None = None
    ) -> list[str]:
        """Layouts of packed bytes that fit this layer, best first: as they were measured here, else in the order of the
        best candidate that reads each.

        ``beside``: what the other stage makes of the same bytes; layouts that it cannot read are left out, and both
        stages' best candidates count, so that each stage finds the same order.
        """
        ranks = [
            self._layout_ranks(each, N, K, dtype, capability) for each in ([use, beside] if beside else [use])
        ]
        common = set.intersection(*(set(found) for found in ranks))
        measured: dict[str, float] = {}
        if self.tuned is not None:
            measured = self.tuned.costs([use.format, *([beside.format] if beside else [])], dtype, N, K)
        equal = min(measured.values(), default=0.0) + TIE
        costs = {layout: measured.get(layout, math.inf) for layout in common}
        return sorted(
            common,
            key=lambda layout: (
                0.0 if costs[layout] <= equal else costs[layout],
                sum(found[layout] for found in ranks),
                layout,
            ),
        )

    def _layout_ranks(self, use: Use, N: int, K: int, dtype: str, capability: Capability) -> dict[str, int]:
        found: dict[str, int] = {}
        for c in self.of(use.format):
            if c.misfit(capability, dtype) or c.shape_misfit(N, K, c.rows[0], use.format.group_size):
                continue
            if c.widens or not use.widened:
                found[c.layout] = min(found.get(c.layout, c.rank), c.rank)
        return found

    def place(
        self,
        use: Use,
        N: int,
        K: int,
        rows: int,
        dtype: str,
        capability: Capability,
        broken: Mapping[str, str] = MappingProxyType({}),
        beside: Use | None = None,
    ) -> Choice:
        """The best candidate among those that read the best layout: the layout does not depend on the rows, so that both
        stages find the same bytes. ``beside``: the other stage's use, where it must read them too."""
        for layout in self.layouts(use, N, K, dtype, capability, beside):
            choice = self.choose(
                use.format, N, K, rows, dtype, capability, layout=layout, broken=broken, widened=use.widened
            )
            if choice.candidate is not None:
                return choice
        choice = self.choose(use.format, N, K, rows, dtype, capability, broken=broken, widened=use.widened)
        if choice.candidate is None or beside is None:
            return choice
        reason = f"no kernel here reads one layout for both {use.label} and {beside.label}"
        return Choice(None, (reason,), by_shape=self._one_layout(use, beside, dtype, capability))

    def _one_layout(self, use: Use, beside: Use, dtype: str, capability: Capability) -> bool:
        """Does some shape have a layout that both read?"""
        both = []
        for each in (use, beside):
            fitting = [c for c in self.of(each.format) if c.misfit(capability, dtype) is None]
            both.append({c.layout for c in fitting if c.widens or not each.widened})
        return bool(both[0] & both[1])

    def choose(
        self,
        fmt: Format,
        N: int,
        K: int,
        rows: int,
        dtype: str,
        capability: Capability,
        *,
        layout: str | None = None,
        broken: Mapping[str, str] = MappingProxyType({}),
        widened: bool = False,
    ) -> Choice:
        """The best candidate for one layer and row count.

        ``layout`` restricts the choice to kernels that read bytes already packed so, ``widened`` to those that dequantize
        them for a dense product; ``broken``: candidates whose probe failed, and how.
        """
        reasons: list[str] = []
        first_missed: tuple[str, str] | None = None
        by_shape = False
        tuned = self.tuned.kernel(fmt, dtype, N, K, rows, layout) if self.tuned is not None else None
        for c in sorted(self.of(fmt), key=lambda c: (c.name != tuned, *c.order(rows))):
            reason = c.misfit(capability, dtype)
            if reason is not None:
                reasons.append(reason)
                continue
            reason = c.shape_misfit(N, K, rows, fmt.group_size)
            by_shape = by_shape or reason is not None
            if reason is None and c.name in broken:
                reason = f"{c.name} failed its probe on this device: {broken[c.name]}"
            if reason is None and layout is not None and c.layout != layout:
                reasons.append(f"{c.name} reads another layout of the weights than {layout}")
                continue
            if reason is None and widened and not c.widens:
                reasons.append(f"{c.name} does not dequantize the weights")
                continue
            if reason is None:
                return Choice(c, tuple(reasons), first_missed)
            reasons.append(reason)
            first_missed = first_missed or (c.name, reason)
        if not reasons:
            reasons.append(self._none_for(fmt))
        return Choice(None, tuple(reasons), first_missed, by_shape)


# -- TOML ------------------------------------------------------------------------------------------------------------

_Entry = TypeVar("_Entry", Candidate, LayerRunner)
_KEYS: Final = frozenset(Candidate.__struct_fields__)
_REQUIRED: Final = ("name", "op", "weights", "layout")


def load_kernels(device: str, user_dir: Path | None = None) -> KernelTable:
    """The shipped table for "cpu" or "cuda" with the user's entries on top (same name replaces), nothing tuned. Raises
    UsageError."""
    if device not in DEVICES:
        raise UsageError(f"no kernel table for {device!r}", f"legal: {', '.join(DEVICES)}")
    shipped = locations.shipped("kernels_cfg") / f"{device}.toml"
    user = (user_dir or locations.user_kernels()) / f"{device}.toml"
    found: dict[str, Candidate] = {}
    layers: dict[str, LayerRunner] = {}
    origins = []
    prefill_rows = None
    for path in (shipped, user):
        if path == user and not path.is_file():
            continue
        table = read_kernels(path, device)
        found.update({candidate.name: candidate for candidate in table.candidates})
        layers.update({entry.name: entry for entry in table.layers})
        origins.append(str(path))
        prefill_rows = table.prefill_rows or prefill_rows
    return KernelTable(device, tuple(found.values()), tuple(origins), tuple(layers.values()), prefill_rows)


def read_kernels(path: Path, device: str) -> KernelTable:
    """One file's entries. Raises UsageError."""
    try:
        text = toml.read_text(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    return parse_kernels(text, device, str(path))


def parse_kernels(text: str, device: str, origin: str = "kernels") -> KernelTable:
    """Validate one document. Raises UsageError naming file, key and the legal values."""
    doc = toml.parse(text, origin)
    _known(origin, doc, {"schema", "device", "kernel", "layers", "prefill"}, "")
    if doc.get("schema") != SCHEMA:
        raise UsageError(f"{origin}: schema: {doc.get('schema')!r} is not supported", f"legal: {SCHEMA}")
    if doc.get("device") != device:
        raise UsageError(f"{origin}: device: {doc.get('device')!r} does not belong here", f"legal: {device}")
    return KernelTable(
        device,
        tuple(_candidate(origin, *entry) for entry in _entries(origin, doc, "kernel")),
        (origin,),
        tuple(_layer_runner(origin, *entry) for entry in _entries(origin, doc, "layers")),
        _prefill_rows(origin, doc.get("prefill", {})),
    )


def _prefill_rows(origin: str, entry: Any) -> int | None:
    if not isinstance(entry, dict):
        raise UsageError(f"{origin}: prefill: must be a table", "write it as [prefill]")
    _known(origin, entry, {"rows"}, "prefill.")
    rows = entry.get("rows")
    if rows is not None and (not _whole(rows) or rows < 1):
        raise UsageError(f"{origin}: prefill.rows: {rows!r} is not legal", "legal: whole numbers from 1")
    return rows


def _entries(origin: str, doc: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, entry) of an array of tables; names are there and differ."""
    entries = doc.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UsageError(f"{origin}: {key}: must be an array of tables", f"write each as [[{key}]]")
    names = [e.get("name") for e in entries]
    for name in names:
        if name is not None and names.count(name) > 1:
            raise UsageError(f"{origin}: {key}.name: {name!r} stands there twice")
    return [(f"{key}[{i}]", entry) for i, entry in enumerate(entries)]


def _required(origin: str, where: str, entry: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if not isinstance(entry.get(key), str) or not entry[key]:
            raise UsageError(
                f"{origin}: {where}.{key}: is missing or no string", f"required: {', '.join(keys)}"
            )


def _word_lists(origin: str, where: str, entry: dict[str, Any], legal: dict[str, Iterable[Any]]) -> None:
    for key, words in legal.items():
        if key not in entry:
            continue
        if not isinstance(entry[key], list):
            raise UsageError(
                f"{origin}: {where}.{key}: must be a list", f"legal: {', '.join(map(str, words))}"
            )
        _among(origin, f"{where}.{key}", entry[key], tuple(words))


def _layer_runner(origin: str, where: str, entry: dict[str, Any]) -> LayerRunner:
    _required(origin, where, entry, ("name", "runner"))
    where = f"layers {entry['name']!r}"
    _known(origin, entry, LayerRunner.__struct_fields__, where + ".")
    _among(origin, f"{where}.runner", [entry["runner"]], RUNNERS)
    _word_lists(origin, where, entry, {"stages": STAGES, "needs": FEATURES, "lacks": FEATURES})
    return _converted(origin, where, entry, LayerRunner)


def _converted(origin: str, where: str, entry: dict[str, Any], kind: type[_Entry]) -> _Entry:
    try:
        return msgspec.convert(entry, kind, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{origin}: {where}: {error}") from error


def _candidate(origin: str, where: str, entry: dict[str, Any]) -> Candidate:
    _required(origin, where, entry, _REQUIRED)
    where = f"kernel {entry['name']!r}"
    _known(origin, entry, _KEYS, where + ".")
    for key, legal in (
        ("op", tuple(OPS)),
        ("weights", WEIGHTS),
        ("layout", LAYOUTS),
        ("activations", ACTIVATIONS),
        ("arithmetic", ARITHMETIC),
    ):
        _among(origin, f"{where}.{key}", [entry[key]] if key in entry else [], legal)
    _word_lists(
        origin,
        where,
        entry,
        {"dtypes": DTYPES, "needs": FEATURES, "lacks": FEATURES, "group_sizes": GROUP_SIZES},
    )
    for key in ("n_multiple", "k_multiple"):
        if key in entry and (not _whole(entry[key]) or entry[key] < 1):
            raise UsageError(
                f"{origin}: {where}.{key}: {entry[key]!r} is not legal", "legal: whole numbers from 1"
            )
    for key in ("rows", "best_rows", "min_sm"):
        if key in entry:
            pair = entry[key]
            ordered = key == "min_sm" or (isinstance(pair, list) and len(pair) == 2 and pair[:1] <= pair[1:])
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(_whole, pair)) or not ordered:
                raise UsageError(
                    f"{origin}: {where}.{key}: {pair!r} is not legal",
                    "legal: two whole numbers, e.g. [1, 16]",
                )
    if entry["layout"] not in OPS[entry["op"]]:
        raise UsageError(
            f"{origin}: {where}.layout: {entry['op']} does not read {entry['layout']!r}",
            f"legal: {', '.join(OPS[entry['op']])}",
        )
    return _converted(origin, where, entry, Candidate)


def _known(origin: str, table: dict[str, Any], allowed: Iterable[str], prefix: str) -> None:
    legal = sorted(allowed)
    for key in table:
        if key not in legal:
            near = difflib.get_close_matches(key, legal, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"{origin}: {prefix}{key}: unknown key", f"{hint}legal: {', '.join(legal)}")


def _among(origin: str, key: str, values: Sequence[Any], legal: Sequence[Any]) -> None:
    for value in values:
        if value not in legal:
            raise UsageError(
                f"{origin}: {key}: {value!r} is not a legal value", f"legal: {', '.join(map(str, legal))}"
            )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
