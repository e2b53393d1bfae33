"""Compare: choose snapshots, the reference first, and see what differs, by how much, and whether that can be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from pdq_tui.core.arms import timed
from pdq_tui.core.metrics import METRICS
from pdq_tui.errors import PdqError
from pdq_tui.tui import compare_rows
from pdq_tui.tui.ask import BOX
from pdq_tui.tui.copying import copy_text
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.lines import Line, LineList, drawn, is_ascii, sentence, title
from pdq_tui.tui.page import Page

if TYPE_CHECKING:  # polars comes with these: only threads import them
    from pdq_tui.store.compare import Comparison, Row
    from pdq_tui.store.listing import Listed
    from pdq_tui.store.snapshot import Snapshot


class CompareScreen(Page):
    """Snapshots above, the table of one pair below; the reference is always the left column."""

    TITLE_WORD = "2 COMPARE"
    DEFAULT_CSS = """
    CompareScreen {
        & #snapshots { height: 4; }
        & #setup { height: auto; max-height: 3; padding: 0 1; }
        & #rows { height: 1fr; }
        & #spread { display: none; height: 7; }
        &.-tall #spread { display: block; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "space",
            "pick",
            "Pick",
            id="compare.pick",
            tooltip="take this snapshot into the comparison or out",
        ),
        Binding(
            "asterisk",
            "reference",
            "Reference",
            id="compare.reference",
            tooltip="this snapshot is the reference",
        ),
        Binding(
            "enter", "detail", "Detail", id="compare.detail", tooltip="formula, why, blocks and distribution"
        ),
        Binding(
            "left_square_bracket",
            "pair(-1)",
            "Prev pair",
            id="compare.prev",
            tooltip="previous candidate",
            show=False,
        ),
        Binding("right_square_bracket", "pair(1)", "Next pair", id="compare.next", tooltip="next candidate"),
        Binding(
            "D", "differences", "Diff only", id="compare.diff", tooltip="only rows that are better or worse"
        ),
        Binding(
            "H",
            "hidden",
            "Hidden",
            id="compare.hidden",
            tooltip="show or hide what the difference filter hides",
        ),
        Binding(
            "y", "copy", "Copy row", id="compare.copy", tooltip="send this row to the terminal's clipboard"
        ),
        Binding("e", "export", "Export", id="compare.export", tooltip="write this comparison to files"),
    ]

    def __init__(self, picked: Sequence[str] = ()) -> None:
        """``picked``: snapshot ids to begin with, the reference first; by default the last of each arm of this run."""
        super().__init__()
        self.picked: list[str] = list(picked)
        self.listed: list[Listed] = []
        self.comparison: Comparison | None = None
        self.sources: dict[str, Snapshot] = {}
        self.pair = 0
        self.differences = self.show_hidden = False
        self._touched = bool(picked)
        self._turn = 0
        self._known: tuple[str, ...] = ()
        self._filter_rows = False

    def compose_body(self) -> ComposeResult:
        for name, heading, cursor in (
            ("snapshots", "snapshots", True),
            ("rows", "", True),
            ("spread", "", False),
        ):
            box = LineList(id=name, cursor=cursor)
            box.add_class("panel")
            box.border_title = heading
            yield box
            if name == "snapshots":
                yield Static(id="setup", markup=False)

    def started(self) -> None:
        self.query_one("#snapshots", LineList).focus()
        self._show()
        self._list()
        self.set_interval(2.0, self._look)

    def _session(self) -> Any:
        return getattr(self.app, "session")  # noqa: B009 - the app's class is not this room's to know

    @property
    def run_dir(self) -> Path:
        return Path(self._session().view(1.0).run_dir)

    # -- the list of snapshots

    def _look(self) -> None:
        if self.is_current and self._session().view(1.0).snapshots != self._known:
            self._list()

    def on_screen_resume(self) -> None:
        if self.is_mounted:
            self._list()

    def _list(self) -> None:
        view = self._session().view(1.0)
        self._known = view.snapshots
        folders = dict.fromkeys([Path(getattr(self.app, "runs_dir"))])  # noqa: B009 - see _session
        if self.run_dir.is_absolute():  # a run started with --dir lies elsewhere
            folders[self.run_dir.parent] = None
        if not self.listed:
            self.say("reading the snapshots …")
        self._read_list(list(folders), view.run_id)

    @work(thread=True, exclusive=True, group="list")
    def _read_list(self, folders: list[Path], run_id: str) -> None:
        from pdq_tui.store import listing

        try:
            found = {s.path: s for folder in folders for s in listing.list_snapshots(folder)}
        except (PdqError, OSError) as error:
            self.app.call_from_thread(self.say, f"the snapshots cannot be read: {sentence(error)}")
            return
        self.app.call_from_thread(self._listed, list(found.values()), run_id)

    def _listed(self, listed: list[Listed], run_id: str) -> None:
        changed = listed != self.listed
        self.listed = listed
        readable = {s.id for s in listed if s.error is None}
        picked = [name for name in self.picked if name in readable]
        if not self._touched:
            picked = last_of_each_arm(listed, run_id)
        if picked != self.picked or (changed and self.comparison is None):
            self.picked = picked
            self._compare()
        self._show()
        if not listed:
            self.say("no snapshot yet: s on the live screen takes one of the active arm")
        elif self.comparison is None and len(self.picked) < 2:
            self.say("space picks two or more, * sets the reference")

    def action_pick(self) -> None:
        name = self._snapshot_key()
        if name is None:
            return
        self._touched = True
        self.picked = [p for p in self.picked if p != name] if name in self.picked else [*self.picked, name]
        self._compare()

    def action_reference(self) -> None:
        name = self._snapshot_key() or self._candidate_id()
        if name is None:
            return
        self._touched = True
        self.picked = [name, *(p for p in self.picked if p != name)]
        self.pair = 0
        self._compare()

    def _snapshot_key(self) -> str | None:
        box = self.query_one("#snapshots", LineList)
        key = box.key if box.has_focus else None
        return key if isinstance(key, str) else None

    def _candidate_id(self) -> str | None:
        return None if self.comparison is None else self.comparison.candidates[self.pair].id

    # -- comparing

    def _compare(self) -> None:
        self._turn += 1
        self.comparison = None
        if len(self.picked) >= 2:
            paths = {s.id: Path(s.path) for s in self.listed}
            self.say("comparing …")
            self._read_pair([paths[p] for p in self.picked], self._turn)
        else:
            self.say("space picks two or more, * sets the reference")
        self._show()

    @work(thread=True, exclusive=True, group="compare")
    def _read_pair(self, paths: list[Path], turn: int) -> None:
        from pdq_tui.store import compare, snapshot

        try:
            sources = [snapshot.load(path) for path in paths]
            # Forced: what cannot be compared is shown side by side, flagged and without a judgement.
            least = getattr(self.app, "min_effect")  # noqa: B009 - see _session
            found = compare.compare(sources, least, force=True)
        except (PdqError, OSError) as error:
            self.app.call_from_thread(self._failed, sentence(error), turn)
            return
        self.app.call_from_thread(self._compared, found, {s.id: s for s in sources}, turn)

    def _failed(self, text: str, turn: int) -> None:
        if turn == self._turn:
            self.say(f"not compared: {text}")

    def _compared(self, found: Comparison, sources: dict[str, Snapshot], turn: int) -> None:
        if turn != self._turn:
            return
        self.comparison, self.sources = found, sources
        self.pair = min(self.pair, len(found.candidates) - 1)
        refused = [c for c in found.setup if c.refuses]
        if refused:
            what = ", ".join(dict.fromkeys(c.what for c in refused))
            self.say(f"not comparable ({what} differ): side by side only, without a judgement")
        else:
            self.say(found.notes[0] if found.notes else "enter shows what a row means")
        self._show()

    # -- showing

    def _show(self) -> None:
        picker = self.query_one("#snapshots", LineList)
        wanted = "" if self._filter_rows else self.wanted
        listed = [s for s in self.listed if wanted in f"{s.id} {s.arm} {s.policy} {s.model} {s.note}".lower()]
        lines = compare_rows.snapshot_lines(
            listed, self.picked, self._session().view(1.0).run_id, picker.size.width - 3
        )
        # no taller than its lines: the table below has more to show
        picker.styles.height = max(4, min(len(lines) + 2, self.size.height * 3 // 10, 10))
        self._set(picker, lines or [Line.of("no snapshot matches" if wanted else "no snapshot yet", "dim")])
        picker.border_subtitle = f"{len(self.picked)} picked of {len(self.listed)}"
        self._show_rows()

    def _set(self, box: LineList, lines: Sequence[Line]) -> None:
        box.set_lines(
            [Line(tuple((drawn(self.app, t), r) for t, r in line.parts), line.key) for line in lines]
        )

    def _show_rows(self) -> None:
        rows, setup = self.query_one("#rows", LineList), self.query_one("#setup", Static)
        found = self.comparison
        if found is None:
            rows.set_lines([])
            rows.border_title = rows.border_subtitle = ""
            setup.update("")
            self.query_one("#spread", LineList).set_lines([])
            self.set_title("reference first, then one or more candidates")
            return
        side = found.candidates[self.pair]
        count = len(found.candidates)
        which = f"pair {self.pair + 1} of {count}   " if count > 1 else ""
        only = "   differences only" if self.differences else ""
        self.set_title(drawn(self.app, f"★ {found.reference.label}   against {side.label}   {which}{only}"))
        setup.update(drawn(self.app, compare_rows.setup_text(found.setup_of(side.id))))
        lines = compare_rows.table_lines(
            found,
            side.id,
            max(40, rows.size.width - 3),
            differences=self.differences,
            hidden=self.show_hidden,
            wanted=self.wanted if self._filter_rows else "",
            plain=is_ascii(self.app),
        )
        self._set(rows, lines)
        self._show_spread()

    @property
    def row(self) -> Row | None:
        """The row under the table's cursor."""
        key = self.query_one("#rows", LineList).key
        if self.comparison is None or key is None:
            return None
        mine = self.comparison.rows_of(self.comparison.candidates[self.pair].id)
        return next((r for r in mine if r.metric == key), None)

    @property
    def help_metric(self) -> str | None:
        """Id of the metric that help is to explain: the row under the cursor."""
        return None if self.row is None else self.row.metric

    def samples(self, row: Row) -> tuple[Sequence[float], Sequence[float]] | None:
        """The values of both sides, one a counted request; None for what is not measured a request."""
        metric = METRICS.get(row.metric)
        if metric is None or self.comparison is None or row.method == "exact":
            return None
        values = []
        for name in (self.comparison.reference.id, row.candidate):
            s = self.sources[name]
            found = (metric.of(r, s.device, s.model) for r in timed(s.requests))
            values.append([v for v in found if v is not None])
        return values[0], values[1]

    def _show_spread(self) -> None:
        box, row = self.query_one("#spread", LineList), self.row
        if row is None or self.comparison is None or not self.has_class("-tall"):
            box.set_lines([])
            return
        width = max(30, box.size.width - 2)
        samples = self.samples(row)
        names = (self.comparison.reference.label, self.comparison.candidates[self.pair].label)
        lines = compare_rows.histogram_lines(row.metric, samples, names, width) if samples else []
        about = compare_rows.about(row.metric)
        box.border_title = title(drawn(self.app, row.name))
        self._set(
            box,
            [
                Line.of(about.why, "dim"),
                *(lines or [Line.of(f"{row.method}: one number, no distribution", "dim")]),
            ],
        )

    def on_line_list_moved(self, event: LineList.Moved) -> None:
        if event.lines.id == "rows":
            self._show_spread()

    def resized(self) -> None:
        self.call_after_refresh(self._show)

    def action_filter(self) -> None:
        self._filter_rows = (
            self.comparison is not None and not self.query_one("#snapshots", LineList).has_focus
        )
        super().action_filter()

    def filtered(self) -> None:
        self._show()

    def focus_body(self) -> None:
        self.query_one("#rows" if self._filter_rows else "#snapshots", LineList).focus()

    # -- keys of the table

    def action_pair(self, step: int) -> None:
        if self.comparison is None or len(self.comparison.candidates) < 2:
            self.say("there is one pair only; space picks more snapshots")
            return
        self.pair = (self.pair + step) % len(self.comparison.candidates)
        self._show_rows()

    def action_differences(self) -> None:
        self.differences = not self.differences
        self._show_rows()

    def action_hidden(self) -> None:
        if not self.differences:
            self.say("nothing is hidden; D shows the differences only")
            return
        self.show_hidden = not self.show_hidden
        self._show_rows()

    def action_detail(self) -> None:
        rows = self.query_one("#rows", LineList)
        if self.query_one("#snapshots", LineList).has_focus:
            if self.comparison is None:
                self.action_pick()
            else:
                rows.focus()
            return
        row = self.row
        if row is not None and self.comparison is not None:
            self.app.push_screen(RowDetail(self.comparison, row, self.samples(row)))

    def on_line_list_chosen(self, event: LineList.Chosen) -> None:
        if event.lines.id == "snapshots":
            self.action_pick()
        else:
            self.action_detail()

    def action_copy(self) -> None:
        row = self.row
        if row is None or self.comparison is None:
            self.say("no row to copy yet")
            return
        self.say(copy_text(self.app, compare_rows.row_text(self.comparison, row), row.metric, self.run_dir))

    def action_export(self) -> None:
        found = self.comparison
        if found is None:
            self.app.push_screen(ExportDialog())
            return
        names = " against ".join(side.label for side in (found.reference, *found.candidates))
        self.app.push_screen(ExportDialog(lambda: found, f"the comparison {names}"))


def last_of_each_arm(listed: Sequence[Listed], run_id: str) -> list[str]:
    """The run's newest readable snapshot of every arm, B (the reference of the app) first."""
    mine = sorted((s for s in listed if s.run == run_id and s.error is None), key=lambda s: (s.created, s.id))
    newest = {s.arm: s.id for s in mine}
    return [newest[arm] for arm in sorted(newest, key=lambda arm: (arm != "B", arm))]


class RowDetail(ModalScreen[None]):
    """All that is known about one row."""

    DEFAULT_CSS = "RowDetail {" + BOX + " & LineList { max-height: 100%; } }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss(None)", "Close", id="detail.close", tooltip="back to the table"),
    ]

    def __init__(
        self, comparison: Comparison, row: Row, samples: tuple[Sequence[float], Sequence[float]] | None
    ) -> None:
        super().__init__()
        self.comparison, self.row, self.samples = comparison, row, samples

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_subtitle = "esc closes"
            yield LineList(id="detail", cursor=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        self.query_one(LineList).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        box = self.query_one(LineList)
        width = max(24, min(72, self.app.size.width - 6))
        lines = compare_rows.detail_lines(self.comparison, self.row, self.samples, width)
        box.styles.height = len(lines)
        box.set_lines([Line(tuple((drawn(self.app, t), r) for t, r in line.parts)) for line in lines])
