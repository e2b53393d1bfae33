"""llama.cpp as an outside reference: built for this machine, in its own environment, run in its own process.

    python -m tests.benchmarks.llama_peer            builds it (ten minutes on two cores) and prints its system line

Formats are made from the demo model's GGUF by ``llama_model_quantize``, requantizing where the file is quantized already: for speed alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path
from typing import Any, Final

from pdq_tui import locations

VERSION: Final = "0.3.36"
#: What runs there; it knows nothing of this project.
CHILD: Final = Path(__file__).with_name("llama_child.py")
#: llama_ftype of what is compared: none of llama.cpp's is left out that its users would choose for so small a model.
FORMATS: Final = {"F16": 1, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
BUILD_TIMEOUT_S: Final = 3600


def environment() -> Path:
    """The folder of the environment that llama.cpp is installed in."""
    return locations.cache_dir() / "bench" / f"llama-cpp-{VERSION}"


def build() -> Path:
    """The python of an environment with llama.cpp, built natively where it is not there yet. Raises CalledProcessError."""
    folder = environment()
    python = folder / "bin" / "python"
    if not (folder / "built").exists():
        venv.create(folder, with_pip=True)
        build_tools = ["scikit-build-core", "cmake", "ninja", "pathspec", "pyproject-metadata"]
        _pip(python, *build_tools, "numpy", "typing-extensions", "diskcache", "jinja2")
        flags = {
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()),
        }
        _pip(
            python,
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
            f"llama-cpp-python=={VERSION}",
            **flags,
        )
        (folder / "built").touch()
    return python


def _pip(python: Path, *words: str, **environ: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", *words]
    subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S, env={**os.environ, **environ})


class Peer:
    """One model file in a process of llama.cpp's. ``system``: what it says about the machine that it was built for."""

    def __init__(self, python: Path, gguf: Path, threads: int, capacity: int) -> None:
        command = [str(python), str(CHILD), "serve", str(gguf), str(threads), str(capacity)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.system: str = self._answer()["system"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, ids: list[int], new: int) -> dict[str, float]:
        """Prefill in ms, and ms a decode step, of one request with greedy tokens."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "new": new}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def quantized(python: Path, gguf: Path, folder: Path) -> dict[str, Path]:
    """A file of each of FORMATS, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, ftype in FORMATS.items():
        made[name] = folder / f"{gguf.stem.split('.')[0]}.{name}.gguf"
        if not made[name].exists():
            part = made[name].with_suffix(".part")
            command = [str(python), str(CHILD), "quantize", str(gguf), str(part), str(ftype)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            part.replace(made[name])
    return made


if __name__ == "__main__":
    print(build())
