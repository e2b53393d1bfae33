"""What a search found, as a page, as JSON, and as a commented policy file."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdq_tui.core.metrics import PRIMARY
from pdq_tui.core.policy import Policy, policy_to_toml
from pdq_tui.judge.search import ROUNDS, STEPS, SearchSpec
from pdq_tui.report.page import Page, Table

Json = Mapping[str, Any]

HOLDS: Final = (
    "Holds for this device, this engine and version, these kernels, and the length of the windows. Up to three candidates may be "
    "tried on held-out text, each at 95 %."
)
_LEGEND: Final = (
    "KLD in nats to the model's own dtype, along the decode path, with its 95 % interval over windows. Formats of a group are "
    "prefill/decode where they differ. Estimates are sums over groups and only say what is worth measuring."
)


def winner(found: Mapping[str, Json]) -> Policy | None:
    """The policy that was chosen; None where none was, or the search is not at its end."""
    body = found.get("confirmation", {}).get("winner")
    return None if body is None else msgspec.convert(body, Policy)


def body(spec: SearchSpec, found: Mapping[str, Json]) -> dict[str, Any]:
    """search.json: limits, the winner, every candidate that was not chosen with its reason, and everything measured."""
    return {
        "schema": 1,
        "kind": "pdq-tui search",
        "model": spec.model,
        "limits": {"max_kld": spec.max_kld, "max_bytes": spec.max_bytes},
        "winner": found.get("confirmation", {}).get("winner"),
        "rejected": rejected(found),
        "steps": [
            {
                "name": t.name,
                "status": str(found[t.name].get("stop") or "done") if t.name in found else "not reached",
            }
            for t in STEPS
        ],
        "found": dict(found),
    }


def rejected(found: Mapping[str, Json]) -> list[dict[str, str]]:
    """Of each candidate that was not chosen: its formats, where it went out, and why."""
    made = found.get("candidates", {})
    names = {c["name"]: _pairs(c) for c in made.get("measured", [])}
    rows = [
        {"candidate": "–", "formats": c["name"], "step": "estimate", "reason": c["reason"]}
        for c in made.get("left_out", [])
    ]
    for step in (*ROUNDS, "confirmation"):
        for name, why in found.get(step, {}).get("rejected", {}).items():
            rows.append({"candidate": name, "formats": names.get(name, ""), "step": step, "reason": why})
    return rows


def _pairs(c: Json) -> str:
    return " | ".join(a if a == b else f"{a}/{b}" for a, b in c["pairs"])


def headline(spec: SearchSpec, found: Mapping[str, Json]) -> str:
    policy = winner(found)
    if policy is None:
        stop = next((str(f["stop"]) for f in found.values() if f.get("stop")), None)
        return f"NONE: {stop}" if stop else "not finished"
    end = found["confirmation"]
    kld = end["tried"][-1]["path"]["kld"]
    against = [r for r in end["ratios"] if r["metric"] == PRIMARY]
    words = ", ".join(f"{r['judgement']} against {r['reference']} ({_percent(r)})" for r in against)
    return (
        f"{policy.name}: {policy.natural_name}{' with exceptions' if policy.keep else ''}; KLD {kld['value']:.4f} on held-out "
        f"text (limit {spec.max_kld:g}), {end['bytes'] / 2**20:.1f} MiB of weights; request time {words or 'is the base itself'}"
    )


def _percent(r: Json) -> str:
    if r["ratio"] is None:
        return str(r["reason"])
    ci = "" if r["ci95"] is None else f", {r['ci95'][0] - 1:+.1%} to {r['ci95'][1] - 1:+.1%}"
    return f"{r['ratio'] - 1:+.1%}{ci}"


def page(spec: SearchSpec, found: Mapping[str, Json]) -> Page:
    limit = "none" if spec.max_bytes is None else f"{spec.max_bytes / 2**20:.1f} MiB"
    w = spec.workload
    facts = [
        ("model", spec.model),
        ("limits", f"KLD ≤ {spec.max_kld:g} nats (upper bound), weights ≤ {limit}"),
        ("workload", f"{w.prompt_tokens} in, {w.output_tokens} out, batch {w.batch}"),
        ("formats", ", ".join(spec.formats)),
    ]
    if "conditions" in found:
        there = found["conditions"]
        facts += [
            ("device", str(there["device"]["name"])),
            (
                "libraries",
                ", ".join(
                    f"{k} {v}" for k, v in there["libraries"].items() if k in ("torch", "transformers")
                ),
            ),
            ("not searched", ", ".join(there["outside"]) or "nothing"),
        ]
        facts += [(f"refused: {name}", why) for name, why in there["refused"].items()]
    tables = [_confirmed(found), _sensitivity(found), *(_round(found, n) for n in ROUNDS), _rejected(found)]
    notes = [HOLDS]
    if "conditions" in found:
        notes += list(found["conditions"]["model"].get("notes", []))
    if "confirmation" in found:
        notes += list(found["confirmation"].get("warnings", []))
    return Page(
        title="Policy search",
        headline=headline(spec, found),
        facts=facts,
        tables=[t for t in tables if t is not None],
        notes=notes,
        formulas=[],
        legend=_LEGEND,
    )


def _kld(value: float | None, ci: Any) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4f}" + (f" [{ci[0]:.4f}, {ci[1]:.4f}]" if ci else "")


def _confirmed(found: Mapping[str, Json]) -> Table | None:
    end = found.get("confirmation")
    if not end or not end.get("ratios"):
        return None
    rows = [
        [
            str(r["arm"]),
            str(r["reference"]),
            str(r["metric"]),
            _percent(r),
            str(r["judgement"]),
            str(r["reason"] or ""),
        ]
        for r in end["ratios"]
    ]
    return Table(
        title="Confirmation: the chosen policy in a fresh interleaved run",
        columns=["policy", "against", "metric", "difference", "word", "reason"],
        rows=rows,
        left=3,
    )


def _sensitivity(found: Mapping[str, Json]) -> Table | None:
    if "sensitivity" not in found:
        return None
    rows = [
        [
            f"{u['layers'][0]}–{u['layers'][1]}",
            u["stage"],
            u["format"],
            _kld(u["kld"]["value"], u["kld"]["ci95"]),
        ]
        for u in found["sensitivity"]["units"]
    ]
    return Table(
        title="Sensitivity: one group of layers in one format in one stage",
        columns=["layers", "stage", "format", "KLD nats"],
        rows=rows,
        left=3,
        footer=[f"{found['sensitivity']['windows']} windows each"],
    )


def _round(found: Mapping[str, Json], name: str) -> Table | None:
    if name not in found:
        return None
    one = found[name]
    names = {c["name"]: c for c in found["candidates"]["measured"]}
    rows = []
    for r in one["results"]:
        estimate = names[r["name"]]["estimated"]
        rows.append(
            [
                r["name"],
                _pairs(names[r["name"]]),
                _kld(r["kld"], r["kld_ci95"]),
                f"{estimate['kld']:.4f}",
                f"{r['e2e_ms']:.1f}",
                f"{r['bytes'] / 2**20:.1f}",
                "goes on" if r["name"] in one["kept"] else "out",
            ]
        )
    base = "n/a" if one["base_e2e_ms"] is None else f"{one['base_e2e_ms']:.1f} ms"
    return Table(
        title=f"Halving, {name.replace('round', 'round ')}",
        columns=["candidate", "formats by group", "KLD nats", "estimated", "ms a request", "MiB", ""],
        rows=rows,
        left=2,
        footer=[f"{one['windows']} windows, {one['blocks']} blocks; the base took {base}"],
    )


def _rejected(found: Mapping[str, Json]) -> Table | None:
    rows = [[r["candidate"], r["formats"], r["step"], r["reason"]] for r in rejected(found)]
    if not rows:
        return None
    return Table(
        title="Not chosen, and why",
        columns=["candidate", "formats by group", "step", "reason"],
        rows=rows,
        left=4,
    )


def toml(spec: SearchSpec, found: Mapping[str, Json]) -> str:
    """The chosen policy's file, with what it was found by in comments. Raises ValueError where there is none."""
    policy = winner(found)
    if policy is None:
        raise ValueError("nothing was chosen")
    there = found["conditions"]
    told = [
        f"Found by: pdq-tui search {spec.model} --max-kld {spec.max_kld:g}"
        + ("" if spec.max_bytes is None else f" --max-memory {spec.max_bytes / 2**20:g}MiB"),
        f"on {there['device']['name']}, pdq-tui {there['tool']['version']}.",
        headline(spec, found) + ".",
        HOLDS,
    ]
    lines = [line for text in told for line in textwrap.wrap(" ".join(text.split()), 110)]
    limit = f"KLD within {spec.max_kld:g} nats on {spec.model.rstrip('/').split('/')[-1]}"
    named = msgspec.structs.replace(policy, summary=f"found by search: {limit}")
    return "".join(f"# {line}\n" for line in lines) + "\n" + policy_to_toml(named)
