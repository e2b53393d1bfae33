"""A made burst of both arms, and the last requests that a roofline is drawn from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_views import BASE, STAGED, make_view

from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import KernelTime, Request, StageTrace, Traced
from pdq_tui.host.view import SessionView

Rows = tuple[tuple[str, str, int, float], ...]


def stage(
    name: str, steps: int, total: float, rows: Rows, *, plain: float, unmatched: tuple[str, ...] = ()
) -> StageTrace:
    kernels = [
        KernelTime(name=n, category=c, calls=calls, ms=ms, share=ms / total, bytes=None, flops=None)
        for n, c, calls, ms in rows
    ]
    return StageTrace(
        stage=name, steps=steps, where="cpu", trace_ms=total, timer_ms=total, plain_ms=plain,
        between_ms=total - sum(k.ms for k in kernels), launch_reason="on the host", kernels=kernels,
        unmatched=list(unmatched),
    )  # fmt: skip


def traced(arm: str, policy: Policy, product: str, quicker: float, **changes: Any) -> Traced:
    prefill = stage("prefill", 1, 100.0 * quicker, (
        (product, "weight GEMM", 210, 61.0 * quicker),
        ("pdq_native::causal", "attention", 30, 12.0 * quicker),
        ("aten::mul", "norm/rope/elementwise", 275, 6.0 * quicker),
        ("aten::copy_", "KV", 60, 2.5 * quicker),
        ("aten::max", "sampling", 1, 0.3 * quicker),
    ), plain=92.0 * quicker)  # fmt: skip
    decode = stage("decode", 4, 60.0 * quicker, (
        (product, "weight GEMV", 840, 33.0 * quicker),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention", 120, 9.0 * quicker),
        ("compiled layer (fused kernels)", "norm/rope/elementwise", 120, 8.0 * quicker),
        ("pdq_native::dense", "weight GEMV", 4, 5.0 * quicker),
    ), plain=47.7 * quicker)  # fmt: skip
    return Traced(
        arm=arm, policy=policy.name, policy_digest=policy.digest, prompt_tokens=512, steps=4,
        stages=[prefill, decode], path="/tmp/t.pt.trace.json.gz", bytes=300_000, events=13_000, **changes,
    )  # fmt: skip


def request(arm: str, policy: Policy, read: int, dtype: str) -> Request:
    return Request(
        request=1, arm=arm, policy=policy.name, policy_digest=policy.digest, kind="loop",
        prefill_bytes=read + 20_000_000, prefill_flops={dtype: 1.05e11, "bf16": 2.1e9} if dtype != "bf16" else {dtype: 1.1e11},
        bytes_per_step=read, decode_flops={"bf16": 2.8e8},
    )  # fmt: skip


def kernels_view(*, bursts: bool = True, flagged: bool = False) -> SessionView:
    view = make_view()
    lasts = {"A": request("A", STAGED, 88_000_000, "int8"), "B": request("B", BASE, 270_000_000, "bf16")}
    arms = {a: replace(v, last=lasts[a]) for a, v in view.arms.items()}
    traces = {}
    if bursts:
        traces = {
            "A": traced("A", STAGED, "pdq_native::int8", 0.8),
            "B": traced("B", BASE, "aten::mm", 1.0),
        }
    if flagged:
        traces["A"].stages[1].unmatched = [
            "native-int4: placed in 210 layers, 0 calls in 4 passes where 840 were due"
        ]
    return make_view(arms=arms, traces=traces, snapshots=())
