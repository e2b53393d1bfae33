"""From groups of layers to policies, and from a policy to its file."""

from __future__ import annotations

from typing import Any

import pytest

from pdq_tui.core.policy import parse_policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.errors import UnfitError
from pdq_tui.judge.search import EFFORTS, SearchSpec, groups_of, policy_of
from pdq_tui.report import searched

LINEARS = {
    **{f"model.layers.{n}.{part}": 100 for n in range(12) for part in ("self_attn.q_proj", "mlp.down_proj")},
    "lm_head": 500,
}


def test_layers_are_cut_in_groups_that_share_nothing_and_leave_out_the_head() -> None:
    groups = groups_of(LINEARS, 5)
    assert [g["layers"] for g in groups] == [[0, 1], [2, 4], [5, 6], [7, 9], [10, 11]]
    patterns = [x for g in groups for x in g["patterns"]]
    assert len(set(patterns)) == 12 and sum(g["parameters"] for g in groups) == 2400
    assert [g["layers"] for g in groups_of(LINEARS, 99)] == [[n, n] for n in range(12)]
    with pytest.raises(UnfitError):
        groups_of({"encoder.dense": 1}, 2)


@pytest.mark.parametrize(
    "pairs",
    [
        [("int8", "int8")] * 4,
        [("w8a8", "int4-g64")] * 4,
        [("w8a8", "int4-g64"), ("bf16", "bf16"), ("w8a8", "int8"), ("int8", "int4-g64")],
        [("bf16", "int8"), ("int8", "bf16"), ("bf16", "bf16"), ("w8a8", "int4-g32")],
    ],
)
def test_a_policy_gives_each_group_its_pair_also_when_read_back(pairs: list[tuple[str, str]]) -> None:
    from pdq_tui.core.policy import policy_to_toml

    groups = groups_of(LINEARS, 4)
    made = policy_of("x", pairs, groups)
    again = parse_policy(policy_to_toml(made))
    assert again.digest == made.digest
    for pair, group in zip(pairs, groups, strict=True):
        for number in range(group["layers"][0], group["layers"][1] + 1):
            module = f"model.layers.{number}.self_attn.q_proj"
            assert tuple(again.format_for(module, s).label for s in ("prefill", "decode")) == pair
    assert again.format_for("lm_head", "decode").label == "bf16"
    assert bool(made.keep) == (len(set(pairs)) > 1)


def test_a_layers_pattern_names_no_other_layer() -> None:
    made = policy_of("x", [("int4-g64", "bf16"), ("bf16", "bf16")], groups_of(LINEARS, 2))
    assert made.format_for("model.layers.1.mlp.down_proj", "prefill").label == "int4-g64"
    assert made.format_for("model.layers.11.mlp.down_proj", "prefill").label == "bf16"


def test_the_written_file_says_what_it_was_found_by_and_is_that_policy() -> None:
    spec = SearchSpec(
        model="/models/small", load=Load(model="small"), workload=Workload(), effort=EFFORTS["quick"],
        formats=("int8",), max_kld=0.01, max_bytes=200 << 20, min_effect=0.01, name="mine",
    )  # fmt: skip
    policy = policy_of("mine", [("int8", "bf16"), ("bf16", "int8")], groups_of(LINEARS, 2))
    import msgspec

    found: dict[str, Any] = {
        "conditions": {"device": {"name": "a CPU"}, "tool": {"version": "9"}},
        "confirmation": {
            "winner": msgspec.to_builtins(policy), "bytes": 100 << 20,
            "tried": [{"path": {"kld": {"value": 0.0042}}}],
            "ratios": [
                {"metric": "e2e_ms", "reference": "bf16", "ratio": 0.8, "ci95": [0.75, 0.85], "judgement": "better", "reason": None},
                {"metric": "tpot_ms", "reference": "bf16", "ratio": 0.8, "ci95": None, "judgement": "unsure", "reason": "x"},
            ],
        },
    }  # fmt: skip
    text = searched.toml(spec, found)
    assert parse_policy(text).digest == policy.digest
    comments = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    assert (
        "--max-kld 0.01 --max-memory 200MiB" in comments
        and "better against bf16 (-20.0%, -25.0% to -15.0%)" in comments
    )
    assert "KLD 0.0042 on held-out text" in comments and "100.0 MiB" in comments
    with pytest.raises(ValueError, match="nothing was chosen"):
        searched.toml(spec, {"conditions": found["conditions"]})
