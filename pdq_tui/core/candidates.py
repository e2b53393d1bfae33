"""A kernel candidate: what it multiplies, under which limits (facts of the kernel), and the words that tables use for it.

What a candidate *does* lives in the engine under its ``op``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pdq_tui.core.formats import KINDS
from pdq_tui.core.policy import STAGES

DEVICES: Final = ("cpu", "cuda")
#: What a candidate multiplies: the dense formats are one.
WEIGHTS: Final = ("dense", *(name for name, kind in KINDS.items() if not kind.dense))
DTYPES: Final = ("bf16", "fp16", "fp32")
ARITHMETIC: Final = ("model", "fp32", "int8", "int16", "fp8")
#: What the engine can detect and a candidate can need or lack: instructions, bf16 and int8 products in hardware, packages,
#: and a C++ compiler with Python's headers.
FEATURES: Final[dict[str, str]] = {
    "avx2": "AVX2 instructions",
    "avx512": "AVX-512 instructions",
    "bf16": "bf16 arithmetic",
    "vnni": "int8 dot products",
    "amx": "AMX tiles",
    "avx512bf16": "AVX-512 bf16 dot products",
    "bitsandbytes": "the package bitsandbytes",
    "cxx": "a C++ compiler (g++, or the one CXX names) and Python's headers",
    "native": "this project's own CPU kernels (AVX2, a C++ compiler, engine.kernels = auto)",
}
#: What a prediction takes for granted where nobody has looked at a device: packages that come with this program.
ASSUMED_FEATURES: Final = ("bitsandbytes",)
#: What runs a decoder layer: transformers' modules as they are, one program compiled from them by torch's inductor, or one
#: call of this project's own.
RUNNERS: Final = ("eager", "inductor", "native")
#: op → the layouts of packed bytes that it reads. The engine implements exactly these.
OPS: Final[dict[str, tuple[str, ...]]] = {
    "linear": ("dense",),
    "linear-float32": ("dense",),
    "int8pack": ("int8",),
    "int8-dequantize": ("int8",),
    "int8-dequantize-float32": ("int8",),
    "w8a8-int_mm": ("int8",),
    "w8a8-int8pack": ("int8",),
    "w8a8-float32": ("int8",),
    "int4pack-cpu": ("int4-cpu",),
    "int4-dequantize": ("int4-cpu",),
    "int4-dequantize-float32": ("int4-cpu",),
    "int4-tinygemm": ("int4-tinygemm",),
    "int4-plain": ("int4-plain",),
    "bnb4-gemm": ("bnb4",),
    "bnb4-gemv-cpu": ("bnb4-cpu",),
    "bnb4-dequantize": ("bnb4", "bnb4-cpu"),
    "bnb4-dequantize-float32": ("bnb4", "bnb4-cpu"),
    "llm-int8": ("llm-int8",),
    "fp8-dequantize": ("fp8",),
    "fp8-dequantize-float32": ("fp8",),
    "w8a8-fp8-scaled_mm": ("fp8",),
    "native-dense": ("dense",),
    "native-int8": ("int8",),
    "native-w8a8": ("int8",),
    "native-int4": ("int4-rows",),
    "native-int4-dequantize": ("int4-rows",),
    "native-int4-dequantize-float32": ("int4-rows",),
    "native-w4a8": ("int4-rows",),
    "native-nested16": ("nested16",),
    "native-nested16-dequantize": ("nested16",),
    "native-nested16-dequantize-float32": ("nested16",),
    "nested16-dequantize": ("nested16",),
    "nested16-dequantize-float32": ("nested16",),
}
#: Those that fill a dense matrix, one for all layers, before they multiply.
WIDENING: Final = frozenset(op for op in OPS if "dequantize" in op) | {
    "linear-float32",
    "w8a8-float32",
    "int4-plain",
}
LAYOUTS: Final = tuple(sorted({layout for layouts in OPS.values() for layout in layouts}))
MANY: Final = 1_000_000


class Capability(msgspec.Struct, frozen=True):
    """What a device can do. ``sm`` is the CUDA compute capability; ``features`` are of FEATURES."""

    kind: str
    features: tuple[str, ...] = ()
    sm: tuple[int, int] | None = None


class Candidate(msgspec.Struct, frozen=True):
    """One kernel and its limits. N: out features, K: in features, rows: tokens times batch in one call.

    arithmetic  dtype of the multiplications: "model" (that of the weights or activations), "fp32", "int8", "int16" or
                "fp8".
    best_rows   inclusive range of row counts where it is preferred; no limit.
    """

    name: str
    op: str
    weights: str
    layout: str
    summary: str = ""
    activations: str = "model"
    dtypes: tuple[str, ...] = DTYPES
    arithmetic: str = "model"
    n_multiple: int = 1
    k_multiple: int = 1
    rows: tuple[int, int] = (1, MANY)
    best_rows: tuple[int, int] = (1, MANY)
    group_sizes: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    min_sm: tuple[int, int] | None = None
    probe: bool = False
    rank: int = 50

    @property
    def widens(self) -> bool:
        """It dequantizes the weights, one layer at a time, and multiplies them as a dense matrix."""
        return self.op in WIDENING

    def misfit(self, capability: Capability, dtype: str) -> str | None:
        """Why this device or dtype rules it out, whatever the layer; None where it does not."""
        if dtype not in self.dtypes:
            return f"{self.name} takes {', '.join(self.dtypes)}, not {dtype}"
        reason = feature_misfit(self.name, self.needs, self.lacks, capability)
        if reason is not None:
            return reason
        if self.min_sm is not None and (capability.sm is None or capability.sm < self.min_sm):
            has = "none" if capability.sm is None else "{}.{}".format(*capability.sm)
            needs = "{}.{}".format(*self.min_sm)
            return f"{self.name} needs a GPU of compute capability {needs} or later, this device has {has}"
        return None

    def shape_misfit(self, N: int, K: int, rows: int, group_size: int) -> str | None:
        """Why this layer's shape rules it out; None where it fits."""
        if K % self.k_multiple:
            return f"{self.name} needs in_features divisible by {self.k_multiple}, not {K}"
        if N % self.n_multiple:
            return f"{self.name} needs out_features divisible by {self.n_multiple}, not {N}"
        if not self.rows[0] <= rows <= self.rows[1]:
            return f"{self.name} takes {self.rows[0]} to {self.rows[1]} rows, not {rows}"
        if self.group_sizes and group_size not in self.group_sizes:
            return f"{self.name} takes groups of {', '.join(map(str, self.group_sizes))}, not {group_size}"
        return None

    def order(self, rows: int) -> tuple[bool, int, str]:
        """Sort key: the best for ``rows`` first."""
        return (not self.best_rows[0] <= rows <= self.best_rows[1], self.rank, self.name)


def feature_misfit(
    name: str, needs: Sequence[str], lacks: Sequence[str], capability: Capability
) -> str | None:
    """What this machine lacks, or has, that rules ``name`` out; None where nothing does."""
    for feature in needs:
        if feature not in capability.features:
            return f"{name} needs {FEATURES[feature]}, which this machine lacks"
    for feature in lacks:
        if feature in capability.features:
            return f"{name} is for machines without {FEATURES[feature]}"
    return None


class LayerRunner(msgspec.Struct, frozen=True):
    """One way to run the decoder layers of a stage. ``runner`` is of RUNNERS; ``max_rows``: None for any number."""

    name: str
    runner: str
    stages: tuple[str, ...] = STAGES
    summary: str = ""
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    max_rows: int | None = None
    rank: int = 50


class RunnerChoice(msgspec.Struct, frozen=True):
    """``runners`` of RUNNERS, the best first, "eager" not among them; ``reasons``: why others do not run here."""

    runners: tuple[str, ...]
    reasons: tuple[str, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """``candidate`` None: nothing fits, and ``reasons`` say why. ``passed_over``: what would have come first on this
    device but for the layer's shape (or a failed probe), with the reason. ``by_shape``: a layer of another shape might
    have been taken."""

    candidate: Candidate | None
    reasons: tuple[str, ...] = ()
    passed_over: tuple[str, str] | None = None
    by_shape: bool = False
