"""The built-in prompt sets, and prompt files of every kind of quality."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.prompts import LIMIT_BYTES, built_in, read_prompts
from pdq_tui.errors import UsageError


def test_the_sets_are_what_they_are_called() -> None:
    short, long, mixed = built_in("short"), built_in("long"), built_in("mixed")
    assert len(short) >= 24
    assert len(long) >= 6
    assert all(10 <= len(text.split()) <= 60 for text in short)
    assert all(300 <= len(text.split()) <= 900 for text in long)
    assert sorted(mixed) == sorted(short + long)
    assert len(set(mixed)) == len(mixed)
    for start in range(len(mixed) - 8):
        assert {text in long for text in mixed[start : start + 8]} == {True, False}
    with pytest.raises(UsageError, match="no prompt set"):
        built_in("medium")


def write(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_I01_one_empty_line_among_ten_costs_only_itself(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"prompt {n}"}) for n in range(1, 11)]
    lines[6] = ""
    found = read_prompts(write(tmp_path, "\n".join(lines) + "\n"))
    assert (len(found.texts), found.total) == (9, 10)
    assert found.refused == ((7, "empty line"),)
    assert found.numbers == (1, 2, 3, 4, 5, 6, 8, 9, 10)
    assert found.summary == "9 of 10 prompts run; number 7 refused: empty line"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "is a JSON list"),
        ('"x"', "is a JSON string"),
        ("null", "is a JSON null"),
        ("{}", "has neither prompt nor messages"),
        ('{"prompt": " \\n"}', "prompt is empty"),
        ('{"prompt": ["a"]}', "prompt is a JSON list, not a string"),
        ('{"prompt": "a", "messages": []}', "has both"),
        ('{"messages": []}', "messages is not a list with at least one message"),
        ('{"messages": "hello"}', "messages is not a list"),
        ('{"messages": [{"content": "a"}]}', "message 1 has no role"),
        ('{"messages": [{"role": "user"}]}', "message 1: content is not text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "message 1: content is not text",
        ),
        ('{"messages": [{"role": "user", "content": " "}]}', "all its messages are empty"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_I01_a_broken_line_is_refused_by_its_number(tmp_path: Path, line: str, reason: str) -> None:
    found = read_prompts(write(tmp_path, '{"prompt": "good"}\n' + line + '\n{"prompt": "also good"}'))
    assert found.texts == ("good", "also good")
    [(number, why)] = found.refused
    assert number == 2
    assert reason in why


def test_chats_keep_roles_order_and_text_parts(tmp_path: Path) -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    }
    found = read_prompts(write(tmp_path, json.dumps(body), "chat.txt"))
    assert found.chats == ((("system", "Be short."), ("user", "ab")),)
    assert found.notes == ("read as JSONL: one prompt a line",)


def test_plain_text_is_split_at_blank_lines_and_says_so(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path, "one\nstill one\n\n \t\n\ntwo\r\n\r\nthree", "p.txt"))
    assert found.texts == ("one\nstill one", "two", "three")
    assert "blank lines" in found.notes[0]


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path, b"caf\xe9 and \xff\n", "p.txt"))
    assert found.texts == ("caf\ufffd and \ufffd",)
    assert found.notes[0] == "2 invalid bytes (not UTF-8) were replaced by U+FFFD"


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, "\ufeffhello".encode(), "a.txt")).texts == ("hello",)
    assert read_prompts(write(tmp_path, "héllo".encode("utf-16"), "b.txt")).texts == ("héllo",)


def test_a_lone_surrogate_can_travel_and_is_told(tmp_path: Path) -> None:
    found = read_prompts(write(tmp_path, '{"prompt": "a\\ud800b"}'))
    assert found.texts == ("a?b",)
    assert any("no encoding" in note for note in found.notes)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "empty (0 bytes)"), (b" \n\t\n", "only blank lines"), (b"\n{]\n", "none of its 2 prompts")],
)
def test_I01_a_file_without_a_prompt_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_prompts(write(tmp_path, content))
    assert sentence in caught.value.message


def test_what_is_no_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_prompts(tmp_path / "missing.txt")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path)
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(LIMIT_BYTES + 1)
    with pytest.raises(UsageError, match="may hold up to"):
        read_prompts(large)


@given(st.binary(min_size=1, max_size=400))
def test_any_bytes_are_prompts_or_a_sentence(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name in ("p.txt", "p.jsonl"):
            try:
                found = read_prompts(write(Path(folder), data, name))
            except UsageError as error:
                assert name in error.message
            else:
                assert found.texts or found.chats
                assert len(found.numbers) == len(found.texts) + len(found.chats)
