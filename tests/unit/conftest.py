"""A run on a virtual clock: events as an engine would send them, with step times that the test decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy, parse_policy
from pdq_tui.core.workload import Workload, block_turns

MEMORY = 25_769_803_776
RESIDENT = 600_000_000
#: 30 layers of 3 KV heads of 64, keys and values, 2 bytes each.
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2
#: One buffer for the workload below: 512 prompt tokens and 9 new ones.
KV_ALLOCATED = (512 + 9) * KV_BYTES_PER_TOKEN
KV_FREE = MEMORY - RESIDENT
KV_RESERVE = 64 << 20
CAPACITY = (KV_FREE - KV_RESERVE) // KV_BYTES_PER_TOKEN

META: dict[str, Any] = {
    "schema": 1,
    "id": "20260102T030405Z-0f3a",
    "started": "2026-01-02T03:04:05+00:00",
    "tool": {"name": "pdq-tui", "version": "0.1.0"},
    "seed": 7,
    "host": {"cpu": "Virtual CPU", "threads": 2, "memory": MEMORY},
    "libraries": {"torch": "2.13.0", "transformers": "5.24.0"},
    "argv": [],
}


def policy(name: str, prefill: str = "bf16", decode: str = "bf16") -> Policy:
    return parse_policy(
        f'schema = 1\nname = "{name}"\n[prefill]\nweights = "{prefill}"\n[decode]\nweights = "{decode}"\n'
    )


def request(
    *,
    arm: str = "A",
    prefill: float | None = 100.0,
    steps: Sequence[float] = (10.0,) * 10,
    prompt_tokens: int = 512,
    batch: int = 1,
    **more: Any,
) -> p.Request:
    """One request with whole timing: TTFT = prefill, TPOT = mean step, E2E = TTFT + Σ steps."""
    decode = sum(steps) if steps else None
    rows = [len(steps) + 1] * batch
    fields: dict[str, Any] = {
        "request": 0,
        "policy": arm,
        "policy_digest": "",
        "kind": "blocks",
        "prompt_tokens": prompt_tokens,
        "batch": batch,
        "output_tokens": rows,
        "prefill_ms": prefill,
        "ttft_ms": prefill,
        "handoff_ms": 0.0,
        "decode_ms": decode,
        "tpot_ms": decode / len(steps) if decode and steps else None,
        "e2e_ms": None if prefill is None else prefill + (decode or 0.0),
        "itl_ms": list(steps),
        "gap_ms": 0.4,
        "bytes_per_step": 100_000_000 if steps else None,
        "bytes_per_step_wasted": 0,
        "prefill_flops": {"bf16": 2.0e11},
        "prefill_bytes": 270_000_000,
        "decode_flops": {"bf16": 3.0e8} if steps else {},
        "prefill_bound_ms": 50.0,
        "decode_bound_ms": 4.0,
        "memory_method": "virtual",
        "prefill_peak_bytes": 500_000_000,
        "decode_peak_bytes": 400_000_000,
        "steady_bytes": 390_000_000,
    }
    return p.Request(arm=arm, **(fields | more))


@dataclass
class VirtualRun:
    """``speed``: label → (prefill ms, step ms). ``drift``: added relative time per request since the start."""

    speed: dict[str, tuple[float, float]]
    blocks: int = 12
    steps: int = 8
    noise: float = 0.002
    drift: Callable[[int], float] = lambda n: 0.0
    seed: int = 7
    control: bool = True
    policies: dict[str, Policy] = field(default_factory=dict)
    workload: Workload = field(default_factory=lambda: Workload(output_tokens=9, seed=7))
    threads: int = 2
    cpu_mhz: float | None = 3700.0
    other_load: float = 0.05
    solo: bool = True
    reverse: bool = False

    def events(self) -> list[Any]:
        rng = random.Random(self.seed)
        labels = list(self.speed)
        t = 1_000_000_000
        found: list[Any] = [
            p.Hello(role="engine", pid=1, python="3.11.9", libraries={"torch": "2.13.0"}, t_ns=t),
            p.ModelReady(
                model=p.ModelInfo(
                    id="demo",
                    sha256="ab" * 32,
                    parameters=134_515_008,
                    layers=30,
                    dtype="bf16",
                    family="llama",
                ),
                device=p.DeviceInfo(
                    kind="cpu",
                    name="Virtual CPU",
                    memory_bytes=MEMORY,
                    threads=self.threads,
                    cpu="Virtual CPU",
                    memory_method="virtual",
                    read_peak_gbps=40.0,
                    read_peak_method="best of 2 probes",
                    compute_peak_tflops={"bf16": 4.0},
                ),
                attention="pdq",
                load_peak_bytes=800_000_000,
                t_ns=t,
            ),
            p.SensorState(nvml="absent", text="no NVML: a CPU run", t_ns=t),
        ]
        for label in labels:
            rule = self.policies.get(label) or policy(label.split("#")[0])
            found.append(
                p.ArmReady(
                    arm=label,
                    policy=rule,
                    weights=p.WeightsInfo(
                        stored_bytes=269_000_000,
                        prefill_bytes=200_000_000,
                        decode_bytes=200_000_000,
                        shared_bytes=200_000_000,
                        kept_bytes=69_000_000,
                        bits_per_weight={"prefill": None, "decode": None},
                        session_resident_bytes=RESIDENT,
                    ),
                    coverage={
                        s: p.Coverage(
                            total_parameters=106_000_000, kernels={"linear": 210}, formats={"bf16": 210}
                        )
                        for s in ("prefill", "decode")
                    },
                    kv=p.KvInfo(
                        bytes_per_token=KV_BYTES_PER_TOKEN,
                        allocated_bytes=KV_ALLOCATED,
                        free_bytes=KV_FREE,
                        reserve_bytes=KV_RESERVE,
                        capacity_tokens=CAPACITY,
                    ),
                    t_ns=t,
                )
            )
        found.append(
            p.WorkloadReady(
                workload=self.workload,
                prompts=8,
                lengths=[512] * 8,
                prompts_sha256="cd" * 32,
                chat_template_applied=False,
                t_ns=t,
            )
        )
        number = 0
        now = t + 1_000_000

        def add(label: str, kind: str, **more: Any) -> None:
            nonlocal number, now
            prefill, step = self.speed[label]
            slow = 1.0 + self.drift(number)
            rule = self.policies.get(label) or policy(label.split("#")[0])
            steps = [step * slow * (1 + rng.gauss(0, self.noise)) for _ in range(self.steps)]
            r = request(
                arm=label,
                prefill=prefill * slow * (1 + rng.gauss(0, self.noise)),
                steps=steps,
                kind=kind,
                request=number,
                **({"policy": rule.name, "policy_digest": rule.digest} | more),
            )
            r.prompt = number % 2
            r.text = f"answer {r.prompt}"
            r.tokens_sha256 = f"{r.prompt:064x}"
            r.host_start_ns = now
            now += round((r.e2e_ms or 0.0) * 1e6)
            r.host_end_ns = r.t_ns = now
            if self.cpu_mhz is not None:
                cpu = p.CpuSample(load=0.9, engine_load=0.85, other_load=self.other_load, mhz=self.cpu_mhz)
                found.append(p.SensorSample(cpu=cpu, t_ns=now - 1))
            found.append(r)
            now += 1_000_000
            number += 1

        if self.solo:
            for label in labels:
                add(label, "solo")
        found.append(p.RunStarted(kind="blocks", arms=labels, interleave=True, seed=self.seed, t_ns=now))
        for label in labels:
            add(label, "warmup", warmup=True)
        for block in range(self.blocks):
            for turn in block_turns(labels, block, self.seed, self.control):
                add(turn.arm, "blocks", block=turn.block, slot=turn.slot, control=turn.control)
        found.append(p.RunEnded(reason="done", requests=number, blocks=self.blocks, t_ns=now))
        return found

    @property
    def requests(self) -> list[p.Request]:
        return [e for e in self.events() if isinstance(e, p.Request)]


@pytest.fixture
def make_run() -> type[VirtualRun]:
    return VirtualRun


@pytest.fixture
def make_request() -> Callable[..., p.Request]:
    return request


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    return policy


@pytest.fixture
def meta() -> dict[str, Any]:
    return dict(META)
