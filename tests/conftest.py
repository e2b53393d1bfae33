"""What holds for every test: no user's files, no network look-ups, no colours or sizes from the outside; and the demo
model, fetched once for all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: The demo model outlives a test session; it lies in the environment that `make clean` takes away.
DEMO_HOME = ROOT / ".venv" / "demo-home"

# Started in the background (a CI job, nohup), a process inherits ignored signals, and hands them on to every child:
# Ctrl-C and a dropped line would then do nothing, which is exactly what some tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings, runs and caches of this test alone. Variables of the person who runs it do not count."""
    home = tmp_path / "pdq-home"
    for name in [n for n in os.environ if n.startswith("PDQ_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PDQ_HOME", str(home))
    # Compiling decoder layers and kernels takes seconds a home: only tests that are about it ask for it.
    monkeypatch.setenv("PDQ_ENGINE_LAYERS", "eager")
    monkeypatch.setenv("PDQ_ENGINE_KERNELS", "torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return home


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The directory with the demo model's GGUF. Skips, with the reason, where it cannot be fetched."""
    from pdq_tui.errors import PdqError
    from pdq_tui.host import demo

    before = os.environ.get("PDQ_HOME")
    os.environ["PDQ_HOME"] = str(DEMO_HOME)
    try:
        return demo.fetch()
    except PdqError as error:
        pytest.skip(str(error))
    finally:
        if before is None:
            del os.environ["PDQ_HOME"]
        else:
            os.environ["PDQ_HOME"] = before
