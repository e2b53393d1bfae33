"""Requests re-scored by the baseline in one pass, on tiny models in float32, against whole logits computed another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.workload import Workload
from pdq_tui.engine.bench import Bench, Control
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.guard import Kept, rescore
from pdq_tui.engine.prompts import Batch, Prepared
from pdq_tui.engine.runner import Arm, Hooks, Limits, run_request
from pdq_tui.engine.staged import StagedModel


@pytest.fixture(scope="module", autouse=True)
def probes_in_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def staged(load_tiny: Callable[..., tuple[object, object]], tiny_llama_untied: Path) -> StagedModel:
    model, masters = load_tiny(tiny_llama_untied)
    return StagedModel(model, masters, CpuDevice(), budget_bytes=None, kernels=load_kernels("cpu"))


_ARMS: dict[str, Arm] = {}


def arm(staged: StagedModel, name: str) -> Arm:
    """Made once: nothing here changes what a policy is."""
    if name not in _ARMS:
        _ARMS[name] = Arm(name, find_policy(name), staged.apply(find_policy(name), rows=[1, 2, 40]))
    return _ARMS[name]


def batch(rows: int = 1, pad: list[int] | None = None, width: int = 16) -> Batch:
    ids = torch.randint(4, 100, (rows, width), generator=torch.Generator().manual_seed(5))
    left = torch.tensor(pad) if pad else None
    return Batch(1, ids, left, rows * width - sum(pad or []), sum(pad or []))


def run(one: Arm, prompts: Batch, n: int, kept: Kept, eos: frozenset[int] = frozenset()) -> p.Request:
    record = p.Request(request=7, arm=one.label, policy="", policy_digest="", kind="loop")
    limits = Limits(n, bool(eos), eos)
    hooks = Hooks(logits=kept.logits, kept=kept.tokens)
    return run_request(CpuDevice(), one, prompts, prompts.width + n, limits, record, hooks)


def told(
    staged: StagedModel, name: str, prompts: Batch, n: int = 12, positions: int = 128
) -> tuple[p.Guarded, Kept]:
    one, kept = arm(staged, name), Kept(positions)
    record = run(one, prompts, n, kept)
    return rescore(CpuDevice(), one, arm(staged, "bf16"), prompts, prompts.width + n, kept, record), kept


def test_the_baseline_agrees_with_itself(staged: StagedModel) -> None:
    """The same weights by the decode path and by one prefill pass: what is left is rounding."""
    found, _ = told(staged, "bf16", batch(2, [0, 5]))
    assert (found.arm, found.base, found.request) == ("bf16", "bf16", 7)
    assert found.positions == 24 and found.same_top1 == 1.0 and found.nonfinite == 0
    assert found.kld is not None and found.kld < 1e-9 and found.seconds > 0
    assert p.decode_event(p.encode(found)) == found


def test_it_is_the_divergence_of_whole_logits_on_the_answers_own_tokens(staged: StagedModel) -> None:
    prompts = batch()
    found, kept = told(staged, "int4", prompts)
    ids = torch.cat([prompts.ids[0], torch.tensor(kept.rows[0])])
    base = torch.stack(
        [
            arm(staged, "bf16").staged.start(1, n, None).prefill(ids[None, :n])[0].clone()
            for n in range(prompts.width, len(ids))
        ]
    ).double()
    ours = kept.compared()[1][0].double()
    values = F.kl_div(ours.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert found.positions == 12
    assert found.kld == pytest.approx(float(values.mean()), rel=1e-4) and found.kld > 1e-4
    assert found.kld_max == pytest.approx(float(values.max()), rel=1e-4)
    assert found.same_top1 == float((base.argmax(-1) == ours.argmax(-1)).double().mean())


def test_of_a_long_answer_the_last_positions_are_compared(staged: StagedModel) -> None:
    whole, _ = told(staged, "int4", batch(), 30)
    last, kept = told(staged, "int4", batch(), 30, positions=8)
    assert whole.positions == 30 and last.positions == 8 and kept.compared()[0] == 22
    assert last.kld != whole.kld


def test_rows_that_ended_are_compared_as_far_as_they_go(staged: StagedModel) -> None:
    one, prompts, kept = arm(staged, "int8"), batch(2, [0, 4]), Kept()
    run(one, prompts, 20, kept)
    ends = kept.rows[0][6]
    kept = Kept()
    record = run(one, prompts, 20, kept, frozenset({ends}))
    found = rescore(CpuDevice(), one, arm(staged, "bf16"), prompts, 36, kept, record)
    assert found.positions == sum(len(row) for row in kept.rows) < 40
    assert found.kld is not None and record.stop_reasons[0] == "eos"


def test_a_planted_bad_layer_shows_and_broken_numbers_are_counted(staged: StagedModel) -> None:
    good, _ = told(staged, "int8", batch())
    one, base, kept = arm(staged, "int8"), arm(staged, "bf16"), Kept()
    record = run(one, batch(), 12, kept)
    weight = staged.skeleton.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight.mul_(-8.0)  # of the baseline here: what matters is that the two are apart
    bad = rescore(CpuDevice(), one, base, batch(), 28, kept, record)
    with torch.no_grad():
        weight.mul_(-0.125)  # exact: powers of two
    assert good.kld is not None and bad.kld is not None and bad.kld > 20 * good.kld
    with torch.inference_mode():
        kept._logits[3][1][0, 5] = float("nan")
    broken = rescore(CpuDevice(), one, base, batch(), 28, kept, record)
    assert broken.kld is None and broken.nonfinite == 1 and broken.reason == "logits are not finite"


def test_every_third_request_is_checked_between_requests_and_never_in_a_block(staged: StagedModel) -> None:
    sent: list[p.Message] = []
    bench = Bench(CpuDevice(), sent.append)
    bench.warmup_steps = 1
    bench.set_workload(Prepared(Workload(output_tokens=4), (batch(),), [16], "sha", False))
    for name in ("int8", "bf16"):
        bench.set_arm(arm(staged, name), packed_anew=True)
    bench.set_guard(p.Guard(base="bf16", every=3))

    def after(n: int) -> Control:
        return Control(stopped=lambda: sum(isinstance(e, p.Request) and not e.warmup for e in sent) >= n)

    bench.loop(p.StartLoop(arm="int8", arms=["int8", "bf16"]), after(7))
    order = [
        type(e).__name__
        for e in sent
        if isinstance(e, p.Guarded) or (isinstance(e, p.Request) and not e.warmup)
    ]
    assert order == ["Request", "Guarded", *["Request"] * 3, "Guarded", *["Request"] * 3, "Guarded"]
    both = [e for e in sent if isinstance(e, p.Guarded | p.Request)]
    assert all(
        r.gap_ms is None
        for before, r in pairwise(both)
        if isinstance(before, p.Guarded) and isinstance(r, p.Request)
    )
    sent.clear()
    bench.set_guard(p.Guard(base="bf16", every=1))
    turns = Control(stopped=after(8).stopped, interleave=lambda: True)
    bench.loop(p.StartLoop(arm="int8", arms=["bf16", "int8"], interleave=True), turns)
    kinds = [
        type(e).__name__
        for e in sent
        if isinstance(e, p.Guarded) or (isinstance(e, p.Request) and e.block == 0)
    ]
    assert kinds[:6].count("Guarded") == 0 and kinds[-1] == "Guarded"
    assert {e.arm for e in sent if isinstance(e, p.Guarded)} == {"int8"}
    sent.clear()
    bench.set_guard(p.Guard(base="bf16", every=0))
    bench.loop(p.StartLoop(arm="int8", arms=["int8"]), after(2))
    assert not [e for e in sent if isinstance(e, p.Guarded)]
