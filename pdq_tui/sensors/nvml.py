"""NVML through ``pynvml``: one query wrapper, and the groups of fields that one getter answers.

Every getter may be unsupported, forbidden, or absent from an old driver's library. A field that cannot be read is None
with a reason; it takes no other field with it, and it is said once in the log.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psutil
import pynvml

from pdq_tui.sensors.clocks import throttling
from pdq_tui.sensors.join import Identity

#: Where NVML's own words do not say what it means for the reader. Codes: NVML API reference, nvmlReturn_t.
REASONS: Final = {
    1: "NVML is not initialised",
    2: "NVML refused the argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    9: "the driver is not loaded",
    10: "NVML timed out",
    12: "no driver library",
    13: "the driver is too old for this query",
    15: "GPU is lost",
    16: "the GPU needs a reset",
    17: "blocked by the operating system",
    18: "library and driver are of different versions",
    25: "the driver is too old for this query",
    999: "NVML error 999",
}
#: Another symbol for the same quantity is worth asking after these.
_TRY_OLDER: Final = frozenset({3, 13, 25})
#: After these nothing of a GPU answers until NVML is started anew: uninitialised, driver gone, GPU lost or to be reset,
#: unknown.
_LOST: Final = frozenset({1, 9, 15, 16, 999})
FIRST: Final = "first reading: nothing to compare with"
_MIG: Final = "n/a (MIG: only the whole GPU's is known)"
#: Parts whose GPU shares the system's memory. By name, because "not supported" alone is also what discrete cards answer.
_INTEGRATED: Final = re.compile(r"\b(GB10|Jetson|Tegra|Orin|Thor|Xavier|DGX Spark)\b", re.IGNORECASE)


class Answer(NamedTuple):
    """``code`` 0: ``value`` holds; else ``reason`` says why not."""

    value: Any
    reason: str
    code: int


_said: set[tuple[str, str, int]] = set()
_lost: set[str] = set()


def ask(where: str, function: str, *args: Any) -> Answer:
    """Call one pynvml function. ``where`` names the GPU in the log. Never raises an NVML error."""
    try:
        answer = Answer(getattr(pynvml, function)(*args), "", 0)
        _lost.discard(where)
        return answer
    except pynvml.NVMLError as error:
        code = int(error.value)
        if code in _LOST:
            _lost.add(where)
        reason = REASONS.get(code, f"NVML error {code}")
    except UnicodeDecodeError:
        code, reason = -1, "NVML answered with broken text"
    if (where, function, code) not in _said:
        _said.add((where, function, code))
        print(f"sensors: {where}: {function}: {reason} ({code})", file=sys.stderr, flush=True)
    return Answer(None, reason, code)


def first_of(where: str, *queries: tuple[Any, ...]) -> tuple[int, Answer]:
    """Ask the newest form first, an older one where the driver does not have it: (which answered, answer)."""
    answer = Answer(None, "no query", -1)
    for position, (function, *args) in enumerate(queries):
        answer = ask(where, function, *args)
        if answer.code not in _TRY_OLDER:
            return position, answer
    return len(queries) - 1, answer


def is_lost(where: str) -> bool:
    """True where the last that this GPU answered is that it, or the driver, is gone."""
    return where in _lost


# -- start -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """``kind``: ok, absent, driver-not-loaded, version-mismatch, error (as in ``protocol.SensorState``)."""

    kind: str
    text: str
    hint: str | None = None
    driver: str | None = None
    devices: tuple[Device, ...] = ()


_FAILURES: Final = {
    12: (
        "absent",
        "no NVIDIA driver library (libnvidia-ml.so.1) here: no GPU sensors",
        "with an NVIDIA GPU: install its driver, or start the container with the NVIDIA runtime",
    ),
    9: (
        "driver-not-loaded",
        "the NVIDIA kernel driver is not loaded: no GPU sensors",
        "load it with 'modprobe nvidia', or look at why it did not load with 'dmesg'",
    ),
    18: (
        "version-mismatch",
        "NVIDIA library and kernel driver are of different versions: no GPU sensors",
        "reboot, or unload and reload the nvidia kernel modules; usual after a driver update",
    ),
    4: (
        "error",
        "no permission to use NVML: no GPU sensors",
        "check the rights of /dev/nvidia* and /dev/nvidiactl",
    ),
    13: (
        "error",
        "libnvidia-ml.so.1 lacks nvmlInitWithFlags, so it is a stub or a very old driver's: no GPU sensors",
        "take the CUDA toolkit's 'stubs' directory out of LD_LIBRARY_PATH",
    ),
}


def start() -> Start:
    """Load the library, initialise it, and find the GPUs. May take seconds, or hang with a sick driver."""
    _lost.clear()
    _samples.clear()
    begun = ask("NVML", "nvmlInit")
    if begun.code:
        kind, text, hint = _FAILURES.get(
            begun.code,
            (
                "error",
                f"NVML does not start ({begun.reason}): no GPU sensors",
                "see what 'nvidia-smi' and 'dmesg' say",
            ),
        )
        return Start(kind, text, hint)
    driver = ask("NVML", "nvmlSystemGetDriverVersion").value
    count = ask("NVML", "nvmlDeviceGetCount")
    if count.code:
        return Start("error", f"NVML cannot count GPUs ({count.reason}): no GPU sensors", None, driver)
    devices = tuple(device for i in range(count.value) for device in _open(i))
    plural = "" if count.value == 1 else "s"
    text = f"NVML: {count.value} GPU{plural}, driver {driver or 'of unknown version'}"
    return Start("ok", text, None, driver, devices)


def stop() -> None:
    """Give up what NVML holds, so that it can be started anew. May hang with a sick driver."""
    ask("NVML", "nvmlShutdown")


@dataclass(frozen=True)
class Device:
    """A GPU or a MIG slice. ``handle`` is its own, ``board`` the whole GPU's; None with ``closed`` the reason."""

    identity: Identity
    handle: Any
    board: Any
    name: str | None = None
    closed: str | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        part = "" if self.identity.slice is None else f" slice {self.identity.slice}"
        return f"GPU {self.identity.index}{part}"

    @property
    def integrated(self) -> bool:
        return self.name is not None and _INTEGRATED.search(self.name) is not None


def _open(index: int) -> list[Device]:
    """The GPU, then its MIG slices."""
    where = f"GPU {index}"
    handle = ask(where, "nvmlDeviceGetHandleByIndex", index)
    if handle.code:
        return [Device(Identity(index), None, None, closed=handle.reason)]
    missing: dict[str, str] = {}
    name = _identify(where, "nvmlDeviceGetName", handle.value, "name", missing)
    uuid = _identify(where, "nvmlDeviceGetUUID", handle.value, "uuid", missing)
    pci = _identify(where, "nvmlDeviceGetPciInfo", handle.value, "bus_id", missing)
    bus_id = str(pci.busId) if pci is not None else None
    # GPUs without MIG answer "not supported": that is no gap in what is known.
    mode = ask(where, "nvmlDeviceGetMigMode", handle.value)
    mig_mode = mode.code == 0 and mode.value[0] == 1
    whole = Device(Identity(index, uuid, bus_id, mig_mode), handle.value, handle.value, name, missing=missing)
    return [whole, *_slices(whole)] if mig_mode else [whole]


def _slices(whole: Device) -> list[Device]:
    most = ask(whole.where, "nvmlDeviceGetMaxMigDeviceCount", whole.handle)
    found = []
    for position in range(most.value or 0):
        handle = ask(whole.where, "nvmlDeviceGetMigDeviceHandleByIndex", whole.handle, position)
        if handle.code:  # 6, not found: this place holds no slice
            continue
        where, missing = f"{whole.where} slice {position}", dict[str, str]()
        name = _identify(where, "nvmlDeviceGetName", handle.value, "name", missing)
        uuid = _identify(where, "nvmlDeviceGetUUID", handle.value, "uuid", missing)
        identity = Identity(whole.identity.index, uuid, whole.identity.bus_id, True, position)
        found.append(Device(identity, handle.value, whole.handle, name, missing=missing))
    return found


def _identify(where: str, function: str, handle: Any, key: str, missing: dict[str, str]) -> Any:
    answer = ask(where, function, handle)
    if answer.code:
        missing[key] = answer.reason
    return answer.value


# -- groups of fields --------------------------------------------------------------------------------------------------


@dataclass
class Reading:
    """Values and reasons by field name of ``protocol.GpuSample``; ``processes``: (pid, bytes or None) by NVML."""

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    processes: list[tuple[int, int | None]] | None = None


@dataclass(frozen=True)
class Group:
    """Fields that one getter answers. ``slow``: may take seconds on a healthy driver, so it is polled apart."""

    name: str
    fields: tuple[str, ...]
    read: Callable[[Device], Reading]
    slow: bool = False


def _one(key: str, answer: Answer, scale: float = 1.0) -> Reading:
    if answer.code:
        return Reading(missing={key: answer.reason})
    return Reading(values={key: answer.value * scale})


def _utilization(device: Device) -> Reading:
    if device.identity.slice is not None or device.identity.mig_mode:
        return Reading(missing={"gpu_util": "utilisation n/a (MIG)", "memory_util": "utilisation n/a (MIG)"})
    answer = ask(device.where, "nvmlDeviceGetUtilizationRates", device.handle)
    if answer.code:
        return Reading(missing={"gpu_util": answer.reason, "memory_util": answer.reason})
    return Reading(values={"gpu_util": answer.value.gpu / 100, "memory_util": answer.value.memory / 100})


def _memory(device: Device) -> Reading:
    """v2 tells the driver's own reserve apart; v1 counts it as used, so the two are not to be compared."""
    position, answer = first_of(
        device.where,
        ("nvmlDeviceGetMemoryInfo", device.handle, pynvml.nvmlMemory_v2),
        ("nvmlDeviceGetMemoryInfo", device.handle),
    )
    total = int(answer.value.total) if not answer.code else 0
    system = psutil.virtual_memory().total
    if device.integrated and total < system // 2:
        # Nothing, zero or a carve-out: the part uses the system's memory. What is used comes from the process list.
        return Reading(
            values={"memory_total_bytes": system, "unified": True},
            missing={"memory_reserved_bytes": "unified memory: nothing is reserved apart"},
        )
    if not total:
        reason = answer.reason or "NVML reports a total of 0"
        return Reading(missing=dict.fromkeys(_MEMORY, reason))
    values = {"memory_total_bytes": total, "memory_used_bytes": int(answer.value.used)}
    if position == 0:
        values["memory_reserved_bytes"] = int(answer.value.reserved)
        return Reading(values={**values, "memory_version": "v2"})
    reserved = "the driver's memory query (v1) counts it as used"
    return Reading(values={**values, "memory_version": "v1"}, missing={"memory_reserved_bytes": reserved})


def _power(device: Device) -> Reading:
    if device.identity.slice is not None:
        return Reading(missing={"power_w": _MIG})
    return _one("power_w", ask(device.where, "nvmlDeviceGetPowerUsage", device.handle), 1e-3)


def _power_limit(device: Device) -> Reading:
    return _one("power_limit_w", ask(device.where, "nvmlDeviceGetEnforcedPowerLimit", device.board), 1e-3)


def _energy(device: Device) -> Reading:
    if device.identity.slice is not None:
        return Reading(missing={"energy_j": _MIG})
    return _one("energy_j", ask(device.where, "nvmlDeviceGetTotalEnergyConsumption", device.handle), 1e-3)


def _temperature(device: Device) -> Reading:
    _, answer = first_of(
        device.where,
        ("nvmlDeviceGetTemperatureV", device.board, pynvml.NVML_TEMPERATURE_GPU),
        ("nvmlDeviceGetTemperature", device.board, pynvml.NVML_TEMPERATURE_GPU),
    )
    return _one("temperature_c", answer, 1.0)


def _sm_clock(device: Device) -> Reading:
    answer = ask(device.where, "nvmlDeviceGetClockInfo", device.board, pynvml.NVML_CLOCK_SM)
    return _one("sm_mhz", answer, 1.0)


def _memory_clock(device: Device) -> Reading:
    answer = ask(device.where, "nvmlDeviceGetClockInfo", device.board, pynvml.NVML_CLOCK_MEM)
    return _one("memory_mhz", answer, 1.0)


def _throttle(device: Device) -> Reading:
    _, answer = first_of(
        device.where,
        ("nvmlDeviceGetCurrentClocksEventReasons", device.board),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", device.board),
    )
    if answer.code:
        return Reading(missing={"throttle": answer.reason, "throttle_raw": answer.reason})
    return Reading(values={"throttle": throttling(answer.value), "throttle_raw": answer.value})


def _processes(device: Device) -> Reading:
    _, answer = first_of(
        device.where,
        ("nvmlDeviceGetComputeRunningProcesses_v3", device.handle),
        ("nvmlDeviceGetComputeRunningProcesses_v2", device.handle),
    )
    if answer.code:
        return Reading(missing=dict.fromkeys(_PROCESSES, answer.reason))
    return Reading(processes=[(int(p.pid), p.usedGpuMemory) for p in answer.value])


def _power_fields(device: Device) -> Reading:
    """The average and the instant, told apart, where the driver has them."""
    names = ("power_average_w", "power_instant_w")
    if device.identity.slice is not None:
        return Reading(missing=dict.fromkeys(names, _MIG))
    ids = [pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_FI_DEV_POWER_INSTANT]
    answer = ask(device.where, "nvmlDeviceGetFieldValues", device.handle, ids)
    if answer.code:
        return Reading(missing=dict.fromkeys(names, answer.reason))
    found = Reading()
    for name, value in zip(names, answer.value, strict=True):
        if value.nvmlReturn:
            found.missing[name] = REASONS.get(value.nvmlReturn, f"NVML error {value.nvmlReturn}")
        else:
            found.values[name] = value.value.uiVal * 1e-3
    return found


def _pcie(device: Device) -> Reading:
    """Each direction alone: a driver counts for 20 ms to answer."""
    found = Reading()
    for name, counter in (
        ("pcie_rx_bytes_s", pynvml.NVML_PCIE_UTIL_RX_BYTES),
        ("pcie_tx_bytes_s", pynvml.NVML_PCIE_UTIL_TX_BYTES),
    ):
        reading = _one(name, ask(device.where, "nvmlDeviceGetPcieThroughput", device.board, counter), 1e3)
        found.values |= reading.values
        found.missing |= reading.missing
    return found


def _ecc(device: Device) -> Reading:
    answer = ask(
        device.where,
        "nvmlDeviceGetTotalEccErrors",
        device.board,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    return _one("ecc_uncorrected", answer, 1)


#: GPM's metrics → our fields, and what one of theirs is in ours: per cent, MiB a second.
_GPM: Final = {
    "sm_activity": (pynvml.NVML_GPM_METRIC_SM_UTIL, 0.01),
    "occupancy": (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, 0.01),
    "tensor_activity": (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 0.01),
    "dram_util": (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 0.01),
    "nvlink_rx_bytes_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, float(1 << 20)),
    "nvlink_tx_bytes_s": (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, float(1 << 20)),
}
#: The last sample of each GPU: what the next one is compared with. Void when NVML is started anew.
_samples: dict[str, Any] = {}


def _gpm(device: Device) -> Reading:
    """What the hardware counted between the last poll and this one."""
    if device.identity.slice is not None or device.identity.mig_mode:
        return Reading(missing=dict.fromkeys(_GPM, "n/a (MIG)"))
    support = ask(device.where, "nvmlGpmQueryDeviceSupport", device.handle)
    if support.code or not support.value.isSupportedDevice:
        why = support.reason or "GPM needs a Hopper GPU or a newer one"
        return Reading(missing=dict.fromkeys(_GPM, why))
    sample = ask(device.where, "nvmlGpmSampleAlloc")
    answer = sample if sample.code else ask(device.where, "nvmlGpmSampleGet", device.handle, sample.value)
    if answer.code:
        return Reading(missing=dict.fromkeys(_GPM, answer.reason))
    before, _samples[device.where] = _samples.get(device.where), sample.value
    if before is None:
        return Reading(missing=dict.fromkeys(_GPM, FIRST))
    wanted = pynvml.c_nvmlGpmMetricsGet_t()
    wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM)
    wanted.sample1, wanted.sample2 = before, sample.value
    for place, (metric, _) in enumerate(_GPM.values()):
        wanted.metrics[place].metricId = metric
    got = ask(device.where, "nvmlGpmMetricsGet", wanted)
    ask(device.where, "nvmlGpmSampleFree", before)
    if got.code:
        return Reading(missing=dict.fromkeys(_GPM, got.reason))
    found = Reading()
    for place, (name, (_, scale)) in enumerate(_GPM.items()):
        metric = got.value.metrics[place]
        if metric.nvmlReturn:
            found.missing[name] = REASONS.get(metric.nvmlReturn, f"NVML error {metric.nvmlReturn}")
        elif not math.isfinite(metric.value):
            found.missing[name] = "GPM answered with no number"
        else:
            found.values[name] = metric.value * scale
    return found


_MEMORY: Final = ("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes")
_PROCESSES: Final = ("process_memory_bytes", "other_processes")
GROUPS: Final = (
    Group("utilization", ("gpu_util", "memory_util"), _utilization),
    Group("memory", _MEMORY, _memory),
    Group("power", ("power_w",), _power),
    Group("power limit", ("power_limit_w",), _power_limit),
    Group("energy", ("energy_j",), _energy),
    Group("temperature", ("temperature_c",), _temperature),
    Group("SM clock", ("sm_mhz",), _sm_clock),
    Group("memory clock", ("memory_mhz",), _memory_clock),
    Group("clock limits", ("throttle", "throttle_raw"), _throttle),
    Group("power by field", ("power_average_w", "power_instant_w"), _power_fields),
    Group("PCIe", ("pcie_rx_bytes_s", "pcie_tx_bytes_s"), _pcie, slow=True),
    Group("ECC", ("ecc_uncorrected",), _ecc, slow=True),
    Group("GPM", tuple(_GPM), _gpm, slow=True),
    Group("processes", _PROCESSES, _processes, slow=True),
)
