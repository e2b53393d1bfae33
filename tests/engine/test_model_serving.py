"""Continuous batching with staged dispatch on a tiny model: right tokens, the stage by the request's state, and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from conftest import tiny_tokenizer

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.engine import serving
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UsageError

INFO = p.ModelInfo(id="tiny", vocab=128, max_positions=256)


@pytest.fixture(scope="module", autouse=True)
def probes_in_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def staged(load_tiny: Callable[..., tuple[object, object]], tiny_llama_untied: Path) -> StagedModel:
    model, masters = load_tiny(tiny_llama_untied)
    return StagedModel(model, masters, CpuDevice(), budget_bytes=None, kernels=load_kernels("cpu"))


def load(staged: StagedModel, policy: str, mixed: str = "split", **more: Any) -> tuple[Any, ...]:
    """(served, ended, tokens by number) of one load."""
    found = find_policy(policy)
    found = msgspec.structs.replace(found, serving=msgspec.structs.replace(found.serving, mixed=mixed))
    arm = Arm(policy, found, staged.apply(found, rows=[1, 16]))
    # What the single-stream engine leaves behind (scratch, its inference tensors) must not disturb the server.
    before = arm.staged.start(1, 64, None)
    before.step(before.prefill(torch.tensor([[5, 6, 7]])).argmax(-1))
    loaded: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), info=INFO, eos=frozenset({2}))
    fields: dict[str, Any] = {
        "arm": policy, "concurrency": 3, "seconds": 0.3, "prompt_tokens": 40, "output_tokens": 6, "chunk": 32,
        "kv_tokens": 1024, "rows": 3,
    }  # fmt: skip
    command = p.Serve(**(fields | more))
    tokens: dict[int, list[int]] = {}
    real = serving._served

    def keep(c: Any, which: int, arrived: float, begin: float, result: Any, *, warmup: bool) -> p.Served:
        tokens[which] = list(result.generated_tokens)
        return real(c, which, arrived, begin, result, warmup=warmup)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "_served", keep)
        with serving.Serving(staged, loaded, arm, command, lambda: False) as server:
            events = list(server.run(lambda: False, lambda *_: None))
            prompts = server._prompts
    *served, ended = events
    return served, ended, tokens, prompts, arm


@pytest.mark.parametrize("policy", ["bf16", "int4", "bf16-prefill-int8-decode", "w8a8-prefill-int4-decode"])
def test_a_split_load_gives_the_tokens_of_the_single_stream_engine(staged: StagedModel, policy: str) -> None:
    """Prompts cut into two chunks, steps that hold both stages: every token as one request alone has it."""
    _, ended, tokens, prompts, arm = load(staged, policy)
    assert ended.mixed > 0 and ended.split_steps == ended.mixed and ended.steps > ended.mixed
    same = total = 0
    for which, made in tokens.items():
        ids = torch.tensor([prompts[which % len(prompts)]])
        generation = arm.staged.start(1, 64, None)
        token = generation.prefill(ids).argmax(-1)
        alone = [int(token)]
        generation.handoff()
        for _ in range(5):
            token = generation.step(token).argmax(-1)
            alone.append(int(token))
        same += sum(a == b for a, b in zip(made, alone, strict=False))
        total += len(made)
    # Another attention sums in another order; a tie may fall otherwise, a wrong view or index would change most of them.
    assert same / total > 0.9, (same, total)


def test_each_token_runs_under_its_own_stage(staged: StagedModel) -> None:
    served, ended, _, _, _ = load(staged, "bf16-prefill-int8-decode")
    whole = [s for s in served if s.error is None]
    assert set(ended.tokens) == {"prefill/prefill", "decode/decode"}
    assert ended.tokens["prefill/prefill"] == 40 * len(whole)
    assert ended.tokens["decode/decode"] == sum(s.output_tokens - 1 for s in whole)
    assert sorted(s.output_tokens for s in whole if s.warmup) == [2, 4, 6], "the first round ends one by one"
    assert ended.readmitted == 0 and ended.cancelled == 0


@pytest.mark.parametrize(("mixed", "wrong"), [("prefill", "decode/prefill"), ("decode", "prefill/decode")])
def test_a_mixed_step_under_one_view_is_counted_as_such(staged: StagedModel, mixed: str, wrong: str) -> None:
    _, ended, _, _, _ = load(staged, "bf16-prefill-int8-decode", mixed)
    assert ended.mixed > 0 and ended.split_steps == 0 and ended.tokens[wrong] > 0


def test_a_prompt_of_one_token_is_prefill(staged: StagedModel) -> None:
    served, ended, _, _, _ = load(staged, "bf16-prefill-int8-decode", prompt_tokens=1, output_tokens=3)
    assert ended.tokens["prefill/prefill"] == len(served)
    assert ended.tokens["decode/decode"] == sum(s.output_tokens - 1 for s in served)


def test_times_count_from_the_arrival(staged: StagedModel) -> None:
    served, ended, _, _, _ = load(staged, "bf16", concurrency=None, rate=40.0, seconds=0.5)
    assert len(served) > 5 and [s.arrival_s for s in sorted(served, key=lambda s: s.number)] == sorted(
        s.arrival_s for s in served
    )
    for s in served:
        assert s.queue_ms is not None and 0 <= s.queue_ms <= s.ttft_ms < s.e2e_ms
        assert s.e2e_ms == pytest.approx(s.ttft_ms + 5 * s.tpot_ms)
    assert ended.busy_s > 0 and ended.seconds >= max(s.arrival_s for s in served)


def test_a_closed_loop_keeps_its_concurrency(staged: StagedModel) -> None:
    served, ended, _, _, _ = load(staged, "bf16", concurrency=4, seconds=1.0)
    assert 2.5 < ended.busy_s / ended.seconds <= 4.01
    assert sum(s.warmup for s in served) == 4 and len(served) >= 8


def test_requests_of_one_length_do_not_stay_in_step(staged: StagedModel) -> None:
    """Prompts that fit into one step, all alike: the uneven first round ends a third of an answer apart, so the prompts that
    follow meet others' decode. How long they then stay apart is the threads' affair, and no share of the steps is promised."""
    served, ended, _, _, _ = load(
        staged, "bf16", concurrency=3, seconds=1.0, prompt_tokens=16, output_tokens=48, chunk=64
    )
    assert sorted(s.output_tokens for s in served if s.warmup) == [16, 32, 48]
    assert ended.mixed >= 2


def test_a_stopped_load_ends(staged: StagedModel) -> None:
    policy = find_policy("bf16")
    arm = Arm("bf16", policy, staged.apply(policy, rows=[1, 16]))
    loaded: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), info=INFO, eos=frozenset({2}))
    command = p.Serve(
        arm="bf16", concurrency=2, seconds=60.0, prompt_tokens=40, output_tokens=6, kv_tokens=512
    )
    looks: list[int] = []

    def stopped() -> bool:
        looks.append(1)
        return len(looks) > 20

    with serving.Serving(staged, loaded, arm, command, lambda: False) as server:
        *_, ended = server.run(stopped, lambda *_: None)
    assert isinstance(ended, p.ServeEnded) and ended.cancelled > 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"concurrency": 1, "rate": 1.0},
        {"concurrency": 0},
        {"rate": -1.0},
        {"concurrency": 1, "prompt_tokens": 300},
    ],
)
def test_what_is_no_load_is_refused(staged: StagedModel, fields: dict[str, Any]) -> None:
    policy = find_policy("bf16")
    arm = Arm("bf16", policy, staged.apply(policy, rows=[1, 16]))
    loaded: Any = SimpleNamespace(tokenizer=tiny_tokenizer(), info=INFO, eos=frozenset({2}))
    with pytest.raises(UsageError):
        serving.Serving(staged, loaded, arm, p.Serve(arm="bf16", **fields), lambda: False)
