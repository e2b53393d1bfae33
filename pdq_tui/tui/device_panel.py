"""The device panel: what the sensors say, each field alone, n/a with its reason."""

from __future__ import annotations

from pdq_tui.core.metrics import counted
from pdq_tui.core.protocol import CpuSample, GpuSample
from pdq_tui.core.stats import Summary
from pdq_tui.core.together import together
from pdq_tui.host.view import SessionView
from pdq_tui.tui.heading import Look
from pdq_tui.tui.lines import Row
from pdq_tui.tui.rows import clip, row

#: Seconds without a sensor reading after which the last one is called stale.
STALE_S = 3.0


def device_title(view: SessionView) -> tuple[str, str]:
    """Title and subtitle of the device panel."""
    gpus = engine_gpus(view)
    source = "NVML" if gpus else "psutil"
    if view.sensors is None:
        return ("DEVICE", "no reading yet")
    if view.sensors_age_s is not None and view.sensors_age_s > STALE_S:
        source = f"stale {view.sensors_age_s:.0f} s"
    if len(gpus) > 1:
        return (f"{len(gpus)} GPUs", source)
    return (f"GPU {gpus[0].index}" if gpus else "CPU", source)


def engine_gpus(view: SessionView) -> list[GpuSample]:
    """The readings of the GPUs that the engine runs on."""
    if view.sensors is None or (view.device is not None and view.device.kind == "cpu"):
        return []
    index = view.sensor_state.engine_gpu if view.sensor_state else None
    return [g for g in view.sensors.gpus if g.engine or g.index == index]


def engine_gpu(view: SessionView) -> GpuSample | None:
    """The same of all of them as one: amounts added, shares averaged."""
    return together(engine_gpus(view))


def device_rows(view: SessionView, width: int, look: Look) -> list[Row]:
    gpu = engine_gpu(view)
    cpu = view.sensors.cpu if view.sensors is not None else CpuSample()
    rows = _gpu_rows(gpu, view, look) if gpu is not None else _cpu_rows(cpu, view, look)
    gpus = engine_gpus(view)
    if len(gpus) > 1:
        rows += [_one_of_several(each) for each in gpus]
    return [clip(r, width) for r in rows]


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value * 100:.0f} %"


def _gib(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 2**30:.1f}"


def _cpu_rows(cpu: CpuSample, view: SessionView, look: Look) -> list[Row]:
    threads = counted(view.device.threads, "thread") if view.device else ""
    rows = [
        row((" load  ", "head"), f"{_share(cpu.load)}   engine {_share(cpu.engine_load)}"),
        row((" RSS   ", "head"), f"{_gib(cpu.engine_rss_bytes)} / {_gib(cpu.memory_total_bytes)} GiB"),
        _peaks(view),
        row(
            (" clock ", "head"),
            (f"{cpu.mhz:.0f} MHz" if cpu.mhz else "n/a") + f"   {_celsius(cpu.temperature_c)}",
        ),
    ]
    if threads:
        rows.append(row((" run   ", "head"), threads))
    rows.append(row((f" {look.foreign(no_gpu_words(view))}", "dim")))
    return rows


def no_gpu_words(view: SessionView) -> str:
    """Why there is no GPU reading."""
    if view.device is not None and view.device.kind == "cpu":
        return "GPU none: CPU run, no power"
    state = view.sensor_state
    if state is None:
        return "sensors starting"
    return state.engine_gpu_reason or state.text


def _celsius(value: float | None) -> str:
    return "temp n/a" if value is None else f"{value:.0f} C"


def _peaks(view: SessionView) -> Row:
    stats = view.arms[view.active].stats if view.active in view.arms else {}
    texts = [
        f"{letter} {_gib(_peak(stats.get(f'{stage}_peak_bytes')))}"
        for letter, stage in (("P", "prefill"), ("D", "decode"))
    ]
    return row((" peak  ", "head"), "  ".join(texts) + " GiB")


def _peak(stat: Summary | None) -> float | None:
    return stat.median if stat is not None else None


def _gpu_rows(gpu: GpuSample, view: SessionView, look: Look) -> list[Row]:
    limit = "" if gpu.power_limit_w is None else f"/{gpu.power_limit_w:.0f}"
    power = (
        f"{gpu.power_w:.0f}{limit} W" if gpu.power_w is not None else f"n/a ({_why(gpu, 'power_w', look)})"
    )
    if gpu.throttle is None:
        throttle = f"n/a ({_why(gpu, 'throttle', look)})"
    else:
        throttle = look.foreign(", ".join(gpu.throttle)) or "none"
    others = "n/a" if gpu.other_processes is None else str(gpu.other_processes)
    clock_text = "n/a" if gpu.sm_mhz is None else f"{gpu.sm_mhz:.0f} MHz"
    return [
        row((" util  ", "head"), f"{_share(gpu.gpu_util)}   sm {clock_text}"),
        row((" power ", "head"), f"{power}   {_celsius(gpu.temperature_c)}"),
        row((" mem   ", "head"), f"{_gib(gpu.memory_used_bytes)} / {_gib(gpu.memory_total_bytes)} GiB"),
        _peaks(view),
        row((" throttle ", "head"), (throttle, "bad" if gpu.throttle else "")),
        row((" other procs ", "head"), (others, "warn" if gpu.other_processes else "")),
    ]


def _one_of_several(gpu: GpuSample) -> Row:
    watts = "n/a" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    return row(
        (f" GPU {gpu.index} ", "head"),
        f"{_share(gpu.gpu_util)}  {_gib(gpu.memory_used_bytes)} GiB  {watts}",
        (" throttled" if gpu.throttle else "", "bad"),
    )


def _why(gpu: GpuSample, name: str, look: Look) -> str:
    return look.foreign(gpu.missing.get(name, "no reading"))
