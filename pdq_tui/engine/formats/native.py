"""Linear layers over packed weights by our own CPU kernels (``engine.native``), and the 4-bit layout that they read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pdq_tui.engine.formats.linears import PackedLinear
from pdq_tui.engine.native import BLOCK


def nibbles_by_rows(q: Tensor) -> Tensor:
    """uint8 [rows, k] of 0…15 → [rows, k / 2] bytes, in blocks of 64 columns: the 16-bit word j of a block's sixteen
    holds columns j, 16 + j, 32 + j and 48 + j, from the lowest nibble on. k is a multiple of 64."""
    rows, k = q.shape
    planes = q.view(rows, k // BLOCK, 4, BLOCK // 4).to(torch.int32)
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return torch.stack((words & 0xFF, words >> 8), dim=3).to(torch.uint8).view(rows, k // 2)


def columns_of_rows(packed: Tensor) -> Tensor:
    """The inverse: bytes [rows, k / 2] → uint8 [rows, k]."""
    rows, half = packed.shape
    pairs = packed.view(torch.uint8).view(rows, half * 2 // BLOCK, BLOCK // 4, 2).to(torch.int32)
    words = pairs[..., 0] | pairs[..., 1] << 8
    planes = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], dim=2)
    return planes.to(torch.uint8).view(rows, half * 2)


def _ops() -> Any:
    return torch.ops.pdq_native


class NativeDense(PackedLinear):
    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().dense(x, self.weight)
        return out


class NativeInt8(PackedLinear):
    #: True: activations rounded to −127…127 with one scale a token; False: to 16-bit whole numbers by blocks.
    tokens = False

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().int8(x, self.weight, self.scales, self.tokens)
        return out


class NativeW8A8(NativeInt8):
    tokens = True


class NativeInt4(PackedLinear):
    tokens = False

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = _ops().int4(x, self.weight, self.scales, self.group, self.tokens)
        return out


class NativeW4A8(NativeInt4):
    tokens = True


#: ``op`` of ``core.kernels`` → the class that is it.
NATIVE: Final[dict[str, Any]] = {
    "native-dense": NativeDense,
    "native-int8": NativeInt8,
    "native-w8a8": NativeW8A8,
    "native-int4": NativeInt4,
    "native-w4a8": NativeW4A8,
}
