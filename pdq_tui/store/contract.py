"""What readers of a manifest rely on, as types: a file that somebody edited is named at the field that is not right,
instead of ending a report half-way. Fields that are not here are free; those that are may be missing or null."""

from __future__ import annotations

from typing import Any

import msgspec

_Number = float | None
_Text = str | None
_Names = dict[str, Any] | None


class _Summary(msgspec.Struct):
    median: _Number = None
    ci95: tuple[float, float] | None = None
    n: int | None = None
    unit: _Text = None


class _Gaps(msgspec.Struct):
    p50: _Number = None
    p90: _Number = None
    p99: _Number = None
    max: _Number = None


class _Prefill(msgspec.Struct):
    ttft_ms: _Summary | None = None
    prefill_ms: _Summary | None = None
    tokens_per_s: _Summary | None = None
    mfu: _Summary | None = None
    explained: _Summary | None = None
    bytes: _Number = None
    flops: dict[str, float] | None = None
    peak_bytes: _Number = None


class _Decode(msgspec.Struct):
    tpot_ms: _Summary | None = None
    step_ms: _Summary | None = None
    itl_ms: _Gaps | None = None
    tokens_per_s: _Summary | None = None
    bandwidth_gbps: _Summary | None = None
    mbu: _Summary | None = None
    explained: _Summary | None = None
    bytes_per_step: _Number = None
    flops: dict[str, float] | None = None
    peak_bytes: _Number = None


class _Weights(msgspec.Struct):
    stored_bytes: _Number = None
    extra_bytes: _Number = None


class _Kv(msgspec.Struct):
    bytes_per_token: _Number = None


class _Covered(msgspec.Struct):
    kernels: _Names = None
    runner: _Text = None


class _Counted(msgspec.Struct):
    used: int | None = None


class _Arm(msgspec.Struct):
    label: _Text = None
    policy: _Text = None
    storage: _Text = None
    prefill: _Prefill | None = None
    decode: _Decode | None = None
    handoff_ms: _Summary | None = None
    e2e_ms: _Summary | None = None
    weights: _Weights | None = None
    kv: _Kv | None = None
    coverage: dict[str, _Covered] | None = None
    policy_text: _Names = None
    requests: _Counted | None = None
    steady_bytes: _Number = None
    memory_from: _Text = None
    memory_method: _Text = None
    valid: bool | None = None


class _Device(msgspec.Struct):
    name: _Text = None
    kind: _Text = None
    memory: _Number = None
    read_peak_gbps: _Number = None
    compute_peak_tflops: dict[str, float] | None = None
    clocks: _Names = None


class _Model(msgspec.Struct):
    id: _Text = None
    parameters: int | None = None
    dtype: _Text = None


class _Workload(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_lengths: list[int] | None = None
    output_tokens: int | None = None
    batch: int | None = None
    prompts_sha256: _Text = None


class _Conditions(msgspec.Struct):
    clocks: _Names = None
    slowed: list[str] | None = None
    other_load: _Number = None


class _Ratio(msgspec.Struct):
    reference: str
    arm: str
    metric: str
    judgement: str
    ratio: _Number = None
    ci95: tuple[float, float] | None = None
    difference: _Number = None
    noise_floor: _Number = None
    judgement_reason: _Text = None


class _Rows(msgspec.Struct):
    rows: int | None = None


class Manifest(msgspec.Struct):
    """manifest.json of schema 1, as far as it is read."""

    arm: _Arm
    schema: _Number = None
    run: _Text = None
    label: _Text = None
    note: _Text = None
    created: _Text = None
    started: _Text = None
    device: _Device | None = None
    model: _Model | None = None
    workload: _Workload | None = None
    host: _Names = None
    tool: _Names = None
    libraries: dict[str, _Text] | None = None
    conditions: _Conditions | None = None
    ratios: list[_Ratio] | None = None
    noise_floor: dict[str, Any] | None = None
    warnings: list[Any] | None = None
    series: dict[str, _Rows] | None = None


def check(body: Any) -> str | None:
    """None, or what is wrong and where: ``$.arm.decode.tpot_ms.median: expected float | null, got str``."""
    try:
        msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        return str(error)
    return None
