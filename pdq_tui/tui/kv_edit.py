"""What the KV cache of a policy may become: the live screen's question, and the rows of the Policies screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from pdq_tui.core.kv import (
    KV_CONVERT,
    KV_DTYPES,
    KV_GROUP_SIZES,
    KvGeometry,
    KvPolicy,
    misfit,
    natural_convert,
    of_label,
)
from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.protocol import ModelInfo
from pdq_tui.tui.ask import Choice

Part = Literal["prefill", "decode", "convert"]

_DTYPES: Final = {
    "bf16": "the model's own dtype",
    "fp8": "E4M3, a scale for each token and head",
    "int8": "8 bits, a scale for each token and head",
    "int4": "4 bits, scale and minimum for each token and head",
}
_CONVERT: Final = {
    "write": "every position is quantized as it is written",
    "handoff": "prefill writes its own format, the hand-off converts: timed as the hand-off",
    "never": "nothing is converted",
}
#: What v offers; the Policies screen has the others.
PRESETS: Final = (
    KvPolicy(),
    *(KvPolicy("bf16", dtype, "handoff") for dtype in ("fp8", "int8", "int4")),
    KvPolicy("bf16", "int4", "handoff", group_size=32),
    *(KvPolicy("bf16", dtype, "handoff", "channel") for dtype in ("int8", "int4")),
    KvPolicy("bf16", "int8", "write"),
    *(KvPolicy(dtype, dtype, "write") for dtype in ("fp8", "int8", "int4")),
)
BY_LABEL: Final = {kv.label: kv for kv in PRESETS}


def presets(model: ModelInfo | None) -> list[Choice]:
    """Every preset with its bytes a token on ``model``; refused where the model's heads or its attention do not fit."""
    geometry = model.kv if model else None
    found = []
    for kv in PRESETS:
        size = f"{format_bytes(geometry.bytes_per_token(kv, 'decode'))} a token; " if geometry else ""
        found.append(Choice(kv.label, size + _words(kv), refusal(kv, model)))
    return found


def refusal(kv: KvPolicy, model: ModelInfo | None) -> str | None:
    """Why ``model`` cannot have this cache, None where it can or nothing is known of it yet."""
    if model is None or kv == KvPolicy():
        return None
    geometry: KvGeometry | None = model.kv
    return model.kv_refused or (geometry.misfit(kv) if geometry else None)


def _words(kv: KvPolicy) -> str:
    if kv == KvPolicy():
        return "nothing is converted"
    keys = ", keys by channel" if kv.keys == "channel" else ""
    if kv.prefill == kv.decode:
        return "prefill reads what was rounded, too"
    return (
        "converted at the hand-off" if kv.convert == "handoff" else "prefill reads bf16, each write quantizes"
    ) + keys


def value_of(kv: KvPolicy, part: Part) -> str:
    return kv.convert if part == "convert" else kv.named(part)


def choices(kv: KvPolicy, part: Part) -> list[Choice]:
    """Every value of one row, those that do not go with the rest refused with the reason."""
    if part == "convert":
        return [Choice(v, _CONVERT[v], _why(msgspec.structs.replace(kv, convert=v))) for v in KV_CONVERT]
    found = []
    for label in _labels(part):
        candidate, _ = changed(kv, part, label)
        dtype, keys, group = of_label(label)
        note = _DTYPES[dtype] + (f", groups of {group}" if group else "")
        if keys == "channel":
            note += "; keys by channel, from the whole prompt"
        found.append(Choice(label, note, _why(candidate)))
    return found


def _labels(part: Part) -> Sequence[str]:
    plain = list(KV_DTYPES) + [f"int4-g{group}" for group in KV_GROUP_SIZES if group]
    return plain if part == "prefill" else [*plain, "int8-channel", "int4-channel", "int4-g32-channel"]


def _why(kv: KvPolicy) -> str | None:
    bad = misfit(kv)
    return bad.message if bad else None


def changed(kv: KvPolicy, part: Part, value: str) -> tuple[KvPolicy, str]:
    """The cache with one row changed, and a sentence about what had to change with it ("" for nothing)."""
    if part == "convert":
        return msgspec.structs.replace(kv, convert=value), ""
    dtype, keys, group = of_label(value)
    new = msgspec.structs.replace(kv, **{part: dtype})
    if part == "decode":
        new = msgspec.structs.replace(new, keys=keys)
    # One group size for both stages: the row that was changed says which; one without groups takes it along.
    if dtype == "int4" or "int4" not in (new.prefill, new.decode):
        new = msgspec.structs.replace(new, group_size=group)
    said = []
    if misfit(new) is not None:
        convert = natural_convert(new.prefill, new.decode)
        if convert != new.convert:
            new = msgspec.structs.replace(new, convert=convert)
            said.append(f"convert is {convert} now")
    if part == "prefill" and new.keys == "channel" and misfit(new) is not None:
        new = msgspec.structs.replace(new, keys="token")
        said.append("keys have scales by token again: by channel needs a hand-off")
    return new, "; ".join(said)
