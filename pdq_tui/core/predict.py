"""What a policy will store and convert on a model, from shapes alone. The engine's plan, with weights and device at
hand, has the last word; this one needs neither."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from pdq_tui.core.formats import GROUP_SIZES, Format, own_bytes, packed_bytes, stored_parts
from pdq_tui.core.kernels import ASSUMED_FEATURES, Candidate, Capability, KernelTable, uses_of
from pdq_tui.core.kv import sliding_words
from pdq_tui.core.policy import STAGES, Policy, Stage, is_head
from pdq_tui.core.shapes import Linear, Shapes
from pdq_tui.errors import OTHER_FORMAT, UnfitError

#: How a note begins that says what the engine will not do.
REFUSED: Final = "the engine will refuse this:"
#: The device that is meant where nobody says which.
_PLAIN: Final = {"cpu": "a CPU without special instructions", "cuda": "a GPU of compute capability 9.0"}


class Left(msgspec.Struct, frozen=True):
    """Layers that stay in the model's dtype though the stage names another format, and why."""

    modules: tuple[str, ...]
    parameters: int
    reason: str


class StagePrediction(msgspec.Struct, frozen=True):
    """``kernels``: linear layers by the kernel that comes first for them. ``bits_per_weight``: over the converted parameters;
    None where nothing is converted. ``head_bytes``: of an output head that is the input embedding and left in its dtype:
    read in every step, but stored once, with the embedding, and in none of ``bytes``."""

    bytes: int
    converted_parameters: int
    total_parameters: int
    formats: dict[str, int]
    kernels: dict[str, int]
    left: tuple[Left, ...]
    bits_per_weight: float | None
    head_bytes: int = 0


class Prediction(msgspec.Struct, frozen=True):
    """All bytes of one policy on one model. ``extra_bytes``: stored minus the larger stage alone; ``kept_bytes``: what
    no policy touches (embeddings, norms, biases, a tied head)."""

    policy: str
    model: str
    device: str
    storage: str
    stored_bytes: int
    extra_bytes: int
    kept_bytes: int
    kv: str
    kv_bytes_per_token: int | None
    kv_prefill_bytes_per_token: int | None
    kv_reason: str
    stages: dict[str, StagePrediction]
    notes: tuple[str, ...]


def predict(
    policy: Policy,
    shapes: Shapes,
    table: KernelTable,
    prefill_rows: int,
    decode_rows: int,
    capability: Capability | None = None,
) -> Prediction:
    """Bytes and coverage of ``policy``. Rows: tokens in one call of each stage (prompt length × batch, batch).
    ``capability``: of the device that is meant, by default a plain CPU or compute capability 9.0. Raises UnfitError where
    nothing on that device runs a format of the policy."""
    stages, stored = _both(policy, shapes, table, prefill_rows, decode_rows, capability)
    total = sum(stored.values())
    notes = (
        [f"{len(shapes.fused)} weights outside linear layers (routers) stay as they are"]
        if shapes.fused
        else []
    )
    notes += [f"{policy.name}: {text}" for text in policy.unmatched(x.name for x in shapes.linears)]
    meant = "" if capability else f" for {_PLAIN[table.device]}"
    if policy.prefill.source or policy.decode.source:
        notes.append(
            "a stage's own source is taken to have the model's shapes, and weights that are not quantized"
        )
    notes.append(f"from shapes alone{meant}: the engine's plan with the real device has the last word")
    kv, geometry = policy.kv, shapes.kv
    if geometry is not None:
        refused = geometry.misfit(kv)
        windows = sliding_words(
            geometry.sliding_layers, geometry.layers, max(filter(None, geometry.windows), default=None)
        )
        notes = [
            *([f"{REFUSED} KV cache {kv.label}: {refused}"] if refused else []),
            *filter(None, [windows, shapes.kv_reason]),
            *notes,
        ]
    return Prediction(
        policy=policy.name,
        model=shapes.path,
        device=table.device,
        storage=policy.storage,
        stored_bytes=total,
        extra_bytes=total - max(s.bytes for s in stages.values()),
        kept_bytes=shapes.other_bytes,
        kv=kv.label,
        kv_bytes_per_token=geometry.bytes_per_token(kv, "decode") if geometry else None,
        kv_prefill_bytes_per_token=geometry.bytes_per_token(kv, "prefill") if geometry else None,
        kv_reason=shapes.kv_reason,
        stages=stages,
        notes=tuple(notes),
    )


def step_bytes(
    prediction: Prediction, policy: Policy, shapes: Shapes, batch: int, positions: int
) -> tuple[int | None, str]:
    """Bytes that one decode step has to read at least, with ``positions`` tokens of each of ``batch`` sequences in the KV
    cache: the linear layers as stored, the output head, the cache. Norms and the tokens' embedding rows are left out.
    None with the reason where shapes do not tell."""
    if any(layer.experts > 1 for layer in shapes.linears):
        return None, "which experts a token reads is not in the shapes"
    if shapes.kv is None:
        return None, shapes.kv_reason
    decode = prediction.stages["decode"]
    cache = batch * shapes.kv.sequence_bytes(policy.kv, "decode", positions)
    return decode.bytes + decode.head_bytes + cache, ""


def to_pack(
    policy: Policy,
    resident: Iterable[Policy],
    shapes: Shapes,
    table: KernelTable,
    prefill_rows: int,
    decode_rows: int,
    capability: Capability | None = None,
) -> tuple[int, int]:
    """(bytes that have to be packed for ``policy``, bytes that ``resident`` policies have packed). A weight in the
    model's own dtype is the loaded model's itself on a CPU, and a copy on a GPU."""

    def packed(one: Policy) -> dict[tuple[str, str], int]:
        _, stored = _both(one, shapes, table, prefill_rows, decode_rows, capability)
        return {
            k: size for k, size in stored.items() if table.device != "cpu" or k[1] != Format().storage_key
        }

    there: dict[tuple[str, str], int] = {}
    for one in resident:
        there |= packed(one)
    return sum(size for k, size in packed(policy).items() if k not in there), sum(there.values())


@dataclass(frozen=True)
class _On:
    """What layers are placed on. ``rows``: of a call in the stage, and of its output head, which sees the last positions
    only."""

    shapes: Shapes
    table: KernelTable
    capability: Capability
    rows: dict[Stage, int]
    head_rows: int

    def rows_of(self, layer: Linear, stage: Stage) -> int:
        return self.head_rows if is_head(layer.name) else self.rows[stage]


def _both(
    policy: Policy,
    shapes: Shapes,
    table: KernelTable,
    prefill_rows: int,
    decode_rows: int,
    capability: Capability | None,
) -> tuple[dict[str, StagePrediction], dict[tuple[str, str], int]]:
    """Each stage, and the bytes of everything that either of them reads by (layer, storage key)."""
    sm = (9, 0) if table.device == "cuda" else None
    capability = capability or Capability(table.device, ASSUMED_FEATURES, sm)
    on = _On(shapes, table, capability, {"prefill": prefill_rows, "decode": decode_rows}, decode_rows)
    stored: dict[tuple[str, str], int] = {}
    stages: dict[str, StagePrediction] = {}
    for stage in STAGES:
        stages[stage], packed = _stage(policy, stage, on)
        stored |= packed
    return stages, stored


def _stage(policy: Policy, stage: Stage, on: _On) -> tuple[StagePrediction, dict[tuple[str, str], int]]:
    shapes = on.shapes
    packed: dict[tuple[str, str], int] = {}
    formats: dict[str, int] = {}
    kernels: dict[str, int] = {}
    left: dict[str, list[Linear]] = {}
    converted = converted_bytes = head = 0
    source = policy.stage(stage).source
    for layer in shapes.linears:
        wanted = policy.format_for(layer.name, stage)
        _runs(wanted, policy, stage, on)
        used, kernel, reason = _fit(wanted, policy, stage, layer, on)
        layout = kernel.layout if kernel is not None else "dense"
        if kernel is not None:
            kernels[kernel.name] = kernels.get(kernel.name, 0) + 1
        if reason is None and used.dense and not policy.stage(stage).format.dense:
            reason = "kept in the model's dtype by the policy or, as the head, unless named"
        if reason is not None:
            left.setdefault(reason, []).append(layer)
        size = packed_bytes(used, layer.N, layer.K, shapes.dtype_bytes, layout) * layer.experts
        formats[used.label] = formats.get(used.label, 0) + layer.parameters
        if not used.dense:
            converted += layer.parameters
            converted_bytes += size
        if layer.tied and used.dense:  # a tied head is the embedding's bytes
            head += size
        else:
            for part, _ in stored_parts(used):
                one = own_bytes(part, layer.N, layer.K, shapes.dtype_bytes, layout)
                key = f"{part.storage_key}@{source}" if source else part.storage_key
                packed[layer.name, key] = one * layer.experts
    prediction = StagePrediction(
        bytes=sum(packed.values()),
        converted_parameters=converted,
        total_parameters=sum(x.parameters for x in shapes.linears) + sum(n for _, n in shapes.fused),
        formats=formats,
        kernels=kernels,
        left=tuple(
            Left(tuple(x.name for x in layers), sum(x.parameters for x in layers), reason)
            for reason, layers in left.items()
        ),
        bits_per_weight=8 * converted_bytes / converted if converted else None,
        head_bytes=head,
    )
    return prediction, packed


def _runs(wanted: Format, policy: Policy, stage: Stage, on: _On) -> None:
    """Raises UnfitError where nothing on this device runs ``wanted``, whatever the layer's shape."""
    if wanted.dense:
        return
    refusal = on.table.refusal(wanted, on.shapes.dtype, on.capability)
    if refusal is not None:
        raise UnfitError(
            f"{policy.name}: {wanted.label} in {stage} does not run on {on.table.device}: {refusal}",
            OTHER_FORMAT,
        )


def _fit(
    wanted: Format, policy: Policy, stage: Stage, layer: Linear, on: _On
) -> tuple[Format, Candidate | None, str | None]:
    """The format that this layer really gets, the kernel that comes first for it, and why it is left in the model's dtype if
    it is."""
    rows, dtype = on.rows_of(layer, stage), on.shapes.dtype
    if wanted.dense:
        return wanted, _dense(wanted, layer, rows, on), None
    tried = [wanted]
    if wanted.group_size and policy.on_misfit == "smaller-group":
        tried += [
            Format(wanted.weights, wanted.activations, g)
            for g in sorted(GROUP_SIZES, reverse=True)
            if g < wanted.group_size
        ]
    reason = f"in_features {layer.K} is not divisible by a group of {wanted.group_size}"
    for fmt in tried:
        if fmt.group_size and layer.K % fmt.group_size and policy.on_misfit != "pad":
            continue
        k = layer.K + (-layer.K % fmt.group_size if fmt.group_size else 0)
        use, beside = uses_of(policy, layer.name, stage, fmt.group_size)
        choice = on.table.place(use, layer.N, k, rows, dtype, on.capability, beside=beside)
        if choice.candidate is not None:
            return fmt, choice.candidate, None
        reason = choice.reasons[-1]
    return Format(), _dense(Format(), layer, rows, on), reason


def _dense(fmt: Format, layer: Linear, rows: int, on: _On) -> Candidate | None:
    dtype = {"fp16": "fp16", "fp32": "fp32"}.get(fmt.weights, on.shapes.dtype)
    return on.table.choose(fmt, layer.N, layer.K, rows, dtype, on.capability).candidate
