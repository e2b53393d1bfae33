"""What this device can do, and probing kernels that may end the process, in a child process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from pdq_tui.core.kernels import Candidate, Capability
from pdq_tui.core.policy import Format

_log = logging.getLogger(__name__)

#: Seconds a probing child may take, its import of torch included.
PROBE_TIMEOUT_S: Final = 120.0


class HasCapability(Protocol):
    kind: str
    capability: tuple[int, int] | None


def capability(device: HasCapability) -> Capability:
    """Kind, CUDA compute capability, and on a CPU what torch's kernels can use of it."""
    if device.kind != "cpu":
        return Capability(device.kind, (), device.capability)
    features = []
    level = torch.backends.cpu.get_cpu_capability()
    if level.startswith(("AVX2", "AVX512")):
        features.append("avx2")
    if level.startswith("AVX512"):
        features.append("avx512")
    # private, but the only place where torch says whether oneDNN takes bf16 and int8 here
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        features.append("bf16")
    cpu: Any = torch.cpu
    if cpu._is_vnni_supported():
        features.append("vnni")
    if cpu._is_amx_tile_supported():
        features.append("amx")
    return Capability("cpu", tuple(features))


def shape_class(N: int, K: int) -> tuple[int, int]:
    """A small stand-in for [N, K] that takes the same paths of a kernel: the same residues modulo 64."""
    return 128 + N % 64, 128 + K % 64


class Prober:
    """Runs candidates marked ``probe`` once in a child process per (kernel, dtype, shape class).

    Results are remembered in memory and, by torch version and instruction set, in ``file``, so that a machine pays for
    the child once.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._stamp = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
        self._known: dict[tuple[str, str, int, int], bool] = {}

    def broken(
        self, wanted: Iterable[tuple[Candidate, str, int, int]]
    ) -> dict[tuple[str, str, int, int], bool]:
        """For (candidate, dtype name, N, K) → by (name, dtype, N, K): True where the child died there or the result was
        not finite or wrong."""
        asked = list(wanted)
        if not self._known:
            self._known.update(self._recall())
        missing: dict[tuple[str, str, int, int], dict[str, Any]] = {}
        for c, dtype, N, K in asked:
            n, k = shape_class(N, K)
            if (c.name, dtype, n, k) not in self._known:
                missing[c.name, dtype, n, k] = {
                    "op": c.op, "layout": c.layout, "weights": c.weights, "activations": c.activations,
                    "group_size": c.group_sizes[0] if c.group_sizes else 0, "dtype": dtype, "N": n, "K": k,
                }  # fmt: skip
        todo = list(missing.items())
        while todo:
            good = _child([job for _, job in todo])
            for (key, _), ok in zip(todo, good, strict=False):
                self._known[key] = ok
            if len(good) < len(todo):  # it died at this one: the rest goes to the next child
                self._known[todo[len(good)][0]] = False
                todo = todo[len(good) + 1 :]
            else:
                todo = []
        if missing:
            self._remember()
        return {
            (c.name, dtype, N, K): not self._known[(c.name, dtype, *shape_class(N, K))]
            for c, dtype, N, K in asked
        }

    def _recall(self) -> dict[tuple[str, str, int, int], bool]:
        if self._file is None:
            return {}
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if stored["stamp"] != self._stamp:
                return {}
            return {(str(n), str(d), int(N), int(K)): bool(ok) for n, d, N, K, ok in stored["results"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # a cache that cannot be read is made again

    def _remember(self) -> None:
        if self._file is None:
            return
        body = {"stamp": self._stamp, "results": [[*key, ok] for key, ok in sorted(self._known.items())]}
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(body), encoding="utf-8")
            part.replace(self._file)
        except OSError as error:
            _log.info("probe results are not kept: %s", error)


def _child(jobs: list[dict[str, Any]]) -> list[bool]:
    """Results in order, as far as the child came."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pdq_tui.engine.kernels"],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if late.stdout else ""
    return [line == "ok" for line in text.splitlines() if line in ("ok", "wrong")]


def _probe(job: dict[str, Any]) -> bool:
    """Run one kernel on random numbers against its dequantized reference in float64."""
    from pdq_tui.engine.formats.linears import LINEARS
    from pdq_tui.engine.formats.pack import pack
    from pdq_tui.engine.formats.packed import DTYPE_NAMES, Spec
    from pdq_tui.engine.formats.unpack import Scratch

    dtype = {name: torch_dtype for torch_dtype, name in DTYPE_NAMES.items()}[job["dtype"]]
    N, K = job["N"], job["K"]
    torch.manual_seed(0)
    master = torch.randn(N, K).to(dtype)
    spec = Spec(Format(job["weights"], job["activations"], job["group_size"]), job["layout"], N, K, K, dtype)
    packed = pack(spec, master, torch.device("cpu"), lambda: False)
    layer = LINEARS[job["op"]](packed, None, Scratch())
    with torch.inference_mode():
        for rows in (1, 5, 17):
            x = torch.randn(rows, K).to(dtype)
            wanted = x.double() @ master.double().t()
            error = (layer(x).double() - wanted).norm() / wanted.norm()
            if not bool(error < 0.2):  # 4 bits by plain rounding are within 0.1; NaN compares false
                return False
    return True


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(sys.stdin.read()):
        sys.stdout.write("ok\n" if _probe(job) else "wrong\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
