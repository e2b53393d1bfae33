"""How often the judge is wrong: on recorded noise with known differences, a thousand seeds each, and on real A/A runs.

    python -m tests.benchmarks.selftest --out tests/benchmarks/results/selftest.json [--seeds N] [--runs N]

A real run is ``pdq-tui run demo`` with one policy under two labels: whatever it says of them is about the machine alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.machine import machine

# Shared with the tests, which find it by its bare name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from noise_trials import DIFFERENT, LONG_SOAK, METRICS, PRIMARY, SHORT_SOAK, SIDES, drifts, signs, words
from recorded_noise import PIECE, load, names, wilson

#: Blocks at which 3 % are looked for, rising, until they are found in ``FOUND`` of the seeds.
BLOCKS: Final = (10, 30, 100, 200, 400, 800)
FOUND: Final = 0.97
POLICY: Final = "int8"


def share(hits: int, n: int) -> dict[str, Any]:
    return {"hits": hits, "n": n, "share": hits / n, "wilson95": wilson(hits, n)}


def on_recorded_noise(name: str, seeds: int) -> dict[str, Any]:
    recording, found = load(name), {}
    for blocks in (10, 30):
        said, any_metric = words(recording, 1.0, range(seeds), blocks)
        found[f"equal arms, {blocks} blocks"] = {
            "words": dict(said),
            "primary called different": share(sum(said[w] for w in DIFFERENT), seeds),
            "any of them called different": share(any_metric, seeds),
        }
    for blocks in BLOCKS:
        tried = seeds if blocks <= 30 else max(100, seeds // 4)
        said, _ = words(recording, 1.03, range(tried), blocks, (PRIMARY,))
        found[f"3 % slower, {blocks} blocks"] = {"words": dict(said), "found": share(said["worse"], tried)}
        if said["worse"] >= FOUND * tried:
            break
    for side in SIDES:
        for part, one in signs(recording, side, range(seeds), 10).items():
            found[f"break-even, faster for {side}, at {part} N*"] = {
                "right": share(one.right, seeds),
                "said": share(one.said, seeds),
                "said and wrong": share(one.said_wrong, seeds),
            }
    flat = drifts(recording, 0.0, range(seeds), SHORT_SOAK)
    found["flat soak called drift"] = share(flat, seeds)
    for change in (0.1, 0.2, 0.5):
        tried = max(50, seeds // 5)
        seen = drifts(recording, change, range(tried), LONG_SOAK)
        found[f"drift of {change:.0%} over {LONG_SOAK} requests seen"] = share(seen, tried)
    about = {
        key: getattr(recording, key)
        for key in (
            "what",
            "started",
            "seconds",
            "host",
            "policy",
            "prompt_tokens",
            "output_tokens",
            "other_load",
        )
    }
    return {"recording": about | {"requests": len(recording.step_us)}, **found}


def real_run(blocks: int, threads: int | None, folder: Path) -> dict[str, Any]:
    """The words of one A/A run, by metric; or why it failed."""
    command = [sys.executable, "-m", "pdq_tui", "run", "demo", "-p", POLICY, "-p", POLICY]
    command += ["--in", "64", "--out", "8", "--blocks", str(blocks), "--no-solo", "--json"]
    command += (
        ["--dir", str(folder)] if threads is None else ["--dir", str(folder), "--threads", str(threads)]
    )
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=900
    )
    if done.returncode != 0:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    document = json.loads(done.stdout)
    rows = {r["metric"]: r for r in document["ratios"] if r["metric"] in METRICS}
    return {
        "words": {m: r["judgement"] for m, r in rows.items()},
        "ratio": rows[PRIMARY]["ratio"],
        "ci95": rows[PRIMARY]["ci95"],
        "noise_floor": document["noise_floor"][PRIMARY],
        "reason": rows[PRIMARY]["judgement_reason"],
        "threads": threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--threads", type=int, default=None, help="of the real runs")
    parser.add_argument(
        "--go-on", action="store_true", help="keep what --out holds, and make the real runs that are missing"
    )
    asked = parser.parse_args()
    there: dict[str, Any] = json.loads(asked.out.read_text(encoding="utf-8")) if asked.go_on else {}
    result: dict[str, Any] = there or {
        "schema": 1,
        "what": "how often the judge is wrong, and what it sees",
        "repeat": "python -m tests.benchmarks.selftest --out FILE",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "piece_requests": PIECE,
        "recorded": {name: on_recorded_noise(name, asked.seeds) for name in names()},
        "real": {"policy": POLICY, "blocks": asked.blocks, "runs": []},
    }
    runs = result["real"]["runs"] = [run for run in result["real"]["runs"] if "words" in run]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(runs), asked.runs):
            runs.append(run := real_run(asked.blocks, asked.threads, Path(folder)))
            print(
                f"A/A run {number + 1} of {asked.runs}: {run.get('words') or run}",
                file=sys.stderr,
                flush=True,
            )
            asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    runs = [run for run in runs if "words" in run]
    said = Counter(run["words"][PRIMARY] for run in runs)
    result["real"] |= {
        "words": dict(said),
        "primary called different": sum(said[w] for w in DIFFERENT),
        "any of them called different": sum(
            any(w in DIFFERENT for w in run["words"].values()) for run in runs
        ),
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
