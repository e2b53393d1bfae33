"""The sensors worker as a process, and what it reads of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest
from fake_nvml.sensors_process import sensors

from pdq_tui.core import cpus
from pdq_tui.core.cgroups import Memory, cgroup_memory, own_memory
from pdq_tui.core.protocol import (
    Dropped,
    Hello,
    Note,
    Ping,
    Pong,
    SensorSample,
    Shutdown,
    decode_event,
    encode,
)
from pdq_tui.errors import PdqError
from pdq_tui.sensors.channel import Channel
from pdq_tui.sensors.cpu import CpuReader


@pytest.fixture
def worker(tmp_path):
    with sensors(tmp_path, {"LD_LIBRARY_PATH": str(tmp_path)}) as running:
        yield running


def test_hello_comes_first_and_commands_are_answered(worker):
    worker.send(Ping(id=7))
    assert worker.until(lambda e: isinstance(e, Pong)).id == 7
    assert isinstance(worker.events[0], Hello)
    assert worker.events[0].role == "sensors"


def test_a_broken_or_unknown_command_does_not_end_it(worker):
    worker.process.stdin.write(b'{"type":"later","v":1}\nnot json\n{"type":"ping","v":99}\n')
    worker.send(Ping(id=1))
    worker.until(lambda e: isinstance(e, Pong))
    notes = [e for e in worker.events if isinstance(e, Note)]
    assert [note.level for note in notes] == ["warn", "error"]
    assert "version 99" in notes[1].text


def test_S05_it_ends_with_stdin_and_with_shutdown(tmp_path):
    for end in ("eof", "shutdown"):
        with sensors(tmp_path, {}) as running:
            running.until(lambda e: isinstance(e, Hello))
            if end == "eof":
                running.close_stdin()
            else:
                running.send(Shutdown())
            assert running.process.wait(timeout=2) == 0


def test_S05_it_dies_with_its_parent_even_if_stdin_stays_open(tmp_path):
    read, write = os.pipe()
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'pdq_tui.sensors.worker'], stdin=int(sys.argv[1]),"
        " stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(read)], pass_fds=[read], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
        assert psutil.wait_procs([child], timeout=3)[1] == [] or child.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()
        os.close(read)
        os.close(write)


def test_S03_what_libraries_print_is_not_taken_for_events(tmp_path):
    # A thread that writes to fd 1 as soon as the worker has taken that descriptor away from the events.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time\n"
        "def late():\n"
        "    while os.fstat(1).st_ino != os.fstat(2).st_ino:\n"
        "        time.sleep(0.01)\n"
        "    os.write(1, b'printed by a library\\n')\n"
        "threading.Thread(target=late, daemon=True).start()\n"
    )
    with sensors(tmp_path, {"PYTHONPATH": str(tmp_path)}) as running:
        running.until(lambda e: isinstance(e, SensorSample) and e.cpu.load is not None)
        deadline = time.monotonic() + 5
        while "printed by a library" not in running.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "printed by a library" in running.log.read_text()
        assert not any(isinstance(event, PdqError) for event in running.events)


def test_a_reader_that_does_not_read_costs_samples_only_and_they_are_counted():
    read, write = os.pipe()
    channel = Channel(write, "sensors")
    begun = time.monotonic()
    for _ in range(2000):
        channel.send(SensorSample())
    channel.send(Pong(id=1))
    assert time.monotonic() - begun < 20, "sending never waits: a full pipe would have kept it for ever"
    samples, dropped, pongs = 0, 0, 0
    with os.fdopen(read, "rb") as lines:
        while samples + dropped < 2000:
            event = decode_event(lines.readline())
            samples += isinstance(event, SensorSample)
            pongs += isinstance(event, Pong)
            if isinstance(event, Dropped):
                assert event.role == "sensors"
                dropped = event.count
    assert samples >= 64
    assert dropped > 0
    assert pongs == 1, "what is not a sample is never dropped"


def test_it_imports_neither_torch_nor_a_screen_nor_tables():
    code = (
        "import sys, pdq_tui.sensors.worker\n"
        "print([m for m in ('torch', 'textual', 'polars', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- CPU ---------------------------------------------------------------------------------------------------------------


def test_the_engine_process_is_followed_by_pid_until_it_ends():
    engine = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        reader = CpuReader()
        reader.watch(engine.pid)
        first = reader.read()
        assert first.engine_load is None
        assert "first reading" in first.missing["engine_load"]
        assert first.engine_rss_bytes
        time.sleep(0.3)
        second = reader.read()
        assert second.engine_load is not None
        assert 0 < second.engine_load <= 1.1
        assert second.load is not None
    finally:
        engine.kill()
        engine.wait()
    third = reader.read()
    assert (third.engine_load, third.engine_rss_bytes) == (None, None)
    assert "ended" in third.missing["engine_rss_bytes"]


def test_T14_the_engine_s_load_is_of_the_cpus_that_it_may_use_itself(monkeypatch):
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        engine.stdout.readline()
        monkeypatch.setattr(cpus, "cpu_quota", lambda pid: None)
        assert cpus.usable_cpus(engine.pid) == 1.0, "its own affinity, not ours"
        monkeypatch.setattr(cpus, "cpu_quota", lambda pid: 0.5 if pid == engine.pid else None)
        assert cpus.usable_cpus(engine.pid) == 0.5
        reader = CpuReader()
        reader.watch(engine.pid)
        reader.read()
        assert reader._cpus == 0.5
        engine.communicate("\n")
    assert "ended" in reader.read().missing["engine_load"]


def test_nothing_is_watched_yet():
    sample = CpuReader().read()
    assert sample.missing["engine_load"] == "the engine has not started"
    assert sample.memory_total_bytes is not None


MACHINE = Memory(total=1000, available=600)


def test_a_cgroup_v2_limit_narrows_the_memory(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (tmp_path / "a" / "memory.max").write_text("400\n")
    (tmp_path / "a" / "memory.current").write_text("300\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 200\ninactive_file 50\n")
    assert cgroup_memory("0::/a/b\n", tmp_path, MACHINE) == Memory(400, 150)


def test_a_cgroup_v1_limit_narrows_the_memory_and_its_huge_number_means_none(tmp_path):
    memory = tmp_path / "memory" / "x"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("500\n")
    (memory / "memory.usage_in_bytes").write_text("450\n")
    (memory / "memory.stat").write_text("total_inactive_file 20\n")
    membership = "9:name=systemd:/\n4:memory:/x\n0::/\n"
    assert cgroup_memory(membership, tmp_path, MACHINE) == Memory(500, 70)
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_memory(membership, tmp_path, MACHINE) == MACHINE


def test_a_container_that_hides_its_own_cgroup_path_is_read_at_the_root(tmp_path):
    (tmp_path / "memory.max").write_text("800\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert cgroup_memory("0::/not/visible\n", tmp_path, MACHINE) == Memory(800, 600)


def test_without_cgroups_the_machine_is_the_limit(tmp_path):
    assert own_memory(MACHINE, tmp_path, tmp_path / "missing") == MACHINE


def test_encoded_samples_hold_no_numbers_where_nothing_was_read():
    line = encode(SensorSample(cpu=CpuReader().read()))
    assert b"NaN" not in line
