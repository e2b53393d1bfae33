"""What the sensors' worker sends."""

from __future__ import annotations

import msgspec

from pdq_tui.core.messages.base import Message


class GpuSample(msgspec.Struct, kw_only=True):
    """One GPU now. Every field alone: None with an entry in ``missing`` (field → reason).

    power_w         what the driver calls usage: an average over the last second on most GPUs since Ampere
    dram_util       share of the memory's theoretical bandwidth that was used, device-wide (GPM, Hopper and newer); with
                    sm_activity (a warp was resident), tensor_activity and occupancy over the last polling interval
    ecc_uncorrected uncorrected memory errors since the driver was loaded
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    mig: bool = False
    engine: bool = False
    gpu_util: float | None = None
    memory_util: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_version: str | None = None
    unified: bool = False
    process_memory_bytes: int | None = None
    other_processes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_average_w: float | None = None
    power_instant_w: float | None = None
    dram_util: float | None = None
    sm_activity: float | None = None
    tensor_activity: float | None = None
    occupancy: float | None = None
    nvlink_rx_bytes_s: float | None = None
    nvlink_tx_bytes_s: float | None = None
    pcie_rx_bytes_s: float | None = None
    pcie_tx_bytes_s: float | None = None
    ecc_uncorrected: int | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    throttle: list[str] | None = None
    throttle_raw: int | None = None
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class CpuSample(msgspec.Struct, kw_only=True):
    """energy_j: RAPL's counter of all packages, the whole machine's. affinity: CPUs that the engine may run on.
    quota: CPUs' worth of time that its cgroup allows."""

    load: float | None = None
    engine_load: float | None = None
    other_load: float | None = None
    engine_rss_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    mhz: float | None = None
    energy_j: float | None = None
    affinity: int | None = None
    quota: float | None = None
    temperature_c: float | None = None
    missing: dict[str, str] = msgspec.field(default_factory=dict)


class SensorState(Message):
    """Sent at start and when it changes. ``nvml``: ok, absent, driver-not-loaded, version-mismatch, error.

    ``engine_gpu``: index of the GPU that is the engine's (first) device, None with ``engine_gpu_reason``, which also says
    where one of several was not found. ``engine_gpus``: indices of all that were.
    """

    nvml: str
    text: str
    hint: str | None = None
    driver: str | None = None
    gpus: int = 0
    engine_gpu: int | None = None
    engine_gpu_reason: str | None = None
    engine_gpus: list[int] = msgspec.field(default_factory=list)


class SensorSample(Message):
    """Droppable on screen, journaled."""

    gpus: list[GpuSample] = msgspec.field(default_factory=list)
    cpu: CpuSample = msgspec.field(default_factory=CpuSample)
