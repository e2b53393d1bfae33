"""What every message has: version, type and time."""

from __future__ import annotations

from typing import Final

import msgspec

VERSION: Final = 1


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag=_snake):
    v: int = VERSION
    t_ns: int = 0
