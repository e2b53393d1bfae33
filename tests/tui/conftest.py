"""Fixtures of the screen's tests: no blinking, no colours from the outside, a fake session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_views import FakeSession


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same terminal for every test, whatever runs it; and no user's own files."""
    for name in ("NO_COLOR", "COLORTERM", "TEXTUAL_THEME", "TEXTUAL_ANIMATIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("PDQ_HOME", str(tmp_path / "home"))


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def make_app(session: FakeSession, tmp_path: Path) -> Callable[..., Any]:
    """``make_app(**options)`` → the app on the fake session; timers off, so that nothing moves by itself."""

    def make(picture: Any = None, **options: Any) -> Any:
        from pdq_tui.tui.app import Options, PdqApp

        if picture is not None:
            session.picture = picture
        options.setdefault("runs_dir", tmp_path / "runs")
        options.setdefault("fps", 0.0)
        return PdqApp(session, Options(**options))

    return make
