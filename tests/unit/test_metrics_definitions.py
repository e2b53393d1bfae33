"""Each metric against its definition, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdq_tui.core import protocol as p
from pdq_tui.core.analysis import arm_stats, counts, drift
from pdq_tui.core.metrics import METRICS, RATIO_METRICS, format_bytes, of

DEVICE = p.DeviceInfo(
    kind="cpu", name="x", read_peak_gbps=20.0, compute_peak_tflops={"bf16": 2.0, "int8": 4.0}
)


@pytest.mark.parametrize(("n", "tpot"), [(1, None), (2, 10.0), (11, 10.0)])
def test_T04_tpot_is_over_n_minus_one(make_request: Any, n: int, tpot: float | None) -> None:
    r = make_request(prefill=100.0, steps=(10.0,) * (n - 1))
    assert of("tpot_ms", r, None, None) == tpot
    e2e, ttft = of("e2e_ms", r, None, None), of("ttft_ms", r, None, None)
    assert e2e == ttft + (n - 1) * (tpot or 0.0)


def test_T04_a_one_token_answer_has_no_decode_figures_and_says_why(make_request: Any) -> None:
    r = make_request(prefill=100.0, steps=())
    # Even where an engine would send a 0 for it.
    r.tpot_ms, r.decode_ms = 0.0, 0.0
    for metric in ("tpot_ms", "decode_step_ms", "decode_tokens_per_s", "itl_ms", "bandwidth_gbps", "mbu"):
        assert of(metric, r, DEVICE, None) is None
    stats = arm_stats([r], DEVICE, None)
    assert stats["tpot_ms"].reason == "needs at least two output tokens"
    assert stats["ttft_ms"].median == 100.0


def test_T04_prefill_rate_counts_real_tokens(make_request: Any) -> None:
    """Two prompts of 3 and 7 tokens, left-padded to 14 in all: 10 are real, 4 are padding."""
    r = make_request(prefill=100.0, batch=2, prompt_tokens=10, padded_tokens=4)
    assert of("prefill_tokens_per_s", r, None, None) == pytest.approx(100.0)
    assert r.prompt_tokens + r.padded_tokens == 14


def test_T04_every_metric_carries_its_formula() -> None:
    for id_, m in METRICS.items():
        assert m.id == id_ and m.name and m.short and m.missing
        assert len(m.formula) > 10 and len(m.why) > 10, id_
        assert m.better in ("lower", "higher", None)
    assert set(RATIO_METRICS) <= set(METRICS)
    assert all(METRICS[m].better for m in RATIO_METRICS)


def test_the_ids_that_other_rooms_rely_on() -> None:
    assert set(METRICS) >= {
        "ttft_ms",
        "prefill_ms",
        "prefill_tokens_per_s",
        "prefill_mfu",
        "prefill_explained",
        "tpot_ms",
        "decode_step_ms",
        "itl_ms",
        "decode_tokens_per_s",
        "bytes_per_step",
        "bandwidth_gbps",
        "mbu",
        "decode_explained",
        "e2e_ms",
        "handoff_ms",
        "gap_ms",
        "prefill_peak_bytes",
        "decode_peak_bytes",
        "steady_bytes",
    }


def test_decode_rate_counts_the_whole_batch(make_request: Any) -> None:
    r = make_request(steps=(10.0,) * 10, batch=4)
    assert of("decode_tokens_per_s", r, None, None) == pytest.approx(4 * 10 / 0.1)
    r.output_tokens = [11, 3, 1, 1]  # natural stop: what was really made
    assert of("decode_tokens_per_s", r, None, None) == pytest.approx((10 + 2) / 0.1)


def test_bandwidth_and_its_share(make_request: Any) -> None:
    r = make_request(steps=(10.0,) * 4, bytes_per_step=100_000_000)
    assert of("bandwidth_gbps", r, DEVICE, None) == pytest.approx(10.0)
    assert of("mbu", r, DEVICE, None) == pytest.approx(0.5)
    assert of("mbu", r, p.DeviceInfo(kind="cpu", name="x"), None) is None
    assert of("mbu", r, None, None) is None


def test_shares_above_one_are_shown_as_they_are(make_request: Any) -> None:
    r = make_request(steps=(1.0,) * 4, bytes_per_step=100_000_000, decode_bound_ms=2.5)
    assert of("mbu", r, DEVICE, None) == pytest.approx(5.0)
    assert of("decode_explained", r, DEVICE, None) == pytest.approx(2.5)
    assert METRICS["mbu"].text(5.0) == "500.0 %"


def test_mfu_sums_each_dtype_against_its_own_peak(make_request: Any) -> None:
    r = make_request(prefill=100.0, prefill_flops={"bf16": 4e10, "int8": 8e10})
    assert of("prefill_mfu", r, DEVICE, None) == pytest.approx((20.0 + 20.0) / 100.0)
    r.prefill_flops["fp8"] = 1.0  # a peak that was not measured
    assert of("prefill_mfu", r, DEVICE, None) is None


def test_a_stage_of_no_duration_has_no_rate(make_request: Any) -> None:
    r = make_request(prefill=0.0, steps=(0.0, 0.0))
    for metric in (
        "prefill_tokens_per_s",
        "prefill_mfu",
        "prefill_explained",
        "decode_tokens_per_s",
        "bandwidth_gbps",
    ):
        assert of(metric, r, DEVICE, None) is None


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("ttft_ms", 84.12, "84.1 ms"),
        ("tpot_ms", 11.918, "11.92 ms"),
        ("tpot_ms", 9.3849, "9.38 ms"),
        ("e2e_ms", 1321.4, "1321 ms"),
        ("prefill_tokens_per_s", 48_712.0, "48.7k tok/s"),
        ("prefill_mfu", 0.4123, "41.2 %"),
        ("bytes_per_step", 5_476_083_302, "5.1 GiB"),
        ("gap_ms", 0.0412, "0.0412 ms"),
        ("ttft_ms", 0.0, "0.00 ms"),
        ("ttft_ms", None, "n/a"),
        ("mbu", None, "n/a"),
    ],
)
def test_numbers_as_people_read_them(metric: str, value: float | None, text: str) -> None:
    assert METRICS[metric].text(value) == text


def test_bytes_as_people_read_them() -> None:
    assert [format_bytes(v) for v in (0, 1023, 1024, 4_402_341_478, -1_048_576, 3e15)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "4.1 GiB",
        "-1.0 MiB",
        "2728.5 TiB",
    ]


# -- an arm's requests -------------------------------------------------------------------------------------------------


def test_what_does_not_count_is_counted(make_request: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"warmup": True, "kind": "warmup"},
        {"first_use": True},
        {"cancelled": True},
        {"valid": False, "invalid_reason": "NaN"},
        {"control": True},
        {"kind": "solo"},
    ]
    requests = [make_request(prefill=100.0 if not k else 9999.0, **k) for k in kinds]
    c = counts(requests)
    assert (c.used, c.warmup, c.first_use, c.cancelled, c.invalid, c.control, c.solo) == (2, 1, 1, 1, 1, 1, 1)
    s = arm_stats(requests, None, None)
    assert s["ttft_ms"].median == 100.0 and s["ttft_ms"].n == 2


def test_memory_comes_from_the_solo_passes(make_request: Any) -> None:
    shared = [make_request(decode_peak_bytes=900) for _ in range(3)]
    solo = make_request(decode_peak_bytes=400, kind="solo")
    assert arm_stats(shared, None, None)["decode_peak_bytes"].median == 900
    s = arm_stats([solo, *shared], None, None)
    assert s["decode_peak_bytes"].median == 400 and s["ttft_ms"].n == 3


def test_T06_unequal_output_lengths_are_said_beside_the_figure(make_request: Any) -> None:
    s = arm_stats([make_request(steps=(10.0,) * n) for n in (4, 9)], None, None)
    assert s["e2e_ms"].note == "requests made 5 to 10 tokens"
    assert s["tpot_ms"].note is None


def test_nothing_measured_is_null_with_a_reason() -> None:
    s = arm_stats([], DEVICE, None)
    assert set(s) == set(METRICS)
    assert all(x.median is None and x.n == 0 and x.reason for x in s.values())


def test_T09_drift_is_last_third_against_first(make_request: Any) -> None:
    requests = [make_request(prefill=100.0 + i) for i in range(9)]
    assert drift(requests)["ttft_ms"] == pytest.approx(107 / 101 - 1)
    assert drift(requests[:5])["ttft_ms"] is None


def test_non_finite_values_never_reach_a_summary(make_request: Any) -> None:
    requests = [make_request(prefill=v) for v in (100.0, math.nan, math.inf)]
    s = arm_stats(requests, DEVICE, None)["ttft_ms"]
    assert (s.median, s.n) == (100.0, 1)
