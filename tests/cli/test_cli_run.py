"""A headless measurement from the command line, with the real engine on a tiny model: the JSON contract, what is kept,
and what happens when the disk or the person ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_gear import PATIENCE_S, Pdq, environment

QUICK = ("--in", "16", "--out", "4", "--min-seconds", "0", "--no-solo", "--threads", "1", "--device", "cpu")


class Measured:
    """One run of two arms, made once for all tests that only read it."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        words = [
            "run",
            str(model),
            "-p",
            "bf16",
            "-p",
            "int8",
            "--blocks",
            "2",
            *QUICK,
            "--json",
            "--name",
            "[/",
        ]
        self.done = pdq_at(home, *words)
        self.document: dict[str, Any] = json.loads(self.done.stdout, parse_constant=_refuse)

    def pdq(self, *words: str) -> subprocess.CompletedProcess[str]:
        return pdq_at(self.home, *words)


def pdq_at(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdq_tui", *words],
        env=environment(home, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Measured:
    return Measured(tmp_path_factory.mktemp("home"), tiny_model)


def test_run_gives_the_contract_on_stdout_and_words_on_stderr(measured: Measured) -> None:
    assert measured.done.returncode == 0, measured.done.stderr
    doc = measured.document
    assert doc["schema"] == 1
    assert [arm["label"] for arm in doc["arms"]] == ["bf16", "int8"]
    assert doc["workload"]["prompt_tokens"] == 16
    assert doc["arms"][1]["coverage"]["decode"]["converted_parameters"] > 0
    assert {r["reference"] for r in doc["ratios"]} == {"bf16"}
    assert "snapshot" in measured.done.stderr


def test_a_run_leaves_a_snapshot_an_arm_and_each_can_be_found(measured: Measured) -> None:
    listed = json.loads(measured.pdq("snapshots", "list", "--json").stdout)
    assert [s["arm"] for s in listed] == ["bf16", "int8"]
    assert {s["note"] for s in listed} == {"[/"}
    shown = json.loads(measured.pdq("snapshots", "show", "@last", "--json").stdout, parse_constant=_refuse)
    assert shown["arms"][0]["label"] == "int8"
    before = json.loads(measured.pdq("snapshots", "show", "@last-1", "--json").stdout)
    assert before["arms"][0]["label"] == "bf16"
    assert measured.pdq("snapshots", "show", "@last-2").returncode == 2


def test_compare_and_report_from_what_a_run_left(measured: Measured, tmp_path: Path) -> None:
    ids = [s["id"] for s in json.loads(measured.pdq("snapshots", "list", "--json").stdout)]
    table = measured.pdq("compare", *ids)
    assert table.returncode == 0
    assert "int8 against bf16" in table.stdout
    for form in ("md", "json", "csv"):
        assert measured.pdq("compare", *ids, "--format", form).stdout
    done = measured.pdq("report", *ids, "-f", "md,json,csv,parquet", "--dir", str(tmp_path))
    assert [Path(line).name for line in done.stdout.split()] == [
        "report.md", "report.json", "report.csv", "report.parquet",
    ]  # fmt: skip
    one = measured.pdq("report", ids[0], "-f", "csv", "--dir", str(tmp_path / "one"))
    assert [Path(line).name for line in one.stdout.split()] == ["report.csv"]
    again = measured.pdq("report", *ids, "--dir", str(tmp_path))
    assert (again.returncode, again.stdout) == (1, "")
    assert "--force" in again.stderr


def test_fail_on_worse_exits_3_and_says_what_is_worse(measured: Measured) -> None:
    """bf16 stores more bytes than int8, exactly and always: against int8 it is worse, where that is asked."""
    ids = [s["id"] for s in json.loads(measured.pdq("snapshots", "list", "--json").stdout)]
    done = measured.pdq("compare", *reversed(ids), "--fail-on", "worse:stored_bytes")
    assert done.returncode == 3
    assert "worse: bf16" in done.stderr


def test_snapshots_are_deleted_only_when_that_is_said(measured: Measured, tmp_path: Path) -> None:
    done = measured.pdq("snapshots", "rm", "@last")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--yes" in done.stderr
    assert len(json.loads(measured.pdq("snapshots", "list", "--json").stdout)) == 2


def test_a_run_without_a_snapshot_is_named_and_gets_them_from_its_journal(
    measured: Measured, tmp_path: Path
) -> None:
    """What is left of an app that was killed: a journal. Its snapshots say what those of the run itself said."""
    run = next((measured.home / "state" / "runs").iterdir())
    left = tmp_path / "runs" / run.name
    shutil.copytree(run, left, ignore=shutil.ignore_patterns("snapshots"))
    listed = measured.pdq("snapshots", "list", "--dir", str(left.parent))
    assert f"1 run without a snapshot, the last {run.name}" in listed.stderr
    made = measured.pdq("snapshots", "make", run.name[-4:], "--dir", str(left.parent))
    assert made.returncode == 0, made.stderr
    assert [line.split()[:2] for line in made.stdout.splitlines()] == [
        [f"{run.name}/001", "bf16"],
        [f"{run.name}/002", "int8"],
    ]
    words = ("compare", f"{run.name}/001", f"{run.name}/002", "--format", "csv")
    again = measured.pdq(*words, "--dir", str(left.parent))
    assert again.returncode == 0, again.stderr
    assert again.stdout == measured.pdq(*words).stdout
    assert "without a snapshot" not in measured.pdq("snapshots", "list", "--dir", str(left.parent)).stderr
    wrong = measured.pdq("snapshots", "make", "nothing", "--dir", str(left.parent))
    assert (wrong.returncode, "no run is called 'nothing'" in wrong.stderr) == (2, True)


def test_X04_a_place_that_cannot_be_written_costs_no_result(
    pdq: Pdq, tiny_model: Path, tmp_path: Path
) -> None:
    """Not even root may write below /proc: the run is kept elsewhere, which is said, and the exit code is not 0."""
    done = pdq(
        "run", str(tiny_model), "-p", "bf16", "--blocks", "1", *QUICK, "--json", "--dir", "/proc/runs",
        TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 1
    assert json.loads(done.stdout, parse_constant=_refuse)["arms"][0]["label"] == "bf16"
    assert "error: /proc/runs cannot be written" in done.stderr, "the reason of the exit code, at the end"
    kept = [p for p in tmp_path.rglob("manifest.json") if "snapshots" in p.parts]
    assert len(kept) == 1
    assert str(kept[0].parent) in done.stderr


SMALL_DISK = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'


def test_X04_a_disk_that_fills_up_in_the_middle_costs_no_result(
    own_home: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """A real file system of 64 KiB, in a mount namespace of its own: the journal is larger."""
    place, spare = tmp_path / "small", tmp_path / "spare"
    place.mkdir()
    spare.mkdir()
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(place)]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [
            *words, sys.executable, "-P", "-m", "pdq_tui", "run", str(tiny_model), "-p", "bf16", *QUICK,
            "--blocks", "60", "--json", "--dir", str(place),
        ],
        env=environment(own_home, TMPDIR=str(spare)),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot be written (No space left on device)" in done.stderr, "said while it runs"
    assert f"the journal in {place}" in done.stderr and "could not be written to the end" in done.stderr
    journal = next(spare.rglob("events.jsonl"))
    assert f"the whole run is kept in {journal.parent} instead" in done.stderr
    kept = journal.read_bytes()
    assert len(kept) > 64 << 10
    arm = json.loads(done.stdout, parse_constant=_refuse)["arms"][0]
    assert kept.count(b'"kind":"blocks"') >= arm["requests"]["used"] >= 120
    assert len(list(spare.rglob("manifest.json"))) == 1


def test_ctrl_c_keeps_what_was_measured_and_says_where(own_home: Path, tiny_model: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "pdq_tui",
        "run",
        str(tiny_model),
        "-p",
        "bf16",
        "--blocks",
        "100000",
        *QUICK,
    ]
    with subprocess.Popen(
        argv, env=environment(own_home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _wait_for_requests(own_home, process, 4)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: what was measured until then is kept in" in err
    assert str(own_home / "state" / "runs") in err
    assert "bf16" in out
    assert len(list(own_home.glob("state/runs/*/snapshots/001/manifest.json"))) == 1


def _wait_for_requests(home: Path, process: subprocess.Popen[str], count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for journal in home.glob("state/runs/*/events.jsonl"):
            if journal.read_bytes().count(b'"kind":"blocks"') >= count + 1:
                return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    raise AssertionError("nothing was measured in time")


def test_I01_nine_of_ten_prompts_run(pdq: Pdq, tiny_model: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"line {n} of ten"}) for n in range(1, 11)]
    lines[3] = ""
    file = tmp_path / "ten.jsonl"
    file.write_text("\n".join(lines) + "\n")
    done = pdq(
        "run", str(tiny_model), "-p", "bf16", "--prompts", str(file), "--blocks", "1", *QUICK, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "9 of 10 prompts run; number 4 refused: empty line" in done.stderr
    assert json.loads(done.stdout)["workload"]["prompts"] in (9, "file")


def test_I06_a_damaged_model_is_one_sentence_and_no_traceback(
    pdq: Pdq, own_home: Path, tmp_path: Path, tiny_model: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    done = pdq("run", str(broken), "-p", "bf16", *QUICK)
    assert done.returncode == 2
    assert "model.safetensors is short by 100 bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*(own_home / "state" / "runs").iterdir()], "a run that came to nothing leaves no folder"
