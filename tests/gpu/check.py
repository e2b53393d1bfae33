"""``make gpu-check``: what only a machine with a CUDA GPU can tell, within eight minutes and without a network.

Results are right or wrong (fail); what the machine lacks is skipped with the reason; times are written down and judged by
nobody. A short table on stdout last, everything as JSON in the folder that was given.

    python -m tests.gpu.check --out DIR [--device cuda|cpu] [--seconds 480]

``--device cpu`` runs what a CPU can, on small shapes: how this script itself is tested.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.energy import stage_energy
from pdq_tui.core.formats import GROUP_SIZES, Format
from pdq_tui.core.kernels import Candidate, KernelTable, load_kernels
from pdq_tui.engine import energy
from pdq_tui.engine.device import Device, open_device
from pdq_tui.engine.formats.ops import OPS
from pdq_tui.engine.formats.pack import pack_all
from pdq_tui.engine.formats.packed import Spec
from pdq_tui.engine.formats.unpack import Scratch
from pdq_tui.engine.kernels import capability
from pdq_tui.engine.peaks import measure
from pdq_tui.engine.prompts import Batch
from pdq_tui.engine.runner import Arm, Hooks, Limits, run_request
from pdq_tui.engine.staged import StagedArm, StagedModel
from pdq_tui.errors import PdqError

ROWS = (1, 8, 17, 64, 2048)
#: Root-mean-square error over that of the exact product, with the original weights: what each format may lose.
LIMITS = {
    "dense": 0.01, "nested16": 0.01, "int8": 0.02, "llm-int8": 0.03, "fp8": 0.06, "int4": 0.15, "nf4": 0.15, "fp4": 0.2,
}  # fmt: skip
#: What rounding the activations may add.
ROUNDED = {"model": 0.0, "int8": 0.02, "fp8": 0.05}
POLICIES = ("bf16", "int8", "w8a8", "int4", "w8a8-prefill-int4-decode")
Json = dict[str, Any]


@dataclass
class Check:
    """The machine, and what is left of the time."""

    device: Device
    until: float
    small: bool
    found: list[Json] = field(default_factory=list)

    def left(self) -> float:
        return self.until - time.monotonic()

    def add(self, part: str, name: str, status: str, reason: str = "", **figures: Any) -> None:
        self.found.append({"part": part, "name": name, "status": status, "reason": reason, **figures})

    @property
    def cuda(self) -> bool:
        return self.device.kind == "cuda"


def never() -> bool:
    return False


# -- every format's linear, and graph capture --------------------------------------------------------------------------


def candidates(check: Check) -> Iterator[tuple[Candidate, str]]:
    """Each candidate of this kind of device, with why it is skipped here ("" where it is not)."""
    table: KernelTable = load_kernels(check.device.kind)
    has = capability(check.device)
    for candidate in table.candidates:
        yield candidate, candidate.misfit(has, "bf16") or ""


def limit_of(candidate: Candidate) -> float:
    return LIMITS[candidate.weights] + ROUNDED[candidate.activations]


def layer_of(check: Check, candidate: Candidate, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """(layer, its original weights in float64 [N, K])."""
    where = check.device.torch_device
    group = 64 if candidate.weights in ("int4", "nf4", "fp4") else 0
    if group and candidate.group_sizes and group not in candidate.group_sizes:
        group = next(g for g in GROUP_SIZES if g in candidate.group_sizes)
    weights = "bf16" if candidate.weights == "dense" else candidate.weights
    fmt = Format(weights, candidate.activations, group) if group else Format(weights, candidate.activations)
    master = (torch.randn(size, size, device=where) / math.sqrt(size)).to(torch.bfloat16)
    packed = pack_all(Spec(fmt, candidate.layout, size, size, size, torch.bfloat16), master, where, never)
    return OPS[candidate.op](packed, None, Scratch()).eval(), master.double()


def poison(check: Check, rows: int, size: int) -> None:
    """Freed memory full of NaN: what a kernel takes for its result and does not write shows."""
    torch.full(
        (max(rows, 64) * size * 2,), float("nan"), dtype=torch.bfloat16, device=check.device.torch_device
    )


@torch.inference_mode()
def linears(check: Check) -> None:
    size = 256 if check.small else 4096
    for candidate, why in candidates(check):
        if why:
            check.add("linear", candidate.name, "skip", why)
            continue
        if check.left() < 60 and not check.small:
            check.add("linear", candidate.name, "skip", "no time is left")
            continue
        try:
            layer, exact = layer_of(check, candidate, size)
        except Exception as error:  # noqa: BLE001 - one that cannot be built takes no other with it
            check.add("linear", candidate.name, "skip", f"cannot be built: {first_line(error)}")
            continue
        for rows in ROWS if not check.small else (1, 8, 17, 64):
            if not candidate.rows[0] <= rows <= candidate.rows[1]:
                check.add("linear", f"{candidate.name} {rows}", "skip", "outside of its row range")
                continue
            one_linear(check, candidate, layer, exact, rows, size)
        del layer, exact
        check.device.empty_cache()
    graphs(check, size)


def one_linear(
    check: Check, candidate: Candidate, layer: torch.nn.Module, exact: torch.Tensor, rows: int, size: int
) -> None:
    name, limit = f"{candidate.name} {rows}", limit_of(candidate)
    worst = 0.0
    try:
        for _ in range(2):
            x = torch.randn(rows, size, dtype=torch.bfloat16, device=check.device.torch_device)
            poison(check, rows, size)
            got = layer(x)
            wanted = x.double() @ exact.t()
            error = float((got.double() - wanted).norm() / wanted.norm())
            worst = max(worst, error) if math.isfinite(error) else math.inf
        # No row may depend on which others are beside it: the first alone gives what it gave among all.
        alone = layer(x[:1]) if candidate.rows[0] <= 1 else got[:1]
        beside = float((alone.double() - got[:1].double()).norm() / got[:1].double().norm())
    except (RuntimeError, NotImplementedError) as error:
        check.add("linear", name, "fail", f"raised: {first_line(error)}")
        return
    wrong = not worst <= limit or not beside <= 0.02
    reason = (
        f"error {worst:.3g} of {limit} allowed, {beside:.3g} between one row alone and among {rows}"
        if wrong
        else ""
    )
    figure = worst if math.isfinite(worst) else None
    check.add("linear", name, "fail" if wrong else "ok", reason, error=figure, limit=limit, beside=beside)


@torch.inference_mode()
def graphs(check: Check, size: int) -> None:
    """A captured graph gives what eager gives."""
    if not check.cuda:
        check.add("graph", "capture equals eager", "skip", "no CUDA device: there are no graphs")
        return
    for candidate, why in candidates(check):
        if why or check.left() < 60:
            continue
        try:
            layer, _ = layer_of(check, candidate, size)
            x = torch.randn(candidate.rows[0], size, dtype=torch.bfloat16, device=check.device.torch_device)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    layer(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = layer(x)
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.cuda.synchronize()
            eager = layer(x)
            same = float((captured.double() - eager.double()).norm() / eager.double().norm())
        except (PdqError, RuntimeError, NotImplementedError) as error:
            check.add("graph", candidate.name, "skip", f"cannot be captured: {first_line(error)}")
            torch.cuda.synchronize()
            continue
        check.add(
            "graph",
            candidate.name,
            "ok" if same <= 0.005 else "fail",
            "" if same <= 0.005 else f"differs by {same:.3g}",
            difference=same,
        )


# -- both stages of a model --------------------------------------------------------------------------------------------


class Masters:
    """The unquantized weights of a model that is in memory."""

    def __init__(self, model: Any) -> None:
        self._tensors = {name: t.detach() for name, t in model.named_parameters(remove_duplicate=False)}

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def files(self) -> Sequence[Path]:
        return []

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def random_model(check: Check) -> StagedModel:
    """Shaped like an 8-B Llama in bf16 with random weights; small on a CPU, fewer layers where memory is short."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    free = check.device.free_bytes() or 0
    layers = 2 if check.small else 32 if free > 60 << 30 else 8
    shape = (
        {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
        if check.small
        else {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    )  # fmt: skip
    config = LlamaConfig(
        **shape, num_hidden_layers=layers, max_position_embeddings=8192, tie_word_embeddings=False
    )
    with check.device.torch_device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    return StagedModel(
        model, Masters(model), check.device, budget_bytes=None, kernels=load_kernels(check.device.kind)
    )


def stages(check: Check) -> dict[str, StagedArm]:
    """Prefill and decode of each policy between the device's own marks, against the peaks measured before."""
    info = check.device.info()
    peaks = measure(check.device, info, lambda *_: None, never)
    check.add(
        "peaks",
        "measured",
        "ok",
        "",
        read_gbps=peaks.read_gbps,
        copy_gbps=peaks.copy_gbps,
        tflops=peaks.compute_tflops,
    )
    staged = random_model(check)
    prompt, tokens = (32, 6) if check.small else (1024, 65)
    ids = torch.randint(5, 500, (1, prompt))
    batch = Batch(number=0, ids=ids, pad=None, real_tokens=prompt, padded_tokens=0)
    info.read_peak_gbps, info.compute_peak_tflops = peaks.read_gbps, dict(peaks.compute_tflops)
    ready: dict[str, StagedArm] = {}
    from pdq_tui.core.metrics import METRICS

    for name in POLICIES:
        if check.left() < 45 and not check.small:
            check.add("stages", name, "skip", "no time is left")
            continue
        try:
            arm = staged.apply(find_policy(name), rows=[1, prompt])
        except PdqError as error:
            check.add("stages", name, "skip", error.message)
            continue
        ready[name] = arm
        hooks = Hooks(peaks=peaks)
        for _ in range(3):
            record = p.Request(request=1, arm=name, policy=name, policy_digest=arm.policy.digest, kind="loop")
            run_request(
                check.device,
                Arm(name, arm.policy, arm),
                batch,
                prompt + tokens,
                Limits(tokens, False),
                record,
                hooks,
            )
        figures = {
            m: METRICS[m].of(record, info, None)
            for m in (
                "prefill_ms",
                "prefill_mfu",
                "prefill_explained",
                "decode_step_ms",
                "mbu",
                "decode_explained",
            )
        }
        status = "ok" if record.valid else "fail"
        check.add("stages", name, status, record.invalid_reason or "", **figures)
    return ready


# -- sensors and energy ------------------------------------------------------------------------------------------------


class Sensors:
    """The sensors' own process, and everything that it said."""

    def __init__(self, device: Device, info: p.DeviceInfo) -> None:
        self.samples: list[p.SensorSample] = []
        self.state: p.SensorState | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdq_tui.sensors.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        assert self.process.stdin is not None
        self.process.stdin.write(p.encode(p.Watch(pid=os.getpid(), uuid=info.uuid, bus_id=info.bus_id)))
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = p.decode_event(line)
            except (p.ProtocolError, p.UnknownTypeError):
                continue
            if isinstance(event, p.SensorSample):
                self.samples.append(event)
            elif isinstance(event, p.SensorState):
                self.state = event

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def gpu(self) -> p.GpuSample | None:
        last = self.samples[-1] if self.samples else None
        return next((g for g in last.gpus if g.engine), None) if last else None

    def readings(self, cuda: bool) -> list[tuple[int, float]]:
        if not cuda:
            return [(s.t_ns, s.cpu.energy_j) for s in self.samples if s.cpu.energy_j is not None]
        found = [(s.t_ns, g.energy_j) for s in self.samples for g in s.gpus if g.engine]
        return [(t, e) for t, e in found if e is not None]


def sensing(check: Check, sensors: Sensors) -> None:
    time.sleep(1.0 if check.small else 3.0)
    if sensors.state is None or not check.cuda:
        why = sensors.state.text if sensors.state is not None else "the sensors' process said nothing"
        check.add("sensors", "NVML", "skip", why if not check.cuda or sensors.state is None else "")
        return
    gpu = sensors.gpu()
    if gpu is None:
        check.add("sensors", "NVML", "skip", sensors.state.engine_gpu_reason or sensors.state.text)
        return
    body = {n: getattr(gpu, n) for n in gpu.__struct_fields__ if n not in ("missing",)}
    check.add("sensors", "NVML", "ok", "", fields=body, missing=gpu.missing)
    gpm = gpu.dram_util is not None
    check.add(
        "sensors",
        "GPM",
        "ok" if gpm else "skip",
        "" if gpm else gpu.missing.get("dram_util", "not read"),
        dram_util=gpu.dram_util,
    )


def energies(check: Check, sensors: Sensors, ready: dict[str, StagedArm]) -> None:
    prompt, tokens = (32, 6) if check.small else (1024, 65)
    batch = Batch(
        number=0, ids=torch.randint(5, 500, (1, prompt)), pad=None, real_tokens=prompt, padded_tokens=0
    )
    seconds = 0.1 if check.small else 5.5
    for name, arm in list(ready.items())[:: max(1, len(ready) - 1)]:  # the first, and the last
        if check.left() < 4 * seconds + 10:
            check.add("energy", name, "skip", "no time is left")
            continue
        loops = energy.Loops(check.device, Arm(name, arm.policy, arm), batch, prompt + tokens, tokens, never)
        windows = [loops.run(kind, seconds) for kind in energy.WINDOWS]
        time.sleep(0.3)
        found = stage_energy(
            windows, sensors.readings(check.cuda), "NVML" if check.cuda else "RAPL", "no energy counter"
        )
        status = "ok" if found.prefill_j is not None else "skip"
        check.add(
            "energy", name, status, found.reason, prefill_j=found.prefill_j, decode_j=found.decode_j,
            prefill_net_j=found.prefill_net_j, decode_net_j=found.decode_net_j, idle_w=found.idle_w,
            closure=found.closure,
        )  # fmt: skip


# -- all of it ---------------------------------------------------------------------------------------------------------


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def guarded(check: Check, part: str, run: Callable[[], Any]) -> Any:
    """A part that breaks takes no other with it. What it raised is no wrong result, and is told."""
    begin = time.monotonic()
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - whatever a driver raises, the other parts still run
        check.add(part, part, "skip", f"broke off: {first_line(error)}")
        return None
    finally:
        check.add(part, "seconds", "time", "", seconds=round(time.monotonic() - begin, 2))


def run(kind: str, seconds: float) -> Json:
    begin = time.monotonic()
    out: Json = {"schema": 1, "torch": str(torch.__version__), "cuda": torch.version.cuda, "checks": []}
    try:
        device = open_device(kind)
    except PdqError as error:
        out["device"], out["skipped"] = None, error.message
        out["checks"] = [{"part": "device", "name": kind, "status": "skip", "reason": error.message}]
        return out
    info = device.info()
    out["device"] = {
        "name": info.name,
        "kind": info.kind,
        "capability": info.capability,
        "driver": info.driver,
    }
    check = Check(device, begin + seconds, small=device.kind != "cuda")
    guarded(check, "linear", lambda: linears(check))
    ready = guarded(check, "stages", lambda: stages(check)) or {}
    sensors = Sensors(device, info)
    try:
        guarded(check, "sensors", lambda: sensing(check, sensors))
        guarded(check, "energy", lambda: energies(check, sensors, ready))
    finally:
        sensors.close()
    check.add("triton", "kernels", "skip", "this engine has no Triton kernels of its own")
    out["checks"] = check.found
    out["seconds"] = round(time.monotonic() - begin, 1)
    return out


def table(body: Json) -> str:
    """One line a kernel and a part: of a kernel that is right at all row counts the largest error."""
    lines: list[str] = []
    kernels: dict[str, list[float]] = {}
    hidden = ("part", "name", "status", "reason", "fields", "missing", "tflops")
    for c in body["checks"]:
        if c["status"] == "time":
            continue
        if c["part"] == "linear" and c["status"] == "ok":
            kernels.setdefault(c["name"].rsplit(" ", 1)[0], []).append(c["error"])
            continue
        told = " ".join(f"{k}={v:.3g}" for k, v in c.items() if k not in hidden and isinstance(v, float))
        lines.append(f"{c['status']:<5} {c['part']:<8} {c['name']:<34} {c['reason'] or told}".rstrip()[:118])
    right = [
        f"ok    linear   {name:<34} error {max(errors):.3g} at most, {len(errors)} row counts"
        for name, errors in kernels.items()
    ]
    counts = {s: sum(c["status"] == s for c in body["checks"]) for s in ("ok", "skip", "fail")}
    return "\n".join([*right, *lines, ", ".join(f"{n} {s}" for s, n in counts.items())])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu-check.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=460.0, help="time for everything, in seconds")
    given = parser.parse_args(argv)
    body = run(given.device, given.seconds)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu-check.json").write_text(
        json.dumps(body, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8"
    )
    print(table(body))
    return 1 if any(c["status"] == "fail" for c in body["checks"]) else 0


if __name__ == "__main__":
    sys.exit(main())
