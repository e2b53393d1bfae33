"""Packed weights of all policies, one entry per (module, storage key), least recently used first, under a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from pdq_tui.core.formats import Format
from pdq_tui.engine.census import Layer
from pdq_tui.engine.checkpoint import Masters
from pdq_tui.engine.formats.imported import Imported, holds, repack
from pdq_tui.engine.formats.pack import pack, pack_stack
from pdq_tui.engine.formats.packed import Packed, PackedStack, Spec
from pdq_tui.engine.layout import Layout
from pdq_tui.errors import UnfitError

Key = tuple[str, str]
Progress = Callable[[float, float | None, str], None]

#: Bytes that must stay free beside what is packed: scratch for one layer and for activations.
HEADROOM_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class SourceWeights:
    """Where the weights of a model, or of a stage with a checkpoint of its own, come from.

    own     by layer: weights that the skeleton holds on the device itself (tied heads), used instead of the masters.
    others  by name: parameters beside the linear weights that are not the model's own; empty for the model.
    """

    masters: Masters
    own: Mapping[str, Tensor]
    others: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def other_bytes(self) -> int:
        return sum({id(p): p.nbytes for p in self.others.values()}.values())


class WeightStore:
    """Holds what is packed. ``sources``: by name, "" for the model itself."""

    def __init__(
        self, masters: Masters, layout: Layout, budget_bytes: int | None, own: Mapping[str, Tensor]
    ) -> None:
        self.masters, self.layout, self.budget_bytes = masters, layout, budget_bytes
        self.sources = {"": SourceWeights(masters, own)}
        self._entries: OrderedDict[Key, Packed | PackedStack] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Packed | PackedStack:
        self._entries.move_to_end(key)
        return self._entries[key]

    @property
    def nbytes(self) -> int:
        """Everything held, dense masters in use included, the model's own (tied) tensors not."""
        return sum(
            p.nbytes for (name, _), p in self._entries.items() if p.ours or name not in self.sources[""].own
        )

    @property
    def packed_bytes(self) -> int:
        """What this store itself allocated; the budget is on this."""
        return sum(p.nbytes for p in self._entries.values() if p.ours)

    def bytes_beside(self, keys: Iterable[Key], device: torch.device | None = None) -> int:
        """What this store allocated for other entries than these, in all or on ``device``."""
        keep = set(keys)
        return sum(
            p.nbytes
            for key, p in self._entries.items()
            if p.ours and key not in keep and (device is None or self.layout.of(key[0]) == device)
        )

    def bytes_on(self, keys: Iterable[Key], device: torch.device) -> int:
        """As ``nbytes``, of these entries where they lie on ``device``."""
        here = [(key, self._entries[key]) for key in keys if self.layout.of(key[0]) == device]
        return sum(p.nbytes for (name, _), p in here if p.ours or name not in self.sources[""].own)

    def new_bytes(self, wanted: Mapping[Key, tuple[Layer, Spec]]) -> int:
        """Bytes that packing what is missing will allocate."""
        return sum(
            spec.own_bytes
            for key, (layer, spec) in wanted.items()
            if key not in self and not self.shares(layer, spec)
        )

    def shares(self, layer: Layer, spec: Spec) -> bool:
        """True where the dense weight is the master (or the model's own tensor) itself and costs nothing."""
        if not spec.fmt.dense or spec.stored_dtype != spec.dtype or layer.conv1d:
            return False
        source = self.sources[spec.source]
        on_cpu = self.layout.of(layer.name).type == "cpu"
        return layer.name in source.own or (on_cpu and source.masters.shared(layer.parameter))

    def check_fit(
        self, new_bytes: int, live: Iterable[Key], free_bytes: int | None, beside_bytes: int = 0
    ) -> None:
        """Make room under the budget and in memory by dropping what no live arm uses. Raises UnfitError before anything
        is packed. ``beside_bytes``: of the KV cache and of scratch, which are no part of the budget."""
        self.check_budget(new_bytes, live)
        self.check_free(new_bytes, live, free_bytes, beside_bytes)

    def check_budget(self, new_bytes: int, live: Iterable[Key]) -> None:
        keep = set(live)
        if new_bytes and self.budget_bytes is not None:
            for key in [k for k, p in self._entries.items() if k not in keep and p.ours]:
                if self.packed_bytes + new_bytes <= self.budget_bytes:
                    break
                del self._entries[key]
            if self.packed_bytes + new_bytes > self.budget_bytes:
                raise UnfitError(
                    f"does not fit: {_mb(new_bytes)} of weights to pack, {_mb(self.packed_bytes)} in use,"
                    f" the budget is {_mb(self.budget_bytes)}",
                    "raise the weight budget, or let go of the other policy",
                )

    def check_free(
        self,
        new_bytes: int,
        live: Iterable[Key],
        free_bytes: int | None,
        beside_bytes: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """The same of the memory alone; all figures are of ``device`` where the model lies on several."""
        keep, wanted = set(live), new_bytes + beside_bytes
        here = [
            k for k in self._entries if k not in keep and (device is None or self.layout.of(k[0]) == device)
        ]
        while free_bytes is not None and wanted and wanted + HEADROOM_BYTES > free_bytes:
            unused = next((k for k in here if k in self._entries and self._entries[k].ours), None)
            if unused is None:
                beside = f" and {_mb(beside_bytes)} of KV cache and scratch" if beside_bytes else ""
                where = f" on {device}" if device is not None else ""
                raise UnfitError(
                    f"does not fit{where}: {_mb(new_bytes)} of weights to pack{beside}, {_mb(free_bytes)} free,"
                    f" of which {_mb(HEADROOM_BYTES)} are kept for activations",
                    "close other programs, or choose a policy with fewer bytes"
                    + (", shorter prompts or a smaller batch" if beside_bytes else ""),
                )
            free_bytes += self._entries.pop(unused).nbytes

    def pack_missing(
        self,
        wanted: Mapping[Key, tuple[Layer, Spec]],
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> int:
        """Pack what is not there. Returns how many layers were packed. Raises Cancelled; what is done stays."""
        missing = [(key, layer, spec) for key, (layer, spec) in wanted.items() if key not in self]
        total = float(sum(spec.own_bytes for _, _, spec in missing))
        done = 0.0
        for key, layer, spec in missing:
            progress(done, total, f"{spec.fmt.label} {layer.name}")
            shared, device = self.shares(layer, spec), self.layout.of(layer.name)
            base = self._base(layer, spec)
            held = self.imported(layer, spec)
            if held is not None:
                self._entries[key] = repack(spec, held, device, cancelled)
            elif spec.stack:
                assert base is None or isinstance(base, PackedStack)
                masters = partial(self.master, layer, source=spec.source)
                self._entries[key] = pack_stack(spec, masters, device, cancelled, shared, base)
            else:
                assert base is None or isinstance(base, Packed)
                self._entries[key] = pack(
                    spec, self.master(layer, source=spec.source), device, cancelled, shared, base
                )
            done += spec.own_bytes
        if missing:
            progress(total, total, "packed")
        return len(missing)

    def _base(self, layer: Layer, spec: Spec) -> Packed | PackedStack | None:
        """The packed weights that ``spec`` builds upon; they stand before it in what is wanted."""
        below = spec.parts[:-1]
        return self._entries[layer.name, below[-1].key] if below else None

    def imported(self, layer: Layer, spec: Spec) -> Imported | None:
        """The checkpoint's own numbers, where it holds them in this very format."""
        have = self.format(layer, spec)
        masters = self.sources[spec.source].masters
        return masters.imported(layer.parameter) if have and holds(have, spec.fmt) else None

    def format(self, layer: Layer, spec: Spec) -> Format | None:
        """What the checkpoint that ``spec`` is made from holds the layer in; None where it is not quantized."""
        return self.sources[spec.source].masters.format(layer.parameter)

    def files(self) -> list[Path]:
        return [file for source in self.sources.values() for file in source.masters.files()]

    def master(self, layer: Layer, expert: int | None = None, *, source: str = "") -> Tensor:
        """[N, K] in the model's dtype, a view where the parameter is kept [K, N]; of ``expert`` where there are several."""
        masters = self.sources[source].masters
        own = self.sources[source].own.get(layer.name)
        if own is not None:
            weight = own if expert is None else own[expert]
        elif expert is None:
            weight = masters.get(layer.parameter)
        else:
            weight = masters.part(layer.parameter, expert)
        return weight.t() if layer.conv1d else weight

    def keep_only(self, keys: Iterable[Key]) -> None:
        keep = set(keys)
        for key in [k for k in self._entries if k not in keep]:
            del self._entries[key]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
