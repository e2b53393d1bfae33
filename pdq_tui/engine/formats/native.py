"""Linear layers over packed weights by our own CPU kernels (``engine.native``)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pdq_tui.engine.formats.linears import PackedLinear


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
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().int4(x.contiguous(), self.weight, self.scales, self.group)
        return out


LINEARS: Final[dict[str, type[PackedLinear]]] = {
    "native-dense": NativeDense,
    "native-int8": NativeInt8,
    "native-w8a8": NativeW8A8,
    "native-int4": NativeInt4,
}
