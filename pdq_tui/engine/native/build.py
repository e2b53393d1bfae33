"""Building the library of kernels: ``python -m pdq_tui.engine.native.build PARENT COMPILER LIBRARY``.

A process of its own, so that it can be left in the middle; torch is not imported, only its headers are looked up.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from pdq_tui.engine.process import die_with_parent

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)  # gcc 12 warns of its own headers


def command(compiler: str, library: Path) -> list[str]:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    return [
        compiler,
        *FLAGS,
        f"-I{torch / 'include'}",
        str(Path(__file__).parent / "ops.cpp"),
        "-o",
        str(library),
        f"-L{torch / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]


def main() -> None:
    compiler, library = sys.argv[2], Path(sys.argv[3])
    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_name(f"{library.name}.{os.getpid()}.part")
    try:
        done = subprocess.run(
            command(compiler, part),
            check=False,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,
        )
        if done.returncode:
            sys.stderr.write(done.stderr)
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            sys.stdout.write(errors[0].strip() + "\n")
            raise SystemExit(1)
        part.replace(library)  # two engines may build at once: each replaces a whole file by a whole one
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main()
