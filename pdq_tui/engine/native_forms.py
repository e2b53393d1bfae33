"""Linear layers of our own kernels, as the operators take several of them at once (``native/ops.cpp``, ``linear_of``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from pdq_tui.engine.formats import native as forms
from pdq_tui.engine.formats.linears import PackedLinear

#: Kernel's class → its number in ``native/linear.h``, and the word for it in the operators' names.
FORMS: Final[dict[type[PackedLinear], tuple[int, str]]] = {
    forms.NativeDense: (0, "dense"),
    forms.NativeInt8: (1, "int8"),
    forms.NativeW8A8: (2, "int8"),
    forms.NativeInt4: (3, "int4"),
    forms.NativeW4A8: (4, "int4"),
    forms.NativeNested16: (5, "nested"),
}


def word_of(matrices: Sequence[Any]) -> str:
    """What an operator over these is called, so that a profile says which form it multiplied."""
    words = {FORMS[type(matrix)][1] for matrix in matrices}
    return words.pop() if len(words) == 1 else "mixed"


def given(matrices: Sequence[Any], nothing: Tensor) -> tuple[list[Tensor], list[int]]:
    """(weight, scales, residual and bias, form, K and group) of each, of classes in FORMS; ``nothing``: an empty tensor."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for matrix in matrices:
        nested = isinstance(matrix, forms.NativeNested16)
        tensors += [
            matrix.base_weight if nested else matrix.weight,
            matrix.scales,
            matrix.weight if nested else nothing,
            nothing if matrix.bias is None else matrix.bias,
        ]
        numbers += [FORMS[type(matrix)][0], matrix.in_features, matrix.group]
    return tensors, numbers
