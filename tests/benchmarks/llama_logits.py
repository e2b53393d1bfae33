"""The prefill path's divergence against llama.cpp's own logits, on the same files and the same windows.

    python -m tests.benchmarks.llama_logits --out tests/benchmarks/results/llama-logits.json [--windows 8]

An F16 and a Q8_0 file are made from the demo model's by llama.cpp, and read by both engines, by ours dequantized to float32.
Each window is 512 tokens in one pass, its second half compared, as llama-perplexity does. Three questions: do both engines say
the same of one file; does the KLD of Q8_0 to F16 come out alike; and is our figure the formula's, computed in NumPy from
llama.cpp's logits without a line of ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.protocol import Load, Score, Scored
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.loader import load_model
from pdq_tui.engine.quality import Judge, _Values
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel
from pdq_tui.engine.windows import windows
from pdq_tui.host import demo
from pdq_tui.judge.quality import summarize
from tests.benchmarks import llama_peer
from tests.benchmarks.machine import machine

FILES: Final = ("F16", "Q8_0")
TOKENS: Final = 512


def ours(gguf: Path, cache: Path) -> tuple[Arm, Any, Any]:
    """The file in our engine, in float32: (arm, tokenizer, what it is)."""
    device = CpuDevice()
    command = Load(model=str(gguf), cache_dir=str(cache), dtype="fp32")
    loaded = load_model(command, device, lambda *_: None, lambda: False)
    staged = StagedModel(
        loaded.skeleton, loaded.masters, device, budget_bytes=None, kernels=load_kernels("cpu")
    )
    policy = find_policy("bf16")  # the model's own dtype
    return Arm(gguf.stem, policy, staged.apply(policy, rows=[1, TOKENS])), loaded.tokenizer, loaded.info


def theirs(python: Path, gguf: Path, ids: Sequence[Tensor], threads: int, folder: Path) -> list[np.ndarray]:
    """llama.cpp's logits of each window's second half but the last position, float32 [255, V]."""
    folder.mkdir()
    lines = "".join(json.dumps({"ids": row.tolist(), "first": TOKENS // 2}) + "\n" for row in ids)
    command = [str(python), str(llama_peer.CHILD), "logits", str(gguf), str(threads), str(folder)]
    done = subprocess.run(
        command, input=lines, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return [np.load(json.loads(line)["file"])[:-1] for line in done.stdout.splitlines()]


def formula(base: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Σ p ln(p / q) and equal argmax by position, in float64."""

    def log_shares(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_shares(base), log_shares(other)
    return (np.exp(p) * (p - q)).sum(-1), base.argmax(-1) == other.argmax(-1)


def over(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Means over all positions of all windows, by the formula."""
    klds, same = zip(*(formula(a, b) for a, b in pairs), strict=True)
    return {"kld": float(np.concatenate(klds).mean()), "same_top1": float(np.concatenate(same).mean())}


def by_ours(
    label: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]], ids: Sequence[Tensor]
) -> dict[str, Any]:
    """The same by the engine's own arithmetic."""
    scored = []
    for number, ((a, b), row) in enumerate(zip(pairs, ids, strict=True)):
        values = _Values()
        values.add(torch.from_numpy(a), torch.from_numpy(b), row[TOKENS // 2 + 1 :])
        scored.append(
            Scored(
                arm=label, base="", policy=label, policy_digest="", path="prefill", forced="text", window=number,
                first=TOKENS // 2, kld=values.kld, same_top1=values.same, nll=values.nll, base_nll=values.base_nll,
            )
        )  # fmt: skip
    return summary(scored)


def summary(scored: Sequence[Scored]) -> dict[str, Any]:
    found = summarize(list(scored))
    return {
        "kld": found.kld.value,
        "kld_ci95": found.kld.ci95,
        "same_top1": found.same_top1.value,
        "ppl_ratio": found.ppl_ratio.value,
        "positions": found.positions,
        "windows": len(scored),
    }


def logits_of(arm: Arm, ids: Sequence[Tensor]) -> list[np.ndarray]:
    with torch.inference_mode():
        return [
            arm.staged.start(1, TOKENS, None).score(row[None], TOKENS // 2)[0, :-1].float().numpy().copy()
            for row in ids
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    asked = parser.parse_args()
    python = llama_peer.build()
    folder = llama_peer.environment().parent / "gguf"
    source = next(demo.fetch().glob("*.gguf"))
    files = llama_peer.quantized(python, source, folder)
    arms: dict[str, Arm] = {}
    command = Score(
        arms=["Q8_0"],
        base="F16",
        path="prefill",
        windows=asked.windows,
        prompt_tokens=TOKENS,
        text="confirmation",
    )
    for name in FILES:
        arms[name], tokenizer, info = ours(files[name], folder / "converted")
        ids = windows(command, tokenizer, info)
    threads = CpuDevice().info().threads
    with tempfile.TemporaryDirectory() as scratch:
        peer = {name: theirs(python, files[name], ids, threads, Path(scratch) / name) for name in FILES}
    mine = {name: logits_of(arms[name], ids) for name in FILES}
    judged = list(Judge(CpuDevice(), arms["F16"], [arms["Q8_0"]], command).score(ids))
    theirs_pairs = list(zip(peer["F16"], peer["Q8_0"], strict=True))
    result: dict[str, Any] = {
        "schema": 1,
        "what": f"{asked.windows} windows of {TOKENS} tokens, second half compared; {source.name} as F16 and Q8_0",
        "repeat": "python -m tests.benchmarks.llama_logits --out FILE",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "llama_cpp_python": llama_peer.VERSION,
        "one file, both engines (llama.cpp → ours)": {
            name: over(list(zip(peer[name], mine[name], strict=True))) for name in FILES
        },
        "Q8_0 against F16": {
            "ours, as scored": summary(judged),
            "ours, by the formula from logits": over(list(zip(mine["F16"], mine["Q8_0"], strict=True))),
            "llama.cpp's logits, by the formula": over(theirs_pairs),
            "llama.cpp's logits, by our arithmetic": by_ours("Q8_0", theirs_pairs, ids),
            "llama.cpp's F16 against ours of Q8_0": over(list(zip(peer["F16"], mine["Q8_0"], strict=True))),
        },
    }
    asked.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))


if __name__ == "__main__":
    main()
