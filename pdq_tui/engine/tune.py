"""Which kernel candidate is fastest on this machine, for each layer shape of the loaded model, format and row count.

All candidates of a cell take turns in one run, each reading another copy of the weights every time, so that no cache
serves them all (as none does in a pass through the whole model). Beside the time stands the error against float64: a
candidate that is off by more than its format's own rounding explains may not win, however fast it is.
"""

from __future__ import annotations

import importlib.metadata
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from pdq_tui.core import protocol as p
from pdq_tui.core.formats import Format, of_label
from pdq_tui.core.kernels import Candidate, KernelTable, Use
from pdq_tui.core.tuned import MAX_ERROR_FACTOR, TIE, label_of, ranges
from pdq_tui.engine import faults, native
from pdq_tui.engine.cancel import check
from pdq_tui.engine.census import Layer
from pdq_tui.engine.device import Device
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack_all
from pdq_tui.engine.formats.packed import DTYPE_NAMES, Packed, Spec, dense_dtype
from pdq_tui.engine.kernels import PACKAGES
from pdq_tui.engine.peaks import buffer_bytes
from pdq_tui.engine.plan import fit_groups
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import PdqError

#: Copies of one weight at most; smaller ones than a 500th of what is read in turn are few enough to be in a cache anyway.
MOST_COPIES: Final = 512
#: A sample is as many calls as take about this long, in ms, but once through the copies at most.
SAMPLE_MS: Final = 2.0
#: Samples of each candidate: at least, and at most.
LEAST_SAMPLES: Final = 5
MOST_SAMPLES: Final = 1000
#: After so many samples a candidate that never came within this factor of the best is left at that.
LOST_AFTER: Final = 3
LOST_FACTOR: Final = 2.0
#: Share of the rounds in which another kernel must have been faster than the one that the tables put first.
BEATS: Final = 0.8
#: The output head sees the last positions only: as many rows as requests.
HEAD_ROWS: Final = 16
#: What of a result is held against float64: so many rows and columns at most.
CHECKED_ROWS: Final = 32
CHECKED_COLUMNS: Final = 1024

Progress = Callable[[float, float | None, str], None]


def stamp(info: p.DeviceInfo, table: KernelTable, kernels: str | None) -> dict[str, str]:
    """What times of kernels depend on, by ``core.tuned.STAMP``. ``kernels``: identity of our own CPU kernels."""
    found = {
        "cpu": info.cpu or info.name,
        "gpu": info.name if info.kind == "cuda" else "",
        "isa": " ".join(info.isa),
        "threads": str(info.threads),
        "torch": str(torch.__version__),
        "kernels": (kernels or "") if info.kind == "cpu" else "",
        "candidates": table.digest,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return {key: value for key, value in found.items() if value}


@dataclass
class _Runner:
    """One candidate in a cell: a layer a copy of the weights."""

    candidate: Candidate
    layers: list[nn.Module]
    at: int = 0
    calls: int = 1
    samples: list[float] = field(default_factory=list)
    error: float | None = None
    excluded: str | None = None
    lost: bool = False


@dataclass(frozen=True)
class _Group:
    """All cells of one format on one shape. ``k`` ≥ K with columns of padding."""

    fmt: Format
    layer: Layer
    k: int
    matrices: int
    rows: tuple[tuple[int, tuple[int, int]], ...]


class Tuner:
    """The cells of one ``Tune`` on a loaded model. Raises UsageError for labels that are no formats."""

    def __init__(self, staged: StagedModel, device: Device, info: p.DeviceInfo, command: p.Tune) -> None:
        self._staged, self._device, self._info, self._command = staged, device, info, command
        # What was tuned before must not decide what is called the shipped choice now.
        self._table = staged.planner.untuned
        self._capability = staged.capability
        self.refused: dict[str, str] = {}
        self._groups = self._plan([of_label(label) for label in command.formats])
        self._random = random.Random(command.seed)

    @property
    def cells(self) -> int:
        return sum(len(group.rows) for group in self._groups)

    def started(self) -> p.TuneStarted:
        return p.TuneStarted(
            device=self._device.kind,
            stamp=stamp(self._info, self._table, native.identity()),
            dtype=DTYPE_NAMES[self._staged.dtype],
            cells=self.cells,
            refused=dict(self.refused),
        )

    @torch.inference_mode()
    def run(self, cancelled: Callable[[], bool], progress: Progress) -> Iterator[p.KernelsTimed]:
        """One after the other, the shapes with most weights first. Raises Cancelled."""
        done, total = 0, float(self.cells)
        for group in self._groups:
            what = f"{group.fmt.label} {group.layer.N} × {group.layer.K}"
            progress(done, total, what)
            broken = self._broken(group, cancelled, lambda _d, _t, label: progress(done, total, label))  # noqa: B023
            candidates = self._candidates(group, broken)
            master = self._staged.store.master(group.layer, 0 if group.layer.experts else None)
            copies = self._copies(group, candidates, master, cancelled)
            wide = master.to(self._device.torch_device, torch.float64)
            for rows, span in group.rows:
                progress(done, total, f"{what}, {rows} {'row' if rows == 1 else 'rows'}")
                yield self._cell(group, candidates, copies, wide, rows, span, broken, cancelled)
                done += 1
            del copies, wide
            self._staged.scratch.clear()
        progress(total, total, "tuned")

    # -- what is measured ----------------------------------------------------------------------------------------------

    def _plan(self, formats: Sequence[Format]) -> list[_Group]:
        shapes: dict[tuple[int, int, bool], list[Layer]] = {}
        for layer in self._staged.census.layers:
            # Experts are measured one by one, as any layer of their shape.
            shapes.setdefault((layer.N, layer.K, layer.head), []).append(layer)
        groups: dict[tuple[str, str, int, int, bool], _Group] = {}
        for layers in sorted(shapes.values(), key=lambda same: -sum(each.parameters for each in same)):
            layer = layers[0]
            counts = [rows for rows in ranges(self._command.rows) if rows[0] <= HEAD_ROWS or not layer.head]
            for fmt in formats:
                used, k, why = fit_groups(fmt, layer.K, "smaller-group")
                refusal = (
                    None if used is None else self._table.refusal(used, self._dtype(used), self._capability)
                )
                if refusal is not None:
                    self.refused[fmt.label] = refusal
                    continue
                if used is None:
                    self.refused.setdefault(f"{fmt.label} {layer.N} × {layer.K}", why or "it does not fit")
                    continue
                key = (label_of(used), self._dtype(used), layer.N, k)
                held = sum(max(1, same.experts) for same in layers)
                groups.setdefault((*key, layer.head), _Group(used, layer, k, held, tuple(counts)))
        # A head of a decoder layer's shape is measured with it.
        seen = {key[:4] for key in groups if not key[4]}
        return [group for key, group in groups.items() if group.rows and not (key[4] and key[:4] in seen)]

    def _dtype(self, fmt: Format) -> str:
        own = self._staged.dtype
        return DTYPE_NAMES[dense_dtype(fmt, own) if fmt.dense else own]

    def _spec(self, group: _Group, layout: str) -> Spec:
        return Spec(group.fmt, layout, group.layer.N, group.layer.K, group.k, self._staged.dtype)

    def _possible(self, group: _Group, dtype: str) -> list[Candidate]:
        """Candidates that fit at some row count."""
        fmt, N, k = group.fmt, group.layer.N, group.k
        return [
            c
            for c in self._table.of(fmt)
            if c.misfit(self._capability, dtype) is None
            and any(c.shape_misfit(N, k, rows, fmt.group_size) is None for rows, _ in group.rows)
        ]

    def _broken(self, group: _Group, cancelled: Callable[[], bool], progress: Progress) -> dict[str, str]:
        """Name of a candidate → why it does not work here; tried in a child process."""
        dtype = self._dtype(group.fmt)
        asked = [(c, dtype, group.layer.N, group.k) for c in self._possible(group, dtype) if c.probe]
        found = self._staged.prober.broken(asked, cancelled, progress) if asked else {}
        return {name: why for (name, *_), why in found.items()}

    def _candidates(self, group: _Group, broken: dict[str, str]) -> list[Candidate]:
        """Each kernel once: two entries of one kernel are two rules for the same thing."""
        found: dict[tuple[str, str], Candidate] = {}
        for c in sorted(self._possible(group, self._dtype(group.fmt)), key=lambda c: (c.rank, c.name)):
            if c.name not in broken:
                found.setdefault((c.op, c.layout), c)
        return list(found.values())

    def _copies(
        self, group: _Group, candidates: Sequence[Candidate], master: Tensor, cancelled: Callable[[], bool]
    ) -> dict[str, list[Packed]]:
        """Layout → the same packed bytes again and again, in memory of their own."""
        layouts = sorted({c.layout for c in candidates})
        wanted = buffer_bytes(self._device, self._info) // max(1, len(layouts))
        found = {}
        for layout in layouts:
            first = pack_all(self._spec(group, layout), master, self._device.torch_device, cancelled)
            count = min(MOST_COPIES, max(1, -(-wanted // max(1, _held(first)))))
            found[layout] = [first]
            for _ in range(count - 1):
                check(cancelled)
                found[layout].append(_copy(first))
        return found

    # -- one cell ------------------------------------------------------------------------------------------------------

    def _cell(
        self,
        group: _Group,
        candidates: Sequence[Candidate],
        copies: dict[str, list[Packed]],
        wide: Tensor,
        rows: int,
        span: tuple[int, int],
        broken: dict[str, str],
        cancelled: Callable[[], bool],
    ) -> p.KernelsTimed:
        fmt, layer = group.fmt, group.layer
        generator = torch.Generator().manual_seed(self._command.seed + rows)
        x = torch.randn(rows, layer.K, generator=generator)
        x = x.to(self._device.torch_device, self._staged.dtype)
        runners = []
        for c in candidates:
            if c.shape_misfit(layer.N, group.k, rows, fmt.group_size) is None:
                runners.append(
                    _Runner(c, [OPS[c.op](q, None, self._staged.scratch).eval() for q in copies[c.layout]])
                )
        columns = torch.randperm(layer.N, generator=generator)[:CHECKED_COLUMNS].to(x.device)
        few = x[:CHECKED_ROWS]
        wanted = few.double() @ wide[columns].t()
        for runner in runners:
            check(cancelled)
            self._first(runner, x, wanted, columns)
        alive = [runner for runner in runners if runner.error is not None]
        own, why = self._own_error(group, wide, few, wanted, columns, cancelled)
        bound = own if own is not None else min((r.error for r in alive if r.error is not None), default=None)
        for runner in alive:
            assert runner.error is not None and bound is not None
            if not runner.error <= MAX_ERROR_FACTOR * bound:
                runner.excluded = (
                    f"its error is {runner.error / bound:.1f} times the format's own ({MAX_ERROR_FACTOR:g} at most)"
                    if runner.error == runner.error
                    else "its result is not finite"
                )
        self._time(alive, x, cancelled)
        times = self._times(group, runners, rows, broken)
        held = max((sum(map(_held, copies[r.candidate.layout])) for r in runners), default=0)
        return p.KernelsTimed(
            format=label_of(fmt), dtype=self._dtype(fmt), N=layer.N, K=group.k, layers=group.matrices,
            rows=rows, rows_low=span[0], rows_high=span[1], times=times, own_error=own, own_reason=why,
            rotating_bytes=held,
        )  # fmt: skip

    def _first(self, runner: _Runner, x: Tensor, wanted: Tensor, columns: Tensor) -> None:
        """Error, and how many calls make a sample; a kernel that raises is out, whatever the reason."""
        try:
            got = runner.layers[0](x)[: wanted.shape[0], columns].double()
            runner.error = float((got - wanted).norm() / wanted.norm().clamp_min(1e-300))
            seconds = self._sample(runner, x)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, PdqError) as error:
            runner.error, runner.excluded = None, f"it failed: {faults.first_line(error)}"
            return
        runner.calls = max(1, min(len(runner.layers), int(SAMPLE_MS / 1e3 / max(seconds, 1e-9))))

    def _sample(self, runner: _Runner, x: Tensor) -> float:
        """Seconds a call, over ``calls`` calls on as many copies."""
        layers, count = runner.layers, len(runner.layers)
        self._device.synchronize()
        first = self._device.mark()
        for _ in range(runner.calls):
            layers[runner.at](x)
            runner.at = (runner.at + 1) % count
        second = self._device.mark()
        self._device.synchronize()
        return self._device.elapsed_ms(first, second) / 1e3 / runner.calls

    def _time(self, runners: Sequence[_Runner], x: Tensor, cancelled: Callable[[], bool]) -> None:
        """Rounds in which every candidate takes one turn, in random order."""
        spent = 0.0
        for number in range(MOST_SAMPLES):
            turns = [runner for runner in runners if not runner.lost]
            self._random.shuffle(turns)
            for runner in turns:
                check(cancelled)
                seconds = self._sample(runner, x)
                runner.samples.append(seconds)
                spent += seconds * runner.calls
            fair = [min(r.samples) for r in turns if r.excluded is None]
            if fair and number + 1 >= LOST_AFTER:
                for runner in turns:
                    runner.lost = min(runner.samples) > LOST_FACTOR * min(fair)
            if number + 1 >= LEAST_SAMPLES and spent >= self._command.seconds:
                return

    def _own_error(
        self,
        group: _Group,
        wide: Tensor,
        x: Tensor,
        wanted: Tensor,
        columns: Tensor,
        cancelled: Callable[[], bool],
    ) -> tuple[float | None, str | None]:
        """(relative error of the format itself: weights (and activations) rounded as it says, multiplied in float32, the
        result rounded to the model's dtype; why there is none)."""
        fmt, N, K = group.fmt, group.layer.N, group.layer.K
        if fmt.dense:
            weights = dense_dtype(fmt, self._staged.dtype)
            exact = x.to(weights).double() @ wide[columns].to(weights).double().t()
            rounded = exact.to(weights).to(x.dtype)
            return float((rounded.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)), None
        exactly = [
            c
            for c in self._table.of(fmt)
            if c.arithmetic == "fp32"
            and c.misfit(self._capability, "fp32") is None
            and c.shape_misfit(N, group.k, x.shape[0], fmt.group_size) is None
        ]
        asked = [(c, "fp32", N, group.k) for c in exactly if c.probe]
        broken = (
            {name: why for (name, *_), why in self._staged.prober.broken(asked, cancelled).items()}
            if asked
            else {}
        )
        reasons = []
        for c in sorted(exactly, key=lambda c: (c.rank, c.name)):
            if c.name in broken:
                reasons.append(f"{c.name} failed its probe: {broken[c.name]}")
                continue
            spec = Spec(fmt, c.layout, N, K, group.k, torch.float32)
            try:
                packed = pack_all(spec, wide.float(), self._device.torch_device, cancelled)
                got = OPS[c.op](packed, None, self._staged.scratch)(x.float())[:, columns].to(x.dtype)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, PdqError) as error:
                reasons.append(f"{c.name} failed: {faults.first_line(error)}")
                continue
            off = float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))
            if off > 0:
                return off, None
            reasons.append(f"{c.name} is exact to the last bit")
        return None, "; ".join(reasons) or "nothing multiplies it in float32 here"

    def _times(
        self, group: _Group, runners: Sequence[_Runner], rows: int, broken: dict[str, str]
    ) -> list[p.CandidateTime]:
        shipped = self._table.place(
            Use(group.fmt), group.layer.N, group.k, rows, self._dtype(group.fmt), self._capability, broken
        ).candidate
        best: set[str] = set()
        for layout in {r.candidate.layout for r in runners}:
            fair = [r for r in runners if r.candidate.layout == layout and r.samples and r.excluded is None]
            if fair:
                best.add(_fastest(sorted(fair, key=lambda r: r.candidate.order(rows))).candidate.name)
        found = []
        for r in runners:
            c = r.candidate
            time = p.CandidateTime(
                kernel=c.name, layout=c.layout, n=len(r.samples), error=r.error, excluded=r.excluded,
                best=c.name in best,
                shipped=shipped is not None and (shipped.op, shipped.layout) == (c.op, c.layout),
            )  # fmt: skip
            if r.samples:
                time.us = statistics.median(r.samples) * 1e6
                quarters = statistics.quantiles(r.samples, n=4, method="inclusive")
                time.us_low, time.us_high = quarters[0] * 1e6, quarters[2] * 1e6
            found.append(time)
        for name, why in broken.items():
            found.append(p.CandidateTime(kernel=name, layout="", excluded=f"its probe failed: {why}"))
        return sorted(found, key=lambda t: (t.us is None, t.us or 0.0, t.kernel))


def _copy(packed: Packed) -> Packed:
    scales = None if packed.scales is None else packed.scales.clone()
    base = None if packed.base is None else _copy(packed.base)
    return Packed(packed.spec, packed.weight.clone(), scales, base=base)


def _held(packed: Packed) -> int:
    """Bytes that a product reads, of all parts."""
    return packed.nbytes + (0 if packed.base is None else _held(packed.base))


def _fastest(runners: Sequence[_Runner]) -> _Runner:
    """The first of these, in the tables' order, unless another one is clearly faster: by its median, and in at least four
    of five of the rounds that both ran. On a busy machine a median alone changes from one minute to the next."""
    first = runners[0]
    bar = statistics.median(first.samples) / (1 + TIE)

    def beats(other: _Runner) -> bool:
        pairs = list(zip(other.samples, first.samples, strict=False))
        return statistics.median(other.samples) <= bar and sum(a < b for a, b in pairs) >= BEATS * len(pairs)

    return min(filter(beats, runners[1:]), key=lambda r: statistics.median(r.samples), default=first)
