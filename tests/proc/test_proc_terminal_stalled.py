"""A terminal that takes nothing for twenty seconds: what is measured meanwhile is all there."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from proc_gear import HERE, wait_until

sys.path.insert(0, str(HERE.parent / "tui"))
from pty_gear import Pty, end

from pdq_tui.core import protocol as p
from pdq_tui.host.journal import read_events

STALL_S = 20.0
CHILD = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from proc_gear import ENGINE, SENSORS
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.host.live import LiveSession
from pdq_tui.host.runs import new_run
from pdq_tui.tui.app import Options, PdqApp
run = new_run(Path({runs!r}))
session = LiveSession(run, engine_argv=ENGINE, sensors_argv=SENSORS)
options = Options(runs_dir=Path({runs!r}), load=Load(model="fake"), a=find_policy("int8"), b=find_policy("bf16"),
                  workload=Workload(), fps=10.0)
sys.exit(PdqApp(session, options).run())
"""


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Pty]:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(here=str(HERE), runs=str(tmp_path / "runs")), encoding="utf-8")
    found = Pty(script, PDQ_HOME=str(tmp_path / "home"))
    yield found
    end(found)


def test_S04_a_terminal_that_stops_for_20_s_costs_no_sample(terminal: Pty, tmp_path: Path) -> None:
    terminal.until(lambda: b"RUNNING" in terminal.received, 60)
    [journal] = (tmp_path / "runs").glob("*/events.jsonl")
    wait_until(
        lambda: any(isinstance(e, p.Request) for e in read_events(journal)), 30, "a request is recorded"
    )
    begin = time.monotonic_ns()
    time.sleep(STALL_S)  # nobody reads the terminal: its buffer fills, and the app's writes wait
    finish = time.monotonic_ns()
    during = [e for e in read_events(journal) if begin <= e.t_ns <= finish]
    requests = [e for e in during if isinstance(e, p.Request)]
    samples = [e for e in during if isinstance(e, p.SensorSample)]
    assert len(requests) > 20 and len(samples) > 50
    numbers = [r.request for r in requests]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "no record is missing"
    assert not [e for e in during if isinstance(e, p.Dropped)]
    gaps = [(b.t_ns - a.t_ns) / 1e9 for a, b in itertools.pairwise(samples)]
    assert max(gaps) < 8.0, f"nothing was sampled for {max(gaps):.1f} s"
    assert (samples[-1].t_ns - samples[0].t_ns) / 1e9 > STALL_S / 2
    # The screen goes on where the run is, and the keys work.
    start = len(terminal.received)
    terminal.until(lambda: len(terminal.received) > start + 200)
    terminal.answers(b"?", b"esc closes")
