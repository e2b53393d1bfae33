"""From a comparison or a run's document to a page that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from pdq_tui.core.document import DECODE_KEYS, PREFILL_KEYS
from pdq_tui.core.metrics import METRICS, MISSING, counted, format_bytes
from pdq_tui.core.roofline import Roofline, document_rooflines
from pdq_tui.core.stats import UNSURE, Summary
from pdq_tui.report.answers import answers_tables, side_by_side
from pdq_tui.report.cells import (
    ARROWS,
    DELTA,
    INTERVAL,
    PERCENT,
    about,
    delta_interval_text,
    delta_text,
    interval_text,
    judgement_text,
    percent_text,
    signed,
    value_text,
)
from pdq_tui.report.page import Formula, Page, Table
from pdq_tui.report.roofline import roofline_table
from pdq_tui.store.compare import PAIRED, UNPAIRED, Comparison, Side
from pdq_tui.store.figures import FIGURES
from pdq_tui.store.setup import BY_POLICY, DIFFERS, OK, SPEED, UNKNOWN, SetupCheck, kernels

Json = Mapping[str, Any]

HOLDS: Final = "Holds for this device, this engine and version, these kernels."
#: What a speed row's absolute difference is, by the method of its ratio.
DELTA_OF: Final = {
    PAIRED: "Δ is ★'s geometric mean over the blocks × (ratio − 1), the estimate of Δ %, not the medians' difference",
    UNPAIRED: "Δ is the median of ★'s blocks × (ratio − 1), the estimate of Δ %; a block is its geometric mean",
}
#: How the words and signs of a comparison are to be read, below the formulas.
LEGEND: Final = (
    "± is half the width of the 95 % interval of the median. A judgement compares whole blocks in which the "
    "policies take turns: better or worse where the interval excludes 0 and the difference exceeds the threshold "
    "(the smallest effect that matters, or the noise of the reference against itself, whichever is larger); "
    "same where the interval lies inside the threshold; unsure otherwise, and wherever conditions differ (⚑). "
    "Δ % is ratio − 1; Δ by ratio is the same estimate in the metric's unit, so the two never differ in sign."
)
_MARKS: Final = {OK: "✓", DIFFERS: "✗", UNKNOWN: "?", BY_POLICY: "by policy:"}


# -- comparison --------------------------------------------------------------------------------------------------------


def comparison_page(c: Comparison, *, diff_only: bool = False) -> Page:
    """``diff_only`` leaves out rows that are neither better nor worse, and says how many."""
    tables = []
    if len(c.candidates) > 1:
        tables.append(_overview(c, diff_only))
    tables += [_pair(c, side, diff_only) for side in c.candidates]
    placed, unplaced = _roofline([] if diff_only else c.rooflines)
    tables += [*placed, *([] if diff_only else answers_tables(c)), _setup(c)]
    shown = list(dict.fromkeys(r.metric for r in c.rows if r.different or not diff_only))
    return Page(
        title=f"{', '.join(s.label for s in c.candidates)} against {c.reference.label}",
        headline=" ".join(_headline(c, side) for side in c.candidates),
        facts=[
            *facts(c.conditions),
            ("reference", _side_fact(c.reference)),
            *(("candidate", _side_fact(s)) for s in c.candidates),
            ("smallest effect that matters", f"{c.min_effect * 100:g} %"),
        ],
        tables=tables,
        notes=[*c.notes, *unplaced, HOLDS],
        formulas=formulas(shown),
        legend=LEGEND,
        texts=side_by_side(c),
    )


def _side_fact(side: Side) -> str:
    """What a column is, when it was measured where that is known, and the note that its snapshot was taken with."""
    return _join(f"{side.label} ({side.id})", day(side.measured), f"note: {side.note}" if side.note else "")


def _headline(c: Comparison, side: Side) -> str:
    rows = {r.metric: r for r in c.rows_of(side.id)}
    parts = []
    for metric in ("e2e_ms", "ttft_ms", "tpot_ms"):
        row = rows.get(metric)
        if row is not None and row.percent is not None:
            why = f": {row.reason}" if row.judgement == "unsure" and row.reason else ""
            parts.append(f"{row.short} {percent_text(row.percent)} ({row.judgement}{why})")
    return f"{side.label}: {', '.join(parts) or 'nothing to compare'}."


def _pair(c: Comparison, side: Side, diff_only: bool) -> Table:
    rows = c.rows_of(side.id)
    shown = [r for r in rows if r.different or not diff_only]
    table = Table(
        title=f"{side.label} against {c.reference.label}",
        columns=[
            "metric",
            "unit",
            f"★ {c.reference.label}",
            side.label,
            DELTA,
            "95 % CI of Δ",
            PERCENT,
            INTERVAL,
            "judgement",
        ],
        rows=[],
        left=2,
    )
    group = ""
    for row in shown:
        if row.group != group:
            group = row.group
            table.sections[len(table.rows)] = group
        table.rows.append(
            [
                row.short,
                about(row.metric).shown_unit,
                value_text(row.metric, row.reference),
                value_text(row.metric, row.value),
                delta_text(row),
                delta_interval_text(row),
                percent_text(row.percent),
                interval_text(row),
                judgement_text(row),
            ]
        )
    hidden = len(rows) - len(shown)
    if hidden:
        table.footer.append(f"{hidden} rows without a difference are not shown")
    table.footer += _by_reason([(r.short, r.reason) for r in shown if r.judgement == UNSURE])
    missing = [r for r in shown if r.judgement != UNSURE and None in (r.reference.median, r.value.median)]
    table.footer += _by_reason([(r.short, r.reason) for r in missing], MISSING)
    speed = [r for r in shown if r.group == SPEED and r.percent is not None]
    methods = sorted({f"{r.method} ({r.blocks})" if r.blocks else r.method for r in speed})
    if methods:
        table.footer.append(f"speed rows: {', '.join(methods)}; {DELTA_OF[speed[0].method]}")
    return table


def _by_reason(pairs: Sequence[tuple[str, str | None]], word: str = UNSURE) -> list[str]:
    """One line a reason: "E2E, TTFT: unsure (threads)"."""
    grouped: dict[str, list[str]] = {}
    for name, why in pairs:
        if why:
            grouped.setdefault(why, []).append(name)
    return [f"{', '.join(names)}: {word} ({why})" for why, names in grouped.items()]


def _overview(c: Comparison, diff_only: bool) -> Table:
    by_side = {s.id: {r.metric: r for r in c.rows_of(s.id)} for s in c.candidates}
    metrics = [r.metric for r in c.rows_of(c.candidates[0].id)]
    table = Table(
        title=f"all against {c.reference.label}",
        columns=["metric", "unit", f"★ {c.reference.label}", *(s.label for s in c.candidates)],
        rows=[],
        left=2,
    )
    for metric in metrics:
        rows = [by_side[s.id][metric] for s in c.candidates]
        if diff_only and not any(r.different for r in rows):
            continue
        cells = [
            f"{about(metric).format(r.value.median)}  {percent_text(r.percent)}  {judgement_text(r)}"
            for r in rows
        ]
        first = rows[0]
        table.rows.append(
            [first.short, about(metric).shown_unit, value_text(metric, first.reference), *cells]
        )
    return table


def _setup(c: Comparison) -> Table:
    """Same set-up? One row a condition, one column a snapshot; only what is not ok names both values."""
    what = list(dict.fromkeys(check.what for check in c.setup))
    by_side: dict[str, dict[str, SetupCheck]] = {
        s.id: {k.what: k for k in c.setup_of(s.id)} for s in c.candidates
    }
    table = Table(
        title="same set-up?",
        columns=["condition", f"★ {c.reference.label}", *(s.label for s in c.candidates)],
        rows=[],
        left=2 + len(c.candidates),
    )
    for name in what:
        checks = [by_side[s.id].get(name) for s in c.candidates]
        reference = next((k.reference for k in checks if k), MISSING)
        cells = []
        for check in checks:
            if check is None:
                cells.append("–")
                continue
            spoils = f" → {' and '.join(check.invalidates)} rows flagged" if check.invalidates else ""
            shown = "" if check.status == OK else f" {check.value}"
            cells.append(f"{_MARKS[check.status]}{shown}{spoils}")
        table.rows.append([name, reference, *cells])
    return table


# -- one run -----------------------------------------------------------------------------------------------------------


def document_page(doc: Json) -> Page:
    """A run's (or a snapshot's) contract document."""
    arms = [a for a in doc.get("arms", []) if isinstance(a, Mapping)]
    labels = [str(a.get("label")) for a in arms]
    placed, unplaced = _roofline(document_rooflines(doc))
    return Page(
        title=f"pdq-tui run {doc.get('run') or ''}".strip(),
        headline=" ".join(_ratio_sentence(r) for r in doc.get("ratios", []) if r.get("metric") == "e2e_ms")
        or f"{', '.join(labels) or 'no arm'}: no comparison in this run.",
        facts=[*facts(doc), *(("note", note) for note in doc.get("notes", []) if note)],
        tables=[
            _arms_table(arms, labels),
            *_ratio_tables(doc),
            *placed,
        ],
        notes=[*doc.get("warnings", []), *unplaced, HOLDS],
        formulas=formulas(
            [*PREFILL_KEYS.values(), *DECODE_KEYS.values(), "itl_ms", "e2e_ms", "handoff_ms", *FIGURES]
        ),
        legend=LEGEND,
    )


def _ratio_sentence(r: Json) -> str:
    ratio = r.get("ratio")
    if ratio is None:
        return f"{r['arm']}: not compared ({r.get('judgement_reason') or r.get('ratio_reason')})."
    word = r["judgement"]
    return f"{r['arm']}: E2E {percent_text((ratio - 1) * 100)} against {r['reference']} ({word})."


def _summary(value: Any) -> Summary | None:
    if not isinstance(value, Mapping):
        return None
    ci = value.get("ci95")
    return Summary(
        median=value.get("median"),
        ci95=(ci[0], ci[1]) if ci else None,
        n=int(value.get("n") or 0),
        unit=str(value.get("unit") or ""),
    )


def _arms_table(arms: Sequence[Json], labels: Sequence[str]) -> Table:
    table = Table(title="arms", columns=["metric", "unit", *labels], rows=[], left=2)

    missing: list[tuple[str, str | None]] = []

    def add(name: str, unit: str, cells: list[str]) -> None:
        table.rows.append([name, unit, *cells])

    def missed(name: str, tables: list[Json], key: str) -> None:
        whys = {str(t.get(f"{key}_reason")) for t in tables if t.get(key) is None and t.get(f"{key}_reason")}
        missing.extend((name, why) for why in sorted(whys))

    def summaries(metric: str, tables: list[Json], key: str) -> None:
        entry = about(metric)
        parsed = [_summary(t.get(key)) for t in tables]
        add(entry.short, entry.shown_unit, [value_text(metric, s) if s else MISSING for s in parsed])
        missed(entry.short, tables, key)

    def counted_bytes(name: str, tables: list[Json], key: str) -> None:
        add(name, "", [_bytes(t.get(key)) for t in tables])
        missed(name, tables, key)

    add("policy", "", [str(a.get("policy") or MISSING) for a in arms])
    add("storage", "", [str(a.get("storage") or MISSING) for a in arms])
    for stage, keys in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        table.sections[len(table.rows)] = stage
        parts = [a.get(stage) or {} for a in arms]
        for key, metric in keys.items():
            summaries(metric, parts, key)
        if stage == "decode":
            gaps = [p.get("itl_ms") or {} for p in parts]
            for q in ("p50", "p90", "p99", "max"):
                add(f"ITL {q}", "ms", [METRICS["itl_ms"].format(g.get(q)) for g in gaps])
                missed(f"ITL {q}", gaps, q)
            counted_bytes("B/step", parts, "bytes_per_step")
        counted_bytes(f"peak {stage[0].upper()}", parts, "peak_bytes")
        add("kernels", "", [kernels(a, stage) or MISSING for a in arms])
    table.sections[len(table.rows)] = "request"
    for key in ("e2e_ms", "handoff_ms"):
        summaries(key, list(arms), key)
    counted = [a.get("requests") or {} for a in arms]
    add("requests", "", [str(c.get("used", MISSING)) for c in counted])
    table.sections[len(table.rows)] = "memory"
    for figure in FIGURES.values():
        if figure.id != "bytes_per_step":
            add(figure.short, figure.shown_unit, [figure.format(figure.of(dict(a))) for a in arms])
    counted_bytes("steady", list(arms), "steady_bytes")
    add("measured", "", [_join(a.get("memory_from"), a.get("memory_method")) or MISSING for a in arms])
    table.footer = _by_reason(list(dict.fromkeys(missing)), MISSING)
    return table


def _bytes(value: Any) -> str:
    return format_bytes(value) if isinstance(value, (int, float)) else MISSING


def _ratio_tables(doc: Json) -> list[Table]:
    rows = doc.get("ratios") or []
    if not rows:
        return []
    table = Table(
        title=f"against {rows[0].get('reference')}",
        columns=["arm", "metric", "ratio", "95 % CI", DELTA, "noise floor", "blocks", "judgement"],
        rows=[],
        left=2,
    )
    for r in rows:
        ci, floor, word = r.get("ci95"), r.get("noise_floor"), str(r.get("judgement"))
        table.rows.append(
            [
                str(r["arm"]),
                about(r["metric"]).short,
                MISSING if r.get("ratio") is None else f"×{r['ratio']:.3f}",
                MISSING if not ci else f"[{ci[0]:.3f}, {ci[1]:.3f}]",
                _difference(r),
                MISSING if floor is None else f"{floor * 100:.1f} %",
                str(r.get("blocks", MISSING)),
                f"{ARROWS.get(word, '')}{word}",
            ]
        )
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [(about(r["metric"]).short, r.get("judgement_reason")) for r in rows if r["arm"] == arm]
        table.footer += [f"{arm}: {line}" for line in _by_reason(mine)]
    table.footer.append(
        "ratio is arm / reference of the metric as named: a time ratio below 1 is faster; Δ is the reference's geometric "
        "mean over the blocks × (ratio − 1)"
    )
    return [table]


def _difference(r: Json) -> str:
    value, entry = r.get("difference"), about(r["metric"])
    return MISSING if value is None else f"{signed(r['metric'], value)} {entry.shown_unit}".rstrip()


# -- what both have ----------------------------------------------------------------------------------------------------


def _roofline(lines: Sequence[Roofline]) -> tuple[list[Table], list[str]]:
    """The table, or the note why there is none: rows of nothing tell nothing."""
    if any(line.points for line in lines):
        return [roofline_table(lines)], []
    reasons = dict.fromkeys(why for line in lines for why in line.missing.values())
    return [], [f"no roofline: {'; '.join(reasons)}"] if reasons else []


def facts(doc: Json) -> list[tuple[str, str]]:
    """The conditions, in words; what is not known is left out."""
    model, device = doc.get("model") or {}, doc.get("device") or {}
    workload, host = doc.get("workload") or {}, doc.get("host") or {}
    found: list[tuple[str, str]] = [("measured", day(doc.get("started")))]
    if model:
        identity = model.get("revision") or str(model.get("sha256") or "")[:12]
        count = model.get("parameters") or 0
        size = f"{count / 1e6:.0f} M parameters" if count >= 1e6 else f"{count} parameters" if count else ""
        found.append(("model", _join(model.get("id"), model.get("dtype"), size, identity)))
        if model.get("weights"):
            found.append(("its weights", str(model["weights"])))
    if device:
        memory = format_bytes(device["memory"]) if device.get("memory") else ""
        threads = (
            counted(host["threads"], "thread") if device.get("kind") == "cpu" and host.get("threads") else ""
        )
        found.append(("device", _join(device.get("name"), memory, threads)))
        if device.get("read_peak_gbps"):
            peak = f"{device['read_peak_gbps']:.1f} GB/s"
            found.append(("read peak", _join(peak, device.get("read_peak_method"))))
        peaks = device.get("compute_peak_tflops") or {}
        found.append(("compute peaks", _join(*(f"{d} {v:.3g} TFLOP/s" for d, v in sorted(peaks.items())))))
        found.append(("peaks from", str(device.get("peaks_from") or "")))
        found += _clock_facts(device.get("clocks") or {})
    if workload:
        prompt = workload.get("prompt_tokens") or "own length"
        parts = [
            f"prompt {prompt}",
            f"output {workload.get('output_tokens')}",
            f"batch {workload.get('batch')}",
        ]
        parts.append(str(workload.get("stop_note") or workload.get("stop") or ""))
        parts.append("chat template applied" if workload.get("chat_template") else "no chat template")
        found.append(("workload", _join(*parts)))
        blocks = int(workload.get("blocks") or 0)
        prompts = f"{workload.get('prompts')} (sha256 {str(workload.get('prompts_sha256') or '')[:12]})"
        found.append(
            ("prompts", _join(prompts, f"seed {workload.get('seed')}", counted(blocks, "whole block")))
        )
        if workload.get("attention"):
            found.append(("attention", str(workload["attention"])))
    memory = f"{format_bytes(host['memory'])} of memory" if host.get("memory") else ""
    found.append(("host", _join(host.get("system"), host.get("cpu"), memory)))
    versions = doc.get("libraries") or {}
    tool = (doc.get("tool") or {}).get("version")
    named = [f"{n} {versions[n]}" for n in ("torch", "transformers") if versions.get(n)]
    named += [f"Python {doc['python']}"] if doc.get("python") else []
    found.append(("versions", _join(f"pdq-tui {tool}" if tool else "", *named)))
    if doc.get("driver"):
        found.append(("driver", str(doc["driver"])))
    return [(k, v) for k, v in found if v]


def day(stamp: Any) -> str:
    """ "2026-12-02 06:30 UTC" of an ISO time; what is no time stays as it is."""
    try:
        then = datetime.fromisoformat(str(stamp or ""))
    except ValueError:
        return str(stamp or "")
    return f"{then.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if then.tzinfo else f"{then:%Y-%m-%d %H:%M}"


def _clock_facts(clocks: Json) -> list[tuple[str, str]]:
    names = {"sm_mhz": "SM clock", "memory_mhz": "memory clock", "cpu_mhz": "CPU clock"}
    found = [
        (title, f"{c['median']:.0f} MHz ({c['min']:.0f} to {c['max']:.0f})")
        for key, title in names.items()
        if isinstance(c := clocks.get(key), Mapping)
    ]
    if clocks.get("throttle"):
        found.append(("clock limits", ", ".join(clocks["throttle"])))
    return found


def _join(*parts: Any) -> str:
    return " · ".join(str(p) for p in parts if p)


def formulas(metrics: Sequence[str]) -> list[Formula]:
    found = []
    for metric in dict.fromkeys(metrics):
        m = about(metric)
        found.append(Formula(short=m.short, name=m.name, formula=m.formula, why=m.why, better=m.better))
    return found
