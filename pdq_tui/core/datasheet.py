"""What vendors' data sheets promise: memory bandwidth, and dense products by dtype. Stood beside what was measured, never
in its place: no kernel reaches a data sheet.

GB/s and TFLOP/s without sparsity, from the product pages and architecture whitepapers of NVIDIA; boards are told apart
by the name that the driver gives. A board that is not here has no data sheet here.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec


class DataSheet(msgspec.Struct, frozen=True):
    board: str
    read_gbps: float
    compute_tflops: dict[str, float]


def _board(name: str, gbps: float, **tflops: float) -> DataSheet:
    return DataSheet(name, gbps, tflops)


_HOPPER: Final = {"bf16": 989.0, "fp16": 989.0, "int8": 1979.0, "fp8": 1979.0}
_AMPERE: Final = {"bf16": 312.0, "fp16": 312.0, "int8": 624.0}
#: Pattern of the driver's name → data sheet; the first that matches.
_BOARDS: Final[tuple[tuple[str, DataSheet], ...]] = (
    (r"\bH200\b(?!.*NVL)", _board("H200 SXM", 4800.0, **_HOPPER)),
    (r"\bH100\b.*HBM3|\bH100 SXM", _board("H100 SXM", 3350.0, **_HOPPER)),
    (r"\bA100\b.*SXM.*80GB", _board("A100 SXM 80 GB", 2039.0, **_AMPERE)),
    (r"\bA100\b.*PCIe.*80GB|\bA100 80GB PCIe", _board("A100 PCIe 80 GB", 1935.0, **_AMPERE)),
    (r"\bA100\b.*40GB", _board("A100 40 GB", 1555.0, **_AMPERE)),
    (r"\bL40S\b", _board("L40S", 864.0, bf16=362.0, fp16=362.0, int8=733.0, fp8=733.0)),
    (r"\bL4\b", _board("L4", 300.0, bf16=121.0, fp16=121.0, int8=242.0, fp8=242.0)),
    (r"\bA10\b", _board("A10", 600.0, bf16=125.0, fp16=125.0, int8=250.0)),
    (r"\bTesla T4\b|\bNVIDIA T4\b", _board("T4", 320.0, fp16=65.0, int8=130.0)),
)


def data_sheet(name: str) -> DataSheet | None:
    """The data sheet of the board that the driver calls ``name``; None where none is known."""
    return next((sheet for pattern, sheet in _BOARDS if re.search(pattern, name)), None)
