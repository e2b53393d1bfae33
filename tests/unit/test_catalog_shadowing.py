"""The catalogue: shipped policies, the user's in their place, damaged files beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdq_tui.core.catalog import find_policy, policies
from pdq_tui.core.policy import Policy, policy_to_toml
from pdq_tui.errors import UsageError

SHIPPED = {
    "bf16",
    "int8",
    "w8a8",
    "int4",
    "w8a8-prefill-int4-decode",
    "w8a8-prefill-int8-decode",
    "w8a8-prefill-bf16-decode",
    "bf16-prefill-int8-decode",
    "bf16-prefill-int4-decode",
    "int4-prefill-bf16-decode",
}


def put(folder: Path, name: str, text: str | None = None, stem: str | None = None) -> Path:
    path = folder / f"{stem or name}.toml"
    path.write_text(
        text if text is not None else policy_to_toml(Policy(name, summary="mine")), encoding="utf-8"
    )
    return path


def test_the_shipped_policies_are_there_and_valid(tmp_path: Path) -> None:
    found = policies(tmp_path)
    assert set(found) >= SHIPPED
    assert all(e.error is None and e.policy is not None and e.origin == "shipped" for e in found.values())


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("bf16", "uniform"),
        ("int8", "uniform"),
        ("w8a8", "uniform"),
        ("int4", "uniform"),
        ("w8a8-prefill-int8-decode", "shared"),
        ("w8a8-prefill-int4-decode", "dual"),
        ("w8a8-prefill-bf16-decode", "dual"),
        ("bf16-prefill-int8-decode", "dual"),
        ("bf16-prefill-int4-decode", "dual"),
        ("int4-prefill-bf16-decode", "dual"),
    ],
)
def test_shipped_policies_do_what_they_are_called(tmp_path: Path, name: str, storage: str) -> None:
    policy = find_policy(name, tmp_path)
    assert (policy.name, policy.storage) == (name, storage)
    assert policy.staged == ("prefill" in name)
    assert policy.summary
    if policy.staged:
        labels = [policy.prefill.format.label, policy.decode.format.label]
        wanted = [part.removesuffix("-prefill").removesuffix("-decode") for part in name.split("-prefill-")]
        assert [label.split("-")[0] for label in labels] == wanted
    text = Path(policies(tmp_path)[name].path).read_text(encoding="utf-8")
    assert f'storage = "{storage}"' in text  # declared, not inferred


def test_a_users_policy_takes_the_place_of_a_shipped_one(tmp_path: Path) -> None:
    put(tmp_path, "int8")
    put(tmp_path, "my-own")
    found = policies(tmp_path)
    assert found["int8"].origin == "user" and found["int8"].policy is not None
    assert found["int8"].policy.summary == "mine"
    assert found["my-own"].origin == "user" and found["bf16"].origin == "shipped"
    assert find_policy("int8", tmp_path).summary == "mine"


def test_the_name_inside_counts_not_the_files(tmp_path: Path) -> None:
    put(tmp_path, "int4", stem="whatever")
    assert policies(tmp_path)["int4"].path.endswith("whatever.toml")


def test_a_damaged_file_is_listed_and_the_others_work(tmp_path: Path) -> None:
    put(tmp_path, "broken", "schema = ")
    put(tmp_path, "binary", "x").write_bytes(b"\xff\xfe\x00")
    put(tmp_path, "good")
    found = policies(tmp_path)
    assert found["broken"].policy is None and "broken.toml" in str(found["broken"].error)
    assert found["binary"].policy is None and found["good"].policy is not None
    with pytest.raises(UsageError, match=r"broken\.toml"):
        find_policy("broken", tmp_path)
    assert find_policy("bf16", tmp_path).name == "bf16"


def test_a_path_is_read_as_a_path(tmp_path: Path) -> None:
    path = put(tmp_path, "mine")
    assert find_policy(str(path), tmp_path / "none").name == "mine"
    with pytest.raises(UsageError, match="cannot be read"):
        find_policy(str(tmp_path / "nothing.toml"))


@pytest.mark.parametrize(
    ("word", "near"), [("int9", "int"), ("w8a8-prefill-int4", "w8a8-prefill-int4-decode")]
)
def test_a_word_near_a_name(tmp_path: Path, word: str, near: str) -> None:
    with pytest.raises(UsageError, match="no policy is called") as caught:
        find_policy(word, tmp_path)
    assert "did you mean" in str(caught.value.hint) and near in str(caught.value.hint)


def test_a_word_near_nothing_gets_the_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find_policy("zzzzzz", tmp_path)
    assert "bf16" in str(caught.value.hint)


def test_a_missing_user_folder_is_no_error(tmp_path: Path) -> None:
    assert set(policies(tmp_path / "never" / "made")) >= SHIPPED
