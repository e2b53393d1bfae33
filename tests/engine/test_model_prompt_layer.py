"""Decoder layers over a prompt by our own operators: the modules' logits for every family, kernel, cache and cut that there is, and
the reason where they do not fit; the operators themselves against float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import parse_policy
from pdq_tui.engine import native
from pdq_tui.engine.formats.native import NativeInt4, NativeInt8, NativeW4A8, NativeW8A8
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack
from pdq_tui.engine.formats.packed import Spec
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.native_forms import given, word_of
from pdq_tui.engine.prompt_layer import PromptLayer
from pdq_tui.engine.staged import StagedArm, StagedModel
from tests.engine.families import save_family
from tests.engine.test_model_layer_native import FORMS
from tests.engine.test_model_native import library  # noqa: F401 - the fixture builds and loads the kernels
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("library")

Make = Callable[..., StagedModel]


@pytest.fixture
def make(load_tiny) -> Make:
    def build(path: Path, dtype: torch.dtype | None = None, how: str = "auto", rows: int = 0) -> StagedModel:
        model, masters = load_tiny(path, dtype)
        return StagedModel(
            model,
            masters,
            Cpu(),
            budget_bytes=None,
            kernels=load_kernels("cpu"),
            layers=how,
            prefill_rows=rows,
        )

    return build


def whole(text: str, kv: str = "", keep: str = "") -> object:
    """A policy with one format in both stages."""
    return parse_policy(
        f'schema = 1\nname = "x"\nstorage = "uniform"\n[prefill]\n{text}\n[decode]\n{text}\n{kv}\n{keep}\n',
        "x.toml",
    )


def both(
    make: Make,
    path: Path,
    what: object,
    batch: int = 1,
    length: int = 50,
    dtype: torch.dtype | None = None,
    cut: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompt and of three tokens after it [4, B, V], with our layers and with the modules; the tokens are the
    modules' in both."""
    ids, pad = ids_of(batch, length), torch.arange(batch) * 3 if batch > 1 else None
    tokens, wanted = run(make(path, dtype, "eager").apply(what, rows=(batch, batch * length)), ids, 4, pad)
    arm = make(path, dtype, rows=cut).apply(what, rows=(batch, batch * length))
    cover = arm.coverage["prefill"]
    assert (cover.runner, cover.runner_reason) == ("native", None)
    assert len(ours(arm, batch * length, batch)) == 2
    generation = arm.start(batch, length + 4, pad)
    logits = [generation.prefill(ids)]
    assert (generation.pieces > 1) == (0 < cut < batch * length)
    generation.handoff()
    logits += [generation.step(token) for token in tokens.t()[:-1]]
    return torch.stack(logits), wanted


def ours(arm: StagedArm, rows: int, batch: int) -> list[PromptLayer]:
    model = arm.view("prefill", rows, batch).model
    return [m for m in model.modules() if isinstance(m, PromptLayer)]


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen2-sliding", "qwen3", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_family_in_float32(family, batch, make, tmp_path) -> None:
    """A window of eight: all but the last positions of a sliding layer are gone when decode begins."""
    got, wanted = both(
        make, save_family(family, tmp_path), whole('weights = "bf16"'), batch, dtype=torch.float32
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "nested"])
def test_every_form_in_bf16(form, make, tmp_path) -> None:
    got, wanted = both(make, save_family("qwen3", tmp_path), whole(FORMS[form]), dtype=torch.bfloat16)
    assert apart(got, wanted) < (0.06 if form in ("w8a8", "w4a8") else 0.03)


def test_a_form_that_only_widens_is_called_as_it_is(make, tmp_path) -> None:
    """nested16's bf16 side is a dense product from scratch memory."""
    text = 'schema = 1\nname = "x"\nstorage = "nested"\n[prefill]\nweights = "nested16"\n[decode]\nweights = "int8"\n'
    got, wanted = both(
        make, save_family("llama", tmp_path), parse_policy(text, "x.toml"), dtype=torch.bfloat16
    )
    assert apart(got, wanted) < 0.03


def test_matrices_of_several_kinds_in_one_layer(make, tmp_path) -> None:
    keep = '[[keep]]\nmodules = ["*self_attn.v_proj*", "*layers.1.mlp.up_proj*", "*layers.0.mlp.down_proj*"]'
    path = save_family("llama-bias", tmp_path)
    got, wanted = both(make, path, whole(FORMS["w8a8"], keep=keep), 2, dtype=torch.bfloat16)
    assert apart(got, wanted) < 0.06


@pytest.mark.parametrize(
    "kv",
    [
        '[kv]\nprefill = "int8"\ndecode = "int8"',
        '[kv]\nprefill = "int4"\ndecode = "int4"',
        '[kv]\nprefill = "bf16"\ndecode = "int8"\nconvert = "handoff"\nkeys = "channel"',
    ],
)
@pytest.mark.parametrize("cut", [0, 20])
def test_every_cache_and_a_prompt_in_pieces(kv, cut, make, tmp_path) -> None:
    got, wanted = both(make, save_family("mistral", tmp_path), whole(FORMS["int8"], kv), cut=cut)
    # A number that lies between two steps of the format may fall to the other side.
    assert apart(got, wanted) < (0.03 if "int4" in kv else 0.015)


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_a_prompt_in_pieces_in_float32(family, make, tmp_path) -> None:
    got, wanted = both(
        make, save_family(family, tmp_path), whole('weights = "bf16"'), 2, dtype=torch.float32, cut=30
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)


def test_one_view_serves_prompts_of_every_length(make, tmp_path) -> None:
    arm = make(save_family("llama", tmp_path)).apply(whole(FORMS["int8"]), rows=(1, 40, 50, 60))
    views = {id(arm.view("prefill", rows, 1)) for rows in (40, 50, 60)}
    assert len(views) == 1


def test_another_family_runs_its_modules_and_the_reason_is_said(make, tmp_path) -> None:
    cover = make(save_family("gemma", tmp_path)).apply(whole(FORMS["int8"]), rows=(1, 40)).coverage["prefill"]
    assert (cover.runner, cover.runner_reason) == (
        "eager",
        "no call of our own for layers of GemmaDecoderLayer",
    )


def test_layers_that_compute_something_else_are_not_used(make, tmp_path, monkeypatch) -> None:
    real = PromptLayer.forward
    monkeypatch.setattr(PromptLayer, "forward", lambda self, *a, **k: real(self, *a, **k) * 1.05)
    arm = make(save_family("llama", tmp_path)).apply(whole(FORMS["int8"]), rows=(1, 40))
    cover = arm.coverage["prefill"]
    assert cover.runner == "eager" and "layer 0 compiled differs from its modules" in str(cover.runner_reason)
    assert ours(arm, 40, 1) == []


def test_layers_that_do_not_look_at_the_mask_are_not_used(make, tmp_path, monkeypatch) -> None:
    real = PromptLayer.forward
    monkeypatch.setattr(
        PromptLayer, "forward", lambda self, *a, **k: real(self, *a, **{**k, "attention_mask": None})
    )
    cover = make(save_family("llama", tmp_path)).apply(whole(FORMS["int8"]), rows=(1, 40)).coverage["prefill"]
    assert cover.runner == "eager" and "differ" in str(cover.runner_reason)


@pytest.mark.parametrize(("family", "positions"), [("gemma", 256), ("gpt2", 64)])
def test_another_kind_is_no_fallback_and_is_not_tried(family, positions, make, tmp_path) -> None:
    """GPT-2 has fewer positions than a trial would take."""
    staged = make(save_family(family, tmp_path))
    assert staged.max_positions in (positions, None)
    arm = staged.apply(whole(FORMS["int8"]), rows=(1, 40), hard=True)
    assert arm.coverage["prefill"].runner == "eager"
    assert "no call of our own" in str(arm.coverage["prefill"].runner_reason)


# -- the operators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [8, 31, 64, 576])
def test_norms_and_sums_are_those_of_float64(dtype, n) -> None:
    generator = torch.Generator().manual_seed(n)
    x, other, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((5, 7, n), (5, 7, n), (n,)))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1 / 128, "atol": 1e-2}
    ops = torch.ops.pdq_native

    def normed(t: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(t.double(), (n,), weight.double(), 1e-6).to(dtype)

    torch.testing.assert_close(ops.norm(x, weight, 1e-6), normed(x), **tolerance)
    state = x.clone()
    got = ops.add_norm(state, other, weight, 1e-6)
    assert torch.equal(state, x + other)
    torch.testing.assert_close(got, normed(x + other), **tolerance)
    ops.add(state, other)
    assert torch.equal(state, x + other + other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("B", "turns", "D"), [(2, 1, 64), (2, 2, 6), (1, 1, 32)])
def test_heads_are_turned_by_their_position(dtype, normed, B, turns, D) -> None:
    generator = torch.Generator().manual_seed(D)
    x = torch.randn(B, 5, 3 * D, generator=generator).to(dtype)
    cos, sin = torch.randn(2, turns, 5, D, generator=generator).to(dtype)
    weight = torch.randn(D, generator=generator).to(dtype) if normed else x.new_empty(0)
    heads = x.double().view(B, 5, 3, D)
    if normed:
        heads = F.rms_norm(heads, (D,), weight.double(), 1e-6).to(dtype).double()
    halves = torch.cat((-heads[..., D // 2 :], heads[..., : D // 2]), -1)
    wanted = heads * cos.double()[:, :, None] + halves * sin.double()[:, :, None]
    got = x.clone()
    torch.ops.pdq_native.turn(got, cos, sin, weight, 1e-6)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1 / 64, "atol": 2e-2}
    torch.testing.assert_close(got.view(B, 5, 3, D), wanted.to(dtype), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_silu_also_far_out(dtype) -> None:
    gate = torch.cat((torch.linspace(-100, 100, 1000), torch.tensor([0.0, -0.0, 1e30, -1e30]).repeat(2))).to(
        dtype
    )
    up = torch.linspace(-2, 2, len(gate)).to(dtype)
    wanted = (F.silu(gate.double()) * up.double()).to(dtype)
    got = gate.clone()[None]
    torch.ops.pdq_native.gated(got, up[None])
    torch.testing.assert_close(got[0], wanted, rtol=1e-5 if dtype == torch.float32 else 1 / 128, atol=1e-6)
    bad = torch.full((1, 8), float("nan"), dtype=dtype)
    torch.ops.pdq_native.gated(bad, torch.ones_like(bad))
    assert bad.isnan().all()


@pytest.mark.parametrize("rows", [1, 9, 17, 25, 200])
@pytest.mark.parametrize("kind", [NativeInt8, NativeW8A8, NativeInt4, NativeW4A8])
def test_several_matrices_at_once_are_what_each_is_alone(kind, rows) -> None:
    op = next(name for name, made in OPS.items() if made is kind)
    table = load_kernels("cpu")
    candidate = next(c for c in table.candidates if c.op == op)
    fmt = parse_policy(
        'schema = 1\nname = "x"\n[prefill]\n{0}\n[decode]\n{0}\n'.format(
            {
                NativeInt8: FORMS["int8"],
                NativeW8A8: FORMS["w8a8"],
                NativeInt4: FORMS["int4"],
                NativeW4A8: FORMS["w4a8"],
            }[kind]
        ),
        "x.toml",
    ).prefill.format
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 100 if kind in (NativeInt8, NativeW8A8) else 128, generator=generator).bfloat16()
    made = []
    for i, N in enumerate((40, 33, 96)):
        master = torch.randn(N, x.shape[1], generator=generator).bfloat16()
        bias = torch.randn(N, generator=generator).bfloat16() if i != 1 else None
        K = x.shape[1]
        spec = Spec(fmt, candidate.layout, N, K, -(-K // native.BLOCK) * native.BLOCK, master.dtype)
        stored = pack(spec, master, torch.device("cpu"), lambda: False)
        made.append(kind(stored, bias, Scratch()))
    outs = [torch.full((rows, m.out_features), float("nan")).bfloat16() for m in made]
    tensors, numbers = given(made, x.new_empty(0))
    getattr(torch.ops.pdq_native, f"products_{word_of(made)}_3")(x, tensors, numbers, outs)
    for out, matrix in zip(outs, made, strict=True):
        assert torch.equal(out, matrix(x))
