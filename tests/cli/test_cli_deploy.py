"""``deploy`` as a person has it: commands on stdout, files in a folder, refusals in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

from cli_gear import Pdq
from test_cli_predicted import SHAPES, model


def test_it_prints_commands_and_writes_what_they_name(pdq: Pdq, tmp_path: Path) -> None:
    folder = model(tmp_path / "tiny", SHAPES)
    words = ("deploy", "w8a8-prefill-int4-decode", "--model", str(folder), "--in", "1000", "--link", "10")
    done = pdq(*words, "--dir", "out", "--format", "json")
    assert done.returncode == 0, done.stderr
    by = {d["server"]: d for d in json.loads(done.stdout)["deployments"]}
    # one layer, two KV heads of 16 numbers, two bytes each: 128 bytes a token
    assert by["vllm"]["link"]["bytes"] == 128_000 and abs(by["vllm"]["link"]["ms"] - 0.0128) < 1e-9
    assert by["tensorrt-llm"]["pools"] == [] and by["tensorrt-llm"]["cannot"]
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"deploy.md", "deploy.json", "vllm/make-tiny-w8a8.py", "sglang/make-tiny-w8a8.py"} <= written
    text = (tmp_path / "out" / "deploy.md").read_text()
    assert "vllm serve ./tiny-int4-g64" in text and "not run: no server was started" in text
    again = pdq(*words, "--dir", "out")
    assert again.returncode == 1 and "already there" in again.stderr


def test_X01_what_it_cannot_take_is_named(pdq: Pdq, tmp_path: Path) -> None:
    for words, sentence in (
        (("--link", "0"), "--link: 0.0 is not a legal value"),
        (("--server", "ollama"), "legal: sglang, tensorrt-llm, vllm"),
        (("--model", "./nowhere"), "no such directory"),
    ):
        done = pdq("deploy", "int8", *words)
        assert done.returncode == 2 and sentence in done.stderr and not done.stdout
