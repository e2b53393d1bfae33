"""``compare --fail-on`` as a process: what a gate counts, what it says, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_gear import Pdq
from made_snapshots import events, save_all

from pdq_tui import locations
from pdq_tui.commands.gate import JUDGED, TIMED, watched
from pdq_tui.errors import UsageError

FASTER = {"B": (100.0, 10.0), "A": (90.0, 9.0)}
#: Faster to the first token, slower afterwards.
MIXED = {"B": (129.7, 9.38), "A": (84.1, 11.92)}


@pytest.fixture
def faster(own_home: Path) -> list[str]:
    """A dual-storage policy that is faster in both stages, and needs a second copy of the weights."""
    return save_all(locations.runs_dir(), made=events(FASTER))


def test_the_price_of_a_second_copy_fails_no_gate_unless_named(pdq: Pdq, faster: list[str]) -> None:
    done = pdq("compare", *faster, "--fail-on", "worse")
    assert (done.returncode, done.stderr) == (0, "")
    assert "▲ worse" in done.stdout, "the extra bytes are shown as what they are"
    done = pdq("compare", *faster, "--fail-on", "worse:extra_bytes")
    assert done.returncode == 3
    assert done.stderr.startswith("worse: int8-prefill-int4-decode") and "Extra weight bytes" in done.stderr


def test_a_slower_stage_fails_the_gate_unless_another_is_named(pdq: Pdq, own_home: Path) -> None:
    ids = save_all(locations.runs_dir(), made=events(MIXED))
    done = pdq("compare", *ids, "--fail-on", "worse")
    assert done.returncode == 3
    assert "in Time per output token" in done.stderr and "Time to first token" not in done.stderr
    assert pdq("compare", *ids, "--fail-on", "worse:ttft_ms,e2e_ms").returncode == 0
    assert pdq("compare", *ids, "--fail-on", "worse:ttft_ms,tpot_ms").returncode == 3
    assert pdq("compare", *ids).returncode == 0


def test_what_could_not_be_judged_is_said_and_does_not_fail(pdq: Pdq, own_home: Path) -> None:
    ids = save_all(locations.runs_dir(), made=events(MIXED, blocks=2))
    done = pdq("compare", *ids, "--fail-on", "worse:e2e_ms,steady_bytes", "--min-effect", "90%")
    assert done.returncode == 0 and "worse" not in done.stderr
    other = save_all(locations.runs_dir(), "20261203T000000Z-bbbb", made=events(MIXED, text="x"))
    done = pdq("compare", ids[0], other[1], "--fail-on", "worse:e2e_ms")
    assert done.returncode == 0
    assert "unsure: int8-prefill-int4-decode" in done.stderr and "independent units" in done.stderr


def test_an_unknown_gate_is_refused_before_anything_is_read(pdq: Pdq) -> None:
    for words, hint in (("better", "worse:METRIC"), ("worse:tpot", "tpot_ms"), ("worse:", "legal: e2e_ms")):
        done = pdq("compare", "x", "y", "--fail-on", words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--fail-on" in done.stderr and hint in done.stderr


def test_the_words_of_a_gate() -> None:
    assert watched(None, JUDGED) == ()
    assert watched("worse", JUDGED) == TIMED
    assert watched("worse:tpot_ms, stored_bytes", JUDGED) == ("tpot_ms", "stored_bytes")
    with pytest.raises(UsageError, match="'stored_bytes'"):
        watched("worse:stored_bytes", TIMED)
    with pytest.raises(UsageError, match="'mbu'"):
        watched("worse:mbu", JUDGED)
