"""What lies on several devices or in several processes is refused in a sentence, before anything is packed."""

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
from pdq_tui.engine.spread import refuse_processes, refuse_spread
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
    refuse_spread(model)
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(8, 8), two_processes, [Shard(0)]))
    with pytest.raises(
        UnfitError, match=r"tensor parallelism is not supported: 1\.weight is sharded"
    ) as refused:
        refuse_spread(model)
    assert "one GPU" in (refused.value.hint or "") and refused.value.exit_code == 4


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        ({"": 0}, False),
        ({"model.embed_tokens": "cpu", "lm_head": "cpu"}, False),
        ({"model.layers.0": 0, "model.layers.1": 1}, True),
        ({"model.layers.0": 0, "lm_head": "disk"}, True),
    ],
)
def test_layers_on_several_devices_are_refused(places: dict[str, Any], refused: bool) -> None:
    model = nn.Linear(2, 2)
    model.hf_device_map = places  # type: ignore[assignment]
    if not refused:
        refuse_spread(model)
        return
    with pytest.raises(UnfitError, match=r"lie on 2 devices \("):
        refuse_spread(model)


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for alone in ("", "1", "0"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        refuse_processes()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnfitError, match="one of 2 processes"):
        refuse_processes()
    with pytest.raises(UnfitError, match="tensor parallelism is not supported"):
        staged("/no/such/model", "bf16")
