"""The export dialog: what was compared or measured, as files; a full disk leaves the dialog and the results standing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from pdq_tui.core.document import run_document
from pdq_tui.errors import PdqError
from pdq_tui.tui.ask import BOX
from pdq_tui.tui.lines import Line, LineList, drawn, fit, is_ascii, literal, sentence

FORMATS = (
    ("md", "tables to read and paste"),
    ("html", "one file with figures, opens anywhere"),
    ("json", "everything, strict JSON, for scripts"),
    ("csv", "one row a metric, for a spreadsheet"),
    ("parquet", "typed columns, for polars or pandas"),
)

STEM = "report"
_STILL = "Nothing is lost: give another directory."

#: Makes what is exported; called in a thread. None of a screen's widgets may be touched there.
Subject = Callable[[], Any]


class ExportDialog(ModalScreen[None]):
    """Exports ``subject`` (a comparison or a run's document; by default all that this run has measured).

    ``what`` says what it is. Files go to ``folder``, by default the run's own; what is there already is replaced only
    by a second enter after it was named.
    """

    DEFAULT_CSS = (
        "ExportDialog {"
        + BOX
        + """
        & #told { max-height: 6; margin-top: 1; }
    }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "switch", "On or off", id="export.toggle", tooltip="this format on or off"),
        Binding("enter", "export", "Export", id="export.go", tooltip="write the files"),
        Binding("escape", "dismiss(None)", "Close", id="export.close", tooltip="close; nothing is lost"),
    ]

    def __init__(
        self, subject: Subject | None = None, what: str = "this run", folder: Path | None = None
    ) -> None:
        super().__init__()
        self.subject, self.what, self.folder = subject, what, folder
        self.formats = {"md", "json"}
        self.busy = False
        self._refused: tuple[str, frozenset[str]] | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="box") as box:
            box.border_title = "export"
            yield Static(f"{literal(self.what)}, as", markup=False)
            yield LineList(id="formats")
            yield Static("into the directory", markup=False)
            yield Input(id="folder")
            yield Static(id="told", markup=False)

    def on_mount(self) -> None:
        self.set_class(is_ascii(self.app), "-ascii")
        if self.folder is None:
            run_dir = Path(self._session().view(1.0).run_dir)
            self.folder = (
                run_dir if run_dir.is_absolute() else Path.cwd()
            )  # a run kept in memory only has no place
        self.query_one(Input).value = str(self.folder)
        box = self.query_one(LineList)
        box.styles.height = len(FORMATS)
        box.focus()
        self._show()
        self._tell("space on or off   tab directory   enter export   esc close")

    def only(self, form: str) -> None:
        """This one of ``FORMATS`` on, the others off."""
        self.formats = {form}
        if self.is_mounted:
            self._show()

    def _session(self) -> Any:
        return getattr(self.app, "session")  # noqa: B009 - the app's class is not this room's to know

    def _show(self) -> None:
        lines = []
        for name, note in FORMATS:
            mark = "[x]" if name in self.formats else "[ ]"
            lines.append(Line(((f"{mark} {fit(name, 8)} ", ""), (note, "dim")), name))
        self.query_one(LineList).set_lines(lines)

    def _tell(self, text: str) -> None:
        self.query_one("#told", Static).update(drawn(self.app, text))

    @property
    def told(self) -> str:
        """The sentence that the dialog shows now."""
        return str(self.query_one("#told", Static).content)

    def action_switch(self) -> None:
        key = self.query_one(LineList).key
        if isinstance(key, str):
            self.formats ^= {key}
            self._show()

    def on_line_list_chosen(self) -> None:
        self.action_switch()

    def on_input_submitted(self) -> None:
        self.action_export()

    def action_export(self) -> None:
        where = self.query_one(Input).value.strip()
        formats = [name for name, _ in FORMATS if name in self.formats]
        if self.busy:
            self._tell("still writing …")
        elif not formats:
            self._tell("no format is on: space turns one on")
        elif not where:
            self._tell("no directory given")
        else:
            asked = (str(Path(where).expanduser()), frozenset(formats))
            self.busy = True
            self._tell("writing …")
            self._write(Path(where).expanduser(), formats, asked == self._refused)
            self._refused = None

    @work(thread=True, group="export")
    def _write(self, folder: Path, formats: list[str], force: bool) -> None:
        from pdq_tui.report import write  # polars comes with it: not before somebody exports

        refused = False
        try:
            body = self.subject() if self.subject is not None else self._measured()
            paths = write.write(body, formats, folder, force, stem=STEM)
            names = ", ".join(literal(path.name) for path in paths)
            files = f"{len(paths)} file{'' if len(paths) == 1 else 's'}"
            # The first sentence about the keys is gone by now, and the screen's own keys do nothing in a dialog.
            text = f"{files} in {literal(folder)}: {names}\n\nesc close"
        except write.AlreadyThereError as error:
            refused = True
            text = (
                f"already there: {', '.join(error.names)}. Enter again replaces, or give another directory."
            )
        except PdqError as error:
            text = f"not exported: {literal(error.message)}. {_STILL}"
        except OSError as error:
            text = f"not exported: {sentence(error)}. {_STILL}"
        self.app.call_from_thread(self._written, text, (str(folder), frozenset(formats)) if refused else None)

    def _measured(self) -> Any:
        from pdq_tui.report import samples, write

        session = self._session()
        least = getattr(self.app, "min_effect")  # noqa: B009 - see _session
        events = session.events()
        document = run_document(session.run.meta, events, min_effect=least)
        if not document["arms"]:
            raise PdqError("nothing was measured yet")
        labels = [arm["label"] for arm in document["arms"]]
        return write.Reported(document, samples.of_events(events, session.run.path.name, labels))

    def _written(self, text: str, refused: tuple[str, frozenset[str]] | None) -> None:
        self.busy = False
        self._refused = refused
        self._tell(text)
