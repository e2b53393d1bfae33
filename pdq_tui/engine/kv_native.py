"""The KV cache by our own CPU kernels (``engine.native``): which formats they take, and the calls.

They read each row once for all of its query heads and never widen more than a register of it, so that a step costs what
the stored bytes cost; torch's own operators would pass over every block several times.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pdq_tui.engine import native
from pdq_tui.engine.kv_formats import Codec, Int4, Plain

#: Largest error of the check, relative: one rounding of the result to bf16, or sums in another order.
_TOLERANCE: Final = {torch.bfloat16: 8e-3, torch.float32: 1e-4}
#: By format and the model's dtype: what was wrong with ours in a child process, None where it came out right.
_tried: Final[dict[tuple[Codec, torch.dtype], str | None]] = {}


def why_not(made: Codec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why torch's operators serve this format instead; None where ours do. ``dtype``: the model's."""
    reason = unfit(made, dtype, device)
    if reason is not None:
        return reason
    if (made, dtype) not in _tried:
        return "our own kernel was not tried here"
    wrong = _tried[made, dtype]
    return None if wrong is None else f"our own kernel does not work here: {wrong}"


def unfit(made: Codec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why ours cannot take this format; None where they may be tried."""
    if device.type != "cpu":
        return "no kernel of our own for this device"
    if native.loaded() is None:
        return native.why_not() or "our own kernels are switched off"
    if dtype not in _TOLERANCE:
        return "our own kernel takes bf16 and float32"
    if made.head_dim % 8:
        return f"heads of {made.head_dim} are no multiple of 8"
    if isinstance(made, Int4) and (made.head_dim % 16 or made.group % 8):
        return f"heads of {made.head_dim} in groups of {made.group} are no multiples of 16 and 8"
    return None


def remember(made: Codec, dtype: torch.dtype, wrong: str | None) -> None:
    """What a child found out by ``wrong_with``, or that it died."""
    _tried[made, dtype] = wrong


def wrong_with(made: Codec, dtype: torch.dtype) -> str | None:
    """A small example, written and read by ours, against float64 over what the format says was stored: None, or what
    is wrong."""
    generator = torch.Generator().manual_seed(7)
    B, heads, group, n, D = 2, 2, 3, 70, made.head_dim
    keys, values = torch.randn(2, B, heads, n, D, generator=generator).to(dtype)
    query = torch.randn(B, heads * group, D, generator=generator).to(dtype)
    parts = tuple(torch.empty((2, B, heads, n, width), dtype=kind) for width, kind in made.widths)
    if isinstance(made, Plain):
        parts[0][0], parts[0][1] = keys, values
    else:
        put(keys, values, parts, 0)
    whole = made.decode(parts, torch.float32).double()
    scores = query.double().view(B, heads, group, D) @ whole[0].transpose(2, 3) * D**-0.5
    wanted = scores.softmax(-1) @ whole[1]
    got = attend(query, parts, n, None, D**-0.5, None).double().view_as(wanted)
    error = (got - wanted).norm() / wanted.norm()
    stored = (whole - torch.stack((keys, values)).double()).norm() / whole.norm()
    if not error <= _TOLERANCE[dtype]:  # NaN compares false
        return f"its attention is off by {float(error):.2g}"
    if not stored < 0.2:  # 4 bits over a whole row are within 0.15
        return f"what it stores is off by {float(stored):.2g}"
    return None


def _ops() -> Any:
    return torch.ops.pdq_native


def filled_up(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales, minima; what a format does not have is the data once more, and is not looked at."""
    return parts[0], parts[1] if len(parts) > 1 else parts[0], parts[2] if len(parts) > 2 else parts[0]


def attend(
    query: Tensor,
    parts: tuple[Tensor, ...],
    count: int,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """query [B, H, D] float32 or bf16 over the first ``count`` slots of a layer's parts [2, B, kv_heads, slots, width],
    mask float32 [B, count] or None → [B, H, D]."""
    empty = parts[0].new_empty(0) if mask is None else mask
    out: Tensor = _ops().attend(query.contiguous(), *filled_up(parts), count, empty, scale, softcap or 0.0)
    return out


def put(keys: Tensor, values: Tensor, parts: tuple[Tensor, ...], slot: int) -> None:
    """keys and values [B, kv_heads, n, D], float32 or bf16, into the slots of a layer's parts from ``slot`` on."""
    if keys.dtype != values.dtype:
        keys, values = keys.float(), values.float()
    if keys.stride(3) != 1 or values.stride(3) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    _ops().put(keys, values, *filled_up(parts), slot)
