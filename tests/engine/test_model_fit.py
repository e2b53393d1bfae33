"""Whether a policy fits is told before anything is packed, its KV cache counted to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.engine.kv_formats import Channels
from pdq_tui.engine.staged import StagedModel
from pdq_tui.engine.weights import HEADROOM_BYTES
from pdq_tui.errors import UnfitError
from tests.engine.families import WINDOW, save_family
from tests.engine.test_model_staged import Cpu, ids_of

pytestmark = pytest.mark.usefixtures("shared_home")

BATCH, CAPACITY = 2, 24
#: Bytes of one position of one sequence of the tiny models: 2 layers, keys and values, 2 heads of 16 numbers; float32
#: where the cache is in the model's dtype, else the codes of a row and a bf16 scale (int4: and minimum).
DENSE, FP8, INT8, INT4, INT4_G8 = (2 * 2 * 2 * row for row in (16 * 4, 16 + 2, 16 + 2, 8 + 4, 8 + 4))
#: Mean and spread of the keys' channels of one layer: 2 heads of 16 numbers, two float32.
CHANNELS = 2 * 16 * 8
CASES = {
    "bf16": (KvPolicy(), DENSE, 0),
    "fp8": (KvPolicy("fp8", "fp8", "write"), FP8, 0),
    "int8": (KvPolicy("int8", "int8", "write"), INT8, 0),
    "int4": (KvPolicy("int4", "int4", "write"), INT4, 0),
    "bf16/int8": (KvPolicy("bf16", "int8", "handoff"), INT8, DENSE),
    "bf16/int8-write": (KvPolicy("bf16", "int8", "write"), INT8, 0),
    "fp8/int4": (KvPolicy("fp8", "int4", "handoff"), INT4, FP8),
    "int8-channel": (KvPolicy("bf16", "int8", "handoff", "channel"), INT8, DENSE),
}


def with_kv(kv: KvPolicy, name: str = "int8") -> Any:
    return msgspec.structs.replace(find_policy(name), kv=kv)


@pytest.fixture
def make(load_tiny: Any) -> Any:
    def build(path: Path, free: int | None = None) -> StagedModel:
        model, masters = load_tiny(path)
        return StagedModel(model, masters, Cpu(free), budget_bytes=None, kernels=load_kernels("cpu"))

    return build


def waiting_bytes(cache: Any) -> int:
    """Of what waits for the hand-off, and of the channels that were taken, now."""
    channels = [c for c in cache._channels if isinstance(c, Channels)]
    waiting = sum(store.nbytes for store in cache._waiting if store is not None)
    return waiting + sum(x.nbytes for c in channels for x in vars(c).values() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("name", CASES)
def test_Q11_bytes_of_a_request_are_those_that_lie_there(name: str, make: Any, tiny_llama: Path) -> None:
    kv, token, waiting = CASES[name]
    staged = make(tiny_llama)
    arm = staged.apply(with_kv(kv), rows=[BATCH, 2 * BATCH])
    geometry = staged.kv.geometry
    channels = BATCH * CHANNELS if kv.keys == "channel" else 0
    buffers, beside = BATCH * CAPACITY * token, BATCH * CAPACITY * waiting + channels
    assert geometry.buffer_bytes(kv, BATCH, CAPACITY) == buffers
    assert geometry.handoff_bytes(kv, BATCH, CAPACITY) == beside
    assert staged.caches.new_bytes([kv], BATCH, CAPACITY) == buffers + beside

    generation = arm.start(BATCH, CAPACITY, None)
    assert arm.kv_info().allocated_bytes == staged.caches.nbytes == buffers
    generation.prefill(ids_of(BATCH, 9))
    assert waiting_bytes(generation._cache) == beside - channels
    generation.handoff()
    assert waiting_bytes(generation._cache) == 2 * channels, "both layers' now, and nothing waits"
    assert staged.caches.new_bytes([kv], BATCH, CAPACITY) == beside, "the buffers are used again"


def test_Q11_sliding_layers_count_their_window(make: Any, tmp_path: Path) -> None:
    staged = make(save_family("gemma3", tmp_path / "model"))  # 2 of 3 layers slide
    kv = CASES["bf16/int8"][0]
    layer, dense = 2 * 2 * (16 + 2), 2 * 2 * 16 * 4
    wanted = BATCH * layer * (CAPACITY + 2 * WINDOW) + BATCH * CAPACITY * 3 * dense
    assert staged.caches.new_bytes([kv], BATCH, CAPACITY) == wanted
    staged.caches.cache(BATCH, CAPACITY, kv)
    assert staged.caches.nbytes == wanted - BATCH * CAPACITY * 3 * dense


@pytest.mark.parametrize("name", CASES)
def test_a_policy_fits_to_the_byte_with_its_cache(name: str, make: Any, tiny_llama: Path) -> None:
    kv, token, waiting = CASES[name]
    channels = BATCH * CHANNELS if kv.keys == "channel" else 0
    cache = BATCH * CAPACITY * (token + waiting) + channels
    staged = make(tiny_llama)
    weights = staged.plan(with_kv(kv), [BATCH, 8]).new_bytes
    exact = HEADROOM_BYTES + weights + cache
    staged.device.free = exact - 1
    taken = len(staged.store.masters.taken)
    with pytest.raises(
        UnfitError, match=r"does not fit: .* of weights to pack and .* of KV cache"
    ) as refused:
        staged.apply(with_kv(kv), rows=[BATCH, 8], request=(BATCH, CAPACITY))
    assert "smaller batch" in str(refused.value.hint)
    assert len(staged.store.masters.taken) == taken and staged.caches.nbytes == 0
    staged.device.free = exact
    staged.apply(with_kv(kv), rows=[BATCH, 8], request=(BATCH, CAPACITY))


def test_the_caches_of_both_arms_have_to_fit(make: Any, tiny_llama: Path) -> None:
    staged = make(tiny_llama)
    request = (1, CAPACITY)
    one = staged.apply(with_kv(CASES["bf16"][0]), rows=[1, 8], request=request)
    staged.device.free = HEADROOM_BYTES + CAPACITY * (DENSE + INT8 + DENSE) - 1
    staged_kv = with_kv(CASES["bf16/int8"][0])  # the weights are there: the cache alone does not fit
    with pytest.raises(UnfitError, match=r"0\.0 MB of weights to pack and"):
        staged.apply(staged_kv, rows=[1, 8], request=request)
    one.start(*request, None)  # its buffers are taken now, and no longer part of what is free
    staged.device.free -= CAPACITY * DENSE - 1
    staged.apply(staged_kv, rows=[1, 8], request=request)


def test_a_layer_that_is_widened_has_to_fit_as_well(make: Any, tiny_llama_bf16: Path) -> None:
    staged = make(tiny_llama_bf16)
    plan = staged.plan(find_policy("transient-int4"), [1, 12])
    assert plan.weights.scratch_bytes > 0
    staged.device.free = HEADROOM_BYTES + plan.new_bytes + plan.weights.scratch_bytes - 1
    with pytest.raises(UnfitError, match="scratch"):
        staged.apply(find_policy("transient-int4"), rows=[1, 12])
    staged.device.free += 1
    staged.apply(find_policy("transient-int4"), rows=[1, 12])
