"""The HTML report in a real browser: complete in itself, readable at a phone's width, sortable, and safe from what others
wrote into it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import made_evaluation
import made_snapshots
from browser import CHROMIUM, Browser
from made_evaluation import SPEC, STAGED

from pdq_tui.core.protocol import Request
from pdq_tui.judge import soak
from pdq_tui.judge.matrix import stage_matrix
from pdq_tui.report import samples, write
from pdq_tui.report.evaluated import Evaluated, evaluated
from pdq_tui.report.evaluation_figures import evaluation_figures
from pdq_tui.report.figure import Figure
from pdq_tui.report.html import html
from pdq_tui.report.page import Page, Table
from pdq_tui.report.run_figures import comparison_figures, sample_figures
from pdq_tui.report.trend import trend_page
from pdq_tui.store.compare import Comparison, compare
from pdq_tui.store.listing import resolve
from pdq_tui.store.snapshot import Snapshot, load
from pdq_tui.store.trend import Trend, trend

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
HOSTILE = '<img src="http://127.0.0.1:1/x.png"><script>alert(1)</script> & "quoted"'
PHONE = 360


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[Snapshot]]:
    runs = tmp_path_factory.mktemp("runs")
    found = [load(resolve(i, runs)) for i in made_snapshots.save_all(runs, note=HOSTILE)]
    return compare(found), found


def timed_and_scored() -> dict[str, Any]:
    return {
        "small_quality": made_evaluation.scored(),
        "confirmation": made_evaluation.confirmation(),
        "load": made_evaluation.load(),
        "soak": crept(),
    }


def crept() -> dict[str, Any]:
    """Twenty seconds in which the time per token crept up by a fifth."""
    requests = [
        Request(
            request=n, arm=STAGED, policy=STAGED, policy_digest="d", kind="soak", host_start_ns=n * 10**8,
            host_end_ns=(n + 1) * 10**8, tpot_ms=10 + n / 100 + (n % 3) / 10, ttft_ms=80.0 + n % 5, output_tokens=[11],
        )
        for n in range(200)
    ]  # fmt: skip
    body = soak.analyse(requests, [], [], 0)
    return {
        "seconds": 21.0, "stop": None, "policy": STAGED, "asked_s": 20.0, "hours_long": False, **body,
        "troubles": soak.troubles(body), "unsettled": "20 s: not the hours-long test",
    }  # fmt: skip


@pytest.fixture(scope="module")
def judged() -> Evaluated:
    return evaluated(SPEC, timed_and_scored())


def page(*tables: Table) -> Page:
    return Page(title="t", headline="h", facts=[], tables=list(tables), notes=[], formulas=[], legend="l")


# -- in the browser ----------------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize("kind", ["comparison", "snapshot", "evaluation"])
def test_a_report_needs_nothing_but_itself(
    kind: str,
    compared: tuple[Comparison, list[Snapshot]],
    judged: Evaluated,
    browser: Browser,
    tmp_path: Path,
) -> None:
    comparison, snapshots = compared
    source: Any = {
        "comparison": write.Reported(comparison, samples.of_snapshots(comparison, snapshots)),
        "snapshot": write.Reported(snapshots[0].document(), samples.of_snapshot(snapshots[0])),
        "evaluation": judged,
        "trend": followed,
    }[kind]
    drawn = {"comparison": 6, "snapshot": 5, "evaluation": 10, "trend": 4}[kind]
    [path] = write.write(source, ["html"], tmp_path)
    for width, phone, shown in ((1100, False, "wide"), (PHONE, True, "narrow")):
        browser.open(path, width, phone=phone)
        assert browser.requests == [path.as_uri()] and browser.console == []
        assert browser.js("document.documentElement.scrollWidth") <= width, (
            "the page itself does not scroll sideways"
        )
        sizes = browser.js(
            f"[...document.querySelectorAll('figure .{shown} svg')].map(s => [s.getBoundingClientRect().width, "
            "s.querySelectorAll('path,line,text').length])"
        )
        assert len(sizes) == drawn
        assert all(200 < w <= width and marks > 15 for w, marks in sizes)
        hidden = {"wide": "narrow", "narrow": "wide"}[shown]
        assert browser.js(
            f"[...document.querySelectorAll('figure .{hidden}')].every(d => d.getBoundingClientRect().width === 0)"
        )
    assert browser.js("document.querySelector('main').lastElementChild.querySelector('h2').textContent") == (
        "What the numbers mean"
    )


@needs_browser
def test_what_others_wrote_is_text(
    compared: tuple[Comparison, list[Snapshot]], browser: Browser, tmp_path: Path
) -> None:
    comparison, snapshots = compared
    path = write.write(
        write.Reported(comparison, samples.of_snapshots(comparison, snapshots)), ["html"], tmp_path
    )[0]
    browser.open(path, 1000)
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert browser.js("document.querySelectorAll('script').length") == 1
    assert HOSTILE in browser.js("document.querySelector('.conditions').textContent")
    assert browser.requests == [path.as_uri()]


@needs_browser
@pytest.mark.parametrize(("width", "shown"), [(1100, "wide"), (PHONE, "narrow")])
def test_a_point_of_the_roofline_tells_what_it_is_where_it_is_pointed_at(
    compared: tuple[Comparison, list[Snapshot]], browser: Browser, tmp_path: Path, width: int, shown: str
) -> None:
    [path] = write.write(write.Reported(compared[0]), ["html"], tmp_path)
    browser.open(path, width, phone=width == PHONE)
    told = browser.js(
        f"[...document.querySelectorAll('#figure-roofline .{shown} title')].filter(t => / ms; /.test(t.textContent)).map(t => {{"
        " t.parentElement.scrollIntoView({block: 'center'}); const r = t.parentElement.getBoundingClientRect();"
        " const hit = document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2);"
        " return [hit === t.parentElement, t.textContent]; })"
    )
    assert [t.split(":")[0] for _, t in told] == [
        "bf16 prefill", "bf16 decode", "int8-prefill-int4-decode prefill", "int8-prefill-int4-decode decode",
    ]  # fmt: skip
    assert all(hit and "GFLOP" in text and "MiB" in text for hit, text in told)


@needs_browser
@pytest.mark.parametrize(("width", "columns"), [(1100, 2), (PHONE, 1)])
def test_answers_stand_side_by_side_where_there_is_room(
    browser: Browser, tmp_path: Path, width: int, columns: int
) -> None:
    said = {"B": [(f"one {HOSTILE}", [1, 2])], "A": [(f"one {HOSTILE}  more", [1, 3])]}
    made = made_snapshots.events(answers=said)
    found = [load(resolve(i, tmp_path)) for i in made_snapshots.save_all(tmp_path, made=made)]
    [path] = write.write(write.Reported(compare(found)), ["html"], tmp_path)
    browser.open(path, width, phone=width == PHONE)
    assert browser.requests == [path.as_uri()] and browser.console == []
    texts = browser.js("[...document.querySelectorAll('.pair p')].map(p => p.textContent)")
    assert texts == [f"one {HOSTILE}▸", f"one {HOSTILE}▸  more"]
    lefts = browser.js(
        "[...document.querySelectorAll('.pair > div')].map(d => d.getBoundingClientRect().left)"
    )
    assert len(set(lefts)) == columns
    assert browser.js("document.documentElement.scrollWidth") <= width


@needs_browser
def test_a_page_may_ask_for_nothing_even_if_it_wanted_to(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(html(page(), []), encoding="utf-8")
    browser.open(path, 1000)
    asked = browser.js(
        "new Promise(done => { const i = new Image(); i.onerror = () => done('refused'); i.onload = () => done('shown');"
        " i.src = 'data:image/gif;base64,R0lGODlhAQABAAAAACw='; })"
    )
    assert asked == "refused"


@needs_browser
def test_a_click_on_a_heading_sorts(browser: Browser, tmp_path: Path) -> None:
    table = Table(
        title="t",
        columns=["name", "bytes"],
        rows=[["b", "1.5 GiB"], ["a", "n/a"], ["c", "900 MiB"], ["d", "−2 KiB"]],
        sections={0: "first"},
    )
    path = tmp_path / "report.html"
    path.write_text(html(page(table), []), encoding="utf-8")
    browser.open(path, 1000)
    names = (
        "[...document.querySelectorAll('tbody tr:not(.section)')].map(r => r.cells[0].textContent).join('')"
    )
    click = "document.querySelectorAll('thead button')[%d].click()"
    seen = [browser.js(names)]
    for column in (1, 1, 1, 0):
        browser.js(click % column)
        seen.append(browser.js(names))
    assert seen == ["bacd", "dcba", "bcda", "bacd", "abcd"], (
        "numbers by their unit; what is missing stays last"
    )
    assert browser.js("document.querySelector('thead th').getAttribute('aria-sort')") == "ascending"


# -- a trend -----------------------------------------------------------------------------------------------------------


def later(folder: Path, run: str, created: str, slower: float, torch: str, note: str = "") -> list[Snapshot]:
    """The usual two arms, measured ``slower`` times as slowly on another day with another torch."""
    speed = {arm: (a * slower, b * slower) for arm, (a, b) in made_snapshots.SPEED.items()}
    found = []
    for name in made_snapshots.save_all(folder, run, note, made_snapshots.events(speed)):
        path = resolve(name, folder)
        body = json.loads((path / "manifest.json").read_text())
        body["created"] = created
        body["libraries"]["torch"] = torch
        (path / "manifest.json").write_text(json.dumps(body))
        found.append(load(path))
    return found


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Snapshot]]:
    folder = tmp_path_factory.mktemp("days")
    return folder, [
        *later(
            folder, "20261203T063000Z-0003", "2026-12-03T06:30:00+00:00", 1.2, "2.14.0", "after the update"
        ),
        *later(folder, "20261201T063000Z-0001", "2026-12-01T06:30:00+00:00", 1.0, "2.13.0"),
        *later(folder, "20261202T063000Z-0002", "2026-12-02T06:30:00+00:00", 1.0, "2.13.0"),
    ]


@pytest.fixture(scope="module")
def followed(days: tuple[Path, list[Snapshot]]) -> Trend:
    return trend(days[1], 0.01)


def test_a_trend_names_the_version_that_made_it_slower(followed: Trend) -> None:
    assert [s.policy for s in followed.series] == ["bf16", "int8-prefill-int4-decode"]
    first, second, third = followed.series[0].points
    assert first.against == {} and second.changed == [] and third.changed == ["torch 2.13.0 → 2.14.0"]
    assert second.against["tpot_ms"].judgement in ("same", "unsure")
    assert third.against["tpot_ms"].judgement == "worse"
    assert third.against["tpot_ms"].ratio == pytest.approx(1.2, rel=0.02)
    shown = trend_page(followed)
    assert "torch 2.13.0 → 2.14.0" in shown.headline and "worse" in shown.headline
    assert [row[0] for row in shown.tables[0].rows] == [f"2026-12-0{d} 06:30 UTC" for d in (1, 2, 3)]
    assert shown.tables[0].rows[2][3] == "after the update"


def test_a_trend_is_written_in_every_form(followed: Trend, tmp_path: Path) -> None:
    paths = write.write(followed, list(write.REPORTERS), tmp_path)
    assert {p.name for p in paths} == {f"report.{f}" for f in ("md", "html", "json", "csv", "parquet")}
    rows = (tmp_path / "report.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 3 * 4 and "torch 2.13.0 → 2.14.0" in rows[-1]
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "pdq-tui trend"


def test_a_folder_of_runs_is_reported_from_the_command_line(
    days: tuple[Path, list[Snapshot]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from pdq_tui.commands.report import app

    monkeypatch.setenv("PDQ_HOME", str(tmp_path / "home"))
    broken = days[0] / "20261130T000000Z-ffff" / "snapshots" / "001"
    broken.mkdir(parents=True, exist_ok=True)
    (broken / "manifest.json").write_text("{")
    done = CliRunner().invoke(app, [str(days[0]), "-f", "md", "--dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.md").read_text()
    assert "Trend of 6 snapshots" in text and "left out: 20261130T000000Z-ffff/001" in text


def test_setups_are_never_mixed_in_one_series(days: tuple[Path, list[Snapshot]], tmp_path: Path) -> None:
    others = made_snapshots.save_all(tmp_path, made=made_snapshots.events(model="another"))
    found = trend([*days[1], *(load(resolve(i, tmp_path)) for i in others)], 0.01)
    assert len(found.series) == 4 and len({s.setup for s in found.series}) == 2


# -- the figures themselves --------------------------------------------------------------------------------------------


def test_figures_say_what_is_not_there(compared: tuple[Comparison, list[Snapshot]]) -> None:
    comparison, _ = compared
    drawn = comparison_figures(comparison, [])
    assert [f.name for f in drawn] == ["ratios", "roofline", "samples"] and drawn[2].draw is None
    assert "were not given" in (drawn[2].missing or "")
    by_name = {f.name: f for f in evaluation_figures(SPEC, {})}
    assert all(f.draw is None and f.missing for f in by_name.values())
    assert {"map", "matrix", "positions", "load", "soak"} <= set(by_name)


def test_ids_of_figures_never_meet(judged: Evaluated, tmp_path: Path) -> None:
    [path] = write.write(judged, ["html"], tmp_path)
    text = path.read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and {"matrix-wide-0", "matrix-narrow-0"} <= set(ids)
    used = set(re.findall(r"url\(#([^)]+)\)", text))
    assert used and used <= set(ids)
    [again] = write.write(judged, ["html"], tmp_path, force=True)
    assert again.read_text(encoding="utf-8") == text


def test_a_long_run_is_drawn_by_its_medians(compared: tuple[Comparison, list[Snapshot]]) -> None:
    _, snapshots = compared
    one = samples.of_snapshot(snapshots[0])[0]
    many = [msgspec.structs.replace(r, t_ns=r.t_ns + 10**9 * i) for i in range(60) for r in one.requests]
    figures = {f.name: f for f in sample_figures([one._replace(requests=many)])}
    assert len(many) > 300 and "median of neighbouring requests" in figures["time-tpot_ms"].reads
    drawn = chart(figures["time-tpot_ms"])["data"]["values"]
    assert len(drawn) <= 300
    values = [r.tpot_ms for r in one.requests]
    assert min(values) <= min(d["value"] for d in drawn) <= max(d["value"] for d in drawn) <= max(values)  # type: ignore[type-var]


def test_answers_of_one_token_have_no_time_per_token(compared: tuple[Comparison, list[Snapshot]]) -> None:
    _, snapshots = compared
    one = samples.of_snapshot(snapshots[0])[0]
    short = [msgspec.structs.replace(r, tpot_ms=None, itl_ms=[], decode_ms=None) for r in one.requests]
    figures = {f.name: f for f in sample_figures([one._replace(requests=short)])}
    assert figures["time-tpot_ms"].draw is None and figures["spread-itl_ms"].draw is None
    assert figures["time-ttft_ms"].draw is not None


def test_the_map_says_which_side_wins_in_words(judged: Evaluated) -> None:
    drawn = next(f for f in evaluation_figures(SPEC, judged.found) if f.name == "map")
    cells = {(c["row"].split(" − ")[1], c["output"]): c for c in chart(drawn)["layer"][0]["data"]["values"]}
    assert {k: (c["side"], c["text"]) for k, c in cells.items()} == {
        ("int8", 11): ("faster", "-55"),
        ("int8", 64): ("faster", "-320~"),
        ("int4", 11): ("not told", "+1"),
        ("int4", 64): ("slower", "+6~"),
    }


def test_load_curves_and_drift_are_drawn_with_their_words(judged: Evaluated) -> None:
    by_name = {f.name: f for f in evaluation_figures(SPEC, judged.found)}
    load = judged.found["load"]
    rows = chart(by_name["load-good"])["layer"][0]["data"]["values"]
    closed = [p for p in load["points"] if p["concurrency"]]
    assert {(r["label"], r["at"]): r["value"] for r in rows} == {
        (p["arm"], p["concurrency"]): p["good"] * 100 for p in closed
    }
    assert all(
        f"{k['arm']}: {'no load' if k['concurrency'] is None else 'knee at ' + str(k['concurrency'])}"
        in by_name["load-good"].reads
        for k in load["knees"]
    )
    drift = {r["row"]: r for r in chart(by_name["soak"])["layer"][1]["data"]["values"]}
    assert drift["TPOT"]["word"] == "drifts" and 10 < drift["TPOT"]["change"] < 25
    assert drift["TTFT"]["word"] == "no drift" and "Not the hours-long test." in by_name["soak"].reads
    assert "no energy counter here" in by_name["soak"].reads


def chart(figure: Figure) -> dict[str, Any]:
    """The chart's own specification, data inside where a layer has it."""
    assert figure.draw is not None
    spec: dict[str, Any] = figure.draw(680).to_dict()
    sets = spec.get("datasets", {})

    def inline(part: Any) -> Any:
        if isinstance(part, dict):
            if set(part) == {"name"} and part["name"] in sets:
                return {"values": sets[part["name"]]}
            return {k: inline(v) for k, v in part.items()}
        return [inline(p) for p in part] if isinstance(part, list) else part

    whole = inline(spec)
    for layer in whole.get("layer", []):
        layer.setdefault("data", whole.get("data"))
    return dict(whole)


# -- the stage matrix --------------------------------------------------------------------------------------------------


def test_the_stage_matrix_composes_and_checks_itself() -> None:
    cells = {
        (c.prefill, c.decode): c
        for c in stage_matrix(SPEC.policies, made_evaluation.confirmation()["arms"], 11)
    }
    assert len(cells) == 9
    mixed = cells["int8", "int4"]
    assert mixed.composed_ms == 80 + 10 * 10 and mixed.policy == STAGED and mixed.measured_ms == 181
    assert mixed.error == pytest.approx(180 / 181 - 1)
    assert cells["int4", "int8"].policy is None and cells["bf16", "bf16"].measured_ms == 300


def test_a_mixed_cell_that_is_off_is_called_not_separable() -> None:
    off = timed_and_scored()
    off["confirmation"]["arms"][3]["e2e_ms"]["median"] = 200.0
    for steps, word in ((timed_and_scored(), "separable here"), (off, "not separable here")):
        drawn = next(f for f in evaluation_figures(SPEC, steps) if f.name == "matrix")
        assert f"): {word}" in drawn.reads


def test_one_uniform_makes_no_matrix() -> None:
    assert stage_matrix(SPEC.policies, made_evaluation.confirmation()["arms"][:1], 11) == []
