"""bitsandbytes' formats: every kernel against its own dequantized weights in float64, bytes, layers, and an install that
does not work."""

import os
import sys
from pathlib import Path

import pytest
import torch

from pdq_tui.core import kernels as tables
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import Capability, load_kernels
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.predict import predict
from pdq_tui.core.shapes import read_shapes
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.formats import bnb
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack
from pdq_tui.engine.formats.packed import Packed, PackedStack, Spec
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.kernels import Prober, capability
from pdq_tui.engine.process import run_module
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UnfitError
from tests.engine.test_model_staged import Cpu, ids_of, run

CPU = torch.device("cpu")
HERE = capability(Cpu())
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
#: FP4 of bitsandbytes: a sign and 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4.
FP4 = [0.0, 0.00520833, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
CODES = {"nf4": torch.tensor(NF4).double(), "fp4": torch.tensor(FP4 + [-x for x in FP4]).double()}
OPS_4BIT = [op for op in bnb.LINEARS if op.startswith("bnb4")]


def never() -> bool:
    return False


def spec_of(weights: str, N: int, K: int, dtype: torch.dtype, group: int = 64, layout: str = "bnb4") -> Spec:
    return Spec(Format(weights, "model", group), layout, N, K, -(-K // group) * group, dtype)


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([weight >> 4, weight & 15], 2).reshape(weight.shape[0], -1).long()


def dequantized(packed: Packed) -> torch.Tensor:
    """float64 [N, K] from the straight layout, by another road than bitsandbytes'."""
    assert packed.scales is not None
    spec = packed.spec
    scales = packed.scales.double().repeat_interleave(spec.fmt.group_size, 1)
    return (CODES[spec.fmt.weights][codes_of(packed.weight)] * scales)[:, : spec.K]


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("N", "K", "group"), [(64, 128, 64), (33, 96, 32), (65, 130, 64), (7, 256, 256)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("weights", ["nf4", "fp4"])
@pytest.mark.parametrize("op", [op for op in OPS_4BIT if "bnb4" in tables.OPS[op]])
def test_4bit_matches_its_dequantized_weights(op, weights, dtype, N, K, group, rows) -> None:
    torch.manual_seed(rows)
    packed = pack(spec_of(weights, N, K, dtype, group), torch.randn(N, K).to(dtype), CPU, never)
    assert packed.nbytes == packed.spec.nbytes == N * packed.spec.k // 2 + N * packed.spec.k // group * 4
    bias = torch.randn(N).to(dtype)
    layer = OPS[op](packed, bias, Scratch())
    weight = dequantized(packed)
    for _ in range(2):
        x = torch.randn(2, rows, K).to(dtype)
        wanted = x.double() @ weight.t() + bias.double()
        with torch.inference_mode():
            got = layer(x)
        assert got.dtype == dtype and got.shape == (2, rows, N)
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize(("weights", "furthest"), [("nf4", 0.152), ("fp4", 0.167)])
def test_4bit_rounds_to_the_nearest_code(weights, furthest) -> None:
    torch.manual_seed(0)
    master = torch.randn(64, 128)
    before = master.clone()
    packed = pack(spec_of(weights, 64, 128, torch.float32), master, CPU, never)
    assert torch.equal(master, before), "the master is nobody's scratch"
    largest = master.view(64, 2, 64).abs().amax(2)
    assert torch.equal(packed.scales, largest)
    away = (dequantized(packed) - master.double()).view(64, 2, 64).abs().amax(2) / largest
    assert 0.1 < away.max() <= furthest


def test_the_layout_of_the_cpu_kernel_is_bitsandbytes_own() -> None:
    from bitsandbytes.functional import QuantState, _convert_weight_packed_for_cpu

    torch.manual_seed(0)
    master = torch.randn(96, 128)
    straight = pack(spec_of("nf4", 96, 128, torch.bfloat16), master, CPU, never)
    ours = pack(spec_of("nf4", 96, 128, torch.bfloat16, layout="bnb4-cpu"), master, CPU, never)
    assert ours.nbytes == ours.spec.nbytes == 96 * 128 // 2 + 96 * 2 * 2
    state = QuantState(straight.scales.reshape(-1), torch.Size((96, 128)), None, 64, "nf4", torch.bfloat16)
    theirs, state = _convert_weight_packed_for_cpu(straight.weight.reshape(-1, 1), state)
    assert torch.equal(ours.weight, theirs) and torch.equal(ours.scales, state.absmax)
    assert torch.equal(bnb.straight(ours.weight), straight.weight)
    x = torch.randn(3, 128).bfloat16()
    weight = CODES["nf4"][codes_of(straight.weight)] * ours.scales.t().double().repeat_interleave(64, 1)
    wanted = x.double() @ weight.t()
    for op in ("bnb4-dequantize", "bnb4-dequantize-float32"):
        got = OPS[op](ours, None, Scratch())(x).double()
        assert (got - wanted).norm() / wanted.norm() < 8e-3


@pytest.mark.skipif("avx512bf16" not in HERE.features, reason="this CPU has no AVX-512 bf16 dot products")
@pytest.mark.parametrize("weights", ["nf4", "fp4"])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_cpu_kernel_matches_its_dequantized_weights(rows, weights) -> None:
    torch.manual_seed(rows)
    packed = pack(
        spec_of(weights, 96, 128, torch.bfloat16, layout="bnb4-cpu"), torch.randn(96, 128), CPU, never
    )
    weight = CODES[weights][codes_of(bnb.straight(packed.weight))]
    weight = weight * packed.scales.t().double().repeat_interleave(64, 1)
    x = torch.randn(rows, 128).bfloat16()
    wanted = x.double() @ weight.t()
    got = OPS["bnb4-gemv-cpu"](packed, None, Scratch())(x).double()
    assert (got - wanted).norm() / wanted.norm() < 2e-2


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("N", "K"), [(80, 96), (33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_llm_int8_matches_its_own_arithmetic(dtype, N, K, rows) -> None:
    """Activations rounded with a scale a row, columns with a value of 6 or more multiplied as they are."""
    torch.manual_seed(rows)
    packed = pack(
        Spec(Format("llm-int8"), "llm-int8", N, K, K, dtype), torch.randn(N, K).to(dtype), CPU, never
    )
    assert packed.nbytes == packed.spec.nbytes == N * K + 4 * N
    weight = packed.weight.double() * packed.scales.double()[:, None] / 127
    layer = OPS["llm-int8"](packed, None, Scratch())
    for outliers in ([], [4, 7]):
        x = torch.randn(rows, K).clamp(-5, 5).to(dtype)
        x[-1, outliers] = 40.0
        before = x.clone()
        with torch.inference_mode():
            got = layer(x)
        assert torch.equal(x, before) and got.dtype == dtype
        inner = x.half()
        inner[inner.abs() >= 6] = 0
        largest = inner.abs().amax(1, keepdim=True).float()
        q = (inner * (127.0 / largest)).round()
        q[:, outliers] = 0
        wanted = (q.double() * largest.double() / 127) @ weight.t() + x.double()[:, outliers] @ weight[
            :, outliers
        ].t()
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < (1e-4 if dtype == torch.float32 else 1e-2)


def test_llm_int8_rounds_its_weights_to_nearest() -> None:
    torch.manual_seed(0)
    master = torch.randn(64, 96)
    packed = pack(Spec(Format("llm-int8"), "llm-int8", 64, 96, 96, torch.float32), master, CPU, never)
    step = packed.scales.double()[:, None] / 127
    assert ((packed.weight.double() * step - master.double()).abs() <= 0.55 * step).all()


@pytest.mark.parametrize("weights", ["nf4", "fp4", "llm-int8"])
def test_Q10_a_weight_that_is_not_finite_shows(weights) -> None:
    master = torch.randn(64, 64)
    master[3, 5] = float("nan")
    spec = (
        Spec(Format(weights), weights, 64, 64, 64, torch.float32)
        if weights == "llm-int8"
        else spec_of(weights, 64, 64, torch.float32)
    )
    op = "llm-int8" if weights == "llm-int8" else "bnb4-dequantize"
    out = OPS[op](pack(spec, master, CPU, never), None, Scratch())(torch.randn(2, 64))
    assert not torch.isfinite(out[:, 3]).any()
    assert torch.isfinite(out[:, :3]).all()


@pytest.mark.parametrize("weights", ["nf4", "llm-int8"])
def test_packing_of_a_large_layer_is_cancelled_between_slices(weights) -> None:
    asked = 0

    def third_time() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 3

    spec = Spec(
        Format(weights, "model", 64 if weights == "nf4" else 0), "bnb4", 16384, 256, 256, torch.bfloat16
    )
    with pytest.raises(Cancelled):
        pack(spec, torch.zeros(16384, 256, dtype=torch.bfloat16), CPU, third_time)
    assert asked == 3


# -- in a model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What children found is remembered from test to test, as it is from start to start."""
    return tmp_path_factory.mktemp("probes") / "probes.json"


@pytest.fixture
def make(load_tiny, probes):
    def build(
        path: Path, dtype: torch.dtype | None = None, layers: str = "eager", file: Path | None = probes
    ) -> StagedModel:
        model, masters = load_tiny(path, dtype)
        staged = StagedModel(
            model, masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"), layers=layers
        )
        staged.prober = Prober(file)
        staged.planner._broken = staged.prober.broken
        return staged

    return build


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2", "tiny_moe"])
@pytest.mark.parametrize("word", ["nf4", "fp4", "llm-int8"])
def test_Q02_logits_agree_with_a_model_of_dequantized_weights(word, name, make, load_tiny, request) -> None:
    """Also of Conv1D layers, whose weights lie the other way round."""
    path = request.getfixturevalue(name)
    staged = make(path)
    arm = staged.apply(find_policy(word), rows=[1, 12])
    reference, _ = load_tiny(path)
    for layer in staged.census.layers:
        key = next((k for k in staged.store._entries if k[0] == layer.name and word in k[1]), None)
        if key is None:
            continue
        packed = staged.store.get(key)
        target = reference.get_parameter(layer.parameter).data
        experts = isinstance(packed, PackedStack)
        for part, matrix in zip(packed.parts, target, strict=True) if experts else [(packed, target)]:
            if word == "llm-int8":
                weight = part.weight.double() * part.scales.double()[:, None] / 127
            else:
                weight = dequantized(part)
            matrix.copy_(weight.t() if layer.conv1d else weight)
    ids = ids_of(1, 12)
    tokens, ours = run(arm, ids, 4)
    with torch.inference_mode():
        wanted = reference(torch.cat([ids, tokens[:, :-1]], 1)).logits[:, 11:].transpose(0, 1)
    if word == "llm-int8":  # its activations are rounded as well
        assert (ours - wanted).norm() / wanted.norm() < 0.1
    else:
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=2e-3)
    cover = arm.coverage["decode"]
    assert cover.converted_parameters > 0.5 * cover.total_parameters


@pytest.mark.parametrize("word", ["nf4", "fp4", "llm-int8", "bf16-prefill-nf4-decode"])
def test_bytes_are_those_predicted_and_those_held(word, make, tiny_llama_bf16) -> None:
    staged = make(tiny_llama_bf16)
    arm = staged.apply(find_policy(word), rows=[1, 12])
    p = predict(
        find_policy(word), read_shapes(tiny_llama_bf16), load_kernels("cpu"), 12, 1, staged.capability
    )
    w = arm.weights
    assert (w.stored_bytes, w.extra_bytes) == (p.stored_bytes, p.extra_bytes)
    held = sum(
        packed.nbytes for (_, key), packed in staged.store._entries.items() if not key.startswith("dense")
    )
    n = sum(layer.parameters for layer in staged.census.layers if not layer.head)
    rows = sum(layer.N for layer in staged.census.layers if not layer.head)
    scale = (
        2 if "avx512bf16" in staged.capability.features else 4
    )  # the CPU kernel's layout has bfloat16 scales
    assert held == (n + 4 * rows if word == "llm-int8" else n // 2 + n // 64 * scale)
    assert staged.plan(find_policy(word), [1, 12]).resident


@pytest.mark.parametrize("word", ["nf4", "llm-int8"])
def test_decoder_layers_are_compiled_around_bitsandbytes(word, make, tiny_llama) -> None:
    ids = ids_of(1, 9)
    _, wanted = run(make(tiny_llama).apply(find_policy(word), rows=(1, 16)), ids, 6)
    arm = make(tiny_llama, layers="auto").apply(find_policy(word), rows=(1, 16))
    cover = arm.coverage["decode"]
    # with our own kernels loaded (another file of this process may have), or without them
    reasons = "which our own layers do not call", "native-layer needs this project's own CPU kernels"
    assert cover.runner == "inductor" and any(reason in str(cover.runner_reason) for reason in reasons)
    _, got = run(arm, ids, 6)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=0.05 if word == "llm-int8" else 2e-3)


def test_another_number_of_outliers_passes_through_a_compiled_layer(make, tiny_llama) -> None:
    """How many columns are multiplied apart depends on the data: no number of them is baked into the program."""
    staged, reference = make(tiny_llama, layers="auto"), make(tiny_llama)
    arms = [s.apply(find_policy("llm-int8"), rows=(1, 16)) for s in (staged, reference)]
    assert arms[0].coverage["decode"].runner == "inductor"
    ids = ids_of(1, 9)
    _, before = run(arms[0], ids, 4)
    for s in (staged, reference):
        s.skeleton.get_parameter("model.layers.0.input_layernorm.weight").data[7] = 400.0
    (_, got), (_, wanted) = (run(arm, ids, 4) for arm in arms)
    assert not torch.allclose(got, before, atol=0.1)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=0.05)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_Q03_groups_that_do_not_divide_72_columns(group, make, tiny_llama_72) -> None:
    nf4 = StagePolicy("nf4", "model", group)
    for rule, told in (
        ("smaller-group", "nor does any smaller"),
        ("pad", "padded to"),
        ("leave", "do not divide"),
    ):
        policy = Policy("test", nf4, nf4, on_misfit=rule)
        staged = make(tiny_llama_72)
        plan = staged.plan(policy, [1, 6])
        assert any(told in text for text in plan.misfits)
        arm = staged.apply(policy, rows=[1, 6])
        assert (arm.coverage["decode"].converted_parameters > 0) == (rule == "pad")
        assert torch.isfinite(run(arm, ids_of(1, 6), 3)[1]).all()


# -- an install that does not work -------------------------------------------------------------------------------------


def broken_package(folder: Path, body: str) -> Path:
    package = folder / "bitsandbytes"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)
    return folder


@pytest.fixture
def on_the_path(monkeypatch):
    def put(folder: Path) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.syspath_prepend(str(folder))

    return put


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ImportError('libfoo.so: cannot open shared object file')", "libfoo.so"),
        ("import os; os._exit(139)", "it ended the process"),
        ("", "quantize_4bit"),
    ],
)
def test_Q08_a_package_that_does_not_work_is_named_and_the_rest_goes_on(
    body, told, make, tiny_llama, tmp_path, on_the_path
) -> None:
    on_the_path(broken_package(tmp_path / "first", body))
    staged = make(tiny_llama, file=None)
    with pytest.raises(UnfitError) as raised:
        staged.apply(find_policy("nf4"), rows=[1, 8])
    sentence = str(raised.value)
    assert "does not run on this device" in sentence and "failed its probe" in sentence and told in sentence
    assert torch.isfinite(run(staged.apply(find_policy("int8"), rows=[1, 8]), ids_of(1, 8), 3)[1]).all()


def test_Q08_without_the_package_the_formats_are_refused_before_anything_runs(make, tiny_llama) -> None:
    staged = make(tiny_llama)
    staged.planner.capability = Capability("cpu", tuple(f for f in HERE.features if f != "bitsandbytes"))
    with pytest.raises(UnfitError, match="needs the package bitsandbytes, which this machine lacks"):
        staged.plan(find_policy("nf4"), [1, 8])
    staged.plan(find_policy("int4"), [1, 8])


def test_Q08_a_wrong_library_version_is_refused_or_runs(make, tiny_llama, monkeypatch) -> None:
    monkeypatch.setenv("BNB_CUDA_VERSION", "999")
    staged = make(tiny_llama)
    try:
        arm = staged.apply(find_policy("nf4"), rows=[1, 8])
    except UnfitError as refused:
        assert "failed its probe" in str(refused)
    else:
        assert torch.isfinite(run(arm, ids_of(1, 8), 3)[1]).all()


def test_Q08_I08_nothing_is_fetched_when_it_is_imported(tmp_path) -> None:
    """Where the package ``kernels`` is installed, bitsandbytes asks the Hub on some CPUs while it is imported."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("import socket\nsocket.create_connection(('127.0.0.1', 9))\n")
    probe = tmp_path / "watched.py"
    probe.write_text(
        "import sys\n"
        "from pdq_tui.engine.process import die_with_parent\n"
        "die_with_parent(int(sys.argv[1]))\n"
        "def watch(event, args):\n"
        "    if event.startswith('socket.') and event != 'socket.__new__':\n"
        "        print('fetched', event, flush=True)\n"
        "sys.addaudithook(watch)\n"
        "from pdq_tui.engine.formats import bnb\n"
        "bnb.ops()\n"
        "print('there', sys.modules.get('kernels'), flush=True)\n"
        "import kernels\n"
    )
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)]),
    }
    _, lines = run_module("watched", [], lambda _: None, environment=environment, timeout_s=200)
    assert "there None" in lines, lines
    before, after = lines[: lines.index("there None")], lines[lines.index("there None") :]
    assert not [line for line in before if line.startswith("fetched")]
    assert [line for line in after if line.startswith("fetched")], "the trap works"
