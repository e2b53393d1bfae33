"""A policy search on a tiny model with the real engine: killed, resumed, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_gear import PATIENCE_S, Pdq, environment

SMALL = (
    "--in",
    "16",
    "--out",
    "4",
    "--threads",
    "1",
    "--device",
    "cpu",
    "--formats",
    "int8,int4",
    "--groups",
    "2",
)
#: What int4 in all of a tiny random model costs is more than this, int8 less.
LIMIT = "0.00004"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Path, dict[str, Any]]:
    """(home, directory, search.json) of one that was killed after its candidates were made, and resumed."""
    home, place = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("searches") / "one"
    words = [
        sys.executable,
        "-m",
        "pdq_tui",
        "search",
        str(tiny_model),
        *SMALL,
        "--max-kld",
        LIMIT,
        "--dir",
        str(place),
    ]
    process = subprocess.Popen(
        [*words, "--name", "mine"], env=environment(home), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    while not (place / "steps" / "candidates.json").exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {f.name: f.stat().st_mtime_ns for f in (place / "steps").iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", "pdq_tui", "search", "--resume", "--dir", str(place), "--json"],
        env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3/8 Sensitivity: done before" in done.stderr and "policy: " in done.stderr
    assert all((place / "steps" / name).stat().st_mtime_ns == when for name, when in before.items())
    return home, place, json.loads(done.stdout)


def test_a_search_ends_in_a_policy_within_its_limits(found: tuple[Path, Path, dict[str, Any]]) -> None:
    home, place, body = found
    end = body["found"]["confirmation"]
    passed = end["tried"][-1]
    assert passed["gate"]["result"] == "pass" and passed["path"]["kld"]["ci95"][1] <= float(LIMIT)
    assert body == json.loads((place / "search.json").read_text())
    written = (home / "config" / "profiles" / "mine.toml").read_text()
    assert written.startswith("# Found by: pdq-tui search ") and "KLD" in written and "held-out" in written
    shown = subprocess.run(
        [sys.executable, "-m", "pdq_tui", "policies", "show", "mine", "--json"], env=environment(home),
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert json.loads(shown.stdout)["digest"] == end["digest"], "what was confirmed is what was written"
    report = (place / "search.md").read_text()
    assert "Sensitivity" in report and "Not chosen, and why" in report and "mine" in report


def test_every_group_format_and_stage_was_measured_by_itself(
    found: tuple[Path, Path, dict[str, Any]],
) -> None:
    body = found[2]["found"]
    assert [g["layers"] for g in body["conditions"]["groups"]] == [[0, 0], [1, 1]]
    units = {(u["group"], u["stage"], u["format"]): u["kld"]["value"] for u in body["sensitivity"]["units"]}
    assert set(units) == {
        (g, s, f) for g in (0, 1) for s in ("prefill", "decode") for f in ("int8", "int4-g64")
    }
    for group in (0, 1):
        for stage in ("prefill", "decode"):
            assert units[group, stage, "int4-g64"] > units[group, stage, "int8"] > 0


def test_every_candidate_was_chosen_or_has_a_reason(found: tuple[Path, Path, dict[str, Any]]) -> None:
    body = found[2]
    candidates = body["found"]["candidates"]
    out = {r["candidate"] for r in body["rejected"]} - {"–"}
    chosen = body["found"]["confirmation"]["tried"][-1]["candidate"]
    assert out | {chosen} == {c["name"] for c in candidates["measured"]} and chosen not in out
    assert all(r["reason"] and r["formats"] for r in body["rejected"])
    assert len(candidates["measured"]) + len(candidates["left_out"]) == candidates["made"]
    rounds = [body["found"][name] for name in ("round1", "round2", "round3")]
    assert [r["windows"] for r in rounds] == [2, 4, 8] and all(r["kept"] for r in rounds)
    assert [len(r["results"]) for r in rounds[1:]] == [len(r["kept"]) for r in rounds[:-1]]
    selected = {t for r in rounds for t in ()} | set(
        body["found"]["confirmation"]["tried"][-1]["path"]["texts"]
    )
    assert len(selected) == 8, "held-out windows, each of its own"


def test_limits_that_nothing_keeps_end_in_3_and_a_report(pdq: Pdq, tmp_path: Path, tiny_model: Path) -> None:
    place = tmp_path / "s"
    done = pdq("search", str(tiny_model), *SMALL, "--max-memory", "1KiB", "--dir", str(place))
    assert done.returncode == 3, done.stderr
    assert "NONE: no policy of these formats is estimated to keep to the limits" in done.stdout
    assert "over the limit of" in (place / "search.md").read_text()
    assert not list((tmp_path / "pdq-home").glob("config/profiles/*.toml"))


def test_what_cannot_be_searched_is_refused_before_anything_runs(pdq: Pdq, tiny_model: Path) -> None:
    for words, sentence in (
        (("--max-kld", "0"), "is not a limit"),
        (("--max-memory", "much"), "is no size"),
        (("--formats", "int3"), "is not a format"),
        (("--formats", "bf16"), "leaves nothing to search"),
        (("--name", "int8"), "a format's own name"),
        (("--name", "w8a8-prefill-int4-decode"), "is called w8a8-prefill-int4-decode already"),
        (("--plan", "long"), "legal: quick, full"),
        (("--resume",), "--resume needs --dir"),
        (("--resume", "--dir", "nowhere"), "there is no search in nowhere"),
    ):
        done = pdq("search", str(tiny_model), *words)
        assert done.returncode == 2 and sentence in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_folder_with_steps_of_something_else_is_refused(pdq: Pdq, tmp_path: Path, tiny_model: Path) -> None:
    """An evaluation's are called alike: conditions, confirmation."""
    (tmp_path / "e" / "steps").mkdir(parents=True)
    (tmp_path / "e" / "steps" / "conditions.json").write_text("{}")
    done = pdq("search", str(tiny_model), *SMALL, "--dir", str(tmp_path / "e"))
    assert done.returncode == 2 and "holds steps of something else" in done.stderr
    assert not (tmp_path / "e" / "search-spec.json").exists()
