"""Policy files: what is wrong is named with file, line, key and the legal values; what is right comes back equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.formats import GROUP_SIZES, Format
from pdq_tui.core.policy import (
    STAGES,
    Keep,
    Policy,
    StagePolicy,
    load_policy,
    natural_storage,
    parse_policy,
    policy_to_toml,
)
from pdq_tui.errors import USAGE, UsageError

GOOD = """\
schema = 1
name = "trial"
summary = "both"
storage = "dual"
on_fallback = "warn"
on_misfit = "pad"

[prefill]
weights = "int8"
activations = "int8"

[decode]
weights = "int4"
group_size = 128

[kv]
prefill = "bf16"
decode = "bf16"
convert = "never"

[serving]
mixed = "split"

[[keep]]
modules = ["*.layers.0.*"]
weights = "bf16"

[[keep]]
modules = ["*.down_proj"]
stages = ["decode"]
weights = "int8"
"""


def test_a_whole_policy_is_read() -> None:
    p = parse_policy(GOOD, "trial.toml")
    assert p.prefill.format == Format("int8", "int8") and p.decode.format == Format("int4", "model", 128)
    assert (p.storage, p.on_misfit, p.kv.convert, p.serving.mixed) == ("dual", "pad", "never", "split")
    assert p.keep == (
        Keep(("*.layers.0.*",), "bf16"),
        Keep(("*.down_proj",), "int8", stages=("decode",)),
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("schema = 1", "schema = 2", 1, ["schema", "reads 1"]),
        ("schema = 1", "schema = true", 1, ["schema", "reads 1"]),
        ('name = "trial"', 'name = "../x"', 2, ["name", "not a legal name"]),
        ('name = "trial"', 'name = ".x"', 2, ["name"]),
        ('name = "trial"', 'name = ""', 2, ["name"]),
        ('name = "trial"', "name = 3", 2, ["name", "must be a string"]),
        ('summary = "both"', "summary = 1", 3, ["summary", "must be a string"]),
        ('storage = "dual"', 'storage = "shared"', 4, ["storage", "'dual'"]),
        ('storage = "dual"', 'storage = "both"', 4, ["storage", "uniform, shared, nested, transient, dual"]),
        ('storage = "dual"', 'storage = "nested"', 4, ["storage", 'write storage = "dual"']),
        (
            'storage = "dual"',
            'storage = "transient"',
            4,
            ["storage", "the same 4-bit weights in both stages"],
        ),
        ('storage = "dual"', 'stroage = "dual"', 4, ["stroage", "unknown key", "did you mean 'storage'"]),
        ('on_fallback = "warn"', 'on_fallback = "ignore"', 5, ["on_fallback", "warn, fail"]),
        ('on_misfit = "pad"', 'on_misfit = "crop"', 6, ["on_misfit", "smaller-group, pad, leave"]),
        ('on_misfit = "pad"', "on_misfit = true", 6, ["on_misfit", "True"]),
        ('weights = "int8"\nactivations', 'weights = "int7"\nactivations', 9, ["prefill.weights", "int8"]),
        ('weights = "int8"\nactivations', "weights = 8\nactivations", 9, ["prefill.weights", "8"]),
        ('activations = "int8"', 'activations = "int4"', 10, ["prefill.activations", "model, fp8, int8"]),
        ('activations = "int8"', 'activations = "fp8"', 10, ["prefill.activations", "need fp8 weights"]),
        ('activations = "int8"', 'activation = "int8"', 10, ["prefill.activation", "'activations'"]),
        ('activations = "int8"', "group_size = 64", 10, ["prefill.group_size", "no groups"]),
        ('activations = "int8"', "source = 3", 10, ["prefill.source", "3 is not a legal value", "hub id"]),
        ('activations = "int8"', 'source = ""', 10, ["prefill.source", "not a legal value"]),
        ('weights = "int4"', 'weights = "nf3"', 13, ["decode.weights", "int4, nf4, fp4, llm-int8"]),
        ("group_size = 128", "group_size = 48", 14, ["decode.group_size", "32, 64, 128, 256"]),
        ("group_size = 128", "group_size = -1", 14, ["decode.group_size"]),
        ("group_size = 128", 'group_size = "64"', 14, ["decode.group_size", "whole number"]),
        ("group_size = 128", "group_size = true", 14, ["decode.group_size", "whole number"]),
        ("group_size = 128", 'activations = "fp8"', 14, ["decode.activations", "fp8 weights"]),
        ('decode = "bf16"', 'decode = "int3"', 18, ["kv.decode", "bf16"]),
        ('convert = "never"', 'convert = "sometimes"', 19, ["kv.convert", "write, handoff, never"]),
        ('mixed = "split"', 'mixed = "both"', 22, ["serving.mixed", "split, prefill, decode"]),
        ('mixed = "split"', 'mode = "split"', 22, ["serving.mode", "unknown key"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, line: int, words: list[str]) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        parse_policy(GOOD.replace(old, new, 1), "trial.toml")
    text = str(caught.value)
    assert text.startswith(f"trial.toml:{line}: "), text
    for word in words:
        assert word in text
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('\n[[keep]]\nweights = "int8"\n', ["modules", "list of module name patterns"]),
        ('\n[[keep]]\nmodules = []\nweights = "int8"\n', ["modules"]),
        ('\n[[keep]]\nmodules = [1]\nweights = "int8"\n', ["modules"]),
        ('\n[[keep]]\nmodules = ["a"]\nstages = ["both"]\n', ["stages", "prefill, decode"]),
        ('\n[[keep]]\nmodules = ["a"]\nstages = []\n', ["stages"]),
        ('\n[[keep]]\nmodules = ["a"]\nweights = "int99"\n', ["weights", "int99"]),
        ('\n[[keep]]\nmodules = ["a"]\nlayers = [0]\n', ["layers", "unknown key"]),
    ],
)
def test_a_wrong_exception_is_named(change: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(GOOD + change, "trial.toml")
    assert "keep[2]." in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = ", "not valid TOML"),
        ("", "schema"),
        ("schema = 1\n", "name"),
        ('schema = 1\nname = "x"\nprefill = "int8"\n', "[prefill]"),
        ('schema = 1\nname = "x"\nkeep = "a"\n', "[[keep]]"),
        ('schema = 1\nname = "x"\nschema = 1\n', "not valid TOML"),
    ],
)
def test_a_wrong_file_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(text, "trial.toml")
    assert str(caught.value).startswith("trial.toml") and words in str(caught.value)


# -- round trip --------------------------------------------------------------------------------------------------------

FORMATS = st.one_of(
    st.sampled_from([Format("bf16"), Format("fp16"), Format("fp32"), Format("int8"), Format("int8", "int8")]),
    st.sampled_from(GROUP_SIZES).map(lambda g: Format("int4", "model", g)),
)
KEEPS = st.builds(
    lambda modules, f, stages: Keep(tuple(modules), f.weights, f.activations, f.group_size, stages),
    st.lists(
        st.sampled_from(["*.layers.0.*", "lm_head", "*.mlp.*", 'odd"quote', "a b"]), min_size=1, max_size=2
    ),
    FORMATS,
    st.sampled_from([STAGES, ("prefill",), ("decode",)]),
)


def stage(f: Format) -> StagePolicy:
    return StagePolicy(f.weights, f.activations, f.group_size)


@given(FORMATS, FORMATS, st.lists(KEEPS, max_size=3), st.text(max_size=30), st.sampled_from(["warn", "fail"]))
def test_a_written_policy_reads_back_equal(
    prefill: Format, decode: Format, keep: list[Keep], summary: str, on_fallback: str
) -> None:
    policy = Policy(
        "made-here",
        stage(prefill),
        stage(decode),
        summary=summary,
        storage=natural_storage(prefill, decode),
        on_fallback=on_fallback,
        keep=tuple(keep),
    )
    back = parse_policy(policy_to_toml(policy))
    assert back == policy and back.digest == policy.digest


def test_the_digest_is_of_what_it_does_not_of_its_name() -> None:
    a = parse_policy(GOOD)
    b = parse_policy(GOOD.replace('"trial"', '"other"').replace('"both"', '"said differently"'))
    c = parse_policy(GOOD.replace("128", "64"))
    assert a.digest == b.digest != c.digest


def test_first_matching_exception_wins_and_the_head_is_kept() -> None:
    p = parse_policy(GOOD)
    assert p.format_for("model.layers.0.mlp.down_proj", "decode") == Format()
    assert p.format_for("model.layers.1.mlp.down_proj", "decode") == Format("int8")
    assert p.format_for("model.layers.1.mlp.down_proj", "prefill") == Format("int8", "int8")
    assert p.format_for("model.layers.1.mlp.up_proj", "decode") == Format("int4", "model", 128)
    assert p.format_for("lm_head", "decode") == Format()
    named = parse_policy(GOOD + '\n[[keep]]\nmodules = ["lm_head"]\nweights = "int8"\n')
    assert named.format_for("lm_head", "decode") == Format("int8")
    # whatever a family calls it, and where the engine has looked
    assert p.format_for("embed_out", "decode") == p.format_for("output", "decode", head=True) == Format()
    assert (
        named.format_for("embed_out", "decode")
        == named.format_for("output", "decode", True)
        == Format("int8")
    )
    assert p.unmatched(["embed_out"]) and not [w for w in named.unmatched(["embed_out"]) if "lm_head" in w]


def test_storage_is_what_the_two_formats_need() -> None:
    w8a8, int8, int4 = Format("int8", "int8"), Format("int8"), Format("int4", "model", 64)
    assert natural_storage(int8, int8) == "uniform"
    assert natural_storage(w8a8, int8) == "shared"
    assert natural_storage(w8a8, int4) == "dual"
    assert natural_storage(Format("int4", "model", 64), Format("int4", "model", 128)) == "dual"


def test_changing_one_stage_names_the_result_after_what_it_does() -> None:
    base = parse_policy(
        'schema = 1\nname = "int8"\n[prefill]\nweights = "int8"\n[decode]\nweights = "int8"\n'
    )
    changed = base.with_stage("decode", StagePolicy("int4", group_size=64))
    assert (changed.name, changed.storage) == ("int8-prefill-int4-g64-decode*", "dual")
    assert parse_policy(policy_to_toml(changed)).digest == changed.digest
    assert changed.with_stage("decode", base.decode).name == "int8*"


def test_hostile_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text("a=" + "[" * 100_000)
    with pytest.raises(UsageError, match="nested too deeply"):
        load_policy(deep)
    endless = tmp_path / "endless.toml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="no regular file"):
        load_policy(endless)
    large = tmp_path / "large.toml"
    large.write_text("#" * 2_000_000)
    with pytest.raises(UsageError, match="2000000 bytes"):
        load_policy(large)


SOURCES = """schema = 1
name = "two-checkpoints"
[prefill]
weights = "int8"
source = "org/name-W8A8"
[decode]
weights = "int8"
"""


def test_stages_with_sources_of_their_own_are_dual_and_another_policy() -> None:
    policy = parse_policy(SOURCES)
    assert (policy.prefill.source, policy.decode.source) == ("org/name-W8A8", "")
    assert policy.storage == "dual" and policy.staged
    assert parse_policy(policy_to_toml(policy)) == policy
    plain = parse_policy(SOURCES.replace('source = "org/name-W8A8"\n', ""))
    assert plain.storage == "uniform" and plain.digest != policy.digest
    other = parse_policy(SOURCES.replace("name-W8A8", "name-other"))
    assert other.digest != policy.digest
    both = parse_policy(SOURCES + 'source = "org/name-W8A8"\n')
    assert both.storage == "uniform"
    with pytest.raises(
        UsageError, match=r"storage: is 'uniform', but stages with different sources share no byte"
    ):
        parse_policy(SOURCES.replace("[prefill]", 'storage = "uniform"\n[prefill]'))


def test_changing_a_stage_keeps_its_source() -> None:
    policy = parse_policy(SOURCES).with_stage("prefill", StagePolicy("int4", group_size=64))
    assert policy.prefill == StagePolicy("int4", "model", 64, "org/name-W8A8")
    assert policy.storage == "dual"


def test_a_policy_without_sources_has_the_digest_that_it_always_had() -> None:
    assert find_policy("int8").digest == "89f22afd18da"
