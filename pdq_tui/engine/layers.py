"""Decoder layers as compiled programs, or as calls of our own (``layer_native``, ``prompt_layer``): what stands in for a view's
modules.

A program serves all layers of a kind, their tensors are its inputs.

A decode step runs the same few dozen operations once a layer; most of its time beside the weights goes into the calls
between them. A layer is traced once (``make_fx``) with its parameters as inputs and compiled by torch's inductor, so a
model of 30 equal layers is compiled once, in seconds, and a policy whose layers look like an earlier one's not at all.
Keys and values stay outside of the program: one operator of ours writes them into the active cache and attends over
its filled part, so no shape in the program changes from step to step.

Nothing guards a program at run time. Instead every layer's results, and the logits of several steps, are compared with
those of the modules before it is used (``agreement``); where one differs by more than rounding explains, or anything else
does not fit, the view stays eager and says why.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from pdq_tui.core.policy import Stage
from pdq_tui.engine import decoder_native, faults
from pdq_tui.engine.agreement import Agreement
from pdq_tui.engine.attention import UNSUPPORTED, decode_product
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.formats.linears import PackedLinear
from pdq_tui.engine.kv import KvCache, active_cache
from pdq_tui.engine.layer_native import NativeLayer
from pdq_tui.engine.llama_kind import llama_kind
from pdq_tui.engine.prompt_layer import PromptLayer
from pdq_tui.engine.recorded import (
    Call,
    UncompiledError,
    find_layers,
    owned,
    reach,
    record_step,
    signature_of,
)

_log = logging.getLogger(__name__)

ATTENTION: Final = "pdq_decode_layer"
#: Seconds between two looks at whether a compilation was cancelled.
POLL_S: Final = 0.05

Program = Callable[..., Any]


# -- the one operator that knows the cache -----------------------------------------------------------------------------

_library: Any = torch.library.Library("pdq", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor slot, float scale, int? window, float? softcap) -> Tensor"
)


def _decode_attention(
    q: Tensor, k: Tensor, v: Tensor, slot: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """q [B, H, 1, D], k and v [B, Hkv, 1, D] of the new position, slot: the layer's number → [B, 1, H, D].

    Writes k and v into the active cache at its ``start`` and attends over its filled part, or the last ``window`` of it.
    """
    cache = active_cache()
    keys, values = cache.update(k, v, int(slot))
    mask = cache.mask
    if mask is not None:
        mask = mask[..., : cache.end]
    return decode_product(q, keys, values, mask, scale, window, softcap)


_library.impl("decode_attention", _decode_attention, "CompositeExplicitAutograd")


def _decode_attention_shape(
    q: Tensor, k: Tensor, v: Tensor, slot: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    B, H, _, D = q.shape
    return q.new_empty(B, 1, H, D)


torch.library.register_fake("pdq::decode_attention", _decode_attention_shape, lib=_library)


def _traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a layer calls while it is traced: the operator, with the layer's number as a tensor."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UncompiledError(f"attention with {name}")
    slot = kwargs.get("pdq_slot")
    if slot is None:
        raise UncompiledError("its layers keep arguments from their attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.pdq.decode_attention(query, key, value, slot, scale, sliding_window, softcap), None


AttentionInterface.register(ATTENTION, _traced_attention)


# -- what a layer consists of ------------------------------------------------------------------------------------------


@contextmanager
def _standing_in(layer: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    owners = list(owned(layer))
    try:
        for (held, name, _), tensor in zip(owners, tensors, strict=True):
            held[name] = tensor
        yield
    finally:
        for held, name, tensor in owners:
            held[name] = tensor


def _copy(module: nn.Module) -> nn.Module:
    """The shells of a layer, with configs of their own that name the traced attention; tensors are shared."""
    mine = copy.copy(module)
    mine._parameters, mine._buffers = dict(module._parameters), dict(module._buffers)
    mine._modules = {name: None if m is None else _copy(m) for name, m in module._modules.items()}
    config = getattr(module, "config", None)
    if isinstance(config, PreTrainedConfig):
        mine.__dict__["config"] = copy.copy(config)
        mine.__dict__["config"]._attn_implementation = ATTENTION
    return mine


# -- compiling ---------------------------------------------------------------------------------------------------------


class CompiledLayer(nn.Module):
    """A decoder layer as a program of its arguments' tensors, its number, and its own tensors."""

    def __init__(self, program: Program, call: Call) -> None:
        super().__init__()
        self._program, self._paths = program, tuple(call.paths)
        self._shapes = [tensor.shape for tensor in call.inputs]
        self._fixed = (torch.tensor(call.slot), *call.tensors)
        # Experts are found by number as long as they live: not a submodule, but not let go either.
        self._stands_for = (call.layer,)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [reach(args, kwargs, path) for path in self._paths]
        if [
            tensor.shape for tensor in given
        ] != self._shapes:  # a program would read past them, without a word
            raise RuntimeError(f"compiled for {self._shapes}, called with {[t.shape for t in given]}")
        out: Tensor = self._program(*given, *self._fixed)
        return out


@dataclass(frozen=True)
class Trial:
    """What a view is tried on before something stands in for its layers.

    step      runs the view's next call on ``cache``, an empty one with room for all of them, and returns its logits [B, V]
    before    calls that nobody records, so that the cache holds something
    recorded  calls that are recorded and compared
    """

    stage: Stage
    step: Callable[[], Tensor]
    cache: KvCache
    before: int
    recorded: int


class LayerCompiler:
    """Programs by signature, kept as long as the model; compiled one at a time, in a thread, so that a cancel is
    answered while the C++ compiler runs. What was being compiled then is finished and kept."""

    def __init__(self, folder: Path) -> None:
        # Read by inductor when it first compiles; a user's own choice stands.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        self.programs: dict[tuple[Any, ...], Program] = {}
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Is something still being compiled that nobody waits for?"""
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> None:
        """Wait for a compilation that was cancelled, so that it does not run beside a measurement."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def attach(
        self,
        model: PreTrainedModel,
        trial: Trial,
        runners: Sequence[str],
        progress: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> tuple[str, list[str]]:
        """Put something faster in place of ``model``'s decoder layers: the first of ``runners`` ("native", "inductor") that
        can; which it was, and why not those before it. Raises UncompiledError where none can, the model unchanged, and
        Cancelled, likewise.
        """
        places = find_layers(model)
        if not places:
            raise UncompiledError("no decoder layers of transformers' kind were found")
        decoding = trial.stage == "decode"
        inside = [m for held, i in places for m in held[i].modules()]
        scratch = [m for m in inside if isinstance(m, PackedLinear) and m.uses_scratch]
        if scratch and decoding:  # a prompt's are called as they are
            raise UncompiledError(f"{type(scratch[0]).__name__} widens its weights into shared memory")
        if (
            not decoding
        ):  # before the trial, which other kinds need not be able to run: learned positions end somewhere
            for held, i in places:
                llama_kind(held[i])
        step, cache = trial.step, trial.cache
        for _ in range(trial.before):
            step()
        steps = [record_step(places, step, cache, keep_masks=not decoding) for _ in range(trial.recorded)]
        agreement = Agreement(cache, steps, cancelled)
        calls = steps[-1].calls
        self.settle()  # it may be compiling just this
        cache.activate()
        reasons: list[str] = []
        explained: float | None = None
        for runner in runners:
            try:
                stand_ins = [
                    self._stand_in(trial.stage, runner, i, calls, cache, progress, cancelled)
                    for i in range(len(calls))
                ]
                progress("comparing what stands in for the decoder layers with the model's own")
                for number, layer in enumerate(stand_ins):
                    agreement.compare_layer(number, layer)
                if explained is None:  # of the modules, whatever stands in for them
                    explained = agreement.rounding_of_logits(step)
                _replace(model, places, stand_ins)
                whole = runner == "native" and decoding
                around = not whole or decoder_native.take_over(model)
                try:
                    agreement.compare_logits(step, explained)
                except (UncompiledError, Cancelled):
                    decoder_native.give_back(model)
                    _replace(model, places, [call.layer for call in calls])
                    raise
            except UncompiledError as why:
                reasons.append(str(why))
            else:
                return runner, reasons if around else [
                    *reasons,
                    f"no step of our own around {type(model).__name__}",
                ]
        raise UncompiledError("; ".join(reasons))

    def _stand_in(
        self,
        stage: Stage,
        runner: str,
        number: int,
        calls: Sequence[Call],
        cache: KvCache,
        progress: Callable[[str], None],
        cancelled: Callable[[], bool],
    ) -> nn.Module:
        call = calls[number]
        if runner == "native":
            return NativeLayer(call) if stage == "decode" else PromptLayer(call)
        signature = signature_of(call)
        if signature not in self.programs:
            progress(f"compiling the decoder layers of this kind once, from layer {number} of {len(calls)}")
            self._in_thread(signature, call, cache, cancelled)
        return CompiledLayer(self.programs[signature], call)

    def _in_thread(
        self, signature: tuple[Any, ...], call: Call, cache: KvCache, cancelled: Callable[[], bool]
    ) -> None:
        failed: list[BaseException] = []

        def work() -> None:
            try:
                cache.activate()  # and is kept alive by this, also where nobody waits any more
                self.programs[signature] = _compile(call)
            except Exception as error:  # noqa: BLE001 - passed on to the thread that waits
                failed.append(error)

        thread = self._thread = threading.Thread(target=work, name="compile", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if thread.is_alive() and cancelled():
                raise Cancelled
        self._thread = None
        if failed:
            if isinstance(failed[0], UncompiledError):
                raise failed[0]
            _log.warning("a decoder layer could not be compiled", exc_info=failed[0])
            raise UncompiledError(f"the compiler failed: {faults.first_line(failed[0])}") from failed[0]


def _compile(call: Call) -> Program:
    """Trace one layer and compile it. Its program takes the tensors among the flattened arguments, the slot, and the
    layer's own tensors."""
    from torch import _inductor
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = _copy(call.layer)
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    count = len(places)

    def run(*given: Tensor) -> Tensor:
        leaves = list(flat)
        for i, tensor in zip(places, given[:count], strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with _standing_in(layer, given[count + 1 :]):
            out = layer(*args, **kwargs, pdq_slot=given[count])
        if not isinstance(out, Tensor):
            raise UncompiledError("its layers do not return one tensor each")
        return out

    # Torch keeps its precompiled headers (150 MB) in the temporary directory, wherever its cache is.
    headers = Path(cache_dir()) / "precompiled_headers"
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
    # no_grad, not inference_mode: tensors made in the latter cannot be traced
    with torch.inference_mode(False), torch.no_grad():
        inputs: list[Any] = [*(x.clone() for x in call.inputs), torch.tensor(call.slot), *call.tensors]
        graph = make_fx(run)(*inputs)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                raise UncompiledError("its layers hold tensors that are neither parameters nor buffers")
        program: Program = _inductor.compile(
            graph,
            inputs,
            # In this process, no pool of workers that would outlive it; no checks of shapes that cannot change.
            options={"compile_threads": 1, "size_asserts": False},
        )
        program(*inputs)  # the C++ is built on the first call
    return program


def _replace(
    model: nn.Module, places: Sequence[tuple[nn.ModuleList, int]], compiled: Sequence[nn.Module]
) -> None:
    """The lists are the view's own shells, their entries are changed in place."""
    for (held, index), layer in zip(places, compiled, strict=True):
        held._modules[str(index)] = layer
