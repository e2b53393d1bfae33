"""Builds the fake ``libnvidia-ml.so.1`` (nvml.c) and writes the file that it reads on every call.

fake = FakeNvml.create(tmp_path, gpus=2)              # skips the test, with the reason, where there is no gcc
fake.set("ret.nvmlDeviceGetPowerUsage@0", 3)
subprocess.Popen([...], env=os.environ | fake.env)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
GIB = 1 << 30
UUIDS = (
    "GPU-11111111-aaaa-bbbb-cccc-000000000000",
    "GPU-22222222-aaaa-bbbb-cccc-000000000001",
    "GPU-22223333-aaaa-bbbb-cccc-000000000002",
)
BUSES = ("00000000:17:00.0", "00000000:65:00.0", "00000000:CA:00.0")


def build(without: Sequence[str] = ()) -> Path:
    """The directory that holds the library, built once per source and set of left-out functions."""
    gcc = shutil.which("gcc") or shutil.which("cc")
    if gcc is None:
        pytest.skip("no C compiler: the fake NVML library cannot be built")
    flags = [f"-DWITHOUT_{name}" for name in sorted(without)]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"pdq-fake-nvml-{os.getuid()}" / key
    library = place / "libnvidia-ml.so.1"
    if not library.exists():
        place.mkdir(parents=True, exist_ok=True)
        partial = place / f"{os.getpid()}.so"
        done = subprocess.run(
            [
                gcc,
                "-shared",
                "-fPIC",
                "-O1",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-unused-function",
                *flags,
                "-o",
                partial,
                SOURCE,
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the fake NVML library does not compile:\n{done.stderr}")
        partial.replace(library)  # atomic: another test process may be building the same one
    return place


class FakeNvml:
    """One fake machine: ``env`` is what a process needs to see it, ``set`` and ``drop`` change it at any time."""

    def __init__(self, library: Path, file: Path) -> None:
        self.file = file
        self.calls_file = file.with_suffix(".calls")
        self._lines: dict[str, str] = {}
        before = os.environ.get("LD_LIBRARY_PATH")
        self.env = {
            "LD_LIBRARY_PATH": f"{library}:{before}" if before else str(library),
            "FAKE_NVML": str(file),
            "FAKE_NVML_CALLS": str(self.calls_file),
        }

    @classmethod
    def create(cls, directory: Path, gpus: int = 1, without: Sequence[str] = ()) -> FakeNvml:
        """``gpus`` healthy H200-like GPUs; GPU i answers with values that tell it apart from the others."""
        fake = cls(build(without), directory / "nvml.txt")
        fake._lines |= {"gpus": str(gpus), "driver": "580.65.06"}
        for i in range(gpus):
            total, reserved, used = 141 * GIB, GIB, (10 + i) * GIB
            fake._lines |= {
                f"name@{i}": "NVIDIA H200",
                f"uuid@{i}": UUIDS[i],
                f"bus@{i}": BUSES[i],
                f"val.nvmlDeviceGetUtilizationRates@{i}": f"{90 + i} {40 + i}",
                f"val.nvmlDeviceGetMemoryInfo@{i}": f"{total} {total - used - reserved} {used + reserved}",
                f"val.nvmlDeviceGetMemoryInfo_v2@{i}": f"{total} {reserved} {total - used - reserved} {used}",
                f"val.nvmlDeviceGetPowerUsage@{i}": f"{300000 + i}",
                f"val.nvmlDeviceGetEnforcedPowerLimit@{i}": "700000",
                f"val.nvmlDeviceGetTotalEnergyConsumption@{i}": f"{5000000 + i}",
                f"val.nvmlDeviceGetFieldValues@{i}": f"{310000 + i} {350000 + i} 0 0",
                f"val.nvmlDeviceGetPcieThroughput@{i}": f"{100 + i} {2000 + i}",
                f"val.nvmlDeviceGetTotalEccErrors@{i}": f"{i}",
                f"val.nvmlGpmMetricsGet@{i}": f"2 {88 + i} 3 {41 + i} 5 {33 + i} 10 {71 + i} 60 {5 + i} 61 {6 + i}",
                f"val.nvmlDeviceGetTemperatureV@{i}": f"{60 + i}",
                f"val.nvmlDeviceGetTemperature@{i}": f"{60 + i}",
                f"val.nvmlDeviceGetClockInfo@{i}": f"{1980 - i} 3201",
                f"val.nvmlDeviceGetCurrentClocksEventReasons@{i}": "0",
                f"val.nvmlDeviceGetCurrentClocksThrottleReasons@{i}": "0",
            }
        fake._write()
        return fake

    def set(self, key: str, value: object) -> None:
        self._lines[key] = str(value)
        self._write()

    def drop(self, *keys: str) -> None:
        for key in keys:
            self._lines.pop(key)
        self._write()

    def processes(self, gpu: int, used: dict[int, int]) -> None:
        """The process list of a GPU: pid → bytes."""
        listed = " ".join(f"{pid} {size}" for pid, size in used.items())
        for version in ("v2", "v3"):
            self._lines[f"val.nvmlDeviceGetComputeRunningProcesses_{version}@{gpu}"] = listed
        self._write()

    def calls(self) -> set[str]:
        """Names of the functions that were called so far."""
        return set(self.calls_file.read_text().split()) if self.calls_file.exists() else set()

    def _write(self) -> None:
        partial = self.file.with_suffix(".part")
        partial.write_text("".join(f"{key} {value}\n" for key, value in self._lines.items()))
        partial.replace(self.file)
