"""``where``: every path that is read or written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pdq_tui import config, locations
from pdq_tui.commands.common import STATE, emit, runs_dir, settings
from pdq_tui.core.tuned import tuned_file
from pdq_tui.host.demo import model_dir

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help="Print every path that is read or written.")
def where(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object, name to path.")] = False,
) -> None:
    paths = {
        "config": STATE.config or locations.config_file(),
        "project": Path.cwd() / config.PROJECT_FILE,
        "policies": locations.user_policies(),
        "shipped policies": locations.shipped("profiles"),
        "kernel tables": locations.shipped("kernels_cfg"),
        "server tables": locations.shipped("servers_cfg"),
        "your kernel tables": locations.user_kernels(),
        "tuned for the CPU": tuned_file("cpu"),
        "tuned for the GPU": tuned_file("cuda"),
        "runs": runs_dir(settings()),
        "log": locations.log_file(),
        "cache": locations.cache_dir(),
        # Deleting one of these has it made anew: own kernels, compiled layers, measured peaks.
        "own kernels": locations.cache_dir() / "native",
        "compiled layers": locations.cache_dir() / "inductor",
        "peaks": locations.cache_dir() / "peaks",
        "demo peaks": locations.demo_dir() / "peaks",
        "demo": model_dir(),
    }
    if as_json:
        emit(json.dumps({name: str(path) for name, path in paths.items()}, indent=1))
        return
    width = max(map(len, paths))
    emit("".join(f"{name:<{width}}  {path}\n" for name, path in paths.items()))
