"""Tiny models with random weights, saved to a temporary directory with a character tokenizer: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from pdq_tui.engine import native, prefill_native

VOCAB = 128


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; <s> 1, </s> 2, no pad token, no BOS added by itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "\n", *(chr(c) for c in range(32, 127))]
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tok.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_tiny(config: object, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A random model of ``config`` in ``folder`` with safetensors and tokenizer files; deterministic by ``seed``."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:  # the default 0.02 leaves logits too flat for an error to show
                parameter.copy_(torch.randn(parameter.shape) * (1.0 if "embed" in name else 0.08))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def llama_config(**changes: object) -> LlamaConfig:
    settings: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(settings | changes))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_kernels_only_where_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that one module has loaded stays in the process: other modules' tests shall not depend on their order.
    Those that want it have a fixture ``library``."""
    if "library" not in request.fixturenames:
        monkeypatch.setattr(native, "loaded", lambda: None)
        monkeypatch.setattr(native, "identity", lambda: None)
        monkeypatch.setattr(prefill_native, "_op", lambda: None)


@pytest.fixture(scope="session")
def _one_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-home")


@pytest.fixture
def shared_home(own_home: Path, _one_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One home for all tests that ask for it: kernels that may crash are tried in a child once, not once a test."""
    monkeypatch.setenv("PDQ_HOME", str(_one_home))
    return _one_home


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama, tied head, float32, 2 layers, hidden 64."""
    return save_tiny(llama_config(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_llama_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(llama_config(tie_word_embeddings=False), tmp_path_factory.mktemp("llama_untied"))


@pytest.fixture(scope="session")
def tiny_llama_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(llama_config(), tmp_path_factory.mktemp("llama_bf16"), dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def tiny_llama_72(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden 72: no legal group size divides it."""
    return save_tiny(
        llama_config(
            hidden_size=72, intermediate_size=144, num_attention_heads=6, num_key_value_heads=3, head_dim=12
        ),
        tmp_path_factory.mktemp("llama72"),
    )


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with Conv1D layers and 32 positions."""
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=32, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return save_tiny(config, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE with 4 experts, two a token."""
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return save_tiny(config, tmp_path_factory.mktemp("moe"))


class DictMasters:
    """Masters over a loaded model's own parameters; ``taken`` lists what was read, in order."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._tensors = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        self.taken: list[str] = []

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def files(self) -> Sequence[Path]:
        return []

    def get(self, name: str) -> torch.Tensor:
        self.taken.append(name)
        return self._tensors[name]

    def part(self, name: str, index: int) -> torch.Tensor:
        return self.get(name)[index]

    def format(self, name: str) -> None:
        return None

    def imported(self, name: str) -> None:
        return None

    def shared(self, name: str) -> bool:
        return True


@pytest.fixture(scope="session")
def load_tiny() -> Callable[..., tuple[PreTrainedModel, DictMasters]]:
    """``load_tiny(path, dtype=None)`` → (skeleton, masters) with every weight in memory."""

    def load(path: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, DictMasters]:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto").eval()
        model.requires_grad_(False)
        return model, DictMasters(model)

    return load
