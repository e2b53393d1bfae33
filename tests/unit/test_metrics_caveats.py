"""What stands beside the figures: too little measured, the engine's limits, shares above 1, KV that no longer fits."""

from __future__ import annotations

from typing import Any

import pytest

from pdq_tui.core import protocol as p
from pdq_tui.core.analysis import run_document
from pdq_tui.core.arms import gaps, units
from pdq_tui.core.stats import STRICTER, TOO_WIDE, Interval, unsure_reason


def document(make_run: Any, meta: dict[str, Any], change: Any = None, **more: Any) -> dict[str, Any]:
    events = make_run({"bf16": (100, 50), "int4": (180, 26)}, **more).events()
    for e in events:
        if change:
            change(e)
    return run_document(meta, events)


def test_fewer_blocks_or_seconds_than_planned_are_said(make_run: Any, meta: dict[str, Any]) -> None:
    assert "3 blocks: judgements are planned on 10" in document(make_run, meta, blocks=3)["warnings"]
    whole = " ".join(document(make_run, meta)["warnings"])
    assert "judgements are planned" not in whole

    def faster(e: Any) -> None:
        if isinstance(e, p.Request):
            e.host_start_ns, e.host_end_ns = e.host_start_ns // 10, e.host_end_ns // 10

    assert any(
        "s were measured: judgements are planned on 10 s" in w
        for w in document(make_run, meta, faster)["warnings"]
    )


def gpus(*, others: int | None = 0, beside: tuple[int | None, float | None] = (0, 0.0)) -> list[p.GpuSample]:
    return [
        p.GpuSample(index=0, other_processes=beside[0], gpu_util=beside[1]),
        p.GpuSample(index=1, engine=True, other_processes=others, gpu_util=0.97),
    ]


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (gpus(), []),
        (gpus(others=None, beside=(None, None)), []),
        (gpus(beside=(0, 0.04)), []),
        (gpus(others=1), ["1 other process had memory or time of the engine's GPU"]),
        (gpus(beside=(2, 0.0)), ["GPU 0 beside the engine's had 2 processes and was busy up to 0%"]),
        (gpus(others=3, beside=(None, 0.8)), ["3 other processes had", "had no process"]),
    ],
)
def test_processes_on_and_beside_the_engine_s_gpu_are_named(
    make_run: Any, meta: dict[str, Any], read: list[p.GpuSample], said: list[str]
) -> None:
    events = make_run({"bf16": (100, 50), "int4": (180, 26)}).events()
    for e in events:
        if isinstance(e, p.SensorSample):
            e.gpus = read
    found = [w for w in run_document(meta, events)["warnings"] if "GPU" in w and "NVML" not in w]
    assert len(found) == len(said) and all(part in text for part, text in zip(said, found, strict=True)), (
        found
    )
    # Read while nothing of ours ran, it says nothing.
    for e in events:
        if isinstance(e, p.SensorSample):
            e.t_ns = 1
    assert not [w for w in run_document(meta, events)["warnings"] if "engine's GPU" in w or "beside" in w]


def test_gpus_that_share_the_model_are_no_neighbours_and_nothing_is_held_against_a_peak(
    make_run: Any, meta: dict[str, Any]
) -> None:
    events = make_run({"bf16": (100, 50), "int4": (180, 26)}).events()
    for e in events:
        if isinstance(e, p.SensorSample):
            e.gpus = [p.GpuSample(index=i, engine=True, other_processes=0, gpu_util=0.9) for i in (0, 1)]
        if isinstance(e, p.ModelReady):
            e.device.others = [p.DevicePart(name="GPU", uuid="GPU-1", memory_bytes=5)]
            e.device.own_memory_bytes, e.device.layers = 4, "20 layers on cuda:0, 12 on cuda:1"
            e.device.read_peak_gbps, e.device.compute_peak_tflops = None, {}
        if isinstance(e, p.Request):
            e.devices, e.prefill_bound_ms, e.decode_bound_ms = 2, None, None
    made = run_document(meta, events)
    told = [w for w in made["warnings"] if "devices" in w or "beside the engine's" in w]
    words = "layers on 2 devices (20 layers on cuda:0, 12 on cuda:1): figures are shown, nothing is judged"
    assert told == [f"bf16: {words}", f"int4: {words}"]
    assert [part["memory"] for part in made["device"]["parts"]] == [4, 5]
    why = "layers on 2 devices: peaks are of one"
    for arm in made["arms"]:
        assert (arm["decode"]["mbu"], arm["decode"]["mbu_reason"]) == (None, why)
        assert (arm["prefill"]["explained"], arm["prefill"]["explained_reason"]) == (None, why)


def test_an_engine_far_from_the_hardware_is_named(make_run: Any, meta: dict[str, Any]) -> None:
    """The virtual engine: decode_bound_ms 4 of 50 ms and of 26 ms."""
    found = document(make_run, meta)["warnings"]
    assert any(w.startswith("int4: engine-limited") and "15 % of decode" in w for w in found)

    def near(e: Any) -> None:
        if isinstance(e, p.Request):
            e.prefill_bound_ms, e.decode_bound_ms = 0.9 * e.prefill_ms, 0.9 * e.itl_ms[0]

    assert not any("engine-limited" in w for w in document(make_run, meta, near)["warnings"])


@pytest.mark.parametrize(
    ("cache", "why"), [(64, "fits in the last-level cache"), (32, "census or the read peak")]
)
def test_a_utilization_above_one_is_explained_and_not_clamped(
    make_run: Any, meta: dict[str, Any], cache: int, why: str
) -> None:
    def small(e: Any) -> None:
        if isinstance(e, p.ModelReady):
            e.device.read_peak_gbps, e.device.last_level_cache_bytes = 0.5, cache << 20
        if isinstance(e, p.Request):
            e.bytes_per_step = 50 << 20

    doc = document(make_run, meta, small)
    assert doc["arms"][0]["decode"]["mbu"]["median"] > 1
    assert any("MBU is 210 %" in w and why in w for w in doc["warnings"])


def test_kv_that_the_second_copy_displaces_and_requests_that_fit(make_run: Any, meta: dict[str, Any]) -> None:
    def dual(e: Any) -> None:
        if isinstance(e, p.ArmReady):
            e.weights.extra_bytes = 54_000_000

    kv = document(make_run, meta, dual)["arms"][1]["kv"]
    assert kv["displaced_tokens"] == 54_000_000 // kv["bytes_per_token"]
    assert kv["capacity_tokens"] == (kv["free_bytes"] - kv["reserve_bytes"]) // kv["bytes_per_token"] > 0
    assert kv["capacity_requests"] == kv["capacity_tokens"] // (512 + 9) > 0


def test_how_much_kv_fits_is_null_with_the_engines_own_reason(make_run: Any, meta: dict[str, Any]) -> None:
    def untold(reason: str | None) -> Any:
        def change(e: Any) -> None:
            if isinstance(e, p.ArmReady):
                e.kv = p.KvInfo(bytes_per_token=23_040, capacity_reason=reason)

        return document(make_run, meta, change)["arms"][0]["kv"]

    for reason, told in (("this device is silent", "this device is silent"), (None, "did not say how much")):
        kv = untold(reason)
        for key in ("free_bytes", "capacity_tokens", "capacity_requests"):
            assert kv[key] is None and told in kv[f"{key}_reason"]


def test_requests_that_fit_need_a_workload(make_run: Any, meta: dict[str, Any]) -> None:
    events = [
        e for e in make_run({"bf16": (100, 50)}).events() if not isinstance(e, (p.WorkloadReady, p.Request))
    ]
    kv = run_document(meta, events)["arms"][0]["kv"]
    assert kv["capacity_tokens"] > 0
    assert kv["capacity_requests"] is None and kv["capacity_requests_reason"] == "no workload was set"


def test_gaps_of_one_block_are_one_independent_unit(make_run: Any, meta: dict[str, Any]) -> None:
    itl = document(make_run, meta)["arms"][0]["decode"]["itl_ms"]
    assert (itl["n"], itl["units"]) == (12 * 2 * 8, 12)


def test_units_are_blocks_and_requests_outside_blocks(make_request: Any) -> None:
    at = [(None, None), (None, None), (0, 0), (0, 3), (1, 1), (1, 2), (1, 0)]
    made = [make_request(block=block, slot=slot) for block, slot in at]
    assert [len(unit) for unit in units(made)] == [1, 1, 2, 2, 1], "a step back in the slot is another loop"
    assert sum(len(g) for g in gaps(made)) == sum(len(r.itl_ms) for r in made)


def test_a_word_that_only_the_stricter_level_withholds_says_so() -> None:
    clear = Interval(0.05, 0.02, 0.08, 12)
    assert unsure_reason(clear, 0.01, 0.01) == STRICTER
    assert unsure_reason(Interval(0.05, -0.01, 0.11, 12), 0.01, 0.01) == TOO_WIDE
    assert unsure_reason(Interval(0.0, -0.001, 0.001, 12), 0.01, 0.01) == STRICTER
    assert "noise here hides" in unsure_reason(Interval(0.0, -0.01, 0.01, 12), 0.2, 0.01)


def test_prompts_in_pieces_are_said_beside_the_figures(make_run: Any, meta: dict[str, Any]) -> None:
    def cut(e: Any) -> None:
        if isinstance(e, p.ArmReady) and e.arm == "int4":
            e.coverage = {"prefill": p.Coverage(rows=256, rows_reason="engine.prefill_rows")}
        if isinstance(e, p.Request) and e.arm == "int4":
            e.prefill_pieces = 2

    doc = document(make_run, meta, cut)
    said = "prompts ran in up to 2 pieces of at most 256 rows (engine.prefill_rows): each reads all weights again"
    assert [w for w in doc["warnings"] if "pieces" in w] == [f"int4: {said}"]
    assert doc["arms"][1]["coverage"]["prefill"]["rows"] == 256
    assert all("rows" not in stage for stage in doc["arms"][0]["coverage"].values())
