"""``trace show/diff/open``: what the profiler saw of a run's stages, as tables, in TensorBoard, or in Perfetto."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from pdq_tui.commands.common import columns, emit, runs_dir, say, settings
from pdq_tui.commands.words import Dir
from pdq_tui.core import tracing
from pdq_tui.core.metrics import format_bytes
from pdq_tui.core.protocol import Traced
from pdq_tui.errors import INTERRUPTED, UNFIT, PdqError, UsageError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Kernels by stage of profiled bursts (run --trace, t in 5 Kernels).",
)

RunWord = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's id, the last four characters of it, or a path.")
]
#: The distribution whose plugin shows torch's traces in TensorBoard.
PLUGIN: Final = "torch-tb-profiler"
PERFETTO: Final = "https://ui.perfetto.dev"
_SHOWN: Final = 12


def _run_dir(word: str, directory: str | None) -> Path:
    from pdq_tui.store.listing import resolve_run

    return resolve_run(word, runs_dir(settings({"run.dir": ("--dir", directory)})))


def traces_of(run: Path) -> dict[str, Traced]:
    """The last burst of each arm that brought a table. Raises PdqError where there is none."""
    from pdq_tui.host.journal import Journal

    found = {e.arm: e for e in Journal(run / "events.jsonl").events() if isinstance(e, Traced) and e.stages}
    if not found:
        raise UsageError(f"no burst was profiled in {run}", "make one: pdq-tui run MODEL --trace")
    return found


@app.command(help="The kernel table of each arm and stage: self time, share, calls, bytes, FLOPs.")
def show(
    run: RunWord,
    everything: Annotated[bool, typer.Option("--all", help="All kernels, not the largest only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    directory: Dir = None,
) -> None:
    found = traces_of(_run_dir(run, directory))
    if as_json:
        emit(json.dumps([msgspec.to_builtins(t) for t in found.values()], indent=1))
        return
    emit("\n\n".join(table(t, None if everything else _SHOWN) for t in found.values()))


def table(t: Traced, most: int | None) -> str:
    parts = []
    for stage in t.stages:
        where = "kernels on the device" if stage.where == "device" else "operators on the CPU"
        over = f", profiler ×{stage.overhead:.2f}" if stage.overhead else ""
        passes = "1 pass" if stage.steps == 1 else f"{stage.steps} passes"
        head = f"{t.arm} ({t.policy})  {stage.stage}: {stage.trace_ms:.2f} ms in {passes}, {where}{over}"
        rows = [
            (
                k.name[:60],
                k.category,
                str(k.calls),
                f"{k.ms:.3f}",
                f"{k.share:.1%}",
                "" if k.bytes is None else format_bytes(k.bytes),
                "" if k.flops is None else f"{k.flops / 1e9:.3g} G",
            )
            for k in stage.kernels[:most]
        ]
        left = len(stage.kernels) - len(rows)
        if left:
            rest = stage.kernels[len(rows) :]
            ms, share = sum(k.ms for k in rest), sum(k.share for k in rest)
            rows.append(
                (f"{left} more", "", str(sum(k.calls for k in rest)), f"{ms:.3f}", f"{share:.1%}", "", "")
            )
        share = stage.between_ms / stage.trace_ms if stage.trace_ms else 0.0
        rows.append(("between kernels", "", "", f"{stage.between_ms:.3f}", f"{share:.1%}", "", ""))
        total = stage.trace_ms or 1.0
        kinds = ", ".join(f"{kind} {ms / total:.0%}" for kind, ms in tracing.by_category(stage).items())
        lines = [
            head,
            kinds,
            columns(rows, ("kernel", "category", "calls", "ms", "share", "bytes", "FLOPs")).rstrip(),
        ]
        if stage.where == "device" and stage.launch_reason:
            lines.append(stage.launch_reason)
        lines += [f"! does not run what its policy says: {why}" for why in stage.unmatched]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


@app.command(help="Which kernels came, went, sped up or slowed down from one arm to another, by stage.")
def diff(
    run: RunWord,
    reference: Annotated[str, typer.Argument(metavar="ARM", help="The arm to start from.")],
    arm: Annotated[str, typer.Argument(metavar="ARM", help="The arm to compare with it.")],
    directory: Dir = None,
) -> None:
    found = traces_of(_run_dir(run, directory))
    for name in (reference, arm):
        if name not in found:
            raise UsageError(f"no burst of arm {name!r}", f"profiled: {', '.join(found)}")
    parts = []
    for one, two in tracing.pairs(found[reference].stages, found[arm].stages):
        rows = [
            (
                c.word,
                c.name[:60],
                c.category,
                "" if c.before_ms is None else f"{c.before_ms:.3f}",
                "" if c.after_ms is None else f"{c.after_ms:.3f}",
                f"{(c.after_ms or 0.0) - (c.before_ms or 0.0):+.3f}",
            )
            for c in tracing.difference(one, two)
            if c.word != "same"
        ]
        head = f"{one.stage}: {reference} → {arm}, ms a pass under the profiler; one burst each names kernels, it ranks nothing"
        parts.append(
            f"{head}\n{columns(rows, ('', 'kernel', 'category', reference, arm, 'change')).rstrip()}"
        )
    emit("\n\n".join(parts))


@app.command("open", help="Show a run's traces in TensorBoard on this machine's loopback, until Ctrl-C.")
def open_(
    run: RunWord,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="TCP port; 0 takes a free one.")
    ] = 0,
    directory: Dir = None,
) -> None:
    folder = _run_dir(run, directory) / "trace"
    files = sorted(folder.glob("*/*.pt.trace.json.gz"))
    if not files:
        raise UsageError(f"there is no trace in {folder}", "make one: pdq-tui run MODEL --trace")
    perfetto = f"in Perfetto: open {PERFETTO} and drop the file there; it stays in the browser"
    for file in files:
        emit(str(file))
    reason = unavailable()
    if reason is not None:
        raise PdqError(f"TensorBoard cannot show them: {reason}", perfetto, UNFIT)
    say(perfetto)
    raise typer.Exit(serve(folder, port or free_port()))


def unavailable() -> str | None:
    """Why TensorBoard with torch's plugin cannot be started here; None where it can. Nothing is imported."""
    for name in ("tensorboard", PLUGIN):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed (pip install {name})"
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(folder: Path, port: int) -> int:
    """TensorBoard as a process of its own, on loopback only; its address is printed when it answers."""
    argv = [
        sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--load_fast", "false",
    ]  # fmt: skip
    process: subprocess.Popen[str] = subprocess.Popen(
        argv,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    before: Any = signal.signal(signal.SIGTERM, signal.default_int_handler)
    told = False
    tail: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            tail = [*tail[-5:], line.rstrip()]
            if not told and re.search(r"https?://", line):
                told = True
                emit(f"http://127.0.0.1:{port}/#pytorch_profiler")
                say("Ctrl-C ends it")
        code = process.wait()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if not told:
        raise PdqError(f"TensorBoard ended at once ({code}): {' '.join(tail)}")
    return 0 if code == 0 else 1
