"""Settings in layers, every value with its origin: flags > environment PDQ_* > project pdq.toml > user file > default.

A setting is declared once, here, with its unit, its legal values and what it does; ``config show``, ``config init``
and every error message are made from that declaration. An unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pdq_tui import locations
from pdq_tui.core import toml
from pdq_tui.core.workload import CHAT_TEMPLATES, LAYERS
from pdq_tui.errors import UsageError

PROJECT_FILE: Final = "pdq.toml"
#: Environment names that start with PDQ_ and are no settings.
RESERVED: Final = ("PDQ_HOME",)


@dataclass(frozen=True)
class Declared:
    """One setting: its dotted ``key`` in files, type, default, unit, legal values and meaning."""

    key: str
    kind: type
    optional: bool
    default: Any
    doc: str
    unit: str
    choices: tuple[str, ...]
    least: float | None
    attribute: str

    @property
    def env(self) -> str:
        return "PDQ_" + self.key.replace(".", "_").upper()


def _setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    key: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
) -> Any:
    return field(
        default=default, metadata={"doc": doc, "unit": unit, "key": key, "choices": choices, "least": least}
    )


@dataclass(frozen=True)
class WorkloadSettings:
    """What is run."""

    model: str = _setting("demo", "model that is opened without being named: demo, a directory, or a hub id")
    prompt_tokens: int = _setting(512, "prompt length of the built-in sets", unit="tokens", key="in", least=1)
    output_tokens: int = _setting(
        64, "new tokens a request; the first comes from prefill", unit="tokens", key="out", least=1
    )
    batch: int = _setting(1, "requests a pass, left-padded to the longest", unit="requests", least=1)
    prompts: str = _setting("mixed", "prompt set (short, long, mixed) or a text or JSONL file")
    chat_template: str = _setting(
        "auto", "auto: the model's template for chats, not for texts; none: never", choices=CHAT_TEMPLATES
    )
    seed: int = _setting(0, "seed of the prompts' and the blocks' order", least=0)


@dataclass(frozen=True)
class PoliciesSettings:
    """The two policies that the app opens with."""

    a: str = _setting("w8a8-prefill-int4-decode", "policy of arm A")
    b: str = _setting("bf16", "policy of arm B, the reference")


@dataclass(frozen=True)
class EngineSettings:
    """Where and how the engine runs."""

    device: str = _setting("auto", "auto takes a GPU where there is one", choices=("auto", "cuda", "cpu"))
    gpu: str | None = _setting(None, "which GPU: index or UUID; several (0,1 or all) share one model")
    threads: int | None = _setting(
        None, "CPU threads; never more than affinity and quota allow", unit="threads", least=1
    )
    weight_budget: float | None = _setting(
        None, "most that packed weights of all policies may take together", unit="GiB", least=0.001
    )
    layers: str = _setting(
        "auto",
        "auto decodes by layers of our own, or compiled (seconds, once a kind and machine), where a C++ compiler is; eager by "
        "transformers' modules",
        choices=LAYERS,
    )
    kernels: str = _setting(
        "auto",
        "auto builds this project's own CPU kernels where a C++ compiler and AVX2 are (seconds, once a machine); torch "
        "uses those of torch only",
        choices=("auto", "torch"),
    )
    prefill_rows: int | None = _setting(
        None,
        "most rows (tokens x requests) of a prompt that run at once, longer ones in pieces; left out, as the kernel table "
        "says; 0 never cuts one",
        unit="rows",
        least=0,
    )
    tuned: str = _setting(
        "auto",
        "auto takes the kernels that `pdq-tui tune` measured as fastest on this machine; off keeps the order of the tables",
        choices=("auto", "off"),
    )


@dataclass(frozen=True)
class RunSettings:
    """A measurement."""

    blocks: int = _setting(
        10, "ABBA blocks; fewer than 10 give no judgement of their own", unit="blocks", least=1
    )
    budget: float | None = _setting(
        None, "stop measuring after this, whatever is done", unit="seconds", least=0.001
    )
    min_effect: float = _setting(
        0.01, "smallest difference that may be called better or worse", unit="fraction", least=0.0
    )
    trace_every: float | None = _setting(
        None,
        "while the app's loop runs, profile a burst of the arm in turn this often (its file replaces the last one)",
        unit="seconds",
        least=10,
    )
    energy_every: float | None = _setting(
        None,
        "while the app's loop runs, measure energy by stage of the arm in turn this often; takes half a minute each time, and a counter",
        unit="seconds",
        least=60,
    )
    dir: str | None = _setting(None, "where runs are kept, in place of the state directory (for NFS homes)")


@dataclass(frozen=True)
class GuardSettings:
    """In the app: requests of arm A re-scored by the resident baseline B, and the limits at which B takes over."""

    every: int = _setting(
        0,
        "every so many requests of arm A one is re-scored by arm B in one pass; 0: none",
        unit="requests",
        least=0,
    )
    kld: float = _setting(
        0.031, "arm B takes over where the mean KLD of the last checks is larger", unit="nats", least=0.0
    )
    window: int = _setting(
        5, "checks that the mean is over; it decides from the third on", unit="checks", least=1
    )
    errors: float = _setting(
        0.05,
        "arm B takes over where a larger share of the last 20 requests fails",
        unit="fraction",
        least=0.0,
    )


@dataclass(frozen=True)
class ScreenSettings:
    """The app's screen."""

    fps: str = _setting("auto", "most redraws: auto or a number", unit="frames a second")
    marker: str = _setting(
        "auto", "what charts are drawn with", choices=("auto", "braille", "block", "ascii")
    )
    ascii: bool = _setting(False, "draw everything in ASCII")
    theme: str = _setting("auto", "auto, pdq-dark, pdq-light, pdq-contrast, or any of Textual's")
    mouse: bool = _setting(True, "take the mouse; false leaves selection to the terminal")


@dataclass(frozen=True)
class Settings:
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    policies: PoliciesSettings = field(default_factory=PoliciesSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    run: RunSettings = field(default_factory=RunSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    screen: ScreenSettings = field(default_factory=ScreenSettings)
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """``settings``, and where each value came from (dotted key → origin). ``files``: those that were read."""

    settings: Settings
    origins: dict[str, str]
    files: tuple[Path, ...]


SECTIONS: Final[dict[str, type]] = {
    "workload": WorkloadSettings,
    "policies": PoliciesSettings,
    "engine": EngineSettings,
    "run": RunSettings,
    "guard": GuardSettings,
    "screen": ScreenSettings,
}
#: Free tables: any name → text.
TABLES: Final = {"keys": 'other keys for the app\'s bindings: binding id = key, e.g. snapshot = "f2"'}


def _declare() -> dict[str, Declared]:
    found = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            parts = [t for t in typing.get_args(hints[f.name]) if t is not type(None)]
            key = f"{section}.{f.metadata['key'] or f.name}"
            found[key] = Declared(
                key=key,
                kind=parts[0] if parts else hints[f.name],
                optional=bool(parts),
                default=f.default,
                doc=f.metadata["doc"],
                unit=f.metadata["unit"],
                choices=f.metadata["choices"],
                least=f.metadata["least"],
                attribute=f.name,
            )
    return found


DECLARED: Final = _declare()


def load(
    flags: Mapping[str, tuple[str, Any]] | None = None,
    *,
    config: Path | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """Merge all layers.

    flags    dotted key → (the flag's name, its value); None means not given.
    config   read in place of the user file; must exist.
    folder   where the project's pdq.toml is looked for, by default the current directory.

    Raises UsageError naming file, line, key and the legal values.
    """
    values: dict[str, Any] = {key: d.default for key, d in DECLARED.items()}
    origins = dict.fromkeys(values, "default")
    tables: dict[str, dict[str, str]] = {name: {} for name in TABLES}
    files = []
    for path, needed in (
        (config or locations.config_file(), config is not None),
        ((folder or Path()) / PROJECT_FILE, False),
    ):
        text = _text(path, needed)
        if text is not None:
            files.append(path)
            _apply_file(path, text, values, origins, tables)
    _apply_environment(os.environ if environment is None else environment, values, origins)
    for key, (flag, value) in (flags or {}).items():
        if value is not None:
            values[key] = _checked(DECLARED[key], value, flag)
            origins[key] = f"flag {flag}"
    return Loaded(_build(values, tables), origins, tuple(files))


def _build(values: Mapping[str, Any], tables: Mapping[str, Mapping[str, str]]) -> Settings:
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        parts[key.partition(".")[0]][DECLARED[key].attribute] = value
    return Settings(
        workload=WorkloadSettings(**parts["workload"]),
        policies=PoliciesSettings(**parts["policies"]),
        engine=EngineSettings(**parts["engine"]),
        run=RunSettings(**parts["run"]),
        guard=GuardSettings(**parts["guard"]),
        screen=ScreenSettings(**parts["screen"]),
        keys=tables["keys"],
    )


# -- files ---------------------------------------------------------------------------------------------------------------


def _text(path: Path, needed: bool) -> str | None:
    try:
        return toml.read_text(path)
    except FileNotFoundError:
        if needed:
            raise UsageError(
                f"{path}: no such configuration file", "`pdq-tui config init` writes one"
            ) from None
        return None


def _apply_file(
    path: Path,
    text: str,
    values: dict[str, Any],
    origins: dict[str, str],
    tables: dict[str, dict[str, str]],
) -> None:
    doc = toml.parse(text, str(path))
    for section, body in doc.items():
        line = line_of(text, section)
        if section not in SECTIONS and section not in TABLES:
            raise _unknown(f"{path}{line}", section, [*SECTIONS, *TABLES])
        if not isinstance(body, dict):
            raise UsageError(f"{path}{line}: {section}: must be a table", f"write it as [{section}]")
        for name, value in body.items():
            where = f"{path}{line_of(text, section, name)}"
            if section in TABLES:
                if not isinstance(value, str):
                    raise UsageError(f"{where}: {section}.{name}: must be a string, not {value!r}")
                tables[section][name] = value
                origins[f"{section}.{name}"] = where
                continue
            key = f"{section}.{name}"
            if key not in DECLARED:
                raise _unknown(where, key, [k for k in DECLARED if k.startswith(section + ".")])
            values[key] = _checked(DECLARED[key], value, f"{where}: {key}")
            origins[key] = where


def _unknown(where: str, key: str, legal: list[str]) -> UsageError:
    near = difflib.get_close_matches(key, legal or list(DECLARED), 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return UsageError(f"{where}: {key}: unknown key", f"{hint}legal: {', '.join(legal)}")


def line_of(text: str, section: str, name: str | None = None) -> str:
    """``:<line>`` of a section's header, or of a key in it; empty where it is written in another way (dotted,
    inline): tomllib keeps no line numbers."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            inside = stripped.split("#")[0].strip("[] ") == section
            if inside and name is None:
                return f":{number}"
            continue
        left = stripped.split("=")[0].strip(" \"'")
        if left in (section, f"{section}.{name}") or (inside and left == name):
            return f":{number}"
    return ""


# -- environment and values ----------------------------------------------------------------------------------------------


def _apply_environment(
    environment: Mapping[str, str], values: dict[str, Any], origins: dict[str, str]
) -> None:
    by_env = {d.env: d for d in DECLARED.values()}
    prefixes = tuple(f"PDQ_{section.upper()}_" for section in SECTIONS)
    for name, text in environment.items():
        declared = by_env.get(name)
        if declared is not None:
            if text:
                values[declared.key] = _checked(declared, _from_text(declared, text, name), name)
                origins[declared.key] = f"environment {name}"
        elif name.startswith(prefixes) and name not in RESERVED:
            near = difflib.get_close_matches(name, by_env, 1)
            hint = f"did you mean {near[0]}?" if near else None
            raise UsageError(f"{name}: no such setting in the environment", hint)


def _from_text(declared: Declared, text: str, where: str) -> Any:
    if declared.kind is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise UsageError(f"{where}: {text!r} is not a legal value", "legal: true, false")
        return words[text.lower()]
    if declared.kind in (int, float):
        try:
            return int(text) if declared.kind is int else float(text)
        except ValueError:
            raise UsageError(f"{where}: {text!r} is not a number", f"in {declared.unit or 'units'}") from None
    return text


def _checked(declared: Declared, value: Any, where: str) -> Any:
    """``value`` in the setting's type. Raises UsageError with the legal values."""
    kind: Any = declared.kind
    unit = f" {declared.unit}" if declared.unit else ""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise UsageError(f"{where}: must be {names[kind]}{f' of{unit}' if unit else ''}, not {value!r}")
    if declared.choices and value not in declared.choices:
        raise UsageError(f"{where}: {value!r} is not a legal value", f"legal: {', '.join(declared.choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: {value} is no finite number", f"a number{unit}")
    if declared.least is not None and not value >= declared.least:
        raise UsageError(f"{where}: {value} is too small", f"at least {declared.least:g}{unit}")
    if declared.key == "screen.fps" and value != "auto":
        _check_fps(value, where)
    return value


def _check_fps(value: str, where: str) -> None:
    try:
        good = 0.1 <= float(value) <= 60
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{where}: {value!r} is not a legal value", "legal: auto, or 0.1 to 60")


# -- as TOML ----------------------------------------------------------------------------------------------------------------


def show(loaded: Loaded) -> str:
    """The merged settings as TOML that can be read back, each with its unit and origin as a comment."""
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        part = getattr(loaded.settings, section)
        for d in _of(section):
            value = getattr(part, d.attribute)
            unit = f"{d.unit}; " if d.unit else ""
            name = d.key.partition(".")[2]
            text = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
            lines.append(f"{text}  # {unit}{loaded.origins[d.key]}")
        lines.append("")
    lines.append("[keys]")
    for name, value in loaded.settings.keys.items():
        lines.append(f"{_toml(name)} = {_toml(value)}  # {loaded.origins[f'keys.{name}']}")
    return "\n".join(lines) + "\n"


def template() -> str:
    """A configuration file in which everything is explained and nothing is set."""
    lines = [
        "# pdq-tui settings. Take the # away from a line to change it; `pdq-tui config show` tells what holds.",
        "",
    ]
    for section, cls in SECTIONS.items():
        lines += [f"[{section}]  # {str(cls.__doc__).rstrip('.')}"]
        for d in _of(section):
            unit = f" ({d.unit})" if d.unit else ""
            legal = f"; legal: {', '.join(d.choices)}" if d.choices else ""
            lines.append(f"# {d.doc}{unit}{legal}; also {d.env}")
            value = "" if d.default is None else f" {_toml(d.default)}"
            lines.append(f"# {d.key.partition('.')[2]} ={value}")
        lines.append("")
    for name, doc in TABLES.items():
        lines += [f"[{name}]  # {doc}"]
    return "\n".join(lines) + "\n"


def _of(section: str) -> list[Declared]:
    return [d for key, d in DECLARED.items() if key.startswith(section + ".")]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        body = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in body) + '"'
    return repr(value)
