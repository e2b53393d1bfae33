"""The table that ``tune`` writes: what it puts first, when it counts, and what becomes of a damaged one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec
import pytest

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import Capability, KernelTable, Use, load_kernels
from pdq_tui.core.predict import Prediction, predict
from pdq_tui.core.shapes import Linear, Shapes
from pdq_tui.core.tuned import (
    MANY,
    ROWS,
    TunedTable,
    Winner,
    difference,
    in_use,
    ranges,
    read_tuned,
    tuned_file,
    write_tuned,
)
from pdq_tui.errors import UsageError

STAMP = {"cpu": "AMD EPYC", "threads": "2", "torch": "2.13.0", "kernels": "aa", "candidates": "bb"}
AVX2 = Capability("cpu", ("avx2",))
INT8, W8A8, INT4 = Format("int8"), Format("int8", "int8"), Format("int4", "model", 64)


def won(
    fmt: str, kernel: str, layout: str, us: float, rows: tuple[int, int] = (1, 1), **more: object
) -> Winner:
    at: dict[str, object] = {"dtype": "bf16", "N": 128, "K": 128}
    return Winner(format=fmt, kernel=kernel, layout=layout, us=us, rows=rows, error=0.01, **(at | more))


def tuned(*winners: Winner) -> KernelTable:
    return msgspec.structs.replace(load_kernels("cpu"), tuned=TunedTable("cpu", STAMP, winners, "today"))


def kernel(table: KernelTable, fmt: Format, rows: int, N: int = 128, K: int = 128) -> str:
    choice = table.place(Use(fmt), N, K, rows, "bf16", AVX2)
    assert choice.candidate is not None
    return choice.candidate.name


def test_every_row_count_belongs_to_one_measured() -> None:
    found = ranges(ROWS)
    assert [span for _, span in found] == [(1, 1), (2, 8), (9, 32), (33, 181), (182, MANY)]
    assert ranges([7]) == [(7, (1, MANY))]
    assert ranges([1, 2, 3]) == [(1, (1, 1)), (2, (2, 2)), (3, (3, MANY))]
    for counts in ([1, 4, 16], [2, 9, 700], [5, 6]):
        spans = [span for _, span in ranges(counts)]
        assert spans[0][0] == 1 and spans[-1][1] == MANY
        assert all(low == before[1] + 1 for before, (low, _) in itertools.pairwise(spans))
        assert all(low <= count <= high for count, (low, high) in ranges(counts))


def test_what_was_measured_comes_first_where_it_was_measured_and_nowhere_else() -> None:
    plain = load_kernels("cpu")
    assert kernel(plain, INT8, 1) == "int8pack" and kernel(plain, INT8, 512) == "int8-dequantize-float32"
    table = tuned(
        won("int8", "int8-dequantize-float32", "int8", 5.0),
        won("int8", "int8pack", "int8", 50.0, (2, MANY)),
    )
    assert kernel(table, INT8, 1) == "int8-dequantize-float32"
    assert kernel(table, INT8, 512) == "int8pack"
    assert kernel(table, INT8, 1, N=256) == "int8pack", "another shape keeps the shipped order"
    assert kernel(table, W8A8, 1) == "w8a8-int8pack", "another format as well"
    assert table.place(Use(INT8), 128, 128, 1, "fp32", AVX2).candidate.name == "int8pack", "and another dtype"  # type: ignore[union-attr]


def test_a_winner_is_subject_to_every_limit() -> None:
    table = tuned(won("int8", "int8pack", "int8", 5.0, K=72), won("int8", "native-int8", "int8", 1.0))
    assert kernel(table, INT8, 1, K=72) == "int8-dequantize-float32", "72 is no multiple of 16"
    choice = table.place(Use(INT8), 128, 128, 1, "bf16", AVX2)
    assert choice.candidate is not None and choice.candidate.name == "int8pack", (
        "no own kernels on this machine"
    )
    broken = table.place(Use(INT8), 128, 128, 1, "bf16", AVX2, {"int8pack": "it sat down"})
    assert broken.candidate is not None and broken.candidate.name == "int8-dequantize-float32"


def test_the_layout_is_one_for_all_rows_of_both_stages() -> None:
    plain = load_kernels("cpu")
    shape = (Use(INT4), 128, 128, "bf16", AVX2)
    assert plain.layouts(*shape) == ["int4-cpu", "int4-plain"]
    # plain wins one row by a third, and loses many rows by four times: cpu is the better of the two for both stages
    table = tuned(
        won("int4-g64", "int4-plain", "int4-plain", 6.0),
        won("int4-g64", "int4pack", "int4-cpu", 9.0),
        won("int4-g64", "int4-plain", "int4-plain", 400.0, (2, MANY)),
        won("int4-g64", "int4pack", "int4-cpu", 100.0, (2, MANY)),
    )
    assert table.layouts(*shape) == ["int4-cpu", "int4-plain"]
    assert kernel(table, INT4, 1) == "int4pack" and kernel(table, INT4, 512) == "int4pack"
    faster = tuned(
        won("int4-g64", "int4-plain", "int4-plain", 2.0), won("int4-g64", "int4pack", "int4-cpu", 9.0)
    )
    assert faster.layouts(*shape) == ["int4-plain", "int4-cpu"]
    assert kernel(faster, INT4, 1) == kernel(faster, INT4, 512) == "int4-plain"
    equal = tuned(
        won("int4-g64", "int4-plain", "int4-plain", 8.9), won("int4-g64", "int4pack", "int4-cpu", 9.0)
    )
    assert equal.layouts(*shape)[0] == "int4-cpu", "a hundredth is no reason to leave the shipped order"


def test_formats_that_share_bytes_share_the_layout() -> None:
    table = TunedTable("cpu", STAMP, (
        won("int8", "a", "one", 1.0), won("int8", "b", "two", 4.0),
        won("w8a8", "c", "one", 9.0), won("w8a8", "d", "two", 1.0),
    ))  # fmt: skip
    costs = table.costs([INT8, W8A8], "bf16", 128, 128)
    assert costs == table.costs([W8A8, INT8], "bf16", 128, 128)
    assert costs["one"] == pytest.approx(math.log(9) / 2) and costs["two"] == pytest.approx(math.log(4) / 2)
    assert table.costs([INT8], "bf16", 128, 128) == {"one": 0.0, "two": pytest.approx(math.log(4))}
    half = TunedTable("cpu", STAMP, (*table.winners[:3],))
    assert set(half.costs([INT8, W8A8], "bf16", 128, 128)) == {"one"}, "nothing multiplies w8a8 in layout two"


def test_the_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tuned_file("cpu", tmp_path / "new")
    assert read_tuned(path) is None
    table = TunedTable(
        "cpu", STAMP | {"cpu": 'a "quoted"\\ CPU\n'}, (won("int8", "int8pack", "int8", 5.25),), "today"
    )
    write_tuned(path, table)
    assert read_tuned(path) == table and list(path.parent.iterdir()) == [path]
    more = table.with_winners([won("int8", "x", "int8", 1.0), won("int8", "y", "int8", 2.0, N=64)], "later")
    assert [w.kernel for w in more.winners] == ["x", "y"], (
        "a shape measured again replaces what was known of it"
    )
    other = more.with_winners([won("w8a8", "z", "int8", 1.0)], "later")
    assert [w.kernel for w in other.winners] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("schema = 9", "schema: 9 is not supported"),
        ('schema = 1\ndevice = "cpu"\n[stamp]\n[[best]]\nformat = "int8"', "missing required field"),
        ("schema = 1\ndevice = 3\n[stamp]", "Expected `str`"),
        ("schema = [", "not valid TOML"),
        ('schema = 1\ndevice = "cpu"\n[stamp]\n[[best]]\nformat="int9"\ndtype="bf16"\nn=1\nk=1\nrows=[1,1]\n'
         'layout="int8"\nkernel="a"\nmicroseconds=1.0\nerror=0.1', "is not a format"),
        ('schema = 1\ndevice = "cpu"\n[stamp]\n[[best]]\nformat="int8"\ndtype="bf16"\nn=1\nk=1\nrows=[1,1]\n'
         'layout="int8"\nkernel="a"\nmicroseconds=nan\nerror=0.1', "is no time"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_told_and_not_used(tmp_path: Path, text: str, what: str) -> None:
    path = tuned_file("cpu", tmp_path)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=str(path)) as raised:
        read_tuned(path)
    assert what in raised.value.message
    found = in_use("cpu", STAMP, folder=tmp_path)
    assert found.table is None and found.level == "warn" and what in found.text


def test_a_table_of_another_machine_is_not_used_and_this_is_said(tmp_path: Path) -> None:
    table = TunedTable("cpu", STAMP, (won("int8", "int8pack", "int8", 5.0),), "2026-12-03")
    assert "no tuned kernel table" in in_use("cpu", STAMP, folder=tmp_path).text
    write_tuned(tuned_file("cpu", tmp_path), table)
    used = in_use("cpu", STAMP, folder=tmp_path)
    assert used.table == table and used.level == "info"
    assert used.text == "tuned kernel table of 2026-12-03: 1 layer shapes, int8"
    off = in_use("cpu", STAMP, wanted="off", folder=tmp_path)
    assert off.table is None and "engine.tuned = off" in off.text
    for key, value in STAMP.items():
        other = in_use("cpu", STAMP | {key: value + "x"}, folder=tmp_path)
        assert other.table is None and other.level == "warn" and other.hint is not None, key
    assert difference(STAMP, STAMP | {"torch": "2.14.0"}) == "torch 2.13.0, here 2.14.0"
    assert difference(STAMP, {k: v for k, v in STAMP.items() if k != "kernels"}) == "without own CPU kernels"
    assert difference(STAMP, STAMP | {"kernels": "cc", "threads": "1"}) == (
        "CPU threads 2, here 1; other own CPU kernels"
    )


def test_what_was_fastest_is_told_by_rows_for_people() -> None:
    table = TunedTable(
        "cpu",
        STAMP,
        (
            won("int8", "int8pack", "int8", 5.0),
            won("int8", "native-int8", "int8", 4.0),
            won("int8", "int8pack", "int8", 4.0, N=256),
            won("int8", "int8-dequantize-float32", "int8", 9.0, (2, 8)),
            won("int8", "int8pack", "int8", 9.0, (9, MANY)),
        ),
    )
    assert table.words(INT8) == (
        "1 row native-int8 1/2, int8pack 1/2; 2 to 8 rows int8-dequantize-float32; from 9 rows int8pack"
    )
    assert table.words(INT4) == ""


def test_a_prediction_takes_the_layout_and_the_kernels_that_were_measured_first() -> None:
    """``policies check --device here`` and the app's forecast: the same table as the engine's."""
    layers = (Linear("model.layers.0.mlp.down_proj", 128, 128), Linear("lm_head", 128, 128))
    shapes = Shapes("m", "bf16", 2, layers, (), 0, None)
    can = Capability("cpu", ("avx2", "native"))
    int4 = find_policy("int4")

    def told(table: KernelTable) -> Prediction:
        return predict(int4, shapes, table, 512, 1, can)

    plain = told(load_kernels("cpu")).stages["decode"]
    table = tuned(
        won("int4-g64", "native-int4", "int4-rows", 9.0),
        won("int4-g64", "int4pack", "int4-cpu", 1.0),
        won("dense", "linear-float32", "dense", 1.0),
    )
    measured = told(table).stages["decode"]
    assert set(plain.kernels) == {"native-int4", "native-dense"}
    assert measured.kernels == {"int4pack": 1, "linear-float32": 1}
    # of a prompt's 512 rows the head multiplies one a request
    assert told(table).stages["prefill"].kernels.keys() >= {"linear-float32"}
