"""The roofline as a table: what each stage reads, multiplies and takes, and on which side of its ridge it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdq_tui.core.metrics import MISSING, format_bytes
from pdq_tui.core.roofline import Roof, Roofline, RoofPoint, distinct_roofs
from pdq_tui.report.page import Table

_COLUMNS = ("arm", "stage", "bytes", "FLOPs", "time", "FLOP/byte", "TFLOP/s", "GB/s", "turns at", "bound by")
_HOW = (
    "bytes and FLOPs are counted, of one prefill and of one decode step; time is the median. Below the FLOP/byte at which its "
    "dtype turns, a stage is bound by memory, from it on by arithmetic"
)


def roofline_table(lines: Sequence[Roofline]) -> Table:
    """A row a stage of each of ``lines``; what cannot be placed is n/a, with the reason below."""
    table = Table(title="roofline", columns=list(_COLUMNS), rows=[], left=2)
    why: dict[str, list[str]] = {}
    for line in lines:
        drawn = {p.stage: p for p in line.points}
        for stage in dict.fromkeys(("prefill", "decode", *drawn)):
            point = drawn.get(stage)
            cells = [MISSING] * (len(_COLUMNS) - 2) if point is None else _cells(point, line.roof)
            table.rows.append([line.label, stage, *cells])
        for stage, reason in line.missing.items():
            why.setdefault(reason, []).append(f"{line.label} {stage}")
    table.footer = [f"{', '.join(who)}: {MISSING} ({reason})" for reason, who in why.items()]
    table.footer += [f"{device}: {roof_text(roof)}" for device, roof in distinct_roofs(lines)]
    table.footer.append(_HOW)
    return table


def _cells(p: RoofPoint, roof: Roof) -> list[str]:
    ridge = roof.ridge(p.dtype)
    return [
        format_bytes(p.bytes),
        flops_text(p.flops),
        f"{p.ms:.4g} ms",
        short(p.intensity),
        short(p.tflops),
        short(p.gbps),
        MISSING if ridge is None else f"{short(ridge)} ({p.dtype})",
        {"memory": "memory", "compute": "arithmetic", None: MISSING}[p.bound(roof)],
    ]


def flops_text(flops: Mapping[str, float]) -> str:
    """ "190 GFLOP int8 + 2.4 GFLOP bf16", the largest share first."""
    return " + ".join(
        f"{short(f / 1e9)} GFLOP {d}" for d, f in sorted(flops.items(), key=lambda item: -item[1])
    )


def roof_text(roof: Roof) -> str:
    """ "read 31.6 GB/s; bf16 0.42 TFLOP/s, from 13.3 FLOP/byte on", as measured."""
    parts = [f"read {short(roof.read_gbps)} GB/s" if roof.read_gbps else "no read peak was measured"]
    for dtype, peak in sorted(roof.compute_tflops.items()):
        ridge = roof.ridge(dtype)
        parts.append(
            f"{dtype} {short(peak)} TFLOP/s{'' if ridge is None else f', from {short(ridge)} FLOP/byte on'}"
        )
    return "; ".join(parts)


def short(value: float) -> str:
    """Three digits, and no power of ten from 1,000 on."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
