"""A weight in slices of rows, so that packing it can be cancelled and needs little scratch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pdq_tui.engine.formats.packed import Spec

#: Elements quantized between two looks at the cancel flag; rows are taken in multiples of the packed row block.
SLICE_ELEMENTS = 1 << 20
ROW_BLOCK = 64
SMALL_ELEMENTS = 1 << 16


def row_slices(N: int, k: int) -> Iterator[slice]:
    step = max(ROW_BLOCK, SLICE_ELEMENTS // max(k, 1) // ROW_BLOCK * ROW_BLOCK)
    for begin in range(0, N, step):
        yield slice(begin, min(N, begin + step))


def small_slices(N: int, k: int) -> Iterator[slice]:
    """For widening beside a dense matrix: float32 copies of a slice stay in a core's second cache."""
    step = max(1, SMALL_ELEMENTS // max(k, 1))
    for begin in range(0, N, step):
        yield slice(begin, min(N, begin + step))


def wide_rows(spec: Spec, master: Tensor, rows: slice, device: torch.device) -> Tensor:
    """A new float32 [rows, k] on the device, columns of zeros added where the layer is padded."""
    w = master[rows].to(device=device, dtype=torch.float32, copy=True)
    return F.pad(w, (0, spec.k - spec.K)) if spec.k != spec.K else w
