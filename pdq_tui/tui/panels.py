"""The two stages' panels, and both in one table: pure functions from the session's picture to rows."""

from __future__ import annotations

from collections.abc import Sequence

from pdq_tui.core.metrics import METRICS, MISSING, counted
from pdq_tui.core.policy import STAGES, Policy, Stage
from pdq_tui.core.stats import Ratio, Summary
from pdq_tui.host.view import ArmView, SessionView
from pdq_tui.tui.device_panel import device_rows, device_title
from pdq_tui.tui.heading import Display, Look, header, policy_line, stage_word, wanted_policy
from pdq_tui.tui.lines import Part, Row
from pdq_tui.tui.rows import cell, clip, length, row

_WORD_ROLE = {"better": "good", "worse": "bad", "same": "", "unsure": "dim"}


def stage_rows(
    view: SessionView, stage: Stage, width: int, look: Look, *, readonly: bool = False
) -> list[Row]:
    """The PREFILL or the DECODE panel. ``readonly``: no key alternates the arms."""
    primary, others = (
        ("ttft_ms", ("prefill_tokens_per_s", "prefill_mfu", "prefill_explained"))
        if stage == "prefill"
        else ("tpot_ms", ("decode_tokens_per_s", "mbu", "decode_explained"))
    )
    rows = [_policy_row(view, stage, width, look)]
    main = METRICS[primary]
    rows.append(
        row(
            cell(f" {main.short}", 9, "head"),
            *_value_cells(view, primary),
            *_ratio_parts(view.ratios.get(primary), width - 33, look, readonly),
        )
    )
    rows.append(
        row(
            cell("", 9),
            *(cell(_spread(view, arm, primary, look), 12, "dim") for arm in ("A", "B")),
            _judgement(view.ratios.get(primary), width - 33),
        )
    )
    remarks = {"prefill_mfu": "own peaks", "mbu": "read peak"}
    for id_ in others:
        metric = METRICS[id_]
        ratio = view.ratios.get(id_)
        tail = (
            _ratio_parts(ratio, width - 33, look, readonly)
            if ratio is not None
            else ((cell(remarks.get(id_, ""), max(width - 33, 0), "dim")),)
        )
        name = {"prefill_tokens_per_s": "tok/s", "decode_tokens_per_s": "tok/s"}.get(id_, metric.short)
        cells = _value_cells(view, id_, bare=metric.unit == "tok/s")
        rows.append(row(cell(f" {name}", 9, "head"), *cells, *tail))
    return [clip(r, width) for r in rows]


def stage_title(view: SessionView, stage: Stage, look: Look) -> str:
    """The stage's name; while the running request is in it, so marked, with the tokens made so far."""
    return f"{stage.upper()}  {live_words(view, look)}" if view.live_stage == stage else stage.upper()


def live_words(view: SessionView, look: Look) -> str:
    """Where the running request is: "● token 37 of 64"; nothing between requests."""
    if not view.live_stage:
        return ""
    if view.live_stage != "decode":
        return look.own("● ") + view.live_stage
    wanted = f" of {view.workload.workload.output_tokens}" if view.workload else ""
    return look.own("● ") + f"token {view.live_tokens}{wanted}"


def stage_subtitle(view: SessionView, stage: Stage, width: int) -> str:
    """What the panel's figures rest on; before that, where they are there and ``width`` cells hold them, the last energy
    burst's joules a token and the last profiled burst's age."""
    peak = view.device.read_peak_gbps if view.device else None
    if stage == "prefill":
        base = "device time"
    else:
        base = f"MBU of {peak:.4g} GB/s read peak" if peak else "no read peak measured"
    energy = energy_words(view, stage)
    burst = burst_words(view) if stage == "prefill" else ""
    forms = (
        (energy, burst, base),
        (energy, burst),
        (energy, base),
        (energy,),
        (burst, base),
        (burst,),
        (base,),
    )
    wanted = [" · ".join(part for part in form if part) for form in forms if form[0]]
    return next((text for text in wanted if len(text) <= width), base)


def energy_words(view: SessionView, stage: Stage) -> str:
    """ "J/tok A 0.011 B 0.016 34 s ago": of the policies that run now; ! where stages and whole requests disagree."""
    found, ages = [], []
    for name in ("A", "B"):
        arm, energy = view.arms.get(name), view.energy.get(name)
        if energy is None or arm is None or arm.ready is None or arm.ready.policy.digest != energy.digest:
            continue
        joules = energy.taken.prefill_j if stage == "prefill" else energy.taken.decode_j
        found.append(
            f"{name} {MISSING if joules is None else f'{joules:.2g}'}{'!' if energy.taken.flagged else ''}"
        )
        ages.append(energy.age_s)
    return f"J/tok {' '.join(found)} {ago(max(ages))}" if found else ""


def burst_words(view: SessionView) -> str:
    """ "burst A 34 s ago": the last one under the profiler."""
    if not view.trace_ages_s:
        return ""
    arm = min(view.trace_ages_s, key=lambda a: view.trace_ages_s[a])
    return f"burst {arm} {ago(view.trace_ages_s[arm])}"


def burst_subtitle(view: SessionView, width: int) -> str:
    """Of the table of both stages: energy of prefill and decode, and the last profiled burst."""
    parts = [f"{stage[0].upper()} {words}" for stage in STAGES if (words := energy_words(view, stage))]
    burst = burst_words(view)
    forms = [" · ".join([*parts, *([burst] if burst else [])]), " · ".join(parts), burst]
    return next((text for text in forms if text and len(text) <= width), "")


def ago(seconds: float) -> str:
    """ "34 s ago", "12 min ago", "3 h ago"."""
    if seconds < 100:
        return f"{max(0, seconds):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.0f} h ago"


def _policy_row(view: SessionView, stage: Stage, width: int, look: Look) -> Row:
    arm = view.arms.get(view.active)
    wanted = wanted_policy(arm)
    # What is shown below is of the policy that runs; the one that was asked for comes with its first request.
    running = arm.ready.policy if arm is not None and arm.ready is not None else wanted
    name = _policy_name(running, stage)
    if wanted is not None and running is not None and wanted.digest != running.digest:
        tails: Sequence[Part] = [(look.own(f"→ {_policy_name(wanted, stage)} next"), "warn")]
    else:
        tails = _kernel_words(arm, stage, look)
    letter = (f"{view.active} ", view.active.lower())
    # The kernel's whole name is worth more than the words before it.
    forms = [row(cell(" policy", 9, "head"), letter, cell(name, 10), tail) for tail in tails]
    forms.append(row(" ", letter, f"{name}  ", tails[-1]))
    return next((form for form in forms if length(form) <= width), clip(forms[-1], width))


def _policy_name(policy: Policy | None, stage: Stage) -> str:
    if policy is None:
        return "-"
    return stage_word(policy, stage) + ("*" if policy.name.endswith("*") else "")


def _kernel_words(arm: ArmView | None, stage: Stage, look: Look) -> Sequence[Part]:
    """The kernel of most of the stage's layers, or what is wrong; the longest way to say it first."""
    if arm is None or arm.ready is None:
        return [("no kernels yet", "dim")]
    fallbacks = [f for f in arm.ready.fallbacks if f.stage == stage]
    if fallbacks:
        count = sum(f.modules for f in fallbacks)
        return [(f"kernels ! {count} fell back", "warn")]
    coverage = arm.ready.coverage.get(stage)
    if coverage is None or not coverage.kernels:
        return [("kernels n/a", "dim")]
    name = look.foreign(max(coverage.kernels, key=lambda k: coverage.kernels[k]))
    return [(look.own(f"{word}✓ ") + name, "") for word in ("kernels ", "")]


def _stat(view: SessionView, arm: str, metric: str) -> Summary | None:
    there = view.arms.get(arm)
    return there.stats.get(metric) if there else None


def _value_cells(view: SessionView, metric: str, *, bare: bool = False, width: int = 12) -> list[Part]:
    """Both arms' medians; ``bare`` without the unit, where the line's name says it."""
    parts: list[Part] = []
    write = METRICS[metric].format if bare else METRICS[metric].text
    for arm in ("A", "B"):
        text = write(_median(_stat(view, arm, metric)))
        parts += [(f"{arm} ", arm.lower()), cell(text, width - 2, "dim" if text == "n/a" else "")]
    return parts


def _median(stat: Summary | None) -> float | None:
    return stat.median if stat is not None else None


def half_width(stat: Summary | None) -> float | None:
    if stat is None or stat.ci95 is None:
        return None
    return (stat.ci95[1] - stat.ci95[0]) / 2


def _spread(view: SessionView, arm: str, metric: str, look: Look) -> str:
    stat = _stat(view, arm, metric)
    half = half_width(stat)
    if stat is None or not stat.n:
        return "n=0"
    if half is None:
        return f"n={stat.n}"
    text = look.own(f"±{_short(half)} n={stat.n}")
    return text if len(text) <= 11 else text.replace("n=", "")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def arrow(ratio: Ratio, look: Look) -> str:
    if ratio.ratio is None:
        return "?"
    if ratio.judgement == "same" or f"{ratio.ratio:.2f}" == "1.00":
        return "="
    return look.own("▼" if ratio.ratio < 1 else "▲")


def _ratio_parts(ratio: Ratio | None, width: int, look: Look, readonly: bool) -> tuple[Part, ...]:
    if width <= 0:
        return ()
    if ratio is None or ratio.ratio is None:
        return (cell("x: ABBA" if ratio is None and not readonly else "n/a", width, "dim"),)
    role = "dim" if ratio.provisional else _WORD_ROLE.get(ratio.judgement, "")
    return (cell(look.own(f"×{ratio.ratio:.2f} ") + arrow(ratio, look), width, role),)


def _judgement(ratio: Ratio | None, width: int) -> Part:
    """The word, or that there is none to rely on yet."""
    if width <= 0:
        return ("", "")
    if ratio is None:
        return cell("", width)
    return cell(
        judgement_word(ratio, width),
        width,
        "dim" if ratio.provisional else _WORD_ROLE.get(ratio.judgement, ""),
    )


def judgement_word(ratio: Ratio | None, room: int) -> str:
    """The word with the number of blocks that decided it, or that none has been decided yet: in ``room`` cells."""
    if ratio is None:
        return ""
    blocks = counted(ratio.blocks, "block")
    if ratio.provisional:
        forms = [f"not decided at {blocks}", f"prov. {ratio.blocks}bl"]
    elif ratio.decided_at is not None:
        forms = [f"{ratio.judgement} at {ratio.decided_at} blocks", f"{ratio.judgement}@{ratio.decided_at}"]
    else:
        forms = [f"{ratio.judgement} at {blocks}", ratio.judgement]
    return next((form for form in forms if len(form) <= room), forms[-1])


def both_rows(view: SessionView, width: int, look: Look, *, readonly: bool = False) -> list[Row]:
    """The STAGES panel of the smaller layouts: both stages in one table."""
    wide = width >= 74
    rows = [row(cell("", 11), cell("A", 14, "a"), cell("B", 14, "b"), ("A/B", "head"))]
    for metric in ("ttft_ms", "tpot_ms"):
        ratio = view.ratios.get(metric)
        role = "dim" if ratio is None or ratio.provisional else _WORD_ROLE.get(ratio.judgement, "")
        rows.append(
            row(
                cell(f" {METRICS[metric].short} ms", 11, "head"),
                *(_with_spread(view, arm, metric, look) for arm in ("A", "B")),
                *_ratio_parts(ratio, 8, look, readonly),
                (judgement_word(ratio, width - 47), role),
            )
        )
    if wide:
        rows.append(_pair_row(view, "mbu", "MBU dec", f"MFU pre {_both(view, 'prefill_mfu')}"))
        tail = f"expl pre {_both(view, 'prefill_explained')}  {kernel_marks(view, look)}"
        rows.append(_pair_row(view, "decode_explained", "expl dec", tail))
    else:
        rows.append(_pair_row(view, "mbu", "MBU dec", kernel_marks(view, look)))
        rows.append(_pair_row(view, "prefill_mfu", "MFU pre", ""))
        rows.append(_pair_row(view, "decode_explained", "expl dec", ""))
    return [clip(r, width) for r in rows]


def _with_spread(view: SessionView, arm: str, metric: str, look: Look) -> Part:
    stat = _stat(view, arm, metric)
    text = METRICS[metric].format(_median(stat))
    half = half_width(stat)
    if half is not None:
        text += look.own(f" ±{_short(half)}")
    return cell(text, 14, "dim" if text == "n/a" else "")


def _both(view: SessionView, metric: str) -> str:
    return " / ".join(METRICS[metric].text(_median(_stat(view, arm, metric))) for arm in ("A", "B"))


def _pair_row(view: SessionView, metric: str, name: str, tail: str) -> Row:
    texts = [METRICS[metric].text(_median(_stat(view, arm, metric))) for arm in ("A", "B")]
    return row(cell(f" {name}", 11, "head"), cell(texts[0], 14), cell(texts[1], 14), (tail, ""))


def kernel_marks(view: SessionView, look: Look) -> str:
    """A's and B's kernels: as asked for, fallen back (!), or not known yet."""
    marks = []
    for name in ("A", "B"):
        arm = view.arms.get(name)
        ready = arm.ready if arm else None
        marks.append("-" if ready is None else "!" if ready.fallbacks else look.own("✓"))
    return "kernels " + " ".join(marks)


def summary_text(view: SessionView) -> str:
    """The figures of this screen as plain text, for the clipboard and a file."""
    look = Look()
    rows = [header(view, Display(), 110, look), policy_line(view, 160, look), ()]
    for stage in STAGES:
        rows += [row(stage.upper()), *stage_rows(view, stage, 60, look), ()]
    rows += [row(device_title(view)[0]), *device_rows(view, 60, look)]
    return "\n".join("".join(text for text, _ in r).rstrip() for r in rows)
