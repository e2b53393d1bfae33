"""Kernel tables: strict validation, limits, the order by rows; the roofline's arithmetic; probing."""

import pytest

from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import OPS, Candidate, Capability, Use, load_kernels, parse_kernels
from pdq_tui.core.roofline import Op, StageCost, linear, merged
from pdq_tui.engine import kernels
from pdq_tui.engine.formats.ops import OPS as BUILT
from pdq_tui.engine.probe import probe_in_child
from pdq_tui.errors import UsageError

AVX2 = Capability("cpu", ("avx2",))
AVX512 = Capability("cpu", ("avx2", "avx512", "bf16", "vnni"))
SM90 = Capability("cuda", (), (9, 0))
HEAD = 'schema = 1\ndevice = "cpu"\n'
GOOD = '[[kernel]]\nname = "x"\nop = "linear"\nweights = "dense"\nlayout = "dense"\n'


def test_shipped_tables_load_and_every_op_is_implemented() -> None:
    for device in ("cpu", "cuda"):
        table = load_kernels(device)
        assert all(c.summary for c in table.candidates)
    assert set(BUILT) == set(OPS)


@pytest.mark.parametrize(
    ("text", "key", "legal"),
    [
        (HEAD + GOOD + "rowss = [1, 2]\n", "rowss", "rows"),
        (HEAD + GOOD + "rows = [4, 2]\n", "rows", "two whole numbers"),
        (HEAD + GOOD + "k_multiple = 0\n", "k_multiple", "from 1"),
        (HEAD + GOOD + 'dtypes = ["bf17"]\n', "dtypes", "bf16, fp16, fp32"),
        (HEAD + GOOD + "group_sizes = [48]\n", "group_sizes", "32, 64, 128, 256"),
        (HEAD + GOOD + 'probe = "yes"\n', "probe", ""),
        (HEAD + GOOD.replace('"linear"', '"lineal"'), "op", "linear"),
        (HEAD + GOOD.replace('layout = "dense"', 'layout = "int8"'), "layout", "dense"),
        (HEAD + GOOD + GOOD, "twice", ""),
        (HEAD + GOOD.replace('name = "x"\n', ""), "name", "required"),
        (HEAD.replace("cpu", "gpu") + GOOD, "device", "cpu"),
        ("schema = 2\n" + GOOD, "schema", "1"),
        (HEAD + "kernels = 1\n", "kernels", "kernel"),
    ],
)
def test_a_wrong_table_is_named_with_file_key_and_legal_values(text: str, key: str, legal: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_kernels(text, "cpu", "my.toml")
    told = str(raised.value)
    assert "my.toml" in told and key in told and legal in told


def test_a_users_entry_replaces_the_shipped_one(tmp_path) -> None:
    (tmp_path / "cpu.toml").write_text(
        HEAD + GOOD.replace('"x"', '"linear"') + "rank = 77\n", encoding="utf-8"
    )
    table = load_kernels("cpu", tmp_path)
    assert [c.rank for c in table.candidates if c.name == "linear"] == [77]
    assert len(table.origins) == 2


@pytest.mark.parametrize(
    ("fmt", "device", "rows", "op"),
    [
        (Format(), AVX2, 1, "linear"),
        (Format(), AVX2, 512, "linear-float32"),
        (Format(), AVX512, 512, "linear"),
        (Format("int8"), AVX2, 1, "int8pack"),
        (Format("int8"), AVX2, 512, "int8-dequantize-float32"),
        (Format("int8"), AVX512, 512, "int8-dequantize"),
        (Format("int8", "int8"), AVX2, 1, "w8a8-int8pack"),
        (Format("int8", "int8"), AVX2, 512, "w8a8-float32"),
        (Format("int8", "int8"), AVX512, 512, "w8a8-int_mm"),
        (Format("int4", "model", 64), AVX2, 1, "int4pack-cpu"),
        (Format("int4", "model", 64), AVX2, 512, "int4-dequantize-float32"),
        (Format("int4", "model", 64), AVX512, 512, "int4-dequantize"),
    ],
)
def test_the_best_kernel_by_stage_and_device(fmt: Format, device: Capability, rows: int, op: str) -> None:
    choice = load_kernels("cpu").choose(fmt, 1536, 576, rows, "bf16", device)
    assert choice.candidate is not None and choice.candidate.op == op


def test_limits_exclude_and_say_why() -> None:
    cpu, cuda = load_kernels("cpu"), load_kernels("cuda")
    choice = cpu.choose(Format("int8"), 64, 72, 1, "bf16", AVX2)
    assert choice.candidate is not None and choice.candidate.op == "int8-dequantize-float32"
    assert choice.passed_over == ("int8pack", "int8pack needs in_features divisible by 16, not 72")
    assert cpu.layouts(Use(Format("int4", "model", 64)), 72, 128, "bf16", AVX2) == ["int4-plain"]
    assert cpu.layouts(Use(Format("int4", "model", 64)), 80, 128, "bf16", AVX2) == ["int4-cpu", "int4-plain"]
    broken = cpu.choose(Format("int8"), 64, 64, 1, "bf16", AVX2, broken={"int8pack": "it sat down"})
    assert broken.passed_over is not None
    assert broken.passed_over[1] == "int8pack failed its probe on this device: it sat down"
    old = cuda.choose(Format("int8", "int8"), 64, 64, 1, "bf16", Capability("cuda", (), (7, 5)))
    assert old.candidate is not None and old.candidate.op == "w8a8-float32"
    assert any("8.0 or later, this device has 7.5" in reason for reason in old.reasons)
    assert cuda.choose(Format("int4", "model", 64), 64, 128, 1, "bf16", SM90).candidate.op == "int4-tinygemm"


def test_roofline_by_hand() -> None:
    ops = merged(
        [linear("a", 10, 20, 3, 400, "bf16"), linear("a", 10, 20, 3, 400, "bf16"), Op("b", 8000, 0.0, "fp32")]
    )
    cost = StageCost(ops)
    assert cost.bytes == 8800 and cost.flops == {"bf16": 2400.0}
    # 400 bytes at 1 GB/s are 0.4 µs, 1,200 FLOPs at 1 GFLOP/s are 1.2 µs: the larger counts, operator by operator
    assert cost.bound_ms(1.0, {"bf16": 1e-3}) == pytest.approx((2 * 1.2e-6 + 8e-6) * 1e3)
    assert cost.bound_ms(None, {}) is None and cost.bound_ms(1.0, {}) is None


def test_a_kernel_that_ends_the_process_is_found_in_a_child(monkeypatch, tmp_path) -> None:
    calls: list[int] = []

    def child(jobs: list[dict[str, object]], poll: object) -> list[str | None]:
        calls.append(len(jobs))
        return [] if jobs[0]["op"] == "int8pack" else [None, "off by 3"][: len(jobs)]

    monkeypatch.setattr(kernels, "probe_in_child", child)
    bad = Candidate("int8pack", "int8pack", "int8", "int8", probe=True)
    good = Candidate("w8a8-int8pack", "w8a8-int8pack", "int8", "int8", activations="int8", probe=True)
    file = tmp_path / "probes.json"
    wanted = [
        (bad, "bf16", 64, 64),
        (good, "bf16", 64, 64),
        (good, "bf16", 130, 1024),
        (good, "bf16", 128, 1024),
    ]
    result = kernels.Prober(file).broken(wanted)
    assert result == {
        ("int8pack", "bf16", 64, 64): "it ended the process",
        ("w8a8-int8pack", "bf16", 130, 1024): "off by 3",
    }
    assert calls == [3, 2], "one for each kind of shape"
    assert kernels.Prober(file).broken(wanted) == result
    assert calls == [3, 2], "remembered on disk"


def test_the_real_child_runs_the_real_kernel() -> None:
    job = {"op": "int8pack", "layout": "int8", "weights": "int8", "activations": "model", "group_size": 0,
           "dtype": "bf16", "N": 128, "K": 128, "device": "cpu", "native": ""}  # fmt: skip
    told = probe_in_child([job, job | {"layout": "int9"}, job | {"op": "nothing"}], lambda: None)
    assert told == [None, None, "'nothing'"]
