"""Predictions of policies on a model directory, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdq_tui import locations
from pdq_tui.commands.common import columns
from pdq_tui.commands.flags import DEMO
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy
from pdq_tui.core.predict import REFUSED, Prediction, predict
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


def predicted(policy: Policy, model: Path, device: str, prefill_rows: int, decode_rows: int) -> Prediction:
    return predict(policy, read_shapes(model), load_kernels(device), prefill_rows, decode_rows)


def table(predictions: Sequence[Prediction]) -> str:
    head = (
        "policy",
        "stage",
        "format",
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


def kv_bytes(p: Prediction, stage: str) -> str:
    """Of one token, as ``stage`` reads the cache."""
    size = p.kv_prefill_bytes_per_token if stage == "prefill" else p.kv_bytes_per_token
    return "-" if size is None else str(size)


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
