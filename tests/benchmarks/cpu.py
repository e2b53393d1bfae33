"""How near to the hardware's limit, and against whom: ``make bench-cpu`` writes the result file.

    python -m tests.benchmarks.cpu --out FILE [--blocks 10] [--skip-llama] [--skip-large]

Three parts. Peers: the demo model's uniform and staged arms, llama.cpp in each of its formats, and ``transformers.generate``
in bf16, all interleaved in one run (a random permutation and its mirror a block). Limit: a random Llama of 1.1 billion
parameters, whose decode reads weights against the fastest of several probes that read 512 MB in the same seconds, and whose
W8A8 prefill multiplies against the int8 peak. Bytes: what shared, nested and transient policies hold beside one copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.nn.functional as F

from pdq_tui import locations
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Keep, Policy
from pdq_tui.core.protocol import Load, Request
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.loader import load_model
from pdq_tui.engine.peaks import peaks
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Arm, Hooks, Limits, run_request
from pdq_tui.engine.staged import StagedModel
from tests.benchmarks import llama_peer
from tests.benchmarks.engine import Bench, speedup
from tests.benchmarks.machine import machine

ARMS: Final = (
    "bf16", "int8", "w8a8", "int4", "w8a8-prefill-int4-decode", "w8a8-prefill-int8-decode", "w4a8-prefill-int4-decode",
)  # fmt: skip
#: The same with the head in 8 bits as well, as llama.cpp's files have theirs (in 6 or 8).
HEADS: Final = ("int8", "int4", "w8a8-prefill-int4-decode", "w8a8-prefill-int8-decode")
CLASSES: Final = (
    "w8a8-prefill-int8-decode", "w4a8-prefill-int4-decode", "nested16-prefill-int8-decode", "int8-prefill-nested16-decode",
    "transient-int4",
)  # fmt: skip
METRICS: Final = ("prefill_ms", "tpot_ms", "e2e_ms")
PROBE_BYTES: Final = 512 << 20
LARGE: Final = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of the interleaved run")
    parser.add_argument("--skip-llama", action="store_true", help="without llama.cpp, which is built first")
    parser.add_argument(
        "--skip-large", action="store_true", help="without the model of 1.1 billion parameters"
    )
    args = parser.parse_args()
    result: dict[str, Any] = {
        "schema": 1,
        "what": f"demo model, prompt 512, 128 new tokens, batch 1, {args.blocks} blocks; random Llama of 1.1 billion",
        "repeat": f"make bench-cpu, or python -m tests.benchmarks.cpu --out FILE --blocks {args.blocks}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }
    bench = Bench(None, 512, 128)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        args.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    result |= peers_of(bench, args.blocks, llama=not args.skip_llama)
    keep()
    result["explained"] = explained(bench)
    result["bytes"] = stored(bench)
    if not args.skip_large:
        keep()
        result["large"] = large(bench.directory)
    keep()
    print(json.dumps({k: result[k] for k in result if k != "machine"}, indent=1))


def policies() -> dict[str, Policy]:
    """ARMS, and HEADS with an int8 head."""
    found = {name: find_policy(name) for name in ARMS}
    head = Keep(modules=("lm_head",), weights="int8")
    for name in HEADS:
        policy = find_policy(name)
        kept = msgspec.structs.replace(policy, name=f"{name}+head8", keep=(*policy.keep, head))
        found[kept.name] = kept
    return found


# -- peers ---------------------------------------------------------------------------------------------------------------


def peers_of(bench: Bench, blocks: int, *, llama: bool) -> dict[str, Any]:
    peers: dict[str, llama_peer.Peer] = {}
    if llama:
        python = llama_peer.build()
        gguf = next((locations.demo_dir() / "gguf").rglob("*.gguf"))
        files = llama_peer.quantized(python, gguf, locations.cache_dir() / "bench" / "gguf")
        threads = torch.get_num_threads()
        peers = {
            f"llama.cpp-{name}": llama_peer.Peer(python, path, threads, 1024) for name, path in files.items()
        }
    for name, policy in policies().items():
        bench.arms[name] = Arm(name, policy, bench.apply(bench.model, policy))

    def turn(name: str, block: int) -> dict[str, float]:
        if name in peers:
            return peers[name].run(bench.batch(block).ids[0].tolist(), bench.new)
        return bench.turn(name, block, bench.new)

    names = [*bench.arms, "generate-bf16", *peers]
    for name in names:
        turn(name, 0)
    logs: list[dict[tuple[str, str], float]] = []
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    order = random.Random(0)
    for block in range(blocks):
        order.shuffle(names)
        values: dict[tuple[str, str], list[float]] = defaultdict(list)
        for name in names + names[::-1]:
            figures = turn(name, block)
            seen[name].append(figures)
            for metric in METRICS:
                values[name, metric].append(math.log(figures[metric]))
        logs.append({key: statistics.fmean(logged) for key, logged in values.items()})
        print(f"block {block + 1}/{blocks}", flush=True)

    def ratio(slow: str, fast: str, metric: str) -> dict[str, Any]:
        return speedup([b[slow, metric] - b[fast, metric] for b in logs])

    medians = {
        n: {m: round(statistics.median(f[m] for f in rows), 3) for m in METRICS} for n, rows in seen.items()
    }

    def best(of: list[str], metric: str) -> str:
        return min(of, key=lambda n: medians[n][metric])

    ours = list(bench.arms)
    compared: dict[str, Any] = {"generate": {}}
    for metric, key in (("tpot_ms", "decode_ratio"), ("prefill_ms", "prefill_ratio")):
        fast = best(ours, metric)
        compared["generate"][key] = ratio("generate-bf16", fast, metric) | {"ours": fast}
        if peers:
            theirs = best(list(peers), metric)
            found = ratio(theirs, fast, metric) | {"ours": fast, "theirs": theirs}
            compared.setdefault("llama_cpp", {})[key] = found
    if peers:
        compared["llama_cpp"]["system"] = next(iter(peers.values())).system
        compared["llama_cpp"]["version"] = llama_peer.VERSION
    for peer in peers.values():
        peer.close()
    staged = "w8a8-prefill-int4-decode"
    return {
        "arms_median": medians,
        "peers": compared,
        "staged": {
            f"{uniform} / {arm}": {m: ratio(uniform, arm, m) for m in METRICS}
            for arm in (staged, "w4a8-prefill-int4-decode")
            for uniform in ("bf16", "int8", "w8a8", "int4")
        },
        "speed_only": {f"w8a8 / {staged}": ratio("w8a8", staged, "e2e_ms")},
        "decoder_layers": {name: arm.staged.coverage["decode"].runner for name, arm in bench.arms.items()},
    }


def explained(bench: Bench) -> dict[str, dict[str, Any]]:
    """Share of each stage's time that its bytes and operations explain, the memory's speed that of the same seconds: medians
    of five requests an arm, in turn."""
    reader = Reader()
    shares: dict[str, list[dict[str, Any]]] = defaultdict(list)
    kept = bench.peaks
    for _ in range(5):
        for name, arm in bench.arms.items():
            bench.peaks = dataclasses.replace(kept, read_gbps=reader.now())
            shares[name].append(bench.explained(arm))
    bench.peaks = kept
    return {
        name: {
            stage: round(statistics.median(row[stage] for row in rows), 3) for stage in ("prefill", "decode")
        }
        for name, rows in shares.items()
    }


def stored(bench: Bench) -> dict[str, Any]:
    """Extra bytes over the larger stage, and what a transient stage dequantizes into beside its largest layer."""
    found: dict[str, Any] = {}
    dense = bench.apply(bench.model, find_policy("bf16")).weights.stored_bytes
    for name in CLASSES:
        arm = bench.apply(bench.model, find_policy(name))
        weights = arm.weights
        bench.arms[name] = Arm(name, find_policy(name), arm)
        bench.turn(name, 0, 2)
        found[name] = {
            "stored_bytes": weights.stored_bytes,
            "extra_share": round(weights.extra_bytes / max(weights.prefill_bytes, weights.decode_bytes), 4),
            "scratch_bytes": weights.scratch_bytes,
            "over_bf16": round(weights.stored_bytes / dense, 4),
        }
        if name == "transient-int4":
            largest = max(x.parameters for x in bench.model.census.layers if not x.head)
            wide = 2 if weights.scratch_bytes < 4 * largest else 4
            beyond = bench.model.scratch.nbytes - wide * largest
            found[name]["beyond_one_layer_share"] = round(beyond / weights.stored_bytes, 4)
    return found


# -- the limit ------------------------------------------------------------------------------------------------------------


class Reader:
    """Ways to read 512 MB once. On a shared machine the memory's speed is the neighbours' as well (36 to 77 GB/s were seen
    within minutes), so what a request reached is held against reads right before and after it, never against another hour's."""

    def __init__(self) -> None:
        words = torch.ones(PROBE_BYTES // 4 // 2048, 2048)
        halves = words.view(torch.bfloat16)
        vector, row = torch.ones(2048), torch.ones(1, 4096, dtype=torch.bfloat16)
        self.ways: dict[str, Callable[[], Any]] = {
            "sum, fp32": words.sum,
            "matrix times vector, fp32": lambda: torch.mv(words, vector),
            "linear of one row, bf16": lambda: F.linear(row, halves),
            "own kernel, one row, bf16": lambda: torch.ops.pdq_native.dense(row, halves),
        }
        self.medians = {
            name: round(statistics.median(self._gbps(way) for _ in range(7)), 2)
            for name, way in self.ways.items()
        }
        self._best = sorted(self.medians, key=lambda name: -self.medians[name])[:2]

    @staticmethod
    def _gbps(way: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        way()
        return PROBE_BYTES / (time.perf_counter() - begin) / 1e9

    def now(self) -> float:
        """GB/s: the best of two reads by each of the two ways that were the fastest."""
        return max(self._gbps(self.ways[name]) for name in self._best for _ in range(2))


def large_model(demo: Path) -> Path:
    """A random Llama of 1.1 billion parameters in bf16, made once."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = locations.cache_dir() / "bench" / "llama-1.1b-random"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.no_grad():
            model = AutoModelForCausalLM.from_config(LlamaConfig(**LARGE), dtype=torch.bfloat16)
            model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # any will do: prompts are random ids
        shutil.copy(demo / name, folder / name)
    return folder


def large(demo: Path) -> dict[str, Any]:
    """MBU of decode over a context of 64, and MFU of a W8A8 prompt of 2,048 tokens: medians of five requests."""
    device = CpuDevice()
    command = Load(model=str(large_model(demo)), cache_dir=str(locations.cache_dir()))
    loaded = load_model(command, device, lambda *_: None, lambda: False)
    model = StagedModel(
        loaded.skeleton, loaded.masters, device, budget_bytes=None, kernels=load_kernels("cpu"), layers="auto"
    )
    measured = peaks(device, device.info(), locations.cache_dir(), lambda *_: None, lambda: False).best
    reader = Reader()
    found: dict[str, Any] = {
        "parameters": sum(layer.parameters for layer in model.census.layers),
        "read_probes_median_gbps": reader.medians,
        "compute_peak_tflops": dict(measured.compute_tflops),
    }

    def requests(name: str, prompt: int, new: int) -> list[tuple[Request, float]]:
        """Each with the better of the reads before and after it."""
        arm = Arm(name, find_policy(name), model.apply(find_policy(name), rows=[1, prompt]))
        generator = torch.Generator().manual_seed(prompt)
        done = []
        for number in range(6):
            ids = torch.randint(10, 30000, (1, prompt), generator=generator)
            record = Request(request=number, arm=name, policy="", policy_digest="", kind="loop")
            batch = Batch(number, ids, None, prompt, prompt)
            limits = Limits(new, natural=False)
            before = reader.now()
            request = run_request(device, arm, batch, prompt + new, limits, record, Hooks(peaks=measured))
            done.append((request, max(before, reader.now())))
        model.release([])
        return done[1:]

    for name in ("bf16", "int8", "int4"):
        done = requests(name, 64, 24)
        size = done[0][0].bytes_per_step
        assert size is not None
        reached = [(size / (r.tpot_ms * 1e-3) / 1e9, probe) for r, probe in done if r.tpot_ms]
        found[name] = {
            "tpot_ms": round(statistics.median(r.tpot_ms for r, _ in done if r.tpot_ms), 2),
            "bytes_per_step": size,
            "gbps": round(statistics.median(gbps for gbps, _ in reached), 2),
            "probe_gbps": round(statistics.median(probe for _, probe in reached), 2),
            "mbu": round(statistics.median(gbps / probe for gbps, probe in reached), 3),
            "mbu_range": [round(f(gbps / probe for gbps, probe in reached), 3) for f in (min, max)],
        }
    done = requests("w8a8", 2048, 2)
    took = statistics.median(r.prefill_ms for r, _ in done if r.prefill_ms)
    flops = done[0][0].prefill_flops
    peak = measured.compute_tflops["int8"]
    found["w8a8_prefill_2048"] = {
        "prefill_ms": round(took, 1),
        "tflop": {k: round(v / 1e12, 3) for k, v in flops.items()},
        "int8_mfu": round(flops["int8"] / (took * 1e-3) / (peak * 1e12), 3),
    }
    return found


if __name__ == "__main__":
    main()
