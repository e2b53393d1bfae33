"""The whole protocol from the command line on a tiny model with the real engine: its verdict, and going on after an end."""

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

STAGED = "bf16-prefill-int4-decode"
SMALL = (
    "--in", "16", "--out", "4", "--threads", "1", "--device", "cpu",
    "--baseline", "bf16", "--baseline", "int4", "--candidate", STAGED, "--gate", "loose", "--soak", "3s",
)  # fmt: skip
STEPS = [
    "conditions",
    "bottleneck",
    "selection",
    "small_quality",
    "confirmation",
    "quality",
    "tasks",
    "load",
    "abnormal",
    "soak",
    "logs",
]


@pytest.fixture(scope="module")
def evaluated(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> tuple[Path, Path, dict[str, Any]]:
    """(home, directory, evaluation.json) of one that was killed after its second step and resumed."""
    home, place = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("evaluations") / "one"
    words = [sys.executable, "-m", "pdq_tui", "evaluate", str(tiny_model), *SMALL, "--dir", str(place)]
    process = subprocess.Popen(
        words,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE_S
    while not (place / "steps" / "bottleneck.json").exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {f.name: f.stat().st_mtime_ns for f in (place / "steps").iterdir()}
    assert {"conditions.json", "bottleneck.json"} <= set(before) < {f"{step}.json" for step in STEPS}
    done = subprocess.run(
        [sys.executable, "-m", "pdq_tui", "evaluate", "--resume", "--dir", str(place), "--json"],
        env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"1/{len(STEPS)} Conditions: done before" in done.stderr
    for name, when in before.items():
        assert (place / "steps" / name).stat().st_mtime_ns == when, "what is done is not done again"
    return home, place, json.loads(done.stdout)


def test_a_killed_evaluation_goes_on_and_ends_in_a_verdict(
    evaluated: tuple[Path, Path, dict[str, Any]],
) -> None:
    _, place, body = evaluated
    assert [s["name"] for s in body["steps"]] == STEPS
    assert body["verdict"]["word"] in ("ONLY-IF", "NO-GO", "UNSURE", "NOT INFORMATIVE", "ENGINE-LIMITED")
    assert body["verdict"]["because"] and body["verdict"]["not_tested"]
    assert body == json.loads((place / "evaluation.json").read_text())
    text = (place / "report.md").read_text()
    assert body["verdict"]["word"] in text and "Where the time goes" in text


def test_every_step_left_its_evidence(evaluated: tuple[Path, Path, dict[str, Any]]) -> None:
    _, place, body = evaluated
    found = body["found"]
    assert 0 < found["bottleneck"]["prefill"] < 1
    assert found["selection"]["staged"] == [STAGED] and found["selection"]["best_uniform"] in ("bf16", "int4")
    small = found["small_quality"]["paths"][STAGED]
    assert [(p["path"], p["forced"]) for p in small] == [
        ("prefill", "text"),
        ("decode", "text"),
        ("decode", "sample"),
    ]
    # Its prefill is the base's own: no divergence there, and none in the first token of an answer.
    assert small[0]["kld"]["value"] == 0.0 and dict(small[1]["by_position"])[0]["value"] == 0.0
    assert small[1]["kld"]["value"] > 0.0
    assert (
        found["confirmation"]["blocks"] >= 10 and found["confirmation"]["noise_floor"]["e2e_ms"] is not None
    )
    arms = [arm["label"] for arm in found["confirmation"]["arms"]]
    assert arms[0] == found["confirmation"]["reference"] and set(arms) == named(found), "and nobody else"
    journals = [*place.glob("runs/*/events.jsonl")]
    assert len(journals) == 3, "an engine a sitting, and one after the disconnect"
    rows = {r["case"]: r for r in body["abnormal"]}
    assert len(rows) == 12 and all(r["result"] == "pass" and r["next_right"] for r in rows.values()), rows
    assert rows["empty"]["reason"].endswith("the prompt is empty")
    assert rows["cancelled during decode"]["reason"] == "after 5 of 8 tokens"
    load = body["load"]
    arms = {p["arm"] for p in load["points"]}
    assert STAGED in arms and load["refused"] == {} and load["knee"]["arm"] == STAGED
    closed = [p for p in load["points"] if p["arm"] == STAGED and p["rate"] is None]
    assert [p["concurrency"] for p in closed][:2] == [1, 2] and all(p["requests"] >= 2 for p in closed)
    assert closed[0]["achieved"] <= 1.01 and closed[1]["achieved"] > 1.05
    assert any(p["rate"] is not None for p in load["points"]) and "paged cache" in load["attention"]
    assert all(set(p["tokens"]) <= {"prefill/prefill", "decode/decode"} for p in load["points"])
    logs = {c["kind"]: c for c in body["logs"]}
    assert logs["errors"]["count"] == 0 and logs["out of memory"]["count"] == 0, logs
    assert logs["refusals"]["count"] >= 4 and logs["retries"]["count"] == 2, (
        "resumed once, and one disconnect"
    )
    soak = body["soak"]
    assert soak["requests"] > 10 and soak["canaries"]["n"] >= 3 and soak["canaries"]["changed"] == 0
    assert soak["canaries"]["kld_max"] == 0.0 and soak["unsettled"] == "3 s: not the hours-long test"
    tasks = body["tasks"]
    assert tasks["asked"] == 40 and tasks["refused"] < 40, "some fit into 256 positions of one character each"
    gates = {g["name"]: g["result"] for g in tasks["policies"][STAGED]["gates"]}
    assert gates["quality: drop on the task set"] == "not informative", "random weights solve nothing"
    assert "the base solves" in body["verdict"]["not_tested"]["task set"]
    agreed = tasks["policies"][STAGED]["agreement"]
    answered = tasks["asked"] - tasks["refused"]
    assert agreed["n"] == answered and 0 <= agreed["same"] <= answered and 0 <= agreed["chrf"]["value"] <= 1
    assert agreed["nll"]["n"] == answered and agreed["nll"]["value"] is not None
    answers = found["tasks"]["answers"]["bf16"]
    assert all(len(a["ids"]) == a["tokens"] for a in answers.values())
    servers = {d["server"] for d in body["deploy"] if d["policy"] == STAGED}
    assert servers == {"vllm", "sglang", "tensorrt-llm"}
    link = next(d["link"] for d in body["deploy"] if d["policy"] == STAGED and d["server"] == "vllm")
    assert link["bytes"] == link["tokens"] * found["conditions"]["kv"]["bf16"]["bytes_per_token"]
    assert body["rollback"]["baseline"] == found["confirmation"]["reference"]
    assert [c["policy"] for c in body["candidates"]] == found["confirmation"]["staged"]
    sets = [
        {text for path in found[step]["paths"][STAGED] for text in path["texts"]}
        for step in ("small_quality", "quality")
    ]
    assert len(sets[0]) >= 4 and len(sets[1]) >= 8 and not sets[0] & sets[1], "held out is held out"
    quality = body["quality"]
    assert [r["policy"] for r in quality["prefill_path"]].count(STAGED) == 1
    assert {r["position"] for r in quality["decode_path"]} == set(range(24))


def named(found: dict[str, Any]) -> set[str]:
    timing = found["confirmation"]
    return {*timing["uniform"], *timing["staged"], *found["selection"]["also_measured"]}


def test_ctrl_c_gives_up_the_step_alone_and_says_how_to_go_on(tmp_path: Path, tiny_model: Path) -> None:
    place = tmp_path / "e"
    words = [
        sys.executable,
        "-m",
        "pdq_tui",
        "evaluate",
        str(tiny_model),
        *SMALL,
        "--plan",
        "full",
        "--dir",
        str(place),
    ]
    process = subprocess.Popen(
        words,
        env=environment(tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE_S
    while not (place / "steps" / "selection.json").exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert f"--resume --dir {place}" in err and "Traceback" not in err and out == ""
    kept = {f.stem for f in (place / "steps").iterdir()}
    assert {"conditions", "bottleneck", "selection"} <= kept < set(STEPS)
    assert not (place / "evaluation.json").exists()


def test_an_evaluation_is_begun_once_and_named_where_it_cannot_be(
    evaluated: tuple[Path, Path, dict[str, Any]], pdq: Pdq, tmp_path: Path, tiny_model: Path
) -> None:
    _, place, _ = evaluated
    again = pdq("evaluate", str(tiny_model), *SMALL, "--dir", str(place))
    assert (again.returncode, "--resume" in again.stderr) == (2, True)
    for words, sentence in (
        (("--resume",), "--resume needs --dir"),
        (("--resume", "--dir", str(tmp_path)), "there is no evaluation"),
        (("--plan", "long"), "legal: quick, full"),
        (("--gate", "any"), "legal: strict, standard, loose"),
        (("--baseline", STAGED), "--baseline takes uniform policies"),
        (("--traffic", "nothing.csv"), "is no preset"),
        (("--soak", "long"), "is no duration"),
        (("--targets", "fast"), "is not TTFT/TPOT in ms"),
        (("--tasks", "nothing.jsonl"), "cannot be read"),
    ):
        done = pdq("evaluate", str(tiny_model), *words)
        assert done.returncode == 2 and sentence in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr


def test_traffic_without_decode_needs_no_measuring_of_staging(
    pdq: Pdq, tmp_path: Path, tiny_model: Path
) -> None:
    traffic = tmp_path / "t.csv"
    traffic.write_text("prompt_tokens,output_tokens\n16,1\n")
    place = tmp_path / "e"
    done = pdq("evaluate", str(tiny_model), *SMALL, "--traffic", str(traffic), "--dir", str(place), "--json")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["verdict"]["word"] == "NO-GO"
    assert "no staging can gain more than 0.0%" in body["verdict"]["because"][0]
    assert not (place / "steps" / "selection.json").exists()
