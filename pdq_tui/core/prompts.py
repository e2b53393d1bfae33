"""Where prompts come from: the sets written for this project, and the user's own file.

Texts and chats only: token ids are made by the engine, which owns the tokenizer and cuts to exact lengths.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from pdq_tui.core.workload import PROMPT_SETS
from pdq_tui.errors import UsageError

#: A prompt file is read whole and travels to the engine in one message.
LIMIT_BYTES: Final = 16 * 1024 * 1024

Chat = tuple[tuple[str, str], ...]


class Prompts(msgspec.Struct, frozen=True):
    """The prompts of one file.

    texts    plain prompts, in the file's order.
    chats    conversations as (role, content) pairs, in the file's order.
    refused  (1-based number in the file, reason) of those that will not run.
    notes    what was decided about the file, in sentences: how it was split, what was replaced.
    numbers  the numbers in the file of ``texts`` followed by those of ``chats``.
    """

    texts: tuple[str, ...] = ()
    chats: tuple[Chat, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Prompts in the file, refused ones included."""
        return len(self.texts) + len(self.chats) + len(self.refused)

    @property
    def summary(self) -> str:
        """``9 of 10 prompts run; number 4 refused: empty``; at most three of the refused are named."""
        kept = self.total - len(self.refused)
        if not self.refused:
            return f"{kept} prompts"
        named = "; ".join(f"number {number} refused: {reason}" for number, reason in self.refused[:3])
        more = f"; and {len(self.refused) - 3} more" if len(self.refused) > 3 else ""
        return f"{kept} of {self.total} prompts run; {named}{more}"


@cache
def _set_file(name: str) -> tuple[str, ...]:
    """The texts of one shipped set: each starts after a line ``%% title``."""
    source = resources.files("pdq_tui.core").joinpath("prompt_sets", f"{name}.txt")
    texts: list[list[str]] = []
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("%% "):
            texts.append([])
        else:
            texts[-1].append(line)
    return tuple("\n".join(lines).strip() for lines in texts)


def built_in(name: str) -> list[str]:
    """The texts of a built-in set: "short" (one instruction each), "long" (documents of several hundred words), or
    "mixed" (both, spread evenly). Always the same texts in the same order. Raises UsageError for another name."""
    if name not in PROMPT_SETS:
        raise UsageError(f"no prompt set is called {name!r}", f"there are: {', '.join(PROMPT_SETS)}")
    if name != "mixed":
        return list(_set_file(name))
    short, long = _set_file("short"), _set_file("long")
    # By relative position, so that any stretch of the mixture holds both kinds.
    placed = [((i + 0.5) / len(short), text) for i, text in enumerate(short)]
    placed += [((i + 0.5) / len(long), text) for i, text in enumerate(long)]
    return [text for _, text in sorted(placed)]


def read_prompts(path: Path) -> Prompts:
    """Read a prompt file.

    ``.jsonl`` / ``.ndjson``, or a file whose first line is a JSON object: one object a line with ``prompt`` (a string)
    or ``messages`` (a list of ``{"role", "content"}``); the number of a prompt is its line. Anything else is plain
    text: prompts separated by blank lines, numbered in order.

    Broken, empty or blank prompts are refused by number, the others run. Raises UsageError where nothing is left.
    """
    text, notes = _read(path)
    if not text.strip():
        raise UsageError(f"{path}: holds only blank lines", "write one prompt a paragraph, or JSONL")
    if _is_jsonl(path, text):
        notes.append("read as JSONL: one prompt a line")
        found = _from_jsonl(text, notes)
    else:
        notes.append("read as plain text: prompts are separated by blank lines")
        texts = tuple(_paragraphs(text))
        found = Prompts(texts=texts, notes=tuple(notes), numbers=tuple(range(1, len(texts) + 1)))
    if not found.texts and not found.chats:
        number, reason = found.refused[0]
        raise UsageError(
            f"{path}: none of its {found.total} prompts can be used (number {number}: {reason})",
            'each line must look like {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        )
    return found


def _read(path: Path) -> tuple[str, list[str]]:
    try:
        size = path.stat().st_size
        if size > LIMIT_BYTES:
            raise UsageError(f"{path}: is {size:,} bytes, prompt files may hold up to {LIMIT_BYTES:,} bytes")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", "--prompts takes a text or JSONL file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not raw:
        raise UsageError(f"{path}: the prompt file is empty (0 bytes)", "write at least one prompt into it")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding, notes = "utf-16", ["read as UTF-16 (it starts with that byte order mark)"]
    else:
        encoding, notes = "utf-8-sig", []
    text = raw.decode(encoding, "replace")
    replaced = text.count("\ufffd") - raw.count("\ufffd".encode())
    if encoding == "utf-8-sig" and replaced > 0:
        notes.append(f"{replaced} invalid bytes (not UTF-8) were replaced by U+FFFD")
    return text.replace("\r\n", "\n").replace("\r", "\n"), notes


def _is_jsonl(path: Path, text: str) -> bool:
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return True
    first = next(line for line in text.split("\n") if line.strip())
    value, _ = _parse(first)
    return isinstance(value, dict) and bool({"prompt", "messages"} & value.keys())


def _paragraphs(text: str) -> list[str]:
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(lines).strip() for lines in found if lines]


def _from_jsonl(text: str, notes: list[str]) -> Prompts:
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    texts: list[tuple[int, str]] = []
    chats: list[tuple[int, Chat]] = []
    refused: list[tuple[int, str]] = []
    surrogates = 0
    for number, line in enumerate(lines, 1):
        try:
            value = _one(line)
        except UsageError as error:
            refused.append((number, error.message))
            continue
        if isinstance(value, str):
            clean = _encodable(value)
            surrogates += clean != value
            texts.append((number, clean))
        else:
            pairs = tuple((_encodable(role), _encodable(content)) for role, content in value)
            surrogates += pairs != value
            chats.append((number, pairs))
    if surrogates:
        notes.append(f"{surrogates} prompts held characters that no encoding can carry; replaced by ?")
    return Prompts(
        texts=tuple(text for _, text in texts),
        chats=tuple(chat for _, chat in chats),
        refused=tuple(refused),
        notes=tuple(notes),
        numbers=tuple(number for number, _ in [*texts, *chats]),
    )


def _parse(line: str) -> tuple[Any, str]:
    """(value, "") or (None, why it is not JSON)."""
    try:
        return json.loads(line), ""
    except json.JSONDecodeError as error:
        return None, f"not valid JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        return None, "not valid JSON: nested too deeply"
    except ValueError as error:  # a whole number of more digits than Python converts
        return None, f"not valid JSON: {error}"


def _one(line: str) -> str | Chat:
    """One line's prompt or chat. Raises UsageError with the reason alone."""
    if not line.strip():
        raise UsageError("empty line")
    value, why = _parse(line)
    if why:
        raise UsageError(why)
    if not isinstance(value, dict):
        raise UsageError(f"is a JSON {_kind(value)}, not an object with prompt or messages")
    if "prompt" in value and "messages" in value:
        raise UsageError("has both prompt and messages")
    if "prompt" in value:
        prompt = value["prompt"]
        if not isinstance(prompt, str):
            raise UsageError(f"prompt is a JSON {_kind(prompt)}, not a string")
        if not prompt.strip():
            raise UsageError("prompt is empty")
        return prompt
    if "messages" not in value:
        raise UsageError("has neither prompt nor messages")
    return _chat(value["messages"])


def _chat(messages: Any) -> Chat:
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages is not a list with at least one message")
    pairs = []
    for index, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {index} has no role")
        pairs.append((message["role"], _content(message.get("content"), index)))
    if not any(content.strip() for _, content in pairs):
        raise UsageError("all its messages are empty")
    return tuple(pairs)


def _content(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(cast("str", part["text"]) for part in content)
    raise UsageError(f"message {index}: content is not text")


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _kind(value: Any) -> str:
    return {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )
