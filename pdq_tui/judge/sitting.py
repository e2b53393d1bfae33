"""A protocol in a directory of its own, step by step: a step that is done is never done again.

``<dir>/spec.json`` says what it is about, ``<dir>/steps/<name>.json`` what each step found, ``<dir>/runs/`` holds the
journals behind them. All steps of one sitting talk to one engine process: what was packed and compiled for a policy is
packed and compiled once, which takes longer than most steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar

import msgspec

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy
from pdq_tui.core.workload import Workload
from pdq_tui.errors import INTERRUPTED, PdqError, UsageError
from pdq_tui.host.conversation import Conversation, InterruptedEarlyError
from pdq_tui.host.runs import Run, new_run
from pdq_tui.judge.plan import Step
from pdq_tui.store import atomic
from pdq_tui.store.snapshot import strict_json

Json = dict[str, Any]
#: Told at the beginning and the end of each step: (step, its number, "running" | "kept" | "done", seconds).
Watch = Callable[[Step, int, str, float], None]

SPEC: Final = "spec.json"
#: What belongs to one step; of everything else (model, workload, arms, notes) the last word stands.
_MEASURED: Final = (
    p.Request,
    p.Scored,
    p.Answered,
    p.LmEvaluated,
    p.Served,
    p.ServeEnded,
    p.Canary,
    p.RunStarted,
    p.RunEnded,
    p.SensorSample,
    p.StageSample,
    p.Progress,
)


class StoppedError(PdqError):
    """Ctrl-C: what is done is kept, and --resume goes on."""

    exit_code = INTERRUPTED


class Said(Protocol):
    """What every specification holds: the model as it is loaded, and the workload."""

    @property
    def load(self) -> p.Load: ...
    @property
    def workload(self) -> Workload: ...
    @property
    def seed(self) -> int: ...


S = TypeVar("S", bound=Said)


class Sitting(Generic[S]):
    """One protocol in ``directory``. ``found``: what each finished step found, by name.

    command  that goes on with it; what: its name for people; kind and file: of its specification; steps: in their order.
    """

    command: ClassVar[str]
    what: ClassVar[str]
    kind: ClassVar[type]
    file: ClassVar[str] = SPEC
    steps: ClassVar[tuple[Step, ...]]

    def __init__(
        self,
        spec: S,
        directory: Path,
        *,
        on_event: Callable[[Any], None] | None = None,
        engine_argv: Sequence[str] | None = None,
        sensors: bool = True,
    ) -> None:
        self.spec, self.directory = spec, directory
        self.found: dict[str, Json] = {}
        #: meta.json of the last run.
        self.meta: Json = {}
        self._on_event, self._engine_argv, self._sensors = on_event, engine_argv, sensors
        self._talk: Conversation | None = None
        self._run: Run | None = None
        self._armed: set[str] = set()

    def do(self, step: Step) -> Json:
        """What the step finds. Raises PdqError."""
        raise NotImplementedError

    @classmethod
    def create(cls, spec: S, directory: Path, **options: Any) -> Self:
        """Raises PdqError where the directory already holds one, or cannot be written."""
        if (directory / cls.file).exists():
            raise UsageError(
                f"{directory} holds {cls.what} already", "--resume goes on with it; or another --dir"
            )
        steps = directory / "steps"
        try:
            steps.mkdir(parents=True, exist_ok=True)
            others = any(steps.iterdir())
        except OSError as error:
            raise atomic.failed(directory, error) from error
        if others:  # steps of another kind are called alike, and would be taken for ours
            raise UsageError(f"{steps} holds steps of something else", "another --dir")
        atomic.write_file(directory / cls.file, msgspec.json.format(msgspec.json.encode(spec), indent=1))
        return cls(spec, directory, **options)

    @classmethod
    def resume(cls, directory: Path, **options: Any) -> Self:
        """Raises PdqError where there is none, or it was made by another version."""
        try:
            spec: Any = msgspec.json.decode((directory / cls.file).read_bytes(), type=cls.kind)
        except OSError as error:
            raise UsageError(
                f"there is no {cls.what.split()[-1]} in {directory}", "leave --resume out to begin one"
            ) from error
        except msgspec.MsgspecError as error:
            raise PdqError(f"{directory / cls.file} cannot be read: {error}") from error
        return cls(spec, directory, **options)

    def run(self, watch: Watch = lambda *_: None) -> dict[str, Json]:
        """All steps, or until one says that the answer is there. Raises PdqError; StoppedError on Ctrl-C. Call it from
        the main thread, where Ctrl-C arrives."""
        try:
            return self._steps(watch)
        finally:
            self.close()

    def _steps(self, watch: Watch) -> dict[str, Json]:
        for number, step in enumerate(self.steps, 1):
            kept = self._kept(step)
            begin = time.monotonic()
            if kept is None:
                watch(step, number, "running", 0.0)
                kept = self.do(step)
                kept["seconds"] = round(time.monotonic() - begin, 1)
                atomic.write_file(self._file(step), strict_json(kept), force=True)
                watch(step, number, "done", kept["seconds"])
            else:
                watch(step, number, "kept", 0.0)
            self.found[step.name] = kept
            if kept.get("stop"):
                break
        return self.found

    def kept(self) -> dict[str, Json]:
        """What the steps that are done found, in their order. Raises PdqError where one is damaged."""
        found = ((step.name, self._kept(step)) for step in self.steps)
        return {name: body for name, body in found if body is not None}

    def _file(self, step: Step) -> Path:
        return self.directory / "steps" / f"{step.name}.json"

    def _kept(self, step: Step) -> Json | None:
        try:
            body = json.loads(self._file(step).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise PdqError(
                f"{self._file(step)} is damaged: {error}", "delete it, and the step is done again"
            ) from error
        return body if isinstance(body, dict) else None

    # -- one engine process --------------------------------------------------------------------------------------------

    def talk(self, do: Callable[[Conversation], None]) -> list[Any]:
        """``do`` with a loaded model and the workload set. Returns what the journal says of it: the conditions that
        stand, and of measurements only those that were made now. Ctrl-C gives the step up."""
        try:
            talk = self._open()
            begin = time.monotonic_ns()
            do(talk)
        except InterruptedEarlyError:
            raise StoppedError(
                "stopped: this step is given up, what was done before it is kept",
                f"pdq-tui {self.command} --resume --dir {self.directory} goes on",
            ) from None
        assert self._run is not None
        self.meta = self._run.meta
        return [e for e in talk.journal.events() if e.t_ns >= begin or not isinstance(e, _MEASURED)]

    def arm(self, policy: Policy) -> None:
        """Ready in the engine, under its own name. Raises RefusedError."""
        assert self._talk is not None
        if policy.name not in self._armed:
            self._talk.arm(policy.name, policy)
            self._armed.add(policy.name)

    def _open(self) -> Conversation:
        if self._talk is None:
            self._run = new_run(self.directory / "runs", seed=self.spec.seed)
            talk = Conversation(
                self._run,
                on_event=self._on_event,
                engine_argv=self._engine_argv,
                sensors=self._sensors,
                patient=False,
            )
            self._talk = talk.__enter__()
            talk.load(self.spec.load)
            talk.workload(self.spec.workload)
        return self._talk

    def close(self) -> None:
        """End the engine; what needs one opens another, in which nothing is ready."""
        talk, self._talk = self._talk, None
        self._armed.clear()
        if talk is not None:
            talk.__exit__(None, None, None)

    def blocks(
        self, policies: Sequence[Policy], blocks: int, seed: int, *, solo: bool, min_seconds: float = 0.0
    ) -> list[Any]:
        """Interleaved blocks; the first policy is the reference and its own control."""

        def do(talk: Conversation) -> None:
            for policy in policies:
                self.arm(policy)
            names = [policy.name for policy in policies]
            talk.blocks(p.RunBlocks(arms=names, blocks=blocks, min_seconds=min_seconds, seed=seed, solo=solo))

        names = {policy.name for policy in policies}
        return [e for e in self.talk(do) if not isinstance(e, p.ArmReady | p.ArmRefused) or e.arm in names]
