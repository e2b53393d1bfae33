"""The census of one stage of a staged model in ``core.roofline``'s terms, read from what is really placed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pdq_tui.core.kv import KvPolicy, Stage
from pdq_tui.core.roofline import Op, StageCost, linear, merged
from pdq_tui.engine.census import Census
from pdq_tui.engine.formats.packed import DTYPE_NAMES
from pdq_tui.engine.kv import MODEL_DTYPE, KvShape
from pdq_tui.engine.plan import Placement


class CostModel:
    """Bytes and FLOPs of prefill and of one decode step for one model."""

    def __init__(self, census: Census, kv: KvShape, hidden: int) -> None:
        self.census, self.kv, self.hidden = census, kv, hidden
        self.dtype = DTYPE_NAMES[kv.dtype]
        fused = sum(f.nbytes for f in census.fused)
        #: norms, biases, position tables' single rows: read once a pass.
        self.small_bytes = max(census.other_bytes - census.embedding_bytes - fused, 0)

    def _linears(
        self, placements: Sequence[Placement], tokens: int, sequences: int, passes: int = 1
    ) -> list[Op]:
        """``passes``: how often the weights are read, for an equal part of the tokens each."""
        ops = []
        for p in placements:
            arithmetic = p.candidate.arithmetic
            if arithmetic == "model":
                arithmetic = DTYPE_NAMES[p.spec.stored_dtype] if p.spec.fmt.dense else self.dtype
            layer, rows, read = p.layer, sequences if p.layer.head else tokens, p.spec.nbytes
            kind = "head" if layer.head else "linear"
            if layer.experts:
                kind, rows = "experts", tokens * layer.routed
                # at most this many distinct ones; exact for one token
                read = read * min(layer.experts, -(-rows // passes)) // layer.experts
            read *= passes
            ops.append(linear(f"{kind} {layer.N}x{layer.K}", layer.N, layer.K, rows, read, arithmetic))
        return ops

    def _rest(self, tokens: int, passes: int = 1) -> list[Op]:
        size = self.kv.dtype.itemsize
        ops = [
            Op("embedding", tokens * self.hidden * size, 0.0, self.dtype),
            Op("norms and biases", passes * self.small_bytes, 0.0, self.dtype),
        ]
        ops += [
            Op("other weights", passes * f.nbytes, 2.0 * f.parameters * tokens, self.dtype)
            for f in self.census.fused
        ]
        return ops

    def _attention(
        self,
        kv: KvPolicy,
        stage: Stage,
        sequences: int,
        positions: Callable[[int], int],
        pairs: Callable[[int], float],
    ) -> list[Op]:
        """One operator a layer. ``positions``: whose keys and values are read, over the batch, by how far back the layer
        sees; ``pairs`` of query and key, likewise."""
        shape, size = self.kv, self.kv.geometry.layer_bytes(kv, stage)
        beside = sequences * self.kv.geometry.sequence_layer_bytes(kv) if stage == "decode" else 0
        return [
            Op(
                "attention",
                positions(sight) * size + beside,
                4.0 * shape.heads * shape.head_dim * pairs(sight),
                self.dtype,
            )
            for sight in (window or sys.maxsize for window in shape.windows)
        ]

    def prefill(
        self,
        placements: Sequence[Placement],
        lengths: Sequence[int],
        kv: KvPolicy = MODEL_DTYPE,
        ends: Sequence[int] = (),
    ) -> StageCost:
        """``lengths``: real prompt tokens of each sequence; padding is no work that had to be done. ``ends``: positions up
        to which each piece of a prompt goes; each reads the weights, and the keys and values of those before it."""
        tokens, passes = sum(lengths), max(1, len(ends))
        longest = max(lengths, default=0)
        starts = [0, *ends[:-1]]

        def pairs(sight: int) -> float:
            # query n sees min(n, sight) positions
            return sum((m := min(n, sight)) * (m + 1) / 2 + (n - m) * m for n in lengths)

        def positions(sight: int) -> int:
            # the piece's own, and of those before it what a layer still sees
            earlier = sum(min(max(0, start - (longest - n)), sight) for start in starts for n in lengths)
            return tokens + earlier

        ops = [
            *self._linears(placements, tokens, len(lengths), passes),
            *self._rest(tokens, passes),
            *self._attention(kv, "prefill", len(lengths), positions, pairs),
        ]
        return StageCost(merged(ops))

    def step(
        self,
        placements: Sequence[Placement],
        contexts: Sequence[int],
        length: int,
        kv: KvPolicy = MODEL_DTYPE,
    ) -> StageCost:
        """One token a sequence over ``contexts`` real positions, the new one included; ``length``: positions of every
        row, padding included: what a step reads of the padding is wasted."""
        B, geometry = len(contexts), self.kv.geometry

        def positions(sight: int) -> int:
            return sum(min(n, sight) for n in contexts)

        ops = [
            *self._linears(placements, B, B),
            *self._rest(B),
            *self._attention(kv, "decode", B, positions, positions),
        ]
        read = sum(
            min(length, window or length) * B - positions(window or length) for window in geometry.windows
        )
        return StageCost(merged(ops), read * geometry.layer_bytes(kv, "decode"))
