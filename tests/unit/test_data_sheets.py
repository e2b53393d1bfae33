"""Data sheets stand beside what was measured, for boards that are known by the driver's name, and for no other."""

from __future__ import annotations

import pytest

from pdq_tui.core.datasheet import data_sheet
from pdq_tui.doctor import peaks
from pdq_tui.host.machine import MeasuredPeaks


@pytest.mark.parametrize(
    ("name", "board", "gbps"),
    [
        ("NVIDIA H200", "H200 SXM", 4800),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 3350),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", 2039),
        ("NVIDIA A100-SXM4-40GB", "A100 40 GB", 1555),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB", 1935),
        ("NVIDIA L4", "L4", 300),
        ("NVIDIA L40S", "L40S", 864),
        ("Tesla T4", "T4", 320),
    ],
)
def test_boards_are_told_apart_by_the_drivers_name(name: str, board: str, gbps: float) -> None:
    sheet = data_sheet(name)
    assert sheet is not None and (sheet.board, sheet.read_gbps) == (board, gbps)


@pytest.mark.parametrize(
    "name", ["AMD EPYC 9R14", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L40", "NVIDIA T400"]
)
def test_no_board_gets_anothers_data_sheet(name: str) -> None:
    assert data_sheet(name) is None


def test_doctor_tells_both_or_that_there_are_none() -> None:
    found = MeasuredPeaks(
        4300.0, "sum, fp32", 4210.0, {"bf16": 788.0}, "best of 3 looks, the last on 2026-12-03"
    )
    measured, age, sheet = [c.text for c in peaks("NVIDIA H200", found)]
    assert "reads 4300 GB/s (sum, fp32), copies 4210 GB/s; TFLOP/s: bf16 788" in measured
    assert age == "best of 3 looks, the last on 2026-12-03"
    assert "4800 GB/s (90% of it read)" in sheet and "fp8 1979" in sheet
    nothing, unknown = [c.text for c in peaks("AMD EPYC", None)]
    assert "not measured yet" in nothing and "no data sheet of AMD EPYC" in unknown
    half = next(peaks("AMD EPYC", MeasuredPeaks(None, "", None, {}))).text
    assert "reads n/a, copies n/a; TFLOP/s: n/a" in half


def test_doctor_warns_of_peaks_that_were_measured_on_a_busy_machine() -> None:
    found = MeasuredPeaks(20.0, "sum, fp32", 9.0, {}, "best of 1 look", "the peaks may be too low")
    [warned] = [c for c in peaks("AMD EPYC", found) if c.status == "warn"]
    assert warned.text == "best of 1 look: the peaks may be too low" and warned.advice
