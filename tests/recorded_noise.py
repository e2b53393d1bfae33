"""Noise as real machines make it: series of one policy's requests, recorded, and replayed on a virtual clock.

    pdq-tui run demo -p int8 -p int8 --in 128 --out 16 --blocks 100000 --budget 1500 --no-solo --dir RUNS
    python -m tests.recorded_noise RUNS/<run> tests/noise/NAME.json "what else the machine did"

records: one policy's requests in a row (A/A), so whatever they differ by is the machine. ``replayed`` makes
measurements of it whose true differences are known. Each draws pieces of the recording at random places, as long as bursts
and drift last, and joins them: the moving block bootstrap (H. R. Künsch, Ann. Statist. 17, 1989).
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.core import protocol as p
from pdq_tui.core.pairs import counted
from pdq_tui.core.workload import block_turns

FOLDER: Final = Path(__file__).with_name("noise")
#: Requests in a row that are kept together: an order of magnitude above one block's.
PIECE: Final = 96
_KINDS: Final = (b'"type":"request"', b'"type":"sensor_sample"', b'"type":"workload_ready"')


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order in which they ran. ``prefill_us``, ``step_us``: prefill and mean decode step, whole µs."""

    what: str
    run: str
    started: str
    seconds: float
    tool: str
    host: dict[str, Any]
    libraries: dict[str, str]
    policy: str
    prompt_tokens: int
    output_tokens: int
    other_load: tuple[float, float, float] | None
    prefill_us: list[int]
    step_us: list[int]


def load(name: str) -> Recording:
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Recording)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


# -- recording ---------------------------------------------------------------------------------------------------------


def record(run: Path, what: str) -> Recording:
    """From a run's folder: the requests of the policy that ran most, on its own workload's length."""
    meta = json.loads((run / "meta.json").read_text(encoding="utf-8"))
    events = [
        p.decode_event(line)
        for line in (run / "events.jsonl").read_bytes().splitlines()
        if any(kind in line for kind in _KINDS)
    ]
    there = [e for e in events if isinstance(e, p.Request) and counted(e) and e.kind != "solo"]
    shape = Counter((r.policy_digest, *r.output_tokens) for r in there).most_common(1)[0][0]
    whole = [
        r
        for r in there
        if (r.policy_digest, *r.output_tokens) == shape and r.prefill_ms is not None and r.tpot_ms is not None
    ]
    workload = next(e.workload for e in events if isinstance(e, p.WorkloadReady))
    loads = sorted(
        e.cpu.other_load for e in events if isinstance(e, p.SensorSample) and e.cpu.other_load is not None
    )
    return Recording(
        what=what,
        run=meta["id"],
        started=meta["started"],
        seconds=round((whole[-1].host_end_ns - whole[0].host_start_ns) / 1e9, 1),
        tool=meta["tool"]["version"],
        host={k: meta["host"][k] for k in ("cpu", "threads", "memory", "system")},
        libraries={k: v for k, v in meta["libraries"].items() if k in ("torch", "transformers")},
        policy=whole[0].policy,
        prompt_tokens=workload.prompt_tokens or 0,
        output_tokens=workload.output_tokens,
        # Share of the machine that other processes used: 10 %, half, 90 % of the samples lie below.
        other_load=(loads[len(loads) // 10], loads[len(loads) // 2], loads[len(loads) * 9 // 10])
        if loads
        else None,
        prefill_us=[round((r.prefill_ms or 0.0) * 1e3) for r in whole],
        step_us=[round((r.tpot_ms or 0.0) * 1e3) for r in whole],
    )


# -- replaying ---------------------------------------------------------------------------------------------------------


def stretch(recording: Recording, length: int, rng: random.Random) -> list[tuple[float, float]]:
    """``length`` requests as (prefill ms, step ms): pieces of the recording, each from a random place, which it leaves
    at its end for its beginning."""
    n = len(recording.prefill_us)
    found: list[tuple[float, float]] = []
    while len(found) < length:
        start = rng.randrange(n)
        found += [
            (recording.prefill_us[i % n] / 1e3, recording.step_us[i % n] / 1e3)
            for i in range(start, start + PIECE)
        ]
    return found[:length]


def replayed(
    recording: Recording,
    arms: Mapping[str, tuple[float, float]],
    *,
    seed: int,
    blocks: int,
    output_tokens: int | None = None,
) -> list[p.Request]:
    """Interleaved blocks as the engine runs them, the first arm its own control. arms: label → what it multiplies the
    recorded prefill and step by, which is its true difference. Times follow each other on a virtual clock."""
    rng, labels = random.Random(f"{recording.run}:{seed}"), list(arms)
    turns = [turn for block in range(blocks) for turn in block_turns(labels, block, seed)]
    N = output_tokens or recording.output_tokens
    found, now = [], 0
    for turn, (prefill, step) in zip(turns, stretch(recording, len(turns), rng), strict=True):
        by_prefill, by_step = arms[turn.arm]
        first, tpot = prefill * by_prefill, step * by_step
        e2e = first + (N - 1) * tpot
        begin, now = now, now + round(e2e * 1e6)
        found.append(
            p.Request(
                request=len(found),
                arm=turn.arm,
                policy=turn.arm,
                policy_digest=turn.arm,
                kind="blocks",
                block=turn.block,
                slot=turn.slot,
                control=turn.control,
                output_tokens=[N],
                prefill_ms=first,
                ttft_ms=first,
                tpot_ms=tpot,
                handoff_ms=0.0,
                decode_ms=(N - 1) * tpot,
                e2e_ms=e2e,
                host_start_ns=begin,
                host_end_ns=now,
            )
        )
    return found


def wilson(hits: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    share, wide = hits / n, z * z / n
    middle = (share + wide / 2) / (1 + wide)
    half = z / (1 + wide) * math.sqrt(share * (1 - share) / n + wide / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def _main(words: Sequence[str]) -> None:
    run, target, what = words
    found = record(Path(run), what)
    Path(target).write_bytes(msgspec.json.encode(found) + b"\n")
    print(f"{len(found.prefill_us)} requests in {found.seconds:.0f} s: {target}")


if __name__ == "__main__":
    _main(sys.argv[1:])
