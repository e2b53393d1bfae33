"""One arm's requests: which of them count, their summaries, and whether they drifted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from pdq_tui.core.metrics import MEMORY_METRICS, METRICS
from pdq_tui.core.protocol import DeviceInfo, ModelInfo, Request
from pdq_tui.core.stats import Summary, present, summarize, summarize_pooled


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


def arm_stats(
    requests: Sequence[Request], device: DeviceInfo | None, model: ModelInfo | None
) -> dict[str, Summary]:
    """Summaries of one arm's requests by metric id. Left out: warm-up, first use, cancelled, invalid, control
    (``counts`` tells how many). Memory is from the solo passes where there are any."""
    used = timed(requests)
    solo = [r for r in requests if r.kind == "solo" and r.valid and not r.cancelled]
    mixed = _mixed_lengths(used)
    found: dict[str, Summary] = {}
    for id_, metric in METRICS.items():
        if id_ == "itl_ms":
            summary = summarize_pooled([r.itl_ms for r in used], metric.unit, metric.missing)
        else:
            source = solo if id_ in MEMORY_METRICS and solo else used
            values = [metric.of(r, device, model) for r in source]
            summary = summarize(values, metric.unit, metric.missing if source else "no request was measured")
        if mixed and id_ in ("e2e_ms", "decode_tokens_per_s") and summary.median is not None:
            summary = msgspec.structs.replace(summary, note=mixed)
        found[id_] = summary
    return found


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
    for metric in metrics:
        values = present([METRICS[metric].of(r, device, model) for r in timed(requests)])
        third = len(values) // 3
        found[metric] = None
        if third >= 2:
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            found[metric] = last / first - 1 if first > 0 else None
    return found
