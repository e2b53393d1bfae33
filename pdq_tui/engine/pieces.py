"""A long prompt in pieces: how many rows go through the model at once, and why a prompt is not cut.

What a layer holds while it works on a prompt (the MLP's intermediate values above all) grows with the rows; in pieces it
grows to that of one piece. Each piece reads all weights again and attends to what earlier ones wrote into the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdq_tui.core.kv import KvPolicy


@dataclass(frozen=True)
class Pieces:
    """``rows``: the most (tokens × sequences) at once; None: a prompt is always whole. ``reason``: who says so."""

    rows: int | None = None
    reason: str = ""

    def most(self, rows: int) -> int:
        """Rows of the largest piece of a prompt of so many; what kernels are chosen for."""
        return rows if self.rows is None else min(rows, self.rows)

    def cut(self, batch: int, positions: int) -> list[tuple[int, int]]:
        """Half-open ranges of positions, one after the other. They differ by one position at most: a last piece of a few
        rows would be none that the kernels were chosen for."""
        count = 1 if self.rows is None else -(-batch * positions // self.rows)
        count = min(count, positions)
        return [(positions * i // count, positions * (i + 1) // count) for i in range(count)]


def pieces_of(wanted: int | None, table_rows: int | None, table: str, kv: KvPolicy) -> Pieces:
    """``wanted``: the setting engine.prefill_rows, None: as the kernel table says, 0: never cut. ``table_rows``: what the
    kernel table says, None where it says nothing; ``table``: its name, for the reason."""
    if wanted == 0:
        return Pieces(None, "engine.prefill_rows is 0")
    rows = wanted or table_rows
    if rows is None:
        return Pieces()
    if kv.convert == "write" and kv.prefill != kv.decode:
        # What earlier pieces computed is not at hand any more in the form that prefill reads.
        return Pieces(None, f"prefill reads {kv.prefill} and stores {kv.decode} at each write")
    return Pieces(rows, "engine.prefill_rows" if wanted else table)
