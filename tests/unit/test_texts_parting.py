"""Where two answers part: by tokens, by text, at the end, and what is not known; and how reports show it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_snapshots

from pdq_tui.core.protocol import Request, decode_event, encode
from pdq_tui.core.texts import Answers, compared_answers
from pdq_tui.report.html import html
from pdq_tui.report.pages import comparison_page
from pdq_tui.report.tables import render
from pdq_tui.store.compare import Comparison, compare
from pdq_tui.store.listing import resolve
from pdq_tui.store.snapshot import load

HOSTILE = 'so <script>alert(1)</script>\x1b[31m & "x"'
SAID = {
    "B": [("The answer is four.", [1, 2, 3, 4, 5]), ("same\n  here", [7, 8]), (f"{HOSTILE} a", [1, 2, 3])],
    "A": [("The answer is 4.", [1, 2, 3, 9, 5]), ("same\n  here", [7, 8]), (f"{HOSTILE} b", [1, 2, 4])],
}


def request(text: str | None, ids: list[int] | None = None, prompt: int = 0) -> Request:
    return Request(
        request=1, arm="A", policy="p", policy_digest="d", kind="blocks", prompt=prompt, text=text, token_ids=ids or [],
    )  # fmt: skip


def pair(*sides: tuple[str, list[int] | None]) -> Answers:
    [found] = compared_answers(*([request(*side)] for side in sides))
    return found


@pytest.mark.parametrize(
    ("one", "two", "token", "at", "word"),
    [
        (("ab", [1, 2]), ("ab", [1, 2]), None, None, "the same answer"),
        (("ab", [1, 2]), ("ac", [1, 3]), 2, 1, "first divergence: token 2 of 2"),
        (("abc", [1, 2, 3]), ("xy", [9, 8]), 1, 0, "first divergence: token 1 of 2 and 3"),
        (("abc", [1, 2, 3]), ("ab", [1, 2]), 3, 2, "one ends after token 2, the other after 3"),
        (("ab", [1, 2]), ("ab", [12]), 1, None, "first divergence: token 1 of 1 and 2, the text is the same"),
        (("ab", None), ("ab", [1]), None, None, "the same answer"),
        (("ab", None), ("aXb", [1]), None, 1, "first divergence: character 2 (token ids were not recorded)"),
        (("", [5]), ("", [6]), 1, None, "first divergence: token 1 of 1, the text is the same"),
    ],
)
def test_where_two_answers_part(one: Any, two: Any, token: int | None, at: int | None, word: str) -> None:
    found = pair(one, two)
    assert (found.token, found.at, found.word) == (token, at, word)
    assert found.common + found.rests[0] == one[0] and found.common + found.rests[1] == two[0]


def test_the_first_answer_to_each_prompt_that_both_have() -> None:
    one = [
        request("later", [1], 2),
        request("first", [1], 0),
        request("again", [2], 0),
        request(None, [3], 1),
    ]
    two = [request("first", [1], 0), request("there", [3], 1), request("x", [4], 5), request("other", [2], 2)]
    assert [(a.prompt, a.reference, a.value, a.same) for a in compared_answers(one, two)] == [
        (0, "first", "first", True),
        (2, "later", "other", False),
    ]


def test_ids_are_stored_once_an_answer_and_found_by_its_digest(tmp_path: Path) -> None:
    said = {"B": [("four", [1, 2])], "A": [("five", [1, 3])]}
    made = made_snapshots.events(answers=said)
    for e in made:
        if isinstance(e, Request):
            e.tokens_sha256 = e.text * 16  # type: ignore[operator]
            # What is left out of the figures may be the only one that carries the ids.
            e.first_use = e.request <= 3
    names = made_snapshots.save_all(tmp_path, made=made)
    found = [load(resolve(i, tmp_path)) for i in names]
    for s in found:
        carry = [r.first_use for r in s.requests if r.token_ids]
        assert carry == [True]
    [pair] = compare(found).answers[names[1]]
    assert (pair.recorded, pair.token, pair.at) == (True, 2, 1)


def test_token_ids_pass_the_journal() -> None:
    assert decode_event(encode(request("a", [3, 1]))).token_ids == [3, 1]


@pytest.fixture
def compared(tmp_path: Path) -> Comparison:
    made = made_snapshots.events(answers=SAID)
    return compare([load(resolve(i, tmp_path)) for i in made_snapshots.save_all(tmp_path, made=made)])


def test_a_comparison_carries_the_answers_from_the_stored_requests(compared: Comparison) -> None:
    [found] = compared.answers.values()
    assert [(a.prompt, a.token) for a in found] == [(0, 4), (1, None), (2, 3)]
    body = json.loads(render(compared, "json"))
    assert body["answers"][compared.candidates[0].id][0]["value"] == "The answer is 4."


def test_reports_name_the_prompt_the_token_and_how_each_goes_on(compared: Comparison) -> None:
    text = render(compared, "md")
    assert "### answers" in text and "first divergence: token 4 of 5" in text
    assert "| …four. | …4. |" in text and "the same answer" in text
    assert "\x1b" not in text and "<script>" not in text
    assert "### answers" not in render(compared, "md", diff_only=True)
    assert render(compared, "table", ascii_only=True).isascii()


def test_html_has_them_side_by_side_as_text(compared: Comparison) -> None:
    text = html(comparison_page(compared), [])
    assert 'class="common">The answer is </span><mark>▸</mark>four.</p>' in text
    assert 'class="common">same\n  here</span></p>' in text
    assert (
        "<script>alert" not in text and "\x1b" not in text and "so &lt;script&gt;" in text and "␛[31m" in text
    )


def test_a_page_of_many_prompts_says_what_it_leaves_out(tmp_path: Path) -> None:
    many = {arm: [(f"{arm} {i}", [i, i]) for i in range(24)] for arm in "AB"}
    made = made_snapshots.events(answers=many, blocks=24)
    c = compare([load(resolve(i, tmp_path)) for i in made_snapshots.save_all(tmp_path, made=made)])
    page = comparison_page(c)
    table = next(t for t in page.tables if t.title == "answers")
    assert len(table.rows) == len(page.texts) == 20 and "4 more pairs are not shown" in table.footer[0]
