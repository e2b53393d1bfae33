"""Bursts under torch's profiler: one prefill and a few decode steps, apart from everything that is measured.

The same burst runs once for warming where its arm is cold, once between the marks of the device alone, and once under the
profiler between the same marks. The first of both gives the overhead, the last the kernels. A profiler that fails costs the
burst, never the engine.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import nn

from pdq_tui.core import evidence, tracing
from pdq_tui.core.kernels import KernelTable
from pdq_tui.core.messages.profiles import StageTrace, Traced
from pdq_tui.engine import faults
from pdq_tui.engine.cancel import Cancelled, check
from pdq_tui.engine.device import Device, Mark
from pdq_tui.engine.formats.linears import PackedLinear
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.kv import KvCache
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Arm, Generation
from pdq_tui.errors import PdqError

#: Events that a trace may hold: about 25 MB of text, 1 MB gzipped; a viewer opens it at once.
MAX_EVENTS: Final = 150_000
MAX_STEPS: Final = 256
#: Up to this many steps nobody counts events beforehand: no model makes too many of them.
UNASKED_STEPS: Final = 8
#: A gzipped trace that is larger is not kept.
MAX_BYTES: Final = 20_000_000

Progress = Callable[[float, float | None, str], None]


@dataclass
class Timed:
    """One burst between marks, in ms."""

    prefill_ms: float = 0.0
    steps_ms: list[float] = field(default_factory=list)

    def ms(self, stage: str) -> float:
        return self.prefill_ms if stage == "prefill" else sum(self.steps_ms)


@contextlib.contextmanager
def _range(name: str, on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    with torch.profiler.record_function(name):
        yield


class Burst:
    """One arm and one prompt. ``steps`` decode steps follow the prefill, as far as the cache reaches."""

    def __init__(self, device: Device, arm: Arm, batch: Batch, capacity: int, steps: int) -> None:
        self.device, self.arm, self.batch, self.capacity = device, arm, batch, capacity
        self.steps = max(0, min(steps, capacity - batch.width, MAX_STEPS))

    @torch.inference_mode()
    def run(self, *, marked: bool, steps: int | None = None) -> Timed:
        """``marked``: with the ranges by which a trace is read."""
        device, batch = self.device, self.batch
        ids = batch.ids.to(device.torch_device)
        pad = batch.pad.to(device.torch_device) if batch.pad is not None else None
        generation = self.arm.staged.start(batch.rows, self.capacity, pad)
        device.synchronize()
        wanted = self.steps if steps is None else min(steps, self.steps)
        spans: list[tuple[Mark, Mark]] = []
        with _range(f"{tracing.STEP}0", marked):
            begin = device.mark()
            with _range(tracing.PREFILL, marked):
                token = _choose(generation.prefill(ids), marked)
            spans.append((begin, device.mark()))
            device.synchronize()
        generation.handoff()
        device.synchronize()
        for number in range(1, wanted + 1):
            token = self._step(generation, token, number, spans, marked)
        device.synchronize()
        first, *rest = [device.elapsed_ms(a, b) for a, b in spans]
        return Timed(first, rest)

    def _step(
        self,
        generation: Generation,
        token: torch.Tensor,
        number: int,
        spans: list[tuple[Mark, Mark]],
        marked: bool,
    ) -> torch.Tensor:
        with _range(f"{tracing.STEP}{number}", marked):
            begin = self.device.mark()
            with _range(tracing.DECODE, marked):
                token = _choose(generation.step(token), marked)
            spans.append((begin, self.device.mark()))
        return token


def _choose(logits: torch.Tensor, marked: bool) -> torch.Tensor:
    with _range(tracing.SAMPLE, marked):
        _, token = logits.max(dim=-1)
    return token


# -- what a trace is read by -------------------------------------------------------------------------------------------

_NAMES: Final = {cls: op for op, cls in OPS.items()}


@contextlib.contextmanager
def _marks_inside() -> Iterator[None]:
    """Ranges around every packed linear layer and every write to the cache, as long as this lasts. Compiled layers have
    neither: their operators speak for themselves."""
    forward, update = PackedLinear.__call__, KvCache.update

    def call(self: PackedLinear, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(tracing.LINEAR + _NAMES.get(type(self), "unknown")):
            return nn.Module.__call__(self, *args, **kwargs)

    def write(self: KvCache, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(tracing.KV):
            return update(self, *args, **kwargs)

    PackedLinear.__call__ = call  # type: ignore[method-assign]
    KvCache.update = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        if forward is nn.Module.__call__:
            del PackedLinear.__call__
        else:
            PackedLinear.__call__ = forward  # type: ignore[method-assign]
        KvCache.update = update  # type: ignore[method-assign]


def profile(device: Device) -> Any:
    """torch's profiler, not yet started. Shapes are recorded, for bytes and FLOPs; stacks and memory are not: they make
    traces that nothing opens."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, record_shapes=True)


def refuse_nested() -> None:
    """Raises PdqError inside of somebody's profiler: torch has one for a process."""
    if torch._C._autograd._profiler_enabled():
        raise PdqError(
            "a profiler is already running in this process, and torch has only one",
            "end that one first; nothing was recorded",
        )


def trace(
    device: Device,
    arm: Arm,
    batch: Batch,
    capacity: int,
    steps: int,
    folder: Path | None,
    table: KernelTable,
    progress: Progress,
    cancelled: Callable[[], bool],
    *,
    profiler: Callable[[Device], Any] = profile,
    warm: bool = False,
    rolling: bool = False,
) -> Traced:
    """Profile one burst and read it. ``warm``: the arm has run this shape before; ``rolling``: the file takes the place of
    the arm's last such. Raises Cancelled, and what the *model* raised where the device or memory gave up;
    everything else that goes wrong is ``Traced.failed``."""
    began = time.monotonic()
    out = Traced(
        arm=arm.label,
        policy=arm.policy.name,
        policy_digest=arm.policy.digest,
        prompt_tokens=batch.real_tokens,
        batch=batch.rows,
        rolling=rolling,
    )
    try:
        _trace(out, device, arm, batch, capacity, steps, folder, table, progress, cancelled, profiler, warm)
    except Cancelled:
        raise
    except PdqError as error:
        out.failed = error.message + (f" ({error.hint})" if error.hint else "")
    except Exception as error:
        if faults.kind_of(error) in ("oom", "device"):
            raise
        out.failed = f"the profiler failed: {faults.first_line(error)}"
    out.seconds = time.monotonic() - began
    return out


def _trace(
    out: Traced,
    device: Device,
    arm: Arm,
    batch: Batch,
    capacity: int,
    steps: int,
    folder: Path | None,
    table: KernelTable,
    progress: Progress,
    cancelled: Callable[[], bool],
    profiler: Callable[[Device], Any],
    warm: bool,
) -> None:
    refuse_nested()
    burst = Burst(device, arm, batch, capacity, steps)
    if burst.steps < steps:
        out.notes.append(
            f"{burst.steps} decode steps instead of {steps}: no more fit into the workload's KV buffer"
        )
    if not warm:
        progress(0, 4, "a burst for warming")
        burst.run(marked=False, steps=1)
        check(cancelled)
    progress(1, 4, "the burst without the profiler")
    plain = burst.run(marked=False)
    check(cancelled)
    if burst.steps > UNASKED_STEPS:
        of_prefill, of_step = _events_of(device, burst, profiler)
        most = max(1, (MAX_EVENTS - of_prefill) // max(of_step, 1))
        if burst.steps > most:
            out.notes.append(
                f"{most} decode steps instead of {burst.steps}: a step makes about {of_step} events,"
                f" and viewers choke on more than {MAX_EVENTS}"
            )
            burst.steps = most
            plain.steps_ms = plain.steps_ms[:most]
    out.steps = burst.steps
    check(cancelled)
    progress(2, 4, "the burst under the profiler")
    with profiler(device) as running, _marks_inside():
        timed = burst.run(marked=True)
    check(cancelled)
    progress(3, 4, "writing and reading the trace")
    with TemporaryDirectory(prefix="pdq-trace-") as scratch:
        raw = Path(scratch) / "trace.json"
        running.export_chrome_trace(str(raw))
        check(cancelled)
        body = _read_and_keep(out, raw, folder)
    _tables(out, body, timed, plain, arm, table)
    progress(4, 4, "done")


def _events_of(device: Device, burst: Burst, profiler: Callable[[Device], Any]) -> tuple[int, int]:
    """(events of a prefill, of a decode step), counted over one of each: what a longer burst will make."""
    with profiler(device) as running, _marks_inside():
        burst.run(marked=True, steps=1)
    with TemporaryDirectory(prefix="pdq-trace-") as scratch:
        raw = Path(scratch) / "probe.json"
        running.export_chrome_trace(str(raw))
        text = tracing.read_text(raw)
    calls = tracing.op_calls(_valid(text)[1])
    return (sum(calls.get("prefill", {}).values()), sum(calls.get("decode", {}).values()))


def _valid(text: str) -> tuple[str, dict[str, Any]]:
    """(text that is valid JSON, what it holds), repaired where it has to be. Raises PdqError where it cannot be."""
    try:
        return text, tracing.parse(text)
    except PdqError:
        mended = tracing.repaired(text)
        return mended, tracing.parse(mended)


def _read_and_keep(out: Traced, raw: Path, folder: Path | None) -> dict[str, Any]:
    """Parse what torch wrote, and only then call it saved. What no repair helps is kept under another name."""
    written = tracing.read_text(raw)
    try:
        text, body = _valid(written)
    except PdqError:
        if folder is not None:
            _write(folder / f"{out.arm}.invalid.json.gz", written)
        raise
    if text != written:
        out.notes.append("torch wrote names with bare quotes; they were escaped")
    out.events = len(body["traceEvents"])
    if folder is None:
        out.path_reason = "this run is kept in memory only"
        return body
    # TensorBoard's plugin: a directory a run, <worker>.<stamp>.pt.trace.json.gz in it.
    where = _own_folder(folder, tracing.label(out.arm), out.rolling)
    before = list(where.iterdir())
    worker = tracing.label(f"{socket.gethostname()}_{os.getpid()}").replace(".", "_").replace("/", "_")
    path = where / f"{worker}.{time.time_ns() // 1_000_000}.pt.trace.json.gz"
    size = _write(path, text)
    if size > MAX_BYTES:
        path.unlink()
        out.path_reason = f"{size} bytes gzipped, over the limit of {MAX_BYTES}"
        return body
    tracing.parse(tracing.read_text(path), str(path))
    out.path, out.bytes = str(path), size
    for old in before:
        old.unlink(missing_ok=True)
    return body


def _own_folder(folder: Path, arm: str, rolling: bool) -> Path:
    """A new directory, or the one that the arm's rolling trace lies in: a schedule must not fill the disk."""
    name = "".join(c if c.isalnum() or c in "-_#" else "_" for c in arm) or "arm"
    if rolling:
        found = folder / f"last-{name}"
        found.mkdir(parents=True, exist_ok=True)
        return found
    number = 1
    while True:
        found = folder / f"{number:03d}-{name}"
        try:
            found.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return found


def _write(path: Path, text: str) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with gzip.open(part, "wb", compresslevel=6) as stream:
            stream.write(text.encode("utf-8", "replace"))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def _tables(
    out: Traced, body: dict[str, Any], timed: Timed, plain: Timed, arm: Arm, table: KernelTable
) -> None:
    calls = tracing.op_calls(body)
    coverage = getattr(arm.staged, "coverage", {})
    stages: list[StageTrace] = tracing.stage_tables(body)
    for stage in stages:
        stage.timer_ms, stage.plain_ms = timed.ms(stage.stage), plain.ms(stage.stage)
        covered = coverage.get(stage.stage)
        if covered is not None:
            stage.unmatched = evidence.unmatched(
                calls.get(stage.stage, {}), stage.steps, covered.kernels, table
            )
    out.stages = stages
