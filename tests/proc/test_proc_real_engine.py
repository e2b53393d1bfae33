"""The real engine on a tiny model, through the same doors as the app and the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from proc_gear import HERE, alive, wait_until
from shared_peaks import share

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.workload import Workload
from pdq_tui.host.live import LiveSession
from pdq_tui.host.measure import MeasureError, measure
from pdq_tui.host.runs import Run
from pdq_tui.host.supervisor import Supervisor

SMALL = Workload(prompt_tokens=16, output_tokens=6, prompts="short")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run(
        [sys.executable, str(HERE / "tiny_model.py"), str(folder)], check=True, capture_output=True
    )
    return folder


def load(model: Path | str) -> p.Load:
    return p.Load(model=str(model), device="cpu", threads=1, cache_dir=share(Path(model).parent / "cache"))


#: Importing torch takes a second on an idle machine and half a minute on a crowded one.
PATIENCE_S = 150.0


def test_a_measurement_of_two_policies_end_to_end(tiny: Path, run: Run) -> None:
    policies = [find_policy("bf16"), find_policy("w8a8-prefill-int4-decode")]
    result = measure(
        load(tiny), policies, SMALL, run=run, blocks=2, min_seconds=0, warmup_steps=1, sensors=False
    )
    assert (result.reason, result.exit_code) == ("done", 0)
    requests = [e for e in result.events if isinstance(e, p.Request)]
    blocked = [r for r in requests if r.block is not None and not r.warmup]
    assert {r.arm for r in blocked} == set(result.labels)
    assert sum(r.control for r in blocked) >= 4
    for r in blocked:
        assert r.valid and r.prompt_tokens == 16 and r.output_tokens == [6]
        assert r.prefill_ms and r.decode_ms and len(r.itl_ms) == 5
        assert sum(r.itl_ms) == pytest.approx(r.decode_ms)
    ready = {e.arm: e for e in result.events if isinstance(e, p.ArmReady)}
    assert ready["w8a8-prefill-int4-decode"].coverage["decode"].converted_parameters > 0
    assert [e.expected for e in result.events if isinstance(e, p.WorkerExited)] == [True]


def test_a_file_named_like_a_library_where_the_person_stands_is_not_imported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.py", "psutil.py", "msgspec.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    seen: list[p.Message] = []
    supervisor = Supervisor(run, seen.append)
    supervisor.start()
    wait_until(lambda: {e.role for e in seen if isinstance(e, p.Hello)} == {"engine", "sensors"}, PATIENCE_S)
    supervisor.close()
    assert all(e.expected for e in seen if isinstance(e, p.WorkerExited))


def test_I08_a_wrong_path_is_a_sentence_and_a_failed_run(run: Run) -> None:
    with pytest.raises(MeasureError) as caught:
        measure(load("/no/such/model"), [find_policy("bf16")], SMALL, run=run, sensors=False)
    assert caught.value.exit_code == 2 and caught.value.message == "no such directory: /no/such/model"


def test_S06_a_killed_engine_comes_back_with_model_arms_workload_and_loop(tiny: Path, run: Run) -> None:
    session = LiveSession(run)
    try:
        session.start(load(tiny), find_policy("int8"), find_policy("bf16"), SMALL, loop=True)
        wait_until(lambda: session.view().arms["A"].requests > 3, PATIENCE_S)
        session.select("B")
        wait_until(lambda: session.view().arms["B"].requests > 3, 60)
        session.interleave(True)
        wait_until(lambda: session.view().ratios, 60)
        view = session.view()
        assert view.engine.pid and view.engine.state == "running"
        os.kill(view.engine.pid, signal.SIGKILL)
        wait_until(lambda: session.view().engine.restarts == 1 and session.view().running, PATIENCE_S)
        before = session.view().arms["A"].requests
        wait_until(lambda: session.view().arms["A"].requests > before, 60)
        assert any("probably out of memory" in n.text for n in session.view().notes)
    finally:
        began = time.monotonic()
        session.close()
        assert time.monotonic() - began < 15


@pytest.mark.parametrize("wait_s", [0.3, 2.5], ids=["f_while_importing", "later"])
def test_S05_the_real_workers_die_with_the_app(tiny: Path, tmp_path: Path, wait_s: float) -> None:
    app = subprocess.Popen(
        [sys.executable, str(HERE / "fake_app.py"), str(tmp_path), str(tiny)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert app.stdout is not None
    pids = [int(word) for word in app.stdout.readline().split()]
    time.sleep(wait_s)
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    assert "engine.worker" in " ".join(psutil.Process(pids[0]).cmdline())
    app.kill()
    app.wait(5)
    app.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in pids), 5, "no orphan")
