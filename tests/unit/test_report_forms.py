"""Reports: golden pages, strict machine forms, files whole or not at all in any locale."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_snapshots

from pdq_tui.core.analysis import run_document
from pdq_tui.core.protocol import Request
from pdq_tui.core.stats import Summary
from pdq_tui.errors import PdqError, UsageError
from pdq_tui.report.cells import about, value_text
from pdq_tui.report.pages import HOLDS, comparison_page, document_page
from pdq_tui.report.tables import FORMATS, render
from pdq_tui.report.write import REPORTERS, write
from pdq_tui.store import listing, snapshot
from pdq_tui.store.compare import Comparison, compare

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def document(make_run: Any, meta: dict[str, Any]) -> dict[str, Any]:
    return run_document(meta, make_run({"bf16": (100, 50), "int4": (180, 26)}).events())


def _comparison(tmp_path: Path, make_run: Any, meta: dict[str, Any], speed: dict[str, Any]) -> Comparison:
    events = make_run(speed).events()
    paths = [snapshot.save(tmp_path / meta["id"], events, arm, meta=meta) for arm in speed]
    return compare([snapshot.load(path) for path in paths])


@pytest.fixture
def comparison(tmp_path: Path, make_run: Any, meta: dict[str, Any]) -> Comparison:
    return _comparison(tmp_path, make_run, meta, {"bf16": (100, 50), "int4": (180, 26)})


@pytest.fixture
def three(tmp_path: Path, make_run: Any, meta: dict[str, Any]) -> Comparison:
    return _comparison(tmp_path, make_run, meta, {"bf16": (100, 50), "int8": (100, 50.1), "int4": (180, 26)})


def golden(name: str, text: str) -> None:
    """Equal to the stored file. UPDATE_GOLDEN=1 writes it anew: look at the difference before it is committed."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_golden_comparison(comparison: Comparison) -> None:
    golden("compare.txt", render(comparison, "table"))
    golden("compare.md", render(comparison, "md"))
    golden("compare.csv", render(comparison, "csv"))


def test_golden_three_arms_differences_only(three: Comparison) -> None:
    golden("compare_three_diff_only.txt", render(three, "table", diff_only=True))


def test_the_conditions_name_time_host_note_and_whole_blocks(tmp_path: Path) -> None:
    """A block that was cut off is none: screen and report count alike."""
    made = made_snapshots.events(blocks=7)
    last = max(i for i, e in enumerate(made) if isinstance(e, Request))
    found = [
        snapshot.load(listing.resolve(i, tmp_path))
        for i in made_snapshots.save_all(tmp_path, note="after the update", made=made[: last - 1])
    ]
    facts = dict(document_page(found[0].document()).facts)
    assert facts["measured"] == "2026-12-02 06:30 UTC" and facts["note"] == "after the update"
    assert "Virtual CPU" in facts["host"] and facts["prompts"].endswith("6 whole blocks")
    compared = compare(found)
    assert {r.blocks for r in compared.rows if r.group == "speed" and r.blocks} == {6}
    named = [v for k, v in comparison_page(compared).facts if k in ("reference", "candidate", "prompts")]
    assert named[0].endswith("6 whole blocks") and all("note: after the update" in v for v in named[1:])


def test_golden_run(document: dict[str, Any]) -> None:
    golden("run.txt", render(document, "table"))
    golden("run.md", render(document, "md"))
    golden("run.csv", render(document, "csv"))


@pytest.mark.parametrize(
    ("metric", "median", "half", "text"),
    [
        ("ttft_ms", 129.7, 1.38, "129.7 ±1.4"),
        ("tpot_ms", 11.92, 0.0503, "11.92 ±0.05"),
        ("tpot_ms", 50.0, 0.0331, "50.0 ±0.03"),  # one digit where the value's decimals would say 0
        ("tpot_ms", 11.92, 0.0, "11.92"),
        ("prefill_tokens_per_s", 5117.0, 9.3, "5117 ±9"),
        ("prefill_tokens_per_s", 48_700.0, 312.0, "48.7 ±0.3k"),
        ("mbu", 0.1538, 0.00013, "15.38 ±0.01"),
        ("decode_peak_bytes", 476.8 * 2**20, 3.24 * 2**20, "476.8 ±3.2 MiB"),
        ("decode_peak_bytes", 3.0 * 2**30, 2.0 * 2**20, "3.0 ±0.002 GiB"),
        ("bytes_per_step", 900.0, 12.0, "900 ±12 B"),
    ],
)
def test_an_interval_has_the_unit_and_the_decimals_of_its_value(
    metric: str, median: float, half: float, text: str
) -> None:
    summary = Summary(median=median, ci95=(median - half, median + half), n=12, unit="")
    assert value_text(metric, summary) == text
    assert value_text(metric, summary, len(text)) == text
    if "±" in text:  # too narrow for both: the value, never half of it
        assert value_text(metric, summary, len(text) - 1) == about(metric).format(median)
    assert value_text(metric, Summary(median=None, ci95=None, n=0, unit="")) == "n/a"


def test_markdown_holds_what_a_reader_needs(comparison: Comparison) -> None:
    text = render(comparison, "md")
    for words in (
        "## int4 against bf16",
        "(better)",
        "▼ better",
        "paired blocks (12)",
        "torch 2.13.0",
        "Virtual CPU",
    ):
        assert words in text
    assert HOLDS.rstrip(".") in text
    for formula in ("(t\\_last − t\\_first) / (N − 1)", "real prompt tokens / prefill time"):
        assert formula in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def test_differences_only_says_what_it_hides(comparison: Comparison) -> None:
    full, short = render(comparison), render(comparison, diff_only=True)
    assert "12 rows without a difference are not shown" in short and "not shown" not in full
    assert "MBU" in full and "MBU" not in short and "TPOT" in short


def test_texts_of_others_cannot_break_a_table(document: dict[str, Any]) -> None:
    document["warnings"].append("a | b\n| <script> *x* [y](z) \x1b[31m`\\ \ud800")
    document["arms"][0]["policy"] = "x|y\nz"
    text = render(document, "md")
    assert "<script>" not in text and "x\\|y z" in text and "\x1b" not in text
    assert "\x1b" not in render(document)


def test_ascii_only(comparison: Comparison) -> None:
    for form in ("table", "md"):
        text = render(comparison, form, ascii_only=True)
        assert text.isascii() and "better" in text and "+-" in text


def table_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("kind", ["document", "comparison"])
def test_X01_machine_forms_are_strict(kind: str, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in JSON")

    body = json.loads(render(source, "json"), parse_constant=refuse)
    assert body["schema"] == 1
    text = render(source, "csv")
    assert "nan" not in text.lower() and "None" not in text
    parsed = list(csv.DictReader(io.StringIO(text)))
    assert len(parsed) >= 18
    for row in parsed:
        value = row.get("value", row.get("candidate_value"))
        assert value or row["reason"] or row["metric"] in ("extra_bytes",), row


def test_X01_a_comparisons_nulls_have_reasons(comparison: Comparison) -> None:
    body = json.loads(render(comparison, "json"))
    for row in body["rows"]:
        for key in ("delta", "delta_ci95", "percent", "ci95"):
            assert row[key] is not None or row[f"{key}_reason"]
        for side in ("reference", "value"):
            assert row[side]["median"] is not None or row[side]["median_reason"]


def test_a_timed_row_without_an_interval_says_so_and_why(
    tmp_path: Path, make_run: Any, meta: dict[str, Any]
) -> None:
    """One block: the column of the interval holds no method's name, which reads as if it were an exact number."""
    events = make_run({"bf16": (100, 50), "int4": (180, 26)}, blocks=1, solo=False).events()
    paths = [snapshot.save(tmp_path / meta["id"], events, arm, meta=meta) for arm in ("bf16", "int4")]
    lines = render(compare([snapshot.load(path) for path in paths])).splitlines()
    tpot = next(line for line in lines if line.startswith("TPOT"))
    assert "bootstrap" not in tpot and "paired" not in tpot and "? unsure" in tpot
    assert any("TPOT" in line and "independent units" in line for line in lines)


def test_an_unknown_format_is_named(document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'pdf' is not a format") as caught:
        render(document, "pdf")
    assert all(f in str(caught.value) for f in FORMATS)
    with pytest.raises(UsageError, match="pdf, xml is not a format"):
        write(document, ["md", "pdf", "xml"], tmp_path / "r")
    with pytest.raises(UsageError, match="nothing is not a format"):
        write(document, [], tmp_path / "r")
    assert not (tmp_path / "r").exists()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["document", "comparison"])
def test_all_files_are_written(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source = request.getfixturevalue(kind)
    paths = write(source, list(REPORTERS), tmp_path / "deep" / "out")
    tables = ["report", "report-ratios"] if kind == "document" else ["report"]
    flat = [f"{name}.{form}" for form in ("csv", "parquet") for name in tables]
    assert [f.name for f in paths] == ["report.md", "report.html", "report.json", *flat]
    folder = paths[0].parent
    assert sorted(f.name for f in folder.iterdir()) == sorted(f.name for f in paths)
    for name in tables:
        typed = pl.read_parquet(folder / f"{name}.parquet")
        rows = table_of(folder / f"{name}.csv")
        assert typed.height == len(rows) > 0 and typed.columns == list(rows[0])
        assert pl.Null not in typed.dtypes
    assert paths[0].read_text(encoding="utf-8") == render(source, "md")


def test_the_csv_of_a_run_has_its_ratios_in_a_file_of_their_own(
    document: dict[str, Any], tmp_path: Path
) -> None:
    write(document, ["csv"], tmp_path)
    rows = table_of(tmp_path / "report-ratios.csv")
    assert len(rows) == len(document["ratios"]) > 3
    for row, r in zip(rows, document["ratios"], strict=True):
        assert (row["run"], row["reference"], row["arm"]) == (document["run"], "bf16", "int4")
        assert (row["metric"], row["judgement"], row["unit"]) == (r["metric"], r["judgement"], r["unit"])
        assert [float(row[k]) for k in ("ratio", "ratio_low", "ratio_high")] == [r["ratio"], *r["ci95"]]
        assert [float(row[k]) for k in ("difference", "difference_low", "difference_high")] == [
            r["difference"], *r["difference_ci95"],
        ]  # fmt: skip
        assert (float(row["threshold"]), int(row["blocks"])) == (r["threshold"], r["blocks"])


def test_ratios_that_are_missing_have_their_reason(
    make_run: Any, meta: dict[str, Any], tmp_path: Path
) -> None:
    document = run_document(meta, make_run({"bf16": (100, 50), "int4": (180, 26)}, blocks=1).events())
    write(document, ["csv"], tmp_path)
    rows = table_of(tmp_path / "report-ratios.csv")
    assert {row["judgement"] for row in rows} == {"unsure"}
    assert all(row["ratio_low"] == "" and "1 block" in row["reason"] for row in rows)


def test_a_report_of_one_arm_has_no_ratios_and_none_of_another_run_stay(
    document: dict[str, Any], make_run: Any, meta: dict[str, Any], tmp_path: Path
) -> None:
    alone = run_document(meta, make_run({"bf16": (100, 50)}).events())
    assert [p.name for p in write(alone, ["csv"], tmp_path / "alone")] == ["report.csv"]
    write(document, ["csv"], tmp_path)
    paths = write(alone, ["csv"], tmp_path, force=True)
    assert [p.name for p in paths] == ["report.csv", "report-ratios.csv"]
    assert len(paths[1].read_text(encoding="utf-8").splitlines()) == 1  # the header alone


def test_existing_files_are_kept_unless_forced(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.csv").write_text("mine")
    with pytest.raises(PdqError, match=r"report\.csv already there") as caught:
        write(document, ["md", "csv"], tmp_path)
    assert "--force" in str(caught.value.hint)
    assert not (tmp_path / "report.md").exists()
    assert (tmp_path / "report.csv").read_text() == "mine"
    write(document, ["md", "csv"], tmp_path, force=True)
    assert (tmp_path / "report.csv").read_text().startswith("run,arm,")


@pytest.mark.parametrize("form", list(REPORTERS))
def test_X04_every_exporter_on_a_full_device(form: str, document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / f"report.{form}").symlink_to("/dev/full")
    with pytest.raises(PdqError, match="No space left on device"):
        write(document, [form], tmp_path, force=True)
    assert [f.name for f in tmp_path.iterdir()] == [f"report.{form}"]
    assert Path("/dev/full").is_char_device()


def test_X04_a_place_that_cannot_be_made(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PdqError, match="cannot be written"):
        write(document, ["md"], tmp_path / "file" / "below")
    (tmp_path / "report.md").mkdir()
    with pytest.raises(PdqError, match="is a directory"):
        write(document, ["md"], tmp_path, force=True)


def test_files_are_utf8_in_an_ascii_locale(comparison: Comparison, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom pdq_tui.report.write import write\n"
        "from pdq_tui.store.compare import compare\nfrom pdq_tui.store.snapshot import load\n"
        "write(compare([load(Path(a)) for a in sys.argv[2:]]), ['md', 'csv', 'json'], Path(sys.argv[1]))\n"
    )
    ids = [comparison.reference.id, comparison.candidates[0].id]
    paths = [str(listing.resolve(i, tmp_path)) for i in ids]
    env = {
        **os.environ,
        "LC_ALL": "POSIX",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
        "PYTHONCOERCECLOCALE": "0",
    }
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out"), *paths], env=env, check=True)
    assert (tmp_path / "out" / "report.md").read_bytes() == render(comparison, "md").encode("utf-8")
