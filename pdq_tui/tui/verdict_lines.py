"""An evaluation as lines: the word and why, the gates, four situations, the map, the steps. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from pdq_tui.core.metrics import MISSING
from pdq_tui.tui.lines import Line, Part, fit, literal, to_ascii, wrapped

if TYPE_CHECKING:  # polars comes with these
    from pdq_tui.judge.scenarios import Card
    from pdq_tui.judge.watching import Watched
    from pdq_tui.report.evaluated import Evaluated

_RESULTS: Final = {
    "pass": ("✓ pass", "good"),
    "fail": ("✗ FAIL", "bad"),
    "unsure": ("? unsure", "warn"),
    "not informative": ("? no answer", "warn"),
    "shown": ("  shown", "dim"),
    "not tested": ("– not tested", "dim"),
}
_WORD_ROLES: Final = {"GO": "good", "NO-GO": "bad"}
_CARD_ROLES: Final = {"for staging": "good", "against": "bad", "not tested": "dim"}
_RESULT_WIDTH: Final = 13
_CELL: Final = 8
#: Reasons of the word that are shown above; the rest is in the report.
_BECAUSE: Final = 3


def bar(done: int, total: int, width: int = 10) -> str:
    filled = round(width * done / total)
    return "█" * filled + "·" * (width - filled)


def about(seconds: float) -> str:
    """ "about 40 s", "about 12 min", "about 3.5 h"."""
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def heading(w: Watched, steps: Sequence[Any], now: float) -> str:
    """What the title says: model, plan, how far it is, what is left."""
    done = sum(s.name in w.found for s in steps)
    text = f"{literal(w.spec.model)}   plan {w.spec.plan.name}   step {done}/{len(steps)} {bar(done, len(steps))}"
    if not w.running:
        return text + ("" if w.finished else "   stopped")
    if w.left_s is None or w.began is None:
        return text + "   running"
    rest = w.left_s - (now - w.began)
    return text + f"   {about(rest) + ' left' if rest > 0 else 'longer than estimated'}"


def word_lines(e: Evaluated, w: Watched, steps: Sequence[Any], width: int, height: int) -> list[Line]:
    """The word, or what is under way; at most ``height`` lines of ``width`` cells."""
    if w.running and not w.finished:
        step = next((s for s in steps if s.name == w.step), None)
        title = step.title if step else str(w.step)
        lines = [Line(((" measuring ", "mark"), (title, "head")))]
        lines += [Line.of(f" {part}", "dim") for part in wrapped(step.why if step else "", width - 2)]
        return [*lines, Line.of(f" {fit(literal(w.said), width - 2).rstrip()}")][:height]
    v = e.verdict
    about_ = f"  {literal(v.staged)}" if v.staged else ""
    lines = [Line(((f" {v.word}", _WORD_ROLES.get(v.word, "warn")), (about_, "head")))]
    if v.region:
        lines += [Line.of(f" {part}") for part in wrapped(literal(v.region), width - 2)]
    others = [f"{literal(o.staged)} {o.word}" for o in e.each if o.staged != v.staged]
    if others:
        lines += [
            Line.of(f" {part}", "dim") for part in wrapped(f"also confirmed: {', '.join(others)}", width - 2)
        ]
    for number, reason in enumerate(v.because[:_BECAUSE], 1):
        first, *more = wrapped(literal(reason), width - 14)
        lead = "because" if number == 1 else ""
        lines.append(Line(((f" {lead:<8}{number}. ", "dim"), (first, ""))))
        lines += [Line.of(" " * 12 + part) for part in more]
    if not w.running and not w.finished:
        lines.append(Line.of(" the protocol was not finished: r goes on", "warn"))
    if len(lines) > height:
        return [*lines[: height - 1], Line.of(" …  enter on a row, or the report, has the rest", "dim")]
    return lines


def _mark(text: str, plain: bool) -> str:
    """A column of its own: in ASCII a mark may be longer, and has to be before it is fitted."""
    return fit(to_ascii(text) if plain else text, _RESULT_WIDTH)


def gate_lines(e: Evaluated, width: int, plain: bool = False) -> list[Line]:
    """``plain``: for a terminal that is given ASCII only; the same below."""
    lines = [Line.of("CRITERIA", "head")]
    limit = 22 if width >= 100 else 0
    measured = max(12, (width - _RESULT_WIDTH - limit) * 6 // 11)
    name = max(10, width - _RESULT_WIDTH - measured - limit - 2)
    for number, g in enumerate(e.verdict.gates):
        mark, role = _RESULTS.get(g.result, (g.result, ""))
        parts: list[Part] = [
            (_mark(mark, plain), role),
            (fit(literal(g.name), name) + " ", ""),
            (fit(literal(g.measured), measured), ""),
        ]
        if limit:
            parts.append((" " + fit(literal(g.limit), limit), "dim"))
        lines.append(Line(tuple(parts), ("gate", number)))
    if not e.verdict.gates:
        lines.append(Line.of("no gate was reached yet", "dim"))
    return lines


def card_lines(found: Sequence[Card], width: int) -> list[Line]:
    """Each with all that it rests on."""
    lines = [Line.of("FOUR SITUATIONS", "head")]
    for number, card in enumerate(found):
        column = _RESULT_WIDTH + 17
        first, *more = wrapped(literal(card.because), max(12, width - column))
        parts: tuple[Part, ...] = (
            (fit(card.says, _RESULT_WIDTH), _CARD_ROLES.get(card.says, "warn")),
            (fit(card.name, 17), ""),
            (first, "dim"),
        )
        lines.append(Line(parts, ("card", number)))
        lines += [Line.of(" " * column + part, "dim") for part in more]
    return lines


def map_lines(e: Evaluated, width: int) -> list[Line]:
    """ΔT by answer length, one pair of lines a pair of policies."""
    found = e.found.get("confirmation", {}).get("map", [])
    lines = [Line.of("MAP: staged − uniform, ms a request", "head")]
    if not found:
        return [*lines, Line.of("the confirmation run was not reached yet", "dim")]
    outputs = sorted({c["output"] for c in found})
    room = max(1, (width - 8) // _CELL)
    shown = outputs[:room]
    lines.append(Line.of("tokens  " + "".join(f"{n:>{_CELL}}" for n in shown), "dim"))
    pairs = dict.fromkeys((c["staged"], c["uniform"], c["prompt"], c["batch"]) for c in found)
    several = len({(p, b) for _, _, p, b in pairs}) > 1
    for staged, uniform, prompt, batch in pairs:
        by = {
            c["output"]: c
            for c in found
            if (c["staged"], c["uniform"], c["prompt"], c["batch"]) == (staged, uniform, prompt, batch)
        }
        at = f"  prompt {prompt} batch {batch}" if several else ""
        label = fit(literal(f"{staged} − {uniform}{at}"), width).rstrip()
        lines.append(Line.of(label, "", ("map", staged, uniform)))
        parts: list[Part] = [(" " * 8, "")]
        for n in shown:
            text, role = _map_cell(by.get(n))
            parts.append((f"{text:>{_CELL}}", role))
        lines.append(Line(tuple(parts)))
    cut = f"; {len(outputs) - len(shown)} more lengths in the report" if len(shown) < len(outputs) else ""
    legend = f"− faster, + slower; * the interval excludes 0; ~ extrapolated{cut}"
    return [*lines, *(Line.of(part, "dim") for part in wrapped(legend, width))]


def _map_cell(cell: Any) -> tuple[str, str]:
    if cell is None:
        return MISSING, "dim"
    ci, delta = cell["ci95"], cell["delta_ms"]
    clear = bool(ci) and (ci[0] > 0 or ci[1] < 0)
    number = f"{delta / 1e3:+.0f}k" if abs(delta) >= 9_999.5 else f"{delta:+.0f}"
    role = ("good" if delta < 0 else "bad") if clear else "dim"
    return f"{number}{'*' if clear else ''}{'~' if cell['extrapolated'] else ''}", role


def step_lines(
    w: Watched, steps: Sequence[Any], width: int, plain: bool = False, now: float | None = None
) -> list[Line]:
    lines = [Line.of("STEPS", "head")]
    for step in steps:
        body = w.found.get(step.name)
        if body is not None:
            mark, role, took = "✓ done", "good", f"{body.get('seconds', 0):.0f} s"
            if body.get("stop"):
                mark, role = "■ ended here", "warn"
        elif w.step == step.name:
            spent = (now or time.time()) - (w.began or time.time())
            mark, role, took = "▶ running", "mark", f"{spent:.0f} s"
        else:
            mark, role, took = "  to do", "dim", ""
        parts: tuple[Part, ...] = (
            (_mark(mark, plain), role),
            (fit(step.title, max(8, min(24, width - _RESULT_WIDTH - 8))), ""),
            (f"{took:>7}", "dim"),
        )
        lines.append(Line(parts, ("step", step.name)))
    return lines


def summary_text(e: Evaluated) -> str:
    """What is copied: the word, its reasons, its gates."""
    v = e.verdict
    lines = [f"{v.word}{f' about {v.staged}' if v.staged else ''}{f' ({v.region})' if v.region else ''}"]
    lines += [f"- {reason}" for reason in v.because]
    lines += [
        f"{_RESULTS.get(g.result, (g.result,))[0].strip()}: {g.name}: {g.measured} (limit {g.limit})"
        for g in v.gates
    ]
    return "\n".join([*lines, v.holds])
