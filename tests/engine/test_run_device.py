"""Threads, memory meters, device choice, faults and peaks: small parts, each with the file or figure it was given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_device import FakeDevice

from pdq_tui.core import protocol as p
from pdq_tui.core.cgroups import own_memory
from pdq_tui.core.cpus import cpu_quota, quota_v1, quota_v2
from pdq_tui.core.workload import Workload
from pdq_tui.engine import faults, memory
from pdq_tui.engine import peaks as peaks_module
from pdq_tui.engine.channel import LONG_QUEUE, EventWriter, Inbox
from pdq_tui.engine.device import CpuDevice, cuda_bus_id, cuda_uuid, open_device, pick_gpu
from pdq_tui.engine.threads import thread_count
from pdq_tui.errors import UnfitError


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("200000 100000", 2.0),
        ("150000 100000\n", 1.5),
        ("max 100000", None),
        ("", None),
        (None, None),
        ("x y", None),
    ],
)
def test_T14_cpu_max(text: str | None, quota: float | None) -> None:
    assert quota_v2(text) == quota


@pytest.mark.parametrize(("quota_us", "quota"), [("-1", None), ("50000", 0.5), ("400000", 4.0), (None, None)])
def test_T14_cgroup_v1(quota_us: str | None, quota: float | None) -> None:
    assert quota_v1(quota_us, "100000") == quota


@pytest.mark.parametrize(
    ("cpus", "quota", "wanted", "threads", "why"),
    [
        (8, 2.0, None, 2, "quota"),
        (8, 1.5, None, 1, "quota"),
        (8, 0.5, None, 1, "quota"),
        (8, None, None, 8, "affinity"),
        (1, 4.0, None, 1, "affinity"),
        (8, None, 3, 3, "3 asked for"),
        (2, None, 16, 2, "though 16 were asked for"),
        (4, None, 0, 1, "asked"),
    ],
)
def test_T14_threads_are_the_smallest_limit(
    cpus: int, quota: float | None, wanted: int | None, threads: int, why: str
) -> None:
    found, reason = thread_count(cpus, quota, wanted)
    assert found == threads
    assert why in reason


def test_T14_the_tightest_quota_of_all_parents(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000")
    own = tmp_path / "7" / "cgroup"
    own.parent.mkdir()
    own.write_text("0::/a/b\n")
    assert cpu_quota(7, tmp_path, tmp_path) == 1.5
    assert cpu_quota(8, tmp_path, tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    own.write_text("4:memory:/x\n1:cpu,cpuacct:/elsewhere\n")
    assert cpu_quota(7, tmp_path, tmp_path) == 1.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_T14_one_cpu_in_the_affinity_mask_is_one_thread() -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from pdq_tui.core.cpus import affinity\n"
        "from pdq_tui.engine.threads import thread_count\n"
        "print(thread_count(affinity(), None)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_T12_high_water_is_reset_for_each_stage() -> None:
    meter = memory.peak_meter()
    if isinstance(meter, memory.SampledRss):
        pytest.skip("this system does not let VmHWM be reset")
    meter.reset()
    before = meter.peak_bytes()
    ballast = bytearray(os.urandom(1)) * (64 << 20)
    high = meter.peak_bytes()
    del ballast
    meter.reset()
    after = meter.peak_bytes()
    assert before is not None
    assert high is not None
    assert after is not None
    assert high > before + (48 << 20)
    assert after < high - (48 << 20)


def test_T12_without_a_reset_the_set_is_sampled_and_says_so(tmp_path: Path) -> None:
    meter = memory.peak_meter(clear_refs=tmp_path / "missing" / "clear_refs")
    assert isinstance(meter, memory.SampledRss)
    assert "sampled" in meter.method
    assert (meter.peak_bytes() or 0) > 0


def test_a_gpu_is_named_by_index_or_uuid_and_never_guessed() -> None:
    uuids: list[str | None] = ["GPU-aaaa-1", "GPU-aabb-2", None]
    assert pick_gpu(None, uuids) == 0
    assert pick_gpu("1", uuids) == 1
    assert pick_gpu("GPU-aab", uuids) == 1
    for word, said in (("7", "no GPU 7"), ("GPU-aa", "several"), ("GPU-zz", "no GPU is called")):
        with pytest.raises(UnfitError, match=said):
            pick_gpu(word, uuids)


def test_uuid_and_bus_id_are_spelled_as_nvml_does() -> None:
    card = SimpleNamespace(name="H200", uuid="ab-cd", pci_bus_id=0x1B, pci_domain_id=0, pci_device_id=0)
    assert cuda_uuid(card) == "GPU-ab-cd"
    assert cuda_bus_id(card) == "00000000:1B:00.0"
    assert cuda_uuid(SimpleNamespace(name="old")) is None
    assert cuda_bus_id(SimpleNamespace(name="old")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_a_sentence() -> None:
    with pytest.raises(UnfitError, match="no CUDA device"):
        open_device("cuda")
    assert open_device("auto", wanted_threads=1).kind == "cpu"


@pytest.mark.parametrize(
    ("error", "kind", "wanted"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0"),
            "oom",
            int(2.5 * 2**30),
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."),
            "oom",
            400,
        ),
        (MemoryError(), "oom", None),
        (MemoryError("unable to mmap 113534016 bytes from model.safetensors"), "oom", 113_534_016),
        (RuntimeError("can't start new thread"), "oom", None),
        (RuntimeError("CUDA error: device-side assert triggered"), "device", None),
        (ValueError("something else"), "internal", None),
    ],
)
def test_S06_faults_say_stage_wanted_and_free(error: Exception, kind: str, wanted: int | None) -> None:
    found = faults.failure(error, "decode, step 5", FakeDevice())
    assert (found.kind, found.wanted_bytes, found.fatal) == (kind, wanted, True)
    assert "decode, step 5" in found.message
    if kind == "oom":
        assert found.free_bytes == 9900


def test_S06_the_limit_of_an_outer_cgroup_is_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service's limit stands on a cgroup around ours, not at the root."""
    inner = tmp_path / "service" / "job"
    inner.mkdir(parents=True)
    (tmp_path / "service" / "memory.max").write_text("50000000\n")
    (tmp_path / "service" / "memory.current").write_text("20000000\n")
    own = tmp_path / "membership"
    own.write_text("0::/service/job\n")
    monkeypatch.setattr(memory, "own_memory", lambda machine: own_memory(machine, tmp_path, own))
    assert (memory.host_total_bytes(), memory.host_free_bytes()) == (50_000_000, 30_000_000)


def test_S06_a_limit_on_this_process_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    used = memory.status_bytes("VmSize")
    assert used is not None
    infinity = memory.resource.RLIM_INFINITY
    limits = {memory.resource.RLIMIT_AS: used + 50_000_000, memory.resource.RLIMIT_DATA: infinity}
    monkeypatch.setattr(memory.resource, "getrlimit", lambda number: (limits[number], infinity))
    assert 0 < memory.host_free_bytes() <= 50_000_000


def test_S06_a_hint_fits_what_failed() -> None:
    hints = [
        faults.failure(error, stage, None).hint or ""
        for error, stage in (
            (MemoryError(), "load"),
            (MemoryError(), "prefill"),
            (RuntimeError("can't start new thread"), "load"),
        )
    ]
    assert ["smaller model" in hints[0], "prompts" in hints[1], "ulimit" in hints[2]] == [True] * 3


def square_products(
    device: FakeDevice, rate: Callable[[int], float], fails_from: int = 1 << 30
) -> tuple[float | None, list[int]]:
    """(the rate that was found, the edges that were tried): a product of edge n runs at rate(n) FLOP/s."""
    tried: list[int] = []

    def product(n: int) -> Callable[[], None]:
        tried.append(n)
        if n >= fails_from:
            raise RuntimeError("no memory")
        return lambda: device.queue(1e3 * 2.0 * n**3 / rate(n))

    return peaks_module.best_rate(device, product, lambda: False), tried


def many_cores(n: int) -> float:
    """Half of the rate is reached at an edge of 1024."""
    return 1e13 * n / (n + 1024)


def test_a_product_grows_until_its_rate_no_longer_rises() -> None:
    device = FakeDevice()
    device.total_bytes = 64 << 30
    assert square_products(device, many_cores) == (pytest.approx(many_cores(4096)), [512, 1024, 2048, 4096])
    few = {512: 1.0e12, 1024: 1.5e12, 2048: 1.51e12, 4096: 9e12}
    assert square_products(device, few.__getitem__) == (pytest.approx(1.51e12), [512, 1024, 2048]), (
        "risen by less than 2 %"
    )
    falls = {512: 1.0e12, 1024: 0.9e12, 2048: 9e12}
    assert square_products(device, falls.__getitem__) == (pytest.approx(1.0e12), [512, 1024])


def test_a_slow_device_is_not_asked_for_more_than_its_time() -> None:
    """512³ takes 100 ms here: one of eight times the work, twice, would not fit into 0.4 s."""
    device = FakeDevice()
    device.total_bytes = 64 << 30
    _, tried = square_products(device, lambda n: 2.0 * 512**3 / 0.1)
    assert tried == [512]
    assert device.clock_ms < 1e3 * (2 * peaks_module.PRODUCTS_S + peaks_module.PROBE_S)
    device.clock_ms = 0.0
    slowly_rising = {512: 5e10, 1024: 6e10, 2048: 7e10, 4096: 8e10}
    _, tried = square_products(device, slowly_rising.__getitem__)
    assert tried == [512, 1024]


def test_operands_of_a_product_stay_within_a_tenth_of_what_is_free() -> None:
    """Three matrices of 1024² words are 12.6 MB, of 2048² 50.3 MB."""
    device = FakeDevice()
    for free, edges in ((100_000_000, [512]), (130_000_000, [512, 1024]), (510_000_000, [512, 1024, 2048])):
        device.total_bytes = free + device.held
        assert square_products(device, many_cores) == (pytest.approx(many_cores(edges[-1])), edges)


def test_a_product_that_cannot_be_run_leaves_what_smaller_ones_reached() -> None:
    device = FakeDevice()
    device.total_bytes = 64 << 30
    assert square_products(device, many_cores, fails_from=512) == (None, [512])
    assert square_products(device, many_cores, fails_from=2048) == (
        pytest.approx(many_cores(1024)),
        [512, 1024, 2048],
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_products_of_every_dtype_here_make_their_own_operands() -> None:
    device = CpuDevice(1)
    names = [dtype for dtype, product in peaks_module._products(device) if product(64)() is not None]
    assert {"fp32", "bf16"} <= set(names)


def test_droppable_events_are_dropped_and_counted_while_nobody_reads() -> None:
    read, write = os.pipe()
    writer = EventWriter(write, on_broken=lambda: None)
    for number in range(4000):
        writer.send(p.StageSample(request=number, arm="A", stage="decode", tokens=1))
        if number % 1000 == 0:
            writer.send(p.RunEnded(reason="done", requests=number))
    found: list[p.Message] = []
    with os.fdopen(read, "rb") as stream:
        for line in stream:
            found.append(p.decode_event(line))
            if isinstance(found[-1], p.RunEnded) and found[-1].requests == 3000:
                writer.send(p.RunEnded(reason="done", requests=4000))
            # The count travels at the end of a stretch: at the latest after the last event.
            ended = any(isinstance(e, p.RunEnded) and e.requests == 4000 for e in found)
            if ended and any(isinstance(e, p.Dropped) for e in found):
                break
    os.close(write)
    kept = sum(isinstance(e, p.StageSample) for e in found)
    dropped = max(e.count for e in found if isinstance(e, p.Dropped))
    assert dropped > 0
    assert kept + dropped <= 4000
    assert LONG_QUEUE < 4000
    assert sum(isinstance(e, p.RunEnded) for e in found) == 5


def test_stop_and_cancel_reach_what_was_asked_before_them_and_nothing_later() -> None:
    said: list[p.Message] = []
    inbox = Inbox(said.append)
    inbox.take(p.SetWorkload(workload=Workload()))
    inbox.take(p.StartLoop(arm="A", arms=["A", "B"]))
    inbox.take(p.CancelTask())
    inbox.take(p.Stop())
    inbox.take(p.Load(model="y"))
    inbox.take(p.SelectArm(arm="B"))
    inbox.take(p.Interleave(on=True))
    inbox.take(p.Ping(id=5))
    assert [inbox.cancelled(n) for n in (1, 2, 3)] == [True, True, False]
    assert [inbox.stopped(n) for n in (1, 2, 3)] == [True, True, False]
    assert (inbox.selected, inbox.interleave) == ("B", True)
    assert isinstance(said[0], p.Pong)
    assert [inbox.next() for _ in range(3)][2] is not None
    inbox.take(p.Shutdown())
    assert inbox.next() is None
    assert inbox.stopped(3)


def test_S05_f_a_load_that_waits_for_imports_is_cancelled_at_once() -> None:
    """The main thread imports torch for seconds and takes no command meanwhile; the commands' thread answers."""
    said: list[p.Message] = []
    inbox = Inbox(said.append)
    inbox.take(p.Load(model="x"))
    inbox.take(p.SetWorkload(workload=Workload()))
    inbox.take(p.CancelTask())
    (ended,) = said
    assert isinstance(ended, p.TaskEnded) and (ended.task, ended.label, ended.cancelled) == (
        "load",
        "x",
        True,
    )
    inbox.take(p.Load(model="y"))
    left = [taken for taken in (inbox.next(), inbox.next()) if taken is not None]
    assert [type(command) for _, command in left] == [p.SetWorkload, p.Load]
    assert len(said) == 1


def test_a_primitive_that_cannot_be_made_is_memory_only_where_little_is_free() -> None:
    from pdq_tui.engine.faults import kind_of

    error = RuntimeError("could not create a primitive")
    assert [kind_of(error, free) for free in (1 << 20, 1 << 30, None)] == ["oom", "internal", "internal"]
