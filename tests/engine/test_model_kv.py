"""Models on a KV cache in another form, held against transformers' own attention over the dequantized cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.engine import kv_attention
from pdq_tui.engine.kv import KvCache, KvShape
from pdq_tui.engine.kv_formats import Channels, Plain, codec
from pdq_tui.engine.kv_store import Filled
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.engine.views import Caller
from pdq_tui.errors import UnfitError
from tests.engine.families import SLIDING, WINDOW, save_family
from tests.engine.test_model_staged import Cpu, ids_of, run

WRITE = [KvPolicy(f, f, "write") for f in ("fp8", "int8", "int4")] + [
    KvPolicy("bf16", "int8", "write"),
    KvPolicy("int4", "int4", "write", group_size=16),
]
HANDOFF = [
    KvPolicy("bf16", "fp8", "handoff"),
    KvPolicy("bf16", "int8", "handoff"),
    KvPolicy("bf16", "int4", "handoff"),
    KvPolicy("bf16", "int8", "handoff", "channel"),
    KvPolicy("bf16", "int4", "handoff", "channel", 16),
    KvPolicy("fp8", "int8", "handoff"),
    KvPolicy("int8", "bf16", "handoff"),
    KvPolicy("fp8", "int4", "handoff", "channel"),
]
EVERY = [KvPolicy(), *WRITE, *HANDOFF]


def builder(load_tiny: Any) -> Any:
    def build(path: Path, **options: Any) -> StagedModel:
        model, masters = load_tiny(path)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"), **options)

    return build


@pytest.fixture
def make(load_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PDQ_HOME", str(tmp_path))
    return builder(load_tiny)


class Dequantized(DynamicCache):
    """A second implementation: every position kept whole in float32, rounded where the policy says so."""

    def __init__(self, model: PreTrainedModel, kv: KvPolicy, pad: torch.Tensor | None) -> None:
        super().__init__()
        shape = KvShape(model.config, torch.float32)
        self.kv, self.pad = kv, pad
        self.made = {s: codec(kv, s, shape.head_dim, torch.float32) for s in ("prefill", "decode")}
        self.held: dict[int, list[torch.Tensor]] = {}
        self.channels: dict[int, Channels] = {}
        self.decoding = False

    def rounded(self, stage: str, x: torch.Tensor) -> torch.Tensor:
        made = self.made[stage]
        return made.decode(made.encode(x), torch.float32)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if not self.decoding:
            new = [self.rounded("prefill", x) for x in (key_states, value_states)]
            kept = (
                new
                if self.kv.convert == "handoff"
                else [self.rounded("decode", x) for x in (key_states, value_states)]
            )
            self.held[layer_idx] = kept
            return tuple(new)
        new = [self._key(layer_idx, key_states), self.rounded("decode", value_states)]
        self.held[layer_idx] = [torch.cat(two, 2) for two in zip(self.held[layer_idx], new, strict=True)]
        return tuple(self.held[layer_idx])

    def _key(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        found = self.channels.get(layer)
        return (
            self.rounded("decode", keys)
            if found is None
            else found.whole(self.rounded("decode", found.apart(keys)))
        )

    def handoff(self) -> None:
        self.decoding = True
        if self.kv.convert != "handoff":
            return
        for layer, (keys, values) in self.held.items():
            if self.kv.keys == "channel":
                self.channels[layer] = Channels.of(keys, self.pad)
            self.held[layer] = [self._key(layer, keys), self.rounded("decode", values)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.held[layer_idx][0].shape[2] if layer_idx in self.held else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


def reference(
    model: PreTrainedModel, kv: KvPolicy, ids: torch.Tensor, tokens: torch.Tensor, pad: torch.Tensor | None
) -> torch.Tensor:
    """Logits [new, B, V] of transformers' eager attention, fed with our ``tokens`` [B, new]."""
    model.set_attn_implementation("eager")
    cache, call = Dequantized(model, kv, pad), Caller(model)
    B, P = ids.shape
    pads = torch.zeros(B, dtype=torch.int64) if pad is None else pad
    found = []
    with torch.inference_mode():
        for step in range(tokens.shape[1]):
            length = P + step
            given = ids if step == 0 else tokens[:, step - 1 : step]
            columns = torch.arange(length)[None, :]
            positions = (columns - pads[:, None]).clamp(min=0)[:, -given.shape[1] :]
            mask = (columns >= pads[:, None]).long()
            found.append(call.logits(model, given, mask, positions, cache)[:, -1])
            if step == 0:
                cache.handoff()
    return torch.stack(found)


def policy_of(kv: KvPolicy, name: str = "bf16") -> Any:
    return msgspec.structs.replace(find_policy(name), kv=kv)


def label(kv: KvPolicy) -> str:
    return kv.label


def to_capacity(
    arm: StagedArm, ids: torch.Tensor, new: int, pad: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``run``, in a cache whose last position is filled by the last step."""
    generation = arm.start(ids.shape[0], ids.shape[1] + new - 1, pad)
    logits = [generation.prefill(ids)]
    generation.handoff()
    for _ in range(new - 1):
        logits.append(generation.step(logits[-1].argmax(-1)))
    stacked = torch.stack(logits)
    return stacked.argmax(-1).t(), stacked


def agree(
    make: Any, load_tiny: Any, path: Path, kv: KvPolicy, ids: torch.Tensor, new: int, pad: torch.Tensor | None
) -> StagedModel:
    staged = make(path)
    arm = staged.apply(policy_of(kv), rows=[ids.shape[0], ids.numel()])
    tokens, ours = to_capacity(arm, ids, new, pad)
    model, _ = load_tiny(path)
    wanted = reference(model, kv, ids, tokens, pad)
    # A number between two codes may fall to either side: in some rows one code is another one, at the size of its step.
    flipped = ((ours - wanted).abs() > 2e-3 + 1e-3 * wanted.abs()).any(-1)
    assert float(flipped.float().mean()) <= (0.25 if kv.keys == "channel" else 0.0)
    torch.testing.assert_close(ours[~flipped], wanted[~flipped], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(ours, wanted, rtol=0.0, atol=0.05)
    return staged


@pytest.mark.parametrize("kv", EVERY, ids=label)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_moe"])
def test_Q11_logits_are_those_of_attention_over_the_dequantized_cache(
    name: str, kv: KvPolicy, make: Any, load_tiny: Any, request: pytest.FixtureRequest
) -> None:
    agree(make, load_tiny, request.getfixturevalue(name), kv, ids_of(1, 9), 6, None)


@pytest.mark.parametrize("kv", EVERY, ids=label)
def test_padded_batches_agree_row_by_row(kv: KvPolicy, make: Any, load_tiny: Any, tiny_llama: Path) -> None:
    agree(make, load_tiny, tiny_llama, kv, ids_of(3, 9), 6, torch.tensor([0, 4, 8]))


@pytest.mark.parametrize("kv", [WRITE[1], HANDOFF[3]], ids=label)
@pytest.mark.parametrize("prompt", [1, 2])
def test_the_shortest_contexts(
    prompt: int, kv: KvPolicy, make: Any, load_tiny: Any, tiny_llama: Path
) -> None:
    agree(make, load_tiny, tiny_llama, kv, ids_of(2, prompt), 3, None)


@pytest.mark.parametrize("kv", [KvPolicy(), WRITE[1], HANDOFF[1], HANDOFF[4]], ids=label)
def test_more_blocks_than_one(
    kv: KvPolicy, make: Any, load_tiny: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_attention, "block_of", lambda row_bytes, device: 7)
    for length in (6, 7, 8, 40):
        agree(make, load_tiny, tiny_llama, kv, ids_of(2, length), 4, torch.tensor([0, 3]))


def test_greedy_tokens_of_the_models_own_dtype_are_those_of_generate(
    make: Any, load_tiny: Any, tiny_llama_bf16: Path
) -> None:
    staged, (model, _) = make(tiny_llama_bf16), load_tiny(tiny_llama_bf16)
    ids = ids_of(1, 20)
    with torch.inference_mode():
        wanted = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[:, 20:]
    tokens, _ = run(staged.apply(find_policy("bf16"), rows=[1, 20]), ids, 8)
    assert tokens.tolist() == wanted.tolist()


def test_quantizing_changes_the_logits_and_less_bits_change_them_more(make: Any, tiny_llama: Path) -> None:
    """Otherwise nothing above would show that a quantized cache is read at all."""
    staged = make(tiny_llama)
    ids = ids_of(2, 40)
    _, exact = run(staged.apply(policy_of(KvPolicy()), rows=[2, 80]), ids, 2)
    off = {}
    for kv in HANDOFF[:3]:
        _, logits = run(staged.apply(policy_of(kv), rows=[2, 80]), ids, 2)
        assert torch.equal(logits[0], exact[0])  # prefill reads the model's dtype
        off[kv.decode] = float((logits[1] - exact[1]).norm())
    assert 0 < off["int8"] < off["fp8"] < off["int4"]
    _, logits = run(staged.apply(policy_of(WRITE[1]), rows=[2, 80]), ids, 2)
    assert not torch.equal(logits[0], exact[0])  # prefill reads what was rounded


def test_channels_of_keys_pay_where_one_is_large(make: Any, load_tiny: Any, tiny_llama: Path) -> None:
    """One channel of every head far above the others, as rotary models have: a scale by token is spent on it."""
    model, masters = load_tiny(tiny_llama)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[15::16] *= 60  # the last of 16: it turns slowest
            layer.self_attn.q_proj.weight[15::16] /= 60
    staged = StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))
    ids = ids_of(1, 40)
    off = {}
    _, exact = run(staged.apply(policy_of(KvPolicy()), rows=[1, 40]), ids, 2)
    for keys in ("token", "channel"):
        kv = KvPolicy("bf16", "int4", "handoff", keys)
        _, logits = run(staged.apply(policy_of(kv), rows=[1, 40]), ids, 2)
        off[keys] = float((logits[1] - exact[1]).norm())
    assert off["channel"] < 0.5 * off["token"]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in before:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("kv", [*WRITE, *HANDOFF[1:5]], ids=label)
def test_no_step_makes_a_whole_copy_of_the_cache(
    kv: KvPolicy, load_tiny: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_tiny(tiny_llama)
    shape = KvShape(model.config, torch.float32)
    monkeypatch.setitem(kv_attention.BLOCK_BYTES, "cpu", 1 << 16)
    T = 4000
    cache = KvCache(shape, 1, T + 1, torch.device("cpu"), kv)
    row = shape.kv_heads * shape.head_dim * 4
    step = kv_attention.block_of(row, "cpu")
    with torch.inference_mode():
        cache.advance(T)
        keys, values = torch.randn(2, 1, shape.kv_heads, T, shape.head_dim)
        for layer in range(shape.layers):
            cache.update(keys, values, layer)
        cache.handoff()
        cache.advance(1)
        query = torch.randn(1, shape.heads, 1, shape.head_dim)
        with Largest() as largest:
            filled, _ = cache.update(keys[:, :, :1], values[:, :, :1], 0)
            kv_attention.attend(query, filled, None, None, None)
    scores = shape.heads * (T + 1) * 4
    assert 0 < largest.bytes <= max(step * row, scores) < T * row / 4


@pytest.mark.parametrize("kv", EVERY, ids=label)
def test_Q11_bytes_are_counted_from_what_lies_there(kv: KvPolicy, make: Any, tiny_llama: Path) -> None:
    staged = make(tiny_llama)
    arm = staged.apply(policy_of(kv), rows=[2, 18])
    generation = arm.start(2, 16, torch.tensor([0, 3]))
    info = arm.kv_info()
    assert info.allocated_bytes == 2 * 16 * info.bytes_per_token
    assert (info.layers, info.quantized_layers) == (2, 0 if kv.decode == "bf16" else 2)
    generation.prefill(ids_of(2, 9))
    assert generation.kv_bytes() == 2 * 9 * info.prefill_bytes_per_token
    without = staged.costs.step(generation._decode.placements, [10, 7], 10)
    generation.handoff()
    assert generation.kv_bytes() == 2 * (9 * info.bytes_per_token + info.sequence_bytes)
    dense = 2 * 2 * 2 * 16 * 4
    assert (
        generation.bytes_per_step() - without.bytes
        == 17 * (info.bytes_per_token - dense) + 2 * info.sequence_bytes
    )
    assert generation.bytes_per_step_wasted() == 3 * info.bytes_per_token
    assert arm.kv_info().allocated_bytes == info.allocated_bytes


@pytest.mark.parametrize("kv", HANDOFF, ids=label)
def test_what_waited_for_the_handoff_is_let_go(kv: KvPolicy, make: Any, tiny_llama: Path) -> None:
    staged = make(tiny_llama)
    arm = staged.apply(policy_of(kv), rows=[1, 9])
    generation = arm.start(1, 16, None)
    generation.prefill(ids_of(1, 9))
    assert all(waiting is not None for waiting in generation._cache._waiting)
    generation.handoff()
    assert not any(generation._cache._waiting)


def test_a_cache_of_one_policy_is_not_that_of_another(make: Any, tiny_llama: Path) -> None:
    staged = make(tiny_llama)
    arms = [staged.apply(policy_of(kv), rows=[1, 9]) for kv in EVERY]
    ids = ids_of(1, 9)
    first = [run(arm, ids, 5)[1] for arm in arms]
    again = [run(arm, ids, 5)[1] for arm in reversed(arms)][::-1]
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    before = staged.caches.cache(1, 14, EVERY[1]).stores[0].parts[0].data_ptr()
    run(arms[1], ids_of(1, 9, 3), 5)
    assert staged.caches.cache(1, 14, EVERY[1]).stores[0].parts[0].data_ptr() == before


def test_Q11_what_cannot_be_read_is_refused_before_anything_is_packed(
    make: Any, tiny_llama: Path, tiny_llama_72: Path
) -> None:
    staged = make(tiny_llama_72)
    taken = len(staged.store.masters.taken)
    with pytest.raises(UnfitError, match="groups of 16 do not divide this model's heads of 12"):
        staged.apply(policy_of(KvPolicy("bf16", "int4", "handoff", group_size=16), "int8"), rows=[1, 9])
    assert len(staged.store.masters.taken) == taken
    staged = make(tiny_llama, attention_name="sdpa")
    with pytest.raises(UnfitError, match="only this program's own attention reads a quantized cache"):
        staged.plan(policy_of(KvPolicy("int8", "int8", "write")), [1, 9])
    run(staged.apply(policy_of(KvPolicy()), rows=[1, 9]), ids_of(1, 9), 3)


def test_plain_formats_need_no_copy_in_a_step(load_tiny: Any, tiny_llama: Path) -> None:
    shape = KvShape(load_tiny(tiny_llama)[0].config, torch.float32)
    cache = KvCache(shape, 1, 8, torch.device("cpu"))
    assert all(isinstance(store.codec, Plain) for store in cache.stores)
    cache.handoff()
    cache.advance(1)
    x = torch.randn(1, shape.kv_heads, 1, shape.head_dim)
    read, _ = cache.update(x, x, 1)
    keys = (
        read.store.layers[read.layer][0] if isinstance(read, Filled) else read
    )  # with our kernels, and without
    assert keys.data_ptr() == cache.stores[0].parts[0][1].data_ptr()


@pytest.fixture(scope="session")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


SLIDING_CACHES = [KvPolicy(), WRITE[1], WRITE[3], HANDOFF[2], HANDOFF[3], HANDOFF[5]]


@pytest.mark.parametrize("prompt", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 1])
@pytest.mark.parametrize("kv", SLIDING_CACHES, ids=label)
@pytest.mark.parametrize("name", SLIDING)
def test_Q11_sliding_layers_hold_their_window_and_agree_at_every_length(
    name: str, kv: KvPolicy, prompt: int, make: Any, load_tiny: Any, sliding_model: Any
) -> None:
    """From a shorter context than the window, over its edge, around it, to the last position of the buffer."""
    pad = None if prompt < 3 else torch.tensor([0, prompt - 2])
    path, ids = sliding_model(name), ids_of(2, prompt)
    staged = agree(make, load_tiny, path, kv, ids, WINDOW + 3, pad)
    cache = staged.caches.cache(2, prompt + WINDOW + 2, kv)
    geometry = staged.kv.geometry
    assert {store.slots for store in cache.stores} == {
        min(w or cache.capacity, cache.capacity) for w in geometry.windows
    }
    if kv.keys == "token":
        assert cache.nbytes == 2 * geometry.sequence_bytes(kv, "decode", cache.capacity)


def test_Q11_k_of_n_layers_slide_is_told(make: Any, sliding_model: Any) -> None:
    staged = make(sliding_model("gemma3"))
    arm = staged.apply(policy_of(HANDOFF[1]), rows=[1, 30])
    generation = arm.start(1, 40, None)
    info = arm.kv_info()
    assert (info.layers, info.quantized_layers, info.sliding_layers, info.window) == (3, 3, 2, WINDOW)
    layer = info.bytes_per_token // 3
    assert info.allocated_bytes == layer * (40 + 2 * WINDOW)
    generation.prefill(ids_of(1, 30))
    generation.handoff()
    assert generation.kv_bytes() == layer * (30 + 2 * WINDOW)
    read = sum(op.bytes * op.count for op in generation.step_cost().ops if op.name == "attention")
    assert read == layer * (31 + 2 * WINDOW)


def test_Q11_another_attention_keeps_all_positions_of_a_sliding_layer(
    make: Any, load_tiny: Any, sliding_model: Any
) -> None:
    path, ids = sliding_model("mistral"), ids_of(2, 20)
    staged = make(path, attention_name="eager")
    tokens, ours = to_capacity(
        staged.apply(policy_of(KvPolicy()), rows=[2, 40]), ids, 4, torch.tensor([0, 5])
    )
    model, _ = load_tiny(path)
    wanted = reference(model, KvPolicy(), ids, tokens, torch.tensor([0, 5]))
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=2e-3)
    assert {store.slots for store in staged.caches.cache(2, 23).stores} == {23}


def test_Q11_state_space_and_hybrid_layers_are_refused_when_the_model_is_loaded(
    load_tiny: Any, tiny_llama: Path
) -> None:
    model, masters = load_tiny(tiny_llama)
    model.config.layer_types = ["full_attention", "mamba"]
    with pytest.raises(UnfitError, match="mamba"):
        StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))
