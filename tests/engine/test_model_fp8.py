"""FP8 E4M3: weight-only on any device, W8A8 where the hardware has it, and a reason elsewhere."""

import pytest
import torch

from pdq_tui.core.catalog import find_policy, policies
from pdq_tui.core.formats import Format, of_label, wrong_with
from pdq_tui.core.kernels import Capability, load_kernels
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.predict import predict
from pdq_tui.core.shapes import read_shapes
from pdq_tui.engine.formats import fp8
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.plan import Planner
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UnfitError
from tests.engine.test_model_staged import Cpu, ids_of, run

CPU = torch.device("cpu")
W8A8_FP8 = Policy("w8a8-fp8", StagePolicy("fp8", "fp8"), StagePolicy("fp8", "fp8"))


def packed_of(N: int, K: int, dtype: torch.dtype) -> Packed:
    return pack(Spec(Format("fp8"), "fp8", N, K, K, dtype), torch.randn(N, K).to(dtype), CPU, lambda: False)


def dequantized(packed: Packed) -> torch.Tensor:
    """float64, from the bits: sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 holds subnormals."""
    assert packed.scales is not None
    bits = packed.weight.view(torch.uint8).long()
    sign = 1.0 - 2.0 * (bits >> 7).double()
    exponent, mantissa = (bits >> 3 & 15).double(), (bits & 7).double()
    size = torch.where(exponent > 0, (1 + mantissa / 8) * 2 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return sign * size * packed.scales.double()[:, None]


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("N", "K"), [(80, 96), (33, 65)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("op", list(fp8.LINEARS))
def test_fp8_matches_its_dequantized_weights(op, dtype, N, K, rows) -> None:
    torch.manual_seed(rows)
    packed = packed_of(N, K, dtype)
    assert packed.nbytes == packed.spec.nbytes == N * K + 4 * N
    bias = torch.randn(N).to(dtype)
    scratch = Scratch()
    scratch.take((4 * N * K,), torch.float32, CPU).fill_(float("nan"))  # what nobody wrote must not be read
    scratch.take((4 * N * K,), dtype, CPU).fill_(float("nan"))
    layer = OPS[op](packed, bias, scratch)
    weight = dequantized(packed)
    for _ in range(2):
        x = torch.randn(2, rows, K).to(dtype)
        taken = x.double()
        if op.startswith("w8a8"):
            q, scale = fp8.quantize_rows(x.reshape(-1, K))
            taken = (q.double() * scale.double()).view_as(taken)
        wanted = taken @ weight.t() + bias.double()
        with torch.inference_mode():
            got = layer(x)
        assert got.dtype == dtype and got.shape == (2, rows, N)
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("op", ["fp8-dequantize", "fp8-dequantize-float32"])
def test_a_scale_a_group_multiplies_its_columns_alone(op, group, dtype) -> None:
    """Groups of very different size: one scale a channel would lose the small ones."""
    torch.manual_seed(group)
    N, K = 48, 192
    master = (torch.randn(N, K) * torch.logspace(-3, 0, K // 32).repeat_interleave(32)).to(dtype)
    fmt = Format("fp8", group_size=group)
    packed = pack(Spec(fmt, "fp8", N, K, K, dtype), master, CPU, lambda: False)
    assert packed.scales is not None and packed.scales.shape == (N, K // group)
    assert packed.nbytes == packed.spec.nbytes == N * K + 4 * N * K // group
    plain = Packed(packed.spec, packed.weight, torch.ones(N))
    weight = dequantized(plain) * packed.scales.double().repeat_interleave(group, 1)
    relative = (weight - master.double()).abs() / master.double().abs().clamp_min(1e-6)
    assert float(relative.median()) < 2**-4
    x = torch.randn(3, K).to(dtype)
    scratch = Scratch()
    scratch.take((4 * N * K,), torch.float32, CPU).fill_(float("nan"))
    with torch.inference_mode():
        got = OPS[op](packed, None, scratch)(x)
    wanted = x.double() @ weight.t()
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]


def test_groups_are_legal_for_fp8_weights_alone_and_not_needed() -> None:
    assert of_label("fp8-g128") == Format("fp8", group_size=128) and of_label("fp8") == Format("fp8")
    assert wrong_with(Format("fp8", group_size=128)) is None
    for fmt, words in (
        (Format("fp8", group_size=100), "100 is not a legal group size"),
        (Format("fp8", "fp8", 128), "fp8 activations take a scale per channel"),
    ):
        wrong = wrong_with(fmt)
        assert wrong is not None and words in wrong[1]


def test_every_number_is_widened_to_itself() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    packed = Packed(Spec(Format("fp8"), "fp8", 2, 128, 128, torch.float32), every, torch.ones(2))
    layer = fp8.Fp8DequantizeFloat32(packed, None, Scratch())
    got, wanted = layer.dense(torch.float32) * fp8.BIAS, every.float()
    number = torch.isfinite(wanted)
    assert int(number.sum()) == 254 and torch.equal(got[number], wanted[number])


def test_packing_rounds_to_nearest() -> None:
    torch.manual_seed(0)
    master = torch.randn(64, 96)
    packed = pack(Spec(Format("fp8"), "fp8", 64, 96, 96, torch.float32), master, CPU, lambda: False)
    error = (dequantized(packed) - master.double()).abs()
    # half a step of 3 mantissa bits, or of the subnormals
    step = torch.maximum(master.double().abs() / 16, packed.scales.double()[:, None] * 2.0**-10)
    assert (error <= step * 1.001).all()
    assert torch.equal(packed.scales, master.abs().amax(1) / 448)


def test_Q10_a_weight_that_is_not_finite_shows() -> None:
    for bad in (float("nan"), float("inf")):
        master = torch.randn(64, 64)
        master[3, 5] = bad
        packed = pack(Spec(Format("fp8"), "fp8", 64, 64, 64, torch.float32), master, CPU, lambda: False)
        out = OPS["fp8-dequantize-float32"](packed, None, Scratch())(torch.randn(2, 64))
        assert not torch.isfinite(out[:, 3]).any()
        assert torch.isfinite(out[:, :3]).all()


def test_one_row_does_not_disturb_another_under_w8a8() -> None:
    layer = OPS["w8a8-fp8-scaled_mm"](packed_of(64, 64, torch.float32), None, Scratch())
    x = torch.randn(2, 64)
    x[1] *= 1e4
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=1e-6, atol=1e-6)


@pytest.fixture
def make(load_tiny):
    def build(path, dtype=None) -> StagedModel:
        model, masters = load_tiny(path, dtype)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))

    return build


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_Q02_logits_agree_with_a_model_of_dequantized_weights(name, make, load_tiny, request) -> None:
    path = request.getfixturevalue(name)
    staged = make(path)
    arm = staged.apply(find_policy("fp8"), rows=[1, 12])
    reference, _ = load_tiny(path)
    for layer in staged.census.layers:
        if not layer.head:
            weight = dequantized(staged.store.get((layer.name, "fp8-fp8")))
            target = reference.get_parameter(layer.parameter)
            target.data.copy_(weight.t() if layer.conv1d else weight)
    ids = ids_of(1, 12)
    tokens, ours = run(arm, ids, 4)
    with torch.inference_mode():
        wanted = reference(torch.cat([ids, tokens[:, :-1]], 1)).logits[:, 11:].transpose(0, 1)
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=2e-3)
    assert arm.coverage["decode"].converted_parameters > 0.5 * arm.coverage["decode"].total_parameters
    n = sum(layer.parameters for layer in staged.census.layers if not layer.head)
    rows = sum(layer.N for layer in staged.census.layers if not layer.head)
    assert arm.weights.stored_bytes == staged.store.packed_bytes == n + 4 * rows


@pytest.mark.parametrize("sm", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 1), None])
def test_Q04_what_the_hardware_lacks_is_refused_before_anything_runs(sm, make, tiny_llama_bf16) -> None:
    staged = make(tiny_llama_bf16)
    kind = "cpu" if sm is None else "cuda"
    table, capability = load_kernels(kind), Capability(kind, ("bitsandbytes",), sm)
    planner = Planner(staged.census, torch.bfloat16, table, capability, lambda *_: {})
    shapes = read_shapes(tiny_llama_bf16)

    def told(policy: Policy) -> None:
        planner.placements(policy, "prefill", 8, 1)
        planner.placements(policy, "decode", 1, 1)
        predict(policy, shapes, table, 8, 1, capability)

    if sm is not None and sm >= (8, 9):
        told(W8A8_FP8)
    else:
        has = "none" if sm is None else f"{sm[0]}.{sm[1]}"
        with pytest.raises(
            UnfitError, match=f"needs a GPU of compute capability 8.9 or later, this device has {has}"
        ):
            planner.placements(W8A8_FP8, "prefill", 8, 1)
        with pytest.raises(
            UnfitError, match=f"needs a GPU of compute capability 8.9 or later, this device has {has}"
        ):
            predict(W8A8_FP8, shapes, table, 8, 1, capability)
        assert "8.9" in str(table.refusal(W8A8_FP8.prefill.format, "bf16", capability))
    for entry in policies().values():
        assert entry.policy is not None, entry.error
        if entry.policy.prefill.format.label.startswith("w4a8"):
            own = (
                "needs this project's own CPU kernels"
                if sm is None
                else "no kernel on cuda multiplies int4 weights"
            )
            with pytest.raises(UnfitError, match=own):
                planner.placements(entry.policy, "prefill", 8, 1)
            with pytest.raises(UnfitError, match=own):
                predict(entry.policy, shapes, table, 8, 1, capability)
            continue
        told(entry.policy)  # weight-only fp8 among them: there it is storage


def test_Q04_weights_are_never_touched_for_a_policy_that_is_refused(make, tiny_llama) -> None:
    staged = make(tiny_llama)
    with pytest.raises(UnfitError, match=r"w8a8-fp8 in prefill does not run on this device"):
        staged.apply(W8A8_FP8, rows=[1, 8])
    assert staged.store.masters.taken == []
