"""Rows of keys and values, there and back: how far off each format may be, and what it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdq_tui.core.kv import KvGeometry, KvPolicy
from pdq_tui.engine.kv_formats import Channels, Fp8, Int4, Int8, Plain, codec
from pdq_tui.engine.kv_store import KvStore

CPU = torch.device("cpu")
D = 32


@st.composite
def rows(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some rows of 32 numbers: noise of any size, with outliers, offsets, constants and zeros among them."""
    count, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, D, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
    match draw(st.sampled_from(["noise", "outlier", "offset", "zero", "constant", "positive"])):
        case "outlier":
            x[:, draw(st.integers(0, D - 1))] *= 1000
        case "offset":
            x += 50 * x.abs().amax()
        case "zero":
            x[0] = 0
        case "constant":
            x[:] = x[0, 0]
        case "positive":
            x = x.abs()
    return x.to(dtype)


def off_by(made: Plain | Fp8 | Int8 | Int4, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    parts = made.encode(x)
    assert [(p.shape[-1], p.dtype) for p in parts] == list(made.widths)
    return (made.decode(parts, torch.float32).double() - x.double()).abs(), parts


@settings(deadline=None)
@given(rows())
def test_int8_is_off_by_half_a_step_at_most(x: torch.Tensor) -> None:
    error, (_, scale) = off_by(Int8(D), x)
    assert bool((error <= scale.double() * 0.5001).all())
    largest = x.double().abs().amax(-1, keepdim=True)
    assert bool((scale.double() <= largest / 127 * (1 + 2**-8))[largest > 0].all())


@settings(deadline=None)
@given(rows(), st.sampled_from([8, 16, 32]))
def test_int4_is_off_by_half_a_step_of_its_group_at_most(x: torch.Tensor, group: int) -> None:
    error, (_, scale, low) = off_by(Int4(D, group), x)
    # and by what rounding the minimum to bf16 adds
    bound = scale.double() * 0.5001 + low.double().abs() * 2**-8 * 0.5
    assert bool((error.view(*scale.shape, group).amax(-1) <= bound).all())
    grouped = x.double().view(*scale.shape, group)
    span = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
    assert bool((scale.double() <= span / 15 * (1 + 2**-6))[span > 0].all())


@settings(deadline=None)
@given(rows())
def test_fp8_is_off_by_a_sixteenth_or_half_its_least_step(x: torch.Tensor) -> None:
    error, (_, scale) = off_by(Fp8(D), x)
    bound = (x.double().abs() * 2**-4).maximum(scale.double() * 2**-10) * 1.0001
    assert bool((error <= bound).all())


@settings(deadline=None)
@given(rows(torch.bfloat16))
def test_the_models_dtype_is_exact(x: torch.Tensor) -> None:
    made = Plain(D, torch.bfloat16)
    assert torch.equal(made.decode(made.encode(x), torch.bfloat16), x)


@pytest.mark.parametrize("made", [Fp8(D), Int8(D), Int4(D, D), Int4(D, 8)])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible(made: Fp8 | Int8 | Int4) -> None:
    x = torch.randn(3, D)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 3] = float("inf")
    back = made.decode(made.encode(x), torch.float32)
    assert bool((back[0] == 0).all())
    assert not torch.isfinite(back[1]).all() and not torch.isfinite(back[2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kv",
    [
        KvPolicy(),
        KvPolicy("fp8", "fp8", "write"),
        KvPolicy("int8", "int8", "write"),
        KvPolicy("int4", "int4", "write"),
        KvPolicy("int4", "int4", "write", group_size=16),
    ],
)
def test_bytes_of_the_buffers_are_those_that_are_told(kv: KvPolicy, dtype: torch.dtype) -> None:
    store = KvStore(codec(kv, "decode", D, dtype), 2, 3, 5, 7, CPU, dtype)
    geometry = KvGeometry(5, D, dtype.itemsize, (None, None))
    assert store.nbytes == sum(p.untyped_storage().nbytes() for p in store.parts)
    assert store.nbytes == 3 * 7 * geometry.bytes_per_token(kv, "decode")


@settings(deadline=None)
@given(
    slots=st.integers(1, 9),
    pieces=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    made=st.sampled_from([Plain(8, torch.float32), Int8(8), Int4(8, 4)]),
)
def test_a_ring_holds_the_last_positions_each_in_its_slot(
    slots: int, pieces: list[int], made: Plain | Int8 | Int4
) -> None:
    store = KvStore(made, 2, 1, 2, slots, CPU, torch.float32)
    total = sum(pieces)
    keys, values = torch.randn(2, 1, 2, total, 8)
    start = 0
    for n in pieces:
        store.write(1, start, keys[:, :, start : start + n], values[:, :, start : start + n])
        start += n
    wanted_k, wanted_v = (made.decode(made.encode(x), torch.float32) for x in (keys, values))
    for position in range(max(0, total - slots), total):
        slot = position % slots
        assert torch.equal(store.read(1, 0, slot, slot + 1, torch.float32)[0, :, 0], wanted_k[0, :, position])
        assert torch.equal(store.read(1, 1, slot, slot + 1, torch.float32)[0, :, 0], wanted_v[0, :, position])


def test_long_prompts_are_encoded_in_pieces_that_meet() -> None:
    made = Int8(D)
    store = KvStore(made, 1, 1, 1, 2500, CPU, torch.float32)
    keys, values = torch.randn(2, 1, 1, 2500, D)
    store.write(0, 0, keys, values)
    assert torch.equal(
        store.read(0, 0, 0, 2500, torch.float32), made.decode(made.encode(keys), torch.float32)
    )


def test_channels_leave_out_padding_and_come_back() -> None:
    keys = torch.randn(2, 3, 9, D) * torch.logspace(-2, 3, D) + torch.linspace(-40, 40, D)
    keys[1, :, :4] = 1e9  # padding
    found = Channels.of(keys, torch.tensor([0, 4]))
    alone = Channels.of(keys[1:, :, 4:], None)
    torch.testing.assert_close(found.mean[1:], alone.mean)
    torch.testing.assert_close(found.spread[1:], alone.spread)
    held = found.apart(keys)
    assert float(held[0].abs().amax()) <= 1.0001 and float(held[1, :, 4:].abs().amax()) <= 1.0001
    torch.testing.assert_close(found.whole(held)[0], keys[0], rtol=1e-5, atol=1e-3)
    constant = Channels.of(torch.ones(1, 1, 3, D), None)
    assert bool((constant.apart(torch.ones(1, 1, 1, D)) == 0).all())


def test_a_channel_that_few_positions_leave_alike_takes_no_later_keys_precision() -> None:
    """Two positions, nearly equal in one channel; a later key differs there as it does everywhere."""
    torch.manual_seed(3)
    keys = torch.randn(1, 1, 2, 64)
    keys[..., 1, 5] = keys[..., 0, 5] + 1e-4
    later, made = torch.randn(1, 1, 1, 64), Int8(64)
    channels = Channels.of(keys, None)
    read = channels.whole(made.decode(made.encode(channels.apart(later)), torch.float32))
    assert float((read - later).norm() / later.norm()) < 0.2
