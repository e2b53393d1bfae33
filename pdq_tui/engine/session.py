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
from pdq_tui.engine import energy, faults, harness, native, quality, trace, tune
from pdq_tui.engine.asking import Asker
from pdq_tui.engine.bench import Bench, Control
from pdq_tui.engine.canary import Canaries
from pdq_tui.engine.cancel import Cancelled, check
from pdq_tui.engine.channel import Inbox
from pdq_tui.engine.device import Device, open_device
from pdq_tui.engine.loader import LoadedModel, load_model, load_source
from pdq_tui.engine.peaks import peaks
from pdq_tui.engine.prompts import prepare
from pdq_tui.engine.runner import Arm, RequestFailedError
from pdq_tui.engine.serving import Serving
from pdq_tui.engine.spread import refuse_processes
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.engine.windows import windows as cut
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
                    self._run(number, lambda bench, control: bench.loop(command, control))
                case p.RunBlocks():
                    self._run_blocks(number, command)
                case p.Guard():
                    self._guard(command)
                case p.Trace():
                    stage = "trace"
                    self._trace(number, command)
                case p.MeasureEnergy():
                    stage = "energy"
                    self._energy(number, command)
                case p.Score():
                    self._run(number, lambda bench, control: self._score(bench, control, command))
                case p.Ask():
                    self._run(number, lambda bench, control: self._ask(bench, control, command))
                case p.LmEval():
                    stage = "lm-eval"
                    self._run(number, lambda bench, control: self._lm_eval(bench, control, command))
                case p.Tune():
                    stage = "tune"
                    self._run(number, lambda bench, control: self._tune(control, command))
                case p.Serve():
                    self._run(number, lambda bench, control: self._serve(bench, control, command))
                case p.Soak():
                    self._run(number, lambda bench, control: self._soak(bench, control, command))
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
    def _task(self, task: str, label: str) -> Iterator[None]:
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

    def _progress(self, task: str, unit: str) -> Callable[[float, float | None, str], None]:
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
        progress = self._progress("load", "")

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
            with self._task("load", command.model):
                refuse_processes()
                device = self.device = open_device(command.device, command.gpu, command.threads)
                device.reset_peak()
                self._own_kernels(command, device, cancelled)
                model = load_model(command, device, self._progress("load", ""), cancelled)
                peak = device.peak_bytes()  # of loading: the probes' buffers come after it
                info = self.info = device.info()
                cache = Path(command.cache_dir) if command.cache_dir else locations.cache_dir()
                found = peaks(device, info, cache, self._progress("load", "probes"), cancelled)
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

    def _pack(self, label: str, policy: Policy, hard: bool, cancelled: Callable[[], bool]) -> StagedArm:
        """Make ``label`` follow ``policy``: pack what is missing. Raises PdqError, Cancelled."""
        if self.staged is None or self.bench is None:
            raise UsageError("no model is loaded")
        ready = self.staged.apply(
            policy,
            rows=self._rows(),
            request=self._request(),
            hard=hard,
            progress=self._progress("pack", "B"),
            cancelled=cancelled,
        )
        self.bench.set_arm(Arm(label, policy, ready), packed_anew=not ready.resident)
        self.ready[label], self.hard[label] = ready, hard
        return ready

    def _set_arm(self, number: int, command: p.SetArm) -> None:
        label, policy, begin = command.arm, command.policy, time.monotonic()
        try:
            with self._task("pack", f"{label}: {policy.name}"):
                ready = self._pack(label, policy, command.hard, lambda: self.inbox.cancelled(number))
        except Cancelled:
            self._refuse(command, PdqError("cancelled"))
            if self.staged is not None and self.staged.compiler.busy:
                # The C++ compiler cannot be stopped half-way, and nothing may be measured beside it.
                with self._task("pack", "what was being compiled is finished"):
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

    def _run(self, number: int, run: Callable[[Bench, Control], None]) -> None:
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

    def _score(self, bench: Bench, control: Control, command: p.Score) -> None:
        assert self.model is not None and self.device is not None
        tokenizer, info = self.model.tokenizer, self.model.info
        windows = cut(command, tokenizer, info)
        arms = [bench.arm(label) for label in command.arms]
        scores = quality.Judge(self.device, bench.arm(command.base), arms, command).score(windows)
        done, total = 0, len(windows) * len(arms)
        on = {"text": "on a text", "sample": "on the base's own sample"}[command.forced]
        what = "quality, prefill path" if command.path == "prefill" else f"quality, decode path {on}"
        while not control.stopped():
            self.send(p.Progress(task="score", label=what, done=done, total=total, unit="windows"))
            scored = next(scores, None)
            if scored is None:
                break
            self.send(scored)
            done += 1
        self.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))

    def _ask(self, bench: Bench, control: Control, command: p.Ask) -> None:
        assert self.model is not None and self.device is not None
        asker = Asker(self.device, self.model, bench.arm(command.arm), prompt_sets.built_in)
        done, total = 0, len(command.questions)
        for question in command.questions:
            if control.stopped():
                break
            what = f"{command.arm}: {question.id}"
            self.send(p.Progress(task=command.task, label=what, done=done, total=total, unit="questions"))
            self.send(asker.answer(question, control.stopped))
            done += 1
        self.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))

    def _lm_eval(self, bench: Bench, control: Control, command: p.LmEval) -> None:
        assert self.model is not None and self.device is not None
        model, device, arm = self.model, self.device, bench.arm(command.arm)
        tell = self._progress("lm-eval", "requests")
        label = f"{arm.label}: lm-eval {', '.join(command.tasks)}"

        def requests(kind: type) -> harness.StagedRequests:
            made: harness.StagedRequests = kind(
                device, arm, model.tokenizer, model.info, model.eos, control.stopped,
                lambda done, total: tell(done, total, label),
            )  # fmt: skip
            return made

        tell(0, None, label)
        try:
            found = harness.evaluate(command.tasks, command.limit, command.seed, requests)
        except Cancelled:
            self.send(p.RunEnded(reason="stopped", requests=0))
            return
        for fields in found:
            self.send(harness.told(arm, fields))
        self.send(p.RunEnded(reason="done", requests=len(found)))

    def _tune(self, control: Control, command: p.Tune) -> None:
        assert self.staged is not None and self.device is not None and self.info is not None
        tuner = tune.Tuner(self.staged, self.device, self.info, command)
        self.send(tuner.started())
        done, reason = 0, "done"
        try:
            for timed in tuner.run(control.stopped, self._progress("tune", "measurements")):
                self.send(timed)
                done += 1
        except Cancelled:
            reason = "stopped"
        self.staged.give_back()
        self.send(p.RunEnded(reason=reason, requests=done))

    def _energy(self, number: int, command: p.MeasureEnergy) -> None:
        """Stage-pure loops of each arm, in windows that the host holds against an energy counter."""

        def cancelled() -> bool:
            return self.inbox.cancelled(number) or self.inbox.stopped(number)

        try:
            with self._task("energy", ", ".join(command.arms)):
                if self.bench is None or self.bench.prepared is None or self.device is None:
                    raise UsageError("there is no model and workload to run yet")
                prepared, done = self.bench.prepared, 0
                progress = self._progress("energy", "windows")
                for label in command.arms:
                    loops = energy.Loops(
                        self.device,
                        self.bench.arm(label),
                        prepared.batches[0],
                        prepared.capacity,
                        prepared.workload.output_tokens,
                        cancelled,
                    )
                    for window in energy.WINDOWS:
                        if window == "decode" and prepared.workload.output_tokens < 2:
                            continue
                        progress(done, len(command.arms) * len(energy.WINDOWS), f"energy: {label}, {window}")
                        self.send(loops.run(window, command.seconds))
                        done += 1
                self.bench.disturbed()
        except (Cancelled, PdqError):
            return  # the task's end has told it

    def _trace(self, number: int, command: p.Trace) -> None:
        """A burst beside everything that is measured: a block around it is given up."""
        try:
            if (
                self.bench is None
                or self.bench.prepared is None
                or self.device is None
                or self.staged is None
            ):
                raise UsageError("there is no model and workload to profile yet")
            bench, prepared = self.bench, self.bench.prepared
            arm = bench.arm(command.arm)
            bench.disturbed()
            with self._task("trace", command.arm):
                done = trace.trace(
                    self.device,
                    arm,
                    prepared.batches[0],
                    prepared.capacity,
                    command.steps,
                    Path(command.folder) if command.folder else None,
                    self.staged.kernels,
                    self._progress("trace", ""),
                    lambda: self.inbox.cancelled(number),
                    warm=bench.is_warm(command.arm),
                    rolling=command.rolling,
                )
        except Cancelled:
            done = p.Traced(arm=command.arm, policy="", rolling=command.rolling, failed="cancelled")
        except PdqError as error:
            done = p.Traced(arm=command.arm, policy="", rolling=command.rolling, failed=error.message)
        self.send(done)

    def _guard(self, command: p.Guard) -> None:
        if self.bench is None:
            self.send(p.Note(level="warn", text="there is no model yet that could be guarded"))
            return
        self.bench.set_guard(command)

    def _serve(self, bench: Bench, control: Control, command: p.Serve) -> None:
        assert self.model is not None and self.staged is not None
        progress = self._progress("serve", "s")
        try:
            with Serving(
                self.staged, self.model, bench.arm(command.arm), command, control.stopped
            ) as serving:
                done = 0
                for event in serving.run(control.stopped, progress):
                    self.send(event)
                    done += isinstance(event, p.Served)
        except Cancelled:
            self.send(p.RunEnded(reason="stopped", requests=0))
            return
        self.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))

    def _soak(self, bench: Bench, control: Control, command: p.Soak) -> None:
        assert self.model is not None and self.device is not None
        prompts = [batch.ids[:1] for batch in bench.prompts()[: command.canary_prompts]]
        canaries = Canaries(self.device, bench.arm(command.arm), prompts, command)
        bench.warm_up(command.arm, control.stopped)
        begin = time.monotonic()
        self.send(canaries.sing())
        done, sung = 0, 0.0
        while not control.stopped() and (at := time.monotonic() - begin) < command.seconds:
            if at - sung >= command.canary_every_s:
                sung = at
                self.send(canaries.sing())
            self.send(
                p.Progress(
                    task="soak", label=f"{command.arm}: soak", done=at, total=command.seconds, unit="s"
                )
            )
            bench.request(command.arm, done, "soak", control.stopped)
            done += 1
        if not control.stopped():
            self.send(canaries.sing())
        self.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))

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

    def _run_blocks(self, number: int, command: p.RunBlocks) -> None:
        def repack(labels: list[str]) -> None:
            assert self.bench is not None
            for label in labels:
                policy = self.bench.arms[label].policy
                self._pack(label, policy, self.hard.get(label, False), lambda: self.inbox.stopped(number))

        alone: list[str] = []

        def solo(label: str) -> None:
            assert self.bench is not None and self.staged is not None
            alone[:] = [label]
            self.staged.release([self.ready[label]])
            for other, arm in self.bench.arms.items():
                if other != label:
                    self.bench.forget_warm(arm.policy.digest)
            repack([label])
            self.staged.give_back()

        def together() -> None:
            assert self.bench is not None
            repack(list(self.bench.arms))
            alone.clear()

        def run(bench: Bench, control: Control) -> None:
            # In a measurement nothing is changed on the way.
            fixed = Control(stopped=control.stopped)
            try:
                bench.blocks(command, fixed, solo, together)
            finally:
                for label in [label for label in bench.arms if alone and label not in alone]:
                    # Stopped before all were together again: the weights of this arm were let go.
                    del bench.arms[label], self.ready[label]

        self._run(number, run)
