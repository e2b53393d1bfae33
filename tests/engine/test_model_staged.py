"""The staged model on tiny models in float32: stages, padding, coverage, bytes, caching."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy, StagePolicy, natural_storage, parse_policy
from pdq_tui.engine import census
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.staged import StagedModel
from pdq_tui.engine.weights import HEADROOM_BYTES
from pdq_tui.errors import PdqError, UnfitError, UsageError

pytestmark = pytest.mark.usefixtures("shared_home")

UNIFORM = ("bf16", "int8", "w8a8", "int4")
STAGED = ("w8a8-prefill-int4-decode", "w8a8-prefill-int8-decode", "int4-prefill-bf16-decode")


class Cpu:
    kind = "cpu"
    torch_device = torch.device("cpu")
    capability = None

    def __init__(self, free: int | None = None) -> None:
        self.free = free

    def free_bytes(self) -> int | None:
        return self.free

    def empty_cache(self, mapped: object = ()) -> None:
        pass


@pytest.fixture
def make(load_tiny):
    def build(
        path: Path,
        budget: int | None = None,
        dtype: torch.dtype | None = None,
        free: int | None = None,
        **options,
    ):
        model, masters = load_tiny(path, dtype)
        staged = StagedModel(
            model, masters, Cpu(free), budget_bytes=budget, kernels=load_kernels("cpu"), **options
        )
        return staged, model, masters

    return build


def two(prefill: Format, decode: Format, **changes) -> Policy:
    stages = [StagePolicy(f.weights, f.activations, f.group_size) for f in (prefill, decode)]
    return Policy("test", *stages, storage=natural_storage(prefill, decode), **changes)


def ids_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(
    arm, ids: torch.Tensor, new: int, pad: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B, new], logits [new, B, V])."""
    generation = arm.start(ids.shape[0], ids.shape[1] + new, pad)
    logits = [generation.prefill(ids)]
    generation.handoff()
    for _ in range(new - 1):
        logits.append(generation.step(logits[-1].argmax(-1)))
    assert generation.length == ids.shape[1] + new - 1
    stacked = torch.stack(logits)
    return stacked.argmax(-1).t(), stacked


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_llama_untied", "tiny_gpt2", "tiny_moe"])
def test_dense_stages_agree_with_generate(name, make, request) -> None:
    staged, model, _ = make(request.getfixturevalue(name))
    ids = ids_of(1, 9)
    with torch.inference_mode():
        wanted = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[:, 9:]
        logits = model(ids).logits[:, -1]
    tokens, ours = run(staged.apply(find_policy("bf16"), rows=[1, 9]), ids, 6)
    assert tokens.tolist() == wanted.tolist()
    torch.testing.assert_close(ours[0], logits, rtol=1e-4, atol=1e-4)


def fake_quantized(model: nn.Module, policy: Policy, stage: str) -> None:
    """Round every linear weight in place as the stage's format would, by a second implementation."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        fmt = policy.format_for(name, stage)
        if fmt.dense:
            continue
        w = module.weight.data.t() if isinstance(module, Conv1D) else module.weight.data
        if fmt.weights == "int8":
            s = w.abs().amax(1, keepdim=True) / 127
            w.copy_((w / s).round().clamp(-127, 127) * s)
        else:
            groups = w.reshape(w.shape[0], -1, fmt.group_size)
            low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
            s = (high - low) / 15
            w.copy_((((groups - low) / s).round() * s + low).reshape(w.shape))


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_Q02_logits_agree_with_a_fake_quantized_model(name, word, make, load_tiny, request) -> None:
    path = request.getfixturevalue(name)
    staged, _, _ = make(path)
    policy = find_policy(word)
    arm = staged.apply(policy, rows=[1, 12])
    reference, _ = load_tiny(path)
    fake_quantized(reference, policy, "prefill")
    ids = ids_of(1, 12)
    tokens, ours = run(arm, ids, 4)
    full = torch.cat([ids, tokens[:, :-1]], 1)
    with torch.inference_mode():
        wanted = reference(full).logits[:, 11:]
    torch.testing.assert_close(ours.transpose(0, 1), wanted, rtol=1e-3, atol=2e-3)
    for stage in ("prefill", "decode"):
        assert arm.coverage[stage].converted_parameters > 0.5 * arm.coverage[stage].total_parameters


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("word", STAGED)
def test_each_stage_runs_its_own_format(name, word, make, request) -> None:
    """Prefill's logits are those of the uniform prefill policy; the cache is handed over as it is."""
    staged, _, _ = make(request.getfixturevalue(name))
    policy = find_policy(word)
    ids = ids_of(1, 12)
    _, ours = run(staged.apply(policy, rows=[1, 12]), ids, 3)
    uniform = two(policy.prefill.format, policy.prefill.format)
    _, first = run(staged.apply(uniform, rows=[1, 12]), ids, 3)
    assert torch.equal(ours[0], first[0])
    assert not torch.equal(ours[1], first[1])


def test_T07_one_pass_over_the_prompt_then_single_tokens(make, tiny_llama) -> None:
    staged, model, _ = make(tiny_llama)
    seen: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_hook(lambda _m, args, _o: seen.append(tuple(args[0].shape)))
    arm = staged.apply(find_policy("w8a8-prefill-int4-decode"), rows=[1, 32])
    assert seen == []
    run(arm, ids_of(1, 32), 8)
    assert seen == [(1, 32)] + [(1, 1)] * 7


@pytest.mark.parametrize("options", [{}, {"attention_name": "sdpa"}], ids=["pdq", "sdpa"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_moe"])
def test_I04_padded_rows_agree_with_batch_one(name, options, make, request) -> None:
    staged, _, _ = make(request.getfixturevalue(name), **options)
    arm = staged.apply(find_policy("bf16"), rows=[3, 27])
    lengths = (1, 5, 9)
    prompts = [ids_of(1, n, seed=n) for n in lengths]
    padded = torch.zeros((3, 9), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, 9 - prompt.shape[1] :] = prompt
    pad = torch.tensor([9 - n for n in lengths])
    tokens, together = run(arm, padded, 5, pad)
    for row, prompt in enumerate(prompts):
        alone_tokens, alone = run(arm, prompt, 5)
        torch.testing.assert_close(together[:, row], alone[:, 0], rtol=1e-4, atol=1e-4)
        assert tokens[row].tolist() == alone_tokens[0].tolist()


@pytest.mark.parametrize("word", ["int8", "w8a8", "int4", "w8a8-prefill-int8-decode"])
def test_I04_quantized_rows_agree_with_batch_one(word, make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    arm = staged.apply(find_policy(word), rows=[2, 14])
    short, long = ids_of(1, 3, 1), ids_of(1, 7, 2)
    padded = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.int64), short], 1), long])
    _, together = run(arm, padded, 4, torch.tensor([4, 0]))
    for row, prompt in enumerate((short, long)):
        torch.testing.assert_close(together[0, row], run(arm, prompt, 4)[1][0, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("word", ["int8", "w8a8", "int4"])
def test_Q01_experts_are_converted_with_the_rest(word, make, tiny_moe) -> None:
    staged, model, _ = make(tiny_moe)
    arm = staged.apply(find_policy(word), rows=[1, 8])
    cover = arm.coverage["decode"]
    assert {left.module for left in cover.left} == {
        "lm_head",
        *(f"model.layers.{i}.mlp.gate.weight" for i in range(2)),
    }
    experts = sum(p.numel() for n, p in model.named_parameters() if "experts" in n)
    assert experts > 0.5 * cover.total_parameters, "most of such a model is its experts"
    assert cover.converted_parameters > experts
    assert sum(cover.formats.values()) == cover.total_parameters
    assert arm.warnings == []


def test_Q01_experts_that_no_format_reaches_are_told_and_the_policy_is_partial(
    make, tiny_moe, monkeypatch
) -> None:
    """Those of a class that transformers does not let anybody else multiply."""
    monkeypatch.setattr(census, "is_experts", lambda module: False)
    staged, model, _ = make(tiny_moe)
    arm = staged.apply(find_policy("int4"), rows=[1, 8])
    cover = arm.coverage["decode"]
    experts = [left for left in cover.left if "experts" in left.module]
    assert len(experts) == 4 and all("expert weights in one tensor" in left.reason for left in experts)
    assert sum(left.parameters for left in experts) == sum(
        p.numel() for n, p in model.named_parameters() if "experts" in n
    )
    assert sum(cover.formats.values()) == cover.total_parameters
    assert any("partial" in warning for warning in arm.warnings)
    with pytest.raises(UnfitError, match="partial"):
        staged.plan(find_policy("int4"), [1, 8], hard=True)
    assert torch.isfinite(run(arm, ids_of(1, 8), 3)[1]).all()


def test_experts_of_a_step_are_counted_as_many_as_can_be_met(make, tiny_moe) -> None:
    """4 experts, 2 a token: one row reads half of their bytes, two rows all of them; a row multiplies two in any case."""
    staged, _, _ = make(tiny_moe)
    arm = staged.apply(find_policy("int8"), rows=[1, 8])
    stored = sum(p.nbytes for (name, _), p in staged.store._entries.items() if "experts" in name)
    matrices = sum(p.numel() for n, p in staged.skeleton.named_parameters() if "experts" in n)
    for rows, share in ((1, 2), (2, 1)):
        generation = arm.start(rows, 20, None)
        generation.prefill(ids_of(rows, 8))
        ops = [op for op in generation.step_cost().ops if op.name.startswith("experts")]
        assert sum(op.bytes * op.count for op in ops) == stored // share
        assert sum(op.flops * op.count for op in ops) == 2 * matrices // 4 * 2 * rows


@pytest.mark.parametrize(
    ("rule", "group", "told"),
    [
        ("smaller-group", 32, "nor does any smaller legal group"),
        ("smaller-group", 128, "nor does any smaller legal group"),
        ("pad", 64, "padded to 128"),
        ("pad", 256, "padded to 256"),
        ("leave", 64, "do not divide"),
    ],
)
def test_Q03_groups_that_do_not_divide(rule, group, told, make, tiny_llama_72) -> None:
    staged, _, masters = make(tiny_llama_72)
    int4 = Format("int4", "model", group)
    policy = two(int4, int4, on_misfit=rule)
    plan = staged.plan(policy, [1, 6])
    assert masters.taken == [], "told before anything is packed"
    assert any(told in text for text in plan.misfits)
    arm = staged.apply(policy, rows=[1, 6])
    cover = arm.coverage["prefill"]
    if rule == "pad":
        assert cover.converted_parameters > 0
    else:
        assert cover.converted_parameters == 0 and cover.left
        with pytest.raises(UnfitError, match="in_features 72"):
            staged.plan(msgspec.structs.replace(policy, on_fallback="fail"), [1, 6])
    assert torch.isfinite(run(arm, ids_of(1, 6), 3)[1]).all()


def test_Q03_a_smaller_group_is_taken_where_one_divides(make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    int4 = Format("int4", "model", 256)
    plan = staged.plan(two(int4, int4), [1, 6])
    assert plan.coverage["decode"].formats.keys() >= {"int4-g64", "int4-g128"}
    assert any("groups of 64 instead" in text for text in plan.misfits)


@pytest.mark.parametrize("group", [-1, 0, 48])
def test_Q03_bad_group_sizes_are_refused_with_the_legal_ones(group, make, tiny_llama_72) -> None:
    staged, _, _ = make(tiny_llama_72)
    bad = Format("int4", "model", group)
    with pytest.raises(UsageError, match="32, 64, 128, 256"):
        staged.plan(two(bad, bad), [1, 6])


@pytest.mark.parametrize("word", ["int8", "w8a8"])
def test_Q03_int8_runs_where_the_fast_kernel_does_not_take_the_shape(word, make, tiny_llama_72) -> None:
    staged, _, _ = make(tiny_llama_72, dtype=torch.bfloat16)
    arm = staged.apply(find_policy(word), rows=[1, 6])
    if word == "w8a8" and "vnni" in staged.capability.features:  # the fast kernel there takes every shape
        assert arm.fallbacks == [] and "w8a8-int_mm" in arm.coverage["decode"].kernels
    else:
        assert any("needs in_features divisible by" in f.reason for f in arm.fallbacks)
    assert torch.isfinite(run(arm, ids_of(1, 6), 3)[1]).all()


def test_bytes_of_a_tied_model_counted_by_hand(make, tiny_llama) -> None:
    """hidden 64, 4 heads of 16, 2 KV heads, MLP 128, 2 layers, float32: per layer q and o 64×64, k and v 32×64,
    gate and up 128×64, down 64×128."""
    staged, _, _ = make(tiny_llama)
    n = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    int8 = n + rows * 4
    groups = n // 64
    int4 = n // 2 + groups * 2 * 4
    kept = 128 * 64 * 4 + 5 * 64 * 4  # embedding (the head is the same tensor) and five norms
    arm = staged.apply(find_policy("w8a8-prefill-int4-decode"), rows=[1, 8])
    w = arm.weights
    assert (w.prefill_bytes, w.decode_bytes, w.stored_bytes) == (int8, int4, int8 + int4)
    assert (w.shared_bytes, w.extra_bytes) == (0, int4)
    assert kept <= w.kept_bytes <= kept + 2 * 8 * 4  # and the rotary frequencies
    assert w.bits_per_weight == {"prefill": 8 * int8 / n, "decode": 8 * int4 / n}
    assert sum(p.nbytes for p in staged.store._entries.values() if p.ours) == int8 + int4
    cover = arm.coverage["prefill"]
    assert (cover.converted_parameters, cover.total_parameters) == (n, n + 128 * 64)
    assert cover.converted_bytes == int8 and cover.left_bytes == 128 * 64 * 4
    assert [left.module for left in cover.left] == ["lm_head"]

    generation = arm.start(1, 20, None)
    generation.prefill(ids_of(1, 8))
    context = 9
    small = w.kept_bytes - 128 * 64 * 4
    kv = 2 * 2 * 2 * 16 * 4
    assert generation.bytes_per_step() == int4 + 128 * 64 * 4 + 64 * 4 + small + kv * context
    assert arm.kv_info().bytes_per_token == kv
    assert generation.step_cost().flops["fp32"] == 2 * (n + 128 * 64) + 2 * 4 * 4 * 16 * context
    # The prompt: every linear layer 8 times, the head once; 8·9/2 pairs of a query and a key, since attention is causal.
    prompt = generation.prefill_cost(8)
    assert sum(prompt.flops.values()) == 2 * (8 * n + 128 * 64) + 2 * 4 * 4 * 16 * (8 * 9 // 2)
    (attention,) = [op for op in prompt.ops if op.name == "attention"]
    assert (attention.count, attention.count * attention.bytes) == (2, kv * 8)


def test_how_much_kv_fits_is_counted_from_free_memory(make, tiny_llama) -> None:
    """What only another policy holds, and the buffers of requests that ended, count as free for this one."""
    free = HEADROOM_BYTES + 10_000_000
    staged, _, _ = make(tiny_llama, free=free)
    int8 = staged.apply(find_policy("int8"), rows=[1, 8])
    kv = int8.kv_info()
    assert (kv.free_bytes, kv.reserve_bytes, kv.allocated_bytes) == (free, HEADROOM_BYTES, 0)
    assert kv.capacity_tokens == 10_000_000 // (2 * 2 * 2 * 16 * 4) and kv.capacity_reason is None

    int4 = staged.apply(find_policy("int4"), rows=[1, 8])
    run(int4, ids_of(1, 8), 2)
    buffer = 10 * kv.bytes_per_token
    for arm, other in ((int8, int4), (int4, int8)):
        beside = other.weights.decode_bytes
        assert arm.kv_info().allocated_bytes == buffer
        assert arm.kv_info().free_bytes == free + buffer + beside
        assert arm.kv_info().capacity_tokens == (10_000_000 + buffer + beside) // kv.bytes_per_token


@pytest.mark.parametrize(
    ("free", "tokens", "reason"),
    [
        (None, None, "does not tell"),
        (0, 0, None),
        (HEADROOM_BYTES + 511, 0, None),
        (HEADROOM_BYTES + 512, 1, None),
    ],
)
def test_kv_that_fits_is_never_less_than_nothing_and_null_where_nobody_knows(
    free, tokens, reason, make, tiny_llama
) -> None:
    staged, _, _ = make(tiny_llama, free=free)
    kv = staged.apply(find_policy("bf16"), rows=[1, 8]).kv_info()
    assert kv.bytes_per_token == 512 and kv.capacity_tokens == tokens
    assert (kv.capacity_reason is None) if reason is None else (reason in kv.capacity_reason)


def test_shared_int8_costs_no_bytes_and_a_flip_packs_nothing(make, tiny_llama) -> None:
    staged, _, masters = make(tiny_llama)
    shared = find_policy("w8a8-prefill-int8-decode")
    arm = staged.apply(shared, rows=[1, 8])
    assert arm.weights.extra_bytes == 0 and not arm.resident
    assert arm.weights.shared_bytes == arm.weights.stored_bytes == arm.weights.prefill_bytes
    resident, taken = staged.session_resident_bytes, list(masters.taken)
    for word in ("int8", "w8a8"):
        assert staged.plan(find_policy(word), [1, 8]).resident
        assert staged.apply(find_policy(word), rows=[1, 8]).resident
    assert staged.session_resident_bytes == resident
    assert masters.taken == taken


def test_views_share_the_models_tensors(make, tiny_llama) -> None:
    staged, model, _ = make(tiny_llama)
    arm = staged.apply(find_policy("int4"), rows=[1, 8])
    mine = {id(p) for p in model.parameters()}
    for stage in ("prefill", "decode"):
        view = arm.view(stage, 8 if stage == "prefill" else 1, 1).model
        assert {id(p) for p in view.parameters()} <= mine
        assert view.config is not model.config and view.config._attn_implementation.startswith("pdq_")
    assert model.config._attn_implementation not in ("pdq_decode", "pdq_prefill")


def test_release_drops_everything_else(make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    dense = staged.apply(find_policy("bf16"), rows=[1, 8])
    int4 = staged.apply(find_policy("int4"), rows=[1, 8])
    run(dense, ids_of(1, 8), 2)
    staged.release([int4])
    assert {key for _, key in staged.store._entries} <= {"int4-g64-int4-cpu", "dense-fp32"}
    assert staged.store.packed_bytes == int4.weights.decode_bytes
    assert torch.isfinite(run(int4, ids_of(1, 8), 3)[1]).all()


def test_budget_evicts_what_no_arm_uses_and_refuses_before_packing(make, tiny_llama) -> None:
    staged, _, masters = make(tiny_llama, budget=100_000)
    arm = staged.apply(find_policy("int8"), rows=[1, 8])
    taken = len(masters.taken)
    with pytest.raises(UnfitError, match="does not fit"):
        staged.apply(find_policy("int4"), rows=[1, 8])
    assert len(masters.taken) == taken
    assert torch.isfinite(run(arm, ids_of(1, 8), 2)[1]).all()
    del arm
    staged.apply(find_policy("int4"), rows=[1, 8])
    assert staged.store.packed_bytes <= 100_000


def test_cancelled_packing_keeps_what_is_done(make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    labels: list[str] = []
    with pytest.raises(Cancelled):
        staged.apply(
            find_policy("int4"),
            rows=[1, 8],
            progress=lambda done, total, label: labels.append(label),
            cancelled=lambda: len(labels) >= 4,
        )
    assert 0 < len(staged.store._entries) < 14
    assert not staged.apply(find_policy("int4"), rows=[1, 8]).resident


def test_keep_names_layers_by_stage(make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    policy = parse_policy(
        'schema = 1\nname = "k"\nstorage = "uniform"\n[prefill]\nweights = "int4"\n[decode]\nweights = "int4"\n'
        '[[keep]]\nmodules = ["*.layers.0.*"]\nweights = "bf16"\nstages = ["decode"]\n'
        '[[keep]]\nmodules = ["lm_head"]\nweights = "int8"\n'
    )
    arm = staged.apply(policy, rows=[1, 8])
    assert arm.warnings == []
    assert arm.coverage["prefill"].formats.keys() == {"int4-g64", "int8"}
    assert {left.module.split(".")[2] for left in arm.coverage["decode"].left} == {"0"}
    assert torch.isfinite(run(arm, ids_of(1, 8), 3)[1]).all()


def test_a_keep_that_names_nothing_is_said(make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    policy = parse_policy(
        'schema = 1\nname = "k"\n[prefill]\nweights = "int8"\n[decode]\nweights = "int8"\n'
        '[[keep]]\nmodules = ["*.layer.0.*", "lm_head"]\nweights = "bf16"\n'
    )
    arm = staged.apply(policy, rows=[1, 8])
    assert arm.warnings == ["[[keep]] '*.layer.0.*' names no linear layer of this model"]


def test_kv_buffer_is_one_and_used_again(make, tiny_llama) -> None:
    staged, _, _ = make(tiny_llama)
    arm, other = (staged.apply(find_policy(w), rows=[1, 8]) for w in ("bf16", "int4"))
    first, _ = run(arm, ids_of(1, 8), 4)
    address = staged.caches.cache(1, 12).stores[0].parts[0].data_ptr()
    run(other, ids_of(1, 8, 3), 4)
    again, _ = run(arm, ids_of(1, 8), 4)
    assert staged.caches.cache(1, 12).stores[0].parts[0].data_ptr() == address
    assert first.tolist() == again.tolist()


def test_more_positions_than_the_buffer_or_the_model_has_are_refused(make, tiny_gpt2, tiny_llama) -> None:
    arm = make(tiny_gpt2)[0].apply(find_policy("bf16"), rows=[1, 8])
    with pytest.raises(UsageError, match="32 positions"):
        arm.start(1, 40, None)
    arm = make(tiny_llama)[0].apply(find_policy("bf16"), rows=[1, 8])
    generation = arm.start(1, 8, None)
    generation.prefill(ids_of(1, 8))
    with pytest.raises(UsageError, match="holds 8 positions"):
        generation.step(torch.tensor([5]))


def test_an_unfit_model_is_refused_with_a_sentence(make, tiny_llama, load_tiny) -> None:
    model, masters = load_tiny(tiny_llama)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(PdqError, match="linear_attention"):
        StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))
