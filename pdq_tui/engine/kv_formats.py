"""How rows of keys and values are held: the bytes of each format, and the way there and back.

A row is the keys, or the values, of one head at one position. Encoding computes in float32; scales are rounded to bf16
first and divided by afterwards, so that what is read back is off by no more than half a step of the stored scale.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import torch
from torch import Tensor

from pdq_tui.core.kv import KvPolicy, Stage

FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = 448.0
#: Least spread of a channel of keys, as a share of the median of its head's channels.
LEAST_SPREAD: Final = 0.25


class Codec(Hashable, Protocol):
    """``name``: of ``core.kv.KV_DTYPES``; ``group``: numbers that share a scale; ``widths``: of each part, numbers a row
    and their dtype; the first part is the data."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...

    @property
    def head_dim(self) -> int: ...
    @property
    def widths(self) -> tuple[tuple[int, torch.dtype], ...]: ...

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """[..., D] of any float dtype → the parts, each [..., its width]."""
        ...

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The parts → [..., D] in ``dtype``."""
        ...


@dataclass(frozen=True)
class Plain:
    """The model's dtype: one part, nothing is rounded."""

    name: ClassVar[str] = "bf16"

    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.head_dim

    @property
    def widths(self) -> tuple[tuple[int, torch.dtype], ...]:
        return ((self.head_dim, self.dtype),)

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows,)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)


@dataclass(frozen=True)
class _Byte:
    """A byte a number and a scale a row: the largest number of a row becomes ``most``."""

    name: ClassVar[str]
    codes: ClassVar[torch.dtype]
    most: ClassVar[float]

    head_dim: int

    @property
    def group(self) -> int:
        return self.head_dim

    @property
    def widths(self) -> tuple[tuple[int, torch.dtype], ...]:
        return ((self.head_dim, self.codes), (1, torch.bfloat16))

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        rows = rows.float()
        scale = _scale(rows.abs().amax(-1, keepdim=True), self.most)
        # The scale may have been rounded down: what is above ``most`` then has no code, and in E4M3 would read back as NaN.
        shares = (rows / scale.float()).clamp_(-self.most, self.most)
        return (shares if self.codes.is_floating_point else shares.round_()).to(self.codes), scale

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        return codes.to(dtype).mul_(scale.to(dtype))


class Fp8(_Byte):
    """E4M3."""

    name = "fp8"
    codes = FP8
    most = _FP8_MAX


class Int8(_Byte):
    """Symmetric, −127 to 127."""

    name = "int8"
    codes = torch.int8
    most = 127.0


@dataclass(frozen=True)
class Int4:
    """0 to 15 times a scale, plus a minimum, for each group of ``group`` numbers. Byte j of a row holds number j in its
    low half and number j + D/2 in its high half."""

    name: ClassVar[str] = "int4"

    head_dim: int
    group: int

    @property
    def groups(self) -> int:
        return self.head_dim // self.group

    @property
    def widths(self) -> tuple[tuple[int, torch.dtype], ...]:
        return (
            (self.head_dim // 2, torch.uint8),
            (self.groups, torch.bfloat16),
            (self.groups, torch.bfloat16),
        )

    def encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        grouped = rows.float().reshape(*rows.shape[:-1], self.groups, self.group)
        # 0 lies in the range: the minimum's own rounding stays far below one step then.
        low = grouped.amin(-1, keepdim=True).clamp_(max=0).to(torch.bfloat16)
        scale = _scale(grouped.amax(-1, keepdim=True).clamp_(min=0) - low.float(), 15.0)
        codes = ((grouped - low.float()) / scale.float()).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)
        half = self.head_dim // 2
        packed = codes[..., :half] | codes[..., half:] << 4
        return packed, scale.squeeze(-1), low.squeeze(-1)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        packed, scale, low = parts
        codes = torch.cat((packed & 15, packed >> 4), -1).to(dtype)
        codes = codes.view(*packed.shape[:-1], self.groups, self.group)
        return codes.mul_(scale.to(dtype).unsqueeze(-1)).add_(low.to(dtype).unsqueeze(-1)).flatten(-2)


def _scale(span: Tensor, steps: float) -> Tensor:
    """span / steps in bf16; 1 where a row is all zeros, so that nothing is divided by 0. NaN and inf stay what they are,
    and are seen in the logits."""
    scale = (span / steps).to(torch.bfloat16)
    return scale.masked_fill_(scale == 0, 1.0)


def named(name: str, head_dim: int, group: int, dtype: torch.dtype) -> Codec:
    """A format by its name. ``group``: of int4, 0 for the whole row; ``dtype``: of "bf16", which is the model's own."""
    match name:
        case "fp8":
            return Fp8(head_dim)
        case "int8":
            return Int8(head_dim)
        case "int4":
            return Int4(head_dim, group or head_dim)
        case _:
            return Plain(head_dim, dtype)


def codec(kv: KvPolicy, stage: Stage, head_dim: int, dtype: torch.dtype) -> Codec:
    """What ``stage`` of ``kv`` reads. ``dtype``: the model's. The model was checked to fit (KvGeometry.misfit)."""
    return named(kv.dtype(stage), head_dim, kv.group_size, dtype)


@dataclass(frozen=True)
class Channels:
    """Mean and spread of the channels of keys, each float32 [B, kv_heads, 1, D]: keys are held as (k − mean) / spread."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, keys: Tensor, pad: Tensor | None) -> Channels:
        """keys [B, kv_heads, P, D]; ``pad`` int64 [B], columns at the left of each row that are not looked at."""
        keys = keys.float()
        B, _, P, _ = keys.shape
        if pad is None:
            mean = keys.mean(2, keepdim=True)
            spread = (keys - mean).abs().amax(2, keepdim=True)
        else:
            real = (torch.arange(P, device=keys.device)[None, :] >= pad[:, None])[:, None, :, None]
            mean = keys.masked_fill(~real, 0).sum(2, keepdim=True) / (P - pad).view(B, 1, 1, 1)
            spread = (keys - mean).abs().masked_fill(~real, 0).amax(2, keepdim=True)
        # A few positions may be alike in a channel: a later key would stand out there by so much that the scale of its
        # row left nothing for the other channels.
        usual = spread.median(-1, keepdim=True).values
        spread = spread.maximum(usual * LEAST_SPREAD)
        return cls(mean, spread.masked_fill(spread == 0, 1.0))

    def apart(self, keys: Tensor) -> Tensor:
        """keys [B, kv_heads, n, D] → what is held, float32."""
        return (keys.float() - self.mean) / self.spread

    def whole(self, held: Tensor) -> Tensor:
        """The inverse of ``apart``."""
        return held * self.spread.to(held.dtype) + self.mean.to(held.dtype)
