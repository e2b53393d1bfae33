"""What this device can do, and which of the kernels that may end the process do so here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from pdq_tui.core.kernels import Candidate, Capability
from pdq_tui.engine import kv_native, native
from pdq_tui.engine.cancel import check
from pdq_tui.engine.formats.packed import DTYPE_NAMES
from pdq_tui.engine.kv_formats import Codec
from pdq_tui.engine.probe import probe_in_child

_log = logging.getLogger(__name__)

#: What is shown while a child tries kernels.
LABEL: Final = "trying kernels once on this machine"

#: Packages with kernels of their own.
PACKAGES: Final = ("bitsandbytes",)

#: (kernel, dtype, N, K); of a KV cache's: (format, dtype, head_dim, group)
ProbeKey = tuple[str, str, int, int]


class HasCapability(Protocol):
    kind: str
    capability: tuple[int, int] | None


def capability(device: HasCapability, *, buildable: bool = False) -> Capability:
    """Kind, CUDA compute capability, packages with kernels, and on a CPU what torch's kernels can use of it. That a package
    is there does not mean that it works: its candidates are probed. ``buildable``: our own kernels count where they can be
    built, and not only where they are loaded."""
    features = [package for package in PACKAGES if importlib.util.find_spec(package) is not None]
    if device.kind != "cpu":
        return Capability(device.kind, tuple(features), device.capability)
    level = torch.backends.cpu.get_cpu_capability()
    if level.startswith(("AVX2", "AVX512")):
        features.append("avx2")
    if level.startswith("AVX512"):
        features.append("avx512")
    # private, but the only place where torch says whether oneDNN takes bf16 and int8 here
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        features.append("bf16")
    cpu: Any = torch.cpu
    if cpu._is_avx512_bf16_supported():
        features.append("avx512bf16")
    if cpu._is_vnni_supported():
        features.append("vnni")
    if cpu._is_amx_tile_supported():
        features.append("amx")
    if has_cxx():
        features.append("cxx")
    if native.loaded() is not None or (buildable and native.possible()):
        features.append("native")
    return Capability("cpu", tuple(features))


def has_cxx() -> bool:
    """Is there what torch's inductor needs to build a program for the CPU: the compiler it would call, and Python.h?"""
    return native.compiler() is not None and (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def shape_class(c: Candidate, N: int, K: int) -> tuple[int, int]:
    """A small stand-in for [N, K] that takes the same paths of a kernel: the same residues modulo 64. Of a package's
    kernels one shape: what may fail there is the package."""
    return (128, 128) if set(c.needs) & set(PACKAGES) else (128 + N % 64, 128 + K % 64)


def _stamp(device: str) -> str:
    """What the results of probes depend on: torch, the device, our own kernels, and where which packages come from."""
    parts = ["2", torch.__version__, torch.backends.cpu.get_cpu_capability(), device, str(native.identity())]
    if device == "cuda":
        parts.append(torch.cuda.get_device_name())
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None:
            parts += [str(spec.origin), _version(package)]
    parts.append(os.environ.get("BNB_CUDA_VERSION", ""))
    return " ".join(parts)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""  # a folder on the path that was never installed


class Prober:
    """Runs candidates marked ``probe`` once in a child process per (kernel, dtype, shape class).

    Results are remembered in memory and, by what they depend on, in ``file``, so that a machine pays for
    the child once.
    """

    def __init__(self, file: Path | None = None, device: str = "cpu") -> None:
        self._file = file
        self._device = device
        self._stamp = _stamp(device)
        self._known: dict[ProbeKey, str | None] = {}

    def broken(
        self,
        wanted: Iterable[tuple[Candidate, str, int, int]],
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[float, float | None, str], None] = lambda done, total, label: None,
    ) -> dict[ProbeKey, str]:
        """For (candidate, dtype name, N, K) → by (name, dtype, N, K), those that do not work: the child died there, an
        error was raised, or the result was not finite or wrong. Raises Cancelled (what was found by then stays known).

        progress(0, None, what is going on) while a child works.
        """

        asked = list(wanted)
        jobs: dict[ProbeKey, dict[str, Any]] = {}
        for c, dtype, N, K in asked:
            n, k = shape_class(c, N, K)
            jobs[c.name, dtype, n, k] = {
                "op": c.op, "layout": c.layout, "weights": c.weights, "activations": c.activations,
                "group_size": c.group_sizes[0] if c.group_sizes else 0,
            }  # fmt: skip
        self._try(jobs, cancelled, progress)
        found = {
            (c.name, dtype, N, K): self._known[(c.name, dtype, *shape_class(c, N, K))]
            for c, dtype, N, K in asked
        }
        return {key: why for key, why in found.items() if why is not None}

    def try_caches(
        self,
        wanted: Iterable[Codec],
        dtype: torch.dtype,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[float, float | None, str], None] = lambda done, total, label: None,
    ) -> None:
        """The same for our own kernels over KV caches of these formats, of a model in ``dtype``: ``kv_native`` is told."""
        keys: dict[Codec, ProbeKey] = {
            made: (f"kv {made.name}", DTYPE_NAMES[dtype], made.head_dim, made.group) for made in wanted
        }
        self._try({key: {"cache": made.name} for made, key in keys.items()}, cancelled, progress)
        for made, key in keys.items():
            kv_native.remember(made, dtype, self._known[key])

    def _try(
        self,
        jobs: dict[ProbeKey, dict[str, Any]],
        cancelled: Callable[[], bool],
        progress: Callable[[float, float | None, str], None],
    ) -> None:
        """Know of every job. ``N`` and ``K`` of a job are the last two of its key."""

        def poll() -> None:
            check(cancelled)
            progress(0, None, LABEL)

        if not self._known:
            self._known.update(self._recall())
        library = os.fspath(native.loaded() or "")
        missing = {
            key: {**job, "dtype": key[1], "N": key[2], "K": key[3], "device": self._device, "native": library}
            for key, job in jobs.items()
            if key not in self._known
        }
        todo = list(missing.items())
        try:
            while todo:
                told = probe_in_child([job for _, job in todo], poll)
                for (key, _), why in zip(todo, told, strict=False):
                    self._known[key] = why
                if len(told) < len(todo):  # it died at this one: the rest goes to the next child
                    self._known[todo[len(told)][0]] = "it ended the process"
                    todo = todo[len(told) + 1 :]
                else:
                    todo = []
        finally:
            if missing:
                self._remember()

    def _recall(self) -> dict[ProbeKey, str | None]:
        if self._file is None:
            return {}
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if stored["stamp"] != self._stamp:
                return {}
            return {
                (str(n), str(d), int(N), int(K)): None if why is None else str(why)
                for n, d, N, K, why in stored["results"]
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # a cache that cannot be read is made again

    def _remember(self) -> None:
        if self._file is None:
            return
        body = {"stamp": self._stamp, "results": [[*key, why] for key, why in sorted(self._known.items())]}
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(body), encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            _log.info("probe results are not kept: %s", error)
