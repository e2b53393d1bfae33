"""What a result file must say about the machine that its figures come from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

from pdq_tui.engine.device import CpuDevice


def machine() -> dict[str, Any]:
    info = CpuDevice().info()
    return {
        "cpu": info.cpu,
        "isa": info.isa,
        "threads": info.threads,
        "cores": os.cpu_count(),
        "memory_bytes": info.memory_bytes,
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in ("torch", "transformers", "textual", "polars")},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
