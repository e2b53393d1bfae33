"""lm-eval's figures of two policies, document by document, and what is said where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdq_tui.commands.evaluate import lm_eval_tasks
from pdq_tui.core.protocol import LmEvaluated
from pdq_tui.errors import UnfitError, UsageError
from pdq_tui.judge.harness import compared


def result(**values: list[float]) -> LmEvaluated:
    n = len(next(iter(values.values())))
    return LmEvaluated(
        arm="A", policy="A", policy_digest="d", task="t", version="1", documents=n,
        metrics={m: sum(v) / n for m, v in values.items()}, stderr={}, values=dict(values), higher_is_better={"acc": True},
    )  # fmt: skip


def test_right_and_wrong_documents_are_counted_both_ways() -> None:
    base, policy = [1.0] * 6 + [0.0] * 4, [1.0] * 4 + [0.0] * 5 + [1.0]
    (row,) = compared([result(acc=base)], [result(acc=policy)])
    assert (row["flips"]["lost"], row["flips"]["gained"], row["flips"]["changed"]) == (2, 1, 3)
    assert row["flips"]["drop"] == pytest.approx(0.1) and (row["base"], row["policy"]) == (0.6, 0.5)
    assert row["higher_is_better"] is True and row["difference"] is None


def test_other_figures_are_compared_by_their_mean_difference() -> None:
    base, policy = [0.2, 0.4, 0.6, 0.8], [0.3, 0.5, 0.7, 0.9]
    (row,) = compared([result(bleu=base)], [result(bleu=policy)])
    assert row["flips"] is None and row["difference"] == pytest.approx(0.1)
    assert row["difference_ci95"] == pytest.approx([0.1, 0.1])


def test_what_cannot_be_paired_says_so() -> None:
    (row,) = compared([result(acc=[1.0, 0.0])], [result(acc=[1.0])])
    assert row["flips"] is None and row["reason"]
    assert compared([], [result(acc=[1.0])]) == []


def test_without_lm_eval_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        assert name == "lm_eval"

    monkeypatch.setattr("importlib.util.find_spec", absent)
    with pytest.raises(UnfitError, match="is not installed") as told:
        lm_eval_tasks("hellaswag")
    assert "pip install 'pdq-tui[lm-eval]'" in (told.value.hint or "")


def test_tasks_are_names_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    monkeypatch.chdir(tmp_path)
    assert lm_eval_tasks("hellaswag, mine.yaml") == ("hellaswag", str(tmp_path / "mine.yaml"))
    for text, sentence in ((",", "no task is named"), ("other.yaml", "no such file")):
        with pytest.raises(UsageError, match=sentence):
            lm_eval_tasks(text)


def test_what_is_worse_where_it_is_1_is_no_answer_that_is_lost() -> None:
    base, policy = [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]
    made = [
        msgspec.structs.replace(result(toxic=v), higher_is_better={"toxic": False}) for v in (base, policy)
    ]
    (row,) = compared([made[0]], [made[1]])
    assert row["flips"] is None and row["difference"] == pytest.approx(0.25)
