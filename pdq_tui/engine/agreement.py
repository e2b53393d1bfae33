"""Compiled layers against the modules that they stand for, on decode steps that the modules ran.

Program and modules round at different places, so their results differ; by how much they may is measured on the modules
themselves: each of their results is rounded once more at random, and what that changes is what rounding explains here.

Two comparisons. Layer by layer, what is added to the hidden state: the state that a layer is given is scaled down to the
size of what it adds, since in a deep layer the rounding of a large state hides errors of a tenth. And the logits of whole
steps, from the cache that the modules left: a small error drowns in them, what is wired wrongly does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from pdq_tui.engine import faults
from pdq_tui.engine.cancel import check
from pdq_tui.engine.kv import KvCache
from pdq_tui.engine.recorded import Step, UncompiledError

#: Times what one more rounding changes that a layer, and the logits, may differ. Measured on a model of 30 layers in
#: bf16: layers 0.4 to 1.4, and 2.1 (W8A8) to 5 and more with a tenth too much in any of them; logits 0.7 to 1.9.
LAYER_ROUNDINGS: Final = 2.0
LOGIT_ROUNDINGS: Final = 4.0
#: A share that is always allowed: a few roundings of the dtype, and one activation that W8A8 rounds to the other side.
ROUNDINGS_ALLOWED: Final = 4
FLIP_ALLOWED: Final = 5e-3
#: The hidden state is scaled down no further than to this: a norm adds its epsilon to it.
LEAST_SCALE_LOG2: Final = -8


class Agreement:
    """``steps``: consecutive ones, which the modules ran on ``cache``."""

    def __init__(self, cache: KvCache, steps: Sequence[Step], cancelled: Callable[[], bool]) -> None:
        self._cache, self._steps, self._cancelled = cache, steps, cancelled
        self._random = torch.Generator().manual_seed(0)

    def compare_layer(self, number: int, layer: nn.Module) -> None:
        """``layer`` against the modules of the recorded calls of this number. Raises UncompiledError, Cancelled."""
        apart = explained = added = 0.0
        floor = 0.0
        for step in self._steps:
            check(self._cancelled)
            call = step.calls[number]
            assert call.out is not None
            state, floor = call.inputs[0], _floor(call.out.dtype)
            scale = _scale(_square(call.out - state), _square(state))
            args, kwargs = call.given(scale, self._cache)
            self._at(step, call.slot)
            with self._rounding(call.layer):
                rounded = call.layer(*args, **kwargs)
            self._at(step, call.slot)
            wanted = call.layer(*args, **kwargs)
            self._at(step, call.slot)
            args, kwargs = call.given(scale)
            try:
                got = layer(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
                raise UncompiledError(
                    f"layer {number} compiled does not run: {faults.first_line(error)}"
                ) from error
            apart += _apart(got, wanted)
            explained += _apart(rounded, wanted)
            added += _apart(wanted, state * scale)
        _judge(
            f"layer {number} compiled differs from its modules",
            apart,
            explained,
            added,
            LAYER_ROUNDINGS,
            floor,
        )

    def rounding_of_logits(self, step: Callable[[], Tensor]) -> float:
        """Σ of squared differences that one more rounding in the layers makes to the logits. ``step``: runs the next call of
        the modules."""
        total = 0.0
        for recorded in self._steps:
            check(self._cancelled)
            self._before(recorded)
            with self._rounding(*(call.layer for call in recorded.calls)):
                total += _apart(step(), recorded.logits)
        return total

    def compare_logits(self, step: Callable[[], Tensor], explained: float) -> None:
        """``step``: runs the next call of the programs. Raises UncompiledError, Cancelled."""
        apart = size = floor = 0.0
        for recorded in self._steps:
            check(self._cancelled)
            self._before(recorded)
            try:
                got = step()
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
                raise UncompiledError(f"a step compiled does not run: {faults.first_line(error)}") from error
            apart += _apart(got, recorded.logits)
            size += _square(recorded.logits - recorded.logits.mean(-1, keepdim=True))
            floor = _floor(recorded.logits.dtype)
        _judge("the logits of compiled steps differ", apart, explained, size, LOGIT_ROUNDINGS, floor)

    # -- the cache as the modules found it -----------------------------------------------------------------------------

    def _before(self, step: Step) -> None:
        self._cache.restore(step.held)
        self._cache.rewind(step.start)

    def _at(self, step: Step, slot: int) -> None:
        """In the midst of ``step``, before the layer of this place in the cache writes."""
        self._cache.restore(step.held, slot)
        self._cache.rewind(step.start)
        self._cache.advance(step.positions)

    # -- one more rounding ---------------------------------------------------------------------------------------------

    @contextmanager
    def _rounding(self, *layers: nn.Module) -> Iterator[None]:
        """Every result inside these layers is off by up to half a unit in its last place, at random."""

        def hook(_module: nn.Module, _args: object, out: object) -> Tensor | None:
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return None
            half = 0.5 * torch.finfo(out.dtype).eps
            share = torch.empty(out.shape, dtype=torch.float64).uniform_(-half, half, generator=self._random)
            return (out.double() * (1 + share.to(out.device))).to(out.dtype)

        handles = [module.register_forward_hook(hook) for layer in layers for module in layer.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _judge(what: str, apart: float, explained: float, size: float, roundings: float, floor: float) -> None:
    """Sums of squares: of the difference, of what rounding explains, and of what both are a share of."""
    share, rounding = (_share(part, size) for part in (apart, explained))
    allowed = max(floor, roundings * rounding)
    # NaN compares false; where rounding explains anything, nothing was compared.
    if not (share <= allowed and math.isfinite(share) and math.isfinite(rounding)):
        raise UncompiledError(f"{what} by {share:.2g} (allowed {allowed:.2g})")


def _share(part: float, size: float) -> float:
    if size:
        return math.sqrt(part / size)
    return math.inf if part else 0.0


def _floor(dtype: torch.dtype) -> float:
    return max(FLIP_ALLOWED, ROUNDINGS_ALLOWED * torch.finfo(dtype).eps)


def _scale(added: float, state: float) -> float:
    """The power of two, so that nothing is rounded, that brings the state to the size of what is added to it; never up.
    Both as sums of squares."""
    if not 0 < added < state:
        return 1.0
    return 2.0 ** max(LEAST_SCALE_LOG2, math.floor(0.5 * math.log2(added / state)))


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _apart(one: Tensor, other: Tensor) -> float:
    return _square(one.double() - other.double())
