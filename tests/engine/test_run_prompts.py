"""From texts to ids: exact lengths, refusals by number, padding with an id that exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer

from pdq_tui.core import prompts as prompt_sets
from pdq_tui.core.protocol import ModelInfo
from pdq_tui.core.workload import Workload
from pdq_tui.engine.prompts import Prepared, prepare
from pdq_tui.errors import UsageError

MODEL = ModelInfo(id="tiny", vocab=128, max_positions=256)
LEARNED = ModelInfo(id="tiny", vocab=128, max_positions=32, rotary=False)
ROTARY = ModelInfo(id="tiny", vocab=128, max_positions=32)


def prepared(model: ModelInfo = MODEL, tokenizer: Any = None, **settings: Any) -> Prepared:
    return prepare(Workload(**settings), tokenizer or tiny_tokenizer(), model, prompt_sets.built_in)


def own(*texts: str, model: ModelInfo = MODEL, **settings: Any) -> Prepared:
    return prepared(model, prompts="file", texts=texts, **({"output_tokens": 4} | settings))


@pytest.mark.parametrize("name", ["short", "long", "mixed"])
@pytest.mark.parametrize("length", [1, 7, 200])
def test_built_in_prompts_have_the_exact_length(name: str, length: int) -> None:
    found = prepared(prompts=name, prompt_tokens=length, output_tokens=8, distinct=3)
    assert found.lengths == [length] * 3
    assert found.capacity == length + 8
    assert all(batch.pad is None for batch in found.batches)


def test_prompts_are_deterministic_by_seed() -> None:
    one, again, other = (prepared(prompt_tokens=64, seed=seed) for seed in (0, 0, 1))
    assert one.sha256 == again.sha256 != other.sha256
    assert torch.equal(one.batches[0].ids, again.batches[0].ids)


def test_I01_an_empty_prompt_is_refused_by_its_number() -> None:
    texts = ["one", "two", "three", "  \n", "five", "six", "seven", "eight", "nine", "ten"]
    found = own(*texts)
    assert [(r.number, r.reason) for r in found.refused] == [(4, "the prompt is empty")]
    assert len(found.lengths) == 9


@pytest.mark.parametrize("texts", [[""], ["  \n"], []])
def test_I01_nothing_left_is_a_sentence(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="no prompt can run"):
        own(*texts)


def test_I01_blank_is_refused_whether_or_not_the_tokenizer_adds_bos() -> None:
    tokenizer = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    found = prepared(tokenizer=tokenizer, prompts="file", texts=("", "ab"), output_tokens=4)
    assert [r.number for r in found.refused] == [1]
    assert found.batches[0].ids[0, 0] == 1


def test_I03_learned_positions_refuse_what_is_too_long() -> None:
    found = own("x" * 40, "x" * 30, "x" * 24, model=LEARNED, output_tokens=8)
    assert [r.number for r in found.refused] == [1, 2]
    assert "32 positions" in found.refused[0].reason
    with pytest.raises(UsageError, match="30 prompt"):
        own("x" * 30, model=LEARNED, output_tokens=8, long_positions_ok=True)


def test_I03_rotary_runs_on_only_when_confirmed_and_says_so() -> None:
    with pytest.raises(UsageError, match="32 positions"):
        own("x" * 30, model=ROTARY, output_tokens=8)
    found = own("x" * 30, model=ROTARY, output_tokens=8, long_positions_ok=True)
    assert any("beyond" in note for note in found.notes)


def test_I04_left_padding_with_an_existing_id() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.pad_token_id is None
    found = own("a", "b" * 5, "c" * 9, batch=3)
    (batch,) = found.batches
    assert batch.ids.shape == (3, 9)
    assert batch.pad is not None
    assert batch.pad.tolist() == [8, 4, 0]
    assert int(batch.ids.max()) < MODEL.vocab
    assert (batch.real_tokens, batch.padded_tokens) == (15, 12)
    assert len(tokenizer) <= MODEL.vocab


def test_a_batch_is_filled_up_from_the_front() -> None:
    found = own("aa", "bb", "cc", batch=2)
    assert [batch.rows for batch in found.batches] == [2, 2]
    assert torch.equal(found.batches[1].ids[1], found.batches[0].ids[0])


def test_chat_template_is_applied_to_chats_and_said() -> None:
    tokenizer = tiny_tokenizer()
    chat = (("user", "hi"),)
    plain = prepared(tokenizer=tokenizer, prompts="file", chats=(chat,), output_tokens=4)
    assert not plain.chat_template_applied
    assert "no chat template" in plain.notes[0]
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    found = prepared(tokenizer=tokenizer, prompts="file", texts=("raw",), chats=(chat,), output_tokens=4)
    assert found.chat_template_applied
    assert tokenizer.decode(found.batches[1].ids[0]) == "[user]hi>"
    never = prepared(
        tokenizer=tokenizer, prompts="file", chats=(chat,), chat_template="none", output_tokens=4
    )
    assert not never.chat_template_applied
    assert "not asked for" in never.notes[0]


def test_a_template_that_refuses_a_chat_names_it() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    found = prepared(
        tokenizer=tokenizer, prompts="file", texts=("ok",), chats=((("user", "hi"),),), output_tokens=4
    )
    assert [r.number for r in found.refused] == [2]
    assert "alternate" in found.refused[0].reason


def test_T06_fixed_length_says_that_eos_is_ignored() -> None:
    assert any("EOS is ignored" in note for note in own("a").notes)
    assert not any("EOS" in note for note in own("a", stop="natural").notes)


@pytest.mark.parametrize(
    ("settings", "text", "hint"),
    [
        ({"prompt_tokens": 2_000_000_000}, "no prompt can run: 2000000000", "--beyond-positions"),
        (
            {"prompt_tokens": 2_000_000_000, "long_positions_ok": True},
            r"2000000000 prompt tokens × 1 rows",
            "--in",
        ),
        ({"prompt_tokens": 20, "batch": 1_000_000}, r"20 prompt tokens × 1000000 rows", "--batch"),
    ],
)
def test_I03_absurd_workloads_are_refused_before_they_are_made(
    settings: dict[str, Any], text: str, hint: str
) -> None:
    """Thousands of millions of tokens: nothing of that size is allocated, or this test would not end."""
    with pytest.raises(UsageError, match=text) as raised:
        prepared(ROTARY, output_tokens=4, **settings)
    assert hint in (raised.value.hint or "")
