"""A model's shapes from config.json and the headers of its safetensors files: no weight is read.

Which tensors belong to linear layers is told from names and ranks alone, so it is a prediction; the engine's census
after loading is the truth.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.errors import UsageError

_EMBEDDINGS: Final = ("embed", "wte", "wpe", "position_emb")
#: Model types whose linear layers are stored [K, N] (transformers' Conv1D).
_TRANSPOSED: Final = ("gpt2",)
_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
_HEADER_LIMIT: Final = 100_000_000


class Linear(msgspec.Struct, frozen=True):
    """One linear layer's weight [N, K]: ``name`` of its module. ``tied``: the head that is the input embedding."""

    name: str
    N: int
    K: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        return self.N * self.K


class Shapes(msgspec.Struct, frozen=True):
    """``other_bytes``: every tensor that is no linear layer's weight. ``fused``: (name, parameters) of weights with
    more than two dimensions. ``kv_bytes_per_token`` None with a reason in ``kv_reason``."""

    path: str
    dtype_bytes: int
    linears: tuple[Linear, ...]
    fused: tuple[tuple[str, int], ...]
    other_bytes: int
    kv_bytes_per_token: int | None
    kv_reason: str = ""


def read_shapes(folder: Path) -> Shapes:
    """Raises UsageError, naming the file, where the directory or one of its files is not what it should be."""
    if not folder.is_dir():
        raise UsageError(f"no such directory: {folder}", "--model takes a local model directory")
    config = _config(folder / "config.json")
    tensors: dict[str, tuple[str, list[int]]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder}: there are no .safetensors files in it", "other formats are read by the engine only"
        )
    for file in files:
        tensors |= _header(file)
    transposed = config.get("model_type") in _TRANSPOSED
    linears, fused, other, widths = [], [], 0, []
    for name, (dtype, shape) in tensors.items():
        size = _BYTES.get(dtype, 1)
        parameters = 1
        for edge in shape:
            parameters *= edge
        module = name.removesuffix(".weight")
        if len(shape) == 2 and name.endswith(".weight") and not any(e in name for e in _EMBEDDINGS):
            N, K = (shape[1], shape[0]) if transposed and "lm_head" not in name else (shape[0], shape[1])
            linears.append(Linear(module, N, K))
            widths.append(size)
            continue
        if len(shape) > 2:
            fused.append((name, parameters))
        other += parameters * size
    embedding = next(
        (s for n, (_, s) in tensors.items() if "embed_tokens" in n or n.endswith("wte.weight")), None
    )
    if not any("lm_head" in x.name for x in linears) and embedding is not None and len(embedding) == 2:
        linears.append(Linear("lm_head", embedding[0], embedding[1], tied=True))
    width = max(set(widths), key=widths.count) if widths else 2
    kv, why = _kv(config, width)
    return Shapes(str(folder), width, tuple(linears), tuple(fused), other, kv, why)


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


def _kv(config: dict[str, Any], width: int) -> tuple[int | None, str]:
    """2 · layers · KV heads · head size · bytes, from the usual names."""
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
    head = c.get("head_dim") or hidden // heads
    return 2 * layers * (c.get("num_key_value_heads") or heads) * head * width, ""
