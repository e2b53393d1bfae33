"""Several CUDA devices that are not there: tensors that carry one, compute on the CPU, and refuse as CUDA does to meet.

``Pretended`` is a mode: inside it ``device="cuda:1"`` of a factory and ``.to("cuda:1")`` make a ``Far`` tensor. An operator
that gets tensors of two devices raises, except for a CPU tensor without dimensions, a CPU index, and a copy. ``moves`` counts
copies between devices by (from, to); ``ran`` the operators by device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from pdq_tui.core.protocol import DeviceInfo

_CPU = torch.device("cpu")
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_")

moves: Counter[tuple[str, str]] = Counter()
ran: Counter[str] = Counter()


class Far(torch.Tensor):
    """A tensor of ``inner``'s numbers that says it lies on ``far``."""

    inner: torch.Tensor
    far: torch.device

    @staticmethod
    def __new__(cls, inner: torch.Tensor, far: torch.device) -> Far:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        made.inner, made.far = inner, far
        return made

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"Far({self.inner!r}, {self.far})"

    @property
    def device(self) -> torch.device:
        return self.far

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "tolist":
            return args[0].inner.tolist()
        if name == "data_ptr":
            return args[0].inner.data_ptr()
        if func is torch.Tensor.to:
            return _to(args, kwargs)
        if name in ("cpu",):
            return _moved(args[0], _CPU)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        found = {x.far for x in flat if isinstance(x, Far)}
        near = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Far) and x.dim()]
        if func not in _COPIES and (len(found) > 1 or (near and func._schema.name not in _INDEXED)):
            devices = sorted(map(str, found | ({_CPU} if near else set())))
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices)}!"
                f" ({func})"
            )
        asked = kwargs.get("device")
        first = next(x for x in flat if isinstance(x, torch.Tensor))
        where = first.far if isinstance(first, Far) else None
        if where is None and func not in _COPIES:
            where = next(iter(found))
        if asked is not None:
            where = (
                None if torch.device(asked).type == "cpu" and func._schema.name != "aten::_to_copy" else where
            )
        ran[str(where)] += 1
        if func is torch.ops.aten.copy_.default and len(found | {where}) > 1:
            moves[str(args[1].device), str(args[0].device)] += 1
        known = {id(x.inner): x for x in flat if isinstance(x, Far)}
        inner_args, inner_kwargs = tree_unflatten([x.inner if isinstance(x, Far) else x for x in flat], spec)
        if asked is not None:
            inner_kwargs["device"] = _CPU
        out = func(*inner_args, **inner_kwargs)
        leaves, shape = tree_flatten(out)
        wrapped = [_wrap(x, known, where) for x in leaves]
        return tree_unflatten(wrapped, shape)


def _wrap(made: Any, known: dict[int, Far], where: torch.device | None) -> Any:
    if not isinstance(made, torch.Tensor) or where is None:
        return made
    same = known.get(id(made))
    return Far(made, where) if same is None else same


def _moved(tensor: torch.Tensor, device: torch.device, **kwargs: Any) -> torch.Tensor:
    inner = tensor.inner if isinstance(tensor, Far) else tensor
    if tensor.device != device:
        moves[str(tensor.device), str(device)] += 1
        copied = inner.to(**kwargs) if kwargs.get("dtype") not in (None, inner.dtype) else inner.clone()
    else:
        copied = inner.to(**kwargs) if kwargs else inner
        if copied is inner:
            return tensor
    made: torch.Tensor = copied.detach() if device.type == "cpu" else Far(copied.detach(), device)
    return made


def _to(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, *rest = args
    device = kwargs.get("device")
    dtype = kwargs.get("dtype")
    for given in rest:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, torch.Tensor):
            device, dtype = given.device, given.dtype
        elif isinstance(given, (str, torch.device)):
            device = given
    where = tensor.device if device is None else torch.device(device)
    if not isinstance(tensor, Far) and where.type != "cuda":
        return torch._C.TensorBase.to(*args, **kwargs)
    return _moved(tensor, where, **({"dtype": dtype} if dtype is not None else {}))


class Pretended(TorchFunctionMode):
    """While it is entered, devices of type "cuda" are pretended."""

    def __enter__(self) -> Any:
        moves.clear()
        ran.clear()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return _to(args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            made = func(*args, **kwargs)
            return made if isinstance(made, Far) else Far(made, torch.device(device))
        return func(*args, **kwargs)


class FarDevice:
    """One of the pretended devices, with the CPU's kernels. ``free``: bytes that are said to be free."""

    kind = "cpu"
    memory_method = "pretended"
    capability: tuple[int, int] | None = None

    def __init__(self, index: int, free: int | None = None) -> None:
        self.torch_device = torch.device("cuda", index)
        self.total_bytes = self.free = free
        self.log: list[str] = []
        self.peak: int | None = None

    def info(self) -> DeviceInfo:
        index = self.torch_device.index
        return DeviceInfo(
            kind="cuda", name="Pretended GPU", index=index, uuid=f"GPU-{index}", memory_bytes=self.total_bytes
        )

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def mark(self) -> float:
        self.log.append("mark")
        return float(len(self.log))

    def elapsed_ms(self, first: float, second: float) -> float:
        return second - first

    def peek_ms(self, first: float, second: float) -> float | None:
        return second - first

    def host_ns(self) -> int:
        return 1_000_000 * len(self.log)

    def reset_peak(self) -> None:
        self.log.append("reset")

    def peak_bytes(self) -> int | None:
        return self.peak

    def allocated_bytes(self) -> int | None:
        return self.peak

    def free_bytes(self) -> int | None:
        return self.free

    def empty_cache(self, mapped: Iterable[Path] = ()) -> None:
        self.log.append("empty")


def far_of(tensor: torch.Tensor) -> str:
    return str(tensor.device)


Moved = Callable[[torch.Tensor], torch.Tensor]
