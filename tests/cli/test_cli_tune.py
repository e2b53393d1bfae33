"""``tune`` from the command line with the real engine on a tiny model, and what `doctor`, `run` and `where` make of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from cli_gear import PATIENCE_S, Pdq, environment

WORDS = ("--device", "cpu", "--threads", "1", "--seconds", "0")


def test_the_winners_are_written_and_used(pdq: Pdq, tiny_model: Path, own_home: Path) -> None:
    done = pdq("tune", str(tiny_model), "--format", "int8,bf16,w8a8-fp8", "--rows", "1,16", *WORDS, "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["complete"] and body["device"] == "cpu" and list(body["refused"]) == ["w8a8-fp8"]
    assert {(c["format"], c["rows"]) for c in body["cells"]} == {
        (f, rows) for f in ("dense", "int8") for rows in (1, 16)
    }
    file = own_home / "config" / "kernels_cfg" / "cpu.tuned.toml"
    assert body["file"] == str(file)
    stored = tomllib.loads(file.read_text(encoding="utf-8"))
    assert stored["stamp"] == body["stamp"] and stored["stamp"]["threads"] == "1"
    assert len(stored["best"]) == sum(t["best"] for c in body["cells"] for t in c["times"])
    assert "w8a8-fp8 is left out: w8a8-fp8-scaled_mm needs a GPU" in done.stderr

    where = json.loads(pdq("where", "--json").stdout)
    assert where["tuned for the CPU"] == str(file)

    # A winner of another name shows who takes it from the table.
    text = file.read_text(encoding="utf-8")
    for best in stored["best"]:
        if best["format"] == "int8":
            text = text.replace(f'kernel = "{best["kernel"]}"', 'kernel = "int8-dequantize-float32"')
    file.write_text(text, encoding="utf-8")

    words = ("doctor", "--device", "cpu", "--json")
    checks = [c["text"] for c in json.loads(pdq(*words, PDQ_ENGINE_THREADS="1").stdout)["checks"]]
    assert any("4 layer shapes, dense, int8" in text for text in checks)
    [int8] = [text for text in checks if text.startswith("int8: ")]
    assert "; measured here: 1 row int8-dequantize-float32; from 2 rows int8-dequantize-float32" in int8

    def checked(**more: str) -> tuple[dict[str, int], str]:
        """(kernels of decode, what is said of the table): without a weight being loaded."""
        words = (
            "policies",
            "check",
            "int8",
            "--model",
            str(tiny_model),
            "--device",
            "here",
            "--in",
            "16",
            "--json",
        )
        [found] = json.loads(pdq(*words, PDQ_ENGINE_DEVICE="cpu", **more).stdout)
        return found["stages"]["decode"]["kernels"], found["notes"][-1]

    here, said = checked(PDQ_ENGINE_THREADS="1")
    assert "int8-dequantize-float32" in here and said.startswith("tuned kernel table of ")
    off, said = checked(PDQ_ENGINE_THREADS="1", PDQ_ENGINE_TUNED="off")
    assert "int8-dequantize-float32" not in off and said.startswith("no tuned kernel table is used")
    if (os.cpu_count() or 1) > 1 and len(os.sched_getaffinity(0)) > 1:
        assert "was measured elsewhere (CPU threads 1, here 2)" in checked(PDQ_ENGINE_THREADS="2")[1]
    ran = ("run", str(tiny_model), "-p", "int8", "--in", "16", "--out", "2", "--blocks", "1", "--min-seconds", "0",
           "--no-solo", "--device", "cpu", "--threads", "1", "--json")  # fmt: skip
    with_it = json.loads(pdq(*ran).stdout)["arms"][0]
    assert with_it["coverage"]["decode"]["kernels"] == here, "what was predicted"


def test_the_table_is_for_people(pdq: Pdq, tiny_model: Path) -> None:
    done = pdq("tune", str(tiny_model), "--format", "bf16", "--rows", "1", *WORDS)
    assert done.returncode == 0, done.stderr
    head, first, *_ = done.stdout.splitlines()
    assert head.split("  ")[0] == "format" and "over the shipped choice" in head
    assert first.startswith("dense") and "128 × 64" in first and " us" in first
    assert "winners in" in done.stderr


def test_ctrl_c_keeps_what_was_measured(own_home: Path, tiny_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pdq_tui", "tune", str(tiny_model), "--format", "bf16,int8,w8a8", "--device", "cpu",
         "--threads", "1", "--seconds", "4", "--json"],
        env=environment(own_home), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    end = time.monotonic() + PATIENCE_S
    line = ""
    while re.search(r": [1-9]\d* of \d+ measurements", line) is None:
        line = process.stderr.readline()
        assert line and time.monotonic() < end, "it told of no measurement"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    body = json.loads(out)
    assert not body["complete"] and body["cells"]
    stored = tomllib.loads(Path(body["file"]).read_text(encoding="utf-8"))
    assert len(stored["best"]) == sum(t["best"] for c in body["cells"] for t in c["times"]) >= 1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--format", "int9"), "'int9' is not a format"),
        (("--format", ","), "--format: no format is named"),
        (("--rows", "1,none"), "--rows: 'none' is not a legal value"),
        (("--rows", "0"), "--rows: '0' is not a legal value"),
        (("--seconds", "nan"), "--seconds: nan is no finite number"),
    ],
)
def test_a_wrong_word_is_named(pdq: Pdq, tiny_model: Path, words: tuple[str, str], what: str) -> None:
    done = pdq("tune", str(tiny_model), *words)
    assert done.returncode == 2 and what in done.stderr
