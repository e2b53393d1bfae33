"""A model's directory of file headers only: shapes are there, the data is a hole in the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

LAYERS, HIDDEN, INNER, KV, VOCAB = 30, 576, 1536, 192, 49_152
CONFIG = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "num_attention_heads": 9, "num_key_value_heads": 3,
    "hidden_size": HIDDEN,
}  # fmt: skip
#: [out, in] of one decoder layer's weights.
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip


def made_model(folder: Path, layers: int = LAYERS) -> Path:
    """SmolLM2-135M's shapes, with fewer layers if wanted, in bf16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": edges for name, edges in LINEARS.items()}
    header, offset = {}, 0
    for name, (rows, columns) in shapes.items():
        end = offset + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(body)) + body)
        file.truncate(8 + len(body) + offset)
    return folder
