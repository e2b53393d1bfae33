"""Compare: choose snapshots, the reference first, and see what differs, by how much, and whether that can be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from pdq_tui.errors import PdqError
from pdq_tui.tui import compare_rows
from pdq_tui.tui.compare_detail import RowDetail
from pdq_tui.tui.compare_picks import Picks
from pdq_tui.tui.compare_spread import Samples, samples, spread_lines
from pdq_tui.tui.compare_texts import TextsDialog
from pdq_tui.tui.copying import copy_text
from pdq_tui.tui.export import ExportDialog
from pdq_tui.tui.keys import bound
from pdq_tui.tui.lines import Line, LineList, drawn, is_ascii, is_readonly, paragraph, sentence, title
from pdq_tui.tui.page import Page

if TYPE_CHECKING:  # polars comes with these: only threads import them
    from pdq_tui.store.compare import Comparison, Row
    from pdq_tui.store.listing import Listed
    from pdq_tui.store.snapshot import Snapshot


#: Lines of the paragraph that says whether the set-up is the same.
_SETUP_LINES = 3


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
        bound("space", "pick", "Pick", "compare.pick", "take this snapshot into the comparison or out"),
        bound("asterisk", "reference", "Reference", "compare.reference", "this snapshot is the reference"),
        bound("D", "differences", "Diff only", "compare.diff", "only rows that are better or worse"),
        bound("H", "hidden", "Hidden", "compare.hidden", "show or hide what the difference filter hides"),
        bound("enter", "detail", "Detail", "compare.detail", "formula, why, blocks and distribution"),
        bound("left_square_bracket", "pair(-1)", "Pair", "compare.prev", "previous candidate"),
        bound("right_square_bracket", "pair(1)", "Pair", "compare.next", "next candidate"),
        bound(
            "t", "texts", "Texts", "compare.texts", "both sides' answers to the same prompts, side by side"
        ),
        bound("y", "copy", "Copy row", "compare.copy", "send this row to the terminal's clipboard"),
        bound("e", "export", "Export", "compare.export", "write this comparison to files"),
    ]

    def __init__(self, picked: Sequence[str] = ()) -> None:
        """``picked``: snapshot ids to begin with, the reference first; by default the last of each arm of this run."""
        super().__init__()
        self.picks = Picks(picked)
        self.comparison: Comparison | None = None
        self.sources: dict[str, Snapshot] = {}
        self.pair = 0
        self.differences = self.show_hidden = False
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
        if not self.picks.listed:
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
        changed, repicked = self.picks.relist(listed, run_id)
        if repicked or (changed and self.comparison is None):
            self._compare()
        self._show()
        if not listed:
            how = "" if is_readonly(self.app) else ": s on the live screen takes one of the active arm"
            self.say(f"no snapshot yet{how}")
        elif self.comparison is None and len(self.picks.picked) < 2:
            self.say("space picks two or more, * sets the reference")

    def action_pick(self) -> None:
        name = self._snapshot_key()
        if name is None:
            return
        self.picks.toggle(name)
        self._compare()

    def take(self, name: str) -> None:
        """Pick a snapshot by its id, known yet or not."""
        if name not in self.picks.picked:
            self.picks.toggle(name)
        if all(picked in {s.id for s in self.picks.listed} for picked in self.picks.picked):
            self._compare()
        else:
            self._list()  # comparing follows, once its place is known

    def action_reference(self) -> None:
        name = self._snapshot_key() or self._candidate_id()
        if name is None:
            return
        self.picks.lead(name)
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
        if len(self.picks.picked) >= 2:
            self.say("comparing …")
            self._read_pair([Path(path) for path in self.picks.paths], self._turn)
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
        lines = compare_rows.snapshot_lines(
            self.picks.matching(wanted),
            self.picks.picked,
            self._session().view(1.0).run_id,
            picker.size.width - 3,
        )
        # no taller than its lines: the table below has more to show
        picker.styles.height = max(4, min(len(lines) + 2, self.size.height * 3 // 10, 10))
        self._set(picker, lines or [Line.of("no snapshot matches" if wanted else "no snapshot yet", "dim")])
        picker.border_subtitle = f"{len(self.picks.picked)} picked of {len(self.picks.listed)}"
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
        self.set_title(drawn(self.app, f"★ {found.reference.label}   against {side.label}"))
        which = [f"pair {self.pair + 1} of {count}"] if count > 1 else []
        only = ["differences only"] if self.differences else []
        rows.border_subtitle = title("   ".join([*which, *only]))
        same = drawn(self.app, compare_rows.setup_text(found.setup_of(side.id)))
        setup.update(paragraph(same, max(1, self.size.width - 2), _SETUP_LINES, drawn(self.app, "…")))
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

    def _samples(self, row: Row) -> Samples | None:
        return None if self.comparison is None else samples(self.comparison, self.sources, row)

    def _show_spread(self) -> None:
        box, row = self.query_one("#spread", LineList), self.row
        if row is None or self.comparison is None or not self.has_class("-tall"):
            box.set_lines([])
            return
        names = (self.comparison.reference.label, self.comparison.candidates[self.pair].label)
        box.border_title = title(drawn(self.app, row.name))
        self._set(box, spread_lines(row, self._samples(row), names, max(30, box.size.width - 2)))

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
            self.app.push_screen(RowDetail(self.comparison, row, self._samples(row)))

    def action_texts(self) -> None:
        found = self.comparison
        if found is None:
            self.say("no comparison yet: space picks two or more snapshots")
            return
        side = found.candidates[self.pair]
        pairs = found.answers.get(side.id, [])
        if not pairs:
            self.say("no prompt was answered by both with its text recorded")
            return
        self.app.push_screen(TextsDialog(pairs, (found.reference.label, side.label)))

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
        sources = dict(self.sources)

        def subject() -> Any:
            from pdq_tui.report import samples, write

            return write.Reported(found, samples.of_snapshots(found, sources.values()))

        names = " against ".join(side.label for side in (found.reference, *found.candidates))
        self.app.push_screen(ExportDialog(subject, f"the comparison {names}"))
