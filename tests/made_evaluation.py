"""An evaluation made up by hand: what its steps would have found, and its directory on disk."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import made_snapshots
import msgspec

from pdq_tui.core import protocol as p
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.host.runs import stamp
from pdq_tui.judge import flips, freerun, logs
from pdq_tui.judge import load as loads
from pdq_tui.judge import soak as endurance
from pdq_tui.judge.evaluation import Evaluation
from pdq_tui.judge.plan import PLANS, STEPS, Spec
from pdq_tui.judge.traffic import Shape
from pdq_tui.judge.watching import PROGRESS, RUNNING

STAGED = "int8-prefill-int4-decode"
UNIFORM = ("bf16", "int8", "int4")
SPEC = Spec(
    model="demo",
    load=Load(model="demo"),
    uniform=tuple(made_snapshots.policy(name, name, name) for name in UNIFORM),
    staged=(made_snapshots.policy(STAGED, "int8", "int4"),),
    workload=Workload(output_tokens=11),
    traffic=(Shape(512, 11),),
    traffic_name="the workload itself",
    plan=PLANS["quick"],
    gate="standard",
    min_effect=0.01,
)


def _arm(label: str, ttft: float, tpot: float, e2e: float) -> dict[str, Any]:
    return {
        "label": label, "policy": label, "storage": "dual",
        "prefill": {"ttft_ms": {"median": ttft}, "prefill_ms": {"median": ttft}, "bytes": 270 << 20,
                    "flops": {"bf16": 1.1e11}, "explained": {"median": 0.7}, "kernels": ["mm"]},
        "decode": {"tpot_ms": {"median": tpot}, "step_ms": {"median": tpot}, "bytes_per_step": int(tpot * 13e6),
                   "flops": {"bf16": 2.7e8}, "explained": {"median": 0.6}, "kernels": ["mv"]},
        "e2e_ms": {"median": e2e},
    }  # fmt: skip


def conditions() -> dict[str, Any]:
    names = (*UNIFORM, STAGED)
    stored = dict(zip(names, (270, 160, 110, 215), strict=True))
    return {
        "seconds": 12.0, "stop": None, "started": "2026-12-02T06:30:00+00:00", "contenders": list(names), "refused": {},
        "model": {"id": "demo", "parameters": 134_515_008, "dtype": "bfloat16", "notes": []},
        "device": {"kind": "cpu", "name": "Virtual CPU", "memory": 24 << 30, "read_peak_gbps": 31.6,
                   "compute_peak_tflops": {"bf16": 0.42}},
        "workload": {"prompt_tokens": 512, "output_tokens": 11, "batch": 1, "prompts": "mixed", "seed": 0},
        "host": {"threads": 2}, "libraries": {"torch": "2.13.0"}, "tool": {"version": "0.1.0"},
        "weights": {n: {"stored_bytes": stored[n] << 20, "extra_bytes": (55 << 20) if n == STAGED else 0} for n in names},
        "operation": {n: {"storage": "dual" if n == STAGED else "uniform",
                          "kernels": {"prefill": ["mm"], "decode": ["mv"]},
                          "formats": {"prefill": {}, "decode": {}}} for n in names},
        "fallbacks": {}, "windows": {"prefill": 256, "decode": 256, "new_tokens": 24},
    }  # fmt: skip


def bottleneck() -> dict[str, Any]:
    return {
        "seconds": 8.0, "stop": None, "base": "bf16", "traffic": "the workload itself", "prefill_ms": 100.0,
        "decode_ms": 200.0, "prefill": 1 / 3, "most_gain": 0.25, "extrapolated": False, "ttft_ms": 100.0, "tpot_ms": 20.0,
        "prefill_mfu": 0.4, "mbu": 0.5, "prefill_explained": 0.7, "decode_explained": 0.6,
        "measured": {"prompt": 512, "output": 11, "batch": 1},
    }  # fmt: skip


def selection() -> dict[str, Any]:
    return {
        "seconds": 20.0, "stop": None, "best_uniform": "int4", "uniform": ["int8", "int4"], "staged": [STAGED],
        "also_measured": ["bf16"], "left_out": {}, "ratios": [], "e2e_ms": {},
    }  # fmt: skip


def scored(kld: float = 0.004) -> dict[str, Any]:
    def estimate(value: float) -> dict[str, Any]:
        return {"value": value, "ci95": [value / 2, value * 2], "windows": 8, "reason": None}

    def path(policy: str, size: float) -> dict[str, Any]:
        return {
            "policy": policy, "path": "decode", "forced": "text", "kld": estimate(size), "same_top1": estimate(0.98),
            "ppl_ratio": estimate(1.001), "by_position": [[at, estimate(size * (at + 1) / 3)] for at in range(5)],
        }  # fmt: skip

    gate = {
        "name": "quality: KLD on the decode path, nats", "limit": "≤ 0.011 (upper bound)",
        "measured": f"{kld:.4f} [{kld / 2:.4f}, {kld * 2:.4f}]",
        "result": "pass" if kld * 2 <= 0.011 else "fail", "reason": None,
    }  # fmt: skip
    sizes = {"int8": kld / 4, "int4": kld * 1.5, STAGED: kld}
    return {
        "seconds": 30.0, "stop": None, "failed": [], "uniform": ["int8", "int4"], "staged": [STAGED],
        "gates": dict.fromkeys(sizes, gate), "paths": {name: [path(name, v)] for name, v in sizes.items()},
    }  # fmt: skip


def confirmation() -> dict[str, Any]:
    def ratio(reference: str, metric: str, value: float, word: str) -> dict[str, Any]:
        return {
            "reference": reference, "arm": STAGED, "metric": metric, "ratio": value,
            "ci95": [value * 0.97, value * 1.03], "judgement": word, "reason": None, "blocks": 10,
        }  # fmt: skip

    cells = [
        {"staged": STAGED, "uniform": u, "prompt": 512, "batch": 1, "output": n, "delta_ms": d * n,
         "ci95": [d * n - 3, d * n + 3], "extrapolated": n > 11}
        for u, d in (("int8", -5.0), ("int4", 0.1)) for n in (11, 64)
    ]  # fmt: skip
    return {
        "seconds": 41.0, "stop": None, "reference": "int4", "staged": [STAGED], "uniform": ["int8", "int4"], "blocks": 10,
        "warnings": [], "noise_floor": {"e2e_ms": 0.01}, "crossover": [], "clocks": None, "other_load": 0.02,
        "break_even": [{"staged": STAGED, "uniform": "int4", "output": None, "ci95": None,
                        "side": "no finite break-even: the decode steps cannot be told apart"}],
        "arms": [_arm("bf16", 100, 20, 300), _arm("int8", 80, 15, 230), _arm("int4", 120, 10, 220),
                 _arm(STAGED, 82, 10, 181)],
        "ratios": [
            ratio("int8", "e2e_ms", 0.8, "better"), ratio("int4", "e2e_ms", 0.84, "better"),
            ratio("int8", "ttft_ms", 1.0, "same"), ratio("int4", "ttft_ms", 0.68, "better"),
            ratio("int8", "tpot_ms", 0.67, "better"), ratio("int4", "tpot_ms", 1.2, "worse"),
        ],
        "map": cells,
    }  # fmt: skip


def abnormal() -> dict[str, Any]:
    def case(name: str) -> dict[str, Any]:
        return {
            "case": name, "expected": ["answered"], "state": "answered", "next_right": True, "result": "pass", "reason": None,
        }  # fmt: skip

    return {
        "seconds": 14.0, "stop": None, "policy": STAGED, "abnormal": [case("blank"), case("cancelled in decode")],
    }  # fmt: skip


def tasks() -> dict[str, Any]:
    """Forty tasks, of which the policy lost one and gained one."""
    ours, theirs = [True] * 24 + [False] * 16, [True] * 23 + [False] * 16 + [True]
    f = flips.compare(ours, theirs, [(20, 20)] * 40, 6)
    gates = (flips.task_gate(f, flips.DROPS["standard"]), flips.length_gate(f))
    items = [
        {
            "id": f"fact {i}",
            "kind": "fact",
            "prompt": f"Which word stands at place {i}?",
            "answer": f"word{i}",
        }
        for i in range(40)
    ]

    def said(right: list[bool], other: str, ids: list[int]) -> dict[str, Any]:
        return {
            item["id"]: {
                "right": r, "tokens": 3, "text": item["answer"] if r else other, "ids": [7, i, 2] if r else ids
            }
            for i, (item, r) in enumerate(zip(items, right, strict=True))
        }  # fmt: skip

    answers = {
        "bf16": said(ours, "I do not know.", [8, 9, 2]),
        STAGED: said(theirs, "I don't know.", [8, 4, 2]),
    }
    nll = {item["id"]: (0.3, 0.2) for item in items}
    agreed = freerun.agreement(answers["bf16"], answers[STAGED], nll)
    one = {
        **msgspec.to_builtins(f),
        "agreement": msgspec.to_builtins(agreed),
        "gates": [msgspec.to_builtins(g) for g in gates],
        "kinds": {"fact": {"n": 40, "base": f.base, "policy": f.policy}},
    }
    return {
        "seconds": 40.0, "stop": None, "set": "the project's own", "base": "bf16", "asked": 40, "refused": 0,
        "chat_template": True, "policies": {STAGED: one}, "items": items, "answers": answers,
        "unsettled": gates[0].reason,
    }  # fmt: skip


def load() -> dict[str, Any]:
    """A closed loop that saturates at two requests; one open loop."""

    def point(arm: str, concurrency: int | None, rate: float | None, speed: float) -> loads.Point:
        c = concurrency or 1
        wait, each = max(0.0, c / speed - 2.0) * 300, 300.0
        rows = [
            p.Served(
                arm=arm, number=i, arrival_s=i / speed, prompt_tokens=512, output_tokens=64, ttft_ms=each + wait, tpot_ms=12.0,
                e2e_ms=each + wait + 63 * 12.0, queue_ms=wait,
            )
            for i in range(12)
        ]  # fmt: skip
        ended = p.ServeEnded(
            arm=arm, engine="transformers 5.24.0 continuous batching", attention="sdpa, paged cache of 32 tokens a page",
            scheduler="fifo, 256 tokens a step, mixed steps: split", tokens={"prefill/prefill": 6144, "decode/decode": 756},
            steps=200, mixed=20, split_steps=20, kv_tokens=4096, seconds=10.0, busy_s=10.0 * c,
        )  # fmt: skip
        return loads.point(
            rows, ended, concurrency=concurrency, rate=rate, ttft_target=2000.0, tpot_target=100.0
        )

    points, knees = [], []
    for arm, most in (("int8", 1.5), (STAGED, 2.0)):
        mine = [point(arm, c, None, min(0.9 * c, most)) for c in (1, 2, 4)] + [point(arm, None, 1.2, 1.2)]
        points += mine
        knees.append(loads.knee(arm, mine))
    return {
        "seconds": 71.0, "stop": None, "targets": {"ttft_ms": 2000.0, "tpot_ms": 100.0, "share": loads.MEET},
        "engine": "transformers 5.24.0 continuous batching", "attention": "sdpa, paged cache of 32 tokens a page",
        "scheduler": "fifo, 256 tokens a step, mixed steps: split", "memory_bytes": 300 << 20, "refused": {}, "unsettled": None,
        "points": [msgspec.to_builtins(point) for point in points], "knees": [msgspec.to_builtins(k) for k in knees],
        "knee": msgspec.to_builtins(knees[-1]),
    }  # fmt: skip


def soak() -> dict[str, Any]:
    requests = [
        p.Request(
            request=i, arm=STAGED, policy=STAGED, policy_digest="d", kind="soak", ttft_ms=100.0, tpot_ms=12.0 + i % 3,
            steady_bytes=400 << 20, host_start_ns=i * 10**9, host_end_ns=(i + 1) * 10**9,
        )
        for i in range(20)
    ]  # fmt: skip
    canaries = [
        p.Canary(
            arm=STAGED,
            number=i,
            at_s=4.0 * i,
            tokens_sha256="a",
            same=True,
            kld=0.0,
            nonfinite=0,
            highest=18.5,
        )
        for i in range(6)
    ]
    return {
        "seconds": 20.0, "stop": None, "policy": STAGED, "asked_s": 20.0, "hours_long": False, "troubles": [],
        "unsettled": "20 s: not the hours-long test", **endurance.analyse(requests, canaries, [], 0),
    }  # fmt: skip


def log_counts() -> dict[str, Any]:
    counted = logs.Logs()
    counted.take([p.WorkerStarted(role="engine", pid=1), p.WorkloadRefused(reason="the prompt is empty")])
    counted.opened(1)
    return {
        "seconds": 0.4, "stop": None, "journals": 2, "unreadable": {}, "events": counted.events,
        "counts": [msgspec.to_builtins(c) for c in counted.counts()],
    }  # fmt: skip


def found() -> dict[str, Any]:
    """What the steps found, in their order."""
    made = {
        "conditions": conditions(),
        "bottleneck": bottleneck(),
        "selection": selection(),
        "small_quality": scored(),
        "confirmation": confirmation(),
        "quality": scored(),
        "tasks": tasks(),
        "load": load(),
        "abnormal": abnormal(),
        "soak": soak(),
        "logs": log_counts(),
    }
    return {step.name: made[step.name] for step in STEPS if step.name in made}


def make(
    folder: Path, name: str = "20261202T063000Z", *, steps: int | None = None, running: bool = False
) -> Path:
    """An evaluation's directory with its first ``steps`` steps done (all: None). ``running``: this process runs the next."""
    place = folder / name
    Evaluation.create(SPEC, place)
    there = list(found().items())
    for step, body in there[:steps]:
        (place / "steps" / f"{step}.json").write_text(json.dumps(body), encoding="utf-8")
    if running:
        following = STEPS[len(there[:steps])].name
        body = {**stamp(os.getpid(), "evaluation"), "step": following, "began": time.time(), "left_s": 130.0}
        (place / RUNNING).write_text(json.dumps(body), encoding="utf-8")
        (place / PROGRESS).write_text("1/6 Conditions: done in 12 s\n5/6 block 3 of 10\n", encoding="utf-8")
    return place
