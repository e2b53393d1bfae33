"""A whole evaluation as a source of reports: its page, its JSON, its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdq_tui.judge import diary, marks, risks, rollback
from pdq_tui.judge.deploy import Deployment
from pdq_tui.judge.diary import Entry
from pdq_tui.judge.evaluation import Evaluation
from pdq_tui.judge.marks import Marks
from pdq_tui.judge.plan import STEPS, Spec
from pdq_tui.judge.verdict import Verdict, verdict, verdicts
from pdq_tui.report import deployment
from pdq_tui.report.evaluation import evaluation_page
from pdq_tui.report.page import Page

Json = Mapping[str, Any]


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """``found``: what the finished steps said, by name; ``each``: a verdict a confirmed candidate, the best word first, of which
    ``verdict`` is the first; ``logged``: work that people did by hand; ``marks``: what they said
    of answers, by (policy, task)."""

    spec: Spec
    found: dict[str, Any]
    verdict: Verdict
    each: tuple[Verdict, ...] = ()
    logged: tuple[Entry, ...] = ()
    marks: dict[tuple[str, str], str] = msgspec.field(default_factory=dict)

    def page(self) -> Page:
        return evaluation_page(self.spec, self.found, self.verdict, self.logged, self.marks)

    def deployments(self) -> list[Deployment]:
        """What the policy of the verdict and the best uniform mean for serving engines."""
        return deployment.of_evaluation(self.spec, self.found, deployment.subjects(self.found, self.verdict))

    def body(self) -> dict[str, Any]:
        """evaluation.json: the verdict, the map, how far each step came, and everything that was found."""
        return {
            "schema": 1,
            "kind": "pdq-tui evaluation",
            "model": self.spec.model,
            "plan": self.spec.plan.name,
            "gate": self.spec.gate,
            "verdict": msgspec.to_builtins(self.verdict),
            "candidates": [
                {"policy": v.staged, "word": v.word, "region": v.region, "because": v.because}
                for v in self.each
            ],
            "confounders": [msgspec.to_builtins(r) for r in risks.confounders(self.spec, self.found)],
            "risks": [msgspec.to_builtins(r) for r in risks.risks(self.spec, self.found, self.logged)],
            "quality": _paths(self.found),
            "tasks": {k: v for k, v in self.found.get("tasks", {}).items() if k not in ("items", "answers")},
            "marks": [{"policy": p, "task": t, "mark": m} for (p, t), m in self.marks.items()],
            "load": self.found.get("load"),
            "soak": self.found.get("soak"),
            "logs": self.found.get("logs", {}).get("counts", []),
            "deploy": [msgspec.to_builtins(d) for d in self.deployments()],
            "rollback": msgspec.to_builtins(rollback.plan(self.spec, self.found, self.verdict)),
            "operations": [msgspec.to_builtins(entry) for entry in self.logged],
            "abnormal": self.found.get("abnormal", {}).get("abnormal", []),
            "map": self.found.get("confirmation", {}).get("map", []),
            "steps": [{"name": t.name, "status": self._status(t.name)} for t in STEPS],
            "found": self.found,
        }

    def _status(self, step: str) -> str:
        return str(self.found[step].get("stop") or "done") if step in self.found else "not reached"


def _paths(found: Mapping[str, Json]) -> dict[str, list[dict[str, Any]]]:
    """The held-out set, or the small one where the protocol stopped there: means by path, and the decode path by
    position."""
    paths = (found.get("quality") or found.get("small_quality") or {}).get("paths", {})
    rows = [path for of in paths.values() for path in of]
    return {
        "prefill_path": [
            {"policy": r["policy"], "kld": r["kld"]["value"], "ci95": r["kld"]["ci95"]}
            for r in rows
            if r["path"] == "prefill"
        ],
        "decode_path": [
            {
                "policy": r["policy"],
                "forced": r["forced"],
                "position": at,
                "kld": e["value"],
                "ci95": e["ci95"],
            }
            for r in rows
            if r["path"] == "decode"
            for at, e in r["by_position"]
        ],
    }


def evaluated(
    spec: Spec, found: Mapping[str, Json], logged: Sequence[Entry] = (), marks: Marks | None = None
) -> Evaluated:
    return Evaluated(
        spec=spec,
        found=dict(found),
        verdict=verdict(spec, found),
        each=tuple(verdicts(spec, found)),
        logged=tuple(logged),
        marks=dict(marks or {}),
    )


def read(directory: Path) -> Evaluated:
    """What is there of an evaluation, finished or not. Raises PdqError where there is none, or it is damaged."""
    kept = Evaluation.resume(directory)
    return evaluated(kept.spec, kept.kept(), diary.read(directory), marks.read(directory))
