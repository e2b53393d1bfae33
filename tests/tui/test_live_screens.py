"""Pictures of the live screen at the sizes and in the modes that matter, compared with saved ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_views import make_view, starting_view

from pdq_tui.host.view import TaskView
from pdq_tui.tui.footing import task_rows
from pdq_tui.tui.heading import Look

Make = Callable[..., Any]
SIZES = [(60, 20), (80, 24), (120, 36)]


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_live_cpu(snap_compare: Any, make_app: Make, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(make_view()), terminal_size=size)


def test_live_gpu(snap_compare: Any, make_app: Make) -> None:
    assert snap_compare(make_app(make_view(gpu=True)), terminal_size=(120, 36))


def test_live_starting_with_progress(snap_compare: Any, make_app: Make) -> None:
    task = TaskView("load", "SmolLM2-135M", 1.2e8, 2.7e8, "bytes", 1.4)
    assert snap_compare(make_app(starting_view(tasks=(task,))), terminal_size=(120, 36))


@pytest.mark.parametrize("size", SIZES[1:], ids=lambda s: f"{s[0]}x{s[1]}")
def test_live_ascii(snap_compare: Any, make_app: Make, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(make_view(), ascii=True), terminal_size=size)


@pytest.mark.parametrize("size", SIZES[1:], ids=lambda s: f"{s[0]}x{s[1]}")
def test_live_no_color(
    snap_compare: Any, make_app: Make, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(make_app(make_view()), terminal_size=size)


def test_live_light(snap_compare: Any, make_app: Make) -> None:
    assert snap_compare(make_app(make_view(), theme="pdq-light"), terminal_size=(120, 36))


def test_live_zoomed(snap_compare: Any, make_app: Make) -> None:
    assert snap_compare(make_app(make_view()), press=["z"], terminal_size=(120, 36))


@pytest.mark.parametrize("size", SIZES[1:], ids=lambda s: f"{s[0]}x{s[1]}")
def test_live_stage_picker(snap_compare: Any, make_app: Make, size: tuple[int, int]) -> None:
    assert snap_compare(make_app(make_view()), press=["d"], terminal_size=size)


@pytest.mark.parametrize(
    ("task", "amount"),
    [
        (TaskView("pack", "trying kernels once on this machine", 0.0, None, "B", 1.4), "running"),
        (TaskView("pack", "layer 3", 5e8, 1e9, "B", 1.4), "of"),
        (TaskView("load", "demo", 0.0, None, "", 1.4), "running"),
        (TaskView("load", "demo", 1.0, 4.0, "", 1.4), " 25 %"),
        (TaskView("warmup", "demo", 3.0, None, "requests", 1.4), "3 requests"),
    ],
    ids=["nothing_to_count_yet", "bytes", "unknown", "share", "count"],
)
def test_a_task_says_how_far_it_is_or_that_it_runs(task: TaskView, amount: str) -> None:
    (row,) = task_rows(make_view(tasks=(task,)), 120, Look())
    shown = "".join(text for text, _ in row)
    assert amount in shown and "0 B" not in shown
