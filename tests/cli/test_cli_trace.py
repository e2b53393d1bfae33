"""``run --trace`` and ``trace show/diff/open`` with the real engine on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cli_gear import PATIENCE_S, Pdq, environment

WORDS = (
    "-p", "bf16", "-p", "int8", "--blocks", "1", "--in", "16", "--out", "6", "--min-seconds", "0", "--no-solo",
    "--threads", "1", "--device", "cpu", "--trace", "--trace-steps", "3", "--json",
)  # fmt: skip


class Run:
    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        self.done = self.pdq("run", str(model), *WORDS)
        assert self.done.returncode == 0, self.done.stderr
        self.document: dict[str, Any] = json.loads(self.done.stdout)
        self.path = next(home.rglob("events.jsonl")).parent

    def pdq(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pdq_tui", *words],
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    return Run(tmp_path_factory.mktemp("home"), tiny_model)


def test_the_document_holds_the_kernels_that_each_stage_really_used(run: Run) -> None:
    for arm in run.document["arms"]:
        traced = arm["trace"]
        assert Path(traced["path"]).stat().st_size == traced["bytes"]
        assert set(traced["stages"]) == {"prefill", "decode"}
        for stage in traced["stages"].values():
            assert sum(k["share"] for k in stage["kernels"]) <= 1
            assert stage["unmatched"] == []
            assert stage["trace_ms"] == pytest.approx(stage["timer_ms"], rel=0.05)
            assert stage["launch_bound"] is None and stage["launch_bound_reason"]
    snapshots = sorted(run.path.glob("snapshots/*/manifest.json"))
    stored = json.loads(snapshots[-1].read_text())
    assert stored["arm"]["trace"]["stages"]["decode"]["kernels"]
    kinds = [json.loads(line)["type"] for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert "request" not in kinds[kinds.index("traced") :] and kinds.count("traced") == 2


def test_show_and_diff(run: Run) -> None:
    shown = run.pdq("trace", "show", str(run.path))
    assert shown.returncode == 0, shown.stderr
    assert "bf16 (bf16)  prefill:" in shown.stdout and "int8 (int8)  decode:" in shown.stdout
    assert "between kernels" in shown.stdout and "weight GE" in shown.stdout
    told = json.loads(run.pdq("trace", "show", str(run.path), "--json").stdout)
    assert [t["arm"] for t in told] == ["bf16", "int8"]
    diff = run.pdq("trace", "diff", str(run.path), "bf16", "int8")
    assert diff.returncode == 0, diff.stderr
    assert "came" in diff.stdout and "ranks nothing" in diff.stdout
    assert run.pdq("trace", "diff", str(run.path), "bf16", "nobody").returncode == 2


def test_P07_open_starts_tensorboard_on_loopback_and_says_how_perfetto_does(run: Run) -> None:
    pytest.importorskip("torch_tb_profiler")
    process = subprocess.Popen(
        [sys.executable, "-m", "pdq_tui", "trace", "open", str(run.path)],
        env=environment(run.home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(PATIENCE_S / 2, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        assert process.stdout is not None and process.stderr is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("http"):
                break
        files = [line for line in lines if line.endswith(".pt.trace.json.gz")]
        assert len(files) == 2
        address = re.match(r"http://127\.0\.0\.1:(\d+)/", lines[-1])
        assert address is not None, lines
        base = f"http://127.0.0.1:{address[1]}"
        assert urllib.request.urlopen(base, timeout=60).status == 200
        plugins = json.loads(urllib.request.urlopen(f"{base}/data/plugins_listing", timeout=60).read())
        assert "pytorch_profiler" in plugins
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "ui.perfetto.dev" in process.stderr.read()
    finally:
        watchdog.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_run_without_a_trace_is_told_how_to_make_one(pdq: Pdq, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    for words in (("show",), ("open",)):
        done = pdq("trace", *words, str(tmp_path / "run"))
        assert done.returncode == 2
        assert "pdq-tui run MODEL --trace" in done.stderr
