"""Comparisons: paired where both ran interleaved, careful where not, and honest about the set-up."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdq_tui.core import protocol as p
from pdq_tui.core.arms import timed, units
from pdq_tui.core.pairs import ratios
from pdq_tui.core.stats import quantile
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError
from pdq_tui.store import snapshot
from pdq_tui.store.compare import Comparison, Row, compare
from pdq_tui.store.figures import FIGURES
from pdq_tui.store.snapshot import Snapshot
from pdq_tui.store.unpaired import block_values, bootstrap, median_of_resample


@pytest.fixture
def snap(tmp_path: Path, make_run: Any, meta: dict[str, Any]) -> Callable[..., list[Snapshot]]:
    """Snapshots of all arms of one virtual run; ``edit`` changes a manifest before it is read."""

    def make(
        speed: dict[str, tuple[float, float]],
        run: str = "20260102T030405Z-0f3a",
        edit: Callable[[dict[str, Any]], None] | None = None,
        change: Callable[[Any], None] | None = None,
        **more: Any,
    ) -> list[Snapshot]:
        events = make_run(speed, **more).events()
        for e in events:
            if change:
                change(e)
        found = []
        for arm in speed:
            path = snapshot.save(tmp_path / run, events, arm, meta={**meta, "id": run})
            if edit:
                body = json.loads((path / "manifest.json").read_text())
                edit(body)
                (path / "manifest.json").write_text(json.dumps(body))
            found.append(snapshot.load(path))
        return found

    return make


def rows(c: Comparison) -> dict[str, Row]:
    return {r.metric: r for r in c.rows_of(c.candidates[0].id)}


def differing(c: Comparison) -> dict[str, tuple[str, ...]]:
    return {k.what: k.invalidates for k in c.setup if k.status == "differs"}


SPEED = {"bf16": (100.0, 50.0), "int4": (180.0, 26.0)}


def test_arms_of_one_run_are_compared_by_their_blocks(snap: Any) -> None:
    c = compare(snap(SPEED))
    assert differing(c) == {}
    r = rows(c)
    assert r["e2e_ms"].method == "paired blocks" and r["e2e_ms"].blocks == 12
    assert (r["ttft_ms"].judgement, r["tpot_ms"].judgement, r["e2e_ms"].judgement) == (
        "worse",
        "better",
        "better",
    )
    assert r["tpot_ms"].percent == pytest.approx(-48, abs=0.5)
    assert r["tpot_ms"].delta == pytest.approx(-24, abs=0.2)
    ci = r["tpot_ms"].ci95
    assert ci is not None and ci[0] < r["tpot_ms"].percent < ci[1]
    assert r["decode_tokens_per_s"].judgement == "better"
    assert r["stored_bytes"].judgement == "same" and r["stored_bytes"].method == "exact"
    assert r["mbu"].judgement == ""


def test_the_absolute_difference_is_that_of_the_ratio_with_its_interval(snap: Any) -> None:
    """By hand: per block the mean ln of both sides; G = exp(mean of the reference's); Δ = G · (ratio − 1)."""
    one, two = snap(SPEED, blocks=6, noise=0.05)
    r = rows(compare([one, two]))["tpot_ms"]
    logs: dict[str, list[float]] = {}
    for s in (one, two):
        used = [q for q in s.requests if q.kind == "blocks" and not q.control]
        logs[s.label] = [
            statistics.fmean(math.log(q.tpot_ms) for q in used if q.block == n) for n in range(6)
        ]
    level = math.exp(statistics.fmean(logs["bf16"]))
    d = [b - a for a, b in zip(logs["bf16"], logs["int4"], strict=True)]
    assert r.delta == pytest.approx(level * math.expm1(statistics.fmean(d)))
    assert r.percent == pytest.approx(100 * math.expm1(statistics.fmean(d)))
    assert r.ci95 is not None
    assert r.delta_ci95 == pytest.approx([level * bound / 100 for bound in r.ci95])


@given(
    st.lists(st.tuples(*[st.floats(0.5, 2.0)] * 4), min_size=3, max_size=8),
    st.floats(1e-3, 1e5),
    st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_absolute_and_relative_difference_never_have_different_signs(
    make_request: Any, values: list[tuple[float, float, float, float]], scale: float, paired: bool
) -> None:
    """The medians of these may differ one way and the blocks the other: both columns follow the blocks."""
    requests = {"A": [], "B": []}
    for n, block in enumerate(values):
        for slot, (arm, v) in enumerate(zip("ABBA", block, strict=True)):
            requests[arm].append(
                make_request(
                    arm=arm,
                    prefill=v * scale,
                    steps=(v * scale, scale),
                    block=n,
                    slot=slot,
                    t_ns=4 * n + slot,
                )
            )
    sides = []
    for arm, run in (("A", "one"), ("B", "one" if paired else "two")):
        s = Snapshot(Path(arm), {"run": run, "arm": {"label": arm}})
        s.__dict__["requests"] = requests[arm]
        sides.append(s)
    seen = 0
    for row in compare(sides, force=True).rows:
        if row.percent is None or row.delta is None:
            continue
        seen += 1
        assert (row.delta > 0, row.delta < 0) == (row.percent > 0, row.percent < 0), row
        for low, high in zip(row.delta_ci95 or (), row.ci95 or (), strict=True):
            assert (low > 0, low < 0) == (high > 0, high < 0), row
    assert seen >= 6


def test_the_reference_can_be_either(snap: Any) -> None:
    one, two = snap(SPEED)
    there, back = rows(compare([one, two])), rows(compare([two, one]))
    assert back["tpot_ms"].judgement == "worse" and there["tpot_ms"].judgement == "better"
    assert (1 + there["tpot_ms"].percent / 100) * (1 + back["tpot_ms"].percent / 100) == pytest.approx(1)


def test_several_candidates_one_reference(snap: Any) -> None:
    c = compare(snap({"bf16": (100, 50), "int8": (90, 40), "int4": (180, 26)}, blocks=4))
    assert [s.label for s in c.candidates] == ["int8", "int4"]
    assert {r.candidate for r in c.rows} == {s.id for s in c.candidates}
    assert len(c.rows_of(c.candidates[0].id)) == len(c.rows_of(c.candidates[1].id))


def test_runs_apart_are_compared_with_care(snap: Any) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"int4": (180, 26)}, run="20260102T000000Z-bbbb", seed=9)[0]
    c = compare([one, two])
    r = rows(c)
    assert r["tpot_ms"].method == "unpaired bootstrap"
    assert r["tpot_ms"].judgement == "better" and "not interleaved" in str(r["tpot_ms"].reason)
    assert any("not interleaved" in n for n in c.notes)


def test_too_few_blocks_are_not_called_no_interleaving(snap: Any) -> None:
    """A newcomer who pressed x, and then s at once, is told to wait, and not to press x."""

    def note(blocks: int) -> str:
        return " ".join(compare(snap({"bf16": (100, 50), "int4": (180, 26)}, blocks=blocks)).notes)

    assert "interleaved with the reference for 1 whole block: from 2 on" in note(1)
    assert "interleaved" not in note(2)


def test_T09_a_drift_inside_a_run_widens_the_threshold(snap: Any) -> None:
    """The same policy twice: the second run began on the machine that the first one had heated."""
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", drift=lambda n: 0.003 * n)[0]
    two = snap({"bf16": (100, 50)}, run="20260102T000000Z-bbbb", drift=lambda n: 0.05 + 0.003 * n)[0]
    r = rows(compare([one, two]))
    assert r["tpot_ms"].percent > 2
    assert {r[m].judgement for m in ("e2e_ms", "ttft_ms", "tpot_ms")} <= {"same", "unsure"}


@pytest.mark.parametrize(
    ("what", "edit", "spoils"),
    [
        ("clocks", lambda m: m["conditions"]["clocks"]["cpu_mhz"].update(median=2000.0), ("speed",)),
        ("threads", lambda m: m["conditions"].update(threads=8), ("speed",)),
        ("device", lambda m: m["device"].update(name="Another CPU"), ("speed", "memory")),
        ("attention", lambda m: m["workload"].update(attention="sdpa"), ("speed",)),
        ("prompts", lambda m: m["workload"].update(prompts_sha256="ee" * 32), ("speed",)),
        ("libraries", lambda m: m["libraries"].update(torch="2.12.0"), ("speed", "memory")),
        ("libraries", lambda m: m["tool"].update(version="0.2.0"), ("speed", "memory")),
        ("driver", lambda m: m.update(driver="999.1"), None),
        ("slowdowns", lambda m: m["conditions"].update(slowed=["thermal slowdown"]), ("speed",)),
        ("memory reading", lambda m: m["conditions"].update(memory_version="v1"), None),
        ("memory method", lambda m: m["arm"].update(memory_method="sampled RSS"), ("memory",)),
        ("seed", lambda m: m["workload"].update(seed=99), ()),
    ],
)
def test_what_differs_is_named_and_spoils_its_rows(
    snap: Any, what: str, edit: Callable[[dict[str, Any]], None], spoils: tuple[str, ...] | None
) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", blocks=4)[0]
    two = snap({"int4": (180, 26)}, run="20260102T000000Z-bbbb", edit=edit, blocks=4)[0]
    c = compare([one, two])
    check = next(k for k in c.setup if k.what == what)
    if spoils is None:  # known on one side only
        assert check.status == "unknown" and not any(r.flagged for r in c.rows)
        return
    assert differing(c) == {what: spoils}
    speed = [r for r in c.rows if r.group == "speed"]
    memory = [r for r in c.rows if r.metric.endswith(("peak_bytes", "steady_bytes"))]
    assert all(r.flagged and r.judgement == "unsure" and r.reason == what for r in speed) == (
        "speed" in spoils
    )
    assert all(r.flagged and r.judgement == "unsure" for r in memory) == ("memory" in spoils)
    assert all(r.percent is not None for r in speed)  # shown all the same


def test_T14_other_thread_counts_are_flagged(snap: Any) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", threads=2, blocks=3)[0]
    two = snap({"bf16": (60, 30)}, run="20260102T000000Z-bbbb", threads=4, blocks=3)[0]
    c = compare([one, two])
    check = next(k for k in c.setup if k.what == "threads")
    assert (check.status, check.reference, check.value) == ("differs", "2", "4")
    assert rows(c)["tpot_ms"].judgement == "unsure" and rows(c)["tpot_ms"].reason == "threads"


def test_a_model_on_several_devices_is_shown_and_not_judged(snap: Any) -> None:
    def several(e: Any) -> None:
        if isinstance(e, p.Request):
            e.devices = 2

    one, two = snap(SPEED, change=several)
    made = rows(compare([one, two]))
    timed = [r for name, r in made.items() if name not in FIGURES]
    assert {r.reason for r in timed} == {"layers on 2 devices"}
    assert {r.judgement for r in timed} <= {"unsure", ""} and made["tpot_ms"].judgement == "unsure"
    assert {made[name].reason for name in FIGURES if name in made} != {"layers on 2 devices"}, (
        "bytes are counted wherever they lie"
    )
    assert made["tpot_ms"].value is not None, "the figures are there"


def test_memory_read_by_another_call_is_not_compared(snap: Any) -> None:
    def version(v: str) -> Callable[[dict[str, Any]], None]:
        return lambda m: m["conditions"].update(memory_version=v)

    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", edit=version("v2"), blocks=3)[0]
    two = snap({"bf16": (100, 50)}, run="20260102T000000Z-bbbb", edit=version("v1"), blocks=3)[0]
    assert differing(compare([one, two])) == {"memory reading": ("memory",)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edit": lambda m: m["model"].update(sha256="ee" * 32)}, "model:"),
        ({"edit": lambda m: m["model"].update(dtype="fp32")}, "model dtype: bf16 against fp32"),
        ({"workload": Workload(prompt_tokens=64, output_tokens=9, seed=7)}, "workload: in 512 out 9"),
        ({"workload": Workload(output_tokens=9, batch=4, seed=7)}, "bs 4"),
    ],
)
def test_other_models_and_workloads_are_refused_unless_forced(
    snap: Any, change: dict[str, Any], words: str
) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", blocks=3)[0]
    two = snap({"int4": (50, 25)}, run="20260102T000000Z-bbbb", blocks=3, **change)[0]
    with pytest.raises(PdqError, match="cannot be compared") as caught:
        compare([one, two])
    assert words in caught.value.message and "--force" in str(caught.value.hint)
    forced = compare([one, two], force=True)
    assert {r.judgement for r in forced.rows if r.group == "speed"} == {"unsure"}
    assert all(r.flagged for r in forced.rows if r.group == "speed")


def test_an_invalid_arm_is_never_ranked(snap: Any) -> None:
    def spoil(e: Any) -> None:
        if isinstance(e, p.Request) and e.arm == "int4" and e.block == 3:
            e.valid, e.invalid_reason = False, "NaN"

    c = compare(snap(SPEED, change=spoil))
    assert {r.judgement for r in c.rows if r.group == "speed"} == {"unsure"}
    assert str(rows(c)["e2e_ms"].reason).endswith(": NaN") and not c.candidates[0].valid


def test_an_invalid_arm_is_better_in_nothing_not_even_in_bytes(snap: Any) -> None:
    def spoil(e: Any) -> None:
        if isinstance(e, p.Request) and e.arm == "int4" and e.block == 3:
            e.valid, e.invalid_reason = False, "NaN"
        if isinstance(e, p.ArmReady) and e.arm == "int4":
            e.weights.stored_bytes //= 2

    assert {r.judgement for r in compare(snap(SPEED, change=spoil)).rows if r.group != "utilization"} == {
        "unsure"
    }


def test_counted_bytes_of_another_model_get_no_judgement_when_forced(snap: Any) -> None:
    def smaller(m: dict[str, Any]) -> None:
        m["model"].update(sha256="ee" * 32)
        m["arm"]["weights"].update(stored_bytes=1000)

    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"bf16": (100, 50)}, run="20260102T000000Z-bbbb", edit=smaller)[0]
    r = rows(compare([one, two], force=True))["stored_bytes"]
    assert (r.judgement, r.flagged, r.reason) == ("unsure", True, "model") and r.percent < -99


def test_other_kernels_for_the_same_format_are_not_a_comparison_of_precisions(snap: Any) -> None:
    def other(m: dict[str, Any]) -> None:
        m["arm"]["coverage"]["decode"].update(kernels={"slow": 210})

    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"bf16": (100, 70)}, run="20260102T000000Z-bbbb", edit=other)[0]
    c = compare([one, two])
    assert differing(c) == {"decode kernels": ("decode",)}
    assert (rows(c)["tpot_ms"].judgement, rows(c)["tpot_ms"].reason) == ("unsure", "decode kernels")

    compiled = snap(
        {"bf16": (100, 70)},
        run="20260103T000000Z-cccc",
        edit=lambda m: m["arm"]["coverage"]["prefill"].update(runner="inductor"),
    )[0]
    c = compare([one, compiled])
    assert differing(c) == {"prefill layers": ("prefill",)}
    by_metric = {m: r.reason for m, r in rows(c).items() if r.judgement == "unsure" and r.flagged}
    assert by_metric == dict.fromkeys(
        ("e2e_ms", "ttft_ms", "prefill_ms", "prefill_tokens_per_s"), "prefill layers"
    )


def test_memory_of_arms_that_were_resident_together_is_no_policys_own(snap: Any) -> None:
    shared = snap({"bf16": (100, 50), "int4": (100, 40)}, solo=False)
    r = rows(compare(shared))["steady_bytes"]
    assert (r.judgement, r.flagged, r.reason) == ("unsure", True, "both arms were resident")
    alone = snap({"bf16": (100, 50)}, run="20260103T000000Z-cccc", solo=False)
    assert alone[0].arm["memory_from"] == "only policy of the session"
    assert rows(compare(snap({"bf16": (100, 50), "int4": (100, 40)})))["steady_bytes"].judgement == "same"


def test_kernels_that_differ_because_the_policies_do_are_named_and_spoil_nothing(
    snap: Any, make_policy: Any
) -> None:
    def other(m: dict[str, Any]) -> None:
        m["arm"]["coverage"]["decode"].update(kernels={"packed4": 210})

    policies = {"int4": make_policy("int4", "bf16", "int4")}
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"int4": (100, 26)}, run="20260102T000000Z-bbbb", edit=other, policies=policies)[0]
    c = compare([one, two])
    check = next(k for k in c.setup if k.what == "decode kernels")
    assert (check.status, check.reference, check.value) == (
        "by policy",
        "linear ×210",
        "packed4 ×210",
    )
    assert check.invalidates == () and rows(c)["tpot_ms"].judgement == "better"
    assert next(k for k in c.setup if k.what == "prefill kernels").status == "ok"


def test_two_arms_that_are_not_the_reference_have_its_noise_floor(snap: Any) -> None:
    """int8 against int4: the control of the same run was the reference's, and it is as noisy for them."""
    _, int8, int4 = snap({"bf16": (100, 50), "int8": (100, 50), "int4": (110, 55)}, noise=0.003)
    c = compare([int8, int4])
    assert (rows(c)["ttft_ms"].method, rows(c)["ttft_ms"].judgement) == ("paired blocks", "worse")
    int8.manifest["noise_floor"]["ttft_ms"] = 0.5
    row = rows(compare([int8, int4]))["ttft_ms"]
    assert (row.judgement, row.reason) == ("unsure", "noise here hides differences up to 50%")
    both = sorted([*int8.requests, *int4.requests], key=lambda r: r.t_ns)
    found = ratios(both, "int8", ["int8", "int4"], floors={"ttft_ms": 0.5}, metrics=("ttft_ms",))
    assert found[0].threshold == pytest.approx(math.log(1.5)) and found[0].noise_floor == pytest.approx(0.5)


def test_answers_of_other_lengths_are_no_end_to_end_comparison_between_runs_either(snap: Any) -> None:
    def longer(e: Any) -> None:
        if isinstance(e, p.Request):
            e.output_tokens = [12]

    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"bf16": (100, 60)}, run="20260102T000000Z-bbbb", change=longer)[0]
    r = rows(compare([one, two]))
    assert (r["e2e_ms"].judgement, r["e2e_ms"].reason) == ("unsure", "output counts differ")
    assert r["tpot_ms"].judgement == "worse"


def test_a_resample_of_a_median_is_drawn_without_its_values() -> None:
    """The same distribution as by brute force, for an odd and an even number of values."""
    for n in (7, 8):
        rng = random.Random(n)
        values = sorted(rng.lognormvariate(0, 1) for _ in range(n))
        short = sorted(median_of_resample(values, rng) for _ in range(20_000))
        long = sorted(statistics.median(rng.choices(values, k=n)) for _ in range(20_000))
        for q in (0.025, 0.25, 0.5, 0.75, 0.975):
            assert quantile(short, q) == pytest.approx(quantile(long, q), abs=0.02 * values[-1])
        assert statistics.fmean(short) == pytest.approx(statistics.fmean(long), rel=0.02)


def test_a_resample_costs_the_same_whatever_its_size() -> None:
    class Counting(random.Random):
        drawn = 0

        def betavariate(self, alpha: float, beta: float) -> float:
            self.drawn += 1
            return super().betavariate(alpha, beta)

        def choices(self, *_: Any, **__: Any) -> Any:
            pytest.fail("the values were drawn one by one")

    for n in (10, 10_001):
        rng = Counting(0)
        median_of_resample([float(i) for i in range(n)], rng)
        assert rng.drawn == 1


def test_requests_of_one_block_are_one_unit_between_runs(snap: Any) -> None:
    one = snap({"bf16": (100, 50)}, blocks=5)[0]
    assert len(timed(one.requests)) == 10
    values = block_values(units(timed(one.requests)), one, "tpot_ms")
    first = [r.tpot_ms for r in timed(one.requests) if r.block == 0]
    assert len(values) == 5 and math.sqrt(first[0] * first[1]) == pytest.approx(
        min(values, key=lambda v: abs(v - math.sqrt(first[0] * first[1])))
    )
    assert bootstrap(values, values) is None
    assert bootstrap([*values, 60.0], [*values, 60.0]) is not None


def test_the_most_of_several_passes_is_the_peak(snap: Any) -> None:
    """In the manifest and in the comparison: one number for one name."""

    def grow(e: Any) -> None:
        if isinstance(e, p.Request) and e.kind == "blocks":
            e.decode_peak_bytes = 400_000_000 + e.request

    one, two = snap(SPEED, change=grow, solo=False)
    r = rows(compare([one, two]))["decode_peak_bytes"]
    assert (
        r.reference.median
        == one.arm["decode"]["peak_bytes"]
        == max(q.decode_peak_bytes for q in timed(one.requests))
    )
    assert r.reference.note == "the largest of 24 passes" and r.reference.ci95 is None


def test_clocks_of_one_interleaved_run_belong_to_the_policy(snap: Any) -> None:
    one, two = snap(SPEED)
    two.manifest["conditions"]["clocks"]["cpu_mhz"]["median"] = 2000.0
    c = compare([one, two])
    assert differing(c) == {"clocks": ()} and rows(c)["tpot_ms"].judgement == "better"


def test_a_missing_part_is_unknown_and_no_crash(snap: Any) -> None:
    one, two = snap({"bf16": (100, 50), "int4": (180, 26)}, blocks=3)
    for key in ("conditions", "device", "libraries", "noise_floor", "workload", "model", "host", "warnings"):
        two.manifest.pop(key)
    two.manifest["arm"] = {"label": "int4"}
    c = compare([one, two])
    assert {k.status for k in c.setup if k.what in ("device", "threads", "workload", "libraries")} == {
        "unknown"
    }
    assert rows(c)["stored_bytes"].judgement == "unsure"
    assert rows(c)["stored_bytes"].reason == f"not in {two.id}"


def test_memory_read_from_outside_needs_a_larger_difference(snap: Any) -> None:
    def rss(more: int) -> Callable[[Any], None]:
        def change(e: Any) -> None:
            if isinstance(e, p.Request):
                e.memory_method = "VmHWM, reset for each stage"
                e.decode_peak_bytes = 400_000_000 + (more if e.arm == "int4" else 0)

        return change

    small = rows(compare(snap(SPEED, run="20260101T000000Z-aaaa", blocks=3, change=rss(8_000_000))))
    large = rows(compare(snap(SPEED, run="20260102T000000Z-bbbb", blocks=3, change=rss(80_000_000))))
    assert (small["decode_peak_bytes"].judgement, large["decode_peak_bytes"].judgement) == ("same", "worse")
    assert small["decode_peak_bytes"].method == "resident set"


def test_a_comparison_needs_two_different_snapshots(snap: Any) -> None:
    one, _ = snap(SPEED, blocks=3)
    with pytest.raises(PdqError, match="at least one candidate"):
        compare([one])
    with pytest.raises(PdqError, match="named twice"):
        compare([one, one])


def test_columns_have_different_names(snap: Any) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", blocks=3)[0]
    two = snap({"bf16": (100, 50)}, run="20260102T000000Z-bbbb", blocks=3)[0]
    c = compare([one, two])
    assert (c.reference.label, c.candidates[0].label) == ("bf16 aaaa/001", "bf16 bbbb/001")


def test_too_few_requests_are_unsure(snap: Any) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa", blocks=1)[0]
    two = snap({"int4": (100, 25)}, run="20260102T000000Z-bbbb", blocks=0)[0]
    r = rows(compare([one, two]))["tpot_ms"]
    assert (r.judgement, r.percent, r.ci95) == ("unsure", None, None)
    assert str(r.reason).endswith("bbbb/001: no request counted")


def test_answers_are_compared_over_the_prompts_that_both_got(snap: Any) -> None:
    """Runs that came to different numbers of prompts are not said to answer differently for that."""
    two = snap({"bf16": (100, 50), "int4": (100, 40)}, solo=False)
    one = snap({"bf16": (100, 50)}, run="20260103T000000Z-cccc", solo=False)[0]
    few = [r for r in one.requests if r.prompt == 0]
    one.requests[:] = few
    assert (
        compare([two[0], one]).notes[1]
        == "bf16 cccc/001 gave the same answers as the reference to all 1 prompts that both got"
    )
    for r in few:
        r.tokens_sha256 = "f" * 64
    assert (
        compare([two[0], one]).notes[1]
        == "bf16 cccc/001 gave other answers than the reference to 1 of 1 prompts"
    )


def test_shares_of_different_peaks_are_flagged_beside_each_other(snap: Any) -> None:
    def slower(m: dict[str, Any]) -> None:
        m["device"].update(read_peak_gbps=2.9)

    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"bf16": (100, 50)}, run="20260102T000000Z-bbbb", edit=slower)[0]
    c = compare([one, two])
    assert differing(c) == {"peaks": ("utilization",)}
    assert (rows(c)["mbu"].flagged, rows(c)["mbu"].reason) == (True, "peaks")
    assert not rows(c)["tpot_ms"].flagged


def test_what_others_took_of_the_cpu_spoils_times_of_different_runs(snap: Any) -> None:
    one = snap({"bf16": (100, 50)}, run="20260101T000000Z-aaaa")[0]
    two = snap({"bf16": (100, 80)}, run="20260102T000000Z-bbbb", other_load=0.6)[0]
    c = compare([one, two])
    assert differing(c) == {"other load": ("speed",)}
    assert (rows(c)["tpot_ms"].judgement, rows(c)["tpot_ms"].reason) == ("unsure", "other load")
    assert any("other processes had 60% of this machine's CPU time" in note for note in c.notes)
    both = snap({"bf16": (100, 50), "int4": (100, 40)}, other_load=0.6)
    assert rows(compare(both))["tpot_ms"].judgement == "better", "interleaved arms shared it"
