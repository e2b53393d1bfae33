"""The store at scale: listing 1,000 snapshots, comparing two runs of a million token records each.

    python tests/benchmarks/store.py --out FILE [--snapshots 1000] [--tokens 1000000] [--repeats 5]

listing    store.listing.list_snapshots over the snapshots of many runs, and `pdq-tui snapshots list` as a process.
comparing  store.compare.compare from the directories: reading, pairing, judging. ``unpaired``: one arm of each of two
           runs; ``paired``: two arms of one interleaved run, a million records each.

Everything lies in a temporary directory and was just written, so files come from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from pdq_tui.core import protocol as p  # noqa: E402 - the path is set above
from pdq_tui.core.policy import parse_policy  # noqa: E402
from pdq_tui.core.workload import Workload, block_turns  # noqa: E402
from pdq_tui.store import listing, snapshot  # noqa: E402
from pdq_tui.store.compare import compare  # noqa: E402

LIMITS = {"listing_s": 0.3, "comparing_s": 1.0}
STEPS = 64
A_RUN = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests/benchmarks/results/store.json")
    parser.add_argument("--snapshots", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="token records of one arm")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    load = round(os.getloadavg()[0], 2)  # before anything of ours
    with tempfile.TemporaryDirectory(prefix="pdq-bench-") as scratch:
        many, long = Path(scratch) / "many", Path(scratch) / "long"
        step(f"{args.snapshots} snapshots")
        make_many(many, args.snapshots)
        step(f"two runs, {args.tokens} token records an arm")
        one = make_run(long, "20260101T000000Z-aaaa", args.tokens, 1)
        two = make_run(long, "20260102T000000Z-bbbb", args.tokens, 2)
        step("measuring")
        result: dict[str, Any] = {
            "schema": 1,
            "what": "listing snapshots and comparing long runs, files in the page cache",
            "repeat": "make bench, or python tests/benchmarks/store.py --out FILE",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "limits": LIMITS,
            "load_before": load,
            "listing": {
                "snapshots": len(listing.list_snapshots(many)),
                "bytes_of_manifests": sum(f.stat().st_size for f in many.glob("*/snapshots/*/manifest.json")),
                **timed(lambda: listing.list_snapshots(many), args.repeats),
                "as_a_command": timed(lambda: command(many), args.repeats),
            },
            "comparing": {
                name: {
                    "token_records": sum(snapshot.load(path).tokens_table.height for path in pair),
                    "method": compare([snapshot.load(path) for path in pair]).rows[0].method,
                    **timed(lambda pair=pair: comparing(pair), args.repeats),  # type: ignore[misc]
                }
                for name, pair in (("unpaired", (one[0], two[1])), ("paired", (one[0], one[1])))
            },
        }
    slowest = max(c["median_s"] for c in result["comparing"].values())
    result["within_limits"] = {
        "listing": result["listing"]["median_s"] <= LIMITS["listing_s"],
        "comparing": slowest <= LIMITS["comparing_s"],
    }
    result["machine"] = _machine()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))


def timed(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    seconds, own = [], []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        kept = call()
        seconds.append(time.perf_counter() - start)
        own.append(time.process_time() - cpu)
        del kept  # a person does not wait for what is let go
    return {
        "median_s": round(statistics.median(seconds), 3),
        "seconds": [round(s, 3) for s in seconds],
        # Of this process alone: what a busy machine changes least.
        "cpu_median_s": round(statistics.median(own), 3),
    }


def comparing(pair: tuple[Path, Path]) -> Any:
    found = [snapshot.load(path) for path in pair]
    return compare(found), found


def command(runs: Path) -> None:
    argv = [sys.executable, "-m", "pdq_tui", "snapshots", "list", "--dir", str(runs)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")


def make_many(runs: Path, count: int) -> None:
    """``count`` snapshots, four a run: one is saved, the others are its copies under their own run and number."""
    first = make_run(runs, "20260101T000000Z-0000", 24 * STEPS, 0)[0]
    for number in range(2, count):
        run, place = divmod(number, A_RUN)
        target = runs / f"20260101T{run:06d}Z-{run:04x}" / "snapshots" / f"{place + 1:03d}"
        shutil.copytree(first, target)
        body = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
        body |= {"run": target.parent.parent.name, "name": target.name}
        (target / "manifest.json").write_bytes(snapshot.strict_json(body))


def make_run(runs: Path, run: str, tokens: int, seed: int) -> tuple[Path, Path]:
    """One interleaved run of two arms with ``tokens`` records an arm; the directories of its two snapshots."""
    (runs / run).mkdir(parents=True)
    events = made_events(max(2, tokens // STEPS // 2), seed)
    meta = {
        "id": run,
        "started": "2026-01-01T00:00:00+00:00",
        "tool": {"version": "0"},
        "libraries": {"torch": "0"},
    }
    one, two = (snapshot.save(runs / run, events, arm, meta=meta) for arm in ("bf16", "int4"))
    return one, two


def made_events(blocks: int, seed: int) -> list[Any]:
    """A run as the engine sends it: ``blocks`` ABBA blocks of bf16 (100 ms, 50 ms a step) and int4 (180 ms, 26 ms)."""
    rng, now = random.Random(seed), 1_000_000_000
    speed = {"bf16": (100.0, 50.0), "int4": (180.0, 26.0)}
    policies = {
        name: parse_policy(
            f'schema = 1\nname = "{name}"\n[prefill]\nweights = "{name}"\n[decode]\nweights = "{name}"\n'
        )
        for name in speed
    }
    found: list[Any] = [
        p.Hello(role="engine", pid=1, python="3", libraries={"torch": "0"}, t_ns=now),
        p.ModelReady(
            model=p.ModelInfo(id="made", sha256="ab" * 32, parameters=1, layers=1, dtype="bf16"),
            device=p.DeviceInfo(
                kind="cpu", name="Virtual CPU", read_peak_gbps=40.0, compute_peak_tflops={"bf16": 4.0}
            ),
            attention="made",
            t_ns=now,
        ),
        p.WorkloadReady(
            workload=Workload(output_tokens=STEPS + 1, seed=seed and 1),
            prompts=8,
            lengths=[512] * 8,
            prompts_sha256="cd" * 32,
            chat_template_applied=False,
            t_ns=now,
        ),
    ]
    found += [
        p.ArmReady(
            arm=arm,
            policy=policies[arm],
            weights=p.WeightsInfo(stored_bytes=269_000_000),
            coverage={s: p.Coverage(total_parameters=1, kernels={arm: 210}) for s in ("prefill", "decode")},
            kv=p.KvInfo(bytes_per_token=23_040, free_bytes=500_000 * 23_040, capacity_tokens=500_000),
            t_ns=now,
        )
        for arm in speed
    ]
    found.append(p.RunStarted(kind="blocks", arms=list(speed), interleave=True, seed=seed, t_ns=now))
    number = 0
    for block in range(blocks):
        for turn in block_turns(list(speed), block, seed, False):
            prefill, one_step = speed[turn.arm]
            steps = [one_step * (1 + rng.gauss(0, 0.002)) for _ in range(STEPS)]
            decode = sum(steps)
            now += round((prefill + decode) * 1e6)
            found.append(
                p.Request(
                    request=number,
                    arm=turn.arm,
                    policy=turn.arm,
                    policy_digest=policies[turn.arm].digest,
                    kind="blocks",
                    block=block,
                    slot=turn.slot,
                    prompt=number % 8,
                    prompt_tokens=512,
                    output_tokens=[STEPS + 1],
                    prefill_ms=prefill * (1 + rng.gauss(0, 0.002)),
                    ttft_ms=prefill,
                    handoff_ms=0.0,
                    decode_ms=decode,
                    tpot_ms=decode / STEPS,
                    e2e_ms=prefill + decode,
                    itl_ms=steps,
                    gap_ms=1.0,
                    bytes_per_step=100_000_000,
                    prefill_flops={"bf16": 2e11},
                    prefill_bound_ms=50.0,
                    decode_bound_ms=4.0,
                    prefill_peak_bytes=500_000_000,
                    decode_peak_bytes=400_000_000,
                    steady_bytes=390_000_000,
                    memory_method="made",
                    tokens_sha256=f"{number % 8:064x}",
                    text="word " * 50,
                    token_ids=[(number % 8 * 7919 + i * 104729) % 49152 for i in range(STEPS)],
                    host_start_ns=now - round((prefill + decode) * 1e6),
                    host_end_ns=now,
                    t_ns=now,
                )
            )
            number += 1
    found.append(p.RunEnded(reason="done", requests=number, blocks=blocks, t_ns=now))
    return found


def step(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def _machine() -> dict[str, Any]:
    from tests.benchmarks.machine import machine  # imports torch: after everything was measured

    return machine()


if __name__ == "__main__":
    main()
