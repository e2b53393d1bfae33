"""What workers print reaches the log with time and stage, and never holds the worker up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from proc_gear import ENGINE, wait_until

from pdq_tui.core.protocol import Hello, Progress, StageSample, TaskEnded
from pdq_tui.host import printed
from pdq_tui.host.printed import Printed, unmarked
from pdq_tui.host.runs import Run
from pdq_tui.host.stages import StageWatch
from pdq_tui.host.supervisor import Supervisor

STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \S+ ")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "stderr.log"


@pytest.fixture
def words(log: Path) -> Iterator[Printed]:
    made = Printed("engine", log, lambda: "decode")
    made.start()
    yield made
    made.close()


def child(words: Printed, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], stderr=words.fd)


def shown(log: Path) -> list[tuple[bytes, bytes]]:
    """(time and stage, text) of the log's lines, as a terminal would show them."""
    return [unmarked(line.rpartition(b"\r")[2]) for line in log.read_bytes().split(b"\n") if line]


def test_S03_every_line_has_time_and_stage_whoever_looks(words: Printed, log: Path) -> None:
    child(words, "import os; os.write(2, b'from C++\\nand more\\nno end')").wait()
    wait_until(lambda: log.exists() and b"and more" in log.read_bytes())
    words.close()
    lines = shown(log)
    assert [text for _, text in lines] == [b"from C++", b"and more", b"no end"]
    assert all(re.fullmatch(rb"\d\d:\d\d:\d\d decode", when) for when, _ in lines)
    assert words.tail() == "from C++\nand more\nno end"


def test_S03_a_progress_bar_is_one_line_and_seen_before_it_ends(
    words: Printed, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printed, "PARTIAL_S", 0.0)
    os.write(words.fd, b"".join(b"\r%3d%%" % n for n in range(50)))
    wait_until(lambda: log.exists() and b" 49%" in log.read_bytes())
    os.write(words.fd, b"\r100%\nend\n")
    words.close()
    assert [text for _, text in shown(log)] == [b"100%", b"end"]
    assert log.read_bytes().count(b"%") == 2, "states that nobody saw are not kept"


def test_S03_a_flood_stalls_nobody_loses_no_line_and_keeps_no_memory(words: Printed, log: Path) -> None:
    code = (
        "import os, time\n"
        "worst, t = 0, time.perf_counter()\n"
        "for n in range(40_000):\n"
        "    os.write(2, b'a warning of the usual length, and then some more: %06d\\n' % n)\n"
        "    now = time.perf_counter(); worst, t = max(worst, now - t), now\n"
        "os._exit(0 if worst < 10 else 3)\n"
    )
    assert child(words, code).wait(100) == 0
    words.close()
    numbers = [int(line.rpartition(b" ")[2]) for line in log.read_bytes().splitlines()]
    assert numbers == list(range(40_000))


def test_S03_what_was_read_is_given_back_to_the_machine(words: Printed) -> None:
    os.write(words.fd, b"x" * 99 + b"\n")
    for _ in range(8):
        os.write(words.fd, (b"x" * 99 + b"\n") * 10_000)
    wait_until(lambda: os.fstat(words.fd).st_blocks * 512 < 2 * printed.READ_BYTES)
    assert os.fstat(words.fd).st_size == 8_000_100


def test_S03_a_stopped_app_does_not_stop_a_worker_that_prints(log: Path) -> None:
    words = Printed(
        "engine", log, lambda: "load"
    )  # not started: it looks as seldom as a stopped process does
    assert child(words, "import os; [os.write(2, b'x' * 99 + b'\\n') for _ in range(50_000)]").wait(100) == 0
    words.close()
    assert log.read_bytes().count(b" load xxx") == 50_000


def test_S03_the_log_is_bounded_and_ends_with_the_last_words(log: Path) -> None:
    words = Printed("engine", log, lambda: "decode", limit_bytes=10_000)
    for n in range(1_000):
        os.write(words.fd, b"line %d\n" % n)
        if n % 100 == 0:
            words._take()
    words.close()
    text = log.read_text()
    assert len(text) < 10_000 + 40 * printed.TAIL_BYTES and "bytes are missing here" in text
    assert text.rstrip().endswith("line 999")


def test_X04_a_full_disk_costs_lines_and_says_so(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Printed("engine", log, lambda: "decode")
    full = [False]
    write = os.write

    def writing(fd: int, data: bytes) -> int:
        if full[0] and fd == words._log:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", writing)
    for state, text in ((False, b"one\n"), (True, b"two\n"), (False, b"three\n")):
        full[0] = state
        write(words.fd, text)
        words._take()
    words.close()
    texts = [text.decode() for _, text in shown(log)]
    assert texts[0] == "one" and "bytes are missing here" in texts[1] and texts[2] == "three"
    assert words.tail() == "one\ntwo\nthree"


def test_a_log_that_cannot_be_opened_costs_the_log_only(tmp_path: Path) -> None:
    words = Printed("engine", tmp_path / "no" / "such.log", lambda: "")
    os.write(words.fd, b"hello\n")
    words.close()
    assert words.tail() == "hello"


def test_S03_the_stage_is_what_the_worker_is_at(run: Run) -> None:
    watch = StageWatch("engine")
    seen = [watch.word]
    for event in (
        Hello(role="engine", pid=1),
        Progress(task="convert", label="", done=0),
        TaskEnded(task="convert", label="", ok=True, seconds=1),
        StageSample(request=1, arm="A", stage="prefill", tokens=0),
    ):
        watch.take(event)
        seen.append(watch.word)
    assert seen == ["starting", "idle", "convert", "idle", "prefill"]


def test_S03_the_engine_s_words_are_marked_without_a_screen(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "exit_at_start")
    events: list[object] = []
    supervisor = Supervisor(run, events.append, engine_argv=ENGINE, sensors=False, restart=False)
    supervisor.start()
    wait_until(lambda: any(type(e).__name__ == "WorkerExited" for e in events))
    supervisor.close()
    lines = (run.path / "stderr.log").read_text().splitlines()
    assert len(lines) == 2 and all(STAMPED.match(line) and " starting " in line for line in lines)
