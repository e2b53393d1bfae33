"""``--hard`` beyond formats and kernels of layers: their program, the KV cache's kernel, prompts in pieces. And the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.policy import Keep
from pdq_tui.engine import kv_native, native
from pdq_tui.engine.recorded import UncompiledError
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UnfitError
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("shared_home")


@pytest.fixture
def make(load_tiny: Any) -> Any:
    def build(path: Path, **options: Any) -> StagedModel:
        model, masters = load_tiny(path)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"), **options)

    return build


def refused(staged: StagedModel, policy: Any, words: str) -> None:
    with pytest.raises(UnfitError) as caught:
        staged.apply(policy, rows=[1, 20], hard=True)
    assert words in caught.value.message and caught.value.hint == "leave out --hard to allow it"


def test_Q04_layers_that_could_not_be_compiled_are_a_fallback(
    tiny_llama: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(*_: Any) -> None:
        raise UncompiledError("it branches on its numbers")

    staged = make(tiny_llama, layers="auto")
    monkeypatch.setattr(
        staged, "_runners", lambda stage, *_: (("inductor",) if stage == "decode" else (), [])
    )
    monkeypatch.setattr(staged.compiler, "attach", uncompiled)
    cover = staged.apply(find_policy("bf16"), rows=[1, 20]).coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("eager", "it branches on its numbers")
    refused(
        staged, find_policy("bf16"), "bf16: the decoder layers of decode run one operator after the other"
    )


def test_layers_asked_to_be_eager_are_no_fallback(tiny_llama: Path, make: Any) -> None:
    assert make(tiny_llama).apply(find_policy("bf16"), rows=[1, 20], hard=True).fallbacks == []


def test_Q04_a_cache_that_our_kernel_does_not_take_is_a_fallback(
    tiny_llama: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "loaded", lambda: "a library")
    monkeypatch.setattr(kv_native, "why_not", lambda *_: "heads of 12 are no multiple of 8")
    staged = make(tiny_llama)
    policy = msgspec.structs.replace(find_policy("bf16"), kv=KvPolicy("bf16", "int8", "handoff"))
    info = staged.apply(policy, rows=[1, 20]).kv_info()
    assert (info.kernel, info.kernel_reason) == ("torch, by blocks", "heads of 12 are no multiple of 8")
    refused(staged, policy, "runs torch, by blocks, not our own kernel: heads of 12 are no multiple of 8")


def test_Q04_a_prompt_that_cannot_be_cut_is_a_fallback(tiny_llama: Path, make: Any) -> None:
    policy = msgspec.structs.replace(find_policy("bf16"), kv=KvPolicy("bf16", "int8", "write"))
    refused(make(tiny_llama, prefill_rows=8), policy, "prompts run whole, not in pieces: prefill reads bf16")
    make(tiny_llama, prefill_rows=32).apply(policy, rows=[1, 20], hard=True)
    make(tiny_llama, prefill_rows=0).apply(policy, rows=[1, 20], hard=True)


# -- the output head ---------------------------------------------------------------------------------------------------


def head_of(staged: StagedModel) -> Any:
    [head] = [layer for layer in staged.census.layers if layer.head]
    return head


def test_Q01_a_head_is_kept_unless_named(tiny_llama_untied: Path, make: Any) -> None:
    staged = make(tiny_llama_untied)
    head = head_of(staged)
    arm = staged.apply(find_policy("int8"), rows=[1, 9])
    [left] = [m for m in arm.coverage["decode"].left if m.module == head.name]
    assert left.reason == "the output head is kept unless named" and left.bytes == head.N * head.K * 4


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_llama_untied"])
def test_the_head_has_a_format_of_its_own_by_stage_and_is_counted(
    model: str, request: pytest.FixtureRequest, make: Any, load_tiny: Any
) -> None:
    path = request.getfixturevalue(model)
    staged = make(path)
    head = head_of(staged)
    base = staged.apply(find_policy("bf16"), rows=[1, 9])
    keep = (Keep(modules=("lm_head",), weights="int8", stages=("decode",)),)
    policy = msgspec.structs.replace(find_policy("bf16"), keep=keep, storage="dual")
    arm = staged.apply(policy, rows=[1, 9])
    assert arm.warnings == []
    cover = arm.coverage
    assert cover["prefill"].converted_parameters == 0
    assert cover["decode"].converted_parameters == head.N * head.K
    assert cover["decode"].formats["int8"] == head.N * head.K
    assert arm.weights.decode_bytes - base.weights.decode_bytes == head.N * head.K + 4 * head.N
    # prefill's token is the model's own, decode's come from the rounded head
    _, ours = run(arm, ids_of(1, 9), 3)
    plain, _ = load_tiny(path)
    tokens, theirs = run(base, ids_of(1, 9), 3)
    assert torch.equal(ours[0], theirs[0])
    with torch.inference_mode():
        out = plain.get_output_embeddings()
        weight = out.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        kept = out.weight
        out.weight = torch.nn.Parameter((weight / scale).round() * scale)
        wanted = plain(torch.cat((ids_of(1, 9), tokens[:, :1]), 1)).logits[:, -1]
        out.weight = kept
    torch.testing.assert_close(ours[1], wanted, rtol=2e-3, atol=2e-3)
