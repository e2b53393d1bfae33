"""The app's own figures, in a real pseudo-terminal of 120 × 36: ``make bench`` writes the result file.

    python -m tests.benchmarks.app --out FILE [--seconds 20] [--pairs 20] [--model demo]

first screen   from exec to the first full frame, best of three, and that the process has not mapped torch.
own CPU, bytes of the app's process over ``--seconds`` while the workload runs at the default refresh.
keys           from a key to the first output in which the screen has changed as it must (help opens, help closes),
               while the engine loads, quantizes, and measures.
burst          from its key on screen 5 to the table: one prefill and four decode steps under the profiler, the trace written and read.
attached       decode with the app drawing against the same engine with the app suspended (SIGSTOP: no screen, no
               reducing, no journal; so more is charged to the app than its drawing), in pairs of random order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from pdq_tui.core.stats import block_interval  # noqa: E402 - the path is set above
from tests.benchmarks.terminal import Terminal  # noqa: E402

LIMITS = {
    "first_screen_s": 0.6, "cpu_share": 0.10, "bytes_per_s": 35_000, "key_ms": 100.0, "burst_s": 5.0, "trace_bytes": 20_000_000,
}  # fmt: skip
HELP = "esc closes"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", "--json", dest="out", type=Path, default=ROOT / "tests/benchmarks/results/app.json"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--in", dest="prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--seconds", type=float, default=20.0, help="window for CPU and bytes")
    parser.add_argument("--pairs", type=int, default=20, help="pairs attached / suspended")
    parser.add_argument("--slice", type=float, default=8.0, help="seconds of one half of a pair")
    parser.add_argument("--starts", type=int, default=3, help="starts for the first screen")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdq-bench-") as scratch:
        bench = Bench(args.model, Path(scratch), ["--in", str(args.prompt), "--out", str(args.new)])
        step("the model: fetched, converted, and run once")
        bench.prepare()
        result: dict[str, Any] = {
            "schema": 1,
            "what": "the app on the demo model in a terminal of 120x36, default refresh,"
            f" prompt {args.prompt}, {args.new} new tokens",
            "repeat": "make bench, or python -m tests.benchmarks.app --out FILE",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "limits": LIMITS,
        }
        step(f"first screen, {args.starts} starts")
        result["first_screen"] = bench.first_screen(args.starts)
        result |= bench.live(args.seconds, args.pairs, args.slice)
    result["machine"] = _machine()
    result["within_limits"] = _within(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))


class Journal:
    """Follows the one run's events.jsonl under ``runs``."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._path: Path | None = None
        self._read = 0
        self.events: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        if self._path is None:
            self._path = next(iter(self._runs.glob("*/events.jsonl")), None)
        if self._path is not None:
            data = self._path.read_bytes()[self._read :]
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            self.events += [json.loads(line) for line in whole.splitlines()]
        return self.events

    def of(self, *types: str) -> list[dict[str, Any]]:
        return [event for event in self.poll() if event["type"] in types]

    def requests(self) -> list[dict[str, Any]]:
        """Those whose times count."""
        return [
            r for r in self.of("request")
            if r["valid"] and not (r["warmup"] or r["first_use"] or r["cancelled"]) and r["tpot_ms"]
        ]  # fmt: skip

    def phase(self) -> str:
        """What the engine is doing, by the tasks that it began and ended."""
        if not self.of("model_ready"):
            return "load"
        packs = [e["type"] for e in self.of("progress", "task_ended") if e["task"] == "pack"]
        return "quantize" if not packs or packs[-1] == "progress" else "measure"


class Bench:
    def __init__(self, model: str, scratch: Path, workload: list[str]) -> None:
        self.model = model
        self.workload = workload
        self.scratch = scratch
        self.command = str(Path(sys.executable).with_name("pdq-tui"))
        self.env = {
            k: v for k, v in os.environ.items() if not k.startswith(("PDQ_", "PYTHON")) and k != "NO_COLOR"
        }
        self.env |= {
            "PDQ_HOME": os.environ.get("PDQ_HOME", str(ROOT / ".venv" / "demo-home")),
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
        }

    def prepare(self) -> None:
        """Fetch and convert the model once, so that no start is charged with it."""
        argv = [
            self.command,
            "run",
            self.model,
            "--policy",
            "bf16",
            "--in",
            "16",
            "--out",
            "4",
            "--blocks",
            "1",
        ]
        argv += ["--min-seconds", "0", "--no-solo", "--dir", str(self.scratch / "prepare")]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

    def start(self, name: str) -> tuple[Terminal, Journal]:
        runs = self.scratch / name
        return Terminal([self.command, self.model, *self.workload, "--dir", str(runs)], self.env), Journal(
            runs
        )

    def first_screen(self, starts: int) -> dict[str, Any]:
        seconds, silent = [], []
        for i in range(starts):
            terminal, _ = self.start(f"start{i}")
            try:
                at = terminal.wait(full_frame, 20.0)
                if at is None:
                    sys.exit(f"no full frame within 20 s; the screen:\n{terminal.screen()}")
                seconds.append(at - terminal.started)
                silent.append(mapped(terminal.process.pid, "torch"))
            finally:
                terminal.close()
        return {
            "seconds": [round(s, 3) for s in seconds],
            "best_s": round(min(seconds), 3),
            "torch_mapped": any(silent),
        }

    def live(self, seconds: float, pairs: int, part: float) -> dict[str, Any]:
        terminal, journal = self.start("live")
        try:
            if terminal.wait(full_frame, 20.0) is None:
                sys.exit(f"no full frame within 20 s; the screen:\n{terminal.screen()}")
            step("keys while the engine loads, quantizes and measures")
            keys = self._keys(terminal, journal)
            step(f"CPU and bytes over {seconds:g} s")
            result = self._quiet(terminal, journal, seconds)
            step("profiled bursts")
            result["burst"] = self._bursts(terminal, journal)
            step(f"{pairs} pairs attached / suspended")
            result["attached"] = self._pairs(terminal, journal, pairs, part)
        finally:
            # Not by keys: continuing a suspended program is not what it takes keys after.
            terminal.kill()
        return {"keys": keys, **result}

    def _keys(self, terminal: Terminal, journal: Journal) -> dict[str, Any]:
        """Help opened and closed again and again: while loading, while the first two arms and then further formats
        are packed, and for ten seconds of measuring."""
        found: dict[str, list[float]] = {"load": [], "quantize": [], "measure": []}
        packs, deadline = 2, time.monotonic() + 150
        while time.monotonic() < deadline:
            phase = journal.phase()
            for opened in (True, False):
                sent = terminal.send(b"?")
                at = terminal.wait(lambda text, wanted=opened: (HELP in text) is wanted, 5.0)
                # An unanswered key is worth five seconds, not nothing.
                found[phase].append((at - sent if at is not None else 5.0) * 1e3)
                time.sleep(0.05 + random.random() * 0.1)
            if phase != "measure":
                continue
            if packs < 5 and len(journal.requests()) >= packs - 1:
                # The next format of the active arm's decode stage: it has to be packed while the loop runs.
                for key in (b"d", b"j", b"\r"):
                    terminal.send(key)
                    time.sleep(0.2)
                packs += 1
            elif packs == 5 and len(found["measure"]) >= 60:
                break
        return {phase: spread(values) for phase, values in found.items()}

    def _quiet(self, terminal: Terminal, journal: Journal, seconds: float) -> dict[str, Any]:
        """Nobody types: what the app costs by itself."""
        ui = psutil.Process(terminal.process.pid)
        before, start, requests = ui.cpu_times(), time.monotonic(), len(journal.of("request"))
        time.sleep(seconds)
        after, end = ui.cpu_times(), time.monotonic()
        spent = after.user + after.system - before.user - before.system
        return {
            "cpu_share": round(spent / (end - start), 4),
            "bytes_per_s": round(terminal.bytes_between(start, end) / (end - start)),
            "longest_silence_s": round(terminal.longest_silence(start, end), 2),
            "window_s": round(end - start, 1),
            "requests_in_window": len(journal.of("request")) - requests,
            "ui_rss_bytes": ui.memory_info().rss,
            "torch_mapped_later": mapped(ui.pid, "torch"),
        }

    def _bursts(self, terminal: Terminal, journal: Journal, count: int = 3) -> dict[str, Any]:
        """While the loop runs, which the burst waits for: between two requests."""
        terminal.send(b"5")
        terminal.wait(lambda text: "t profiles a burst" in text, 5.0)
        seconds: list[float] = []
        for _ in range(count):
            before = len(journal.of("traced"))
            sent = terminal.send(b"t")
            at = terminal.wait(
                lambda text, n=before: len(journal.of("traced")) > n and "profiling a burst" not in text, 60.0
            )
            if at is None:
                return {"seconds": None, "reason": f"no table within 60 s: {terminal.screen()[-300:]}"}
            seconds.append(round(at - sent, 2))
            time.sleep(1.0)
        terminal.send(b"1")
        return {"seconds": seconds, "trace_bytes": max(e["bytes"] for e in journal.of("traced"))}

    def _pairs(self, terminal: Terminal, journal: Journal, pairs: int, part: float) -> dict[str, Any]:
        """Slices by the host's clock; a request counts for the slice that it lies in wholly."""
        rng = random.Random(0)
        slices: list[tuple[int, bool, int, int]] = []
        for pair in range(pairs):
            for attached in rng.sample([True, False], 2):
                os.kill(terminal.process.pid, signal.SIGCONT if attached else signal.SIGSTOP)
                time.sleep(0.2)  # what had gathered is drawn
                start = time.monotonic_ns()
                time.sleep(part)
                slices.append((pair, attached, start, time.monotonic_ns()))
        os.kill(terminal.process.pid, signal.SIGCONT)
        time.sleep(2.0)
        requests = journal.requests()
        differences, lost, used = [], 0, 0
        for pair in range(pairs):
            both = {}
            for number, attached, start, end in slices:
                inside = [
                    r["tpot_ms"] for r in requests if start <= r["host_start_ns"] and r["host_end_ns"] <= end
                ]
                if number == pair and inside:
                    both[attached] = statistics.fmean(inside)
                    used += len(inside)
            if len(both) == 2:
                differences.append(math.log(both[True] / both[False]))
            else:
                lost += 1
        interval = block_interval(differences)
        if interval is None:
            return {"ratio": None, "reason": "no pair holds a whole request in both halves", "pairs": 0}
        return {
            "what": "decode time per token, app attached / app suspended",
            "ratio": round(math.exp(interval.mean), 4),
            "ci95": [round(math.exp(interval.low), 4), round(math.exp(interval.high), 4)],
            "pairs": len(differences),
            "pairs_without_a_whole_request": lost,
            "requests": used,
        }


def step(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def full_frame(text: str) -> bool:
    """Both panels, and the last row's keys: everything that is drawn before there is a model."""
    lines = text.splitlines()
    return "PREFILL" in text and "DECODE" in text and "Help" in lines[-1] and "pdq" in lines[0]


def mapped(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


def spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {
            "n": 0,
            "median_ms": None,
            "p90_ms": None,
            "max_ms": None,
            "reason": "too short to press a key in",
        }
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return {
        "n": len(ordered),
        "median_ms": round(statistics.median(ordered), 1),
        "p90_ms": round(p90, 1),
        "max_ms": round(ordered[-1], 1),
    }


def _within(result: dict[str, Any]) -> dict[str, bool | None]:
    """``keys``: 9 of 10 in each phase; the worst one is in the figures."""
    worst = [v["p90_ms"] for v in result["keys"].values() if v["p90_ms"] is not None]
    return {
        "first_screen": result["first_screen"]["best_s"] <= LIMITS["first_screen_s"],
        "no_torch": not (result["first_screen"]["torch_mapped"] or result["torch_mapped_later"]),
        "cpu": result["cpu_share"] <= LIMITS["cpu_share"],
        "bytes": result["bytes_per_s"] <= LIMITS["bytes_per_s"],
        "burst": None
        if (b := result["burst"])["seconds"] is None
        else max(b["seconds"]) <= LIMITS["burst_s"],
        "trace": None if b["seconds"] is None else b["trace_bytes"] <= LIMITS["trace_bytes"],
        "keys": max(worst) <= LIMITS["key_ms"] if worst else None,
    }


def _machine() -> dict[str, Any]:
    from tests.benchmarks.machine import machine  # imports torch: after everything was measured

    return machine()


if __name__ == "__main__":
    main()
