"""A real limit on the engine's memory, in the real engine: one sentence, an exit code, and a session that goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from proc_gear import HERE, wait_until
from shared_peaks import share

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.workload import Workload
from pdq_tui.host.live import LiveSession
from pdq_tui.host.measure import MeasureError, measure
from pdq_tui.host.runs import Run

LIMITED = [sys.executable, "-P", str(HERE / "limited_engine.py")]
LARGE = Workload(prompt_tokens=200, output_tokens=6, prompts="short", batch=256)
SMALL = Workload(prompt_tokens=16, output_tokens=6, prompts="short")
PATIENCE_S = 150.0
SENTENCE = re.compile(
    r"the engine had to be ended: out of memory in (load|prefill) \((?:[\d.]+ [MG]iB wanted, )?[\d.]+ MiB free\)"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limited") / "tiny"
    subprocess.run(
        [sys.executable, str(HERE / "tiny_model.py"), str(folder)], check=True, capture_output=True
    )
    return folder


@pytest.fixture
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("LIMIT_COUNT", str(tmp_path / "processes"))
    return monkeypatch


def load(model: Path) -> p.Load:
    return p.Load(model=str(model), device="cpu", threads=1, cache_dir=share(model.parent / "cache"))


def test_S06_c_load_and_request_run_out_of_memory_and_the_session_goes_on(
    tiny: Path, run: Run, limit: pytest.MonkeyPatch
) -> None:
    # A thread's stack fits, and what a large prefill takes does not; the load's file is made larger than the room.
    limit.setenv("LIMIT_AT", "load,,request")  # the second replaces the first by itself
    limit.setenv("LIMIT_ROOM", str(40 << 20))
    weights = next(tiny.glob("*.safetensors"))
    data = weights.read_bytes()
    session = LiveSession(run, engine_argv=LIMITED, sensors=False)

    def told() -> list[str]:
        return [n.text for n in session.view().notes if n.text.startswith("the engine had to be ended")]

    try:
        with weights.open("ab") as file:
            file.truncate(len(data) + (200 << 20))
        session.start(load(tiny), find_policy("bf16"), find_policy("bf16"), LARGE, loop=True)
        wait_until(told, PATIENCE_S)
        assert SENTENCE.match(told()[0]) and "in load" in told()[0] and "started again" in told()[0]
        hint = next(n.hint for n in session.view().notes if n.level == "error")
        assert hint and "smaller model" in hint
        weights.write_bytes(data)
        session.restart_engine()
        wait_until(lambda: len(told()) > 1, PATIENCE_S)
        assert SENTENCE.match(told()[1]) and "in prefill" in told()[1]
        wait_until(lambda: session.view().workload and session.view().engine.state == "ready", PATIENCE_S)
        assert not session.view().wants_loop, "it would meet the same failure"
        session.set_workload(SMALL)
        session.start_loop()
        wait_until(lambda: session.view().arms["A"].requests > 3, PATIENCE_S)
        assert session.view().engine.restarts >= 2
    finally:
        session.close()


def test_S06_c_a_headless_run_out_of_memory_exits_1_with_one_sentence(
    tiny: Path, run: Run, limit: pytest.MonkeyPatch
) -> None:
    limit.setenv("LIMIT_AT", "request")
    limit.setenv("LIMIT_ROOM", str(40 << 20))
    with pytest.raises(MeasureError) as caught:
        measure(
            load(tiny),
            [find_policy("bf16")],
            LARGE,
            run=run,
            blocks=1,
            min_seconds=0,
            solo=False,
            sensors=False,
            engine_argv=LIMITED,
        )
    assert caught.value.exit_code == 1 and SENTENCE.fullmatch(caught.value.message)
    assert caught.value.hint and "smaller policy" in caught.value.hint
    failures = [e for e in caught.value.events if isinstance(e, p.Failure)]
    assert len(failures) == 1 and failures[0].kind == "oom"
    assert failures[0].free_bytes is not None
