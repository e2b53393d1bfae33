"""One arm's requests: which of them count, their summaries, and whether they drifted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from pdq_tui.core.metrics import MEMORY_METRICS, METRICS, PEAK_METRICS
from pdq_tui.core.protocol import DeviceInfo, ModelInfo, Request
from pdq_tui.core.stats import Summary, present, summarize, summarize_in_units, summarize_pooled


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of an arm entered its figures, and why the others did not. ``solo`` passes give memory only;
    ``control`` is the reference run as its own rival."""

    used: int = 0
    warmup: int = 0
    first_use: int = 0
    cancelled: int = 0
    invalid: int = 0
    control: int = 0
    solo: int = 0


def counts(requests: Sequence[Request]) -> Counts:
    """Each request falls into one class; the first that applies in the order invalid, cancelled, solo, warm-up,
    first use, control."""
    tally = dict.fromkeys(Counts.__struct_fields__, 0)
    for r in requests:
        tally[_class(r)] += 1
    return Counts(**tally)


def _class(r: Request) -> str:
    if not r.valid:
        return "invalid"
    if r.cancelled:
        return "cancelled"
    if r.kind == "solo":
        return "solo"
    if r.warmup or r.kind == "warmup":
        return "warmup"
    if r.first_use:
        return "first_use"
    return "control" if r.control else "used"


def timed(requests: Sequence[Request]) -> list[Request]:
    """The requests whose times enter an arm's figures."""
    return [r for r in requests if _class(r) == "used"]


def units(requests: Sequence[Request]) -> list[list[Request]]:
    """What is independent of each other: one arm's requests of a block together, each request outside blocks alone.
    A loop that is started again counts from block 0 again: a step back in the slot begins a new block."""
    found: list[list[Request]] = []
    last: Request | None = None
    for r in requests:
        together = (
            last is not None
            and r.block is not None
            and r.block == last.block
            and (r.slot or 0) > (last.slot or 0)
        )
        if together:
            found[-1].append(r)
        else:
            found.append([r])
        last = r
    return found


def gaps(requests: Sequence[Request]) -> list[list[float]]:
    """Every inter-token latency in ms, by independent unit."""
    return [[v for r in unit for v in r.itl_ms] for unit in units(requests)]


def invalid_reason(requests: Sequence[Request]) -> str | None:
    """Why an arm's figures may be shown but never ranked; None if every request of it is valid."""
    for r in requests:
        if not r.valid:
            where = f" (first in {r.nonfinite.stage}, step {r.nonfinite.step})" if r.nonfinite else ""
            return f"{r.invalid_reason or 'invalid'}{where}"
    return None


def answers(requests: Sequence[Request]) -> dict[int, str]:
    """Prompt number → what stands for the first answer to it: equal where the same was written."""
    found: dict[int, str] = {}
    for r in requests:
        made = r.tokens_sha256 or r.text
        if made is not None:
            found.setdefault(r.prompt, made)
    return found


def unequal_work(one: Sequence[Request], two: Sequence[Request]) -> str | None:
    """Why end-to-end times of two arms may not be judged: they made different numbers of tokens."""
    made = [{tuple(r.output_tokens) for r in side} for side in (one, two)]
    return "output counts differ" if all(made) and made[0] != made[1] else None


#: Metrics that hold a figure against a device's peaks.
OF_A_PEAK: Final = ("mfu", "mbu", "prefill_explained", "decode_explained")


def arm_stats(
    requests: Sequence[Request],
    device: DeviceInfo | None,
    model: ModelInfo | None,
    metrics: Sequence[str] = tuple(METRICS),
) -> dict[str, Summary]:
    """Summaries of one arm's requests by metric id. Left out: warm-up, first use, cancelled, invalid, control
    (``counts`` tells how many). Memory is from the solo passes where there are any. A peak is the largest of all
    passes and has no interval; everything else is a median whose interval takes a block as one observation
    (``units``)."""
    used = timed(requests)
    solo = [r for r in requests if r.kind == "solo" and r.valid and not r.cancelled]
    mixed = _mixed_lengths(used)
    # The two requests of a block share its minute of clocks and heat: together they are one observation.
    sizes = {True: [len(unit) for unit in units(solo)], False: [len(unit) for unit in units(used)]}
    found: dict[str, Summary] = {}
    for id_ in metrics:
        metric = METRICS[id_]
        source = solo if id_ in MEMORY_METRICS and solo else used
        why = metric.missing if source else "no request was measured"
        if source and device is not None and device.several and id_ in OF_A_PEAK:
            why = f"{device.several}: peaks are of one"
        if id_ == "itl_ms":
            summary = summarize_pooled(gaps(used), metric.unit, why)
        elif id_ in PEAK_METRICS:
            summary = _largest([metric.of(r, device, model) for r in source], metric.unit, why)
        else:
            of = metric.of
            values = [of(r, device, model) for r in source]
            summary = summarize_in_units(values, sizes[source is solo], metric.unit, why)
        if mixed and id_ in ("e2e_ms", "decode_tokens_per_s") and summary.median is not None:
            summary = msgspec.structs.replace(summary, note=mixed)
        found[id_] = summary
    return found


def _largest(values: Sequence[float | None], unit: str, reason: str) -> Summary:
    there = present(values)
    if not there:
        return summarize(values, unit, reason)
    n = len(there)
    note = f"the largest of {n} passes" if n > 1 else None
    why = "a high-water mark has no interval"
    return Summary(median=max(there), ci95=None, n=n, unit=unit, reason=why, note=note)


def _mixed_lengths(requests: Sequence[Request]) -> str | None:
    """Requests that made different numbers of tokens are not one population: to be said beside the figure."""
    made = sorted({n for r in requests for n in r.output_tokens})
    return f"requests made {made[0]} to {made[-1]} tokens" if len(made) > 1 else None


def drift(
    requests: Sequence[Request],
    device: DeviceInfo | None = None,
    model: ModelInfo | None = None,
    metrics: Sequence[str] = ("e2e_ms", "ttft_ms", "tpot_ms"),
) -> dict[str, float | None]:
    """Median of the last third of one arm's requests over that of the first third, minus 1, in the order they ran.
    None below 6 requests."""
    found: dict[str, float | None] = {}
    used = timed(requests)
    for metric in metrics:
        values = present([METRICS[metric].of(r, device, model) for r in used])
        third = len(values) // 3
        found[metric] = None
        if third >= 2:
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            found[metric] = last / first - 1 if first > 0 else None
    return found
