"""What process tests share: command lines of the fakes, and waiting without guessing a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
ENGINE = [sys.executable, str(HERE / "fake_engine.py")]
SENSORS = [sys.executable, str(HERE / "fake_sensors.py")]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "") -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what or condition}")
