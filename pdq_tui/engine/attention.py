"""Attention of the two stages, registered with transformers: the view's config names it, nothing looks at the stage.

Prefill: causal over the whole prompt, right with left padding, by our own kernel where it is, else SDPA. Decode: one
query row a sequence, SDPA over the filled part of the cache, query heads grouped by reshape. Layers that slide read their
window only; layers that cap their scores (Gemma 2) are multiplied out, since no fused kernel does it. Masks are made once
a request (4-D, passed through by transformers as they are), None where nothing is padded.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from pdq_tui.engine import kv_attention, prefill_native
from pdq_tui.engine.kv import windows_of
from pdq_tui.engine.kv_store import Filled
from pdq_tui.errors import UnfitError

PREFILL: Final = "pdq_prefill"
PREFILL_FLOAT32: Final = "pdq_prefill_float32"
DECODE: Final = "pdq_decode"
#: Attention arguments that change the result and that are not implemented here.
UNSUPPORTED: Final = ("s_aux", "head_mask", "sinks")
#: Queries that are masked, or whose scores are multiplied out, at once.
BLOCK: Final = 512


def _refuse(kwargs: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnfitError(
                f"this model's attention uses {name}, which this engine does not implement",
                "load it with --attention eager",
            )


def _same_window(module: nn.Module, passed: int | None) -> None:
    """A layer that slides in its config must say so when it calls: without a mask nothing else would tell."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or not isinstance(index, int):
        return
    windows = windows_of(config)
    if index < len(windows) and windows[index] != passed:
        raise UnfitError(
            f"layer {index} of this model slides over {windows[index]} positions by its config and over {passed} by its"
            " code",
            "load it with --attention eager",
        )


def prefill_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, q, D], key and value [B, Hkv, T, D], mask bool [B, 1, q, at least T] or None → [B, q, H, D]. The queries
    are the last q of T positions (T > q: a prompt in pieces); of a mask the last T columns are theirs.

    sliding_window  a query sees that many positions, itself among them; softcap c: scores become c · tanh(score / c).
    """
    _refuse(kwargs)
    _same_window(module, sliding_window)
    q, T = query.shape[2], key.shape[2]
    if attention_mask is not None:
        attention_mask = attention_mask[..., attention_mask.shape[-1] - T :]
    if attention_mask is None and softcap is None and prefill_native.possible(query, key, value):
        return prefill_native.causal(query, key, value, scaling, sliding_window), None
    if q == T and softcap is None and (sliding_window is None or sliding_window >= T):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2), None
    out = torch.empty_like(query)
    position = torch.arange(T, device=query.device)
    for begin in range(0, q, BLOCK):
        end = min(q, begin + BLOCK)
        first, last = begin + T - q, end + T - q  # their positions
        low = max(0, first - sliding_window + 1) if sliding_window is not None else 0
        ahead = position[first:last, None] - position[None, low:last]
        seen = ahead >= 0
        if sliding_window is not None:
            seen &= ahead < sliding_window
        seen = seen if attention_mask is None else seen & attention_mask[:, :, begin:end, low:last]
        out[:, :, begin:end] = _attend(
            query[:, :, begin:end], key[:, :, low:last], value[:, :, low:last], seen, scaling, softcap
        )
    return out.transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """query [B, H, q, D], key and value [B, Hkv, T, D], mask bool or additive, broadcast over heads → [B, H, q, D]."""
    B, H, q, D = query.shape
    kv_heads = key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=kv_heads != H
        )
    scale = D**-0.5 if scaling is None else scaling
    grouped = query.reshape(B, kv_heads, -1, D)
    scores = (grouped @ key.transpose(2, 3)).float().mul_(scale).div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(B, H, q, -1)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
    shares = scores.softmax(-1).to(value.dtype).view(B, kv_heads, H // kv_heads * q, -1)
    return (shares @ value).view(B, H, q, D)


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
    key: Tensor | Filled,
    value: Tensor | Filled,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, 1, D], key and value [B, Hkv, T, D], additive mask [B, 1, 1, T] or None → [B, 1, H, D]. A cache in
    another form comes as what is filled of it."""
    _refuse(kwargs)
    return decode_product(query, key, value, attention_mask, scaling, sliding_window, softcap), None


def decode_product(
    query: Tensor,
    key: Tensor | Filled,
    value: Tensor | Filled,
    mask: Tensor | None,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Shapes as in ``decode_attention``; only the last ``window`` positions are read."""
    if isinstance(key, Filled) or isinstance(value, Filled):
        assert isinstance(key, Filled)  # a sliding layer keeps no more than its window
        return kv_attention.attend(query, key, mask, scaling, softcap)
    B, H, _, D = query.shape
    T, kv_heads = key.shape[2], key.shape[1]
    if window is not None and window < T:
        key, value = key[:, :, T - window :], value[:, :, T - window :]
        mask = mask if mask is None else mask[..., T - window :]
    if softcap is not None:
        return _attend(query, key, value, mask, scaling, softcap).view(B, 1, H, D)
    # The query heads of one KV head stand as the rows of one query: keys and values are read once for all of them, and
    # nothing is repeated. Two matmuls are up to four times slower where bf16 is multiplied in software.
    grouped = query.reshape(B, kv_heads, H // kv_heads, D)
    return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling).reshape(
        B, 1, H, D
    )


def register() -> None:
    """Make the three known to transformers. Their masks are given by the engine, so no mask function goes with them:
    transformers passes a 4-D mask through and makes none where there is none."""
    AttentionInterface.register(PREFILL, prefill_attention)
    AttentionInterface.register(PREFILL_FLOAT32, prefill_attention_float32)
    AttentionInterface.register(DECODE, decode_attention)


def prefill_mask(pad: Tensor, P: int, first: int = 0) -> Tensor:
    """bool [B, 1, P - first, P], True where a query, from ``first`` on, may look: causal, not at padding. A padded query
    sees itself alone, so that its softmax is defined; nothing reads its result."""
    position = torch.arange(P, device=pad.device)
    causal = position[None, :] <= position[first:, None]
    real = position[None, :] >= pad[:, None]
    itself = position[None, :] == position[first:, None]
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
