"""``app``, and what ``pdq-tui [MODEL]`` runs: the screen, up before the model is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import runs_dir, say, settings
from pdq_tui.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Open the app on MODEL; what `pdq-tui [MODEL]` does. It starts to measure as soon as the model is loaded."
)
def app_(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="demo, a directory, a .gguf file, or a hub id. [demo]"),
    ] = None,
    a: Annotated[
        str | None, typer.Option("--a", metavar="POLICY", help="Policy of arm A. [w8a8-prefill-int4-decode]")
    ] = None,
    b: Annotated[
        str | None, typer.Option("--b", metavar="POLICY", help="Policy of arm B, the reference. [bf16]")
    ] = None,
    prompt_tokens: flags.In = None,
    output_tokens: flags.Out = None,
    batch: flags.Batch = None,
    prompts: flags.PromptsFlag = None,
    chat_template: flags.ChatTemplate = None,
    beyond_positions: flags.Beyond = False,
    seed: flags.Seed = None,
    min_effect: flags.MinEffect = None,
    device: flags.Device = None,
    gpu: flags.Gpu = None,
    threads: flags.Threads = None,
    weight_budget: flags.Budget = None,
    trust_remote_code: flags.Trust = False,
    revision: flags.Revision = None,
    guard: Annotated[
        int | None,
        typer.Option(
            "--guard",
            metavar="K",
            min=0,
            help="Re-score every K-th request of arm A by B, which takes over where KLD, broken numbers or failures pass "
            "the limits of [guard]. [0: off]",
        ),
    ] = None,
    fps: Annotated[
        str | None, typer.Option("--fps", metavar="auto|N", help="Most redraws, in frames a second. [auto]")
    ] = None,
    marker: Annotated[
        str | None,
        typer.Option(
            "--marker", metavar="auto|braille|block|ascii", help="What charts are drawn with. [auto]"
        ),
    ] = None,
    ascii_: Annotated[
        bool, typer.Option("--ascii", help="Draw everything in ASCII. [found out from the terminal]")
    ] = False,
    theme: Annotated[
        str | None,
        typer.Option(
            "--theme", metavar="NAME", help="pdq-dark, pdq-light, pdq-contrast, or one of Textual's. [auto]"
        ),
    ] = None,
    no_mouse: Annotated[
        bool, typer.Option("--no-mouse", help="Leave the mouse, and selecting text, to the terminal.")
    ] = False,
    readonly: Annotated[
        bool,
        typer.Option(
            "--readonly",
            help="Look only: the model is loaded, nothing is started, switched or applied, and no file is written but "
            "what you export, copy or picture (and caches).",
        ),
    ] = False,
    trace_every: Annotated[
        float | None,
        typer.Option(
            "--trace-every", metavar="SECONDS", help="While the loop runs, profile a burst this often."
        ),
    ] = None,
    energy_every: Annotated[
        float | None,
        typer.Option(
            "--energy-every",
            metavar="SECONDS",
            help="While the loop runs, measure energy by stage this often.",
        ),
    ] = None,
    directory: flags.RunsDir = None,
) -> None:
    loaded = settings(
        {
            "policies.a": ("--a", a),
            "policies.b": ("--b", b),
            **flags.workload_flags(prompt_tokens, output_tokens, batch, prompts, chat_template, seed),
            "run.dir": ("--dir", directory),
            "run.trace_every": ("--trace-every", trace_every),
            "run.energy_every": ("--energy-every", energy_every),
            "run.min_effect": ("--min-effect", flags.share_of(min_effect)),
            **flags.engine_flags(device, gpu, threads, weight_budget),
            "guard.every": ("--guard", guard),
            "screen.fps": ("--fps", fps),
            "screen.marker": ("--marker", marker),
            "screen.ascii": ("--ascii", ascii_ or None),
            "screen.theme": ("--theme", theme),
            "screen.mouse": ("--no-mouse", False if no_mouse else None),
        }
    )
    s = loaded.settings
    word = model or s.workload.model
    need_terminal(word)
    from pdq_tui.core.catalog import find_policy

    policy_a, policy_b = find_policy(s.policies.a), find_policy(s.policies.b)
    workload = flags.workload_of(s, beyond_positions=beyond_positions)
    load = flags.load_of(s, word, trust_remote_code=trust_remote_code, revision=revision)

    from pdq_tui.commands.logfile import log_to_file
    from pdq_tui.host.guard import GuardLimits
    from pdq_tui.host.live import LiveSession
    from pdq_tui.host.runs import new_run
    from pdq_tui.tui.app import Options, PdqApp

    runs = runs_dir(loaded)
    log_to_file(keep=not readonly)
    options = Options(
        runs_dir=runs,
        load=load,
        a=policy_a,
        b=policy_b,
        workload=workload,
        fps=None if s.screen.fps == "auto" else float(s.screen.fps),
        marker=s.screen.marker,
        ascii=True if s.screen.ascii else None,
        theme=None if s.screen.theme == "auto" else s.screen.theme,
        readonly=readonly,
        min_effect=s.run.min_effect,
        keys=dict(s.keys),
        first=not runs.is_dir() or not any(runs.iterdir()),
    )
    run = new_run(runs, sys.argv, seed=workload.seed, in_memory=readonly)
    limits = GuardLimits(every=s.guard.every, kld=s.guard.kld, window=s.guard.window, errors=s.guard.errors)
    session = LiveSession(run, min_effect=s.run.min_effect, guard=limits)
    if not readonly:
        session.schedule(trace_every_s=s.run.trace_every, energy_every_s=s.run.energy_every)
    try:
        code = PdqApp(session, options).run(mouse=s.screen.mouse)
    finally:
        session.close()
    if session.journal.text:
        say(f"{session.journal.text}", level=-1)
    if not readonly:
        say(f"the run is kept in {run.place}")
    raise typer.Exit(1 if code is None else code)


def need_terminal(model: str) -> None:
    """Raises UsageError, naming the headless command, where no screen can be drawn."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(stream is not None and stream.isatty() for stream in streams):
        why = "there is no terminal here"
    elif os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        why = f"this terminal cannot be drawn on (TERM={os.environ.get('TERM', '')})"
    else:
        return
    raise UsageError(
        f"{why}: the app cannot open; without a screen the same is measured by "
        f"`{as_called()} run {model} --policy bf16 --policy w8a8-prefill-int4-decode`"
    )


def as_called() -> str:
    """How the person would start this program again: its name where that is found, else its path."""
    found = shutil.which("pdq-tui")
    called = Path(sys.argv[0])
    if called.name != "pdq-tui" or (found is not None and Path(found).resolve() == called.resolve()):
        return "pdq-tui"
    return os.path.relpath(called) if called.is_absolute() else str(called)
