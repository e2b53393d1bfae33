"""The coverage table: what the engine really made of each arm's policy."""

from __future__ import annotations

from collections.abc import Iterable

from pdq_tui.core.kv import sliding_words
from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.protocol import ArmReady, Coverage, KvInfo, LeftModule
from pdq_tui.host.view import ArmView
from pdq_tui.tui.lines import Line, literal


def coverage_lines(arms: Iterable[ArmView], *, readonly: bool = False) -> list[Line]:
    """Lines for a LineList; glyphs are the caller's to translate. No arm ready: a sentence instead of a table.
    ``readonly``: no key applies anything."""
    lines: list[Line] = []
    for arm in arms:
        lines += _arm_lines(arm)
    how = "" if readonly else ": a or b applies the one above"
    return lines or [Line.of(f"no arm has a policy yet{how}", "dim")]


def _arm_lines(arm: ArmView) -> list[Line]:
    lines = []
    name = literal(arm.ready.policy.name) if arm.ready else "nothing applied yet"
    head = f"arm {arm.arm}  {name}"
    if arm.pending and arm.wanted is not None:
        head += f"   → {literal(arm.wanted.name)} is being made"
    lines.append(Line.of(head, "head"))
    if arm.refused:
        lines.append(Line.of(f"  ✗ refused, the arm keeps what it had: {literal(arm.refused)}", "bad"))
    if arm.ready is not None:
        lines += _ready_lines(arm.ready)
    return lines


def _ready_lines(ready: ArmReady) -> list[Line]:
    weights = ready.weights
    extra = (
        f"+{format_bytes(weights.extra_bytes)} for the second copy"
        if weights.extra_bytes
        else "no extra bytes"
    )
    if weights.scratch_bytes:
        extra += f", {format_bytes(weights.scratch_bytes)} to dequantize one layer at a time"
    lines = [
        Line.of(
            f"  weights {format_bytes(weights.stored_bytes)} stored, {extra}; "
            f"{format_bytes(weights.kept_bytes)} kept in the model's dtype"
        ),
        *(
            Line.of(f"    on {literal(device)}: {format_bytes(held)}")
            for device, held in weights.by_device.items()
        ),
        Line.of(_kv_line(ready.kv)),
    ]
    for stage, coverage in ready.coverage.items():
        lines.append(Line.of(_stage_line(stage, coverage)))
        lines.append(Line.of(_layers_line(coverage)))
        lines += [_left_line(*group) for group in _grouped(coverage.left)]
    for fallback in ready.fallbacks:
        count = f" ×{fallback.modules}" if fallback.modules > 1 else ""
        lines.append(
            Line.of(
                f"  ! fallback {literal(fallback.stage)}: {literal(fallback.module)}{count} wanted "
                f"{literal(fallback.wanted)}, uses {literal(fallback.used)}: {literal(fallback.reason)}",
                "warn",
            )
        )
    lines += [Line.of(f"  ! {literal(text)}", "warn") for text in ready.warnings]
    return lines


def _kv_line(kv: KvInfo) -> str:
    """``KV cache int8, 11880 B a token, 30 of 30 layers quantized; prefill reads bf16, 23040 B, converted at handoff``"""
    line = f"  KV cache {literal(kv.dtype)}, {kv.bytes_per_token} B a token"
    if kv.quantized_layers:
        line += f", {kv.quantized_layers} of {kv.layers} layers quantized"
    if kv.prefill_dtype not in (None, kv.dtype):
        line += f"; prefill reads {literal(kv.prefill_dtype or '')}, {kv.prefill_bytes_per_token} B"
    if kv.convert != "never":
        line += f"; converted at {literal(kv.convert)}"
    if kv.kernel is not None:
        line += f"; read by {literal(kv.kernel)}" + (
            f" ({literal(kv.kernel_reason)})" if kv.kernel_reason else ""
        )
    sliding = sliding_words(kv.sliding_layers, kv.layers, kv.window)
    return line + (f"; {sliding}" if sliding else "")


def _stage_line(stage: str, c: Coverage) -> str:
    share = f" ({100 * c.converted_parameters / c.total_parameters:.1f} %)" if c.total_parameters else ""
    formats = ", ".join(f"{literal(name)} {_millions(count)}" for name, count in c.formats.items()) or "-"
    return (
        f"  {literal(stage):<8}{_millions(c.converted_parameters)} of {_millions(c.total_parameters)} parameters{share}"
        f"  {format_bytes(c.converted_bytes)}  {formats}"
        + (f"  from {literal(c.source)}" if c.source else "")
    )


def _layers_line(c: Coverage) -> str:
    kernels = ", ".join(f"{literal(name)} ×{count}" for name, count in c.kernels.items()) or "-"
    why = f": {literal(c.runner_reason)}" if c.runner_reason else ""
    calls = {"eager": "eager", "native": "by our own calls"}
    how = calls.get(c.runner) or f"compiled by {literal(c.runner)}"
    rows = f"  prompts in pieces of {c.rows} rows" if c.rows else ""
    return f"          kernels {kernels}  decoder layers {how}{why}{rows}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 100_000 else str(count)


def _grouped(left: Iterable[LeftModule]) -> list[tuple[str, list[LeftModule]]]:
    by_reason: dict[str, list[LeftModule]] = {}
    for module in left:
        by_reason.setdefault(module.reason, []).append(module)
    return list(by_reason.items())


def _left_line(reason: str, modules: list[LeftModule]) -> Line:
    names = ", ".join(literal(m.module) for m in modules[:2]) + (
        f" and {len(modules) - 2} more" if len(modules) > 2 else ""
    )
    size = format_bytes(sum(m.bytes for m in modules))
    return Line.of(f"          left {names}  {size}: {literal(reason)}", "dim")
