"""The metric registry: one definition per quantity, for the screen, the help, the tables and the reports.

Shares (mfu, mbu, explained) are fractions and never clamped: a share above 1 is news about the census, not noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import msgspec

from pdq_tui.core.protocol import DeviceInfo, ModelInfo, Request

MISSING: Final = "n/a"
#: Bytes in each unit that ``format_bytes`` writes.
BYTE_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

Of = Callable[[Request, DeviceInfo | None, ModelInfo | None], float | None]


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """What a number is, for whoever reads it.

    short    for a narrow column: "TTFT".
    unit     of the value: "ms", "tok/s", "GB/s", "B", or "1" for a fraction (shown in %).
    better   "lower", "higher", or None where neither direction is good by itself.
    formula  and ``why``: one sentence each, shown wherever a person reads the number.
    """

    id: str
    name: str
    short: str
    unit: str
    better: str | None
    formula: str
    why: str

    @property
    def shown_unit(self) -> str:
        """The unit as printed beside ``format``'s number; bytes carry theirs in the number."""
        return {"1": "%", "B": ""}.get(self.unit, self.unit)

    @property
    def direction(self) -> str:
        """``better`` in words."""
        return f"{self.better} is better" if self.better else "neither direction is better by itself"

    def format(self, value: float | None) -> str:
        """The number as people read it, without the unit (bytes with it: "4.1 GiB"); "n/a" for None."""
        if value is None:
            return MISSING
        if self.unit == "1":
            return _number(value * 100)
        return format_bytes(value) if self.unit == "B" else _number(value)

    def text(self, value: float | None) -> str:
        """The number with its unit: "84.1 ms", "41.0 %", "4.1 GiB"; "n/a" for None."""
        unit = self.shown_unit
        return f"{self.format(value)} {unit}" if unit and value is not None else self.format(value)


class Metric(Quantity, frozen=True, kw_only=True):
    """A quantity that every request has a value of.

    stage    "prefill", "decode", "request" (both), "memory".
    missing  the reason given where ``of`` finds nothing in any request.
    of       the value of one request, None where it has none.
    """

    stage: str
    missing: str
    of: Of


def _number(value: float) -> str:
    """Three to four significant digits; thousands as k from 10,000 on."""
    size = abs(value)
    if size >= 999_950:
        return f"{value / 1e6:.1f}M"
    if size >= 9_999.5:
        return f"{value / 1e3:.1f}k"
    if size >= 999.5:
        return f"{value:.0f}"
    if size >= 99.95:
        return f"{value:.1f}"
    if size >= 9.995:
        return f"{value:.1f}" if size >= 20 else f"{value:.2f}"
    if size >= 1 or size == 0:
        return f"{value:.2f}"
    return f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Binary multiples, signed: 4402341478 → "4.1 GiB"."""
    size, sign = abs(value), "-" if value < 0 else ""
    if size < 1023.95:
        return f"{sign}{size:.0f} B"
    unit = next((u for u, factor in BYTE_UNITS.items() if size / factor < 1023.95), "TiB")
    return f"{sign}{size / BYTE_UNITS[unit]:.1f} {unit}"


def counted(count: int, what: str) -> str:
    """1, "thread" → "1 thread"; 2 → "2 threads"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b <= 0 else a / b


def _steps_ms(r: Request) -> float | None:
    """Mean device time of a decode step."""
    return _over(r.decode_ms, len(r.itl_ms)) if r.itl_ms else None


def _tpot(r: Request, _d: DeviceInfo | None, _m: ModelInfo | None) -> float | None:
    return r.tpot_ms if max(r.output_tokens, default=0) >= 2 else None


def _prefill_rate(r: Request, _d: DeviceInfo | None, _m: ModelInfo | None) -> float | None:
    rate = _over(float(r.prompt_tokens), r.prefill_ms)
    return None if rate is None else rate * 1e3


def _decode_rate(r: Request, _d: DeviceInfo | None, _m: ModelInfo | None) -> float | None:
    made = sum(n - 1 for n in r.output_tokens if n > 1)
    rate = _over(float(made), r.decode_ms) if made else None
    return None if rate is None else rate * 1e3


def _mfu(r: Request, d: DeviceInfo | None, _m: ModelInfo | None) -> float | None:
    if d is None or not r.prefill_flops or not r.prefill_ms:
        return None
    bound_ms = 0.0
    for dtype, flops in r.prefill_flops.items():
        peak = d.compute_peak_tflops.get(dtype)
        if not peak:
            return None
        bound_ms += flops / (peak * 1e9)
    return bound_ms / r.prefill_ms


def _bandwidth(r: Request, _d: DeviceInfo | None, _m: ModelInfo | None) -> float | None:
    per_ms = _over(r.bytes_per_step, _steps_ms(r))
    return None if per_ms is None else per_ms / 1e6


def _mbu(r: Request, d: DeviceInfo | None, m: ModelInfo | None) -> float | None:
    return _over(_bandwidth(r, d, m), d.read_peak_gbps if d else None)


def _itl(r: Request, _d: DeviceInfo | None, _m: ModelInfo | None) -> float | None:
    return statistics.median(r.itl_ms) if r.itl_ms else None


class _Time(Metric, frozen=True, kw_only=True):
    unit: str = "ms"
    better: str | None = "lower"


class _Rate(Metric, frozen=True, kw_only=True):
    unit: str = "tok/s"
    better: str | None = "higher"


class _Share(Metric, frozen=True, kw_only=True):
    unit: str = "1"
    better: str | None = "higher"


class _Bytes(Metric, frozen=True, kw_only=True):
    unit: str = "B"
    better: str | None = "lower"


_NO_PREFILL: Final = "no prefill was timed"
_NO_STEP: Final = "no decode step was made"
_TWO_TOKENS: Final = "needs at least two output tokens"
_NO_PEAKS: Final = "no peaks were measured"
_NO_COUNTER: Final = "this device has no counter for it"
_PEAK: Final = "high-water mark of the stage, reset before it; from a pass with only this policy resident, if one was made"

_ALL: Final = (
    _Time(
        id="e2e_ms",
        name="End-to-end time",
        short="E2E",
        formula="start of prefill → last token; TTFT + hand-off + (N − 1) · TPOT at batch 1",
        why="What the caller waits for in all; the primary endpoint of a comparison.",
        stage="request",
        missing="no request ended",
        of=lambda r, d, m: r.e2e_ms,
    ),
    _Time(
        id="ttft_ms",
        name="Time to first token",
        short="TTFT",
        formula="start of prefill → first token; TTFT = prefill here: prompts are tokenized beforehand and nothing queues",
        why="How long nothing is seen; grows with the prompt.",
        stage="prefill",
        missing="no first token was made",
        of=lambda r, d, m: r.ttft_ms,
    ),
    _Time(
        id="prefill_ms",
        name="Prefill time",
        short="prefill",
        formula="device time of the one pass over the prompt, until the first token is chosen",
        why="The compute-bound stage alone; the same time as TTFT here, where nothing comes before it.",
        stage="prefill",
        missing=_NO_PREFILL,
        of=lambda r, d, m: r.prefill_ms,
    ),
    _Rate(
        id="prefill_tokens_per_s",
        name="Prefill rate",
        short="pp tok/s",
        formula="real prompt tokens / prefill time; padding is not counted",
        why="Prompt throughput, comparable between prompt lengths (llama-bench: pp).",
        stage="prefill",
        missing=_NO_PREFILL,
        of=_prefill_rate,
    ),
    _Share(
        id="prefill_mfu",
        name="Model FLOPs utilization of prefill",
        short="MFU",
        formula="Σ over dtypes (FLOPs in that dtype / measured peak of that dtype) / prefill time",
        why="How much of the arithmetic this device can do was used; each dtype against its own peak.",
        stage="prefill",
        missing="no compute peak of every dtype used was measured",
        of=_mfu,
    ),
    _Share(
        id="prefill_explained",
        name="Explained share of prefill",
        short="expl P",
        formula="Σ over operators max(bytes / read peak, FLOPs / peak of its dtype) / prefill time",
        why="How much of the time is hardware limit; the rest is engine, and no statement about precision.",
        stage="prefill",
        missing=_NO_PEAKS,
        of=lambda r, d, m: _over(r.prefill_bound_ms, r.prefill_ms),
    ),
    _Time(
        id="tpot_ms",
        name="Time per output token",
        short="TPOT",
        formula="(t_last − t_first) / (N − 1), one value a request, null for N < 2",
        why="How fast the answer flows once it has begun.",
        stage="decode",
        missing=_TWO_TOKENS,
        of=_tpot,
    ),
    _Time(
        id="decode_step_ms",
        name="Decode step",
        short="step",
        formula="device time of decode / number of single-token passes",
        why="The bandwidth-bound step that bytes per step is divided by.",
        stage="decode",
        missing=_NO_STEP,
        of=lambda r, d, m: _steps_ms(r),
    ),
    _Time(
        id="itl_ms",
        name="Inter-token latency",
        short="ITL",
        formula="every gap between consecutive tokens; a distribution (a request's value is its median)",
        why="Shows stutter that a mean hides.",
        stage="decode",
        missing=_NO_STEP,
        of=_itl,
    ),
    _Rate(
        id="decode_tokens_per_s",
        name="Decode rate",
        short="tg tok/s",
        formula="Σ over rows (N − 1) / decode time",
        why="Tokens made a second by the whole batch (llama-bench: tg).",
        stage="decode",
        missing=_TWO_TOKENS,
        of=_decode_rate,
    ),
    _Bytes(
        id="bytes_per_step",
        name="Bytes per decode step",
        short="B/step",
        formula="stored bytes that one step must read: packed weights, scales, zero points, head, one embedding row a token, KV at its length and format",
        why="What quantization is for in decode: time can fall no faster than this.",
        stage="decode",
        missing=_NO_STEP,
        of=lambda r, d, m: r.bytes_per_step,
    ),
    Metric(
        id="bandwidth_gbps",
        name="Achieved bandwidth",
        short="GB/s",
        unit="GB/s",
        better=None,
        formula="bytes per step / mean device time of a decode step",
        why="Whether decode runs at memory speed. Fewer bytes at the same time lower it: not good or bad alone.",
        stage="decode",
        missing=_NO_STEP,
        of=_bandwidth,
    ),
    _Share(
        id="mbu",
        name="Memory bandwidth utilization",
        short="MBU",
        formula="achieved bandwidth / measured read peak of this device; over 100 %: fits in cache, or the census is wrong",
        why="How near decode is to the memory's limit.",
        stage="decode",
        missing="no read peak was measured",
        of=_mbu,
    ),
    _Share(
        id="decode_explained",
        name="Explained share of decode",
        short="expl D",
        formula="Σ over operators max(bytes / read peak, FLOPs / peak of its dtype) / time, mean step",
        why="Below one half the engine is measured, not the precision.",
        stage="decode",
        missing=_NO_PEAKS,
        of=lambda r, d, m: _over(r.decode_bound_ms, _steps_ms(r)),
    ),
    _Time(
        id="handoff_ms",
        name="Hand-off",
        short="hand-off",
        formula="conversion of the KV cache between prefill and decode; in no other number but E2E",
        why="The price of two KV formats; 0 where nothing is converted.",
        stage="request",
        missing="no hand-off was timed",
        of=lambda r, d, m: r.handoff_ms,
    ),
    _Time(
        id="gap_ms",
        name="Gap between requests",
        short="gap",
        formula="end of the last request → start of this one",
        why="What switching to another resident policy costs.",
        stage="request",
        missing="no request followed another",
        of=lambda r, d, m: r.gap_ms,
    ),
    _Bytes(
        id="prefill_peak_bytes",
        name="Peak memory in prefill",
        short="peak P",
        formula=_PEAK,
        why="Decides whether a prompt fits.",
        stage="memory",
        missing=_NO_COUNTER,
        of=lambda r, d, m: r.prefill_peak_bytes,
    ),
    _Bytes(
        id="decode_peak_bytes",
        name="Peak memory in decode",
        short="peak D",
        formula=_PEAK,
        why="Decides how many requests fit.",
        stage="memory",
        missing=_NO_COUNTER,
        of=lambda r, d, m: r.decode_peak_bytes,
    ),
    _Bytes(
        id="steady_bytes",
        name="Steady memory",
        short="steady",
        formula="median of memory held over the last third of decode",
        why="What stays occupied while tokens flow.",
        stage="memory",
        missing=_NO_COUNTER,
        of=lambda r, d, m: r.steady_bytes,
    ),
)

METRICS: Final[dict[str, Metric]] = {m.id: m for m in _ALL}

#: The primary endpoint first; the others are Holm-corrected. Paired blocks are taken of these.
PRIMARY: Final = "e2e_ms"
RATIO_METRICS: Final = (
    PRIMARY,
    "ttft_ms",
    "prefill_ms",
    "prefill_tokens_per_s",
    "tpot_ms",
    "decode_tokens_per_s",
)
#: Rates that are a time's reciprocal: one hypothesis, which must not be counted twice in a correction for several.
MIRRORS: Final = {"prefill_tokens_per_s": "prefill_ms", "decode_tokens_per_s": "tpot_ms"}
MEMORY_METRICS: Final = tuple(m.id for m in _ALL if m.stage == "memory")
#: High-water marks: the largest of several passes is the figure, not their median.
PEAK_METRICS: Final = ("prefill_peak_bytes", "decode_peak_bytes")


def of(metric: str, request: Request, device: DeviceInfo | None, model: ModelInfo | None) -> float | None:
    """The value of ``metric`` (an id of METRICS) of one request."""
    return METRICS[metric].of(request, device, model)
