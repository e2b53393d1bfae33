"""Several devices that one model lies on, as one: what is timed begins and ends on the first, memory is added up.

A pass visits the devices one after the other and its logits come back to the first (``layout``). A mark waits, on the first
device and without the host, for what the others were given before it, so that work that ends elsewhere (a converted KV cache)
lies between the marks as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pdq_tui.core.protocol import DeviceInfo
from pdq_tui.engine.device import CudaDevice, Device, Mark, cuda_devices, open_device, pick_gpu
from pdq_tui.engine.layout import Layout
from pdq_tui.errors import UnfitError

# torch ships no types for its events.
_Event: Any = torch.cuda.Event
#: In ``--gpu``: all that are visible.
ALL = "all"


class DeviceGroup:
    """``parts``: two or more of one kind, in the order a pass visits them."""

    def __init__(self, parts: Sequence[Device]) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        self.kind, self.torch_device = first.kind, first.torch_device
        known = [part.capability for part in self.parts if part.capability is not None]
        #: The least of them: every layer runs on each.
        self.capability = min(known) if len(known) == len(self.parts) else None
        totals = [part.total_bytes for part in self.parts]
        self.total_bytes = _added(totals)
        self.memory_method = f"{first.memory_method}, added over {len(self.parts)} devices"

    def info(self) -> DeviceInfo:
        """The first device's, with the memory of all; ``others`` tells the rest."""
        told = [part.info() for part in self.parts]
        info = told[0]
        names = list(dict.fromkeys(part.name for part in told))
        info.others = told[1:]
        info.own_memory_bytes = info.memory_bytes
        info.name = f"{len(told)} × {names[0]}" if len(names) == 1 else " + ".join(part.name for part in told)
        info.capability, info.memory_bytes = self.capability, self.total_bytes
        info.memory_method = self.memory_method
        if info.features is not None:
            info.features = [f for f in info.features if all(f in (part.features or ()) for part in told)]
        return info

    def synchronize(self) -> None:
        for part in self.parts:
            part.synchronize()

    def mark(self) -> Mark:
        first, *others = self.parts
        _wait_for(first, others)
        return first.mark()

    def elapsed_ms(self, first: Mark, second: Mark) -> float:
        return self.parts[0].elapsed_ms(first, second)

    def peek_ms(self, first: Mark, second: Mark) -> float | None:
        return self.parts[0].peek_ms(first, second)

    def host_ns(self) -> int:
        return self.parts[0].host_ns()

    def reset_peak(self) -> None:
        for part in self.parts:
            part.reset_peak()

    def peak_bytes(self) -> int | None:
        """The devices' high-water marks, added: they need not have been reached at one time."""
        return _added([part.peak_bytes() for part in self.parts])

    def allocated_bytes(self) -> int | None:
        return _added([part.allocated_bytes() for part in self.parts])

    def free_bytes(self) -> int | None:
        return _added([part.free_bytes() for part in self.parts])

    def free_on(self, device: torch.device) -> int | None:
        return next(part.free_bytes() for part in self.parts if part.torch_device == device)

    def empty_cache(self, mapped: Iterable[Path] = ()) -> None:
        for part in self.parts:
            part.empty_cache(mapped)


def places(device: Device) -> tuple[list[torch.device], list[int | None]]:
    """Where a model on ``device`` may lie, and what is free there."""
    parts: Sequence[Device] = device.parts if isinstance(device, DeviceGroup) else (device,)
    return [part.torch_device for part in parts], [part.free_bytes() for part in parts]


def open_devices(kind: str = "auto", gpu: str | None = None, wanted_threads: int | None = None) -> Device:
    """As ``open_device``; ``gpu`` may name several, "0,1", or all that are visible, "all"."""
    if gpu is None or not (gpu == ALL or "," in gpu):
        return open_device(kind, gpu, wanted_threads)
    if kind == "cpu":
        raise UnfitError(f"--gpu {gpu}: the run was to be on the CPU", "leave out one of the two")
    open_device("cuda", None, wanted_threads)  # says why where there is none
    uuids = cuda_devices()
    parts = [CudaDevice(index, wanted_threads) for index in pick_gpus(gpu, uuids)]
    if len(parts) == 1:
        return parts[0]
    torch.cuda.set_device(parts[0].index)  # home: what names no device lies there
    return DeviceGroup(parts)


def devices_of(layout: Layout) -> Device:
    """Those that a model in memory lies on. Raises UnfitError."""
    if layout.home.type != "cuda":
        return open_device(layout.home.type)
    parts = [CudaDevice(device.index or 0) for device in layout.devices]
    torch.cuda.set_device(parts[0].index)
    return DeviceGroup(parts) if len(parts) > 1 else parts[0]


def pick_gpus(words: str, uuids: list[str | None]) -> list[int]:
    """Indices among the visible devices, in the order given. Raises UnfitError, never guesses."""
    if words == ALL:
        return list(range(len(uuids)))
    picked = [pick_gpu(word.strip(), uuids) for word in words.split(",")]
    twice = next((i for i in picked if picked.count(i) > 1), None)
    if twice is not None:
        raise UnfitError(f"--gpu {words} names GPU {twice} twice", "name each once")
    return picked


def _wait_for(first: Device, others: Sequence[Device]) -> None:
    """Let the first device's stream wait for what the others were given; nothing where a device has no streams."""
    if not isinstance(first, CudaDevice):
        return
    stream: Any = torch.cuda.current_stream(first.torch_device)
    for other in others:
        event = _Event()
        event.record(torch.cuda.current_stream(other.torch_device))
        stream.wait_event(event)


def _added(found: Sequence[int | None]) -> int | None:
    known = [n for n in found if n is not None]
    return sum(known) if len(known) == len(found) else None
