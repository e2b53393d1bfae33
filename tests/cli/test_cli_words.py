"""Which command is meant, what is said, and which exit code comes of it. No engine is started here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_gear import Pdq, environment
from fake_nvml import FakeNvml

from pdq_tui import __version__
from pdq_tui.cli import with_app
from pdq_tui.commands import COMMANDS
from pdq_tui.errors import UsageError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ["app"]),
        (["demo"], ["app", "demo"]),
        (["org/name", "--a", "int8"], ["app", "org/name", "--a", "int8"]),
        (["--a", "int8"], ["app", "--a", "int8"]),
        (["-v", "--config", "x.toml", "demo"], ["-v", "--config", "x.toml", "app", "demo"]),
        (["--config=x.toml"], ["--config=x.toml", "app"]),
        (["run", "demo"], ["run", "demo"]),
        (["-q", "run", "demo"], ["-q", "run", "demo"]),
        (["./run"], ["app", "./run"]),
        (["--version"], ["--version"]),
        (["-v", "-h"], ["-v", "-h"]),
        (["app", "comapre"], ["app", "comapre"]),
        (["--config"], ["--config", "app"]),
    ],
)
def test_the_first_word_is_a_command_or_a_model(given: list[str], meant: list[str]) -> None:
    assert with_app(given) == meant


def test_a_mistyped_command_is_no_model() -> None:
    with pytest.raises(UsageError, match="comapre") as caught:
        with_app(["comapre", "a", "b"])
    assert "pdq-tui compare" in (caught.value.hint or "")


def test_version_is_data(pdq: Pdq) -> None:
    done = pdq("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pdq-tui {__version__}\n", "")


def test_help_names_every_command_and_none_that_does_not_exist(pdq: Pdq) -> None:
    text = pdq("-h").stdout
    assert {"app", "run", "evaluate", "compare", "report", "policies", "doctor"} <= set(COMMANDS)
    for word in COMMANDS:
        assert re.search(rf"^  {word} ", text, re.MULTILINE), word
    for word in {"search", "tune", "deploy", "replay", "trace", "recheck", "note"} - set(COMMANDS):
        assert word not in text.lower().split()


@pytest.mark.parametrize(
    "command", ["app", "run", "compare", "report", "policies check", "snapshots rm", "doctor"]
)
def test_help_of_a_command_says_what_each_flag_does(pdq: Pdq, command: str) -> None:
    done = pdq(*command.split(), "-h")
    assert done.returncode == 0
    options = done.stdout.partition("Options:")[2]
    starts = re.findall(r"^  (?:-\w, )?--[\w-]+.*$", options, re.MULTILINE)
    assert len(starts) > 4
    if command in ("run", "app"):
        for unit in ("tokens", "seconds" if command == "run" else "frames a second", "GiB"):
            assert unit in options


def test_without_a_terminal_the_app_names_the_headless_command(pdq: Pdq) -> None:
    done = pdq("demo")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "pdq-tui run demo --policy" in done.stderr


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_be_drawn_on_names_the_headless_command(own_home: Path, term: str) -> None:
    done = in_a_terminal(["demo"], environment(own_home, TERM=term))
    assert done.returncode == 2
    assert "pdq-tui run demo" in done.stdout
    assert f"TERM={term}" in done.stdout


def in_a_terminal(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The command with a pseudo-terminal as its stdin, stdout and stderr; what was drawn comes as ``stdout``."""
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    argv = [sys.executable, "-c", code, sys.executable, "-m", "pdq_tui", *words]
    return subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


def test_exit_codes_of_wrong_words(pdq: Pdq) -> None:
    for words in (
        ("run",),
        ("run", "demo", "--nothing"),
        ("run", "demo", "--in", "0"),
        ("run", "demo", "--policy", "int5"),
        ("run", "demo", "--fail-on", "better"),
        ("run", "demo", "--fail-on", "worse:stored_bytes"),
        ("run", "demo", "--min-effect", "half"),
        ("run", "demo", "--device", "tpu"),
        ("run", "demo", "--chat-template", "maybe"),
        ("policies", "show", "int5"),
        ("policies", "lst"),
        ("compare", "@last"),
        ("compare", "x", "y"),
        ("snapshots", "show", "@last"),
        ("--config", "/nowhere/x.toml", "where", "--json", "extra"),
        ("--config", "/nowhere/x.toml", "config", "show"),
    ):
        done = pdq(*words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert done.stderr
        assert "Traceback" not in done.stderr


def test_common_options_are_understood_before_and_after_the_command(pdq: Pdq, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[workload]\nin = 99\n")
    for words in (("--config", str(file), "config", "show"), ("config", "show", "--config", str(file))):
        assert "in = 99" in pdq(*words).stdout
    assert "read " in pdq("-v", "config", "show", "--config", str(file)).stderr
    assert pdq("config", "show", "--config", str(file), "-q").stderr == ""


def test_I08_a_path_with_nothing_there_is_not_looked_for_on_the_hub(pdq: Pdq) -> None:
    for word in ("./no-such-model", "/no/such/model", "~/no-such-model", "a/b/c", "model.gguf"):
        done = pdq("run", word, "-p", "bf16")
        assert done.returncode == 2
        assert done.stderr.startswith(f"pdq-tui: no such directory: {word}")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty (0 bytes)"),
        (b"  \n\t\n", "only blank lines"),
        (b'{"prompt": ""}\n', "none of its 1 prompts can be used (number 1: prompt is empty)"),
        (b'{"prompt": 3}\n{"x": 1}\n', "none of its 2 prompts"),
    ],
)
def test_I01_a_prompt_file_without_a_prompt_is_refused_at_input(
    pdq: Pdq, tmp_path: Path, content: bytes, sentence: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    done = pdq("run", "demo", "--prompts", str(file), "-p", "bf16")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert str(file) in done.stderr


def test_an_unknown_prompt_set_names_the_sets(pdq: Pdq) -> None:
    done = pdq("run", "demo", "--prompts", "shrot", "-p", "bf16")
    assert done.returncode == 2
    assert "did you mean short?" in done.stderr


def test_where_names_every_path_and_moves_with_the_home(pdq: Pdq, own_home: Path) -> None:
    paths = json.loads(pdq("where", "--json").stdout)
    for name in ("config", "policies", "runs", "log", "cache", "demo"):
        assert paths[name].startswith(str(own_home))
    assert Path(paths["shipped policies"], "bf16.toml").is_file()


def test_X04_stdout_that_takes_nothing_is_told(own_home: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pdq_tui", "policies", "list"],
            env=environment(own_home),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "pdq-tui: stdout cannot be written: No space left on device\n"


def test_a_reader_that_has_seen_enough_ends_it_quietly(own_home: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m pdq_tui policies list | true",
        shell=True,
        env=environment(own_home),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""


def test_S09_an_ascii_locale_gets_every_table(pdq: Pdq) -> None:
    for words in (("policies", "list"), ("config", "show"), ("run", "-h")):
        done = pdq(*words, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()


def test_shell_completion_knows_the_commands(own_home: Path) -> None:
    env = environment(own_home, _PDQ_TUI_COMPLETE="complete_bash", COMP_WORDS="pdq-tui po", COMP_CWORD="1")
    code = "import sys; sys.argv = ['pdq-tui']; from pdq_tui.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["policies"]


def test_config_init_writes_a_file_that_changes_nothing(pdq: Pdq, own_home: Path) -> None:
    before = pdq("config", "show").stdout
    done = pdq("config", "init")
    assert done.stdout.strip() == str(own_home / "config" / "config.toml")
    assert pdq("config", "show").stdout == before
    again = pdq("config", "init")
    assert (again.returncode, again.stdout) == (2, "")
    assert "--force" in again.stderr


def test_doctor_says_what_is_there_and_its_exit_code_says_whether_that_will_do(pdq: Pdq) -> None:
    done = pdq("doctor", "--json", "--device", "cpu")
    body = json.loads(done.stdout)
    assert (done.returncode, body["fit"]) == (0, True)
    groups = {check["group"] for check in body["checks"]}
    assert {"versions", "paths", "policies", "terminal", "sensors", "engine", "kernels"} <= groups
    assert {check["status"] for check in body["checks"]} <= {"ok", "warn"}
    formats = [check["text"].partition(":")[0] for check in body["checks"] if check["group"] == "kernels"]
    assert {"bf16", "int8", "w8a8", "int4-g64"} <= set(formats)


def test_doctor_says_how_one_of_several_gpus_is_chosen(pdq: Pdq, tmp_path: Path) -> None:
    fake = FakeNvml.create(tmp_path, gpus=2)
    done = pdq("doctor", "--json", "--device", "cpu", **fake.env)
    texts = [check["text"] for check in json.loads(done.stdout)["checks"] if check["group"] == "GPUs"]
    assert done.returncode == 0 and len(texts) == 1
    assert texts[0].startswith("2: ") and "--gpu 0,1" in texts[0]


def test_doctor_where_the_device_is_missing_exits_4(pdq: Pdq) -> None:
    done = pdq("doctor", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4
    assert re.search(r"^fail +engine +no CUDA device", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "/no/such/model", "--gpu", "0,1"),
        ("search", "/no/such/model", "--max-kld", "0.1", "--gpu", "all"),
        ("tune", "/no/such/model", "--gpu", "all"),
    ],
)
def test_what_judges_refuses_several_gpus_before_anything_is_looked_for(
    pdq: Pdq, words: tuple[str, ...]
) -> None:
    done = pdq(*words)
    assert done.returncode == 4
    assert f"{words[0]} runs on one GPU, and --gpu is {words[-1]}" in " ".join(done.stderr.split())


def test_no_option_of_python_or_the_folder_leaks_in(pdq: Pdq, tmp_path: Path) -> None:
    """A module of the same name as one of ours or of a library, in the current folder, is not imported."""
    (tmp_path / "typer.py").write_text("raise SystemExit(99)\n")
    script = Path(sys.executable).with_name("pdq-tui")
    if not script.exists():
        pytest.skip("the console script is not installed beside this Python")
    env = environment(tmp_path / "home") | {"PATH": os.environ["PATH"]}
    done = subprocess.run([str(script), "--version"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0


@pytest.mark.parametrize("flag", ["--min-seconds", "--budget", "--weight-budget"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused_at_once(flag: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdq_tui", "run", "demo", flag, value],
        check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{value} is no finite number" in done.stderr


def test_a_revision_of_the_demo_model_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdq_tui", "run", "demo", "--revision", "abc"],
        check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2 and "--revision belongs to a hub model" in done.stderr
