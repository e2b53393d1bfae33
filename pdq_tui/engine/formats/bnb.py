"""bitsandbytes' formats through its registered operators: NF4 and FP4 in groups of columns, and LLM.int8.

NF4 and FP4 keep two weights a byte, codes of a table of 16 values, and a float32 largest magnitude for each group
(QLoRA, arXiv 2305.14314). LLM.int8 keeps int8 rows with a float32 largest magnitude each; activation columns that hold a
value of ``OUTLIER`` or more in any row are multiplied apart in the model's dtype (arXiv 2208.07339).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pdq_tui.engine.cancel import check, interruptible
from pdq_tui.engine.formats.linears import PackedLinear
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.slices import row_slices, wide_rows
from pdq_tui.errors import UnfitError

#: Magnitude from which an activation is an outlier: the paper's, and bitsandbytes' default in transformers.
OUTLIER: Final = 6.0
#: Rows that the layout of the CPU kernel holds together.
CPU_ROWS: Final = 32


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Within, ``import module`` fails as if it were not installed."""
    there = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if there is None:
            del sys.modules[module]
        else:
            sys.modules[module] = there


@cache
def ops() -> Any:
    """bitsandbytes' operators; the first call imports it. Raises UnfitError where it cannot be imported.

    On CPUs with AVX-512 BF16 its import fetches a kernel from the Hub where the package ``kernels`` is installed: code
    that nobody asked for, over the network. It has one of its own, and takes that where it does not find the package.
    """
    try:
        with _hidden("kernels"):
            import bitsandbytes  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError, NameError, SyntaxError, TypeError) as error:
        raise UnfitError(
            f"bitsandbytes cannot be imported: {error}", "pip install --force-reinstall bitsandbytes"
        ) from error
    return torch.ops.bitsandbytes


# -- NF4, FP4 ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pack_4bit(spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    """``bnb4``: weight uint8 [N, k / 2], the even column in the high nibble; scales float32 [N, k / group].
    ``bnb4-cpu``: rows interleaved by 32 for the CPU kernel; scales bfloat16 [k / group, N]."""
    group, k, N = spec.fmt.group_size, spec.k, spec.N
    weight = torch.empty((N, k // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((N, k // group), dtype=torch.float32, device=device)
    quantize = interruptible(ops, cancelled).quantize_4bit
    for rows in row_slices(N, k):
        check(cancelled)
        codes, largest = quantize(wide_rows(spec, master, rows, device), group, spec.fmt.weights, torch.uint8)
        weight[rows] = codes.view(-1, k // 2)
        scales[rows] = largest.view(-1, k // group)
    if spec.layout == "bnb4-cpu":
        return Packed(spec, interleaved(weight), scales.t().to(torch.bfloat16).contiguous())
    return Packed(spec, weight, scales)


def interleaved(weight: Tensor) -> Tensor:
    """[N, k / 2] → the order of bitsandbytes' CPU kernel: of 32 rows and two columns, the first 16 rows' codes are the
    low nibbles and the other 16 rows' the high ones."""
    N, half = weight.shape
    codes = torch.stack([weight >> 4, weight & 15], 2).view(N // CPU_ROWS, CPU_ROWS, half, 2)
    low, high = codes.transpose(1, 2).reshape(-1, 2, CPU_ROWS).unbind(1)
    return (high << 4 | low).view(N, half)


def straight(weight: Tensor) -> Tensor:
    """The inverse of ``interleaved``."""
    N, half = weight.shape
    block = weight.view(-1, CPU_ROWS)
    codes = torch.stack([block & 15, block >> 4], 1).view(N // CPU_ROWS, half, CPU_ROWS, 2)
    even, odd = codes.transpose(1, 2).reshape(N, half, 2).unbind(2)
    return even << 4 | odd


class _Bnb4(PackedLinear):
    kind: str
    interleaved: bool

    def prepare(self) -> None:
        self.kind, self.interleaved = self.spec.fmt.weights, self.spec.layout == "bnb4-cpu"
        ops()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, k], in new memory: bitsandbytes takes no buffer on a CPU."""
        weight, scales = self.weight, self.scales
        if self.interleaved:
            weight, scales = straight(weight), scales.t().float()
        shape = (self.out_features, self.in_features + self.padding)
        out: Tensor = ops().dequantize_4bit(
            weight.view(-1, 1), scales.reshape(-1), self.group, self.kind, shape, dtype
        )
        return out


class Bnb4Dequantize(_Bnb4):
    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense(x.dtype))


class Bnb4DequantizeFloat32(_Bnb4):
    def product(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.dense(torch.float32)).to(x.dtype)


class Bnb4Gemm(_Bnb4):
    """Fused for few rows, dequantized for many: bitsandbytes chooses."""

    def product(self, x: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features + self.padding)
        out: Tensor = ops().gemm_4bit(
            x, self.weight.view(-1, 1), shape, self.scales.view(-1), self.group, self.kind
        )
        return out


class Bnb4GemvCpu(_Bnb4):
    """The CPU kernel for AVX-512 BF16, any number of rows."""

    code: Tensor

    def prepare(self) -> None:
        super().prepare()
        # All that the kernel looks at is the sign of the second code: the table of FP4 begins 0, 0.0052.
        code = torch.tensor([0.0, 0.0052 if self.kind == "fp4" else -0.6962])
        self.register_buffer("code", code, persistent=False)

    def product(self, x: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features + self.padding)
        out: Tensor = ops().gemv_4bit(x, self.weight, shape, self.scales, self.code, self.group)
        return out


# -- LLM.int8 ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pack_llm_int8(spec: Spec, master: Tensor, device: torch.device, cancelled: Callable[[], bool]) -> Packed:
    """weight int8 [N, K]; scales float32 [N], the largest magnitude of each row: w = q · scale / 127. From float16, as
    bitsandbytes does it."""
    weight = torch.empty((spec.N, spec.k), dtype=torch.int8, device=device)
    scales = torch.empty(spec.N, dtype=torch.float32, device=device)
    quantize = interruptible(ops, cancelled).int8_vectorwise_quant
    for rows in row_slices(spec.N, spec.k):
        check(cancelled)
        weight[rows], scales[rows], _ = quantize(wide_rows(spec, master, rows, device).half())
    return Packed(spec, weight, scales)


# One operator of ours around the three of bitsandbytes: how many outlier columns there are depends on the data, which no
# compiled program could hold otherwise.
_library: Any = torch.library.Library("pdq", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("llm_int8(Tensor x, Tensor weight, Tensor scales) -> Tensor")


def _llm_int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [rows, K] in the model's dtype → [rows, N] in the same."""
    q, rows, outliers = ops().int8_vectorwise_quant(x.half(), OUTLIER)
    out: Tensor = ops().int8_mixed_scaled_mm(x, q, weight, rows, scales, outliers, None)[0]
    return out


def _llm_int8_shape(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_library.impl("llm_int8", _llm_int8, "CompositeExplicitAutograd")
torch.library.register_fake("pdq::llm_int8", _llm_int8_shape, lib=_library)


class LlmInt8(PackedLinear):
    def prepare(self) -> None:
        ops()

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.pdq.llm_int8(x, self.weight, self.scales)
        return out


LINEARS: Final[dict[str, type[PackedLinear]]] = {
    "bnb4-dequantize": Bnb4Dequantize,
    "bnb4-dequantize-float32": Bnb4DequantizeFloat32,
    "bnb4-gemm": Bnb4Gemm,
    "bnb4-gemv-cpu": Bnb4GemvCpu,
    "llm-int8": LlmInt8,
}
