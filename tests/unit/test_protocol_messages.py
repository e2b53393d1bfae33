"""The protocol: every message comes back as it was, lines are strict JSON, strangers are counted and not fatal."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdq_tui.core import protocol as p
from pdq_tui.core.policy import Policy, StagePolicy

COMMANDS = typing.get_args(p.Command)
EVENTS = typing.get_args(p.Event)
MESSAGES = [*COMMANDS, *EVENTS]

TEXT = st.text(max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def value_of(kind: Any, floats: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    """Any value of a msgspec type."""
    if isinstance(kind, msgspec.inspect.BoolType):
        return st.booleans()
    if isinstance(kind, msgspec.inspect.IntType):
        return st.integers(-(2**62), 2**62)
    if isinstance(kind, msgspec.inspect.FloatType):
        return floats
    if isinstance(kind, msgspec.inspect.StrType):
        return TEXT
    if isinstance(kind, msgspec.inspect.NoneType):
        return st.none()
    if isinstance(kind, msgspec.inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, msgspec.inspect.UnionType):
        return st.one_of(*(value_of(t, floats) for t in kind.types))
    if isinstance(kind, msgspec.inspect.ListType):
        return st.lists(value_of(kind.item_type, floats), max_size=3)
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return st.lists(value_of(kind.item_type, floats), max_size=3).map(tuple)
    if isinstance(kind, msgspec.inspect.TupleType):
        return st.tuples(*(value_of(t, floats) for t in kind.item_types))
    if isinstance(kind, msgspec.inspect.DictType):
        return st.dictionaries(value_of(kind.key_type, floats), value_of(kind.value_type, floats), max_size=3)
    if isinstance(kind, msgspec.inspect.StructType):
        return st.deferred(lambda: struct_of(kind.cls, floats))  # a struct may hold others of its kind
    raise NotImplementedError(kind)


@functools.cache
def struct_of(cls: Any, floats: st.SearchStrategy[float] = FINITE) -> st.SearchStrategy[Any]:
    info = typing.cast(msgspec.inspect.StructType, msgspec.inspect.type_info(cls))
    fields = {f.name: value_of(f.type, floats) for f in info.fields if f.name not in ("v", "t_ns")}
    if issubclass(cls, p.Message):
        fields["t_ns"] = st.integers(1, 2**62)
    return st.fixed_dictionaries(fields).map(lambda kw: cls(**kw))


def decode(line: bytes, cls: Any) -> Any:
    return p.decode_command(line) if cls in COMMANDS else p.decode_event(line)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda c: c.__name__)
@given(data=st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_message_comes_back_as_it_was(cls: Any, data: st.DataObject) -> None:
    message = data.draw(struct_of(cls))
    line = p.encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    back = decode(line, cls)
    assert type(back) is cls and back == message


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda c: c.__name__)
@given(data=st.data())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_X01_lines_are_strict_json_whatever_the_numbers(cls: Any, data: st.DataObject) -> None:
    line = p.encode(data.draw(struct_of(cls, st.floats())))

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} in JSON")

    body = json.loads(line, parse_constant=refuse)
    assert body["v"] == p.VERSION and body["type"]


def test_X01_a_number_that_is_not_finite_is_null_and_named() -> None:
    line = p.encode(
        p.Request(
            request=1, arm="A", policy="x", policy_digest="y", kind="loop", ttft_ms=math.nan, tpot_ms=math.inf
        )
    )
    assert sorted(json.loads(line)["nonfinite_fields"]) == ["tpot_ms", "ttft_ms"]
    back = p.decode_event(line)
    assert back.ttft_ms is None and back.tpot_ms is None


def test_a_number_of_a_series_that_is_not_finite_is_left_out_and_named_and_the_record_survives() -> None:
    request = p.Request(
        request=1, arm="A", policy="x", policy_digest="y", kind="loop", itl_ms=[1.0, math.nan, 2.0]
    )
    line = p.encode(request)
    assert json.loads(line)["nonfinite_fields"] == ["itl_ms[1]"]
    assert p.decode_event(line).itl_ms == [1.0, 2.0]


def test_text_that_no_encoding_can_hold_is_replaced() -> None:
    back = p.decode_event(p.encode(p.Note(level="info", text="half a pair: \ud800.")))
    assert back.text == "half a pair: ?."


def test_a_line_is_stamped_when_it_is_not() -> None:
    note = p.Note(level="info", text="x")
    assert p.decode_event(p.encode(note)).t_ns > 0
    assert p.decode_event(p.encode(p.Note(level="info", text="x", t_ns=5))).t_ns == 5


def test_types_and_names_are_stable() -> None:
    """A journal of today is read tomorrow: a type's name on the wire never changes."""
    assert json.loads(p.encode(p.SetArm(arm="A", policy=Policy("x"))))["type"] == "set_arm"
    assert (
        json.loads(p.encode(p.Request(request=0, arm="A", policy="", policy_digest="", kind="loop")))["type"]
        == "request"
    )
    tags = [json.loads(p.encode(_least(c)))["type"] for c in MESSAGES]
    assert len(set(tags)) == len(tags)


def _least(cls: Any) -> Any:
    samples = {str: "", int: 0, float: 0.0, bool: False}
    info = typing.cast(msgspec.inspect.StructType, msgspec.inspect.type_info(cls))
    required = [f.name for f in info.fields if f.required]
    hints = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for name in required:
        hint = hints[name]
        origin = typing.get_origin(hint)
        if hint in samples:
            made[name] = samples[hint]
        elif origin in (list, dict):
            made[name] = origin()
        elif isinstance(hint, type) and issubclass(hint, Policy):
            made[name] = Policy("x")
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            made[name] = _least(hint)
        else:
            made[name] = None
    return cls(**made)


def test_unknown_fields_are_tolerated() -> None:
    line = b'{"v":1,"type":"note","t_ns":3,"level":"info","text":"x","colour":"blue"}\n'
    assert p.decode_event(line).text == "x"


def test_an_unknown_type_is_told_apart() -> None:
    with pytest.raises(p.UnknownTypeError, match="telepathy"):
        p.decode_event(b'{"v":1,"type":"telepathy","t_ns":3}')
    with pytest.raises(p.UnknownTypeError):
        p.decode_command(b'{"v":1,"type":"note","level":"info","text":"an event is no command"}')


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_version_is_a_sentence(version: int) -> None:
    line = json.dumps({"v": version, "type": "note", "level": "info", "text": "x"}).encode()
    with pytest.raises(p.ProtocolError, match=f"protocol version {version}") as caught:
        p.decode_event(line)
    assert caught.value.hint is not None
    with pytest.raises(p.ProtocolError, match="protocol version"):
        p.decode_event(json.dumps({"v": version, "type": "new_thing"}).encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"null",
        b"hello from a C++ library",
        b"\xff\xfe",
        b'{"v":1,"type":"note","level":3,"text":"x"}',
        b'{"v":1,"type":"note"}',
    ],
)
def test_garbage_is_a_protocol_error_and_nothing_else(line: bytes) -> None:
    with pytest.raises(p.ProtocolError):
        p.decode_event(line)


@given(st.binary(max_size=80))
def test_no_bytes_can_do_worse(line: bytes) -> None:
    for read in (p.decode_event, p.decode_command):
        with contextlib.suppress(p.ProtocolError, p.UnknownTypeError):
            read(line)


def test_a_torn_line_is_an_error_of_that_line() -> None:
    line = p.encode(p.Note(level="info", text="a long sentence"))
    for cut in range(len(line) - 2):
        with pytest.raises((p.ProtocolError, p.UnknownTypeError)):
            p.decode_event(line[:cut])


def test_policies_travel_whole() -> None:
    policy = Policy(
        "x", prefill=StagePolicy("int8", "int8"), decode=StagePolicy("int4", group_size=64), storage="dual"
    )
    back = p.decode_command(p.encode(p.SetArm(arm="A", policy=policy)))
    assert back.policy == policy and back.policy.digest == policy.digest
