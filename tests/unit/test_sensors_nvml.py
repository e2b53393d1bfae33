"""The sensors worker against a fake NVML library: start-up failures, missing getters, hung calls, containers."""

from __future__ import annotations

import itertools
import os
import time

import pytest
from fake_nvml import BUSES, GIB, UUIDS, FakeNvml, build
from fake_nvml.sensors_process import sensors

from pdq_tui.core.protocol import GpuSample, SensorSample, SensorState
from pdq_tui.core.together import together

GPM = {
    "sm_activity", "occupancy", "tensor_activity", "dram_util", "nvlink_rx_bytes_s", "nvlink_tx_bytes_s",
}  # fmt: skip
#: Every function of the library that the worker calls, and the fields that are gone when it is not supported.
GETTERS = {
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetPciInfo_v3": {"bus_id"},
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetUtilizationRates": {"gpu_util", "memory_util"},
    "nvmlDeviceGetMemoryInfo_v2": {"memory_reserved_bytes"},
    "nvmlDeviceGetMemoryInfo": set(),
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
    "nvmlDeviceGetFieldValues": {"power_average_w", "power_instant_w"},
    "nvmlDeviceGetPcieThroughput": {"pcie_rx_bytes_s", "pcie_tx_bytes_s"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_uncorrected"},
    "nvmlGpmQueryDeviceSupport": GPM,
    "nvmlGpmSampleGet": GPM,
    "nvmlGpmMetricsGet": GPM,
    "nvmlDeviceGetTemperatureV": set(),
    "nvmlDeviceGetTemperature": set(),
    "nvmlDeviceGetClockInfo": {"sm_mhz", "memory_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
    "nvmlDeviceGetCurrentClocksThrottleReasons": set(),
    "nvmlDeviceGetComputeRunningProcesses_v3": set(),
    "nvmlDeviceGetComputeRunningProcesses_v2": set(),
}
#: Newest and older form of one quantity: it is gone when neither is there.
PAIRS = {
    ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"): {
        "memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes", "memory_version",
    },
    ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"): {"temperature_c"},
    ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"): {
        "throttle", "throttle_raw",
    },
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"): {
        "process_memory_bytes", "other_processes",
    },
}  # fmt: skip
FLAGS = {"index", "mig", "engine", "unified", "missing"}
FIELDS = [name for name in GpuSample.__struct_fields__ if name not in FLAGS]


def settled(gpus: list[GpuSample]) -> bool:
    """Every field of every GPU has been read once."""
    waiting = {"not read yet", "first reading: nothing to compare with"}
    return bool(gpus) and all(waiting.isdisjoint(gpu.missing.values()) for gpu in gpus)


def gone(gpu: GpuSample) -> set[str]:
    return {name for name in FIELDS if getattr(gpu, name) is None}


# -- N01 ---------------------------------------------------------------------------------------------------------------


def test_N01a_no_library(tmp_path):
    missing = {"LD_LIBRARY_PATH": str(tmp_path)}
    with sensors(tmp_path, missing) as worker:
        state = worker.state()
        if state.nvml == "ok":
            pytest.skip("this machine has a real NVML library outside LD_LIBRARY_PATH")
        assert state.nvml == "absent"
        assert "libnvidia-ml.so.1" in state.text
        assert state.hint
        sample = worker.until(lambda e: isinstance(e, SensorSample) and e.cpu.load is not None)
        assert sample.gpus == []


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        pytest.param(9, "driver-not-loaded", "not loaded", id="b-driver-not-loaded"),
        pytest.param(18, "version-mismatch", "reboot", id="c-version-mismatch"),
        pytest.param(999, "error", "999", id="d-unknown"),
        pytest.param(4, "error", "permission", id="e-no-permission"),
    ],
)
def test_N01_init_fails_and_says_which_way(tmp_path, code, kind, words):
    fake = FakeNvml.create(tmp_path)
    fake.set("ret.nvmlInitWithFlags", code)
    with sensors(tmp_path, fake.env) as worker:
        state = worker.state()
        assert state.nvml == kind
        assert words in f"{state.text} {state.hint}"
        assert state.gpus == 0
        sample = worker.until(lambda e: isinstance(e, SensorSample) and e.cpu.load is not None)
        assert sample.gpus == []
        assert sum(isinstance(e, SensorState) for e in worker.events) == 1, "said once"


def test_N01_a_stub_library_is_called_a_stub(tmp_path):
    fake = FakeNvml.create(tmp_path, without=["nvmlInitWithFlags"])
    with sensors(tmp_path, fake.env) as worker:
        state = worker.state()
        assert state.nvml == "error"
        assert "stub" in state.text


# -- N02 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    fake = FakeNvml.create(tmp_path, gpus=2)
    for i in range(2):
        fake.processes(i, {os.getpid(): 6 * GIB, 999999: GIB})
    return fake


def both(worker, fake: FakeNvml) -> list[GpuSample]:
    worker.watch(pid=os.getpid(), uuid=UUIDS[0], bus_id=BUSES[0], interval_s=0.02)
    return worker.gpus(lambda gpus: settled(gpus) and any(gpu.engine for gpu in gpus))


def test_N02_a_healthy_gpu_lacks_nothing_and_every_getter_is_in_the_list(tmp_path, two):
    with sensors(tmp_path, two.env) as worker:
        first, second = both(worker, two)
        assert worker.state().driver == "580.65.06"
        called = two.calls()
    assert gone(first) == set()
    assert gone(second) == {"process_memory_bytes"}, "the engine is not on this one"
    assert first.gpu_util == 0.90
    assert first.memory_used_bytes == 10 * GIB
    assert first.power_w == pytest.approx(300.0)
    assert first.energy_j == pytest.approx(5000.0)
    assert (first.sm_mhz, first.memory_mhz) == (1980, 3201)
    assert (first.power_average_w, first.power_instant_w) == (pytest.approx(310.0), pytest.approx(350.0))
    assert (first.dram_util, second.dram_util) == (pytest.approx(0.71), pytest.approx(0.72))
    assert (first.sm_activity, first.occupancy, first.tensor_activity) == pytest.approx((0.88, 0.41, 0.33))
    assert (first.nvlink_rx_bytes_s, first.nvlink_tx_bytes_s) == (5 << 20, 6 << 20)
    assert (first.pcie_tx_bytes_s, first.pcie_rx_bytes_s) == (100_000, 2_000_000)
    assert (first.ecc_uncorrected, second.ecc_uncorrected) == (0, 1)
    assert first.process_memory_bytes == 6 * GIB
    assert (first.other_processes, second.other_processes) == (1, 2)
    system = {
        "nvmlInitWithFlags",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlGpmSampleAlloc",
        "nvmlGpmSampleFree",
    }
    assert called - system <= GETTERS.keys()


@pytest.mark.parametrize("getter", GETTERS)
def test_N02_one_getter_unsupported_leaves_the_rest(tmp_path, two, getter):
    two.set(f"ret.{getter}@0", 3)
    with sensors(tmp_path, two.env) as worker:
        first, second = both(worker, two)
        time.sleep(0.3)
        log = worker.log.read_text()
    assert gone(first) == GETTERS[getter]
    assert GETTERS[getter] <= first.missing.keys(), "each with a reason"
    assert gone(second) == {"process_memory_bytes"}
    assert log.count("not supported (3)") <= 2, "said once (or for v2 and v1), not per poll"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1])
def test_N02_both_forms_unsupported_leave_the_rest(tmp_path, two, pair):
    for getter in pair:
        two.set(f"ret.{getter}@0", 3)
    with sensors(tmp_path, two.env) as worker:
        first, _ = both(worker, two)
    assert gone(first) == PAIRS[pair]
    assert all(first.missing[name] == "not supported" for name in PAIRS[pair] - {"memory_version"})


def test_N02_power_and_energy_unsupported_are_null_not_zero(tmp_path, two):
    for getter in ("PowerUsage", "TotalEnergyConsumption", "EnforcedPowerLimit"):
        two.set(f"ret.nvmlDeviceGet{getter}@0", 3)
    with sensors(tmp_path, two.env) as worker:
        first, second = both(worker, two)
    assert (first.power_w, first.energy_j, first.power_limit_w) == (None, None, None)
    assert second.power_w == pytest.approx(300.001)


def test_N02_one_power_field_of_two_is_unsupported(tmp_path, two):
    two.set("val.nvmlDeviceGetFieldValues@0", "310000 0 0 3")
    with sensors(tmp_path, two.env) as worker:
        first, _ = both(worker, two)
    assert first.power_average_w == pytest.approx(310.0)
    assert (first.power_instant_w, first.missing["power_instant_w"]) == (None, "not supported")


def test_N02_gpm_on_an_older_gpu_or_driver_is_said_and_one_metric_takes_no_other(tmp_path, two):
    two.set("gpm@0", 0)
    two.set("val.nvmlGpmMetricsGet@1", "10 55")
    with sensors(tmp_path, two.env) as worker:
        first, second = both(worker, two)
    assert {first.missing[name] for name in GPM} == {"GPM needs a Hopper GPU or a newer one"}
    assert second.dram_util == pytest.approx(0.55)
    assert {second.missing[name] for name in GPM - {"dram_util"}} == {"not supported"}
    old = FakeNvml.create(tmp_path, without=["nvmlGpmQueryDeviceSupport", "nvmlDeviceGetFieldValues"])
    with sensors(tmp_path, old.env) as worker:
        worker.watch(pid=os.getpid(), uuid=UUIDS[0], bus_id=BUSES[0], interval_s=0.02)
        (gpu,) = worker.gpus(settled)
    assert (
        gpu.missing["dram_util"] == gpu.missing["power_instant_w"] == "the driver is too old for this query"
    )
    assert gpu.power_w is not None


def test_N02_what_the_file_says_while_it_runs_is_what_is_read(tmp_path, two):
    with sensors(tmp_path, two.env) as worker:
        both(worker, two)
        two.set("val.nvmlGpmMetricsGet@0", "2 1 3 2 5 3 10 4 60 5 61 6")
        (first, _) = worker.gpus(lambda gpus: settled(gpus) and gpus[0].dram_util == pytest.approx(0.04))
        assert first.occupancy == pytest.approx(0.02)


def test_N02_a_lost_gpu_leaves_the_other(tmp_path, two):
    with sensors(tmp_path, two.env) as worker:
        both(worker, two)
        for getter in GETTERS:
            two.set(f"ret.{getter}@0", 15)
        first, second = worker.gpus(lambda gpus: gpus[0].missing.get("process_memory_bytes") == "GPU is lost")
        first, second = worker.gpus(lambda gpus: gpus[0].missing.get("energy_j") == "GPU is lost")
    assert first.uuid == UUIDS[0], "which one it was is still known"
    assert first.power_w is None
    assert second.gpu_util == 0.91


# -- N03, N04 ------------------------------------------------------------------------------------------------------------


def test_N03_unified_memory_comes_from_the_system_and_the_process_list(tmp_path):
    fake = FakeNvml.create(tmp_path)
    fake.set("name@0", "NVIDIA GB10")
    fake.set("ret.nvmlDeviceGetMemoryInfo", 3)
    fake.set("ret.nvmlDeviceGetMemoryInfo_v2", 3)
    fake.processes(0, {999999: 6 * GIB})
    with sensors(tmp_path, fake.env) as worker:
        (gpu,) = worker.gpus(settled)
    assert gpu.unified
    assert gpu.memory_used_bytes == 6 * GIB
    assert gpu.memory_total_bytes is not None
    assert gpu.memory_total_bytes > GIB


@pytest.mark.parametrize("answer", ["unsupported", "zero"])
def test_N03_a_discrete_gpu_without_memory_numbers_is_not_called_unified(tmp_path, answer):
    fake = FakeNvml.create(tmp_path)
    for getter, zeros in (("nvmlDeviceGetMemoryInfo", "0 0 0"), ("nvmlDeviceGetMemoryInfo_v2", "0 0 0 0")):
        if answer == "zero":
            fake.set(f"val.{getter}@0", zeros)
        else:
            fake.set(f"ret.{getter}@0", 3)
    with sensors(tmp_path, fake.env) as worker:
        (gpu,) = worker.gpus(settled)
    assert not gpu.unified
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (None, None)
    assert gpu.missing["memory_total_bytes"] == (
        "not supported" if answer == "unsupported" else "NVML reports a total of 0"
    )


def test_N04_an_old_driver_falls_back_and_says_so(tmp_path):
    old = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetTemperatureV",
    ]
    fake = FakeNvml.create(tmp_path, without=[*old, "nvmlDeviceGetComputeRunningProcesses_v2"])
    with sensors(tmp_path, fake.env) as worker:
        (gpu,) = worker.gpus(settled)
    assert gpu.memory_version == "v1"
    assert gpu.memory_used_bytes == 11 * GIB, "v1 counts the reserve as used"
    assert gpu.memory_reserved_bytes is None
    assert gpu.temperature_c == 60
    assert gpu.other_processes is None
    assert "too old" in gpu.missing["other_processes"]


def test_N04_v2_is_preferred_and_shows_the_reserve_apart(tmp_path):
    fake = FakeNvml.create(tmp_path)
    with sensors(tmp_path, fake.env) as worker:
        (gpu,) = worker.gpus(settled)
    assert gpu.memory_version == "v2"
    assert (gpu.memory_used_bytes, gpu.memory_reserved_bytes) == (10 * GIB, GIB)


@pytest.mark.parametrize("symbol", ["EventReasons", "ThrottleReasons"])
def test_N11_either_symbol_will_do(tmp_path, symbol):
    other = {"EventReasons": "ThrottleReasons", "ThrottleReasons": "EventReasons"}[symbol]
    fake = FakeNvml.create(tmp_path, without=[f"nvmlDeviceGetCurrentClocks{other}"])
    fake.set(f"val.nvmlDeviceGetCurrentClocks{symbol}@0", 0x4 | 0x20)
    with sensors(tmp_path, fake.env) as worker:
        (gpu,) = worker.gpus(settled)
    assert gpu.throttle == ["power cap", "thermal slowdown"]
    assert gpu.throttle_raw == 0x24


# -- N05, N07 ------------------------------------------------------------------------------------------------------------


def test_N05_the_engine_is_joined_by_uuid_not_by_index(tmp_path):
    fake = FakeNvml.create(tmp_path, gpus=2)
    with sensors(tmp_path, fake.env | {"CUDA_VISIBLE_DEVICES": "1"}) as worker:
        assert worker.state().engine_gpu is None
        worker.watch(pid=1, uuid=UUIDS[1].removeprefix("GPU-"))
        assert worker.until(lambda e: isinstance(e, SensorState) and e.engine_gpu == 1)
        gpus = worker.gpus(lambda gpus: any(g.engine for g in gpus))
        assert [g.engine for g in gpus] == [False, True]


def test_N05_several_gpus_of_one_model_are_all_the_engine_s(tmp_path):
    fake = FakeNvml.create(tmp_path, gpus=2)
    with sensors(tmp_path, fake.env) as worker:
        worker.watch(pid=1, uuid=UUIDS[1], others=[(None, BUSES[0])])
        assert worker.until(lambda e: isinstance(e, SensorState) and e.engine_gpus == [1, 0])
        gpus = worker.gpus(lambda gpus: all(g.engine for g in gpus))
        assert len(gpus) == 2
        worker.watch(pid=1, uuid=UUIDS[1], others=[("GPU-elsewhere", None)])
        state = worker.until(lambda e: isinstance(e, SensorState) and e.engine_gpus == [1])
        assert state.engine_gpu == 1 and state.engine_gpu_reason == "NVML knows no GPU GPU-elsewhere"


def test_several_gpus_read_as_one_add_amounts_and_miss_what_one_does_not_tell():
    one = GpuSample(index=0, power_w=300.0, energy_j=10.0, gpu_util=0.9, temperature_c=60.0, sm_mhz=1900.0)
    two = GpuSample(
        index=1, power_w=200.0, gpu_util=0.5, temperature_c=70.0, sm_mhz=1500.0, missing={"energy_j": "n/a"}
    )
    made = together([one, two])
    assert made is not None and (made.power_w, made.gpu_util) == (500.0, 0.7)
    assert (made.temperature_c, made.sm_mhz) == (70.0, 1500.0)
    assert made.energy_j is None and made.missing["energy_j"] == "GPU 1: n/a"
    assert together([two]) is two and together([]) is None and one.missing == {}


def test_N05_a_cpu_run_says_what_hides_the_gpus(tmp_path):
    fake = FakeNvml.create(tmp_path, gpus=3)
    with sensors(tmp_path, fake.env | {"CUDA_VISIBLE_DEVICES": "GPU-2222"}) as worker:
        worker.watch(pid=os.getpid())
        state = worker.until(lambda e: isinstance(e, SensorState) and "CPU" in (e.engine_gpu_reason or ""))
        assert "ambiguous" in (state.engine_gpu_reason or "")


def test_N05_a_mig_slice_shows_its_own_memory_and_no_utilisation(tmp_path):
    fake = FakeNvml.create(tmp_path, gpus=1)
    slice_uuid = "MIG-aaaaaaaa-0000-0000-0000-000000000000"
    fake.set("migs@0", 1)
    fake.set("name@0.0", "NVIDIA H200 MIG 1g.18gb")
    fake.set("uuid@0.0", slice_uuid)
    fake.set("val.nvmlDeviceGetMemoryInfo_v2@0.0", f"{18 * GIB} 0 {16 * GIB} {2 * GIB}")
    with sensors(tmp_path, fake.env) as worker:
        worker.watch(pid=os.getpid(), uuid=slice_uuid)
        (gpu,) = worker.gpus(lambda gpus: settled(gpus) and gpus[0].engine)
    assert gpu.mig
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (18 * GIB, 2 * GIB)
    assert gpu.gpu_util is None
    assert gpu.missing["gpu_util"] == "utilisation n/a (MIG)"
    assert gpu.power_w is None


@pytest.mark.parametrize("listed", ["strange", "unrelated-local"])
def test_N07_a_process_list_without_us_says_nothing_about_us(tmp_path, listed):
    fake = FakeNvml.create(tmp_path)
    pid = 999999 if listed == "strange" else os.getppid()
    fake.processes(0, {pid: 6 * GIB})
    with sensors(tmp_path, fake.env) as worker:
        worker.watch(pid=os.getpid(), uuid=UUIDS[0])
        (gpu,) = worker.gpus(lambda gpus: settled(gpus) and gpus[0].engine)
    assert gpu.process_memory_bytes is None
    assert "PID namespace" in gpu.missing["process_memory_bytes"]
    assert gpu.other_processes is None, "whether the listed one is ours is not known"


# -- N10 ---------------------------------------------------------------------------------------------------------------


def ends_within(worker, seconds: float) -> bool:
    begun = time.monotonic()
    worker.close_stdin()
    worker.process.wait(timeout=20)
    return time.monotonic() - begun < seconds


@pytest.mark.parametrize("delay", ["60000", "forever"])
def test_N10_init_hangs_and_the_rest_goes_on(tmp_path, delay):
    fake = FakeNvml.create(tmp_path)
    fake.set("delay.nvmlInitWithFlags", delay)
    with sensors(tmp_path, fake.env) as worker:
        worker.until(lambda e: isinstance(e, SensorSample))
        assert worker.state().nvml == "starting"
        worker.until(lambda e: isinstance(e, SensorSample) and e.cpu.load is not None)
        assert ends_within(worker, 8.0)


def test_N10_a_slow_process_list_does_not_delay_the_fast_fields(tmp_path):
    fake = FakeNvml.create(tmp_path)
    fake.set("delay.nvmlDeviceGetComputeRunningProcesses_v3", 60_000)
    with sensors(tmp_path, fake.env) as worker:
        worker.watch(pid=os.getpid(), uuid=UUIDS[0], interval_s=0.05)
        worker.gpus(lambda gpus: gpus != [] and gpus[0].power_w is not None)
        fake.set("val.nvmlDeviceGetPowerUsage@0", 123000)
        worker.gpus(lambda gpus: gpus[0].power_w == pytest.approx(123.0))
        (gpu,) = worker.gpus(lambda gpus: "has not answered" in gpus[0].missing.get("other_processes", ""))
        assert gpu.gpu_util == 0.90


def test_N10_a_getter_that_hangs_for_ever_takes_only_its_field(tmp_path):
    fake = FakeNvml.create(tmp_path, gpus=2)
    with sensors(tmp_path, fake.env) as worker:
        worker.watch(pid=os.getpid(), uuid=UUIDS[0], interval_s=0.05)
        worker.gpus(settled)
        fake.set("delay.nvmlDeviceGetPowerUsage@0", "forever")
        fake.set("delay.nvmlDeviceGetTotalEnergyConsumption@0", "forever")
        (first, _) = worker.gpus(lambda gpus: gpus[0].missing.get("power_w", "").startswith("stale"))
        assert first.power_w == pytest.approx(300.0), "the last value, with its age as the reason"
        (first, _) = worker.gpus(lambda gpus: gpus[0].missing.get("energy_j", "").startswith("stale"))
        assert first.energy_j is None, "a counter that stands still would read as no energy"
        fake.set("val.nvmlDeviceGetUtilizationRates@0", "12 3")
        fake.set("val.nvmlDeviceGetUtilizationRates@1", "34 5")
        worker.gpus(lambda gpus: (gpus[0].gpu_util, gpus[1].gpu_util) == (0.12, 0.34))
        (first, _) = worker.gpus(lambda gpus: gpus[0].power_w is None)
        assert "has not answered" in first.missing["power_w"]
        samples = [e for e in worker.events if isinstance(e, SensorSample)]
        gaps = [(b.t_ns - a.t_ns) / 1e9 for a, b in itertools.pairwise(samples)]
        assert max(gaps) < 5.0, "samples come on time all the while"
        assert ends_within(worker, 8.0)


def test_N01_a_driver_that_goes_and_comes_back_is_found_again(tmp_path):
    """Handles of before are void after the driver was unloaded: without a new start nothing would answer again."""
    fake = FakeNvml.create(tmp_path, gpus=2)
    with sensors(tmp_path, fake.env) as worker:
        worker.watch(uuid=UUIDS[1], interval_s=0.05)
        worker.gpus(lambda gpus: settled(gpus) and gpus[1].engine)
        fake.set("driver_gone", 9)
        gone_state = worker.until(lambda e: isinstance(e, SensorState) and e.nvml == "driver-not-loaded")
        assert "not loaded" in gone_state.text and gone_state.hint and gone_state.engine_gpu is None
        assert worker.gpus(lambda gpus: not gpus) == []
        told = len([e for e in worker.events if isinstance(e, SensorState)])
        fake.set("load", 1)
        fake.drop("driver_gone")
        back = worker.gpus(settled)
        assert [gone(gpu) - {"process_memory_bytes", "other_processes"} for gpu in back] == [set(), set()]
        assert back[1].engine and back[1].power_w == pytest.approx(300.001)
        states = [e for e in worker.events if isinstance(e, SensorState)]
        assert (states[-1].nvml, states[-1].engine_gpu) == ("ok", 1)
        assert len(states) == told + 1, "it is said once that it is gone, and once that it is back"


def test_N01_a_driver_that_is_loaded_later_is_found(tmp_path):
    fake = FakeNvml.create(tmp_path)
    fake.set("driver_gone", 9)
    with sensors(tmp_path, fake.env) as worker:
        assert worker.state().nvml == "driver-not-loaded"
        fake.drop("driver_gone")
        assert worker.gpus(settled)[0].power_w == 300.0


def test_the_fake_is_built_once(tmp_path):
    assert build() == build()
