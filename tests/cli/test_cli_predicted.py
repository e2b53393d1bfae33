"""Bytes and coverage told from file headers alone, and what damaged files are told."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_gear import Pdq

from pdq_tui.commands.predicted import table
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import packed_bytes
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.policy import Keep, Policy, StagePolicy
from pdq_tui.core.predict import REFUSED, Prediction, predict
from pdq_tui.core.shapes import read_shapes
from pdq_tui.errors import UsageError

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
}  # fmt: skip


def model(folder: Path, shapes: dict[str, list[int]], config: dict[str, Any] | None = None) -> Path:
    """A directory of headers: the data is a hole in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for edge in shape:
            size *= edge
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    body = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        file.truncate(8 + len(body) + offset)
    return folder


SHAPES = {
    "model.embed_tokens.weight": [128, 64],
    "model.layers.0.self_attn.q_proj.weight": [64, 64],
    "model.layers.0.mlp.down_proj.weight": [64, 96],
    "model.norm.weight": [64],
}


def told(folder: Path, policy: Policy) -> Prediction:
    return predict(policy, read_shapes(folder), load_kernels("cpu"), 512, 1)


def test_bytes_of_both_stages_and_what_they_share(tmp_path: Path) -> None:
    folder = model(tmp_path, SHAPES)
    p = told(folder, find_policy("w8a8-prefill-int8-decode"))
    int8 = packed_bytes(StagePolicy("int8").format, 64, 64, 2) + packed_bytes(
        StagePolicy("int8").format, 64, 96, 2
    )
    assert (p.stored_bytes, p.extra_bytes) == (int8, 0)
    assert p.kept_bytes == 2 * (128 * 64 + 64)
    assert p.kv_bytes_per_token == 2 * 1 * 2 * 16 * 2
    dual = told(folder, find_policy("w8a8-prefill-int4-decode"))
    assert dual.stored_bytes == dual.stages["prefill"].bytes + dual.stages["decode"].bytes
    assert dual.extra_bytes == dual.stages["decode"].bytes


def test_Q03_a_group_that_does_not_divide_is_smaller_padded_or_left(tmp_path: Path) -> None:
    folder = model(tmp_path, SHAPES)  # K = 96 takes groups of 32, not of 64
    int4 = find_policy("int4")
    smaller = told(folder, int4).stages["decode"]
    assert set(smaller.formats) == {"bf16", "int4-g64", "int4-g32"}
    left = told(folder, msgspec.structs.replace(int4, on_misfit="leave")).stages["decode"]
    assert any(
        "96" in each.reason and each.modules == ("model.layers.0.mlp.down_proj",) for each in left.left
    )
    padded = told(folder, msgspec.structs.replace(int4, on_misfit="pad")).stages["decode"]
    assert set(padded.formats) == {"bf16", "int4-g64"}
    assert padded.bytes > smaller.bytes - 1


def test_a_keep_that_names_nothing_is_said(tmp_path: Path) -> None:
    kept = msgspec.structs.replace(find_policy("int4"), keep=(Keep(modules=("*.layers.0.*", "*.layer.0.*")),))
    p = told(model(tmp_path, SHAPES), kept)
    assert "int4: [[keep]] '*.layer.0.*' names no linear layer of this model" in p.notes
    assert len([n for n in p.notes if "names no" in n]) == 1


def test_the_engine_finds_what_was_predicted(pdq: Pdq, tiny_model: Path) -> None:
    """The prediction against the engine's own census after packing, to the byte."""
    words = (
        "--in",
        "16",
        "--out",
        "4",
        "--blocks",
        "1",
        "--min-seconds",
        "0",
        "--no-solo",
        "--device",
        "cpu",
        "--json",
    )
    done = pdq("run", str(tiny_model), "-p", "w8a8-prefill-int4-decode", *words)
    assert done.returncode == 0, done.stderr
    weights = json.loads(done.stdout)["arms"][0]["weights"]
    [p] = json.loads(
        pdq(
            "policies",
            "check",
            "w8a8-prefill-int4-decode",
            "--model",
            str(tiny_model),
            "--in",
            "16",
            "--json",
        ).stdout
    )
    assert (p["stored_bytes"], p["extra_bytes"]) == (weights["stored_bytes"], weights["extra_bytes"])
    coverage = json.loads(done.stdout)["arms"][0]["coverage"]
    for stage in ("prefill", "decode"):
        assert p["stages"][stage]["converted_parameters"] == coverage[stage]["converted_parameters"]


def test_Q11_bytes_of_the_kv_cache_follow_the_policy(tmp_path: Path) -> None:
    folder = model(tmp_path, SHAPES)

    def of(kv: KvPolicy) -> Prediction:
        return told(folder, msgspec.structs.replace(find_policy("bf16"), kv=kv))

    rows = 2 * 1 * 2
    p = of(KvPolicy("bf16", "int8", "handoff"))
    assert (p.kv, p.kv_prefill_bytes_per_token, p.kv_bytes_per_token) == ("bf16/int8", rows * 32, rows * 18)
    assert of(KvPolicy("int4", "int4", "write")).kv_bytes_per_token == rows * 12
    [note] = [n for n in of(KvPolicy("int4", "int4", "write", group_size=32)).notes if n.startswith(REFUSED)]
    assert "groups of 32 do not divide this model's heads of 16" in note
    text = table([p, of(KvPolicy("int4", "int4", "write", group_size=32))])
    assert str(rows * 18) in text and note in text


@pytest.mark.parametrize(
    ("config", "windows", "said"),
    [
        ({}, (None,), ""),
        (
            {"model_type": "mistral", "sliding_window": 8},
            (8,),
            "1 of 1 layers keep their last 8 positions only",
        ),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, (None,), ""),
        (
            {"model_type": "gemma2", "sliding_window": 8},
            (None,),
            "some layers keep their last 8 positions only",
        ),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, (None,), ""),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention"]},
            (8,),
            "1 of 1 layers keep their last 8",
        ),
    ],
)
def test_Q11_sliding_layers_are_told_from_the_config(
    tmp_path: Path, config: dict[str, Any], windows: tuple[int | None, ...], said: str
) -> None:
    folder = model(tmp_path, SHAPES, config)
    geometry = read_shapes(folder).kv
    assert geometry is not None and geometry.windows == windows
    text = " ".join(told(folder, find_policy("bf16")).notes)
    assert said in text and ("positions only" in text) == bool(said)


@pytest.mark.parametrize("one_tensor", [True, False], ids=["one tensor", "a tensor each"])
def test_experts_are_converted_and_routers_are_not(one_tensor: bool, tmp_path: Path) -> None:
    """The same bytes whether the files hold the experts' matrices together or by themselves."""
    at = "model.layers.0.mlp."
    experts = (
        {f"{at}experts.gate_up_proj": [4, 64, 128], f"{at}experts.down_proj": [4, 128, 32]}
        if one_tensor
        else {
            f"{at}experts.{i}.{kind}.weight": [128, 32] if kind == "w2" else [32, 128]
            for i in range(4)
            for kind in ("w1", "w2", "w3")
        }
    )
    folder = model(tmp_path, SHAPES | {f"{at}gate.weight": [4, 64]} | experts)
    p = told(folder, find_policy("int8"))
    stage = p.stages["decode"]
    linear = 64 * 64 + 64 * 96 + 4 * (64 * 128 + 128 * 32)
    assert stage.total_parameters == 128 * 64 + linear + 4 * 64
    assert stage.converted_parameters == linear
    assert stage.bytes == linear + 2 * (64 + 64 + 4 * (64 + 128))
    assert any("1 weights outside linear layers" in note for note in p.notes)


def test_a_tensor_that_no_layer_is_known_for_is_counted_and_left(tmp_path: Path) -> None:
    folder = model(tmp_path, SHAPES | {"model.layers.0.mlp.mixer.weight": [4, 64, 128]})
    p = told(folder, find_policy("int8"))
    assert p.stages["decode"].total_parameters == 128 * 64 + 64 * 64 + 64 * 96 + 4 * 64 * 128
    assert p.stages["decode"].converted_parameters == 64 * 64 + 64 * 96


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("pointer", "is a Git LFS pointer"),
        ("empty", "cut off or damaged"),
        ("header", "cut off or damaged"),
        ("garbage", "header cannot be read"),
        ("no weights", "there are no .safetensors files"),
        ("no config", "config.json: missing"),
        ("bad config", "config.json: cannot be read"),
    ],
)
def test_I06_damaged_files_are_named(tmp_path: Path, damage: str, sentence: str) -> None:
    folder = model(tmp_path, SHAPES)
    file = folder / "model.safetensors"
    match damage:
        case "pointer":
            file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        case "empty":
            file.write_bytes(b"")
        case "header":
            file.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
        case "garbage":
            file.write_bytes(struct.pack("<Q", 4) + b"{{{{" + bytes(100))
        case "no weights":
            file.unlink()
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
    with pytest.raises(UsageError) as caught:
        read_shapes(folder)
    assert sentence in caught.value.message


def test_a_policy_that_nothing_here_runs_is_told_with_the_way_out(
    pdq: Pdq, tiny_model: Path, tmp_path: Path
) -> None:
    """By ``policies check``, which shows the others, and by ``run``, once."""
    stage = 'weights = "fp8"\nactivations = "fp8"\n'
    file = tmp_path / "tensor-cores.toml"
    file.write_text(f'schema = 1\nname = "tensor-cores"\n[prefill]\n{stage}[decode]\n{stage}')
    sentence = "w8a8-fp8 in prefill does not run on {}: w8a8-fp8-scaled_mm needs a GPU of compute capability 8.9 or later"
    way_out = "choose another format for this stage; pdq-tui doctor lists what runs here"

    checked = pdq("policies", "check", "int8", str(file), "--model", str(tiny_model))
    assert checked.returncode == 4 and "int8" in checked.stdout
    assert f"tensor-cores: {sentence.format('cpu')}" in checked.stderr and way_out in checked.stderr
    as_json = pdq("policies", "check", "int8", str(file), "--model", str(tiny_model), "--json")
    good, bad = json.loads(as_json.stdout)
    assert good["policy"] == "int8" and "unfit" not in good
    assert bad["policy"] == "tensor-cores" and sentence.format("cpu") in bad["unfit"]

    words = ("--in", "8", "--out", "2", "--blocks", "1", "--min-seconds", "0", "--device", "cpu")
    done = pdq("run", str(tiny_model), "-p", str(file), *words)
    assert done.returncode == 4 and done.stdout == ""
    assert f"policy tensor-cores refused: {sentence.format('this device')}" in done.stderr
    assert (done.stderr.count("does not run on"), done.stderr.count(way_out)) == (1, 1)


def test_a_stages_source_is_looked_for(pdq: Pdq, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "apart.toml"

    def checked(source: str) -> tuple[int, str]:
        stage = f'[prefill]\nweights = "int8"\nsource = "{source}"\n[decode]\nweights = "int8"\n'
        file.write_text(f'schema = 1\nname = "apart"\n{stage}')
        done = pdq("policies", "check", str(file))
        return done.returncode, done.stdout + done.stderr

    code, said = checked(str(tiny_model))
    assert code == 0 and "dual" in said, said
    assert checked("org/name-W8A8")[0] == 0
    code, said = checked(str(tmp_path / "missing"))
    assert code == 2 and "apart: prefill.source: no such directory" in said and "hub id" in said
    code, said = checked(str(tmp_path))
    assert code == 2 and f"there is no config.json in {tmp_path}" in said


def test_nothing_is_predicted_of_a_quantized_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "quantized"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(UsageError, match="already quantized: nothing is predicted"):
        read_shapes(folder)
