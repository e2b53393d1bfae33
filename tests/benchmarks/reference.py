"""``transformers.generate`` as an outside reference: the same model, prompt and length, timed at the same places."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Generate:
    """Plain ``generate`` in bf16, greedy, as its documentation would have it. One forward over the prompt is prefill;
    the time from its end to the end of the last forward, over the N − 1 forwards between, is the decode step."""

    def __init__(self, model_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
        self.ends: list[float] = []
        self.model.register_forward_hook(lambda *_: self.ends.append(time.perf_counter()))

    def run(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        """ids [1, P] → (prefill ms, ms per decode step)."""
        self.ends.clear()
        start = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + new_tokens
        assert len(self.ends) == new_tokens
        prefill = (self.ends[0] - start) * 1e3
        return prefill, (self.ends[-1] - self.ends[0]) * 1e3 / (new_tokens - 1)
