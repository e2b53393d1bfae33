"""The JSON of a run: the contract's keys, strictness, reasons, warnings."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdq_tui.core import protocol as p
from pdq_tui.core.analysis import collect, run_document
from pdq_tui.core.workload import Workload


def strict(text: str | bytes) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def no_number_without_meaning(value: Any, path: str = "") -> None:
    """Every null has its reason beside it."""
    if isinstance(value, dict):
        for k, v in value.items():
            if v is None and path != "/host":
                assert f"{k}_reason" in value, f"{path}/{k} is null without a reason"
            no_number_without_meaning(v, f"{path}/{k}")
    elif isinstance(value, list):
        for i, v in enumerate(value):
            no_number_without_meaning(v, f"{path}[{i}]")


@pytest.fixture
def doc(make_run: Any, meta: dict[str, Any]) -> dict[str, Any]:
    return run_document(meta, make_run({"bf16": (100, 50), "int4": (180, 26)}).events())


def test_the_contract_is_there(doc: dict[str, Any]) -> None:
    assert doc["schema"] == 1
    assert doc["tool"]["version"] == "0.1.0"
    assert {"cpu", "threads", "memory"} <= set(doc["host"])
    assert {"name", "uuid", "kind", "memory", "interconnect", "clocks"} <= set(doc["device"])
    assert {"torch", "transformers"} <= set(doc["libraries"])
    assert {"id", "sha256", "parameters", "layers", "dtype"} <= set(doc["model"])
    assert {
        "prompt_tokens",
        "output_tokens",
        "batch",
        "prompts_sha256",
        "seed",
        "blocks",
        "chat_template",
        "attention",
    } <= set(doc["workload"])
    for arm in doc["arms"]:
        assert {
            "label",
            "policy",
            "storage",
            "handoff_ms",
            "e2e_ms",
            "steady_bytes",
            "session_resident_bytes",
        } <= set(arm)
        assert {
            "ttft_ms",
            "prefill_ms",
            "tokens_per_s",
            "mfu",
            "explained",
            "energy_j_per_token",
            "peak_bytes",
            "kernels",
        } <= set(arm["prefill"])
        assert {
            "tpot_ms",
            "step_ms",
            "itl_ms",
            "tokens_per_s",
            "bytes_per_step",
            "bandwidth_gbps",
            "mbu",
            "explained",
            "energy_j_per_token",
            "peak_bytes",
            "kernels",
        } <= set(arm["decode"])
        assert {"p50", "p90", "p99", "max", "n", "unit"} <= set(arm["decode"]["itl_ms"])
        assert {"stored_bytes", "extra_bytes", "kept_bytes", "bits_per_weight"} <= set(arm["weights"])
        assert {"bytes_per_token", "dtype", "capacity_tokens"} <= set(arm["kv"])
        for stage in ("prefill", "decode"):
            assert {"converted_parameters", "total_parameters", "left"} <= set(arm["coverage"][stage])
        assert {"fallbacks", "valid", "text_sha256"} <= set(arm)
        summary = arm["decode"]["tpot_ms"]
        assert set(summary) == {"median", "ci95", "n", "unit"} and len(summary["ci95"]) == 2
        assert isinstance(arm["decode"]["peak_bytes"], int) and isinstance(
            arm["decode"]["bytes_per_step"], int
        )
    for r in doc["ratios"]:
        assert {"reference", "arm", "metric", "ratio", "ci95", "judgement"} <= set(r)
        assert r["judgement"] in ("better", "worse", "same", "unsure")
    assert isinstance(doc["noise_floor"]["tpot_ms"], float)
    assert isinstance(doc["warnings"], list)


def test_numbers_are_those_of_the_run(doc: dict[str, Any]) -> None:
    first, second = doc["arms"]
    assert (first["label"], second["label"]) == ("bf16", "int4")
    assert first["prefill"]["ttft_ms"]["median"] == pytest.approx(100, rel=0.01)
    assert second["decode"]["tpot_ms"]["median"] == pytest.approx(26, rel=0.01)
    assert first["decode"]["tpot_ms"]["n"] == 24  # two slots a block; the control stands apart
    assert first["requests"] == {
        "used": 24,
        "warmup": 1,
        "first_use": 0,
        "cancelled": 0,
        "invalid": 0,
        "control": 24,
        "solo": 1,
    }
    assert doc["workload"]["blocks"] == 12
    tpot = next(r for r in doc["ratios"] if r["metric"] == "tpot_ms")
    assert tpot["ratio"] == pytest.approx(26 / 50, abs=0.002) and tpot["judgement"] == "better"
    assert tpot["ci95"][0] < tpot["ratio"] < tpot["ci95"][1]
    assert second["memory_from"] == "solo pass"


def test_X01_strict_json_with_missing_values(make_run: Any, meta: dict[str, Any]) -> None:
    """Missing power, one-token outputs, not-a-number shares, stages without duration."""
    run = make_run({"bf16": (100, 50), "x": (0.0, 26)}, blocks=3, cpu_mhz=None)
    events = run.events()
    for e in events:
        if isinstance(e, p.ModelReady):
            e.device = p.DeviceInfo(kind="cuda", name="GPU", read_peak_gbps=float("nan"))
            e.attention = None
        if isinstance(e, p.Request) and e.arm == "x":
            e.itl_ms, e.decode_ms, e.tpot_ms, e.output_tokens = [], None, None, [1]
            e.prefill_ms = 0.0
            e.prefill_bound_ms = float("nan")
            e.bytes_per_step = None
            e.prefill_peak_bytes = e.decode_peak_bytes = e.steady_bytes = None
    events.append(
        p.SensorSample(gpus=[p.GpuSample(index=0, power_w=None, missing={"power_w": "not supported"})])
    )
    doc = run_document(meta, events)
    assert strict(json.dumps(doc, allow_nan=False)) == doc
    no_number_without_meaning(doc)
    x = doc["arms"][1]
    assert (
        x["decode"]["tpot_ms"] is None and x["decode"]["tpot_ms_reason"] == "needs at least two output tokens"
    )
    assert x["decode"]["energy_j_per_token"] is None and x["prefill"]["tokens_per_s"] is None
    assert x["decode"]["itl_ms"]["p50"] is None and x["decode"]["itl_ms"]["n"] == 0
    assert doc["device"]["read_peak_gbps"] is None


def test_X01_every_null_has_its_reason(doc: dict[str, Any]) -> None:
    no_number_without_meaning(doc)


def test_X01_an_empty_run_is_a_document_as_well(meta: dict[str, Any]) -> None:
    doc = run_document(meta, [])
    assert strict(json.dumps(doc, allow_nan=False))["arms"] == []
    no_number_without_meaning(doc)
    assert run_document({}, [])["tool"] == {"version": None, "version_reason": "not known"}


def test_T06_unequal_output_lengths_are_a_warning(make_run: Any, meta: dict[str, Any]) -> None:
    events = make_run({"bf16": (100, 50)}).events()
    used = [e for e in events if isinstance(e, p.Request) and e.kind == "blocks" and not e.control]
    used[3].output_tokens = [4]
    doc = run_document(meta, events)
    assert any("4 to 9 tokens" in w for w in doc["warnings"])
    assert doc["arms"][0]["e2e_ms"]["note"] == "requests made 4 to 9 tokens"


def test_T09_drift_inside_the_run_is_reported(make_run: Any, meta: dict[str, Any]) -> None:
    doc = run_document(
        meta, make_run({"bf16": (100, 50), "x": (100, 50)}, drift=lambda n: 0.005 * n).events()
    )
    assert any("drifted by +" in w for w in doc["warnings"])
    assert doc["arms"][0]["drift"]["tpot_ms"] > 0.05
    assert {r["judgement"] for r in doc["ratios"]} == {"same"}


def test_left_out_requests_fallbacks_and_notes_are_warnings(make_run: Any, meta: dict[str, Any]) -> None:
    events = make_run({"bf16": (100, 50), "int4": (100, 26)}).events()
    ready = next(e for e in events if isinstance(e, p.ArmReady) and e.arm == "int4")
    ready.fallbacks.append(
        p.Fallback(
            stage="decode", module="*.down_proj", wanted="int4", used="bf16", reason="K % 64", modules=30
        )
    )
    used = [e for e in events if isinstance(e, p.Request) and e.kind == "blocks" and e.arm == "int4"]
    used[0].first_use = True
    used[1].cancelled = True
    events.append(p.Note(level="warn", text="the disk is slow"))
    events.append(p.ArmRefused(arm="int4", policy="int8", reason="does not fit"))
    events.append(p.RunEnded(reason="budget", requests=3, blocks=2))
    doc = run_document(meta, events)
    told = "\n".join(doc["warnings"])
    for words in (
        "decode of *.down_proj runs bf16 instead of int4 in 30 modules: K % 64",
        "1 first-use, 1 cancelled",
        "the disk is slow",
        "policy int8 was refused: does not fit",
        "ended early (budget) after 2 blocks",
    ):
        assert words in told
    assert doc["arms"][1]["fallbacks"][0]["wanted"] == "int4"


def test_an_invalid_arm_is_shown_and_never_ranked(make_run: Any, meta: dict[str, Any]) -> None:
    events = make_run({"bf16": (100, 50), "nan": (10, 5)}).events()
    for e in events:
        if isinstance(e, p.Request) and e.arm == "nan" and e.block == 11:
            e.valid, e.invalid_reason = False, "not a number in the logits"
            e.nonfinite = p.NonFinite(stage="decode", step=3)
    doc = run_document(meta, events)
    arm = doc["arms"][1]
    assert arm["valid"] is False and "first in decode, step 3" in arm["valid_reason"]
    assert {r["judgement"] for r in doc["ratios"]} == {"unsure"}
    assert arm["decode"]["tpot_ms"]["median"] == pytest.approx(5, rel=0.02)
    assert any("may not be ranked" in w for w in doc["warnings"])


def test_an_earlier_workload_or_policy_does_not_mix_in(
    make_run: Any, make_policy: Any, meta: dict[str, Any]
) -> None:
    first = make_run({"A": (500, 200), "B": (500, 200)}, blocks=2)
    second = make_run({"A": (100, 50), "B": (100, 50)}, blocks=3, workload=Workload(output_tokens=9, seed=8))
    doc = run_document(meta, first.events() + second.events())
    assert doc["arms"][0]["requests"]["used"] == 6
    assert any("earlier workload" in w for w in doc["warnings"])
    third = make_run(
        {"A": (10, 5), "B": (100, 50)},
        blocks=4,
        workload=Workload(output_tokens=9, seed=8),
        policies={"A": make_policy("other", decode="int4"), "B": make_policy("B")},
    )
    doc = run_document(meta, second.events() + third.events())
    by_label = {a["label"]: a for a in doc["arms"]}
    assert by_label["A"]["requests"]["used"] == 8 and by_label["B"]["requests"]["used"] == 14


def test_the_apps_reference_is_b_and_a_headless_runs_the_first(make_run: Any, meta: dict[str, Any]) -> None:
    app = run_document(meta, make_run({"A": (100, 50), "B": (100, 50)}, blocks=2).events())
    assert [a["label"] for a in app["arms"]] == ["B", "A"]
    assert {r["reference"] for r in app["ratios"]} == {"B"}
    two = make_run({"int8": (100, 50), "int8#2": (100, 50)}, blocks=2).events()
    assert [a["label"] for a in run_document(meta, two)["arms"]] == ["int8", "int8#2"]
    assert run_document(meta, two, reference="int8#2")["arms"][0]["label"] == "int8#2"


def test_answers_are_compared_by_prompt(make_run: Any, meta: dict[str, Any]) -> None:
    events = make_run({"bf16": (100, 50), "int4": (100, 26)}, blocks=4).events()
    same = run_document(meta, events)["arms"]
    assert same[0]["text_sha256"] == same[1]["text_sha256"] is not None
    for e in events:
        if isinstance(e, p.Request) and e.arm == "int4" and e.prompt == 1:
            e.tokens_sha256 = "f" * 64
    other = run_document(meta, events)["arms"]
    assert other[0]["text_sha256"] == same[0]["text_sha256"] != other[1]["text_sha256"]


def test_conditions_come_from_the_measured_windows(make_run: Any) -> None:
    events = make_run({"bf16": (100, 50)}, blocks=2, cpu_mhz=3000.0).events()
    events.insert(5, p.SensorSample(cpu=p.CpuSample(mhz=800.0), t_ns=1))  # before anything ran
    from pdq_tui.core.facts import clocks

    f = collect(events)
    seen = clocks(f, f.requests)
    assert seen is not None and seen["cpu_mhz"] == {"min": 3000.0, "median": 3000.0, "max": 3000.0}


def test_a_slowed_gpu_is_a_warning_and_idle_clocks_are_not(make_run: Any, meta: dict[str, Any]) -> None:
    events = make_run({"bf16": (100, 50)}, blocks=2).events()
    for e in events:
        if isinstance(e, p.ModelReady):
            e.device = msgspec.structs.replace(e.device, kind="cuda", uuid="GPU-1")
        if isinstance(e, p.SensorSample):
            e.gpus = [p.GpuSample(index=0, uuid="GPU-1", sm_mhz=1755.0, throttle=["thermal slowdown"])]
    doc = run_document(meta, events)
    assert any("slowed down" in w and "thermal" in w for w in doc["warnings"])
    assert doc["device"]["clocks"]["sm_mhz"]["median"] == 1755.0
    for e in events:
        if isinstance(e, p.SensorSample):
            e.gpus[0].throttle = []
    assert not any("slowed down" in w for w in run_document(meta, events)["warnings"])
