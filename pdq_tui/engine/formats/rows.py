"""The 4-bit layout that our own CPU kernels read: row by row, in blocks of 64 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from pdq_tui.engine.native import BLOCK


def nibbles_by_rows(q: Tensor) -> Tensor:
    """uint8 [rows, k] of 0…15 → [rows, k / 2] bytes, in blocks of 64 columns: the 16-bit word j of a block's sixteen
    holds columns j, 16 + j, 32 + j and 48 + j, from the lowest nibble on. k is a multiple of 64."""
    rows, k = q.shape
    planes = q.view(rows, k // BLOCK, 4, BLOCK // 4).to(torch.int32)
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return torch.stack((words & 0xFF, words >> 8), dim=3).to(torch.uint8).view(rows, k // 2)
