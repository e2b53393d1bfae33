"""A large model: quantized on load, layer by layer from the files; the unquantized model never lies in memory whole."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.protocol import Load
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.loader import load_model
from pdq_tui.engine.staged import StagedModel
from tests.engine.conftest import VOCAB, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("shared_home")

HIDDEN, INNER, LAYERS = 256, 512, 8
#: Parameters of the decoder layers, and of the largest matrix.
WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
LARGEST = HIDDEN * INNER


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCAB, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


class Allocated(TorchDispatchMode):
    """Bytes of the memory that operators allocated and some tensor still holds: ``now`` and their ``peak``. Views, also of
    the mapped files, allocate nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and t.device.type == "cpu"
        }
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            if key[0] in given and not self._held[key]:
                continue
            self._hold(key)
            weakref.finalize(tensor, self._let_go, key)
        return out

    def _hold(self, key: tuple[int, int]) -> None:
        self._held[key] += 1
        if self._held[key] == 1:
            self.now += key[1]
            self.peak = max(self.peak, self.now)

    def _let_go(self, key: tuple[int, int]) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self.now -= key[1]


def test_the_counter_counts() -> None:
    with Allocated() as counted:
        one = torch.empty(1000, dtype=torch.int8)
        view = one[10:]
        two = one.clone()
        assert counted.now == counted.peak == 2000
        del one, two
        assert counted.now == 1000
        del view
        torch.empty(500, dtype=torch.int8)
    assert (counted.now, counted.peak) == (0, 2000)


@pytest.mark.parametrize(
    ("policy", "share"), [("int8", 1.0), ("int4", 0.57), ("w8a8-prefill-int4-decode", 1.57)]
)
def test_a_model_is_quantized_from_its_files_and_never_held_whole(
    policy: str, share: float, folder: Path
) -> None:
    device = CpuDevice()
    with Allocated() as counted:
        loaded = load_model(Load(model=str(folder)), device, lambda *_: None, lambda: False)
        staged = StagedModel(
            loaded.skeleton, loaded.masters, device, budget_bytes=None, kernels=load_kernels("cpu")
        )
        after_load = counted.peak
        arm = staged.apply(find_policy(policy), rows=[1, 64])
    packed = arm.weights.stored_bytes
    assert WEIGHTS * share * 0.9 < packed < WEIGHTS * share * 1.1
    assert after_load < staged.census.other_bytes + 4 * LARGEST, "no linear weight was read on loading"
    # One matrix, widened to float32, and what is made of it on the way.
    assert counted.peak < staged.census.other_bytes + packed + 5 * 4 * LARGEST
    if policy != "w8a8-prefill-int4-decode":
        assert counted.peak < 2 * WEIGHTS, "as large as the unquantized model"
    assert counted.now >= packed, "what is packed was seen"
