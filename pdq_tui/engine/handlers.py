"""What each command that runs something does to a loaded session, one function a command.

Those that take ``bench`` and ``control`` are run by ``Session.run``, which tells a PdqError as a failed run; the others tell
the end of their task themselves.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdq_tui.core import prompts as prompt_sets
from pdq_tui.core import protocol as p
from pdq_tui.engine import energy, harness, quality, trace, tune
from pdq_tui.engine.asking import Asker
from pdq_tui.engine.bench import Bench, Control
from pdq_tui.engine.canary import Canaries
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.serving import Serving
from pdq_tui.engine.windows import windows as cut
from pdq_tui.errors import PdqError, UsageError

if TYPE_CHECKING:
    from pdq_tui.engine.session import Session


def score(session: Session, bench: Bench, control: Control, command: p.Score) -> None:
    """Windows of each arm against the base's, one at a time."""
    assert session.model is not None and session.device is not None
    tokenizer, info = session.model.tokenizer, session.model.info
    windows = cut(command, tokenizer, info)
    arms = [bench.arm(label) for label in command.arms]
    scores = quality.Judge(session.device, bench.arm(command.base), arms, command).score(windows)
    done, total = 0, len(windows) * len(arms)
    on = {"text": "on a text", "sample": "on the base's own sample"}[command.forced]
    what = "quality, prefill path" if command.path == "prefill" else f"quality, decode path {on}"
    while not control.stopped():
        session.send(p.Progress(task="score", label=what, done=done, total=total, unit="windows"))
        scored = next(scores, None)
        if scored is None:
            break
        session.send(scored)
        done += 1
    session.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))


def ask(session: Session, bench: Bench, control: Control, command: p.Ask) -> None:
    """Questions with their own stop and length, one answer each."""
    assert session.model is not None and session.device is not None
    asker = Asker(session.device, session.model, bench.arm(command.arm), prompt_sets.built_in)
    done, total = 0, len(command.questions)
    for question in command.questions:
        if control.stopped():
            break
        what = f"{command.arm}: {question.id}"
        session.send(p.Progress(task=command.task, label=what, done=done, total=total, unit="questions"))
        session.send(asker.answer(question, control.stopped))
        done += 1
    session.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))


def lm_eval(session: Session, bench: Bench, control: Control, command: p.LmEval) -> None:
    """Tasks of lm-eval on an arm."""
    assert session.model is not None and session.device is not None
    model, device, arm = session.model, session.device, bench.arm(command.arm)
    tell = session.progress("lm-eval", "requests")
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
        session.send(p.RunEnded(reason="stopped", requests=0))
        return
    for fields in found:
        session.send(harness.told(arm, fields))
    session.send(p.RunEnded(reason="done", requests=len(found)))


def tune_kernels(session: Session, control: Control, command: p.Tune) -> None:
    """Every cell of formats, shapes and rows; what was measured before a stop stays."""
    assert session.staged is not None and session.device is not None and session.info is not None
    tuner = tune.Tuner(session.staged, session.device, session.info, command)
    session.send(tuner.started())
    done, reason = 0, "done"
    try:
        for timed in tuner.run(control.stopped, session.progress("tune", "measurements")):
            session.send(timed)
            done += 1
    except Cancelled:
        reason = "stopped"
    session.staged.give_back()
    session.send(p.RunEnded(reason=reason, requests=done))


def measure_energy(session: Session, number: int, command: p.MeasureEnergy) -> None:
    """Stage-pure loops of each arm, in windows that the host holds against an energy counter."""

    def cancelled() -> bool:
        return session.inbox.cancelled(number) or session.inbox.stopped(number)

    try:
        with session.task("energy", ", ".join(command.arms)):
            if session.bench is None or session.bench.prepared is None or session.device is None:
                raise UsageError("there is no model and workload to run yet")
            prepared, done = session.bench.prepared, 0
            progress = session.progress("energy", "windows")
            for label in command.arms:
                loops = energy.Loops(
                    session.device,
                    session.bench.arm(label),
                    prepared.batches[0],
                    prepared.capacity,
                    prepared.workload.output_tokens,
                    cancelled,
                )
                for window in energy.WINDOWS:
                    if window == "decode" and prepared.workload.output_tokens < 2:
                        continue
                    progress(done, len(command.arms) * len(energy.WINDOWS), f"energy: {label}, {window}")
                    session.send(loops.run(window, command.seconds))
                    done += 1
            session.bench.disturbed()
    except (Cancelled, PdqError):
        return  # the task's end has told it


def trace_burst(session: Session, number: int, command: p.Trace) -> None:
    """A burst beside everything that is measured: a block around it is given up."""
    try:
        if (
            session.bench is None
            or session.bench.prepared is None
            or session.device is None
            or session.staged is None
        ):
            raise UsageError("there is no model and workload to profile yet")
        bench, prepared = session.bench, session.bench.prepared
        arm = bench.arm(command.arm)
        bench.disturbed()
        with session.task("trace", command.arm):
            done = trace.trace(
                session.device,
                arm,
                prepared.batches[0],
                prepared.capacity,
                command.steps,
                Path(command.folder) if command.folder else None,
                session.staged.kernels,
                session.progress("trace", ""),
                lambda: session.inbox.cancelled(number),
                warm=bench.is_warm(command.arm),
                rolling=command.rolling,
            )
    except Cancelled:
        done = p.Traced(arm=command.arm, policy="", rolling=command.rolling, failed="cancelled")
    except PdqError as error:
        done = p.Traced(arm=command.arm, policy="", rolling=command.rolling, failed=error.message)
    session.send(done)


def serve(session: Session, bench: Bench, control: Control, command: p.Serve) -> None:
    """Many requests at a time, by transformers' continuous batching."""
    assert session.model is not None and session.staged is not None
    progress = session.progress("serve", "s")
    try:
        with Serving(
            session.staged, session.model, bench.arm(command.arm), command, control.stopped
        ) as serving:
            done = 0
            for event in serving.run(control.stopped, progress):
                session.send(event)
                done += isinstance(event, p.Served)
    except Cancelled:
        session.send(p.RunEnded(reason="stopped", requests=0))
        return
    session.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))


def soak(session: Session, bench: Bench, control: Control, command: p.Soak) -> None:
    """Request after request for a time, with canary prompts between them."""
    assert session.model is not None and session.device is not None
    prompts = [batch.ids[:1] for batch in bench.prompts()[: command.canary_prompts]]
    canaries = Canaries(session.device, bench.arm(command.arm), prompts, command)
    bench.warm_up(command.arm, control.stopped)
    begin = time.monotonic()
    session.send(canaries.sing())
    done, sung = 0, 0.0
    while not control.stopped() and (at := time.monotonic() - begin) < command.seconds:
        if at - sung >= command.canary_every_s:
            sung = at
            session.send(canaries.sing())
        session.send(
            p.Progress(task="soak", label=f"{command.arm}: soak", done=at, total=command.seconds, unit="s")
        )
        bench.request(command.arm, done, "soak", control.stopped)
        done += 1
    if not control.stopped():
        session.send(canaries.sing())
    session.send(p.RunEnded(reason="stopped" if control.stopped() else "done", requests=done))


def run_blocks(session: Session, number: int, command: p.RunBlocks) -> None:
    """A measurement: arms in blocks, before it each alone where asked for."""

    def repack(labels: list[str]) -> None:
        assert session.bench is not None
        for label in labels:
            policy = session.bench.arms[label].policy
            session.pack(label, policy, session.hard.get(label, False), lambda: session.inbox.stopped(number))

    alone: list[str] = []

    def solo(label: str) -> None:
        assert session.bench is not None and session.staged is not None
        alone[:] = [label]
        session.staged.release([session.ready[label]])
        for other, arm in session.bench.arms.items():
            if other != label:
                session.bench.forget_warm(arm.policy.digest)
        repack([label])
        session.staged.give_back()

    def together() -> None:
        assert session.bench is not None
        repack(list(session.bench.arms))
        alone.clear()

    def run(bench: Bench, control: Control) -> None:
        # In a measurement nothing is changed on the way.
        fixed = Control(stopped=control.stopped)
        try:
            bench.blocks(command, fixed, solo, together)
        finally:
            for label in [label for label in bench.arms if alone and label not in alone]:
                # Stopped before all were together again: the weights of this arm were let go.
                del bench.arms[label], session.ready[label]

    session.run(number, run)
