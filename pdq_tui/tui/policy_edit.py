"""What can be edited of a policy, and what a value may become: pure functions under the Policies screen."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdq_tui.core.formats import (
    ACTIVATIONS,
    GROUP_SIZES,
    KINDS,
    Format,
    default_of,
    of_label,
)
from pdq_tui.core.formats import (
    wrong_with as wrong_format,
)
from pdq_tui.core.policy import (
    ON_FALLBACK,
    ON_MISFIT,
    STAGES,
    Keep,
    Policy,
    Stage,
    StagePolicy,
    parse_policy,
    policy_to_toml,
    stored_as,
)
from pdq_tui.errors import PdqError, UsageError
from pdq_tui.tui import kv_edit
from pdq_tui.tui.ask import Choice
from pdq_tui.tui.runnable import Refusal

_NOT_HERE = "not in this version"

_NOTES = {
    "warn": "another kernel or format may stand in; said in the coverage table",
    "fail": "the policy is refused where anything would have to stand in",
    "smaller-group": "take the largest group that divides the layer",
    "pad": "pad the layer's columns to whole groups",
    "leave": "leave the layer in the model's dtype",
}


@dataclass(frozen=True)
class Field:
    """One editable value. ``stage`` None: it holds for both stages. ``typed``: written as text, not chosen. ``kv``:
    which part of the KV cache it is, if it is one."""

    id: str
    label: str
    stage: Stage | None = None
    typed: bool = False
    kv: kv_edit.Part | None = None


FIELDS = (
    Field("name", "name", typed=True),
    *(
        Field(f"{stage}.{key}", label, stage, kv=stage if key == "kv" else None)
        for stage in STAGES
        for key, label in (
            ("weights", "weights"),
            ("activations", "activations"),
            ("group_size", "group size"),
            ("kv", "KV cache"),
        )
    ),
    Field("kv.convert", "KV convert", kv="convert"),
    Field("on_fallback", "on fallback"),
    Field("on_misfit", "on misfit"),
    Field("keep", "exceptions", typed=True),
)
BY_ID = {field.id: field for field in FIELDS}


def value_of(policy: Policy, field: Field) -> str:
    """The field's value as text; "-" for a group size where the format has none."""
    if field.kv is not None:
        return kv_edit.value_of(policy.kv, field.kv)
    if field.stage is not None:
        value = getattr(policy.stage(field.stage), field.id.split(".")[1])
        return str(value) if value else "-"
    if field.id == "keep":
        return keep_text(policy.keep)
    return str(getattr(policy, field.id))


def note_of(policy: Policy, field: Field) -> str:
    """Why a value is what it is, beside it."""
    if field.id == "keep" and not policy.keep:
        return "none; lm_head and embeddings stay in the model's dtype"
    if field.stage is not None and field.id.endswith("group_size"):
        kind = policy.stage(field.stage).format.kind
        return "" if kind.groups or kind.blocks else f"{kind.name} has no groups"
    return ""


def choices(policy: Policy, field: Field, refusal: Refusal) -> list[Choice]:
    """Every value of a chosen field, those that are not legal or do not run on this device with the reason."""
    if field.kv is not None:
        return kv_edit.choices(policy.kv, field.kv)
    if field.id in ("on_fallback", "on_misfit"):
        return [Choice(v, _NOTES[v]) for v in (ON_FALLBACK if field.id == "on_fallback" else ON_MISFIT)]
    assert field.stage is not None
    fmt = policy.stage(field.stage).format
    if field.id.endswith("weights"):
        return [Choice(name, kind.note, refusal(default_of(name))) for name, kind in KINDS.items()]
    if field.id.endswith("activations"):
        pairs = [msgspec.structs.replace(fmt, activations=a) for a in ACTIVATIONS]
        return [Choice(p.activations, _activations_note(p), _illegal(p) or refusal(p)) for p in pairs]
    sizes = [msgspec.structs.replace(fmt, group_size=g) for g in GROUP_SIZES]
    return [Choice(str(f.group_size), "columns that share one scale", _illegal(f)) for f in sizes]


def _activations_note(fmt: Format) -> str:
    return "activations in the model's dtype" if fmt.activations == "model" else fmt.note


def _illegal(fmt: Format) -> str | None:
    """Why this is no legal format, None where it is."""
    wrong = wrong_format(fmt)
    return wrong[1] if wrong else None


def changed(policy: Policy, field: Field, value: str) -> tuple[Policy, str]:
    """The policy with one value changed, and a sentence about what had to change with it ("" for nothing).

    Storage is derived. Raises UsageError for text that does not parse.
    """
    said = ""
    if field.id == "name":
        policy = msgspec.structs.replace(policy, name=value)
    elif field.id == "keep":
        policy = msgspec.structs.replace(policy, keep=parse_keep(value))
    elif field.kv is not None:
        kv, said = kv_edit.changed(policy.kv, field.kv, value)
        policy = msgspec.structs.replace(policy, kv=kv)
    elif field.id in ("on_fallback", "on_misfit"):
        policy = msgspec.structs.replace(policy, **{field.id: value})
    else:
        assert field.stage is not None
        stage, said = _stage_changed(policy.stage(field.stage), field, value)
        policy = msgspec.structs.replace(policy, **{field.stage: stage})
    storage = stored_as(policy.prefill.format, policy.decode.format, policy.storage, policy.apart)
    return msgspec.structs.replace(policy, storage=storage), said


def _stage_changed(old: StagePolicy, field: Field, value: str) -> tuple[StagePolicy, str]:
    key = field.id.split(".")[1]
    if key == "activations":
        return msgspec.structs.replace(old, activations=value), ""
    if key == "group_size":
        return msgspec.structs.replace(old, group_size=int(value)), ""
    meant = default_of(value)
    if meant.kind.groups and old.group_size:
        meant = msgspec.structs.replace(meant, group_size=old.group_size)
    with_old = msgspec.structs.replace(meant, activations=old.activations)
    wrong = wrong_format(with_old)
    if wrong is None:
        return _with_format(old, with_old), ""
    return _with_format(old, meant), f"activations back to model: {wrong[1]}"


def _with_format(old: StagePolicy, fmt: Format) -> StagePolicy:
    return StagePolicy(fmt.weights, fmt.activations, fmt.group_size, old.source)


def stepped(policy: Policy, field: Field, step: int, refusal: Refusal) -> str | None:
    """The next (or previous) legal value of a chosen field, None where there is no other."""
    legal = [c.value for c in choices(policy, field, refusal) if c.refused is None]
    now = value_of(policy, field)
    if now not in legal or len(legal) < 2:
        return None
    return legal[(legal.index(now) + step) % len(legal)]


def wrong_with(policy: Policy) -> str | None:
    """None for a valid policy, else the sentence of the very parser that reads policy files."""
    try:
        parse_policy(policy_to_toml(policy), policy.name or "policy")
    except PdqError as error:
        return str(error)
    return None


STORAGE_WORDS = {
    "uniform": "one format in both stages: one copy",
    "shared": "both stages read the same bytes: one copy",
    "nested": "one stage reads the int8 byte of each weight, the other its residual byte as well",
    "transient": "4-bit in memory; prefill dequantizes one layer at a time for a dense product",
    "dual": "two formats, two copies of the weights in memory",
}


# -- exceptions by module name, as one line of text ----------------------------------------------------------------------


def keep_text(keep: tuple[Keep, ...]) -> str:
    """``*.layers.0.*, lm_head = bf16; *.mlp.* = int8 @decode``: patterns = format, @stage where only one."""
    return "; ".join(
        f"{', '.join(k.modules)} = {k.format.label}" + (f" @{k.stages[0]}" if k.stages != STAGES else "")
        for k in keep
    )


def parse_keep(text: str) -> tuple[Keep, ...]:
    """The inverse of ``keep_text``. Raises UsageError naming the part that is wrong and what is legal."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        names, equals, rest = part.rpartition("=")
        if not equals:
            raise UsageError(f"{part!r} names no format", "write patterns = format, e.g. *.layers.0.* = bf16")
        label, _, stage = (word.strip() for word in rest.partition("@"))
        modules = tuple(name.strip() for name in names.split(",") if name.strip())
        if not modules:
            raise UsageError(
                f"{part!r} names no modules", "write patterns = format, e.g. *.layers.0.* = bf16"
            )
        if stage and stage not in STAGES:
            raise UsageError(f"{stage!r} is not a stage", "legal: @prefill, @decode, or nothing for both")
        stages: tuple[Stage, ...] = tuple(s for s in STAGES if s == stage) if stage else STAGES
        fmt = of_label(label)
        found.append(Keep(modules, fmt.weights, fmt.activations, fmt.group_size, stages))
    return tuple(found)
