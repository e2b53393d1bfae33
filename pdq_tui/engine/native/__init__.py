"""Kernels of our own for packed weights on a CPU with AVX2, in C++, built once a machine by the compiler that is there.

torch's kernels for one row of packed weights reach a fifth to a half of the memory's speed on such a CPU, and for many
rows it has nothing but float32 products. Here activations become 16-bit whole numbers (``activations.h``), which the
16-bit multiply-add of AVX2 takes two a lane: 2.5 times the multiplications of float32, for any packed format. Where there
is AVX512-VNNI its dot products take four bytes or two such numbers a lane, and with AVX512-BF16 a prompt's attention is
here as well.

A library that cannot be built or loaded is no error: ``ensure`` tells why, and the tables' other candidates are used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from pdq_tui.engine.process import run_module

#: Seconds that building may take; a quiet machine needs twenty.
BUILD_TIMEOUT_S: Final = 300.0
#: What is shown while the compiler runs.
LABEL: Final = "compiling CPU kernels once on this machine"
SOURCES: Final = tuple(sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".h")))
#: Columns of K that the kernels take at a time (``activations.h``), and the least group of weights.
BLOCK: Final = 64
HALF: Final = 32

_NAME: Final = "pdq_native.so"


class _State:
    path: Path | None = None
    reason: str | None = None


def loaded() -> Path | None:
    """The library that this process uses; None where there is none (yet)."""
    return _State.path


def identity() -> str | None:
    """Changes whenever what the loaded library holds does; None where none is loaded."""
    return None if _State.path is None else _State.path.parent.name


def built(folder: Path) -> str | None:
    """The identity that the library of ``folder`` will have here once ``ensure`` has loaded it; None where it is not
    built, or not possible."""
    if not possible():
        return None
    digest = _digest()
    return digest if (folder / digest / _NAME).is_file() else None


def why_not() -> str | None:
    """Why ``ensure`` found that it cannot be had; None where it can, or was not asked."""
    return _State.reason


def possible() -> bool:
    """Linux on x86-64 with AVX2 and a compiler, and nothing failed so far."""
    return (
        _State.reason is None
        and sys.platform == "linux"
        and platform.machine() == "x86_64"
        and torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))
        and compiler() is not None
    )


def compiler() -> str | None:
    """The C++ compiler that is called, by us and by torch's inductor."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def ensure(folder: Path, poll: Callable[[], None]) -> str | None:
    """Build the library into ``folder`` where it is not there yet, and load it: None, or why it cannot be had.

    ``poll`` is called while the compiler runs; what it raises ends the compiler. To be called before capabilities are
    asked for: kernels of the library exist from then on.
    """
    if _State.path is not None or _State.reason is not None:
        return _State.reason
    if not possible():
        _State.reason = "needs Linux on x86-64 with AVX2, and a C++ compiler"
        return _State.reason
    library = folder / _digest() / _NAME
    if not library.is_file():
        _State.reason = _build(library, poll)
    if _State.reason is None:
        load(library)
    return _State.reason


def load(library: Path) -> None:
    """Load a library that ``ensure`` built, here or in the process that started this one."""
    if _State.path is None:
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError as error:
            _State.reason = f"it cannot be loaded: {error}"
            return
        for name in ("dense", "int8", "int4", "nested"):
            torch.library.register_fake(f"pdq_native::{name}", _shape)
        for name in ("norm", "add_norm"):
            torch.library.register_fake(f"pdq_native::{name}", torch.empty_like)
        for name in ("widen_int4", "widen_nested", "add", "turn", "gated"):
            torch.library.register_fake(f"pdq_native::{name}", _nothing)
        if hasattr(torch.ops.pdq_native, "causal"):  # only where AVX512-BF16 was built
            torch.library.register_fake("pdq_native::causal", _prompt_shape)
        _State.path = library


def _shape(x: torch.Tensor, w: torch.Tensor, *_rest: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _nothing(*_given: object) -> None:
    """The fake of an operator that writes into what it is given."""


def _prompt_shape(q: torch.Tensor, *_rest: object) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def _build(library: Path, poll: Callable[[], None]) -> str | None:
    code, lines = run_module(
        "pdq_tui.engine.native.build",
        [str(compiler()), str(library)],
        lambda _: poll(),
        timeout_s=BUILD_TIMEOUT_S,
    )
    if code is None:
        return f"the compiler did not end within {BUILD_TIMEOUT_S:.0f} s"
    if code != 0 or not library.is_file():
        return "the compiler failed: " + (lines[-1] if lines else f"exit code {code}")
    return None


def _digest() -> str:
    """Of everything that decides what the library holds: sources, torch, compiler, and this CPU's instructions."""
    found = hashlib.sha256()
    for source in SOURCES:
        found.update(source.read_bytes())
    cpu = next((line for line in _cpuinfo() if line.startswith("flags")), platform.processor())
    found.update(f"{torch.__version__}\0{compiler()}\0{os.path.realpath(compiler() or '')}\0{cpu}".encode())
    return found.hexdigest()[:16]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
