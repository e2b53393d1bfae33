"""What a policy would take on the loaded model, before it is applied: bytes a stage, extra bytes, whether it fits, and the
least time that a decode step can take here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec
from textual import work
from textual.widgets import Static

from pdq_tui.core.kernels import Capability, load_kernels
from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.policy import STAGES, Policy
from pdq_tui.core.predict import Prediction, predict, step_bytes, to_pack
from pdq_tui.core.shapes import Shapes, read_shapes
from pdq_tui.core.tuned import in_use
from pdq_tui.errors import PdqError, UnfitError
from pdq_tui.host.view import SessionView
from pdq_tui.tui.device_panel import engine_gpu
from pdq_tui.tui.lines import drawn, literal
from pdq_tui.tui.runnable import capability_of

#: Prompt tokens where no workload says how many.
_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Question:
    """What a forecast depends on; two that are equal have the same answer.

    model           path of the loaded model.
    capability      what its device can do.
    tuned           the stamp of the tuned kernel table that the engine uses; empty: it uses none.
    rows            tokens in one call of prefill and of decode.
    request         sequences of the largest request, and the positions that each needs room for; None: no workload yet.
    resident        policies that arms have ready.
    free, budget    bytes that may still be taken, bytes that all packed weights may take; None: not known, no limit.
    positions       tokens in the KV cache in the middle of the longest prompt's answer.
    read_gbps       the device's measured read peak, GB/s; None: not measured.
    """

    policy: Policy
    model: str
    capability: Capability
    tuned: tuple[tuple[str, str], ...]
    rows: tuple[int, int]
    request: tuple[int, int] | None
    resident: tuple[Policy, ...]
    free: int | None
    budget: int | None
    positions: int = _PROMPT_TOKENS
    read_gbps: float | None = None


@dataclass(frozen=True)
class Forecast:
    """``new_bytes``: to be packed; ``packed_bytes``: packed already, of all arms; ``kv_bytes``: the most that one request
    takes in KV cache beside what other arms' requests have taken, 0 where no workload says; ``step_bytes``: what one
    decode step reads at least, None with the reason in ``step_reason``."""

    prediction: Prediction
    new_bytes: int
    packed_bytes: int
    kv_bytes: int
    step_bytes: int | None = None
    step_reason: str = ""


def ask(policy: Policy, view: SessionView, budget: int | None) -> Question | str:
    """The question about ``policy`` as the session stands, or why there is none yet."""
    if view.model is None or view.device is None:
        return f"no model is loaded yet (engine {view.engine.state})"
    work = view.workload
    batch = work.workload.batch if work else 1
    longest = max(work.lengths, default=_PROMPT_TOKENS) if work else _PROMPT_TOKENS
    return Question(
        policy,
        view.model.path,
        capability_of(view.device),
        tuple(view.device.tuned_stamp.items()),
        (longest * batch, batch),
        (batch, longest + work.workload.output_tokens) if work else None,
        tuple(arm.ready.policy for _, arm in sorted(view.arms.items()) if arm.ready is not None),
        free_bytes(view),
        budget,
        longest + (work.workload.output_tokens // 2 if work else 0),
        view.device.read_peak_gbps,
    )


def free_bytes(view: SessionView) -> int | None:
    """What the sensors say may still be taken on the engine's device, to 64 MiB so that it does not flicker."""
    gpu = engine_gpu(view)
    free: float | None
    if view.device is not None and view.device.kind != "cpu":
        known = gpu is not None and gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None
        free = gpu.memory_total_bytes - gpu.memory_used_bytes if known else None  # type: ignore[union-attr, operator]
    else:
        free = view.sensors.cpu.memory_available_bytes if view.sensors is not None else None
    return None if free is None else int(free) >> 26 << 26


def answer(question: Question, shapes: Shapes) -> Forecast:
    """Raises UsageError for a kernel table that cannot be read, UnfitError where the policy does not run there."""
    kind = question.capability.kind
    table = load_kernels(kind)
    if question.tuned:
        table = msgspec.structs.replace(table, tuned=in_use(kind, dict(question.tuned)).table)
    where = (shapes, table, *question.rows, question.capability)
    new, packed = to_pack(question.policy, question.resident, *where)
    prediction = predict(question.policy, *where)
    batch = question.rows[1]
    step, why = step_bytes(prediction, question.policy, shapes, batch, question.positions)
    return Forecast(prediction, new, packed, _kv_bytes(question, shapes), step, why)


def _kv_bytes(question: Question, shapes: Shapes) -> int:
    if shapes.kv is None or question.request is None:
        return 0
    kv = question.policy.kv
    there = any(one.kv == kv for one in question.resident)
    buffers = 0 if there else shapes.kv.buffer_bytes(kv, *question.request)
    return buffers + shapes.kv.handoff_bytes(kv, *question.request)


@functools.lru_cache(maxsize=4)
def shapes_of(path: str) -> Shapes:
    """Raises UsageError where no shapes can be read without the engine (GGUF, damaged files)."""
    return read_shapes(Path(path))


def fit(question: Question, forecast: Forecast) -> tuple[bool | None, str]:
    """Whether it fits (None: nobody knows), and the sentence with the bytes that say so."""
    kv = f" and {format_bytes(forecast.kv_bytes)} of KV cache" if forecast.kv_bytes else ""
    new = (f"{format_bytes(forecast.new_bytes)}" if forecast.new_bytes else "nothing") + f" to pack{kv}"
    wanted = forecast.new_bytes + forecast.kv_bytes
    if not wanted:
        return True, "nothing has to be packed"
    together = forecast.packed_bytes + forecast.new_bytes
    if forecast.new_bytes and question.budget is not None and together > question.budget:
        return (
            False,
            f"{new}, {format_bytes(together)} with both arms' own, budget {format_bytes(question.budget)}",
        )
    if question.free is None:
        return None, f"{new}, free memory n/a (no reading)"
    return wanted <= question.free, f"{new}, {format_bytes(question.free)} free"


def floor_ms(question: Question, forecast: Forecast) -> tuple[float | None, str]:
    """The least TPOT in ms: what a step reads over the measured read peak, all overhead left out; None with the reason."""
    if forecast.step_bytes is None:
        return None, forecast.step_reason
    if not question.read_gbps:
        return None, "no read peak measured"
    return forecast.step_bytes / (question.read_gbps * 1e6), ""


def floor_words(question: Question, forecast: Forecast, width: int) -> str:
    """The decode floor in one line of ``width`` cells."""
    least, why = floor_ms(question, forecast)
    reads = "" if forecast.step_bytes is None else format_bytes(forecast.step_bytes)
    if least is None:
        forms = [f"decode floor n/a: {literal(why)}"]
        forms = [f"{forms[0]}; a step reads {reads}", *forms] if reads else forms
    else:
        bound = f"TPOT ≥ {least:.3g} ms"
        peak = f"{question.read_gbps:.4g} GB/s"
        forms = [
            f"decode floor: {reads} a step at {question.positions} tokens, {bound} at {peak} read",
            f"decode floor: {reads} a step, {bound} at {peak}",
            f"decode floor: {bound} ({reads} a step)",
            f"decode floor: {bound}",
            bound,
        ]
    return next((text for text in forms if len(text) <= width), forms[-1])


def words(question: Question, forecast: Forecast, width: int) -> list[str]:
    """Lines for ``width`` cells: each stage's weights, what is stored and a token takes, the decode floor, and whether it
    fits. Four; three where there is room for few."""
    p = forecast.prediction
    size = {stage: format_bytes(p.stages[stage].bytes) for stage in STAGES}
    kv = "n/a" if p.kv_bytes_per_token is None else f"{p.kv_bytes_per_token} B"
    good, why = fit(question, forecast)
    head = {True: "✓ fits", False: "✗ does not fit", None: "? fits"}[good]
    if width < 44:
        copy = f"+{format_bytes(p.extra_bytes)} copy" if p.extra_bytes else "no copy"
        least, _ = floor_ms(question, forecast)
        token, new = f"{copy} KV {kv}", f"{head}: {format_bytes(forecast.new_bytes)} new"
        floor = "TPOT ≥ n/a" if least is None else floor_words(question, forecast, width)
        ends = (f"{new}, {floor}", f"{head}, {floor}", head)
        return [
            "  ".join(f"{stage[0].upper()} {text}" for stage, text in size.items()),
            token if len(token) <= width else copy,
            next(text for text in ends if len(text) <= width or text == head),
        ]
    extra = f"+{format_bytes(p.extra_bytes)} for a second copy" if p.extra_bytes else "no second copy"
    floor = floor_words(question, forecast, width)
    fits = f"{head}: {why}"
    if len(fits) > width:
        free = "" if question.free is None else f", {format_bytes(question.free)} free"
        fits = f"{head}: {format_bytes(forecast.new_bytes + forecast.kv_bytes)} new{free}"
    if width < 70:
        stages = " · ".join(f"{stage} {text}" for stage, text in size.items())
        return [stages, f"{extra.replace('for a ', '')} · KV {kv}/token", floor, fits]
    formats = {stage: literal(question.policy.stage(stage).format.label) for stage in STAGES}
    stored = f"  {format_bytes(p.stored_bytes)} stored, {extra}"
    kept = f", {format_bytes(p.kept_bytes)} kept as they are" if p.kept_bytes else ""
    token = f"; KV {kv} a token"
    return [
        "predicted weights: " + "   ".join(f"{s} {formats[s]} {text}" for s, text in size.items()),
        stored + (kept if len(stored + kept + token) <= width else "") + token,
        floor,
        fits,
    ]


class ForecastLines(Static):
    """Shows the forecast for one policy; what costs time (file headers, every layer's kernel) is done in a thread."""

    DEFAULT_CSS = "ForecastLines { height: auto; max-height: 4; padding: 0 1; }"

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, markup=False)
        self._asked: Question | str | None = None
        self._found: tuple[Question, Forecast] | None = None

    def about(self, policy: Policy | None, view: SessionView, budget: int | None) -> None:
        """Ask again if anything that matters has changed. None: nothing to say."""
        asked = "" if policy is None else ask(policy, view, budget)
        if asked == self._asked:
            return
        self._asked, self._found = asked, None
        if isinstance(asked, Question):
            self._work_out(asked)
        else:
            self.update(drawn(self.app, f"predicted bytes n/a: {asked}" if asked else ""))

    @work(thread=True, exclusive=True, group="forecast")
    def _work_out(self, question: Question) -> None:
        try:
            found: Forecast | PdqError = answer(question, shapes_of(question.model))
        except PdqError as error:
            found = error
        self.app.call_from_thread(self._told, question, found)

    def _told(self, question: Question, found: Forecast | PdqError) -> None:
        if question != self._asked:
            return
        if isinstance(found, UnfitError):
            self.update(drawn(self.app, f"✗ {literal(found.message)}; {literal(found.hint or '')}"))
        elif isinstance(found, PdqError):
            self.update(drawn(self.app, f"predicted bytes n/a: {literal(found.message)}"))
        else:
            self._found = (question, found)
            self._write()

    def on_resize(self) -> None:
        self._write()

    def _write(self) -> None:
        if self._found is not None:
            self.update(drawn(self.app, "\n".join(words(*self._found, self.content_size.width))))
