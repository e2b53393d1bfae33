"""What an abnormal request has to end in, and what an answer to it is worth."""

from __future__ import annotations

from typing import Any

import pytest

from pdq_tui.core.protocol import Answered, Ask, Question, decode_command, encode
from pdq_tui.core.workload import MOST_TOKENS
from pdq_tui.judge import abnormal as a

CLEAN = [5, 6, 7, 8]


def made(**more: Any) -> dict[str, a.Case]:
    known: dict[str, Any] = {
        "max_positions": 256, "capacity_tokens": 5000, "seconds_a_token": 1e-4, "longest_s": 60.0,
    }  # fmt: skip
    return {c.name: c for c in a.cases(16, 0, **(known | more))}


def answer(state: str, reason: str | None = None, tokens: list[int] | None = None) -> Answered:
    return Answered(
        id="x",
        arm="x",
        policy="x",
        policy_digest="d",
        state=state,
        reason=reason,
        tokens=[tokens] if tokens else [],
    )


def test_the_limit_is_met_and_passed_by_one_token() -> None:
    cases = made()
    for name, over in (("at the limit", 0), ("one over the limit", 1)):
        w = cases[name].workload
        assert (w.prompt_tokens or 0) + w.output_tokens == 256 + over
    assert cases["at the limit"].expected == (a.DONE,) and cases["one over the limit"].expected == (
        a.REFUSED,
    )


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"max_positions": None}, "names no limit"),
        ({"max_positions": 8}, "no room for a prompt"),
        ({"max_positions": 8192}, "does not fit into free memory"),
        ({"seconds_a_token": 1.0}, "would take about"),
    ],
)
def test_a_limit_that_cannot_be_reached_here_is_said_and_not_counted(
    more: dict[str, Any], sentence: str
) -> None:
    case = made(**more)["at the limit"]
    found = a.skipped(case)
    assert found.result == a.NOT_TESTED and sentence in (found.reason or "")


def test_a_huge_batch_is_more_than_fits_anywhere() -> None:
    w = made()["huge batch"].workload
    assert w.batch * (16 + a.OUTPUT) > 2 * 5000
    w = made(capacity_tokens=None)["huge batch"].workload
    assert w.batch * 16 > MOST_TOKENS


@pytest.mark.parametrize(
    ("name", "given", "after", "result"),
    [
        ("one token", answer("done"), CLEAN, a.PASS),
        ("one token", answer("done"), [5, 6, 7, 9], a.FAIL),
        ("one token", answer("done"), None, a.FAIL),
        ("one token", answer("refused", "no"), CLEAN, a.FAIL),
        ("one token", answer("not finite", "nan"), CLEAN, a.FAIL),
        ("empty", answer("refused", "the prompt is empty"), CLEAN, a.PASS),
        ("empty", answer("refused"), CLEAN, a.FAIL),
        ("empty", answer("done"), CLEAN, a.FAIL),
        ("empty", None, CLEAN, a.FAIL),
        ("cancelled during decode", answer("cancelled", "after 2", [5, 6]), CLEAN, a.PASS),
        ("cancelled during decode", answer("cancelled", "after 2", [5, 9]), CLEAN, a.FAIL),
        ("cancelled during decode", answer("done", None, CLEAN), CLEAN, a.FAIL),
    ],
)
def test_a_case_passes_when_it_ended_as_stated_and_the_next_was_right(
    name: str, given: Answered | None, after: list[int] | None, result: str
) -> None:
    found = a.result(made()[name], given, "the engine ended", CLEAN, after)
    assert found.result == result
    assert given is not None or found.reason == "the engine ended"


def test_a_disconnect_ends_the_engine() -> None:
    assert a.disconnected(0.2, CLEAN, CLEAN).result == a.PASS
    assert a.disconnected(None, CLEAN, CLEAN).result == a.FAIL
    assert a.disconnected(0.2, CLEAN, [1]).result == a.FAIL


def test_every_case_survives_the_way_to_the_engine() -> None:
    for case in made().values():
        sent = Ask(arm="x", questions=[Question(id=case.name, workload=case.workload, leave=case.leave)])
        there = decode_command(encode(sent)).questions[0]
        assert (there.id, there.leave, there.workload.batch) == (case.name, case.leave, case.workload.batch)
        if case.name == "invalid bytes":
            assert there.workload.texts == ("caf? ? ? ok ??",)
