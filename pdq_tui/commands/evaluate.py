"""``evaluate``: the whole protocol, and a verdict with its evidence."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import ascii_only, emit, one_of, runs_dir, say, settings
from pdq_tui.commands.progress import Printer
from pdq_tui.commands.run import fetch_demo
from pdq_tui.errors import UnfitError, UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

#: Where stderr is no terminal, a long step says at most this often where it is.
_LINE_EVERY_S: Final = 15.0


@app.command(
    help="Answer whether staged precision is worth it for MODEL on this machine: bottleneck, timing, quality, verdict."
)
def evaluate(
    model: flags.Model = flags.DEMO,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            metavar="POLICY",
            help="A uniform policy; repeat it. The first is the base of quality. [all]",
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", metavar="POLICY", help="A staged policy; repeat it. [the usual three]"),
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            "--traffic",
            metavar="PRESET|FILE",
            help="Your requests' lengths: chat, rag, agent, reasoning, summary, or a CSV with prompt_tokens and "
            "output_tokens. [the workload itself]",
        ),
    ] = None,
    plan: Annotated[
        str, typer.Option("--plan", metavar="quick|full", help="How much is measured.")
    ] = "quick",
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="strict|standard|loose",
            help="Limit of the decode path's mean KLD: 0.0055, 0.011, 0.031 nats.",
        ),
    ] = "standard",
    tasks: Annotated[
        Path | None,
        typer.Option(
            "--tasks",
            metavar="FILE",
            help='Your tasks instead of ours: JSONL with "prompt" and "answer", and "rule" where "contains" does not suit.',
        ),
    ] = None,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm-eval",
            metavar="TASK,...",
            help="lm-eval's tasks as well, by name or YAML file, where it is installed (pip install 'pdq-tui[lm-eval]').",
        ),
    ] = None,
    targets: Annotated[
        str,
        typer.Option(
            "--targets",
            metavar="TTFT/TPOT",
            help="Under load, what 90 % of requests have to meet, in ms; MLPerf's for 8 B: 2000/100, or 500/30.",
        ),
    ] = "2000/100",
    link: flags.Link = None,
    soak: Annotated[
        str | None,
        typer.Option(
            "--soak",
            metavar="DURATION",
            help="How long the policy runs at the end: 20s, 10min, 4h. [by plan]",
        ),
    ] = None,
    prompt_tokens: flags.In = None,
    output_tokens: flags.Out = None,
    batch: flags.Batch = None,
    seed: flags.Seed = None,
    as_json: Annotated[bool, typer.Option("--json", help="evaluation.json on stdout.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where the evaluation is kept. [a new one beside the runs]"
        ),
    ] = None,
    resume: flags.Resume = False,
    min_effect: flags.MinEffect = None,
    device: flags.Device = None,
    gpu: flags.Gpu = None,
    threads: flags.Threads = None,
    trust_remote_code: flags.Trust = False,
    revision: flags.Revision = None,
) -> None:
    from datetime import UTC, datetime

    from pdq_tui.core.catalog import find_policy
    from pdq_tui.judge import diary, estimate, marks, quality, taskset
    from pdq_tui.judge import soak as endurance
    from pdq_tui.judge import traffic as traffics
    from pdq_tui.judge.evaluation import Evaluation
    from pdq_tui.judge.plan import PLANS, STAGED, STEPS, UNIFORM, Spec, Step
    from pdq_tui.judge.watching import Mark
    from pdq_tui.report.evaluated import evaluated
    from pdq_tui.report.tables import plain, to_ascii, to_json
    from pdq_tui.report.write import write
    from pdq_tui.store import atomic

    one_of("--plan", plan, PLANS)
    one_of("--gate", gate, quality.GATES)
    ttft_target, tpot_target = _targets(targets)
    soak_s = None if soak is None else endurance.duration_s(soak)
    lm_tasks = () if lm_eval is None else lm_eval_tasks(lm_eval)
    loaded = settings(
        {
            **flags.workload_flags(prompt_tokens, output_tokens, batch, None, None, seed),
            "run.min_effect": ("--min-effect", flags.share_of(min_effect)),
            **flags.engine_flags(device, gpu, threads, None),
        }
    )
    s = loaded.settings
    flags.refuse_several(s, "evaluate")
    printer = Printer(every_s=_LINE_EVERY_S)
    if resume:
        if directory is None:
            raise UsageError("--resume needs --dir: which evaluation goes on")
        evaluation = Evaluation.resume(directory.expanduser(), on_event=printer)
    else:
        load = flags.load_of(s, model, trust_remote_code=trust_remote_code, revision=revision)
        fetch_demo(load, printer)
        workload = flags.workload_of(s)
        if workload.prompt_tokens is None:
            raise UsageError(
                "an evaluation runs on the built-in prompts of an exact length", "leave --prompts out"
            )
        shapes = (
            traffics.read(traffic)
            if traffic
            else [traffics.Shape(workload.prompt_tokens, workload.output_tokens)]
        )
        spec = Spec(
            model=model,
            load=load,
            uniform=tuple(find_policy(n) for n in baseline or UNIFORM),
            staged=tuple(find_policy(n) for n in candidate or STAGED),
            workload=workload,
            traffic=tuple(shapes),
            traffic_name=traffic or "the workload itself",
            plan=PLANS[plan],
            gate=gate,
            min_effect=s.run.min_effect,
            seed=s.workload.seed,
            tasks=() if tasks is None else tuple(taskset.read(tasks.expanduser())),
            soak_s=soak_s,
            link_gbps=link,
            lm_tasks=lm_tasks,
            ttft_target_ms=ttft_target,
            tpot_target_ms=tpot_target,
            tasks_name="the project's own" if tasks is None else tasks.name,
        )
        mixed = [p.name for p in spec.uniform if p.staged] or [p.name for p in spec.staged if not p.staged]
        if mixed:
            raise UsageError(
                f"{mixed[0]} does not belong there",
                "--baseline takes uniform policies, --candidate staged ones",
            )
        now = datetime.now(UTC)
        place = (
            directory.expanduser()
            if directory
            else runs_dir(loaded).parent / "evaluations" / f"{now:%Y%m%dT%H%M%SZ}"
        )
        evaluation = Evaluation.create(spec, place, on_event=printer)
    say(f"evaluation in {evaluation.directory}; Ctrl-C stops it, --resume --dir goes on")

    now_at: tuple[str, float | None] = ("", None)

    def around(text: str) -> str:
        number, until = now_at
        rest = None if until is None else until - time.monotonic()
        tail = "" if rest is None else f"; {_about(rest)} left" if rest > 0 else "; longer than estimated"
        return f"{number} {text}{tail}"

    def watch(step: Step, number: int, state: str, seconds: float) -> None:
        nonlocal now_at
        printer.close()
        where = f"{number}/{len(STEPS)} {step.title}"
        if state == "running":
            rest = estimate.left(evaluation.spec, evaluation.found)
            whole = sum(rest.values())
            now_at = (f"{number}/{len(STEPS)}", time.monotonic() + whole if rest else None)
            mine = rest.get(step.name)
            mark.step(step.name, whole if rest else None)
            took = "" if mine is None else f" ({_about(mine)}; {_about(whole)} to the end)"
            say(f"{where}: {step.why}{took}")
        else:
            say(f"{where}: {'done before' if state == 'kept' else f'done in {seconds:.0f} s'}")

    mark = Mark(evaluation.directory)
    printer.around = around
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = evaluation.run(watch)
    finally:
        printer.close()
        mark.end()
    source = evaluated(
        evaluation.spec, found, diary.read(evaluation.directory), marks.read(evaluation.directory)
    )
    data = to_json(source)
    atomic.write_file(evaluation.directory / "evaluation.json", data, force=True)
    reports = write(source, ["md", "html"], evaluation.directory, force=True)
    text = data.decode("utf-8") if as_json else plain(source.page())
    emit(to_ascii(text) if ascii_only() and not as_json else text)
    say(f"report: {', '.join(map(str, reports))}")


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


def lm_eval_tasks(text: str) -> tuple[str, ...]:
    """Names and absolute paths of files. Raises UnfitError where lm-eval is not installed, UsageError where a file is not
    there: before anything runs."""
    from importlib.util import find_spec

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError("--lm-eval: no task is named", "such as --lm-eval hellaswag,arc_easy or a YAML file")
    if find_spec("lm_eval") is None:
        raise UnfitError(
            "--lm-eval: lm-eval is not installed",
            "pip install 'pdq-tui[lm-eval]', or leave --lm-eval out: the other tasks run without it",
        )
    found = []
    for word in words:
        file = Path(word).expanduser() if word.endswith((".yaml", ".yml")) else None
        if file is not None and not file.is_file():
            raise UsageError(f"--lm-eval: no such file: {word}")
        found.append(word if file is None else str(file.absolute()))
    return tuple(found)


def _targets(text: str) -> tuple[float, float]:
    """ "2000/100" → TTFT and TPOT in ms."""
    try:
        ttft, tpot = (float(part) for part in text.split("/"))
    except ValueError:
        ttft = tpot = 0.0
    if not (0 < ttft < float("inf") and 0 < tpot < float("inf")):
        raise UsageError(f"--targets: {text!r} is not TTFT/TPOT in ms", "like 2000/100")
    return ttft, tpot
