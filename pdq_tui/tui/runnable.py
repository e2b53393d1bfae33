"""Which formats run on the engine's device, told from what the engine said about it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pdq_tui.core.formats import Format
from pdq_tui.core.protocol import DeviceInfo
from pdq_tui.host.view import SessionView

if TYPE_CHECKING:  # the first screen does not wait for kernel tables
    from pdq_tui.core.kernels import Capability, KernelTable

#: Why a format does not run; None where it does, or where nobody knows.
Refusal = Callable[[Format], str | None]

#: torch's names of dtypes → those of kernel tables.
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def capability_of(device: DeviceInfo) -> Capability:
    from pdq_tui.core.kernels import ASSUMED_FEATURES, Capability

    features = ASSUMED_FEATURES if device.features is None else tuple(device.features)
    return Capability(device.kind, features, device.capability)


def refusals(view: SessionView) -> Refusal:
    """Raises UsageError for a kernel table that cannot be read."""
    device, model = view.device, view.model
    if device is None or device.features is None or model is None:
        return lambda _: None
    table, capability = _table(device.kind), capability_of(device)
    dtype = _DTYPES.get(model.dtype, model.dtype)
    return lambda fmt: None if fmt.dense else table.refusal(fmt, dtype, capability)


@lru_cache(maxsize=2)
def _table(kind: str) -> KernelTable:
    from pdq_tui.core.kernels import load_kernels

    return load_kernels(kind)
