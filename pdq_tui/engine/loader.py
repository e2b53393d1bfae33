"""From a word to a model: a directory, a hub id, a GGUF file, or the demo.

The skeleton is built without memory; only what is not a linear weight is put on the device. Linear weights stay in
the memory-mapped files until a policy asks for them, so the unquantized model need not fit. Where a checkpoint's
names differ from the model's (experts fused on loading, prefixes), transformers loads it whole into memory, and the
notes say so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pdq_tui import locations
from pdq_tui.core.protocol import Load, ModelInfo
from pdq_tui.engine import convert, faults, hub
from pdq_tui.engine.cancel import check, interruptible
from pdq_tui.engine.census import packable
from pdq_tui.engine.checkpoint import Checkpoint, HeldMasters, MappedMasters, Masters, few, inspect
from pdq_tui.engine.device import Device
from pdq_tui.engine.devices import places
from pdq_tui.engine.layout import Layout, lay_out
from pdq_tui.engine.quantized import Quantized, QuantizedMasters, check_layers, read_quantized
from pdq_tui.errors import PdqError, UsageError

# transformers ships no types for its factories.
_AUTO: Any = AutoModelForCausalLM
#: The number of a decoder layer in a weight's name, in all families: model.layers.3., transformer.h.3., …
_LAYER: Final = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"

Progress = Callable[[float, float | None, str], None]
Cancel = Callable[[], bool]


@dataclass
class LoadedModel:
    """``skeleton``: a causal LM in eval mode, its linear weights on the meta device; ``masters`` holds those.

    ``eos``: every id that ends an answer. ``layout``: on which device each module lies.
    """

    skeleton: Any
    masters: Masters
    tokenizer: Any
    info: ModelInfo
    layout: Layout
    eos: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Source:
    """Where the word led to. ``id`` is what people call it."""

    id: str
    path: Path
    revision: str | None = None
    notes: tuple[str, ...] = ()


def load_model(command: Load, device: Device, progress: Progress, cancelled: Cancel) -> LoadedModel:
    """Raises PdqError with one sentence, or Cancelled: within a fraction of a second, also where a disk takes its time,
    since whatever reads files is waited for in a thread. A local directory causes no connection attempt."""
    source = resolve(command, progress, cancelled)
    check(cancelled)
    progress(0, None, f"{source.id}: checking the files")
    checkpoint = interruptible(lambda: inspect(source.path), cancelled)
    quantized = interruptible(lambda: read_quantized(checkpoint), cancelled)
    dtype = _dtype(command.dtype, checkpoint)
    config = interruptible(lambda: _config(checkpoint, command), cancelled)
    progress(0, None, f"{source.id}: reading the tokenizer")
    tokenizer = interruptible(lambda: _tokenizer(checkpoint, command), cancelled)
    notes = list(source.notes)
    skeleton, masters, layout = _mapped(
        checkpoint, quantized, config, dtype, command, device, progress, cancelled
    )
    if skeleton is None and quantized is not None:
        raise UsageError(
            f"{source.id}: this checkpoint is already quantized ({quantized.method}), and its names differ from the"
            " model's (experts, or code of its own): it would have to be dequantized whole",
            "use the model's unquantized checkpoint",
        )
    if skeleton is None:
        skeleton, masters, layout = _held(checkpoint, dtype, command, device, progress, cancelled)
        notes.append(
            "the checkpoint's names differ from the model's: the unquantized weights are held in memory"
        )
    assert masters is not None and layout is not None
    skeleton.eval().requires_grad_(False)
    check(cancelled)
    digest, digest_note = interruptible(checkpoint.sha256, cancelled)
    notes.extend([digest_note] if digest_note else [])
    notes.extend(_left_over(checkpoint, skeleton))
    weights = None
    if quantized is not None:
        weights = quantized.words(sorted(packable(skeleton)))
        notes.extend([f"its files hold {weights}", *quantized.notes, *quantized.rounding(dtype)])
    info = _info(source, skeleton, masters, tokenizer, dtype, digest, notes)
    info.weights = weights
    return LoadedModel(
        skeleton=skeleton,
        masters=masters,
        tokenizer=tokenizer,
        info=info,
        layout=layout,
        eos=_eos(checkpoint.path, skeleton, tokenizer),
    )


#: What makes two configurations compute differently on the same weights.
_ARITHMETIC: Final = (
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps",
    "layer_norm_eps", "layer_norm_epsilon", "hidden_act", "hidden_activation", "activation_function", "sliding_window",
    "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "num_experts_per_tok", "norm_topk_prob",
)  # fmt: skip


def load_source(
    word: str, model: LoadedModel, command: Load, device: Device, progress: Progress, cancelled: Cancel
) -> tuple[Any, Masters]:
    """(skeleton, masters) of another checkpoint of the same model, in the model's dtype. Raises UsageError where its
    configuration is another's, PdqError, Cancelled."""
    source = resolve(
        msgspec.structs.replace(command, model=word, source=None, revision=None), progress, cancelled
    )
    checkpoint = interruptible(lambda: inspect(source.path), cancelled)
    quantized = interruptible(lambda: read_quantized(checkpoint), cancelled)
    config = interruptible(lambda: _config(checkpoint, command), cancelled)
    ours, theirs = model.skeleton.config.get_text_config(), config.get_text_config()
    for key in _ARITHMETIC:
        mine, other = getattr(ours, key, None), getattr(theirs, key, None)
        if mine != other:
            raise UsageError(
                f"{word}: {key} is {other!r}, the model's is {mine!r}",
                "a stage's source has to be a checkpoint of the same model",
            )
    dtype = DTYPES[model.info.dtype]
    skeleton, masters, _ = _mapped(
        checkpoint, quantized, config, dtype, command, device, progress, cancelled, model.layout
    )
    if skeleton is None or masters is None:
        raise UsageError(
            f"{word}: its names or shapes are not the model's, or it brings code of its own",
            "a stage's source has to be safetensors files of the same model",
        )
    skeleton.eval().requires_grad_(False)
    return skeleton, masters


# -- where the files are ------------------------------------------------------------------------------------------------


def resolve(command: Load, progress: Progress, cancelled: Cancel) -> Source:
    """A local directory for the word, fetched or converted where it has to be."""
    cache = Path(command.cache_dir) if command.cache_dir else locations.cache_dir()
    if command.model == DEMO:
        target = cache / "smollm2-135m-instruct-bf16"
        if not convert.is_converted(target):
            convert.converted(_only_gguf(_demo_source(command)), target, progress, cancelled)
        note = "its weights were stored in 4 bits (GGUF Q4_1) and are dequantized: speed and procedure only"
        return Source(DEMO_NAME, target, notes=(note,))
    path = Path(command.model).expanduser()
    gguf = path if path.suffix == ".gguf" else None
    if path.is_dir() and not (path / "config.json").is_file() and any(path.glob("*.gguf")):
        gguf = _only_gguf(path)
    if gguf is not None:
        convert.check_gguf(gguf)
        target = convert.converted(gguf, cache / "gguf" / convert.cache_name(gguf), progress, cancelled)
        note = f"{gguf.name} is dequantized on load: nothing here is about the file's own format"
        return Source(f"{gguf.stem} (dequantized on load)", target, notes=(note,))
    if path.is_dir():
        return Source(path.resolve().name, path)
    if path.exists():
        raise UsageError(f"{path} is a file; a model is a directory, a .gguf file, or a hub id")
    if not hub.looks_like_hub_id(command.model):
        raise UsageError(f"no such directory: {path}")
    folder, commit = hub.fetch(command.model, command.revision, progress, cancelled)
    return Source(command.model, folder, revision=commit)


def _demo_source(command: Load) -> Path:
    if command.source is None:
        raise UsageError("the demo model has not been fetched yet")
    return Path(command.source)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        raise UsageError(f"{folder}: there is no .gguf file in it")
    if len(found) > 1:
        raise UsageError(f"{folder}: there are {len(found)} .gguf files in it", "name the one that is meant")
    return found[0]


# -- what is in them ----------------------------------------------------------------------------------------------------


def _dtype(wanted: str | None, checkpoint: Checkpoint) -> torch.dtype:
    word = wanted or checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bf16"
    dtype = DTYPES.get(str(word).removeprefix("torch."))
    if dtype is None:
        raise UsageError(f"dtype {word!r} is not supported", f"legal: {', '.join(DTYPES)}")
    return dtype


def _config(checkpoint: Checkpoint, command: Load) -> Any:
    if "auto_map" in checkpoint.config and not command.trust_remote_code:
        known = checkpoint.config.get("model_type")
        if known not in _known_types():
            raise UsageError(
                f"{checkpoint.path.name} brings code of its own, which is not run unless asked for",
                "--trust-remote-code, if you trust it",
            )
    try:
        return AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=command.trust_remote_code
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(
            f"{checkpoint.path.name}: transformers does not know this model: {faults.first_line(error)}"
        ) from error


def _known_types() -> frozenset[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _tokenizer(checkpoint: Checkpoint, command: Load) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=command.trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain Exception from Rust
        raise UsageError(
            f"{checkpoint.path.name}: the tokenizer cannot be read: {faults.first_line(error)}"
        ) from error


def _eos(path: Path, skeleton: Any, tokenizer: Any) -> frozenset[int]:
    values: list[Any] = [
        skeleton.config.get_text_config().eos_token_id,
        getattr(tokenizer, "eos_token_id", None),
    ]
    if (path / "generation_config.json").is_file():
        values.append(GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id)
    ids: set[int] = set()
    for value in values:
        if value is not None:
            ids.update(int(v) for v in (value if isinstance(value, (list, tuple)) else [value]))
    return frozenset(ids)


# -- the model ----------------------------------------------------------------------------------------------------------


def _mapped(
    checkpoint: Checkpoint,
    quantized: Quantized | None,
    config: Any,
    dtype: torch.dtype,
    command: Load,
    device: Device,
    progress: Progress,
    cancelled: Cancel,
    layout: Layout | None = None,
) -> tuple[Any, Masters | None, Layout | None]:
    """(skeleton, masters over the files, where its modules lie: as ``layout`` says, else as the device has room), or
    nothing where names or shapes differ, or code is not ours."""
    if not checkpoint.tensors or command.trust_remote_code:
        return None, None, None
    for settings in ("quantization_config", "compression_config"):  # what is read of them is read here
        if hasattr(config, settings):
            delattr(config, settings)
    try:
        with init_empty_weights(include_buffers=False):
            model = _AUTO.from_config(config, dtype=dtype)
    except ValueError as error:
        raise UsageError(
            f"{checkpoint.path.name} is no causal language model: {faults.first_line(error)}"
        ) from error
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return None, None, None
    model.tie_weights()
    groups = _parameter_groups(model)
    held = quantized.layers if quantized is not None else {}
    stored: dict[str, str] = {}
    for names, parameter in groups:
        if any(name in held for name in names):
            continue
        name = next((n for n in names if n in checkpoint.tensors), None)
        if name is None or checkpoint.tensors[name].shape != tuple(parameter.shape):
            return None, None, None
        stored.update(dict.fromkeys(names, name))
    aliases = {name: file_name for name, file_name in stored.items() if name != file_name}
    masters = MappedMasters(checkpoint, dtype, aliases)
    if quantized is not None:
        known = [name for names, _ in groups for name in names]
        raw, linears = masters.raw, _plain_linears(model)
        interruptible(lambda: check_layers(quantized, linears, known, checkpoint, raw), cancelled)
        masters = QuantizedMasters(checkpoint, quantized, dtype, aliases)
    linear = packable(model)
    if layout is None:
        layout = lay_out(model, *places(device))
    wanted = [names for names, _ in groups if not linear.issuperset(names)]
    for done, names in enumerate(wanted):
        check(cancelled)
        progress(done, len(wanted), f"{checkpoint.path.name}: {names[0]}")
        where = layout.of(names[0])  # of a tied head its embedding, which comes first
        value = _read(masters, stored[names[0]], where, cancelled)
        for name in names:
            set_module_tensor_to_device(model, name, where, value=value, dtype=dtype)
    model.tie_weights()
    _move_buffers(model, masters, layout)
    return model, masters, layout


def _plain_linears(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes [N, K] of the linear layers that no other module shares its weight with, by the parameter's name."""
    linear = packable(model)
    return {
        names[0]: tuple(parameter.shape)
        for names, parameter in _parameter_groups(model)
        if len(names) == 1
        and names[0] in linear
        and isinstance(model.get_submodule(names[0].rpartition(".")[0]), nn.Linear)
    }


def _left_over(checkpoint: Checkpoint, model: Any) -> list[str]:
    """A sentence where weights of the files are no part of this model as far as their numbered layers go: a config.json
    with fewer layers describes another model. Names of other things differ between checkpoints and say nothing."""
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    beyond = sorted(
        name for name in checkpoint.tensors if (n := _LAYER.search(name)) and int(n.group(1)) >= layers
    )
    if not layers or not beyond:
        return []
    return [
        f"{len(beyond)} weights of the files belong to layers beyond the {layers} that config.json describes, and are"
        f" not used: {few(beyond)}"
    ]


def _read(masters: Masters, name: str, device: torch.device, cancelled: Cancel) -> torch.Tensor:
    """One weight on the device; a large one may take the disk, or the way to the device, many seconds."""

    def work() -> torch.Tensor:
        return masters.get(name).to(device)

    return interruptible(work, cancelled)


def _held(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    command: Load,
    device: Device,
    progress: Progress,
    cancelled: Cancel,
) -> tuple[Any, Masters, Layout]:
    """The model loaded whole by transformers; its linear weights become masters in memory."""
    progress(0, None, f"{checkpoint.path.name}: loading the whole model into memory")

    def work() -> Any:
        return _AUTO.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=command.trust_remote_code,
            output_loading_info=True,
        )

    try:
        model, found = interruptible(work, cancelled)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise PdqError(f"{checkpoint.path.name} cannot be loaded: {faults.first_line(error)}") from error
    missing = sorted(found["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise UsageError(
            f"{checkpoint.path.name}: config.json describes a model of which {len(missing)} weights are not in the"
            f" files: {few(missing)}",
            "take the config.json that belongs to these weights",
        )
    linear, layout = packable(model), lay_out(model, *places(device))
    held: dict[str, torch.Tensor] = {}
    for names, parameter in _parameter_groups(model):
        if linear.issuperset(names):
            held.update(dict.fromkeys(names, parameter.data))
            for name in names:
                set_module_tensor_to_device(model, name, "meta")
        else:
            held.update({name: parameter.data for name in names if name in linear})
            for name in names:
                set_module_tensor_to_device(model, name, layout.of(names[0]), value=parameter.data)
    model.tie_weights()
    masters = HeldMasters(held)
    _move_buffers(model, None, layout)
    return model, masters, layout


def _parameter_groups(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter once, with all the names it is tied under."""
    groups: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), ([], parameter))[0].append(name)
    return list(groups.values())


def _move_buffers(model: nn.Module, masters: MappedMasters | None, layout: Layout) -> None:
    stored = set(masters.names()) if masters is not None else set()
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if masters is not None and name in stored and leaf not in module._non_persistent_buffers_set:
            module._buffers[leaf] = masters.get(name).to(layout.of(name))
        else:
            module._buffers[leaf] = buffer.to(layout.of(name))


def _info(
    source: Source,
    model: Any,
    masters: Masters,
    tokenizer: Any,
    dtype: torch.dtype,
    digest: str,
    notes: list[str],
) -> ModelInfo:
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return ModelInfo(
        id=source.id,
        path=os.fspath(source.path),
        revision=source.revision,
        sha256=digest,
        family=str(config.model_type),
        parameters=sum(parameter.numel() for _, parameter in _parameter_groups(model)),
        layers=int(getattr(config, "num_hidden_layers", 0)),
        hidden=int(getattr(config, "hidden_size", 0)),
        vocab=int(embedding.num_embeddings),
        max_positions=int(positions) if positions else None,
        rotary=not _learned_positions(model, positions),
        dtype=str(dtype).removeprefix("torch."),
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
        tied_head=head is not None and head.weight is embedding.weight,
        notes=notes,
    )


def _learned_positions(model: Any, positions: int | None) -> bool:
    """A second embedding table with a row for each position (OPT keeps two more) cannot go beyond its end."""
    words = model.get_input_embeddings()
    return positions is not None and any(
        isinstance(module, nn.Embedding)
        and module is not words
        and module.num_embeddings in (positions, positions + 2)
        for module in model.modules()
    )
