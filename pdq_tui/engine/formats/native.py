"""Linear layers over packed weights by our own CPU kernels (``engine.native``)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pdq_tui.engine.formats.linears import PackedLinear, WideLinear


def _ops() -> Any:
    return torch.ops.pdq_native


class NativeDense(PackedLinear):
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().dense(x.contiguous(), self.weight)
        return out


class NativeInt8(PackedLinear):
    #: True: activations rounded to −127…127 with one scale a token; False: to 16-bit whole numbers by blocks.
    tokens = False

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().int8(x.contiguous(), self.weight, self.scales, self.tokens)
        return out


class NativeW8A8(NativeInt8):
    tokens = True


class NativeInt4(PackedLinear):
    #: As in ``NativeInt8``.
    tokens = False

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().int4(x.contiguous(), self.weight, self.scales, self.group, self.tokens)
        return out


class NativeW4A8(NativeInt4):
    tokens = True


class NativeNested16(PackedLinear):
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().nested(x.contiguous(), self.base_weight, self.weight, self.scales)
        return out


class NativeNested16Dequantize(WideLinear):
    def widen(self, out: Tensor) -> None:
        _ops().widen_nested(self.base_weight, self.weight, self.scales, out)


class NativeNested16DequantizeFloat32(NativeNested16Dequantize):
    wide = torch.float32


class NativeInt4Dequantize(WideLinear):
    def widen(self, out: Tensor) -> None:
        _ops().widen_int4(self.weight, self.scales, self.group, out)


class NativeInt4DequantizeFloat32(NativeInt4Dequantize):
    wide = torch.float32


LINEARS: Final[dict[str, type[PackedLinear]]] = {
    "native-dense": NativeDense,
    "native-int8": NativeInt8,
    "native-w8a8": NativeW8A8,
    "native-int4": NativeInt4,
    "native-w4a8": NativeW4A8,
    "native-nested16": NativeNested16,
    "native-nested16-dequantize": NativeNested16Dequantize,
    "native-nested16-dequantize-float32": NativeNested16DequantizeFloat32,
    "native-int4-dequantize": NativeInt4Dequantize,
    "native-int4-dequantize-float32": NativeInt4DequantizeFloat32,
}
