"""The worker as a process of its own, spoken to through pipes, on the tiny model."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from shared_peaks import share

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.workload import Workload

WAIT_S = 120.0


class Worker:
    """An engine process with its pipes and everything it said."""

    def __init__(self, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdq_tui.engine.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                start_new_session=True,
            )
        self.events: list[Any] = []
        self._queue: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(p.decode_event(line))
        self._queue.put(None)

    def send(self, *commands: p.Message) -> None:
        assert self.process.stdin is not None
        for command in commands:
            self.process.stdin.write(p.encode(command))
        self.process.stdin.flush()

    def until(self, wanted: type | Callable[[Any], bool], timeout_s: float = WAIT_S) -> Any:
        """The next event of a type, or one that passes a test; all on the way are kept in ``events``."""
        end = time.monotonic() + timeout_s
        while True:
            event = self._queue.get(timeout=max(0.01, end - time.monotonic()))
            assert event is not None, f"the worker ended: {self.log.read_text()[-2000:]}"
            self.events.append(event)
            if isinstance(wanted, type):
                if isinstance(event, wanted):
                    return event
            elif wanted(event):
                return event

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    found = Worker(tmp_path / "stderr.log")
    yield found
    found.close()


def load(model: Path, tmp_path: Path, **settings: Any) -> p.Load:
    return p.Load(model=str(model), cache_dir=share(tmp_path / "cache"), device="cpu", threads=1, **settings)


WORKLOAD = Workload(prompt_tokens=16, output_tokens=5, batch=1, prompts="short", distinct=2)


def test_a_whole_session_through_pipes(worker: Worker, tiny_llama: Path, tmp_path: Path) -> None:
    hello = worker.until(p.Hello)
    assert hello.role == "engine"
    assert hello.pid == worker.process.pid
    assert "torch" in hello.libraries
    worker.send(
        load(tiny_llama, tmp_path),
        p.SetArm(arm="A", policy=find_policy("w8a8-prefill-int4-decode")),
        p.SetArm(arm="B", policy=find_policy("bf16")),
        p.SetWorkload(workload=WORKLOAD),
        p.Ping(id=7),
    )
    assert worker.until(p.Pong).id == 7
    ready = worker.until(p.ModelReady)
    assert ready.model.layers == 2
    assert ready.device.threads == 1
    assert ready.device.read_peak_gbps > 0
    assert ready.load_peak_bytes > 0
    arms = [worker.until(p.ArmReady), worker.until(p.ArmReady)]
    assert {arm.arm for arm in arms} == {"A", "B"}
    for kv in (arm.kv for arm in arms):
        assert kv.free_bytes <= ready.device.memory_bytes
        assert kv.capacity_tokens == (kv.free_bytes - kv.reserve_bytes) // kv.bytes_per_token > 0
    workload = worker.until(p.WorkloadReady)
    assert workload.lengths == [16, 16]

    worker.send(p.StartLoop(arm="A", arms=["B", "A"]))
    first = worker.until(lambda e: isinstance(e, p.Request) and e.kind == "loop")
    assert first.arm == "A"
    assert first.valid
    assert first.output_tokens == [5]
    assert len(first.itl_ms) == 4
    assert first.tpot_ms > 0
    assert first.bytes_per_step > 0
    assert first.decode_bound_ms > 0
    assert first.prefill_peak_bytes > 0
    assert first.tokens_sha256 and len(first.token_ids) == first.output_tokens[0]
    worker.send(p.SelectArm(arm="B"))
    assert worker.until(p.ArmSwitched).arm == "B"
    assert worker.until(lambda e: isinstance(e, p.Request) and e.kind == "loop").arm == "B"
    # A new policy while the loop runs: packed between requests, then the loop goes on.
    worker.send(p.SetArm(arm="B", policy=find_policy("int8")))
    worker.until(lambda e: isinstance(e, p.ArmReady) and e.arm == "B" and e.policy.name == "int8")
    worker.until(
        lambda e: isinstance(e, p.Request) and e.arm == "B" and e.policy == "int8" and e.kind == "loop"
    )
    worker.send(p.Interleave(on=True))
    worker.until(lambda e: isinstance(e, p.Request) and e.slot == 5)
    worker.send(p.Stop())
    ended = worker.until(p.RunEnded)
    assert (ended.reason, ended.blocks >= 1) == ("stopped", True)

    worker.send(p.RunBlocks(arms=["B", "A"], blocks=2, min_seconds=0.0, warmup_steps=2))
    done = worker.until(lambda e: isinstance(e, p.RunEnded))
    assert (done.reason, done.blocks) == ("done", 2)
    measured = [e for e in worker.events if isinstance(e, p.Request) and e.kind == "blocks"]
    assert len(measured) == 12
    assert {e.arm for e in worker.events if isinstance(e, p.Request) and e.kind == "solo"} == {"A", "B"}
    assert len({e.tokens_sha256 for e in measured if e.arm == "A"}) <= 2

    worker.send(p.Shutdown())
    assert worker.process.wait(10) == 0
    assert not [e for e in worker.events if isinstance(e, p.Failure)]


def test_bad_input_leaves_the_worker_usable(worker: Worker, tiny_llama: Path, tmp_path: Path) -> None:
    worker.send(p.SetArm(arm="A", policy=find_policy("bf16")))
    assert "no model" in worker.until(p.ArmRefused).reason
    worker.send(p.SetWorkload(workload=WORKLOAD))
    assert "no model" in worker.until(p.WorkloadRefused).reason
    worker.send(p.StartLoop(arm="A", arms=["A"]))
    failure = worker.until(p.Failure)
    assert (failure.kind, failure.fatal) == ("usage", False)
    worker.send(load(tmp_path / "nowhere" / "at" / "all", tmp_path))
    failure = worker.until(p.Failure)
    assert (failure.kind, failure.fatal) == ("model", False)
    assert "no such directory" in failure.message
    assert worker.process.stdin is not None
    worker.process.stdin.write(b'{"v": 1, "type": "dance"}\nnot json\n')
    worker.send(load(tiny_llama, tmp_path), p.SetWorkload(workload=WORKLOAD))
    assert "dance" in worker.until(p.Failure).message
    worker.until(p.ModelReady)
    worker.until(p.WorkloadReady)


def test_cancel_reaches_a_load_that_is_going_on(worker: Worker, tiny_llama: Path, tmp_path: Path) -> None:
    worker.send(load(tiny_llama, tmp_path), p.CancelTask())
    ended = worker.until(p.TaskEnded)
    assert ended.cancelled
    worker.send(p.Ping(id=3))
    assert worker.until(p.Pong).id == 3


PROBE = "pdq_tui.engine.probe"


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_S05_f_trying_kernels_ends_with_a_cancel_and_with_the_engine(
    worker: Worker, tiny_llama: Path, tmp_path: Path, how: str
) -> None:
    worker.send(load(tiny_llama, tmp_path, dtype="bf16"))
    worker.until(p.ModelReady)
    worker.send(p.SetArm(arm="A", policy=find_policy("int8")))
    worker.until(lambda e: isinstance(e, p.Progress) and e.label == "trying kernels once on this machine")
    # Beside the shell that ends the group with the engine.
    (child,) = [c for c in psutil.Process(worker.process.pid).children() if PROBE in c.cmdline()]
    if how == "killed":
        worker.process.kill()
        worker.process.wait(10)
    else:
        worker.send(p.CancelTask())
        refused = worker.until(p.ArmRefused)
        assert refused.reason == "cancelled"
        ended = [e for e in worker.events if isinstance(e, p.TaskEnded)][-1]
        assert (ended.task, ended.cancelled) == ("pack", True)
    end = time.monotonic() + 3
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "the child is left"
            time.sleep(0.01)


def test_S03_what_libraries_print_goes_to_the_log(worker: Worker, tiny_llama: Path, tmp_path: Path) -> None:
    """Every line of the event pipe decodes (the reader would raise), and descriptor 1 is the log's file."""
    worker.until(p.Hello)
    one = Path(f"/proc/{worker.process.pid}/fd/1").stat()
    assert (one.st_dev, one.st_ino) == (worker.log.stat().st_dev, worker.log.stat().st_ino)
    assert str(Path(f"/proc/{worker.process.pid}/fd/0").readlink()) == os.devnull


def test_S05_the_worker_ends_when_its_pipe_closes(worker: Worker, tiny_llama: Path, tmp_path: Path) -> None:
    worker.until(p.Hello)
    worker.send(load(tiny_llama, tmp_path))
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(20) == 0


def test_S05_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed; the pipe is kept open by somebody else, so that only the kernel's signal can end it."""
    script = (
        "import subprocess, sys, time\n"
        "w = subprocess.Popen([sys.executable, '-m', 'pdq_tui.engine.worker'], stdin=0, stdout=subprocess.PIPE)\n"
        "w.stdout.readline(); print(w.pid, flush=True); time.sleep(600)\n"
    )
    held, kept = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=held, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.stdout.close()
    parent.kill()
    parent.wait(10)
    end = time.monotonic() + 20
    while time.monotonic() < end and _alive(child):
        time.sleep(0.05)
    os.close(held)
    os.close(kept)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
