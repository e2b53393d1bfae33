"""What the ``app`` command hands to the screen: settings and flags, with the files that it makes or does not make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from pdq_tui.commands import app as command
from pdq_tui.commands import logfile
from pdq_tui.errors import UsageError
from pdq_tui.tui import app as screen


class Shown:
    """In the app's place."""

    made: list[Shown] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, session: Any, options: screen.Options) -> None:
        self.session, self.options = session, options
        self.made.append(self)

    def run(self, **how: Any) -> int:
        return 0


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Shown]:
    Shown.made = []
    monkeypatch.setattr(screen, "PdqApp", Shown)
    monkeypatch.setattr(command, "need_terminal", lambda model: None)
    monkeypatch.setattr(logfile, "log_to_file", lambda *, keep=True: None)
    return Shown.made


def opened(tmp_path: Path, **flags: Any) -> None:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    with pytest.raises(typer.Exit) as ended:
        command.app_(model=str(model), **flags)
    assert ended.value.exit_code == 0


def test_min_effect_of_the_app_comes_from_the_flag_before_the_settings(
    shown: list[Shown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path)
    monkeypatch.setenv("PDQ_RUN_MIN_EFFECT", "0.02")
    opened(tmp_path)
    opened(tmp_path, min_effect="5%")
    assert [s.options.min_effect for s in shown] == [0.01, 0.02, 0.05]
    assert [s.session.session._numbers.min_effect for s in shown] == [0.01, 0.02, 0.05]
    with pytest.raises(UsageError, match="--min-effect"):
        opened(tmp_path, min_effect="five")


def test_a_run_leaves_its_directory_and_a_readonly_one_nothing(shown: list[Shown], tmp_path: Path) -> None:
    opened(tmp_path, readonly=True)
    assert shown[-1].options.readonly
    assert [path for path in tmp_path.rglob("*") if path.name != "model"] == []
    opened(tmp_path)
    assert len(list((tmp_path / "home" / "state" / "runs").iterdir())) == 1
