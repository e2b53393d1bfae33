"""Causal attention over a prompt by our own kernel, where the library holds it: AVX512-BF16 (``native/prefill.h``)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

#: Positions that a query sees where no window limits them.
EVERYTHING: Final = 1 << 31


def _op() -> Any:
    return getattr(torch.ops.pdq_native, "causal", None)


def possible(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Is this prompt one that the kernel takes: bf16 on a CPU, heads of a multiple of 32, no query without its key?"""
    return (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.device.type == "cpu"
        and query.shape[3] == value.shape[3]
        and query.shape[3] % 32 == 0
        and query.shape[2] <= key.shape[2]
        and all(t.stride(3) == 1 for t in (query, key, value))
        and _op() is not None
    )


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """query [B, H, P, D] of the last P positions, key and value [B, Hkv, T, D] → [B, P, H, D], all bf16; scores and sums in float32."""
    D = query.shape[3]
    scale = D**-0.5 if scaling is None else scaling
    out: Tensor = _op()(query, key, value, scale, EVERYTHING if window is None else window)
    return out
