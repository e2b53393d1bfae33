"""Measuring kernel candidates on a tiny model: who may win, what is read in turn, and what is done with the winners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdq_tui.core import protocol as p
from pdq_tui.core.kernels import Candidate, load_kernels
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.tuned import MANY, TunedTable, tuned_file, write_tuned
from pdq_tui.engine import tune
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.formats.linears import Int8DequantizeFloat32
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.staged import StagedModel
from pdq_tui.host.tuning import Tuning, keep, winners


@pytest.fixture
def make(load_tiny: Callable[..., Any], tiny_llama_bf16: Path, own_home: Path) -> Callable[..., tune.Tuner]:
    def tuner(
        formats: list[str],
        rows: list[int],
        candidates: tuple[Candidate, ...] = (),
        path: Path = tiny_llama_bf16,
    ) -> tune.Tuner:
        skeleton, masters = load_tiny(path)
        table = load_kernels("cpu")
        table = msgspec.structs.replace(table, candidates=(*table.candidates, *candidates))
        device = CpuDevice(1)
        staged = StagedModel(skeleton, masters, device, budget_bytes=None, kernels=table)
        return tune.Tuner(staged, device, device.info(), p.Tune(formats=formats, rows=rows, seconds=0.0))

    return tuner


def run(tuner: tune.Tuner) -> list[p.KernelsTimed]:
    return list(tuner.run(lambda: False, lambda *_: None))


def test_every_shape_format_and_row_count_is_measured_once(make: Callable[..., tune.Tuner]) -> None:
    tuner = make(["bf16", "int8", "w8a8"], [1, 16, 64])
    found = run(tuner)
    # q and o are 64 × 64, k and v 32 × 64, gate and up 128 × 64, down 64 × 128; the tied head is 128 × 64 as well
    shapes = {(c.N, c.K): c.layers for c in found}
    assert shapes == {(128, 64): 4, (64, 128): 2, (64, 64): 4, (32, 64): 4}
    assert len(found) == tuner.cells == tuner.started().cells == 4 * 3 * 3
    assert len({(c.format, c.N, c.K, c.rows) for c in found}) == len(found)
    for cell in found:
        fair = [t for t in cell.times if t.excluded is None]
        assert fair and any(t.best for t in fair) and sum(t.shipped for t in cell.times) == 1
        for t in fair:
            assert t.us is not None and t.us_low is not None and t.us_high is not None and t.error is not None
            assert 0 < t.us_low <= t.us <= t.us_high and t.n >= tune.LOST_AFTER
        assert cell.own_error is not None
        assert min(t.error for t in fair if t.error) == pytest.approx(cell.own_error, rel=0.2)
        limits = {"dense": (0.001, 0.003), "int8": (0.004, 0.02), "w8a8": (0.006, 0.03)}[cell.format]
        assert limits[0] < cell.own_error < limits[1]


def test_what_this_machine_does_not_run_is_named(
    make: Callable[..., tune.Tuner], tiny_llama_72: Path
) -> None:
    tuner = make(["w8a8-fp8", "bf16"], [1])
    assert list(tuner.started().refused) == ["w8a8-fp8"]
    assert "compute capability 8.9" in tuner.started().refused["w8a8-fp8"]
    assert {c.format for c in run(tuner)} == {"dense"}
    odd = make(["int4"], [1], path=tiny_llama_72)
    assert odd.cells == 0 and "groups of 64 do not divide" in next(iter(odd.refused.values()))


class _Sloppy(Int8DequantizeFloat32):
    """As exact as a kernel that adds up in 8 bits."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return super().product(x) * (1 + 0.05 * torch.randn(x.shape[0], self.out_features)).to(x.dtype)


class _Raises(Int8DequantizeFloat32):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not for these shapes\nand more words")


class _Instant(Int8DequantizeFloat32):
    """The fastest of all, and wrong."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((x.shape[0], self.out_features), float("nan"))


def test_a_kernel_that_is_off_or_fails_may_not_win(
    make: Callable[..., tune.Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"sloppy": _Sloppy, "raises": _Raises, "instant": _Instant}
    for name, op in made.items():
        monkeypatch.setitem(OPS, name, op)
    candidates = tuple(Candidate(name, name, "int8", "int8", rank=1) for name in made)
    cell = run(make(["int8"], [1], candidates))[0]
    times = {t.kernel: t for t in cell.times}
    assert "times the format's own (1.5 at most)" in str(times["sloppy"].excluded)
    assert times["sloppy"].us is not None, "its time is shown all the same"
    assert times["instant"].excluded == "its result is not finite"
    assert times["raises"].excluded == "it failed: not for these shapes" and times["raises"].us is None
    assert not any(times[name].best for name in made)
    assert {w.kernel for w in winners([cell])}.isdisjoint(made)
    assert winners([cell])[0].rows == (1, MANY)


def test_the_tables_first_choice_stays_unless_another_is_clearly_faster() -> None:
    def runner(name: str, *samples: float) -> tune._Runner:
        return tune._Runner(Candidate(name, "linear", "dense", "dense"), [], samples=list(samples))

    first = runner("first", 10.0, 10.0, 10.0, 10.0, 10.0)
    assert tune._fastest([first, runner("equal", 9.9, 9.9, 9.9, 9.9, 9.9)]) is first
    assert tune._fastest([first, runner("lucky", 5.0, 5.0, 5.0, 11.0, 12.0)]) is first, "three of five rounds"
    faster = runner("faster", 5.0, 5.0, 5.0, 12.0, 5.0)
    assert tune._fastest([first, runner("fast", 8.0, 8.0, 8.0, 8.0, 8.0), faster]) is faster


def test_weights_are_read_from_memory_of_their_own(
    make: Callable[..., tune.Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "buffer_bytes", lambda device, info: 40_000)
    tuner = make(["int8"], [1])
    group = tuner._groups[0]
    copies = tuner._copies(
        group, tuner._candidates(group, {}), tuner._staged.store.master(group.layer), lambda: False
    )
    (packed,) = copies.values()
    assert len({q.weight.data_ptr() for q in packed}) == len(packed) > 1
    assert sum(q.nbytes for q in packed) >= 40_000
    assert all(torch.equal(q.weight, packed[0].weight) for q in packed)


def test_it_ends_between_two_samples_and_what_was_measured_stays(make: Callable[..., tune.Tuner]) -> None:
    tuner = make(["int8"], [1, 16])
    found: list[p.KernelsTimed] = []
    with pytest.raises(Cancelled):
        for cell in tuner.run(lambda: len(found) == 3, lambda *_: None):
            found.append(cell)
    assert len(found) == 3 and all(cell.times for cell in found)
    assert not Tuning(tuner.started(), found).complete


def test_winners_are_kept_and_the_planner_takes_them(
    make: Callable[..., tune.Tuner], load_tiny: Callable[..., Any], tiny_llama_bf16: Path, tmp_path: Path
) -> None:
    tuner = make(["int8"], [1, 64])
    started, timed = tuner.started(), run(tuner)
    path, told = keep(Tuning(started, timed), tmp_path)
    assert path == tuned_file("cpu", tmp_path) and told == ""
    elsewhere = TunedTable("cpu", started.stamp | {"torch": "1.0"})
    write_tuned(path, elsewhere)
    _, told = keep(Tuning(started, timed), tmp_path)
    assert "measured elsewhere is replaced (torch 1.0, here" in told
    # the slowest possible winner, so that it cannot be the shipped choice
    odd = [msgspec.structs.replace(w, kernel="int8-dequantize-float32") for w in winners(timed)]
    table = msgspec.structs.replace(load_kernels("cpu"), tuned=TunedTable("cpu", started.stamp, tuple(odd)))
    skeleton, masters = load_tiny(tiny_llama_bf16)
    device = CpuDevice(1)
    policy = Policy(name="int8", prefill=StagePolicy("int8"), decode=StagePolicy("int8"))
    shipped = StagedModel(skeleton, masters, device, budget_bytes=None, kernels=load_kernels("cpu"))
    staged = StagedModel(skeleton, masters, device, budget_bytes=None, kernels=table)
    plan = staged.plan(policy, (1, 64))
    assert "int8-dequantize-float32" not in shipped.plan(policy, (1, 1)).coverage["decode"].kernels
    for stage in ("prefill", "decode"):
        assert plan.coverage[stage].kernels["int8-dequantize-float32"] == 14
    assert plan.weights.stored_bytes == shipped.plan(policy, (1, 64)).weights.stored_bytes


def test_nested_weights_and_experts_are_measured_as_they_are_held(
    make: Callable[..., tune.Tuner], tiny_moe: Path
) -> None:
    tuner = make(["nested16", "int4"], [1], path=tiny_moe)
    found = run(tuner)
    # two layers of four experts each, whose gate and up are one matrix of 128 × 64: the head of that shape is not measured again
    assert {(c.N, c.K): c.layers for c in found if c.format == "nested16"}[128, 64] == 2 * 4
    for cell in found:
        assert any(t.best and t.us for t in cell.times), cell
    group = next(g for g in tuner._groups if g.fmt.weights == "nested16")
    master = tuner._staged.store.master(group.layer, 0 if group.layer.experts else None)
    (packed,) = tuner._copies(group, tuner._candidates(group, {}), master, lambda: False).values()
    first, second = packed[:2]
    assert first.base is not None and second.base is not None
    assert first.base.weight.data_ptr() != second.base.weight.data_ptr(), "both bytes are read anew"
    assert tune._held(first) == first.nbytes + first.base.nbytes
