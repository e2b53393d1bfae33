"""The one adapter between the engine and a device: synchronise, marks in time, memory counters, capability.

Everything that measures goes through here, so that the CPU, a CUDA device and the tests' fake asynchronous device are
timed by the same code.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from pdq_tui.core import cpus
from pdq_tui.core.protocol import DeviceInfo
from pdq_tui.engine import memory, threads
from pdq_tui.engine.kernels import capability
from pdq_tui.errors import UnfitError

# torch ships no types for its events.
_Event: Any = torch.cuda.Event

#: A point in the device's own order of work; only its device can read it.
Mark = Any


class Device(Protocol):
    """What the engine asks of a device.

    ``mark`` is a point in the device's stream of work and costs no synchronise; ``elapsed_ms`` may be called only
    after a ``synchronize`` that came later than both marks; ``peek_ms`` is for live display and returns None where
    the answer is not known yet. ``host_ns`` is the host's monotonic clock (the tests' device has a virtual one).
    """

    kind: str
    torch_device: torch.device
    capability: tuple[int, int] | None
    total_bytes: int | None
    memory_method: str

    def info(self) -> DeviceInfo: ...
    def synchronize(self) -> None: ...
    def mark(self) -> Mark: ...
    def elapsed_ms(self, first: Mark, second: Mark) -> float: ...
    def peek_ms(self, first: Mark, second: Mark) -> float | None: ...
    def host_ns(self) -> int: ...
    def reset_peak(self) -> None: ...
    def peak_bytes(self) -> int | None: ...
    def allocated_bytes(self) -> int | None: ...
    def free_bytes(self) -> int | None: ...
    def empty_cache(self, mapped: Iterable[Path] = ()) -> None:
        """Give back what is free. ``mapped``: files whose mappings were only read."""
        ...


class CpuDevice:
    """The CPU: work is done when a call returns, so a mark is the clock and a synchronise is nothing."""

    kind = "cpu"

    def __init__(self, wanted_threads: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.capability: tuple[int, int] | None = None
        self.threads, self.threads_reason = threads.thread_count(
            cpus.affinity(), cpus.cpu_quota(), wanted_threads
        )
        torch.set_num_threads(self.threads)
        self._meter = memory.peak_meter()
        self.memory_method = self._meter.method
        self.total_bytes: int | None = memory.host_total_bytes()

    def info(self) -> DeviceInfo:
        name = cpu_name()
        return DeviceInfo(
            kind="cpu",
            name=name,
            features=list(capability(self, buildable=True).features),
            memory_bytes=self.total_bytes,
            threads=self.threads,
            threads_reason=self.threads_reason,
            cpu=name,
            isa=cpu_isa(),
            memory_method=self.memory_method,
            last_level_cache_bytes=last_level_cache_bytes(),
        )

    def synchronize(self) -> None:
        pass

    def mark(self) -> Mark:
        return time.perf_counter_ns()

    def elapsed_ms(self, first: Mark, second: Mark) -> float:
        return float(second - first) / 1e6

    def peek_ms(self, first: Mark, second: Mark) -> float | None:
        return self.elapsed_ms(first, second)

    def host_ns(self) -> int:
        return time.monotonic_ns()

    def reset_peak(self) -> None:
        self._meter.reset()

    def peak_bytes(self) -> int | None:
        return self._meter.peak_bytes()

    def allocated_bytes(self) -> int | None:
        return memory.rss_bytes()

    def free_bytes(self) -> int | None:
        return memory.host_free_bytes()

    def empty_cache(self, mapped: Iterable[Path] = ()) -> None:
        memory.give_back(mapped)


class CudaDevice:
    """One CUDA device: marks are events in the current stream, memory figures are the caching allocator's."""

    kind = "cuda"
    memory_method = "CUDA allocator high-water mark"

    def __init__(self, index: int, wanted_threads: int | None = None) -> None:
        self.index = index
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._properties: Any = torch.cuda.get_device_properties(index)
        self.capability: tuple[int, int] | None = torch.cuda.get_device_capability(index)
        self.total_bytes: int | None = int(self._properties.total_memory)
        self.threads, self.threads_reason = threads.thread_count(
            cpus.affinity(), cpus.cpu_quota(), wanted_threads
        )
        torch.set_num_threads(self.threads)

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            kind="cuda",
            name=str(self._properties.name),
            index=self.index,
            uuid=cuda_uuid(self._properties),
            bus_id=cuda_bus_id(self._properties),
            capability=self.capability,
            driver=cuda_driver(),
            features=list(capability(self, buildable=True).features),
            memory_bytes=self.total_bytes,
            threads=self.threads,
            threads_reason=self.threads_reason,
            cpu=cpu_name(),
            isa=cpu_isa(),
            memory_method=self.memory_method,
            last_level_cache_bytes=getattr(self._properties, "L2_cache_size", None),
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> Mark:
        event = _Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def elapsed_ms(self, first: Mark, second: Mark) -> float:
        return float(first.elapsed_time(second))

    def peek_ms(self, first: Mark, second: Mark) -> float | None:
        return self.elapsed_ms(first, second) if second.query() else None

    def host_ns(self) -> int:
        return time.monotonic_ns()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def allocated_bytes(self) -> int | None:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def free_bytes(self) -> int | None:
        """Free on the device plus what our own allocator holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        idle = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free) + int(idle)

    def empty_cache(self, mapped: Iterable[Path] = ()) -> None:
        torch.cuda.empty_cache()


def open_device(kind: str = "auto", gpu: str | None = None, wanted_threads: int | None = None) -> Device:
    """``kind``: auto, cuda or cpu. ``gpu``: index among the visible devices, or a UUID or its unique beginning.

    Raises UnfitError where CUDA was asked for and there is none, or no such GPU.
    """
    if kind not in ("auto", "cuda", "cpu"):
        raise UnfitError(f"no device kind is called {kind!r}", "legal: auto, cuda, cpu")
    if kind == "cpu" or (kind == "auto" and gpu is None and not torch.cuda.is_available()):
        return CpuDevice(wanted_threads)
    if not torch.cuda.is_available():
        build = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no usable GPU"
        raise UnfitError(f"no CUDA device: {build}", "use --device cpu, or install a CUDA build of torch")
    return CudaDevice(pick_gpu(gpu, cuda_devices()), wanted_threads)


def pick_gpu(word: str | None, uuids: list[str | None]) -> int:
    """Index among the visible devices (CUDA_VISIBLE_DEVICES already applied). Raises UnfitError, never guesses."""
    if word is None:
        return 0
    if word.isdigit():
        if int(word) < len(uuids):
            return int(word)
        raise UnfitError(f"there is no GPU {word}", f"visible: 0 to {len(uuids) - 1}")
    hits = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(word)]
    if len(hits) == 1:
        return hits[0]
    known = ", ".join(uuid for uuid in uuids if uuid) or "none with a UUID"
    raise UnfitError(f"{'several GPUs match' if hits else 'no GPU is called'} {word!r}", f"visible: {known}")


def cuda_devices() -> list[str | None]:
    """UUIDs of the devices that CUDA shows; None for one that this torch does not tell."""
    return [cuda_uuid(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]


def cuda_uuid(properties: Any) -> str | None:
    """NVML's spelling of the device's UUID; None where this torch does not tell it."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    return f"{'MIG' if ' MIG ' in str(properties.name) else 'GPU'}-{uuid}"


def cuda_driver() -> str | None:
    """The CUDA version that the driver speaks, "13.0"; None where this torch does not tell it."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = int(ask()) if ask is not None else 0
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def cuda_bus_id(properties: Any) -> str | None:
    """NVML's spelling of the PCI address; None where this torch does not tell it."""
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    return f"{domain:08X}:{bus:02X}:{slot:02X}.0"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "CPU"
    for line in text.splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


#: Instruction sets that decide which CPU kernel is the fast one, as /proc/cpuinfo spells them.
ISA = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "sve",
)


def cpu_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            flags = set(line.partition(":")[2].split())
            return [name for name in ISA if name in flags]
    return []


def last_level_cache_bytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the largest cache that one core reaches; None where the system does not tell."""
    sizes = []
    for entry in cpu.glob("index*/size"):
        text = entry.read_text(encoding="ascii", errors="replace").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes) if sizes else None
