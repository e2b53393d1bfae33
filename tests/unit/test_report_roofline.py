"""The roofline in reports: places and roofs by hand arithmetic, what is missing with its reason, words in every form."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_snapshots

from pdq_tui.core.roofline import Roofline, distinct_roofs, document_rooflines
from pdq_tui.report.figure import svg
from pdq_tui.report.roofline import roofline_table
from pdq_tui.report.roofline_figure import roofline_figure
from pdq_tui.report.tables import render
from pdq_tui.store.compare import Comparison, compare
from pdq_tui.store.listing import resolve
from pdq_tui.store.snapshot import load

DEVICE = {"name": "CPU (R) one", "read_peak_gbps": 40.0, "compute_peak_tflops": {"bf16": 4.0, "int8": 8.0}}


def arm(label: str = "one", **decode: Any) -> dict[str, Any]:
    return {
        "label": label,
        "policy": "w8a8",
        "prefill": {
            "bytes": 10**9,
            "flops": {"int8": 3e11, "bf16": 1e11},
            "prefill_ms": {"median": 100.0, "ci95": None, "n": 3, "unit": "ms"},
        },
        "decode": {"bytes_per_step": 10**8, "flops": {"bf16": 3e8}, "step_ms": {"median": 5.0}} | decode,
    }


def lines(*arms: dict[str, Any], device: Any = None) -> list[Roofline]:
    return document_rooflines({"arms": list(arms), "device": DEVICE if device is None else device})


def drawn(found: list[Roofline]) -> dict[str, list[dict[str, Any]]]:
    """What the figure draws: edges of roofs, ridges, points."""
    draw = roofline_figure(found).draw
    assert draw is not None
    spec = draw(680).to_dict()
    rows = [
        (layer["mark"], data.get("values", spec.get("datasets", {}).get(data.get("name"))))
        for layer in spec["layer"]
        for data in [layer["data"]]
    ]
    return {
        "edges": next((r for mark, r in rows if mark["type"] == "rule"), []),
        "ridges": next(r for mark, r in rows if mark.get("shape") == "diamond"),
        "points": next(r for mark, r in rows if mark.get("size") == 110),
    }


@pytest.fixture
def compared(tmp_path: Path) -> Comparison:
    return compare([load(resolve(i, tmp_path)) for i in made_snapshots.save_all(tmp_path)])


def test_points_and_roofs_are_where_arithmetic_puts_them() -> None:
    edges, ridges, points = drawn(lines(arm())).values()
    at = {p["letter"]: p for p in points}
    assert at["P"]["intensity"] == pytest.approx(400) and at["P"]["tflops"] == pytest.approx(4.0)
    assert at["D"]["intensity"] == pytest.approx(3) and at["D"]["tflops"] == pytest.approx(0.06)
    assert {(r["x"], r["y"]) for r in ridges} == {(100.0, 4.0), (200.0, 8.0)}
    slope = next(e for e in edges if not e["name"])
    assert slope["y"] == pytest.approx(slope["x"] * 0.04) and (slope["x2"], slope["y2"]) == (200.0, 8.0)
    # Every roof is over the drawing's own span, so that no line leaves it.
    assert all(math.isfinite(e[k]) and e[k] > 0 for e in edges for k in ("x", "y", "x2", "y2"))


def test_a_point_tells_bytes_operations_and_time_without_a_script() -> None:
    figure = roofline_figure(lines(arm("<img>")))
    assert figure.draw is not None
    text = svg(figure.draw(680), 680, "roofline-wide")
    assert (
        "<title>&lt;img&gt; decode (w8a8): 95.4 MiB, 0.3 GFLOP bf16, 5 ms; 3 FLOP/byte, 0.06 TFLOP/s, 20 GB/s; bound by memory"
        "</title></path>" in text
    )
    assert text.count("<title>") == 2 + 2 and "<img" not in text


def test_what_has_no_place_says_why() -> None:
    found = lines(
        arm(), arm("two", step_ms=None, step_ms_reason="an answer of one token has no step"), {"label": "x"}
    )
    table = roofline_table(found)
    assert [r[2] for r in table.rows] == ["953.7 MiB", "95.4 MiB", "953.7 MiB", "n/a", "n/a", "n/a"]
    assert "two decode: n/a (an answer of one token has no step)" in table.footer
    assert "x prefill: n/a (bytes is not in the document)" in table.footer
    assert "two decode (an answer of one token has no step)" in roofline_figure(found).reads
    nothing = roofline_figure(lines({"label": "x"}))
    assert nothing.draw is None and "bytes is not in the document" in (nothing.missing or "")
    assert roofline_figure([]).draw is None
    text = render({"arms": [{"label": "x"}], "device": DEVICE}, "md")
    assert "### roofline" not in text and "no roofline: bytes is not in the document" in text


@pytest.mark.parametrize(
    "device",
    [{}, {"name": "c"}, {"read_peak_gbps": None}, {"read_peak_gbps": float("nan"), "compute_peak_tflops": 3}],
)
def test_without_peaks_there_is_no_roof_and_no_side(device: Any) -> None:
    found = lines(arm(), device=device)
    assert (
        drawn(found)["edges"] == []
        and distinct_roofs(found) == []
        and "there is no roof" in roofline_figure(found).reads
    )
    assert [r[-1] for r in roofline_table(found).rows] == ["n/a", "n/a"]


def test_a_peak_of_one_kind_alone_draws_that_kind() -> None:
    memory = drawn(lines(arm(), device={"name": "c", "read_peak_gbps": 40.0}))["edges"]
    assert [e["name"] for e in memory] == [""]
    arithmetic = drawn(lines(arm(), device={"name": "c", "compute_peak_tflops": {"bf16": 4.0}}))["edges"]
    assert [e["name"] for e in arithmetic] == ["bf16 4"] and not arithmetic[0]["ridge"]


def test_two_devices_have_two_roofs_and_another_look_at_one_has_none() -> None:
    other = {"name": "another", "read_peak_gbps": 4000.0, "compute_peak_tflops": {"bf16": 800.0}}
    near = DEVICE | {"read_peak_gbps": 41.0}
    found = [*lines(arm()), *lines(arm("two"), device=near), *lines(arm("three"), device=other)]
    assert [name for name, _ in distinct_roofs(found)] == ["CPU (R) one", "another"]
    edges, _, points = drawn(found).values()
    assert {e["n"] for e in edges} == {0, 1} and {"bf16 800, another"} <= {e["name"] for e in edges}
    assert all(", CPU (R) one" in p["tells"] or ", another" in p["tells"] for p in points)
    threads = DEVICE | {"read_peak_gbps": 20.0}
    assert len(distinct_roofs([*lines(arm()), *lines(arm(), device=threads)])) == 2


def test_a_comparison_has_it_in_every_form(compared: Comparison) -> None:
    assert [(r.label, [p.stage for p in r.points]) for r in compared.rooflines] == [
        ("bf16", ["prefill", "decode"]),
        ("int8-prefill-int4-decode", ["prefill", "decode"]),
    ]
    text = render(compared, "md")
    assert "### roofline" in text and "190 GFLOP int8 + 10 GFLOP bf16" in text and "175 (int8)" in text
    assert "Virtual CPU: read 40 GB/s; bf16 4 TFLOP/s, from 100 FLOP/byte on" in text
    assert "### roofline" not in render(compared, "md", diff_only=True)
    body = json.loads(render(compared, "json"))
    assert body["rooflines"][0]["points"][1]["bytes"] == 100_000_000
    assert body["rooflines"][0]["roof"]["read_gbps"] == 40.0
