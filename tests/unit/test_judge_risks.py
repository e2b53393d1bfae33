"""Every confounder and every risk has a state and what it rests on; each confirmed candidate has its word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import made_evaluation
import msgspec
import pytest

from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.roofline import evaluation_rooflines
from pdq_tui.judge import risks
from pdq_tui.judge.diary import Entry
from pdq_tui.judge.plan import RISKS, STEPS
from pdq_tui.judge.verdict import verdicts
from pdq_tui.report.evaluated import evaluated
from pdq_tui.report.evaluation_figures import evaluation_figures
from pdq_tui.tui.verdict_lines import word_lines

SPEC = made_evaluation.SPEC
STATES = {risks.EXCLUDED, risks.PARTLY, risks.OPEN, risks.NOT_REACHED, risks.TESTED, risks.NOT_TESTED}


def by_name(rows: list[risks.Row]) -> dict[str, risks.Row]:
    return {row.name: row for row in rows}


@pytest.mark.parametrize("steps", range(12))
def test_no_row_is_ever_without_a_state_and_its_evidence(steps: int) -> None:
    whole = made_evaluation.found()
    found = {name: whole[name] for name in list(whole)[:steps]}
    rows = [*risks.confounders(SPEC, found), *risks.risks(SPEC, found)]
    assert all(row.state in STATES and row.about and row.evidence for row in rows)
    assert {
        "allocation of resources",
        "cache policy",
        "data size",
        "concurrency model",
        "clocks and drift",
    } <= set(by_name(rows))
    assert {"sample bias", "environment", "other models", "engineering cost", *RISKS} <= set(by_name(rows))


def test_states_follow_from_what_was_found() -> None:
    found = made_evaluation.found()
    rows = by_name(risks.confounders(SPEC, found))
    assert rows["allocation of resources"].state == risks.EXCLUDED
    assert rows["cache policy"].state == risks.EXCLUDED
    assert rows["clocks and drift"].state == risks.EXCLUDED and "1.0%" in rows["clocks and drift"].evidence
    assert rows["kernels"].evidence == "explained shares from 60% (bf16 decode) to 70%"
    found["confirmation"] |= {"other_load": 0.4, "warnings": ["a drifted by 9 %"]}
    found["confirmation"]["arms"][0]["decode"]["explained"]["median"] = 0.2
    mixed = msgspec.structs.replace(
        SPEC, staged=(msgspec.structs.replace(SPEC.staged[0], kv=KvPolicy("bf16", "int8", "handoff")),)
    )
    rows = by_name(risks.confounders(mixed, found))
    assert (
        rows["allocation of resources"].state == risks.PARTLY
        and "40%" in rows["allocation of resources"].evidence
    )
    assert rows["cache policy"].state == risks.OPEN and "bf16, bf16/int8" in rows["cache policy"].evidence
    assert rows["clocks and drift"].state == risks.PARTLY and rows["kernels"].state == risks.OPEN


def test_who_else_was_on_the_gpu_is_a_confounder_that_is_not_excluded() -> None:
    found = made_evaluation.found()
    told = "2 other processes had memory or time of the engine's GPU while it was measured"
    found["confirmation"]["warnings"] = [told, "x drifted by 9 %"]
    row = by_name(risks.confounders(SPEC, found))["allocation of resources"]
    assert (row.state, row.evidence) == (risks.OPEN, told)


def test_a_risk_that_a_step_looked_at_is_tested_or_partly_so() -> None:
    found = made_evaluation.found()
    rows = by_name(risks.risks(SPEC, found))
    assert rows["load"].state == risks.TESTED and rows["load"].evidence.endswith("loads")
    assert rows["energy"].state == risks.NOT_TESTED
    assert rows["soak"].state == risks.PARTLY and "not the hours-long test" in rows["soak"].evidence
    assert rows["engineering cost"].state == risks.NOT_TESTED
    logged = [Entry(op="x", minutes=12, at="2026-12-03T00:00:00+00:00")]
    cost = by_name(risks.risks(SPEC, found, logged))["engineering cost"]
    assert (cost.state, cost.evidence) == (risks.PARTLY, "12 min logged")
    assert (
        rows["sample bias"].state == risks.PARTLY
        and "40 tasks (the project's own)" in rows["sample bias"].evidence
    )


def two_candidates() -> tuple[Any, dict[str, Any]]:
    """A second one that is slower than a uniform policy."""
    found, other = made_evaluation.found(), "second"
    spec = msgspec.structs.replace(
        SPEC, staged=(*SPEC.staged, msgspec.structs.replace(SPEC.staged[0], name=other))
    )
    timing = found["confirmation"]
    timing["staged"].append(other)
    timing["ratios"] += [
        r | {"arm": other, "ratio": 1.3, "ci95": [1.2, 1.4], "judgement": "worse"}
        for r in timing["ratios"]
        if r["metric"] == "e2e_ms"
    ]
    found["quality"]["gates"][other] = found["quality"]["gates"][made_evaluation.STAGED]
    found["conditions"]["weights"][other] = {"stored_bytes": 300 << 20, "extra_bytes": 0}
    return spec, found


def test_each_confirmed_candidate_has_a_word_of_its_own() -> None:
    spec, found = two_candidates()
    each = verdicts(spec, found)
    assert [v.staged for v in each] == [made_evaluation.STAGED, "second"] and each[1].word == "NO-GO"
    report = evaluated(spec, found)
    assert report.verdict == each[0]
    table = next(t for t in report.page().tables if t.title == "each confirmed candidate")
    assert [row[:2] for row in table.rows] == [[v.staged, v.word] for v in each]
    assert "speed: E2E against int8" in table.rows[1][4]
    assert [c["policy"] for c in report.body()["candidates"]] == [made_evaluation.STAGED, "second"]
    assert list(report.each) == each
    seen: Any = SimpleNamespace(spec=spec, found=found, running=False, finished=True, step=None)
    shown = [line.text for line in word_lines(report, seen, STEPS, 100, 9)]
    assert " also confirmed: second NO-GO" in shown
    assert verdicts(spec, {k: found[k] for k in ("conditions", "confirmation")}) == []


def test_the_report_draws_and_tells_the_roofline_of_every_confirmed_arm() -> None:
    found = made_evaluation.found()
    lines = evaluation_rooflines(found)
    assert [line.label for line in lines] == [arm["label"] for arm in found["confirmation"]["arms"]]
    assert all(len(line.points) == 2 and line.roof.read_gbps == 31.6 for line in lines)
    drawn = next(f for f in evaluation_figures(SPEC, found) if f.name == "roofline")
    assert drawn.draw is not None
    table = next(t for t in evaluated(SPEC, found).page().tables if "roofline" in t.title)
    assert len(table.rows) == 2 * len(lines) and {row[-1] for row in table.rows} == {"memory", "arithmetic"}
    missing = next(f for f in evaluation_figures(SPEC, {}) if f.name == "roofline")
    assert missing.draw is None and missing.missing == "no stage was measured"
