"""What the base and each policy answered freely: how far they agree, a person's marks, and the texts side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdq_tui.core.metrics import MISSING
from pdq_tui.judge import freerun
from pdq_tui.judge.marks import MARKS, Marks, counted
from pdq_tui.report.page import SideBySide, Table

Json = Mapping[str, Any]
#: Pairs of a policy that an HTML report shows in full.
_SHOWN: Final = 20


def agreement_table(tasks: Json, marks: Marks) -> Table | None:
    """None for evaluations that were made before answers were compared."""
    rows = []
    for name, f in tasks["policies"].items():
        a = f.get("agreement")
        if a is None:
            continue
        marked = counted(marks, name)
        seen = sum(marked.values())
        rows.append(
            [
                name,
                f"{a['same']} of {a['n']}",
                _mean(a["chrf"], "{:.3f}"),
                MISSING if a["divergence"] is None else f"{a['divergence']:g}",
                _mean(a["nll"], "{:+.3f}"),
                " / ".join(str(marked[m]) for m in MARKS) if seen else "none yet",
                a["least"] or MISSING,
            ]
        )
    if not rows:
        return None
    return Table(
        title="3. quality held? Free run: how far the answers agree with the base's",
        columns=["policy", "same tokens", "chrF", "first divergence", "NLL gap", f"marked {' / '.join(MARKS)}", "least alike"],
        rows=rows,
        footer=[
            "chrF: character n-grams of 1 to 6, F with β = 2, blanks left out (sacreBLEU's chrF2|nc:6|nw:0|space:no); 1 is the "
            "same text. It is a measure of surface, not of sense",
            "first divergence: median token at which answers part, of those that do; NLL gap: what the base thinks of the "
            "policy's answer, minus of its own, nats a token; 0: it finds both as likely",
            "marked: by a person, on screen 4 (t); nobody's mark decides a gate",
        ],
    )  # fmt: skip


def _mean(m: Json, form: str) -> str:
    if m["value"] is None:
        return MISSING
    ci = m["ci95"]
    return form.format(m["value"]) + (f" [{form.format(ci[0])}, {form.format(ci[1])}]" if ci else "")


def side_by_side(tasks: Json, marks: Marks, policy: str | None) -> list[SideBySide]:
    """The answers of one policy that part from the base's; marked ones first."""
    if policy is None:
        return []
    parted = {t: p for t, p in freerun.pairs(tasks, policy).items() if not p.same}
    order = sorted(parted, key=lambda t: (policy, t) not in marks)
    return [
        SideBySide(
            title=f"{task}: {policy} against {tasks['base']}",
            labels=(f"★ {tasks['base']}", policy),
            common=parted[task].common,
            rest=parted[task].rests,
            word=parted[task].word + (f"; marked {marks[policy, task]}" if (policy, task) in marks else ""),
        )
        for task in order[:_SHOWN]
    ]
