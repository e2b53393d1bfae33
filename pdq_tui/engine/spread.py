"""Models that are sharded over several processes, which a policy cannot be applied to."""

from __future__ import annotations

import os

from torch import nn
from torch.distributed import is_available

from pdq_tui.errors import UnfitError


def refuse_processes() -> None:
    """Raises UnfitError in one of several processes that a launcher started for one model."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1:
        raise UnfitError(
            f"tensor parallelism is not supported: this is one of {world} processes of a launcher (WORLD_SIZE), and the linear"
            " layers that a policy puts in place are not sharded by it",
            "start it once, without torchrun, on one GPU, or with --gpu 0,1 for its layers on several",
        )


def refuse_sharded(model: nn.Module) -> None:
    """Raises UnfitError for a model in memory whose parameters are sharded over processes."""
    if is_available():
        from torch.distributed.tensor import DTensor

        sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise UnfitError(
                f"tensor parallelism is not supported: {sharded} is sharded over processes, and the linear layers that a policy"
                " puts in place are not",
                "load the model without tp_plan, on one GPU or with a device_map",
            )
