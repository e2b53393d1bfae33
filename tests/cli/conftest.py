"""The command line as a person has it: a real process, a home of its own, no terminal unless asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_gear import PATIENCE_S, REPO, Pdq, environment


@pytest.fixture
def pdq(own_home: Path, tmp_path: Path) -> Pdq:
    """``pdq("policies", "list", PDQ_RUN_BLOCKS="3")``: runs it in a folder of its own and returns what came of it."""

    def call(*words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", "pdq_tui", *words],
            cwd=cwd or tmp_path,
            env=environment(own_home, **more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return call


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, made by a process of its own so that these tests never import torch."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    maker = REPO / "tests" / "proc" / "tiny_model.py"
    subprocess.run([sys.executable, str(maker), str(folder)], check=True, capture_output=True)
    return folder
