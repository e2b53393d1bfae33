"""The word of a verdict from what the steps found: which gate decides, and what is always said beside it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.judge import estimate
from pdq_tui.judge import verdict as v
from pdq_tui.judge.plan import PLANS, STEPS, Spec, not_tested
from pdq_tui.judge.traffic import Shape
from pdq_tui.report.evaluation import evaluation_page
from pdq_tui.report.tables import markdown, plain

STAGED = "w8a8-prefill-int4-decode"
SPEC = Spec(
    model="tiny",
    load=Load(model="tiny"),
    uniform=tuple(find_policy(n) for n in ("bf16", "int8")),
    staged=(find_policy(STAGED),),
    workload=Workload(),
    traffic=(Shape(512, 64),),
    traffic_name="the workload itself",
    plan=PLANS["quick"],
    gate="standard",
    min_effect=0.01,
)


def spread(value: float | None, low: float = 0.0, high: float = 0.0) -> dict[str, Any]:
    return {"value": value, "ci95": [low, high], "windows": 8, "reason": None}


def path(name: str, kind: str) -> dict[str, Any]:
    return {
        "policy": name, "path": kind, "forced": "text", "kld": spread(0.004, 0.003, 0.005),
        "same_top1": spread(0.97, 0.96, 0.98), "ppl_ratio": spread(1.01, 1.0, 1.02), "kld_median": 0.003,
        "kld_p99": None, "kld_max": 0.1, "positions": 64, "nonfinite": 0,
        "by_position": [[0, spread(0.001)], [1, spread(0.002)], [2, spread(0.003)]],
    }  # fmt: skip


def found(
    *,
    speed: dict[str, str] | None = None,
    quality: str = "pass",
    explained: float = 0.8,
    won: tuple[int, ...] = (),
) -> dict[str, Any]:
    words = speed or {"bf16": "better", "int8": "better"}
    ratio = {"better": 0.8, "worse": 1.2, "same": 1.0, "unsure": 0.98}
    arms = [
        {
            "label": name,
            "prefill": {"explained": {"median": explained}, "ttft_ms": {"median": 100.0}, "kernels": ["k"]},
            "decode": {"explained": {"median": 0.9}, "tpot_ms": {"median": step}, "kernels": ["k"]},
        }
        for name, step in (("bf16", 20.0), ("int8", 10.0), (STAGED, 5.0))
    ]
    gate = {
        "name": "quality: KLD",
        "limit": "≤ 0.011",
        "measured": "0.004",
        "result": quality,
        "reason": "why",
    }
    return {
        "conditions": {
            "weights": {
                n: {"stored_bytes": size << 20, "extra_bytes": 60 << 20}
                for n, size in (("bf16", 260), ("int8", 160), (STAGED, 220))
            },
            "operation": {n: {"storage": "uniform", "kernels": {"prefill": ["k"], "decode": ["k"]}} for n in ("bf16", STAGED)},
            "fallbacks": {STAGED: [{"modules": 7}]},
            "refused": {},
            "seconds": 1.0,
        },
        "bottleneck": {
            "base": "bf16", "traffic": "chat", "prefill_ms": 100.0, "decode_ms": 300.0, "prefill": 0.25,
            "most_gain": 1 / 3, "extrapolated": True, "seconds": 1.0, "ttft_ms": 100.0, "tpot_ms": 5.0,
            "prefill_mfu": 0.4, "mbu": None, "mbu_reason": "no read peak", "prefill_explained": 0.6, "decode_explained": 0.7,
            "measured": {"prompt": 512, "output": 64, "batch": 1},
        },
        "selection": {"left_out": {"int4": "+9.0% against int8"}, "seconds": 1.0},
        "confirmation": {
            "uniform": ["bf16", "int8"],
            "staged": [STAGED],
            "arms": arms,
            "warnings": [],
            "blocks": 10,
            "clocks": None,
            "other_load": 0.25,
            "noise_floor": {"e2e_ms": 0.02},
            "crossover": [
                {
                    "uniform": "int8", "base": "bf16", "crosses": True,
                    "prefill": {"ratio": 1.2, "ci95": [1.1, 1.3], "judgement": "worse"},
                    "decode": {"ratio": 0.7, "ci95": [0.6, 0.8], "judgement": "better"},
                }
            ],
            "seconds": 1.0,
            "ratios": [
                {
                    "reference": u, "arm": STAGED, "metric": "e2e_ms", "ratio": ratio[w],
                    "ci95": [ratio[w] - 0.02, ratio[w] + 0.02], "judgement": w, "reason": None, "blocks": 10,
                }
                for u, w in words.items()
            ],
            "map": [
                {
                    "staged": STAGED, "uniform": u, "prompt": 512, "batch": 1, "output": n,
                    "delta_ms": -50.0 if n in won else 50.0, "ci95": [-60.0, -40.0] if n in won else [40.0, 60.0],
                    "extrapolated": n > 64,
                }
                for u in words
                for n in (16, 64, 256)
            ],
            "break_even": [
                {"staged": STAGED, "uniform": u, "output": 90.0, "ci95": [80.0, 100.0], "side": "staged is faster for longer answers"}
                for u in words
            ],
        },
        "quality": {
            "gates": {STAGED: gate},
            "paths": {STAGED: [path(STAGED, "prefill"), path(STAGED, "decode")]},
            "seconds": 1.0,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, v.ONLY_IF),
        ({"quality": "fail"}, v.NO_GO),
        ({"quality": "fail", "explained": 0.2}, v.NO_GO),
        ({"explained": 0.2}, v.ENGINE_LIMITED),
        ({"quality": "not informative"}, v.NOT_INFORMATIVE),
        ({"quality": "unsure"}, v.UNSURE_WORD),
        ({"speed": {"bf16": "better", "int8": "unsure"}}, v.UNSURE_WORD),
        ({"speed": {"bf16": "better", "int8": "same"}}, v.NO_GO),
        ({"speed": {"bf16": "better", "int8": "worse"}}, v.NO_GO),
        ({"speed": {"bf16": "better", "int8": "worse"}, "won": (256,)}, v.ONLY_IF),
    ],
)
def test_the_word_is_that_of_the_gate_that_decides(changes: dict[str, Any], word: str) -> None:
    judged = v.verdict(SPEC, found(**changes))
    assert (judged.word, judged.staged) == (word, STAGED)
    assert judged.because and judged.not_tested == not_tested({}) and judged.holds == v.HOLDS


def test_it_never_says_go_while_something_is_not_tested() -> None:
    judged = v.verdict(SPEC, found())
    assert judged.word != v.GO and judged.region is not None
    assert all(what in judged.region for what in not_tested(found()))


def abnormal(result: str, **more: Any) -> dict[str, Any]:
    row = {
        "case": "one token", "expected": ["done"], "state": "done", "reason": None, "next_right": result == "pass",
        "result": result, "seconds": 0.1,
    }  # fmt: skip
    left = row | {
        "case": "at the limit",
        "result": "not tested",
        "state": None,
        "next_right": None,
        "reason": "slow",
    }
    return {"abnormal": {"policy": STAGED, "abnormal": [row | more, left], "seconds": 1.0}}


def test_abnormal_inputs_are_a_gate_of_their_own() -> None:
    good, bad = found() | abnormal("pass"), found() | abnormal("fail", state="not finite")
    judged = v.verdict(SPEC, good)
    gate = next(g for g in judged.gates if "abnormal" in g.name)
    assert (gate.result, gate.measured) == ("pass", "1 of 1 cases")
    assert gate.reason == "at the limit was not tested: slow"
    assert "abnormal inputs" not in judged.not_tested and "soak" in judged.not_tested
    failed = v.verdict(SPEC, bad)
    assert failed.word == v.NO_GO and "0 of 1 cases" in failed.because[0]
    for text in (plain(evaluation_page(SPEC, bad, failed)), markdown(evaluation_page(SPEC, bad, failed))):
        assert "not finite" in text and "at the limit" in text


def test_a_region_says_what_was_not_measured_there() -> None:
    losing = {"bf16": "better", "int8": "worse"}
    judged = v.verdict(SPEC, found(speed=losing, won=(16, 256)))
    assert judged.region == "answers of 16, 256 tokens (some of them extrapolated)"
    assert "speed: E2E against int8" in judged.because[0]


def test_a_protocol_that_stopped_says_why() -> None:
    early = {"bottleneck": {"stop": "no staging can gain more than 0.4%"}}
    judged = v.verdict(SPEC, early)
    assert (judged.word, judged.because) == (v.NO_GO, ["no staging can gain more than 0.4%"])
    assert v.verdict(SPEC, {}).word == v.UNSURE_WORD


def test_the_page_holds_the_evidence_behind_the_word() -> None:
    """Every gate, the map, both paths, the steps and what was not tested, as text and as Markdown."""
    facts = found(speed={"bf16": "better", "int8": "worse"}, won=(256,))
    judged = v.verdict(SPEC, facts)
    page = evaluation_page(SPEC, facts, judged)
    assert page.headline.startswith(f"ONLY-IF about {STAGED}")
    for text in (plain(page), markdown(page)):
        for piece in (
            *(g.measured for g in judged.gates),
            *(s.title for s in STEPS),
            "not tested",
            "+50",
            "0.0040",
        ):
            assert piece in text.replace("\\", "")
    assert "staged is faster for longer answers than 90 [80, 100] tokens" in plain(page)
    titles = [t.title for t in page.tables]
    for number in "12345":
        assert any(t.startswith(f"{number}. ") for t in titles), "each question has its table"
    text = plain(page)
    for piece in (
        "MBU: n/a (no read peak)",
        "yes: one stage wins, the other loses",
        "others had 25% of the CPU time",
    ):
        assert piece in text
    assert "Δ" not in markdown(page), "the legend is this page's own"


def test_an_engine_limit_gives_what_was_measured_and_a_projection_that_says_so() -> None:
    """Limits of one request of 64 tokens: prefill 100 ms · 0.2, a step 5, 10 or 20 ms · 0.9."""
    spec = msgspec.structs.replace(SPEC, workload=Workload(output_tokens=64))
    judged = v.verdict(spec, found(explained=0.2))
    assert judged.word == v.ENGINE_LIMITED
    ours, theirs = (20 + 63 * step * 0.9 for step in (5.0, 10.0))
    told = " ".join(judged.because)
    assert (
        f"projection at equal explained share, not measured: E2E {ours / theirs - 1:+.0%} against int8"
        in told
    )
    assert "speed: E2E against int8: -20.0 %" in told
    assert any(g.result == "not tested" for g in judged.gates), "stability was not"
    assert judged.to_change[0].startswith("kernels that come nearer")


def test_what_is_left_is_estimated_from_what_was_measured() -> None:
    assert estimate.left(SPEC, {}) == {}, "nothing is known before the base was timed"
    facts = found()
    told = estimate.left(SPEC, {"bottleneck": facts["bottleneck"]})
    steps = [s.name for s in STEPS if s.name not in ("conditions", "bottleneck", "logs")]
    assert list(told) == steps and min(told.values()) > 0
    assert told["quality"] == 2 * told["small_quality"], "twice as many windows"
    done = {
        "bottleneck": facts["bottleneck"],
        "selection": {"seconds": 24.0, "uniform": ["bf16", "int8"], "staged": [STAGED]},
        "small_quality": {"seconds": 8.0, "uniform": ["bf16", "int8"], "staged": [STAGED], "paths": {"int8": [], STAGED: [], "bf16": []}},
    }  # fmt: skip
    told = estimate.left(SPEC, done)
    # Three blocks of three arms and the control: 24 turns of a second; ten blocks of four arms and it: 100, and 4 warm-ups.
    known = {name: told[name] for name in ("confirmation", "quality")}
    assert known == {"confirmation": pytest.approx(104.0), "quality": pytest.approx(16.0)}
