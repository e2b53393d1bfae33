"""Every key of the app and of the live screen, with the id that ``[keys]`` in the configuration refers to.

Avoided on purpose: alt and meta, ctrl+a and ctrl+b (screen, tmux), ctrl+s (flow control), ctrl+j, ctrl+k and ctrl+e
(editors), F10 and F11 (terminals); ctrl+z suspends as everywhere.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from textual.binding import Binding, BindingType
from textual.keys import _character_to_key

from pdq_tui.errors import UsageError


def bound(
    keys: str, action: str, word: str, id_: str, tooltip: str, *, priority: bool = False, show: bool = True
) -> Binding:
    """``keys`` (comma between) do ``action``. ``word``: in the key line, where ``show``; ``tooltip``: in the help."""
    return Binding(keys, action, word, id=id_, tooltip=tooltip, priority=priority, show=show)


#: Screens in the order of their digits.
SCREENS: Final = (
    ("1", "live", "Live"),
    ("2", "compare", "Compare"),
    ("3", "policies", "Policies"),
    ("4", "verdict", "Verdict"),
    ("5", "kernels", "Kernels"),
    ("6", "log", "Log"),
)

APP: Final[tuple[Binding, ...]] = (
    *(
        bound(digit, f"go('{mode}')", word, f"screen.{mode}", f"the {word} screen")
        for digit, mode, word in SCREENS
    ),
    bound(
        "question_mark,f1",
        "help",
        "Help",
        "app.help",
        "keys of this screen and the formula of the focused panel",
    ),
    bound("colon,ctrl+p", "command_palette", "Palette", "app.palette", "find a command by its name"),
    bound(
        "e",
        "export",
        "Export",
        "app.export",
        "write what was measured: html with figures, md, json, csv, parquet",
    ),
    bound("y", "copy", "Copy", "app.copy", "copy this screen's figures (OSC 52) and save them as a file"),
    bound("T", "next_theme", "Theme", "app.theme", "next colour theme"),
    bound("f12", "picture", "Picture", "app.screenshot", "SVG picture of the screen into the run's folder"),
    bound(
        "ctrl+z",
        "suspend_process",
        "Suspend",
        "app.suspend",
        "back to the shell, fg returns; the engine goes on meanwhile",
    ),
    bound("q", "leave", "Quit", "app.quit", "quit; asks only while a run is live"),
    bound("ctrl+q", "leave", "Quit", "app.quit_any", "quit from anywhere", priority=True),
    bound(
        "ctrl+c",
        "interrupt",
        "Stop",
        "app.interrupt",
        "stop the run; a second time within 2 s: quit",
        priority=True,
    ),
    bound(
        "ctrl+c",
        "interrupt_looking",
        "Quit",
        "app.interrupt",
        "a second time within 2 s: quit",
        priority=True,
        show=False,
    ),
)

LIVE: Final[tuple[Binding, ...]] = (
    bound("r", "run", "Run/Stop", "live.run", "start or stop the workload"),
    bound(
        "R",
        "restart",
        "Restart",
        "live.restart",
        "replace the engine process; everything wanted is sent again",
    ),
    bound("a", "arm('A')", "Arm A", "live.arm_a", "next requests use arm A"),
    bound("b", "arm('B')", "Arm B", "live.arm_b", "next requests use arm B, the reference"),
    bound(
        "x",
        "interleave",
        "ABBA",
        "live.interleave",
        "alternate both arms in ABBA blocks: what a comparison rests on",
    ),
    bound("p", "stage('prefill')", "Prefill", "live.prefill", "what the active arm does in prefill"),
    bound("d", "stage('decode')", "Decode", "live.decode", "what the active arm does in decode"),
    bound("v", "kv", "KV", "live.kv", "what the active arm does with the KV cache"),
    bound(
        "J",
        "energy",
        "Energy",
        "live.energy",
        "joules a token by stage: loops of one stage for 6 s each, half a minute",
    ),
    bound("s", "snapshot", "Snap", "live.snapshot", "save what the active arm has measured"),
    bound("S", "snapshot_note", "Snap+note", "live.snapshot_note", "snapshot with a note"),
    bound("space", "freeze", "Pause", "live.freeze", "freeze the display only; recording goes on"),
    bound("m", "metric(1)", "Metric", "live.metric_next", "next metric in this chart"),
    bound("M", "metric(-1)", "Metric back", "live.metric_previous", "previous metric in this chart"),
    bound("w", "window", "Window", "live.window", "charts over 30 s, 2 min, everything"),
    bound("z", "zoom", "Zoom", "live.zoom", "this panel alone, and back"),
    bound("c", "clear_marks", "Clear marks", "live.clear_marks", "clear the marks on the time axis"),
    bound(
        "escape", "escape", "Back", "live.back", "cancel loading or packing; end zoom or pause; never quits"
    ),
    bound("j,down,right", "focus_panel(1)", "Next panel", "live.next_panel", "next panel"),
    bound("k,up,left", "focus_panel(-1)", "Last panel", "live.previous_panel", "panel before"),
)

#: Actions of all screens that change what runs or write files of their own accord; off with --readonly. Left are those
#: that look, cancel what this app loads itself, and write what is asked for: export, copy, picture.
CHANGING: Final = frozenset(
    {
        "interrupt",
        *(
            "run",
            "restart",
            "energy",
            "arm",
            "interleave",
            "stage",
            "kv",
            "snapshot",
            "snapshot_note",
        ),  # live
        *("apply", "write", "delete"),  # policies
        "plan",  # verdict
        "mark",  # answers of a verdict
        "trace",  # kernels
    }
)
#: Actions that stand in for one of those with --readonly, and are off without.
_LOOKING: Final = frozenset({"interrupt_looking"})


def works(action: str, readonly: bool) -> bool:
    """Whether ``action`` (its name, without parameters) does something here: what does not is shown nowhere."""
    return action not in (CHANGING if readonly else _LOOKING)


def ids(bindings: Iterable[BindingType]) -> list[str]:
    return [b.id for b in bindings if isinstance(b, Binding) and b.id]


def check(overrides: Mapping[str, str], scopes: Sequence[Sequence[Binding]]) -> None:
    """Raises UsageError for a binding id that does not exist, naming the nearest, and for a key that would then mean two
    things at one place (``scopes``: the bindings of each), naming both."""
    names = sorted({b.id for scope in scopes for b in scope if b.id})
    for name in overrides:
        if name not in names:
            near = difflib.get_close_matches(name, names, 2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}"
            raise UsageError(f"[keys] {name}: no key binding has this id", hint)
    for scope in scopes:
        before = _clashes(scope, {})  # a screen's own key in the place of the app's is meant
        for key, one, other in sorted(_clashes(scope, overrides) - before):
            raise UsageError(
                f"[keys] {key!r} would be both {one} and {other}",
                f"give {other if one in overrides else one} another key in [keys] as well",
            )


def _clashes(scope: Sequence[Binding], overrides: Mapping[str, str]) -> set[tuple[str, str, str]]:
    """(key, id, id) of the bindings of one place that answer to the same key."""
    owners: dict[str, list[str]] = {}
    for binding in scope:
        if not binding.id:
            continue
        for key in overrides.get(binding.id, binding.key).split(","):
            name = _character_to_key(key.strip()) if len(key.strip()) == 1 else key.strip()
            there = owners.setdefault(name, [])
            if binding.id not in there:
                there.append(binding.id)
    return {
        (key, first, second)
        for key, there in owners.items()
        for first, second in itertools.combinations(sorted(there), 2)
    }


def shown(id_: str, overrides: Mapping[str, str]) -> str:
    """The key to print for a binding, as people write it."""
    from pdq_tui.tui.page import key_name

    default = next((b.key for b in (*APP, *LIVE) if b.id == id_), "")
    return key_name(overrides.get(id_, default).split(",")[0])
