"""Make the pictures in this folder from the real app on the demo model: ``make screenshots``.

Nothing is drawn by hand: the app runs without a terminal of its own, measures both arms interleaved, takes its
snapshots, and each screen is saved as SVG at the size in its name. The verdict is that of a quick evaluation, which is run
for it afterwards; with ``--evaluation DIR`` of one that was made before, and then that picture alone is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def keep(app: Any, name: str) -> None:
    # Where this checkout lies is nobody's business; of one length, so that the columns stay.
    here = str(HERE.parent)
    alias = ("/home/user" + "/pdq-tui" * len(here))[: len(here)]
    picture = app.export_screenshot(title="pdq-tui").replace(here, alias)
    (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")
    print(f"screenshots/{name}.svg", flush=True)


def evaluate(model: str, prompt: int, new: int) -> Path:
    """A quick evaluation's directory."""
    place = Path(tempfile.mkdtemp(prefix="pdq-shots-")) / "evaluation"
    argv = [
        sys.executable,
        "-m",
        "pdq_tui",
        "evaluate",
        model,
        "--in",
        str(prompt),
        "--out",
        str(new),
        "--plan",
        "quick",
    ]
    subprocess.run([*argv, "--dir", str(place)], check=True, stdout=subprocess.DEVNULL)
    return place


async def verdict(evaluation: Path) -> None:
    """Screen 4 on an evaluation, beside no engine: it is read from its directory."""
    from pdq_tui.host.live import LiveSession
    from pdq_tui.host.runs import new_run
    from pdq_tui.tui.app import Options, PdqApp

    home = Path(tempfile.mkdtemp(prefix="pdq-shots-"))
    (home / "evaluations").mkdir()
    # Named as the app would have: by when it was made.
    made = datetime.fromtimestamp((evaluation / "evaluation.json").stat().st_mtime, UTC)
    shutil.copytree(evaluation, home / "evaluations" / f"{made:%Y%m%dT%H%M%SZ}")
    session = LiveSession(new_run(home / "runs", ["pdq-tui"]))
    app = PdqApp(session, Options(runs_dir=home / "runs", marker="braille", ascii=False, theme="pdq-dark"))
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("4")
        await pilot.pause(5)
        keep(app, "verdict-120x36")
        app.leave(0)
        await pilot.pause(1)


async def main(requests: int, model: str, prompt: int, new: int) -> None:
    from textual.pilot import Pilot

    from pdq_tui.commands.flags import load_of
    from pdq_tui.config import Settings
    from pdq_tui.core.catalog import find_policy
    from pdq_tui.core.workload import Workload
    from pdq_tui.host.live import LiveSession
    from pdq_tui.host.runs import new_run
    from pdq_tui.tui.app import Options, PdqApp

    runs = Path(tempfile.mkdtemp(prefix="pdq-shots-")) / "runs"
    run = new_run(runs, ["pdq-tui", model])
    session = LiveSession(run)
    app = PdqApp(
        session,
        Options(
            runs_dir=runs,
            load=load_of(Settings(), model),
            a=find_policy("w8a8-prefill-int4-decode"),
            b=find_policy("bf16"),
            workload=Workload(prompt_tokens=prompt, output_tokens=new),
            marker="braille",
            ascii=False,
            theme="pdq-dark",
        ),
    )

    async def until(pilot: Pilot[int], what: str, ready: Callable[[], bool], limit_s: float = 1200) -> None:
        begin = time.monotonic()
        while not ready():
            if time.monotonic() - begin > limit_s:
                raise SystemExit(f"{what}: not within {limit_s:.0f} s")
            await pilot.pause(0.25)

    def made(arm: str) -> int:
        view = session.view().arms.get(arm)
        return view.requests if view else 0

    def save(name: str) -> None:
        keep(app, name)

    async with app.run_test(size=(120, 36)) as pilot:
        await until(pilot, "engine", lambda: bool(session.view().tasks), 120)
        await pilot.pause(1)
        save("start-120x36")
        await until(pilot, "first request", lambda: made("A") > 0)
        await pilot.press("x")
        await until(pilot, "requests", lambda: min(made("A"), made("B")) >= requests)
        await pilot.pause(1.2)
        save("live-120x36")
        await pilot.resize_terminal(80, 24)
        await pilot.pause(1.2)
        save("live-80x24")
        await pilot.resize_terminal(120, 36)
        await pilot.press("question_mark")
        await pilot.pause(1)
        save("help-120x36")
        await pilot.press("escape")
        # Both arms take turns, so one key saves both.
        await pilot.press("s")
        await until(pilot, "snapshots", lambda: len(session.view().snapshots) >= 2, 60)
        await pilot.press("3")
        await pilot.pause(1.5)
        save("policies-120x36")
        await pilot.press("2")
        await pilot.pause(3)
        save("compare-120x36")
        await pilot.press("5")
        await pilot.press("t")
        await until(pilot, "a profiled burst", lambda: len(session.view().traces) >= 1, 120)
        await pilot.press("1", "b", "5", "t")
        await until(pilot, "a profiled burst of the other arm", lambda: len(session.view().traces) >= 2, 120)
        await pilot.pause(1.5)
        save("kernels-120x36")
        await pilot.press("6")
        await pilot.pause(1.5)
        save("log-120x36")
        app.leave(0)
        await pilot.pause(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=12, help="requests of each arm before the pictures are taken"
    )
    parser.add_argument("--model", default="demo", help="model directory, or demo")
    parser.add_argument("--in", dest="prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument(
        "--evaluation", type=Path, help="directory of an evaluation: take the picture of its verdict alone"
    )
    args = parser.parse_args()
    os.environ.pop("NO_COLOR", None)
    if args.evaluation is not None:
        asyncio.run(verdict(args.evaluation))
    else:
        asyncio.run(main(args.requests, args.model, args.prompt, args.new))
        asyncio.run(verdict(evaluate(args.model, args.prompt, args.new)))
