"""A policy's predicted memory against what its pass alone took."""

from __future__ import annotations

from pdq_tui.core.footprint import footprint
from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import ArmReady, KvInfo, Request, WeightsInfo

CUDA = "CUDA allocator high-water mark"


def ready(reserve: int = 50) -> ArmReady:
    return ArmReady(
        arm="A", policy=Policy("bf16"), weights=WeightsInfo(stored_bytes=700, kept_bytes=100),
        coverage={}, kv=KvInfo(reserve_bytes=reserve),
    )  # fmt: skip


def solo(prefill: int | None, decode: int | None, method: str = CUDA) -> Request:
    return Request(
        request=1, arm="A", policy="bf16", policy_digest="", kind="solo", kv_bytes=80, prefill_peak_bytes=prefill,
        decode_peak_bytes=decode, memory_method=method,
    )  # fmt: skip


def test_what_stays_within_the_reserve_was_predicted_right() -> None:
    found = footprint(ready(), [solo(920, 890)])
    assert (found.predicted, found.rest) == (880, {"prefill": 40, "decode": 10})
    assert (found.exceeded, found.reason) == (0, "")


def test_what_takes_more_is_told_by_how_much() -> None:
    assert footprint(ready(), [solo(1000, 890), solo(960, 891)]).exceeded == 1000 - 880 - 50


def test_a_process_figure_or_none_is_not_held_against_it() -> None:
    cpu = footprint(ready(), [solo(5000, 4000, "reset high-water mark of the process")])
    assert cpu.exceeded is None and "libraries" in cpu.reason
    for passes in ([], [solo(None, None)]):
        assert footprint(ready(), passes).exceeded is None
        assert "no pass" in footprint(ready(), passes).reason
