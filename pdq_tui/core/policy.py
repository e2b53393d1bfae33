"""The policy: what each stage does with weights, activations and the KV cache, and its strict TOML form.

A policy is data. This module parses and validates it, resolves the format of one module in one stage, and writes
it back. Whether this machine and this model can run it is decided elsewhere (``core.kernels``, the engine).
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.core import toml
from pdq_tui.core.formats import (
    ACTIVATIONS,
    WEIGHTS,
    Format,
    default_of,
    wrong_with,
)
from pdq_tui.core.kv import (
    KV_CONVERT,
    KV_DTYPES,
    KV_GROUP_SIZES,
    KV_KEYS,
    KvPolicy,
    misfit,
    natural_convert,
)
from pdq_tui.core.kv import Stage as Stage  # every module takes it from here
from pdq_tui.errors import UsageError

SCHEMA: Final = 1

STAGES: Final[tuple[Stage, Stage]] = ("prefill", "decode")

STORAGE: Final = ("uniform", "shared", "nested", "transient", "dual")
ON_FALLBACK: Final = ("warn", "fail")
ON_MISFIT: Final = ("smaller-group", "pad", "leave")
MIXED: Final = ("split", "prefill", "decode")


class StagePolicy(msgspec.Struct, frozen=True):
    """``source``: a model directory or hub id that all of this stage's weights come from; "" for the model itself."""

    weights: str = "bf16"
    activations: str = "model"
    group_size: int = 0
    source: str = ""

    @property
    def format(self) -> Format:
        return Format(self.weights, self.activations, self.group_size)


class Keep(msgspec.Struct, frozen=True):
    """An exception by module name. ``modules`` are shell patterns on the dotted name; ``stages`` both if left out."""

    modules: tuple[str, ...]
    weights: str = "bf16"
    activations: str = "model"
    group_size: int = 0
    stages: tuple[Stage, ...] = STAGES

    @property
    def format(self) -> Format:
        return Format(self.weights, self.activations, self.group_size)


class ServingPolicy(msgspec.Struct, frozen=True):
    mixed: str = "split"


#: What families call their output head; GPT-NeoX the second.
HEADS: Final = ("lm_head", "embed_out")


def is_head(module: str) -> bool:
    """Is the linear layer of this dotted name the output head, as families call it?"""
    return module.rpartition(".")[2] in HEADS


class Policy(msgspec.Struct, frozen=True):
    """A validated policy. Two policies with one ``digest`` do the same thing, whatever they are called."""

    name: str
    prefill: StagePolicy = StagePolicy()
    decode: StagePolicy = StagePolicy()
    summary: str = ""
    storage: str = "uniform"
    on_fallback: str = "warn"
    on_misfit: str = "smaller-group"
    kv: KvPolicy = KvPolicy()
    serving: ServingPolicy = ServingPolicy()
    keep: tuple[Keep, ...] = ()

    @property
    def digest(self) -> str:
        """12 hex digits of SHA-256 over everything but name and summary."""
        body = msgspec.to_builtins(msgspec.structs.replace(self, name="", summary=""))
        for stage in STAGES:  # the digests of policies without one stay what they were
            if not body[stage]["source"]:
                del body[stage]["source"]
        return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()[:12]

    def stage(self, stage: Stage) -> StagePolicy:
        return self.prefill if stage == "prefill" else self.decode

    @property
    def apart(self) -> bool:
        """True where the stages read different checkpoints, and so share no byte."""
        return self.prefill.source != self.decode.source

    @property
    def staged(self) -> bool:
        return self.prefill != self.decode

    def format_for(self, module: str, stage: Stage, head: bool = False) -> Format:
        """The format of the linear layer ``module`` (dotted name) in ``stage``. First matching [[keep]] wins; the output
        head (``head``, or one of its usual names) stays in the model's dtype unless a [[keep]] names it: by its own name,
        or as lm_head, whatever it is called."""
        head = head or is_head(module)
        names = (module, "lm_head") if head else (module,)
        for keep in self.keep:
            if stage in keep.stages and any(fnmatch.fnmatchcase(n, p) for p in keep.modules for n in names):
                return keep.format
        if head:
            return Format()
        return self.stage(stage).format

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """A sentence for each pattern of [[keep]] that names none of the model's linear layers: mistyped, most often,
        or of another family."""
        names = list(modules)
        names += ["lm_head"] if any(map(is_head, names)) else []  # what any head answers to
        return [
            f"[[keep]] {pattern!r} names no linear layer of this model"
            for keep in self.keep
            for pattern in keep.modules
            if not fnmatch.filter(names, pattern)
        ]

    def with_stage(self, stage: Stage, value: StagePolicy) -> Policy:
        """The same policy with one stage replaced: named after what it does, marked unsaved with a trailing *. A stage
        keeps its source unless the new one names another."""
        value = msgspec.structs.replace(value, source=value.source or self.stage(stage).source)
        prefill = value if stage == "prefill" else self.prefill
        decode = value if stage == "decode" else self.decode
        storage = stored_as(prefill.format, decode.format, self.storage, prefill.source != decode.source)
        policy = msgspec.structs.replace(self, prefill=prefill, decode=decode, storage=storage)
        return msgspec.structs.replace(
            policy, name=policy.natural_name + "*", summary="unsaved, made in the app"
        )

    def with_kv(self, kv: KvPolicy) -> Policy:
        """The same policy with another KV cache, named and marked likewise."""
        policy = msgspec.structs.replace(self, kv=kv)
        return msgspec.structs.replace(
            policy, name=policy.natural_name + "*", summary="unsaved, made in the app"
        )

    @property
    def natural_name(self) -> str:
        """What the policy does with weights and KV cache, as a legal name."""
        prefill, decode = self.prefill.format.label, self.decode.format.label
        name = prefill if self.prefill == self.decode else f"{prefill}-prefill-{decode}-decode"
        if self.storage == "transient":
            name = f"transient-{name}"
        return name + self.kv.suffix


def natural_storage(prefill: Format, decode: Format) -> str:
    """The storage class that two formats need: one set of bytes (uniform or shared), one that a stage reads half of
    (nested), or two (dual)."""
    if prefill == decode:
        return "uniform"
    if prefill.storage_key == decode.storage_key:
        return "shared"
    return "nested" if {prefill.weights, decode.weights} == {"nested16", "int8"} else "dual"


def can_be_transient(prefill: Format, decode: Format) -> bool:
    """May prefill dequantize what decode reads, one layer at a time? Where both are the same 4-bit weights."""
    return prefill == decode and prefill.kind.groups and prefill.activations == "model"


def stored_as(prefill: Format, decode: Format, declared: str, apart: bool = False) -> str:
    """The storage class of two formats, where ``declared`` is what a policy said before: transient stays where it can.
    ``apart``: each stage has a checkpoint of its own."""
    if apart:
        return "dual"
    natural = natural_storage(prefill, decode)
    return declared if declared == "transient" and can_be_transient(prefill, decode) else natural


# -- TOML ------------------------------------------------------------------------------------------------------------

_TOP = {
    "schema",
    "name",
    "summary",
    "storage",
    "on_fallback",
    "on_misfit",
    "prefill",
    "decode",
    "kv",
    "serving",
    "keep",
}
_STAGE = {"weights", "activations", "group_size", "source"}
_KEEP = {"modules", "weights", "activations", "group_size", "stages"}
_KV = {"prefill", "decode", "convert", "keys", "group_size"}
_SERVING = {"mixed"}


class _Reader:
    """Checks one document; every complaint names file, key and the legal values."""

    def __init__(self, origin: str, text: str) -> None:
        self.origin = origin
        self.lines = text.splitlines()

    def fail(self, key: str, message: str, hint: str | None = None) -> UsageError:
        return UsageError(f"{self.origin}{self._line(key)}: {key}: {message}", hint)

    def _line(self, key: str) -> str:
        """tomllib keeps no line numbers; the last part of the key is looked up in its section of the text."""
        *section, leaf = key.split(".")
        section_name = section[-1].split("[")[0] if section else ""
        inside = not section_name
        for number, line in enumerate(self.lines, 1):
            stripped = line.strip()
            if stripped.startswith("["):
                here = stripped.strip("[] ")
                if not section_name and here == leaf:
                    return f":{number}"
                inside = here == section_name
            elif inside and stripped.split("=")[0].strip().strip('"') == leaf:
                return f":{number}"
        return ""

    def table(self, doc: dict[str, Any], key: str, allowed: set[str]) -> dict[str, Any]:
        value = doc.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "must be a table", f"write it as [{key}]")
        self.known(value, allowed, key + ".")
        return value

    def known(self, table: dict[str, Any], allowed: set[str], prefix: str = "") -> None:
        for key in table:
            if key not in allowed:
                near = difflib.get_close_matches(key, sorted(allowed), 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise self.fail(prefix + key, "unknown key", f"{hint}legal: {', '.join(sorted(allowed))}")

    def choice(
        self, table: dict[str, Any], key: str, legal: tuple[str, ...], default: str, prefix: str = ""
    ) -> str:
        value = table.get(key, default)
        if value not in legal:
            raise self.fail(prefix + key, f"{value!r} is not a legal value", f"legal: {', '.join(legal)}")
        return str(value)

    def text(self, table: dict[str, Any], key: str, default: str) -> str:
        value = table.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {type(value).__name__}")
        return value

    def format(self, table: dict[str, Any], prefix: str) -> Format:
        weights = self.choice(table, "weights", WEIGHTS, "bf16", prefix)
        activations = self.choice(table, "activations", ACTIVATIONS, "model", prefix)
        group = table.get("group_size", default_of(weights).group_size)
        if isinstance(group, bool) or not isinstance(group, int):
            raise self.fail(prefix + "group_size", f"must be a whole number, not {group!r}")
        fmt = Format(weights, activations, group)
        wrong = wrong_with(fmt)
        if wrong is not None:
            key, message, hint = wrong
            raise self.fail(prefix + key, message, hint)
        return fmt

    def source(self, table: dict[str, Any], prefix: str) -> str:
        value = table.get("source", "")
        if not isinstance(value, str) or (not value.strip() and "source" in table):
            raise self.fail(
                prefix + "source",
                f"{value!r} is not a legal value",
                "a model directory or a hub id; leave it out for the model itself",
            )
        return value

    def kv(self, doc: dict[str, Any]) -> KvPolicy:
        table = self.table(doc, "kv", _KV)
        prefill = self.choice(table, "prefill", KV_DTYPES, "bf16", "kv.")
        decode = self.choice(table, "decode", KV_DTYPES, "bf16", "kv.")
        group = table.get("group_size", 0)
        if isinstance(group, bool) or group not in KV_GROUP_SIZES:
            raise self.fail(
                "kv.group_size",
                f"{group!r} is not a legal group size",
                f"legal: {', '.join(map(str, KV_GROUP_SIZES))} (0: the whole row of a head)",
            )
        kv = KvPolicy(
            prefill,
            decode,
            self.choice(table, "convert", KV_CONVERT, natural_convert(prefill, decode), "kv."),
            self.choice(table, "keys", KV_KEYS, "token", "kv."),
            int(group),
        )
        bad = misfit(kv)
        if bad is not None:
            raise self.fail(f"kv.{bad.key}", bad.message, bad.hint)
        return kv

    def keep(self, doc: dict[str, Any]) -> tuple[Keep, ...]:
        entries = doc.get("keep", [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise self.fail("keep", "must be an array of tables", "write each as [[keep]]")
        found = []
        for index, entry in enumerate(entries):
            prefix = f"keep[{index}]."
            self.known(entry, _KEEP, prefix)
            modules = entry.get("modules")
            if isinstance(modules, str):
                modules = [modules]
            if (
                not modules
                or not isinstance(modules, list)
                or not all(isinstance(m, str) and m for m in modules)
            ):
                raise self.fail(
                    prefix + "modules", "must be a list of module name patterns", 'e.g. ["*.layers.0.*"]'
                )
            stages = entry.get("stages", list(STAGES))
            if not isinstance(stages, list) or not stages or any(s not in STAGES for s in stages):
                raise self.fail(prefix + "stages", f"{stages!r} is not legal", "legal: prefill, decode")
            fmt = self.format({k: v for k, v in entry.items() if k not in ("modules", "stages")}, prefix)
            found.append(Keep(tuple(modules), fmt.weights, fmt.activations, fmt.group_size, tuple(stages)))
        return tuple(found)


def parse_policy(text: str, origin: str = "policy") -> Policy:
    """Parse and validate one policy file. ``origin`` is the file name used in messages. Raises UsageError."""
    doc = toml.parse(text, origin)
    r = _Reader(origin, text)
    r.known(doc, _TOP)
    schema = doc.get("schema")
    if schema is True or schema != SCHEMA:  # True == 1, and is no version
        raise r.fail("schema", f"is {schema!r}, this version reads {SCHEMA}", f"write schema = {SCHEMA}")
    name = r.text(doc, "name", "")
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise r.fail("name", f"{name!r} is not a legal name", "letters, digits, - _ and . (not first)")
    tables = {stage: r.table(doc, stage, _STAGE) for stage in STAGES}
    prefill, decode = (r.format(tables[stage], f"{stage}.") for stage in STAGES)
    sources = [r.source(tables[stage], f"{stage}.") for stage in STAGES]
    apart = sources[0] != sources[1]
    storage = r.choice(doc, "storage", STORAGE, "dual" if apart else natural_storage(prefill, decode))
    needed = stored_as(prefill, decode, storage, apart)
    if apart and storage != needed:
        raise r.fail(
            "storage",
            f"is {storage!r}, but stages with different sources share no byte: they are 'dual'",
            'write storage = "dual"',
        )
    if storage == "transient" != needed:
        raise r.fail(
            "storage",
            f"is {storage!r}, which needs the same 4-bit weights in both stages: prefill dequantizes them one layer at a"
            f" time; here they are {prefill.label} and {decode.label}",
            f'write storage = "{needed}", or the same weights = "int4", "nf4" or "fp4" in both stages',
        )
    if storage != needed:
        raise r.fail(
            "storage",
            f"is {storage!r}, but {prefill.label} in prefill and {decode.label} in decode are {needed!r}",
            f'write storage = "{needed}"',
        )
    serving = r.table(doc, "serving", _SERVING)
    return Policy(
        name=name,
        summary=r.text(doc, "summary", ""),
        prefill=StagePolicy(prefill.weights, prefill.activations, prefill.group_size, sources[0]),
        decode=StagePolicy(decode.weights, decode.activations, decode.group_size, sources[1]),
        storage=storage,
        on_fallback=r.choice(doc, "on_fallback", ON_FALLBACK, "warn"),
        on_misfit=r.choice(doc, "on_misfit", ON_MISFIT, "smaller-group"),
        kv=r.kv(doc),
        serving=ServingPolicy(r.choice(serving, "mixed", MIXED, "split", "serving.")),
        keep=r.keep(doc),
    )


def load_policy(path: Path) -> Policy:
    """Read one policy file. Raises UsageError with the file's name."""
    try:
        text = toml.read_text(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    return parse_policy(text, str(path))


def policy_to_toml(policy: Policy) -> str:
    """The policy as a commented TOML document that ``parse_policy`` reads back to an equal policy."""
    import tomlkit  # the app's first screen reads policies and writes none

    doc = tomlkit.document()
    doc["schema"] = SCHEMA
    doc["name"] = policy.name.rstrip("*")
    doc["summary"] = policy.summary
    doc["storage"] = policy.storage
    doc["storage"].comment(f"{' | '.join(STORAGE)}: declared and checked")
    doc["on_fallback"] = policy.on_fallback
    doc["on_misfit"] = policy.on_misfit
    doc["on_misfit"].comment(f"{' | '.join(ON_MISFIT)}: when a group size does not divide a layer")
    for stage in STAGES:
        table = _filled(tomlkit.table(), policy.stage(stage).format)
        if policy.stage(stage).source:
            table["source"] = policy.stage(stage).source
        doc[stage] = table
    kv = tomlkit.table()
    kv.update({"prefill": policy.kv.prefill, "decode": policy.kv.decode, "convert": policy.kv.convert})
    if policy.kv.keys != "token":
        kv["keys"] = policy.kv.keys
    if policy.kv.group_size:
        kv["group_size"] = policy.kv.group_size
    doc["kv"] = kv
    serving = tomlkit.table()
    serving["mixed"] = policy.serving.mixed
    doc["serving"] = serving
    if policy.keep:
        entries = tomlkit.aot()
        for keep in policy.keep:
            entry = _filled(tomlkit.table(), keep.format)
            entry["modules"] = list(keep.modules)
            if keep.stages != STAGES:
                entry["stages"] = list(keep.stages)
            entries.append(entry)
        doc["keep"] = entries
    return tomlkit.dumps(doc)


def _filled(table: Any, fmt: Format) -> Any:
    """``table`` with the format's keys; those that are at their default are left out."""
    table["weights"] = fmt.weights
    if fmt.activations != "model":
        table["activations"] = fmt.activations
    if fmt.group_size:
        table["group_size"] = fmt.group_size
    return table
