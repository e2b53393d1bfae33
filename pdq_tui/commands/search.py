"""``search``: the fastest policy within limits of divergence and memory, group of layers by group of layers."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from pdq_tui import locations
from pdq_tui.commands import flags
from pdq_tui.commands.common import ascii_only, emit, one_of, runs_dir, say, settings
from pdq_tui.commands.progress import Printer
from pdq_tui.commands.run import fetch_demo
from pdq_tui.errors import GATE, OK, UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_LINE_EVERY_S: Final = 15.0
#: In the search's folder: its policy is its own to replace, since it wrote it or was told --force.
WRITTEN: Final = "written"
_UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@app.command(
    help="Find the fastest policy for MODEL within limits: what each group of layers costs in each format and stage, then "
    "halving, then confirmation on other text. Writes it into your policies. Exit code 3: none keeps to the limits."
)
def search(
    model: flags.Model = flags.DEMO,
    max_kld: Annotated[
        float,
        typer.Option(
            "--max-kld",
            metavar="NATS",
            callback=flags.finite,
            help="Limit of the decode path's mean KLD to the model's own dtype, in nats: the upper bound has to lie under it.",
        ),
    ] = 0.011,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="SIZE",
            help="Limit of the weights of both stages with all that stays as it is, like 200MiB or 4GiB. [none]",
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--formats",
            metavar="FORMAT,...",
            help="What a group of layers may have beside the model's own dtype. [int8,w8a8,int4]",
        ),
    ] = None,
    effort: Annotated[
        str, typer.Option("--plan", metavar="quick|full", help="How much is measured.")
    ] = "quick",
    groups: Annotated[
        int | None,
        typer.Option(
            "--groups",
            metavar="N",
            min=1,
            help="Groups of consecutive layers; as many as layers: each by itself. [by plan]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Of the policy that is written. [searched-MODEL]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a policy of that name.")] = False,
    prompt_tokens: flags.In = None,
    output_tokens: flags.Out = None,
    batch: flags.Batch = None,
    seed: flags.Seed = None,
    as_json: Annotated[bool, typer.Option("--json", help="search.json on stdout.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where the search is kept. [a new one beside the runs]"),
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

    import msgspec

    from pdq_tui.commands.tune import chosen_formats
    from pdq_tui.judge.plan import Step
    from pdq_tui.judge.search import EFFORTS, FORMATS, STEPS, Search, SearchSpec
    from pdq_tui.report import searched
    from pdq_tui.report.tables import markdown, plain, to_ascii
    from pdq_tui.store import atomic
    from pdq_tui.store.snapshot import strict_json

    one_of("--plan", effort, EFFORTS)
    if max_kld <= 0:
        raise UsageError(
            f"--max-kld: {max_kld:g} is not a limit", "nats above 0, such as 0.011 (q5_K_M of llama.cpp)"
        )
    most = None if max_memory is None else bytes_of(max_memory)
    loaded = settings(
        {
            **flags.workload_flags(prompt_tokens, output_tokens, batch, None, None, seed),
            "run.min_effect": ("--min-effect", flags.share_of(min_effect)),
            **flags.engine_flags(device, gpu, threads, None),
        }
    )
    s = loaded.settings
    flags.refuse_several(s, "search")
    printer = Printer(every_s=_LINE_EVERY_S)
    if resume:
        if directory is None:
            raise UsageError("--resume needs --dir: which search goes on")
        sitting = Search.resume(directory.expanduser(), on_event=printer)
        force = force or (sitting.directory / WRITTEN).exists()
        free(sitting.spec.name, force=force)
    else:
        labels = [x for x in chosen_formats(formats or ",".join(FORMATS), "--formats") if x != "bf16"]
        if not labels:
            raise UsageError("--formats: bf16 alone leaves nothing to search", f"such as {','.join(FORMATS)}")
        called = name or _free_name(model)
        if called in ("bf16", *labels):
            raise UsageError(f"--name: {called} is a format's own name")
        free(called, force=force)
        load = flags.load_of(s, model, trust_remote_code=trust_remote_code, revision=revision)
        fetch_demo(load, printer)
        workload = flags.workload_of(s)
        if workload.prompt_tokens is None:
            raise UsageError(
                "a search runs on the built-in prompts of an exact length", "leave --prompts out"
            )
        chosen = EFFORTS[effort]
        spec = SearchSpec(
            model=model,
            load=load,
            workload=workload,
            effort=chosen if groups is None else msgspec.structs.replace(chosen, groups=groups),
            formats=tuple(labels),
            max_kld=max_kld,
            max_bytes=most,
            min_effect=s.run.min_effect,
            name=called,
            seed=s.workload.seed,
        )
        now = datetime.now(UTC)
        place = (
            directory.expanduser()
            if directory
            else runs_dir(loaded).parent / "searches" / f"{now:%Y%m%dT%H%M%SZ}"
        )
        sitting = Search.create(spec, place, on_event=printer)
        if force:  # also where it goes on later
            atomic.write_file(sitting.directory / WRITTEN, b"--force\n")
    say(f"search in {sitting.directory}; Ctrl-C stops it, --resume --dir goes on")

    def watch(step: Step, number: int, state: str, seconds: float) -> None:
        printer.close()
        where = f"{number}/{len(STEPS)} {step.title}"
        if state == "running":
            printer.around = lambda text: f"{number}/{len(STEPS)} {text}"
            say(f"{where}: {step.why}")
        else:
            say(f"{where}: {'done before' if state == 'kept' else f'done in {seconds:.0f} s'}")

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = sitting.run(watch)
    finally:
        printer.close()
    spec = sitting.spec
    data = strict_json(searched.body(spec, found))
    page = searched.page(spec, found)
    atomic.write_file(sitting.directory / "search.json", data, force=True)
    atomic.write_file(sitting.directory / "search.md", markdown(page).encode("utf-8", "replace"), force=True)
    text = data.decode("utf-8") if as_json else plain(page)
    emit(to_ascii(text) if ascii_only() and not as_json else text)
    say(f"report: {sitting.directory / 'search.md'}, {sitting.directory / 'search.json'}")
    if searched.winner(found) is None:
        say(searched.headline(spec, found))
        raise typer.Exit(GATE)
    path = locations.user_policies() / f"{spec.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named hours ago: another search may have written a policy of that name meanwhile.
    free(spec.name, force=force)
    atomic.write_file(sitting.directory / WRITTEN, f"{path}\n".encode(), force=True)
    atomic.write_file(path, searched.toml(spec, found).encode("utf-8"), force=True)
    say(f"policy: {path}; pdq-tui evaluate {spec.model} --candidate {spec.name} judges it")
    raise typer.Exit(OK)


def bytes_of(text: str) -> int:
    """ "200MiB" in bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*", text)
    size = int(float(match.group(1)) * _UNITS[match.group(2)]) if match else 0
    if size <= 0:
        raise UsageError(f"--max-memory: {text!r} is no size", f"a number and one of {', '.join(_UNITS)}")
    return size


def free(name: str, *, force: bool) -> None:
    """Raises UsageError where a policy is called that already, or none can be."""
    from pdq_tui.core.catalog import policies
    from pdq_tui.core.policy import parse_policy

    parse_policy(f'schema = 1\nname = "{name}"\n', "--name")
    if name in policies() and not force:
        raise UsageError(
            f"a policy is called {name} already", "--force replaces yours, --name takes another one"
        )


def _free_name(model: str) -> str:
    from pdq_tui.core.catalog import policies

    word = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "model"
    there = policies()
    names = (f"searched-{word}" + ("" if n == 1 else f"-{n}") for n in range(1, len(there) + 2))
    return next(name for name in names if name not in there)
