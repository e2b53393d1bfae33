"""``policies list/show/check/new``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from pdq_tui import locations
from pdq_tui.commands.common import columns, emit, say, tell
from pdq_tui.core.catalog import Entry, find_policy, policies
from pdq_tui.core.policy import STAGES, Policy, Stage, parse_policy, policy_to_toml
from pdq_tui.errors import PdqError, UnfitError, UsageError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List, show, check and make policies.",
)

Name = Annotated[str, typer.Argument(metavar="POLICY", help="A policy's name, or the path of its TOML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command("list", help="All policies, shipped and your own; damaged files are listed with what is wrong.")
def list_(as_json: AsJson = False) -> None:
    entries = list(policies().values())
    if as_json:
        emit(json.dumps([_json(entry) for entry in entries], indent=1))
        return
    rows = []
    for entry in entries:
        if entry.policy is None:
            rows.append((entry.name, entry.origin, "damaged", "", "", "", entry.error or ""))
        else:
            p = entry.policy
            rows.append(
                (
                    p.name,
                    entry.origin,
                    p.storage,
                    p.prefill.format.label,
                    p.decode.format.label,
                    p.kv.label,
                    p.summary,
                )
            )
    emit(columns(rows, ("policy", "from", "storage", "prefill", "decode", "kv", "summary")))


def _json(entry: Entry) -> dict[str, Any]:
    body = {
        "name": entry.name,
        "path": entry.path,
        "origin": entry.origin,
        "error": entry.error,
        "policy": None,
    }
    if entry.policy is not None:
        body["policy"] = msgspec.to_builtins(entry.policy)
        body["digest"] = entry.policy.digest
    return body


@app.command(help="Print a policy's file.")
def show(policy: Name, as_json: AsJson = False) -> None:
    found = find_policy(policy)
    if as_json:
        emit(json.dumps({**msgspec.to_builtins(found), "digest": found.digest}, indent=1))
        return
    entry = policies().get(policy)
    path = Path(entry.path) if entry is not None else Path(policy).expanduser()
    say(f"{path}  digest {found.digest}")
    emit(path.read_text(encoding="utf-8"))


@app.command(help="Write a new policy file into your own policies, to be edited; prints its path.")
def new(
    name: Annotated[str, typer.Argument(help="The new policy's name.")],
    base: Annotated[
        str, typer.Option("--from", metavar="POLICY", help="The policy that it starts as.")
    ] = "w8a8-prefill-int4-decode",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    start = find_policy(base)
    made = msgspec.structs.replace(start, name=name, summary=f"made from {start.name}")
    text = policy_to_toml(made)
    parse_policy(text, name)  # refuses a name that could not be read back
    path = locations.user_policies() / f"{name}.toml"
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", "--force replaces it")
    shipped = name in policies(user_dir=Path("/nonexistent"))
    if shipped and not force:
        raise UsageError(f"{name} is a shipped policy", "take another name; --force puts yours in its place")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise PdqError(f"{path} cannot be written: {error.strerror}") from error
    if shipped:
        say(f"{name} now stands in place of the shipped policy of that name")
    emit(str(path))


@app.command(
    help="Check policies; with --model also what they will convert and store, without loading a weight."
)
def check(
    names: Annotated[list[str], typer.Argument(metavar="POLICY...", help="Names, or paths of TOML files.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="DIR", help="A model directory, or demo: predicts bytes and coverage."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="cpu|cuda|here",
            help="Whose kernels are meant: a plain cpu or cuda device, or here: this machine's, with what `tune` measured.",
        ),
    ] = "cpu",
    rows: Annotated[
        int,
        typer.Option(
            "--in", metavar="TOKENS", min=1, help="Prompt length that the kernels must take, in tokens."
        ),
    ] = 512,
    batch: Annotated[int, typer.Option("--batch", metavar="REQUESTS", min=1, help="Requests a pass.")] = 1,
    as_json: AsJson = False,
) -> None:
    found: list[Policy] = [find_policy(name) for name in names]
    for p in found:
        for stage in STAGES:
            _check_source(p, stage)
    if model is None:
        if as_json:
            emit(json.dumps([{**msgspec.to_builtins(p), "digest": p.digest} for p in found], indent=1))
            return
        rows_ = [
            (p.name, "ok", p.storage, p.prefill.format.label, p.decode.format.label, p.kv.label, p.digest)
            for p in found
        ]
        emit(columns(rows_, ("policy", "valid", "storage", "prefill", "decode", "kv", "digest")))
        return
    from pdq_tui.commands import predicted

    predictions, told = [], []
    unfit: UnfitError | None = None
    on, folder = predicted.device(device), predicted.directory(model)
    for p in found:
        try:
            predictions.append(predicted.predicted(p, folder, on, rows * batch, batch))
            told.append(msgspec.to_builtins(predictions[-1]))
        except UnfitError as error:
            if unfit is not None:
                tell(unfit)
            unfit = error
            told.append({"policy": p.name, "model": model, "device": device, "unfit": error.message})
    if as_json:
        emit(json.dumps(told, indent=1))
    elif predictions:
        emit(predicted.table(predictions))
    if unfit is not None:
        raise unfit


#: owner/name, as a hub writes it.
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _check_source(policy: Policy, stage: Stage) -> None:
    """Raises UsageError where a stage's source is neither a model's directory here nor a hub id. What is in it is told
    when it is loaded."""
    source = policy.stage(stage).source
    folder = Path(source).expanduser()
    if not source or source == "demo" or (folder.suffix == ".gguf" and folder.is_file()):
        return
    if folder.is_dir():
        if not (folder / "config.json").is_file() and not any(folder.glob("*.gguf")):
            raise UsageError(f"{policy.name}: {stage}.source: there is no config.json in {folder}")
        return
    if not _HUB_ID.fullmatch(source):
        raise UsageError(
            f"{policy.name}: {stage}.source: no such directory: {folder}",
            "a model directory, from where the program is started, or a hub id",
        )
