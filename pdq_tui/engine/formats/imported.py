"""One weight as a quantized checkpoint holds it, moved into the layouts of our kernels without being quantized again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdq_tui.core.formats import GROUP_SIZES, Format
from pdq_tui.engine.cancel import check
from pdq_tui.engine.formats.pack import nibbles
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.slices import row_slices

#: The zero point that a 4-bit weight without one has: 0…15 stand for −8…7.
MIDDLE = 8


@dataclass(frozen=True)
class Imported:
    """The numbers of one linear layer, unpacked and as they are.

    q      int8: int8 [N, K]; fp8: float8_e4m3fn [N, K]; int4: uint8 [N, K] of 0…15.
    scale  [N], with groups [N, K / group]; in the checkpoint's dtype.
    zero   int4: int16 [N, K / group], w = (q − zero) · scale; None: MIDDLE everywhere.
    """

    fmt: Format
    q: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K]; the arithmetic is float32, rounded once."""
        out = torch.empty(self.q.shape, dtype=dtype)
        N, K = self.q.shape
        groups = self.fmt.group_size or K
        for rows in row_slices(N, K):
            wide = self.q[rows].float().view(-1, K // groups, groups)
            if self.fmt.weights == "int4":
                wide -= MIDDLE if self.zero is None else self.zero[rows].float()[:, :, None]
            out[rows] = wide.mul_(self.scale[rows].float().view(-1, K // groups, 1)).view(-1, K)
        return out


def natural(weights: str, columns: int) -> Format | None:
    """The format that holds ``columns`` of K for each scale: longer groups than ours are cut into several with one and
    the same scale. None where no legal group divides them."""
    group = next((g for g in sorted(GROUP_SIZES, reverse=True) if columns % g == 0), None)
    return None if group is None else Format(weights, group_size=group)


def holds(have: Format, wanted: Format) -> bool:
    """True where weights in ``have`` are also weights in ``wanted``, with the same numbers."""
    if have.weights != wanted.weights:
        return False
    return not have.group_size or (bool(wanted.group_size) and have.group_size % wanted.group_size == 0)


@torch.no_grad()
def repack(spec: Spec, held: Imported, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    """The same numbers in ``spec.layout``; ``holds(held.fmt, spec.fmt)``. Scales are rounded to the model's dtype, those of
    fp8 are kept in float32; int4: zero = (8 − z) · scale, rounded likewise. Raises Cancelled."""
    if spec.fmt.weights == "int4":
        return _repack_int4(spec, held, device, cancelled)
    check(cancelled)
    scales = held.scale.to(device=device, dtype=torch.float32 if spec.fmt.weights == "fp8" else spec.dtype)
    if spec.fmt.group_size:
        groups = spec.K // spec.fmt.group_size
        scales = scales.view(spec.N, -1)
        scales = scales.repeat_interleave(groups // scales.shape[1], dim=1)
    weight = torch.empty((spec.N, spec.K), dtype=held.q.dtype, device=device)
    for rows in row_slices(spec.N, spec.K):
        check(cancelled)
        weight[rows].copy_(held.q[rows])
    return Packed(spec, weight, scales.contiguous())


def _repack_int4(spec: Spec, held: Imported, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    parts = []
    for rows in row_slices(spec.N, spec.K):
        check(cancelled)
        parts.append(nibbles(spec.layout, held.q[rows].to(device)))
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    scale = held.scale.to(device=device, dtype=spec.dtype)
    offset = torch.zeros_like(scale)
    if held.zero is not None:
        offset = torch.sub(MIDDLE, held.zero.to(device).float()).mul_(scale.float()).to(spec.dtype)
    scales = torch.stack((scale, offset), dim=2)
    scales = scales.repeat_interleave(held.fmt.group_size // spec.fmt.group_size, dim=1)
    if spec.layout != "int4-rows":
        scales = scales.transpose(0, 1)
    return Packed(spec, packed, scales.contiguous())
