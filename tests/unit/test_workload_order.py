"""The workload's digest and the order of the arms."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.workload import Workload, block_turns, turns

ARMS = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@given(ARMS, st.integers(0, 50), st.integers(0, 1000), st.booleans())
def test_each_contender_stands_at_the_same_mean_place(
    arms: list[str], block: int, seed: int, control: bool
) -> None:
    found = block_turns(arms, block, seed, control)
    assert [t.slot for t in found] == list(range(len(found)))
    assert [(t.arm, t.control) for t in found] == [(t.arm, t.control) for t in reversed(found)]
    places: dict[tuple[str, bool], list[int]] = {}
    for t in found:
        places.setdefault((t.arm, t.control), []).append(t.slot)
    middle = (len(found) - 1) / 2
    assert all(len(p) == 2 and sum(p) / 2 == middle for p in places.values())
    assert set(places) == {(a, False) for a in arms} | ({(arms[0], True)} if control else set())


def test_the_order_is_made_by_the_seed() -> None:
    one = [(t.arm, t.control) for t in itertools.islice(turns(["A", "B"], 7), 120)]
    again = [(t.arm, t.control) for t in itertools.islice(turns(["A", "B"], 7), 120)]
    other = [(t.arm, t.control) for t in itertools.islice(turns(["A", "B"], 8), 120)]
    assert one == again != other


def test_both_orders_come_up() -> None:
    found = {"".join(t.arm for t in block_turns(["A", "B"], n, 3, control=False)) for n in range(40)}
    assert found == {"ABBA", "BAAB"}


def test_three_arms_are_mirrored() -> None:
    order = "".join(t.arm for t in block_turns(["A", "B", "C"], 0, 1, control=False))
    assert order[:3] == order[3:][::-1] and set(order) == set("ABC")


def test_blocks_are_numbered_without_a_gap() -> None:
    found = list(itertools.islice(turns(["A", "B"], 0), 18))
    assert [t.block for t in found] == [0] * 6 + [1] * 6 + [2] * 6


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 64},
        {"prompt_tokens": None},
        {"output_tokens": 65},
        {"batch": 2},
        {"prompts": "long"},
        {"texts": ("x",)},
        {"chat_template": "none"},
        {"stop": "natural"},
        {"seed": 1},
        {"distinct": 4},
    ],
)
def test_other_work_has_another_digest(change: dict[str, object]) -> None:
    base = Workload()
    other = msgspec.structs.replace(base, **change)
    assert base.digest == Workload().digest != other.digest and len(base.digest) == 12
