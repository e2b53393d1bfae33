"""Models whose weights lie on several devices or in several processes, which a policy cannot be applied to."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
            "start it once, without torchrun, on one GPU",
        )


def refuse_spread(model: nn.Module) -> None:
    """Raises UnfitError for a model in memory that is sharded over processes, or laid out over several devices."""
    if is_available():
        from torch.distributed.tensor import DTensor

        sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise UnfitError(
                f"tensor parallelism is not supported: {sharded} is sharded over processes, and the linear layers that a policy"
                " puts in place are not",
                "load the model without tp_plan, on one GPU",
            )
    places = getattr(model, "hf_device_map", None)
    devices = sorted({str(d) for d in places.values()}) if isinstance(places, Mapping) else []
    if len(devices) > 1:
        raise UnfitError(
            f"the model's layers lie on {len(devices)} devices ({', '.join(devices)}): a staged model runs on one",
            'load it with device_map={"": 0}, or on the CPU',
        )
