"""The [kv] section: what goes together, what it is called, and what it stores."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.kv import (
    KV_CONVERT,
    KV_DTYPES,
    KV_GROUP_SIZES,
    KV_KEYS,
    KvGeometry,
    KvPolicy,
    misfit,
    natural_convert,
    sliding_words,
)
from pdq_tui.core.policy import Policy, StagePolicy, parse_policy, policy_to_toml
from pdq_tui.errors import USAGE, UsageError

ALL = [KvPolicy(*one) for one in itertools.product(KV_DTYPES, KV_DTYPES, KV_CONVERT, KV_KEYS, KV_GROUP_SIZES)]
LEGAL = [kv for kv in ALL if misfit(kv) is None]


def read(kv: str) -> KvPolicy:
    return parse_policy(f'schema = 1\nname = "t"\n[kv]\n{kv}\n', "t.toml").kv


@pytest.mark.parametrize(
    ("text", "kv"),
    [
        ("", KvPolicy()),
        ('decode = "int8"', KvPolicy("bf16", "int8", "handoff")),
        ('prefill = "fp8"\ndecode = "fp8"', KvPolicy("fp8", "fp8", "write")),
        ('decode = "int8"\nconvert = "write"', KvPolicy("bf16", "int8", "write")),
        ('prefill = "int8"', KvPolicy("int8", "bf16", "handoff")),
        ('decode = "int4"\nkeys = "channel"', KvPolicy("bf16", "int4", "handoff", "channel")),
        ('decode = "int4"\ngroup_size = 32', KvPolicy("bf16", "int4", "handoff", "token", 32)),
    ],
)
def test_what_is_left_out_follows_from_the_rest(text: str, kv: KvPolicy) -> None:
    assert read(text) == kv


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('convert = "write"', 4, ["kv.convert", "nothing is converted", 'convert = "never"']),
        ('convert = "handoff"', 4, ["kv.convert", "nothing is converted"]),
        (
            'decode = "int8"\nconvert = "never"',
            5,
            ["kv.convert", "has to be converted", 'convert = "handoff"'],
        ),
        ('prefill = "int8"\ndecode = "int8"\nconvert = "never"', 6, ["has to be converted", '"write"']),
        ('prefill = "int8"\ndecode = "int8"\nconvert = "handoff"', 6, ["nothing to convert", '"write"']),
        ('prefill = "int8"\nconvert = "write"', 5, ["kv.convert", "one write makes one format"]),
        ('prefill = "fp8"\ndecode = "int8"\nconvert = "write"', 6, ["one write makes one format"]),
        ('keys = "channel"', 4, ["kv.keys", "bf16 has no scales"]),
        ('decode = "fp8"\nkeys = "channel"', 5, ["kv.keys", "fp8 keeps relative precision"]),
        ('prefill = "int8"\ndecode = "int8"\nkeys = "channel"', 6, ["kv.keys", "needs a hand-off"]),
        ('decode = "int8"\nconvert = "write"\nkeys = "channel"', 6, ["kv.keys", "needs a hand-off"]),
        ('decode = "int8"\ngroup_size = 32', 5, ["kv.group_size", "int8 has no groups"]),
        ('decode = "int4"\ngroup_size = 48', 5, ["kv.group_size", "0, 16, 32, 64, 128"]),
        ('decode = "int4"\ngroup_size = true', 5, ["kv.group_size"]),
        ('decode = "int4"\ngroup_size = "32"', 5, ["kv.group_size"]),
        ('decode = "nf4"', 4, ["kv.decode", "bf16, fp8, int8, int4"]),
        ('keys = "head"', 4, ["kv.keys", "token, channel"]),
        ('dtype = "int8"', 4, ["kv.dtype", "unknown key"]),
    ],
)
def test_what_does_not_go_together_is_a_sentence(text: str, line: int, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    said = str(caught.value)
    assert said.startswith(f"t.toml:{line}: "), said
    assert all(word in said for word in words), said
    assert caught.value.exit_code == USAGE


def test_every_combination_is_legal_or_says_what_to_write_instead() -> None:
    assert len(LEGAL) < len(ALL)
    for kv in ALL:
        bad = misfit(kv)
        if bad is not None:
            assert bad.key in ("convert", "keys", "group_size") and bad.message and bad.hint
    for prefill, decode in itertools.product(KV_DTYPES, KV_DTYPES):
        assert misfit(KvPolicy(prefill, decode, natural_convert(prefill, decode))) is None


@given(st.sampled_from(LEGAL))
def test_a_written_cache_reads_back_equal(kv: KvPolicy) -> None:
    policy = Policy("made-here", kv=kv)
    back = parse_policy(policy_to_toml(policy))
    assert back == policy and back.digest == policy.digest


def test_unlike_caches_have_unlike_names_that_are_legal_names_of_policies() -> None:
    labels = {kv.label for kv in LEGAL}
    assert len(labels) == len(LEGAL)
    base = Policy("x", StagePolicy("int8"), StagePolicy("int8"))
    names = {base.with_kv(kv).name for kv in LEGAL}
    assert len(names) == len(LEGAL)
    for kv in LEGAL:
        changed = base.with_kv(kv)
        assert changed.name.endswith("*")
        assert parse_policy(policy_to_toml(changed)).digest == changed.digest
    assert base.with_kv(KvPolicy()).name == "int8*"
    assert base.with_kv(KvPolicy("bf16", "int8", "handoff")).name == "int8-kv-bf16-int8*"


def test_another_cache_is_another_policy_and_a_stage_keeps_it() -> None:
    base = Policy("x")
    other = base.with_kv(KvPolicy("int8", "int8", "write"))
    assert base.digest != other.digest
    staged = other.with_stage("decode", StagePolicy("int4", group_size=64))
    assert staged.kv == other.kv and staged.name == "bf16-prefill-int4-g64-decode-kv-int8*"


def test_bytes_of_a_token_by_hand() -> None:
    """Two layers, 3 heads of 64: data, a 2-byte scale a row, for int4 a 2-byte minimum as well."""
    g = KvGeometry(kv_heads=3, head_dim=64, dtype_bytes=2, windows=(None, None))
    rows = 2 * 2 * 3
    assert g.bytes_per_token(KvPolicy(), "decode") == rows * 128
    for dtype, row in (("fp8", 66), ("int8", 66), ("int4", 36)):
        assert g.bytes_per_token(KvPolicy("bf16", dtype, "handoff"), "decode") == rows * row
        assert g.bytes_per_token(KvPolicy("bf16", dtype, "handoff"), "prefill") == rows * 128
    grouped = KvPolicy("bf16", "int4", "handoff", group_size=16)
    assert g.bytes_per_token(grouped, "decode") == rows * (32 + 4 * 4)
    channel = KvPolicy("bf16", "int8", "handoff", "channel")
    assert g.bytes_per_token(channel, "decode") == rows * 66
    assert g.sequence_bytes(channel, "decode", 10) == 10 * rows * 66 + 2 * 3 * 64 * 8
    assert g.sequence_bytes(channel, "prefill", 10) == 10 * rows * 128


def test_a_sliding_layer_takes_no_more_than_its_window() -> None:
    g = KvGeometry(kv_heads=1, head_dim=8, dtype_bytes=2, windows=(4, None, 4))
    assert [g.sequence_bytes(KvPolicy(), "decode", n) for n in (1, 3, 4, 5, 10)] == [
        32 * held for held in (3, 9, 12, 13, 18)
    ]
    assert sliding_words(g.sliding_layers, g.layers, 4) == "2 of 3 layers keep their last 4 positions only"
    assert sliding_words(0, 3, None) == ""


def test_heads_that_a_format_does_not_fit_are_told() -> None:
    int4 = KvPolicy("bf16", "int4", "handoff", group_size=64)
    assert KvGeometry(1, 96, 2, (None,)).misfit(int4) == "groups of 64 do not divide this model's heads of 96"
    odd = KvGeometry(1, 7, 2, (None,)).misfit(KvPolicy("int4", "int4", "write"))
    assert odd is not None and "two numbers a byte" in odd
    assert KvGeometry(1, 7, 2, (None,)).misfit(KvPolicy("int8", "int8", "write")) is None
