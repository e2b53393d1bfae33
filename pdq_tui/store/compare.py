"""Snapshots side by side, the reference first: absolute, relative, interval, judgement, and what spoils it.

Arms of one interleaved run are compared by its paired blocks (``core.pairs``), snapshots of different runs by
``store.unpaired``. Rows whose conditions differ say "unsure".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.arms import answers, arm_stats, timed
from pdq_tui.core.comparable import stage_metrics
from pdq_tui.core.document import ALONE, SHARED
from pdq_tui.core.metrics import MEMORY_METRICS, METRICS, RATIO_METRICS
from pdq_tui.core.pairs import blocks_of, ratios
from pdq_tui.core.policy import STAGES
from pdq_tui.core.roofline import Roofline, arm_roofline
from pdq_tui.core.stats import UNSURE, Interval, Ratio, Summary, judge
from pdq_tui.core.texts import Answers, compared_answers
from pdq_tui.errors import PdqError
from pdq_tui.store.figures import FIGURES, Figure
from pdq_tui.store.series import no_collecting
from pdq_tui.store.setup import DIFFERS, MEMORY, SPEED, UTILIZATION, SetupCheck, setup_checks
from pdq_tui.store.snapshot import Snapshot
from pdq_tui.store.unpaired import UNPAIRED as UNPAIRED
from pdq_tui.store.unpaired import unpaired

#: No word below this difference about memory read from outside, as the process's resident set: it scatters.
RESIDENT_MEMORY_EFFECT: Final = 0.05
#: Bytes that are counted and not measured: only another model or workload, or an invalid arm, spoils them.
COUNTED: Final = "counted"
PAIRED: Final = "paired blocks"
#: Whole blocks of both from which they are compared block by block.
_LEAST_BLOCKS: Final = 2
_UTILIZATION: Final = ("prefill_mfu", "prefill_explained", "bandwidth_gbps", "mbu", "decode_explained")
_SUMMARIZED: Final = (*RATIO_METRICS, *MEMORY_METRICS, *_UTILIZATION)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One column. ``label`` is unique among the columns. ``measured``: when its run started, as ISO time."""

    id: str
    label: str
    run: str
    arm: str
    policy: str
    note: str = ""
    measured: str = ""
    valid: bool = True


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one candidate against the reference.

    ``metric`` is an id of core.metrics.METRICS or store.figures.FIGURES. ``percent`` and ``ci95`` (of percent) are
    candidate over reference minus 1, in %. ``delta`` and ``delta_ci95`` are the same estimate in the metric's unit:
    of a timed metric the reference's geometric mean over the blocks times (ratio − 1), and so not the difference of the
    two medians in ``reference`` and ``value``. ``judgement``: better, worse, same, unsure; "" where no direction is
    good by itself. ``flagged``: a condition differs. ``method``: paired blocks, unpaired bootstrap, exact, single pass.
    """

    candidate: str
    metric: str
    name: str
    short: str
    unit: str
    group: str
    better: str | None
    reference: Summary
    value: Summary
    delta: float | None
    percent: float | None
    ci95: tuple[float, float] | None
    judgement: str
    method: str
    delta_ci95: tuple[float, float] | None = None
    blocks: int = 0
    flagged: bool = False
    reason: str | None = None

    @property
    def different(self) -> bool:
        """Whether a reader who looks for differences only wants to see it."""
        return self.judgement in ("better", "worse")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``setup`` and ``rows`` of all candidates in their order; ``setup_of`` and ``rows_of`` pick one's. ``rooflines``: one
    a column, the reference first. ``answers``: candidate → its answers beside the reference's."""

    reference: Side
    candidates: list[Side]
    setup: list[SetupCheck]
    rows: list[Row]
    min_effect: float
    conditions: dict[str, Any]
    notes: list[str]
    rooflines: list[Roofline] = []
    answers: dict[str, list[Answers]] = {}

    def setup_of(self, candidate: str) -> list[SetupCheck]:
        return [c for c in self.setup if c.candidate == candidate]

    def rows_of(self, candidate: str) -> list[Row]:
        return [r for r in self.rows if r.candidate == candidate]


@no_collecting()
def compare(
    snapshots: Sequence[Snapshot],
    min_effect: float = 0.01,
    *,
    force: bool = False,
    on_trial: Collection[str] = (),
) -> Comparison:
    """Compare each snapshot with the first. ``min_effect`` is the least relative difference that matters. ``on_trial``:
    conditions that were changed to see what comes of it; they are shown and keep nothing from being judged.

    Raises PdqError for fewer than two, and where model or workload differ, unless ``force``: then every row that
    this spoils is flagged and says "unsure".
    """
    if len(snapshots) < 2:
        raise PdqError("a comparison needs a reference and at least one candidate", exit_code=2)
    reference, *candidates = snapshots
    if len({s.id for s in snapshots}) < len(snapshots):
        raise PdqError("a snapshot is named twice", "compare different snapshots", exit_code=2)
    sides = _sides(snapshots)
    checks: list[SetupCheck] = []
    rows: list[Row] = []
    notes: list[str] = []
    answered: dict[str, list[Answers]] = {}
    for candidate, side in zip(candidates, sides[1:], strict=True):
        paired = _paired(reference, candidate)
        mine = setup_checks(reference, candidate, paired=paired)
        mine = [
            msgspec.structs.replace(c, invalidates=(), refuses=False) if c.what in on_trial else c
            for c in mine
        ]
        refused = [c for c in mine if c.refuses]
        if refused and not force:
            what = "; ".join(f"{c.what}: {c.reference} against {c.value}" for c in refused)
            raise PdqError(
                f"{reference.id} and {candidate.id} cannot be compared: {what}",
                "measure both with the same model and workload; --force shows them side by side without a judgement",
            )
        checks += mine
        rows += _rows(reference, candidate, mine, paired, min_effect)
        notes += _notes(reference, candidate, side, paired)
        answered[candidate.id] = compared_answers(reference.requests, candidate.requests)
    notes += [
        f"{side.label}: {w.removeprefix(f'{s.label}: ')}"
        for s, side in zip(snapshots, sides, strict=True)
        for w in s.manifest.get("warnings") or []
        if isinstance(w, str)
    ]
    return Comparison(
        reference=sides[0],
        candidates=sides[1:],
        setup=checks,
        rows=rows,
        min_effect=min_effect,
        conditions={
            key: reference.manifest.get(key)
            for key in ("tool", "python", "host", "device", "driver", "libraries", "model", "workload")
        },
        notes=list(dict.fromkeys(notes)),
        rooflines=[
            arm_roofline(s.arm, s.part("device"), side.label)
            for s, side in zip(snapshots, sides, strict=True)
        ],
        answers=answered,
    )


def _sides(snapshots: Sequence[Snapshot]) -> list[Side]:
    """Columns are called by their policy; by arm or id as well where that is not unique."""
    names = [s.policy or s.label or s.id for s in snapshots]
    sides = []
    for s, name in zip(snapshots, names, strict=True):
        label = name if names.count(name) == 1 else f"{name} {s.run[-4:]}/{s.name}"
        sides.append(
            Side(
                id=s.id,
                label=label,
                run=s.run,
                arm=s.label,
                policy=s.policy,
                note=s.note,
                measured=str(s.manifest.get("started") or s.manifest.get("created") or ""),
                valid=s.arm.get("valid") is not False,
            )
        )
    return sides


def _paired(a: Snapshot, b: Snapshot) -> bool:
    """Whether both took part in the same interleaved blocks: enough of them in which each ran twice."""
    return _shared_blocks(a, b)[1] >= _LEAST_BLOCKS


def _shared_blocks(a: Snapshot, b: Snapshot) -> tuple[int, int]:
    """Interleaved blocks that both took part in, and those of them in which each ran twice."""
    if a.run != b.run or a.label == b.label:
        return 0, 0
    both = sorted([*a.requests, *b.requests], key=lambda r: r.t_ns)
    ran = [
        min(len(block.get((a.label, False), ())), len(block.get((b.label, False), ())))
        for block in blocks_of(both)
    ]
    return sum(n >= 1 for n in ran), sum(n >= 2 for n in ran)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(
    a: Snapshot, b: Snapshot, checks: Sequence[SetupCheck], paired: bool, min_effect: float
) -> list[Row]:
    spoiled = {
        group: ", ".join(c.what for c in checks if c.status == DIFFERS and group in c.invalidates)
        for group in (SPEED, MEMORY, UTILIZATION, *STAGES)
    }
    spoiled[COUNTED] = ", ".join(c.what for c in checks if c.refuses)
    invalid = next((s for s in (a, b) if s.arm.get("valid") is False), None)
    if invalid is not None:
        why = f"{invalid.id}: {invalid.arm.get('valid_reason') or 'invalid'}"
        spoiled = dict.fromkeys(spoiled, why)
    elif (most := max(_devices(s) for s in (a, b))) > 1:
        spoiled |= dict.fromkeys(spoiled.keys() - {COUNTED}, f"layers on {most} devices")
    elif any(s.part("conditions").get("eager_launch_bound") for s in (a, b)):
        spoiled[SPEED] = spoiled[SPEED] or "eager: launch-bound"
    stats = [arm_stats(s.requests, s.device, s.model, _SUMMARIZED) for s in (a, b)]
    if paired:
        both = sorted([*a.requests, *b.requests], key=lambda r: r.t_ns)
        found = ratios(
            both,
            a.label,
            [a.label, b.label],
            min_effect,
            device=a.device,
            model=a.model,
            floors={m: f for m, f in a.part("noise_floor").items() if isinstance(f, (int, float))},
        )
        by_metric = {r.metric: r for r in found}
    else:
        by_metric = {r.metric: r for r in unpaired(a, b, RATIO_METRICS, min_effect)}
    method = PAIRED if paired else UNPAIRED
    rows = [_speed_row(b, m, stats, by_metric[m], method, _spoils_speed(m, spoiled)) for m in RATIO_METRICS]
    for m in MEMORY_METRICS:
        rows.append(_memory_row(a, b, m, stats, min_effect, spoiled[MEMORY]))
    rows += [_figure_row(a, b, f, min_effect, spoiled[COUNTED]) for f in FIGURES.values()]
    rows += [_plain_row(b, m, stats, spoiled[UTILIZATION]) for m in _UTILIZATION]
    return rows


def _devices(s: Snapshot) -> int:
    """On how many the model lay; one where an older snapshot does not say."""
    said = s.part("conditions").get("devices")
    return said if isinstance(said, int) else 1


def _spoils_speed(metric: str, spoiled: dict[str, str]) -> str:
    by_stage = [spoiled[stage] for stage in STAGES if metric in stage_metrics(stage)]
    return ", ".join(dict.fromkeys(s for s in (spoiled[SPEED], *by_stage) if s))


def _speed_row(
    b: Snapshot, metric: str, stats: Sequence[dict[str, Summary]], ratio: Ratio, method: str, spoiled: str
) -> Row:
    judgement, reason = ratio.judgement, ratio.reason
    if spoiled:
        judgement, reason = UNSURE, spoiled
    ci = ratio.ci95
    return _row(
        b.id,
        metric,
        stats[0][metric],
        stats[1][metric],
        group=SPEED,
        delta=ratio.difference,
        delta_ci95=ratio.difference_ci95,
        percent=None if ratio.ratio is None else (ratio.ratio - 1) * 100,
        ci95=None if ci is None else ((ci[0] - 1) * 100, (ci[1] - 1) * 100),
        judgement=judgement,
        method=method,
        blocks=ratio.blocks,
        flagged=bool(spoiled),
        reason=reason,
    )


def _row(candidate: str, metric: str, reference: Summary, value: Summary, **more: Any) -> Row:
    about: Any = METRICS.get(metric) or FIGURES[metric]
    return Row(
        candidate=candidate,
        metric=metric,
        name=about.name,
        short=about.short,
        unit=about.unit,
        better=about.better,
        reference=reference,
        value=value,
        **more,
    )


def _why(one: Summary, two: Summary) -> str | None:
    """Why something is missing in a row of two numbers; None where nothing is."""
    if one.median is None or two.median is None:
        return one.reason if one.median is None else two.reason
    return "the reference is 0: there is no percentage of it" if one.median == 0 else None


def _apart(a: float | None, b: float | None) -> dict[str, float | None]:
    """``delta`` and ``percent`` of two numbers; no percentage of a reference that is 0."""
    if a is None or b is None:
        return {"delta": None, "percent": None}
    return {"delta": b - a, "percent": None if a == 0 else (b / a - 1) * 100}


def _word(a: float | None, b: float | None, effect: float, better: str | None) -> str:
    """Two exact numbers: same inside ±effect, else better or worse."""
    if a is None or b is None or better is None:
        return UNSURE
    if a == b:
        return "same"
    if a <= 0 or b <= 0:
        return "better" if (b < a) == (better == "lower") else "worse"
    d = math.log(b / a)
    return judge(Interval(d, d, d, 1), math.log1p(effect), better)


def _shared(a: Snapshot, b: Snapshot) -> str:
    """Why memory is not the policies' own: another one was resident beside it, and its bytes are in the figure."""
    states = [s.arm.get("memory_from") for s in (a, b)]
    if all(s in ALONE for s in states):
        return ""
    shared = [s for s in states if s == SHARED]
    if len(shared) == 2:
        return "both arms were resident"
    return (
        "another arm was resident beside one of them" if shared else "not known what was resident beside them"
    )


def _resident(method: str) -> bool:
    return any(word in method.lower() for word in ("rss", "resident set", "vmhwm"))


def _memory_row(
    a: Snapshot,
    b: Snapshot,
    metric: str,
    stats: Sequence[dict[str, Summary]],
    min_effect: float,
    spoiled: str,
) -> Row:
    one, two = stats[0][metric], stats[1][metric]
    if one.median is not None and two.median is not None:
        spoiled = spoiled or _shared(a, b)
    resident = any(_resident(str(s.arm.get("memory_method") or "")) for s in (a, b))
    word = _word(one.median, two.median, max(min_effect, RESIDENT_MEMORY_EFFECT if resident else 0), "lower")
    reason = _why(one, two)
    if spoiled:
        word, reason = UNSURE, spoiled
    return _row(
        b.id,
        metric,
        one,
        two,
        group=MEMORY,
        **_apart(one.median, two.median),
        ci95=None,
        judgement=word,
        method="resident set" if resident else "single pass",
        flagged=bool(spoiled),
        reason=reason,
    )


def _figure_row(a: Snapshot, b: Snapshot, figure: Figure, min_effect: float, spoiled: str) -> Row:
    values = [figure.of(s.arm) for s in (a, b)]
    one, two = (
        Summary(
            median=v,
            ci95=None,
            n=0 if v is None else 1,
            unit=figure.unit,
            reason=f"not in {s.id}" if v is None else None,
        )
        for s, v in zip((a, b), values, strict=True)
    )
    return _row(
        b.id,
        figure.id,
        one,
        two,
        group=MEMORY,
        **_apart(values[0], values[1]),
        ci95=None,
        judgement=UNSURE if spoiled else _word(values[0], values[1], min_effect, figure.better),
        method="exact",
        flagged=bool(spoiled),
        reason=spoiled or _why(one, two),
    )


def _plain_row(b: Snapshot, metric: str, stats: Sequence[dict[str, Summary]], spoiled: str) -> Row:
    one, two = stats[0][metric], stats[1][metric]
    return _row(
        b.id,
        metric,
        one,
        two,
        group=UTILIZATION,
        **_apart(one.median, two.median),
        ci95=None,
        judgement="",
        method="medians",
        flagged=bool(spoiled),
        reason=spoiled or _why(one, two),
    )


def _notes(a: Snapshot, b: Snapshot, side: Side, paired: bool) -> list[str]:
    found = []
    if not paired:
        begun, whole = _shared_blocks(a, b)
        found.append(
            f"{side.label} was interleaved with the reference for {whole} whole block{'' if whole == 1 else 's'}: from "
            f"{_LEAST_BLOCKS} on a drift is cancelled, and many more are needed for a word; take the snapshots later"
            if begun
            else f"{side.label} was not interleaved with the reference: a drift between the runs is not cancelled"
        )
    one, two = (answers(timed(s.requests)) for s in (a, b))
    both = one.keys() & two.keys()
    if both:
        other = sum(one[prompt] != two[prompt] for prompt in both)
        told = "the same answers as" if not other else "other answers than"
        where = (
            f" to {other} of {len(both)} prompts" if other else f" to all {len(both)} prompts that both got"
        )
        found.append(f"{side.label} gave {told} the reference{where}")
    return found
