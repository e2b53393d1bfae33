"""Bursts of the real engine under torch's profiler, on the tiny model."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_peaks import share

from pdq_tui.core import protocol as p
from pdq_tui.core import tracing
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.workload import Workload
from pdq_tui.engine import trace as tracer
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.channel import Inbox
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.session import Session


class Rig:
    """A session with the tiny model, and what it sent."""

    def __init__(self, model: Path, home: Path, layers: str = "eager") -> None:
        self.sent: list[p.Message] = []
        self.inbox = Inbox(self.sent.append)
        self.session = Session(self.sent.append, self.inbox)
        self._number = 0
        self.do(p.Load(model=str(model), cache_dir=share(home), device="cpu", threads=1, layers=layers))
        self.do(p.SetWorkload(workload=Workload(prompt_tokens=24, output_tokens=40, distinct=1)))

    def do(self, command: p.Message) -> list[p.Message]:
        self._number += 1
        before = len(self.sent)
        self.session.handle(self._number, command)
        return self.sent[before:]

    def arm(self, policy: str, label: str = "A") -> None:
        ready = self.do(p.SetArm(arm=label, policy=find_policy(policy)))
        assert any(isinstance(e, p.ArmReady) for e in ready), ready

    def trace(self, folder: Path | None, steps: int = 4, label: str = "A") -> p.Traced:
        found = self.do(p.Trace(arm=label, steps=steps, folder=None if folder is None else str(folder)))
        return next(e for e in found if isinstance(e, p.Traced))

    def request(self, label: str = "A") -> p.Request:
        assert self.session.bench is not None
        return self.session.bench.request(label, 0, "loop", lambda: False)


@pytest.fixture(scope="module")
def rig(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield Rig(tiny_llama, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("policy", ["bf16", "int8", "w8a8", "int4", "w8a8-prefill-int4-decode"])
def test_a_burst_by_stage(rig: Rig, policy: str, tmp_path: Path) -> None:
    rig.arm(policy)
    for _ in range(
        3
    ):  # a few ms are measured: whoever takes the core between the two clocks takes a third of them
        done = rig.trace(tmp_path / "trace")
        assert done.failed is None
        if all(s.trace_ms == pytest.approx(s.timer_ms, rel=0.05) for s in done.stages):
            break
    assert (done.policy, done.steps, done.prompt_tokens) == (policy, 4, 24)
    assert [s.stage for s in done.stages] == ["prefill", "decode"]
    assert [s.steps for s in done.stages] == [1, 4]
    for stage in done.stages:
        assert stage.where == "cpu"
        assert sum(k.share for k in stage.kernels) <= 1
        assert stage.trace_ms == pytest.approx(stage.timer_ms, rel=0.05)
        assert stage.overhead is not None and stage.overhead > 0
        assert stage.unmatched == []
        kinds = {k.category for k in stage.kernels}
        assert {"sampling", "attention", "KV"} <= kinds
        assert kinds & {tracing.GEMM, tracing.GEMV}
    assert done.path is not None and done.bytes == Path(done.path).stat().st_size
    assert done.bytes < 20_000_000
    assert tracing.parse(tracing.read_text(Path(done.path)))["traceEvents"]


def test_dequantizing_and_quantizing_are_told_apart(rig: Rig) -> None:
    rig.arm("w8a8")
    rounded = rig.trace(None)
    assert "quantize" in tracing.by_category(rounded.stages[0])
    assert rounded.path is None and rounded.path_reason
    rig.arm("int4")
    widened = tracing.by_category(rig.trace(None).stages[0])
    assert "quantize" not in widened


def test_two_arms_differ_in_kernels_that_came_and_went(rig: Rig) -> None:
    rig.arm("bf16", "B")
    rig.arm("int8", "A")
    one, two = rig.trace(None, label="B"), rig.trace(None, label="A")
    (_, _), (before, after) = tracing.pairs(one.stages, two.stages)
    words = {(c.word, c.category) for c in tracing.difference(before, after)}
    assert ("came", tracing.GEMV) in words or ("came", "dequantize") in words


def test_T11_figures_come_from_requests_without_a_profiler(rig: Rig, tmp_path: Path) -> None:
    rig.arm("bf16")
    rig.request()
    plain = rig.request()
    sent = len(rig.sent)
    done = rig.trace(tmp_path / "trace")
    # A burst is no request: nothing of it enters a figure, its times and their overhead stand apart.
    assert not [e for e in rig.sent[sent:] if isinstance(e, p.Request)]
    assert all(s.overhead is not None and s.plain_ms and s.timer_ms for s in done.stages)
    after = rig.request()
    assert after.tokens_sha256 == plain.tokens_sha256
    assert not after.first_use and after.gap_ms is None  # the burst is in no gap
    assert not torch._C._autograd._profiler_enabled()


def test_T11_a_block_around_a_burst_is_given_up(rig: Rig) -> None:
    rig.arm("bf16")
    assert rig.session.bench is not None
    epoch = rig.session.bench.epoch
    rig.trace(None)
    assert rig.session.bench.epoch > epoch


def test_P01_a_label_with_a_quote_still_opens(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.arm("bf16", 'A "odd" arm')
    monkeypatch.setattr(tracing, "KV", 'pdq:kv "quoted" \\')
    done = rig.trace(tmp_path / "trace", label='A "odd" arm')
    assert done.failed is None and done.path is not None
    assert any("bare quotes" in note for note in done.notes)
    names = {e["name"] for e in tracing.parse(tracing.read_text(Path(done.path)))["traceEvents"]}
    assert 'pdq:kv "quoted" /' in names  # torch itself turns a backslash round


def test_P01_what_cannot_be_mended_is_kept_under_another_name_and_not_called_saved(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.arm("bf16")
    monkeypatch.setattr(tracing, "read_text", lambda path: '{"traceEvents": [ {"ph": "X" ')
    done = rig.trace(tmp_path / "trace")
    assert done.path is None and "not valid JSON" in str(done.failed)
    kept = list((tmp_path / "trace").rglob("*"))
    assert [k.name for k in kept] == ["A.invalid.json.gz"]
    assert gzip.decompress(kept[0].read_bytes()).startswith(b'{"traceEvents"')


def profiled(rig: Rig, profiler: Any, **changes: Any) -> p.Traced:
    session = rig.session
    assert session.bench is not None and session.bench.prepared is not None
    settings: dict[str, Any] = {"steps": 2, "cancelled": lambda: False} | changes
    return tracer.trace(
        CpuDevice(1),
        session.bench.arm("A"),
        session.bench.prepared.batches[0],
        session.bench.prepared.capacity,
        settings["steps"],
        None,
        load_kernels("cpu"),
        lambda *_: None,
        settings["cancelled"],
        profiler=profiler,
    )


def test_P04_a_profiler_that_fails_costs_the_burst_and_not_the_engine(rig: Rig) -> None:
    rig.arm("bf16")

    def broken(device: object) -> Any:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nand more")

    assert profiled(rig, broken).failed == "the profiler failed: CUPTI_ERROR_NOT_INITIALIZED"
    assert rig.trace(None).failed is None


def test_P04_after_a_model_that_raised_inside_the_next_burst_is_good(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.arm("bf16")
    original = tracer.Burst._step
    calls = []

    def raising(self: Any, *args: Any) -> Any:
        calls.append(1)
        if args[-1]:  # under the profiler
            raise ValueError("the model does not like this")
        return original(self, *args)

    monkeypatch.setattr(tracer.Burst, "_step", raising)
    assert "does not like" in str(rig.trace(None).failed)
    monkeypatch.undo()
    good = rig.trace(None)
    assert good.failed is None and good.stages[1].kernels
    assert not torch._C._autograd._profiler_enabled()


def test_P04_inside_of_somebodys_profiler_it_is_refused_in_a_sentence(rig: Rig) -> None:
    rig.arm("bf16")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        done = rig.trace(None)
    assert "already running" in str(done.failed)
    assert rig.trace(None).failed is None


def test_P05_a_long_burst_is_cut_to_what_viewers_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.arm("bf16")
    beyond = rig.trace(None, steps=2000)
    assert beyond.steps == 40 and any("KV buffer" in note for note in beyond.notes)
    monkeypatch.setattr(tracer, "MAX_EVENTS", 1500)
    cut = rig.trace(None, steps=30)
    assert 1 <= cut.steps < 30
    assert any("viewers choke" in note for note in cut.notes)
    assert cut.stages[1].steps == cut.steps


def test_P05_a_burst_can_be_cancelled(rig: Rig) -> None:
    rig.arm("bf16")
    with pytest.raises(Cancelled):
        profiled(rig, tracer.profile, cancelled=lambda: True)
    rig.inbox._cancelled = 10_000
    try:
        assert rig.trace(None).failed == "cancelled"
    finally:
        rig.inbox._cancelled = 0


def test_P05_a_file_over_the_limit_is_not_kept(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.arm("bf16")
    monkeypatch.setattr(tracer, "MAX_BYTES", 100)
    done = rig.trace(tmp_path / "trace")
    assert done.path is None and "over the limit" in str(done.path_reason)
    assert done.stages and not list((tmp_path / "trace").rglob("*.gz"))


def test_P07_tensorboards_plugin_finds_the_steps_that_were_profiled(rig: Rig, tmp_path: Path) -> None:
    pytest.importorskip("torch_tb_profiler")
    from torch_tb_profiler.profiler.data import RunProfileData

    rig.arm("w8a8-prefill-int4-decode")
    done = rig.trace(tmp_path / "trace")
    path = Path(str(done.path))
    assert path.name.endswith(".pt.trace.json.gz") and path.parent.parent == tmp_path / "trace"
    worker, stamp = path.name.removesuffix(".pt.trace.json.gz").split(".")
    assert worker and stamp.isdigit()
    body = tracing.parse(tracing.read_text(path))
    data = RunProfileData(worker, 0, body)
    data.process()
    assert list(data.steps_names) == ["0", "1", "2", "3", "4"]
    ranges = [e for e in tracing.events_of(body) if e.cat == "user_annotation" and e.name.startswith("pdq:")]
    steps = [e for e in tracing.events_of(body) if e.name.startswith(tracing.STEP)]
    assert len({e.thread for e in [*ranges, *steps]}) == 1
    for each in ranges:
        assert any(s.start <= each.start and each.end <= s.end for s in steps), each.name


def test_nothing_of_the_marks_stays_behind(rig: Rig) -> None:
    from pdq_tui.engine.formats.linears import PackedLinear
    from pdq_tui.engine.kv import KvCache

    before = KvCache.update
    rig.arm("bf16")
    rig.trace(None)
    assert KvCache.update is before
    assert "__call__" not in vars(PackedLinear)
    assert "A" in rig.session.ready


def test_a_rolling_trace_takes_the_place_of_the_arm_s_last_one(rig: Rig, tmp_path: Path) -> None:
    rig.arm("bf16", "A")
    rig.arm("int8", "B")
    rig.request("A")  # warm from here on: no burst for warming
    found = []
    for label in ("A", "A", "B"):
        sent = rig.do(p.Trace(arm=label, steps=2, rolling=True, folder=str(tmp_path)))
        found.append(next(e for e in sent if isinstance(e, p.Traced)))
        labels = [e.label for e in sent if isinstance(e, p.Progress)]
        assert ("a burst for warming" in labels) == (label == "B")
    assert all(t.failed is None and t.rolling for t in found)
    first, second, other = (Path(t.path or "") for t in found)
    assert not first.exists() and second.exists() and other.exists()
    assert sorted(d.name for d in tmp_path.iterdir()) == ["last-A", "last-B"]
    assert len(list((tmp_path / "last-A").iterdir())) == 1


def test_energy_takes_its_turn_within_a_loop(rig: Rig) -> None:
    """It waits between two requests, and the loop goes on."""
    rig.arm("bf16", "A")
    session = rig.session
    waiting = [(7, p.MeasureEnergy(arms=["A"], seconds=0.05))]
    session.inbox.peek = lambda: waiting[0][1] if waiting else None  # type: ignore[method-assign]
    session.inbox.next = lambda: waiting.pop(0)  # type: ignore[method-assign]
    before = len(rig.sent)
    try:
        assert session._between() is False and waiting == []
    finally:
        del session.inbox.peek, session.inbox.next
    windows = [e.window for e in rig.sent[before:] if isinstance(e, p.EnergyWindow)]
    assert windows == ["idle", "prefill", "decode", "mixed"]
