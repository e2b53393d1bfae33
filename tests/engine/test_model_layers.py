"""Decoder layers as compiled programs: the same logits as the modules they stand for, or the modules and the reason.

Needs a C++ compiler, as the fake NVML library does.
"""

import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from conftest import llama_config, save_tiny
from torch import nn
from transformers import AutoModelForCausalLM

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import Capability, load_kernels
from pdq_tui.core.policy import parse_policy
from pdq_tui.engine import agreement, kernels, layers, recorded
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.kv import KvCache
from pdq_tui.engine.staged import StagedArm, StagedModel
from tests.engine.families import save_family
from tests.engine.test_model_staged import Cpu, ids_of, run


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs of all tests here in one folder, so that each kind is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def make(load_tiny):
    def build(path: Path, dtype: torch.dtype | None = None, how: str = "auto") -> StagedModel:
        model, masters = load_tiny(path, dtype)
        table = load_kernels("cpu")
        compiled = tuple(entry for entry in table.layers if entry.runner == "inductor")
        kernels = msgspec.structs.replace(table, layers=compiled)
        return StagedModel(model, masters, Cpu(), budget_bytes=None, kernels=kernels, layers=how)

    return build


def applied(staged: StagedModel, name: str, rows: tuple[int, ...] = (1, 16)) -> StagedArm:
    return staged.apply(find_policy(name), rows=rows)


@pytest.mark.parametrize("name", ["bf16", "int8", "w8a8", "int4"])
def test_compiled_decode_agrees_with_eager(name, make, tiny_llama) -> None:
    ids = ids_of(1, 9)
    _, wanted = run(applied(make(tiny_llama, how="eager"), name), ids, 6)
    arm = applied(make(tiny_llama), name)
    assert (arm.coverage["decode"].runner, arm.coverage["decode"].runner_reason) == ("inductor", None)
    assert arm.coverage["prefill"].runner == "eager"
    _, got = run(arm, ids, 6)
    # W8A8 rounds activations: one that lies between two steps may fall to the other side
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=0.05 if name == "w8a8" else 2e-3)


def test_compiled_decode_of_a_padded_batch(make, tiny_llama) -> None:
    ids, pad = ids_of(3, 9), torch.tensor([0, 4, 2])
    _, wanted = run(applied(make(tiny_llama, how="eager"), "int4", rows=(3, 27)), ids, 6, pad)
    arm = applied(make(tiny_llama), "int4", rows=(3, 27))
    assert arm.coverage["decode"].runner == "inductor"
    _, got = run(arm, ids, 6, pad)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("name", "programs"), [("gpt2", 2), ("gemma2", 2), ("phi3", 1), ("qwen3_moe", 1)])
def test_other_families_are_compiled_too(name, programs, make, tmp_path) -> None:
    """Layers that differ (here GPT-2's in their scale, Gemma's in their sight) get a program each; experts are chosen
    at run time inside of one."""
    path = save_family(name, tmp_path)
    ids = ids_of(2, 13)
    pad = torch.tensor([0, 3])
    _, wanted = run(applied(make(path, how="eager"), "int8", rows=(2, 26)), ids, 6, pad)
    staged = make(path)
    arm = applied(staged, "int8", rows=(2, 26))
    cover = arm.coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("inductor", None)
    assert len(staged.compiler.programs) == programs
    gc.collect()  # what a program stands for is still needed
    _, got = run(arm, ids, 6, pad)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=2e-3)


def test_bf16_programs_pass_their_own_comparison(make, tiny_llama_bf16) -> None:
    assert applied(make(tiny_llama_bf16), "int4").coverage["decode"].runner == "inductor"


def test_one_program_a_kind_of_layer_and_none_anew_for_a_known_kind(make, tiny_llama) -> None:
    staged = make(tiny_llama)
    arms = [applied(staged, "int4")]
    assert len(staged.compiler.programs) == 1
    arms.append(applied(staged, "bf16-prefill-int4-decode"))
    assert len(staged.compiler.programs) == 1
    arms.append(applied(staged, "int8"))
    assert len(staged.compiler.programs) == 2


def test_layers_of_two_kinds_get_a_program_each(make, tiny_llama) -> None:
    policy = parse_policy(
        """
        schema = 1
        name = "mixed"
        storage = "uniform"
        [prefill]
        weights = "int8"
        [decode]
        weights = "int8"
        [[keep]]
        modules = ["*layers.0.mlp*"]
        """,
        "mixed.toml",
    )
    ids = ids_of(1, 9)
    _, wanted = run(make(tiny_llama, how="eager").apply(policy, rows=(1, 16)), ids, 6)
    staged = make(tiny_llama)
    arm = staged.apply(policy, rows=(1, 16))
    assert arm.coverage["decode"].runner == "inductor" and len(staged.compiler.programs) == 2
    _, got = run(arm, ids, 6)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=2e-3)


def test_a_program_that_computes_something_else_is_not_used(make, tiny_llama, monkeypatch) -> None:
    real = layers._compile
    monkeypatch.setattr(layers, "_compile", lambda call: lambda *given: real(call)(*given) + 0.1)
    ids = ids_of(1, 9)
    arm = applied(make(tiny_llama), "int8")
    cover = arm.coverage["decode"]
    assert cover.runner == "eager" and "layer 0 compiled differs from its modules" in str(cover.runner_reason)
    _, got = run(arm, ids, 6)
    _, wanted = run(applied(make(tiny_llama, how="eager"), "int8"), ids, 6)
    assert torch.equal(got, wanted)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama in bf16, 12 layers that each add about a hundredth to a large hidden state, as deep layers do."""
    config = llama_config(num_hidden_layers=12)
    path = save_tiny(config, tmp_path_factory.mktemp("deep"), dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.1)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["bf16", "int8", "w8a8", "int4"])
def test_programs_of_a_deep_bf16_model_pass(name, make, deep) -> None:
    cover = applied(make(deep), name).coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("inductor", None)


@pytest.mark.parametrize("name", ["bf16", "int4"])
@pytest.mark.parametrize("part", ["all that is added", "one channel of it in eight"])
def test_a_tenth_too_much_in_one_deep_bf16_layer_is_refused(part, name, make, deep, monkeypatch) -> None:
    real = layers._compile

    def wrong(call):
        program, slot = real(call), len(call.inputs)

        def run_(*given):
            out = program(*given)
            if int(given[slot]) == 9:
                state = given[0].float()
                more = out.float() - state
                more *= 1.1 if part.startswith("all") else 1.0
                if not part.startswith("all"):
                    more[..., ::8] *= 1.3
                out = (state + more).to(out.dtype)
            return out

        return run_

    monkeypatch.setattr(layers, "_compile", wrong)
    staged = make(deep)
    cover = applied(staged, name).coverage["decode"]
    assert cover.runner == "eager" and "layer 9 compiled differs" in str(cover.runner_reason)
    _, got = run(applied(staged, name), ids_of(1, 9), 4)
    monkeypatch.setattr(layers, "_compile", real)
    _, wanted = run(applied(make(deep, how="eager"), name), ids_of(1, 9), 4)
    assert torch.equal(got, wanted)


def test_layers_in_the_wrong_place_show_in_the_logits(make, tiny_llama, monkeypatch) -> None:
    """Each is right by itself."""
    real = layers._replace

    def swapped(model, places, compiled):
        if isinstance(compiled[0], layers.CompiledLayer):
            compiled = [compiled[1], compiled[0], *compiled[2:]]
        real(model, places, compiled)

    monkeypatch.setattr(layers, "_replace", swapped)
    staged = make(tiny_llama)
    arm = applied(staged, "int8")
    cover = arm.coverage["decode"]
    assert cover.runner == "eager" and "logits of compiled steps differ" in str(cover.runner_reason)
    model = arm.view("decode", 1, 1).model
    assert not any(isinstance(m, layers.CompiledLayer) for m in model.modules())
    _, got = run(arm, ids_of(1, 9), 4)
    _, wanted = run(applied(make(tiny_llama, how="eager"), "int8"), ids_of(1, 9), 4)
    assert torch.equal(got, wanted)


def test_weights_of_one_layer_baked_into_the_program_are_noticed(make, tiny_llama, monkeypatch) -> None:
    """What the comparison is for: a program that serves the first layer only."""
    real = layers._compile

    def baked(call):
        program = real(call)
        inputs = len(call.inputs) + 1
        return lambda *given: program(*given[:inputs], *call.tensors)

    monkeypatch.setattr(layers, "_compile", baked)
    cover = applied(make(tiny_llama), "int8").coverage["decode"]
    assert cover.runner == "eager" and "layer 1 compiled differs" in str(cover.runner_reason)


def test_a_compiler_that_fails_leaves_the_modules_in_place(make, tiny_llama, monkeypatch) -> None:
    def fails(call):
        raise RuntimeError("C++ compile error\nthousands of lines")

    monkeypatch.setattr(layers, "_compile", fails)
    cover = applied(make(tiny_llama), "int8").coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("eager", "the compiler failed: C++ compile error")


def test_without_a_compiler_decode_is_eager_and_says_what_is_missing(make, tiny_llama, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert not kernels.has_cxx()
    cover = applied(make(tiny_llama), "int8").coverage["decode"]
    assert cover.runner == "eager" and "needs a C++ compiler" in str(cover.runner_reason)


def test_asked_for_eager_nothing_is_compiled(make, tiny_llama) -> None:
    staged = make(tiny_llama, how="eager")
    cover = applied(staged, "int8").coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("eager", "asked for") and not staged.compiler.programs
    # and a table without the entry has nothing to name
    table = load_kernels("cuda")
    assert table.runners("decode", 1, Capability("cuda")).runners == ()


def test_a_cancelled_compilation_returns_at_once_is_finished_and_kept(make, tiny_llama, monkeypatch) -> None:
    real, begun, ended, go_on = layers._compile, [], [], threading.Event()

    def slow(call):
        begun.append(True)
        go_on.wait(240)
        program = real(call)
        ended.append(True)
        return program

    monkeypatch.setattr(layers, "_compile", slow)
    staged = make(tiny_llama)
    with pytest.raises(Cancelled):
        staged.apply(find_policy("int8"), rows=(1, 16), cancelled=lambda: bool(begun))
    assert not ended, "it did not wait for the compiler"
    go_on.set()
    arm = applied(staged, "int8")
    assert len(begun) == len(ended) == 1 and arm.coverage["decode"].runner == "inductor"
    _, logits = run(arm, ids_of(1, 9), 3)
    assert bool(torch.isfinite(logits).all())


def test_nothing_measured_runs_beside_a_compilation(make, tiny_llama, monkeypatch) -> None:
    """A request waits for what a cancel left behind."""
    real, begun, ended = layers._compile, [], []

    def slow(call):
        begun.append(True)
        program = real(call)
        time.sleep(0.5)
        ended.append(True)
        return program

    staged = make(tiny_llama)
    eager_arm = applied(staged, "int4")
    monkeypatch.setattr(layers, "_compile", slow)
    with pytest.raises(Cancelled):
        staged.apply(find_policy("int8"), rows=(1, 16), cancelled=lambda: bool(begun))
    assert not ended
    eager_arm.start(1, 16, None)
    assert ended == [True]


def test_compiling_leaves_no_process_and_no_weights_behind(make, tiny_llama) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    staged = make(tiny_llama)
    arm = applied(staged, "int8")
    assert arm.coverage["decode"].runner == "inductor"
    run(arm, ids_of(1, 9), 3)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    weight = weakref.ref(next(iter(staged.store._entries.values())).weight)
    arm.drop()
    del arm
    staged.release([])
    gc.collect()
    assert weight() is None


def test_a_program_needs_the_cache_of_the_request_in_flight(make, tiny_llama) -> None:
    staged = make(tiny_llama)
    cache = KvCache(staged.kv, 1, 8, torch.device("cpu"))
    cache.activate()
    from pdq_tui.engine.kv import active_cache

    assert active_cache() is cache
    del cache
    gc.collect()
    with pytest.raises(RuntimeError, match="without an active KV cache"):
        active_cache()


@pytest.mark.parametrize(
    ("apart", "explained", "size"),
    [(5.0, 0.0, 0.0), (math.nan, 0.0, 0.0), (5.0, math.inf, 1.0), (math.nan, 0.0, 1.0), (1.0, 0.0, 1.0)],
)
def test_where_nothing_can_be_compared_nothing_is_accepted(apart, explained, size) -> None:
    with pytest.raises(recorded.UncompiledError, match="differs"):
        agreement._judge("it differs", apart, explained, size, 2.0, 0.01)


def test_what_adds_nothing_may_add_nothing() -> None:
    agreement._judge("it differs", 0.0, 0.0, 0.0, 2.0, 0.01)


def test_layers_without_decoder_layers_are_refused() -> None:
    compiler = layers.LayerCompiler(Path("unused"))
    with pytest.raises(recorded.UncompiledError, match="no decoder layers"):
        trial = layers.Trial("decode", lambda: None, None, 0, 0)  # type: ignore[arg-type, return-value]
        compiler.attach(nn.Linear(2, 2), trial, ["inductor"], lambda _: None, lambda: False)


def test_a_head_that_widens_its_weights_does_not_keep_the_layers_eager(make, tiny_llama_bf16) -> None:
    """The head is no decoder layer; 16 rows in bf16 without bf16 arithmetic take the widening kernel for it."""
    staged = make(tiny_llama_bf16)
    arm = applied(staged, "int8", rows=(16, 16 * 9))
    view = arm.view("decode", 16, 16)
    inside = [m for m in view.model.modules() if getattr(m, "uses_scratch", False)]
    if "bf16" not in staged.capability.features:
        assert len(inside) == 1
    assert arm.coverage["decode"].runner == "inductor", arm.coverage["decode"].runner_reason


def test_a_program_that_does_not_run_leaves_the_modules_in_place(make, tiny_llama, monkeypatch) -> None:
    def broken(*given):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(layers, "_compile", lambda call: broken)
    cover = applied(make(tiny_llama), "int8").coverage["decode"]
    assert (cover.runner, cover.runner_reason) == ("eager", "layer 0 compiled does not run: no such kernel")
