"""What the first screen waits for: counted in modules and collections of a fresh interpreter, not in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: Start as the command does, without a terminal, and stop where the model would begin to load.
START = """
import gc, json, sys
from pdq_tui.cli import main
import pdq_tui.commands.app as command
from pdq_tui.tui.app import PdqApp
from textual.app import App

found = {}

def frame(app, load):
    found["modules"] = sorted(sys.modules)
    found["collecting"] = gc.isenabled()
    app.call_after_refresh(later, app)

def later(app):
    found["collecting_later"] = gc.isenabled()
    found["frozen"] = gc.get_freeze_count()
    app.exit(0)

command.need_terminal = lambda model: None
PdqApp._begin = frame
PdqApp.run = lambda self, **how: App.run(self, headless=True, size=(120, 36))
sys.argv = ["pdq-tui", "demo", "--dir", sys.argv[1]]
try:
    main()
finally:
    print(json.dumps(found))
"""
#: Of use later or never: the engine's, the store's and reports' libraries, other screens, and what only writes files.
LATER = {
    "torch", "transformers", "numpy", "polars", "altair", "pydantic", "psutil", "tomlkit", "pynvml", "click",
    "pdq_tui.engine", "pdq_tui.report", "pdq_tui.judge", "pdq_tui.core.predict", "pdq_tui.core.kernels",
    "pdq_tui.core.document", "pdq_tui.store.snapshot", "pdq_tui.store.compare",
    "pdq_tui.tui.compare", "pdq_tui.tui.policies", "pdq_tui.tui.log", "pdq_tui.tui.help", "pdq_tui.tui.export",
    "pdq_tui.tui.commands",
}  # fmt: skip


def test_first_screen_waits_for_nothing_that_comes_later(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PDQ_", "TEXTUAL"))}
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path / "runs")],
        env=env | {"PDQ_HOME": str(tmp_path / "home"), "TERM": "xterm-256color"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(LATER & set(found["modules"])) == []
    # No garbage is looked for in what a start makes; after the first frame it is, in what came since.
    assert not found["collecting"]
    assert found["collecting_later"]
    assert found["frozen"] > 10_000
