"""Back from packed 4-bit weights to a dense matrix, for stages in which a dense product is the faster kernel.

The CPU layout of torch (``_convert_weight_to_int4pack_for_cpu``) depends on the instruction set that torch was
dispatched to: rows in blocks of 64 (AVX-512) or 32 (AVX2) whose first half lies in the low nibbles and second half in
the high ones, column by column; a last, smaller block (and every block elsewhere) holds neighbouring rows in a byte.
Which one it is, is found out once by packing a known pattern.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pdq_tui.errors import UnfitError


class Scratch:
    """One growing buffer a dtype, for weights widened one layer at a time. Not for use from two threads."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, valid until the next ``take`` of the same dtype."""
        wanted = 1
        for size in shape:
            wanted *= size
        buffer = self._buffers.get((dtype, device))
        if buffer is None or buffer.numel() < wanted:
            buffer = torch.empty(wanted, dtype=dtype, device=device)
            self._buffers[dtype, device] = buffer
        return buffer[:wanted].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()


@lru_cache(maxsize=1)
def cpu_block() -> int:
    """Rows of a full block in this torch's CPU layout; 0 where all blocks hold neighbouring rows in a byte.
    Raises UnfitError for a layout that is not known here."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (144, 32), dtype=torch.int32, generator=generator)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    for block in (64, 32, 0):
        back = torch.empty((32, 144))
        _nibbles_cpu(packed, back, block)
        if torch.equal(back.t().to(torch.int32), q):
            return block
    raise UnfitError("this torch packs 4-bit weights in a layout that is not known here")


def _nibbles_cpu(packed: Tensor, out: Tensor, block: int) -> None:
    """uint8 [N, K / 2] → ``out`` [K, N] (any dtype, may be a view): the values 0…15, transposed."""
    N, K = packed.shape[0], packed.shape[1] * 2
    flat = packed.reshape(-1)
    full = N // block * block if block else 0
    if full:
        half = block // 2
        blocks = flat[: full * K // 2].view(full // block, K, half)
        target = out[:, :full].view(K, full // block, 2, half).permute(2, 1, 0, 3)
        target[0].copy_(blocks & 15)
        target[1].copy_(blocks >> 4)
    if full < N:
        # the tail is one block of its own; without blocked layout the whole matrix is cut in blocks of 32
        size = 32 if not block else N - full
        for begin in range(full, N, size):
            rows = min(size, N - begin)
            part = flat[begin * K // 2 : (begin + rows) * K // 2].view(K, rows // 2)
            out[:, begin : begin + rows : 2].copy_(part & 15)
            out[:, begin + 1 : begin + rows : 2].copy_(part >> 4)


def int4_cpu_transposed(packed: Tensor, scales: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Packed uint8 [N, K / 2] and scales [K / group, N, 2] → dense [K, N] in ``dtype``, in the scratch buffer."""
    N, K = packed.shape[0], packed.shape[1] * 2
    dense = scratch.take((K, N), dtype, packed.device)
    _nibbles_cpu(packed, dense, cpu_block())
    return _scaled(dense, scales)


def int4_plain_transposed(packed: Tensor, scales: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Plain uint8 [N, K / 2], the even column in the low nibble → dense [K, N] in ``dtype``, in the scratch buffer."""
    N, K = packed.shape[0], packed.shape[1] * 2
    dense = scratch.take((K, N), dtype, packed.device)
    dense[::2].copy_((packed & 15).t())
    dense[1::2].copy_((packed >> 4).t())
    return _scaled(dense, scales)


def _scaled(dense: Tensor, scales: Tensor) -> Tensor:
    """q [K, N] → (q − 8) · scale + zero, in place, a group of columns at a time."""
    K, N = dense.shape
    groups = scales.shape[0]
    grouped = dense.view(groups, K // groups, N)
    for group in range(groups):
        wide = scales[group].float()
        scale = wide[:, 0]
        origin = torch.sub(wide[:, 1], scale, alpha=8)
        # The arithmetic stays in float32: origin alone, rounded to bf16, would cost half a step of the grid.
        grouped[group] = torch.addcmul(origin, grouped[group].float(), scale)
    return dense
