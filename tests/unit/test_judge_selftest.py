"""The judge on noise that real machines made: how often it is wrong about equal arms, and what it sees of unequal ones."""

from __future__ import annotations

import random

import pytest
from noise_trials import LONG_SOAK, PRIMARY, SHORT_SOAK, SIDES, drifts, signs, words
from recorded_noise import PIECE, load, names, replayed, stretch, wilson

from pdq_tui.core.stats import BETTER, WORSE

SEEDS = range(1000)
#: Of wrong words: at most this share, and its interval's upper end.
MOST, MOST_UPPER = 0.05, 0.07
#: Blocks after which 3 % show through the noise of ``calm``: seven minutes of its short requests.
MANY = 400


def kept_below(wrong: int, n: int) -> bool:
    return wrong / n <= MOST and wilson(wrong, n)[1] <= MOST_UPPER


@pytest.mark.parametrize("name", names())
def test_equal_arms_are_rarely_called_different(name: str) -> None:
    """Neither by the primary metric nor by any."""
    said, any_metric = words(load(name), 1.0, SEEDS, 10)
    assert kept_below(said[BETTER] + said[WORSE], len(SEEDS)) and kept_below(any_metric, len(SEEDS)), said


def test_three_percent_are_found() -> None:
    said, _ = words(load("calm"), 1.03, range(150), MANY, (PRIMARY,))
    assert said[WORSE] >= 0.97 * 150 and not said[BETTER], said


def test_where_the_noise_is_larger_than_a_difference_nothing_is_said_of_it() -> None:
    said, _ = words(load("bursts"), 1.03, range(200), 10)
    assert said["unsure"] >= 190 and said[BETTER] + said[WORSE] <= 10, said


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["calm", "crowded"])
def test_the_side_of_a_break_even_is_right(name: str, side: str) -> None:
    for share, found in signs(load(name), side, range(400), 10).items():
        assert found.right >= 0.95 * 400, (share, found)
        assert found.said >= 160, "and it is said, most often"


@pytest.mark.parametrize("side", SIDES)
def test_a_side_that_is_said_is_right_in_any_noise(side: str) -> None:
    for share, found in signs(load("bursts"), side, range(400), 10).items():
        assert kept_below(found.said_wrong, 400), (share, found)


@pytest.mark.parametrize("name", names())
def test_a_flat_soak_is_rarely_called_a_drift(name: str) -> None:
    assert kept_below(drifts(load(name), 0.0, SEEDS, SHORT_SOAK), len(SEEDS))


def test_a_planted_drift_shows_through_recorded_noise() -> None:
    assert drifts(load("calm"), 0.5, range(100), LONG_SOAK) >= 97


def test_a_replay_keeps_what_hangs_together_and_multiplies_by_what_was_asked() -> None:
    recording = load("crowded")
    times = list(zip(recording.prefill_us, recording.step_us, strict=True))
    for seed in range(5):
        found = stretch(recording, 2 * PIECE, random.Random(seed))
        start = times.index((round(found[0][0] * 1e3), round(found[0][1] * 1e3)))
        there = [times[(start + i) % len(times)] for i in range(PIECE)]
        assert [(round(a * 1e3), round(b * 1e3)) for a, b in found[:PIECE]] == there
    one, other = (replayed(recording, {"A": (1.0, 1.0), "B": (f, 1.0)}, seed=3, blocks=4) for f in (1.0, 2.0))
    assert [r.arm for r in one] == [r.arm for r in other] and sum(r.control for r in one) == 8
    for a, b in zip(one, other, strict=True):
        assert b.prefill_ms == pytest.approx((a.prefill_ms or 0) * (2.0 if a.arm == "B" else 1.0))
    ends = [r.host_end_ns for r in one]
    assert [r.host_start_ns for r in one[1:]] == ends[:-1], "one after the other on a clock of its own"


def test_wilson_intervals_are_those_of_the_formula() -> None:
    assert wilson(50, 1000) == pytest.approx((0.0381, 0.0653), abs=2e-4)
    assert wilson(0, 100)[0] == 0.0 and wilson(100, 100)[1] == 1.0
