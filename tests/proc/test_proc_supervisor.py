"""Workers live and die: what the supervisor starts, it explains, replaces and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from proc_gear import ENGINE, HERE, SENSORS, alive, wait_until

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.protocol import (
    Failure,
    Hello,
    Load,
    ModelReady,
    Note,
    Request,
    SensorSample,
    SetArm,
    SetWorkload,
    StartLoop,
    WorkerExited,
    WorkerStarted,
)
from pdq_tui.core.workload import Workload
from pdq_tui.host.runs import Run, cut_short, end_leftover, leftovers
from pdq_tui.host.sentences import exit_sentence
from pdq_tui.host.supervisor import Supervisor

Start = Callable[..., Supervisor]


class Seen(list[Any]):
    def of(self, kind: type) -> list[Any]:
        return [e for e in self if isinstance(e, kind)]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def start(run: Run, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    started: list[Supervisor] = []

    def begin(mode: str = "", *, once: Path | None = None, **options: Any) -> Supervisor:
        monkeypatch.setenv("FAKE_ENGINE", mode)
        if once is not None:
            monkeypatch.setenv("FAKE_ENGINE_ONCE", str(once))
        options.setdefault("sensors", False)
        supervisor = Supervisor(run, seen.append, engine_argv=ENGINE, sensors_argv=SENSORS, **options)
        started.append(supervisor)
        supervisor.start()
        return supervisor

    yield begin
    for supervisor in started:
        supervisor.close()


def begin_loop(supervisor: Supervisor, arm: str = "B") -> None:
    wait_until(lambda: supervisor.engine_pid, what="engine started")
    supervisor.send(Load(model="demo"))
    supervisor.send(SetArm(arm="B", policy=find_policy("bf16")))
    supervisor.send(SetWorkload(workload=Workload(batch=2)))
    supervisor.send(StartLoop(arm=arm, arms=["B"]))


def test_S02_start_stop_restart_three_times(start: Start, seen: Seen) -> None:
    supervisor = start()
    pids = set()
    for n in range(1, 4):
        wait_until(lambda n=n: len(seen.of(Hello)) == n, what=f"hello {n}")
        pids.add(supervisor.engine_pid)
        supervisor.restart_engine()
    wait_until(lambda: len(seen.of(Hello)) == 4)
    assert len(pids) == 3 and not any(alive(p) for p in pids if p)
    assert supervisor.restarts == 3
    assert all(e.expected for e in seen.of(WorkerExited))


def test_S02_worker_has_no_access_to_the_terminal(start: Start, seen: Seen) -> None:
    supervisor = start()
    pid = wait_until(lambda: seen.of(Hello)) and supervisor.engine_pid
    assert pid
    assert os.getpgid(pid) == pid and os.getsid(pid) == pid
    targets = [str(Path(f"/proc/{pid}/fd/{fd}").readlink()) for fd in (0, 1, 2)]
    assert targets[0].startswith("pipe:")
    assert targets[1] == targets[2] and targets[1].startswith("/memfd:engine-printed")
    tty_nr = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4]
    assert tty_nr == "0"


@pytest.mark.parametrize(
    "mode", ["", "ignore_shutdown", "ignore_shutdown,ignore_term,ignore_eof", "hang_at_load", "deaf"]
)
def test_S05_a_quit_ends_the_workers_in_time(start: Start, seen: Seen, mode: str) -> None:
    supervisor = start(mode, sensors=True)
    wait_until(lambda: seen.of(Hello) and len(supervisor.worker_pids) == 2)
    supervisor.send(Load(model="demo"))
    pids = list(supervisor.worker_pids.values())
    began = time.monotonic()
    supervisor.close()
    assert time.monotonic() - began < 15
    assert not any(alive(p) for p in pids)
    assert not (supervisor.run.path / "lock.json").exists()


def test_S05_e_a_stopped_worker_ends_as_well(start: Start, seen: Seen) -> None:
    supervisor = start("ignore_term")
    wait_until(lambda: seen.of(Hello))
    pid = supervisor.engine_pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    supervisor.close()
    assert time.monotonic() - began < 15 and not alive(pid)


def test_S05_e_a_stopped_worker_never_blocks_the_caller(start: Start, seen: Seen) -> None:
    supervisor = start()
    wait_until(lambda: seen.of(Hello))
    pid = supervisor.engine_pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    big = Workload(texts=("x" * 200_000,), prompts="file")
    for _ in range(20):
        assert supervisor.send(SetWorkload(workload=big))
    assert time.monotonic() - began < 10, "a full pipe would have kept it for ever"
    wait_until(lambda: (supervisor.engine_silence() or 0) > 1.5, what="silence is seen")


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM], ids=["c_kill", "d_hangup", "terminated"]
)
@pytest.mark.parametrize("mode", ["ignore_eof", "hang_at_load,ignore_eof"], ids=["idle", "f_during_load"])
def test_S05_workers_die_with_the_app(tmp_path: Path, number: int, mode: str) -> None:
    env = {**os.environ, "FAKE_ENGINE": mode}
    app = subprocess.Popen(
        [sys.executable, str(HERE / "fake_app.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert app.stdout is not None
    pids = [int(word) for word in app.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(p) for p in pids)
    app.send_signal(number)
    app.wait(5)
    app.stdout.close()
    wait_until(lambda: not any(alive(p) for p in pids), 5, "no orphan")


def test_S05_b_interrupt_does_not_reach_the_workers_and_closing_ends_them(tmp_path: Path) -> None:
    app = subprocess.Popen(
        [sys.executable, str(HERE / "fake_app.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert app.stdout is not None
    pids = [int(word) for word in app.stdout.readline().split()]
    app.send_signal(signal.SIGINT)
    assert app.stdout.read() == "closed\n"
    app.wait(5)
    app.stdout.close()
    assert not any(alive(p) for p in pids)


def test_S05_a_leftover_is_recognised_and_offered_not_killed(run: Run) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.track(sleeper.pid, "engine")
        assert leftovers() == []  # its app, we, is alive
        lock = run.path / "lock.json"
        lock.write_text(lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
        found = leftovers()
        assert [(f.run_id, f.role, f.pid) for f in found] == [(run.id, "engine", sleeper.pid)]
        assert run.id in found[0].text and sleeper.poll() is None
        end_leftover(found[0])
        assert sleeper.wait(5) == -signal.SIGTERM
        assert leftovers() == [] and not lock.exists()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_S05_a_killed_app_s_measurements_are_found_and_told_once(run: Run) -> None:
    def again() -> list[str]:
        return [place.name for place in cut_short([run.path.parent])]

    run.track(999999998, "engine")  # ended long ago
    lock, journal = run.path / "lock.json", run.path / "events.jsonl"
    journal.write_text('{"type":"hello","v":1}\n{"type":"request","v":1}\n')
    assert again() == [], "its app, we, is alive"
    lock.write_text(lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    assert again() == [run.id]
    journal.write_text('{"type":"hello","v":1}\n')
    assert again() == [], "nothing was measured"
    journal.write_text('{"type":"request","v":1}\n')
    saved = run.path / "snapshots" / "001" / "manifest.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    assert again() == [], "a snapshot has it"
    saved.unlink()
    lock.write_text(lock.read_text().replace(f'"host": "{socket.gethostname()}"', '"host": "elsewhere"'))
    assert again() == [], "another machine's, of a shared home"
    lock.write_text(lock.read_text().replace('"host": "elsewhere"', f'"host": "{socket.gethostname()}"'))
    assert again() == [run.id]
    assert leftovers() == [] and not lock.exists()
    assert again() == [], "told once"


def test_S05_a_recycled_pid_is_nobody_s_leftover(run: Run) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.track(sleeper.pid, "engine")
        lock = run.path / "lock.json"
        text = lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999')
        ticks = text.rpartition('"start_ticks": ')[2].split("\n")[0].strip()
        lock.write_text(text.replace(ticks, "17"))
        assert leftovers() == [] and sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_S06_out_of_memory_is_told_and_the_next_smaller_run_works(start: Start, seen: Seen) -> None:
    supervisor = start("oom@3")
    begin_loop(supervisor)
    gone = wait_until(lambda: seen.of(WorkerExited))[0]
    assert gone.text == "the engine had to be ended: out of memory in decode (8.00 GiB wanted, 1.00 GiB free)"
    assert gone.replaced and not gone.expected
    assert len([r for r in seen.of(Request) if r.valid]) == 2  # what was measured before is kept
    wait_until(lambda: len(seen.of(Hello)) == 2)
    supervisor.send(Load(model="demo"))
    supervisor.send(SetArm(arm="B", policy=find_policy("bf16")))
    supervisor.send(SetWorkload(workload=Workload(batch=1)))
    supervisor.send(StartLoop(arm="B", arms=["B"]))
    wait_until(lambda: len(seen.of(Request)) > 10)


def test_S06_signal_9_is_explained(start: Start, seen: Seen) -> None:
    supervisor = start("kill@2")
    begin_loop(supervisor)
    gone = wait_until(lambda: seen.of(WorkerExited))[0]
    assert gone.returncode == -9 and gone.text == "the engine was killed, probably out of memory"
    wait_until(lambda: [e.restart for e in seen.of(WorkerStarted)] == [0, 1])


def test_S06_a_real_address_space_limit_is_explained(start: Start, seen: Seen) -> None:
    supervisor = start("memory_error")
    wait_until(lambda: supervisor.engine_pid)
    supervisor.send(Load(model="demo"))
    gone = wait_until(lambda: seen.of(WorkerExited))[0]
    assert "ran out of memory" in gone.text and "MemoryError" in gone.tail


def test_crashes_name_the_signal_or_the_last_line(start: Start, seen: Seen) -> None:
    supervisor = start("exit@2")
    begin_loop(supervisor)
    gone = wait_until(lambda: seen.of(WorkerExited))[0]
    assert gone.text == "the engine ended with exit code 3: RuntimeError: device-side assert triggered"
    assert exit_sentence("engine", -11, False, None, "") == "the engine crashed (SIGSEGV)"
    assert exit_sentence("engine", 0, False, None, "") == "the engine ended without being asked"


def test_three_fruitless_crashes_and_it_stays_down_until_asked(
    start: Start, seen: Seen, tmp_path: Path
) -> None:
    supervisor = start("exit_at_start")
    wait_until(lambda: len(seen.of(WorkerExited)) == 3)
    last = seen.of(WorkerExited)[-1]
    assert not last.replaced and "3 times in a row" in last.text and "no libtorch here" in last.text
    time.sleep(0.6)
    assert supervisor.engine_pid is None and len(seen.of(WorkerStarted)) == 3
    assert not supervisor.send(Load(model="demo"))
    supervisor.restart_engine()
    wait_until(lambda: len(seen.of(WorkerStarted)) == 4)


def test_a_command_that_cannot_be_started_is_a_sentence(run: Run, seen: Seen) -> None:
    supervisor = Supervisor(run, seen.append, engine_argv=["/no/such/python"], sensors=False)
    supervisor.start()
    gone = wait_until(lambda: seen.of(WorkerExited))[0]
    assert "cannot be started" in gone.text and not gone.replaced
    supervisor.close()


def test_garbage_and_unknown_types_are_counted_and_survived(start: Start, seen: Seen) -> None:
    supervisor = start("garbage,unknown")
    wait_until(lambda: any(n.text == "known" for n in seen.of(Note)))
    assert supervisor.garbage == 5 and supervisor.unknown == 1
    assert [n.level for n in seen.of(Note)] == ["warn", "info"]
    supervisor.send(Load(model="demo"))
    wait_until(lambda: seen.of(ModelReady))


def test_a_worker_of_another_version_is_ended_and_not_tried_again(start: Start, seen: Seen) -> None:
    start("wrong_version")
    gone = wait_until(lambda: seen.of(WorkerExited))[0]
    assert "another version of pdq-tui" in gone.text and "99" in gone.text and not gone.replaced
    assert not seen.of(Failure)


def test_a_flood_loses_no_record_and_blocks_nobody(start: Start, seen: Seen) -> None:
    supervisor = start("flood")
    begin_loop(supervisor)
    wait_until(lambda: len(seen.of(Request)) >= 200, 20)
    numbers = [r.request for r in seen.of(Request)][:200]
    assert numbers == list(range(1, 201))
    kept = [e.request for e in supervisor.journal.events() if isinstance(e, Request)][:200]
    assert kept == numbers


def test_a_hung_interpreter_shows_as_silence_and_can_be_replaced(start: Start, seen: Seen) -> None:
    supervisor = start("hang@2")
    begin_loop(supervisor)
    wait_until(lambda: (supervisor.engine_silence() or 0) > 1.2)
    supervisor.restart_engine()
    wait_until(lambda: len(seen.of(Hello)) == 2)


def test_sensors_die_quietly_and_are_given_up_after_a_few_tries(
    start: Start, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SENSORS", "die")
    start(sensors=True)
    gone = wait_until(lambda: [e for e in seen.of(WorkerExited) if not e.replaced])[0]
    assert gone.role == "sensors" and "n/a" in gone.text
    assert len([e for e in seen.of(WorkerStarted) if e.role == "engine"]) == 1


def test_sensors_follow_the_engine_that_runs_now(start: Start, seen: Seen) -> None:
    supervisor = start(sensors=True)
    wait_until(lambda: any(s.cpu.engine_rss_bytes == supervisor.engine_pid for s in seen.of(SensorSample)))
    supervisor.restart_engine()
    wait_until(lambda: len([e for e in seen.of(Hello) if e.role == "engine"]) == 2)
    wait_until(lambda: seen.of(SensorSample)[-1].cpu.engine_rss_bytes == supervisor.engine_pid)
