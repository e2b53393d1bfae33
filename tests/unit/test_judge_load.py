"""Points of a load, and the knee on queueing curves whose knee is known."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from pdq_tui.core.protocol import Served, ServeEnded
from pdq_tui.judge import load


def served(number: int, arrival: float, ttft: float, tpot: float = 10.0, **more: Any) -> Served:
    e2e = ttft + 9 * tpot
    fields: dict[str, Any] = {
        "arm": "x", "number": number, "arrival_s": arrival, "prompt_tokens": 8, "output_tokens": 10, "ttft_ms": ttft,
        "tpot_ms": tpot, "e2e_ms": e2e, "queue_ms": 0.0,
    }  # fmt: skip
    return Served(**(fields | more))


def ended(**more: Any) -> ServeEnded:
    fields: dict[str, Any] = {
        "arm": "x", "engine": "e", "attention": "a", "scheduler": "s",
        "tokens": {"prefill/prefill": 80, "decode/decode": 90}, "seconds": 10.0, "busy_s": 20.0,
    }  # fmt: skip
    return ServeEnded(**(fields | more))


def made(
    rows: list[Served], concurrency: int | None = 2, rate: float | None = None, **more: Any
) -> load.Point:
    return load.point(
        rows, ended(**more), concurrency=concurrency, rate=rate, ttft_target=100.0, tpot_target=20.0
    )


def test_a_point_counts_what_arrived_after_the_first_round() -> None:
    rows = [served(0, 0.0, 999.0, warmup=True)]
    rows += [served(i, i, 50.0 if i < 9 else 150.0, 10.0) for i in range(1, 11)]
    p = made(rows)
    assert p.requests == 10 and p.good == 0.8 and p.achieved == 2.0
    assert p.throughput == pytest.approx(10 / (9 + 0.24)) and p.tokens_per_s == pytest.approx(
        10 * p.throughput
    )
    assert p.ttft_ms["p50"] == 50.0 and p.ttft_ms["p99"] is None and "p99_reason" in p.ttft_ms


def test_who_fails_or_is_given_up_met_no_target() -> None:
    rows = [served(i, i, 50.0) for i in range(8)] + [served(8, 8.0, 50.0, error="lost", e2e_ms=None)]
    p = made(rows, cancelled=1)
    assert (p.requests, p.failed, p.good) == (9, 2, 0.8)


def test_tokens_under_the_wrong_view_flag_the_point() -> None:
    p = made([served(0, 0.0, 50.0)], tokens={"prefill/prefill": 8, "decode/prefill": 3})
    assert p.flagged == "3 decode tokens ran under the prefill view"
    assert made([served(0, 0.0, 50.0)]).flagged is None


def test_nothing_served_is_no_figure() -> None:
    p = made([], seconds=0.0, busy_s=0.0)
    assert (p.throughput, p.achieved, p.good, p.growth_ms_s) == (None, None, None, None)
    assert p.ttft_ms["p50"] is None and p.ttft_ms["reason"]


# -- curves ------------------------------------------------------------------------------------------------------------


def curve(
    sizes: tuple[int, ...],
    alone_s: float,
    most: float,
    noise: float = 0.0,
    seed: int = 0,
    target_s: float = 1.0,
) -> list[load.Point]:
    """A closed queueing system by its asymptotic bounds: throughput min(c / alone, most), time c / throughput."""
    rng, points = random.Random(seed), []
    for c in sizes:
        x = min(c / alone_s, most) * (1 + rng.gauss(0, noise))
        ttft = (c / x) * 1e3
        rows = [served(i, i / x, ttft * (1 + rng.gauss(0, 0.02)), 10.0) for i in range(30)]
        p = load.point(rows, ended(), concurrency=c, rate=None, ttft_target=target_s * 1e3, tpot_target=20.0)
        points.append(msg_replace(p, throughput=x))
    return points


def msg_replace(p: load.Point, **more: Any) -> load.Point:
    return msgspec.structs.replace(p, **more)


SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("knee_at", [4, 8, 16])
@pytest.mark.parametrize("seed", range(5))
def test_the_knee_of_a_known_curve(knee_at: int, seed: int) -> None:
    """Alone a request takes 0.5 s; the server saturates at ``knee_at``; the target is met up to there, by a tenth."""
    points = curve(SIZES, 0.5, knee_at / 0.5, noise=0.02, seed=seed, target_s=0.55)
    found = load.knee("x", points)
    assert (found.concurrency, found.reached) == (knee_at, True)
    assert found.kneedle == knee_at
    assert found.goodput == pytest.approx(knee_at / 0.5, rel=0.1) and "closed loop" in found.goodput_method


def test_a_knee_beyond_what_was_tried_is_said() -> None:
    points = curve((1, 2, 4), 0.5, 100.0, target_s=0.6)
    found = load.knee("x", points)
    assert (found.concurrency, found.reached, found.kneedle, found.stopped) == (4, False, None, None)


def test_targets_that_nobody_meets_have_no_knee() -> None:
    found = load.knee("x", curve(SIZES, 0.5, 8.0, target_s=0.1))
    assert (found.concurrency, found.goodput) == (None, None)


def test_an_open_loop_rate_that_met_the_targets_is_the_goodput() -> None:
    points = curve(SIZES, 0.5, 8.0, target_s=0.6)
    rows = [served(i, i / 5, 50.0) for i in range(30)]
    for rate in (5.0, 6.0):
        points.append(load.point(rows, ended(), concurrency=None, rate=rate, ttft_target=100, tpot_target=20))
    found = load.knee("x", points)
    assert found.goodput == 6.0 and "arrival rate" in found.goodput_method


def test_arrivals_that_all_miss_the_targets_have_no_goodput_whatever_the_closed_loop_says() -> None:
    points = curve(SIZES, 0.5, 8.0, target_s=0.6)
    rows = [served(i, i / 5, 500.0) for i in range(30)]
    points.append(load.point(rows, ended(), concurrency=None, rate=5.0, ttft_target=100, tpot_target=20))
    found = load.knee("x", points)
    assert found.concurrency == 4 and found.goodput is None and "5.00 requests/s" in found.goodput_method


@pytest.mark.parametrize("seed", range(20))
def test_saturation_is_seen_and_not_before(seed: int) -> None:
    points = curve(SIZES, 0.5, 8.0, noise=0.01, seed=seed)  # saturates at 4
    stops = [n for n in range(1, len(points) + 1) if load.saturated(points[:n])]
    assert stops and stops[0] == 5, "after two rises that brought nothing: at 16"


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_that_grows_is_overload_and_a_noisy_wait_is_not(seed: int) -> None:
    rng = random.Random(seed)

    def at(growth: float) -> load.Point:
        rows = [served(i, i / 4, max(1.0, 100 + growth * i / 4 + rng.gauss(0, 20))) for i in range(40)]
        return made(rows, concurrency=None, rate=4.0)

    assert load.overloaded(at(60.0)) and not load.overloaded(at(0.0))


def test_equal_memory_gives_the_smaller_weights_more_cache() -> None:
    large = load.kv_tokens(weights=1000, largest=1000, bytes_per_token=10, tokens=50)
    small = load.kv_tokens(weights=600, largest=1000, bytes_per_token=10, tokens=50)
    assert (large, small) == (50, 90)
