"""A model whose decoder layers lie over several devices, on two that are pretended (``pretended.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretended
import pytest
import torch
from conftest import llama_config, save_tiny
from pretended import FarDevice, Pretended
from transformers import AutoModelForCausalLM, MistralConfig

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy, parse_policy
from pdq_tui.core.protocol import Load, Request
from pdq_tui.engine import dropin, kernels, loader, staged
from pdq_tui.engine.device import CpuDevice, Device
from pdq_tui.engine.devices import DeviceGroup, pick_gpus
from pdq_tui.engine.layout import lay_out, layout_of
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Arm, Hooks, Limits, run_request
from pdq_tui.engine.seams import Seams
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.engine.weights import HEADROOM_BYTES
from pdq_tui.errors import UnfitError

pytestmark = pytest.mark.usefixtures("shared_home")

GB = 1 << 30
VOCAB = 128
PADS = (3, 0)
KV_INT8 = parse_policy(
    'schema = 1\nname = "kv"\nsummary = "x"\nstorage = "uniform"\n[prefill]\nweights = "bf16"\n[decode]\nweights = "bf16"\n'
    '[kv]\nprefill = "bf16"\ndecode = "int8"\nconvert = "handoff"\n',
    "kv.toml",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of five layers: one device gets more than the other."""
    five: dict[str, Any] = {"num_hidden_layers": 5}
    sliding = MistralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=256, sliding_window=6, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return {
        "tied": save_tiny(llama_config(**five), tmp_path_factory.mktemp("tied")),
        "untied": save_tiny(
            llama_config(tie_word_embeddings=False, **five), tmp_path_factory.mktemp("untied")
        ),
        "sliding": save_tiny(sliding, tmp_path_factory.mktemp("sliding")),
    }


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """The mode, entered; what else asks for CUDA here asks the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    prober = kernels.Prober
    monkeypatch.setattr(staged, "Prober", lambda path, _: prober(path, "cpu"))
    # A mode is of one thread.
    monkeypatch.setattr(loader, "interruptible", lambda work, cancelled: work())
    with torch.inference_mode(), Pretended() as mode:
        yield mode


def two(free: tuple[int | None, int | None] = (None, None)) -> DeviceGroup:
    return DeviceGroup([FarDevice(0, free[0]), FarDevice(1, free[1])])


def load(path: Path, device: Device, **options: Any) -> StagedModel:
    command = Load(model=str(path), dtype="fp32")
    model = loader.load_model(command, device, lambda *_: None, lambda: False)
    return StagedModel(
        model.skeleton,
        model.masters,
        device,
        budget_bytes=None,
        kernels=load_kernels("cpu"),
        layout=model.layout,
        **options,
    )


def ready(model: StagedModel, policy: Policy, request: tuple[int, int] | None = (2, 20)) -> StagedArm:
    return model.apply(policy, rows=[2, 22], request=request)


def answered(arm: StagedArm, *, padded: bool = True) -> torch.Tensor:
    """Logits [6, 2, V], on the CPU, of a prompt of 11 and five steps on the plain path."""
    home = arm.owner.device.torch_device
    ids = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(0)).to(home)
    pad = torch.tensor(PADS).to(home) if padded else None
    generation = arm.start(2, 20, pad)
    logits = [generation.prefill(ids)]
    generation.handoff()
    for _ in range(5):
        logits.append(generation.step(logits[-1].argmax(-1)))
    assert {each.device for each in logits} == {home}, "logits come home"
    return torch.stack([each.to("cpu") for each in logits])


@pytest.mark.parametrize(
    ("name", "word", "rows"),
    [
        ("tied", "bf16", 0),
        ("tied", "w8a8-prefill-int4-decode", 0),
        ("untied", "int8", 0),
        ("untied", "w8a8-prefill-int8-decode", 5),
        ("untied", "transient-int4", 0),
        ("sliding", "bf16", 5),
        ("sliding", "w8a8-prefill-int4-decode", 0),
        ("sliding", "kv", 0),
    ],
)
def test_two_devices_compute_what_one_does(
    name: str, word: str, rows: int, models: dict[str, Path], pretend: Pretended
) -> None:
    policy = KV_INT8 if word == "kv" else find_policy(word)
    wanted = answered(ready(load(models[name], CpuDevice(1), prefill_rows=rows), policy), padded=word != "kv")
    model = load(models[name], two(), prefill_rows=rows)
    arm = ready(model, policy)
    pretended.moves.clear()
    torch.testing.assert_close(answered(arm, padded=word != "kv"), wanted, rtol=1e-4, atol=1e-4)
    assert {arm.coverage[stage].runner for stage in ("prefill", "decode")} == {"eager"}
    # Keys and values lie with their layer, and so do packed weights.
    cache = model.caches.cache(2, 20, policy.kv)
    assert [str(cache.filled(i).store.parts[0].device) for i in range(5)] == list(
        map(str, model.layout.layers)
    )
    assert {str(device) for device in model.layout.layers} == {"cuda:0", "cuda:1"}
    # A pass crosses once with each of what layers are given: hidden state, positions, cosine, sine, mask.
    view = arm.view("decode", 2, 2)
    pretended.moves.clear()
    ids, at = (torch.full((2, 1), n).to(model.device.torch_device) for n in (7, 0))
    cache.reset()
    cache.advance(1)
    pretended.moves.clear()
    model.caller.logits(view.model, ids, None, at, cache)
    crossed = pretended.moves["cuda:0", "cuda:1"]
    assert 3 <= crossed <= 4, "not once a layer"


def test_the_pretended_devices_refuse_as_cuda_does(pretend: Pretended) -> None:
    a, b = (torch.ones(2, 2, device=f"cuda:{i}") for i in (0, 1))
    with pytest.raises(RuntimeError, match="same device"):
        a @ b
    with pytest.raises(RuntimeError, match="same device"):
        a + torch.ones(2, 2)
    assert str((a @ b.to("cuda:0")).device) == "cuda:0" and (a + torch.tensor(1.0)).tolist() == [[2, 2]] * 2


def test_a_layout_goes_by_what_is_free_and_keeps_a_tied_head_with_its_embedding(
    models: dict[str, Path],
) -> None:
    cuda = [torch.device("cuda", i) for i in range(3)]
    tied, untied = (AutoModelForCausalLM.from_pretrained(models[n]) for n in ("tied", "untied"))
    even = lay_out(untied, cuda[:2], [None, None])
    assert [d.index for d in even.layers] in ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1])
    assert even.of("model.embed_tokens.weight") == even.home == cuda[0]
    assert even.of("model.norm.weight") == even.of("lm_head") == cuda[1]
    assert even.of("model.layers.4.mlp.up_proj.weight") == cuda[1] and even.of("model.rotary_emb") == cuda[0]
    assert lay_out(tied, cuda[:2], [None, None]).of("lm_head.weight") == cuda[0]
    little = lay_out(untied, cuda[:2], [GB, 9 * GB])
    assert [d.index for d in little.layers].count(0) == 1, "the fuller device gets fewer, and at least one"
    assert len(set(lay_out(untied, cuda, [1, GB, 1]).layers)) == 3
    assert "layers on cuda:0" in even.words() and "on cuda:1" in even.words()
    with pytest.raises(UnfitError, match="has 5 decoder layers, 6 devices"):
        lay_out(untied, [torch.device("cuda", i) for i in range(6)], [None] * 6)


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("word", ["bf16", "w8a8-prefill-int4-decode"])
def test_bytes_by_device_add_up_to_the_census(
    name: str, word: str, models: dict[str, Path], pretend: Pretended
) -> None:
    model = load(models[name], two())
    arm = ready(model, find_policy(word))
    assert list(arm.weights.by_device) == ["cuda:0", "cuda:1"]
    by_device = list(arm.weights.by_device.values())
    assert sum(by_device) == arm.weights.stored_bytes + arm.weights.kept_bytes and min(by_device) > 0
    assert sum(map(model.other_bytes_on, model.layout.devices)) == model.census.other_bytes
    answered(arm)
    assert sum(map(model.caches.nbytes_on, model.layout.devices)) == model.caches.nbytes > 0
    for of in (model.skeleton, arm.view("decode", 2, 2).model):
        for tensor_name, tensor in of.named_parameters():
            assert tensor.device.type == "meta" or tensor.device == model.layout.of(tensor_name), tensor_name


def test_what_does_not_fit_on_one_of_them_is_refused_there(
    models: dict[str, Path], pretend: Pretended
) -> None:
    model = load(models["untied"], two((GB, GB)))
    first, second = model.device.parts  # type: ignore[attr-defined]
    second.free = HEADROOM_BYTES + 1000
    with pytest.raises(UnfitError, match=r"does not fit on cuda:1: .* of KV cache and scratch"):
        ready(model, find_policy("int8"))
    first.free = second.free = GB
    arm = ready(model, find_policy("int8"))
    second.free = HEADROOM_BYTES + 64_000
    room = arm.kv_info()
    on_second = sum(device.index == 1 for device in model.layout.layers)
    assert room.capacity_tokens == 64_000 // (room.bytes_per_token * on_second // 5)


def test_a_request_begins_and_ends_on_the_first_device(models: dict[str, Path], pretend: Pretended) -> None:
    group = two()
    first, second = group.parts
    first.peak, second.peak = 70, 30  # type: ignore[attr-defined]
    arm = ready(load(models["untied"], group), find_policy("bf16"))
    first.log.clear()  # type: ignore[attr-defined]
    second.log.clear()  # type: ignore[attr-defined]
    batch = Batch(number=0, ids=torch.full((1, 8), 9), pad=None, real_tokens=8, padded_tokens=0)
    record = Request(request=1, arm="A", policy="", policy_digest="", kind="loop", prompt=0)
    run_request(group, Arm("A", arm.policy, arm), batch, 12, Limits(4, natural=False), record, Hooks())
    assert record.valid and len(record.itl_ms) == 3 and (record.prefill_ms or 0) > 0
    assert record.prefill_peak_bytes == 100 and record.memory_method == "pretended, added over 2 devices"
    # All marks are the first's; what is waited for is both.
    assert "mark" in first.log and "mark" not in second.log  # type: ignore[attr-defined]
    assert first.log.count("synchronize") == second.log.count("synchronize") > 2  # type: ignore[attr-defined]


def test_one_device_gone_missing_is_said(pretend: Pretended) -> None:
    assert two((None, 5)).free_bytes() is None and two((4, 5)).free_bytes() == 9
    info = two((4, 5)).info()
    assert info.name == "2 × Pretended GPU" and info.memory_bytes == 9 and info.own_memory_bytes == 4
    assert [other.uuid for other in info.others] == ["GPU-1"] and info.several == "layers on 2 devices"


def test_gpus_are_picked_by_index_or_uuid_and_never_guessed() -> None:
    uuids: list[str | None] = ["GPU-aa", "GPU-bb", "GPU-bc"]
    assert pick_gpus("all", uuids) == [0, 1, 2]
    assert pick_gpus("2, GPU-a", uuids) == [2, 0]
    with pytest.raises(UnfitError, match="names GPU 0 twice"):
        pick_gpus("0,GPU-aa", uuids)
    with pytest.raises(UnfitError, match="several GPUs match"):
        pick_gpus("0,GPU-b", uuids)


# -- a model in memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def spread(models: dict[str, Path], pretend: Pretended) -> Callable[[str], Any]:
    def build(name: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(models[name]).eval().requires_grad_(False)
        layout = lay_out(model, [torch.device("cuda", i) for i in (0, 1)], [None, None])
        moved: dict[int, torch.nn.Parameter] = {}
        before = list(model.parameters())  # an id is its own as long as it lives
        for module_name, module in model.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    there = moved.get(id(parameter))
                    if there is None:
                        far = parameter.detach().to(layout.of(f"{module_name}.{leaf}"))
                        there = moved[id(parameter)] = torch.nn.Parameter(far, requires_grad=False)
                    module._parameters[leaf] = there
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = buffer.to(layout.of(f"{module_name}.{leaf}"))
        assert len(moved) == len(before)
        return model

    return build


def test_a_model_in_memory_runs_where_its_layers_lie(
    spread: Callable[[str], Any], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(models["untied"]).eval()
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(3))
    wanted = dropin.staged(whole, "w8a8-prefill-int8-decode", prompt_tokens=9, kernels="torch")
    model = spread("untied")

    def stray(*_: Any, **__: Any) -> Any:
        raise AssertionError("accelerate's hook ran the model's own modules")

    for module in model.modules():  # what accelerate's dispatch leaves behind
        module._hf_hook, module._old_forward, module.forward = object(), module.forward, stray
    monkeypatch.setattr(dropin, "devices_of", lambda layout: two())
    ours = dropin.staged(model, "w8a8-prefill-int8-decode", prompt_tokens=9, kernels="torch")
    assert ours.arm.owner.layout.several
    for stage in ("prefill", "decode"):
        got = ours._views[stage](input_ids=ids.to("cuda:0"), use_cache=False).logits
        want = wanted._views[stage](input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(got.to("cpu"), want, rtol=1e-4, atol=1e-4)


def test_a_model_that_is_half_on_the_cpu_is_refused(spread: Callable[[str], Any]) -> None:
    model = spread("untied")
    assert [d.index for d in layout_of(model).devices] == [0, 1]
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.to("cpu"), requires_grad=False)
    with pytest.raises(UnfitError, match="left on the CPU or the disk"):
        layout_of(model)
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.to("cuda:1"), requires_grad=False)
    with pytest.raises(UnfitError, match=r"model\.layers\.0 lies on cuda:0 and cuda:1"):
        layout_of(model)


class _Failing(torch.nn.Module):
    """Two units; the second one raises."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Identity(), torch.nn.Identity()
        self.two.register_forward_pre_hook(self._fail, prepend=False)

    @staticmethod
    def _fail(*_: Any) -> None:
        raise MemoryError("no room")

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.two(self.one(x), mask)


def test_a_pass_that_raises_lets_go_of_what_it_moved(pretend: Pretended) -> None:
    """Else an out-of-memory would keep the mask's copies on the very device that is full."""
    view = _Failing()
    pretended.moves.clear()
    units = {"one": torch.device("cuda", 0), "two": torch.device("cuda", 1)}
    seams = Seams(view, SimpleNamespace(several=True, units=units))  # type: ignore[arg-type]
    view.two._forward_pre_hooks.move_to_end(next(iter(view.two._forward_pre_hooks)))  # after the mover
    with pytest.raises(MemoryError):
        view(torch.ones(1, 2, device="cuda:0"), torch.ones(1, device="cuda:0"))
    assert pretended.moves["cuda:0", "cuda:1"] == 2 and not seams._moved
