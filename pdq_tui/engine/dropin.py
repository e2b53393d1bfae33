"""``staged()``: a model that stands where a transformers causal LM stands, and runs each stage under its own view.

The stage of a call is the request's state. ``generate`` knows how many prompt tokens the request has; whatever a call
brings, it is prefill as long as the cache holds fewer, be it a prompt of one token or the last chunk of one, and decode
from then on, be it several tokens at once (assisted generation). Outside of ``generate``, a call without a filled cache is
a prompt (lm-eval scores so); with one, ``request`` has to say how long the prompt is.

Attention and cache are transformers' own: figures from here stand beside the engine's, never among them.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from transformers import ContinuousBatchingConfig, PreTrainedModel

from pdq_tui import locations
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.policy import Policy, Stage
from pdq_tui.core.protocol import Load
from pdq_tui.engine import native
from pdq_tui.engine.checkpoint import HeldMasters, Masters
from pdq_tui.engine.devices import devices_of, open_devices
from pdq_tui.engine.kv import MODEL_DTYPE
from pdq_tui.engine.layout import layout_of
from pdq_tui.engine.loader import load_model
from pdq_tui.engine.serving import Dispatcher
from pdq_tui.engine.spread import refuse_processes, refuse_sharded
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.engine.views import copy_shell
from pdq_tui.errors import UnfitError, UsageError

_log = logging.getLogger(__name__)

#: The one that transformers' generate and its continuous batching both take, on every device.
ATTENTION: Final = "sdpa"
#: Under which names versions of transformers pass the cache.
_CACHES: Final = ("cache", "past_key_values")


def staged(
    model: str | Path | PreTrainedModel,
    policy: str | Path | Policy,
    *,
    prompt_tokens: int = 512,
    batch: int = 1,
    device: str = "auto",
    gpu: str | None = None,
    dtype: str | None = None,
    hard: bool = False,
    weight_budget_bytes: int | None = None,
    kernels: str = "auto",
) -> Any:
    """A drop-in for ``model`` that prefills and decodes as ``policy`` says: of its class, with ``generate``,
    ``generate_batch`` and a ``forward`` of its own, and the attributes of ``Staged``.

    model          a directory, a hub id, "demo" where it was fetched, or a model in memory, whose weights are shared and
                   which stays as it is: where a device_map laid its decoder layers over several GPUs, they run there.
    policy         a name, a file, or the policy itself.
    prompt_tokens, batch  the calls that kernels are chosen for; others run as well.
    device, dtype  where and as what a model that is not in memory is loaded: auto, cpu or cuda; bf16, fp16 or fp32.
    gpu            of such a model, which GPU: index or UUID; several, "0,1" or "all", share its decoder layers.
    hard           any fallback is an error.
    kernels        "auto" builds and uses this project's own CPU kernels where it can, "torch" does not.

    Raises PdqError: UnfitError for a policy that cannot run here, or whose KV cache is not in the model's dtype, since the
    cache is transformers' own; UsageError for a model or a policy that is not there.
    """
    followed = policy if isinstance(policy, Policy) else find_policy(str(policy))
    if followed.kv != MODEL_DTYPE:
        raise UnfitError(
            f"{followed.name}: KV cache {followed.kv.label}: generate brings transformers' own cache, which is in the"
            " model's dtype",
            "leave out [kv], or measure with pdq-tui run",
        )
    refuse_processes()
    if isinstance(model, PreTrainedModel):
        refuse_sharded(model)
        layout = layout_of(model)
        opened = devices_of(layout)
    else:
        opened = open_devices(device, gpu)
    if kernels == "auto" and opened.kind == "cpu":
        native.ensure(locations.cache_dir() / "native", lambda: None)
    tokenizer: Any = None
    masters: Masters
    skeleton: Any = model
    if isinstance(model, PreTrainedModel):
        skeleton.eval()
        masters = HeldMasters(
            {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
        )
    else:
        command = Load(model=str(model), device=device, dtype=dtype)
        loaded = load_model(command, opened, lambda *_: None, lambda: False)
        skeleton, masters, tokenizer = loaded.skeleton, loaded.masters, loaded.tokenizer
        layout = loaded.layout
    owner = StagedModel(
        skeleton,
        masters,
        opened,
        budget_bytes=weight_budget_bytes,
        kernels=load_kernels(opened.kind),
        attention_name=ATTENTION,
        layout=layout,
    )
    arm = owner.apply(followed, rows=[batch, batch * prompt_tokens], hard=hard)
    shell: Any = copy_shell(skeleton, {}, ATTENTION)
    base: type[PreTrainedModel] = type(skeleton)
    shell.__class__ = _class_of(base)
    views = {
        "prefill": arm.view("prefill", batch * prompt_tokens, batch).model,
        "decode": arm.view("decode", batch, batch).model,
    }
    # Past nn.Module, which would take the views for submodules and count every tensor thrice.
    vars(shell).update(
        arm=arm, tokens=Counter(), tokenizer=tokenizer, _views=views, _prompt=None, _dispatcher=None
    )
    return shell


class Staged:
    """What ``staged`` adds to the model's own class.

    arm        how every layer is placed and stored: ``arm.coverage``, ``arm.fallbacks``, ``arm.weights``.
    tokens     tokens that ran, by "stage/view"; where the two words differ, one call held both stages.
    tokenizer  of a model that was loaded by name, else None.
    """

    arm: StagedArm
    tokens: Counter[str]
    tokenizer: Any
    _views: dict[Stage, Any]
    _prompt: int | None
    _dispatcher: Dispatcher | None

    @contextmanager
    def request(self, prompt_tokens: int) -> Iterator[None]:
        """Calls inside belong to requests of ``prompt_tokens`` positions each, padding included, whatever each call
        brings. ``generate`` needs no such help."""
        if prompt_tokens < 1:
            raise UsageError("a request has at least one prompt token")
        before, self._prompt = self._prompt, prompt_tokens
        try:
            yield
        finally:
            self._prompt = before

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. Raises UsageError for inputs that are no token ids."""
        ids, mask = inputs if inputs is not None else kwargs.get("input_ids"), kwargs.get("attention_mask")
        if ids is None or kwargs.get("inputs_embeds") is not None:
            raise UsageError("a staged model generates from input_ids")
        # Where a cache is continued, the ids may be the new ones alone; the mask covers the whole request.
        prompt = max(int(ids.shape[1]), int(mask.shape[1]) if mask is not None else 0)
        with self.request(prompt):
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, **kwargs: Any
    ) -> Any:
        """As transformers', whose ``generate_batch`` calls it. Which requests a step holds is read from the manager, so
        batches are prepared and run one after the other, without captured graphs."""
        config = copy.copy(continuous_batching_config) or ContinuousBatchingConfig()
        for name in ("use_async_batching", "use_cuda_graph", "auto_switch_to_flash"):
            if getattr(config, name, None) is True and continuous_batching_config is not None:
                _log.warning("%s is left off: the stage of each request is looked up before each step", name)
            setattr(config, name, False)
        for name in ("varlen_compile_config", "decode_compile_config"):
            if getattr(config, name, None) is not None:
                raise UsageError(f"a staged model runs no compiled step: {name} is set")
        manager = super().init_continuous_batching(  # type: ignore[misc]
            generation_config=generation_config, continuous_batching_config=config, **kwargs
        )
        dispatcher = Dispatcher(self._views, self.arm.policy.serving.mixed)
        dispatcher.tokens = self.tokens
        dispatcher.batch = lambda: manager.batch_processor.inputs_and_outputs.requests_in_batch
        self._dispatcher = dispatcher
        return manager

    def stage_of(self, cached: int) -> Stage:
        """Of a call that finds ``cached`` positions in its cache."""
        if self._prompt is not None:
            return "prefill" if cached < self._prompt else "decode"
        if cached:
            raise UsageError(
                "this call goes on from a cache, and nothing says how many of its tokens are the prompt's",
                "call generate, or wrap the calls in model.request(prompt_tokens)",
            )
        return "prefill"

    def _staged_forward(self, *args: Any, **kwargs: Any) -> Any:
        if "cu_seq_lens_q" in kwargs:
            if self._dispatcher is None:
                raise UsageError("a staged model takes ragged batches by generate_batch alone")
            return self._dispatcher.forward(**kwargs)
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            raise UsageError("a staged model runs on input_ids")
        cache = next((kwargs[name] for name in _CACHES if kwargs.get(name) is not None), None)
        cached = int(cache.get_seq_length()) if cache is not None else 0
        stage = self.stage_of(cached)
        rows, count = int(ids.shape[0]), int(ids.shape[1])
        owed = count if self._prompt is None else min(count, max(0, self._prompt - cached))
        for of, tokens in (("prefill", owed), ("decode", count - owed)):
            if tokens:
                self.tokens[f"{of}/{stage}"] += rows * tokens
        return self._views[stage](*args, **kwargs)


#: By class of the model.
_classes: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _class_of(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """``base`` with what ``Staged`` adds. The signature of ``forward`` stays the model's: transformers reads it."""
    if base in _classes:
        return _classes[base]

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._staged_forward(*args, **kwargs)

    # No whole call is compiled: which view runs is decided in it.
    return type(
        f"Staged{base.__name__}", (Staged, base), {"forward": forward, "_can_compile_fullgraph": False}
    )
