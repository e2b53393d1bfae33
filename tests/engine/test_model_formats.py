"""Every kernel against its own dequantized weights in float64: fresh random inputs, all row counts, biases."""

import pytest
import torch

from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import OPS
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.formats.linears import LINEARS, quantize_rows
from pdq_tui.engine.formats.pack import pack, pack_all
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.unpack import Scratch, int4_cpu_transposed

CPU = torch.device("cpu")
CPU_OPS = [op for op in LINEARS if op != "int4-tinygemm"]


def spec_for(op: str, N: int, K: int, dtype: torch.dtype, group: int = 32, k: int | None = None) -> Spec:
    layout = OPS[op][0]
    weights = layout.split("-")[0]
    fmt = {
        "dense": Format(),
        "int8": Format("int8", "int8" if op.startswith("w8a8") else "model"),
        "int4": Format("int4", "model", group),
        "nested16": Format("nested16"),
    }[weights]
    return Spec(fmt, layout, N, K, k or K, dtype)


def never() -> bool:
    return False


def dequantized(packed: Packed) -> torch.Tensor:
    """float64 [N, K], from the packed bytes, by another road than the kernels'."""
    spec = packed.spec
    if spec.fmt.dense:
        return packed.weight.double()
    if packed.base is not None:
        assert packed.base.scales is not None
        whole = packed.base.weight.double() * 256 + packed.weight.double()
        return whole * (packed.base.scales.double()[:, None] / 256)
    assert packed.scales is not None
    if spec.fmt.weights == "int8":
        return packed.weight.double() * packed.scales.double()[:, None]
    if spec.layout == "int4-plain":
        q = torch.stack([packed.weight & 15, packed.weight >> 4], 2).reshape(spec.N, spec.k)
        scale, zero = (
            packed.scales[..., i].t().repeat_interleave(spec.fmt.group_size, 1).double() for i in (0, 1)
        )
        return ((q.double() - 8) * scale + zero)[:, : spec.K]
    # the CPU kernel itself on the unit matrix in float32 tells what it takes the weights for
    scales = packed.scales.float()
    eye = torch.eye(spec.k)
    rows = torch.ops.aten._weight_int4pack_mm_for_cpu(eye, packed.weight, spec.fmt.group_size, scales)
    return rows.t().double()[:, : spec.K]


@pytest.mark.parametrize("rows", [1, 8, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("op", CPU_OPS)
def test_linear_matches_its_dequantized_weights(op: str, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    N, K = 80, 96
    packed = pack_all(spec_for(op, N, K, dtype), torch.randn(N, K).to(dtype), CPU, never)
    bias = torch.randn(N).to(dtype)
    scratch = Scratch()
    scratch.take((4 * N * K,), torch.float32, CPU).fill_(float("nan"))  # what nobody wrote must not be read
    scratch.take((4 * N * K,), dtype, CPU).fill_(float("nan"))
    layer = LINEARS[op](packed, bias, scratch)
    weight = dequantized(packed)
    for _ in range(2):
        x = torch.randn(2, rows, K).to(dtype)
        taken = x.double()
        if op.startswith("w8a8"):
            q, scale = quantize_rows(x.reshape(-1, K))
            taken = (q.double() * scale.double()).view_as(taken)
        wanted = taken @ weight.t() + bias.double()
        with torch.inference_mode():
            got = layer(x)
        assert got.dtype == dtype and got.shape == (2, rows, N)
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("N", [16, 48, 64, 80, 144])
def test_int4_cpu_layout_unpacks_to_what_the_kernel_multiplies(N: int) -> None:
    torch.manual_seed(N)
    packed = pack(spec_for("int4pack-cpu", N, 64, torch.float32), torch.randn(N, 64), CPU, never)
    assert packed.scales is not None
    dense = int4_cpu_transposed(packed.weight, packed.scales, torch.float32, Scratch())
    torch.testing.assert_close(dense.t().double(), dequantized(packed), rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", ["int8pack", "int4pack-cpu", "int4-plain"])
def test_packing_rounds_to_nearest_and_predicts_its_bytes(op: str) -> None:
    torch.manual_seed(0)
    master = torch.randn(64, 128)
    before = master.clone()
    spec = spec_for(op, 64, 128, torch.float32, 64)
    packed = pack(spec, master, CPU, never)
    assert torch.equal(master, before), "the master is nobody's scratch"
    assert packed.nbytes == spec.nbytes
    step = packed.scales.abs().max() if op == "int8pack" else packed.scales[..., 0].max()
    assert (dequantized(packed) - master.double()).abs().max() <= step * 0.51


def test_storage_bytes_by_hand() -> None:
    bf16 = torch.bfloat16
    assert spec_for("int8pack", 64, 128, bf16).nbytes == 64 * 128 + 64 * 2
    assert spec_for("int4pack-cpu", 64, 128, bf16, 32).nbytes == 64 * 128 // 2 + 4 * 64 * 2 * 2
    assert spec_for("linear", 64, 128, bf16).nbytes == 64 * 128 * 2
    assert spec_for("int8pack", 64, 128, bf16).key == spec_for("w8a8-float32", 64, 128, bf16).key


def test_padded_columns_change_nothing() -> None:
    torch.manual_seed(0)
    master = torch.randn(64, 72)
    packed = pack(spec_for("int4pack-cpu", 64, 72, torch.float32, 32, k=96), master, CPU, never)
    layer = LINEARS["int4pack-cpu"](packed, None, Scratch())
    x = torch.randn(3, 72)
    torch.testing.assert_close(layer(x).double(), x.double() @ dequantized(packed).t(), rtol=0, atol=1e-4)


def test_one_row_does_not_disturb_another_under_w8a8() -> None:
    torch.manual_seed(0)
    packed = pack(spec_for("w8a8-float32", 64, 64, torch.float32), torch.randn(64, 64), CPU, never)
    for op in ("w8a8-float32", "w8a8-int8pack", "w8a8-int_mm"):
        layer = LINEARS[op](packed, None, Scratch())
        x = torch.randn(2, 64)
        x[1] *= 1e4
        torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["int8pack", "w8a8-float32", "int4pack-cpu", "int4-plain"])
def test_Q10_a_weight_that_is_not_finite_shows(op: str) -> None:
    master = torch.randn(64, 64)
    master[3, 5] = float("nan")
    packed = pack(spec_for(op, 64, 64, torch.float32), master, CPU, never)
    out = LINEARS[op](packed, None, Scratch())(torch.randn(2, 64))
    assert not torch.isfinite(out[:, 3]).any()
    assert torch.isfinite(out[:, :3]).all()


@pytest.mark.parametrize("op", ["int8pack", "int4pack-cpu"])
def test_packing_of_a_large_layer_is_cancelled_between_slices(op: str) -> None:
    asked = 0

    def third_time() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 3

    with pytest.raises(Cancelled):
        pack(
            spec_for(op, 16384, 576, torch.bfloat16),
            torch.zeros(16384, 576, dtype=torch.bfloat16),
            CPU,
            third_time,
        )
    assert asked == 3
