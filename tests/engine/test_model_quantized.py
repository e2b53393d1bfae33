"""Quantized checkpoints: their own numbers in our layouts, logits against the dequantized weights, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.protocol import Load
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.formats.imported import Imported
from pdq_tui.engine.formats.linears import quantize_rows
from pdq_tui.engine.formats.pack import nibbles
from pdq_tui.engine.formats.packed import Packed
from pdq_tui.engine.loader import LoadedModel, load_model, load_source
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UsageError
from tests.engine.conftest import llama_config, save_tiny
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("shared_home")

Tensors = dict[str, Tensor]
#: Made of one [N, K]: the tensors that a checkpoint holds for it, what they mean in float64, and the whole numbers.
Writer = Callable[[str, int, int], tuple[Tensors, Tensor, Tensor]]


def words(q: Tensor, dim: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """0…15 → int32, eight along ``dim``; nibble i of a word holds number ``order[i]`` of the eight."""
    wide = np.moveaxis(q.numpy().astype(np.uint32), dim, -1)
    wide = wide.reshape(*wide.shape[:-1], wide.shape[-1] // 8, 8)
    packed = np.zeros(wide.shape[:-1], np.uint32)
    for nibble, place in enumerate(order):
        packed |= wide[..., place] << np.uint32(4 * nibble)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, dim)))


def numbers(N: int, K: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, scales [N, K / group], zeros, what they mean in float64), any 4 bits."""
    q = torch.randint(0, 16, (N, K))
    scale = (torch.rand(N, K // group) * 0.02 + 0.01).half().float()
    zero = torch.full((N, K // group), 8) if symmetric else torch.randint(1, 16, (N, K // group))
    each = torch.repeat_interleave(zero, group, 1)
    return q, scale, zero, (q - each).double() * torch.repeat_interleave(scale, group, 1).double()


def gptq(group: int, symmetric: bool = False, less: int = 1) -> Writer:
    def write(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
        q, scale, zero, wide = numbers(N, K, group, symmetric)
        return {
            f"{name}.qweight": words(q.t(), 0),
            f"{name}.qzeros": words((zero - less).t(), 1),
            f"{name}.scales": scale.t().contiguous().half(),
            f"{name}.g_idx": (torch.arange(K) // group).int(),
        }, wide, q  # fmt: skip

    return write


def awq(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
    q, scale, zero, wide = numbers(N, K, 32, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{name}.qweight": words(q.t(), 1, order),
        f"{name}.qzeros": words(zero.t(), 1, order),
        f"{name}.scales": scale.t().contiguous().half(),
    }, wide, q  # fmt: skip


def packed_words(symmetric: bool) -> Writer:
    def write(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
        q, scale, zero, wide = numbers(N, K, 64, symmetric)
        made = {
            f"{name}.weight_packed": words(q, 1),
            f"{name}.weight_scale": scale,
            f"{name}.weight_shape": torch.tensor([N, K]),
        }
        if not symmetric:
            made[f"{name}.weight_zero_point"] = words(zero, 0)
        return made, wide, q

    return write


def int8(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
    q = torch.randint(-128, 128, (N, K)).to(torch.int8)
    scale = torch.rand(N, 1) * 2e-3 + 1e-3
    return {f"{name}.weight": q, f"{name}.weight_scale": scale}, q.double() * scale.double(), q


def fp8(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
    q = torch.randn(N, K).to(torch.float8_e4m3fn)
    scale = torch.rand(N, 1) * 0.1 + 0.05
    return {f"{name}.weight": q, f"{name}.weight_scale": scale}, q.double() * scale.double(), q


def fp8_blocks(leaf: str, rows: int = 48, columns: int = 64) -> Writer:
    """A scale for each block of the matrix; 48 rows do not divide 32, 64 or 128, so the last blocks are cut off."""

    def write(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
        q = torch.randn(N, K).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-N // rows), -(-K // columns)) * 0.1 + 0.05
        each = scale.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]
        return {f"{name}.weight": q, f"{name}.{leaf}": scale}, q.double() * each.double(), q

    return write


def one_fp8(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
    q, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.tensor(0.07)
    made = {f"{name}.weight": q, f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(1.0)}
    return made, q.double() * scale.double(), q


def compressed(form: str, bits: int, kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind} | weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
INT8 = compressed("int-quantized", 8, "int", strategy="channel")
FP8 = compressed("float-quantized", 8, "float", strategy="channel")
FP8_BLOCKS = compressed("float-quantized", 8, "float", strategy="block", block_structure=[48, 64])
W4A16 = compressed("pack-quantized", 4, "int", strategy="group", group_size=64)
LAYOUTS: dict[str, tuple[dict[str, Any], Writer, Format]] = {
    "gptq": (GPTQ, gptq(32), Format("int4", group_size=32)),
    "gptq-sym": (GPTQ | {"sym": True}, gptq(64, True), Format("int4", group_size=64)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(32, less=0), Format("int4", group_size=32)),
    "awq": (AWQ, awq, Format("int4", group_size=32)),
    "w4a16": (W4A16, packed_words(True), Format("int4", group_size=64)),
    "w4a16-asym": (W4A16, packed_words(False), Format("int4", group_size=64)),
    "int8": (INT8, int8, Format("int8")),
    "w8a8": (INT8, int8, Format("int8", "int8")),
    "fp8": (FP8, fp8, Format("fp8")),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 64], "activation_scheme": "dynamic"},
        fp8_blocks("weight_scale_inv"),
        Format("fp8", group_size=64),
    ),
    "compressed-blocks": (FP8_BLOCKS, fp8_blocks("weight_scale"), Format("fp8", group_size=64)),
    "fp8-one": ({"quant_method": "fp8", "activation_scheme": "static"}, one_fp8, Format("fp8")),
}


class Written:
    """A checkpoint in ``folder``, its meaning in a plain model, and the whole numbers of each layer."""

    def __init__(self, plain: Path, folder: Path, settings: dict[str, Any], write: Writer) -> None:
        torch.manual_seed(7)
        folder.mkdir()
        for file in plain.iterdir():
            if file.suffix == ".json" and "index" not in file.name:
                (folder / file.name).write_bytes(file.read_bytes())
        self.path, self.numbers = folder, {}
        self.model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        tensors = load_file(plain / "model.safetensors")
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear) or name == "lm_head":
                continue
            del tensors[f"{name}.weight"]
            made, wide, self.numbers[name] = write(name, *module.weight.shape)
            tensors |= made
            module.weight.data.copy_(wide)
        self.save(tensors, settings)

    def save(self, tensors: Tensors, settings: dict[str, Any] | None = None) -> None:
        save_file({k: v.contiguous() for k, v in tensors.items()}, self.path / "model.safetensors")
        if settings is not None:
            file = self.path / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))

    @property
    def tensors(self) -> Tensors:
        return load_file(self.path / "model.safetensors")


def load(path: Path, **settings: Any) -> LoadedModel:
    command = Load(model=str(path), cache_dir=str(path.parent / "cache"), device="cpu", **settings)
    return load_model(command, CpuDevice(1), lambda *_: None, lambda: False)


def staged_of(model: LoadedModel) -> StagedModel:
    return StagedModel(model.skeleton, model.masters, Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))


def uniform(fmt: Format) -> Policy:
    stage = StagePolicy(fmt.weights, fmt.activations, fmt.group_size)
    return Policy("own", stage, stage)


@pytest.fixture
def written(tiny_llama: Path, tmp_path: Path) -> Callable[..., Written]:
    def make(layout: str, **changes: Any) -> Written:
        settings, write, _ = LAYOUTS[layout]
        return Written(tiny_llama, tmp_path / "quantized", settings | changes, write)

    return make


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_its_own_numbers_run_and_nothing_is_dequantized(layout, written, monkeypatch) -> None:
    checkpoint, fmt = written(layout), LAYOUTS[layout][2]
    model = load(checkpoint.path)
    assert model.info.weights is not None and model.info.weights.startswith(
        f"{Format(fmt.weights, group_size=fmt.group_size).label} in 14 of 15 linear layers"
    )
    monkeypatch.setattr(Imported, "dequantized", lambda *_: pytest.fail("a layer was dequantized"))
    staged = staged_of(model)
    arm = staged.apply(uniform(fmt), rows=[1, 2 * 9])
    assert arm.warnings == []
    assert arm.coverage["decode"].converted_parameters == sum(q.numel() for q in checkpoint.numbers.values())

    stored = 0
    for (name, key), packed in staged.store._entries.items():
        if name == "lm_head":
            continue
        assert isinstance(packed, Packed), key
        q, (N, K) = checkpoint.numbers[name], checkpoint.numbers[name].shape
        if fmt.weights == "int4":
            assert packed.nbytes == N * K // 2 + K // fmt.group_size * N * 2 * 4
            assert torch.equal(packed.weight, nibbles(packed.spec.layout, q))
        else:
            assert packed.nbytes == N * K + N * 4 * (K // fmt.group_size if fmt.group_size else 1)
            assert torch.equal(packed.weight.view(torch.int8), q.view(torch.int8))
        stored += packed.nbytes
    assert stored == staged.store.packed_bytes == arm.weights.stored_bytes

    if fmt.activations == "int8":
        for name in checkpoint.numbers:
            checkpoint.model.get_submodule(name).register_forward_pre_hook(rounded)
    ids = ids_of(2, 9)
    tokens, ours = run(arm, ids, 5)
    with torch.inference_mode():
        wanted = checkpoint.model(torch.cat((ids, tokens[:, :-1]), 1)).logits[:, 8:]
    close = 2e-2 if fmt.activations == "int8" else 1e-4
    error = (ours.transpose(0, 1) - wanted).norm() / wanted.norm()
    assert error < close


def rounded(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    x = inputs[0]
    q, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    return ((q.float() * scale.float().view(-1, 1)).view_as(x),)


@pytest.mark.parametrize("layout", ["gptq", "awq", "int8", "w4a16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scales_rounded_to_the_models_dtype_are_told(layout, dtype, written) -> None:
    checkpoint, fmt = written(layout), LAYOUTS[layout][2]
    model = load(checkpoint.path, dtype=dtype)
    rounds = layout in ("int8", "w4a16") or dtype == "bf16"
    assert any("are rounded to" in note for note in model.info.notes) == rounds
    assert any("of a step" in note for note in model.info.notes) == (layout in ("gptq", "awq"))
    staged = staged_of(model)
    _, ours = run(staged.apply(uniform(fmt), rows=[1, 9]), ids_of(1, 9), 2)
    with torch.inference_mode():
        wanted = checkpoint.model(ids_of(1, 9)).logits[:, -1]
    assert (ours[0].float() - wanted).norm() / wanted.norm() < (0.06 if dtype == "bf16" else 0.01)


@pytest.mark.parametrize(
    ("fmt", "said"),
    [
        (Format(), "14 layers are dequantized from the checkpoint's int4-g64 to fp32"),
        (Format("int8"), "14 layers are quantized a second time, from the checkpoint's int4-g64 to int8"),
        (Format("int4", group_size=128), "from the checkpoint's int4-g64 to int4-g128"),
        (Format("int4", group_size=32), None),
    ],
    ids=lambda value: value.label if isinstance(value, Format) else "",
)
def test_another_format_is_made_layer_by_layer_and_said(fmt, said, written, monkeypatch) -> None:
    checkpoint = written("w4a16")
    staged = staged_of(load(checkpoint.path))
    alive: list[Any] = []
    whole = Imported.dequantized

    def watched(self: Imported, dtype: torch.dtype) -> Tensor:
        import weakref

        out = whole(self, dtype)
        alive.append(weakref.ref(out))
        if not fmt.dense:
            assert sum(each() is not None for each in alive) <= 2
        return out

    monkeypatch.setattr(Imported, "dequantized", watched)
    arm = staged.apply(uniform(fmt), rows=[1, 9])
    if said is None:
        assert arm.warnings == [] and not alive
    else:
        assert any(said in warning for warning in arm.warnings) and alive
    _, ours = run(arm, ids_of(1, 9), 2)
    with torch.inference_mode():
        wanted = checkpoint.model(ids_of(1, 9)).logits[:, -1]
    exact = fmt.dense or said is None
    assert (ours[0] - wanted).norm() / wanted.norm() < (1e-4 if exact else 0.4)


def test_a_group_as_long_as_the_row_is_cut_in_equal_ones(tiny_llama: Path, tmp_path: Path) -> None:
    def write(name: str, N: int, K: int) -> tuple[Tensors, Tensor, Tensor]:
        return gptq(K)(name, N, K)

    checkpoint = Written(tiny_llama, tmp_path / "rows", GPTQ | {"group_size": -1}, write)
    staged = staged_of(load(checkpoint.path))
    arm = staged.apply(uniform(Format("int4", group_size=64)), rows=[1, 9])
    assert arm.warnings == []
    _, ours = run(arm, ids_of(1, 9), 2)
    with torch.inference_mode():
        wanted = checkpoint.model(ids_of(1, 9)).logits[:, -1]
    torch.testing.assert_close(ours[0], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("layout", "changes", "wrong"),
    [
        ("gptq", {"desc_act": True}, "(GPTQ): its columns are ordered by activation (desc_act)"),
        ("gptq", {"bits": 8}, "(GPTQ): weights of 8 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "(AWQ): version 'gemv'"),
        ("awq", {"bits": None}, "weights of None bits"),
        ("fp8", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ("compressed-blocks", compressed("float-quantized", 8, "float", strategy="block", block_structure=[32, 32]),
         "fp8 scales [2, 2]; one for a channel or a matrix is read here, or one for a block of 32 × 32"),
        ("compressed-blocks", compressed("float-quantized", 8, "float", strategy="block", block_structure="48"),
         "a scale for each block of '48': two whole numbers are read here"),
        ("fp8-blocks", {"config_groups": FP8["config_groups"] | {"b": {"weights": {
            "type": "float", "num_bits": 8, "strategy": "block", "block_structure": "128x128"}}}},
         "blocks of several sizes (48 × 64, 128 × 128)"),
        ("fp8-odd", {}, "blocks of 48 columns over 128 are cut into no groups that a layout here holds"),
        ("w4a16", compressed("pack-quantized", 4, "int", actorder="group"), "actorder"),
        ("w4a16", compressed("pack-quantized", 3, "int"), "int weights of 3 bits"),
        ("int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse (sparse-24-bitmask)"),
        ("int8", {"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
        ("int8", {"quant_method": "bitsandbytes"}, "(bitsandbytes): no layout of this method"),
    ],
)  # fmt: skip
def test_Q07_what_would_be_misread_is_refused_by_name(
    layout, changes, wrong, written, tiny_llama, tmp_path
) -> None:
    if layout == "fp8-odd":
        settings = {"quant_method": "fp8", "weight_block_size": [48, 48]}
        refused(
            Written(tiny_llama, tmp_path / "odd", settings, fp8_blocks("weight_scale_inv", 48, 48)), wrong
        )
    else:
        refused(written(layout, **changes), wrong)


def refused(checkpoint: Written, wrong: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(checkpoint.path)
    assert "already quantized" in str(caught.value) and wrong in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.hint


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("layout", "change", "wrong"),
    [
        ("gptq", {"g_idx": torch.arange(128).int() % 4}, "out of order (g_idx)"),
        ("gptq", {"qzeros": torch.zeros(4, 16, dtype=torch.int32)}, "down_proj.qzeros is [4, 16], not [4, 8]"),
        ("gptq", {"qweight": torch.zeros(32, 64, dtype=torch.int32)}, "is [64, 256], the model's [64, 128]"),
        ("gptq", {"scales": torch.ones(8, 64), "qzeros": torch.zeros(8, 8, dtype=torch.int32)}, "groups of 16"),
        ("gptq", {"qzeros": None}, "down_proj.qzeros is missing"),
        ("gptq", {"bias": torch.ones(64)}, "1 layers of the files add a bias"),
        ("w4a16", {"weight_g_idx": torch.zeros(128).int()}, "out of order (weight_g_idx)"),
        ("w4a16", {"weight_shape": torch.tensor([64, 120])}, "weight_shape is not [64, 128]"),
        ("int8", {"weight_zero_point": torch.zeros(64, 1).to(torch.int8)}, "int8 weights with zero points"),
        ("int8", {"weight_scale": torch.ones(64, 2)}, "int8 scales [64, 2]"),
        ("int8", {"weight_scale": None}, "I8 weights without a scale"),
        ("fp8", {"weight": torch.zeros(64, 128).to(torch.float8_e5m2)}, "F8_E5M2 weights"),
        ("fp8", {"weight_scale_inv": torch.ones(1, 1)}, "fp8 scales [1, 1]; one for a channel or a matrix is read here"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(2, 2).to(torch.uint8)}, "scales in U8; BF16"),
        ("compressed-blocks", {"weight": torch.zeros(64, 128).to(torch.int8)}, "int8 weights with a scale for each block (48 × 64)"),
    ],
)  # fmt: skip
def test_Q07_a_layer_of_another_layout_is_refused_by_name(layout, change, wrong, written) -> None:
    checkpoint = written(layout)
    tensors = checkpoint.tensors
    for leaf, value in change.items():
        tensors.pop(f"{DOWN}.{leaf}", None)
        if value is not None:
            tensors[f"{DOWN}.{leaf}"] = value
    checkpoint.save(tensors)
    refused(checkpoint, wrong)


def test_Q07_experts_of_a_quantized_checkpoint_are_refused(tiny_moe: Path, tmp_path: Path) -> None:
    refused(Written(tiny_moe, tmp_path / "moe", GPTQ, gptq(32)), "experts")


def test_blocks_of_128_run_in_the_groups_that_divide_each_layer(tiny_llama: Path, tmp_path: Path) -> None:
    """As DeepSeek's checkpoints have them. 64 columns are half a block, 128 one: a policy names the larger group."""
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    checkpoint = Written(tiny_llama, tmp_path / "q", settings, fp8_blocks("weight_scale_inv", 128, 128))
    model = load(checkpoint.path)
    assert model.info.weights == "fp8-g64 in 12, fp8-g128 in 2 of 15 linear layers (FP8)"
    staged = staged_of(model)
    arm = staged.apply(uniform(Format("fp8", group_size=128)), rows=[1, 9])
    assert arm.warnings == [] and set(arm.coverage["decode"].formats) == {"fp8-g64", "fp8-g128", "fp32"}
    assert all("groups of 64 instead" in f.reason for f in arm.fallbacks)
    _, ours = run(arm, ids_of(1, 9), 2)
    with torch.inference_mode():
        wanted = checkpoint.model(ids_of(1, 9)).logits[:, -1]
    torch.testing.assert_close(ours[0], wanted, rtol=1e-3, atol=1e-3)
    # A scale a channel is another rounding: said, and one that is finer is not.
    again = staged.apply(uniform(Format("fp8")), rows=[1, 9])
    assert any("quantized a second time, from the checkpoint's fp8-g128 to fp8" in w for w in again.warnings)
    assert staged.apply(uniform(Format("fp8", group_size=32)), rows=[1, 9]).warnings == []


@pytest.mark.parametrize("group", [32, 64])
def test_a_scale_a_channel_is_held_by_groups_as_well(group: int, written) -> None:
    checkpoint = written("fp8")
    arm = staged_of(load(checkpoint.path)).apply(uniform(Format("fp8", group_size=group)), rows=[1, 9])
    assert arm.warnings == []
    _, ours = run(arm, ids_of(1, 9), 2)
    with torch.inference_mode():
        wanted = checkpoint.model(ids_of(1, 9)).logits[:, -1]
    torch.testing.assert_close(ours[0], wanted, rtol=1e-3, atol=1e-3)


def test_a_bias_of_zeros_that_the_model_lacks_is_nothing(written) -> None:
    checkpoint = written("gptq")
    checkpoint.save(checkpoint.tensors | {f"{DOWN}.bias": torch.zeros(64)})
    load(checkpoint.path)


# -- a stage with a checkpoint of its own --------------------------------------------------------------------------------


def opened(base: LoadedModel, path: Path) -> StagedModel:
    command = Load(model=str(path), cache_dir=str(path.parent / "cache"), device="cpu")
    return StagedModel(
        base.skeleton,
        base.masters,
        Cpu(),
        budget_bytes=None,
        kernels=load_kernels("cpu"),
        sources=lambda word, told, stop: load_source(word, base, command, CpuDevice(1), told, stop),
    )


def apart(prefill: StagePolicy, decode: StagePolicy) -> Policy:
    return Policy("apart", prefill, decode, storage="dual")


def two_models(prefill: Any, decode: Any, ids: Tensor, new: int) -> Tensor:
    """Logits [new, B, V] of one model's prompt and the other's answer over its cache, by transformers alone."""
    with torch.inference_mode():
        out = prefill(ids, use_cache=True)
        logits = [out.logits[:, -1]]
        for _ in range(new - 1):
            out = decode(logits[-1].argmax(-1)[:, None], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize("norms", [False, True], ids=["", "other-norms"])
def test_a_stage_reads_another_checkpoint_whole(which, norms, tiny_llama, written) -> None:
    """Its linear weights, its norms where they differ, and its tied head."""
    checkpoint = written("w4a16")
    if norms:
        tensors = checkpoint.tensors
        for name in (
            "model.layers.0.input_layernorm.weight",
            "model.norm.weight",
            "model.embed_tokens.weight",
        ):
            tensors[name] = tensors[name] * 1.5 + 0.1
            checkpoint.model.get_parameter(name).data.copy_(tensors[name])
        checkpoint.save(tensors)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    staged = opened(load(tiny_llama), checkpoint.path)
    theirs = StagePolicy("int4", "model", 64, str(checkpoint.path))
    policy = apart(theirs, StagePolicy()) if which == "prefill" else apart(StagePolicy(), theirs)
    before = staged.session_resident_bytes
    arm = staged.apply(policy, rows=[1, 9])
    assert arm.warnings == []
    assert arm.coverage[which].source == str(checkpoint.path)
    assert arm.coverage["decode" if which == "prefill" else "prefill"].source == ""

    packed = sum(q.numel() // 2 + q.numel() // 64 * 8 for q in checkpoint.numbers.values())
    dense = sum(q.numel() * 4 for q in checkpoint.numbers.values())
    embedding = 128 * 64 * 4 + 2 * 64 * 4 if norms else 0
    assert arm.weights.stored_bytes == packed + dense and arm.weights.extra_bytes == packed
    assert arm.weights.kept_bytes == staged.census.other_bytes + embedding
    assert staged.session_resident_bytes == before + packed + dense + embedding

    ids = ids_of(2, 9)
    models = (checkpoint.model, plain) if which == "prefill" else (plain, checkpoint.model)
    _, ours = run(arm, ids, 5)
    wanted = two_models(*models, ids, 5)
    assert (ours - wanted).norm() / wanted.norm() < 1e-4

    uniform_arm = staged.apply(uniform(Format()), rows=[1, 9])
    _, alone = run(uniform_arm, ids, 3)
    assert (alone - two_models(plain, plain, ids, 3)).norm() / alone.norm() < 1e-4
    staged.release([uniform_arm])
    assert set(staged.store.sources) == {""} and staged.session_resident_bytes == before + dense


def test_both_stages_of_two_quantized_checkpoints(tiny_llama, tmp_path) -> None:
    first = Written(tiny_llama, tmp_path / "first", INT8, int8)
    second = Written(tiny_llama, tmp_path / "second", GPTQ, gptq(32))
    staged = opened(load(tiny_llama), tiny_llama)
    policy = apart(
        StagePolicy("int8", source=str(first.path)), StagePolicy("int4", "model", 32, str(second.path))
    )
    arm = staged.apply(policy, rows=[1, 9])
    assert arm.warnings == []
    ids = ids_of(1, 9)
    _, ours = run(arm, ids, 4)
    wanted = two_models(first.model, second.model, ids, 4)
    assert (ours - wanted).norm() / wanted.norm() < 1e-4


def test_a_source_of_another_model_is_refused_by_name(
    tiny_llama, tiny_llama_untied, tiny_llama_72, tmp_path
) -> None:
    staged = opened(load(tiny_llama), tiny_llama)
    for path, wrong in (
        (tiny_llama_untied, "its output head is not tied to the embedding, the model's is tied"),
        (tiny_llama_72, "num_attention_heads is 6, the model's is 4"),
        (tmp_path / "nothing", "no such directory"),
    ):
        with pytest.raises(UsageError) as caught:
            staged.apply(apart(StagePolicy("int8", source=str(path)), StagePolicy("int8")), rows=[1, 9])
        assert wrong in str(caught.value)
    larger = tmp_path / "larger"
    save_tiny(llama_config(intermediate_size=192), larger)
    with pytest.raises(
        UsageError, match=r"6 weights have other names or shapes than the model's: model\.layers\.0\.mlp"
    ):
        staged.apply(apart(StagePolicy("int8", source=str(larger)), StagePolicy("int8")), rows=[1, 9])
    assert set(staged.store.sources) == {""}
