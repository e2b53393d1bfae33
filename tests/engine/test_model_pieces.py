"""A long prompt in pieces: the same logits and the same cache as in one, less memory, and an end between two of them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fake_device import FakeDevice, fake_arm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels, parse_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.protocol import Request
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.pieces import Pieces, pieces_of
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Hooks, Limits, run_request
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.errors import UsageError
from tests.engine.conftest import llama_config, save_tiny
from tests.engine.families import FAMILIES, save_family
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("shared_home")

Make = Callable[..., StagedModel]


@pytest.fixture
def make(load_tiny: Any) -> Make:
    def build(path: Path, rows: int | None, **options: Any) -> StagedModel:
        model, masters = load_tiny(path)
        kernels = options.pop("kernels", load_kernels("cpu"))
        return StagedModel(
            model, masters, Cpu(), budget_bytes=None, kernels=kernels, prefill_rows=rows, **options
        )

    return build


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


def of(arm: StagedArm, ids: Tensor, pad: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(tokens, logits of prefill and three steps, every byte of the cache after the hand-off)."""
    generation = arm.start(ids.shape[0], ids.shape[1] + 4, pad)
    logits = [generation.prefill(ids)]
    generation.handoff()
    held = [part.clone() for store in generation._cache.stores for part in store.parts]
    for _ in range(3):
        logits.append(generation.step(logits[-1].argmax(-1)))
    stacked = torch.stack(logits)
    return stacked.argmax(-1), stacked, held


def same(
    one: tuple[Tensor, Tensor, list[Tensor]], other: tuple[Tensor, Tensor, list[Tensor]], P: int
) -> None:
    """Float32: equal but for the order of a sum."""
    assert torch.equal(one[0], other[0])
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(one[2], other[2], strict=True):
        filled = min(P, mine.shape[4])
        a, b = (part[:, :, :, :, :filled].float() for part in (mine, theirs))
        # a code may fall on the other side of a half
        assert float(((a - b).abs() > 1e-4 * b.abs().clamp_min(1.0)).float().mean()) < 0.01


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_family_gives_the_same_in_pieces(name: str, family: Callable[[str], Path], make: Make) -> None:
    """Windows of 8 positions are shorter than a piece, than two, and than the prompt."""
    path, bf16 = family(name), find_policy("bf16")
    ids = ids_of(1, 29)
    whole = of(make(path, 0).apply(bf16, rows=[1, 29]), ids)
    for rows in (10, 7, 3):
        same(of(make(path, rows).apply(bf16, rows=[1, 29]), ids), whole, 29)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_padded_prompts_give_the_same_in_pieces(name: str, family: Callable[[str], Path], make: Make) -> None:
    """One row is padded beyond the whole of its first piece."""
    pad = torch.tensor([0, 3, 17])
    ids = ids_of(3, 24)
    for row, count in enumerate(pad.tolist()):
        ids[row, :count] = 0
    bf16 = find_policy("bf16")
    whole = of(make(family(name), 0).apply(bf16, rows=[3, 72]), ids, pad)
    got = of(make(family(name), 20).apply(bf16, rows=[3, 72]), ids, pad)
    assert torch.equal(got[0], whole[0])
    torch.testing.assert_close(got[1], whole[1], rtol=1e-4, atol=1e-5)


KVS = [
    KvPolicy("bf16", dtype, "handoff", keys, group)
    for dtype, keys, group in (("fp8", "token", 0), ("int8", "channel", 0), ("int4", "token", 16))
] + [KvPolicy("int8", "int8", "write"), KvPolicy("fp8", "fp8", "write"), KvPolicy("int4", "int8", "handoff")]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("kv", KVS, ids=lambda kv: kv.label)
def test_Q11_a_quantized_cache_is_the_same_in_pieces(
    kv: KvPolicy, name: str, family: Callable[[str], Path], make: Make
) -> None:
    policy = msgspec.structs.replace(find_policy("int8"), kv=kv)
    ids = ids_of(2, 26)
    whole = of(make(family(name), 0).apply(policy, rows=[2, 52]), ids)
    arm = make(family(name), 14).apply(policy, rows=[2, 52])
    assert arm.coverage["prefill"].rows == 14
    got = of(arm, ids)
    torch.testing.assert_close(got[1], whole[1], rtol=2e-2, atol=2e-2)
    same((whole[0], whole[1], got[2]), whole, 26)


def test_a_cache_that_prefill_cannot_read_again_keeps_the_prompt_whole_and_says_so(
    tiny_llama: Path, make: Make
) -> None:
    policy = msgspec.structs.replace(find_policy("bf16"), kv=KvPolicy("bf16", "int8", "write"))
    arm = make(tiny_llama, 8).apply(policy, rows=[1, 20])
    cover = arm.coverage["prefill"]
    assert cover.rows is None and cover.rows_reason == "prefill reads bf16 and stores int8 at each write"
    generation = arm.start(1, 24, None)
    generation.prefill(ids_of(1, 20))
    assert generation.pieces == 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_own_attention_gives_the_same_in_pieces(
    attention: str, family: Callable[[str], Path], make: Make
) -> None:
    bf16 = find_policy("bf16")
    for name, pad in itertools.product(("llama", "mistral"), (None, torch.tensor([0, 5]))):
        whole = run(
            make(family(name), 0, attention_name=attention).apply(bf16, rows=[2, 44]), ids_of(2, 22), 3, pad
        )
        got = run(
            make(family(name), 16, attention_name=attention).apply(bf16, rows=[2, 44]), ids_of(2, 22), 3, pad
        )
        torch.testing.assert_close(got[1], whole[1], rtol=1e-4, atol=1e-5)


def test_judging_sees_the_same_logits_of_many_positions(tiny_llama: Path, make: Make) -> None:
    bf16 = find_policy("bf16")
    ids = ids_of(1, 21)
    for keep in (1, 4, 9, 21):
        whole, got = (
            make(tiny_llama, rows).apply(bf16, rows=[1, 21]).start(1, 25, None).score(ids, keep)
            for rows in (0, 6)
        )
        assert got.shape == whole.shape == (1, keep, whole.shape[2])
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


# -- how a prompt is cut ---------------------------------------------------------------------------------------------


def test_pieces_are_nearly_equal_and_none_is_larger_than_allowed() -> None:
    for batch, positions, rows in itertools.product((1, 3), (1, 7, 100, 4097), (1, 2, 64, 4096, 10_000)):
        cuts = Pieces(rows).cut(batch, positions)
        assert cuts[0][0] == 0 and cuts[-1][1] == positions
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
        sizes = [last - first for first, last in cuts]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert max(sizes) * batch < rows + batch or max(sizes) == 1
    assert Pieces(None).cut(2, 50) == [(0, 50)] and Pieces(None).most(50) == 50
    assert Pieces(4096).most(50) == 50 and Pieces(4096).most(5000) == 4096


def test_the_setting_overrules_the_kernel_table_and_both_are_named() -> None:
    kv = KvPolicy()
    assert pieces_of(None, None, "t", kv) == Pieces()
    assert pieces_of(None, 4096, "the table", kv) == Pieces(4096, "the table")
    assert pieces_of(100, 4096, "t", kv) == Pieces(100, "engine.prefill_rows")
    assert pieces_of(0, 4096, "t", kv) == Pieces(None, "engine.prefill_rows is 0")
    assert load_kernels("cpu").prefill_rows == 4096 and load_kernels("cuda").prefill_rows == 8192
    head = 'schema = 1\ndevice = "cpu"\n'
    assert parse_kernels(f"{head}[prefill]\nrows = 7\n", "cpu").prefill_rows == 7
    for text, wrong in (
        ("rows = 0", "0 is not legal"),
        ("row = 7", "unknown key"),
        ("rows = true", "is not legal"),
    ):
        with pytest.raises(UsageError, match=wrong):
            parse_kernels(f"{head}[prefill]\n{text}\n", "cpu")


def test_coverage_names_the_rows_only_where_the_workload_has_more(tiny_llama: Path, make: Make) -> None:
    few = msgspec.structs.replace(load_kernels("cpu"), prefill_rows=16)
    staged = make(tiny_llama, None, kernels=few)
    bf16 = find_policy("bf16")
    cover = staged.apply(bf16, rows=[1, 17]).coverage["prefill"]
    assert (cover.rows, cover.rows_reason) == (16, "the kernel table (cpu)")
    cover = staged.apply(bf16, rows=[1, 16]).coverage["prefill"]
    assert (cover.rows, cover.rows_reason) == (None, "")
    cover = make(tiny_llama, 0, kernels=few).apply(bf16, rows=[1, 17]).coverage["prefill"]
    assert (cover.rows, cover.rows_reason) == (None, "engine.prefill_rows is 0")


# -- what it is for --------------------------------------------------------------------------------------------------


class Living(TorchDispatchMode):
    """Bytes of all tensors made meanwhile that live at once, at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in old or storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def test_T12_what_layers_hold_meanwhile_is_that_of_one_piece(tmp_path: Path, make: Make) -> None:
    """An MLP much wider than the hidden size, as models have it: eight pieces take less than a fourth of the memory."""
    path = save_tiny(llama_config(intermediate_size=1024, max_position_embeddings=1024), tmp_path / "wide")
    ids, most = ids_of(1, 512), {}
    for rows in (0, 64):
        arm = make(path, rows).apply(find_policy("bf16"), rows=[1, 512])
        generation = arm.start(1, 516, None)
        generation.prefill(ids)  # buffers are there from here on
        with Living() as living:
            generation.prefill(ids)
        most[rows] = living.most
    assert most[0] >= 2 * 512 * 1024 * 4, "gate and up of the whole prompt"
    assert most[64] < most[0] / 4


def test_the_census_counts_weights_once_a_piece_and_the_cache_again(tiny_llama: Path, make: Make) -> None:
    bf16 = find_policy("bf16")
    whole, pieces = (
        make(tiny_llama, rows).apply(bf16, rows=[1, 32]).start(1, 33, None).prefill_cost(32)
        for rows in (0, 8)
    )
    assert pieces.flops == whole.flops

    def read(cost: Any) -> dict[str, int]:
        found: dict[str, int] = {}
        for op in cost.ops:
            kind = op.name.split()[0]
            found[kind] = found.get(kind, 0) + op.bytes * op.count
        return found

    one, four = read(whole), read(pieces)
    assert four["linear"] == 4 * one["linear"] and four["embedding"] == one["embedding"]
    # 32 positions of its own, and 8, 16 and 24 of those before
    assert four["attention"] == one["attention"] * (32 + 8 + 16 + 24) // 32


# -- an end between two pieces ---------------------------------------------------------------------------------------


def test_a_prompt_is_left_between_two_pieces_and_the_next_request_is_right(
    tiny_llama: Path, make: Make
) -> None:
    arm = make(tiny_llama, 8).apply(find_policy("bf16"), rows=[1, 30])
    ids, asked = ids_of(1, 30), []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) == 2

    generation = arm.start(1, 34, None)
    with pytest.raises(Cancelled):
        generation.prefill(ids, cancelled)
    assert len(asked) == 2 and generation.length == 15, "two of four pieces"
    whole = of(make(tiny_llama, 0).apply(find_policy("bf16"), rows=[1, 30]), ids)
    same(of(arm, ids), whole, 30)


@contextmanager
def cancelled_in_prefill(device: FakeDevice) -> Iterator[Any]:
    arm = fake_arm(device)
    start = arm.staged.start

    def started(*words: Any) -> Any:
        generation = start(*words)

        def prefill(ids: Tensor, cancelled: Callable[[], bool] = lambda: False) -> Tensor:
            device.queue(40.0)
            assert cancelled()
            raise Cancelled

        generation.prefill = prefill
        return generation

    arm.staged.start = started
    yield arm


def test_T_a_request_left_in_its_prompt_has_no_token_and_no_time() -> None:
    device = FakeDevice()
    record = Request(request=1, arm="A", policy="", policy_digest="", kind="loop")
    batch = Batch(number=0, ids=ids_of(2, 9), pad=None, real_tokens=18, padded_tokens=0)
    with cancelled_in_prefill(device) as arm:
        hooks = Hooks(cancelled=lambda: True)
        done = run_request(device, arm, batch, 16, Limits(4, natural=False), record, hooks)
    assert done.cancelled and done.output_tokens == [0, 0] and done.stop_reasons == ["cancelled"] * 2
    assert (done.prefill_ms, done.ttft_ms, done.e2e_ms, done.itl_ms) == (None, None, None, [])
    assert done.host_end_ns > done.host_start_ns and done.valid
