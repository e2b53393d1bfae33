"""``deploy``: what a policy means for vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pdq_tui.commands import flags
from pdq_tui.commands.common import ascii_only, emit, one_of, say
from pdq_tui.errors import PdqError, UsageError

if TYPE_CHECKING:
    from pdq_tui.judge.deploy import Cache

app = typer.Typer(add_completion=False, rich_markup_mode=None)

FORMATS: Final = ("md", "json")
#: owner/name, as a hub writes it.
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@app.command(
    help="What POLICY means for serving engines: checkpoints, flags, the commands of two pools, steps in and back, what "
    "crosses the link, and what each cannot express. Starts nothing."
)
def deploy(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="A policy's name, or the path of its file.")
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="demo, a directory, or a hub id.")
    ] = flags.DEMO,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="NAME", help="vllm, sglang or tensorrt-llm; repeat it. [all]"),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option("--in", metavar="TOKENS", min=1, help="Tokens of a prompt, for what crosses the link."),
    ] = 512,
    batch: Annotated[int, typer.Option("--batch", metavar="REQUESTS", min=1, help="Prompts at once.")] = 1,
    link: flags.Link = None,
    format: Annotated[str, typer.Option("--format", "-f", metavar="md|json", help="Of stdout.")] = "md",  # noqa: A002
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Also write deploy.md, deploy.json and each server's files into its own folder here.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    from pdq_tui.core.catalog import find_policy
    from pdq_tui.core.servers import load_servers
    from pdq_tui.judge.deploy import deployment
    from pdq_tui.report.deployment import body, markdown
    from pdq_tui.report.tables import to_ascii
    from pdq_tui.store import atomic
    from pdq_tui.store.snapshot import strict_json

    one_of("--format", format, FORMATS)
    servers = load_servers()
    for name in server or ():
        one_of("--server", name, [s.name for s in servers])
    chosen = find_policy(policy)
    named, cache, reason = _model(model)
    found = [
        deployment(
            s,
            chosen,
            named,
            tokens=tokens,
            batch=batch,
            cache=cache,
            cache_reason=reason,
            gbps=link,
        )
        for s in servers
        if not server or s.name in server
    ]
    text, data = markdown(found, named), strict_json(body(found, named))
    if directory is not None:
        place = directory.expanduser()
        files = {place / "deploy.md": text.encode("utf-8", "replace"), place / "deploy.json": data}
        files |= {
            place / d.server / f.name: f.text.encode("utf-8", "replace") for d in found for f in d.files
        }
        there = [str(path) for path in files if path.exists()]
        if there and not force:
            raise PdqError(f"{', '.join(there)} already there", "--force replaces them; or another --dir")
        for path, content in files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise atomic.failed(path.parent, error) from error
            atomic.write_file(path, content, force=force)
        say(f"written into {place}: {len(files)} files")
    shown = data.decode("utf-8") if format == "json" else text
    emit(to_ascii(shown) if ascii_only() and format == "md" else shown)


def _model(model: str) -> tuple[str, Cache | None, str]:
    """What the server's command line calls it, its cache, and why that is not known. Raises UsageError where there is no
    such model."""
    from pdq_tui.commands.predicted import directory
    from pdq_tui.core.shapes import read_shapes
    from pdq_tui.judge.deploy import cache_of

    folder = directory(model)
    if not folder.is_dir():
        if _HUB_ID.fullmatch(model):
            return model, None, "the model is not on this machine: its shapes are not known"
        raise UsageError(f"no such directory: {folder}", "a model directory, demo, or a hub id")
    try:
        shapes = read_shapes(folder)
    except UsageError as error:
        return str(folder), None, error.message
    if shapes.kv is None:
        return str(folder), None, shapes.kv_reason
    return str(folder), cache_of(shapes.kv), ""
