"""Leaving a long task early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How often a wait asks whether it was cancelled, in seconds.
POLL_S = 0.05


class Cancelled(Exception):  # noqa: N818 - not an error: the person asked for it
    """The task was cancelled on request; what was finished by then may stay."""


def check(cancelled: Callable[[], bool]) -> None:
    """Raises Cancelled where the person asked for it."""
    if cancelled():
        raise Cancelled


def interruptible(work: Callable[[], T], cancelled: Callable[[], bool]) -> T:
    """Run ``work``, which knows no way to be stopped, in a thread of its own and wait for it.

    On cancelling the thread is left behind: it ends when its call returns, and what it returns is dropped.
    Raises Cancelled, or whatever ``work`` raises.
    """
    result: list[T] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def body() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread, which raises it
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=body, name="interruptible", daemon=True).start()
    while not done.wait(POLL_S):
        check(cancelled)
    if raised:
        raise raised[0]
    return result[0]
