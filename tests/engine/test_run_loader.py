"""What is wrong with a model is one sentence before anything is loaded; what is right needs no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors

from pdq_tui.core.protocol import Load
from pdq_tui.engine import convert, hub, loader
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.checkpoint import Checkpoint, HeldMasters, MappedMasters, inspect
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.loader import LoadedModel, load_model
from pdq_tui.errors import PdqError, UnfitError, UsageError


def go(model: Path | str, tmp_path: Path, **settings: Any) -> LoadedModel:
    command = Load(model=str(model), cache_dir=str(tmp_path / "cache"), device="cpu", **settings)
    return load_model(command, CpuDevice(1), lambda *_: None, lambda: False)


@pytest.fixture
def broken(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "broken"))


def test_linear_weights_stay_in_the_files(tiny_llama: Path, tmp_path: Path) -> None:
    model = go(tiny_llama, tmp_path)
    assert isinstance(model.masters, MappedMasters)
    assert model.skeleton.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert model.skeleton.model.embed_tokens.weight.device.type == "cpu"
    assert model.skeleton.lm_head.weight is model.skeleton.model.embed_tokens.weight
    assert model.masters.get("model.layers.0.mlp.up_proj.weight").shape == (128, 64)
    assert model.masters.get("lm_head.weight").shape == (128, 64)
    info = model.info
    assert (info.layers, info.hidden, info.vocab, info.max_positions) == (2, 64, 128, 256)
    assert info.rotary
    assert info.tied_head
    assert info.dtype == "float32"
    assert model.eos == {2}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (loader, "inspect"),
        (loader, "_config"),
        (loader, "_tokenizer"),
        (MappedMasters, "get"),
        (Checkpoint, "sha256"),
    ],
    ids=["headers", "config", "tokenizer", "weights", "hash"],
)
def test_S05_f_a_load_from_a_slow_disk_is_cancelled_without_waiting_for_it(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """The disk answers when it likes: here after minutes, for each reader in turn."""
    before = getattr(owner, name)
    asked, stop, over = threading.Event(), threading.Event(), threading.Event()
    answered: list[bool] = []

    def slow(*arguments: Any) -> Any:
        asked.set()
        answered.append(over.wait(240))
        return before(*arguments)

    monkeypatch.setattr(owner, name, slow)

    def press() -> None:
        asked.wait(60)
        stop.set()

    threading.Thread(target=press, daemon=True).start()
    command = Load(model=str(tiny_llama), cache_dir=str(tmp_path / "cache"), device="cpu")
    with pytest.raises(Cancelled):
        load_model(command, CpuDevice(1), lambda *_: None, stop.is_set)
    assert not answered, "it did not wait for the disk"
    over.set()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_any_dtype_on_a_cpu(tiny_llama: Path, tmp_path: Path, dtype: str) -> None:
    model = go(tiny_llama, tmp_path, dtype=dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert model.masters.get("model.layers.0.mlp.up_proj.weight").dtype == wanted
    assert model.skeleton.model.norm.weight.dtype == wanted


def test_learned_positions_are_told_from_rotary_ones(tiny_gpt2: Path, tmp_path: Path) -> None:
    info = go(tiny_gpt2, tmp_path).info
    assert (info.rotary, info.max_positions) == (False, 32)


def test_names_that_differ_are_held_in_memory_and_said(tiny_moe: Path, tmp_path: Path) -> None:
    model = go(tiny_moe, tmp_path)
    assert isinstance(model.masters, HeldMasters)
    assert any("held in memory" in note for note in model.info.notes)
    assert model.skeleton.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    assert model.masters.get("model.layers.0.self_attn.q_proj.weight").shape == (64, 64)


def test_a_list_of_eos_ids(broken: Path, tmp_path: Path) -> None:
    (broken / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert go(broken, tmp_path).eos == {2, 5}


# -- I06: broken files -------------------------------------------------------------------------------------------------


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UsageError) as caught:
        inspect(path)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_I06_lfs_pointer(broken: Path) -> None:
    (broken / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    refused(broken, "model.safetensors", "Git LFS pointer", "git lfs pull")


def test_I06_truncated_by_n_bytes(broken: Path) -> None:
    file = broken / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    refused(broken, "model.safetensors", "short by 100 bytes")


def test_I06_cut_inside_the_header(broken: Path) -> None:
    os.truncate(broken / "model.safetensors", 40)
    refused(broken, "model.safetensors", "header")


def test_I06_zero_bytes(broken: Path) -> None:
    os.truncate(broken / "model.safetensors", 0)
    refused(broken, "model.safetensors", "empty (0 bytes)")


def test_I06_missing_shards_are_listed(broken: Path) -> None:
    names = {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(broken, "2 of 2 weight files are missing", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", ["no config.json"]),
        ("model.safetensors", ["no weights"]),
        ("tokenizer.json", ["no tokenizer"]),
    ],
)
def test_I06_missing_files(broken: Path, name: str, words: list[str]) -> None:
    (broken / name).unlink()
    refused(broken, *words)


def test_I06_a_config_with_more_layers_than_the_files_is_refused(broken: Path, tmp_path: Path) -> None:
    """transformers would fill them with random numbers, and they would be measured."""
    change_config(broken, num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"\d+ weights are not in the files: model.layers.2") as caught:
        go(broken, tmp_path)
    assert "config.json" in (caught.value.hint or "")


def test_I06_a_config_of_another_architecture_is_refused(broken: Path, tmp_path: Path) -> None:
    change_config(
        broken, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=64, n_layer=2, n_head=4
    )
    with pytest.raises(PdqError, match=r"weights are not in the files|cannot be loaded"):
        go(broken, tmp_path)


def test_I06_a_config_with_fewer_layers_is_measured_and_said(broken: Path, tmp_path: Path) -> None:
    change_config(broken, num_hidden_layers=1)
    notes = go(broken, tmp_path).info.notes
    assert len(notes) == 1 and "beyond the 1 that config.json describes" in notes[0]


def change_config(model: Path, **values: Any) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text()) | values
    if "num_hidden_layers" in values:
        config.pop("layer_types", None)
    file.write_text(json.dumps(config))


def test_Q07_a_checkpoint_that_only_says_that_it_is_quantized(broken: Path, tmp_path: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (broken / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(UsageError, match=r"already quantized \(AWQ\): .* no quantized layer is in the files"):
        go(broken, tmp_path)


# -- I08: offline, gated, mistyped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["/no/such/place", "./missing", "a/b/c", "~/missing-model", "x.gguf"])
def test_I08_a_wrong_path_says_so(word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such (directory|file)"):
        go(word, tmp_path)


def test_I08_a_typo_beside_an_existing_directory_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        go("models/typo", tmp_path)


def test_I08_a_local_directory_causes_no_connection(tiny_llama: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "def hook(event, args):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        "        raise RuntimeError(f'network: {event} {args}')\n"
        "sys.addaudithook(hook)\n"
        "from pdq_tui.core.protocol import Load\n"
        "from pdq_tui.engine.device import CpuDevice\n"
        "from pdq_tui.engine.loader import load_model\n"
        "load_model(Load(model=sys.argv[1], cache_dir=sys.argv[2]), CpuDevice(1), lambda *_: None, lambda: False)\n"
        "print('loaded')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_llama), str(tmp_path)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {"OMP_NUM_THREADS": "1"},
    )
    assert "loaded" in done.stdout, done.stderr[-2000:]


class _Response:
    def __init__(self, status: int) -> None:
        self.status_code = status
        self.headers: dict[str, str] = {}
        self.request = None


def _raising(error: Exception) -> Any:
    def download(*_: Any, **__: Any) -> str:
        raise error

    return download


def _http(kind: type[Any], status: int) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "Bearer hf_secrettoken")
    error.response = _Response(status)
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_http(hub_errors.GatedRepoError, 403), "gated"),
        (_http(hub_errors.HfHubHTTPError, 401), "refuses access"),
        (_http(hub_errors.RepositoryNotFoundError, 404), "no such directory, and no such model"),
        (_http(hub_errors.HfHubHTTPError, 500), "answered 500"),
        (ConnectionError("hf_secrettoken"), "cannot be reached"),
    ],
)
def test_I08_each_refusal_is_a_sentence_without_a_token(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", _raising(error))
    with pytest.raises(PdqError) as caught:
        go("org/name", tmp_path)
    assert words in str(caught.value)
    assert "hf_secret" not in str(caught.value)


def test_I08_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "snapshot_download", _raising(hub_errors.OfflineModeIsEnabled("off")))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnfitError, match="switched off"):
        go("org/name", tmp_path)


def test_I08_waiting_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    never = threading.Event()
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(never.wait(20)))
    asked = iter([False, True])
    with pytest.raises(Cancelled):
        hub.fetch("org/name", None, lambda *_: None, lambda: next(asked, True))
    never.set()


# -- I09: GGUF ---------------------------------------------------------------------------------------------------------


def test_I09_no_gguf_file_at_all(tmp_path: Path) -> None:
    fake = tmp_path / "model.gguf"
    fake.write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="no GGUF file"):
        go(fake, tmp_path)


def test_I09_a_gguf_is_dequantized_once_and_labelled(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory holds only a .gguf; the converter itself is tried with the demo model."""
    calls = []

    def fake_convert(gguf: Path, target: Path, progress: Any, cancelled: Any) -> None:
        calls.append(gguf)
        shutil.copytree(tiny_llama, target)

    monkeypatch.setattr(convert, "_convert", fake_convert)
    folder = tmp_path / "only"
    folder.mkdir()
    (folder / "tiny.Q4_0.gguf").write_bytes(b"GGUF" + bytes(20))
    for _ in range(2):
        info = go(folder, tmp_path).info
        assert info.id == "tiny.Q4_0 (dequantized on load)"
        assert "dequantized on load" in info.notes[0]
    assert len(calls) == 1


def test_I09_a_damaged_gguf_is_a_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(PdqError, match="cannot be dequantized"):
        go(damaged, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_the_demo_needs_its_file_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not been fetched"):
        go("demo", tmp_path)
