"""A model that runs under a policy: a prefill view and a decode view over one set of tensors.

The stage is the request's state: ``Generation.prefill`` uses the one view, ``step`` the other, whatever the number of
tokens. Toggling between policies whose weights are resident is a change of pointers.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pdq_tui import locations
from pdq_tui.core.kernels import Capability, KernelTable
from pdq_tui.core.kv import KvPolicy
from pdq_tui.core.policy import STAGES, Policy, Stage
from pdq_tui.core.protocol import Coverage, Fallback, KvInfo, WeightsInfo
from pdq_tui.engine import attention, experts
from pdq_tui.engine.beside import fallbacks_beside
from pdq_tui.engine.census import Layer, check_fit, take_census
from pdq_tui.engine.checkpoint import Masters
from pdq_tui.engine.cost import CostModel
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.packed import DTYPE_NAMES, PackedStack, Spec
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.generation import Generation
from pdq_tui.engine.kernels import Prober, capability
from pdq_tui.engine.kv import KvCache, KvShape
from pdq_tui.engine.kv_pool import KvPool
from pdq_tui.engine.layers import LayerCompiler, Trial
from pdq_tui.engine.layout import Layout, on_one
from pdq_tui.engine.pieces import Pieces, pieces_of
from pdq_tui.engine.plan import (
    Placement,
    Plan,
    Planner,
    coverage_of,
    fallbacks_of,
    requantized,
    warnings_of,
    weights_of,
)
from pdq_tui.engine.recorded import UncompiledError, UnknownKindError
from pdq_tui.engine.seams import Seams
from pdq_tui.engine.views import Caller, copy_shell
from pdq_tui.engine.weights import HEADROOM_BYTES, Key, Progress, SourceWeights, WeightStore
from pdq_tui.errors import UnfitError, UsageError

#: Of each of the two pieces of a prompt that a view's stand-ins are tried on: more rows than are multiplied one by one.
TRIED_POSITIONS: Final = 40
TRIED_PADDING: Final = 7
#: A stage's ``source`` → (its skeleton like the model's, its masters). Raises PdqError, Cancelled.
OpenSource = Callable[[str, Progress, Callable[[], bool]], tuple[PreTrainedModel, Masters]]


class ModelDevice(Protocol):
    """What a staged model needs of ``engine.device.Device``."""

    kind: str
    torch_device: torch.device
    capability: tuple[int, int] | None

    def free_bytes(self) -> int | None: ...
    def empty_cache(self, mapped: Iterable[Path] = ()) -> None: ...


class Several(ModelDevice, Protocol):
    """The same of several devices; see ``engine.devices``."""

    def free_on(self, device: torch.device) -> int | None: ...


class StagedModel:
    """One loaded model and everything packed from it.

    skeleton   HF causal LM in eval mode; weights of linear layers may be on meta, everything else is on the device.
    masters    the unquantized weights by parameter name, in the checkpoint's own layout (GPT-2's Conv1D: [K, N]).
    attention  "pdq" (this engine's own), or a transformers implementation ("sdpa", "eager") for both stages.
    prefill_rows  the most rows of a prompt that run at once: None as the kernel table says, 0: it is never cut.
    layers     "auto": decoder layers run as the kernel table says; "eager": always transformers' modules.
    sources    opens the checkpoint that a stage names; None: there is none to be had.
    layout     where the skeleton's modules lie; None: all on ``device``. Of several devices ``device`` is a ``Several``, and
               decoder layers run as transformers' modules.
    Raises UnfitError for models whose cache or attention this engine does not implement.
    """

    def __init__(
        self,
        skeleton: PreTrainedModel,
        masters: Masters,
        device: ModelDevice,
        *,
        budget_bytes: int | None,
        kernels: KernelTable,
        attention_name: str = "pdq",
        layers: str = "eager",
        prefill_rows: int | None = 0,
        sources: OpenSource | None = None,
        layout: Layout | None = None,
    ) -> None:
        attention.register()
        experts.register()
        self.skeleton, self.device = skeleton, device
        self.layout = layout if layout is not None else on_one(device.torch_device)
        self.census = take_census(skeleton)
        check_fit(skeleton, attention_name)
        self.capability: Capability = capability(device)
        embedding = skeleton.get_input_embeddings()
        assert isinstance(embedding.weight, Tensor)
        self.dtype: torch.dtype = embedding.weight.dtype
        self.prober = Prober(locations.cache_dir() / "kernel-probes.json", device.torch_device.type)
        self.planner = Planner(self.census, self.dtype, kernels, self.capability, self.prober.broken)
        parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        own = {
            layer.name: parameters[layer.parameter].detach()
            for layer in self.census.layers
            if parameters[layer.parameter].device == self.layout.of(layer.name)
        }
        self._parameters = parameters
        self._open_source = sources
        self.store = WeightStore(masters, self.layout, budget_bytes, own)
        self.kv = KvShape(skeleton.config, self.dtype)
        self.caches = KvPool(self.kv, self.layout, own_attention=attention_name == "pdq")
        config = skeleton.config.get_text_config()
        self.costs = CostModel(self.census, self.kv, int(config.hidden_size))
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.rotary = getattr(config, "rope_parameters", None) is not None
        self.scratch = Scratch()
        self.caller = Caller(skeleton)
        self.attention_name = attention_name
        self.layers, self.kernels = layers, kernels
        self.prefill_rows = prefill_rows
        self.compiler = LayerCompiler(locations.cache_dir() / "inductor")
        self._arms: weakref.WeakSet[StagedArm] = weakref.WeakSet()
        self._views: weakref.WeakValueDictionary[tuple[Any, ...], View] = weakref.WeakValueDictionary()

    # -- planning and packing ------------------------------------------------------------------------------------------

    def plan(self, policy: Policy, rows: Iterable[int], *, hard: bool = False) -> Plan:
        """What ``apply`` would do; touches no weights.

        rows  row counts of the workload: prompt tokens × batch (the largest is taken for prefill) and batch (the
              smallest, for decode).
        Raises PdqError where the policy is refused: nothing runs it here, or ``hard`` / on_fallback = "fail" and
        something would not be as the policy says.
        """
        self._open(policy, lambda *_: None, lambda: False)
        self.caches.check(policy.kv, policy.name)
        rows = list(rows)
        by_stage = self._placements(policy, rows)
        wanted = _wanted(by_stage)
        dtype = DTYPE_NAMES[self.dtype]
        coverage: dict[str, Coverage] = {
            s: coverage_of(by_stage[s], self.census.fused, dtype) for s in STAGES
        }
        for stage in STAGES:
            coverage[stage].source = policy.stage(stage).source
        pieces = self.pieces(policy.kv)
        if (most := max(rows, default=1)) > pieces.most(most):
            coverage["prefill"].rows = pieces.rows
        if most > (self.prefill_rows or self.kernels.prefill_rows or most):
            coverage["prefill"].rows_reason = pieces.reason
        placements = [*by_stage["prefill"], *by_stage["decode"]]
        fallbacks = fallbacks_of(placements)
        warnings = warnings_of(policy, coverage)
        changed = fallbacks_of(p for p in placements if not p.as_written)
        if changed and (hard or policy.on_fallback == "fail"):
            first = changed[0]
            raise UnfitError(
                f"{policy.name}: {first.module} in {first.stage} would run {first.used}, not {first.wanted}:"
                f" {first.reason}",
                'allow it with on_fallback = "warn"' if not hard else "leave out --hard to allow it",
            )
        if warnings and hard:
            raise UnfitError(f"{policy.name}: {warnings[0]}", "leave out --hard to allow it")
        warnings += requantized(placements, self.store.format)
        warnings += policy.unmatched(placement.layer.name for placement in by_stage["prefill"])
        weights = weights_of(by_stage, self.census, coverage)
        used = {policy.stage(stage).source for stage in STAGES}
        weights.kept_bytes += sum(self.store.sources[source].other_bytes for source in used)
        new = self.store.new_bytes(wanted)
        weights.session_resident_bytes = self.session_resident_bytes + new
        misfits = [
            f"{f.module}{f' and {f.modules - 1} more' if f.modules > 1 else ''} in {f.stage}: {f.reason}"
            for f in fallbacks
        ]
        return Plan(
            policy=policy,
            new_bytes=new,
            total_bytes=weights.stored_bytes,
            coverage=coverage,
            weights=weights,
            fallbacks=fallbacks,
            misfits=misfits,
            warnings=warnings,
        )

    def apply(
        self,
        policy: Policy,
        *,
        rows: Iterable[int],
        request: tuple[int, int] | None = None,
        hard: bool = False,
        progress: Progress | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StagedArm:
        """Pack what is missing and return the arm, ready to start.

        request: (batch, capacity) of the workload; its KV cache, and those of the other arms, have to fit as well.
        progress(done bytes, total bytes, label) before each layer; ``cancelled`` is asked at least every few million
        weights. Raises Cancelled (what is packed stays), UnfitError where it does not fit (before anything is packed),
        and whatever ``plan`` raises.
        """
        rows = list(rows)
        progress = progress or (lambda *_: None)
        self._open(policy, progress, cancelled)
        self.planner.probe(policy, cancelled, progress)
        plan = self.plan(policy, rows, hard=hard)
        wanted = _wanted(self._placements(policy, rows))
        live = {key for arm in self._arms for key in arm.keys}
        self.prober.try_caches(self.caches.own_kernels(policy.kv), self.dtype, cancelled, progress)
        beside = max(0, plan.weights.scratch_bytes - self.scratch.nbytes)
        kvs = {policy.kv, *(arm.policy.kv for arm in self._arms)}

        def kv_bytes(on: torch.device | None) -> int:
            return self.caches.new_bytes(kvs, *request, on) if request is not None else 0

        self._check_fit(wanted, live | set(wanted), lambda on: beside + kv_bytes(on))
        packed = self.store.pack_missing(wanted, progress, cancelled)
        arm = StagedArm(self, policy, plan, rows, frozenset(wanted), resident=packed == 0)
        views = arm.prepare(progress, cancelled)
        if hard and (others := fallbacks_beside(arm, views)):
            raise UnfitError(f"{policy.name}: {others[0]}", "leave out --hard to allow it")
        self._arms.add(arm)
        return arm

    def _check_fit(
        self,
        wanted: Mapping[Key, tuple[Layer, Spec]],
        live: set[Key],
        beside: Callable[[torch.device | None], int],
    ) -> None:
        """Make room for what is to be packed, on each device for what lies there. ``beside``: bytes that are needed beside
        it, in all (None) or on one device. Raises UnfitError."""
        new_bytes = self.store.new_bytes(wanted)
        if not self.layout.several:
            self.store.check_fit(new_bytes, live, self.device.free_bytes(), beside(None))
            return
        self.store.check_budget(new_bytes, live)
        for on in self.layout.devices:
            mine = {key: what for key, what in wanted.items() if self.layout.of(key[0]) == on}
            self.store.check_free(self.store.new_bytes(mine), live, self.free_on(on), beside(on), on)

    def free_on(self, device: torch.device) -> int | None:
        """Of a model on several devices."""
        return cast(Several, self.device).free_on(device)

    def release(self, keep: Sequence[StagedArm]) -> None:
        """Drop every packed weight, view and KV buffer that these arms do not use. Other arms must not be used after."""
        for arm in list(self._arms):
            if arm not in keep:
                self._arms.discard(arm)
                arm.drop()
        self.store.keep_only({key for arm in keep for key in arm.keys})
        used = {"", *(arm.policy.stage(stage).source for arm in keep for stage in STAGES)}
        self.store.sources = {name: source for name, source in self.store.sources.items() if name in used}
        self.caches.clear()
        self.scratch.clear()
        self.give_back()

    def give_back(self) -> None:
        """Return to the system what packing left behind: free pages of the heap, and the checkpoint's pages that were
        read. What an arm still reads of them comes back with its next pass."""
        gc.collect()
        self.device.empty_cache(self.store.files())

    @property
    def session_resident_bytes(self) -> int:
        """The model's own tensors and everything packed or taken from the masters, of all arms."""
        others = sum(source.other_bytes for source in self.store.sources.values())
        return self.census.other_bytes + others + self.store.nbytes

    def other_bytes_on(self, device: torch.device) -> int:
        """Of the model's own tensors that no policy replaces, as ``census.other_bytes``."""
        own = [*self.skeleton.parameters(), *self.skeleton.buffers()]
        replaced = {id(self._parameters[la.parameter]) for la in self.census.layers if not la.tied}
        return sum({id(t): t.nbytes for t in own if id(t) not in replaced and t.device == device}.values())

    def _open(self, policy: Policy, progress: Progress, cancelled: Callable[[], bool]) -> None:
        """Open what the policy's stages name and is not open yet. Raises PdqError, Cancelled."""
        for stage in STAGES:
            source = policy.stage(stage).source
            if source in self.store.sources:
                continue
            if self._open_source is None:
                raise UnfitError(f"{policy.name}: {stage}: no other checkpoint can be opened here", None)
            model, masters = self._open_source(source, progress, cancelled)
            self.store.sources[source] = self._compared(source, model, masters)

    def _compared(self, source: str, model: PreTrainedModel, masters: Masters) -> SourceWeights:
        """What of another checkpoint is not the model's own, kept once where it is. Raises UsageError where it is another
        model."""
        theirs = dict(model.named_parameters(remove_duplicate=False))
        shapes = [{n: tuple(p.shape) for n, p in each.items()} for each in (self._parameters, theirs)]
        strange = sorted(n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n))
        if strange:
            raise UsageError(
                f"{source}: {len(strange)} weights have other names or shapes than the model's: {', '.join(strange[:4])}",
                "a stage's source has to be a checkpoint of the same model",
            )
        tied = [
            each.get_output_embeddings().weight is each.get_input_embeddings().weight  # type: ignore[no-untyped-call]
            for each in (self.skeleton, model)
        ]
        if tied[0] != tied[1]:
            raise UsageError(
                f"{source}: its output head is {'tied' if tied[1] else 'not tied'} to the embedding, the model's is"
                f" {'tied' if tied[0] else 'not tied'}",
                "a stage's source has to be a checkpoint of the same model",
            )
        here = {n: p for n, p in theirs.items() if p.device.type != "meta"}
        linear = {layer.parameter: layer for layer in self.census.layers if not layer.tied}
        others: dict[str, nn.Parameter] = {}
        for name, parameter in here.items():
            mine = self._parameters[name]
            if name not in linear and not (mine.device == parameter.device and torch.equal(mine, parameter)):
                others[name] = parameter
        own = {
            layer.name: others.get(layer.parameter, self._parameters[layer.parameter]).detach()
            for layer in self.census.layers
            if layer.tied
        }
        return SourceWeights(masters, own, others)

    def _placements(self, policy: Policy, rows: Iterable[int]) -> dict[Stage, list[Placement]]:
        counts = sorted(set(rows)) or [1]
        most = self.pieces(policy.kv).most(counts[-1])
        return {
            "prefill": self.planner.placements(policy, "prefill", most, counts[0]),
            "decode": self.planner.placements(policy, "decode", counts[0], counts[0]),
        }

    def pieces(self, kv: KvPolicy) -> Pieces:
        """How a long prompt is cut where attention reads ``kv``."""
        table = f"the kernel table ({self.kernels.device})"
        return pieces_of(self.prefill_rows, self.kernels.prefill_rows, table, kv)

    # -- views and caches ----------------------------------------------------------------------------------------------

    def view(
        self,
        policy: Policy,
        stage: Stage,
        rows: int,
        head_rows: int,
        progress: Progress = lambda *_: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> View:
        """The view of one stage for a row count, shared by all arms that place every layer alike.

        Raises Cancelled where a compilation was; the view is made again when it is asked for.
        """
        placements = self.planner.placements(policy, stage, rows, head_rows)
        implementation = self.implementation(stage)
        runners, reasons = self._runners(stage, rows, policy)
        # What stands in for a layer's modules in a decode step is made for its number of rows.
        fixed_rows = rows if runners and stage == "decode" else None
        key = (implementation, fixed_rows, *runners, *((p.candidate.name, p.spec.key) for p in placements))
        view = self._views.get(key)
        if view is None:
            linears = {p.layer.name: self._linear(p) for p in placements}
            others = self.store.sources[policy.stage(stage).source].others
            view = View(
                copy_shell(self.skeleton, linears, implementation, others), placements, "eager", reasons
            )
            Seams(view.model, self.layout)
            if runners:
                self._compile(view, stage, rows, runners, progress, cancelled)
            self._views[key] = view
        return view

    def serving_views(
        self,
        policy: Policy,
        chunk: int,
        rows: int,
        attention_name: str,
        progress: Progress = lambda *_: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[Stage, PreTrainedModel]:
        """Models of both stages for another engine's batches: up to ``chunk`` prompt tokens, or ``rows`` sequences of one
        token, by another attention. Eager: their shapes change with every step. Packs what is missing; raises Cancelled,
        and UnfitError where it does not fit."""
        if self.layout.several:
            raise UnfitError(
                f"the model's layers lie on {len(self.layout.devices)} devices: another engine's batches run on one",
                "choose one GPU",
            )
        by_stage: dict[Stage, list[Placement]] = {
            "prefill": self.planner.placements(policy, "prefill", chunk, rows),
            "decode": self.planner.placements(policy, "decode", rows, rows),
        }
        wanted = _wanted(by_stage)
        live = {key for arm in self._arms for key in arm.keys} | set(wanted)
        self._check_fit(wanted, live, lambda _: 0)
        self.store.pack_missing(wanted, progress, cancelled)
        return {
            stage: copy_shell(
                self.skeleton, {p.layer.name: self._linear(p) for p in placements}, attention_name
            )
            for stage, placements in by_stage.items()
        }

    def _runners(self, stage: Stage, rows: int, policy: Policy) -> tuple[tuple[str, ...], list[str]]:
        """(what may run the decoder layers instead of their modules, the best first; why not something better)."""
        if self.layers == "eager":
            return (), ["asked for"]
        if self.layout.several:
            return (), [f"layers on {len(self.layout.devices)} devices: no graph or program crosses them"]
        if self.attention_name != "pdq":
            return (), [f"attention {self.attention_name}"]
        choice = self.kernels.runners(stage, rows, self.capability)
        runners, reasons = choice.runners, list(choice.reasons)
        cached = self.caches.why_not_native(policy.kv) if stage == "decode" else None
        if "native" in runners and cached is not None:
            runners = tuple(runner for runner in runners if runner != "native")
            reasons.append(f"no layers of our own with this KV cache: {cached}")
        return runners, reasons

    def _compile(
        self,
        view: View,
        stage: Stage,
        rows: int,
        runners: Sequence[str],
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Something faster in the place of the view's layers, or the reason why it stays as it is."""
        begin = time.monotonic()
        try:
            with torch.inference_mode():
                view.runner, why_not = self.compiler.attach(
                    view.model,
                    self._trial(view, stage, rows),
                    runners,
                    lambda label: progress(0, None, label),
                    cancelled,
                )
        except UnknownKindError as why:
            view.reasons.append(str(why))
        except UncompiledError as why:
            view.uncompiled = str(why)
            view.reasons.append(view.uncompiled)
        else:
            view.reasons += why_not
        view.seconds = time.monotonic() - begin

    def _trial(self, view: View, stage: Stage, rows: int) -> Trial:
        """Three steps of ``rows`` sequences on a cache that is not empty, or two pieces of two short prompts, one padded."""
        decoding = stage == "decode"
        before, recorded, positions = (3, 3, 1) if decoding else (0, 2, TRIED_POSITIONS)
        batch = rows if decoding else 2
        pad = None if decoding else torch.tensor([0, TRIED_PADDING], device=self.device.torch_device)
        cache = KvCache(self.kv, batch, (before + recorded) * positions, self.device.torch_device)
        if decoding:
            cache.handoff()
        words = int(self.skeleton.config.get_text_config().vocab_size)

        def step() -> Tensor:
            cache.advance(positions)
            place = torch.arange(cache.start, cache.end, device=self.device.torch_device)[None, :]
            token = torch.arange(batch, device=self.device.torch_device)[:, None] * 7 + 31 * (place + 1)
            position, mask = place.expand(batch, -1).contiguous(), None
            if pad is not None:
                position = attention.prefill_positions(pad, cache.end)[:, cache.start :]
                mask = attention.prefill_mask(pad, cache.end, cache.start)
            return self.caller.logits(view.model, token % words, mask, position, cache)[:, -1]

        return Trial(stage, step, cache, before, recorded)

    def implementation(self, stage: Stage) -> str:
        if self.attention_name != "pdq":
            return self.attention_name
        if stage == "decode":
            return attention.DECODE
        slow = (
            self.device.kind == "cpu"
            and self.dtype != torch.float32
            and "bf16" not in self.capability.features
        )
        return attention.PREFILL_FLOAT32 if slow else attention.PREFILL

    def _linear(self, p: Placement) -> nn.Module:
        packed = self.store.get((p.layer.name, p.spec.key))
        make = OPS[p.candidate.op]
        if isinstance(packed, PackedStack):
            parts = [make(part, None, self.scratch).eval() for part in packed.parts]
            return experts.ExpertLinears(parts, p.layer.N)
        others = self.store.sources[p.spec.source].others
        name = f"{p.layer.name}.bias"
        bias = others.get(name, self._parameters.get(name))
        layer: nn.Module = make(packed, None if bias is None else bias.detach(), self.scratch)
        return layer.eval()


class View:
    """One stage's model and how its layers are placed. ``runner``: what runs the decoder layers; ``reasons``: why nothing
    better; ``uncompiled``: why nothing stands in for its layers though something might have; ``seconds``: what compiling
    them took."""

    def __init__(
        self, model: PreTrainedModel, placements: Sequence[Placement], runner: str, reasons: Sequence[str]
    ) -> None:
        self.model, self.placements = model, placements
        self.runner, self.reasons = runner, list(reasons)
        self.uncompiled: str | None = None
        self.seconds: float | None = None

    @property
    def reason(self) -> str | None:
        return "; ".join(self.reasons) or None


class StagedArm:
    """A policy made ready on a staged model. ``resident``: nothing had to be packed for it."""

    def __init__(
        self,
        owner: StagedModel,
        policy: Policy,
        plan: Plan,
        rows: Sequence[int],
        keys: frozenset[Key],
        *,
        resident: bool,
    ) -> None:
        self.owner, self.policy, self.keys, self.resident = owner, policy, keys, resident
        self.coverage: dict[str, Coverage] = plan.coverage
        self.fallbacks: list[Fallback] = plan.fallbacks
        self.warnings: list[str] = plan.warnings
        self._weights: WeightsInfo = plan.weights
        self._views: dict[tuple[Stage, int, int], View] = {}
        self._rows = sorted(set(rows)) or [1]

    def prepare(self, progress: Progress, cancelled: Callable[[], bool]) -> dict[str, list[View]]:
        """Make the views of both stages for the rows that were planned. Raises Cancelled."""
        made: dict[str, list[View]] = {}
        decode, *prefill = self._rows
        pieces = self.owner.pieces(self.policy.kv)
        most = sorted({pieces.most(rows) for rows in prefill or [decode]})
        counts: dict[Stage, list[int]] = {"decode": [decode], "prefill": most}
        for stage in counts:
            for count in counts[stage]:
                view = self.view(stage, count, decode, progress, cancelled)
                self.coverage[stage].runner, self.coverage[stage].runner_reason = view.runner, view.reason
                made.setdefault(stage, []).append(view)
        return made

    @property
    def weights(self) -> WeightsInfo:
        """Bytes of this policy; ``session_resident_bytes`` is of now."""
        self._weights.session_resident_bytes = self.owner.session_resident_bytes
        layout = self.owner.layout
        if layout.several and not self._weights.by_device:
            self._weights.by_device = {str(device): self.bytes_on(device) for device in layout.devices}
        return self._weights

    def kv_info(self) -> KvInfo:
        """The KV cache and how many tokens of it fit now: into what is free on the device, what present buffers hold,
        and what only other policies of the session hold, since serving this policy needs neither."""
        owner = self.owner
        free = owner.device.free_bytes()
        if free is not None:
            free += owner.caches.nbytes + owner.store.bytes_beside(self.keys)
        info = owner.caches.info(self.policy.kv, free, HEADROOM_BYTES)
        if owner.layout.several and info.capacity_tokens is not None:
            # A sequence needs room on every device: the fullest one decides.
            fits = [self._capacity_on(device) for device in owner.layout.devices]
            info.capacity_tokens = min((n for n in fits if n is not None), default=info.capacity_tokens)
        return info

    def _capacity_on(self, device: torch.device) -> int | None:
        owner = self.owner
        free = owner.free_on(device)
        if free is None:
            return None
        free += owner.caches.nbytes_on(device) + owner.store.bytes_beside(self.keys, device)
        return owner.caches.capacity_tokens(self.policy.kv, free, HEADROOM_BYTES, device)

    def bytes_on(self, device: torch.device) -> int:
        """What this policy's weights take on ``device``, the model's own tensors there included."""
        return self.owner.other_bytes_on(device) + self.owner.store.bytes_on(self.keys, device)

    def view(
        self,
        stage: Stage,
        rows: int,
        head_rows: int,
        progress: Progress = lambda *_: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> View:
        key = (stage, rows, head_rows)
        view = self._views.get(key)
        if view is None:
            view = self.owner.view(self.policy, stage, rows, head_rows, progress, cancelled)
            self._views[key] = view
        return view

    def drop(self) -> None:
        self._views.clear()

    def start(self, batch: int, capacity: int, pad: Tensor | None) -> Generation:
        """A request of ``batch`` sequences of up to ``capacity`` positions (padding, prompt and new tokens).

        pad  int64 [batch], how many positions each row is padded on the left; None: none is. Buffers are reused between
        requests of one (batch, capacity), so a new request ends the earlier one. Raises UsageError for more positions
        than the model has.
        """
        owner = self.owner
        if not owner.rotary and owner.max_positions is not None and capacity > owner.max_positions:
            raise UsageError(f"this model has {owner.max_positions} positions, {capacity} were asked for")
        owner.compiler.settle()
        return Generation(self, owner.caches.cache(batch, capacity, self.policy.kv), batch, pad)


def _wanted(by_stage: dict[Stage, list[Placement]]) -> dict[Key, tuple[Layer, Spec]]:
    return {
        (p.layer.name, part.key): (p.layer, part)
        for stage in STAGES
        for p in by_stage[stage]
        for part in p.spec.parts
    }
