"""Stage-pure loops: on the fake device by its virtual clock, and on the real model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from fake_device import FakeDevice, FakeStaged, fake_arm
from test_run_request import batch_of

from pdq_tui.core import protocol as p
from pdq_tui.engine import energy
from pdq_tui.engine.cancel import Cancelled


def loops(device: FakeDevice, arm: object, **changes: object) -> energy.Loops:
    def sleep(seconds: float) -> None:
        device.idle(seconds * 1e3)

    settings: dict[str, object] = {"output_tokens": 41, "cancelled": lambda: False, "sleep": sleep} | changes
    return energy.Loops(device, arm, batch_of(32), 32 + 41, **settings)  # type: ignore[arg-type]


def test_each_window_is_of_one_stage_and_long_enough() -> None:
    device = FakeDevice()
    arm = fake_arm(device, prefill_ms=80.0, step_ms=5.0)
    staged = arm.staged
    assert isinstance(staged, FakeStaged)
    for window in energy.WINDOWS:
        staged.passes.clear()
        found = loops(device, arm).run(window, 6.0)
        assert found.window == window and found.seconds >= 6.0
        assert found.seconds < 7.0
        kinds = [kind for kind, _ in staged.passes]
        prefills, steps = kinds.count("prefill"), kinds.count("decode")
        if window == "idle":
            assert not kinds and (found.prompt_tokens, found.output_tokens) == (0, 0)
        elif window == "prefill":
            assert steps == 0 and found.prompt_tokens == 32 * prefills and found.output_tokens == 0
            assert prefills == pytest.approx(6000 / 80, abs=1)
        elif window == "decode":
            assert prefills == 1 and found.prompt_tokens == 0
            assert found.output_tokens == steps == pytest.approx(6000 / 5, abs=energy.STEPS)
            assert kinds.count("rewind") == (steps - 1) // 40
        else:
            assert found.prompt_tokens == 32 * prefills and found.output_tokens == 40 * prefills == steps


def test_the_prompt_before_a_decode_window_is_not_in_it() -> None:
    device = FakeDevice()
    arm = fake_arm(device, prefill_ms=100_000.0, step_ms=5.0)
    begin = device.clock_ms
    found = loops(device, arm).run("decode", 6.0)
    assert found.start_ns / 1e6 >= begin + 100_000
    assert found.seconds < 7


def test_it_can_be_cancelled() -> None:
    device = FakeDevice()
    with pytest.raises(Cancelled):
        loops(device, fake_arm(device), cancelled=lambda: True).run("prefill", 6.0)


def test_rewinding_gives_the_same_tokens_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_model_trace import Rig

    monkeypatch.setenv("PDQ_HOME", str(tmp_path))
    rig = Rig(tiny_llama, tmp_path / "cache")
    rig.arm("w8a8-prefill-int4-decode")
    bench = rig.session.bench
    assert bench is not None and bench.prepared is not None
    batch = bench.prepared.batches[0]
    generation = bench.arm("A").staged.start(batch.rows, bench.prepared.capacity, batch.pad)
    with torch.inference_mode():
        first = generation.prefill(batch.ids).argmax(-1)

        def five() -> list[int]:
            token, found = first, []
            for _ in range(5):
                token = generation.step(token).argmax(-1)
                found.append(int(token))
            return found

        once = five()
        generation.rewind(batch.width)
        assert generation.length == batch.width
        assert five() == once


def test_the_engine_sends_a_window_each_and_then_ends_the_task(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_model_trace import Rig

    monkeypatch.setenv("PDQ_HOME", str(tmp_path))
    rig = Rig(tiny_llama, tmp_path / "cache")
    rig.arm("bf16")
    sent = rig.do(p.MeasureEnergy(arms=["A"], seconds=0.05))
    windows = [e for e in sent if isinstance(e, p.EnergyWindow)]
    assert [w.window for w in windows] == list(energy.WINDOWS)
    assert all(w.seconds >= 0.05 for w in windows)
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(windows))
    ended = sent[-1]
    assert isinstance(ended, p.TaskEnded) and ended.ok
    missing = rig.do(p.MeasureEnergy(arms=["nobody"], seconds=0.05))[-1]
    assert isinstance(missing, p.TaskEnded) and not missing.ok and "nobody" in missing.text
