"""Questions to an arm as a user sends them: what they end in, and that the next one is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer

from pdq_tui.core import prompts as prompt_sets
from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.workload import Workload
from pdq_tui.engine.asking import Asker
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel

POLICY = "bf16-prefill-int8-decode"
CLEAN = Workload(prompt_tokens=16, output_tokens=6, distinct=1)


@pytest.fixture(scope="module", autouse=True)
def probes_in_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def asker(load_tiny: Callable[..., tuple[object, object]], tiny_llama_untied: Path) -> Asker:
    model, masters = load_tiny(tiny_llama_untied)
    staged = StagedModel(model, masters, CpuDevice(), budget_bytes=None, kernels=load_kernels("cpu"))
    arm = Arm(POLICY, find_policy(POLICY), staged.apply(find_policy(POLICY), rows=[1, 16]))
    info = p.ModelInfo(id="tiny", vocab=128, max_positions=256, rotary=True)
    loaded: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), info=info, eos=frozenset({2}))
    return Asker(CpuDevice(), loaded, arm, prompt_sets.built_in)


def ask(asker: Asker, workload: Workload, **more: Any) -> p.Answered:
    return asker.answer(p.Question(id="q", workload=workload, **more), lambda: False)


def test_an_answer_holds_every_prompts_tokens(asker: Asker) -> None:
    """Three prompts in batches of two: the third is not answered twice, and each answers as alone."""
    texts = ("abc", "hello there", "x")
    w = Workload(prompt_tokens=None, output_tokens=5, batch=2, prompts="file", texts=texts)
    found = ask(asker, w)
    assert found.state == "done" and found.prompt_tokens == [3, 11, 1]
    assert [len(row) for row in found.tokens] == [5, 5, 5] and len(found.texts) == len(
        found.stop_reasons
    ) == 3
    for text, row in zip(texts, found.tokens, strict=True):
        alone = ask(asker, Workload(prompt_tokens=None, output_tokens=5, prompts="file", texts=(text,)))
        assert alone.tokens == [row]
    assert found.highest is not None and found.ttft_ms and found.tpot_ms


@pytest.mark.parametrize("leave", ["prefill", "decode"])
def test_who_leaves_gets_the_beginning_of_the_answer(asker: Asker, leave: str) -> None:
    whole = ask(asker, CLEAN).tokens[0]
    found = ask(asker, CLEAN, leave=leave)
    made = {"prefill": 1, "decode": 4}[leave]
    assert (found.state, found.tokens) == ("cancelled", [whole[:made]])
    assert found.reason == f"after {made} of 6 tokens"
    assert ask(asker, CLEAN).tokens == [whole], "and the next request is right"


@pytest.mark.parametrize(
    ("workload", "sentence"),
    [
        (Workload(prompt_tokens=None, prompts="file", texts=(" ",)), "the prompt is empty"),
        (Workload(prompt_tokens=251, output_tokens=6), "257|256 positions"),
        (Workload(prompt_tokens=16, output_tokens=6, batch=(1 << 20) + 1), "more than"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(asker: Asker, workload: Workload, sentence: str) -> None:
    whole = ask(asker, CLEAN).tokens
    found = ask(asker, workload)
    assert found.state == "refused" and not found.tokens
    assert re.search(sentence, found.reason or "")
    assert ask(asker, CLEAN).tokens == whole


def test_a_batch_without_room_for_its_cache_is_refused_before_it_is_made(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: 300 << 20)
    found = ask(asker, Workload(prompt_tokens=16, output_tokens=6, batch=100_000))
    assert found.state == "refused" and "fit into free memory" in (found.reason or "")


def test_logits_that_are_not_finite_are_a_state_of_their_own(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdq_tui.engine.generation import Generation

    real, steps = Generation.step, []

    def broken(self: Generation, tokens: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        logits = real(self, tokens)
        return logits * float("nan") if len(steps) == 3 else logits

    monkeypatch.setattr(Generation, "step", broken)
    found = ask(asker, CLEAN)
    assert found.state == "not finite" and "decode step 3" in (found.reason or "")
    assert p.decode_event(p.encode(found)).highest is None


def test_how_likely_an_answer_is_comes_of_every_position(asker: Asker) -> None:
    """Answers of other lengths behind prompts of other lengths, against one prefill a position."""
    texts, answers = ("abc", "hello there", "x"), [[5, 6, 7, 8], [9], []]
    w = Workload(prompt_tokens=None, output_tokens=4, batch=2, prompts="file", texts=texts)
    found = ask(asker, w, forced=answers)
    assert found.state == "done" and found.tokens == [] and len(found.nll) == 3 and found.nll[2] is None
    for text, answer, value in zip(texts[:2], answers, found.nll, strict=False):
        ids = [*asker._model.tokenizer(text)["input_ids"], *answer]
        terms = []
        for i, token in enumerate(answer):
            prefix = torch.tensor([ids[: len(ids) - len(answer) + i]])
            logits = asker._arm.staged.start(1, prefix.shape[1], None).prefill(prefix)[0]
            terms.append(-float(logits.double().log_softmax(-1)[token]))
        assert value == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    short = ask(asker, w, forced=[[1]])
    assert (short.state, short.reason) == ("refused", "1 answers for 3 prompts")
