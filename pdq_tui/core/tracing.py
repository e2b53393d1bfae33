"""Kernel tables by stage from a trace of torch's profiler (Chrome's trace format).

The engine marks its stages with ranges of its own (``PREFILL``, ``DECODE``, …); everything else is torch's. Times in a
trace are microseconds. Field names are those of kineto's JSON and differ between versions, so each is looked for under
all names it ever had, and what is found under none is missing, never 0.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from pdq_tui.core.messages.profiles import KernelTime, StageTrace
from pdq_tui.errors import PdqError

PREFILL: Final = "pdq:prefill"
DECODE: Final = "pdq:decode"
#: Ranges inside of a stage: a linear layer ("pdq:linear:<op>"), writing the cache, choosing the token.
LINEAR: Final = "pdq:linear:"
KV: Final = "pdq:kv"
SAMPLE: Final = "pdq:sample"
#: What TensorBoard's plugin takes for a step.
STEP: Final = "ProfilerStep#"

GEMM: Final = "weight GEMM"
GEMV: Final = "weight GEMV"
#: A decoder layer that is one call of ours: products, attention, cache and norms together.
LAYER: Final = "whole layer"
CATEGORIES: Final = (
    LAYER, GEMM, GEMV, "dequantize", "quantize", "attention", "KV", "norm/rope/elementwise", "sampling", "copies", "other",
)  # fmt: skip
#: Rows up to which a product with the weights reads more than it multiplies.
GEMV_ROWS: Final = 8
#: A device that runs no kernel for this share of a stage waits for launches.
LAUNCH_BOUND: Final = 0.3
_STAGES: Final = {PREFILL: "prefill", DECODE: "decode"}
_ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver"})
_OPS: Final = frozenset({"cpu_op", "operator"})
_ITEM: Final = {
    "float": 4, "double": 8, "c10::bfloat16": 2, "c10::half": 2, "signed char": 1, "unsigned char": 1, "int": 4,
    "long int": 8, "long": 8, "bool": 1, "c10::float8_e4m3fn": 1, "short": 2, "short int": 2,
}  # fmt: skip


# -- files -------------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """A trace's text, gzipped or not. Raises PdqError."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, ValueError) as error:
        raise PdqError(f"{path} cannot be read: {error}") from error
    return raw.decode("utf-8", "replace")


def parse(text: str, name: str = "the trace") -> dict[str, Any]:
    """Strict: what a viewer would refuse is refused here. Raises PdqError."""

    def no_constant(word: str) -> float:
        raise ValueError(f"{word} is no JSON")

    try:
        body = msgspec.json.decode(text)  # ten times as fast, and stricter in nothing but the size of numbers
    except msgspec.DecodeError:
        try:
            body = json.loads(text, parse_constant=no_constant)
        except ValueError as error:
            raise PdqError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("traceEvents"), list):
        raise PdqError(f"{name} holds no list of events")
    return body


_NAMED: Final = re.compile(r'("name": )"(.*)"(?=, "(?:pid|ph|cat|tid|args)"|,?\s*$)')


def repaired(text: str) -> str:
    """The same trace with the names' quotes and backslashes escaped: torch writes an event's name as it is."""

    def escaped(match: re.Match[str]) -> str:
        name = match[2]
        try:
            json.loads(f'"{name}"')
        except ValueError:
            name = json.dumps(name)[1:-1]
        return f'{match[1]}"{name}"'

    return "\n".join(_NAMED.sub(escaped, line) for line in text.split("\n"))


def label(text: str) -> str:
    """A name of ours that every viewer can read: printable ASCII without quotes and backslashes."""
    return re.sub(r'[^ -~]|["\\]', "_", text)


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass
class _Event:
    name: str
    cat: str
    start: float
    end: float
    thread: tuple[Any, Any]
    args: Mapping[str, Any]
    children_us: float = 0.0
    parent: _Event | None = None
    #: Names of what it lies in, outermost first.
    within: tuple[str, ...] = ()

    @property
    def self_us(self) -> float:
        return max(0.0, self.end - self.start - self.children_us)


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _first(args: Mapping[str, Any], *names: str) -> Any:
    return next((args[n] for n in names if n in args), None)


def events_of(trace: Mapping[str, Any]) -> list[_Event]:
    """The complete events, each with times that are numbers."""
    found = []
    for e in trace.get("traceEvents", ()):
        if not isinstance(e, dict) or e.get("ph") != "X":
            continue
        start, length = _number(e.get("ts")), _number(e.get("dur"))
        if start is None or length is None or length < 0:
            continue
        args = e.get("args")
        found.append(
            _Event(
                str(e.get("name", "")),
                str(e.get("cat", "")).lower(),
                start,
                start + length,
                (e.get("pid"), e.get("tid")),
                args if isinstance(args, dict) else {},
            )
        )
    return found


def _nest(events: Iterable[_Event]) -> None:
    """Fill in what each event of one thread lies in, and how much of it its children take."""
    open_: list[_Event] = []
    for e in sorted(events, key=lambda e: (e.start, -e.end)):
        while open_ and open_[-1].end <= e.start:
            open_.pop()
        if open_:
            e.parent = parent = open_[-1]
            parent.children_us += min(e.end, parent.end) - e.start
            e.within = (*parent.within, parent.name)
        open_.append(e)


@dataclass
class _Stages:
    """Where the stages lie on the host's clock."""

    spans: list[tuple[float, float, str]] = field(default_factory=list)

    def at(self, t: float) -> int | None:
        """The number of the span that holds ``t``."""
        i = bisect_right(self.spans, (t, math.inf, "")) - 1
        return i if i >= 0 and self.spans[i][0] <= t < self.spans[i][1] else None


def stage_tables(trace: Mapping[str, Any]) -> list[StageTrace]:
    """What each stage ran. Kernels of a device are attributed by the launch that their correlation id names; without any
    kernel, the host's operators are the kernels. Raises PdqError where no stage is marked."""
    events = events_of(trace)
    threads: dict[Any, list[_Event]] = defaultdict(list)
    for e in events:
        if e.cat in _OPS or e.cat == "user_annotation":
            threads[e.thread].append(e)
    for each in threads.values():
        _nest(each)
    stages = _Stages(
        sorted((e.start, e.end, e.name) for e in events if e.cat == "user_annotation" and e.name in _STAGES)
    )
    if not stages.spans:
        raise PdqError("no stage is marked in this trace")
    kernels = [e for e in events if e.cat in _ON_DEVICE]
    tables = []
    for name, stage in _STAGES.items():
        mine = {i for i, span in enumerate(stages.spans) if span[2] == name}
        if not mine:
            continue
        if kernels:
            tables.append(_device_table(stage, mine, stages, events, kernels))
        else:
            tables.append(_host_table(stage, mine, stages, threads))
    return tables


# -- the host's operators ----------------------------------------------------------------------------------------------


def _host_table(
    stage: str, mine: set[int], stages: _Stages, threads: Mapping[Any, Sequence[_Event]]
) -> StageTrace:
    total = sum(stages.spans[i][1] - stages.spans[i][0] for i in mine)
    # The thread that the stage's own range is on; others (loaders, compilers) take no time of it.
    rows = _Rows(total)
    for each in threads.values():
        if not any(e.name in _STAGES for e in each):
            continue
        for e in each:
            if stages.at(e.start) in mine and e.name not in _STAGES and not _own_range(e.name):
                rows.add(
                    shown_name(e.name),
                    category(e.name, e.within, _rows_of(e)),
                    e.self_us,
                    work(e.name, e.args),
                )
    return StageTrace(
        stage=stage,
        steps=len(mine),
        where="cpu",
        trace_ms=total / 1e3,
        between_ms=max(0.0, total - rows.total) / 1e3,
        launch_reason="no kernel was launched on a device: the host's operators ran",
        kernels=rows.kernels(),
    )


def _own_range(name: str) -> bool:
    return name.startswith((LINEAR, STEP)) or name in (KV, SAMPLE)


def shown_name(name: str) -> str:
    """A compiled layer is an annotation of its graph: its own time is the fused kernels inside, which torch does not
    name."""
    return "compiled layer (fused kernels)" if name.startswith("## Call CompiledFxGraph") else name


# -- a device's kernels ------------------------------------------------------------------------------------------------


def _device_table(
    stage: str, mine: set[int], stages: _Stages, events: Sequence[_Event], kernels: Sequence[_Event]
) -> StageTrace:
    launches: dict[Any, _Event] = {}
    ops: dict[Any, _Event] = {}
    for e in events:
        if e.cat in _LAUNCHES:
            correlation = _first(e.args, "correlation", "correlation id", "Correlation ID")
            if correlation is not None:
                launches[correlation] = e
        elif e.cat in _OPS:
            external = _first(e.args, "External id", "external id", "external_id")
            if external is not None:
                ops[external] = e
    ran: list[tuple[_Event, _Event | None]] = []
    by_span: dict[int, list[_Event]] = defaultdict(list)
    for kernel in kernels:
        launch = launches.get(_first(kernel.args, "correlation", "correlation id", "Correlation ID"))
        op = ops.get(_first(kernel.args, "External id", "external id", "external_id"))
        host = launch or op
        span = stages.at(host.start) if host is not None else None
        if span in mine and span is not None:
            ran.append((kernel, op))
            by_span[span].append(kernel)
    if not ran:
        return StageTrace(
            stage=stage,
            steps=len(mine),
            where="device",
            trace_ms=0.0,
            launch_reason="no kernel of it is in the trace",
        )
    ran.sort(key=lambda pair: pair[0].start)
    start, end = ran[0][0].start, max(k.end for k, _ in ran)
    total = end - start
    rows = _Rows(total)
    reached = start
    for kernel, op in ran:
        # Where two streams overlap, the time is the earlier kernel's.
        own = max(0.0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
        within = (*op.within, op.name) if op is not None else ()
        kind = category(kernel.name, within, _rows_of(op))
        rows.add(kernel.name, kind, own, work(op.name, op.args) if op is not None else (None, None))
    idle = max(0.0, total - rows.total)
    share = idle / total if total else 0.0
    bound = share > LAUNCH_BOUND
    return StageTrace(
        stage=stage,
        steps=len(mine),
        where="device",
        trace_ms=total / 1e3,
        between_ms=idle / 1e3,
        launch_bound=bound,
        launch_reason=f"no kernel ran for {share:.0%} of the stage" + (": launch-bound" if bound else ""),
        kernels=rows.kernels(),
    )


# -- rows --------------------------------------------------------------------------------------------------------------


class _Rows:
    def __init__(self, total_us: float) -> None:
        self.total_us = total_us
        self.total = 0.0
        self._found: dict[tuple[str, str], list[Any]] = {}

    def add(self, name: str, kind: str, us: float, done: tuple[int | None, float | None]) -> None:
        row = self._found.setdefault((name, kind), [0, 0.0, 0, 0.0])
        row[0] += 1
        row[1] += us
        for place, value in ((2, done[0]), (3, done[1])):
            row[place] = None if row[place] is None or value is None else row[place] + value
        self.total += us

    def kernels(self) -> list[KernelTime]:
        found = [
            KernelTime(
                name=name,
                category=kind,
                calls=calls,
                ms=us / 1e3,
                share=us / self.total_us if self.total_us else 0.0,
                bytes=moved,
                flops=flops,
            )
            for (name, kind), (calls, us, moved, flops) in self._found.items()
        ]
        return sorted(found, key=lambda k: -k.ms)


def by_category(stage: StageTrace) -> dict[str, float]:
    """Milliseconds of each category, the largest first; "between kernels" is what is left of the stage."""
    found: dict[str, float] = {}
    for kernel in stage.kernels:
        found[kernel.category] = found.get(kernel.category, 0.0) + kernel.ms
    found["between kernels"] = stage.between_ms
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# -- what a kernel is --------------------------------------------------------------------------------------------------

_ATTENTION: Final = re.compile(
    r"attention|flash|fmha|sdpa|softmax|pdq_native::(causal|attend)|aten::bmm|aten::baddbmm", re.IGNORECASE
)
_PRODUCT: Final = re.compile(
    r"aten::(mm|addmm|_int_mm|_scaled_mm|_weight_int[48]pack_mm\w*)$|mkldnn::_?linear\w*|mkldnn_linear"
    r"|pdq_native::(products_|dense|int8|int4|nested)|bitsandbytes::(gemm_4bit|gemv_4bit|int8_\w*mm\w*|int8_linear\w*|int8_mixed\w*)"
    r"|gemm|gemv|tinygemm|cutlass|xmma|nvjet|wgmma",
    re.IGNORECASE,
)
_DEQUANTIZE: Final = re.compile(r"dequant|unpack|pdq_native::widen", re.IGNORECASE)
_QUANTIZE: Final = re.compile(r"(?<!de)quant|int8_vectorwise", re.IGNORECASE)
_COPY: Final = re.compile(
    r"copy|memcpy|memset|aten::(to|cat|contiguous|clone|fill_|zero_|embedding|index_select|gather|item|_local_scalar_dense)$",
    re.IGNORECASE,
)
_SAMPLING: Final = re.compile(r"argmax|aten::max$|multinomial|topk|isfinite", re.IGNORECASE)
#: Ops that widen the weights before a dense product, and those that round the activations.
_WIDENS: Final = ("dequantize", "plain", "linear-float32", "bnb4")
_ROUNDS: Final = ("w8a8", "w4a8", "llm-int8")


def category(name: str, within: Sequence[str] = (), rows: int | None = None) -> str:
    """One of CATEGORIES. ``within``: names of what it was called from, outermost first; ``rows``: of a product."""
    linear = next((w.removeprefix(LINEAR) for w in within if w.startswith(LINEAR)), None)
    if SAMPLE in within:
        return "sampling"
    if name.startswith("pdq_native::layer_"):
        return LAYER
    if KV in within or name == "pdq_native::put":
        return "KV"
    if _ATTENTION.search(name) or (linear is None and any(_ATTENTION.search(w) for w in within)):
        # What an attention operator of ours copies is the new position into the cache.
        return "KV" if "copy_" in name else "attention"
    if _PRODUCT.search(name) or any(_PRODUCT.search(w) for w in within):
        return GEMM if rows is None or rows > GEMV_ROWS else GEMV
    if _DEQUANTIZE.search(name):
        return "dequantize"
    if _QUANTIZE.search(name):
        return "quantize"
    if linear is not None and not name.startswith("aten::linear"):
        if any(word in linear for word in _ROUNDS):
            return "quantize"
        if any(word in linear for word in _WIDENS):
            return "dequantize"
    if _SAMPLING.search(name):
        return "sampling"
    if _COPY.search(name):
        return "copies"
    if (
        name.startswith(("aten::", "pdq_native::", "## Call", "triton", "void at::", "fused"))
        or "elementwise" in name
        or "reduce" in name
    ):
        return "norm/rope/elementwise"
    return "other"


def _shapes(args: Mapping[str, Any]) -> tuple[list[list[int]], list[str]]:
    dims = _first(args, "Input Dims", "Input dims", "input_dims")
    types = _first(args, "Input type", "Input Types", "input_type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return [], []
    shapes = [d if isinstance(d, list) and all(isinstance(n, int) for n in d) else [] for d in dims]
    return shapes, [str(t).lower() for t in types]


#: Operators by how their product [rows, K] × [K, N] is written in their arguments: (first operand, second, second is
#: [N, K]).
_PLACES: Final = {
    "aten::mm": (0, 1, False), "aten::_int_mm": (0, 1, False), "aten::_scaled_mm": (0, 1, False),
    "aten::addmm": (1, 2, False), "aten::_weight_int8pack_mm": (0, 1, True),
    "aten::_weight_int4pack_mm_for_cpu": (0, 1, True), "pdq_native::dense": (0, 1, True),
    "pdq_native::int8": (0, 1, True), "pdq_native::int4": (0, 1, True), "pdq_native::nested": (0, 1, True), "aten::linear": (0, 1, True),
}  # fmt: skip


#: Several products of the same rows by one call of ours; which form their weights have.
_TOGETHER: Final = re.compile(r"pdq_native::products_(dense|int8|int4|nested|mixed)_\d$")


def _rows_of(e: _Event | None) -> int | None:
    """Rows of the product that this is, or is a part of."""
    while e is not None:
        place = (0,) if _TOGETHER.match(e.name) else _PLACES.get(e.name)
        shapes, _ = _shapes(e.args)
        if place is not None and len(shapes) > place[0] and shapes[place[0]]:
            return math.prod(shapes[place[0]][:-1])
        e = e.parent
    return None


def work(name: str, args: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """(bytes, FLOPs) of one call from its operands' shapes: each operand and the result once. None where they do not
    tell: attention over a prompt is left out, since what its mask spares is not in its shapes."""
    shapes, types = _shapes(args)
    if (together := _TOGETHER.match(name)) is not None:
        return _together(together[1], args)
    place = _PLACES.get(name)
    if place is not None and len(shapes) > max(place[:2]):
        first, second, by_rows = shapes[place[0]], shapes[place[1]], place[2]
        if len(first) < 2 or len(second) < 2:
            return None, None
        rows, K = math.prod(first[:-1]), first[-1]
        N = second[0] if by_rows else second[-1]
        moved = _bytes(shapes, types)
        result = 4 if name == "aten::_int_mm" else _ITEM.get(types[place[0]], 0)
        if moved is not None and result:
            moved += rows * N * result
        return moved, 2.0 * rows * K * N
    if name in ("aten::copy_",) and len(shapes) >= 2:
        return _bytes(shapes[:2], types[:2]), None
    if (
        name.startswith("aten::_scaled_dot_product")
        and len(shapes) >= 3
        and all(len(s) == 4 for s in shapes[:3])
    ):
        B, H, L, D = shapes[0]
        moved = _bytes(shapes[:3], types[:3])
        return moved, 4.0 * B * H * D * shapes[1][2] if L == 1 else None
    return None, None


def _together(form: str, args: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Of some products of the same rows: x [rows, K], (weights, scales, residual, bias) of each, numbers, results [rows, N].
    A list's dtypes are not told: packed weights and residuals are bytes, all else is x's."""
    shapes, types = _shapes(args)
    dims = _first(args, "Input Dims", "Input dims", "input_dims")
    if len(shapes) != 4 or len(shapes[0]) != 2 or not dims[1] or len(dims[1]) != 4 * len(dims[3]):
        return None, None
    rows, K = shapes[0]
    flops = 2.0 * rows * K * sum(out[-1] for out in dims[3])
    item = _ITEM.get(types[0])
    if item is None or form == "mixed":
        return None, flops
    packed = item if form == "dense" else 1
    sizes = [(packed, item, packed, item)[i % 4] * math.prod(shape) for i, shape in enumerate(dims[1])]
    return item * (rows * K + sum(math.prod(out) for out in dims[3])) + sum(sizes), flops


def _bytes(shapes: Sequence[Sequence[int]], types: Sequence[str]) -> int | None:
    total = 0
    for shape, kind in zip(shapes, types, strict=False):
        if not shape:
            continue
        size = _ITEM.get(kind)
        if size is None:
            return None
        total += math.prod(shape) * size
    return total


# -- two arms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One kernel of a stage in two arms: ms a pass on either side, None where it did not run. ``word``: came, went,
    faster, slower, same."""

    name: str
    category: str
    before_ms: float | None
    after_ms: float | None
    word: str


def difference(before: StageTrace, after: StageTrace, *, least: float = 0.05) -> list[Change]:
    """What changes from one arm to another in a stage, the largest change first. A kernel whose time a pass changes by
    less than ``least`` of it is the same. One burst each: it names kernels, it does not rank arms."""

    def per_pass(stage: StageTrace) -> dict[tuple[str, str], float]:
        return {(k.name, k.category): k.ms / max(stage.steps, 1) for k in stage.kernels}

    one, two = per_pass(before), per_pass(after)
    found = []
    for key in one.keys() | two.keys():
        a, b = one.get(key), two.get(key)
        if a is None or b is None:
            word = "came" if a is None else "went"
        elif abs(b - a) <= least * max(a, b):
            word = "same"
        else:
            word = "faster" if b < a else "slower"
        found.append(Change(*key, a, b, word))
    return sorted(found, key=lambda c: (-abs((c.after_ms or 0.0) - (c.before_ms or 0.0)), c.name))


def pairs(one: Sequence[StageTrace], two: Sequence[StageTrace]) -> Iterator[tuple[StageTrace, StageTrace]]:
    """The stages that both have."""
    other = {s.stage: s for s in two}
    for stage in one:
        if stage.stage in other:
            yield stage, other[stage.stage]


def op_calls(trace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """How often each operator of the host was called in each stage, over all its passes."""
    events = events_of(trace)
    stages = _Stages(
        sorted((e.start, e.end, e.name) for e in events if e.cat == "user_annotation" and e.name in _STAGES)
    )
    found: dict[str, dict[str, int]] = {}
    for e in events:
        span = stages.at(e.start) if e.cat in _OPS else None
        if span is not None:
            calls = found.setdefault(_STAGES[stages.spans[span][2]], {})
            calls[e.name] = calls.get(e.name, 0) + 1
    return found
