"""An evaluation as a page that people read: the word, its gates, then the evidence by the question that it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.metrics import METRICS, MISSING, format_bytes
from pdq_tui.core.policy import Policy
from pdq_tui.core.roofline import evaluation_rooflines
from pdq_tui.judge import risks as risk
from pdq_tui.judge import rollback
from pdq_tui.judge.deploy import Deployment
from pdq_tui.judge.diary import Entry
from pdq_tui.judge.marks import Marks
from pdq_tui.judge.plan import STEPS, Spec
from pdq_tui.judge.quality import FAIL, NOT_INFORMATIVE, UNSURE
from pdq_tui.judge.scenarios import Card, cards
from pdq_tui.judge.soak import words
from pdq_tui.judge.verdict import Verdict, break_even_sentences, verdicts
from pdq_tui.report import deployment, freerun
from pdq_tui.report.page import Page, Table
from pdq_tui.report.pages import facts, formulas
from pdq_tui.report.roofline import roofline_table
from pdq_tui.report.way_back import limits_table, ramp_table

Json = Mapping[str, Any]
_MARKS: Final = {
    "pass": "✓ pass",
    "fail": "✗ FAIL",
    "unsure": "? unsure",
    "not informative": "? not informative",
    "shown": "shown",
    "not tested": "– not tested",
}
#: TTFT stands for prefill: they are the same here, nothing queues.
_SHOWN: Final = ("e2e_ms", "ttft_ms", "tpot_ms")
LEGEND: Final = (
    "A ratio is the geometric mean over blocks in which the policies take turns, staged / uniform; its interval is over "
    "blocks. better or worse: the interval excludes 1 and the difference exceeds the threshold (the smallest effect that "
    "matters, or what the control differs from itself here, whichever is larger); same: it lies inside the threshold; unsure: "
    "anything else. In the map, * marks an interval that excludes 0, ~ a length beyond the measured one. Intervals of quality "
    "are bootstrapped over windows; a gate of quality looks at the upper bound. n/a has its reason beside it or in the notes."
)


def evaluation_page(
    spec: Spec,
    found: Mapping[str, Json],
    v: Verdict,
    logged: Sequence[Entry] = (),
    marks: Marks | None = None,
) -> Page:
    """``found``: what the finished steps said, by name; ``logged``: work that people did by hand; ``marks``: what they said
    of answers."""
    marks = marks or {}
    about = f" about {v.staged}" if v.staged else ""
    region = f" ({v.region})" if v.region else ""
    each = verdicts(spec, found)
    tables = [*([_candidates(each)] if each else []), _gates(v)]
    if "bottleneck" in found:
        tables.append(_bottleneck(found["bottleneck"]))
    if "confirmation" in found:
        c = found["confirmation"]
        tables += [_roofline(found), _crossover(c), _ratios(c)]
    for name, title in (
        ("quality", "quality held?"),
        ("small_quality", "quality held? (the small set alone)"),
    ):
        if name in found:
            windows = found.get("conditions", {}).get("windows")
            tables += [_quality(found[name], f"3. {title}", windows), _positions(found[name])]
            break
    if "tasks" in found:
        tables.append(_tasks(found["tasks"]))
        tables += filter(None, [freerun.agreement_table(found["tasks"], marks)])
        if found["tasks"].get("lm_eval"):
            tables.append(_lm_eval(found["tasks"]["lm_eval"]))
    if "confirmation" in found:
        tables.append(_map(found["confirmation"]))
    if "load" in found:
        tables.append(_load(found["load"]))
    if "abnormal" in found:
        tables.append(_abnormal(found["abnormal"]))
    if "soak" in found:
        tables.append(_soak(found["soak"]))
    tables.append(_scenarios(cards(spec, found, v)))
    deployed = deployment.of_evaluation(spec, found, deployment.subjects(found, v))
    if "conditions" in found:
        tables.append(_cost(spec, found["conditions"], deployed))
    if deployed:
        tables += [
            deployment.deploy_table(deployed, found.get("confirmation", {})),
            *filter(None, [deployment.command_table(deployed)]),
        ]
    back = rollback.plan(spec, found, v)
    if back is not None:
        tables += [limits_table(back), ramp_table(back)]
    if logged:
        tables.append(_logged(logged))
    if "logs" in found:
        tables.append(_logs(found["logs"]))
    tables += [_confounders(spec, found), _risks(spec, found, logged), _steps(found)]
    return Page(
        title=f"Evaluation of {spec.model}",
        headline=f"{v.word}{about}{region}. {'. '.join(v.because)}.",
        facts=_facts(spec, found, v),
        tables=tables,
        notes=_notes(found, v),
        formulas=formulas([*_SHOWN, "prefill_mfu", "mbu", "prefill_explained", "decode_explained"]),
        legend=LEGEND,
        texts=freerun.side_by_side(found.get("tasks", {}), marks, v.staged),
    )


def _facts(spec: Spec, found: Mapping[str, Json], v: Verdict) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = []
    if "conditions" in found:
        doc, timing = dict(found["conditions"]), found.get("confirmation", {})
        # The blocks and clocks that the figures come from, not those of a step that times nothing.
        doc["workload"] = {**(doc.get("workload") or {}), "blocks": timing.get("blocks", 0)}
        doc["device"] = {**(doc.get("device") or {}), "clocks": timing.get("clocks")}
        shown = facts(doc)
    return [
        *shown,
        ("plan", spec.plan.name),
        ("traffic", spec.traffic_name),
        ("against", ", ".join(v.against) or MISSING),
        ("quality gate", spec.gate),
        ("smallest effect that matters", f"{spec.min_effect * 100:g} %"),
    ]


def _notes(found: Mapping[str, Json], v: Verdict) -> list[str]:
    left_out = found.get("selection", {}).get("left_out", {})
    failed = found.get("small_quality", {}).get("failed", [])
    return [
        *break_even_sentences(found),
        *(f"for a better word: {what}" for what in v.to_change),
        *(f"not tested: {what} ({why})" for what, why in v.not_tested.items()),
        *(f"left out after selection: {n}, {why}" for n, why in left_out.items()),
        *(f"left out after the small quality set: {n}" for n in failed),
        *(
            f"cannot run here: {n}: {why}"
            for n, why in found.get("conditions", {}).get("refused", {}).items()
        ),
        *found.get("confirmation", {}).get("warnings", []),
        v.holds,
    ]


def _gates(v: Verdict) -> Table:
    rows = [[g.name, g.limit, g.measured, _MARKS[g.result], g.reason or ""] for g in v.gates]
    return Table(title="gates", columns=["gate", "limit", "measured", "result", "why"], rows=rows, left=5)


# -- the five questions ------------------------------------------------------------------------------------------------


def _bottleneck(b: Json) -> Table:
    decode = 1 - b["prefill"]
    rows = [
        _stage("prefill", b["prefill_ms"], b["prefill"], b, "prefill_mfu", "prefill_explained"),
        _stage("decode", b["decode_ms"], decode, b, "mbu", "decode_explained"),
    ]
    footer = [
        f"most that staging can gain over the best uniform, by the base's shares (Amdahl): {b['most_gain']:.1%}",
        *(f"{METRICS[m].short}: n/a ({b[f'{m}_reason']})" for m in METRICS if b.get(f"{m}_reason")),
    ]
    if b["extrapolated"]:
        at = b.get("measured") or {}
        footer.append(
            f"estimated from one measured length (prompt {at.get('prompt', '?')}, output {at.get('output', '?')}): "
            "prefill taken as linear in the prompt, a token as constant"
        )
    return Table(
        title=f"1. different bottlenecks? Where the time goes: {b['traffic']}, {b['base']}",
        columns=[
            "stage",
            "time",
            "share",
            "speed-up if it took no time",
            "use of its limit",
            "explained share",
        ],
        rows=rows,
        footer=footer,
    )


def _stage(name: str, ms: float, share: float, b: Json, use: str, explained: str) -> list[str]:
    used = MISSING if b.get(use) is None else f"{METRICS[use].short} {b[use]:.0%}"
    known = MISSING if b.get(explained) is None else f"{b[explained]:.0%}"
    bound = MISSING if share >= 1 else f"×{1 / (1 - share):.2f}"
    return [name, f"{ms / 1e3:.2f} s", f"{share:.1%}", bound, used, known]


def _roofline(found: Mapping[str, Json]) -> Table:
    table = roofline_table(evaluation_rooflines(found))
    table.title = (
        "1. which limit does each stage run against? The roofline of every arm of the confirmation run"
    )
    return table


def _crossover(c: Json) -> Table:
    words = {True: "yes: one stage wins, the other loses", False: "no", None: "cannot be told"}
    rows = [
        [x["uniform"], x["base"], *(_ratio_cell(x[s]) for s in ("prefill", "decode")), words[x["crosses"]]]
        for x in c["crossover"]
    ]
    footer = [
        "where no uniform crosses, one width wins both stages, and staging can pay by memory or quality only"
    ]
    if not rows:
        footer = ["only the base was kept: there is no second width to compare"]
    return Table(
        title="2. does one width for both waste something? Each kept uniform against the base, by stage",
        columns=["uniform", "base", "TTFT", "TPOT", "crossover"],
        rows=rows,
        left=5,
        footer=footer,
    )


def _ratio_cell(r: Json) -> str:
    return MISSING if r["ratio"] is None else f"×{r['ratio']:.3f} {_interval(r)} {r['judgement']}"


def _interval(r: Json) -> str:
    return f"[{r['ci95'][0]:.3f}, {r['ci95'][1]:.3f}]" if r["ci95"] else MISSING


def _ratios(c: Json) -> Table:
    rows = [
        [
            r["arm"],
            r["reference"],
            METRICS[r["metric"]].short,
            MISSING if r["ratio"] is None else f"×{r['ratio']:.3f}",
            _interval(r),
            r["judgement"] + (f" ({r['reason']})" if r["judgement"] == "unsure" and r["reason"] else ""),
        ]
        for r in c["ratios"]
        if r["metric"] in _SHOWN and r["arm"] in c["staged"]
    ]
    floor = (c.get("noise_floor") or {}).get("e2e_ms")
    return Table(
        title="3. does staging gain? Staged against each kept uniform (a fresh run, one request at a time)",
        columns=["staged", "uniform", "metric", "ratio", "95 % CI", "judgement"],
        rows=rows,
        left=3,
        footer=[
            f"{c['blocks']} blocks; the control differed from itself by up to "
            f"{MISSING if floor is None else f'{floor:.1%}'} in E2E; throughput under load is a table of its own"
        ],
    )


def _quality(q: Json, title: str, windows: Json | None) -> Table:
    rows = []
    footer = ["KLD over the full vocabulary; it does not rank near-lossless policies: the task set does"]
    if windows:
        footer.insert(
            0,
            f"windows of {windows['prefill']} tokens, second half compared (prefill path); "
            f"{windows['decode']} of prompt and {windows['new_tokens']} forced, one at a time (decode path)",
        )
    for name, paths in q["paths"].items():
        for path in paths:
            kld, top, ppl = path["kld"], path["same_top1"], path["ppl_ratio"]
            rows.append(
                [
                    name,
                    path["path"],
                    path["forced"],
                    _estimate(kld, "{:.4f}"),
                    _estimate(top, "{:.3f}"),
                    _estimate(ppl, "{:.4f}"),
                    str(kld["windows"]),
                ]
            )
    return Table(
        title=f"{title} Divergence from the base",
        columns=["policy", "path", "forced", "KLD nats", "same top-1", "PPL ratio", "windows"],
        rows=rows,
        left=3,
        footer=footer,
    )


def _positions(q: Json) -> Table:
    """KLD along the answer, at powers of two."""
    rows, shown = [], []
    for name, paths in q["paths"].items():
        for path in paths:
            if path["path"] != "decode" or path["forced"] != "text":
                continue
            by = dict(path["by_position"])
            shown = [at for at in sorted(by) if at == 0 or (at + 1) & at == 0]
            rows.append([name, *(_with_interval(by[at]) for at in shown)])
    return Table(
        title="KLD by position of the answer (forced text), nats",
        columns=["policy", *(str(at + 1) for at in shown)],
        rows=rows,
        footer=["position 1 is the first token: prefill's own error; behind it decode's comes in"],
    )


def _with_interval(e: Json) -> str:
    return _estimate(e, "{:.3f}")


def _map(c: Json) -> Table:
    outputs = sorted({cell["output"] for cell in c["map"]})
    pairs = list(dict.fromkeys((cell["staged"], cell["uniform"]) for cell in c["map"]))
    by = {(cell["staged"], cell["uniform"], cell["output"]): cell for cell in c["map"]}
    rows = [[staged, uniform, *(_cell(by[staged, uniform, n]) for n in outputs)] for staged, uniform in pairs]
    prompts = sorted({(cell["prompt"], cell["batch"]) for cell in c["map"]})
    where = "; ".join(f"prompt {p}, batch {b}" for p, b in prompts)
    return Table(
        title=f"4. where is it significant? Time of a request, staged minus uniform, ms, by answer length ({where})",
        columns=["staged", "uniform", *map(str, outputs)],
        rows=rows,
        left=2,
        footer=[
            "* the 95 % interval excludes 0; ~ beyond the measured length (extrapolated)",
            "other prompt lengths and batches were not measured; under load only the load table speaks",
        ],
    )


def _cell(cell: Json) -> str:
    ci = cell["ci95"]
    clear = "*" if ci and (ci[0] > 0 or ci[1] < 0) else ""
    return f"{cell['delta_ms']:+.0f}{clear}{'~' if cell['extrapolated'] else ''}"


def _scenarios(found: Sequence[Card]) -> Table:
    return Table(
        title="four situations",
        columns=["situation", "speaks", "because"],
        rows=[[c.name, c.says, c.because] for c in found],
        left=3,
        footer=["each from what was measured alone; the verdict weighs your traffic"],
    )


def _lm_eval(found: Json) -> Table:
    rows = []
    for name, of in found["policies"].items():
        for r in of:
            f, ci = r["flips"], r["difference_ci95"]
            if f is not None:
                low, high = f["drop_ci95"]
                told = [
                    f"{-f['drop']:+.1%} [{-high:+.1%}, {-low:+.1%}]",
                    f"{f['lost']} / {f['gained']}",
                    f"{f['mcnemar_p']:.2g}",
                ]
            elif r["difference"] is not None:
                told = [f"{r['difference']:+.4g}" + (f" [{ci[0]:+.4g}, {ci[1]:+.4g}]" if ci else ""), "", ""]
            else:
                told = [str(r["reason"]), "", ""]
            figures = [MISSING if r[side] is None else f"{r[side]:.4g}" for side in ("base", "policy")]
            rows.append([name, r["task"], r["metric"], str(r["documents"]), *figures, *told])
    return Table(
        title="3. quality held? lm-eval's tasks, through the staged views",
        columns=[
            "policy",
            "task",
            "metric",
            "documents",
            "base",
            "policy's",
            "difference",
            "lost / gained",
            "McNemar p",
        ],
        rows=rows,
        left=3,
        footer=[
            f"at most {found['limit']} documents a task; a continuation is scored one token at a time under the decode view; "
            "rolling perplexities are one pass under the prefill view. Shown, and no gate"
        ],
    )


def _tasks(t: Json) -> Table:
    rows = []
    for name, f in t["policies"].items():
        low, high = f["drop_ci95"]
        kinds = ", ".join(f"{kind} {k['policy'] - k['base']:+.0%}" for kind, k in f["kinds"].items())
        length = MISSING if f["length"] is None else f"{f['length']:.0%}"
        rows.append(
            [
                name,
                f"{f['base']:.0%}",
                f"{f['policy']:.0%}",
                f"{f['drop']:+.1%} [{low:+.1%}, {high:+.1%}]",
                f"{f['lost']} / {f['gained']}",
                f"{f['mcnemar_p']:.2g}",
                f"{f['detectable']:.1%}",
                str(f["changed"]),
                length,
                kinds,
            ]
        )
    template = (
        "as chats, by the model's template" if t["chat_template"] else "as plain text: no chat template"
    )
    return Table(
        title=f"3. quality held? {t['asked']} tasks ({t['set']}), scored by rule",
        columns=[
            "policy",
            "base solves",
            "policy solves",
            "drop",
            "lost / gained",
            "McNemar p",
            "shows from",
            "other text",
            "length",
            "by kind",
        ],
        rows=rows,
        footer=[
            f"greedy, to the natural end, {template}; {t['refused']} were too long for this model",
            "shows from: the smallest drop that so many tasks show with 80 % power; equal shares can hide flips",
        ],
    )


def _load(a: Json) -> Table:
    def ms(spread: Json, key: str) -> str:
        return MISSING if spread[key] is None else f"{spread[key]:.0f}"

    def n(value: float | None, form: str) -> str:
        return MISSING if value is None else format(value, form)

    rows = [
        [
            p["arm"],
            f"{p['concurrency']} at a time" if p["rate"] is None else f"{p['rate']:.2f} /s arrive",
            n(p["achieved"], ".1f"),
            str(p["requests"]),
            n(p["throughput"], ".2f"),
            n(p["tokens_per_s"], ".1f"),
            f"{ms(p['ttft_ms'], 'p50')} / {ms(p['ttft_ms'], 'p90')}",
            f"{ms(p['tpot_ms'], 'p50')} / {ms(p['tpot_ms'], 'p90')}",
            n(p["good"], ".0%"),
            f"{p['mixed_steps']} of {p['steps']}",
            ", ".join(f"{k} {v}" for k, v in sorted(p["tokens"].items())),
        ]
        for p in a["points"]
    ]
    t = a["targets"]
    footer = [
        f"by {a.get('engine', 'no engine')}: {a.get('attention', MISSING)}; {a.get('scheduler', MISSING)}: another attention and "
        "cache than the single-stream engine's, not to be compared with its figures",
        f"meets: share of requests with TTFT ≤ {t['ttft_ms']:g} ms and TPOT ≤ {t['tpot_ms']:g} ms; equal total memory of "
        f"{format_bytes(a['memory_bytes'])}: what weights leave is KV cache",
    ]
    for k in a["knees"]:
        at = (
            "none of the loads meets both targets"
            if k["concurrency"] is None
            else f"knee at concurrency {k['concurrency']}"
        )
        more = "" if k["reached"] else " (the largest that was tried: it may lie above)"
        goodput = MISSING if k["goodput"] is None else f"{k['goodput']:.2f} requests/s"
        second = "sees no bend" if k["kneedle"] is None else f"says {k['kneedle']}"
        footer.append(
            f"{k['arm']}: {at}{more}; Kneedle {second}; goodput {goodput} ({k['goodput_method']})"
            + (f"; {k['stopped']}" if k["stopped"] else "")
        )
    footer += [f"{name} could not be loaded: {why}" for name, why in a["refused"].items()]
    return Table(
        title="4. under load? Rising concurrency, then arrivals on their own",
        columns=[
            "policy",
            "load",
            "in flight",
            "requests",
            "requests/s",
            "tokens/s",
            "TTFT ms p50 / p90",
            "TPOT ms p50 / p90",
            "meets",
            "mixed steps",
            "tokens by stage/view",
        ],
        rows=rows,
        left=2,
        footer=footer,
    )


def _abnormal(a: Json) -> Table:
    right = {True: "yes", False: "NO", None: MISSING}
    rows = [
        [
            r["case"],
            " or ".join(r["expected"]),
            r["state"] or MISSING,
            right[r["next_right"]],
            _MARKS[r["result"]],
            r["reason"] or "",
        ]
        for r in a["abnormal"]
    ]
    return Table(
        title=f"does it hold up? Abnormal inputs to {a['policy']}",
        columns=["case", "has to be", "ended", "next right", "result", "why"],
        rows=rows,
        left=6,
        footer=["next right: the same clean request gave the same tokens as before"],
    )


def _soak(s: Json) -> Table:
    rows = []
    for d in s["drifts"]:
        ci = d["change_ci95"]
        rows.append(
            [
                d["name"],
                MISSING if d["level"] is None else _level(d["level"], d["unit"]),
                MISSING if d["change"] is None else f"{d['change']:+.2%} [{ci[0]:+.2%}, {ci[1]:+.2%}]",
                "DRIFTS"
                if d["worse"]
                else "drifts"
                if d["drifts"]
                else MISSING
                if d["change"] is None
                else "no",
                str(d["n"]),
                d["reason"] or "",
            ]
        )
    c, at = s["canaries"], s["conditions"]
    kld = MISSING if c["kld_max"] is None else f"{c['kld_max']:.2g}"
    top = MISSING if c["highest"] is None else f"{c['highest'][0]:.2f} to {c['highest'][1]:.2f}"
    footer = [
        f"{s['requests']} requests; {words(s['asked_s'])}{'' if s['hours_long'] else ': not the hours-long test'}",
        f"canaries: {c['n']} passes, {c['changed']} with other tokens than minute 0, KLD against it up to {kld} nats, "
        f"{c['nonfinite']} logits not finite, largest logit {top}",
        "drifts: the interval excludes 0 and the change over the run is above 1 %; the first tenth is warm-up",
    ]
    for key, unit in (("clock_mhz", "MHz"), ("temperature_c", "°C")):
        if at[key]["first"] is not None:
            footer.append(
                f"{key.split('_')[0]}: {at[key]['first']:.0f} {unit} in the first third, {at[key]['last']:.0f} in the last"
            )
        else:
            footer.append(f"{key.split('_')[0]}: {MISSING} ({at[key]['reason']})")
    return Table(
        title=f"does it hold up? {words(s['asked_s'])} of {s['policy']}",
        columns=["series", "level", "change over the run, 95 % CI", "drift", "values", "why not"],
        rows=rows,
        left=1,
        footer=footer,
    )


def _level(value: float, unit: str) -> str:
    return format_bytes(int(value)) if unit == "B" else f"{value:.2f} {unit}"


def _cost(spec: Spec, c: Json, deployed: Sequence[Deployment]) -> Table:
    """Counted, not scored."""
    rows = []
    for policy in spec.policies:
        w, op = c["weights"].get(policy.name), c.get("operation", {}).get(policy.name)
        if w is None or op is None:
            continue
        kernels = {k for names in op["kernels"].values() for k in names}
        rows.append(
            [
                policy.name,
                policy.storage,
                str(2 if policy.staged else 1),
                format_bytes(w["stored_bytes"]),
                format_bytes(w["extra_bytes"]),
                str(_settings(policy)),
                str(len(kernels)),
                str(sum(f.get("modules", 1) for f in c["fallbacks"].get(policy.name, []))),
                deployment.steps_text(deployed, policy.name),
            ]
        )
    return Table(
        title="5. what does it cost? Counted on this machine",
        columns=[
            "policy",
            "storage",
            "stage formats",
            "weights",
            "extra for staging",
            "settings",
            "kernels",
            "fallbacks",
            "steps to deploy / roll back",
        ],
        rows=rows,
        left=2,
        footer=[
            "settings: values of the policy that somebody has to keep; to version: its file, the kernel table, the checkpoint",
            "steps are counted in the servers' tables, for the policy of the verdict and the best uniform (* for the nearest that "
            "can be served); they were not tried. Work is not estimated: `pdq-tui note --op TEXT --minutes M` logs it",
        ],
    )


def _logged(logged: Sequence[Entry]) -> Table:
    return Table(
        title="5. what does it cost? Work by hand, as logged",
        columns=["when (UTC)", "what", "minutes"],
        rows=[[e.at, e.op, f"{e.minutes:g}"] for e in logged],
        left=2,
        footer=[f"{sum(e.minutes for e in logged):g} min in all; only what was logged is counted"],
    )


def _logs(a: Json) -> Table:
    rows = [
        [c["kind"], str(c["count"]), "; ".join(f"{cause} ({n})" for cause, n in c["causes"])]
        for c in a["counts"]
    ]
    footer = [f"{a['events']} events in {a['journals']} journals"]
    footer += [f"{run} could not be read: {why}" for run, why in a["unreadable"].items()]
    return Table(
        title="what the logs say", columns=["kind", "count", "causes"], rows=rows, left=3, footer=footer
    )


def _settings(policy: Policy) -> int:
    """Values that somebody has to keep: every key of the policy's file beside its name and summary."""
    body = msgspec.to_builtins(policy)

    def leaves(value: Any) -> int:
        if isinstance(value, dict):
            return sum(leaves(v) for v in value.values())
        if isinstance(value, list | tuple):
            return sum(leaves(v) for v in value)
        return value is not None

    return leaves({k: v for k, v in body.items() if k not in ("name", "summary", "schema")})


def _confounders(spec: Spec, found: Mapping[str, Json]) -> Table:
    return Table(
        title="what else could explain it",
        columns=["confounder", "what was done", "state", "evidence"],
        rows=[[r.name, r.about, r.state, r.evidence] for r in risk.confounders(spec, found)],
        left=4,
    )


def _risks(spec: Spec, found: Mapping[str, Json], logged: Sequence[Entry]) -> Table:
    return Table(
        title="what it does not cover",
        columns=["risk", "why it matters", "state", "evidence"],
        rows=[[r.name, r.about, r.state, r.evidence] for r in risk.risks(spec, found, logged)],
        left=4,
    )


def _candidates(found: Sequence[Verdict]) -> Table:
    """A line a candidate: the page's headline is about the best of them."""
    return Table(
        title="each confirmed candidate",
        columns=["candidate", "word", "where", "because", "failed or open"],
        rows=[
            [
                v.staged or MISSING,
                v.word,
                v.region or "",
                ". ".join(v.because),
                ", ".join(g.name for g in v.gates if g.result in (FAIL, UNSURE, NOT_INFORMATIVE)) or "none",
            ]
            for v in found
        ],
        left=5,
        footer=["each by the same gates; the word of the page is the best of these"],
    )


def _estimate(e: Json, form: str) -> str:
    if e["value"] is None:
        return f"{MISSING} ({e['reason']})" if e.get("reason") else MISSING
    ci = e["ci95"]
    return form.format(e["value"]) + (f" [{form.format(ci[0])}, {form.format(ci[1])}]" if ci else "")


def _steps(found: Mapping[str, Json]) -> Table:
    rows = []
    for step in STEPS:
        f = found.get(step.name)
        status = "not reached" if f is None else f"stopped: {f['stop']}" if f.get("stop") else "done"
        rows.append([step.title, status, MISSING if f is None else f"{f['seconds']:.0f} s", step.why])
    return Table(title="steps", columns=["step", "status", "took", "why it matters"], rows=rows, left=4)
