"""Settings: which layer wins, where each value came from, and what wrong ones are told."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pdq_tui import config, locations
from pdq_tui.errors import UsageError


def user_file(text: str) -> Path:
    path = locations.config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_each_layer_wins_over_the_one_below_and_says_so(tmp_path: Path) -> None:
    user = user_file("[workload]\nin = 1\nout = 1\nbatch = 1\nseed = 1\n")
    (tmp_path / "pdq.toml").write_text("[workload]\nout = 2\nbatch = 2\nseed = 2\n")
    loaded = config.load(
        {"workload.seed": ("--seed", 4), "workload.in": ("--in", None)},
        folder=tmp_path,
        environment={"PDQ_WORKLOAD_BATCH": "3", "PDQ_WORKLOAD_SEED": "3"},
    )
    w = loaded.settings.workload
    assert (w.prompt_tokens, w.output_tokens, w.batch, w.seed) == (1, 2, 3, 4)
    assert loaded.origins["workload.in"] == f"{user}:2"
    assert loaded.origins["workload.out"] == f"{tmp_path / 'pdq.toml'}:2"
    assert loaded.origins["workload.batch"] == "environment PDQ_WORKLOAD_BATCH"
    assert loaded.origins["workload.seed"] == "flag --seed"
    assert loaded.origins["workload.prompts"] == "default"
    assert loaded.files == (user, tmp_path / "pdq.toml")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "[workload]\n\nprmpts = 'x'\n",
            ":3: workload.prmpts: unknown key",
            "did you mean workload.prompts?",
        ),
        ("[wrkload]\n", ":1: wrkload: unknown key", "did you mean workload?"),
        ("workload = 3\n", ":1: workload: must be a table", "[workload]"),
        ("[workload]\nin = '5'\n", ":2: workload.in: must be a whole number of tokens", None),
        ("[workload]\nin = true\n", ":2: workload.in: must be a whole number", None),
        ("[workload]\nin = 0\n", ":2: workload.in: 0 is too small", "at least 1 tokens"),
        ("[workload]\nin = 1.5\n", ":2: workload.in: must be a whole number", None),
        ("[run]\nmin_effect = nan\n", ":2: run.min_effect: nan is no finite number", None),
        ("[engine]\ndevice = 'tpu'\n", ":2: engine.device: 'tpu' is not a legal value", "auto, cuda, cpu"),
        ("[screen]\nfps = '900'\n", ":2: screen.fps: '900' is not a legal value", "0.1 to 60"),
        ("[screen]\nascii = 1\n", ":2: screen.ascii: must be true or false", None),
        ("[keys]\nsnapshot = 3\n", ":2: keys.snapshot: must be a string", None),
        ("[workload\n", "not valid TOML", None),
    ],
)
def test_a_wrong_file_is_told_with_line_key_and_legal_values(
    text: str, message: str, hint: str | None
) -> None:
    path = user_file(text)
    with pytest.raises(UsageError) as caught:
        config.load(environment={})
    assert str(path) in caught.value.message
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PDQ_WORKLOAD_INN", "5", "no such setting"),
        ("PDQ_WORKLOAD_IN", "five", "is not a number"),
        ("PDQ_SCREEN_ASCII", "maybe", "is not a legal value"),
        ("PDQ_RUN_BUDGET", "0", "is too small"),
    ],
)
def test_a_wrong_variable_is_told_by_its_name(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        config.load(environment={name: value})
    assert name in caught.value.message


def test_variables_of_others_and_empty_ones_are_left_alone() -> None:
    loaded = config.load(environment={"PDQ_HOME": "/x", "PDQ_WORKLOAD_IN": "", "PDQ_OF_SOMEBODY": "1"})
    assert loaded.settings == config.Settings()


def test_what_is_shown_can_be_read_back(tmp_path: Path) -> None:
    first = config.load(
        {"run.dir": ("--dir", 'a"b\\c\n'), "run.budget": ("--budget", 3)}, folder=tmp_path, environment={}
    )
    shown = tmp_path / "shown.toml"
    shown.write_text(config.show(first))
    assert config.load(config=shown, folder=tmp_path, environment={}).settings == first.settings


def test_the_template_explains_every_setting_and_sets_none(tmp_path: Path) -> None:
    text = config.template()
    assert all(not body for body in tomllib.loads(text).values())
    for declared in config.DECLARED.values():
        assert declared.doc in text
        assert declared.env in text
    path = tmp_path / "t.toml"
    path.write_text(text)
    assert config.load(config=path, folder=tmp_path, environment={}).settings == config.Settings()


def test_uncommented_defaults_of_the_template_are_legal(tmp_path: Path) -> None:
    lines = config.template().splitlines()
    names = {d.key.partition(".")[2] for d in config.DECLARED.values()}
    live = [
        line[2:]
        if line.startswith("# ") and line[2:].partition(" =")[0] in names and not line.endswith("=")
        else line
        for line in lines
    ]
    path = tmp_path / "t.toml"
    path.write_text("\n".join(live))
    assert config.load(config=path, folder=tmp_path, environment={}).settings == config.Settings()


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file"):
        config.load(config=tmp_path / "nowhere.toml")
