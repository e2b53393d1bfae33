"""Canaries on a tiny model: still where nothing changed, and loud where weights did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.engine.canary import Canaries
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel


@pytest.fixture(scope="module", autouse=True)
def probes_in_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def made(
    load_tiny: Callable[..., tuple[object, object]], tiny_llama_untied: Path
) -> tuple[Canaries, StagedModel]:
    model, masters = load_tiny(tiny_llama_untied)
    staged = StagedModel(model, masters, CpuDevice(), budget_bytes=None, kernels=load_kernels("cpu"))
    policy = find_policy("bf16-prefill-int8-decode")
    arm = Arm("x", policy, staged.apply(policy, rows=[1, 16]))
    prompts = [torch.randint(4, 100, (1, 16), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    return Canaries(CpuDevice(), arm, prompts, p.Soak(arm="x", seconds=1.0, canary_tokens=8)), staged


def test_what_does_not_change_is_the_same_to_the_last_bit(made: tuple[Canaries, StagedModel]) -> None:
    canaries, _ = made
    first, *later = [canaries.sing() for _ in range(3)]
    for c in (first, *later):
        assert c.same and c.kld == 0.0 and c.nonfinite == 0 and c.highest == first.highest
        assert c.tokens_sha256 == first.tokens_sha256
    assert [c.number for c in (first, *later)] == [1, 2, 3]


def test_weights_that_go_astray_are_heard(made: tuple[Canaries, StagedModel]) -> None:
    canaries, staged = made
    canaries.sing()
    norm = staged.skeleton.model.norm.weight
    with torch.no_grad():
        norm.mul_(1.0 + 0.5 * torch.rand(norm.shape))
    moved = canaries.sing()
    assert moved.kld is not None and moved.kld > 1e-3
    with torch.no_grad():
        norm[0] = float("nan")
    broken = canaries.sing()
    assert broken.nonfinite > 0 and broken.kld is None and not broken.same
    assert p.decode_event(p.encode(broken)).nonfinite == broken.nonfinite
