"""Were two snapshots made under the same conditions? What differs, and which figures it spoils."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdq_tui.core.document import ALONE
from pdq_tui.core.policy import STAGES

if TYPE_CHECKING:  # polars comes with it
    from pdq_tui.store.snapshot import Snapshot

OK: Final = "ok"
DIFFERS: Final = "differs"
UNKNOWN: Final = "unknown"
#: Differs because the policies do: what is compared, not what spoils the comparison.
BY_POLICY: Final = "by policy"

SPEED: Final = "speed"
MEMORY: Final = "memory"
UTILIZATION: Final = "utilization"
#: Relative difference of median clocks from which two runs had different clocks. A CPU's reading is coarser.
GPU_CLOCK_TOLERANCE: Final = 0.02
CPU_CLOCK_TOLERANCE: Final = 0.05
PEAK_TOLERANCE: Final = 0.05
#: Of the whole machine.
OTHER_LOAD_TOLERANCE: Final = 0.10


class SetupCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of ``candidate`` (a snapshot id) against the reference.

    ``status``: ok, differs, unknown, by policy. ``invalidates``: the groups of rows ("speed", "memory", or one stage's
    "prefill", "decode") about which nothing may then be said. ``refuses``: the comparison makes no sense and is made
    only when forced.
    """

    candidate: str
    what: str
    status: str
    reference: str
    value: str
    invalidates: tuple[str, ...] = ()
    refuses: bool = False
    text: str = ""


def _show(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_show(v) for v in value) or "none"
    text = str(value)
    return text[:12] + "…" if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else text


class _Checks:
    """Collects the checks of one pair."""

    def __init__(self, reference: Snapshot, candidate: Snapshot) -> None:
        self.a, self.b = reference, candidate
        self.found: list[SetupCheck] = []

    def add(
        self,
        what: str,
        a: Any,
        b: Any,
        invalidates: tuple[str, ...],
        *,
        refuses: bool = False,
        same: Callable[[Any, Any], bool] | None = None,
        text: str = "",
    ) -> None:
        status = UNKNOWN  # absent on both sides is not known to be equal
        if a is not None and b is not None:
            status = OK if (same(a, b) if same else a == b) else DIFFERS
        spoiled = status == DIFFERS
        self.found.append(
            SetupCheck(
                candidate=self.b.id,
                what=what,
                status=status,
                reference=_show(a),
                value=_show(b),
                invalidates=invalidates if spoiled else (),
                refuses=refuses and spoiled,
                text=text if spoiled else "",
            )
        )

    def show(self, what: str, a: Any, b: Any) -> None:
        """A condition that is the policies' own doing: equal or not, it spoils nothing, and both are named."""
        self.add(what, a, b, ())
        last = self.found[-1]
        if last.status == DIFFERS:
            self.found[-1] = msgspec.structs.replace(last, status=BY_POLICY)

    def both(self, get: Callable[[Snapshot], Any]) -> tuple[Any, Any]:
        return get(self.a), get(self.b)


def setup_checks(reference: Snapshot, candidate: Snapshot, *, paired: bool) -> list[SetupCheck]:
    """All conditions of one pair. In a ``paired`` run clocks that differ between the arms are the policy's own doing
    (power, heat) and are shown without spoiling anything; slowdowns are not."""
    c = _Checks(reference, candidate)
    both = c.both
    every = (SPEED, MEMORY)
    c.add("model", *_model(reference, candidate), every, refuses=True, text="another model")
    c.add(
        "model dtype",
        *both(lambda s: s.part("model").get("dtype")),
        every,
        refuses=True,
        text="another dtype",
    )
    c.add(
        "workload",
        *both(_shape),
        every,
        refuses=True,
        text="other lengths, batch or stop rule: other work was done",
    )
    c.add(
        "prompts", *both(lambda s: s.part("workload").get("prompts_sha256")), (SPEED,), text="other prompts"
    )
    c.add("seed", *both(lambda s: s.part("workload").get("seed")), ())
    c.add("device", *both(_device), every, text="another device")
    c.add(
        "threads", *both(lambda s: s.part("conditions").get("threads")), (SPEED,), text="other thread count"
    )
    c.add(
        "attention", *both(lambda s: s.part("workload").get("attention")), (SPEED,), text="another attention"
    )
    if reference.part("device").get("kind") != "cpu":  # on a CPU it is the device
        c.add("host CPU", *both(lambda s: s.part("host").get("cpu")), (SPEED,), text="another host")
    _kernels(c)
    c.add("driver", *_driver(reference, candidate), every, text="another driver")
    c.add("libraries", *_libraries(reference, candidate), every, text="other versions")
    _clocks(c, paired)
    c.add(
        "slowdowns",
        *both(lambda s: tuple(s.part("conditions").get("slowed") or ())),
        (SPEED,),
        same=lambda a, b: not a and not b,
        text="the GPU was slowed down while it was measured",
    )
    if reference.part("device").get("kind") == "cpu":
        # Interleaved arms shared what others left of the machine; two runs did not.
        c.add(
            "other load",
            *both(lambda s: _percent(s.part("conditions").get("other_load"))),
            () if paired else (SPEED,),
            same=lambda _a, _b: _near(*both(lambda s: s.part("conditions").get("other_load"))),
            text="other processes took another share of the CPU",
        )
    c.add(
        "peaks",
        *both(_peaks),
        (UTILIZATION,),
        same=lambda _a, _b: _near_peaks(*both(lambda s: s.part("device"))),
        text="shares of this machine's peaks are against other peaks",
    )
    versions = both(lambda s: s.part("conditions").get("memory_version"))
    if versions != (None, None):
        c.add(
            "memory reading", *versions, (MEMORY,), text="NVML v1 counts reserved memory as used, v2 does not"
        )
    c.add(
        "memory method",
        *both(lambda s: _joined(s.arm.get("memory_method"), s.arm.get("memory_from"))),
        (MEMORY,),
        same=lambda _a, _b: both(_memory)[0] == both(_memory)[1],
        text="memory was measured in different ways",
    )
    return c.found


def _percent(share: Any) -> str | None:
    return f"{share:.0%}" if isinstance(share, (int, float)) else None


def _near(a: Any, b: Any) -> bool:
    return bool(abs(a - b) <= OTHER_LOAD_TOLERANCE)


def _peaks(s: Snapshot) -> str | None:
    """Read peak and the compute peaks, as short as they can be told apart."""
    d = s.part("device")
    read, compute = d.get("read_peak_gbps"), d.get("compute_peak_tflops")
    if not isinstance(read, (int, float)) or not isinstance(compute, dict):
        return None
    return ", ".join([f"{read:.3g} GB/s", *(f"{k} {v:.3g} TFLOP/s" for k, v in sorted(compute.items()))])


def _near_peaks(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """A peak is the best of a few looks, which find a little more or less."""
    one, two = ({"read": d["read_peak_gbps"], **d["compute_peak_tflops"]} for d in (a, b))
    return one.keys() == two.keys() and all(
        abs(one[k] - two[k]) <= PEAK_TOLERANCE * max(one[k], two[k]) for k in one
    )


def _memory(s: Snapshot) -> tuple[Any, Any]:
    """How memory was read and of what: alone in a pass and alone in its process are the same."""
    origin = s.arm.get("memory_from")
    return s.arm.get("memory_method"), "alone" if origin in ALONE else origin


def _joined(*parts: Any) -> str | None:
    there = [str(x) for x in parts if x]
    return ", ".join(there) or None


def _model(a: Snapshot, b: Snapshot) -> tuple[Any, Any]:
    """By the strongest identity that both have: hash, revision, name."""
    one, two = a.part("model"), b.part("model")
    for key in ("sha256", "revision", "id"):
        if one.get(key) and two.get(key):
            return one[key], two[key]
    return one.get("id"), two.get("id")


def _shape(s: Snapshot) -> str | None:
    w = s.part("workload")
    if not w:
        return None
    prompt = w.get("prompt_tokens")
    if prompt is None:
        lengths = w.get("prompt_lengths") or []
        prompt = f"{min(lengths)}-{max(lengths)}" if lengths else "?"
    return f"in {prompt} out {w.get('output_tokens')} bs {w.get('batch')} {w.get('stop')}"


def _device(s: Snapshot) -> str | None:
    d = s.part("device")
    return _joined(d.get("name"), d.get("uuid"))


def _driver(a: Snapshot, b: Snapshot) -> tuple[Any, Any]:
    one, two = a.manifest.get("driver"), b.manifest.get("driver")
    cpu = a.part("device").get("kind") == "cpu" == b.part("device").get("kind")
    return ("none (CPU)", "none (CPU)") if cpu and one is None and two is None else (one, two)


def _libraries(a: Snapshot, b: Snapshot) -> tuple[str | None, str | None]:
    """Only what differs; what draws the screen and stores the files does not run the model."""
    bystanders = ("textual", "polars", "msgspec", "nvidia-ml-py")
    one, two = _versions(a), _versions(b)
    if not one or not two:
        return None, None
    names = sorted(k for k in one.keys() | two.keys() if k not in bystanders and one.get(k) != two.get(k))
    if not names:
        return "same", "same"
    return tuple(", ".join(f"{n} {v.get(n) or 'none'}" for n in names) for v in (one, two))  # type: ignore[return-value]


def _versions(s: Snapshot) -> dict[str, Any]:
    libraries = s.part("libraries")
    if not libraries:
        return {}
    return {**libraries, "pdq-tui": s.part("tool").get("version"), "python": s.manifest.get("python")}


def _kernels(c: _Checks) -> None:
    """By stage. Policies that ask for the same in a stage must have run it by the same kernels, or it was not the
    precision that was compared; where they ask for different things, so are the kernels, and what both ran is only
    shown. What runs the layers (compiled or not) is no policy's wish and must be the same in any case."""
    for stage in STAGES:
        asked = c.both(lambda s, stage=stage: _asked(s, stage))  # type: ignore[misc]
        ran = c.both(lambda s, stage=stage: kernels(s.arm, stage))  # type: ignore[misc]
        if None not in asked and asked[0] == asked[1]:
            c.add(f"{stage} kernels", *ran, (stage,), text="other kernels ran the same formats")
        else:
            c.show(f"{stage} kernels", *ran)
        layers = c.both(lambda s, stage=stage: _covered(s.arm, stage).get("runner"))  # type: ignore[misc]
        c.add(f"{stage} layers", *layers, (stage,), text="compiled on one side only")


def _asked(s: Snapshot, stage: str) -> Any:
    """What the policy wants of a stage; None where the snapshot does not tell."""
    policy = s.arm.get("policy_text")
    return [policy.get(k) for k in (stage, "keep", "on_misfit", "kv")] if isinstance(policy, dict) else None


def kernels(arm: Mapping[str, Any], stage: str) -> str | None:
    """ "linear ×210": how many modules each kernel ran in ``stage`` of one ``arms[]`` of the contract."""
    covered = _covered(arm, stage)
    if not isinstance(covered.get("kernels"), dict):
        return None
    counted = [f"{name} ×{n}" for name, n in sorted(covered["kernels"].items())]
    return _joined(*counted)


def _covered(arm: Mapping[str, Any], stage: str) -> dict[str, Any]:
    coverage = arm.get("coverage")
    covered = coverage.get(stage) if isinstance(coverage, dict) else None
    return covered if isinstance(covered, dict) else {}


def _clocks(c: _Checks, paired: bool) -> None:
    def median(s: Snapshot, name: str) -> float | None:
        clocks = s.part("conditions").get("clocks")
        spread = clocks.get(name) if isinstance(clocks, dict) else None
        value = spread.get("median") if isinstance(spread, dict) else None
        return float(value) if isinstance(value, (int, float)) else None

    invalidates = () if paired else (SPEED,)
    gpu = c.a.part("device").get("kind") != "cpu"
    names = (("sm_mhz", "memory_mhz"), GPU_CLOCK_TOLERANCE) if gpu else (("cpu_mhz",), CPU_CLOCK_TOLERANCE)
    for name in names[0]:
        a, b = c.both(lambda s, name=name: median(s, name))  # type: ignore[misc]
        c.add(
            "clocks" if name != "memory_mhz" else "memory clock",
            None if a is None else f"{a:.0f} MHz",
            None if b is None else f"{b:.0f} MHz",
            invalidates,
            same=lambda _x, _y, a=a, b=b: abs(a - b) <= names[1] * max(a, b),  # type: ignore[misc]
            text="other clocks",
        )
