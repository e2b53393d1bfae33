"""Kernel tables by stage from made traces: nesting, a device's kernels, gaps, names of several torch versions, repair."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pdq_tui.core import tracing
from pdq_tui.core.evidence import OPERATORS, flagged, unmatched
from pdq_tui.core.kernels import OPS, load_kernels
from pdq_tui.core.protocol import StageTrace
from pdq_tui.errors import PdqError


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def mark(name: str, ts: float, dur: float) -> dict[str, Any]:
    return event(name, "user_annotation", ts, dur)


def op(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return event(name, "cpu_op", ts, dur, **args)


def tables(*events: dict[str, Any]) -> dict[str, StageTrace]:
    return {s.stage: s for s in tracing.stage_tables({"traceEvents": list(events)})}


MM = {"Input Dims": [[1, 64], [64, 32]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}


def test_self_time_is_without_what_was_called_and_the_rest_lies_between() -> None:
    found = tables(
        mark(tracing.PREFILL, 0, 1000),
        op("aten::linear", 100, 400),
        op("aten::mm", 150, 300, **MM),
        op("aten::softmax", 600, 100),
        mark(tracing.DECODE, 2000, 100),
        op("aten::mm", 2010, 50, **MM),
        mark(tracing.DECODE, 2200, 100),
        op("aten::mm", 2210, 70, **MM),
        op("aten::mm", 5000, 999, **MM),  # of nobody's stage
    )
    prefill = {k.name: k for k in found["prefill"].kernels}
    assert prefill["aten::linear"].ms == pytest.approx(0.1)
    assert prefill["aten::mm"].ms == pytest.approx(0.3)
    assert found["prefill"].between_ms == pytest.approx(0.5)
    assert found["prefill"].trace_ms == pytest.approx(1.0)
    decode = found["decode"]
    assert (decode.steps, decode.kernels[0].calls) == (2, 2)
    assert decode.kernels[0].ms == pytest.approx(0.12)
    for stage in found.values():
        assert sum(k.share for k in stage.kernels) <= 1
        assert sum(tracing.by_category(stage).values()) == pytest.approx(stage.trace_ms)


def test_bytes_and_flops_come_from_the_shapes_or_are_not_known() -> None:
    found = tables(
        mark(tracing.DECODE, 0, 100),
        op("aten::mm", 0, 10, **MM),
        op("aten::mm", 20, 10, **MM),
        op("pdq_native::int4", 40, 10, **{
            "Input Dims": [[1, 64], [32, 32], [32, 1, 2], []],
            "Input type": ["c10::BFloat16", "unsigned char", "c10::BFloat16", "Scalar"],
        }),
        op("aten::mul", 60, 10),
    )  # fmt: skip
    rows = {k.name: k for k in found["decode"].kernels}
    assert rows["aten::mm"].flops == 2 * 2 * 64 * 32
    assert rows["aten::mm"].bytes == 2 * 2 * (64 + 64 * 32 + 32)
    assert rows["aten::mm"].category == tracing.GEMV
    assert rows["pdq_native::int4"].flops == 2 * 64 * 32
    assert rows["pdq_native::int4"].bytes == 64 * 2 + 32 * 32 + 32 * 2 * 2 + 32 * 2
    assert (rows["aten::mul"].bytes, rows["aten::mul"].flops) == (None, None)


def test_products_of_the_same_rows_are_counted_together() -> None:
    """As torch writes a list's shapes; its dtypes are not told."""

    def work(name: str, width: int) -> tuple[int | None, float | None]:
        matrix = [[32, width], [32, 2, 2], [0], [32]]
        return tracing.work(
            name,
            {
                "Input Dims": [[5, 64], [*matrix, *matrix], [], [[5, 32], [5, 32]]],
                "Input type": ["c10::BFloat16", "TensorList", "ScalarList", "TensorList"],
            },
        )

    flops, around = 2 * 2 * 5 * 64 * 32, 2 * (5 * 64 + 2 * 5 * 32) + 2 * (2 * 128 + 2 * 32)
    assert work("pdq_native::products_int4_2", 32) == (around + 2 * 32 * 32, flops)
    assert work("pdq_native::products_dense_2", 64) == (around + 2 * 32 * 64 * 2, flops)
    assert work("pdq_native::products_mixed_2", 64) == (None, flops)


@pytest.mark.parametrize(
    ("name", "within", "rows", "expected"),
    [
        ("aten::mm", (), 512, "weight GEMM"),
        ("aten::mm", (), 1, "weight GEMV"),
        ("aten::_int_mm", (), 64, "weight GEMM"),
        ("aten::new_empty", ("pdq_native::int8",), 1, "weight GEMV"),
        ("aten::div", (f"{tracing.LINEAR}w8a8-int_mm",), None, "quantize"),
        ("aten::copy_", (f"{tracing.LINEAR}int4-dequantize",), None, "dequantize"),
        ("bitsandbytes::dequantize_4bit", (), None, "dequantize"),
        ("bitsandbytes::gemv_4bit", (), None, "weight GEMM"),
        ("aten::bmm", (), None, "attention"),
        ("aten::copy_", ("pdq::decode_attention",), None, "KV"),
        ("aten::copy_", (tracing.KV,), None, "KV"),
        ("aten::max", (tracing.SAMPLE,), None, "sampling"),
        ("aten::mul", (), None, "norm/rope/elementwise"),
        ("pdq_native::products_int8_3", (), 512, "weight GEMM"),
        ("pdq_native::add_norm", (), None, "norm/rope/elementwise"),
        ("aten::cat", (), None, "copies"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", (), 512, "weight GEMM"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s8_i16832gemm>", (), 2, "weight GEMV"),
        ("void pytorch_flash::flash_fwd_kernel<...>", (), None, "attention"),
        ("void at::native::vectorized_elementwise_kernel<4>", (), None, "norm/rope/elementwise"),
        ("Memcpy DtoD (Device -> Device)", (), None, "copies"),
        ("nobody_knows", (), None, "other"),
    ],
)
def test_categories(name: str, within: tuple[str, ...], rows: int | None, expected: str) -> None:
    assert tracing.category(name, within, rows) == expected
    assert expected in tracing.CATEGORIES


def launched(
    name: str, at: float, host: float, dur: float, number: int, stream: int = 7
) -> list[dict[str, Any]]:
    """A kernel that runs from ``at`` on, launched at ``host`` by an operator of the host."""
    return [
        event("aten::mm", "cpu_op", host, 4, **{"External id": number, **MM}),
        event("cudaLaunchKernel", "cuda_runtime", host + 1, 2, correlation=number),
        event(name, "kernel", at, dur, tid=stream, correlation=number, **{"External id": number}),
    ]


def test_a_devices_kernels_belong_to_the_stage_that_launched_them_not_to_the_one_they_ran_in() -> None:
    found = tables(
        mark(tracing.PREFILL, 0, 100),
        *launched("gemm_of_prefill", 500, 10, 300, 1),
        mark(tracing.DECODE, 600, 100),
        *launched("gemv_of_decode", 810, 610, 50, 2),
        event(tracing.PREFILL, "gpu_user_annotation", 500, 300, tid=7),
    )
    prefill, decode = found["prefill"], found["decode"]
    assert (prefill.where, decode.where) == ("device", "device")
    assert [k.name for k in prefill.kernels] == ["gemm_of_prefill"]
    assert [k.name for k in decode.kernels] == ["gemv_of_decode"]
    assert prefill.trace_ms == pytest.approx(0.3)
    assert prefill.launch_bound is False


def test_gaps_between_kernels_are_launch_bound_and_overlap_is_counted_once() -> None:
    gappy = tables(
        mark(tracing.DECODE, 0, 1000),
        *launched("a", 10, 1, 100, 1),
        *launched("b", 400, 20, 100, 2),
        *launched("c", 900, 40, 100, 3),
    )["decode"]
    assert gappy.launch_bound is True
    assert "launch-bound" in str(gappy.launch_reason)
    assert gappy.between_ms == pytest.approx(0.99 - 0.3)
    full = tables(
        mark(tracing.DECODE, 0, 1000),
        *launched("a", 10, 1, 100, 1),
        *launched("b", 60, 20, 100, 2, stream=8),
    )["decode"]
    assert full.launch_bound is False
    assert sum(k.share for k in full.kernels) == pytest.approx(1)
    assert {k.name: k.ms for k in full.kernels} == {"a": pytest.approx(0.1), "b": pytest.approx(0.05)}


@pytest.mark.parametrize("keys", [("correlation", "External id"), ("correlation id", "external id")])
def test_P02_names_of_any_version_are_understood(keys: tuple[str, str]) -> None:
    correlation, external = keys
    found = tables(
        mark(tracing.DECODE, 0, 1000),
        event("aten::mm", "Operator", 10, 4, **{external: 5, "Input Dims": MM["Input Dims"], "Input type": MM["Input type"]}),
        event("cudaLaunchKernel", "Runtime", 11, 2, **{correlation: 5}),
        event("k", "Kernel", 50, 100, tid=7, **{correlation: 5, external: 5}),
    )["decode"]  # fmt: skip
    assert (found.where, found.kernels[0].name, found.kernels[0].ms) == ("device", "k", pytest.approx(0.1))


def test_P02_what_is_under_no_known_name_is_missing_not_zero() -> None:
    stripped = tables(mark(tracing.DECODE, 0, 100), op("aten::mm", 10, 20))["decode"]
    assert (stripped.kernels[0].bytes, stripped.kernels[0].flops) == (None, None)
    assert stripped.launch_bound is None and stripped.launch_reason
    broken = tables(
        mark(tracing.DECODE, 0, 100), {**op("aten::mul", 10, 20), "dur": None}, op("aten::add", 40, 20)
    )
    assert [k.name for k in broken["decode"].kernels] == ["aten::add"]


def test_a_trace_without_stages_is_a_sentence() -> None:
    with pytest.raises(PdqError, match="no stage is marked"):
        tracing.stage_tables({"traceEvents": [op("aten::mm", 0, 1)]})


def test_P01_bare_quotes_in_names_are_mended_and_nothing_else_is_changed(tmp_path: Path) -> None:
    good = '    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1,'
    bad = '    "ph": "X", "cat": "cpu_op", "name": "say "hi" \\ there", "pid": 1, "tid": 1,'
    assert tracing.repaired(good) == good
    mended = json.loads("{" + tracing.repaired(bad).strip().rstrip(",") + "}")
    assert mended["name"] == 'say "hi" \\ there'
    alone = '    "name": "a "b" c",'
    assert tracing.repaired(alone) == '    "name": "a \\"b\\" c",'
    text = '{"traceEvents": [\n  {\n' + bad + '\n    "ts": 1, "dur": 2\n  }\n]}'
    with pytest.raises(PdqError):
        tracing.parse(text)
    assert tracing.parse(tracing.repaired(text))["traceEvents"][0]["dur"] == 2
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(text.encode()))
    assert tracing.read_text(file) == text
    assert tracing.label('a "quoted"\\ näme') == "a _quoted__ n_me"


def test_a_number_that_no_viewer_reads_is_refused() -> None:
    with pytest.raises(PdqError, match="NaN"):
        tracing.parse('{"traceEvents": [{"dur": NaN}]}')


def test_difference_names_what_came_went_and_changed() -> None:
    before = tables(mark(tracing.DECODE, 0, 100), op("aten::mm", 0, 40, **MM), op("aten::mul", 50, 10))
    after = tables(
        mark(tracing.DECODE, 0, 100),
        op("pdq_native::int4", 0, 9),
        op("aten::mul", 50, 4),
        op("aten::add", 60, 1),
    )
    words = {c.name: c.word for c in tracing.difference(before["decode"], after["decode"])}
    assert words == {
        "aten::mm": "went",
        "pdq_native::int4": "came",
        "aten::mul": "faster",
        "aten::add": "came",
    }
    same = tracing.difference(before["decode"], before["decode"])
    assert {c.word for c in same} == {"same"}


def test_every_op_of_the_tables_has_its_evidence() -> None:
    assert set(OPERATORS) == set(OPS)


def test_a_policy_whose_kernels_are_not_those_of_its_name_is_flagged() -> None:
    table = load_kernels("cpu")
    placed = {"native-int4": 210, "native-dense": 1}
    right = {"pdq_native::int4": 420, "pdq_native::dense": 2}
    assert unmatched(right, 2, placed, table) == []
    wrong = {"pdq_native::dense": 422}
    found = unmatched(wrong, 2, placed, table)
    assert len(found) == 1 and "native-int4" in found[0] and "420 were due" in found[0]
    assert unmatched({"pdq_native::int4": 419, "pdq_native::dense": 2}, 2, placed, table)
    whole = {"pdq_native::layer_int4": 60, "pdq_native::dense": 2}
    assert unmatched(whole, 2, placed, table) == []
    assert unmatched({"pdq_native::layer_int8": 60, "pdq_native::dense": 2}, 2, placed, table)
    assert unmatched({"pdq_native::layer_int4": 59, "pdq_native::dense": 2}, 2, placed, table)
    grouped = {f"pdq_native::products_int4_{n}": calls for n, calls in ((3, 60), (2, 60), (1, 120))}
    assert unmatched(grouped | {"pdq_native::dense": 2}, 2, placed, table) == []
    assert unmatched(grouped | {"pdq_native::products_int4_2": 59}, 2, placed, table)
    stage = StageTrace(stage="decode", steps=2, where="cpu", trace_ms=1.0, unmatched=found)
    assert flagged("int4", [stage])[0].startswith("int4: decode does not run what it says")
