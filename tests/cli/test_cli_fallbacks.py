"""What does not run as its policy says is told wherever its numbers are, and is an error where --hard was asked for."""

from __future__ import annotations

import json
from pathlib import Path

from cli_gear import Pdq

QUICK = ("--in", "16", "--out", "3", "--blocks", "1", "--min-seconds", "0", "--no-solo", "--threads", "1")
#: The tiny model's rows have 64 and 128 weights.
POLICY = """
schema = 1
name = "wide-groups"
summary = "groups that divide half of the layers"
storage = "uniform"
[prefill]
weights = "int4"
group_size = 128
[decode]
weights = "int4"
group_size = 128
"""
WHY = "groups of 128 do not divide in_features 64: groups of 64 instead"


def plain(text: str) -> str:
    """Without Markdown's escapes, and without the breaks of lines."""
    return " ".join(text.replace("\\_", "_").split())


def test_Q04_a_fallback_stands_where_the_number_is_and_hard_refuses_it(
    pdq: Pdq, tiny_model: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "wide-groups.toml"
    policy.write_text(POLICY)
    words = ("run", str(tiny_model), "-p", "bf16", "-p", str(policy), *QUICK, "--device", "cpu")

    done = pdq(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert WHY in done.stderr
    document = json.loads(done.stdout)
    _, arm = document["arms"]
    assert {(f["stage"], f["wanted"], f["reason"]) for f in arm["fallbacks"]} == {
        (stage, "int4-g128", WHY) for stage in ("prefill", "decode")
    }
    # Two layers of q, k, v, o, gate and up; down has 128 columns.
    assert [f["modules"] for f in arm["fallbacks"]] == [12, 12]
    assert sum(WHY in warning for warning in document["warnings"]) == 2

    for form in ("table", "md"):
        compared = pdq("compare", "@last-1", "@last", "--format", form)
        assert compared.returncode == 0 and WHY in plain(compared.stdout), compared.stderr
    reported = pdq("report", "@last", "-f", "md", "--dir", str(tmp_path / "out"))
    assert reported.returncode == 0, reported.stderr
    assert WHY in plain((tmp_path / "out" / "report.md").read_text())

    hard = pdq(*words, "--hard")
    assert (hard.returncode, hard.stdout) == (4, "")
    assert WHY in hard.stderr and "--hard" in hard.stderr
