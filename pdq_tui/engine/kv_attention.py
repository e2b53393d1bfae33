"""Decode attention over a cache that is held in another form: read block by block, dequantized as it is read.

No copy of the cache in the model's dtype exists at any time: of the keys, then of the values, one block at a time.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdq_tui.engine import kv_native
from pdq_tui.engine.kv_store import Filled

#: Bytes of one dequantized block, by kind of device: what a core's own cache holds, or enough work for a launch.
BLOCK_BYTES: Final = {"cpu": 1 << 20, "cuda": 1 << 25}
_LEAST_BLOCK: Final = 16


def block_of(row_bytes: int, device: str) -> int:
    """Positions of one block, where all heads of one position are ``row_bytes`` wide."""
    return max(_LEAST_BLOCK, BLOCK_BYTES.get(device, BLOCK_BYTES["cuda"]) // row_bytes)


def attend(
    query: Tensor, filled: Filled, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """query [B, H, 1, D] over what is filled, additive mask [B, 1, 1, ≥ end] or None → [B, 1, H, D].

    softcap c: scores become c · tanh(score / c).
    """
    B, H, _, D = query.shape
    scale = D**-0.5 if scaling is None else scaling
    if mask is not None:
        mask = filled.by_slot(mask)
    kv_heads = filled.store.parts[0].shape[3]
    # The query heads of one KV head stand as the rows of one query: each block is read once for all of them.
    grouped = query.reshape(B, kv_heads, H // kv_heads, D)
    if filled.store.own_kernel and (softcap is None or filled.channels is None):
        given = query.reshape(B, H, D)
        if filled.channels is not None:
            given = (grouped.float() * filled.channels.spread).reshape(B, H, D)
        columns = None if mask is None else mask.reshape(B, -1).float()
        parts = filled.store.layers[filled.layer]
        out = kv_native.attend(given, parts, filled.count, columns, scale, softcap)
        return out.to(query.dtype).reshape(B, 1, H, D)
    if filled.store.plain and softcap is None:
        keys, values = filled.store.views(filled.layer, filled.count)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).reshape(
            B, 1, H, D
        )
    return _blocks(grouped, filled, mask, scale, softcap).to(query.dtype).reshape(B, 1, H, D)


def _blocks(
    grouped: Tensor, filled: Filled, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """grouped [B, kv_heads, G, D] → the same shape in float32, in which everything is multiplied: a code times its scale
    would be rounded once more in half precision."""
    B, kv_heads, G, D = grouped.shape
    dtype = torch.float32
    query = grouped.to(dtype)
    channels = filled.channels
    spread = query if channels is None else query * channels.spread
    count = filled.count
    step = block_of(B * kv_heads * D * dtype.itemsize, grouped.device.type)
    edges = [(first, min(first + step, count)) for first in range(0, count, step)]
    scores = torch.empty((B, kv_heads, G, count), dtype=dtype, device=grouped.device)
    for first, last in edges:
        scores[..., first:last] = spread @ filled.keys(first, last, dtype).transpose(2, 3)
    scores.mul_(scale)
    if softcap is not None:
        if channels is not None:
            # The channels' mean adds the same to every position: nothing to a softmax, but something to a tanh.
            scores.add_((query * channels.mean).sum(-1, keepdim=True).mul_(scale))
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask)
    shares = scores.softmax(-1)
    out = torch.zeros_like(query)
    for first, last in edges:
        out += shares[..., first:last] @ filled.values(first, last, dtype)
    return out
