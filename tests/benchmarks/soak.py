"""The evaluation's soak for hours, by itself: the protocol's own step on the demo model, kept as a result.

    python -m tests.benchmarks.soak --out tests/benchmarks/results/soak.json [--duration 2h] [--policy NAME] [--threads N]

``pdq-tui evaluate demo --soak 2h`` does the same as one step of eleven. With ``--threads 1`` and ``taskset`` one core is
kept for it and the machine stays usable; the result says which cores it had.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdq_tui.commands.flags import load_of
from pdq_tui.config import Settings
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.workload import Workload
from pdq_tui.judge import operation
from pdq_tui.judge.evaluation import Evaluation
from pdq_tui.judge.plan import PLANS, Spec
from pdq_tui.judge.soak import duration_s, words
from pdq_tui.judge.traffic import Shape
from tests.benchmarks.machine import machine


def run(seconds: float, policy: str, threads: int | None, folder: Path) -> Mapping[str, Any]:
    load = load_of(Settings(), "demo")
    load.threads = threads
    workload = Workload(prompt_tokens=512, output_tokens=64, batch=1)
    spec = Spec(
        model="demo",
        load=load,
        uniform=(find_policy("bf16"),),
        staged=(find_policy(policy),),
        workload=workload,
        traffic=(Shape(workload.prompt_tokens, workload.output_tokens),),
        traffic_name="the workload itself",
        plan=PLANS["quick"],
        gate="standard",
        min_effect=0.01,
        soak_s=seconds,
    )
    evaluation = Evaluation.create(spec, folder)
    evaluation.found["confirmation"] = {"staged": [policy]}
    try:
        return operation.soak(evaluation)
    finally:
        evaluation.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--duration", default="2h")
    parser.add_argument("--policy", default="w8a8-prefill-int8-decode")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    seconds = duration_s(given.duration)
    begin = datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        body = run(seconds, given.policy, given.threads, Path(folder))
    given.out.write_text(
        json.dumps(
            {
                "schema": 1,
                "what": f"soak of {words(seconds)}: {given.policy}, demo model, prompt 512, 64 new tokens, batch 1",
                "repeat": f"python -m tests.benchmarks.soak --out FILE --duration {given.duration}"
                + (f" --threads {given.threads}" if given.threads else ""),
                "date": f"{begin:%Y-%m-%d}",
                "begin": f"{begin:%Y-%m-%dT%H:%M:%SZ}",
                "cores_used": sorted(os.sched_getaffinity(0)),
                "machine": machine(),
                "soak": body,
            },
            indent=1,
        )
        + "\n"
    )
    print(json.dumps({k: v for k, v in body.items() if k != "canaries"}, indent=1))


if __name__ == "__main__":
    main()
