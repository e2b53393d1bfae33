"""The KV cache by the project's own CPU kernels: the same bytes as the formats say, attention against float64."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kv import KvPolicy
from pdq_tui.engine import kernels, kv_attention, kv_native, native
from pdq_tui.engine.kv_formats import Codec, Fp8, Int4, Int8, Plain
from pdq_tui.engine.kv_store import Filled, KvStore
from tests.engine.test_kv_formats import rows
from tests.engine.test_model_kv import EVERY, agree, builder, label, policy_of
from tests.engine.test_model_staged import ids_of, run

CPU = torch.device("cpu")
QUANTIZED = [Fp8(64), Int8(64), Int4(64, 64), Int4(64, 16), Int4(64, 8)]
FORMATS: list[Codec] = [Plain(64, torch.float32), Plain(64, torch.bfloat16), *QUANTIZED]


@pytest.fixture(scope="session", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not native.possible() and native.loaded() is None:
        pytest.skip("no AVX2 or no C++ compiler here")
    folder = Path(os.environ.get("PDQ_TEST_NATIVE", tmp_path_factory.getbasetemp().parent / "native"))
    reason = native.ensure(folder, lambda: None)
    assert reason is None, reason
    kernels.Prober().try_caches(FORMATS, torch.float32)
    assert all(kv_native.why_not(made, torch.float32, CPU) is None for made in FORMATS)


@pytest.fixture
def make(load_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PDQ_HOME", str(tmp_path))
    return builder(load_tiny)


def parts_of(made: Codec, B: int, heads: int, slots: int) -> tuple[torch.Tensor, ...]:
    """Buffers in which nothing may be read that was not written."""
    found = []
    for width, dtype in made.widths:
        raw = torch.full((2, B, heads, slots, width * dtype.itemsize), 0xFF, dtype=torch.uint8)
        found.append(raw.view(dtype))
    return tuple(found)


def filled(made: Codec, keys: torch.Tensor, values: torch.Tensor, slots: int) -> tuple[torch.Tensor, ...]:
    B, heads, n, _ = keys.shape
    parts = parts_of(made, B, heads, slots)
    for part, one in zip(parts, made.encode(torch.stack((keys, values))), strict=True):
        part[:, :, :, :n] = one
    return parts


@pytest.mark.parametrize("made", QUANTIZED, ids=str)
@settings(deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(1, 90), slot=st.integers(0, 5), half=st.booleans())
def test_the_same_bytes_are_written_as_the_format_says(
    made: Codec, seed: int, n: int, slot: int, half: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, n, 3, 64, generator=generator).transpose(2, 3)  # as attention makes them
    keys, values = keys * 10.0 ** (seed % 9 - 4), values.clone()
    values[0, 0, 0] = 0
    if half:
        keys, values = keys.bfloat16(), values.bfloat16()
    parts = parts_of(made, 2, 3, n + 6)
    before = [part.view(torch.uint8).clone() for part in parts]
    kv_native.put(keys, values, parts, slot)
    for part, one, old in zip(parts, made.encode(torch.stack((keys, values))), before, strict=True):
        here = part[:, :, :, slot : slot + n]
        assert torch.equal(
            here.float() if here.is_floating_point() else here,
            one.float() if one.is_floating_point() else one,
        )
        now = part.view(torch.uint8)
        assert torch.equal(now[:, :, :, :slot], old[:, :, :, :slot])
        assert torch.equal(now[:, :, :, slot + n :], old[:, :, :, slot + n :])


@settings(deadline=None)
@given(rows())
def test_rows_of_every_kind_are_written_alike(x: torch.Tensor) -> None:
    keys = x.view(1, 1, *x.shape)
    for made in (Fp8(32), Int8(32), Int4(32, 32), Int4(32, 8)):
        parts = parts_of(made, 1, 1, x.shape[0])
        kv_native.put(keys, keys, parts, 0)
        for part, one in zip(parts, made.encode(torch.stack((keys, keys))), strict=True):
            assert torch.equal(part.float(), one.float()), made


def test_every_fp8_number_is_read_and_written_as_torch_does() -> None:
    """All 254 finite codes, and every float32 between two of them."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    numbers = codes.view(torch.float8_e4m3fn).float()
    ordered = numbers.unique()
    between = torch.cat(
        [ordered[:-1] + (ordered[1:] - ordered[:-1]) * share for share in (0.25, 0.5, 0.500001, 0.75)]
    )
    for x in (numbers, between):
        padded = torch.cat([x, torch.full((-x.numel() % 63,), 448.0)]).view(-1, 63)
        padded = torch.cat([padded, torch.full((padded.shape[0], 1), 448.0)], 1)  # the scale is 1 then
        rows = padded.view(1, 1, -1, 64)
        parts = parts_of(Fp8(64), 1, 1, rows.shape[2])
        kv_native.put(rows, rows, parts, 0)
        assert bool((parts[1].float() == 1).all())
        assert torch.equal(parts[0][0].float(), rows.to(torch.float8_e4m3fn).float())
        # one position at a time: attention over it is the value itself
        for position in range(rows.shape[2]):
            one = tuple(part[:, :, :, position : position + 1].contiguous() for part in parts)
            out = kv_native.attend(torch.zeros(1, 1, 64), one, 1, None, 1.0, None)
            assert torch.equal(out[0, 0], parts[0][1, 0, 0, position].float())


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """float64 [B, H, D]."""
    B, H, D = query.shape
    kv_heads = keys.shape[1]
    scores = query.double().view(B, kv_heads, -1, D) @ keys.double().transpose(2, 3) * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    if mask is not None:
        scores = scores + mask.double()[:, None, None, :]
    return (scores.softmax(-1) @ values.double()).view(B, H, D)


COUNTS = (1, 2, 7, 63, 64, 65, 300, 1000)


@pytest.mark.parametrize(("made", "count"), itertools.product(FORMATS, COUNTS), ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 6), (3, 21)])
def test_attention_over_what_is_stored(made: Codec, count: int, heads: tuple[int, int]) -> None:
    kv_heads, H = heads
    torch.manual_seed(count + H)
    keys, values = torch.randn(2, 2, kv_heads, count, 64) * 3
    if isinstance(made, Plain):
        keys, values = keys.to(made.dtype), values.to(made.dtype)
    parts = filled(made, keys, values, count + 9)
    whole = [made.decode(tuple(p[which][:, :, :count] for p in parts), torch.float32) for which in (0, 1)]
    query = torch.randn(2, H, 64)
    mask = torch.zeros(2, count)
    mask[1, : count // 3] = float("-inf")
    for given_mask, cap in ((None, None), (mask, None), (mask, 5.0)):
        got = kv_native.attend(query, parts, count, given_mask, 0.2, cap)
        torch.testing.assert_close(
            got.double(), reference(query, *whole, given_mask, 0.2, cap), rtol=2e-5, atol=2e-5
        )
    half = query.bfloat16()
    got = kv_native.attend(half, parts, count, None, 0.2, None)
    assert got.dtype == torch.bfloat16
    wanted = reference(half, *whole, None, 0.2, None)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-5)


def test_scores_far_apart_and_a_first_piece_of_padding_alone() -> None:
    made = Plain(64, torch.float32)
    keys, values = torch.randn(2, 1, 1, 900, 64)
    keys[0, 0, 500] = 40.0
    parts = filled(made, keys, values, 900)
    mask = torch.zeros(1, 900)
    mask[0, :700] = float("-inf")
    for given_mask in (None, mask):
        query = torch.ones(1, 2, 64) * 5
        got = kv_native.attend(query, parts, 900, given_mask, 1.0, None)
        wanted = reference(query, keys, values, given_mask, 1.0, None)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("made", QUANTIZED, ids=str)
def test_N01_what_is_not_finite_shows_in_its_head_and_only_there(made: Codec, bad: float) -> None:
    keys, values = torch.randn(2, 1, 2, 5, 64)
    for which in (keys, values):
        spoiled = which.clone()
        spoiled[0, 1, 3, 9] = bad
        parts = parts_of(made, 1, 2, 5)
        kv_native.put(*((spoiled, values) if which is keys else (keys, spoiled)), parts, 0)
        out = kv_native.attend(torch.randn(1, 4, 64), parts, 5, None, 0.1, None)
        assert torch.isfinite(out[0, :2]).all() and not torch.isfinite(out[0, 2:]).all()


@pytest.mark.parametrize("kv", EVERY, ids=label)
def test_Q11_models_agree_with_attention_over_the_dequantized_cache(
    kv: KvPolicy,
    make: Any,
    load_tiny: Any,
    tiny_llama: Path,
) -> None:
    staged = agree(make, load_tiny, tiny_llama, kv, ids_of(3, 9), 6, torch.tensor([0, 4, 8]))
    [store] = staged.caches.cache(3, 15, kv).stores
    fits = not (isinstance(store.codec, Int4) and store.codec.group % 8)
    assert store.own_kernel == fits


@pytest.mark.parametrize("kv", [KvPolicy(), KvPolicy("int8", "int8", "write")], ids=label)
def test_a_bf16_model_chooses_the_tokens_that_torchs_operators_choose(
    kv: KvPolicy,
    make: Any,
    tiny_llama_bf16: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = ids_of(1, 20)
    ours, _ = run(make(tiny_llama_bf16).apply(policy_of(kv), rows=[1, 20]), ids, 8)
    monkeypatch.setattr(kv_native, "why_not", lambda *_: "switched off")
    theirs, _ = run(make(tiny_llama_bf16).apply(policy_of(kv), rows=[1, 20]), ids, 8)
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("made", [Int8(64), Int4(64, 16)], ids=str)
def test_a_ring_and_its_mask(made: Codec) -> None:
    """After 100 positions in 40 slots, of which the first 70 are padding of the first row."""
    store = KvStore(made, 1, 2, 2, 40, CPU, torch.float32)
    assert store.own_kernel
    keys, values = torch.randn(2, 2, 2, 100, 64)
    store.write(0, 0, keys[:, :, :60], values[:, :, :60])
    for position in range(60, 100):
        store.write(0, position, keys[:, :, position : position + 1], values[:, :, position : position + 1])
    mask = torch.zeros(2, 1, 1, 100)
    mask[0, ..., :70] = float("-inf")
    query = torch.randn(2, 4, 1, 64)
    got = kv_attention.attend(query, Filled(store, 0, 100, None), mask, 0.1, None)
    whole = [made.decode(made.encode(x[:, :, 60:]), torch.float32) for x in (keys, values)]
    wanted = reference(query[:, :, 0], *whole, mask[:, 0, 0, 60:], 0.1, None)
    torch.testing.assert_close(got[:, 0].double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kv_native.attend
    assert kv_native.wrong_with(Int8(64), torch.float32) is None
    monkeypatch.setattr(kv_native, "attend", lambda *given: real(*given) * 1.1)
    assert kv_native.wrong_with(Int8(64), torch.float32) == "its attention is off by 0.1"
    monkeypatch.setattr(kv_native, "_tried", {})
    assert kv_native.why_not(Int8(64), torch.float32, CPU) == "our own kernel was not tried here"
    monkeypatch.setattr(kernels, "probe_in_child", lambda jobs, poll: [])  # it died at the first
    kernels.Prober().try_caches([Int8(64)], torch.float32)
    assert kv_native.why_not(Int8(64), torch.float32, CPU) == (
        "our own kernel does not work here: it ended the process"
    )
    assert not KvStore(Int8(64), 1, 1, 1, 8, CPU, torch.float32).own_kernel


@pytest.mark.parametrize(
    ("made", "dtype", "device", "words"),
    [
        (Int8(64), torch.float16, "cpu", "takes bf16 and float32"),
        (Int8(12), torch.float32, "cpu", "no multiple of 8"),
        (Int4(24, 24), torch.float32, "cpu", "multiples of 16 and 8"),
        (Int8(64), torch.bfloat16, "cuda", "no kernel of our own for this device"),
    ],
)
def test_what_ours_do_not_take_is_told(made: Codec, dtype: torch.dtype, device: str, words: str) -> None:
    assert words in str(kv_native.why_not(made, dtype, torch.device(device)))


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    parts = parts_of(Int8(64), 1, 2, 8)
    query = torch.randn(1, 4, 64)
    for bad in (
        lambda: kv_native.attend(query, parts, 9, None, 1.0, None),
        lambda: kv_native.attend(query[:, :3], parts, 8, None, 1.0, None),
        lambda: kv_native.attend(query[..., :32], parts, 8, None, 1.0, None),
        lambda: kv_native.attend(query, parts, 8, torch.zeros(1, 7), 1.0, None),
        lambda: kv_native.put(torch.randn(1, 2, 3, 64), torch.randn(1, 2, 3, 64), parts, 6),
    ):
        with pytest.raises(RuntimeError):
            bad()


def test_policies_of_one_session_use_the_kernel_each(make: Any, tiny_llama_bf16: Path) -> None:
    staged = make(tiny_llama_bf16)
    for kv in EVERY:
        policy = msgspec.structs.replace(find_policy("int8"), kv=kv)
        _, logits = run(staged.apply(policy, rows=[1, 9]), ids_of(1, 9), 4)
        assert torch.isfinite(logits).all()


def test_another_attention_gets_plain_tensors(make: Any, tiny_llama: Path) -> None:
    ids = ids_of(1, 9)
    _, wanted = run(make(tiny_llama).apply(policy_of(KvPolicy()), rows=[1, 9]), ids, 4)
    _, got = run(make(tiny_llama, attention_name="eager").apply(policy_of(KvPolicy()), rows=[1, 9]), ids, 4)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
