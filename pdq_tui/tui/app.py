"""The app: its screens, the keys that work everywhere, start, quit, snapshots, themes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.filter import Monochrome, NoColor
from textual.screen import ModalScreen, Screen

from pdq_tui import errors, locations
from pdq_tui.core.policy import Policy
from pdq_tui.core.protocol import Load, SnapshotSaved
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError
from pdq_tui.host.view import SessionView, TaskView
from pdq_tui.tui import keys, theme
from pdq_tui.tui.lines import sentence
from pdq_tui.tui.live import LiveScreen
from pdq_tui.tui.terminal import AsciiDriver, OwnDriver, needs_ascii, own_terminal, start_marker

if TYPE_CHECKING:
    from textual.command import Provider

    from pdq_tui.host.runs import Leftover

#: The second ctrl+c within this time quits.
_TWICE_S = 2.0
_DEFAULT_FPS = 2.0


class LiveLike(Protocol):
    """What the screens need of a session: ``host.live.LiveSession``, or a stand-in in tests."""

    def view(self, window_s: float | None = 120.0) -> SessionView: ...
    def events(self, since_ns: int | None = None) -> list[Any]: ...
    def note(self, level: str, text: str, hint: str | None = None) -> None: ...
    def record(self, event: Any) -> None: ...
    def start(
        self, load: Load, a: Policy, b: Policy, workload: Workload, *, active: str = "A", loop: bool = False
    ) -> None: ...
    def set_policy(self, arm: str, policy: Policy) -> None: ...
    def select(self, arm: str) -> None: ...
    def interleave(self, on: bool) -> None: ...
    def start_loop(self) -> None: ...
    def stop(self) -> None: ...
    def trace(self, arm: str, steps: int = 4) -> None: ...

    def measure_energy(self, arms: Sequence[str]) -> None: ...
    def restart_engine(self) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """How the app is to look and what it begins with.

    load, a, b, workload  what to start; without ``load`` the session is taken as it is (a replay).
    fps        refreshes of the numbers a second; None: 2; 0: never by itself.
    marker     auto, braille, block, ascii. ascii: None finds out from the terminal.
    readonly   look only: see ``keys.works``. min_effect: the least relative difference that matters.
    keys       binding id → keys, replacing the built-in ones.
    first      nothing was ever measured here: the screen says what to press.
    """

    runs_dir: Path
    load: Load | None = None
    a: Policy | None = None
    b: Policy | None = None
    workload: Workload = field(default_factory=Workload)
    fps: float | None = None
    marker: str = "auto"
    ascii: bool | None = None
    theme: str | None = None
    readonly: bool = False
    min_effect: float = 0.01
    keys: dict[str, str] = field(default_factory=dict)
    first: bool = False


def _compare() -> Screen[Any]:
    from pdq_tui.tui.compare import CompareScreen  # polars comes with it, once somebody compares

    return CompareScreen()


def _policies() -> Screen[Any]:
    from pdq_tui.tui.policies import PoliciesScreen

    return PoliciesScreen()


def _kernels() -> Screen[Any]:
    from pdq_tui.tui.kernels import KernelsScreen

    return KernelsScreen()


def _verdict() -> Screen[Any]:
    from pdq_tui.tui.verdict import VerdictScreen

    return VerdictScreen()


def _log() -> Screen[Any]:
    from pdq_tui.tui.log import LogScreen

    return LogScreen()


def _palette() -> type[Provider]:
    from pdq_tui.tui.commands import PdqCommands  # not before the palette is opened

    return PdqCommands


class PdqApp(App[int]):
    """``session``: see LiveLike. Returns the process exit code. It closes the session before it ends.

    Raises UsageError for an unknown key id or theme before anything is drawn.
    """

    CSS_PATH = Path(__file__).with_name("pdq.tcss")
    TITLE = "pdq"
    #: Made when first shown, then kept with what they hold.
    SCREENS: ClassVar[dict[str, Callable[[], Screen[Any]]]] = {
        "live": LiveScreen, "compare": _compare, "policies": _policies, "verdict": _verdict,
        "kernels": _kernels, "log": _log,
    }  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = list(keys.APP)
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {_palette}
    ENABLE_COMMAND_PALETTE = True

    def __init__(self, session: LiveLike, options: Options) -> None:
        self.ascii = needs_ascii() if options.ascii is None else options.ascii
        super().__init__(driver_class=AsciiDriver if self.ascii else OwnDriver)
        self.session = session
        self.options = options
        self.runs_dir = options.runs_dir
        self.readonly = options.readonly
        self.min_effect = options.min_effect
        self.weight_budget_bytes = options.load.weight_budget_bytes if options.load else None
        self.fps = _DEFAULT_FPS if options.fps is None else options.fps
        self.marker = start_marker(options.marker, self.ascii, os.environ)
        self.fetching: TaskView | None = None
        self._cancelled = threading.Event()
        self._interrupted_at: float | None = None
        self._leaving = False
        self.showing = "live"
        for each in theme.THEMES:
            self.register_theme(each)
        if options.keys:  # looking them up imports every screen: only for those who changed one
            keys.check(options.keys, scopes())
        self.set_keymap(options.keys)
        self.set_theme(theme.start_theme(options.theme, os.environ))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return theme.series_defaults(self.current_theme)

    def set_theme(self, name: str) -> None:
        """Raises UsageError for a theme that does not exist."""
        if name not in self.available_themes:
            raise errors.UsageError(
                f"no theme is called {name!r}", f"there are: {', '.join(sorted(self.available_themes))}"
            )
        self.theme = name
        if self.no_color:
            # Turned grey, "the terminal's own foreground" and "background" are the same black.
            ansi = self.current_theme.ansi
            self._filters = [f for f in self._filters if not isinstance(f, (Monochrome, NoColor))]
            self._filters.append(NoColor() if ansi else Monochrome())

    def run(self, **how: Any) -> int | None:
        """As ``App.run``, with this process's descriptors 1 and 2 kept off the terminal meanwhile."""
        if how.get("headless") or sys.__stderr__ is None or not sys.__stderr__.isatty():
            return super().run(**how)
        with own_terminal(Path(self.session.view().run_dir) / "app.log"):
            return super().run(**how)

    # -- start ---------------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.animation_level = "none"
        self.push_screen("live")
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self._ended_from_outside)
        if self.options.load is not None:
            # After the first frame: the screen does not wait for processes.
            self.call_after_refresh(self._begin, self.options.load)
            if not self.readonly:
                self.call_after_refresh(self._look_for_leftovers)
        self.call_after_refresh(_collect_again)

    @work(thread=True, group="leftovers")
    def _look_for_leftovers(self) -> None:
        from pdq_tui.tui import leftovers

        for left in leftovers.found((self.runs_dir, locations.runs_dir())):
            self.call_from_thread(self._offer, left)

    def _offer(self, left: Leftover) -> None:
        from pdq_tui.tui import leftovers
        from pdq_tui.tui.ask import Ask

        def answered(yes: bool | None) -> None:
            if yes:
                end = partial(leftovers.end, left, self.session.note)
                self.run_worker(end, thread=True, group="leftovers")

        self.push_screen(Ask(leftovers.question(left)), answered)

    def _begin(self, load: Load) -> None:
        if load.model == "demo" and load.source is None:
            self._fetch_demo(load)
        else:
            self._start(load)

    def _start(self, load: Load) -> None:
        a, b = self.options.a, self.options.b
        if a is None or b is None:
            raise ValueError("a model was given without policies for both arms")

        def start(loop: bool) -> None:
            self.session.start(load, a, b, self.options.workload, loop=loop)

        if self.readonly:
            start(False)
        else:
            self.unless_evaluating("the workload", partial(start, True), partial(start, False))

    def unless_evaluating(
        self, what: str, act: Callable[[], None], instead: Callable[[], None] | None = None
    ) -> None:
        """``act``, unless an evaluation of this folder runs: ``what`` beside it would spoil what both measure. Then a
        sentence says so, with the way out, and ``instead`` is done."""
        # Mostly there is none: then nothing of the evaluation's room is imported for it.
        if any(self.evaluations_dir.glob("*/running.json")):
            self._unless(what, act, instead)
        else:
            act()

    @property
    def evaluations_dir(self) -> Path:
        return self.runs_dir.parent / "evaluations"

    @work(thread=True, group="evaluating")
    def _unless(self, what: str, act: Callable[[], None], instead: Callable[[], None] | None) -> None:
        from pdq_tui.judge import watching

        found = watching.running_in(self.evaluations_dir)
        if found is None:
            self.call_from_thread(act)
            return
        place, step = found
        self.session.note(
            "warn",
            f"{what} is not started: the evaluation {place.name} runs ({step}), and each would spoil the other's figures",
            "4 shows it and r there stops it (what is done stays); r here starts the workload afterwards",
        )
        if instead is not None:
            self.call_from_thread(instead)
        self.call_from_thread(self._redraw)

    @work(thread=True, group="fetch")
    def _fetch_demo(self, load: Load) -> None:
        """Bring the demo model's file, with progress, while the screen is already up."""
        from pdq_tui.host import demo

        began = time.monotonic()

        def progress(done: float, total: float | None, label: str) -> None:
            self.fetching = TaskView("fetch", label, done, total, "bytes", time.monotonic() - began)

        try:
            source = demo.fetch(progress, self._cancelled.is_set)
        except PdqError as error:
            self.session.note("error", error.message, error.hint)
        else:
            self.call_from_thread(self._start, _with_source(load, source))
        finally:
            self.fetching = None

    def cancel_tasks(self) -> None:
        """Cancel fetching, loading, converting or packing."""
        if self.fetching is not None:
            self._cancelled.set()
        else:
            self.session.cancel()

    # -- keys ----------------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return keys.works(action, self.readonly)

    async def action_go(self, name: str) -> None:
        """Show one of the screens; a dialog is answered first."""
        if not isinstance(self.screen, ModalScreen) and name != self.showing:
            self.showing = name
            await self.switch_screen(name)

    def action_help(self) -> None:
        from pdq_tui.tui.help import HelpScreen

        metric = self.screen.help_metric if isinstance(self.screen, LiveScreen) else None
        self.push_screen(HelpScreen(metric))

    def action_export(self) -> None:
        from pdq_tui.tui.export import ExportDialog

        self.push_screen(ExportDialog())

    def action_copy(self) -> None:
        if isinstance(self.screen, LiveScreen):
            self.screen.action_copy()

    def action_command_palette(self) -> None:
        from pdq_tui.tui.commands import Palette

        if self.use_command_palette and not isinstance(self.screen, Palette):
            self.push_screen(Palette(id="--command-palette"))

    def action_next_theme(self) -> None:
        place = theme.CYCLE.index(self.theme) if self.theme in theme.CYCLE else -1
        self.set_theme(theme.CYCLE[(place + 1) % len(theme.CYCLE)])

    def action_picture(self) -> None:
        """SVG of the screen into the run's folder."""
        folder = Path(self.session.view().run_dir)
        name = f"screen-{time.strftime('%H%M%S')}.svg"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = self.save_screenshot(name, str(folder))
        except OSError as error:
            self.session.note("error", f"no picture: {sentence(error)}")
        else:
            self.session.note("info", f"picture of the screen in {path}")
        self._redraw()

    async def export_as(self, form: str) -> None:
        """The export dialog of whatever is shown, with one format on."""
        from pdq_tui.tui.export import ExportDialog

        await self.run_action("export", self.screen if hasattr(self.screen, "action_export") else self)
        if isinstance(self.screen, ExportDialog):
            self.screen.only(form)

    async def compare_with(self, snapshot: str) -> None:
        """Take a snapshot, by its id, into the comparison."""
        from pdq_tui.tui.compare import CompareScreen

        await self.action_go("compare")
        if isinstance(self.screen, CompareScreen):
            self.screen.take(snapshot)

    async def run_on_live(self, action: str) -> None:
        """Do one of the live screen's actions from wherever the palette was opened."""
        await self.action_go("live")
        screen = self.screen
        if isinstance(screen, LiveScreen):
            await self.run_action(action, screen)

    async def run_on_kernels(self, action: str) -> None:
        """Do one of the kernels screen's actions from wherever the palette was opened."""
        await self.action_go("kernels")
        await self.run_action(action, self.screen)

    def _redraw(self) -> None:
        if isinstance(self.screen, LiveScreen):
            self.screen.redraw(charts=False)

    # -- snapshots -------------------------------------------------------------------------------------------------------------

    @work(thread=True, group="snapshot")
    def save_snapshots(self, arms: Sequence[str], note: str) -> None:
        """Write what each arm has measured into the store; a line of the event log says where, or why not."""
        from pdq_tui.store import snapshot  # polars comes with it

        folder = Path(self.session.view().run_dir)
        for arm in arms:
            try:
                path = snapshot.save(
                    folder, self.session.events(), arm, note=note, min_effect=self.min_effect
                )
            except PdqError as error:
                self.session.note("error", f"no snapshot of arm {arm}: {error.message}", error.hint)
            except OSError as error:
                self.session.note("error", f"no snapshot of arm {arm}: {sentence(error)}")
            else:
                self.session.record(SnapshotSaved(arm=arm, name=path.name, path=str(path), note=note))
        self.call_from_thread(self._redraw)

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        """Quit; asks only while a run is live."""
        from pdq_tui.tui.ask import Ask

        if isinstance(self.screen, Ask):
            return
        if not self.session.view().running:
            self.leave(errors.OK)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.leave(errors.OK)

        self.push_screen(Ask("A run is live. Stop it, keep the results, and quit?"), answered)

    def action_interrupt(self) -> None:
        """First: stop the run. Again within two seconds: quit. Results are on disk already, request by request."""
        if not self._leaves_again():
            self.session.stop()
            self.session.note("info", "run stopped; ctrl+c again within 2 s quits")
            self._redraw()

    def action_interrupt_looking(self) -> None:
        """The same where nothing is stopped: see ``keys.works``."""
        if not self._leaves_again():
            self.session.note("info", "ctrl+c again within 2 s quits")
            self._redraw()

    def _leaves_again(self) -> bool:
        """Quit and True if it was pressed just before."""
        before, self._interrupted_at = self._interrupted_at, time.monotonic()
        twice = before is not None and self._interrupted_at - before < _TWICE_S
        if twice:
            self.leave(errors.INTERRUPTED)
        return twice

    def _ended_from_outside(self) -> None:
        self.leave(errors.INTERRUPTED)

    def leave(self, code: int) -> None:
        """End the workers, then the app. Once."""
        if not self._leaving:
            self._leaving = True
            self._cancelled.set()
            self._close(code)

    @work(group="leave")
    async def _close(self, code: int) -> None:
        await asyncio.to_thread(self.session.close)
        self.exit(code, return_code=code)


def _collect_again() -> None:
    """Where the collector was off while the program started (``cli``): what is there now stays, and is left out of
    every collection, so that none of them holds a key up for long."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _with_source(load: Load, source: Path) -> Load:
    import msgspec

    return msgspec.structs.replace(load, source=str(source))


def scopes() -> list[list[Binding]]:
    """Bindings that can be pressed at the same place, a list a place: what is on the screen first, the app's last."""
    from pdq_tui.tui import (
        ask,
        compare,
        compare_detail,
        compare_texts,
        export,
        kernels,
        lines,
        log,
        page,
        policies,
        replay,
        verdict,
        verdict_answers,
        verdict_evidence,
    )
    from pdq_tui.tui import help as helping

    def of(*owners: Any) -> list[Binding]:
        return [b for owner in owners for b in owner.BINDINGS if isinstance(b, Binding)]

    app = [*keys.APP, *replay.PLAYER]
    screens = (
        compare.CompareScreen,
        kernels.KernelsScreen,
        log.LogScreen,
        policies.PoliciesScreen,
        verdict.VerdictScreen,
    )
    dialogs = (
        ask.Ask,
        ask.Pick,
        ask.Write,
        compare_detail.RowDetail,
        compare_texts.TextsDialog,
        export.ExportDialog,
        helping.HelpScreen,
        verdict_evidence.Evidence,
    )
    answers = of(verdict_answers.AnswersDialog, compare_texts.TextsDialog, lines.LineList)
    return [
        [*keys.LIVE, *app],
        *([*of(screen, lines.LineList, page.Page), *app] for screen in screens),
        *(of(dialog, lines.LineList) for dialog in dialogs),
        answers,
    ]


def known_ids() -> list[str]:
    """Ids of every key binding of the app and its screens: what ``[keys]`` may name."""
    return list(dict.fromkeys(b.id for scope in scopes() for b in scope if b.id))
