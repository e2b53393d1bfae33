"""The documentation says what the program does: generated tables are current, examples are legal, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdq_tui.core.policy import parse_policy

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    REPO / "README.md",
    REPO / "README.zh.md",
    REPO / "CHANGELOG.md",
    *sorted((REPO / "docs").glob("*.md")),
]


def test_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "docs" / "metrics.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + "run: python docs/metrics.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_policies_in_the_text_are_legal(page: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if block.startswith("schema"):
            parse_policy(block, page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    from pdq_tui.commands import COMMANDS

    for word in re.findall(r"(?:^|`)pdq-tui ([a-z]+)\b", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert word in {*COMMANDS, "demo"}, word
