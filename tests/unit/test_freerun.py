"""Agreement of two free runs on known answers, and a person's marks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.errors import PdqError, UsageError
from pdq_tui.judge import freerun, marks

#: sacreBLEU 2.6.0, CHRF().sentence_score(hypothesis, [reference]).score / 100.
SACREBLEU = (
    ("the cat sat on the mat", "the cat sat on the mat", 1.000000),
    ("the cat sat on a mat", "the cat sat on the mat", 0.659797),
    ("Paris", "The capital is Paris.", 0.216532),
    ("", "x", 0.000000),
    ("abc", "xyz", 0.000000),
    ("42", "The answer is 42", 0.143969),
    ("Ein Hund bellt laut.", "Der Hund bellt sehr laut.", 0.494400),
    ("日本の首都は東京です", "日本の首都は京都です", 0.504762),
    ("a  b\nc", "a b c", 1.000000),
    ("a", "a", 1.000000),
    ("abcd", "abcx", 0.479167),
)


@pytest.mark.parametrize(("ours", "reference", "score"), SACREBLEU)
def test_chrf_is_sacrebleus(ours: str, reference: str, score: float) -> None:
    assert freerun.chrf(ours, reference) == pytest.approx(score, abs=5e-7)


@given(st.text(max_size=30), st.text(max_size=30))
def test_chrf_lies_between_nothing_and_the_same(a: str, b: str) -> None:
    assert 0 <= freerun.chrf(a, b) <= 1 + 1e-12
    assert freerun.chrf(a, a) == pytest.approx(1.0)


def said(text: str, ids: list[int] | None = None) -> dict[str, Any]:
    return {"text": text, "tokens": len(text), "right": True, **({} if ids is None else {"ids": ids})}


BASE = {
    "a": said("one two", [1, 2]),
    "b": said("three", [3, 4, 5]),
    "c": said("x", [9]),
    "d": said("only base", [7]),
}
OTHER = {"a": said("one two", [1, 2]), "b": said("three!", [3, 4, 6]), "c": said("y", [8])}


def test_what_is_counted_of_two_free_runs() -> None:
    found = freerun.agreement(BASE, OTHER, {"a": (0.2, 0.2), "b": (1.2, 0.2), "c": (2.2, 0.2)})
    assert found is not None and (found.n, found.same, found.least) == (3, 1, "c")
    assert found.divergence == 2.0  # third token of b, first of c
    assert found.nll.value == pytest.approx(1.0) and found.nll.n == 3 and found.nll.ci95 is not None
    expected = (1 + freerun.chrf("three!", "three") + 0) / 3
    assert found.chrf.value == pytest.approx(expected)
    assert freerun.agreement(BASE, {}, {}) is None
    alike = freerun.agreement(BASE, BASE, {})
    assert alike is not None and alike.divergence is None and alike.least is None and alike.nll.value is None


def test_answers_of_an_evaluation_without_ids_are_told_by_their_characters() -> None:
    step = {
        "base": "bf16",
        "items": [{"id": "b"}, {"id": "zz"}],
        "answers": {"bf16": {"b": said("three")}, "x": {"b": said("thrice")}},
    }
    [(task, pair)] = freerun.pairs(step, "x").items()
    assert task == "b" and pair.token is None and pair.at == 3 and not pair.recorded
    assert freerun.pairs(step, "nobody") == {} and freerun.pairs({}, "x") == {}


def test_the_last_mark_stands_and_can_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    assert marks.read(tmp_path) == {}
    marks.put(tmp_path, "x", "t1", marks.WORSE)
    marks.put(tmp_path, "x", "t1", marks.SAME)
    marks.put(tmp_path, "x", "t2", marks.CHANGED)
    marks.put(tmp_path, "y", "t2", marks.WORSE)
    marks.put(tmp_path, "y", "t2", "")
    assert marks.read(tmp_path) == {("x", "t1"): "same", ("x", "t2"): "changed"}
    assert marks.counted(marks.read(tmp_path), "x") == {"same": 1, "changed": 1, "worse": 0}


def test_X01_what_is_no_mark_or_damaged_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no evaluation"):
        marks.put(tmp_path, "x", "t", marks.SAME)
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(UsageError, match="is no mark"):
        marks.put(tmp_path, "x", "t", "better")
    (tmp_path / marks.FILE).write_text('{"policy": 3}\n')
    with pytest.raises(PdqError, match="line 1 is damaged"):
        marks.read(tmp_path)
