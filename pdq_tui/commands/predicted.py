"""Predictions of policies on a model directory, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pdq_tui import locations
from pdq_tui.commands.common import columns, one_of, settings
from pdq_tui.commands.flags import DEMO
from pdq_tui.core.kernels import DEVICES, Capability, KernelTable, load_kernels
from pdq_tui.core.policy import Policy
from pdq_tui.core.predict import REFUSED, Prediction, StagePrediction, predict
from pdq_tui.core.shapes import read_shapes
from pdq_tui.errors import UsageError


def directory(model: str) -> Path:
    """Where a model named on the command line lies; "demo" is the newest converted copy. Raises UsageError."""
    if model != DEMO:
        return Path(model).expanduser()
    copies = sorted(locations.demo_dir().glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    if not copies:
        raise UsageError("the demo model was not converted yet", "open it once: pdq-tui, or pdq-tui run demo")
    return copies[-1].parent


#: This machine, as the engine sees it, in place of a kind of device.
HERE: Final = "here"


@dataclass(frozen=True)
class On:
    """The kernels of a device. ``capability`` None: of a plain one of its kind. ``tuned``: what is said of the tuned kernel
    table; "" where nobody asked."""

    table: KernelTable
    capability: Capability | None = None
    tuned: str = ""


def device(word: str) -> On:
    """ "cpu" and "cuda": a plain one, with the shipped order of kernels. "here": this machine's own, with what `tune`
    measured first; takes the seconds that importing torch takes. Raises UsageError, PdqError."""
    if word != HERE:
        return On(load_kernels(one_of("--device", word, (*DEVICES, HERE))))
    from pdq_tui.host.machine import look

    engine = settings().settings.engine
    machine = look(engine.device, engine.threads, engine.kernels)
    table, tuned = machine.kernels(engine.tuned)
    return On(table, machine.capability, tuned.text)


def predicted(policy: Policy, model: Path, on: On, prefill_rows: int, decode_rows: int) -> Prediction:
    found = predict(policy, read_shapes(model), on.table, prefill_rows, decode_rows, on.capability)
    return msgspec.structs.replace(found, notes=(*found.notes, on.tuned)) if on.tuned else found


def table(predictions: Sequence[Prediction]) -> str:
    head = (
        "policy",
        "stage",
        "format",
        "kernel",
        "converted",
        "bits/weight",
        "MiB",
        "stored MiB",
        "extra MiB",
        "kept MiB",
        "KV",
        "KV B/token",
    )
    rows, notes = [], []
    for p in predictions:
        for stage, s in p.stages.items():
            share = s.converted_parameters / s.total_parameters if s.total_parameters else 0.0
            first = stage == "prefill"
            rows.append(
                (
                    p.policy if first else "",
                    stage,
                    " + ".join(s.formats),
                    kernels(s),
                    f"{share:.1%}",
                    "-" if s.bits_per_weight is None else f"{s.bits_per_weight:.2f}",
                    mib(s.bytes),
                    mib(p.stored_bytes) if first else "",
                    mib(p.extra_bytes) if first else "",
                    mib(p.kept_bytes) if first else "",
                    p.kv if first else "",
                    kv_bytes(p, stage),
                )
            )
            for left in s.left:
                names = ", ".join(left.modules[:3]) + (" …" if len(left.modules) > 3 else "")
                notes.append(f"{p.policy}, {stage}: {len(left.modules)} left ({names}): {left.reason}")
        if p.kv_bytes_per_token is None:
            notes.append(f"{p.policy}: KV cache per token is not known: {p.kv_reason}")
        notes += [f"{p.policy}: {note}" for note in p.notes if note.startswith(REFUSED)]
    notes += dict.fromkeys(note for p in predictions for note in p.notes if not note.startswith(REFUSED))
    return columns(rows, head) + "".join(f"- {note}\n" for note in notes)


def kernels(s: StagePrediction) -> str:
    """Names, of the most layers first."""
    return " + ".join(sorted(s.kernels, key=lambda name: -s.kernels[name]))


def kv_bytes(p: Prediction, stage: str) -> str:
    """Of one token, as ``stage`` reads the cache."""
    size = p.kv_prefill_bytes_per_token if stage == "prefill" else p.kv_bytes_per_token
    return "-" if size is None else str(size)


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
