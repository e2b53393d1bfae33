"""pdq-tui: per-stage (prefill / decode) quantization, toggled live and measured honestly on your own box."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"


def staged(model: Any, policy: Any, **options: Any) -> Any:
    """A drop-in for a transformers causal LM that runs each stage as ``policy`` says; see ``pdq_tui.engine.dropin.staged``."""
    # By name: torch is loaded by who asks for this, and by nobody else.
    return importlib.import_module("pdq_tui.engine.dropin").staged(model, policy, **options)
