"""Packed weights: the bytes of one linear layer in one storage format, and how many there will be before packing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from pdq_tui.core.formats import Format, own_bytes, packed_bytes, stored_parts

#: A residual byte of nested weights counts parts of the int8 byte's step.
RESIDUAL: Final = 256


@dataclass(frozen=True)
class Spec:
    """How one weight [N, K] is stored. ``k`` ≥ K where columns of zeros are added; ``dtype`` is the model's (of scales,
    and of dense weights unless the format names another); ``layout`` of ``core.kernels.LAYOUTS``; ``stack``: 0, or how
    many matrices [N, K] (a mixture's experts) are stored alike, each by itself; ``source``: the checkpoint that it is from,
    "" for the model itself."""

    fmt: Format
    layout: str
    N: int
    K: int
    k: int
    dtype: torch.dtype
    stack: int = 0
    source: str = ""

    @property
    def one(self) -> Spec:
        """The spec of one matrix of a stack."""
        return replace(self, stack=0)

    @property
    def key(self) -> str:
        """Names the bytes: equal keys of one module mean the same bytes. Dense is named by its dtype."""
        origin = f"@{self.source}" if self.source else ""
        if self.fmt.dense:
            return f"dense-{DTYPE_NAMES[self.stored_dtype]}{origin}"
        padded = f"-k{self.k}" if self.k != self.K else ""
        return f"{self.fmt.storage_key}-{self.layout}{padded}{origin}"

    @property
    def parts(self) -> tuple[Spec, ...]:
        """The specs of the tensors that it is read from, its own last: nested weights begin with the int8 ones."""
        return tuple(
            self if own else replace(self, fmt=fmt, layout=fmt.weights) for fmt, own in stored_parts(self.fmt)
        )

    @property
    def own_bytes(self) -> int:
        """Exact: what it stores beside the other parts."""
        one = own_bytes(self.fmt, self.N, self.k, self.dtype.itemsize, self.layout)
        return one * max(1, self.stack)

    @property
    def stored_dtype(self) -> torch.dtype:
        return dense_dtype(self.fmt, self.dtype) if self.fmt.dense else torch.int8

    @property
    def nbytes(self) -> int:
        """Exact: packed weights and their scales and zero points."""
        one = packed_bytes(self.fmt, self.N, self.k, self.dtype.itemsize, self.layout)
        return one * max(1, self.stack)


@dataclass(frozen=True)
class Packed:
    """weight: dense [N, K]; int8 [N, k]; 4-bit packed bytes by layout; nested16 the residual bytes int8 [N, k], ``base`` the
    int8 weights: w = (base.weight + weight / 256) · base.scales. scales: int8 [N]; int4 [k / group, N, 2] holding
    (scale, zero) with w = (q − 8) · scale + zero, in layout int4-rows [N, k / group, 2]; others as their packer says.
    ``ours`` False where the tensor belongs to the model itself."""

    spec: Spec
    weight: Tensor
    scales: Tensor | None = None
    ours: bool = True
    base: Packed | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        total = self.weight.nbytes + (self.scales.nbytes if self.scales is not None else 0)
        object.__setattr__(self, "nbytes", total)


@dataclass(frozen=True)
class PackedStack:
    """The matrices of a mixture's experts, each packed by itself."""

    spec: Spec
    parts: tuple[Packed, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def ours(self) -> bool:
        """False where every tensor belongs to the model itself."""
        return any(part.ours for part in self.parts)


DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}


def dense_dtype(fmt: Format, model: torch.dtype) -> torch.dtype:
    """The dtype a dense format stores; "bf16" stands for the model's own."""
    return {"fp16": torch.float16, "fp32": torch.float32}.get(fmt.weights, model)
