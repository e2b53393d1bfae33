"""Tiny random models of the families that this engine runs, from transformers' own configs, and what their forward gives
with the weights that a policy leaves: by a second implementation of every rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from pdq_tui.core.policy import Format, Policy
from tests.engine.conftest import VOCAB, tiny_tokenizer

#: Positions that a layer of these models sees where it slides: shorter than the prompts of the tests.
WINDOW = 8

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "llama-bias": lambda: hf.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: hf.Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen2-sliding": lambda: hf.Qwen2Config(
        **_COMMON, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: hf.Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=True),
    "mistral": lambda: hf.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma": lambda: hf.GemmaConfig(**_COMMON, head_dim=32),
    "gemma2": lambda: hf.Gemma2Config(
        **_COMMON,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_COMMON | {"num_hidden_layers": 3},
        head_dim=16,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
    ),
    "phi": lambda: hf.PhiConfig(**_COMMON, partial_rotary_factor=0.5, qk_layernorm=True),
    "phi3": lambda: hf.Phi3Config(**_COMMON, sliding_window=WINDOW, partial_rotary_factor=0.75),
    "gpt2": lambda: hf.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **_COMMON, moe_intermediate_size=64, head_dim=16, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": lambda: hf.MixtralConfig(
        **_COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
}  # fmt: skip
SLIDING = ("qwen2-sliding", "mistral", "gemma2", "gemma3", "phi3", "mixtral")
EXPERTS = ("qwen3_moe", "mixtral")


def save_family(name: str, folder: Path, *, seed: int = 0, **saving: Any) -> Path:
    """Weights, biases and norms random and large enough that each of them shows in the logits. ``saving``: arguments of
    ``save_pretrained``."""
    generator = torch.Generator().manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(noise * 0.1)
            elif "embed" in parameter_name or "wte" in parameter_name:
                # Gemma multiplies its embeddings by the root of the hidden size
                parameter.copy_(noise * (0.02 if name.startswith("gemma") else 0.1))
            else:
                parameter.copy_(noise * 0.25)
    model.save_pretrained(folder, **saving)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def round_matrix(weight: torch.Tensor, fmt: Format) -> torch.Tensor:
    """[N, K] as ``fmt`` holds it, in float32."""
    if fmt.dense:
        return weight
    if fmt.weights == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return (weight / scale).round().clamp(-127, 127) * scale
    assert fmt.weights == "int4"
    groups = weight.reshape(weight.shape[0], -1, fmt.group_size)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    return (((groups - low) / scale).round() * scale + low).reshape(weight.shape)


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., K] on an int8 grid of its own a row."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round() * scale


def rounded(model: PreTrainedModel, policy: Policy, stage: str) -> PreTrainedModel:
    """``model`` changed in place: every matrix as the stage's format holds it, activations rounded where it says so."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            fmt = policy.format_for(name, stage)
            w = module.weight.data.t() if isinstance(module, Conv1D) else module.weight.data
            if not fmt.dense:
                w.copy_(round_matrix(w, fmt))
            if fmt.activations == "int8":
                module.register_forward_pre_hook(lambda _module, args: (round_rows(args[0]),))
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                fmt = policy.format_for(f"{name}.{leaf}", stage)
                for matrix in parameter.data:
                    matrix.copy_(round_matrix(matrix, fmt))
                if fmt.activations == "int8":
                    model.config._experts_implementation = "tests_rounded"
    return model


def _rounded_experts(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """One token and one expert at a time."""
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for slot in range(chosen.shape[1]):
            expert = int(chosen[token, slot])
            gate, up = (module.gate_up_proj[expert] @ round_rows(hidden[token])).chunk(2)
            inner = round_rows(module.act_fn(gate) * up)
            out[token] += shares[token, slot] * (module.down_proj[expert] @ inner)
    return out


ALL_EXPERTS_FUNCTIONS.register("tests_rounded", _rounded_experts)
