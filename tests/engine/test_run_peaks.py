"""The copy peak on this CPU, and the key under which peaks are cached."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdq_tui.engine import native
from pdq_tui.engine import peaks as peaks_module
from pdq_tui.engine.device import CpuDevice


def test_the_copy_peak_counts_reading_and_writing(tmp_path: Path) -> None:
    device = CpuDevice(1)
    info = device.info()
    found = peaks_module.measure(device, info, lambda *_: None, lambda: False)
    assert found.read_gbps is not None and found.copy_gbps is not None
    # A copy moves two bytes for each that a read moves; it is neither several times a read nor a small part of one.
    assert 0.1 < found.copy_gbps / found.read_gbps < 10
    assert {"fp32", "bf16", "int8"} <= set(found.compute_tflops)


def test_peaks_of_another_driver_are_another_devices(tmp_path: Path) -> None:
    info = CpuDevice(1).info()
    other = msgspec.structs.replace(info, driver="13.0")
    peaks_module.peaks(CpuDevice(1), info, tmp_path, lambda *_: None, lambda: False)
    assert peaks_module.cached(info, tmp_path, native.identity()) is not None
    assert peaks_module.cached(other, tmp_path, native.identity()) is None
    assert peaks_module.cached(info, tmp_path, "other kernels") is None
