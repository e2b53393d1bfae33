"""Storage classes of mixtures: every expert's bytes counted, shared and multiplied as those of a linear layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy
from pdq_tui.core.predict import predict
from pdq_tui.core.shapes import read_shapes
from pdq_tui.engine.formats.packed import PackedStack
from pdq_tui.engine.staged import StagedArm, StagedModel
from tests.engine.conftest import DictMasters
from tests.engine.families import EXPERTS, round_matrix, save_family
from tests.engine.test_model_native import library as library  # builds and loads our own kernels
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("shared_home", "library")

PROMPT = 13
NAMES = (
    "nested16-prefill-int8-decode",
    "int8-prefill-nested16-decode",
    "transient-int4",
    "w4a8-prefill-int4-decode",
    "w8a8-prefill-int8-decode",
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def staged_of(path: Path, dtype: torch.dtype = torch.float32) -> StagedModel:
    model = load(path, dtype)
    return StagedModel(model, DictMasters(model), Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))


def applied(staged: StagedModel, policy: Policy) -> StagedArm:
    return staged.apply(policy, rows=[1, PROMPT])


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("name", EXPERTS)
def test_T12_bytes_of_experts_agree_wherever_they_are_counted(
    name: str, policy: str, family, tmp_path: Path
) -> None:
    path = tmp_path / "bf16"
    load(family(name), torch.bfloat16).save_pretrained(path)
    staged, found = staged_of(path, torch.bfloat16), find_policy(policy)
    plan = staged.plan(found, [1, PROMPT])
    before = staged.store.packed_bytes
    arm = applied(staged, found)
    weights = arm.weights
    stacks = [staged.store.get(key) for key in arm.keys]
    assert any(isinstance(packed, PackedStack) for packed in stacks)
    assert staged.store.packed_bytes - before == plan.new_bytes == sum(p.nbytes for p in stacks if p.ours)
    for packed in stacks:  # the count before packing, against the tensors that lie there
        parts = packed.parts if isinstance(packed, PackedStack) else (packed,)
        tensors = [t for part in parts for t in (part.weight, part.scales) if t is not None]
        assert packed.spec.own_bytes == packed.nbytes == sum(t.nbytes for t in tensors)
    assert weights.extra_bytes == 0 and weights.stored_bytes == max(
        weights.prefill_bytes, weights.decode_bytes
    )
    # The head stays in the model's dtype: kept in the engine's words, stored in the prediction's.
    shapes = read_shapes(path)
    told = predict(found, shapes, load_kernels("cpu"), PROMPT, 1, staged.capability)
    head = sum(x.N * x.K for x in shapes.linears if x.name == "lm_head") * shapes.dtype_bytes
    assert shapes.dtype_bytes == 2 and head > 0
    assert (told.stored_bytes - head, told.extra_bytes) == (weights.stored_bytes, 0)


def dequantized(model: PreTrainedModel, policy: Policy, stage: str) -> PreTrainedModel:
    """Weights as the stage reads them: nested16 is the weight itself to 1e-4, which float32 logits tell from int8."""
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, torch.nn.Linear) and leaf == "weight"
            if not linear and parameter.dim() != 3:
                continue
            fmt = policy.format_for(name if linear else f"{name}.{leaf}", stage)
            if fmt.dense or fmt.weights == "nested16":
                continue
            for matrix in [parameter.data] if linear else parameter.data:
                matrix.copy_(round_matrix(matrix, fmt))
    return model


@pytest.mark.parametrize(
    "policy", ["nested16-prefill-int8-decode", "int8-prefill-nested16-decode", "transient-int4"]
)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_a_storage_class_multiply_what_their_bytes_say(name: str, policy: str, family) -> None:
    path, found, ids = family(name), find_policy(policy), ids_of(1, PROMPT)
    _, logits = run(applied(staged_of(path), found), ids, 2)
    with torch.inference_mode():
        wanted = dequantized(load(path), found, "prefill")(ids).logits[:, -1]
        plain = load(path)(ids).logits[:, -1]
    off, size = (logits[0] - wanted).norm(), plain.norm()
    assert off < 5e-3 * size, (float(off), float(size))
    if found.prefill.format.weights != "nested16":
        assert (logits[0] - plain).norm() > 2 * off, "the rounding of the weights is larger than any other"
