"""Does a stage run what its policy's name says? Each linear layer's ``op`` leaves certain operators in a trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pdq_tui.core.messages.profiles import StageTrace

if TYPE_CHECKING:  # the app's first screen tells what was flagged, and needs no kernel tables for it
    from pdq_tui.core.kernels import KernelTable

#: op → what must be among the operators of a stage that runs it: one pattern of each tuple, each at least once a layer
#: and pass.
OPERATORS: Final[dict[str, tuple[str, ...]]] = {
    "linear": (r"aten::(mm|addmm|linear)$|mkldnn.*linear",),
    "linear-float32": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "int8pack": (r"_weight_int8pack_mm",),
    "int8-dequantize": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "int8-dequantize-float32": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "w8a8-int_mm": (r"aten::_int_mm$",),
    "w8a8-int8pack": (r"_weight_int8pack_mm",),
    "w8a8-float32": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "int4pack-cpu": (r"_weight_int4pack_mm_for_cpu",),
    "int4-dequantize": (r"aten::mm$",),
    "int4-dequantize-float32": (r"aten::mm$",),
    "int4-tinygemm": (r"_weight_int4pack_mm$",),
    "int4-plain": (r"aten::mm$",),
    "bnb4-gemm": (r"bitsandbytes::gem[mv]_4bit",),
    "bnb4-gemv-cpu": (r"bitsandbytes::gem[mv]_4bit",),
    "bnb4-dequantize": (r"bitsandbytes::dequantize_4bit",),
    "bnb4-dequantize-float32": (r"bitsandbytes::dequantize_4bit",),
    "llm-int8": (r"bitsandbytes::int8_",),
    "fp8-dequantize": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "fp8-dequantize-float32": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "w8a8-fp8-scaled_mm": (r"aten::_scaled_mm$",),
    "native-dense": (r"pdq_native::dense",),
    "native-int8": (r"pdq_native::int8",),
    "native-w8a8": (r"pdq_native::int8",),
    "native-int4": (r"pdq_native::int4",),
    "native-w4a8": (r"pdq_native::int4",),
    "native-int4-dequantize": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"pdq_native::widen_int4"),
    "native-int4-dequantize-float32": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"pdq_native::widen_int4"),
    "native-nested16": (r"pdq_native::nested",),
    "native-nested16-dequantize": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"pdq_native::widen_nested"),
    "native-nested16-dequantize-float32": (
        r"aten::(mm|addmm|linear)$|mkldnn.*linear",
        r"pdq_native::widen_nested",
    ),
    "nested16-dequantize": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
    "nested16-dequantize-float32": (r"aten::(mm|addmm|linear)$|mkldnn.*linear", r"aten::copy_$"),
}


#: One call of our own for several matrices → what they are, and how many where it is not a whole decoder layer.
TOGETHER: Final = re.compile(r"pdq_native::(?:layer|products)_(dense|int8|int4|nested|mixed)(?:_(\d))?$")
MATRICES_OF_A_LAYER: Final = 7


def _products(pattern: str, op: str, count: int) -> int:
    """How many products that ``pattern`` describes ``count`` calls of ``op`` were."""
    together = TOGETHER.search(op)
    if together is None:
        return count if re.search(pattern, op) else 0
    kind = together[1]
    fits = "pdq_native::" in pattern if kind == "mixed" else re.search(pattern, f"pdq_native::{kind}")
    return count * int(together[2] or MATRICES_OF_A_LAYER) if fits else 0


def unmatched(
    calls: Mapping[str, int], steps: int, placed: Mapping[str, int], table: KernelTable
) -> list[str]:
    """Sentences about candidates that were placed in a stage and did not run in it; empty where all did.

    calls   operators of the host in the stage, by name, over all passes
    placed  linear layers by the candidate's name (``Coverage.kernels``)
    """
    ops = {c.name: c.op for c in table.candidates}
    wanted: dict[tuple[str, ...], dict[str, int]] = {}
    for name, layers in placed.items():
        patterns = OPERATORS.get(ops.get(name, ""))
        if patterns is not None:
            wanted.setdefault(patterns, {})[name] = layers
    found = []
    for patterns, names in wanted.items():
        layers = sum(names.values())
        for pattern in patterns:
            seen = sum(_products(pattern, op, n) for op, n in calls.items())
            if seen < layers * steps:
                who = " and ".join(sorted(names))
                found.append(
                    f"{who}: placed in {layers} layers, {seen} calls in {steps} passes where {layers * steps} were due"
                )
                break
    return found


def flagged(policy: str, stages: Iterable[StageTrace]) -> Sequence[str]:
    """What is to be said about a policy whose kernels are not those of its name."""
    return [
        f"{policy}: {stage.stage} does not run what it says: {why}"
        for stage in stages
        for why in stage.unmatched
    ]
