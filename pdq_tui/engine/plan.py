"""Which format, bytes and kernel each linear layer gets under a policy: decided from shapes alone, before any packing.

What does not fit is settled here by the policy's own rule (``on_misfit``) and told: a smaller group, padding, or left in
the model's dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from pdq_tui.core.formats import GROUP_SIZES, Format
from pdq_tui.core.kernels import Candidate, Capability, KernelTable, uses_of
from pdq_tui.core.policy import STAGES, Policy, Stage
from pdq_tui.core.protocol import Coverage, Fallback, LeftModule, WeightsInfo
from pdq_tui.engine.census import Census, Fused, Layer
from pdq_tui.engine.formats.imported import holds
from pdq_tui.engine.formats.packed import DTYPE_NAMES, Spec, dense_dtype
from pdq_tui.engine.kernels import ProbeKey
from pdq_tui.errors import OTHER_FORMAT, UnfitError, UsageError

#: Below this share of the weights converted, a policy that names another format than the model's is called partial.
PARTIAL_BELOW = 0.5


@dataclass(frozen=True)
class Placement:
    """How one layer is held and multiplied in one stage. ``wanted``: what the policy names; ``left``: why it stays in
    the model's dtype though the stage names another format; ``fallback``: why it is not quite what was wanted.
    ``nowhere``: left because nothing on this device runs the format, whatever the layer's shape."""

    layer: Layer
    stage: Stage
    rows: int
    wanted: Format
    spec: Spec
    candidate: Candidate
    left: str | None = None
    fallback: str | None = None
    nowhere: bool = False

    @property
    def as_written(self) -> bool:
        """True where the policy's format runs as it is written; columns of zeros do not change it."""
        return self.fallback is None or (self.spec.fmt == self.wanted and self.spec.k != self.spec.K)

    @property
    def scratch_bytes(self) -> int:
        """Of the memory that its weights are dequantized into, which all layers share; 0 where they are not."""
        if not self.candidate.widens:
            return 0
        wide = torch.float32 if self.candidate.arithmetic == "fp32" else self.spec.dtype
        return self.spec.N * self.spec.k * wide.itemsize


class Plan(msgspec.Struct, kw_only=True):
    """What applying a policy would do. No weights were touched.

    ``new_bytes``: to be allocated now; ``total_bytes``: packed bytes of both stages together. ``misfits``: sentences.
    """

    policy: Policy
    new_bytes: int
    total_bytes: int
    coverage: dict[str, Coverage]
    weights: WeightsInfo
    fallbacks: list[Fallback]
    misfits: list[str]
    warnings: list[str]

    @property
    def resident(self) -> bool:
        """True where nothing has to be packed."""
        return self.new_bytes == 0


class Planner:
    """Placements for one model on one device. ``broken`` is the prober's: it tells of candidates that may crash."""

    def __init__(
        self,
        census: Census,
        dtype: torch.dtype,
        table: KernelTable,
        capability: Capability,
        broken: Callable[..., dict[ProbeKey, str]],
    ) -> None:
        if dtype not in DTYPE_NAMES:
            raise UnfitError(
                f"a model in {dtype} cannot be run here", f"legal: {', '.join(DTYPE_NAMES.values())}"
            )
        self.census, self.dtype, self.table, self.capability = census, dtype, table, capability
        self._broken = broken

    @property
    def untuned(self) -> KernelTable:
        """The kernel table in its shipped order."""
        return msgspec.structs.replace(self.table, tuned=None)

    def placements(self, policy: Policy, stage: Stage, rows: int, head_rows: int) -> list[Placement]:
        """One for each linear layer, in the model's order. Raises PdqError where the policy cannot run at all."""
        asked = self._risky(policy, stage)
        broken = self._broken(asked) if asked else {}
        placements = [
            self._place(policy, stage, layer, layer.rows(head_rows if layer.head else rows), broken)
            for layer in self.census.layers
        ]
        lost = next((p for p in placements if p.nowhere), None)
        if lost is not None and all(p.nowhere for p in placements if p.wanted == lost.wanted):
            raise UnfitError(
                f"{policy.name}: {lost.wanted.label} in {stage} does not run on this device: {lost.left}",
                OTHER_FORMAT,
            )
        return placements

    def probe(
        self,
        policy: Policy,
        cancelled: Callable[[], bool],
        progress: Callable[[float, float | None, str], None],
    ) -> None:
        """Try what may crash beforehand, where it can be cancelled; ``placements`` finds the results. Both stages in one
        child, since starting it costs more than what it runs. Raises Cancelled."""
        asked = [each for stage in STAGES for each in self._risky(policy, stage)]
        if asked:
            self._broken(asked, cancelled, progress)

    def _risky(self, policy: Policy, stage: Stage) -> list[tuple[Candidate, str, int, int]]:
        """Every candidate of the table that may crash, with each shape, where this stage may come to one of them."""
        dtype = DTYPE_NAMES[self.dtype]
        risky = [c for c in self.table.candidates if c.probe and not c.misfit(self.capability, dtype)]
        # Any layer may come to a dense product: as the format that is asked for, or where that one does not fit.
        shapes = {"dense": {(layer.N, layer.K) for layer in self.census.layers}}
        for layer in self.census.layers:
            fmt = policy.format_for(layer.name, stage, layer.head)
            shapes.setdefault("dense" if fmt.dense else fmt.weights, set()).add((layer.N, layer.K))
        return [
            (c, dtype, N, K)
            for c in risky
            for N, K in sorted(shapes.get(c.weights, ()))
            if c.shape_misfit(N, K, c.rows[0], c.group_sizes[0] if c.group_sizes else 0) is None
        ]

    def _dtype_name(self, fmt: Format) -> str:
        return DTYPE_NAMES[dense_dtype(fmt, self.dtype) if fmt.dense else self.dtype]

    def _place(
        self,
        policy: Policy,
        stage: Stage,
        layer: Layer,
        rows: int,
        broken: Mapping[ProbeKey, str],
    ) -> Placement:
        wanted = policy.format_for(layer.name, stage, layer.head)
        left = None
        if wanted.dense and not policy.stage(stage).format.dense:
            kept = (
                "a [[keep]] of the policy names it"
                if not layer.head
                else "the output head is kept unless named"
            )
            left = kept + (", and it is the input embedding" if layer.tied else "")
        nowhere = False
        source = policy.stage(stage).source
        own = DTYPE_NAMES[self.dtype]
        bad = {name: why for (name, d, n, kk), why in broken.items() if (d, n, kk) == (own, layer.N, layer.K)}
        used, k, reason = fit_groups(wanted, layer.K, policy.on_misfit)
        if used is not None:
            use, beside = uses_of(policy, layer.name, stage, used.group_size, layer.head)
            choice = self.table.place(
                use, layer.N, k, rows, self._dtype_name(used), self.capability, bad, beside
            )
            if choice.candidate is not None:
                spec = Spec(
                    used, choice.candidate.layout, layer.N, layer.K, k, self.dtype, layer.experts, source
                )
                missed = choice.passed_over[1] if choice.passed_over else None
                return Placement(layer, stage, rows, wanted, spec, choice.candidate, left, reason or missed)
            refusal = self.table.refusal(used, self._dtype_name(used), self.capability)
            reason = refusal or "; ".join(choice.reasons)
            nowhere = not choice.by_shape
        if wanted.dense:
            raise UnfitError(f"{layer.name}: nothing multiplies {wanted.label} here: {reason}")
        dense = Format()
        choice = self.table.choose(dense, layer.N, layer.K, rows, own, self.capability, broken=bad)
        if choice.candidate is None:
            raise UnfitError(f"{layer.name}: nothing multiplies it here: {'; '.join(choice.reasons)}")
        spec = Spec(
            dense, choice.candidate.layout, layer.N, layer.K, layer.K, self.dtype, layer.experts, source
        )
        return Placement(layer, stage, rows, wanted, spec, choice.candidate, reason, reason, nowhere)


def fit_groups(fmt: Format, K: int, on_misfit: str) -> tuple[Format | None, int, str | None]:
    """(format to use or None to leave dense, K with padding, what was changed and why)."""
    if not fmt.kind.groups and not fmt.group_size:
        return fmt, K, None
    group = fmt.group_size
    if group not in GROUP_SIZES:
        raise UsageError(
            f"group_size {group} is not a legal group size", f"legal: {', '.join(map(str, GROUP_SIZES))}"
        )
    if K % group == 0:
        return fmt, K, None
    why = f"groups of {group} do not divide in_features {K}"
    if on_misfit == "pad":
        padded = -(-K // group) * group
        return fmt, padded, f"{why}: padded to {padded} with zeros"
    if on_misfit == "smaller-group":
        for smaller in sorted(GROUP_SIZES, reverse=True):
            if smaller < group and K % smaller == 0:
                return (
                    msgspec.structs.replace(fmt, group_size=smaller),
                    K,
                    f"{why}: groups of {smaller} instead",
                )
        return None, K, f"{why}, nor does any smaller legal group ({', '.join(map(str, GROUP_SIZES))})"
    return None, K, why


# -- what is told about it ---------------------------------------------------------------------------------------------


def coverage_of(placements: Sequence[Placement], fused: Sequence[Fused], dtype: str) -> Coverage:
    """What one stage converts, counted over the weights of linear layers, tied heads and fused weights. ``dtype``: short
    name of the model's."""
    cover = Coverage()
    for p in placements:
        n = p.layer.parameters
        cover.total_parameters += n
        label = p.spec.fmt.label if not p.spec.fmt.dense else DTYPE_NAMES[p.spec.stored_dtype]
        cover.formats[label] = cover.formats.get(label, 0) + n
        cover.kernels[p.candidate.name] = cover.kernels.get(p.candidate.name, 0) + 1
        if p.spec.fmt.dense and p.spec.stored_dtype == p.spec.dtype:
            cover.left_bytes += p.spec.nbytes
            if p.left is not None:
                cover.left.append(
                    LeftModule(module=p.layer.name, parameters=n, bytes=p.spec.nbytes, reason=p.left)
                )
        else:
            cover.converted_parameters += n
            cover.converted_bytes += p.spec.nbytes
    for f in fused:
        cover.total_parameters += f.parameters
        cover.left_bytes += f.nbytes
        cover.formats[dtype] = cover.formats.get(dtype, 0) + f.parameters
        cover.left.append(LeftModule(module=f.name, parameters=f.parameters, bytes=f.nbytes, reason=f.reason))
    return cover


def weights_of(
    by_stage: Mapping[Stage, Sequence[Placement]], census: Census, coverage: Mapping[str, Coverage]
) -> WeightsInfo:
    """Bytes of a policy, exact. A head that stays dense in both stages is among the kept bytes; tied, it is counted once
    with the embedding."""
    stored: dict[Stage, dict[tuple[str, str], int]] = {}
    kept = census.other_bytes
    for stage in STAGES:
        stored[stage] = {}
        for p in by_stage[stage]:
            if (
                p.layer.head
                and _plain(p)
                and all(
                    _plain(q) and q.spec.source == p.spec.source
                    for s in STAGES
                    for q in by_stage[s]
                    if q.layer is p.layer
                )
            ):
                if not p.layer.tied and stage == "prefill":
                    kept += p.spec.nbytes
                continue
            if p.layer.tied and _plain(p):
                continue  # the embedding's own bytes
            stored[stage] |= {(p.layer.name, part.key): part.own_bytes for part in p.spec.parts}
    prefill, decode = (sum(stored[s].values()) for s in STAGES)
    union = sum((stored["prefill"] | stored["decode"]).values())
    bits: dict[str, float | None] = {
        s: 8 * coverage[s].converted_bytes / coverage[s].converted_parameters
        if coverage[s].converted_parameters
        else None
        for s in STAGES
    }
    return WeightsInfo(
        stored_bytes=union,
        prefill_bytes=prefill,
        decode_bytes=decode,
        shared_bytes=prefill + decode - union,
        extra_bytes=union - max(prefill, decode),
        kept_bytes=kept,
        bits_per_weight=bits,
        scratch_bytes=max(
            (p.scratch_bytes for placements in by_stage.values() for p in placements), default=0
        ),
    )


def _plain(p: Placement) -> bool:
    return p.spec.fmt.dense and p.spec.stored_dtype == p.spec.dtype


def fallbacks_of(placements: Iterable[Placement]) -> list[Fallback]:
    """One entry for each (stage, wanted, used, reason), with the first module's name and how many there are."""
    found: dict[tuple[str, str, str, str], Fallback] = {}
    for p in placements:
        if p.fallback is None:
            continue
        used = f"{p.spec.fmt.label} ({p.candidate.name})"
        key = (p.stage, p.wanted.label, used, p.fallback)
        if key in found:
            found[key].modules += 1
        else:
            found[key] = Fallback(
                stage=p.stage, module=p.layer.name, wanted=p.wanted.label, used=used, reason=p.fallback
            )
    return list(found.values())


def warnings_of(policy: Policy, coverage: Mapping[str, Coverage]) -> list[str]:
    found = []
    for stage in STAGES:
        cover = coverage[stage]
        if policy.stage(stage).format.dense or not cover.total_parameters:
            continue
        share = cover.converted_parameters / cover.total_parameters
        if share < PARTIAL_BELOW:
            biggest = max(cover.left, key=lambda left: left.parameters, default=None)
            why = f": {biggest.module}: {biggest.reason}" if biggest else ""
            found.append(f"partial: {share:.0%} of the weights converted in {stage}{why}")
    return found


def requantized(placements: Iterable[Placement], held: Callable[[Layer, Spec], Format | None]) -> list[str]:
    """A sentence for each format that is not what the checkpoint itself holds. ``held``: its format of a layer, None where
    it is not quantized."""
    found: Counter[tuple[str, str, str, bool]] = Counter()
    for p in placements:
        have = held(p.layer, p.spec)
        if have is not None and not holds(have, p.spec.parts[0].fmt):
            label = p.spec.fmt.label if not p.spec.fmt.dense else DTYPE_NAMES[p.spec.stored_dtype]
            found[p.stage, have.label, label, p.spec.fmt.dense] += 1
    return [
        f"{stage}: {count} layers are dequantized from the checkpoint's {have} to {label}"
        if dense
        else f"{stage}: {count} layers are quantized a second time, from the checkpoint's {have} to {label}"
        for (stage, have, label, dense), count in found.items()
    ]
