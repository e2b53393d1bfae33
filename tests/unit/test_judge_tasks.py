"""The task set: made by rule, scored by rule, compared in pairs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from pdq_tui.errors import UsageError
from pdq_tui.judge import flips, quality, taskset
from pdq_tui.judge.taskset import KINDS, Task


def test_hundreds_of_different_tasks_come_from_a_seed() -> None:
    tasks = taskset.own(400, 0)
    assert len({t.prompt for t in tasks}) == len({t.id for t in tasks}) == 400
    assert [sum(t.kind == kind for t in tasks) for kind in KINDS] == [80] * 5
    assert taskset.own(40, 0) == tasks[:40] and taskset.own(40, 1) != tasks[:40]
    assert max(len(t.prompt) for t in tasks if t.kind == "retrieval") > 1000, "from a long context"


def test_every_task_can_be_solved_and_an_empty_answer_solves_none() -> None:
    for t in taskset.own(400, 3):
        first = t.answer.split("|")[0]
        solution = {
            "items": lambda t=t: ", ".join(f"word{i}" for i in range(int(t.answer))),
            "lines": lambda t=t: "\n".join(t.answer.split("|")),
            "upper": lambda t=t: t.answer.upper(),
            "json-keys": lambda t=t: json.dumps(dict.fromkeys(t.answer.split("|"), 1)),
            "sentences": lambda t=t: " ".join(
                f"Sentence {i} tells of {t.answer.split(':')[1]}." for i in range(int(t.answer.split(":")[0]))
            ),
        }.get(t.rule, lambda first=first: f"It is {first}.")()
        solution = first if t.rule == "one-word" else solution
        assert taskset.right(t, solution), (t, solution)
        assert not taskset.right(t, "") and not taskset.right(t, "nothing of it")


@pytest.mark.parametrize(
    ("rule", "answer", "text", "right"),
    [
        ("contains", "Au", "The symbol is Au.", True),
        ("contains", "Au", "Australia", False),
        ("contains", "Kyiv|Kiev", "kiev", True),
        ("number", "12", "7 + 5 = 12", True),
        ("number", "12", "12, since 7 + 5 = 13", False),
        ("number", "1234", "1,234", True),
        ("lines", "1|2|3", "1\n2\n3\n", True),
        ("lines", "1|2|3", "1\n3\n2", False),
        ("lines", "red box|blue cup", "1. red box\n2. blue cup", True),
        ("lines", "red box|blue cup", "red box\nblue cup\nmore", False),
        ("items", "3", "a, b, c.", True),
        ("items", "3", "a, b, b", False),
        ("items", "3", "a, b,\nc", False),
        ("one-word", "cold", "Cold.", True),
        ("one-word", "cold", "It is cold", False),
        ("upper", "rain", "RAIN", True),
        ("upper", "rain", "Rain", False),
        ("json-keys", "a|b", '```json\n{"b": 1, "a": 2}\n```', True),
        ("json-keys", "a|b", '{"a": 1}', False),
        ("json-keys", "a|b", "[" * 100_000, False),
        ("sentences", "2:rain", "The rain is wet. The rain is cold.", True),
        ("sentences", "2:rain", "The rain is wet. The rain is wet.", False),
    ],
)
def test_rules(rule: str, answer: str, text: str, right: bool) -> None:
    assert taskset.right(Task(id="1", kind="k", prompt="p", rule=rule, answer=answer), text) is right


def test_a_users_tasks_replace_ours(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"prompt": "2+2?", "answer": 4, "rule": "number", "max_tokens": 8}\n\n{"id": "x", "prompt": "Hi", "answer": "hello"}\n'
    )
    first, second = taskset.read(file)
    assert (first.rule, first.answer, first.most, first.id) == ("number", "4", 8, "1")
    assert (second.rule, second.id, second.kind) == ("contains", "x", "own")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no task"),
        ("{", "line 1: no JSON"),
        ("[]", "line 1: a task is an object"),
        ('{"answer": "x"}', 'line 1: no "prompt"'),
        ('{"prompt": "x"}', '"answer" is a text'),
        ('{"prompt": "x", "answer": "x", "rule": "magic"}', "there is no \"rule\" 'magic'"),
        ('{"prompt": "x", "answer": "x", "rule": "number"}', "does not suit"),
        ('{"prompt": "x", "answer": "x", "max_tokens": 0}', "max_tokens"),
        (
            '{"prompt": "x", "answer": "x", "id": 1}\n{"prompt": "y", "answer": "x", "id": "1"}',
            "stands twice",
        ),
    ],
)
def test_X01_a_task_that_is_wrong_is_named_by_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence.replace("\\", "")):
        taskset.read(file)


# -- pairs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "gained", "value"),
    [(0, 0, 1.0), (1, 0, 1.0), (10, 0, 2 / 1024), (8, 2, 2 * 56 / 1024), (5, 5, 1.0)],
)
def test_mcnemar_is_the_exact_binomial(lost: int, gained: int, value: float) -> None:
    assert flips.mcnemar(lost, gained) == flips.mcnemar(gained, lost) == pytest.approx(value)


def made(n: int, base: float, lost: int, gained: int, length: float = 1.0) -> flips.Flips:
    solved = round(n * base)
    ours = [True] * solved + [False] * (n - solved)
    theirs = list(ours)
    for i in range(lost):
        theirs[i] = False
    for i in range(gained):
        theirs[n - 1 - i] = True
    return flips.compare(ours, theirs, [(20, round(20 * length))] * n, lost + gained)


def test_equal_shares_can_hide_flips() -> None:
    f = made(100, 0.5, 10, 10)
    assert (f.base, f.policy, f.lost, f.gained, f.drop) == (0.5, 0.5, 10, 10, 0.0)
    assert f.detectable == pytest.approx((1.96 + 0.8416) * math.sqrt(20) / 100, rel=1e-3)


@pytest.mark.parametrize(
    ("f", "result"),
    [
        (made(400, 0.6, 0, 0), quality.PASS),
        (made(40, 0.6, 0, 0), quality.UNSURE),
        (made(400, 0.6, 60, 2), quality.FAIL),
        (made(400, 0.6, 6, 4), quality.UNSURE),
        (made(400, 0.2, 60, 2), quality.NOT_INFORMATIVE),
    ],
)
def test_the_gate_asks_for_the_upper_bound_of_the_drop(f: flips.Flips, result: str) -> None:
    gate = flips.task_gate(f, 0.02)
    assert gate.result == result and f"{f.lost} lost, {f.gained} gained" in gate.measured


def test_the_interval_of_a_drop_holds_it_in_nineteen_of_twenty() -> None:
    """Paired answers of 200 tasks, of which 8 % are lost and 5 % gained."""
    rng, held = random.Random(0), 0
    for _ in range(1000):
        base, policy = [], []
        for _ in range(200):
            x = rng.random()
            b, p = (True, False) if x < 0.08 else (False, True) if x < 0.13 else (True, True)
            base.append(b)
            policy.append(p)
        low, high = flips.compare(base, policy, [(1, 1)] * 200, 0).drop_ci95
        held += low <= 0.03 <= high
    assert 0.93 <= held / 1000 <= 0.97


@pytest.mark.parametrize(
    ("length", "result"), [(1.0, quality.PASS), (0.7, quality.FAIL), (1.3, quality.FAIL)]
)
def test_an_answer_is_neither_shorter_nor_longer(length: float, result: str) -> None:
    assert flips.length_gate(made(100, 0.5, 0, 0, length)).result == result


def test_a_length_that_nothing_is_known_of_is_unsure() -> None:
    one = flips.compare([True], [True], [(10, 10)], 0)
    assert flips.length_gate(one).result == quality.UNSURE
    none = flips.compare([True], [True], [(0, 0)], 0)
    assert flips.length_gate(none).measured == "n/a"
