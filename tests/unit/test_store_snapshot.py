"""Snapshots: whole or not at all, read back equal, found by a word, and read across versions."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pdq_tui.core import protocol as p
from pdq_tui.errors import PdqError, UsageError
from pdq_tui.store import listing, series, snapshot

RUN = "20260102T030405Z-0f3a"


@pytest.fixture
def events(make_run: Any) -> list[Any]:
    return list(make_run({"bf16": (100, 50), "int4": (180, 26)}, blocks=3).events())


@pytest.fixture
def save(tmp_path: Path, events: list[Any], meta: dict[str, Any]) -> Callable[..., Path]:
    def one(arm: str = "bf16", run: str = RUN, **more: Any) -> Path:
        return snapshot.save(
            tmp_path / run, more.pop("events", events), arm, meta={**meta, "id": run}, **more
        )

    return one


def strict(path: Path) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_snapshot_is_numbered_and_complete(save: Callable[..., Path]) -> None:
    first, second = save("bf16"), save("int4", note="after tuning")
    assert (first.name, second.name) == ("001", "002")
    assert sorted(f.name for f in first.iterdir()) == [
        "manifest.json",
        "requests.parquet",
        "sensors.parquet",
        "tokens.parquet",
    ]
    manifest = strict(second / "manifest.json")
    assert (manifest["schema"], manifest["kind"], manifest["name"]) == (1, "pdq-tui snapshot", "002")
    assert (manifest["label"], manifest["reference"], manifest["note"]) == ("int4", "bf16", "after tuning")
    assert manifest["arm"]["decode"]["tpot_ms"]["median"] == pytest.approx(26, rel=0.02)
    assert {r["arm"] for r in manifest["ratios"]} == {"int4"}
    for key in (
        "tool",
        "host",
        "device",
        "libraries",
        "model",
        "workload",
        "noise_floor",
        "warnings",
        "conditions",
    ):
        assert key in manifest
    assert manifest["conditions"]["threads"] == 2
    for name in series.SERIES:
        assert pl.read_parquet_metadata(second / f"{name}.parquet")["pdq_tui_schema"] == "1"
    assert not [f for f in first.parent.iterdir() if f.name.startswith(".")]


def test_requests_come_back_as_they_were(save: Callable[..., Path], events: list[Any]) -> None:
    odd = next(e for e in events if isinstance(e, p.Request) and e.arm == "int4" and e.block == 1)
    odd.valid, odd.invalid_reason, odd.nonfinite = False, "NaN", p.NonFinite(stage="decode", step=3)
    odd.text = "ein Satz mit Ümlaut, 漢字 und \N{SKULL}\nneue Zeile"
    odd.stop_reasons = ["eos"]
    s = snapshot.load(save("int4"))
    assert s.requests == [e for e in events if isinstance(e, p.Request) and e.arm == "int4"]


def test_one_row_a_decode_step(save: Callable[..., Path]) -> None:
    s = snapshot.load(save())
    assert s.tokens_table.height == sum(len(r.itl_ms) for r in s.requests)
    assert s.tokens_table.filter(pl.col("row") == 0)["step"].to_list() == list(range(1, 9))
    assert s.sensors_table["cpu_mhz"].unique().to_list() == [3700.0]
    assert s.sensors_table["gpu"].null_count() == s.sensors_table.height


def test_request_numbers_that_start_again_keep_their_tokens(
    save: Callable[..., Path], events: list[Any]
) -> None:
    """A new engine process counts from 0 again."""
    for e in events:
        if isinstance(e, p.Request):
            e.request %= 3
    s = snapshot.load(save())
    assert s.requests == [e for e in events if isinstance(e, p.Request) and e.arm == "bf16"]


def test_only_what_was_measured_after_a_moment(save: Callable[..., Path], events: list[Any]) -> None:
    moment = next(e.t_ns for e in events if isinstance(e, p.Request) and e.block == 2)
    s = snapshot.load(save("bf16", since_ns=moment))
    assert s.requests and all(r.t_ns >= moment for r in s.requests)


def test_nothing_to_freeze_is_a_sentence(save: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(PdqError, match="nothing was measured of arm 'C'"):
        save("C")
    with pytest.raises(PdqError, match="no request yet"):
        save("bf16", since_ns=2**62)
    assert not (tmp_path / RUN).exists()


def test_meta_is_read_from_the_run(tmp_path: Path, events: list[Any], meta: dict[str, Any]) -> None:
    run = tmp_path / RUN
    run.mkdir()
    (run / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert snapshot.load(snapshot.save(run, events, "bf16")).part("host")["cpu"] == "Virtual CPU"
    (run / "meta.json").write_text("{", encoding="utf-8")
    assert snapshot.load(snapshot.save(run, events, "bf16")).run == RUN


# -- finding -----------------------------------------------------------------------------------------------------------


def test_found_by_name_prefix_last_and_path(save: Callable[..., Path], tmp_path: Path) -> None:
    one, two = save("bf16"), save("int4")
    other = save("bf16", run="20260203T000000Z-beef")
    listed = listing.list_snapshots(tmp_path)
    assert [s.id for s in listed] == [f"{RUN}/001", f"{RUN}/002", "20260203T000000Z-beef/001"]
    assert (listed[1].arm, listed[1].policy, listed[1].model, listed[1].requests) == (
        "int4",
        "int4",
        "demo",
        6,
    )
    for word, path in {
        f"{RUN}/002": two,
        "0f3a/001": one,
        "20260203": other,
        "beef": other,
        "@last": other,
        str(two): two,
        str(two / "manifest.json"): two,
    }.items():
        assert listing.resolve(word, tmp_path) == path, word


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("2026", "names 3 snapshots"),
        ("nothing", "no snapshot is called"),
        ("", "no snapshot is called"),
        ("../..", "no"),
    ],
)
def test_a_word_that_names_none_or_many(
    save: Callable[..., Path], tmp_path: Path, word: str, message: str
) -> None:
    save("bf16"), save("int4"), save("bf16", run="20260203T000000Z-beef")
    with pytest.raises(UsageError, match=message):
        listing.resolve(word, tmp_path)


def test_a_list_looks_at_each_manifest_once_and_builds_none(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand snapshots are listed at a glance: by the few fields that are shown."""
    first = save("bf16")
    for number in range(2, 41):
        shutil.copytree(first, first.parent / f"{number:03d}")
    read: list[Path] = []
    read_bytes = Path.read_bytes

    def counted(path: Path) -> bytes:
        read.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("a whole manifest was built"))
    assert len(listing.list_snapshots(tmp_path)) == 40
    assert len(read) == len(set(read)) == 40


def test_reading_a_long_series_is_one_conversion(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = snapshot.load(save())
    calls: list[Any] = []
    convert = series.msgspec.convert
    monkeypatch.setattr(series.msgspec, "convert", lambda *a, **k: calls.append(a[1]) or convert(*a, **k))
    assert len(s.requests) == s.requests_table.height > 1 and len(calls) == 1
    assert sum(len(r.itl_ms) for r in s.requests) == s.tokens_table.height


def test_the_collector_is_as_it_was_after_a_damaged_row(save: Callable[..., Path]) -> None:
    s = snapshot.load(save())
    bad = s.requests_table.with_columns(pl.lit(2.5).alias("batch"))
    with pytest.raises(PdqError, match="row 1 of the requests is damaged"):
        series.requests_of(bad, s.tokens_table, "bf16")
    assert gc.isenabled()


def test_an_empty_store(tmp_path: Path) -> None:
    assert listing.list_snapshots(tmp_path / "none") == []
    with pytest.raises(UsageError, match="there is no snapshot"):
        listing.resolve("@last", tmp_path)


def test_removing_removes_that_one_alone(save: Callable[..., Path], tmp_path: Path) -> None:
    one, two = save("bf16"), save("int4")
    snapshot.remove(one)
    assert not one.exists() and two.exists()
    for path in (tmp_path, two.parent, one, two / "manifest.json"):
        with pytest.raises(PdqError, match="not a snapshot"):
            snapshot.remove(path)
    link = two.parent / "009"
    link.symlink_to(two)
    with pytest.raises(PdqError, match="not a snapshot"):
        snapshot.remove(link)
    assert save("bf16").name == "010"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "manifest.json").write_text("{"),
        lambda d: (d / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        lambda d: (d / "manifest.json").write_text("[]"),
        lambda d: (d / "manifest.json").write_text('{"schema": 1}'),
        lambda d: (d / "manifest.json").write_text('{"schema": "x", "arm": {}}'),
        lambda d: (d / "manifest.json").unlink(),
        lambda d: (d / "tokens.parquet").unlink(),
    ],
)
def test_a_damaged_snapshot_is_listed_and_the_others_work(
    save: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    bad, good = save("bf16"), save("int4")
    damage(bad)
    one, two = listing.list_snapshots(tmp_path)
    assert one.id == f"{RUN}/001" and one.error and two.error is None
    assert len(snapshot.load(good).requests) == 8


def test_a_copied_run_is_told_apart_by_its_path(save: Callable[..., Path], tmp_path: Path) -> None:
    path = save()
    shutil.copytree(tmp_path / RUN, tmp_path / "copy")
    with pytest.raises(UsageError, match="names 2 snapshots") as caught:
        listing.resolve(f"{RUN}/001", tmp_path)
    assert caught.value.hint and str(path) in caught.value.hint and "copy/snapshots/001" in caught.value.hint


def test_a_series_that_is_not_parquet_is_a_sentence(save: Callable[..., Path]) -> None:
    path = save()
    (path / "requests.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(PdqError, match=r"requests\.parquet cannot be read"):
        _ = snapshot.load(path).requests


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("arm.decode.tpot_ms.median", "fast"),
        ("arm.decode.tpot_ms", 41.2),
        ("arm.weights.stored_bytes", "many"),
        ("device.read_peak_gbps", "quick"),
        ("workload.batch", [1]),
        ("ratios", 3),
        ("conditions.slowed", "no"),
    ],
)
def test_words_where_numbers_belong_are_named_with_their_field(
    save: Callable[..., Path], where: str, value: Any
) -> None:
    path = save()
    body = json.loads((path / "manifest.json").read_text())
    *parents, last = where.split(".")
    table = body
    for name in parents:
        table = table[name]
    table[last] = value
    (path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(PdqError, match=rf"is damaged: .*\$\.{re.escape(where)}"):
        snapshot.load(path)


def test_a_series_of_another_kind_or_another_run_is_named(save: Callable[..., Path]) -> None:
    one, other = save("bf16"), save("int4")
    shutil.copy(other / "sensors.parquet", one / "requests.parquet")
    with pytest.raises(PdqError, match=r"requests\.parquet is no such series: it has no column request"):
        _ = snapshot.load(one).requests
    table = snapshot.load(other).requests_table
    table.head(3).write_parquet(other / "requests.parquet")
    with pytest.raises(PdqError, match="is not of this snapshot: 3 rows, its manifest says"):
        _ = snapshot.load(other).requests


# -- X01, X02, X04 -----------------------------------------------------------------------------------------------------


def test_X01_a_manifest_is_strict_json_and_a_series_has_no_nan(
    save: Callable[..., Path], events: list[Any]
) -> None:
    for e in events:
        if isinstance(e, p.Request):
            e.prefill_bound_ms = math.nan
            e.decode_bound_ms = math.inf
    path = save("bf16", note="broken \ud800 text")
    manifest = strict(path / "manifest.json")
    assert manifest["arm"]["prefill"]["explained"] is None and manifest["arm"]["prefill"]["explained_reason"]
    table = snapshot.load(path).requests_table
    assert table["prefill_bound_ms"].null_count() == table.height
    assert table["ttft_ms"].mean() == pytest.approx(100, rel=0.02)


def _rewrite(path: Path, file: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    change(pl.read_parquet(path / file)).write_parquet(path / file)


def _schema(value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        body = json.loads((path / "manifest.json").read_text())
        body.pop("schema")
        if value is not None:
            body["schema"] = value
        (path / "manifest.json").write_text(json.dumps(body))

    return change


VARIANTS: dict[str, Callable[[Path], None]] = {
    "as written": lambda d: None,
    "column missing": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.drop("gap_ms", "row", "host_start_ns")
    ),
    "column extra": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.with_columns(pl.lit("x").alias("new"))
    ),
    "float to int": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.with_columns(pl.col("ttft_ms", "gap_ms").round().cast(pl.Int64))
    ),
    "int to float": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.with_columns(pl.col("kv_bytes", "prompt_tokens").cast(pl.Float64))
    ),
    "narrow int": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.with_columns(pl.col("prompt_tokens", "block").cast(pl.Int16))
    ),
    "null type": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.with_columns(pl.lit(None).alias("handoff_ms"))
    ),
    "renamed column": lambda d: _rewrite(
        d, "requests.parquet", lambda t: t.rename({"gap_ms": "gap_milliseconds"})
    ),
    "tokens without row": lambda d: _rewrite(d, "tokens.parquet", lambda t: t.drop("row")),
    "no schema": _schema(None),
    "older schema": _schema(0),
    "newer minor schema": _schema(1.4),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("other", ["as written", "column extra", "null type", "int to float"])
def test_X02_versions_side_by_side_in_both_orders(
    save: Callable[..., Path], tmp_path: Path, variant: str, other: str
) -> None:
    one, two = save("bf16"), save("int4")
    VARIANTS[variant](one)
    VARIANTS[other](two)
    assert [s.error for s in listing.list_snapshots(tmp_path)] == [None, None]
    a, b = snapshot.load(one), snapshot.load(two)
    for pair in ((a, b), (b, a)):
        both = series.together([s.requests_table for s in pair])
        assert both.height == a.requests_table.height + b.requests_table.height
        assert set(series.REQUESTS) <= set(both.columns)
        assert both["e2e_ms"].null_count() == 0
    for s in (a, b):
        assert len(s.requests) == s.requests_table.height
        assert all(r.prompt_tokens == 512 and len(r.itl_ms) == 8 for r in s.requests)
    if variant == "column extra":
        assert a.requests_table["new"].to_list() == ["x"] * a.requests_table.height
    if variant in ("column missing", "renamed column"):
        assert a.requests_table["gap_ms"].null_count() == a.requests_table.height
        assert all(r.gap_ms is None for r in a.requests)
    if variant == "renamed column":
        assert a.requests_table["gap_milliseconds"].null_count() == 0
    if variant == "null type":
        assert a.requests_table.schema["handoff_ms"] == pl.Float64


def test_X02_a_newer_major_version_is_listed_and_skipped(save: Callable[..., Path], tmp_path: Path) -> None:
    new, good = save("bf16"), save("int4")
    _schema(2)(new)
    one, two = listing.list_snapshots(tmp_path)
    assert one.error is not None and "made by a newer version" in one.error
    assert two.error is None and len(snapshot.load(good).requests) == 8
    with pytest.raises(PdqError, match="made by a newer version"):
        snapshot.load(new)


def test_X02_an_all_missing_column_keeps_its_type(save: Callable[..., Path], events: list[Any]) -> None:
    for e in events:
        if isinstance(e, p.Request):
            e.gap_ms = None
    raw = pl.read_parquet(save() / "requests.parquet")
    assert raw.schema["gap_ms"] == pl.Float64 and raw.schema == pl.Schema(dict(series.REQUESTS))
    empty = series.sensors_frame([])
    assert empty.schema == pl.Schema(dict(series.SENSORS))


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Every file of this process stops at 2,000 bytes: the kernel refuses the rest, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_X04_a_full_disk_leaves_nothing_half_done(
    save: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = save("bf16")
    request.getfixturevalue("small_disk")
    with pytest.raises(PdqError, match="cannot be written"):
        save("int4")
    assert sorted(f.name for f in before.parent.iterdir()) == ["001"]
    assert [s.error for s in listing.list_snapshots(tmp_path)] == [None]


def test_X04_the_same_results_can_be_saved_elsewhere(
    save: Callable[..., Path], tmp_path: Path, events: list[Any]
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("not a directory")
    with pytest.raises(PdqError, match="cannot be written"):
        snapshot.save(blocked, events, "bf16")
    assert blocked.read_text() == "not a directory"
    assert save("bf16").is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_X04_a_read_only_run_directory(tmp_path: Path, events: list[Any]) -> None:
    run = tmp_path / RUN
    run.mkdir(mode=0o555)
    with pytest.raises(PdqError, match="no permission") as caught:
        snapshot.save(run, events, "bf16")
    assert caught.value.hint is not None
    assert list(run.iterdir()) == []


def test_two_savers_never_share_a_number(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = save("bf16")
    real, calls = snapshot._next_number, []

    def late(folder: Path) -> int:
        calls.append(1)
        return 1 if len(calls) == 1 else real(folder)

    monkeypatch.setattr(snapshot, "_next_number", late)
    second = save("int4")
    assert second.name == "002" and snapshot.load(first).label == "bf16"
    assert strict(second / "manifest.json")["name"] == "002"


def test_gaps_come_back_whatever_the_order_of_the_file() -> None:
    """A file in order is cut, any other is grouped; both give every request its own gaps."""
    requests = [
        p.Request(
            request=n,
            arm="A",
            policy="x",
            policy_digest="d",
            kind="blocks",
            itl_ms=[n + i / 8 for i in range(n % 4)],
        )
        for n in range(9)
    ]
    table, tokens = series.requests_frame(requests), series.tokens_frame(requests)
    wanted = [r.itl_ms for r in requests]
    assert [r.itl_ms for r in series.requests_of(table, tokens, "A")] == wanted
    mixed = tokens.sort("step", "row", descending=[False, True])
    assert [r.itl_ms for r in series.requests_of(table, mixed, "A")] == wanted


def test_only_some_columns_are_read_where_they_are_there(tmp_path: Path) -> None:
    file = tmp_path / "tokens.parquet"
    pl.DataFrame({"request": [1, 2], "itl_ms": [3.0, 4.0], "mine": ["a", "b"]}).write_parquet(file)
    table = series.read(file, series.TOKENS, series.KEYS["tokens"], series.STEPS)
    assert table.columns == ["row", "request", "itl_ms"] and table["row"].null_count() == 2
    with pytest.raises(PdqError, match="no column itl_ms"):
        pl.DataFrame({"request": [1]}).write_parquet(file)
        series.read(file, series.TOKENS, series.KEYS["tokens"], series.STEPS)
