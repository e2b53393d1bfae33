"""Decoder layers of Llama's kind over a prompt: our own operators around the matrices, and one for those that read the same rows.

By transformers' modules a layer is some thirty operators, each a pass over all activations; norms, rotary positions, the gate
and the residual sums take as long as a quarter of the matrices. Here each is one pass, and where our own kernels multiply,
the rows are rounded once for all matrices that read them. Matrices of other kernels are called as they are, and so are the
cache and the view's attention: every format, padding and prompts in pieces stay what they were.

As for every stand-in, results are compared with those of the modules before any of them is used (``agreement``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pdq_tui.engine.kv import active_cache
from pdq_tui.engine.llama_kind import DOWN, GATE_UP, OUT, QKV, llama_kind
from pdq_tui.engine.native_forms import FORMS, given, word_of
from pdq_tui.engine.recorded import Call


class _Products:
    """Matrices that read the same rows. ``matrices``: the view's linear layers."""

    def __init__(self, matrices: Sequence[Any], nothing: Tensor) -> None:
        self._others = [(i, m) for i, m in enumerate(matrices) if type(m) not in FORMS]
        ours = [(i, m) for i, m in enumerate(matrices) if type(m) in FORMS]
        self._ours = [(i, m.out_features) for i, m in ours]
        if ours:
            found = [m for _, m in ours]
            self._tensors, self._numbers = given(found, nothing)
            self._run = getattr(torch.ops.pdq_native, f"products_{word_of(found)}_{len(found)}").default

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """rows [rows, K] → [rows, N] of each, all of them nobody else's."""
        outs: dict[int, Tensor] = {i: matrix(rows) for i, matrix in self._others}
        if self._ours:
            made = [rows.new_empty(rows.shape[0], N) for _, N in self._ours]
            self._run(rows, self._tensors, self._numbers, made)
            outs.update(zip((i for i, _ in self._ours), made, strict=True))
        return [outs[i] for i in range(len(outs))]


class PromptLayer(nn.Module):
    """One decoder layer; ``call``: how its modules were called. Raises UncompiledError where it is of another kind."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        kind = llama_kind(call.layer)
        self._slot, self._scaling, self._eps, self._head = call.slot, kind.scaling, kind.eps, kind.head_dim
        self._attention, self._attend = (
            kind.attention,
            ALL_ATTENTION_FUNCTIONS[kind.attention.config._attn_implementation],  # type: ignore[union-attr]
        )
        before, after, query, key = kind.norms
        assert before is not None and after is not None  # every class of the kind has these
        nothing = before.new_empty(0)
        self._before, self._after = before, after
        self._query = nothing if query is None else query
        self._key = nothing if key is None else key
        self._qkv, self._out, self._gate_up, self._down = (
            _Products([kind.matrices[name] for name in names], nothing)
            for names in (QKV, (OUT,), GATE_UP, (DOWN,))
        )
        # Modules stay what they are: not a submodule, so that the view's linear layers are found once.
        self._stands_for = (call.layer,)

    def forward(
        self, hidden: Tensor, *_args: Any, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """hidden [B, q, hidden]; the last q positions of what the active cache was advanced to."""
        ops: Any = torch.ops.pdq_native
        cache = active_cache()
        hidden = hidden.contiguous()
        B, q, n = hidden.shape
        cos, sin = kwargs["position_embeddings"]
        query, key, value = self._qkv(ops.norm(hidden, self._before, self._eps).view(-1, n))
        for rows, norm in ((query, self._query), (key, self._key)):
            ops.turn(rows.view(B, q, -1), cos, sin, norm, self._eps)
        heads = [rows.view(B, q, -1, self._head).transpose(1, 2) for rows in (query, key, value)]
        keys, values = cache.update(heads[1], heads[2], self._slot)
        attended, _ = self._attend(
            self._attention,
            heads[0],
            keys,
            values,
            attention_mask,
            scaling=self._scaling,
            sliding_window=cache.shape.windows[self._slot],
        )
        (state,) = self._out(attended.reshape(B * q, -1))
        gate, up = self._gate_up(ops.add_norm(state, hidden.view(-1, n), self._after, self._eps))
        ops.gated(gate, up)
        (out,) = self._down(gate)
        ops.add(out, state)
        return out.view(B, q, n)
