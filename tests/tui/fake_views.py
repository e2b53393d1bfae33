"""Made-up pictures of a session, and a session that only records what it is asked for.

Everything is deterministic: no clock, no random numbers, so that a screen drawn from it is the same every time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from pdq_tui.core.kv import KvGeometry
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.protocol import (
    ArmReady,
    Coverage,
    CpuSample,
    DeviceInfo,
    Fallback,
    GpuSample,
    KvInfo,
    LeftModule,
    ModelInfo,
    SensorSample,
    SensorState,
    WeightsInfo,
    WorkloadReady,
)
from pdq_tui.core.stats import Ratio, Summary
from pdq_tui.core.workload import Workload
from pdq_tui.host.runs import Run
from pdq_tui.host.view import ArmView, EngineView, NoteView, Point, SessionView

GIB = 1024**3
STAGED = Policy(
    "w8a8-prefill-int4-decode", StagePolicy("int8", "int8"), StagePolicy("int4", "model", 64), storage="dual"
)
BASE = Policy("bf16")


def summary(
    median: float | None, half: float | None, unit: str, n: int = 212, reason: str | None = None
) -> Summary:
    ci = None if median is None or half is None else (median - half, median + half)
    return Summary(median=median, ci95=ci, n=n if median is not None else 0, unit=unit, reason=reason)


def ratio(metric: str, value: float | None, word: str, *, provisional: bool = False) -> Ratio:
    ci = None if value is None else (value * 0.99, value * 1.01)
    return Ratio(
        reference="B", arm="A", metric=metric, ratio=value, ci95=ci, judgement=word,
        blocks=12, threshold=0.01, noise_floor=0.004, provisional=provisional,
        decided_at=None if provisional or word == "unsure" else 10,
    )  # fmt: skip


def wave(
    base: float, swing: float, end: float = 761.0, seconds: float = 120.0, step: float = 1.0
) -> tuple[Point, ...]:
    """A slow sine around ``base``, one point every ``step`` seconds up to ``end``."""
    count = int(seconds / step)
    return tuple((end - seconds + (i + 1) * step, base + swing * math.sin(i / 9)) for i in range(count))


def arm_ready(arm: str, policy: Policy, extra: int, *, fallbacks: int = 0) -> ArmReady:
    left = [LeftModule(module="lm_head", parameters=28_311_552, bytes=56_623_104, reason="kept by default")]

    def coverage(label: str, stage: str) -> Coverage:
        dense = label == "bf16"
        return Coverage(
            converted_parameters=0 if dense else 106_168_320,
            total_parameters=134_479_872,
            converted_bytes=0 if dense else 106_850_000,
            left_bytes=56_623_104,
            left=left,
            formats={"bf16": 134_479_872} if dense else {label: 106_168_320, "bf16": 28_311_552},
            kernels={"torch-linear": 211} if dense else {f"{label}-mm": 210, "torch-linear": 1},
            runner="inductor" if stage == "decode" else "eager",
        )

    return ArmReady(
        arm=arm,
        policy=policy,
        weights=WeightsInfo(
            stored_bytes=163_473_104 + extra,
            prefill_bytes=163_473_104,
            decode_bytes=120_000_000,
            extra_bytes=extra,
            kept_bytes=56_700_000,
            session_resident_bytes=433_000_000,
        ),
        coverage={s: coverage(policy.stage(s).format.label, s) for s in ("prefill", "decode")},  # type: ignore[arg-type]
        kv=KvInfo(bytes_per_token=23_040, allocated_bytes=576 * 23_040, free_bytes=100_000 * 23_040 + (64 << 20),
                  reserve_bytes=64 << 20, capacity_tokens=100_000),
        fallbacks=[
            Fallback(stage="decode", module="model.layers.*.mlp.down_proj", wanted="int4-g64", used="int4-g32",
                     reason="64 does not divide 1536", modules=30)
        ] if fallbacks else [],
        seconds=1.4,
    )  # fmt: skip


STATS_A = {
    "ttft_ms": (84.1, 0.9, "ms"), "prefill_ms": (83.2, 0.9, "ms"), "prefill_tokens_per_s": (6150.0, 60.0, "tok/s"),
    "prefill_mfu": (0.41, 0.01, "1"), "prefill_explained": (0.71, 0.01, "1"), "tpot_ms": (11.92, 0.05, "ms"),
    "decode_step_ms": (11.92, 0.05, "ms"), "itl_ms": (11.80, 0.07, "ms"), "decode_tokens_per_s": (83.9, 0.4, "tok/s"),
    "bytes_per_step": (88_000_000.0, 0.0, "B"), "bandwidth_gbps": (7.38, 0.04, "GB/s"), "mbu": (0.23, 0.002, "1"),
    "decode_explained": (0.35, 0.01, "1"), "e2e_ms": (835.1, 4.0, "ms"), "handoff_ms": (0.0, 0.0, "ms"),
    "gap_ms": (1.1, 0.1, "ms"), "prefill_peak_bytes": (0.91 * GIB, None, "B"),
    "decode_peak_bytes": (0.74 * GIB, None, "B"), "steady_bytes": (0.70 * GIB, None, "B"),
}  # fmt: skip
STATS_B = {
    "ttft_ms": (129.7, 1.4, "ms"), "prefill_ms": (128.8, 1.4, "ms"), "prefill_tokens_per_s": (3975.0, 50.0, "tok/s"),
    "prefill_mfu": (0.52, 0.01, "1"), "prefill_explained": (0.66, 0.01, "1"), "tpot_ms": (18.9, 0.1, "ms"),
    "decode_step_ms": (18.9, 0.1, "ms"), "itl_ms": (18.6, 0.1, "ms"), "decode_tokens_per_s": (52.9, 0.3, "tok/s"),
    "bytes_per_step": (270_000_000.0, 0.0, "B"), "bandwidth_gbps": (14.29, 0.07, "GB/s"), "mbu": (0.45, 0.003, "1"),
    "decode_explained": (0.52, 0.01, "1"), "e2e_ms": (1320.4, 6.0, "ms"), "handoff_ms": (0.0, 0.0, "ms"),
    "gap_ms": (1.0, 0.1, "ms"), "prefill_peak_bytes": (0.88 * GIB, None, "B"),
    "decode_peak_bytes": (0.72 * GIB, None, "B"), "steady_bytes": (0.69 * GIB, None, "B"),
}  # fmt: skip


def arm_view(arm: str, policy: Policy, stats: dict[str, tuple[float, float | None, str]], n: int) -> ArmView:
    return ArmView(
        arm,
        wanted=policy,
        ready=arm_ready(arm, policy, 54_000_000 if policy.staged else 0),
        requests=n,
        first_use=1,
        stats={k: summary(m, h, u, n) for k, (m, h, u) in stats.items()},
        series={k: wave(m, m * 0.03) for k, (m, _, u) in stats.items() if u != "B"},
    )


def cpu_device() -> DeviceInfo:
    return DeviceInfo(
        kind="cpu", name="AMD EPYC 9R14", cpu="AMD EPYC 9R14", memory_bytes=24 * GIB, threads=2,
        threads_reason="physical cores", isa=["avx512_vnni", "avx512_bf16"], memory_method="RSS, sampled",
        read_peak_gbps=31.6, read_peak_method="best of 3 probes", compute_peak_tflops={"bf16": 0.42, "int8": 0.9},
    )  # fmt: skip


def gpu_device() -> DeviceInfo:
    return DeviceInfo(
        kind="cuda", name="NVIDIA H200", index=0, uuid="GPU-5fd3", bus_id="0000:17:00.0", capability=(9, 0),
        memory_bytes=141 * GIB, threads=16, memory_method="allocator", read_peak_gbps=4300.0,
        read_peak_method="best of 3 probes", compute_peak_tflops={"bf16": 788.0, "int8": 1500.0},
    )  # fmt: skip


def demo_model() -> ModelInfo:
    return ModelInfo(
        id="SmolLM2-135M-Instruct", path="/home/me/.cache/pdq-tui/demo", family="llama", parameters=134_515_008,
        layers=30, hidden=576, vocab=49_152, max_positions=8192, dtype="bf16", chat_template=True, tied_head=True,
        kv=KvGeometry(kv_heads=3, head_dim=64, dtype_bytes=2, windows=(None,) * 30),
    )  # fmt: skip


def cpu_sensors() -> dict[str, Any]:
    return {
        "sensor_state": SensorState(
            nvml="absent", text="no NVIDIA driver here", engine_gpu_reason="the engine runs on the CPU"
        ),
        "sensors": SensorSample(
            cpu=CpuSample(
                load=0.97, engine_load=0.96, engine_rss_bytes=int(0.91 * GIB), memory_total_bytes=24 * GIB,
                memory_available_bytes=11 * GIB, mhz=3650.0, missing={"temperature_c": "this machine has no sensor"},
            )
        ),
        "sensors_age_s": 0.1,
        "sensor_series": {
            "cpu_load": wave(0.95, 0.04), "engine_load": wave(0.95, 0.04), "engine_rss_bytes": wave(0.9e9, 0.05e9),
        },
    }  # fmt: skip


def gpu_sensors() -> dict[str, Any]:
    return {
        "sensor_state": SensorState(nvml="ok", text="driver 580.95", driver="580.95", gpus=1, engine_gpu=0),
        "sensors": SensorSample(
            gpus=[
                GpuSample(
                    index=0, name="NVIDIA H200", uuid="GPU-5fd3", engine=True, gpu_util=0.97, memory_util=0.61,
                    memory_total_bytes=141 * GIB, memory_used_bytes=int(38.2 * GIB), power_w=512.0,
                    power_limit_w=700.0, energy_j=1.2e6, temperature_c=71.0, sm_mhz=1980.0, memory_mhz=3201.0,
                    throttle=[], throttle_raw=0, other_processes=0,
                )
            ],
            cpu=CpuSample(load=0.12, engine_load=0.99, engine_rss_bytes=5 * GIB, memory_total_bytes=128 * GIB),
        ),
        "sensors_age_s": 0.1,
        "sensor_series": {
            "power_w": wave(512.0, 40.0), "gpu_util": wave(0.95, 0.03), "memory_used_bytes": wave(38.2 * GIB, GIB),
            "cpu_load": wave(0.12, 0.02), "engine_rss_bytes": wave(5.0 * GIB, 0.1 * GIB),
        },
    }  # fmt: skip


NOTES = (
    NoteView("12:40:12", "info", "arm switched B → A at request 418 (gap 1.1 ms)"),
    NoteView("12:40:51", "warn", "decode arm A: 1 of 211 Linear left in bf16 (lm_head)", "see 3 Policies"),
    NoteView("12:41:03", "info", "snapshot 001 saved, A n=212"),
)


def make_view(*, gpu: bool = False, **changes: Any) -> SessionView:
    """A run in full swing with both arms measured. ``changes`` replace fields of SessionView."""
    fields: dict[str, Any] = {
        "run_id": "20261202T063000-0f3a",
        "run_dir": "/home/me/.local/state/pdq-tui/runs/20261202T063000-0f3a",
        "elapsed_s": 761.0,
        "engine": EngineView("running", "", 0.0, 4242, 0),
        "active": "A",
        "interleave": False,
        "running": True,
        "model": demo_model(),
        "device": gpu_device() if gpu else cpu_device(),
        "workload": WorkloadReady(
            workload=Workload(),
            prompts=8,
            lengths=[512] * 8,
            prompts_sha256="5b1f",
            chat_template_applied=False,
        ),
        "arms": {"A": arm_view("A", STAGED, STATS_A, 212), "B": arm_view("B", BASE, STATS_B, 208)},
        "ratios": {
            "ttft_ms": ratio("ttft_ms", 0.648, "better"),
            "prefill_ms": ratio("prefill_ms", 0.646, "better"),
            "prefill_tokens_per_s": ratio("prefill_tokens_per_s", 1.547, "better"),
            "tpot_ms": ratio("tpot_ms", 0.631, "better"),
            "decode_tokens_per_s": ratio("decode_tokens_per_s", 1.586, "better"),
            "e2e_ms": ratio("e2e_ms", 0.632, "better"),
        },
        "notes": NOTES,
        "snapshots": ("001",),
        "live_tokens": 37,
        "live_stage": "decode",
    }
    fields |= gpu_sensors() if gpu else cpu_sensors()
    return SessionView(**(fields | changes))


def starting_view(**changes: Any) -> SessionView:
    """The first second: the engine is being started, nothing is known yet."""
    fields: dict[str, Any] = {
        "run_id": "20261202T063000-0f3a", "run_dir": "/tmp/run", "elapsed_s": 0.4,
        "engine": EngineView("starting"), "active": "A", "interleave": False, "running": False,
        "arms": {"A": ArmView("A", wanted=STAGED, pending=True), "B": ArmView("B", wanted=BASE, pending=True)},
    }  # fmt: skip
    return SessionView(**(fields | changes))


class FakeSession:
    """Has LiveSession's face, ``run`` included. ``calls`` lists what it was asked for; ``picture`` is what it shows."""

    def __init__(self, picture: SessionView | None = None) -> None:
        self.picture = picture or make_view()
        self.run = Run(self.picture.run_id, Path(self.picture.run_dir), {"id": self.picture.run_id})
        self.calls: list[tuple[Any, ...]] = []
        self.recorded: list[Any] = []
        self.closed = False

    def change(self, **changes: Any) -> None:
        fields = {name: getattr(self.picture, name) for name in self.picture.__dataclass_fields__}
        self.picture = SessionView(**(fields | changes))

    def view(self, window_s: float | None = 120) -> SessionView:
        return self.picture

    def events(self, since_ns: int | None = None) -> list[Any]:
        return list(self.recorded)

    def note(self, level: str, text: str, hint: str | None = None) -> None:
        self.change(notes=(*self.picture.notes, NoteView("12:41:30", level, text, hint)))

    def record(self, event: Any) -> None:
        self.recorded.append(event)
        if type(event).__name__ == "SnapshotSaved":
            self.change(snapshots=(*self.picture.snapshots, event.name))
            self.note("info", f"snapshot {event.name} saved  {event.arm}  {event.path}")

    def start(
        self, load: Any, a: Policy, b: Policy, workload: Workload, *, active: str = "A", loop: bool = False
    ) -> None:
        self.calls.append(("start", load, a, b, workload, active, loop))

    def set_policy(self, arm: str, policy: Policy) -> None:
        self.calls.append(("set_policy", arm, policy))
        arms = dict(self.picture.arms)
        old = arms[arm]
        fields = {name: getattr(old, name) for name in old.__dataclass_fields__}
        arms[arm] = ArmView(**(fields | {"wanted": policy, "pending": True}))
        self.change(arms=arms)

    def set_workload(self, workload: Workload) -> None:
        self.calls.append(("set_workload", workload))

    def select(self, arm: str) -> None:
        self.calls.append(("select", arm))
        self.change(active=arm)

    def interleave(self, on: bool) -> None:
        self.calls.append(("interleave", on))
        self.change(interleave=on)

    def start_loop(self) -> None:
        self.calls.append(("start_loop",))
        self.change(running=True)

    def stop(self) -> None:
        self.calls.append(("stop",))
        self.change(running=False)

    def trace(self, arm: str, steps: int = 4) -> None:
        self.calls.append(("trace", arm, steps))

    def measure_energy(self, arms: list[str]) -> None:
        self.calls.append(("measure_energy", list(arms)))

    def restart_engine(self) -> None:
        self.calls.append(("restart_engine",))

    def cancel(self) -> None:
        self.calls.append(("cancel",))

    def close(self) -> None:
        self.closed = True
        self.calls.append(("close",))

    @property
    def run_dir(self) -> Path:
        return Path(self.picture.run_dir)


def renamed(policy: Policy, name: str) -> Policy:
    return msgspec.structs.replace(policy, name=name)
