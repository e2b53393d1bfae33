"""Weight formats: how one weight matrix may be held and multiplied, and how many bytes that takes.

The one place that knows them by name. Policies, predictions, kernel tables and screens ask here; what packs and
multiplies a format is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import msgspec

from pdq_tui.errors import UsageError

#: Columns of K that may share a scale.
GROUP_SIZES: Final = (32, 64, 128, 256)
#: Of the formats with groups, where a policy names none.
DEFAULT_GROUP: Final = 64


class Pair(msgspec.Struct, frozen=True):
    """Weights with certain activations: a ``name`` of its own, and a ``note`` for people; "" where the weights' do."""

    name: str = ""
    note: str = ""


class Kind(msgspec.Struct, frozen=True):
    """One value of ``weights`` in a policy file.

    activations  activations that it may be multiplied with.
    dense        True where the matrix is a plain one in some dtype.
    groups       True where columns of K share a scale in groups.
    blocks       True where they may, though a channel has one scale unless a group size is named; without activations of
                 their own.
    """

    name: str
    note: str
    activations: dict[str, Pair] = msgspec.field(default_factory=lambda: {"model": Pair()})
    dense: bool = False
    groups: bool = False
    blocks: bool = False


_KINDS: Final = (
    Kind("bf16", "the model's own dtype", dense=True),
    Kind("fp16", "converted to float16", dense=True),
    Kind("fp32", "converted to float32", dense=True),
    Kind(
        "fp8",
        "8-bit floating-point weights (E4M3), a scale per channel",
        {"model": Pair(), "fp8": Pair("w8a8-fp8", "fp8 arithmetic, a scale per token")},
        blocks=True,
    ),
    Kind(
        "int8",
        "8-bit weights, a scale per channel",
        {"model": Pair(), "int8": Pair("w8a8", "int8 arithmetic, a scale per token")},
    ),
    Kind(
        "int4",
        "4-bit weights",
        {"model": Pair(), "int8": Pair("w4a8", "4-bit weights, int8 arithmetic, a scale per token")},
        groups=True,
    ),
    Kind("nf4", "4-bit NormalFloat (bitsandbytes)", groups=True),
    Kind("fp4", "4-bit floating point (bitsandbytes)", groups=True),
    Kind("llm-int8", "8-bit arithmetic, outlier columns apart (bitsandbytes)"),
    Kind("nested16", "16-bit weights as an int8 byte and a residual byte, a scale per channel"),
)
KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in _KINDS}
#: Weight formats of the policy file. "bf16" means the model's own dtype where the model is not bf16.
WEIGHTS: Final = tuple(KINDS)
ACTIVATIONS: Final = tuple(dict.fromkeys(a for kind in _KINDS for a in kind.activations))


class Format(msgspec.Struct, frozen=True, order=True):
    """How one weight matrix is held and multiplied in one stage.

    weights      one of WEIGHTS; "bf16" stands for the model's own dtype.
    activations  "model" (the model's dtype), or "int8", "fp8": rounded with one scale a token.
    group_size   columns of K that share a scale; 0 where the format has none (per output channel).
    """

    weights: str = "bf16"
    activations: str = "model"
    group_size: int = 0

    @property
    def kind(self) -> Kind:
        return KINDS[self.weights]

    @property
    def storage_key(self) -> str:
        """Names the packed bytes. Weight-only and W8A8 share one layout, hence one key."""
        return f"{self.weights}-g{self.group_size}" if self.group_size else self.weights

    @property
    def label(self) -> str:
        """Short name for people: bf16, int8, w8a8, int4-g64."""
        name = self.kind.activations.get(self.activations, Pair()).name or self.weights
        return f"{name}-g{self.group_size}" if self.group_size else name

    @property
    def note(self) -> str:
        """What it is, in a few words."""
        note = self.kind.activations.get(self.activations, Pair()).note or self.kind.note
        return f"{note}, groups of {self.group_size}" if self.group_size else note

    @property
    def dense(self) -> bool:
        return self.kind.dense


def stored_parts(fmt: Format) -> tuple[tuple[Format, bool], ...]:
    """The packed tensors that a format is read from: (format, whether the format adds these bytes itself). Nested weights
    are the int8 weights, the very bytes that an int8 stage reads, and a residual byte of their own."""
    return ((Format("int8"), False), (fmt, True)) if fmt.weights == "nested16" else ((fmt, True),)


def own_bytes(fmt: Format, N: int, K: int, dtype_bytes: int, layout: str = "") -> int:
    """What a format stores beside the parts that it shares with another (``stored_parts``)."""
    k = K + (-K % fmt.group_size if fmt.group_size else 0)
    return N * k if fmt.weights == "nested16" else packed_bytes(fmt, N, K, dtype_bytes, layout)


def wrong_with(fmt: Format) -> tuple[str, str, str] | None:
    """None for a legal combination, else (key, what is wrong, hint) in a policy file's words."""
    kind = fmt.kind
    if fmt.activations not in kind.activations:
        takers = [k.name for k in _KINDS if fmt.activations in k.activations]
        return (
            "activations",
            f"{fmt.activations} activations need {' or '.join(takers)} weights, not {fmt.weights}",
            f'set weights = "{takers[0]}" or leave activations out',
        )
    if kind.blocks and fmt.group_size and fmt.activations != "model":
        return "group_size", f"{fmt.activations} activations take a scale per channel", "leave group_size out"
    if kind.blocks and not fmt.group_size:
        return None
    if not kind.groups and not kind.blocks:
        owners = ", ".join(k.name for k in _KINDS if k.groups or k.blocks)
        return (
            ("group_size", f"{fmt.weights} has no groups", f"group_size belongs to {owners}")
            if fmt.group_size
            else None
        )
    if fmt.group_size not in GROUP_SIZES:
        return (
            "group_size",
            f"{fmt.group_size} is not a legal group size",
            f"legal: {', '.join(map(str, GROUP_SIZES))}",
        )
    return None


def default_of(weights: str, activations: str = "model") -> Format:
    """The format of these weights that a policy means where it says nothing else."""
    return Format(weights, activations, DEFAULT_GROUP if KINDS[weights].groups else 0)


def formats(groups: tuple[int, ...] = (DEFAULT_GROUP,)) -> Iterator[Format]:
    """Every legal format, those with groups once for each of ``groups``; of those that may have groups the one without."""
    for kind in _KINDS:
        for activations in kind.activations:
            for group in groups if kind.groups else (0,):
                yield Format(kind.name, activations, group)


@cache
def _by_label() -> dict[str, Format]:
    found = {fmt.label: fmt for fmt in formats(GROUP_SIZES)}
    blocks = [Format(kind.name, "model", group) for kind in _KINDS if kind.blocks for group in GROUP_SIZES]
    short = {fmt.label.removesuffix(f"-g{DEFAULT_GROUP}"): fmt for fmt in formats()}
    return short | found | {fmt.label: fmt for fmt in blocks}


def of_label(label: str) -> Format:
    """The inverse of ``Format.label``; without a group size the default one. Raises UsageError with the legal words."""
    known = _by_label()
    if label not in known:
        raise UsageError(f"{label!r} is not a format", f"legal: {', '.join(known)}")
    return known[label]


def packed_bytes(fmt: Format, N: int, K: int, dtype_bytes: int, layout: str = "") -> int:
    """Stored bytes of one weight [N, K], K filled up to whole groups, scales included.

    int8: a scale an output channel; int4: a scale and a zero point for each group of columns; both in the model's dtype
    (``dtype_bytes``). nested16: two bytes a weight and the scale of int8. llm-int8, fp8: a float32 scale an output channel,
    fp8 with a group size one a group; nf4, fp4: a float32 scale a group, in the CPU kernel's ``layout`` a bfloat16 one.
    """
    k = K + (-K % fmt.group_size if fmt.group_size else 0)
    match fmt.weights:
        case "int8":
            return N * k + N * dtype_bytes
        case "nested16":
            return 2 * N * k + N * dtype_bytes
        case "int4":
            return N * k // 2 + k // fmt.group_size * N * 2 * dtype_bytes
        case "nf4" | "fp4":
            return N * k // 2 + k // fmt.group_size * N * (2 if layout == "bnb4-cpu" else 4)
        case "llm-int8" | "fp8":
            return N * k + N * 4 * (k // fmt.group_size if fmt.group_size else 1)
        case "fp16":
            return N * k * 2
        case "fp32":
            return N * k * 4
    return N * k * dtype_bytes
