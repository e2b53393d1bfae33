"""FP8 E4M3 (``torch.float8_e4m3fn``: 4 exponent bits, 3 mantissa bits, largest value 448), one scale an output channel, or
one for each group of its columns, as checkpoints with a scale for each block of the matrix have.

Weight-only, widened one layer at a time, on any device; with activations rounded to the same format, one scale a token,
where tensor cores multiply it (``torch._scaled_mm``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdq_tui.engine.cancel import check
from pdq_tui.engine.formats.linears import PackedLinear
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.slices import row_slices, wide_rows

E4M3: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
#: The bits of an E4M3 number, moved to the exponent and mantissa of a float16, are that number divided by this.
BIAS: Final = 256.0
#: All bits of a float16 but the one that a copied sign falls on beside its own place.
_SIGN_ONCE: Final = ~0x4000


@torch.no_grad()
def pack_fp8(spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    """weight float8_e4m3fn [N, K]; scales float32 [N], with groups [N, K / group]: w = q · scale."""
    groups = spec.k // spec.fmt.group_size if spec.fmt.group_size else 1
    weight = torch.empty((spec.N, spec.k), dtype=E4M3, device=device)
    scales = torch.empty((spec.N, groups), dtype=torch.float32, device=device)
    for rows in row_slices(spec.N, spec.k):
        check(cancelled)
        wide = wide_rows(spec, master, rows, device)
        q, scale = quantize_rows(wide.reshape(-1, spec.k // groups))
        weight[rows], scales[rows] = q.view(wide.shape), scale.view(-1, groups)
    return Packed(spec, weight, scales if spec.fmt.group_size else scales[:, 0].contiguous())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, K] → E4M3 [rows, K], float32 scales [rows, 1], by the largest magnitude of each row."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True).div_(LARGEST).clamp_min_(1e-30)
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(E4M3), scale


class _Fp8Wide(PackedLinear):
    uses_scratch = True
    wide: torch.dtype | None = None
    wide_scales: Tensor

    def prepare(self) -> None:
        # Also where it saves no time: in float16 a sum of products with values up to 448 may overflow.
        self.shifted = not self.weight.is_cuda or self.spec.dtype == torch.float16
        self.register_buffer("wide_scales", self.scales * (BIAS if self.shifted else 1.0), persistent=False)
        self.grouped = self.wide_scales.dim() == 2

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in the scratch buffer, without its scales, divided by BIAS where ``shifted``: torch's own conversion takes a
        CPU twenty times as long. A NaN is lost so; its channel's scale is NaN already."""
        shape = tuple(self.weight.shape)
        out = self.scratch.take(shape, dtype, self.weight.device)
        if not self.shifted:
            return out.copy_(self.weight)
        bits = self.scratch.take(shape, torch.int16, self.weight.device)
        bits.copy_(self.weight.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(_SIGN_ONCE)
        return out.copy_(bits.view(torch.float16))

    def product(self, x: Tensor) -> Tensor:
        dtype = self.wide or x.dtype
        weight = self.dense(dtype)
        if not self.grouped:
            return F.linear(x.to(dtype), weight).mul_(self.wide_scales).to(x.dtype)
        # Of a group the scale cannot wait for the sum; float32 scales, the weight rounded once.
        groups = self.wide_scales.shape[1]
        weight.view(weight.shape[0], groups, -1).mul_(self.wide_scales[:, :, None])
        return F.linear(x.to(dtype), weight).to(x.dtype)


class Fp8Dequantize(_Fp8Wide):
    pass


class Fp8DequantizeFloat32(_Fp8Wide):
    wide = torch.float32


class W8A8Fp8(PackedLinear):
    """Row-wise scales on both sides; the product is summed in float32 and returned in the model's dtype."""

    def product(self, x: Tensor) -> Tensor:
        q, scale = quantize_rows(x)
        out: Tensor = torch.ops.aten._scaled_mm(
            q, self.weight.t(), scale, self.scales[None, :], None, None, x.dtype
        )
        return out


LINEARS: Final[dict[str, type[PackedLinear]]] = {
    "fp8-dequantize": Fp8Dequantize,
    "fp8-dequantize-float32": Fp8DequantizeFloat32,
    "w8a8-fp8-scaled_mm": W8A8Fp8,
}
