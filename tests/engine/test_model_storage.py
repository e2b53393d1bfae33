"""Storage classes: which bytes the two stages of a policy read, that they are the same ones where they are said to be, and
what each stage makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import Format, own_bytes, packed_bytes, stored_parts
from pdq_tui.core.kernels import OPS as OP_NAMES
from pdq_tui.core.kernels import WIDENING, Capability, Use, load_kernels
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.engine import native
from pdq_tui.engine.formats.linears import quantize_rows
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack_all
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UnfitError
from tests.engine.test_model_native import error, stored
from tests.engine.test_model_native import library as library  # builds and loads our own kernels
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("shared_home")

CPU = torch.device("cpu")
INT4 = Format("int4", "model", 64)
W4A8 = Format("int4", "int8", 64)
NESTED = Format("nested16")


def packed(fmt: Format, layout: str, master: torch.Tensor) -> Packed:
    N, K = master.shape
    return pack_all(Spec(fmt, layout, N, K, K, master.dtype), master, CPU, lambda: False)


def nested_weights(p: Packed) -> torch.Tensor:
    """float64 [N, K] of what the two bytes say."""
    assert p.base is not None and p.base.scales is not None
    return (p.base.weight.double() + p.weight.double() / 256) * p.base.scales.double()[:, None]


@pytest.fixture
def make(load_tiny):
    def build(path: Path) -> StagedModel:
        model, masters = load_tiny(path)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))

    return build


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_residual_byte_makes_sixteen_bits_of_eight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    master = torch.randn(40, 192).to(dtype)
    master[3] *= 1e-6
    master[4] = 0
    p = packed(NESTED, "nested16", master)
    assert p.base is not None and p.base.scales is not None
    alone = packed(Format("int8"), "int8", master)
    assert alone.scales is not None
    assert torch.equal(p.base.weight, alone.weight), "the first byte is the int8 policy's own"
    step = p.base.scales.double()[:, None] / 256
    # Half a step, and where the residual's upper end is clamped or the int8 scale was rounded down, a whole one.
    assert float(((nested_weights(p) - master.double()).abs() / step).max()) < (
        130 if dtype == torch.bfloat16 else 1.01
    )
    assert error(nested_weights(p), master.double()) < 1e-4
    assert error(alone.weight.double() * alone.scales.double()[:, None], master.double()) > 5e-3


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("shape", [(48, 64), (33, 192), (130, 576)])
def test_nested_weights_are_multiplied_as_both_bytes_say(rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(rows)
    x, master = torch.randn(rows, shape[1]).bfloat16(), torch.randn(*shape).bfloat16()
    p = packed(NESTED, "nested16", master)
    wanted = x.double() @ nested_weights(p).t()
    for op in (op for op, layouts in OP_NAMES.items() if layouts == ("nested16",)):
        got = OPS[op](p, None, Scratch())(x)
        assert got.dtype == x.dtype and error(got, wanted) < 4e-3, op


@pytest.mark.parametrize("rows", [1, 4, 7, 9, 12, 13, 64])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_W4A8_multiplies_the_nibbles_with_rounded_activations(rows: int, group: int) -> None:
    torch.manual_seed(rows + group)
    x, master = torch.randn(rows, 384).bfloat16(), torch.randn(70, 384).bfloat16()
    p = packed(Format("int4", "int8", group), "int4-rows", master)
    q, scale = quantize_rows(x)
    got = OPS["native-w4a8"](p, None, Scratch())(x)
    assert error(got, (q.double() * scale.double()) @ stored(p).t()) < 3e-3
    assert error(got, x.double() @ stored(p).t()) > 4e-3, "they were rounded"
    x[0, 5] = float("nan")
    out = OPS["native-w4a8"](p, None, Scratch())(x)
    assert not torch.isfinite(out[0]).any() and torch.isfinite(out[1:]).all()


@pytest.mark.parametrize("op", ["native-int4-dequantize", "native-int4-dequantize-float32"])
@pytest.mark.parametrize("group", [32, 64, 256])
def test_our_own_4_bit_layout_is_dequantized(op: str, group: int) -> None:
    torch.manual_seed(group)
    master = torch.randn(70, 512).bfloat16()
    p = packed(Format("int4", "model", group), "int4-rows", master)
    scratch = Scratch()
    layer = OPS[op](p, None, scratch)
    dense = torch.full((70, 512), float("nan"), dtype=layer.wide or torch.bfloat16)
    layer.widen(dense)
    assert error(dense, stored(p)) < (2.5e-3 if dense.dtype == torch.bfloat16 else 1e-6)
    x = torch.randn(20, 512).bfloat16()
    assert error(layer(x), x.double() @ stored(p).t()) < 5e-3
    assert scratch.nbytes == dense.nbytes, "one layer, and nothing beside it"


def test_operators_that_widen_are_those_that_use_the_scratch_tensor() -> None:
    for op, kind in OPS.items():
        if op.startswith("bnb4"):
            continue  # the package allocates the dense matrix itself
        assert kind.uses_scratch == (op in WIDENING), op


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_parts_add_up() -> None:
    for fmt in (NESTED, INT4, W4A8, Format("int8"), Format()):
        parts = sum(own_bytes(part, 48, 192, 2) for part, _ in stored_parts(fmt))
        assert parts == packed_bytes(fmt, 48, 192, 2), fmt
    assert packed_bytes(NESTED, 48, 192, 2) == 2 * 48 * 192 + 48 * 2


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("w8a8-prefill-int8-decode", "w8a8"),
        ("w4a8-prefill-int4-decode", "int4"),
        ("nested16-prefill-int8-decode", "nested16"),
        ("int8-prefill-nested16-decode", "nested16"),
        ("transient-int4", "int4"),
    ],
)
def test_T12_one_set_of_bytes_serves_both_stages(name: str, layers: str, make, tiny_llama_bf16: Path) -> None:
    staged = make(tiny_llama_bf16)
    policy = find_policy(name)
    before = staged.store.packed_bytes
    arm = staged.apply(policy, rows=[1, 12])
    weights = arm.weights
    assert weights.extra_bytes == 0 and weights.stored_bytes == max(
        weights.prefill_bytes, weights.decode_bytes
    )
    assert staged.store.packed_bytes - before == sum(
        staged.store.get(key).nbytes for key in arm.keys if staged.store.get(key).ours
    )
    tensors: dict[str, set[int]] = {}
    for stage in ("prefill", "decode"):
        for layer_name, module in arm.view(stage, 12 if stage == "prefill" else 1, 1).model.named_modules():
            if "proj" in layer_name and hasattr(module, "weight"):
                for tensor in (module.weight, getattr(module, "base_weight", None)):
                    if tensor is not None:
                        tensors.setdefault(layer_name, set()).add(tensor.data_ptr())
    assert {len(found) for found in tensors.values()} == {2 if layers == "nested16" else 1}, "no second copy"
    _, logits = run(arm, ids_of(1, 12), 4)
    assert torch.isfinite(logits).all()


def test_nested_policies_add_a_residual_to_the_bytes_of_int8(make, tiny_llama_bf16: Path) -> None:
    staged = make(tiny_llama_bf16)
    int8 = staged.apply(find_policy("int8"), rows=[1, 12])
    had = staged.store.packed_bytes
    nested = staged.apply(find_policy("nested16-prefill-int8-decode"), rows=[1, 12])
    added = staged.store.packed_bytes - had
    converted = nested.coverage["prefill"].converted_parameters
    assert added == converted, "one byte a weight; the int8 bytes were there"
    assert nested.weights.decode_bytes == int8.weights.decode_bytes
    bf16 = staged.apply(find_policy("bf16"), rows=[1, 12]).weights
    assert nested.weights.stored_bytes <= 1.02 * bf16.stored_bytes


def test_a_transient_stage_needs_one_layer_beside_its_4_bits(make, tiny_llama_bf16: Path) -> None:
    staged = make(tiny_llama_bf16)
    arm = staged.apply(find_policy("transient-int4"), rows=[1, 12])
    assert set(arm.coverage["prefill"].kernels) & {
        "native-int4-dequantize", "native-int4-float32", "int4-dequantize", "int4-dequantize-float32",
    }  # fmt: skip
    run(arm, ids_of(1, 12), 3)
    largest = max(m.parameters for m in staged.census.layers if not m.head)
    assert arm.weights.scratch_bytes in (2 * largest, 4 * largest)
    assert staged.scratch.nbytes == arm.weights.scratch_bytes


def test_each_stage_of_a_nested_policy_is_that_of_its_uniform_one(make, tiny_llama: Path) -> None:
    staged, ids = make(tiny_llama), ids_of(1, 12)  # in float32: rounding to bf16 would hide the residual

    def first(name: str) -> torch.Tensor:
        return run(staged.apply(find_policy(name), rows=[1, 12]), ids, 2)[1][0].float()

    int8, dense = first("int8"), first("bf16")
    nested, coarse = first("nested16-prefill-int8-decode"), first("int8-prefill-nested16-decode")
    torch.testing.assert_close(coarse, int8, rtol=0, atol=0)
    assert (nested - dense).norm() < 0.02 * (int8 - dense).norm()


def test_a_transient_prompt_multiplies_what_int4_stores(make, tiny_llama_bf16: Path) -> None:
    staged, ids = make(tiny_llama_bf16), ids_of(1, 12)
    uniform = run(staged.apply(find_policy("int4"), rows=[1, 12]), ids, 2)[1][0].float()
    arm = staged.apply(find_policy("transient-int4"), rows=[1, 12])
    transient = run(arm, ids, 2)[1][0].float()
    dense = run(staged.apply(find_policy("bf16"), rows=[1, 12]), ids, 2)[1][0].float()
    assert (transient - uniform).norm() < 0.2 * (uniform - dense).norm()
    assert arm.resident, "the bytes are those of int4"


# -- layouts for both stages together -------------------------------------------------------------------------------------

NO_OWN = Capability("cpu", ("avx2", "avx512", "bf16", "vnni", "avx512bf16"))
OWN = Capability("cpu", ("avx2", "avx512", "bf16", "vnni", "avx512bf16", "native"))
AMX = Capability("cpu", (*OWN.features, "amx"))


@pytest.mark.parametrize("able", [OWN, AMX], ids=["own", "amx"])
def test_both_stages_find_the_layout_that_both_can_read(able: Capability) -> None:
    table = load_kernels("cpu")
    for one, other in (
        (Use(W4A8), Use(INT4)),
        (Use(INT4, widened=True), Use(INT4)),
        (Use(Format("int8", "int8")), Use(Format("int8"))),
    ):
        orders = [table.layouts(a, 576, 1536, "bf16", able, b) for a, b in ((one, other), (other, one))]
        assert orders[0] == orders[1] != []
        for use, beside, rows in ((one, other, 512), (other, one, 1)):
            choice = table.place(use, 576, 1536, rows, "bf16", able, beside=beside)
            assert choice.candidate is not None and choice.candidate.layout == orders[0][0]
            assert choice.candidate.widens or not use.widened


def test_where_no_kernel_reads_one_layout_for_both_it_is_refused_with_the_reason() -> None:
    table = load_kernels("cpu")
    choice = table.place(Use(W4A8), 576, 1536, 512, "bf16", NO_OWN, beside=Use(INT4))
    assert choice.candidate is None and "native-w4a8-vnni needs this project's own CPU kernels" in " ".join(
        choice.reasons
    )
    cuda = load_kernels("cuda")
    hopper = Capability("cuda", (), (9, 0))
    assert cuda.place(Use(W4A8), 4096, 4096, 512, "bf16", hopper, beside=Use(INT4)).candidate is None
    both = cuda.place(Use(INT4, widened=True), 4096, 4096, 512, "bf16", hopper, beside=Use(INT4))
    assert both.candidate is not None and both.candidate.layout == "int4-plain"


def test_a_shared_policy_without_its_kernels_is_refused_by_the_engine(
    make, tiny_llama_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native._State, "path", None)
    staged = make(tiny_llama_bf16)
    with pytest.raises(UnfitError, match="w4a8-g64 in prefill does not run on this device"):
        staged.plan(find_policy("w4a8-prefill-int4-decode"), [1, 12])


def test_a_transient_stage_keeps_its_class_when_the_other_half_changes_alike() -> None:
    policy = find_policy("transient-int4")
    assert policy.natural_name == "transient-int4-g64"
    assert policy.with_stage("decode", StagePolicy("int8")).storage == "dual"
    assert Policy("x", StagePolicy("nested16"), StagePolicy("int8", "int8")).staged
