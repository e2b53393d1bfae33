"""Quantizing and packing one weight [N, K].

int8: symmetric, one scale an output channel, −127…127. int4: asymmetric, one scale and zero point for each group of
columns, 0…15. Rounding is to nearest. Scales are rounded to the model's dtype *before* the weights are rounded to the
grid, so that what is stored is the best on the grid that is really used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pdq_tui.engine.cancel import check
from pdq_tui.engine.formats import bnb, fp8
from pdq_tui.engine.formats.packed import RESIDUAL, Packed, PackedStack, Spec
from pdq_tui.engine.formats.rows import nibbles_by_rows
from pdq_tui.engine.formats.slices import row_slices, wide_rows

Packer = Callable[[Spec, Tensor, torch.device, Callable[[], bool]], Packed]


@torch.no_grad()
def pack(
    spec: Spec,
    master: Tensor,
    device: torch.device,
    cancelled: Callable[[], bool],
    shared: bool = False,
    base: Packed | None = None,
) -> Packed:
    """Pack ``master`` [N, K] (any device) for ``device``. Raises Cancelled; a weight that is not finite stays so in its
    scale, so that it shows in the logits instead of vanishing.

    shared  the master is memory that stays anyway, so a dense weight that is used as it is costs nothing.
    base    packed int8 weights, where the spec builds upon them.
    """
    if spec.fmt.dense:
        return _pack_dense(spec, master, device, cancelled, shared)
    if base is not None:
        return _pack_residual(spec, master, device, cancelled, base)
    return PACKERS[spec.fmt.weights](spec, master, device, cancelled)


def pack_all(spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    """``pack``, with whatever ``spec`` builds upon packed before it."""
    below: Packed | None = None
    for part in spec.parts:
        below = pack(part, master, device, cancelled, base=below)
    assert below is not None
    return below


def pack_stack(
    spec: Spec,
    master: Callable[[int], Tensor],
    device: torch.device,
    cancelled: Callable[[], bool],
    shared: bool = False,
    base: PackedStack | None = None,
) -> PackedStack:
    """Pack ``spec.stack`` matrices; ``master(i)`` gives [N, K] of one when it is its turn. Raises Cancelled."""
    below = base.parts if base is not None else (None,) * spec.stack
    parts = (pack(spec.one, master(i), device, cancelled, shared, below[i]) for i in range(spec.stack))
    return PackedStack(spec, tuple(parts))


def _pack_dense(
    spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool], shared: bool
) -> Packed:
    check(cancelled)
    if master.device == device and master.dtype == spec.stored_dtype and master.is_contiguous():
        return Packed(spec, master, ours=not shared)
    out = torch.empty((spec.N, spec.K), dtype=spec.stored_dtype, device=device)
    for rows in row_slices(spec.N, spec.K):
        check(cancelled)
        out[rows].copy_(master[rows])
    return Packed(spec, out)


def _pack_int8(spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    q = torch.empty((spec.N, spec.k), dtype=torch.int8, device=device)
    scales = torch.empty(spec.N, dtype=spec.dtype, device=device)
    for rows in row_slices(spec.N, spec.k):
        check(cancelled)
        w = wide_rows(spec, master, rows, device)
        scale = w.abs().amax(1).div_(127).clamp_min_(smallest(spec.dtype)).to(spec.dtype)
        scales[rows] = scale
        q[rows] = w.div_(scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Packed(spec, q, scales)


def _pack_residual(
    spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool], base: Packed
) -> Packed:
    """What rounding to int8 left, in 256ths of its step: −128…127, the upper end clamped."""
    assert base.scales is not None
    residual = torch.empty((spec.N, spec.k), dtype=torch.int8, device=device)
    for rows in row_slices(spec.N, spec.k):
        check(cancelled)
        w = wide_rows(spec, master, rows, device)
        w.div_(base.scales[rows].float()[:, None]).sub_(base.weight[rows]).mul_(RESIDUAL)
        w = torch.nan_to_num(w.round_(), nan=0.0)  # its scale is NaN already, and stays so
        residual[rows] = w.clamp_(-128, 127).to(torch.int8)
    return Packed(spec, residual, base=base)


def _pack_int4(spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    group, k, N = spec.fmt.group_size, spec.k, spec.N
    parts: list[Tensor] = []
    scales = torch.empty((k // group, N, 2), dtype=spec.dtype, device=device)
    for rows in row_slices(N, k):
        check(cancelled)
        w = wide_rows(spec, master, rows, device).view(-1, k // group, group)
        low, high = torch.aminmax(w, dim=2)
        scale = (high - low).div_(15).clamp_min_(smallest(spec.dtype)).to(spec.dtype)
        zero = torch.add(low, scale.float(), alpha=8).to(spec.dtype)
        scales[:, rows, 0] = scale.t()
        scales[:, rows, 1] = zero.t()
        origin = zero.float().sub_(scale.float(), alpha=8)
        q = w.sub_(origin[:, :, None]).div_(scale.float()[:, :, None]).round_().clamp_(0, 15)
        parts.append(nibbles(spec.layout, q.view(-1, k)))
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    if spec.layout == "int4-rows":
        scales = scales.transpose(0, 1).contiguous()
    return Packed(spec, packed, scales)


def nibbles(layout: str, q: Tensor) -> Tensor:
    """float [rows, k] of 0…15 → packed bytes. Row blocks are independent in every layout, so slices concatenate."""
    q = torch.nan_to_num(q, nan=8.0)  # its scale and zero are NaN already, and stay so
    if layout == "int4-cpu":
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1)
        return packed
    q8 = q.to(torch.uint8)
    if layout == "int4-rows":
        return nibbles_by_rows(q8)
    if layout == "int4-tinygemm":
        pairs = (q8[:, ::2] << 4) | q8[:, 1::2]
        tiles: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
        return tiles
    return q8[:, ::2] | (q8[:, 1::2] << 4)


def smallest(dtype: torch.dtype) -> float:
    """The least scale: keeps 1 / scale finite in float32 and the scale normal in its dtype."""
    return max(float(torch.finfo(dtype).tiny), 1e-30)


PACKERS: Final[dict[str, Packer]] = {
    "int8": _pack_int8,
    "int4": _pack_int4,
    "nf4": bnb.pack_4bit,
    "fp4": bnb.pack_4bit,
    "llm-int8": bnb.pack_llm_int8,
    "fp8": fp8.pack_fp8,
}
