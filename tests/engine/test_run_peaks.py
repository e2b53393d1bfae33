"""The copy peak on this CPU, the key under which peaks are cached, and which looks at a device count."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from fake_device import FakeDevice

from pdq_tui.engine import looks, native
from pdq_tui.engine import peaks as peaks_module
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.looks import Look, Looks
from pdq_tui.engine.runner import Peaks


def test_the_copy_peak_counts_reading_and_writing(tmp_path: Path) -> None:
    device = CpuDevice(1)
    info = device.info()
    found = peaks_module.measure(device, info, lambda *_: None, lambda: False)
    assert found.read_gbps is not None and found.copy_gbps is not None
    # A copy moves two bytes for each that a read moves; it is neither several times a read nor a small part of one.
    assert 0.1 < found.copy_gbps / found.read_gbps < 10
    assert {"fp32", "bf16", "int8"} <= set(found.compute_tflops)
    assert found.others is not None and 0 <= found.others <= 1, "Linux tells of the others"
    assert found.spread is not None and found.spread >= 0 and found.at.startswith("20")


def test_peaks_of_another_driver_are_another_devices(tmp_path: Path) -> None:
    info = CpuDevice(1).info()
    other = msgspec.structs.replace(info, driver="13.0")
    peaks_module.peaks(CpuDevice(1), info, tmp_path, lambda *_: None, lambda: False)
    assert peaks_module.told(info, tmp_path, native.identity()) is not None
    assert peaks_module.told(other, tmp_path, native.identity()) is None
    assert peaks_module.told(info, tmp_path, "other kernels") is None


QUIET = {"others": 0.02, "spread": 0.03, "at": "2026-12-03T07:00:00+00:00"}


def look(read: float | None = 10.0, **more: Any) -> Look:
    return Look(**({"read_gbps": read, "read_method": "sum"} | QUIET | more))


def sessions(monkeypatch: pytest.MonkeyPatch, cache: Path, seen: list[Look]) -> Callable[[], Looks]:
    """What each session finds that comes after the others; a StopIteration where one measures that should not."""
    device, coming = CpuDevice(1), iter(seen)
    monkeypatch.setattr(peaks_module, "measure", lambda *_: next(coming))
    return lambda: peaks_module.peaks(device, device.info(), cache, lambda *_: None, lambda: False)


def test_peaks_are_kept_and_only_get_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        look(10.0, compute_tflops={"fp32": 1.0}),
        look(8.0, read_method="mv", compute_tflops={"fp32": 2.0}),
        look(12.0, read_method="mv"),
    ]
    session = sessions(monkeypatch, tmp_path, seen)
    assert session().best == Peaks(10.0, "sum", {"fp32": 1.0})
    assert session().best == Peaks(10.0, "sum", {"fp32": 2.0})
    best = Peaks(12.0, "mv", {"fp32": 2.0})
    assert session().best == best
    assert session().best == best  # from the cache: there is no fourth measurement
    (file,) = (tmp_path / "peaks").glob("*.json")
    assert len(json.loads(file.read_text())["taken"]) == 3
    file.write_text("{damaged")
    with pytest.raises(StopIteration):
        session()


@pytest.mark.parametrize(
    ("busy", "why"),
    [
        ({"others": 0.5}, "other processes had 50% of this machine's CPU time"),
        ({"spread": 0.4}, "repetitions of its probes took 40% longer"),
    ],
)
def test_a_look_on_a_busy_machine_is_said_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: dict[str, float], why: str
) -> None:
    seen = [look(5.0, **busy), look(9.0, **busy), look(10.0), look(11.0), look(10.5)]
    session = sessions(monkeypatch, tmp_path, seen)
    first = session()
    assert first.warning is not None and why in first.warning and "looks again" in first.warning
    assert first.words == "best of 1 look, the last on 2026-12-03; 1 on a busy machine"
    assert session().warning is not None
    assert session().warning is None, "one undisturbed look is enough not to warn"
    session()
    last = session()
    assert last.enough and last.best.read_gbps == 11.0
    assert last.words == "best of 5 looks, the last on 2026-12-03; up to 9% apart; 2 on a busy machine"
    assert session() == last


def test_a_machine_that_is_never_quiet_is_not_measured_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions(
        monkeypatch, tmp_path, [look(float(n), others=0.9) for n in range(1, looks.MOST_LOOKS + 1)]
    )
    for _ in range(looks.MOST_LOOKS + 1):
        found = session()
    assert found.best.read_gbps == looks.MOST_LOOKS
    assert found.warning is not None and "looks again" not in found.warning


def test_what_others_take_of_a_machine_is_what_is_not_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    def reading(busy_s: float, idle_s: float, own_s: float) -> looks.CpuTimes:
        tick = os.sysconf("SC_CLK_TCK")
        stat = tmp_path / "stat"
        user, steal = int(busy_s * tick / 2), int(busy_s * tick) - int(busy_s * tick / 2)
        stat.write_text(f"cpu  {user} 0 0 {int(idle_s * tick)} 0 0 0 {steal} 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
        found = looks.cpu_times()
        assert found is not None
        return msgspec.structs.replace(found, own=own_s)

    before = reading(10.0, 90.0, 5.0)
    assert looks.others(before, reading(14.0, 94.0, 9.0)) == 0.0, "all of it is ours"
    assert looks.others(before, reading(14.0, 94.0, 7.0)) == pytest.approx(0.25), "2 of 8 s"
    assert looks.others(before, before) is None
    (tmp_path / "stat").unlink()
    assert looks.cpu_times() is None


def test_repetitions_that_differ_are_seen() -> None:
    """Its own clock: a product that takes twice as long two times of three."""
    device = FakeDevice()
    spreads: list[float] = []
    runs = iter([5.0, *([10.0, 20.0, 20.0] * 9)])
    peaks_module.best_rate(device, lambda n: lambda: device.queue(next(runs)), lambda: False, spreads)
    assert spreads and spreads[0] == pytest.approx(1.0)
