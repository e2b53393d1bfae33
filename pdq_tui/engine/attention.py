"""Attention of the two stages, registered with transformers: the view's config names it, nothing looks at the stage.

Prefill: causal over the whole prompt, by our own kernel where it is, else SDPA, right with left padding. Decode: one query row a sequence, SDPA over the
filled part of the cache, query heads grouped by reshape. Masks are made once a request (4-D, passed through by
transformers as they are), None where nothing is padded.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from pdq_tui.engine import prefill_native
from pdq_tui.errors import UnfitError

PREFILL: Final = "pdq_prefill"
PREFILL_FLOAT32: Final = "pdq_prefill_float32"
DECODE: Final = "pdq_decode"
#: Attention arguments that change the result and that are not implemented here.
_UNSUPPORTED: Final = ("softcap", "s_aux", "head_mask", "sinks")


def _refuse(kwargs: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnfitError(
                f"this model's attention uses {name}, which this engine does not implement",
                "load it with --attention sdpa",
            )


def prefill_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, q, D], key and value [B, Hkv, q, D], mask bool [B, 1, q, q] or None → [B, q, H, D]."""
    _refuse(kwargs)
    if attention_mask is None and prefill_native.possible(query, key, value):
        return prefill_native.causal(query, key, value, scaling, None), None
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2), None


def prefill_attention_float32(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same in float32 inside, for CPUs that multiply bf16 in software only."""
    out, _ = prefill_attention(
        module, query.float(), key.float(), value.float(), attention_mask, scaling, dropout, **kwargs
    )
    return out.to(query.dtype), None


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, 1, D], key and value [B, Hkv, T, D], additive mask [B, 1, 1, T] or None → [B, 1, H, D]."""
    _refuse(kwargs)
    B, H, _, D = query.shape
    kv_heads = key.shape[1]
    # The query heads of one KV head stand as the rows of one query: keys and values are read once for all of them, and
    # nothing is repeated. Two matmuls are up to four times slower where bf16 is multiplied in software.
    grouped = query.reshape(B, kv_heads, H // kv_heads, D)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(B, 1, H, D), None


def register() -> None:
    """Make the three known to transformers. Their masks are given by the engine, so no mask function goes with them:
    transformers passes a 4-D mask through and makes none where there is none."""
    AttentionInterface.register(PREFILL, prefill_attention)
    AttentionInterface.register(PREFILL_FLOAT32, prefill_attention_float32)
    AttentionInterface.register(DECODE, decode_attention)


def prefill_mask(pad: Tensor, P: int) -> Tensor:
    """bool [B, 1, P, P], True where a query may look: causal, not at padding. A padded query sees itself alone, so that
    its softmax is defined; nothing reads its result."""
    position = torch.arange(P, device=pad.device)
    causal = position[None, :] <= position[:, None]
    real = position[None, :] >= pad[:, None]
    itself = torch.eye(P, dtype=torch.bool, device=pad.device)
    return ((causal[None] & real[:, None, :]) | itself[None])[:, None]


def decode_mask(pad: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """Additive [B, 1, 1, capacity]: -inf at padding. A step reads its first T columns."""
    position = torch.arange(capacity, device=pad.device)
    mask = torch.zeros((pad.shape[0], capacity), dtype=dtype, device=pad.device)
    mask.masked_fill_(position[None, :] < pad[:, None], float("-inf"))
    return mask[:, None, None, :]


def prefill_positions(pad: Tensor, P: int) -> Tensor:
    """int64 [B, P]: 0 at each row's first real token; padding reads 0."""
    return (torch.arange(P, device=pad.device)[None, :] - pad[:, None]).clamp_min_(0)
