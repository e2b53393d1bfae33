"""The engine's figures on the demo model, all arms interleaved in one run: ``make bench`` writes the result file.

    python -m tests.benchmarks.engine --out FILE [--blocks 10] [--in 512] [--new 64]

Outside reference: ``transformers.generate`` in bf16 in the same process, same prompts. Inside: every uniform arm and
the staged ones, each block a random permutation of all arms and its mirror (ABC … CBA), ratios of block means with
Student-t intervals. Then: what a flip between two resident policies costs from one request to the next, how long each
format takes to quantize, how soon a cancelled one ends, and how long compiling the decoder layers takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pdq_tui import locations
from pdq_tui.core import prompts as texts
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import Load, Request
from pdq_tui.core.stats import block_interval
from pdq_tui.core.workload import Workload
from pdq_tui.engine import native
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.loader import load_model
from pdq_tui.engine.peaks import peaks
from pdq_tui.engine.prompts import Prepared, prepare
from pdq_tui.engine.runner import Arm, Hooks, Limits, Peaks, run_request
from pdq_tui.engine.staged import StagedModel
from tests.benchmarks.machine import machine
from tests.benchmarks.reference import Generate

UNIFORM = ("bf16", "int8", "w8a8", "int4")
STAGED = ("w8a8-prefill-int4-decode", "w8a8-prefill-int8-decode", "bf16-prefill-int4-decode")
MAIN = "w8a8-prefill-int4-decode"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of the interleaved run")
    parser.add_argument("--in", dest="prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument(
        "--model", default=None, help="model directory (default: the demo model, fetched once)"
    )
    args = parser.parse_args()
    bench = Bench(args.model, args.prompt, args.new)
    result: dict[str, Any] = {
        "schema": 1,
        "what": f"demo model, prompt {args.prompt}, {args.new} new tokens, batch 1, {args.blocks} blocks",
        "repeat": f"make bench, or python -m tests.benchmarks.engine --out FILE --blocks {args.blocks}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }
    result["own_kernels"] = {"state": bench.own_kernels, "seconds": bench.own_kernels_s}
    result["quantize"] = bench.quantize()
    result["compile"] = bench.compile()
    result["interleaved"] = bench.interleave(args.blocks)
    result["flip"] = bench.flip()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps({k: result[k] for k in ("quantize", "compile", "interleaved", "flip")}, indent=1))


class Bench:
    def __init__(self, model: str | None, prompt: int, new: int) -> None:
        self.prompt, self.new = prompt, new
        self.device = CpuDevice()
        begin = time.perf_counter()
        self.own_kernels = native.ensure(locations.cache_dir() / "native", lambda: None) or "loaded"
        self.own_kernels_s = round(time.perf_counter() - begin, 1)
        self.directory = Path(model) if model else _demo()
        command = Load(model=str(self.directory), cache_dir=str(locations.cache_dir()))
        self.loaded = load_model(command, self.device, lambda *_: None, lambda: False)
        self.prepared: Prepared = prepare(
            Workload(prompt_tokens=prompt, output_tokens=new, prompts="long"),
            self.loaded.tokenizer,
            self.loaded.info,
            texts.built_in,
        )
        self.model = self._staged()
        self.peaks = peaks(
            self.device, self.device.info(), locations.cache_dir(), lambda *_: None, lambda: False
        ).best
        self.arms: dict[str, Arm] = {}
        self.generate = Generate(self.directory)

    def _staged(self, layers: str = "auto") -> StagedModel:
        return StagedModel(
            self.loaded.skeleton,
            self.loaded.masters,
            self.device,
            budget_bytes=None,
            kernels=load_kernels("cpu"),
            layers=layers,
        )

    def apply(self, model: StagedModel, policy: Policy, cancelled: Callable[[], bool] = lambda: False) -> Any:
        return model.apply(policy, rows=(1, self.prompt), progress=lambda *_: None, cancelled=cancelled)

    # -- figures -----------------------------------------------------------------------------------------------------

    def quantize(self) -> dict[str, Any]:
        """Seconds from nothing packed to ready, a format at a time on a fresh store; and the time from a cancel, given
        in the middle, to the end. Trying kernels that may crash, once a machine, is done and told before."""
        out: dict[str, Any] = {}
        begin = time.perf_counter()
        self._staged().planner.probe(find_policy("int8"), lambda: False, lambda *_: None)
        out["kernel_probe_s"] = round(time.perf_counter() - begin, 3)
        for name in ("int8", "w8a8", "int4"):
            model = self._staged("eager")
            begin = time.perf_counter()
            self.apply(model, find_policy(name))
            out[f"{name}_s"] = round(time.perf_counter() - begin, 3)
            flag = threading.Event()
            asked: list[float] = []

            def ask(flag: threading.Event = flag, asked: list[float] = asked) -> None:
                asked.append(time.perf_counter())
                flag.set()

            timer = threading.Timer(out[f"{name}_s"] / 2, ask)
            model = self._staged("eager")
            timer.start()
            try:
                self.apply(model, find_policy(name), flag.is_set)
                out[f"{name}_cancel_ms"] = None
                out[f"{name}_cancel_ms_reason"] = "ended before the cancel came"
            except Cancelled:
                out[f"{name}_cancel_ms"] = round((time.perf_counter() - asked[0]) * 1e3, 1)
            timer.join()
        return out

    def compile(self) -> dict[str, Any]:
        """Seconds for the decoder layers of one uniform policy: into an empty folder, and again from what lies there.
        The first also finds out what the compiler can do."""
        out: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            for name in UNIFORM:
                for when in ("first", "again"):
                    done = subprocess.run(
                        [sys.executable, "-m", "tests.benchmarks.compile", str(self.directory), name],
                        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder},
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    out[f"{name}_{when}_s"] = float(done.stdout.splitlines()[-1])
        return out

    def interleave(self, blocks: int) -> dict[str, Any]:
        names = ["generate-bf16", *UNIFORM, *STAGED]
        for name in names[1:]:
            self.arms[name] = Arm(name, find_policy(name), self.apply(self.model, find_policy(name)))
        for name in names:  # warm-up: both stages' real paths at the measured shape
            self.turn(name, 0, self.new)
        seen: dict[str, list[dict[str, float]]] = defaultdict(list)
        logs: list[dict[tuple[str, str], float]] = []
        order = random.Random(0)
        for block in range(blocks):
            turn = names[:]
            order.shuffle(turn)
            block_values: dict[tuple[str, str], list[float]] = defaultdict(list)
            for name in turn + turn[::-1]:
                figures = self.turn(name, block, self.new)
                seen[name].append(figures)
                for metric, value in figures.items():
                    block_values[name, metric].append(math.log(value))
            logs.append({key: statistics.fmean(values) for key, values in block_values.items()})
            print(f"block {block + 1}/{blocks}", flush=True)
        arms = {
            name: {
                metric: round(statistics.median(f[metric] for f in rows), 3)
                for metric in ("prefill_ms", "tpot_ms", "e2e_ms")
            }
            for name, rows in seen.items()
        }
        pairs = [("generate-bf16", "bf16"), ("generate-bf16", MAIN)]
        pairs += [(u, MAIN) for u in UNIFORM]
        pairs += [(u, "w8a8-prefill-int8-decode") for u in UNIFORM]
        return {
            "arms_median": arms,
            "decoder_layers": {n: _runner(self.arms[n]) for n in names[1:]},
            "kernels": {n: _kernels(self.arms[n]) for n in names[1:]},
            "explained": {n: self.explained(self.arms[n]) for n in names[1:]},
            "speedup": {
                f"{reference} / {arm}": {
                    metric: speedup([b[reference, metric] - b[arm, metric] for b in logs])
                    for metric in ("prefill_ms", "tpot_ms", "e2e_ms")
                }
                for reference, arm in pairs
            },
            "note": "speedup = time of the first over time of the second, > 1: the second is faster; Student-t 95 %",
        }

    def flip(self, pairs: int = 30) -> dict[str, Any]:
        """From the end of one short request to the start of the next, with and without a change of policy."""
        gaps: dict[str, list[float]] = {"stay": [], "flip": []}
        first: dict[str, list[float]] = {"stay": [], "flip": []}
        arms = [self.arms["bf16"], self.arms[MAIN]]
        for arm in arms:
            self.request(arm, 0, 4)
        last, at = self.request(arms[0], 0, 4), arms[0]
        for i in range(2 * pairs):
            flip = bool(i % 2)
            arm = arms[1 - arms.index(at)] if flip else at
            request = self.request(arm, i, 4)
            kind = "flip" if flip else "stay"
            gaps[kind].append((request.host_start_ns - last.host_end_ns) / 1e6)
            first[kind].append(request.itl_ms[0] / statistics.median(request.itl_ms))
            last, at = request, arm
        stay, flipped = statistics.median(gaps["stay"]), statistics.median(gaps["flip"])
        return {
            "stay_ms": round(stay, 3),
            "flip_ms": round(flipped, 3),
            "extra_ms": round(flipped - stay, 3),
            "first_step_over_median_stay": round(statistics.median(first["stay"]), 3),
            "first_step_over_median_flip": round(statistics.median(first["flip"]), 3),
            "n": pairs,
        }

    def explained(self, arm: Arm) -> dict[str, Any]:
        """Share of each stage's time that the lower bound of its bytes and operations explains, one request."""
        record = self.request(arm, 0, self.new, self.peaks)
        assert record.prefill_ms and record.tpot_ms
        shares = (record.prefill_bound_ms, record.prefill_ms), (record.decode_bound_ms, record.tpot_ms)
        return {
            stage: None if bound is None else round(bound / taken, 3)
            for stage, (bound, taken) in zip(("prefill", "decode"), shares, strict=True)
        }

    # -- one request -------------------------------------------------------------------------------------------------

    def turn(self, name: str, index: int, new: int) -> dict[str, float]:
        if name == "generate-bf16":
            with torch.inference_mode():
                prefill, step = self.generate.run(self.batch(index).ids, new)
            return {"prefill_ms": prefill, "tpot_ms": step, "e2e_ms": prefill + step * (new - 1)}
        record = self.request(self.arms[name], index, new)
        assert record.valid and record.prefill_ms and record.tpot_ms and record.e2e_ms, record.invalid_reason
        return {"prefill_ms": record.prefill_ms, "tpot_ms": record.tpot_ms, "e2e_ms": record.e2e_ms}

    def batch(self, index: int) -> Any:
        return self.prepared.batches[index % len(self.prepared.batches)]

    def request(self, arm: Arm, index: int, new: int, peaks: Peaks | None = None) -> Request:
        record = Request(request=index, arm=arm.label, policy="", policy_digest="", kind="loop")
        return run_request(
            self.device,
            arm,
            self.batch(index),
            self.prompt + self.new,
            Limits(new, natural=False),
            record,
            Hooks(peaks=peaks),
        )


def _runner(arm: Arm) -> str:
    cover = arm.staged.coverage["decode"]
    return cover.runner if cover.runner_reason is None else f"{cover.runner}: {cover.runner_reason}"


def _kernels(arm: Arm) -> dict[str, dict[str, int]]:
    return {stage: dict(cover.kernels) for stage, cover in arm.staged.coverage.items()}


def speedup(differences: list[float]) -> dict[str, Any]:
    interval = block_interval(differences)
    return {
        "ratio": round(math.exp(statistics.fmean(differences)), 3),
        "ci95": [round(math.exp(interval.low), 3), round(math.exp(interval.high), 3)] if interval else None,
        "blocks": len(differences),
    }


def _demo() -> Path:
    from pdq_tui.engine.convert import cache_name, converted
    from pdq_tui.host import demo

    folder = demo.fetch()
    gguf = next(folder.rglob("*.gguf"))
    return converted(gguf, locations.demo_dir() / cache_name(gguf), lambda *_: None, lambda: False)


if __name__ == "__main__":
    main()
