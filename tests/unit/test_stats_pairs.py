"""Paired blocks from requests: symmetry, drift, controls, what may not be paired, planned looks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdq_tui.core import protocol as p
from pdq_tui.core.analysis import noise_floor, ratios
from pdq_tui.core.metrics import RATIO_METRICS
from pdq_tui.core.pairs import Seen, blocks_of, differences, words
from pdq_tui.core.stats import ALPHA, Ratio
from pdq_tui.core.workload import block_turns


def words_of(found: dict[str, list[float]]) -> dict[str, str]:
    return words(Seen(found, {m: [] for m in found}, {}, 0.01), ALPHA)


def by_metric(rows: list[Ratio]) -> dict[str, Ratio]:
    return {r.metric: r for r in rows}


def block(values: list[tuple[str, float]], number: int = 0, **more: Any) -> list[p.Request]:
    return [
        p.Request(
            request=number * 100 + slot,
            arm=arm,
            policy=arm,
            policy_digest=arm,
            kind="blocks",
            block=number,
            slot=slot,
            e2e_ms=value,
            output_tokens=[4],
            **more,
        )
        for slot, (arm, value) in enumerate(values)
    ]


def test_the_block_difference_is_the_formula() -> None:
    d = differences(blocks_of(block([("A", 10), ("B", 20), ("B", 30), ("A", 15)])), "e2e_ms", "A", "B")
    expected = 0.5 * (math.log(20) + math.log(30)) - 0.5 * (math.log(10) + math.log(15))
    assert d == [pytest.approx(expected)]


@given(st.lists(st.tuples(*[st.floats(1, 1e4)] * 4), min_size=2, max_size=12))
@settings(max_examples=50)
def test_ratios_are_antisymmetric(values: list[tuple[float, float, float, float]]) -> None:
    requests = [
        r for n, (a, b, c, d) in enumerate(values) for r in block([("A", a), ("B", b), ("B", c), ("A", d)], n)
    ]
    there = by_metric(ratios(requests, "A", ["A", "B"], metrics=("e2e_ms",)))["e2e_ms"]
    back = by_metric(ratios(requests, "B", ["A", "B"], metrics=("e2e_ms",)))["e2e_ms"]
    assert there.ratio is not None and back.ratio is not None
    assert there.ratio * back.ratio == pytest.approx(1)
    opposite = {"better": "worse", "worse": "better", "same": "same", "unsure": "unsure"}
    assert there.blocks == back.blocks == len(values)
    if there.judgement in ("better", "worse") and back.judgement != "unsure":
        assert back.judgement == opposite[there.judgement]


@given(st.floats(-0.02, 0.02), st.floats(0.5, 2.0), st.integers(0, 50))
@settings(max_examples=50)
def test_a_geometric_drift_cancels_exactly_in_abba(rate: float, ratio: float, seed: int) -> None:
    requests, n = [], 0
    for number in range(5):
        values = []
        for turn in block_turns(["A", "B"], number, seed, control=False):
            values.append((turn.arm, 100 * (ratio if turn.arm == "B" else 1) * math.exp(rate * n)))
            n += 1
        requests += block(values, number)
    d = differences(blocks_of(requests), "e2e_ms", "A", "B")
    assert d == [pytest.approx(math.log(ratio), abs=1e-9)] * 5


def test_T09_equal_policies_on_a_heating_machine_are_the_same(make_run: Any) -> None:
    """Steps get 1 % slower for each second of load: half a second a request."""
    run = make_run({"bf16": (100, 50), "copy": (100, 50)}, blocks=12, drift=lambda n: 0.005 * n)
    rows = by_metric(ratios(run.requests, "bf16", ["bf16", "copy"]))
    assert {m: r.judgement for m, r in rows.items()} == dict.fromkeys(rows, "same")
    # The same machine, one arm after the other, would have been called worse by far.
    half = len(run.requests) // 2
    first, last = run.requests[4], run.requests[4 + half]
    assert last.e2e_ms / first.e2e_ms > 1.1


def test_T09_a_real_difference_is_seen_through_the_drift(make_run: Any) -> None:
    run = make_run({"bf16": (100, 50), "fast": (95, 47)}, blocks=12, drift=lambda n: 0.005 * n)
    rows = by_metric(ratios(run.requests, "bf16", ["bf16", "fast"]))
    assert rows["e2e_ms"].judgement == "better"
    assert rows["e2e_ms"].ratio == pytest.approx((95 + 8 * 47) / (100 + 8 * 50), abs=0.004)
    assert rows["decode_tokens_per_s"].judgement == "better"


def test_the_control_sets_the_noise_floor_and_the_threshold(make_run: Any) -> None:
    quiet = make_run({"bf16": (100, 50), "x": (101.5, 50.75)}, noise=0.001)
    noisy = make_run({"bf16": (100, 50), "x": (101.5, 50.75)}, noise=0.15)
    rows = by_metric(ratios(quiet.requests, "bf16", ["bf16", "x"]))
    assert rows["e2e_ms"].judgement == "worse"
    floors = noise_floor(noisy.requests, "bf16")
    assert floors["ttft_ms"] is not None and floors["ttft_ms"] > 0.015
    loud = by_metric(ratios(noisy.requests, "bf16", ["bf16", "x"]))["ttft_ms"]
    assert loud.threshold == pytest.approx(math.log1p(floors["ttft_ms"]))
    assert loud.noise_floor == pytest.approx(floors["ttft_ms"])
    assert loud.judgement != "worse"


def test_without_a_control_there_is_no_noise_floor(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (100, 50)}, control=False)
    assert set(noise_floor(run.requests, "A").values()) == {None}
    row = ratios(run.requests, "A", ["A", "B"])[0]
    assert row.noise_floor is None and row.threshold == pytest.approx(math.log(1.01))


def test_three_arms_keep_their_pairs_when_one_is_invalid(make_run: Any) -> None:
    run = make_run({"bf16": (100, 50), "int8": (90, 40), "nan": (90, 40)}, blocks=4)
    requests = [
        msgspec.structs.replace(r, valid=False, invalid_reason="NaN") if r.arm == "nan" else r
        for r in run.requests
    ]
    rows = ratios(requests, "bf16", ["bf16", "int8", "nan"], metrics=("e2e_ms",))
    assert [(r.arm, r.judgement, r.blocks) for r in rows] == [("int8", "better", 4), ("nan", "unsure", 0)]
    assert rows[1].ratio is None and rows[1].reason == "0 blocks"


@pytest.mark.parametrize(
    "spoil", [{"first_use": True}, {"cancelled": True}, {"valid": False}, {"warmup": True}, {"e2e_ms": None}]
)
def test_a_block_with_a_slot_that_does_not_count_is_left_out(make_run: Any, spoil: dict[str, Any]) -> None:
    run = make_run({"A": (100, 50), "B": (90, 40)}, blocks=3, control=False)
    first = next(i for i, r in enumerate(run.requests) if r.block == 1)
    requests = list(run.requests)
    requests[first] = msgspec.structs.replace(requests[first], **spoil)
    assert ratios(requests, "A", ["A", "B"], metrics=("e2e_ms",))[0].blocks == 2


def test_two_starts_of_the_loop_are_never_paired_with_each_other() -> None:
    once = block([("A", 10), ("B", 20)], 0)  # stopped in the middle of its first block
    again = block([("B", 40), ("A", 10), ("A", 10), ("B", 40)], 0)
    assert differences(blocks_of(once + again), "e2e_ms", "A", "B") == [pytest.approx(math.log(4))]


def test_only_the_policy_an_arm_follows_now_is_paired() -> None:
    old = [r for n in range(3) for r in block([("A", 10), ("B", 50), ("B", 50), ("A", 10)], n)]
    for r in old:
        if r.arm == "B":
            r.policy_digest = "earlier"
    new = [r for n in range(3, 6) for r in block([("A", 10), ("B", 20), ("B", 20), ("A", 10)], n)]
    row = ratios(old + new, "A", ["A", "B"], metrics=("e2e_ms",))[0]
    assert row.blocks == 3 and row.ratio == pytest.approx(2)


@pytest.mark.parametrize(("blocks", "reason"), [(0, "0 blocks"), (1, "1 block")])
def test_fewer_than_two_blocks_are_unsure(make_run: Any, blocks: int, reason: str) -> None:
    run = make_run({"A": (100, 50), "B": (90, 40)}, blocks=blocks, control=False)
    row = ratios(run.requests, "A", ["A", "B"])[0]
    assert (row.judgement, row.reason, row.ci95) == ("unsure", reason, None)


def test_live_words_appear_only_at_the_planned_looks(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (50, 25)}, blocks=21)
    words = {}
    for n in (2, 9, 10, 15, 20, 21):
        some = [r for r in run.requests if r.block is None or r.block < n]
        row = by_metric(ratios(some, "A", ["A", "B"], provisional=True))["e2e_ms"]
        words[n] = (row.judgement, row.provisional, row.decided_at)
        assert row.ratio is not None and row.ci95 is not None
        if n < 10:
            assert row.reason == f"{n} of 10 blocks"
    assert words == {
        2: ("unsure", True, None),
        9: ("unsure", True, None),
        10: ("better", False, 10),
        15: ("better", False, 10),
        20: ("better", False, 10),
        21: ("better", False, 10),
    }


def looped(differences_: list[float]) -> Ratio:
    requests = [
        r
        for n, d in enumerate(differences_)
        for r in block([("A", 100), ("B", 100 * math.exp(d)), ("B", 100 * math.exp(d)), ("A", 100)], n)
    ]
    return ratios(requests, "A", ["A", "B"], provisional=True, metrics=("e2e_ms",))[0]


def test_a_live_word_that_the_present_figures_contradict_is_taken_back() -> None:
    early = [-0.05 + 0.001 * (-1) ** n for n in range(10)]
    assert (looped(early).judgement, looped(early).decided_at) == ("better", 10)
    row = looped(early + [0.05] * 10)  # by now it is even
    assert row.ci95 is not None and row.ci95[0] < 1 < row.ci95[1]
    assert (row.judgement, row.decided_at) == ("unsure", None)
    assert row.reason == "better at 10 blocks, but no longer at 20"


def test_after_the_last_look_nothing_is_promised_anymore() -> None:
    even = [0.05 * (-1) ** n for n in range(45)]
    assert (looped(even[:12]).provisional, looped(even[:12]).reason) == (True, "12 of 20 blocks")
    row = looped(even)
    assert (row.judgement, row.provisional, row.decided_at) == ("unsure", False, None)
    assert row.reason == "the interval is too wide"


def test_an_endless_loop_is_judged_at_the_planned_looks_whoever_asks(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (50, 25)}, blocks=9, control=False)
    loop = [msgspec.structs.replace(r, kind="loop") if r.block is not None else r for r in run.requests]
    row = by_metric(ratios(loop, "A", ["A", "B"]))["e2e_ms"]
    assert (row.judgement, row.reason) == ("unsure", "9 of 10 blocks")
    assert row.ratio == pytest.approx(0.5, abs=0.01)


def test_an_eager_gpu_run_gives_no_verdict(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (50, 25)})
    requests = [msgspec.structs.replace(r, eager_launch_bound=True) for r in run.requests]
    rows = ratios(requests, "A", ["A", "B"])
    assert {r.judgement for r in rows} == {"unsure"} and rows[0].reason == "eager: launch-bound"
    assert rows[0].ratio is not None  # the figure is shown


def test_a_model_on_several_devices_gives_no_verdict(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (50, 25)})
    requests = [msgspec.structs.replace(r, eager_launch_bound=True, devices=2) for r in run.requests]
    rows = ratios(requests, "A", ["A", "B"])
    assert {(r.judgement, r.reason) for r in rows} == {("unsure", "layers on 2 devices")}
    assert rows[0].ratio is not None


def test_conditions_told_from_outside_make_it_unsure(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (50, 25)})
    told = {"B": dict.fromkeys(RATIO_METRICS, "clocks")}
    rows = ratios(run.requests, "A", ["A", "B"], conditions=told)
    assert {(r.judgement, r.reason) for r in rows} == {("unsure", "clocks")}
    rows = ratios(run.requests, "A", ["A", "B"], conditions={"B": {"tpot_ms": "clocks"}})
    assert {r.metric for r in rows if r.judgement == "unsure"} == {"tpot_ms"}


def test_a_rate_is_no_second_hypothesis_beside_its_time() -> None:
    """Of TTFT, prefill and TPOT the last is judged at α/1 … α/3; two rates more would make it α/5."""
    seen = {m: [0.02, 0.021, 0.019, 0.0205] for m in ("ttft_ms", "prefill_ms", "tpot_ms")}
    both = seen | {"prefill_tokens_per_s": [-d for d in seen["prefill_ms"]]}
    both |= {"decode_tokens_per_s": [-d for d in seen["tpot_ms"]]}
    alone, mirrored = words_of(seen), words_of(both)
    assert {m: mirrored[m] for m in seen} == alone
    assert mirrored["decode_tokens_per_s"] == mirrored["tpot_ms"] == "worse"


def test_the_reference_that_differs_from_itself_by_its_place_widens_the_threshold() -> None:
    requests = []
    for n in range(10):
        wobble = 1 + 0.002 * (-1) ** n
        turns = [("A", 100.0), ("B", 104 * wobble), ("B", 104 * wobble), ("A", 100.0)]
        one = block(turns, n)
        again = block([("A", 105 * wobble), ("A", 105 * wobble)], n)  # 5 % slower than itself
        for slot, r in enumerate(again, start=4):
            r.control, r.slot = True, slot
        requests += one + again
    row = ratios(requests, "A", ["A", "B"], metrics=("e2e_ms",))[0]
    assert row.noise_floor == pytest.approx(0.05, abs=0.005)
    assert row.judgement == "unsure"
    assert row.threshold is not None and row.threshold > math.log(row.ratio or 0)


def test_T06_unequal_lengths_make_e2e_unsure_and_leave_the_stages(make_run: Any) -> None:
    run = make_run({"A": (100, 50), "B": (50, 25)})
    requests = [
        msgspec.structs.replace(r, output_tokens=[5 + (r.slot or 0) % 2], stop="natural")
        if r.arm == "B"
        else r
        for r in run.requests
    ]
    rows = by_metric(ratios(requests, "A", ["A", "B"]))
    assert (rows["e2e_ms"].judgement, rows["e2e_ms"].reason) == ("unsure", "output counts differ")
    assert rows["ttft_ms"].judgement == rows["tpot_ms"].judgement == "better"


def test_equal_arms_with_a_control_give_few_false_alarms(make_run: Callable[..., Any]) -> None:
    alarms = 0
    for seed in range(40):
        run = make_run(
            {"A": (100, 50), "B": (100, 50)}, blocks=10, steps=2, noise=0.03, seed=seed, solo=False
        )
        rows = ratios(run.requests, "A", ["A", "B"])
        alarms += any(r.judgement in ("better", "worse") for r in rows)
    assert alarms <= 4
