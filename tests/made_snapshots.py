"""Snapshots on disk from made-up events: two arms in interleaved blocks, with step times that the test decides."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy, parse_policy
from pdq_tui.core.workload import Workload, block_turns
from pdq_tui.store import snapshot

RUN = "20261202T063000Z-0f3a"
SPEED = {"B": (129.7, 9.38), "A": (84.1, 11.92)}


def policy(name: str, prefill: str, decode: str) -> Policy:
    return parse_policy(
        f'schema = 1\nname = "{name}"\n[prefill]\nweights = "{prefill}"\n[decode]\nweights = "{decode}"\n'
    )


POLICIES = {"B": policy("bf16", "bf16", "bf16"), "A": policy("int8-prefill-int4-decode", "int8", "int4")}


def events(
    speed: dict[str, tuple[float, float]] | None = None,
    *,
    blocks: int = 12,
    model: str = "demo",
    output_tokens: int = 9,
    text: str = "hello",
    answers: dict[str, list[tuple[str, list[int]]]] | None = None,
) -> list[Any]:
    """``speed``: arm → (prefill ms, step ms). ``answers``: arm → text and token ids of its answer to each prompt."""
    speed = speed or SPEED
    rng, t, number = random.Random(7), 1_000_000_000, 0
    work = Workload(output_tokens=output_tokens, seed=7)
    found: list[Any] = [
        p.Hello(role="engine", pid=1, python="3.11.9", libraries={"torch": "2.13.0"}, t_ns=t),
        p.ModelReady(
            model=p.ModelInfo(id=model, sha256=hashlib.sha256(model.encode("utf-8", "replace")).hexdigest(), parameters=134_515_008, layers=30,
                              dtype="bf16"),
            device=p.DeviceInfo(kind="cpu", name="Virtual CPU", cpu="Virtual CPU", memory_bytes=24 << 30, threads=2,
                                memory_method="RSS, sampled", read_peak_gbps=40.0,
                                compute_peak_tflops={"bf16": 4.0, "int8": 7.0}),
            attention="pdq",
            t_ns=t,
        ),
        p.WorkloadReady(workload=work, prompts=8, lengths=[512] * 8, prompts_sha256="5b" * 32,
                        chat_template_applied=False, t_ns=t),
    ]  # fmt: skip
    for arm in speed:
        found.append(
            p.ArmReady(
                arm=arm, policy=POLICIES[arm], kv=p.KvInfo(bytes_per_token=23_040), t_ns=t,
                weights=p.WeightsInfo(stored_bytes=269_000_000, extra_bytes=54_000_000 if arm == "A" else 0),
                coverage={s: p.Coverage(total_parameters=106_000_000) for s in ("prefill", "decode")},
            )
        )  # fmt: skip
    found.append(
        p.RunStarted(kind="blocks", arms=list(speed), interleave=True, seed=7, blocks=blocks, t_ns=t)
    )
    for block in range(blocks):
        for turn in block_turns(list(speed), block, 7, control=True):
            prefill, step = (v * (1 + rng.gauss(0, 0.004)) for v in speed[turn.arm])
            steps = [step * (1 + rng.gauss(0, 0.002)) for _ in range(output_tokens - 1)]
            prompt = block % len(answers[turn.arm]) if answers else 0
            said, ids = answers[turn.arm][prompt] if answers else (text, [])
            t, number = t + int((prefill + sum(steps)) * 1e6), number + 1
            found.append(
                p.Request(
                    request=number, arm=turn.arm, policy=POLICIES[turn.arm].name,
                    policy_digest=POLICIES[turn.arm].digest, kind="blocks", block=block, slot=turn.slot,
                    control=turn.control, prompt_tokens=512, output_tokens=[output_tokens], prefill_ms=prefill,
                    ttft_ms=prefill, handoff_ms=0.0, decode_ms=sum(steps), tpot_ms=sum(steps) / len(steps),
                    e2e_ms=prefill + sum(steps), itl_ms=steps, gap_ms=0.5, bytes_per_step=100_000_000,
                    prefill_flops={"bf16": 2e11} if turn.arm == "B" else {"int8": 1.9e11, "bf16": 1e10},
                    decode_flops={"bf16": 3e8}, prefill_bytes=270_000_000 if turn.arm == "B" else 150_000_000, prefill_bound_ms=50.0, decode_bound_ms=4.0,
                    prefill_peak_bytes=900_000_000 if turn.arm == "A" else 880_000_000, decode_peak_bytes=740_000_000,
                    steady_bytes=700_000_000, memory_method="RSS, sampled", text=said, token_ids=ids, prompt=prompt, t_ns=t,
                )
            )  # fmt: skip
    found.append(p.RunEnded(reason="done", requests=number, blocks=blocks, t_ns=t))
    return found


def save_all(runs_dir: Path, run: str = RUN, note: str = "", made: list[Any] | None = None) -> list[str]:
    """Snapshots 001 (B) and 002 (A) of one run; their ids, the reference first."""
    made = made if made is not None else events()
    folder = runs_dir / run
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "id": run,
        "started": "2026-12-02T06:30:00+00:00",
        "tool": {"version": "0.1.0"},
        "libraries": {"torch": "2.13.0"},
    }
    return [f"{run}/{snapshot.save(folder, made, arm, note, meta=meta).name}" for arm in ("B", "A")]
