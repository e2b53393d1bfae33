"""What several GPUs read as one, where one model lies on all of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Final

import msgspec

from pdq_tui.core.protocol import GpuSample

#: Amounts, which are added.
_ADDED: Final = (
    "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes", "process_memory_bytes", "power_w", "power_limit_w",
    "power_average_w", "power_instant_w", "energy_j", "ecc_uncorrected", "nvlink_rx_bytes_s", "nvlink_tx_bytes_s",
    "pcie_rx_bytes_s", "pcie_tx_bytes_s",
)  # fmt: skip
#: Shares of each device's own, of which the mean is told.
_MEAN: Final = ("gpu_util", "memory_util", "dram_util", "sm_activity", "tensor_activity", "occupancy")
#: Of these the worst: the hottest, the slowest, the fullest.
_HIGHEST: Final = ("temperature_c", "other_processes")
_LOWEST: Final = ("sm_mhz", "memory_mhz")


def together(gpus: Sequence[GpuSample]) -> GpuSample | None:
    """One sample for the engine's GPUs: amounts added, shares averaged, the highest temperature, the lowest clocks. What one
    of them does not tell is missing. None for none; one stays as it is."""
    if len(gpus) < 2:
        return gpus[0] if gpus else None
    first = gpus[0]
    made = msgspec.structs.replace(
        first, missing=dict(first.missing), name=f"{len(gpus)} GPUs", uuid=None, bus_id=None
    )
    for names, merge in ((_ADDED, sum), (_MEAN, _mean), (_HIGHEST, max), (_LOWEST, min)):
        for name in names:
            read = [getattr(gpu, name) for gpu in gpus]
            silent = next((gpu for gpu, value in zip(gpus, read, strict=True) if value is None), None)
            if silent is None:
                setattr(made, name, merge(read))
                made.missing.pop(name, None)
                continue
            setattr(made, name, None)
            made.missing[name] = f"GPU {silent.index}: {silent.missing.get(name, 'not read')}"
    silent = next((gpu for gpu in gpus if gpu.throttle is None), None)
    if silent is None:
        made.throttle = list(dict.fromkeys(t for gpu in gpus for t in gpu.throttle or ()))
        made.throttle_raw = functools.reduce(operator.or_, (gpu.throttle_raw or 0 for gpu in gpus))
    else:
        made.throttle = made.throttle_raw = None
        for name in ("throttle", "throttle_raw"):
            made.missing[name] = f"GPU {silent.index}: {silent.missing.get('throttle', 'not read')}"
    return made


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
