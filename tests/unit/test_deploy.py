"""What a policy means for serving engines: the tables are whole, and what they are turned into holds what it says."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import made_evaluation
import msgspec
import pytest
import yaml

from pdq_tui import locations
from pdq_tui.core.catalog import find_policy, policies
from pdq_tui.core.kv import KvGeometry, KvPolicy
from pdq_tui.core.policy import Keep, Policy, StagePolicy
from pdq_tui.core.servers import LABELS, load_servers, parse_server
from pdq_tui.errors import UsageError
from pdq_tui.judge.deploy import Cache, Deployment, cache_of, deployment
from pdq_tui.report.deployment import markdown
from pdq_tui.report.evaluated import evaluated

SERVERS = {s.name: s for s in load_servers()}
STAGED = find_policy("w8a8-prefill-int4-decode")


def at(name: str, policy: Policy, model: str = "/m/Llama", **more: object) -> Deployment:
    return deployment(SERVERS[name], policy, model, tokens=1024, **more)  # type: ignore[arg-type]


# -- the tables ----------------------------------------------------------------------------------------------------------------


def test_every_server_answers_for_every_format_and_cache() -> None:
    assert set(SERVERS) == {"vllm", "sglang", "tensorrt-llm"}
    for server in SERVERS.values():
        known = [*(w.label for w in server.format), *(n.label for n in server.cannot)]
        assert sorted(known) == sorted(LABELS)
        assert server.sources and all(source.startswith("https://") for source in server.sources)


def table(name: str = "vllm") -> str:
    return (locations.shipped("servers_cfg") / f"{name}.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('label = "nf4"', 'label = "nf5"', "'nf4' stands there 0 times"),
        ('[[cannot]]\nlabel = "nested16"', '[[cannot]]\nlabel = "int8"', "'int8' stands there 2 times"),
        ('make = "llm-compressor"', 'make = "llmcompressor"', "no maker 'llmcompressor'"),
        ("--port $port", "--port $prot", "names prot"),
        ("schema = 1", "schema = 2", "2 is not supported"),
        ('checked = "2026-12-03"', 'checked = "lately"', "no date"),
        ("groups = [32, 64, 128]", "groups = [32, 64, 96]", "legal are 32, 64, 128, 256"),
        ('why = "no checkpoint', 'wherefore = "no checkpoint', "unknown field `wherefore`"),
        ('flag = "--kv-cache-dtype $dtype"', "", "either flag or yaml"),
    ],
)
def test_X01_a_table_that_is_wrong_says_where(old: str, new: str, sentence: str) -> None:
    text = table()
    assert old in text
    with pytest.raises(UsageError, match=sentence) as refused:
        parse_server(text.replace(old, new, 1), "vllm.toml")
    assert refused.value.message.startswith("vllm.toml: ")


def test_a_table_belongs_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(table())
    with pytest.raises(UsageError, match="is not the file's"):
        load_servers(tmp_path)
    with pytest.raises(UsageError, match="no table of a server"):
        load_servers(tmp_path / "nothing")


# -- what they become -------------------------------------------------------------------------------------------------------------


def test_a_staged_policy_is_two_pools_and_a_router_and_a_uniform_one_server() -> None:
    d = at("vllm", STAGED)
    assert [p.role for p in d.pools] == ["prefill", "decode"] and d.router and not d.cannot
    assert [p.weights for p in d.pools] == ["./Llama-w8a8", "./Llama-int4-g64"] and len(d.make) == 2
    assert all("NixlConnector" in p.command for p in d.pools)
    assert d.shared_kv and d.code_change and len(d.steps) > len(d.rollback) >= 3
    one = at("vllm", find_policy("int8"))
    assert [p.role for p in one.pools] == ["one"] and one.router is None and len(one.make) == 1
    assert one.shared_kv is None and one.link is None and "nothing crosses" in str(one.link_reason)
    assert len(one.steps) < len(d.steps) and len(one.rollback) < len(d.rollback)
    plain = at("vllm", find_policy("bf16"))
    assert not plain.make and plain.pools[0].command.split()[:3] == ["vllm", "serve", "/m/Llama"]


@pytest.mark.parametrize("server", sorted(SERVERS))
@pytest.mark.parametrize("name", sorted(policies(user_dir=Path("/nonexistent"))))
def test_every_shipped_policy_is_served_or_refused_by_name_everywhere(server: str, name: str) -> None:
    """Whatever comes out is whole: commands are words of a shell, files are Python or YAML, and no placeholder is left."""
    d = at(server, find_policy(name), "/m/it's $HOME; rm")
    assert bool(d.pools) == bool(d.steps) == bool(d.rollback)
    assert d.pools or d.cannot
    for text in (*(p.command for p in d.pools), *d.make, *([d.router] if d.router else [])):
        assert shlex.split(text, comments=True)
    for p in d.pools:
        words = shlex.split(p.command)
        assert p.weights in words and "it's $HOME; rm" in p.weights
    for file in d.files:
        if file.name.endswith(".py"):
            ast.parse(file.text)
        else:
            assert isinstance(yaml.safe_load(file.text), dict)
    left = " ".join(file.text for file in d.files) + " ".join(d.steps) + (d.router or "")
    for place in ("$weights", "$flags", "$config", "$ignore", "$port", "$kv", "$out", "$group"):
        assert place not in left
    assert "```" in markdown([d], "m") or not d.pools


def test_both_pools_share_the_cache_dtype() -> None:
    """The nearest is served: decode's dtype where it can cross, and what was asked for is named as impossible."""
    mixed = msgspec.structs.replace(STAGED, kv=KvPolicy("bf16", "fp8", "handoff"))
    for name, wanted in (("vllm", "fp8_e4m3"), ("sglang", "fp8_e4m3")):
        d = at(name, mixed)
        assert d.kv_dtype == wanted and d.cannot[0].startswith(
            "KV cache bf16/fp8: both pools need one cache dtype"
        )
        assert all(f"--kv-cache-dtype {wanted}" in p.command for p in d.pools)
    int8 = msgspec.structs.replace(STAGED, kv=KvPolicy("int8", "int8", "write"))
    d = at("vllm", int8)
    assert d.kv_dtype == "auto" and "not transferred" in d.cannot[0]
    assert "--kv-cache-dtype" not in d.pools[0].command
    uniform = msgspec.structs.replace(find_policy("int8"), kv=int8.kv)
    assert at("vllm", uniform).kv_dtype == "int8_per_token_head" and not at("vllm", uniform).cannot
    assert "there is no int8" in at("sglang", uniform).cannot[0]
    by_channel = msgspec.structs.replace(STAGED, kv=KvPolicy("bf16", "int8", "handoff", "channel"))
    assert any("by channel" in why for why in at("vllm", by_channel).cannot)


def test_tensorrt_sets_the_cache_in_its_files() -> None:
    fp8 = msgspec.structs.replace(find_policy("w8a8-prefill-bf16-decode"), kv=KvPolicy("fp8", "fp8", "write"))
    fp8 = msgspec.structs.replace(fp8, prefill=StagePolicy("fp8", "fp8"))
    d = at("tensorrt-llm", fp8)
    assert d.pools and not d.cannot
    by = {f.name: yaml.safe_load(f.text) for f in d.files}
    assert by["context.yml"]["kv_cache_config"] == by["generation.yml"]["kv_cache_config"] == {"dtype": "fp8"}
    assert by["context.yml"]["cache_transceiver_config"]["max_tokens_in_buffer"] == 1024
    assert "--quant fp8" in d.make[0]
    assert not at("tensorrt-llm", STAGED).pools and "int8 arithmetic" in at("tensorrt-llm", STAGED).cannot[0]


def test_groups_exceptions_and_sources_are_carried_or_named() -> None:
    wide = msgspec.structs.replace(STAGED, decode=StagePolicy("int4", group_size=256))
    assert at("vllm", wide).cannot == [
        "int4-g256 in decode: groups of 256: its Marlin kernels take groups of 32, 64 and 128"
    ]
    assert at("sglang", wide).pools[1].flags == ["--torchao-config int4wo-256"]
    kept = msgspec.structs.replace(STAGED, keep=(Keep(("*.layers.0.*",)),))
    d = at("vllm", kept)
    assert all("layers\\\\.0" in f.text and "'lm_head'" in f.text for f in d.files) and not d.cannot
    assert any("converts every layer but the head" in why for why in at("sglang", kept).cannot)
    other = msgspec.structs.replace(STAGED, keep=(Keep(("*.0.*",), "int8"),))
    assert any("by hand" in line for line in at("vllm", other).differs)
    sourced = msgspec.structs.replace(STAGED, decode=StagePolicy(source="org/It-AWQ"), storage="dual")
    assert at("vllm", sourced).pools[1].weights == "org/It-AWQ" and not at("tensorrt-llm", sourced).pools
    blocks = msgspec.structs.replace(STAGED, decode=StagePolicy("fp8", group_size=128))
    assert "a scale a channel there" in at("vllm", blocks).cannot[0]
    awq = msgspec.structs.replace(sourced, decode=StagePolicy("int4", group_size=128, source="org/It-AWQ"))
    told = at("vllm", awq)
    assert told.pools[1].weights == "org/It-AWQ" and len(told.make) == 1
    assert (
        "org/It-AWQ is served as it is: quantized already, as int4-g128, or it has to be made so first"
        in told.needs
    )
    one_stage = Policy("x", keep=(Keep(("*.0.*",), "int8", stages=("decode",)),))
    assert len(at("vllm", one_stage).pools) == 2


def test_one_checkpoint_serves_two_pools_that_read_the_same() -> None:
    same = Policy(
        "x", StagePolicy("int8"), StagePolicy("int8"), keep=(Keep(("lm_head",), "int8", stages=("decode",)),)
    )
    assert len(at("vllm", same).make) == 1
    two = Policy("x", StagePolicy("int8"), StagePolicy("int8"), keep=(Keep(("*.0.*",), stages=("decode",)),))
    d = at("vllm", two)
    assert len({p.weights for p in d.pools}) == 2 and len({f.name for f in d.files}) == 2


# -- the link ------------------------------------------------------------------------------------------------------------------------


def test_what_crosses_the_link_is_the_census_over_its_rate() -> None:
    """32 layers, 8 KV heads of 128, bf16: 128 KiB a token; 1,024 tokens at 25 GB/s take 5.37 ms."""
    cache = cache_of(KvGeometry(8, 128, 2, (None,) * 32))
    link = at("vllm", STAGED, cache=cache, gbps=25.0).link
    assert link is not None and link.bytes == 1024 * 131072
    assert link.ms == pytest.approx(1024 * 131072 / 25e9 * 1e3) == pytest.approx(5.369, abs=1e-3)
    fp8 = msgspec.structs.replace(STAGED, kv=KvPolicy("fp8", "fp8", "write"))
    half = at("vllm", fp8, cache=cache, batch=4).link
    assert half is not None and half.bytes == 4 * 1024 * 65536 and half.ms is None
    sliding = cache_of(KvGeometry(8, 128, 2, (None, 256)))
    assert sliding.bytes(1024, 16) == 2 * 2 * 8 * 128 * (1024 + 256)
    assert Cache(bytes_per_token=10, dtype_bytes=4).bytes(3, 8) == round(10 * 3 / 4)
    assert at("vllm", STAGED).link is None


# -- in a report -----------------------------------------------------------------------------------------------------------------------


def test_the_report_counts_steps_in_and_back_from_the_tables() -> None:
    found = made_evaluation.found()
    report = evaluated(made_evaluation.SPEC, found)
    tables = {t.title: t for t in report.page().tables}
    cost = next(t for title, t in tables.items() if title.startswith("5. what does it cost? Counted"))
    row = next(r for r in cost.rows if r[0] == made_evaluation.STAGED)
    expected = at("vllm", made_evaluation.SPEC.staged[0])
    assert f"vLLM {len(expected.steps)} / {len(expected.rollback)}" in row[-1]
    assert "TensorRT-LLM –" in row[-1]
    assert next(r for r in cost.rows if r[0] == "int8")[-1] == "n/a"
    elsewhere = tables["5. what would it take elsewhere? The policy on serving engines"]
    assert {r[0] for r in elsewhere.rows} == {made_evaluation.STAGED, found["confirmation"]["reference"]}
    assert json.loads(msgspec.json.encode(report.body()["deploy"]))[0]["policy"] == made_evaluation.STAGED


def test_the_report_says_how_fast_a_link_has_to_be_for_the_gain_to_be_left() -> None:
    """55 ms are gained at 11 tokens; 512 tokens of 1,000 B take that at 512,000 B / 55 ms."""
    found = made_evaluation.found()
    found["conditions"]["kv"] = {"bf16": {"bytes_per_token": 1000, "dtype": "bf16"}}
    found["conditions"]["model"]["dtype"] = "bfloat16"
    found["confirmation"]["reference"] = "int8"
    table = next(
        t for t in evaluated(made_evaluation.SPEC, found).page().tables if "on serving engines" in t.title
    )
    rate = 512_000 / 1e9 / 0.055
    told = next(line for line in table.footer if "saves 55.0 ms" in line)
    assert f"a link of less than {rate:.2g} GB/s takes that alone" in told
    found["confirmation"]["reference"] = "int4"
    table = next(
        t for t in evaluated(made_evaluation.SPEC, found).page().tables if "on serving engines" in t.title
    )
    assert any("saves no time here that can be told (+1.1 ms" in line for line in table.footer)
    found["confirmation"]["reference"] = "int8"
    for cell in found["confirmation"]["map"]:
        cell["ci95"] = [-200.0, 90.0]
    table = next(
        t for t in evaluated(made_evaluation.SPEC, found).page().tables if "on serving engines" in t.title
    )
    assert any("that can be told (-55.0 ms" in line for line in table.footer)


def test_the_report_has_a_way_back_with_the_evaluations_own_limits() -> None:
    found = made_evaluation.found()
    report = evaluated(made_evaluation.SPEC, found)
    tables = {t.title: t for t in report.page().tables}
    ramp = tables["5. and back? Share of traffic, and how long it stays there"]
    assert [row[0] for row in ramp.rows] == ["1%", "5%", "25%", "100%"]
    assert [row[2] for row in ramp.rows] == ["30 min", "60 min", "4 h", "24 h"]
    assert {row[1] for row in ramp.rows} == {"≥ 300"}  # (1 - 1 %)^300 is 4.9 %
    limits = tables[
        f"5. and back? Baseline {found['confirmation']['reference']}: what sends traffic back to it"
    ]
    told = {row[0]: row[1] for row in limits.rows}
    assert told["KLD of answers re-scored by the baseline"] == "mean above 0.011 nats"
    assert told["logits that are not finite"] == "any"
    arm = next(a for a in found["confirmation"]["arms"] if a["label"] == found["confirmation"]["reference"])
    assert f"{arm['decode']['tpot_ms']['median']:.1f} ms here" in told["TPOT, median of each hold"]
    assert report.body()["rollback"]["baseline"] == found["confirmation"]["reference"]
    early = evaluated(made_evaluation.SPEC, {k: found[k] for k in ("conditions", "bottleneck")})
    assert early.body()["rollback"] is None and not [t for t in early.page().tables if "and back?" in t.title]


def test_I01_hostile_names_do_not_leave_their_place() -> None:
    text = markdown([at("vllm", msgspec.structs.replace(STAGED, name="a|b`<i>"))], "/m/```\n# x")
    assert "\n# x" not in text and "<i>" not in text.replace("\\<", "")


def test_an_evaluation_takes_the_links_rate_that_it_was_given() -> None:
    found = made_evaluation.found()
    found["conditions"]["kv"] = {"bf16": {"bytes_per_token": 1000, "dtype": "bf16"}}
    found["conditions"]["model"]["dtype"] = "bfloat16"
    for gbps, said in ((None, "--link GB/s names yours"), (2.0, "0.256 ms at 2 GB/s")):
        spec = msgspec.structs.replace(made_evaluation.SPEC, link_gbps=gbps)
        shown = evaluated(spec, found).page()
        table = next(t for t in shown.tables if "on serving engines" in t.title)
        assert any(said in cell for row in table.rows for cell in row) or any(
            said in line for line in table.footer
        )
