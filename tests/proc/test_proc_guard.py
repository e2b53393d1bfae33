"""The guard in a live session: a planted bad layer is switched back, journaled, and told in one sentence."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proc_gear import ENGINE, HERE, SENSORS, wait_until

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.policy import StagePolicy
from pdq_tui.core.workload import Workload
from pdq_tui.host.guard import GuardLimits
from pdq_tui.host.live import LiveSession
from pdq_tui.host.runs import Run
from pdq_tui.host.view import SessionView

BF16, INT8 = find_policy("bf16"), find_policy("int8")
PATIENCE_S = 150.0
#: A random model's logits are flat: two that have nothing to do with each other are some 0.02 nats apart.
STRICT = 0.0055


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    argv = [sys.executable, str(HERE / "tiny_model.py"), str(folder)]
    subprocess.run(argv, check=True, capture_output=True)
    return folder


def with_a_bad_layer(model: Path, folder: Path, change: Callable[[int], int]) -> Path:
    """A copy of which one layer's bf16 weights are changed, bit pattern by bit pattern."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8 : 8 + length])["model.layers.1.mlp.down_proj.weight"]
    begin, end = (8 + length + at for at in entry["data_offsets"])
    words = struct.unpack(f"<{(end - begin) // 2}H", data[begin:end])
    data[begin:end] = struct.pack(f"<{len(words)}H", *map(change, words))
    file.write_bytes(bytes(data))
    return folder


def larger(word: int) -> int:
    """Times 2¹²: twelve more in a bf16's exponent."""
    return word + (12 << 7) if (word >> 7) & 0xFF else word


@pytest.fixture
def live(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LiveSession]]:
    started: list[LiveSession] = []

    def begin(
        load: p.Load, a: Any, b: Any, limits: GuardLimits, argv: list[str] | None, mode: str = ""
    ) -> LiveSession:
        monkeypatch.setenv("FAKE_ENGINE", mode)
        session = LiveSession(
            run, engine_argv=argv, sensors_argv=SENSORS, sensors=argv is not None, guard=limits
        )
        started.append(session)
        workload = Workload(prompt_tokens=16, output_tokens=6, prompts="short")
        session.start(load, a, b, workload, loop=True)
        return session

    yield begin
    for session in started:
        session.close()


def until(session: LiveSession, condition: Callable[[SessionView], Any], timeout_s: float) -> SessionView:
    wait_until(lambda: condition(session.view()), timeout_s)
    return session.view()


def tripped(session: LiveSession) -> list[p.GuardTripped]:
    return [e for e in session.events() if isinstance(e, p.GuardTripped)]


def test_a_planted_bad_layer_gives_way_to_the_baseline(
    live: Callable[..., LiveSession], tiny: Path, tmp_path: Path
) -> None:
    bad = with_a_bad_layer(tiny, tmp_path / "bad", larger)
    a = msgspec.structs.replace(
        BF16, name="planted", prefill=StagePolicy(), decode=StagePolicy(source=str(bad)), storage="dual"
    )
    load = p.Load(model=str(tiny), device="cpu", threads=1, cache_dir=str(tmp_path / "cache"))
    session = live(load, a, BF16, GuardLimits(every=2, kld=STRICT, window=4), None)
    view = until(session, lambda v: v.guard and v.guard.state == "switched", PATIENCE_S)
    assert view.guard is not None and view.active == "B" and not view.interleave
    assert view.guard.text.startswith("guard: A (planted) gave way to B (bf16) at request ")
    assert "nats over the last 3 checks, the limit is 0.0055" in view.guard.text
    assert any(n.text == view.guard.text and n.level == "error" for n in view.notes)
    until(session, lambda v: v.arms["B"].requests >= 3, PATIENCE_S)
    session.stop()
    until(session, lambda v: not v.running, PATIENCE_S)
    events = session.events()
    [trip] = tripped(session)
    assert (trip.measure, trip.switched, trip.base_policy) == (
        "kld",
        True,
        "bf16",
    ) and trip.value > trip.limit
    checks = [e for e in events if isinstance(e, p.Guarded)]
    assert len(checks) >= 3 and all(c.arm == "A" and c.kld is not None and c.kld > STRICT for c in checks)
    # Of two requests one is checked: the sixth of A is on its way, at most, when the fifth was.
    requests = [e for e in events if isinstance(e, p.Request) and not e.warmup]
    assert sum(r.arm == "A" for r in requests) <= 8 and requests[-1].arm == "B"


def test_a_good_policy_stays_and_is_checked(
    live: Callable[..., LiveSession], tiny: Path, tmp_path: Path
) -> None:
    load = p.Load(model=str(tiny), device="cpu", threads=1, cache_dir=str(tmp_path / "cache"))
    session = live(load, INT8, BF16, GuardLimits(every=1, kld=STRICT), None)
    view = until(session, lambda v: v.guard and v.guard.checks >= 6, PATIENCE_S)
    assert view.guard is not None and view.guard.state == "watching" and not view.guard.text
    assert view.active == "A" and view.guard.mean is not None and view.guard.mean < STRICT / 10
    assert not tripped(session)


# -- against a fake engine: what the host does with what it is told -------------------------------------------------------


def said(session: LiveSession, kld: float | None, **more: Any) -> None:
    """A check as the engine would have sent it."""
    ready = session.view().arms["A"].ready
    assert ready is not None
    session._on_event(
        p.Guarded(
            request=1,
            arm="A",
            policy="x",
            policy_digest=ready.policy.digest,
            base="B",
            base_policy="bf16",
            kld=kld,
            **more,
        )
    )


def running(view: SessionView) -> bool:
    return view.running and view.arms["A"].requests > 3


def test_the_person_may_go_back_and_the_guard_begins_anew(live: Callable[..., LiveSession]) -> None:
    session = live(p.Load(model="demo"), INT8, BF16, GuardLimits(every=3), ENGINE)
    until(session, running, 10)
    said(session, None, nonfinite=3, reason="logits are not finite")
    view = until(session, lambda v: v.active == "B" and v.guard and v.guard.state == "switched", 10)
    assert view.guard is not None and "3 logits are not finite" in view.guard.text
    said(session, 9.0)  # of a request that was under way: it has given way already
    assert len(tripped(session)) == 1
    session.select("A")
    view = session.view()
    assert view.guard is not None and view.guard.state == "watching" and view.active == "A"
    for _ in range(3):
        said(session, 9.0)
    until(session, lambda v: v.active == "B", 10)
    assert [t.measure for t in tripped(session)] == ["nonfinite", "kld"]


def test_another_start_begins_anew_and_a_late_answer_says_nothing(live: Callable[..., LiveSession]) -> None:
    session = live(p.Load(model="demo"), INT8, BF16, GuardLimits(every=3), ENGINE)
    until(session, running, 10)
    session.select("B")
    said(session, None, nonfinite=1, reason="logits are not finite")
    assert not tripped(session), "B was chosen already: A has nothing to give way from"
    session.select("A")
    said(session, None, nonfinite=1, reason="logits are not finite")
    until(session, lambda v: v.active == "B", 10)
    pid = session.view().engine.pid
    workload = Workload(prompt_tokens=16, output_tokens=6, prompts="short")
    session.start(p.Load(model="other"), INT8, BF16, workload, loop=True)
    view = until(session, lambda v: v.engine.pid not in (None, pid) and v.running and v.active == "A", 20)
    assert view.guard is not None and view.guard.state == "watching"
    said(session, None, nonfinite=1, reason="logits are not finite")
    wait_until(lambda: len(tripped(session)) == 2, 10)


def test_without_a_resident_baseline_it_says_so_and_what_a_reload_takes(
    live: Callable[..., LiveSession],
) -> None:
    refused = msgspec.structs.replace(find_policy("int4"), name="int4")
    session = live(p.Load(model="demo"), INT8, refused, GuardLimits(every=3), ENGINE, "refuse_int4")
    view = until(
        session, lambda v: v.arms.get("A") and v.arms["A"].ready and v.guard and v.guard.state == "blind", 10
    )
    assert view.guard is not None
    assert view.guard.text == (
        "guard: the baseline B is not resident, nothing is checked; how long making it ready takes is not known: it never was"
    )
    session.set_policy("B", BF16)
    until(session, lambda v: v.guard and v.guard.state == "watching" and not v.guard.text, 10)
    assert not tripped(session)


def test_what_passed_a_limit_without_a_resident_baseline_gives_way_once_it_is(
    live: Callable[..., LiveSession],
) -> None:
    refused = msgspec.structs.replace(find_policy("int4"), name="int4")
    session = live(p.Load(model="demo"), INT8, refused, GuardLimits(every=3), ENGINE, "refuse_int4")
    until(session, running, 10)
    said(session, None, nonfinite=1)
    view = until(session, lambda v: v.guard and v.guard.state == "stuck", 10)
    assert view.active == "A" and view.guard is not None and "should give way" in view.guard.text
    session.set_policy("B", BF16)
    view = until(session, lambda v: v.guard and v.guard.state == "switched", 10)
    assert view.active == "B"
    assert [t.switched for t in tripped(session)] == [False, True]
