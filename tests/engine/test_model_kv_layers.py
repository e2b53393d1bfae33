"""Compiled decoder layers on a KV cache in another form: the operator that knows the cache reads it, no program does.

Needs a C++ compiler, as the fake NVML library does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.engine import layers
from pdq_tui.engine.staged import StagedArm, StagedModel
from tests.engine.test_model_staged import Cpu, ids_of, run

CACHES = [
    KvPolicy("int8", "int8", "write"),
    KvPolicy("bf16", "fp8", "handoff"),
    KvPolicy("bf16", "int4", "handoff", "channel", 16),
]


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def make(load_tiny: Any) -> Any:
    def build(path: Path, how: str) -> StagedModel:
        model, masters = load_tiny(path)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"), layers=how)

    return build


def applied(staged: StagedModel, kv: KvPolicy, rows: tuple[int, ...]) -> StagedArm:
    return staged.apply(msgspec.structs.replace(find_policy("int8"), kv=kv), rows=rows)


@pytest.mark.parametrize("kv", CACHES, ids=lambda kv: kv.label)
def test_compiled_layers_read_the_quantized_cache(kv: KvPolicy, make: Any, tiny_llama: Path) -> None:
    ids, pad = ids_of(3, 9), torch.tensor([0, 4, 2])
    _, wanted = run(applied(make(tiny_llama, "eager"), kv, (3, 27)), ids, 6, pad)
    arm = applied(make(tiny_llama, "auto"), kv, (3, 27))
    assert arm.coverage["decode"].runner == "inductor", arm.coverage["decode"].runner_reason
    _, got = run(arm, ids, 6, pad)
    # A number between two steps of a 4-bit cache may fall to the other side where a layer rounds elsewhere.
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=0.05 if "int4" in kv.label else 5e-3)


def test_no_program_is_made_for_another_cache_or_another_length(
    make: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = make(tiny_llama, "auto")
    arms = [applied(staged, KvPolicy(), (1, 16))]
    assert len(staged.compiler.programs) == 1
    made: list[object] = []
    monkeypatch.setattr(layers, "_compile", made.append)
    counts = torch._dynamo.utils.counters["inductor"].copy()
    arms += [applied(staged, kv, (1, 16)) for kv in CACHES]
    results = []
    for arm in arms:
        assert arm.coverage["decode"].runner == "inductor"
        results.append(run(arm, ids_of(1, 12), 20)[1])
        run(arm, ids_of(1, 16, 1), 3)
    assert not made and len(staged.compiler.programs) == 1
    assert torch._dynamo.utils.counters["inductor"] == counts
    for other in results[1:]:
        assert not torch.equal(other, results[0])
