"""When the guard decides, by hand-made requests and checks."""

from __future__ import annotations

from typing import Any

import pytest

from pdq_tui.core.protocol import Guarded, NonFinite, Request
from pdq_tui.host.guard import GuardLimits, Watch


def request(i: int, **more: Any) -> Request:
    return Request(request=i, arm="A", policy="x", policy_digest="d", kind="loop", **more)


def check(i: int, kld: float | None, **more: Any) -> Guarded:
    return Guarded(
        request=i, arm="A", policy="x", policy_digest="d", base="B", base_policy="bf16", kld=kld, **more
    )


def test_the_rolling_mean_decides_from_the_third_check_on() -> None:
    watch = Watch(GuardLimits(every=1, kld=0.03, window=4))
    assert [watch.checked(check(i, 0.05)) for i in (1, 2)] == [None, None]
    trip = watch.checked(check(3, 0.05))
    assert trip is not None and (trip.measure, trip.request) == ("kld", 3)
    assert (
        trip.value == pytest.approx(0.05)
        and "0.05 nats over the last 3 checks, the limit is 0.03" in trip.words
    )
    watch.reset()
    assert watch.kld is None and watch.checked(check(4, 0.9)) is None


def test_one_outlier_in_a_quiet_window_does_not_decide_and_a_lasting_one_does() -> None:
    watch = Watch(GuardLimits(every=1, kld=0.03, window=5))
    for i in range(5):
        assert watch.checked(check(i, 0.01)) is None
    assert watch.checked(check(6, 0.1)) is None  # mean 0.028
    assert watch.checked(check(7, 0.1)) is not None


def test_numbers_that_are_not_finite_decide_at_once() -> None:
    watch = Watch(GuardLimits(every=1))
    trip = watch.checked(check(3, None, nonfinite=7, reason="logits are not finite"))
    assert trip is not None and trip.measure == "nonfinite" and "7 logits" in trip.words
    broken = request(
        4,
        valid=False,
        nonfinite=NonFinite("decode", 2),
        invalid_reason="logits are not finite from decode step 2 on",
    )
    trip = watch.request(broken)
    assert trip is not None and trip.measure == "nonfinite" and "decode step 2" in trip.words


def test_a_check_that_gave_no_figure_says_nothing() -> None:
    watch = Watch(GuardLimits(every=1, kld=0.0))
    assert all(watch.checked(check(i, None, reason="does not fit")) is None for i in range(9))


def test_failures_decide_by_their_share_and_not_before_five_requests() -> None:
    watch = Watch(GuardLimits(every=1, errors=0.2))
    assert all(watch.request(request(i, valid=False)) is None for i in range(4))
    trip = watch.request(request(4, valid=False))
    assert trip is not None and trip.measure == "errors" and trip.value == 1.0
    watch = Watch(GuardLimits(every=1, errors=0.2))
    for i in range(18):
        assert watch.request(request(i)) is None
    assert [watch.request(request(20 + i, valid=False)) for i in range(4)] == [None] * 4  # 4 of 20
    assert watch.request(request(30, valid=False)) is not None
    assert watch.request(request(31, warmup=True, valid=False)) is None
    assert watch.request(request(32, cancelled=True, valid=False)) is None
