"""Foreign text is shown as it is, any window size will do, and any terminal can be drawn to."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_views import (
    FakeSession,
    arm_ready,
    cpu_device,
    demo_model,
    gpu_sensors,
    make_view,
    renamed,
    starting_view,
)
from rich.cells import cell_len

from pdq_tui.core.protocol import WorkloadReady
from pdq_tui.host.view import ArmView, EngineView, NoteView, SessionView, TaskView
from pdq_tui.tui import footing, heading, panels
from pdq_tui.tui.heading import Look
from pdq_tui.tui.rows import Rows
from pdq_tui.tui.terminal import ascii_only, start_marker
from pdq_tui.tui.theme import shows_unicode, start_theme

Make = Callable[..., Any]
#: Markup, broken markup, control, wide, right-to-left and broken characters.
HOSTILE = (
    "[/",
    "x[/x]y",
    "[1] ok [/]",
    "[red]r[/red]",
    "a\x1b[31mb\r\n\tc",
    "日本語[/",
    "\u202eabc",
    "\ud800",
    "[@click=app.quit]q[/]",
)


def hostile_view(text: str, **changes: Any) -> SessionView:
    """``text`` in every slot that somebody else fills."""
    picture = make_view(gpu=True)
    policy = renamed(picture.arms["A"].wanted, text + "*")
    ready = arm_ready("A", policy, 10_000)
    for coverage in ready.coverage.values():
        coverage.kernels = {text: 3}
    arm = dataclasses.replace(
        picture.arms["A"], wanted=policy, ready=ready, refused=text, invalid_reason=text
    )
    sensors = gpu_sensors()
    gpu = sensors["sensors"].gpus[0]
    gpu.name = text
    gpu.power_w, gpu.missing = None, {"power_w": text}
    gpu.throttle = [text]
    sensors["sensor_state"].text = text
    fields = {
        "run_id": text, "run_dir": text, "model": msgspec.structs.replace(demo_model(), id=text, path=text),
        "device": msgspec.structs.replace(cpu_device(), kind="cuda", name=text, read_peak_method=text),
        "arms": {"A": arm, "B": picture.arms["B"]},
        "notes": tuple(NoteView("12:00:00", level, text, text) for level in ("info", "warn", "error")),
        "tasks": (TaskView(text, text, 1.0, 2.0, text, 1.0),),
        "engine": EngineView("dead", text, 1.0), "run_text": text, "journal_text": text, "workload_error": text,
        "snapshots": (text,),
    }  # fmt: skip
    return make_view(gpu=True, **(sensors | fields | changes))


@pytest.mark.parametrize("text", HOSTILE)
async def test_S01_foreign_text_is_shown_literally_everywhere(
    make_app: Make, session: FakeSession, text: str
) -> None:
    app = make_app(hostile_view(text))
    shown = heading.Look().foreign(text)[:8]
    async with app.run_test(size=(120, 36)) as pilot:
        assert shown in app.screen.query_one("#header", Rows).text
        assert shown in app.screen.query_one("#bottom", Rows).text
        assert shown in app.screen.query_one("#device", Rows).text
        session.note("error", text, text)
        app.screen.redraw()
        for size in ((80, 24), (60, 20), (10, 3), (120, 36)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
        await pilot.press("p")
        await pilot.pause()
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        await pilot.press("escape")
        for strip in (line for widget in app.screen.query(Rows) for line in widget.rows):
            assert all(part[0].isprintable() for part in strip)


SIZES = [
    (1, 1),
    (2, 2),
    (10, 3),
    (20, 5),
    (59, 19),
    (60, 20),
    (79, 24),
    (80, 24),
    (119, 36),
    (120, 36),
    (300, 100),
]


async def test_S07_any_window_size_and_back(make_app: Make, session: FakeSession) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        before = app.screen.query_one("#stages", Rows).text
        for size in (*SIZES, *reversed(SIZES), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
        assert app.screen.layout_name == "mid"
        assert app.screen.query_one("#stages", Rows).text == before
        assert session.calls == [], "the run is not disturbed"


@pytest.mark.parametrize("size", [(1, 1), (10, 3), (40, 10)], ids=lambda s: f"{s[0]}x{s[1]}")
async def test_S07_starts_in_a_tiny_window_and_says_so(make_app: Make, size: tuple[int, int]) -> None:
    app = make_app(starting_view())
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert app.screen.layout_name == "tiny"
        assert "".join(app.screen.query_one("#too-small", Rows).text.split()).startswith("windowtoosmall")
        await pilot.press("d")
        await pilot.press("escape")
        await pilot.resize_terminal(120, 36)
        await pilot.pause()
        assert app.screen.query_one("#prefill").display


@pytest.mark.parametrize("picture", [starting_view(), make_view(), make_view(gpu=True), make_view(arms={}), make_view(ratios={}),
                                     make_view(arms={"A": ArmView("A"), "B": ArmView("B")}, sensors=None, device=None)])  # fmt: skip
@pytest.mark.parametrize("plain", [False, True])
def test_S07_rows_never_exceed_their_width(picture: SessionView, plain: bool) -> None:
    look = Look(plain)
    for width in (0, 1, 5, 20, 42, 60, 80, 120, 300):
        rows = [
            heading.header(picture, heading.Display(), width, look),
            heading.policy_line(picture, width, look),
        ]
        rows += panels.both_rows(picture, width, look) + footing.bottom_rows(picture, width, 3, look)
        for stage in ("prefill", "decode"):
            rows += panels.stage_rows(picture, stage, width, look)  # type: ignore[arg-type]
        for row in rows:
            text = "".join(part for part, _ in row)
            assert cell_len(text) <= max(width, 0), text
            assert not plain or text.isascii(), text


def test_S09_ascii_terminal_gets_one_ascii_character_a_cell() -> None:
    for text in ("╭─ ▲▼ ✓ ⠉⣿ ┤│╯", "日本", "±×·", "plain", "\x1b[31mred\x1b[0m"):
        assert ascii_only(text).isascii()
        assert len(ascii_only(text)) == (len(text) if text.isascii() else cell_len(text))


def test_S09_encodings_and_environments() -> None:
    assert shows_unicode("utf-8")
    assert not shows_unicode("ascii")
    assert not shows_unicode("iso8859-1")
    assert not shows_unicode(None)
    assert not shows_unicode("no-such-codec")
    assert start_theme(None, {"COLORTERM": "truecolor"}) == "pdq-dark"
    assert start_theme(None, {"TERM": "screen-256color"}) == "pdq-ansi"
    assert start_theme("pdq-light", {}) == "pdq-light"
    assert start_marker("auto", False, {"TERM": "linux"}) == "block"
    assert start_marker("auto", False, {"TERM": "tmux-256color"}) == "braille"
    assert start_marker("braille", True, {}) == "ascii"


@pytest.mark.parametrize("name", ["pdq-ansi", "ansi-dark", "ansi-light", "nord", "pdq-contrast"])
async def test_S09_any_theme_draws_with_and_without_colour(
    make_app: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for no_color in ("", "1"):
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        app = make_app(theme=name)
        async with app.run_test(size=(120, 36)) as pilot:
            await pilot.pause()
            assert app.screen.query_one("#chart0").render_line(0).text.strip()


def in_terminal(script: Path, environment: dict[str, str]) -> tuple[int, bytes]:
    """Run ``script`` on a pseudo-terminal of 120x36: its exit code, and everything that arrived there."""
    hidden = (
        "LANG",
        "LC_ALL",
        "NO_COLOR",
        "COLORTERM",
        "PYTHONUTF8",
        "LINES",
        "COLUMNS",
    )  # parallel workers set sizes
    base = {k: v for k, v in os.environ.items() if k not in hidden}
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    child = subprocess.Popen(
        [sys.executable, str(script)], stdin=slave, stdout=slave, stderr=slave, env=base | environment
    )
    os.close(slave)
    received = b""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                received += os.read(master, 65536)
            except OSError:
                break
        elif child.poll() is not None:
            break
    os.close(master)
    return child.wait(20), received


_CHILD = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from fake_views import FakeSession
from pdq_tui.tui.app import Options, PdqApp
class Short(PdqApp):
    def on_ready(self):
        self.set_timer(2.0, lambda: self.leave(0))
sys.exit(Short(FakeSession(), Options(runs_dir=Path("/tmp"), fps=2.0)).run())
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "xterm-256color", "LANG": "C.UTF-8"},
        {"TERM": "screen-256color", "LANG": "C.UTF-8", "NO_COLOR": "1"},
        {"TERM": "linux", "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "vt100", "LANG": "C", "PYTHONIOENCODING": "ascii"},
    ],
    ids=["xterm", "screen-no-color", "linux-posix", "vt100-ascii"],
)
def test_S09_starts_in_a_real_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    """Runs on a pseudo-terminal; what arrives there must hold the labels, and ASCII only where nothing else can."""
    script = tmp_path / "child.py"
    script.write_text(_CHILD.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    code, received = in_terminal(script, environment)
    assert code == 0, received[-2000:]
    assert b"PREFILL" in received and b"DECODE" in received
    if "ascii" in environment.get("PYTHONIOENCODING", "") or environment.get("LC_ALL") == "POSIX":
        assert received.isascii()
        assert b"\\u" not in received
    if "NO_COLOR" not in environment:
        assert b"\x1b[" in received


_SCRIBBLER = """
import os, sys, subprocess, warnings
sys.path.insert(0, {tests!r})
from pathlib import Path
from fake_views import FakeSession, make_view
from pdq_tui.tui.app import Options, PdqApp
class Short(PdqApp):
    def on_ready(self):
        self.set_timer(1.0, self.scribble)
        self.set_timer(2.5, lambda: self.leave(0))
    def scribble(self):
        os.write(2, b"SCRIBBLE-two")
        os.write(1, b"SCRIBBLE-one")
        subprocess.run(["sh", "-c", "echo SCRIBBLE-child >&2"])
        print("SCRIBBLE-print")
        warnings.warn("SCRIBBLE-warn")
code = Short(FakeSession(make_view(run_dir={tests_out!r})), Options(runs_dir=Path("/tmp"), fps=2.0)).run()
print("AFTERWARDS")
sys.exit(code)
"""


def test_S03_nothing_of_this_process_scribbles_on_the_screen(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    here = str(Path(__file__).parent)
    script.write_text(_SCRIBBLER.format(tests=here, tests_out=str(tmp_path)), encoding="utf-8")
    code, received = in_terminal(script, {"TERM": "xterm-256color", "LANG": "C.UTF-8"})
    assert code == 0, received[-2000:]
    assert b"PREFILL" in received
    assert b"SCRIBBLE" not in received
    assert b"AFTERWARDS" in received, "the streams are given back"
    logged = (tmp_path / "app.log").read_text(encoding="utf-8")
    assert all(f"SCRIBBLE-{word}" in logged for word in ("two", "one", "child"))


def test_live_prompts_of_a_mixed_workload_show_their_range() -> None:
    ready = make_view().workload
    mixed = WorkloadReady(
        workload=ready.workload, prompts=2, lengths=[37, 512], prompts_sha256="", chat_template_applied=True
    )
    text = "".join(t for t, _ in heading.header(make_view(workload=mixed), heading.Display(), 120, Look()))
    assert "in 37-512 out 64 bs 1" in text
