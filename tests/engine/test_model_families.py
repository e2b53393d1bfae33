"""Every family in every format through both stages, against the family's own forward in transformers."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedModel

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.predict import predict
from pdq_tui.core.shapes import read_shapes
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.errors import UnfitError
from tests.engine.conftest import VOCAB, DictMasters
from tests.engine.families import EXPERTS, FAMILIES, SLIDING, rounded, save_family
from tests.engine.test_model_staged import Cpu, ids_of, run

pytestmark = pytest.mark.usefixtures("shared_home")

PROMPT, NEW = 13, 6


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory):
    """``family(name)`` → the directory of a tiny model, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def load(path: Path) -> PreTrainedModel:
    """With transformers' plainest attention."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def staged_of(path: Path, **options: str) -> StagedModel:
    model = load(path)
    return StagedModel(
        model, DictMasters(model), Cpu(), budget_bytes=None, kernels=load_kernels("cpu"), **options
    )


def forward(model: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[new, 1, V]: what one pass over everything says at the positions that were generated."""
    with torch.inference_mode():
        logits = model(torch.cat([ids, tokens[:, :-1]], 1)).logits
    return logits[:, ids.shape[1] - 1 :].transpose(0, 1)


def arm_of(staged: StagedModel, name: str, rows: tuple[int, ...] = (1, PROMPT)) -> StagedArm:
    return staged.apply(find_policy(name), rows=rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_dense_tokens_and_logits_are_those_of_generate(name, family) -> None:
    path = family(name)
    model, ids = load(path), ids_of(1, PROMPT)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
    tokens, logits = run(arm_of(staged_of(path), "bf16"), ids, NEW)
    assert tokens.tolist() == wanted.tolist()
    assert len(set(tokens[0].tolist())) > 1, "a model that repeats itself shows nothing"
    torch.testing.assert_close(logits, forward(model, ids, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_Q02_each_format_agrees_with_the_familys_forward_on_its_weights(name, policy, family) -> None:
    path = family(name)
    arm = arm_of(staged_of(path), policy)
    reference, plain = rounded(load(path), find_policy(policy), "prefill"), load(path)
    shares = []
    # An activation between two steps of its grid may fall to the other side, in one prompt of twenty.
    for seed in range(5 if policy == "w8a8" else 1):
        ids = ids_of(1, PROMPT, seed)
        tokens, logits = run(arm, ids, NEW)
        wanted = forward(reference, ids, tokens)
        effect = (forward(plain, ids, tokens) - wanted).norm(dim=(1, 2))
        assert (effect > 1e-3 * wanted.norm(dim=(1, 2))).all(), "what is rounded shows"
        shares.append(float(((logits - wanted).norm(dim=(1, 2)) / effect).max()))
    assert median(shares) < 0.01, shares


@pytest.mark.parametrize("policy", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_Q01_every_matrix_is_converted_but_heads_and_routers(name, policy, family) -> None:
    staged = staged_of(family(name))
    arm = arm_of(staged, policy)
    for cover in arm.coverage.values():
        kept = {left.module for left in cover.left}
        assert kept == {
            "lm_head",
            *(f"model.layers.{i}.mlp.gate.weight" for i in range(2) if name in EXPERTS),
        }
        assert all(left.reason for left in cover.left)
        assert cover.converted_parameters + sum(left.parameters for left in cover.left) == (
            cover.total_parameters
        )
    packed = sum(entry.nbytes for entry in staged.store._entries.values() if entry.ours)
    assert packed == arm.coverage["decode"].converted_bytes


@pytest.mark.parametrize("attention", ["pdq", "eager"])
@pytest.mark.parametrize("name", [*SLIDING, "gpt2", "phi", "qwen3_moe"])
def test_I04_padded_rows_of_every_family_agree_with_batch_one(name, attention, family) -> None:
    arm = arm_of(staged_of(family(name), attention_name=attention), "bf16", rows=(3, 3 * PROMPT))
    lengths = (2, 9, PROMPT)
    prompts = [ids_of(1, n, seed=n) for n in lengths]
    ids = torch.zeros((3, PROMPT), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, PROMPT - prompt.shape[1] :] = prompt
    tokens, together = run(arm, ids, NEW, torch.tensor([PROMPT - n for n in lengths]))
    for row, prompt in enumerate(prompts):
        alone_tokens, alone = run(arm, prompt, NEW)
        torch.testing.assert_close(together[:, row], alone[:, 0], rtol=1e-4, atol=1e-4)
        assert tokens[row].tolist() == alone_tokens[0].tolist()


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_layers_forget_and_are_counted_as_they_read(name, family) -> None:
    """The window changes the logits, and a step's bytes are those of the positions that it sees."""
    path, ids = family(name), ids_of(1, 40)
    staged = staged_of(path)
    arm = arm_of(staged, "bf16", rows=(1, 40))
    _, logits = run(arm, ids, NEW)
    staged.skeleton.config.sliding_window = None
    full = load(path)
    full.config.sliding_window = 4096
    for module in full.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 4096
    assert (forward(full, ids, logits.argmax(-1).t())[-1] - logits[-1]).norm() > 0.05 * logits[-1].norm()
    generation = arm.start(1, 48, None)
    generation.prefill(ids)
    kv = staged.kv
    slides = sum(window is not None for window in kv.windows)
    assert slides and slides == sum(w == 8 for w in kv.windows)
    read = sum(op.bytes * op.count for op in generation.step_cost().ops if op.name == "attention")
    assert read == (8 * slides + 41 * (kv.layers - slides)) * kv.geometry.layer_bytes(KvPolicy(), "decode")


def test_attention_that_an_implementation_leaves_out_is_refused(family) -> None:
    with pytest.raises(UnfitError, match="sdpa leaves out"):
        staged_of(family("gemma2"), attention_name="sdpa")


def test_attention_that_is_the_models_own_is_refused_unless_it_runs_itself(tmp_path) -> None:
    """Bloom adds a bias by distance that no other attention knows of."""
    config = hf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=VOCAB)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnfitError, match="attention of its own"):
        staged_of(tmp_path)
    ids = ids_of(1, PROMPT)
    tokens, logits = run(arm_of(staged_of(tmp_path, attention_name="eager"), "bf16"), ids, NEW)
    torch.testing.assert_close(logits, forward(load(tmp_path), ids, tokens), rtol=1e-4, atol=1e-4)


def test_a_linear_layer_that_does_more_than_multiply_is_left_and_told(family) -> None:
    class Choosing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    model, ids = load(family("llama")), ids_of(1, PROMPT)
    old = model.model.layers[0].mlp.up_proj
    new = model.model.layers[0].mlp.up_proj = Choosing(64, 128, bias=False).requires_grad_(False)
    new.weight = old.weight
    staged = StagedModel(model, DictMasters(model), Cpu(), budget_bytes=None, kernels=load_kernels("cpu"))
    arm = arm_of(staged, "bf16")
    assert [(left.module, left.parameters) for left in arm.coverage["decode"].left] == [
        ("model.layers.0.mlp.up_proj.weight", 128 * 64)
    ]
    tokens, logits = run(arm, ids, NEW)
    torch.testing.assert_close(logits, forward(model, ids, tokens), rtol=1e-4, atol=1e-4)


def test_a_layer_that_slides_by_config_but_does_not_say_so_is_refused(family) -> None:
    staged = staged_of(family("llama"))
    staged.skeleton.config.sliding_window = 8
    with pytest.raises(UnfitError, match="slides over 8 positions by its config and over None"):
        run(arm_of(staged, "bf16"), ids_of(1, PROMPT), 2)


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "phi3", "qwen3_moe", "mixtral"])
def test_what_is_predicted_from_headers_is_what_is_planned(name, policy, family) -> None:
    path = family(name)
    plan = staged_of(path).plan(find_policy(policy), (1, PROMPT))
    table = load_kernels("cpu")
    foreseen = predict(find_policy(policy), read_shapes(path), table, PROMPT, 1)
    for stage, cover in plan.coverage.items():
        told = foreseen.stages[stage]
        assert (told.converted_parameters, told.total_parameters) == (
            cover.converted_parameters,
            cover.total_parameters,
        )
        assert told.bits_per_weight == plan.weights.bits_per_weight[stage]
