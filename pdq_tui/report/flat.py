"""A comparison or a run's document as flat rows, one a figure or one a ratio, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import polars as pl

from pdq_tui.core.document import DECODE_KEYS, PREFILL_KEYS
from pdq_tui.core.metrics import METRICS
from pdq_tui.report import trend
from pdq_tui.store import series
from pdq_tui.store.compare import Comparison
from pdq_tui.store.figures import FIGURES
from pdq_tui.store.trend import Trend

_F, _S, _I, _B = pl.Float64(), pl.String(), pl.Int64(), pl.Boolean()

COMPARISON: Final[series.Schema] = {
    "reference": _S,
    "candidate": _S,
    "metric": _S,
    "unit": _S,
    "group": _S,
    "reference_value": _F,
    "reference_low": _F,
    "reference_high": _F,
    "reference_n": _I,
    "candidate_value": _F,
    "candidate_low": _F,
    "candidate_high": _F,
    "candidate_n": _I,
    "delta": _F,
    "delta_low": _F,
    "delta_high": _F,
    "percent": _F,
    "percent_low": _F,
    "percent_high": _F,
    "judgement": _S,
    "method": _S,
    "blocks": _I,
    "flagged": _B,
    "reason": _S,
}
DOCUMENT: Final[series.Schema] = {
    "run": _S,
    "arm": _S,
    "policy": _S,
    "stage": _S,
    "metric": _S,
    "value": _F,
    "low": _F,
    "high": _F,
    "n": _I,
    "unit": _S,
    "reason": _S,
}
RATIOS: Final[series.Schema] = {
    "run": _S,
    "reference": _S,
    "arm": _S,
    "metric": _S,
    "ratio": _F,
    "ratio_low": _F,
    "ratio_high": _F,
    "difference": _F,
    "difference_low": _F,
    "difference_high": _F,
    "unit": _S,
    "judgement": _S,
    "blocks": _I,
    "decided_at_blocks": _I,
    "threshold": _F,
    "noise_floor": _F,
    "reason": _S,
}
#: Keys of a ratio in a document that are columns as they are.
_RATIO_KEYS: Final = (
    "reference", "arm", "metric", "ratio", "difference", "unit", "judgement", "blocks", "decided_at_blocks",
    "threshold", "noise_floor",
)  # fmt: skip


class Flat(msgspec.Struct, frozen=True):
    schema: dict[str, Any]
    rows: list[dict[str, Any]]


def rows(source: Comparison | Trend | Mapping[str, Any]) -> Flat:
    """Flat rows with their explicit schema. Missing is None, with the reason in the row."""
    if isinstance(source, Comparison):
        return Flat(dict(COMPARISON), _comparison(source))
    if isinstance(source, Trend):
        return Flat(dict(trend.SCHEMA), trend.trend_rows(source))
    return Flat(dict(DOCUMENT), [r for arm in source.get("arms", []) for r in _arm(source.get("run"), arm)])


def ratios(document: Mapping[str, Any]) -> Flat:
    """The arms of a run against its reference, one row an arm and metric; see ``core.stats.Ratio``."""
    return Flat(dict(RATIOS), [_ratio(document.get("run"), r) for r in document.get("ratios") or []])


def _ratio(run: Any, r: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run, **{key: r.get(key) for key in _RATIO_KEYS}}
    for key in ("ratio", "difference"):
        row[f"{key}_low"], row[f"{key}_high"] = _low_high(r.get("ci95" if key == "ratio" else f"{key}_ci95"))
    reasons = (r.get(f"{key}_reason") for key in ("judgement", "ratio", "ci95"))
    row["reason"] = next((reason for reason in reasons if reason), None)
    return row


def to_csv(flat: Flat) -> str:
    """RFC 4180 with a header and \\n line ends; missing is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(flat.schema), lineterminator="\n")
    writer.writeheader()
    for row in flat.rows:
        writer.writerow({k: str(v).lower() if isinstance(v, bool) else v for k, v in row.items()})
    return out.getvalue()


def to_parquet(flat: Flat) -> bytes:
    return series.parquet_bytes(series.frame(flat.rows, flat.schema))


def _low_high(ci: Sequence[float] | None) -> tuple[float | None, float | None]:
    return (ci[0], ci[1]) if ci else (None, None)


def _comparison(c: Comparison) -> list[dict[str, Any]]:
    found = []
    for r in c.rows:
        row: dict[str, Any] = {"reference": c.reference.id, "candidate": r.candidate, "metric": r.metric}
        row |= {"unit": r.unit, "group": r.group}
        for side, s in (("reference", r.reference), ("candidate", r.value)):
            row[f"{side}_value"], row[f"{side}_n"] = s.median, s.n
            row[f"{side}_low"], row[f"{side}_high"] = _low_high(s.ci95)
        row |= {"delta": r.delta, "percent": r.percent, "judgement": r.judgement, "method": r.method}
        row["delta_low"], row["delta_high"] = _low_high(r.delta_ci95)
        row["percent_low"], row["percent_high"] = _low_high(r.ci95)
        row |= {"blocks": r.blocks, "flagged": r.flagged, "reason": r.reason}
        found.append(row)
    return found


def _arm(run: Any, arm: Mapping[str, Any]) -> list[dict[str, Any]]:
    about = {"run": run, "arm": arm.get("label"), "policy": arm.get("policy")}
    found: list[dict[str, Any]] = []

    def add(stage: str, metric: str, table: Mapping[str, Any], key: str, unit: str) -> None:
        value = table.get(key)
        row = {**about, "stage": stage, "metric": metric, "unit": unit, "reason": table.get(f"{key}_reason")}
        if isinstance(value, Mapping):
            row |= {"value": value.get("median"), "n": value.get("n"), "unit": value.get("unit")}
            row["low"], row["high"] = _low_high(value.get("ci95"))
            row["reason"] = value.get("median_reason") or value.get("ci95_reason")
        else:
            row |= {"value": value, "n": None if value is None else 1}
        found.append(row)

    for stage, keys in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        part = arm.get(stage) or {}
        for key, metric in keys.items():
            add(stage, metric, part, key, METRICS[metric].unit)
        add(stage, f"{stage}_peak_bytes", part, "peak_bytes", "B")
    gaps = (arm.get("decode") or {}).get("itl_ms") or {}
    for q in ("p50", "p90", "p99", "max"):
        add("decode", f"itl_{q}_ms", gaps, q, str(gaps.get("unit") or "ms"))
        found[-1]["n"] = gaps.get("n")
    for key in ("e2e_ms", "handoff_ms", "gap_ms"):
        add("request", key, arm, key, "ms")
    add("memory", "steady_bytes", arm, "steady_bytes", "B")
    for figure in FIGURES.values():
        table: Any = arm
        for key in figure.path[:-1]:
            table = (table or {}).get(key)
        add("memory", figure.id, table or {}, figure.path[-1], figure.unit)
    return found
