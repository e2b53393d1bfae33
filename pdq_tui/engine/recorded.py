"""Calls of a view's decoder layers, recorded while it runs: what compiling them starts from, and comparing them goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_layers import GradientCheckpointingLayer

from pdq_tui.engine.kv import Held, KvCache

#: A mask has another shape at every step, and the operator takes it from the cache.
_NO_MASK: Final = {"attention_mask": None}


class UncompiledError(Exception):
    """These layers stay eager; the message says why."""


class UnknownKindError(UncompiledError):
    """Nothing is known that could stand in for layers of this kind: no fallback from anything."""


class PassCache:
    """Stands for the cache while a layer is traced: the operator does the writing."""

    def update(self, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return key, value


def owned(layer: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """(the dict that holds it, its key, tensor) of every parameter and buffer, in a fixed order."""
    for module in layer.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield held, name, tensor


def tensors_of(layer: nn.Module) -> list[Tensor]:
    return [tensor.detach() for _, _, tensor in owned(layer)]


def find_layers(model: nn.Module) -> list[tuple[nn.ModuleList, int]]:
    """Where the decoder layers are: (list, index), in the model's order."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            found += [
                (module, i) for i, child in enumerate(module) if isinstance(child, GradientCheckpointingLayer)
            ]
    return found


#: Where an argument stands: 0 positional or 1 by name, then its keys.
Place = tuple[int, tuple[Any, ...]]


@dataclass
class Call:
    """One recorded call of a layer. ``paths`` and ``inputs``: its tensor arguments, the mask not among them, the hidden
    state first. ``args`` and ``kwargs`` hold a stand-in for the cache."""

    layer: nn.Module
    slot: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    paths: list[Place]
    inputs: list[Tensor]
    tensors: list[Tensor]
    out: Tensor | None = None

    def given(self, scale: float, cache: KvCache | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, the hidden state times ``scale``, and ``cache`` in place of its stand-in where there is one."""

        def changed(leaf: Any) -> Any:
            if leaf is self.inputs[0]:
                return leaf * scale
            return cache if cache is not None and isinstance(leaf, PassCache) else leaf

        args, kwargs = pytree.tree_map(changed, (self.args, self.kwargs))
        return args, kwargs


@dataclass
class Step:
    """One recorded call that wrote ``positions`` positions from ``start`` on. ``held``: the cache before it; ``calls``: by
    layer; ``logits``: [B, V]."""

    start: int
    positions: int
    held: Held
    calls: list[Call]
    logits: Tensor


def _record(
    layer: nn.Module, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], keep_mask: bool
) -> Call:
    """The cache becomes a stand-in, and of a step the mask None: the operator has both."""
    found, spec = pytree.tree_flatten_with_path(
        (args, kwargs | _NO_MASK if "attention_mask" in kwargs and not keep_mask else kwargs)
    )
    leaves = [
        PassCache() if isinstance(leaf, KvCache) else leaf.clone() if isinstance(leaf, Tensor) else leaf
        for _, leaf in found
    ]
    paths = [(_key(path[0]), tuple(map(_key, path[1:]))) for path, leaf in found if isinstance(leaf, Tensor)]
    mine, named = pytree.tree_unflatten(leaves, spec)
    return Call(
        layer,
        _slot(layer, number),
        mine,
        named,
        paths,
        [x for x in leaves if isinstance(x, Tensor)],
        tensors_of(layer),
    )


def _key(entry: pytree.KeyEntry) -> Any:
    """What stands between the brackets."""
    if isinstance(entry, pytree.SequenceKey):
        return entry.idx
    if isinstance(entry, pytree.MappingKey):
        return entry.key
    raise UncompiledError(f"a layer's arguments hold a {type(entry).__name__}")


def reach(args: tuple[Any, ...], kwargs: dict[str, Any], path: Place) -> Any:
    found: Any = kwargs if path[0] else args
    for key in path[1]:
        found = found[key]
    return found


def signature_of(call: Call) -> tuple[Any, ...]:
    """Equal for layers that one program may serve: classes, plain settings, and what every tensor looks like. Whether
    that was enough, the comparison of results tells."""
    modules = tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, (int, float, str, bool)) and key != "layer_idx"
            ),
        )
        for name, module in call.layer.named_modules()
    )
    flat, _ = pytree.tree_flatten((call.args, call.kwargs))
    fixed = tuple(repr(x) for x in flat if x is None or isinstance(x, (int, float, str, bool)))
    looks = tuple((tuple(x.shape), x.stride(), x.dtype) for x in [*call.inputs, *call.tensors])
    return modules, fixed, tuple(call.paths), looks


def record_step(
    places: Sequence[tuple[nn.ModuleList, int]],
    step: Callable[[], Tensor],
    cache: KvCache,
    *,
    keep_masks: bool = False,
) -> Step:
    """Run ``step`` and keep every layer's call, its mask where what stands in takes one. Raises UncompiledError for layers
    that return something else than one tensor."""
    held = cache.copied()
    recorder = Recorder(places, keep_masks)
    try:
        logits = step()
    finally:
        recorder.close()
    calls = [recorder.calls[i] for i in range(len(places)) if i in recorder.calls]
    if len(calls) != len(places) or any(call.out is None for call in calls):
        raise UncompiledError("its layers do not return one tensor each")
    return Step(cache.start, cache.end - cache.start, held, calls, logits.clone())


class Recorder:
    """Hooks on every layer for one step."""

    def __init__(self, places: Sequence[tuple[nn.ModuleList, int]], keep_masks: bool) -> None:
        self._keep_masks = keep_masks
        self.calls: dict[int, Call] = {}
        self._handles = []
        for number, (held, index) in enumerate(places):
            layer = held[index]
            self._handles.append(layer.register_forward_pre_hook(self._before(number), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._after(number)))

    def _before(self, number: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[number] = _record(layer, number, args, kwargs, self._keep_masks)

        return hook

    def _after(self, number: int) -> Callable[..., None]:
        def hook(_layer: nn.Module, _args: object, out: object) -> None:
            if isinstance(out, Tensor):
                self.calls[number].out = out.clone()

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _slot(layer: nn.Module, number: int) -> int:
    """The layer's number in the cache."""
    found = {int(i) for m in layer.modules() if isinstance(i := getattr(m, "layer_idx", None), int)}
    if len(found) > 1:
        raise UncompiledError("a layer writes to more than one place of the cache")
    return found.pop() if found else number
