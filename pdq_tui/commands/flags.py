"""Flags that the app and ``run`` have in common, each with its unit, and what they become: a Load and a Workload."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pdq_tui import locations
from pdq_tui.commands.common import fraction, say
from pdq_tui.config import Settings
from pdq_tui.core.prompts import read_prompts
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import PROMPT_SETS, Workload
from pdq_tui.errors import UnfitError, UsageError
from pdq_tui.host import demo

DEMO: Final = "demo"


def finite(param: typer.CallbackParam, value: float | None) -> float | None:
    """For ``callback=`` of options that take a number: nan and inf pass typer's own limits."""
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{param.opts[0]}: {value} is no finite number")
    return value


def _rate(param: typer.CallbackParam, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{param.opts[0]}: {value} is not a legal value", "GB/s, such as 25")
    return value


Link = Annotated[
    float | None,
    typer.Option(
        "--link",
        metavar="GB/S",
        help="The link between two pools of servers, in 10⁹ bytes a second. [100, 200 and 400 Gbit/s]",
        callback=_rate,
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="demo, a directory, a .gguf file, or a hub id.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on in --dir with what is not done; other flags are its own.")
]
Blocks = Annotated[
    int | None,
    typer.Option("--blocks", metavar="N", min=1, help="Blocks (each arm twice a block, mirrored). [10]"),
]
MinSeconds = Annotated[
    float,
    typer.Option(
        "--min-seconds",
        metavar="SECONDS",
        min=0,
        callback=finite,
        help="Go on until this much was measured, in seconds.",
    ),
]
In = Annotated[
    int | None,
    typer.Option(
        "--in", metavar="TOKENS", min=1, help="Prompt length of the built-in sets, in tokens. [512]"
    ),
]
Out = Annotated[
    int | None,
    typer.Option("--out", metavar="TOKENS", min=1, help="New tokens a request, the first included. [64]"),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="REQUESTS", min=1, help="Requests a pass, left-padded to the longest. [1]"
    ),
]
PromptsFlag = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="SET|FILE",
        help="Prompt set (short, long, mixed), or a file: text with prompts separated by blank lines, or JSONL with "
        "`prompt` or `messages`. [mixed]",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="auto|none",
        help="auto: the model's template for `messages`, none for plain prompts; none: never. [auto]",
    ),
]
Beyond = Annotated[
    bool,
    typer.Option(
        "--beyond-positions",
        help="Run prompts longer than the model's positions in tokens (rotary models only): speed, not sense.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="Seed of the prompts' and the blocks' order. [0]"),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="auto|cuda|cpu", help="auto takes a GPU where there is one. [auto]"),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="INDEX|UUID",
        help="Which GPU, by index or UUID; several (0,1 or all) share a model too large for one, without a verdict. [the first]",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", min=1, help="CPU threads; never more than affinity and quota allow."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--weight-budget",
        metavar="GIB",
        callback=finite,
        help="Most that packed weights of all policies may take, in GiB.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model. Off unless asked for."),
]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub model.")
]
MinEffect = Annotated[
    str | None,
    typer.Option("--min-effect", metavar="SHARE", help="Smallest difference that counts, e.g. 1%. [1%]"),
]
RunsDir = Annotated[
    str | None,
    typer.Option("--dir", metavar="DIR", help="Where the run is kept, in place of the state directory."),
]


def share_of(min_effect: str | None) -> float | None:
    """``--min-effect`` as a fraction, None where it was not given. Raises UsageError."""
    return None if min_effect is None else fraction(min_effect, "--min-effect")


def workload_flags(
    prompt_tokens: int | None,
    output_tokens: int | None,
    batch: int | None,
    prompts: str | None,
    chat_template: str | None,
    seed: int | None,
) -> dict[str, tuple[str, Any]]:
    """What was said about the workload, as ``config.load`` takes it."""
    return {
        "workload.in": ("--in", prompt_tokens),
        "workload.out": ("--out", output_tokens),
        "workload.batch": ("--batch", batch),
        "workload.prompts": ("--prompts", prompts),
        "workload.chat_template": ("--chat-template", chat_template),
        "workload.seed": ("--seed", seed),
    }


def engine_flags(
    device: str | None, gpu: str | None, threads: int | None, weight_budget: float | None
) -> dict[str, tuple[str, Any]]:
    """What was said about where it runs, as ``config.load`` takes it."""
    return {
        "engine.device": ("--device", device),
        "engine.gpu": ("--gpu", gpu),
        "engine.threads": ("--threads", threads),
        "engine.weight_budget": ("--weight-budget", weight_budget),
    }


def workload_of(settings: Settings, *, beyond_positions: bool = False) -> Workload:
    """The workload, with the user's prompts read from their file. What was decided about it is said on stderr.

    Raises UsageError where the file holds nothing that can run.
    """
    w = settings.workload
    common: dict[str, Any] = {
        "output_tokens": w.output_tokens,
        "batch": w.batch,
        "chat_template": w.chat_template,
        "seed": w.seed,
        "long_positions_ok": beyond_positions,
    }
    if w.prompts in PROMPT_SETS:
        return Workload(prompt_tokens=w.prompt_tokens, prompts=w.prompts, **common)
    path = Path(w.prompts).expanduser()
    if not path.exists() and not path.suffix and path.name == w.prompts:
        near = difflib.get_close_matches(w.prompts, PROMPT_SETS, 1)
        hint = f"did you mean {near[0]}?" if near else f"sets: {', '.join(PROMPT_SETS)}; or name a file"
        raise UsageError(f"--prompts: no prompt set or file is called {w.prompts!r}", hint)
    prompts = read_prompts(path)
    say(f"{path}: {prompts.summary} ({'; '.join(prompts.notes)})")
    return Workload(prompt_tokens=None, prompts="file", texts=prompts.texts, chats=prompts.chats, **common)


def refuse_several(settings: Settings, what: str) -> None:
    """Raises UnfitError where several GPUs are to share the model and ``what`` judges, before anything is loaded."""
    gpu = settings.engine.gpu
    if gpu is not None and (gpu == "all" or "," in gpu):
        raise UnfitError(
            f"{what} runs on one GPU, and --gpu is {gpu}: of a model whose layers lie on several devices nothing is judged, since"
            " every time has their hand-overs in it and peaks are of one device",
            "choose one GPU, or look at the figures with pdq-tui run",
        )


def load_of(
    settings: Settings, model: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> Load:
    """The command that loads ``model``: "demo", a directory or .gguf file, or a hub id.

    Raises UsageError where a path is meant and nothing is there: it is not looked for on the hub.
    """
    e = settings.engine
    budget = None if e.weight_budget is None else int(e.weight_budget * 2**30)
    load = Load(
        model=model,
        cache_dir=str(locations.cache_dir()),
        device=e.device,
        gpu=e.gpu,
        threads=e.threads,
        weight_budget_bytes=budget,
        trust_remote_code=trust_remote_code,
        revision=revision,
        layers=e.layers,
        kernels=e.kernels,
        tuned=e.tuned,
        prefill_rows=e.prefill_rows,
    )
    if model == DEMO:
        # Without a source it is fetched first.
        if revision is not None:
            raise UsageError("--revision belongs to a hub model: the demo model has none")
        load.source = str(demo.model_dir()) if demo.fetched() else None
        load.cache_dir = str(locations.demo_dir())
        return load
    path = Path(model).expanduser()
    if path.exists():
        load.model = str(path.absolute())
    elif looks_like_path(model):
        raise UsageError(
            f"no such directory: {model}",
            "MODEL is demo, a directory, a .gguf file, or a hub id such as org/name",
        )
    return load


def looks_like_path(word: str) -> bool:
    """True for what can only be meant as a path: no hub id looks like that, or its directory is there."""
    return (
        word.startswith(("/", ".", "~"))
        or word.count("/") > 1
        or word.endswith((".gguf", "/"))
        or ("/" in word and Path(word).parent.is_dir())
    )
