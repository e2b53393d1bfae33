"""The house's rules, tried: what each room drags in when it is imported in a fresh interpreter, the import contracts,
and the wheel as somebody else would install it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "pdq_tui"
HEAVY = ("torch", "transformers", "bitsandbytes", "torchao")


def modules_of(room: str) -> list[str]:
    path = PACKAGE / room
    if path.is_dir():
        return sorted(
            ".".join(file.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
            for file in path.rglob("*.py")
        )
    return [f"pdq_tui.{room}"]


def loaded_after(modules: list[str]) -> set[str]:
    """Top-level packages in sys.modules after importing ``modules`` in a fresh interpreter."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("room", "without"),
    [
        ("core", (*HEAVY, "textual", "polars", "psutil", "pynvml", "typer", "altair")),
        ("errors", (*HEAVY, "textual", "polars", "psutil", "msgspec")),
        ("host", (*HEAVY, "textual", "polars", "pynvml", "altair")),
        ("sensors", (*HEAVY, "textual", "polars", "altair")),
        ("store", (*HEAVY, "textual", "altair")),
        ("judge", (*HEAVY, "textual")),
        ("report", (*HEAVY, "textual")),
        ("tui", HEAVY),
        ("config", (*HEAVY, "textual", "polars", "psutil")),
        ("commands", HEAVY),
        ("cli", (*HEAVY, "textual", "polars", "altair", "msgspec", "psutil")),
    ],
)
def test_a_room_does_not_drag_in_what_is_not_its_own(room: str, without: tuple[str, ...]) -> None:
    assert not loaded_after(modules_of(room)) & set(without)


def test_the_first_screen_waits_for_neither_tables_nor_figures_nor_torch() -> None:
    modules = [
        "pdq_tui.cli",
        "pdq_tui.commands.app",
        "pdq_tui.host.live",
        "pdq_tui.host.runs",
        "pdq_tui.tui.app",
    ]
    assert not loaded_after(modules) & {*HEAVY, "polars", "altair", "vl_convert", "numpy"}


def test_the_engine_knows_core_alone() -> None:
    """Read from the source, so that torch need not be imported for it."""
    allowed = {"core", "errors", "locations"}
    for room in ("engine", "sensors"):
        for file in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = (
                    [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else []
                )
                for name in names:
                    parts = name.split(".")
                    if parts[0] == "pdq_tui" and len(parts) > 1:
                        assert parts[1] in allowed | {room}, f"{file}: {name}"


def test_core_defines_nothing_that_nobody_uses() -> None:
    """A formula that only tests read drifts from the one that counts."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = Counter(re.findall(r"\w+", text))
    unused = [
        f"{path.stem}.{node.name}"
        for path in sorted((PACKAGE / "core").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("__")
        if words[node.name] < 2
    ]
    assert not unused


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(tool), "--no-cache"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree without fetching anything."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPO)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = folder.glob("*.whl")
    return found


def test_the_wheel_holds_what_is_not_python(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (
        ("profiles", "pdq_tui/_shipped/profiles"),
        ("kernels_cfg", "pdq_tui/_shipped/kernels_cfg"),
        ("servers_cfg", "pdq_tui/_shipped/servers_cfg"),
    ):
        for file in (REPO / folder).glob("*.toml"):
            assert f"{inside}/{file.name}" in names
    for file in (PACKAGE / "core" / "prompt_sets").glob("*.txt"):
        assert f"pdq_tui/core/prompt_sets/{file.name}" in names
    for file in PACKAGE.rglob("*.tcss"):
        assert str(file.relative_to(REPO)) in names
    assert not any(name.startswith("tests/") or "__pycache__" in name for name in names)


def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    """Its own files, beside this environment's libraries; the source tree is out of reach."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import pdq_tui; "
        "assert pdq_tui.__file__.startswith(sys.path[0]), pdq_tui.__file__; from pdq_tui.cli import main; main()"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PDQ_HOME": str(tmp_path / "home")}

    def pdq(*words: str) -> str:
        argv = [sys.executable, "-P", "-c", code, str(site), *words]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    listed = json.loads(pdq("policies", "list", "--json"))
    assert {entry["name"] for entry in listed} == {file.stem for file in (REPO / "profiles").glob("*.toml")}
    assert all(entry["path"].startswith(str(site)) for entry in listed)
    assert json.loads(pdq("where", "--json"))["kernel tables"].startswith(str(site))
