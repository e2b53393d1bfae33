"""What is sharded over several processes is refused in a sentence, before anything is packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pdq_tui.engine.dropin import staged
from pdq_tui.engine.spread import refuse_processes, refuse_sharded
from pdq_tui.errors import UnfitError


@pytest.fixture
def two_processes() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_a_sharded_model_is_refused_with_the_way_out(two_processes: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    refuse_sharded(model)
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(8, 8), two_processes, [Shard(0)]))
    with pytest.raises(
        UnfitError, match=r"tensor parallelism is not supported: 1\.weight is sharded"
    ) as refused:
        refuse_sharded(model)
    assert "one GPU" in (refused.value.hint or "") and refused.value.exit_code == 4


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for alone in ("", "1", "0"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        refuse_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnfitError, match="one of 2 processes"):
        refuse_processes()
    with pytest.raises(UnfitError, match="tensor parallelism is not supported"):
        staged("/no/such/model", "bf16")
