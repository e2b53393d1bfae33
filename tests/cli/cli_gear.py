"""What the command-line tests share: the type of their runner, and the environment of a process of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from shared_peaks import share

Pdq = Callable[..., "subprocess.CompletedProcess[str]"]
REPO = Path(__file__).resolve().parents[2]
#: Importing torch takes a second on an idle machine and half a minute on a crowded one.
PATIENCE_S = 240


def environment(home: Path, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PDQ_", "TEXTUAL"))}
    env |= {"PDQ_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    # Each test has an empty cache: compiling would be most of its time, and has tests of its own.
    env |= {"PDQ_ENGINE_LAYERS": "eager", "PDQ_ENGINE_KERNELS": "torch"}
    share(home / "cache")
    return env | more
