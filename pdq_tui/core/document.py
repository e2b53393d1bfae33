"""The JSON document of a run: the contract that scripts read. Strict JSON: missing is null with ``<key>_reason``.

Fractions (mfu, mbu, explained, noise, drift) are fractions, times are milliseconds, memory is bytes.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.arms import answers, arm_stats, counts, drift, gaps, invalid_reason, timed
from pdq_tui.core.caveats import warnings
from pdq_tui.core.comparable import obstacles
from pdq_tui.core.datasheet import data_sheet
from pdq_tui.core.energy import StageEnergy
from pdq_tui.core.facts import Facts, clocks, collect
from pdq_tui.core.footprint import Footprint, footprint
from pdq_tui.core.metrics import METRICS, RATIO_METRICS
from pdq_tui.core.pairs import blocks_of, noise_floor, ratios
from pdq_tui.core.protocol import Coverage, DeviceInfo, Request, Traced
from pdq_tui.core.stats import Quantiles, Ratio, Summary, quantiles

SCHEMA: Final = 1
#: Where an arm's memory is from. Only what was measured ALONE is that policy's own.
SOLO: Final = "solo pass"
ONLY: Final = "only policy of the session"
SHARED: Final = "shared session"
ALONE: Final = (SOLO, ONLY)

#: Keys of the contract's stages → ids of the metric registry.
PREFILL_KEYS: Final = {
    "ttft_ms": "ttft_ms",
    "prefill_ms": "prefill_ms",
    "tokens_per_s": "prefill_tokens_per_s",
    "mfu": "prefill_mfu",
    "explained": "prefill_explained",
}
DECODE_KEYS: Final = {
    "tpot_ms": "tpot_ms",
    "step_ms": "decode_step_ms",
    "tokens_per_s": "decode_tokens_per_s",
    "bandwidth_gbps": "bandwidth_gbps",
    "mbu": "mbu",
    "explained": "decode_explained",
}

Json = dict[str, Any]


def put(into: Json, key: str, value: Any, reason: str = "not known") -> None:
    """Set ``key``; None gets ``<key>_reason`` beside it. Numbers that are not finite are missing, too."""
    if isinstance(value, float) and not math.isfinite(value):
        value, reason = None, f"not a finite number ({reason})"
    into[key] = value
    if value is None:
        into[f"{key}_reason"] = reason


def summary_json(s: Summary) -> Json:
    """{"median", "ci95", "n", "unit"} with ``ci95_reason`` and ``note`` where there is something to say."""
    out: Json = {}
    put(out, "median", s.median, s.reason or "nothing was measured")
    put(out, "ci95", list(s.ci95) if s.ci95 else None, s.reason or "too few values")
    out.update(n=s.n, unit=s.unit)
    if s.note:
        out["note"] = s.note
    return out


def quantiles_json(q: Quantiles) -> Json:
    out: Json = {}
    for key in ("p50", "p90", "max"):
        put(out, key, getattr(q, key), q.reason or "nothing was measured")
    put(out, "p99", q.p99, q.p99_reason or "nothing was measured")
    if q.p99_ci95:
        out["p99_ci95"] = list(q.p99_ci95)
    out.update(n=q.n, units=q.units, unit=q.unit)
    return out


def run_document(
    meta: Mapping[str, Any], events: Iterable[Any], reference: str | None = None, min_effect: float = 0.01
) -> Json:
    """The document of one run from its meta.json and its events in order. The first arm is the reference: the one
    named, "B" of the app's two arms, else the first of a headless run."""
    facts = collect(events)
    labels = facts.labels(reference)
    current = sorted((r for label in labels for r in facts.of(label)), key=lambda r: (r.t_ns, r.request))
    doc = setup_document(meta, facts, len(complete_blocks(current, labels)))
    doc["arms"] = [arm_document(facts, label) for label in labels]
    doc |= compared(facts, current, labels, min_effect)
    doc["warnings"] = warnings(facts, labels)
    return doc


def compared(facts: Facts, requests: Sequence[Request], labels: Sequence[str], min_effect: float) -> Json:
    """``ratios`` of all arms to the first of ``labels``, and its ``noise_floor``, from ``requests`` in their order."""
    rows: list[Ratio] = []
    floors: dict[str, float | None] = {}
    if labels:
        rows = ratios(
            requests,
            labels[0],
            labels,
            min_effect,
            device=facts.device,
            model=facts.model,
            conditions=obstacles(facts, labels),
        )
        floors = noise_floor(requests, labels[0], device=facts.device, model=facts.model)
    told: Json = {}
    for metric in RATIO_METRICS:
        put(told, metric, floors.get(metric), "no repeated control of at least two blocks")
    return {"ratios": [ratio_json(r) for r in rows], "noise_floor": told}


def complete_blocks(requests: Sequence[Request], labels: Sequence[str]) -> list[Any]:
    """The blocks in which every arm took part twice and counted."""
    return [b for b in blocks_of(requests) if all(len(b.get((a, False), ())) >= 2 for a in labels)]


def setup_document(meta: Mapping[str, Any], facts: Facts, blocks: int) -> Json:
    """Everything but the arms: tool, host, device, libraries, model, workload."""
    doc: Json = {"schema": SCHEMA, "tool": {}}
    for key in ("started", "run"):
        put(doc, key, meta.get("id" if key == "run" else key), "the run kept no meta.json")
    put(doc["tool"], "version", dict(meta.get("tool") or {}).get("version"))
    host = dict(meta.get("host") or {})
    threads = facts.device.threads if facts.device else host.get("threads")
    doc["host"] = {**host}
    put(doc["host"], "cpu", (facts.device and facts.device.cpu) or host.get("cpu"))
    put(doc["host"], "threads", threads)
    put(doc["host"], "memory", host.get("memory"))
    if facts.device and facts.device.threads_reason:
        doc["host"]["threads_note"] = facts.device.threads_reason
    put(doc, "device", _device(facts), "the engine never reported a device")
    doc["libraries"] = {**dict(meta.get("libraries") or {}), **facts.libraries}
    driver = facts.sensor_state.driver if facts.sensor_state else None
    put(doc, "python", facts.python or meta.get("python"))
    put(doc, "driver", driver, facts.sensor_state.text if facts.sensor_state else "no sensors")
    put(doc, "model", _model(facts), "no model was loaded")
    put(doc, "workload", _workload(meta, facts, blocks), "no workload was set")
    return doc


def _no_peak(d: DeviceInfo, which: str) -> str:
    return f"{d.several}: a peak is of one" if d.several else f"no {which} peak was measured"


def _device(facts: Facts) -> Json | None:
    d = facts.device
    if d is None:
        return None
    out: Json = {"name": d.name, "kind": d.kind}
    put(out, "uuid", d.uuid, "a CPU has none" if d.kind == "cpu" else "not reported by the device")
    put(out, "memory", d.memory_bytes)
    put(out, "interconnect", None, "not measured by this version")
    put(out, "clocks", clocks(facts, facts.requests), "no sensor sample fell into the measured windows")
    put(out, "capability", list(d.capability) if d.capability else None, "not a CUDA device")
    put(out, "read_peak_gbps", d.read_peak_gbps, _no_peak(d, "read"))
    out["read_peak_method"] = d.read_peak_method
    out["compute_peak_tflops"] = dict(d.compute_peak_tflops)
    put(out, "copy_peak_gbps", d.copy_peak_gbps, _no_peak(d, "copy"))
    if d.others:
        out["layers"] = d.layers
        first: Json = {"name": d.own_name or d.name, "uuid": d.uuid, "memory": d.own_memory_bytes}
        out["parts"] = [
            first,
            *({"name": o.name, "uuid": o.uuid, "memory": o.memory_bytes} for o in d.others),
        ]
    out["peaks_from"] = d.peaks_from
    sheet = data_sheet(d.name)
    put(
        out,
        "data_sheet",
        msgspec.to_builtins(sheet) if sheet else None,
        "no data sheet of this device is known",
    )
    put(out, "last_level_cache_bytes", d.last_level_cache_bytes, "not told by this device")
    out["memory_method"] = d.memory_method
    return out


def _model(facts: Facts) -> Json | None:
    m = facts.model
    if m is None:
        return None
    out: Json = {
        "id": m.id,
        "parameters": m.parameters,
        "layers": m.layers,
        "dtype": m.dtype,
        "family": m.family,
    }
    put(out, "weights", m.weights, "the checkpoint is not quantized")
    put(out, "revision", m.revision, "not from a hub")
    put(out, "sha256", m.sha256, "the weights were not hashed")
    put(out, "load_peak_bytes", facts.load_peak_bytes, facts.load_peak_reason or "not measured")
    out["notes"] = list(m.notes)
    return out


def _workload(meta: Mapping[str, Any], facts: Facts, blocks: int) -> Json | None:
    ready = facts.workload
    if ready is None:
        return None
    w = ready.workload
    out: Json = {}
    put(out, "prompt_tokens", w.prompt_tokens, "each prompt has its own length: see prompt_lengths")
    attention = facts.attention or meta.get("attention")
    out |= {
        "prompt_lengths": list(ready.lengths),
        "output_tokens": w.output_tokens,
        "batch": w.batch,
        "stop": w.stop,
        "stop_note": "exactly output_tokens are made, EOS is ignored" if w.stop == "fixed" else "ends at EOS",
        "prompts": w.prompts,
        "prompts_sha256": ready.prompts_sha256,
        "digest": w.digest,
        "seed": w.seed,
        "blocks": blocks,
        "chat_template": ready.chat_template_applied,
        "refused": [msgspec.to_builtins(r) for r in ready.refused],
        "notes": list(ready.notes),
    }
    put(out, "attention", attention, "the engine did not say which attention it uses")
    return out


def arm_document(facts: Facts, label: str) -> Json:
    """``arms[]`` of the contract for one arm."""
    requests = facts.of(label)
    ready = facts.arms.get(label)
    stats = arm_stats(requests, facts.device, facts.model)
    used = timed(requests)
    solo = [r for r in requests if r.kind == "solo" and r.valid and not r.cancelled]
    memory_from = solo or used
    energy = facts.energy_of(label)
    out: Json = {"label": label}
    policy = ready.policy if ready else None
    put(out, "policy", policy.name if policy else (requests[-1].policy if requests else None))
    put(out, "policy_digest", policy.digest if policy else (requests[-1].policy_digest if requests else None))
    put(
        out,
        "policy_text",
        msgspec.json.decode(msgspec.json.encode(policy)) if policy else None,
        "the engine never had it ready",
    )
    put(out, "storage", policy.storage if policy else None, "the engine never had it ready")
    for stage, ids in (("prefill", PREFILL_KEYS), ("decode", DECODE_KEYS)):
        part: Json = {}
        for key, metric in ids.items():
            _put_summary(part, key, stats[metric])
        if stage == "decode":
            part["itl_ms"] = quantiles_json(quantiles(gaps(used), "ms", METRICS["itl_ms"].missing))
            read = [r.bytes_per_step for r in used if r.bytes_per_step is not None]
            # An upper median: a number of bytes that a step did read.
            put(
                part,
                "bytes_per_step",
                statistics.median_high(read) if read else None,
                "no decode step was made",
            )
            wasted = [r.bytes_per_step_wasted for r in used if r.bytes_per_step_wasted is not None]
            put(part, "bytes_per_step_wasted", max(wasted, default=None), "not counted")
        _put_work(part, stage, used)
        _put_energy(part, stage, energy)
        _put_bytes(part, "peak_bytes", stats[f"{stage}_peak_bytes"])
        covered = ready.coverage.get(stage) if ready else None
        part["kernels"] = sorted(covered.kernels) if covered else []
        part["formats"] = dict(covered.formats) if covered else {}
        out[stage] = part
    for key in ("handoff_ms", "e2e_ms"):
        _put_summary(out, key, stats[key])
    _put_weights(out, facts, label)
    _put_summary(out, "gap_ms", stats["gap_ms"])
    _put_bytes(out, "steady_bytes", stats["steady_bytes"])
    out["memory"] = None if ready is None else _footprint(footprint(ready, solo))
    if ready is None:
        out["memory_reason"] = "the engine never had it ready"
    out["memory_from"] = SOLO if solo else ONLY if _only(facts) else SHARED
    put(out, "memory_method", next((r.memory_method for r in memory_from if r.memory_method), None))
    traced = facts.trace_of(label)
    put(
        out,
        "trace",
        _trace(traced) if traced else None,
        "no burst of it was profiled (run --trace, or t in 5 Kernels)",
    )
    out["fallbacks"] = [msgspec.to_builtins(f) for f in ready.fallbacks] if ready else []
    bad = invalid_reason(requests)
    out["valid"] = bad is None and bool(used)
    if not out["valid"]:
        out["valid_reason"] = bad or "no request counted"
    put(out, "text_sha256", text_sha256(used), "no text was recorded")
    out["requests"] = msgspec.to_builtins(counts(requests))
    out["drift"] = {}
    for metric, value in drift(requests, facts.device, facts.model).items():
        put(out["drift"], metric, value, "fewer than 6 requests")
    return out


def _footprint(f: Footprint) -> Json:
    out: Json = {
        "predicted_bytes": f.predicted, "weights_bytes": f.weights, "kv_bytes": f.kv, "reserve_bytes": f.reserve,
    }  # fmt: skip
    for stage, value in f.rest.items():
        put(out, f"{stage}_rest_bytes", value, f.reason or "not measured")
    put(out, "exceeded_bytes", f.exceeded, f.reason)
    return out


def _trace(t: Traced) -> Json:
    out: Json = {"steps": t.steps, "prompt_tokens": t.prompt_tokens, "batch": t.batch, "events": t.events}
    put(out, "path", t.path, t.path_reason or "not kept")
    put(out, "bytes", t.bytes, t.path_reason or "not kept")
    out["notes"] = list(t.notes)
    out["stages"] = {}
    for stage in t.stages:
        part: Json = {
            "steps": stage.steps, "where": stage.where, "trace_ms": stage.trace_ms, "between_ms": stage.between_ms,
        }  # fmt: skip
        put(part, "timer_ms", stage.timer_ms, "not timed")
        put(part, "plain_ms", stage.plain_ms, "not timed")
        put(part, "overhead", stage.overhead, "not timed")
        put(part, "launch_bound", stage.launch_bound, stage.launch_reason or "not known")
        part["unmatched"] = list(stage.unmatched)
        part["kernels"] = []
        for kernel in stage.kernels:
            row: Json = {
                "name": kernel.name, "category": kernel.category, "calls": kernel.calls, "ms": kernel.ms,
                "share": kernel.share,
            }  # fmt: skip
            put(row, "bytes", kernel.bytes, "its operands' shapes do not tell")
            put(row, "flops", kernel.flops, "its operands' shapes do not tell")
            part["kernels"].append(row)
        out["stages"][stage.stage] = part
    return out


def _only(facts: Facts) -> bool:
    """Whether one arm under one policy was all that the engine ever held."""
    return len(facts.labels()) <= 1 and len({r.policy_digest for r in facts.requests}) <= 1


def _put_energy(part: Json, stage: str, energy: StageEnergy) -> None:
    """Gross first, then without the idle power of the same time; one window each, so no interval."""
    gross = energy.prefill_j if stage == "prefill" else energy.decode_j
    net = energy.prefill_net_j if stage == "prefill" else energy.decode_net_j
    for key, value in (("energy_j_per_token", gross), ("energy_net_j_per_token", net)):
        one = Summary(median=value, ci95=None, n=1, unit="J", reason="one window has no interval")
        why = energy.reason or "idle was not measured"
        put(part, key, None if value is None else summary_json(one), why)
    put(part, "energy_closure", energy.closure, energy.reason or "no mixed window was run")
    part["energy_source"] = energy.source


def _put_work(part: Json, stage: str, used: Sequence[Request]) -> None:
    """Bytes and FLOPs of one pass, of the last request that counted: what a roofline is drawn from."""
    done = [r for r in used if (r.prefill_flops if stage == "prefill" else r.decode_flops)]
    last = done[-1] if done else None
    flops = None if last is None else last.prefill_flops if stage == "prefill" else last.decode_flops
    put(part, "flops", dict(flops) if flops else None, "no pass was counted")
    if stage == "prefill":
        put(part, "bytes", last.prefill_bytes if last else None, "no pass was counted")


def _put_summary(into: Json, key: str, s: Summary) -> None:
    put(into, key, None if s.median is None else summary_json(s), s.reason or "nothing was measured")


def _put_bytes(into: Json, key: str, s: Summary) -> None:
    put(into, key, None if s.median is None else round(s.median), s.reason or "nothing was measured")


def _put_weights(out: Json, facts: Facts, label: str) -> None:
    ready = facts.arms.get(label)
    if ready is None:
        for key in ("weights", "kv", "session_resident_bytes", "coverage"):
            put(out, key, None, "the engine never had this policy ready")
        return
    w = ready.weights
    by_stage = w.bits_per_weight
    bits = {v for v in by_stage.values() if v is not None}
    weights: Json = {
        "stored_bytes": w.stored_bytes,
        "prefill_bytes": w.prefill_bytes,
        "decode_bytes": w.decode_bytes,
        "shared_bytes": w.shared_bytes,
        "extra_bytes": w.extra_bytes,
        "kept_bytes": w.kept_bytes,
    }
    if w.by_device:  # of a model on several devices alone
        weights["by_device"] = dict(w.by_device)
    one = next(iter(bits)) if len(bits) == 1 else None
    put(weights, "bits_per_weight", one, "differs by stage" if bits else "nothing was converted")
    weights["bits_per_weight_by_stage"] = {}
    for stage, value in by_stage.items():
        put(weights["bits_per_weight_by_stage"], stage, value, "nothing was converted in this stage")
    kv: Json = {
        key: getattr(ready.kv, key)
        for key in (
            "bytes_per_token",
            "dtype",
            "convert",
            "sequence_bytes",
            "layers",
            "quantized_layers",
            "sliding_layers",
        )
    }
    for key in ("prefill_dtype", "prefill_bytes_per_token"):
        put(kv, key, getattr(ready.kv, key), "the engine did not say")
    put(kv, "kernel", ready.kv.kernel, "the engine did not say")
    if ready.kv.kernel_reason is not None:  # itself a reason: absent where there is none
        kv["kernel_reason"] = ready.kv.kernel_reason
    put(kv, "window", ready.kv.window, "no layer slides")
    unknown = ready.kv.capacity_reason or "this engine did not say how much memory is free"
    put(kv, "free_bytes", ready.kv.free_bytes, unknown)
    kv["reserve_bytes"] = ready.kv.reserve_bytes
    put(kv, "capacity_tokens", ready.kv.capacity_tokens, unknown)
    per_token = ready.kv.bytes_per_token
    displaced = w.extra_bytes // per_token if per_token else None
    put(kv, "displaced_tokens", displaced, "bytes per token are not known")
    put(kv, "capacity_requests", *_capacity_requests(facts, ready.kv.capacity_tokens, unknown))
    out["weights"], out["kv"] = weights, kv
    out["session_resident_bytes"] = w.session_resident_bytes
    out["coverage"] = {stage: _coverage(c) for stage, c in ready.coverage.items()}


def _coverage(c: Coverage) -> Json:
    found: Json = msgspec.to_builtins(c)
    if c.runner_reason is None:  # itself a reason: absent where there is none
        del found["runner_reason"]
    if c.rows is None:  # whole: with the reason where somebody asked for pieces
        del found["rows"]
        if not c.rows_reason:
            del found["rows_reason"]
    return found


def _capacity_requests(facts: Facts, tokens: int | None, unknown: str) -> tuple[int | None, str]:
    """How many sequences of this workload's longest prompt and its output fit at once, and why that is not known."""
    if tokens is None:
        return None, unknown
    if facts.workload is None or not facts.workload.lengths:
        return None, "no workload was set"
    return tokens // (max(facts.workload.lengths) + facts.workload.workload.output_tokens), ""


def text_sha256(requests: Sequence[Request]) -> str | None:
    """Over the first answer to each prompt, by prompt number; equal between two arms that wrote the same."""
    made = answers(requests)
    if not made:
        return None
    body = "\n".join(f"{n}:{made[n]}" for n in sorted(made))
    return hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()


def ratio_json(r: Ratio) -> Json:
    out: Json = {"reference": r.reference, "arm": r.arm, "metric": r.metric}
    put(out, "ratio", r.ratio, r.reason or "no complete block")
    put(out, "ci95", list(r.ci95) if r.ci95 else None, r.reason or "fewer than 2 blocks")
    put(out, "difference", r.difference, r.reason or "no complete block")
    put(
        out,
        "difference_ci95",
        list(r.difference_ci95) if r.difference_ci95 else None,
        r.reason or "fewer than 2 blocks",
    )
    out |= {"unit": METRICS[r.metric].unit, "judgement": r.judgement, "blocks": r.blocks}
    if r.reason:
        out["judgement_reason"] = r.reason
    if r.decided_at is not None:
        out["decided_at_blocks"] = r.decided_at
    put(out, "threshold", None if r.threshold is None else math.expm1(r.threshold))
    put(out, "noise_floor", r.noise_floor, "no repeated control of at least two blocks")
    return out
