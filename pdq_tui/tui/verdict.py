"""Verdict: run the whole protocol, watch it, and read what it says with its evidence.

An evaluation is a process of its own with an engine of its own, so it goes on when the app is closed and is found again;
the live run is stopped before, because two engines on one machine measure each other.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal

from pdq_tui.errors import PdqError
from pdq_tui.tui import verdict_lines
from pdq_tui.tui.ask import Ask, Choice, Pick
from pdq_tui.tui.copying import copy_text
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.keys import bound
from pdq_tui.tui.lines import Line, LineList, drawn, is_ascii, is_readonly, literal, sentence, wrapped
from pdq_tui.tui.page import Page
from pdq_tui.tui.verdict_answers import AnswersDialog
from pdq_tui.tui.verdict_evidence import Evidence

if TYPE_CHECKING:  # polars comes with these: only threads import them
    from pdq_tui.judge.scenarios import Card
    from pdq_tui.judge.watching import Watched
    from pdq_tui.report.evaluated import Evaluated

#: Evaluations lie beside the runs.
FOLDER = "evaluations"
_PLANS = (
    Choice("quick", "some minutes: fewer blocks and windows, wider intervals"),
    Choice("full", "hours on a slow machine: what a decision should rest on"),
)
_NONE = "no evaluation yet"


class VerdictScreen(Page):
    """The newest evaluation, or one that was chosen; looked at once a second while it is shown."""

    TITLE_WORD = "4 VERDICT"
    DEFAULT_CSS = """
    VerdictScreen {
        & #word { height: auto; min-height: 3; max-height: 11; }
        & #columns { height: 1fr; }
        & #left { width: 1fr; height: 1fr; }
        & #right { width: 46; height: 1fr; display: none; }
        &.-wide #right { display: block; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        bound("r", "plan", "Run/Stop", "verdict.run", "start an evaluation, go on with this one, or stop it"),
        bound("o", "open", "Open", "verdict.open", "look at another evaluation"),
        bound("enter", "evidence", "Evidence", "verdict.evidence", "what this row rests on"),
        bound(
            "t",
            "texts",
            "Texts",
            "verdict.texts",
            "what base and policy answered, side by side, to be marked",
        ),
        bound("e", "export", "Export", "verdict.export", "write the report: html with figures, md, json"),
        bound(
            "y",
            "copy",
            "Copy",
            "verdict.copy",
            "the word, its reasons and gates, to the clipboard and a file",
        ),
    ]

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.place: Path | None = None
        self.watched: Watched | None = None
        self.source: Evaluated | None = None
        self.cards: list[Card] = []
        self._chosen = False
        self._children: list[subprocess.Popen[bytes]] = []

    def compose_body(self) -> ComposeResult:
        word = LineList(id="word", cursor=False)
        word.add_class("panel")
        word.can_focus = False
        yield word
        with Horizontal(id="columns"):
            for name in ("left", "right"):
                box = LineList(id=name)
                box.add_class("panel")
                yield box

    def started(self) -> None:
        if self.folder is None:
            self.folder = Path(getattr(self.app, "runs_dir")).parent / FOLDER  # noqa: B009 - the app is not this room's
        self.query_one("#left", LineList).focus()
        self._show()
        self._read()
        self.set_interval(1.0, self._look)

    def on_screen_resume(self) -> None:
        if self.is_mounted and self.folder is not None:
            self._read()

    def resized(self) -> None:
        self.call_after_refresh(self._show)

    def _look(self) -> None:
        self._children = [c for c in self._children if c.poll() is None]
        if self.is_current:
            self._read()

    # -- reading

    @work(thread=True, exclusive=True, group="verdict")
    def _read(self) -> None:
        from pdq_tui.judge import diary, marks, watching
        from pdq_tui.judge.scenarios import cards
        from pdq_tui.report.evaluated import evaluated

        assert self.folder is not None
        place = self.place if self._chosen else next(iter(watching.evaluations(self.folder)), None)
        if place is None:
            self.app.call_from_thread(self._found, None, None, [])
            return
        try:
            seen = watching.watch(place)
            source = evaluated(seen.spec, seen.found, diary.read(place), marks.read(place))
            scenarios = cards(seen.spec, seen.found, source.verdict)
        except (PdqError, OSError) as error:
            self.app.call_from_thread(self._unreadable, place, sentence(error))
            return
        self.app.call_from_thread(self._found, seen, source, scenarios)

    def _unreadable(self, place: Path, why: str) -> None:
        self.place, self.watched, self.source = place, None, None
        self._show()
        self.say(f"{place.name} cannot be read: {why}")

    def _found(self, seen: Watched | None, source: Evaluated | None, scenarios: list[Card]) -> None:
        if seen is None:
            self._show()
            return
        ended = self.watched is not None and self.watched.running and not seen.running
        changed = (seen, source) != (self.watched, self.source)
        self.place, self.watched, self.source, self.cards = seen.directory, seen, source, scenarios
        if ended:
            self.say(
                f"report: {seen.directory / 'report.html'}"
                if seen.finished
                else f"it stopped: {seen.said or 'see its directory'}; r goes on with what is not done"
            )
        if changed or seen.running:
            self._show()

    # -- showing

    def _show(self) -> None:
        from pdq_tui.judge.plan import STEPS

        word, left, right = (self.query_one(f"#{name}", LineList) for name in ("word", "left", "right"))
        if self.watched is None or self.source is None:
            self.set_title("is staged precision worth it here?")
            lines = [
                Line.of(f" {part}", "" if n else "head")
                for n, text in enumerate(self._nothing())
                for part in wrapped(text, max(20, self.size.width - 6))
            ]
            self._set(word, lines)
            self._fit(word, len(lines))
            self._set(left, [])
            self._set(right, [])
            return
        w, e = self.watched, self.source
        self.set_title(drawn(self.app, verdict_lines.heading(w, STEPS, time.time())))
        width = max(20, self.size.width - 6)
        most = max(3, min(9, self.size.height // 3))
        lines = verdict_lines.word_lines(e, w, STEPS, width, most)
        self._set(word, lines)
        self._fit(word, len(lines))
        word.border_subtitle = literal(w.directory.name)
        wide, plain = self.has_class("-wide"), is_ascii(self.app)
        gates_width = max(20, left.size.width - 4) if left.size.width else width
        main = [
            *verdict_lines.gate_lines(e, gates_width, plain),
            Line.of(""),
            *verdict_lines.card_lines(self.cards, gates_width),
        ]
        side_width = 42 if wide else width
        side = [
            *verdict_lines.map_lines(e, side_width),
            Line.of(""),
            *verdict_lines.step_lines(w, STEPS, side_width, plain),
        ]
        if not w.finished and not wide:
            side = [
                *verdict_lines.step_lines(w, STEPS, width, plain),
                Line.of(""),
                *verdict_lines.map_lines(e, width),
            ]
            self._set(left, [*side, Line.of(""), *main])
        else:
            self._set(left, main if wide else [*main, Line.of(""), *side])
        self._set(right, side if wide else [])

    def _nothing(self) -> list[str]:
        if is_readonly(self.app):
            return [_NONE, "`pdq-tui evaluate` makes one; it is then shown here"]
        return [
            _NONE,
            "r runs the whole protocol on this model: bottleneck, selection, timing, quality, and one word with its evidence",
            "the live run is stopped for it; it goes on by itself, also when the app is closed",
        ]

    def _fit(self, box: LineList, lines: int) -> None:
        box.styles.height = lines + 2

    def filtered(self) -> None:
        self._show()

    def _set(self, box: LineList, lines: list[Line]) -> None:
        """Rows that can be chosen only where they hold the filter's text."""
        lines = [x for x in lines if x.key is None or self.wanted in x.text.lower()]
        box.set_lines([Line(tuple((drawn(self.app, t), r) for t, r in x.parts), x.key) for x in lines])

    # -- keys

    def action_plan(self) -> None:
        w = self.watched
        if w is not None and w.running:
            self._ask_to_stop(w.directory)
        elif w is not None and not w.finished:
            self.say("going on with what is not done …")
            self._begin(None, w.directory)
        else:
            self.app.push_screen(Pick("how much is to be measured?", _PLANS, "quick"), self._picked)

    def _ask_to_stop(self, place: Path) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self._stop(place)

        self.app.push_screen(Ask("Stop this evaluation? Its step is given up, what is done stays."), answered)

    def _picked(self, plan: str | None) -> None:
        if plan is not None:
            self.say("starting …")
            self._begin(plan, None)

    def _begin(self, plan: str | None, place: Path | None) -> None:
        """A new one by ``plan``, or what is left of the one in ``place``."""
        session = getattr(self.app, "session")  # noqa: B009 - the app's class is not this room's to know
        options: Any = getattr(self.app, "options", None)
        view = session.view(1.0)
        if plan is not None and (options is None or options.load is None):
            self.say("no model is loaded here: `pdq-tui evaluate MODEL` starts one")
            return
        session.stop()
        arms = [arm.wanted for arm in view.arms.values() if arm.wanted is not None]
        least = getattr(self.app, "min_effect")  # noqa: B009 - see above
        self._start(plan, place, options, arms, least)

    @work(thread=True, group="begin")
    def _start(
        self, plan: str | None, place: Path | None, options: Any, arms: list[Any], least: float
    ) -> None:
        from pdq_tui.tui import evaluating

        assert self.folder is not None
        try:
            if plan is not None:
                spec = evaluating.make_spec(options.load, arms, options.workload, plan, least)
                place, child = evaluating.begin(spec, self.folder)
            else:
                assert place is not None
                child = evaluating.go_on(place)
        except (PdqError, OSError) as error:
            self.app.call_from_thread(self.say, f"not started: {sentence(error)}")
            return
        self.app.call_from_thread(self._begun, place, child)

    def _begun(self, place: Path, child: subprocess.Popen[bytes]) -> None:
        self._children.append(child)
        self.place, self._chosen = place, True
        self.say(f"started in {place}; the live run is stopped meanwhile")
        self._read()

    @work(thread=True, group="begin")
    def _stop(self, place: Path) -> None:
        from pdq_tui.judge import watching

        try:
            there = watching.stop(place)
            text = "stopping; what is done stays" if there else "it has ended by itself"
        except PdqError as error:
            text = sentence(error)
        self.app.call_from_thread(self.say, text)

    def action_open(self) -> None:
        self._list()

    @work(thread=True, group="begin")
    def _list(self) -> None:
        from pdq_tui.judge import watching

        assert self.folder is not None
        choices = []
        for place in watching.evaluations(self.folder):
            try:
                w = watching.watch(place)
            except PdqError as error:
                choices.append(Choice(place.name, refused=sentence(error)))
                continue
            state = "running" if w.running else "finished" if w.finished else "not finished"
            choices.append(Choice(place.name, f"{literal(w.spec.model)}, {w.spec.plan.name}, {state}"))
        self.app.call_from_thread(self._offer, choices)

    def _offer(self, choices: list[Choice]) -> None:
        if not choices:
            self.say(_NONE)
            return

        def picked(name: str | None) -> None:
            if name is not None and self.folder is not None:
                self.place, self._chosen = self.folder / name, True
                self._read()

        current = self.place.name if self.place is not None else ""
        self.app.push_screen(Pick("which evaluation?", choices, current), picked)

    def action_evidence(self) -> None:
        box = self.query_one("#right" if self.query_one("#right", LineList).has_focus else "#left", LineList)
        if self.source is not None and box.key is not None:
            self.app.push_screen(Evidence(self.source, self.cards, box.key))

    def action_texts(self) -> None:
        from pdq_tui.judge import freerun

        source, tasks = self.source, (self.source.found.get("tasks") if self.source else None)
        if source is None or self.place is None or tasks is None:
            self.say("the task set was not answered yet" if source is not None else _NONE)
            return
        # The policy that the verdict is about first.
        names = sorted(tasks.get("policies", {}), key=lambda name: name != source.verdict.staged)
        of = {name: pairs for name in names if (pairs := freerun.pairs(tasks, name))}
        if not of:
            self.say("no task was answered by both")
            return

        def closed(_: None) -> None:
            self._read()

        self.app.push_screen(AnswersDialog(tasks, of, source.marks, self.place), closed)

    def on_line_list_chosen(self) -> None:
        self.action_evidence()

    def action_copy(self) -> None:
        if self.source is None or self.place is None:
            self.say(_NONE)
            return
        self.say(copy_text(self.app, verdict_lines.summary_text(self.source), "verdict", self.place))

    def action_export(self) -> None:
        source = self.source
        if source is None or self.place is None:
            self.say(_NONE)
            return
        about = f"the evaluation of {source.spec.model}"
        self.app.push_screen(ExportDialog(lambda: source, about, self.place))
