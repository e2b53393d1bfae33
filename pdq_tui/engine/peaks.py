"""What this device reaches when it does nothing else: reading, copying, and a product in each dtype.

Measured once for a device, its driver and a thread count, then kept in the cache. The read peak is the best of several probes over
a buffer that no cache holds, since one probe alone is off by a fifth; its name travels with it. The peak of a dtype is
the best of square products that grow until the rate no longer rises: a small one does not fill many cores.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from pdq_tui.core.protocol import DeviceInfo
from pdq_tui.engine import looks, native
from pdq_tui.engine.cancel import check
from pdq_tui.engine.device import Device
from pdq_tui.engine.looks import Look, Looks

#: Raise when a probe changes: cached figures of another version are measured again.
PROBES_VERSION = 5
#: Each probe repeats at most this long, in seconds, and at most this often.
PROBE_S = 0.12
PROBE_TIMES = 8
#: Edges of the square products, smallest and largest; a next one has twice the edge, so eight times the work.
EDGES_CPU = (512, 4096)
EDGES_GPU = (4096, 16384)
#: A larger product is tried only if the last one was faster than all before by this share,
RISE = 0.02
#: if two runs of it are foreseen to end within this time of the dtype's first one, in seconds,
PRODUCTS_S = 0.4
#: and if three matrices of 4-byte elements fit into this share of what is free.
SHARE_OF_FREE = 0.1

Run = Callable[[], object]
#: Makes its operands, and returns what is to be timed.
Probe = Callable[[], Run]
#: Makes the operands of a square product of the given edge, and returns what is to be timed.
Product = Callable[[int], Run]

Progress = Callable[[float, float | None, str], None]


def peaks(
    device: Device,
    info: DeviceInfo,
    cache: Path,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Looks:
    """What was seen of the device's peaks, with what is measured now (2 to 4 s) where that was not enough. Raises Cancelled.

    A peak is the best that was ever seen, and one look may fall into a busy second: the first sessions on a device
    each look again, and so do later ones until enough looks were undisturbed.
    """
    file = _file(info, cache, native.identity())
    known = looks.read(file)
    if known.enough:
        return known
    found = Looks((*known.taken, measure(device, info, progress, cancelled)))
    looks.write(file, info.name, found)
    return found


def _file(info: DeviceInfo, cache: Path, kernels: str | None) -> Path:
    return cache / "peaks" / f"{_key(info, kernels)}.json"


def _key(info: DeviceInfo, kernels: str | None) -> str:
    parts = [
        PROBES_VERSION, info.kind, info.name, info.uuid, info.driver, info.threads, info.isa, torch.__version__,
        kernels,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@torch.inference_mode()
def measure(device: Device, info: DeviceInfo, progress: Progress, cancelled: Callable[[], bool]) -> Look:
    """Try the probes one after the other. A dtype that this device has no product for is left out."""
    before = looks.cpu_times() if info.kind == "cpu" else None
    spreads: list[float] = []
    best_gbps, method = None, ""
    products = list(_products(device))
    total = 5 + len(products)
    done = 0
    for name, bytes_read, probe in _reads(device, info):
        check(cancelled)
        progress(done, total, f"read peak: {name}")
        done += 1
        seconds, _ = _best_seconds(device, probe, cancelled, spreads)
        if seconds is not None and (best_gbps is None or bytes_read / seconds / 1e9 > best_gbps):
            best_gbps, method = bytes_read / seconds / 1e9, name
    check(cancelled)
    progress(done, total, "copy peak")
    done += 1
    copied = _copy(device, info)
    seconds, _ = _best_seconds(device, copied[1], cancelled, spreads)
    copy_gbps = None if seconds is None else copied[0] / seconds / 1e9
    tflops: dict[str, float] = {}
    for dtype, product in products:
        check(cancelled)
        progress(done, total, f"compute peak: {dtype}")
        done += 1
        reached = best_rate(device, product, cancelled, spreads)
        if reached is not None:
            tflops[dtype] = max(reached / 1e12, tflops.get(dtype, 0.0))
    if device.torch_device.type == "cpu" and "fp32" in tflops:
        # A CPU without instructions for a narrow type can widen it first: its limit is never below fp32's.
        tflops = {dtype: max(value, tflops["fp32"]) for dtype, value in tflops.items()}
    device.empty_cache()
    return Look(
        read_gbps=best_gbps,
        read_method=method,
        compute_tflops=tflops,
        copy_gbps=copy_gbps,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        others=looks.others(before, looks.cpu_times()) if before is not None else None,
        spread=statistics.median_high(spreads) if spreads else None,
    )


def best_rate(
    device: Device, product: Product, cancelled: Callable[[], bool], spreads: list[float] | None = None
) -> float | None:
    """The highest FLOP/s of square products of growing edge; None where the smallest one cannot be run."""
    edge, largest = EDGES_CPU if device.torch_device.type == "cpu" else EDGES_GPU
    free = device.free_bytes()
    best, spent = None, 0.0
    while True:
        seconds, took = _best_seconds(device, functools.partial(product, edge), cancelled, spreads)
        spent += took
        if seconds is None:
            return best
        rate = 2.0 * edge**3 / seconds
        rises = best is None or rate > best * (1 + RISE)
        best = rate if best is None else max(best, rate)
        edge *= 2
        fits = free is None or 3 * 4 * edge**2 <= SHARE_OF_FREE * free
        if not rises or edge > largest or not fits or spent + 2 * 8 * seconds > PRODUCTS_S:
            return best


def _best_seconds(
    device: Device, probe: Probe, cancelled: Callable[[], bool], spreads: list[float] | None = None
) -> tuple[float | None, float]:
    """(the shortest of a few runs after a first one, what all of them took); the shortest is None where the device has
    no such operator, or no memory for it. Of three runs or more, how far apart they are is added to ``spreads``."""
    prepared, runs = 0.0, []
    try:
        run = probe()
        for number in range(1 + PROBE_TIMES):
            check(cancelled)
            first = device.mark()
            run()
            second = device.mark()
            device.synchronize()
            seconds = device.elapsed_ms(first, second) / 1e3
            if number == 0:
                prepared = seconds
                continue
            runs.append(seconds)
            if sum(runs) > PROBE_S:
                break
    except (RuntimeError, NotImplementedError):
        return None, prepared + sum(runs)
    best = min(runs, default=0.0)
    if spreads is not None and len(runs) >= 3 and best > 0:
        spreads.append(statistics.median(runs) / best - 1)
    return best or None, prepared + sum(runs)


def buffer_bytes(device: Device, info: DeviceInfo) -> int:
    """Four times the last-level cache and at least 128 MiB (a GPU: 1 GiB), but a tenth of what is free at most."""
    wanted = max(
        4 * (info.last_level_cache_bytes or 32 << 20), (128 << 20) if info.kind == "cpu" else 1 << 30
    )
    free = device.free_bytes()
    return min(wanted, int(SHARE_OF_FREE * free)) if free is not None else wanted


def _reads(device: Device, info: DeviceInfo) -> Iterator[tuple[str, int, Probe]]:
    """(name, bytes read by one run, probe): four ways to read one buffer."""
    where = device.torch_device
    columns = 2048
    rows = max(16, buffer_bytes(device, info) // (4 * columns))
    size = rows * columns * 4
    words = torch.ones(rows, columns, dtype=torch.float32, device=where)
    vector = torch.ones(columns, dtype=torch.float32, device=where)

    def row(dtype: torch.dtype) -> Run:
        halves = words.view(dtype)
        one = torch.ones(1, halves.shape[1], dtype=dtype, device=where)
        return lambda: F.linear(one, halves)

    yield "sum, fp32", size, lambda: words.sum
    yield "matrix times vector, fp32", size, lambda: lambda: torch.mv(words, vector)
    yield "linear of one row, fp16", size, lambda: row(torch.float16)
    yield "linear of one row, bf16", size, lambda: row(torch.bfloat16)


def _copy(device: Device, info: DeviceInfo) -> tuple[int, Probe]:
    """(bytes read and written by one run, probe): one buffer into another."""
    elements = max(1 << 16, buffer_bytes(device, info) // 8)

    def probe() -> Run:
        source = torch.ones(elements, dtype=torch.float32, device=device.torch_device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return 2 * 4 * elements, probe


def told(info: DeviceInfo, cache: Path, kernels: str | None) -> dict[str, Any] | None:
    """What earlier sessions measured of this device, for people; nothing is measured now. ``kernels``: identity of our own
    CPU kernels as those sessions had them."""
    return looks.told(looks.read(_file(info, cache, kernels)))


def _products(device: Device) -> Iterator[tuple[str, Product]]:
    """(dtype, product): what multiplies square matrices of each dtype here."""
    where = device.torch_device

    def dense(dtype: torch.dtype, n: int) -> Run:
        a = torch.ones(n, n, dtype=dtype, device=where)
        b = torch.ones(n, n, dtype=dtype, device=where)
        return lambda: F.linear(a, b)

    def int8(n: int) -> Run:
        a = torch.ones(n, n, dtype=torch.int8, device=where)
        b = torch.ones(n, n, dtype=torch.int8, device=where)
        return lambda: torch._int_mm(a, b.t())

    def fp8(n: int) -> Run:
        a = torch.ones(n, n, device=where).to(torch.float8_e4m3fn)
        b = torch.ones(n, n, device=where).to(torch.float8_e4m3fn)
        one = torch.ones((), device=where)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    def int8_fbgemm(n: int) -> Run:
        a = torch.ones(n, n)
        b = torch.quantize_per_tensor(torch.ones(n, n), 1.0, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(b, None)
        return lambda: torch.ops.quantized.linear_dynamic(a, packed)

    def own(tokens: bool, n: int) -> Run:
        a = torch.ones(n, n, dtype=torch.bfloat16)
        b = torch.ones(n, n, dtype=torch.int8)
        one = torch.ones(n, dtype=torch.bfloat16)
        return lambda: torch.ops.pdq_native.int8(a, b, one, tokens)

    yield "fp32", functools.partial(dense, torch.float32)
    yield "bf16", functools.partial(dense, torch.bfloat16)
    yield "fp16", functools.partial(dense, torch.float16)
    yield "int8", int8
    if where.type == "cpu":
        yield "int8", int8_fbgemm
    if native.loaded() is not None:
        # Without int8 dot products bytes are multiplied as 16-bit numbers as well.
        yield "int8" if torch.cpu._is_vnni_supported() else "int16", functools.partial(own, True)
        yield "int16", functools.partial(own, False)
    if device.capability is not None and device.capability >= (8, 9):
        yield "fp8", fp8
