"""A model's shapes from config.json and the headers of its safetensors files: no weight is read.

Which tensors belong to linear layers is told from names and ranks alone, so it is a prediction; the engine's census
after loading is the truth.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.core.kv import KvGeometry, windows_of
from pdq_tui.errors import UsageError

_EMBEDDINGS: Final = ("embed", "wte", "wpe", "position_emb")
#: Model types whose linear layers are stored [K, N] (transformers' Conv1D).
_TRANSPOSED: Final = ("gpt2",)
#: A mixture's matrices: one tensor an expert, [N, K], or one for all of them, [E, N, K].
_EXPERT: Final = re.compile(
    r"(?P<owner>.*\.experts)\.(?:(?P<number>\d+)\.)?(?P<kind>gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"(?:\.weight)?$"
)
_DOWN: Final = ("down_proj", "w2")
_ROUTERS: Final = (".gate.weight", ".router.weight")
#: Model types whose every layer slides where config.json says a window and no layer types.
_ALL_SLIDE: Final = ("mistral", "mixtral", "phi3", "starcoder2")
_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
#: Names of the dtypes that a model runs in; others are loaded as the first.
_DTYPES: Final = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_HEADER_LIMIT: Final = 100_000_000


class Linear(msgspec.Struct, frozen=True):
    """One linear layer's weight [N, K]: ``name`` of its module. ``tied``: the head that is the input embedding.
    ``experts``: how many matrices there are, alike but for their numbers, of a mixture's experts; else 1."""

    name: str
    N: int
    K: int
    tied: bool = False
    experts: int = 1

    @property
    def parameters(self) -> int:
        return self.N * self.K * self.experts


class Shapes(msgspec.Struct, frozen=True):
    """``dtype``: short name of what most linear weights are stored in. ``other_bytes``: every tensor that is no linear layer's weight. ``fused``: (name, parameters) of weights with
    more than two dimensions that are no experts', and of routers. ``kv`` None with a reason in ``kv_reason``, which
    else may say what it does not tell."""

    path: str
    dtype: str
    dtype_bytes: int
    linears: tuple[Linear, ...]
    fused: tuple[tuple[str, int], ...]
    other_bytes: int
    kv: KvGeometry | None
    kv_reason: str = ""


def read_shapes(folder: Path) -> Shapes:
    """Raises UsageError, naming the file, where the directory or one of its files is not what it should be."""
    if not folder.is_dir():
        raise UsageError(f"no such directory: {folder}", "--model takes a local model directory")
    config = _config(folder / "config.json")
    if config.get("quantization_config") or config.get("compression_config"):
        raise UsageError(
            f"{folder.name}: this checkpoint is already quantized: nothing is predicted from its headers",
            "the engine reads it: load it, and the coverage tells",
        )
    tensors: dict[str, tuple[str, list[int]]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder}: there are no .safetensors files in it", "other formats are read by the engine only"
        )
    for file in files:
        tensors |= _header(file)
    transposed = config.get("model_type") in _TRANSPOSED
    linears, fused, other, stored = [], [], 0, []
    mixtures = _experts(tensors)
    for name, (dtype, shape) in tensors.items():
        size = _BYTES.get(dtype, 1)
        if _expert(name, shape):
            stored.append(dtype)
            continue
        parameters = 1
        for edge in shape:
            parameters *= edge
        module = name.removesuffix(".weight")
        router = bool(mixtures) and name.endswith(_ROUTERS)
        if (
            len(shape) == 2
            and name.endswith(".weight")
            and not router
            and not any(e in name for e in _EMBEDDINGS)
        ):
            N, K = (shape[1], shape[0]) if transposed and "lm_head" not in name else (shape[0], shape[1])
            linears.append(Linear(module, N, K))
            stored.append(dtype)
            continue
        if len(shape) > 2 or router:
            fused.append((name, parameters))
        other += parameters * size
    linears += mixtures
    embedding = next(
        (s for n, (_, s) in tensors.items() if "embed_tokens" in n or n.endswith("wte.weight")), None
    )
    if not any("lm_head" in x.name for x in linears) and embedding is not None and len(embedding) == 2:
        linears.append(Linear("lm_head", embedding[0], embedding[1], tied=True))
    most = max(set(stored), key=stored.count) if stored else "BF16"
    width = _BYTES.get(most, 1)
    kv, why = _kv(config, width)
    return Shapes(str(folder), _DTYPES.get(most, "bf16"), width, tuple(linears), tuple(fused), other, kv, why)


def _expert(name: str, shape: list[int]) -> re.Match[str] | None:
    found = _EXPERT.match(name)
    return found if found and len(shape) == (3 if found["number"] is None else 2) else None


def _experts(tensors: Mapping[str, tuple[str, list[int]]]) -> list[Linear]:
    """The matrices of experts under the names that they have in the loaded model, where gate and up are one matrix:
    whether the files hold one tensor an expert or one for all of them."""
    rows: dict[str, int] = {}
    found: dict[str, tuple[int, int]] = {}
    for name, (_, shape) in tensors.items():
        parts = _expert(name, shape)
        if parts is None:
            continue
        owner, number, kind = parts["owner"], parts["number"], parts["kind"]
        down = kind in _DOWN
        key = f"{owner}.{'down_proj' if down else 'gate_up_proj'}"
        if number is None:
            found[key], rows[key] = (shape[0], shape[2]), shape[1]
            continue
        count = found.get(key, (0, 0))[0]
        if int(number) == 0:
            rows[key] = rows.get(key, 0) + shape[0]
        found[key] = (max(count, int(number) + 1), shape[1])
    return [Linear(key, rows[key], K, experts=count) for key, (count, K) in found.items() if key in rows]


def _config(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: missing", "a model directory has a config.json") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{path}: is not a JSON object")
    return body


def _header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """name → (dtype, shape). The format: 8 bytes of length, little-endian, then JSON, then the data."""
    try:
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if start[:7] == b"version":
                raise UsageError(f"{file}: is a Git LFS pointer, not the weights", "git lfs pull")
            if not 2 <= length <= min(_HEADER_LIMIT, file.stat().st_size):
                raise UsageError(f"{file}: its header is cut off or damaged", "fetch the file again")
            body = json.loads(stream.read(length))
        return {
            name: (str(entry["dtype"]), [int(edge) for edge in entry["shape"]])
            for name, entry in body.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file}: its header cannot be read: {error}") from error


def _kv(config: dict[str, Any], width: int) -> tuple[KvGeometry | None, str]:
    """Layers, KV heads, head size and windows, from the usual names."""
    c = config.get("text_config", config)
    layers, heads = (
        c.get("num_hidden_layers", c.get("n_layer")),
        c.get("num_attention_heads", c.get("n_head")),
    )
    hidden = c.get("hidden_size", c.get("n_embd"))
    if not all(isinstance(n, int) and n > 0 for n in (layers, heads, hidden)):
        return None, "config.json does not say layers, heads and hidden size under the usual names"
    if "kv_lora_rank" in c:
        return None, "this model's KV cache is compressed (MLA)"
    window, kinds, why = c.get("sliding_window"), c.get("layer_types"), ""
    slides = isinstance(window, int) and c.get("use_sliding_window") is not False
    if slides and not kinds and c.get("model_type") not in _ALL_SLIDE:
        why = f"some layers keep their last {window} positions only: which ones, the engine tells"
        window = None
    windows = windows_of(layers, window, c.get("use_sliding_window"), kinds)
    head = c.get("head_dim") or hidden // heads
    return KvGeometry(c.get("num_key_value_heads") or heads, head, width, windows), why
