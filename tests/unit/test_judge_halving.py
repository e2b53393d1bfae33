"""Policies by groups of layers, with answers that are known: what is worth measuring, and who survives a round."""

from __future__ import annotations

import itertools

import pytest

from pdq_tui.judge.halving import Candidate, Result, Unit, candidates, composed, halve, worth_measuring

FORMATS = {"bf16": (0.0, 0.0, 0.0, 200), "int8": (0.001, -4.0, -8.0, 100), "int4": (0.01, 6.0, -16.0, 50)}


def units(worse: dict[tuple[int, str], float] | None = None, groups: int = 3) -> list[Unit]:
    """FORMATS: nats of a group, ms in prefill and in decode, bytes. ``worse``: (group, stage) → factor of its nats."""
    return [
        Unit(
            group=g, stage=stage, format=name, kld=kld * (worse or {}).get((g, stage), 1.0), key=name, bytes=size,
            ms=first if stage == "prefill" else then,
        )
        for g in range(groups)
        for name, (kld, first, then, size) in FORMATS.items()
        for stage in ("prefill", "decode")
    ]  # fmt: skip


def by_key(found: list[Unit]) -> dict[tuple[int, str, str], Unit]:
    return {(u.group, u.stage, u.format): u for u in found}


def test_a_policys_estimate_is_the_sum_of_its_groups_and_shared_bytes_count_once() -> None:
    c = composed([("int8", "int8"), ("int8", "int4"), ("bf16", "bf16")], by_key(units()))
    assert c == Candidate(
        pairs=(("int8", "int8"), ("int8", "int4"), ("bf16", "bf16")),
        kld=pytest.approx(0.001 * 2 + 0.011),
        ms=pytest.approx(-4 - 8 - 4 - 16),
        bytes=100 + 150 + 200,
    )
    assert not c.uniform and composed([("int8", "int8")] * 3, by_key(units())).uniform


def best(found: list[Candidate], most_kld: float, most_bytes: int | None) -> Candidate:
    may = [c for c in found if c.kld <= most_kld and (most_bytes is None or c.bytes <= most_bytes)]
    return min(may, key=lambda c: c.ms)


@pytest.mark.parametrize(
    ("most_kld", "most_bytes"),
    [(1.0, None), (0.033, None), (0.012, None), (0.0, None), (1.0, 300), (0.02, 400)],
)
def test_what_is_made_holds_nearly_the_best_of_all_combinations(
    most_kld: float, most_bytes: int | None
) -> None:
    made = units({(1, "decode"): 5.0, (0, "prefill"): 0.2})
    pairs = list(itertools.product(FORMATS, repeat=2))
    everything = [
        composed(list(combination), by_key(made)) for combination in itertools.product(pairs, repeat=3)
    ]
    found = candidates(made, 3)
    assert len(found) < len(everything) / 5 and len({c.pairs for c in found}) == len(found)
    ideal, ours = (best(each, most_kld, most_bytes) for each in (everything, found))
    span = max(c.ms for c in everything) - min(c.ms for c in everything)
    assert ours.ms - ideal.ms <= 0.2 * span


def test_the_sensitive_group_is_spared_and_the_others_are_not() -> None:
    found = candidates(units({(1, "decode"): 50.0}), 3)
    spared = [c for c in found if c.pairs[1][1] == "bf16" and c.pairs[0][1] == c.pairs[2][1] == "int4"]
    assert spared and min(spared, key=lambda c: c.ms).kld < 0.05


def test_what_is_not_measured_is_named_with_its_reason() -> None:
    found = candidates(units({(1, "decode"): 3.0}), 3)
    may, left = worth_measuring(found, most_kld=0.02, most_bytes=500, places=3)
    others = [c for c in may if not c.uniform]
    assert 1 <= len(others) <= 3 and [c.ms for c in may] == sorted(c.ms for c in may)
    assert all(c.kld <= 0.04 and c.bytes <= 500 for c in may)
    assert len(may) + len(left) == len(found)
    reasons = " ".join(left.values())
    assert "over the limit" in reasons and "times the limit" in reasons
    roomy, rest = worth_measuring(found, most_kld=1.0, most_bytes=None, places=4)
    assert all("in time; 4 are measured" in why for why in rest.values())
    assert min(found, key=lambda c: c.ms) == roomy[0]
    by_time = sorted(found, key=lambda c: (c.ms, c.kld))
    uniform = [c for c in found if c.uniform and c.pairs[0][0] != "bf16"]
    assert uniform and not set(uniform) <= set(by_time[:4]), "one of them is slow"
    assert roomy == [c for c in by_time if c in by_time[:4] or c in uniform], (
        "the winner's rivals are measured"
    )


def test_bytes_that_no_policy_touches_count_against_the_limit_and_are_told() -> None:
    found = candidates(units(), 3)
    least = min(c.bytes for c in found)
    may, left = worth_measuring(found, most_kld=1.0, most_bytes=least + 99, places=9, kept_bytes=100)
    assert not may and all("over the limit of" in why for why in left.values())
    may, _ = worth_measuring(found, most_kld=1.0, most_bytes=least + 100, places=9, kept_bytes=100)
    assert {c.bytes for c in may} == {least}


def result(
    name: str, ms: float, kld: float = 0.005, half: float = 0.001, size: int = 100, bad: int = 0
) -> Result:
    return Result(name=name, kld=kld, kld_ci95=(kld - half, kld + half), nonfinite=bad, bytes=size, e2e_ms=ms)


def test_half_goes_on_the_fastest_first_and_each_other_one_says_why() -> None:
    results = [result(f"c{i}", 100 - i) for i in range(8)]
    kept, out = halve(results, 0.01, None)
    assert kept == ["c7", "c6", "c5", "c4"]
    assert set(out) == {"c0", "c1", "c2", "c3"} and all("c7 took 93.0" in why for why in out.values())


def test_limits_come_before_time() -> None:
    results = [
        result("fast", 1, kld=0.5), result("large", 2, size=10**9), result("broken", 3, bad=2),
        result("unsure", 4, kld=0.0105), result("fine", 50),
    ]  # fmt: skip
    kept, out = halve(results, 0.01, 10**8)
    assert kept == ["unsure", "fine"], "an interval that holds the limit rules nobody out"
    assert out["fast"].startswith("KLD 0.5000 [0.4990, 0.5010], over the limit of 0.01")
    assert (
        "953.7 MiB, over the limit of 95.4 MiB" in out["large"] and out["broken"] == "logits are not finite"
    )


def test_the_fastest_sure_one_goes_on_however_many_unsure_ones_are_faster() -> None:
    results = [result(f"u{i}", i, kld=0.0099, half=0.002) for i in range(10)] + [result("sure", 99)]
    kept, _ = halve(results, 0.01, None)
    assert len(kept) == 7 and kept[-1] == "sure"


def test_three_go_on_where_there_are_no_more() -> None:
    assert halve([result(n, i) for i, n in enumerate("ab")], 0.01, None) == (["a", "b"], {})
    assert len(halve([result(n, i) for i, n in enumerate("abcd")], 0.01, None)[0]) == 3
    assert halve([], 0.01, None) == ([], {})


def test_nobody_goes_on_where_all_are_over_the_limit() -> None:
    kept, out = halve([result("a", 1, kld=0.5), result("b", 2, kld=0.6)], 0.01, None)
    assert kept == [] and set(out) == {"a", "b"}


def test_one_window_has_no_interval_and_counts_by_its_mean() -> None:
    one = Result(name="a", kld=0.02, kld_ci95=None, nonfinite=0, bytes=1, e2e_ms=1.0)
    assert halve([one], 0.01, None)[1] == {"a": "KLD 0.0200, over the limit of 0.01"}
