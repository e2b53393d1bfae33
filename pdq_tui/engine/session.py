"""The engine's state and what each command does to it: model, staged weights, arms, workload, runs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pdq_tui import locations
from pdq_tui.core import prompts as prompt_sets
from pdq_tui.core import protocol as p
from pdq_tui.core.kernels import KernelTable, load_kernels
from pdq_tui.core.policy import Policy
from pdq_tui.core.tuned import in_use
from pdq_tui.engine import faults, handlers, native, tune
from pdq_tui.engine.bench import Bench, Control
from pdq_tui.engine.cancel import Cancelled, check
from pdq_tui.engine.channel import Inbox
from pdq_tui.engine.device import Device
from pdq_tui.engine.devices import open_devices
from pdq_tui.engine.loader import LoadedModel, load_model, load_source
from pdq_tui.engine.looks import Looks
from pdq_tui.engine.peaks import peaks
from pdq_tui.engine.prompts import prepare
from pdq_tui.engine.runner import Arm, RequestFailedError
from pdq_tui.engine.spread import refuse_processes
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.errors import PdqError, UsageError

#: Progress is sent at most this often, in seconds; each task's first and last are always sent.
PROGRESS_EVERY_S = 0.1
#: Row counts that a policy is checked for while there is no workload: one token, and a prompt.
DEFAULT_ROWS = (1, 512)


class Fatal(Exception):  # noqa: N818 - not an error of its own: the failure was already told
    """After what just failed this process must not go on."""


class Session:
    """Handles one command at a time in the main thread; the inbox's flags reach into whatever is going on."""

    def __init__(self, send: Callable[[p.Message], None], inbox: Inbox) -> None:
        self.send = send
        self.inbox = inbox
        self.device: Device | None = None
        self.model: LoadedModel | None = None
        self.staged: StagedModel | None = None
        self.bench: Bench | None = None
        self.info: p.DeviceInfo | None = None
        self.ready: dict[str, StagedArm] = {}
        self.hard: dict[str, bool] = {}

    def handle(self, number: int, command: Any) -> None:
        """Carry out one command. Raises Fatal after a failure that this process cannot outlive."""
        stage = type(command).__name__
        try:
            match command:
                case p.Load():
                    stage = "load"
                    self._load(number, command)
                case p.SetArm():
                    stage = "pack"
                    self._set_arm(number, command)
                case p.SetWorkload():
                    self._set_workload(number, command)
                case p.StartLoop():
                    self.run(number, lambda bench, control: bench.loop(command, control))
                case p.RunBlocks():
                    handlers.run_blocks(self, number, command)
                case p.Guard():
                    self._guard(command)
                case p.Trace():
                    stage = "trace"
                    handlers.trace_burst(self, number, command)
                case p.MeasureEnergy():
                    stage = "energy"
                    handlers.measure_energy(self, number, command)
                case p.Score():
                    self.run(number, lambda bench, control: handlers.score(self, bench, control, command))
                case p.Ask():
                    self.run(number, lambda bench, control: handlers.ask(self, bench, control, command))
                case p.LmEval():
                    stage = "lm-eval"
                    self.run(number, lambda bench, control: handlers.lm_eval(self, bench, control, command))
                case p.Tune():
                    stage = "tune"
                    self.run(number, lambda bench, control: handlers.tune_kernels(self, control, command))
                case p.Serve():
                    self.run(number, lambda bench, control: handlers.serve(self, bench, control, command))
                case p.Soak():
                    self.run(number, lambda bench, control: handlers.soak(self, bench, control, command))
                case _:
                    self.send(p.Note(level="warn", text=f"the engine has no use for {stage}"))
        except RequestFailedError as failed:
            self.send(failed.partial)
            where = failed.stage if failed.stage == "prefill" else f"{failed.stage}, step {failed.step}"
            self._fail(failed.__cause__ or failed, where)
        except (
            RuntimeError,
            OSError,
            ImportError,
            MemoryError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AssertionError,
        ) as error:
            self._fail(error, stage)

    def _fail(self, error: BaseException, stage: str) -> None:
        self.send(faults.failure(error, stage, self.device))
        raise Fatal from error

    # -- tasks -------------------------------------------------------------------------------------------------------

    @contextmanager
    def task(self, task: str, label: str) -> Iterator[None]:
        """Sends TaskEnded whatever happens; passes on PdqError and Cancelled."""
        begin = time.monotonic()

        def ended(ok: bool, cancelled: bool = False, text: str = "") -> None:
            seconds = time.monotonic() - begin
            self.send(
                p.TaskEnded(task=task, label=label, ok=ok, seconds=seconds, cancelled=cancelled, text=text)
            )

        try:
            yield
        except Cancelled:
            ended(False, cancelled=True)
            raise
        except PdqError as error:
            ended(False, text=error.message)
            raise
        ended(True)

    def progress(self, task: str, unit: str) -> Callable[[float, float | None, str], None]:
        """Sends the progress of ``task`` (done, total, label) as often as PROGRESS_EVERY_S allows."""
        last = 0.0

        def progress(done: float, total: float | None, label: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= PROGRESS_EVERY_S or done == total:
                last = now
                self.send(p.Progress(task=task, label=label, done=done, total=total, unit=unit))

        return progress

    def _own_kernels(self, command: p.Load, device: Device, cancelled: Callable[[], bool]) -> None:
        """Before anything asks what this device can do. Without them everything works, some of it slower."""
        if command.kernels == "torch" or device.kind != "cpu":
            return
        progress = self.progress("load", "")

        def poll() -> None:
            check(cancelled)
            progress(0, None, native.LABEL)

        reason = native.ensure(locations.cache_dir() / "native", poll)
        if reason is not None:
            self.send(p.Note(level="info", text=f"own CPU kernels are not used: {reason}"))

    def _kernels(self, device: Device, info: p.DeviceInfo, tuned: str) -> KernelTable:
        """The kernel table, with what was measured on this machine in front where there is such."""
        table = load_kernels(device.kind)
        if tuned == "off":
            return table
        found = in_use(device.kind, tune.stamp(info, table, native.identity()), wanted=tuned)
        if found.table is not None or found.level == "warn":
            self.send(p.Note(level=found.level, text=found.text, hint=found.hint))
        if found.table is not None:
            info.tuned_stamp = dict(found.table.stamp)
        return msgspec.structs.replace(table, tuned=found.table)

    def _load(self, number: int, command: p.Load) -> None:
        def cancelled() -> bool:
            return self.inbox.cancelled(number)

        self.model = self.staged = self.bench = None
        self.ready.clear()
        gc.collect()
        try:
            with self.task("load", command.model):
                refuse_processes()
                device = self.device = open_devices(command.device, command.gpu, command.threads)
                device.reset_peak()
                self._own_kernels(command, device, cancelled)
                model = load_model(command, device, self.progress("load", ""), cancelled)
                peak = device.peak_bytes()  # of loading: the probes' buffers come after it
                info = self.info = device.info()
                info.layers = model.layout.words() if model.layout.several else ""
                cache = Path(command.cache_dir) if command.cache_dir else locations.cache_dir()
                if model.layout.several:  # peaks are of one device: nothing is held against them
                    found = Looks(())
                else:
                    found = peaks(device, info, cache, self.progress("load", "probes"), cancelled)
                best = found.best
                info.read_peak_gbps, info.read_peak_method = best.read_gbps, best.read_method
                info.compute_peak_tflops, info.copy_peak_gbps = dict(best.compute_tflops), best.copy_gbps
                info.peaks_from = found.words
                if found.warning is not None:
                    self.send(p.Note(level="warn", text=found.warning))
                self.staged = StagedModel(
                    model.skeleton,
                    model.masters,
                    device,
                    budget_bytes=command.weight_budget_bytes,
                    kernels=self._kernels(device, info, command.tuned),
                    attention_name=command.attention,
                    layers=command.layers,
                    prefill_rows=command.prefill_rows,
                    layout=model.layout,
                    sources=lambda word, told, stop: load_source(word, model, command, device, told, stop),
                )
        except Cancelled:
            return
        except PdqError as error:
            self.send(
                p.Failure(
                    kind="model",
                    message=error.message,
                    hint=error.hint,
                    stage="load",
                    exit_code=error.exit_code,
                )
            )
            return
        caches = self.staged.caches
        model.info.kv, model.info.kv_refused = caches.shape.geometry, caches.refused
        bench = self.bench = Bench(device, self.send)
        bench.eos, bench.peaks = model.eos, best
        bench.text = lambda ids: str(model.tokenizer.decode(list(ids), skip_special_tokens=False))
        self.model = model
        # What was loaded stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self.send(
            p.ModelReady(
                model=model.info,
                device=info,
                attention=command.attention,
                load_peak_bytes=peak,
                load_peak_reason=None if peak is not None else "this device has no high-water mark",
                linears={layer.name: layer.parameters for layer in self.staged.census.layers},
            )
        )

    def _refuse(self, command: p.SetArm, why: PdqError) -> None:
        name = command.policy.name
        self.send(
            p.ArmRefused(
                arm=command.arm,
                policy=name,
                reason=why.message.removeprefix(f"{name}: "),
                hint=why.hint,
                exit_code=why.exit_code,
            )
        )

    def pack(self, label: str, policy: Policy, hard: bool, cancelled: Callable[[], bool]) -> StagedArm:
        """Make ``label`` follow ``policy``: pack what is missing. Raises PdqError, Cancelled."""
        if self.staged is None or self.bench is None:
            raise UsageError("no model is loaded")
        ready = self.staged.apply(
            policy,
            rows=self._rows(),
            request=self._request(),
            hard=hard,
            progress=self.progress("pack", "B"),
            cancelled=cancelled,
        )
        self.bench.set_arm(Arm(label, policy, ready), packed_anew=not ready.resident)
        self.ready[label], self.hard[label] = ready, hard
        return ready

    def _set_arm(self, number: int, command: p.SetArm) -> None:
        label, policy, begin = command.arm, command.policy, time.monotonic()
        try:
            with self.task("pack", f"{label}: {policy.name}"):
                ready = self.pack(label, policy, command.hard, lambda: self.inbox.cancelled(number))
        except Cancelled:
            self._refuse(command, PdqError("cancelled"))
            if self.staged is not None and self.staged.compiler.busy:
                # The C++ compiler cannot be stopped half-way, and nothing may be measured beside it.
                with self.task("pack", "what was being compiled is finished"):
                    self.staged.compiler.settle()
            return
        except PdqError as error:
            self._refuse(command, error)
            return
        self.send(
            p.ArmReady(
                arm=label,
                policy=policy,
                weights=ready.weights,
                coverage=dict(ready.coverage),
                kv=ready.kv_info(),
                fallbacks=list(ready.fallbacks),
                warnings=list(ready.warnings),
                seconds=time.monotonic() - begin,
                resident=ready.resident,
            )
        )

    def _rows(self) -> tuple[int, ...]:
        """Every row count that a linear layer will see: whole prompts, and one token a sequence."""
        prepared = self.bench.prepared if self.bench is not None else None
        if prepared is None:
            return DEFAULT_ROWS
        rows = {batch.rows for batch in prepared.batches}
        return tuple(sorted(rows | {batch.rows * batch.width for batch in prepared.batches}))

    def _request(self) -> tuple[int, int] | None:
        """(batch, capacity) of the largest request, None where there is no workload yet."""
        prepared = self.bench.prepared if self.bench is not None else None
        if prepared is None:
            return None
        return max(batch.rows for batch in prepared.batches), prepared.capacity

    def _set_workload(self, number: int, command: p.SetWorkload) -> None:
        try:
            if self.model is None or self.bench is None:
                raise UsageError("no model is loaded")
            before = self._rows(), self._request()
            prepared = prepare(command.workload, self.model.tokenizer, self.model.info, prompt_sets.built_in)
        except PdqError as error:
            self.send(p.WorkloadRefused(reason=error.message, hint=error.hint))
            return
        self.bench.set_workload(prepared)
        self.send(
            p.WorkloadReady(
                workload=prepared.workload,
                prompts=len(prepared.lengths),
                lengths=prepared.lengths,
                prompts_sha256=prepared.sha256,
                chat_template_applied=prepared.chat_template_applied,
                refused=prepared.refused,
                notes=prepared.notes,
            )
        )
        if (self._rows(), self._request()) != before:
            # Kernels are chosen by row count, and a longer request needs more memory: the arms are checked again.
            for label, arm in list(self.bench.arms.items()):
                self._set_arm(
                    number, p.SetArm(arm=label, policy=arm.policy, hard=self.hard.get(label, False))
                )

    # -- runs --------------------------------------------------------------------------------------------------------

    def run(self, number: int, run: Callable[[Bench, Control], None]) -> None:
        """Run something on the loaded model that a stop ends; a PdqError is told, and ends it as failed."""
        try:
            if self.bench is None:
                raise UsageError("no model is loaded")
            run(
                self.bench,
                Control(
                    stopped=lambda: self.inbox.stopped(number),
                    selected=lambda: self.inbox.selected,
                    interleave=lambda: bool(self.inbox.interleave),
                    between=self._between,
                ),
            )
        except PdqError as error:
            self.send(
                p.Failure(kind="usage", message=error.message, hint=error.hint, exit_code=error.exit_code)
            )
            self.send(p.RunEnded(reason="failed", requests=0))

    def _guard(self, command: p.Guard) -> None:
        if self.bench is None:
            self.send(p.Note(level="warn", text="there is no model yet that could be guarded"))
            return
        self.bench.set_guard(command)

    def _between(self) -> bool:
        """Carry out the arms, workloads, bursts and energy loops that wait; True where something else waits, which ends the loop."""
        while (waiting := self.inbox.peek()) is not None:
            if not isinstance(waiting, (p.SetArm, p.SetWorkload, p.Trace, p.MeasureEnergy, p.Guard)):
                return True
            taken = self.inbox.next()
            if taken is None:
                return True
            self.handle(*taken)
        return False
