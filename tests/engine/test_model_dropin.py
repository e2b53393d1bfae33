"""A staged model in transformers' own hands: the stage is the request's state, whatever a call brings."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
)

import pdq_tui
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kv import KvPolicy
from pdq_tui.errors import UnfitError, UsageError
from tests.engine.families import rounded
from tests.engine.test_model_staged import ids_of

pytestmark = pytest.mark.usefixtures("shared_home")

NEW = 6
#: int8 prefill and int4 decode differ by enough that a token under the wrong view shows in the logits.
POLICY = "w8a8-prefill-int4-decode"


def load(path: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


@pytest.fixture
def model(tiny_llama_untied: Path) -> Any:
    """A drop-in around a model in memory."""
    return pdq_tui.staged(load(tiny_llama_untied), POLICY, prompt_tokens=8, kernels="torch")


def cache_name(model: PreTrainedModel) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Spy:
    """What each view was called with: (stage, positions in the cache before, tokens)."""

    def __init__(self, model: Any) -> None:
        self.calls: list[tuple[str, int, int]] = []
        model._views = {stage: self._watched(stage, view) for stage, view in model._views.items()}

    def _watched(self, stage: str, view: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            ids = args[0] if args else kwargs["input_ids"]
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            self.calls.append((stage, cache.get_seq_length() if cache is not None else 0, ids.shape[1]))
            return view(*args, **kwargs)

        return call


def generate(model: Any, ids: torch.Tensor, new: int = NEW, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)


def by_hand(path: Path, ids: torch.Tensor, new: int = NEW) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B, new], logits [new, B, V]) of two fake-quantized models that share one cache."""
    policy = find_policy(POLICY)
    prefill, decode = (rounded(load(path), policy, stage) for stage in ("prefill", "decode"))
    cache = DynamicCache(config=prefill.config)
    named = cache_name(prefill)
    with torch.inference_mode():
        logits = [prefill(ids, **{named: cache}).logits[:, -1]]
        for _ in range(new - 1):
            logits.append(decode(logits[-1].argmax(-1)[:, None], **{named: cache}).logits[:, -1])
    stacked = torch.stack(logits)
    return stacked.argmax(-1).t(), stacked


def test_generate_runs_each_stage_in_its_own_format(model: Any, tiny_llama_untied: Path) -> None:
    ids, spy = ids_of(2, 9), Spy(model)
    out = generate(model, ids, output_logits=True, return_dict_in_generate=True)
    tokens, logits = by_hand(tiny_llama_untied, ids)
    torch.testing.assert_close(torch.stack(out.logits), logits, rtol=1e-3, atol=1e-3)
    assert out.sequences[:, 9:].tolist() == tokens.tolist()
    assert spy.calls == [("prefill", 0, 9), *(("decode", 9 + n, 1) for n in range(NEW - 1))]
    assert model.tokens == {"prefill/prefill": 2 * 9, "decode/decode": 2 * (NEW - 1)}


def test_a_prompt_of_one_token_is_prefill(model: Any, tiny_llama_untied: Path) -> None:
    ids, spy = ids_of(1, 1), Spy(model)
    out = generate(model, ids, output_logits=True, return_dict_in_generate=True)
    torch.testing.assert_close(
        torch.stack(out.logits), by_hand(tiny_llama_untied, ids)[1], rtol=1e-3, atol=1e-3
    )
    assert spy.calls[:2] == [("prefill", 0, 1), ("decode", 1, 1)]


@pytest.mark.parametrize(
    ("prompt", "chunk", "sizes"), [(9, 4, [4, 4, 1]), (9, 3, [3, 3, 3]), (3, 1, [1, 1, 1])]
)
def test_the_last_chunk_of_a_prompt_is_prefill(
    prompt: int, chunk: int, sizes: list[int], model: Any, tiny_llama_untied: Path
) -> None:
    ids, spy = ids_of(1, prompt), Spy(model)
    out = generate(model, ids, prefill_chunk_size=chunk, output_logits=True, return_dict_in_generate=True)
    assert [(stage, n) for stage, _, n in spy.calls] == [
        *(("prefill", n) for n in sizes),
        *[("decode", 1)] * (NEW - 1),
    ]
    torch.testing.assert_close(
        torch.stack(out.logits), by_hand(tiny_llama_untied, ids)[1], rtol=1e-3, atol=1e-3
    )


def test_left_padded_rows_agree_with_rows_alone(model: Any) -> None:
    ids = ids_of(2, 9)
    mask = torch.ones_like(ids)
    ids[1, :4] = 0
    mask[1, :4] = 0
    out = generate(model, ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True)
    alone = generate(model, ids[1:, 4:], output_logits=True, return_dict_in_generate=True)
    torch.testing.assert_close(
        torch.stack(out.logits)[:, 1], torch.stack(alone.logits)[:, 0], rtol=1e-3, atol=1e-3
    )


def test_a_conversation_goes_on_with_prefill(model: Any) -> None:
    """The second turn's tokens are a prompt again, though the cache is not empty."""
    first = generate(model, ids_of(1, 5), return_dict_in_generate=True)
    cache = first.get("cache", first.get("past_key_values"))
    held = cache.get_seq_length()
    turn = torch.cat([first.sequences, ids_of(1, 3, 7)], 1)
    spy = Spy(model)
    name = cache_name(model)
    generate(model, turn, 3, attention_mask=torch.ones_like(turn), **{name: cache})
    assert spy.calls[0] == ("prefill", held, turn.shape[1] - held)
    assert {stage for stage, _, _ in spy.calls[1:]} == {"decode"}


def test_several_tokens_at_once_may_be_decode(model: Any, tiny_llama_untied: Path) -> None:
    """An assistant's guesses are checked several in one call; its first ones come with the prompt, in one mixed call."""
    ids, spy = ids_of(1, 10), Spy(model)
    alone = generate(model, ids, 8).tolist()
    spy.calls.clear()
    model.tokens.clear()
    made = generate(model, ids, 8, assistant_model=load(tiny_llama_untied))
    assert made.tolist() == alone
    assert spy.calls[0][:2] == ("prefill", 0)
    checks = [n for stage, cached, n in spy.calls if cached >= 10 and stage == "decode"]
    assert len(checks) == len(spy.calls) - 1 and max(checks) > 1, "no guess was checked"
    mixed = spy.calls[0][2] - 10
    assert model.tokens["prefill/prefill"] == 10 and model.tokens["decode/prefill"] == mixed
    assert model.tokens["decode/decode"] == sum(checks)


def batched(model: Any, prompts: list[list[int]], new: int = NEW, **config: Any) -> list[list[int]]:
    """Tokens of each prompt by continuous batching."""
    made = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=16, allow_block_sharing=False, **config
        ),
    )
    assert [out.error for out in made.values()] == [None] * len(prompts)
    return [list(out.generated_tokens) for out in made.values()]


@pytest.mark.parametrize("chunk", [64, 16, 5])
def test_continuous_batching_makes_the_tokens_of_each_prompt_alone(chunk: int, model: Any) -> None:
    """Prompts of one token, and prompts whose last chunk is one token: each token under the view of its own stage."""
    lengths = [1, 6, 11, 21]
    prompts = [ids_of(1, n, n)[0].tolist() for n in lengths]
    alone = [generate(model, torch.tensor([prompt]))[0, len(prompt) :].tolist() for prompt in prompts]
    model.tokens.clear()
    assert batched(model, prompts, max_batch_tokens=chunk) == alone
    assert model.tokens == {"prefill/prefill": sum(lengths), "decode/decode": len(lengths) * (NEW - 1)}
    if chunk == 5:
        assert model._dispatcher.mixed > 0, "steps that hold both stages were meant"


def test_continuous_batching_over_one_view_where_the_policy_says_so(tiny_llama_untied: Path) -> None:
    policy = find_policy(POLICY)
    for mixed, wrong in (("prefill", "decode/prefill"), ("decode", "prefill/decode")):
        changed = msgspec.structs.replace(
            policy, serving=msgspec.structs.replace(policy.serving, mixed=mixed)
        )
        model = pdq_tui.staged(load(tiny_llama_untied), changed, kernels="torch")
        batched(model, [ids_of(1, n, n)[0].tolist() for n in (6, 11, 21)], max_batch_tokens=8)
        assert model.tokens[wrong] > 0


def test_scoring_a_text_is_prefill(model: Any, tiny_llama_untied: Path) -> None:
    """As lm-eval's log-likelihoods: one call, no cache given, logits of every position."""
    ids, spy = ids_of(3, 11), Spy(model)
    wanted = rounded(load(tiny_llama_untied), find_policy(POLICY), "prefill")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted(ids).logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits,
            wanted(ids).logits,
            rtol=1e-3,
            atol=1e-3,
        )
    assert {stage for stage, _, _ in spy.calls} == {"prefill"}


def test_a_call_whose_state_nobody_knows_is_refused(model: Any) -> None:
    ids, cache = ids_of(1, 6), DynamicCache(config=model.config)
    name = cache_name(model)
    with torch.no_grad():
        model(ids[:, :3], **{name: cache})
        with pytest.raises(UsageError, match="how many of its tokens are the prompt's"):
            model(ids[:, 3:], **{name: cache})
        spy = Spy(model)
        with model.request(6):
            model(ids[:, 3:5], **{name: cache})
            model(ids[:, 5:], **{name: cache})
            model(ids[:, :1], **{name: cache})
    assert spy.calls == [("prefill", 3, 2), ("prefill", 5, 1), ("decode", 6, 1)]


def test_the_model_itself_stays_as_it_is(tiny_llama_untied: Path) -> None:
    plain, ids = load(tiny_llama_untied), ids_of(1, 7)
    before = generate(plain, ids).tolist()
    staged = pdq_tui.staged(plain, POLICY, prompt_tokens=7, kernels="torch")
    assert isinstance(staged, type(plain)) and staged.device == plain.device
    assert generate(plain, ids).tolist() == before
    assert sum(p.numel() for p in staged.parameters()) == sum(p.numel() for p in plain.parameters())
    coverage = staged.arm.coverage["decode"]
    assert coverage.converted_parameters > 0 and staged.arm.weights.extra_bytes > 0


def test_a_directory_is_loaded_with_its_tokenizer(tiny_llama: Path) -> None:
    staged = pdq_tui.staged(tiny_llama, "bf16", device="cpu", dtype="fp32", kernels="torch")
    assert staged.tokenizer is not None and generate(staged, ids_of(1, 4), 3).shape == (1, 7)


def test_what_cannot_be_is_refused_with_the_reason(tiny_llama: Path) -> None:
    quantized = msgspec.structs.replace(find_policy("bf16"), kv=KvPolicy("int8", "int8", "write"))
    with pytest.raises(UnfitError, match=r"KV cache int8: .*transformers' own cache"):
        pdq_tui.staged(load(tiny_llama), quantized, kernels="torch")
    with pytest.raises(UsageError):
        pdq_tui.staged(load(tiny_llama), "no-such-policy", kernels="torch")
    model = pdq_tui.staged(load(tiny_llama), "int8", kernels="torch")
    with pytest.raises(UsageError, match="input_ids"):
        model.generate(inputs_embeds=torch.zeros(1, 3, 64), max_new_tokens=2)


def test_lm_eval_takes_it(tiny_llama: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = pdq_tui.staged(tiny_llama, POLICY, device="cpu", dtype="fp32", kernels="torch")
    lm = HFLM(pretrained=model, tokenizer=model.tokenizer, backend="causal", device="cpu")
    asked = [Instance("loglikelihood", {}, ("hello there", " you"), 0)]
    assert lm.loglikelihood(asked)[0][0] < 0
    assert set(model.tokens) == {"prefill/prefill"}


def test_importing_the_package_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pdq_tui; print(pdq_tui.staged.__name__, 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["staged", "False"]
