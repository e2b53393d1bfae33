"""``recheck`` runs what a snapshot's run was asked for again, and ``note`` logs work with an evaluation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
    "--blocks",
    "8",
    "--min-seconds",
    "0",
    "--no-solo",
)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The runs directory of a small run of int8."""
    runs = tmp_path_factory.mktemp("recheck") / "runs"
    words = ["run", str(tiny_model), "--policy", "int8", *SMALL, "--dir", str(runs)]
    done = subprocess.run(
        [sys.executable, "-m", "pdq_tui", *words], env=environment(runs.parent), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return runs


@pytest.fixture
def measured(once: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(runs directory, snapshot): a copy of that run, to be changed."""
    runs = Path(shutil.copytree(once, tmp_path / "runs"))
    (snapshot,) = runs.glob("*/snapshots/*")
    return runs, snapshot


def again(pdq: Pdq, runs: Path, snapshot: Path, **more: str) -> Any:
    words = ("--dir", str(runs), "--blocks", "8", "--min-seconds", "0", "--min-effect", "90%")
    return pdq("recheck", str(snapshot), *words, **more)


def faster(snapshot: Path, factor: float) -> None:
    """Make the snapshot's times those of a machine that is ``factor`` times as fast, and its libraries older."""
    import polars as pl

    for name, columns in (
        ("requests", ("prefill_ms", "ttft_ms", "decode_ms", "tpot_ms", "e2e_ms")),
        ("tokens", ("itl_ms",)),
    ):
        file = snapshot / f"{name}.parquet"
        table = pl.read_parquet(file)
        there = [c for c in columns if c in table.columns]
        table.with_columns([pl.col(c) / factor for c in there]).write_parquet(file)
    manifest = json.loads((snapshot / "manifest.json").read_text())
    manifest["libraries"]["torch"] = "2.0.0"
    manifest["conditions"]["other_load"] = None
    (snapshot / "manifest.json").write_text(json.dumps(manifest))


def test_what_became_faster_is_no_regression(pdq: Pdq, measured: tuple[Path, Path]) -> None:
    runs, snapshot = measured
    # far slower then than now: what a busy machine does to so small a run cannot turn that round
    faster(snapshot, 1 / 50)
    done = again(pdq, runs, snapshot)
    assert done.returncode == 0, done.stderr
    assert "int8 again, as in" in done.stderr and "regression" not in done.stderr
    assert len(list(runs.glob("*/snapshots/*"))) == 2, "the recheck is kept as a snapshot of its own"


def test_what_became_slower_exits_3_though_versions_differ(pdq: Pdq, measured: tuple[Path, Path]) -> None:
    runs, snapshot = measured
    faster(snapshot, 50.0)
    done = again(pdq, runs, snapshot)
    assert done.returncode == 3, done.stderr + done.stdout
    assert "regression: " in done.stderr and "libraries: " in done.stderr


def test_what_cannot_be_run_again_is_said(pdq: Pdq, measured: tuple[Path, Path]) -> None:
    runs, snapshot = measured
    (snapshot.parent.parent / "events.jsonl").unlink()
    done = again(pdq, runs, snapshot)
    assert done.returncode == 1 and "the journal of its run cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    assert pdq("recheck", "nothing", "--dir", str(runs)).returncode == 2


def test_work_is_logged_with_its_evaluation(pdq: Pdq, tmp_path: Path) -> None:
    place = tmp_path / "e"
    words = ("note", "--op", "flags set", "--minutes", "12.5", "--dir", str(place))
    assert pdq(*words).returncode == 2
    place.mkdir()
    (place / "spec.json").write_text("{}")
    assert "12.5 min in all" in pdq(*words).stderr
    assert "25 min in all" in pdq(*words).stderr
    nowhere = pdq("note", "--op", "x", "--minutes", "1")
    assert nowhere.returncode == 2 and "there is no evaluation" in nowhere.stderr
