"""Our own attention over a prompt, against float64 and against torch's: where AVX512-BF16 built it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pdq_tui.engine import attention, prefill_native
from tests.engine.test_model_native import library as library  # builds and loads it


@pytest.fixture(autouse=True)
def built(library: object) -> None:
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("no AVX512-BF16 here")
    assert hasattr(torch.ops.pdq_native, "causal"), "the library of this machine holds it"


def tensors(B: int, H: int, heads: int, P: int, D: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As a layer gives them: queries and values are views of [B, P, heads, D]."""
    torch.manual_seed(P * 100 + D)
    q = torch.randn(B, P, H, D).bfloat16().transpose(1, 2)
    k = torch.randn(B, heads, P, D).bfloat16()
    v = torch.randn(B, P, heads, D).bfloat16().transpose(1, 2)
    return q, k, v


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """float64 [B, P, H, D]; queries are of the last P positions."""
    at = torch.arange(k.shape[2])
    mine = at[k.shape[2] - q.shape[2] :, None]
    seen = at[None] <= mine
    if window is not None:
        seen &= at[None] > mine - window
    out = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return float((got.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("P", [1, 2, 11, 12, 13, 31, 32, 33, 127, 128, 129, 300])
@pytest.mark.parametrize(("H", "heads", "D"), [(4, 4, 32), (9, 3, 64), (4, 1, 128)])
def test_it_attends_to_what_came_before(P: int, H: int, heads: int, D: int) -> None:
    q, k, v = tensors(2, H, heads, P, D)
    for scale in (D**-0.5, 0.3):
        reference = wanted(q, k, v, scale, None)
        got = prefill_native.causal(q, k, v, scale, None)
        assert got.shape == (2, P, H, D) and got.dtype == torch.bfloat16 and got.is_contiguous()
        assert error(got, reference) < 4e-3
        torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        assert error(got, reference) < 1.2 * error(torchs.transpose(1, 2), reference) + 2e-4


@pytest.mark.parametrize("window", [1, 2, 12, 100, 128, 129, 299, 300, 1000])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    q, k, v = tensors(1, 6, 2, 300, 64)
    got = prefill_native.causal(q, k, v, None, window)
    assert error(got, wanted(q, k, v, 64**-0.5, window)) < 4e-3


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("P", [1, 11, 12, 100, 129])
def test_a_piece_of_a_prompt_sees_what_earlier_ones_wrote(P: int, window: int | None) -> None:
    q, k, v = tensors(2, 6, 2, 300, 64)
    got = prefill_native.causal(q[:, :, -P:], k, v, None, window)
    assert error(got, wanted(q[:, :, -P:], k, v, 64**-0.5, window)) < 4e-3
    whole = prefill_native.causal(q, k, v, None, window)
    torch.testing.assert_close(got, whole[:, -P:], rtol=2e-2, atol=2e-2)


def test_what_comes_later_changes_nothing_before_it() -> None:
    q, k, v = tensors(1, 3, 3, 200, 64)
    before = prefill_native.causal(q, k, v, None, None)
    k[:, :, 150:] = 1e4
    v[:, :, 150:] = -7.0
    after = prefill_native.causal(q, k, v, None, None)
    assert torch.equal(before[:, :150], after[:, :150])
    assert not torch.equal(before[:, 150:], after[:, 150:])


def test_huge_scores_do_not_overflow_and_N01_what_is_not_finite_shows() -> None:
    q, k, v = tensors(2, 3, 3, 140, 64)
    q[0, :, 20] *= 1e4
    out = prefill_native.causal(q, k, v, None, None)
    assert torch.isfinite(out).all()
    assert error(out, wanted(q, k, v, 64**-0.5, None)) < 6e-3
    q[0, 1, 30, 5] = float("nan")
    out = prefill_native.causal(q, k, v, None, None)
    assert not torch.isfinite(out[0, 30, 1]).any()
    assert torch.isfinite(out[1]).all() and torch.isfinite(out[0, :30]).all()


def test_the_engine_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(1, 4, 2, 40, 64)
    calls: list[object] = []
    real = prefill_native.causal
    monkeypatch.setattr(prefill_native, "causal", lambda *a: calls.append(a) or real(*a))
    module = torch.nn.Identity()
    out, _ = attention.prefill_attention(module, q, k, v, None, 0.125)
    assert len(calls) == 1 and error(out, wanted(q, k, v, 0.125, None)) < 4e-3
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    masked, _ = attention.prefill_attention(module, q, k, v, mask, 0.125)
    wide, _ = attention.prefill_attention(module, q.float(), k.float(), v.float(), None, 0.125)
    odd, _ = attention.prefill_attention(module, *(t[..., :48] for t in (q, k, v)), None, 0.125)
    assert len(calls) == 1, "masked, in float32, or with heads of 48 it is torch's"
    assert error(masked, out.double()) < 6e-3 and error(wide, out.double()) < 6e-3 and odd.shape[-1] == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.float(), k, v), "bf16"),
        (lambda q, k, v: (q, k[:, :, :-1], v), "positions"),
        (lambda q, k, v: (q[..., :48], k[..., :48], v[..., :48]), "multiple of 32"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of 32"),
        (lambda q, k, v: (q.transpose(2, 3), k, v), "contiguous"),
    ],
)
def test_what_it_cannot_read_is_refused(change: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pdq_native.causal(*change(*tensors(1, 4, 2, 40, 64)), 1.0, 100)  # type: ignore[operator]
