"""``op`` of ``core.kernels`` → the class that is it."""

from __future__ import annotations

from typing import Any, Final

from pdq_tui.engine.formats import bnb, fp8, linears, native

OPS: Final[dict[str, Any]] = {**linears.LINEARS, **native.LINEARS, **bnb.LINEARS, **fp8.LINEARS}
