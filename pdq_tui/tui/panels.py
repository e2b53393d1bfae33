"""What the live screen's panels say: pure functions from the session's picture to rows.

Foreign text (model, device, policy names, errors) goes through ``literal`` and is never parsed as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from pdq_tui.core.metrics import METRICS, format_bytes
from pdq_tui.core.policy import Policy, Stage
from pdq_tui.core.protocol import CpuSample, GpuSample
from pdq_tui.core.stats import Ratio, Summary
from pdq_tui.host.view import ArmView, SessionView
from pdq_tui.tui.lines import ASCII, fit, literal
from pdq_tui.tui.plot import Part, Row
from pdq_tui.tui.rows import apart, cell, clip, length, row

_TABLE = str.maketrans(ASCII)
_WORD_ROLE = {"better": "good", "worse": "bad", "same": "", "unsure": "dim"}
#: Seconds without a sensor reading after which the last one is called stale.
STALE_S = 3.0


@dataclass(frozen=True)
class Look:
    """How this terminal is drawn to: ``plain`` is ASCII only."""

    plain: bool = False

    def own(self, text: str) -> str:
        """Our own words, with glyphs that the terminal has."""
        return text.translate(_TABLE) if self.plain else text

    def foreign(self, text: object) -> str:
        """Somebody else's words, literally; in ASCII what cannot be shown becomes ?."""
        shown = literal(text)
        return shown.encode("ascii", "replace").decode() if self.plain else shown


# -- header ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Display:
    """The display's own state, which the session does not know."""

    frozen_s: float | None = None
    slow_fps: float | None = None
    fps: float = 2.0
    readonly: bool = False


def state_words(view: SessionView, display: Display, look: Look) -> Part:
    """The state in capitals with a mark, e.g. "● RUNNING", "! WORKER STALLED 12 s"."""
    if display.frozen_s is not None:
        return (f"! PAUSED +{display.frozen_s:.0f} s recorded", "bad")
    engine = view.engine
    if engine.state == "stalled":
        return (f"! WORKER STALLED {engine.since_s:.0f} s", "bad")
    if engine.state == "dead":
        return ("! ENGINE DEAD (R restarts)", "bad")
    if display.slow_fps is not None:
        return (f"! LINK SLOW: {display.slow_fps:.0f} fps", "warn")
    if view.workload_error and not view.running:
        return ("! WORKLOAD REFUSED", "bad")
    mark = look.own("● " if view.running else "○ ")
    return (mark + engine.state.upper(), "mark" if view.running else "head")


def clock(seconds: float) -> str:
    whole = int(max(seconds, 0.0))
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def header(view: SessionView, display: Display, width: int, look: Look) -> Row:
    """Model, device, lengths, run, state, elapsed time, active arm, ABBA."""
    wide = width >= 110
    run = look.foreign(view.run_id.rsplit("-", 1)[-1])
    state = state_words(view, display, look)
    arms = _arm_choice(view)
    right: list[Part] = [
        ((f"run {run}  " if wide else f"{run} "), "dim"),
        state,
        (f" {clock(view.elapsed_s)}  " if wide else f" {clock(view.elapsed_s)[-5:]} ", ""),
        *((("arm ", "dim"),) if wide else ()),
        *arms,
        (
            "  ABBA " + ("on" if view.interleave else "off")
            if wide
            else (" ABBA" if view.interleave else ""),
            "",
        ),
        ("  read-only" if display.readonly and wide else "", "warn"),
        (" ", ""),
    ]
    lengths = f"  {_lengths(view, wide)} "
    room = max(width - length(right) - cell_len(lengths) - 6, 0)
    model = look.foreign(view.model.id) if view.model else "no model yet"
    device = look.foreign(_device_name(view)) if view.device else ""
    model_room = min(cell_len(model), max(room - min(cell_len(device) + 1, 14), 8))
    device_room = min(cell_len(device), room - model_room - 1)
    left: list[Part] = [(" pdq  ", "mark"), (fit(model, model_room), "head")]
    if device_room >= 4:
        left.append((f" {fit(device, device_room)}", ""))
    left.append((lengths, "dim"))
    return apart(left, right, width)


def _device_name(view: SessionView) -> str:
    device = view.device
    if device is None:
        return ""
    return device.name.replace("NVIDIA ", "")


def _lengths(view: SessionView, wide: bool) -> str:
    if view.workload is None:
        return "workload refused" if view.workload_error else "no workload yet"
    work, lengths = view.workload.workload, view.workload.lengths
    span = str(lengths[0]) if lengths and min(lengths) == max(lengths) else ""
    if lengths and not span:
        span = f"{min(lengths)}-{max(lengths)}"
    if wide:
        return f"in {span} out {work.output_tokens} bs {work.batch}"
    return f"in{span} out{work.output_tokens} bs{work.batch}"


def _arm_choice(view: SessionView) -> list[Part]:
    parts: list[Part] = []
    for arm in ("A", "B"):
        here = view.active == arm
        parts.append((f"[{arm}]" if here else f" {arm} ", arm.lower() if here else "dim"))
    return parts


def policy_line(view: SessionView, width: int, look: Look) -> Row:
    """Both arms' policies by stage, and what the second copy of weights costs."""
    short = width < 110
    room = width // 2
    parts: list[Part] = []
    for arm in ("A", "B"):
        words = arm_words(view.arms.get(arm), look, short=short)
        parts += [(f" {arm} ", arm.lower()), (fit(words, room - 3) if arm == "A" else words, "")]
    return clip(parts, width)


def arm_words(arm: ArmView | None, look: Look, *, short: bool = False) -> str:
    policy = wanted_policy(arm)
    if arm is None or policy is None:
        return "no policy"
    if short:
        text = look.own(
            f"{stage_word(policy, 'prefill')}/{stage_word(policy, 'decode')}/kv {policy.kv.decode}"
        )
    else:
        text = look.own(
            f"prefill {stage_word(policy, 'prefill')} · decode {stage_word(policy, 'decode')} · kv {policy.kv.decode}"
        )
    if policy.name.endswith("*"):
        text += " *"
    if arm.refused:
        return f"{text} (refused)"
    if arm.pending:
        return f"{text} (packing)" if not short else f"{text} (pack)"
    extra = arm.ready.weights.extra_bytes if arm.ready else 0
    if extra:
        return (
            f"{text} +{format_bytes(extra).replace(' ', '')}"
            if short
            else f"{text} (+{format_bytes(extra)} copy)"
        )
    if arm.arm == "B":
        text += " base" if short else " (reference)"
    return text


def wanted_policy(arm: ArmView | None) -> Policy | None:
    """What the arm is to do: what was asked for, unless that was refused."""
    if arm is None:
        return None
    if arm.ready is not None and (arm.refused or arm.wanted is None):
        return arm.ready.policy
    return arm.wanted


def stage_word(policy: Policy, stage: Stage) -> str:
    return policy.stage(stage).format.label


# -- stage panels --------------------------------------------------------------------------------------------------------


def stage_rows(view: SessionView, stage: Stage, width: int, look: Look) -> list[Row]:
    """The PREFILL or the DECODE panel."""
    primary, others = (
        ("ttft_ms", ("prefill_tokens_per_s", "prefill_mfu", "prefill_explained"))
        if stage == "prefill"
        else ("tpot_ms", ("decode_tokens_per_s", "mbu", "decode_explained"))
    )
    rows = [_policy_row(view, stage, width, look)]
    main = METRICS[primary]
    rows.append(
        row(
            cell(f" {main.short}", 9, "head"),
            *_value_cells(view, primary),
            *_ratio_parts(view.ratios.get(primary), width - 33, look),
        )
    )
    rows.append(
        row(
            cell("", 9),
            *(cell(_spread(view, arm, primary, look), 12, "dim") for arm in ("A", "B")),
            _judgement(view.ratios.get(primary), width - 33),
        )
    )
    remarks = {"prefill_mfu": "own peaks", "mbu": "read peak"}
    for id_ in others:
        metric = METRICS[id_]
        ratio = view.ratios.get(id_)
        tail = (
            _ratio_parts(ratio, width - 33, look)
            if ratio is not None
            else ((cell(remarks.get(id_, ""), max(width - 33, 0), "dim")),)
        )
        name = {"prefill_tokens_per_s": "tok/s", "decode_tokens_per_s": "tok/s"}.get(id_, metric.short)
        cells = _value_cells(view, id_, bare=metric.unit == "tok/s")
        rows.append(row(cell(f" {name}", 9, "head"), *cells, *tail))
    return [clip(r, width) for r in rows]


def stage_subtitle(view: SessionView, stage: Stage) -> str:
    """What the panel's figures rest on."""
    if stage == "prefill":
        return "device time"
    peak = view.device.read_peak_gbps if view.device else None
    return f"MBU of {peak:.4g} GB/s read peak" if peak else "no read peak measured"


def _policy_row(view: SessionView, stage: Stage, width: int, look: Look) -> Row:
    arm = view.arms.get(view.active)
    policy = wanted_policy(arm)
    name = stage_word(policy, stage) + ("*" if policy.name.endswith("*") else "") if policy else "-"
    parts: list[Part] = [
        cell(" policy", 9, "head"),
        (f"{view.active} ", view.active.lower()),
        cell(name, 10),
    ]
    return clip([*parts, *_kernel_parts(arm, stage, look)], width)


def _kernel_parts(arm: ArmView | None, stage: Stage, look: Look) -> list[Part]:
    if arm is None or arm.ready is None:
        return [("kernels not chosen yet", "dim")]
    fallbacks = [f for f in arm.ready.fallbacks if f.stage == stage]
    if fallbacks:
        count = sum(f.modules for f in fallbacks)
        return [(f"kernels ! {count} fell back", "warn")]
    coverage = arm.ready.coverage.get(stage)
    if coverage is None or not coverage.kernels:
        return [("kernels n/a", "dim")]
    name = max(coverage.kernels, key=lambda k: coverage.kernels[k])
    return [(look.own("kernels ✓ ") + look.foreign(name), "")]


def _stat(view: SessionView, arm: str, metric: str) -> Summary | None:
    there = view.arms.get(arm)
    return there.stats.get(metric) if there else None


def _value_cells(view: SessionView, metric: str, *, bare: bool = False, width: int = 12) -> list[Part]:
    """Both arms' medians; ``bare`` without the unit, where the line's name says it."""
    parts: list[Part] = []
    write = METRICS[metric].format if bare else METRICS[metric].text
    for arm in ("A", "B"):
        text = write(_median(_stat(view, arm, metric)))
        parts += [(f"{arm} ", arm.lower()), cell(text, width - 2, "dim" if text == "n/a" else "")]
    return parts


def _median(stat: Summary | None) -> float | None:
    return stat.median if stat is not None else None


def half_width(stat: Summary | None) -> float | None:
    if stat is None or stat.ci95 is None:
        return None
    return (stat.ci95[1] - stat.ci95[0]) / 2


def _spread(view: SessionView, arm: str, metric: str, look: Look) -> str:
    stat = _stat(view, arm, metric)
    half = half_width(stat)
    if stat is None or not stat.n:
        return "n=0"
    if half is None:
        return f"n={stat.n}"
    text = look.own(f"±{_short(half)} n={stat.n}")
    return text if len(text) <= 11 else text.replace("n=", "")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def arrow(ratio: Ratio, look: Look) -> str:
    if ratio.ratio is None:
        return "?"
    if ratio.judgement == "same" or f"{ratio.ratio:.2f}" == "1.00":
        return "="
    return look.own("▼" if ratio.ratio < 1 else "▲")


def _ratio_parts(ratio: Ratio | None, width: int, look: Look) -> tuple[Part, ...]:
    if width <= 0:
        return ()
    if ratio is None or ratio.ratio is None:
        return (cell("x: ABBA" if ratio is None else "n/a", width, "dim"),)
    role = "dim" if ratio.provisional else _WORD_ROLE.get(ratio.judgement, "")
    return (cell(look.own(f"×{ratio.ratio:.2f} ") + arrow(ratio, look), width, role),)


def _judgement(ratio: Ratio | None, width: int) -> Part:
    """The word, or that there is none to rely on yet."""
    if width <= 0:
        return ("", "")
    if ratio is None:
        return cell("", width)
    return cell(
        judgement_word(ratio), width, "dim" if ratio.provisional else _WORD_ROLE.get(ratio.judgement, "")
    )


def judgement_word(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.provisional:
        return f"prov. {ratio.blocks}bl"
    return ratio.judgement


def both_rows(view: SessionView, width: int, look: Look) -> list[Row]:
    """The STAGES panel of the smaller layouts: both stages in one table."""
    rows = [row(cell("", 12), cell("A", 14, "a"), cell("B", 14, "b"), ("A/B", "head"))]
    for metric in ("ttft_ms", "tpot_ms"):
        rows.append(
            row(
                cell(f" {METRICS[metric].short}  ms", 12, "head"),
                *(_with_spread(view, arm, metric, look) for arm in ("A", "B")),
                *_ratio_parts(view.ratios.get(metric), 8, look),
                cell(judgement_word(view.ratios.get(metric)), 14),
            )
        )
    rows.append(_pair_row(view, "mbu", "MBU dec", "prefill_mfu", "MFU pre", look))
    rows.append(
        _pair_row(view, "decode_explained", "expl dec", "prefill_explained", "expl pre", look, kernels=True)
    )
    return [clip(r, width) for r in rows]


def _with_spread(view: SessionView, arm: str, metric: str, look: Look) -> Part:
    stat = _stat(view, arm, metric)
    text = METRICS[metric].format(_median(stat))
    half = half_width(stat)
    if half is not None:
        text += look.own(f" ±{_short(half)}")
    return cell(text, 14, "dim" if text == "n/a" else "")


def _pair_row(
    view: SessionView, left: str, name: str, right: str, other: str, look: Look, *, kernels: bool = False
) -> Row:
    texts = [METRICS[left].text(_median(_stat(view, arm, left))) for arm in ("A", "B")]
    both = " / ".join(METRICS[right].text(_median(_stat(view, arm, right))) for arm in ("A", "B"))
    tail = f"{other} {both}"
    if kernels:
        tail += f"  {kernel_marks(view, look)}"
    return row(cell(f" {name}", 12, "head"), cell(texts[0], 14), cell(texts[1], 14), (tail, ""))


def kernel_marks(view: SessionView, look: Look) -> str:
    marks = []
    for name in ("A", "B"):
        arm = view.arms.get(name)
        ready = arm.ready if arm else None
        marks.append(f"{name} " + ("-" if ready is None else "!" if ready.fallbacks else look.own("✓")))
    return "kernels " + " ".join(marks)


# -- device ------------------------------------------------------------------------------------------------------------


def device_title(view: SessionView) -> tuple[str, str]:
    """Title and subtitle of the device panel."""
    gpu = engine_gpu(view)
    source = "psutil" if gpu is None else "NVML"
    if view.sensors is None:
        return ("DEVICE", "no reading yet")
    if view.sensors_age_s is not None and view.sensors_age_s > STALE_S:
        source = f"stale {view.sensors_age_s:.0f} s"
    return (f"GPU {gpu.index}" if gpu else "CPU", source)


def engine_gpu(view: SessionView) -> GpuSample | None:
    """The reading of the GPU that the engine runs on."""
    if view.sensors is None or (view.device is not None and view.device.kind == "cpu"):
        return None
    index = view.sensor_state.engine_gpu if view.sensor_state else None
    return next((g for g in view.sensors.gpus if g.engine or g.index == index), None)


def device_rows(view: SessionView, width: int, look: Look) -> list[Row]:
    gpu = engine_gpu(view)
    cpu = view.sensors.cpu if view.sensors is not None else CpuSample()
    rows = _gpu_rows(gpu, view, look) if gpu is not None else _cpu_rows(cpu, view, look)
    return [clip(r, width) for r in rows]


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value * 100:.0f} %"


def _gib(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 2**30:.1f}"


def _cpu_rows(cpu: CpuSample, view: SessionView, look: Look) -> list[Row]:
    threads = f"{view.device.threads} threads" if view.device else ""
    rows = [
        row((" load  ", "head"), f"{_share(cpu.load)}   engine {_share(cpu.engine_load)}"),
        row((" RSS   ", "head"), f"{_gib(cpu.engine_rss_bytes)} / {_gib(cpu.memory_total_bytes)} GiB"),
        _peaks(view),
        row(
            (" clock ", "head"),
            (f"{cpu.mhz:.0f} MHz" if cpu.mhz else "n/a") + f"   {_celsius(cpu.temperature_c)}",
        ),
    ]
    if threads:
        rows.append(row((" run   ", "head"), threads))
    rows.append(row((f" {look.foreign(no_gpu_words(view))}", "dim")))
    return rows


def no_gpu_words(view: SessionView) -> str:
    """Why there is no GPU reading."""
    if view.device is not None and view.device.kind == "cpu":
        return "GPU none: CPU run, no power"
    state = view.sensor_state
    if state is None:
        return "sensors starting"
    return state.engine_gpu_reason or state.text


def _celsius(value: float | None) -> str:
    return "temp n/a" if value is None else f"{value:.0f} C"


def _peaks(view: SessionView) -> Row:
    stats = view.arms[view.active].stats if view.active in view.arms else {}
    texts = [
        f"{letter} {_gib(_median(stats.get(f'{stage}_peak_bytes')))}"
        for letter, stage in (("P", "prefill"), ("D", "decode"))
    ]
    return row((" peak  ", "head"), "  ".join(texts) + " GiB")


def _gpu_rows(gpu: GpuSample, view: SessionView, look: Look) -> list[Row]:
    limit = "" if gpu.power_limit_w is None else f"/{gpu.power_limit_w:.0f}"
    power = (
        f"{gpu.power_w:.0f}{limit} W" if gpu.power_w is not None else f"n/a ({_why(gpu, 'power_w', look)})"
    )
    if gpu.throttle is None:
        throttle = f"n/a ({_why(gpu, 'throttle', look)})"
    else:
        throttle = look.foreign(", ".join(gpu.throttle)) or "none"
    others = "n/a" if gpu.other_processes is None else str(gpu.other_processes)
    clock_text = "n/a" if gpu.sm_mhz is None else f"{gpu.sm_mhz:.0f} MHz"
    return [
        row((" util  ", "head"), f"{_share(gpu.gpu_util)}   sm {clock_text}"),
        row((" power ", "head"), f"{power}   {_celsius(gpu.temperature_c)}"),
        row((" mem   ", "head"), f"{_gib(gpu.memory_used_bytes)} / {_gib(gpu.memory_total_bytes)} GiB"),
        _peaks(view),
        row((" throttle ", "head"), (throttle, "bad" if gpu.throttle else "")),
        row((" other procs ", "head"), (others, "warn" if gpu.other_processes else "")),
    ]


def _why(gpu: GpuSample, name: str, look: Look) -> str:
    return look.foreign(gpu.missing.get(name, "no reading"))


# -- tasks and notes -----------------------------------------------------------------------------------------------------


def task_rows(view: SessionView, width: int, look: Look) -> list[Row]:
    """What is under way, with progress: loading, converting, packing, warming up."""
    rows = []
    for task in view.tasks:
        bar = progress_bar(task.done, task.total, 20 if width >= 100 else 12, look)
        amount = _amount(task.done, task.total, task.unit)
        text = f" {look.foreign(task.task)}  {look.foreign(task.label)}"
        tail = f"  {amount}  {task.seconds:.1f} s  esc cancels "
        rows.append(apart([(text, "head")], [(f"  {bar}", "mark"), (tail, "dim")], width))
    return rows


def progress_bar(done: float, total: float | None, width: int, look: Look) -> str:
    """A bar, empty where the total is not known."""
    full, empty = ("#", ".") if look.plain else ("█", "░")
    share = min(1.0, max(0.0, done / total)) if total and total > 0 and done == done else 0.0
    return full * round(share * width) + empty * (width - round(share * width))


def _amount(done: float, total: float | None, unit: str) -> str:
    if unit.lower() in ("b", "bytes"):
        ends = format_bytes(total) if total else ""
        return f"{format_bytes(done)} of {ends}" if ends else format_bytes(done)
    if total:
        return f"{min(done / total, 9.99) * 100:3.0f} %"
    return f"{done:.0f} {unit}".strip()


def note_rows(view: SessionView, width: int, height: int, look: Look) -> list[Row]:
    """Newest first; a warning and an error carry their mark."""
    rows = []
    for text in (view.run_text, view.journal_text):
        if text:
            rows.append(clip([(f" ! {look.foreign(text)}", "bad")], width))
    for note in reversed(view.notes[-height:] if height > 0 else ()):
        mark, role = {"warn": ("! ", "warn"), "error": (look.own("✗ "), "bad")}.get(note.level, ("", ""))
        text = look.foreign(note.text)
        if note.hint:
            text += f" - {look.foreign(note.hint)}"
        rows.append(clip([(f" {note.clock}  ", "dim"), (f"{mark}{text}", role)], width))
    return rows[: max(height, 0)]


def bottom_rows(
    view: SessionView, width: int, height: int, look: Look, first: Sequence[Row] = ()
) -> list[Row]:
    """Tasks first, then the newest notes."""
    rows = [*first, *task_rows(view, width, look)][:height]
    return rows + note_rows(view, width, height - len(rows), look)


def summary_text(view: SessionView) -> str:
    """The figures of this screen as plain text, for the clipboard and a file."""
    look = Look()
    rows = [header(view, Display(), 110, look), policy_line(view, 160, look), ()]
    for stage in ("prefill", "decode"):
        rows += [row(stage.upper()), *stage_rows(view, stage, 60, look), ()]  # type: ignore[arg-type]
    rows += [row(device_title(view)[0]), *device_rows(view, 60, look)]
    return "\n".join("".join(text for text, _ in r).rstrip() for r in rows)
