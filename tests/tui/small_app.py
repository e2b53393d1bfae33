"""A small app around one screen: the session is a stand-in that records what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.app import App
from textual.screen import Screen

from pdq_tui.core.policy import Policy, StagePolicy
from pdq_tui.core.protocol import ArmReady, Coverage, Fallback, KvInfo, LeftModule, WeightsInfo
from pdq_tui.host.view import ArmView, EngineView, NoteView, SessionView

#: Texts that have broken other apps: markup, broken markup, control and wide characters.
NASTY = ("[/", "x[/x]y", "[1] ok [/]", "[red]r[/red]", "a\x1b[31mb", "日本語[/]", "\ud800")


def arm_ready(arm: str, policy: Policy, extra: int = 0) -> ArmReady:
    left = [LeftModule(module="lm_head", parameters=28_311_552, bytes=56_623_104, reason="kept by default")]
    coverage = Coverage(
        converted_parameters=106_168_320,
        total_parameters=134_479_872,
        converted_bytes=106_850_000,
        left_bytes=56_623_104,
        left=left,
        formats={"int8": 210, "bf16": 1},
        kernels={"int8pack": 210},
    )
    return ArmReady(
        arm=arm,
        policy=policy,
        weights=WeightsInfo(stored_bytes=163_473_104, extra_bytes=extra, kept_bytes=56_700_000),
        coverage={"prefill": coverage, "decode": coverage},
        kv=KvInfo(bytes_per_token=23_040),
        fallbacks=[
            Fallback(stage="decode", module="model.layers.*.mlp.down_proj", wanted="int4-g64", used="int4-g32",
                     reason="64 does not divide 1536", modules=30)
        ] if extra else [],
    )  # fmt: skip


def view(run_dir: str = "", notes: tuple[NoteView, ...] = ()) -> SessionView:
    a = Policy(
        "w8a8-prefill-int4-decode", StagePolicy("int8", "int8"), StagePolicy("int4", "model", 64), storage="dual"
    )
    b = Policy("bf16")
    return SessionView(
        run_id="20261202T063000-0f3a",
        run_dir=run_dir,
        elapsed_s=61.0,
        engine=EngineView(state="running"),
        active="A",
        interleave=False,
        running=True,
        arms={
            "A": ArmView("A", wanted=a, ready=arm_ready("A", a, 54_000_000)),
            "B": ArmView("B", wanted=b, ready=arm_ready("B", b)),
        },
        notes=notes,
    )


class StandInSession:
    def __init__(self, picture: SessionView) -> None:
        self.picture = picture
        self.asked: list[tuple[str, Policy]] = []
        self.run_dir = picture.run_dir

    def view(self, window_s: float | None = 120) -> SessionView:
        return self.picture

    def set_policy(self, arm: str, policy: Policy) -> None:
        self.asked.append((arm, policy))

    def events(self, since_ns: int | None = None) -> list[Any]:
        return []


class SmallApp(App[None]):
    """One screen on an empty app, with the attributes that the real app gives to its screens."""

    def __init__(self, screen: Callable[[], Screen[Any]], runs_dir: Path, *, plain: bool = False) -> None:
        super().__init__()
        self.make, self.runs_dir, self.ascii = screen, runs_dir, plain
        self.session = StandInSession(view(str(runs_dir / "20261202T063000-0f3a")))

    def on_mount(self) -> None:
        self.push_screen(self.make())
