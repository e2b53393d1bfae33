"""``run``: one headless measurement by the app's own engine; a snapshot an arm, a table or the JSON contract."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import emit, runs_dir, say, settings
from pdq_tui.commands.gate import TIMED, watched
from pdq_tui.commands.progress import Printer
from pdq_tui.config import Settings
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import Load, Request
from pdq_tui.errors import FAILED, GATE, INTERRUPTED, OK, PdqError
from pdq_tui.host import demo
from pdq_tui.host.measure import MeasureError, measure
from pdq_tui.host.runs import new_run

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Measure policies on MODEL without a screen. The arms take turns in blocks; the first is the reference."
)
def run(
    model: flags.Model,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="POLICY",
            help="An arm; repeat it. The first is the reference. [bf16 and A's]",
        ),
    ] = None,
    prompt_tokens: flags.In = None,
    output_tokens: flags.Out = None,
    batch: flags.Batch = None,
    prompts: flags.PromptsFlag = None,
    chat_template: flags.ChatTemplate = None,
    beyond_positions: flags.Beyond = False,
    blocks: flags.Blocks = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SECONDS",
            callback=flags.finite,
            help="Stop measuring after this many seconds. [none]",
        ),
    ] = None,
    min_seconds: flags.MinSeconds = 10.0,
    solo: Annotated[
        bool,
        typer.Option("--solo/--no-solo", help="First a pass of each policy alone, for its memory in bytes."),
    ] = True,
    seed: flags.Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The JSON document of the run on stdout (schema 1).")
    ] = False,
    hard: Annotated[
        bool,
        typer.Option(
            "--hard",
            help="Fail where anything would fall back: a layer to another kernel or format, decoder layers to single operators, the KV "
            "cache to another kernel, a long prompt to one piece.",
        ),
    ] = False,
    name: Annotated[
        str, typer.Option("--name", metavar="TEXT", help="A note that is kept with the snapshots.")
    ] = "",
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="worse[:METRIC,...]",
            help="Exit 3 if a timed metric of an arm is judged worse; with names (e2e_ms, tpot_ms) only these. "
            "Unsure never fails, and is said.",
        ),
    ] = None,
    min_effect: flags.MinEffect = None,
    energy: Annotated[
        bool,
        typer.Option("--energy", help="Afterwards, loops of each stage alone for its energy: 24 s an arm."),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Afterwards, profile one burst of each arm: its kernels by stage."),
    ] = False,
    trace_steps: Annotated[
        int, typer.Option("--trace-steps", metavar="N", min=1, help="Decode steps of that burst.")
    ] = 4,
    device: flags.Device = None,
    gpu: flags.Gpu = None,
    threads: flags.Threads = None,
    weight_budget: flags.Budget = None,
    trust_remote_code: flags.Trust = False,
    revision: flags.Revision = None,
    directory: flags.RunsDir = None,
) -> None:
    gated = watched(fail_on, TIMED)

    loaded = settings(
        {
            **flags.workload_flags(prompt_tokens, output_tokens, batch, prompts, chat_template, seed),
            "run.blocks": ("--blocks", blocks),
            "run.budget": ("--budget", budget),
            "run.min_effect": ("--min-effect", flags.share_of(min_effect)),
            "run.dir": ("--dir", directory),
            **flags.engine_flags(device, gpu, threads, weight_budget),
        }
    )
    s = loaded.settings
    policies = chosen_policies(policy, s)
    workload = flags.workload_of(s, beyond_positions=beyond_positions)
    load = flags.load_of(s, model, trust_remote_code=trust_remote_code, revision=revision)
    printer = Printer(blocks=s.run.blocks)
    fetch_demo(load, printer)
    where = new_run(runs_dir(loaded), sys.argv, seed=s.workload.seed, extra={"name": name} if name else None)
    if where.text:
        say(where.text)
    say(f"run {where.id}: {', '.join(p.name for p in policies)} on {model}", level=1)
    code = OK
    failure: PdqError | None = None
    # A polite end from outside (timeout, a batch system) keeps the results like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = measure(
            load,
            policies,
            workload,
            run=where,
            blocks=s.run.blocks,
            budget_s=s.run.budget,
            seed=s.workload.seed,
            hard=hard,
            on_event=printer,
            min_seconds=min_seconds,
            solo=solo,
            energy_s=6.0 if energy else 0.0,
            trace_steps=trace_steps if trace else 0,
        )
        events, labels, code = result.events, result.labels, result.exit_code
    except MeasureError as error:
        failure, events, labels, code = error, error.events, (), error.exit_code
    finally:
        printer.close()
    from pdq_tui.commands.results_kept import Kept, keep

    kept: Kept = keep(where, events, labels, note=name, min_effect=s.run.min_effect)
    if failure is not None:
        kept.tell()
        if not any(isinstance(e, Request) for e in events) and str(where.path) not in (failure.hint or ""):
            where.discard()  # nothing was measured, and no log of it is named
        raise failure
    if as_json or kept.lost:
        from pdq_tui.report.tables import to_json

        emit(to_json(kept.document).decode("utf-8"))
    elif kept.document["arms"]:
        from pdq_tui.commands.common import ascii_only
        from pdq_tui.report.tables import render

        emit(render(kept.document, "table", ascii_only=ascii_only()))
    kept.tell()
    if code == INTERRUPTED:
        say(f"interrupted: what was measured until then is kept in {where.place}")
    rows = [r for r in kept.document["ratios"] if r["metric"] in gated]
    if code == OK and kept.trouble:
        code = FAILED
    for row in rows if code == OK else ():
        if row["judgement"] == "worse":
            say(f"worse: {row['arm']} in {row['metric']} (ratio {row['ratio']:.3f})")
            code = GATE
        elif row["judgement"] == "unsure":
            say(f"unsure: {row['arm']} in {row['metric']}: {row['judgement_reason']}")
    raise typer.Exit(code)


def chosen_policies(names: list[str] | None, s: Settings) -> list[Policy]:
    """The arms, the reference first. Without any named: the app's two, B (the reference) before A."""
    if not names:
        names = [s.policies.b, s.policies.a]
        say(f"no --policy given: {names[0]} (reference) and {names[1]}", level=0)
    return [find_policy(name) for name in names]


def fetch_demo(load: Load, printer: Printer) -> None:
    """The demo model's file, where it is what is meant. Ctrl-C ends it with exit code 130."""
    if load.model != flags.DEMO or load.source is not None:
        return
    try:
        load.source = str(demo.fetch(printer.bytes))
    except KeyboardInterrupt:
        raise PdqError("fetching the demo model was cancelled", exit_code=INTERRUPTED) from None
    finally:
        printer.close()
