"""Decoder layers as one call of our own: the modules' logits for every family, form, KV format and padding that it takes,
and the reason where it does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import parse_policy
from pdq_tui.engine import decoder_native, layers
from pdq_tui.engine.formats import native as native_forms
from pdq_tui.engine.layer_native import NativeLayer
from pdq_tui.engine.llama_kind import CLASSES, is_transformers_own
from pdq_tui.engine.staged import StagedArm, StagedModel
from tests.engine.families import save_family
from tests.engine.test_model_native import library  # noqa: F401 - the fixture builds and loads the kernels
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("library")

Make = Callable[..., StagedModel]


@pytest.fixture
def make(load_tiny) -> Make:
    """Models whose every matrix is multiplied by our own kernels, whichever would be chosen on this machine."""
    table = load_kernels("cpu")
    candidates = [
        # These multiply float32 as well, where others are preferred: references are sharper in it.
        msgspec.structs.replace(c, dtypes=("bf16", "fp32"))
        if c.op in ("native-int8", "native-w8a8", "native-dense")
        else c
        for c in table.candidates
        if c.op in native_forms.LINEARS or c.layout == "dense"
    ]
    ours = msgspec.structs.replace(table, candidates=tuple(candidates))

    def build(path: Path, dtype: torch.dtype | None = None, how: str = "auto") -> StagedModel:
        model, masters = load_tiny(path, dtype)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=ours, layers=how)

    return build


def policy(decode: str, kv: str = "", keep: str = "") -> object:
    text = f"""
        schema = 1
        name = "x"
        storage = "{"nested" if "nested16" in decode else "uniform"}"
        [prefill]
        {'weights = "int8"' if "nested16" in decode else decode}
        [decode]
        {decode}
        {kv}
        {keep}
    """
    return parse_policy("\n".join(line.strip() for line in text.splitlines()), "x.toml")


FORMS = {
    "dense": 'weights = "bf16"',
    "int8": 'weights = "int8"',
    "w8a8": 'weights = "int8"\nactivations = "int8"',
    "int4": 'weights = "int4"\ngroup_size = 32',
    "int4-64": 'weights = "int4"\ngroup_size = 64',
    "w4a8": 'weights = "int4"\ngroup_size = 32\nactivations = "int8"',
    "nested": 'weights = "nested16"',
}


def both(
    make: Make, path: Path, what: object, rows: int = 1, dtype: torch.dtype | None = None, new: int = 6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [new, B, V] with our layers, and with the modules, of the same kernels."""
    ids, pad = ids_of(rows, 9), torch.arange(rows) if rows > 1 else None
    tokens, wanted = run(make(path, dtype, "eager").apply(what, rows=(rows, 9 * rows)), ids, new, pad)
    arm = make(path, dtype).apply(what, rows=(rows, 9 * rows))
    cover = arm.coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("native", None)
    inside = [m for m in arm.view("decode", rows, rows).model.modules() if isinstance(m, NativeLayer)]
    assert len(inside) == 2
    return forced(arm, ids, tokens, pad), wanted


def forced(arm: StagedArm, ids: torch.Tensor, tokens: torch.Tensor, pad: torch.Tensor | None) -> torch.Tensor:
    """Logits [new, B, V] along ``tokens`` [B, new]: two that are close may not part at a token."""
    generation = arm.start(ids.shape[0], ids.shape[1] + tokens.shape[1], pad)
    logits = [generation.prefill(ids)]
    generation.handoff()
    logits += [generation.step(token) for token in tokens.t()[:-1]]
    return torch.stack(logits)


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen2-sliding", "qwen3", "mistral"])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_family_in_float32(family, rows, make, tmp_path) -> None:
    """Nine positions and a window of eight: the sliding layers wrap around while they decode."""
    got, wanted = both(make, save_family(family, tmp_path), policy(FORMS["dense"]), rows, torch.float32)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_bf16(form, make, tmp_path) -> None:
    path = save_family("qwen3", tmp_path)
    got, wanted = both(make, path, policy(FORMS[form]), dtype=torch.bfloat16)
    # The modules round between their operators, the call where a matrix takes it; what W8A8 and W4A8 round to the other side
    # is a step of 127.
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(error) < (0.05 if form in ("w8a8", "w4a8") else 0.03)


def test_forms_of_several_kinds_in_one_layer(make, tmp_path) -> None:
    keep = '[[keep]]\nmodules = ["*self_attn.v_proj*", "*layers.1.mlp.up_proj*"]'
    what = policy(FORMS["int8"], keep=keep)
    path = save_family("llama-bias", tmp_path)
    got, wanted = both(make, path, what, 2, torch.bfloat16)
    assert float((got.double() - wanted.double()).norm() / wanted.double().norm()) < 0.03


@pytest.mark.parametrize(
    "kv",
    [
        '[kv]\nprefill = "int8"\ndecode = "int8"',
        '[kv]\nprefill = "fp8"\ndecode = "fp8"',
        '[kv]\nprefill = "int4"\ndecode = "int4"',
        '[kv]\nprefill = "bf16"\ndecode = "int8"\nconvert = "handoff"\nkeys = "channel"',
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_every_kv_format(kv, rows, make, tmp_path) -> None:
    got, wanted = both(make, save_family("llama", tmp_path), policy(FORMS["int8"], kv), rows)
    # A number that lies between two steps of the format may fall to the other side.
    assert float((got - wanted).norm() / wanted.norm()) < (0.03 if "int4" in kv else 0.01)


def test_a_long_context_is_cut_into_pieces_for_the_threads(make, tmp_path) -> None:
    path = save_family("llama", tmp_path)
    what = policy(FORMS["dense"])
    ids = torch.randint(5, 90, (1, 250), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        wide = make(path)
        wide.max_positions = 1200
        arm, eager = wide.apply(what, rows=(1, 250)), make(path, how="eager").apply(what, rows=(1, 250))
        tokens, wanted = run(eager, ids, 6)
        got = forced(arm, ids, tokens, None)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)


def test_more_rows_than_it_is_for_are_compiled(make, tmp_path) -> None:
    arm = make(save_family("llama", tmp_path)).apply(policy(FORMS["int8"]), rows=(9, 81))
    cover = arm.coverage["decode"]
    assert cover.runner == "inductor" and "native-layer takes up to 8 rows" in str(cover.runner_reason)


def test_another_family_is_compiled_and_the_reason_said(make, tmp_path) -> None:
    arm = make(save_family("gemma", tmp_path)).apply(policy(FORMS["int8"]), rows=(1, 9))
    cover = arm.coverage["decode"]
    assert cover.runner == "inductor"
    assert cover.runner_reason == "no call of our own for layers of GemmaDecoderLayer"


def test_a_layer_that_computes_something_else_is_not_used(make, tmp_path, monkeypatch) -> None:
    real = NativeLayer.forward
    monkeypatch.setattr(NativeLayer, "forward", lambda self, *a, **k: real(self, *a, **k) * 1.05)
    staged = make(save_family("llama", tmp_path))
    arm = staged.apply(policy(FORMS["int8"]), rows=(1, 9))
    cover = arm.coverage["decode"]
    assert cover.runner == "inductor" and "layer 0 compiled differs from its modules" in str(
        cover.runner_reason
    )
    assert "forward" not in vars(arm.view("decode", 1, 1).model)


def test_layers_in_the_wrong_place_show_in_the_logits_and_the_step_is_given_back(
    make, tmp_path, monkeypatch
) -> None:
    real = layers._replace

    def swapped(model, places, stand_ins):
        if isinstance(stand_ins[0], NativeLayer):
            stand_ins = [stand_ins[1], stand_ins[0]]
        real(model, places, stand_ins)

    monkeypatch.setattr(layers, "_replace", swapped)
    arm = make(save_family("llama", tmp_path)).apply(policy(FORMS["int8"]), rows=(1, 9))
    cover = arm.coverage["decode"]
    assert cover.runner == "inductor" and "logits of compiled steps differ" in str(cover.runner_reason)
    assert "forward" not in vars(arm.view("decode", 1, 1).model)


def test_positions_that_depend_on_the_length_are_computed_at_each_step(make, tmp_path) -> None:
    arm = make(save_family("llama", tmp_path)).apply(policy(FORMS["int8"]), rows=(1, 9))
    step = vars(arm.view("decode", 1, 1).model)["forward"]
    assert isinstance(step, decoder_native.Decoder) and step._fixed
    _, fast = run(arm, ids_of(1, 9), 6)
    step._fixed = False
    _, slow = run(arm, ids_of(1, 9), 6)
    assert torch.equal(fast, slow)


def test_an_arm_that_is_let_go_takes_its_weights_along(make, tmp_path) -> None:
    """Without the collector: a switch of policies near the memory's end cannot wait for it."""
    arm = make(save_family("llama", tmp_path)).apply(policy(FORMS["int8"]), rows=(1, 9))
    model = weakref.ref(arm.view("decode", 1, 1).model)
    gc.collect()
    gc.disable()
    try:
        arm.drop()
        del arm
        assert model() is None
    finally:
        gc.enable()


def test_classes_of_a_checkpoints_own_code_are_not_taken_for_transformers() -> None:
    alike = type("LlamaDecoderLayer", (torch.nn.Module,), {"__module__": "transformers_modules.mine"})
    assert not is_transformers_own(alike(), CLASSES)
