"""One request on the fake asynchronous device: what is measured, counted, checked and marked."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice, FakeStaged, fake_arm

from pdq_tui.core.protocol import Request
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Hooks, Limits, Peaks, RequestFailedError, first_use, run_request


def batch_of(*lengths: int) -> Batch:
    width = max(lengths)
    pads = [width - n for n in lengths]
    return Batch(
        number=0,
        ids=torch.ones(len(lengths), width, dtype=torch.int64),
        pad=torch.tensor(pads) if any(pads) else None,
        real_tokens=sum(lengths),
        padded_tokens=sum(pads),
    )


def run(
    device: FakeDevice,
    n: int = 8,
    batch: Batch | None = None,
    natural: bool = False,
    eos: set[int] | None = None,
    hooks: Hooks | None = None,
    **costs: object,
) -> tuple[Request, FakeStaged]:
    arm = fake_arm(device, **costs)
    record = Request(request=1, arm="A", policy="", policy_digest="", kind="loop")
    limits = Limits(n, natural, frozenset(eos or ()))
    run_request(device, arm, batch or batch_of(32), 64, limits, record, hooks or Hooks())
    assert isinstance(arm.staged, FakeStaged)
    return record, arm.staged


def test_T01_time_is_read_after_the_device_has_finished() -> None:
    device = FakeDevice()
    record, _ = run(device, n=8, handoff_ms=3.0)
    assert record.prefill_ms == pytest.approx(80)
    assert record.itl_ms == pytest.approx([5.0] * 7)
    assert record.handoff_ms == pytest.approx(3)
    wall = (record.host_end_ns - record.host_start_ns) / 1e6
    assert record.e2e_ms == pytest.approx(wall)
    # At the edges only: start, after prefill, after the hand-off, after decode; never one a step.
    assert device.synchronizations == 4


@pytest.mark.parametrize(("n", "tpot"), [(1, None), (2, 10.0), (11, 10.0)])
def test_T04_tpot_divides_by_n_minus_1(n: int, tpot: float | None) -> None:
    record, _ = run(FakeDevice(), n=n, prefill_ms=100.0, step_ms=10.0)
    assert record.tpot_ms == (None if tpot is None else pytest.approx(tpot))
    assert len(record.itl_ms) == n - 1
    assert record.ttft_ms == record.prefill_ms == pytest.approx(100)
    assert (record.queue_ms, record.tokenize_ms) == (None, None), "not measured: never 0"
    assert record.e2e_ms == pytest.approx(100 + (n - 1) * (tpot or 0))


def test_T04_padding_is_counted_apart() -> None:
    record, _ = run(FakeDevice(), batch=batch_of(3, 7))
    assert (record.prompt_tokens, record.padded_tokens, record.batch) == (10, 4, 2)


def test_T06_fixed_length_ignores_eos_and_says_so() -> None:
    record, staged = run(FakeDevice(), n=6, eos={1, 2}, answer=lambda step, row: 1)
    assert record.output_tokens == [6]
    assert record.stop_reasons == ["length, EOS ignored"]
    assert len(staged.passes) == 6


def test_T06_natural_stop_divides_by_what_was_made() -> None:
    # Row 0 ends at its third token (id 9), row 1 at its fifth (id 8): the eos list holds both.
    answers = {(2, 0): 9, (4, 1): 8}
    record, _ = run(
        FakeDevice(),
        n=20,
        natural=True,
        eos={8, 9},
        batch=batch_of(4, 4),
        answer=lambda step, row: answers.get((step, row), 1),
    )
    assert record.output_tokens == [3, 5]
    assert record.stop_reasons == ["eos", "eos"]
    assert len(record.itl_ms) == 4
    assert record.tpot_ms == pytest.approx(5)


def test_T06_natural_stop_at_the_first_token() -> None:
    record, staged = run(FakeDevice(), natural=True, eos={1}, answer=lambda step, row: 1)
    assert record.output_tokens == [1]
    assert record.tpot_ms is None
    assert staged.passes == [("prefill", 32)]


def test_T06_natural_stop_without_eos_in_reach() -> None:
    record, _ = run(FakeDevice(), n=5, natural=True, eos={15})
    assert record.output_tokens == [5]
    assert record.stop_reasons == ["length"]


def test_T07_prefill_is_paid_once() -> None:
    _, staged = run(FakeDevice(), n=8)
    assert staged.passes == [("prefill", 32)] + [("decode", 1)] * 7


def test_T12_each_stage_has_a_peak_of_its_own() -> None:
    device = FakeDevice()
    device.touch(1000)
    record, _ = run(device)
    assert (record.prefill_peak_bytes, record.decode_peak_bytes, record.steady_bytes) == (300, 200, 100)
    assert record.memory_method == device.memory_method


@pytest.mark.parametrize(("nan_at", "stage", "step"), [(0, "prefill", 0), (1, "decode", 1), (5, "decode", 5)])
def test_Q10_non_finite_logits_mark_stage_and_first_step(nan_at: int, stage: str, step: int) -> None:
    record, _ = run(FakeDevice(), n=8, nan_at=nan_at)
    assert not record.valid
    assert record.nonfinite is not None
    assert (record.nonfinite.stage, record.nonfinite.step) == (stage, step)
    assert record.tpot_ms == pytest.approx(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_Q10_max_propagates_nan(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 4096, dtype=dtype)
    logits[0, 77] = float("nan")
    assert torch.isnan(logits.max(dim=-1).values).all()
    assert torch.isnan(torch.aminmax(logits)[0])


@pytest.mark.parametrize(("fail_at", "stage"), [(0, "prefill"), (5, "decode")])
def test_S06_out_of_memory_keeps_the_partial_record(fail_at: int, stage: str) -> None:
    with pytest.raises(RequestFailedError) as caught:
        run(FakeDevice(), fail_at=fail_at)
    assert (caught.value.stage, caught.value.step) == (stage, fail_at)
    partial = caught.value.partial
    assert not partial.valid
    assert "out of memory" in (partial.invalid_reason or "")


def test_cancelled_at_the_next_token() -> None:
    asked = iter([False, False, True, True])
    record, staged = run(FakeDevice(), n=50, hooks=Hooks(cancelled=lambda: next(asked)))
    assert record.cancelled
    assert record.output_tokens == [3]
    assert record.stop_reasons == ["cancelled"]
    assert len(staged.passes) == 3


def test_census_and_bounds_are_of_the_mean_step() -> None:
    record, _ = run(FakeDevice(), n=5, hooks=Hooks(peaks=Peaks(10.0), text=lambda ids: str(list(ids))))
    assert record.bytes_per_step == 1000 + 32 + 2
    assert record.prefill_bound_ms == pytest.approx(32)
    assert record.decode_bound_ms == pytest.approx(103.4)
    assert record.prefill_flops == {"bf16": 3200.0}
    assert record.text == "[1, 2, 3, 1, 2]"
    assert record.kv_bytes == 2 * 36


def test_T02_a_one_off_cost_is_told_from_a_speed() -> None:
    slow = Request(request=1, arm="A", policy="", policy_digest="", kind="loop", prefill_ms=2080.0)
    fine = Request(request=2, arm="A", policy="", policy_digest="", kind="loop", prefill_ms=81.0)
    late = Request(
        request=3,
        arm="A",
        policy="",
        policy_digest="",
        kind="loop",
        prefill_ms=80.0,
        itl_ms=[5.0, 2005.0, 5.0],
    )
    assert first_use(slow, [80.0])
    assert not first_use(fine, [80.0])
    assert first_use(late, [80.0])
    assert first_use(fine, [])
