"""The project's own CPU kernels: built by the compiler that is here, against float64 over what is really stored."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdq_tui.core.formats import Format
from pdq_tui.core.kernels import Capability, load_kernels
from pdq_tui.core.policy import Policy
from pdq_tui.engine import native
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.census import take_census
from pdq_tui.engine.device import open_device
from pdq_tui.engine.formats.linears import quantize_rows
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack
from pdq_tui.engine.formats.packed import Packed, Spec
from pdq_tui.engine.formats.rows import nibbles_by_rows
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.kernels import capability
from pdq_tui.engine.plan import Planner

CPU = torch.device("cpu")
#: One rounding of the result to bf16 is 2^-9 at most; whole numbers of 16 bits add nothing that shows.
ROUNDED = 2.5e-3


@pytest.fixture(scope="session", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not native.possible() and native.loaded() is None:
        pytest.skip("no AVX2 or no C++ compiler here")
    # One build for all workers of a run: each looks into the same folder, named by what decides the library.
    folder = Path(os.environ.get("PDQ_TEST_NATIVE", tmp_path_factory.getbasetemp().parent / "native"))
    reason = native.ensure(folder, lambda: None)
    assert reason is None, reason
    found = native.loaded()
    assert found is not None
    return found


def packed(fmt: Format, layout: str, master: torch.Tensor) -> Packed:
    N, K = master.shape
    return pack(Spec(fmt, layout, N, K, K, master.dtype), master, CPU, lambda: False)


def columns_of_rows(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``nibbles_by_rows``: bytes [rows, k / 2] → uint8 [rows, k]."""
    rows, half = packed.shape
    pairs = (
        packed.view(torch.uint8).view(rows, half * 2 // native.BLOCK, native.BLOCK // 4, 2).to(torch.int32)
    )
    words = pairs[..., 0] | pairs[..., 1] << 8
    planes = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], dim=2)
    return planes.to(torch.uint8).view(rows, half * 2)


def stored(p: Packed) -> torch.Tensor:
    """float64 [N, K] of what the bytes say."""
    if p.spec.fmt.dense:
        return p.weight.double()
    assert p.scales is not None
    if p.spec.fmt.weights == "int8":
        return p.weight.double() * p.scales.double()[:, None]
    q = columns_of_rows(p.weight).double().view(p.spec.N, -1, p.spec.fmt.group_size)
    scale, zero = p.scales.double().unbind(2)
    return ((q - 8) * scale[:, :, None] + zero[:, :, None]).view(p.spec.N, p.spec.K)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 23, 64)
SHAPES = ((48, 64), (33, 192), (130, 576), (17, 1536))


@pytest.mark.parametrize(("rows", "shape"), itertools.product(ROWS, SHAPES))
def test_every_kernel_multiplies_what_is_stored(rows: int, shape: tuple[int, int]) -> None:
    N, K = shape
    torch.manual_seed(rows * 1000 + K)
    x = torch.randn(rows, K).bfloat16()
    master = torch.randn(N, K).bfloat16()
    q, scale = quantize_rows(x)
    rounded = q.double() * scale.double()
    cases = [
        ("native-int8", Format("int8"), "int8", x.double()),
        ("native-w8a8", Format("int8", "int8"), "int8", rounded),
        *(("native-int4", Format("int4", "model", g), "int4-rows", x.double()) for g in (32, 64) if K % g == 0),
        *((("native-dense", Format(), "dense", x.double()),) if rows <= 8 else ()),
    ]  # fmt: skip
    for op, fmt, layout, acts in cases:
        p = packed(fmt, layout, master)
        got = OPS[op](p, None, Scratch())(x)
        assert got.dtype == x.dtype and got.shape == (rows, N)
        assert error(got, acts @ stored(p).t()) < ROUNDED, (op, fmt.label)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_whole_numbers_are_exact_in_float32(rows: int) -> None:
    """−127…127 times −127…127: no rounding but that of the two scales and the result."""
    x, master = torch.randn(rows, 1536), torch.randn(70, 1536)
    p = packed(Format("int8", "int8"), "int8", master)
    q, scale = quantize_rows(x)
    assert p.scales is not None
    wanted = (q.double() @ p.weight.double().t()) * scale.double() * p.scales.double()
    assert error(OPS["native-w8a8"](p, None, Scratch())(x), wanted) < 3e-7


def test_Q03_a_huge_activation_leaves_other_blocks_and_rows_alone() -> None:
    torch.manual_seed(1)
    x = torch.randn(12, 256).bfloat16()
    x[3, 5] = 3e4
    p = packed(Format("int8"), "int8", torch.randn(32, 256).bfloat16())
    layer = OPS["native-int8"](p, None, Scratch())
    wanted = x.double() @ stored(p).t()
    for few in (x, x[3:4]):
        got, reference = layer(few), few.double() @ stored(p).t()
        small = torch.ones(256, dtype=torch.bool)
        small[0:64] = False  # its own block: kept to 2^-16 of the largest there
        others = few.double()[:, small] @ stored(p).t()[small]
        assert float((got.double() - reference).abs().max()) < 2**-8 * float(reference.abs().max())
        assert others.abs().max() > 0
    assert error(layer(x)[:3], wanted[:3]) < ROUNDED


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("op", ["native-int8", "native-w8a8", "native-int4"])
def test_N01_what_is_not_finite_shows_in_its_row_and_only_there(op: str, bad: float, rows: int) -> None:
    fmt, layout = {
        "native-int8": (Format("int8"), "int8"),
        "native-w8a8": (Format("int8", "int8"), "int8"),
        "native-int4": (Format("int4", "model", 64), "int4-rows"),
    }[op]
    x = torch.randn(rows, 128).bfloat16()
    x[0, 7] = bad
    out = OPS[op](packed(fmt, layout, torch.randn(40, 128).bfloat16()), None, Scratch())(x)
    assert not torch.isfinite(out[0]).any()
    assert torch.isfinite(out[1:]).all()


@pytest.mark.parametrize("without", ["avx512f", "avx512vbmi"])
def test_code_for_lesser_machines_multiplies_the_same(without: str, tmp_path: Path) -> None:
    """A machine with AVX-512 builds other code: what a machine without it, or without its byte permutations, runs is built and
    tried here as well."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this machine builds the narrow ones anyway")
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {native.compiler()} "$@" -mno-{without}\n')
    wrapper.chmod(0o755)
    own = "multiplies_what_is_stored or exact_in_float32 or leaves_other or N01 or zeros_give"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", own, __file__]
    done = subprocess.run(
        command, env={**os.environ, "CXX": str(wrapper)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert done.stdout.count(".") > len(ROWS) * len(SHAPES), done.stdout[-2000:]


def test_rows_of_zeros_give_zeros() -> None:
    for op, fmt, layout in (
        ("native-int8", Format("int8"), "int8"),
        ("native-w8a8", Format("int8", "int8"), "int8"),
        ("native-int4", Format("int4", "model", 32), "int4-rows"),
    ):
        layer = OPS[op](packed(fmt, layout, torch.randn(40, 128).bfloat16()), None, Scratch())
        assert layer(torch.zeros(3, 128).bfloat16()).abs().max() == 0, op
        assert layer(torch.zeros(30, 128).bfloat16()).abs().max() == 0, op


@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_nibbles_come_back_in_their_columns(rows: int, blocks: int, random: object) -> None:
    q = torch.randint(0, 16, (rows, 64 * blocks), dtype=torch.uint8)
    p = nibbles_by_rows(q)
    assert p.nbytes == q.numel() // 2
    assert torch.equal(columns_of_rows(p), q)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o, x: o.int8(x, torch.zeros(4, 100, dtype=torch.int8), torch.ones(4).bfloat16(), False), "multiple of 64"),
        (lambda o, x: o.int8(x, torch.zeros(4, 128, dtype=torch.int8), torch.ones(3).bfloat16(), False), "scale"),
        (lambda o, x: o.int4(x, torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2, 2).bfloat16(), 48), "group"),
        (lambda o, x: o.dense(x, torch.zeros(4, 64).bfloat16()), "one dtype"),
        (lambda o, x: o.dense(x.half(), torch.zeros(4, 128).half()), "bf16 or float32"),
        (lambda o, x: o.dense(x.t(), torch.zeros(4, 2).bfloat16()), "contiguous"),
    ],
)  # fmt: skip
def test_what_a_kernel_cannot_read_is_refused(call: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.pdq_native, torch.zeros(2, 128).bfloat16())  # type: ignore[operator]


def test_the_tables_choose_them_only_where_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = load_kernels("cpu")
    fmt = Format("int4", "model", 64)

    def best(*features: str) -> str:
        choice = table.choose(fmt, 576, 576, 1, "bf16", Capability("cpu", features))
        assert choice.candidate is not None
        return choice.candidate.name

    assert best("avx2", "native") == "native-int4"
    assert best("avx2") == "int4pack"
    assert best("avx2", "avx512", "bf16", "vnni", "native") == "native-int4"
    assert best("avx2", "avx512", "bf16", "vnni", "amx", "native") == "int4pack", "tiles multiply many rows"
    device = open_device("cpu")
    assert "native" in capability(device).features
    monkeypatch.setattr(native._State, "path", None)
    assert "native" not in capability(device).features
    assert "native" in capability(device, buildable=True).features


# -- building ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Nothing is loaded yet, and the compiler is this shell script."""
    monkeypatch.setattr(native._State, "path", None)
    monkeypatch.setattr(native._State, "reason", None)

    def make(script: str) -> None:
        fake = tmp_path / "g++"
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        monkeypatch.setenv("CXX", str(fake))

    return make


def test_a_compiler_that_fails_is_told_and_nothing_stays(
    fake_compiler: Callable[[str], None], tmp_path: Path
) -> None:
    fake_compiler("echo 'ops.cpp:1: error: no such instruction' >&2; exit 1")
    reason = native.ensure(tmp_path / "built", lambda: None)
    assert reason == "the compiler failed: ops.cpp:1: error: no such instruction"
    assert native.loaded() is None and not native.possible()
    assert [p for p in (tmp_path / "built").rglob("*") if p.is_file()] == []


def test_a_library_that_cannot_be_loaded_is_told(
    fake_compiler: Callable[[str], None], tmp_path: Path
) -> None:
    fake_compiler('while [ "$1" != "-o" ]; do shift; done; echo nonsense > "$2"')
    reason = native.ensure(tmp_path / "built", lambda: None)
    assert reason is not None and reason.startswith("it cannot be loaded")
    assert native.loaded() is None


def test_building_can_be_left(fake_compiler: Callable[[str], None], tmp_path: Path) -> None:
    fake_compiler(f"echo $$ > {tmp_path / 'pid'}; exec sleep 100")

    def poll() -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise Cancelled

    with pytest.raises(Cancelled):
        native.ensure(tmp_path / "built", poll)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the compiler outlived the one who left it")
    assert native.why_not() is None, "leaving is no failure: the next load tries again"


def test_every_native_candidate_passes_its_probe_in_a_child(library: Path, tmp_path: Path) -> None:
    from pdq_tui.engine.kernels import Prober

    ours = [c for c in load_kernels("cpu").candidates if c.op.startswith("native")]
    assert {c.op for c in ours} == {op for op in OPS if op.startswith("native")}
    wanted = [(c, "bf16", 576, 1536) for c in ours]
    assert Prober(tmp_path / "probes.json").broken(wanted) == {}
    tried = json.loads((tmp_path / "probes.json").read_text())["results"]
    assert [(name, why) for name, *_, why in tried] == sorted((c.name, None) for c in ours)


def test_a_dense_kernel_that_fails_its_probe_is_passed_over(load_tiny, tiny_llama_bf16) -> None:
    model, _ = load_tiny(tiny_llama_bf16)
    able = Capability("cpu", ("avx2", "native"))
    asked: list[str] = []

    def broken(wanted, *_):
        asked.extend(c.name for c, *_ in wanted)
        return {(c.name, dtype, N, K): "it hangs" for c, dtype, N, K in wanted}

    planner = Planner(take_census(model), torch.bfloat16, load_kernels("cpu"), able, broken)
    placements = planner.placements(Policy("bf16"), "decode", 1, 1)
    assert set(asked) == {"native-dense"}
    assert {(p.candidate.name, p.fallback) for p in placements} == {
        ("linear", "native-dense failed its probe on this device: it hangs")
    }
