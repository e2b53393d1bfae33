"""Linear layers over packed weights: one class a kernel, holding references to the packed tensors, never copies.

Every forward takes [..., K] in the model's dtype and returns [..., N] in the same. W8A8 layers quantize the activations
with one scale a token (row), so that no row disturbs another.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdq_tui.engine.formats.packed import RESIDUAL, Packed
from pdq_tui.engine.formats.slices import small_slices
from pdq_tui.engine.formats.unpack import Scratch, int4_cpu_transposed, int4_plain_transposed

#: torch._int_mm on CUDA raises for this many rows or fewer.
INT_MM_CUDA_MIN_ROWS: Final = 17


class PackedLinear(nn.Module):
    """Base: shapes, bias, padding of K. ``product`` is the kernel: [rows, k] → [rows, N]."""

    #: True where the product widens the weights into the scratch tensor that all layers share.
    uses_scratch = False
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    #: The int8 weights under nested ones, [N, k].
    base_weight: Tensor

    def __init__(self, packed: Packed, bias: Tensor | None, scratch: Scratch) -> None:
        super().__init__()
        self.spec = spec = packed.spec
        self.out_features, self.in_features = spec.N, spec.K
        # Buffers, so that whoever looks for a layer's tensors finds them; the same tensors, no copies.
        self.register_buffer("weight", packed.weight.detach(), persistent=False)
        # Dense weights have none; the layer of a dense weight never looks.
        scales = packed.scales
        if packed.base is not None:
            self.register_buffer("base_weight", packed.base.weight.detach(), persistent=False)
            scales = packed.base.scales
        scales = scales if scales is not None else packed.weight.new_empty(0)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.group = spec.fmt.group_size
        self.padding = spec.k - spec.K
        self.scratch = scratch
        self.prepare()

    def prepare(self) -> None:
        """Small derived tensors (a float32 copy of the scales), made once a view."""

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        rows = x.reshape(-1, self.in_features)
        if self.padding:
            rows = F.pad(rows, (0, self.padding))
        out = self.product(rows)
        if self.bias is not None:
            out = out.add_(self.bias)
        return out.view(*shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}"


class DenseLinear(PackedLinear):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype == x.dtype:
            return F.linear(x, weight, self.bias)
        out = F.linear(x.to(weight.dtype), weight).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


class DenseFloat32(PackedLinear):
    """Weights widened to float32 one layer at a time."""

    uses_scratch = True

    def product(self, x: Tensor) -> Tensor:
        wide = self.scratch.take(tuple(self.weight.shape), torch.float32, x.device)
        wide.copy_(self.weight)
        return F.linear(x.float(), wide).to(x.dtype)


class Int8Pack(PackedLinear):
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(x, self.weight, self.scales)
        return out


class WideLinear(PackedLinear):
    """Weights dequantized one layer at a time into the scratch tensor, then a dense product."""

    uses_scratch = True
    #: dtype of the product; None: the model's.
    wide: torch.dtype | None = None

    def widen(self, out: Tensor) -> None:
        """Fill ``out`` [N, k], of the product's dtype, with the weights."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        dtype = self.wide or x.dtype
        out = self.scratch.take((self.out_features, self.spec.k), dtype, x.device)
        self.widen(out)
        return F.linear(x.to(dtype), out).to(x.dtype)


class Nested16Dequantize(WideLinear):
    """w = (int8 byte + residual / 256) · scale, computed in float32, a few rows at a time."""

    def widen(self, out: Tensor) -> None:
        for rows in small_slices(*out.shape):
            w = self.weight[rows].to(torch.float32).div_(RESIDUAL).add_(self.base_weight[rows])
            out[rows] = w.mul_(self.scales[rows, None].float())


class Nested16DequantizeFloat32(Nested16Dequantize):
    wide = torch.float32


class _Int8Wide(PackedLinear):
    uses_scratch = True
    wide: torch.dtype | None = None

    def product(self, x: Tensor) -> Tensor:
        dtype = self.wide or x.dtype
        weight = self.scratch.take(tuple(self.weight.shape), dtype, x.device)
        weight.copy_(self.weight)
        return F.linear(x.to(dtype), weight).mul_(self.scales).to(x.dtype)


class Int8Dequantize(_Int8Wide):
    pass


class Int8DequantizeFloat32(_Int8Wide):
    wide = torch.float32


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, K] → whole numbers −127…127 as float32 [rows, K], float32 scales [rows, 1]."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True).div_(127).clamp_min_(1e-30)
    return (wide / scale).round_(), scale


class W8A8IntMm(PackedLinear):
    wide_scales: Tensor

    def prepare(self) -> None:
        self.register_buffer("wide_scales", self.scales.float(), persistent=False)

    def product(self, x: Tensor) -> Tensor:
        q, scale = quantize_rows(x)
        q8 = q.to(torch.int8)
        rows = q8.shape[0]
        if q8.is_cuda and rows < INT_MM_CUDA_MIN_ROWS:
            q8 = F.pad(q8, (0, 0, 0, INT_MM_CUDA_MIN_ROWS - rows))
        total: Tensor = torch.ops.aten._int_mm(q8, self.weight.t())[:rows]
        return (total * self.wide_scales).mul_(scale).to(x.dtype)


class W8A8Int8Pack(PackedLinear):
    """The weight-only kernel on quantized activations: −127…127 are exact in every dtype it takes."""

    def product(self, x: Tensor) -> Tensor:
        q, scale = quantize_rows(x)
        out: Tensor = torch.ops.aten._weight_int8pack_mm(q.to(x.dtype), self.weight, self.scales)
        return out.mul_(scale)


class W8A8Float32(PackedLinear):
    """The same whole numbers multiplied in float32; their products are exact, sums up to 2**24."""

    uses_scratch = True

    wide_scales: Tensor

    def prepare(self) -> None:
        self.register_buffer("wide_scales", self.scales.float(), persistent=False)

    def product(self, x: Tensor) -> Tensor:
        q, scale = quantize_rows(x)
        weight = self.scratch.take(tuple(self.weight.shape), torch.float32, x.device)
        weight.copy_(self.weight)
        return F.linear(q, weight).mul_(self.wide_scales).mul_(scale).to(x.dtype)


class Int4PackCpu(PackedLinear):
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, self.group, self.scales)
        return out


class _Int4Wide(PackedLinear):
    uses_scratch = True
    wide: torch.dtype | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        return int4_cpu_transposed(self.weight, self.scales, dtype, self.scratch)

    def product(self, x: Tensor) -> Tensor:
        dtype = self.wide or x.dtype
        return torch.mm(x.to(dtype), self.dense(dtype)).to(x.dtype)


class Int4Dequantize(_Int4Wide):
    pass


class Int4DequantizeFloat32(_Int4Wide):
    wide = torch.float32


class Int4Plain(_Int4Wide):
    """Works on every device and shape; float32 where the CPU would multiply bf16 in software."""

    def prepare(self) -> None:
        self.wide = None if self.weight.is_cuda else torch.float32

    def dense(self, dtype: torch.dtype) -> Tensor:
        return int4_plain_transposed(self.weight, self.scales, dtype, self.scratch)


class Int4Tinygemm(PackedLinear):
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm(x, self.weight, self.group, self.scales)
        return out


#: ``op`` of ``core.kernels`` → the class that is it.
LINEARS: Final[dict[str, Any]] = {
    "linear": DenseLinear,
    "linear-float32": DenseFloat32,
    "int8pack": Int8Pack,
    "int8-dequantize": Int8Dequantize,
    "int8-dequantize-float32": Int8DequantizeFloat32,
    "w8a8-int_mm": W8A8IntMm,
    "w8a8-int8pack": W8A8Int8Pack,
    "w8a8-float32": W8A8Float32,
    "int4pack-cpu": Int4PackCpu,
    "int4-dequantize": Int4Dequantize,
    "int4-dequantize-float32": Int4DequantizeFloat32,
    "int4-tinygemm": Int4Tinygemm,
    "int4-plain": Int4Plain,
    "nested16-dequantize": Nested16Dequantize,
    "nested16-dequantize-float32": Nested16DequantizeFloat32,
}
