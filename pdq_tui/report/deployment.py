"""What a policy means for serving engines, as Markdown with commands to copy, as JSON, and as tables of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core.metrics import MISSING, format_bytes
from pdq_tui.core.servers import load_servers
from pdq_tui.errors import UsageError
from pdq_tui.judge.deploy import USUAL_LINKS, Cache, Deployment, deployment, link_worth
from pdq_tui.judge.plan import Spec
from pdq_tui.judge.verdict import Verdict
from pdq_tui.report.page import Table

Json = Mapping[str, Any]

READ: Final = (
    "read in the servers' documentation, not run: no server was started, and nothing here measured one"
)
#: Bytes of a number in a model's dtype, by its name in documents.
_WIDTHS: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


def body(found: Sequence[Deployment], model: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": "pdq-tui deployment",
        "model": model,
        "method": READ,
        "deployments": [msgspec.to_builtins(d) for d in found],
    }


# -- Markdown of its own: commands have to be copied whole ---------------------------------------------------------------------


def markdown(found: Sequence[Deployment], model: str) -> str:
    policy = found[0].policy
    lines = [f"# {_text(policy)} of {_text(model)} on serving engines", "", f"{READ.capitalize()}."]
    for d in found:
        lines += ["", f"## {d.title}", ""]
        lines += [f"Checked against {d.version} on {d.checked}.", ""]
        lines += _bullets("It cannot express", d.cannot)
        if not d.pools:
            lines += ["So there is nothing to deploy.", ""]
            continue
        if d.cannot:
            lines += ["What follows is the nearest that it can serve, not what was measured.", ""]
        lines += _bullets("It differs from what was measured", d.differs)
        lines += _bullets("It needs", d.needs)
        lines += ["| pool | weights | what they are | flags |", "| :-- | :-- | :-- | :-- |"]
        lines += [
            f"| {p.role} | {_text(p.weights)} | {_text(p.scheme)} | {_text(' '.join(p.flags)) or '–'} |"
            for p in d.pools
        ]
        lines += [
            "",
            f"KV cache: `{d.kv_dtype}`." + (f" {_sentence(d.shared_kv)}." if d.shared_kv else ""),
            "",
        ]
        lines += [f"Link: {link_text(d)}.", ""]
        for command in d.make:
            lines += _fenced("sh", command)
        for file in d.files:
            lines += [f"`{_code(file.name)}`:", "", *_fenced("", file.text)]
        for p in d.pools:
            lines += _fenced("sh", p.command)
        if d.router:
            lines += _fenced("sh", d.router)
        lines += _numbered("Steps", d.steps) + _numbered("Way back", d.rollback)
        if d.code_change:
            lines += [f"Both stages in one process would need code: {_text(d.code_change)}.", ""]
        lines += _bullets("Read in", d.sources)
    return "\n".join(lines).rstrip() + "\n"


def link_text(d: Deployment) -> str:
    """The bytes that a prompt sends to the other pool, and what they take."""
    link = d.link
    if link is None:
        return d.link_reason or "not known"
    what = f"{format_bytes(link.bytes)} of KV cache for {link.batch} × {link.tokens} prompt tokens"
    if link.ms is not None:
        return f"{what}: {link.ms:.3g} ms at {link.gbps:g} GB/s, by its bytes alone; handshakes add to it"
    usual = ", ".join(
        f"{link.bytes / (gbps * 1e9) * 1e3:.3g} ms at {name}" for name, gbps in USUAL_LINKS.items()
    )
    return (
        f"{what}: {usual} (nominal rates; --link GB/s names yours), by its bytes alone; handshakes add to it"
    )


def _bullets(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", "", *(f"- {_text(line)}" for line in lines), ""] if lines else []


def _numbered(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", "", *(f"{n}. {_text(line)}" for n, line in enumerate(lines, 1)), ""]


def _fenced(language: str, text: str) -> list[str]:
    """A block that its own text cannot end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", *text.rstrip("\n").splitlines(), fence, ""]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _text(text: str) -> str:
    clean = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    for sign in "\\`*_[]<>|":
        clean = clean.replace(sign, f"\\{sign}")
    return clean


def _code(text: str) -> str:
    return text.replace("`", "'")


# -- in an evaluation ----------------------------------------------------------------------------------------------------------


def subjects(found: Mapping[str, Json], v: Verdict) -> list[str]:
    """The policy that the verdict is about, or the first staged one that was left, and the best uniform."""
    staged = v.staged or next(
        iter(found.get("confirmation", {}).get("staged") or found.get("selection", {}).get("staged") or []),
        None,
    )
    uniform = found.get("confirmation", {}).get("reference") or found.get("selection", {}).get("best_uniform")
    return [name for name in (staged, uniform) if name]


def of_evaluation(spec: Spec, found: Mapping[str, Json], names: Sequence[str]) -> list[Deployment]:
    """Every shipped server for each of ``names``; none where the tables cannot be read."""
    try:
        servers = load_servers()
    except UsageError:
        return []
    cache, reason = measured_cache(spec, found)
    w = spec.workload
    return [
        deployment(
            server,
            policy,
            spec.model,
            tokens=w.prompt_tokens or 0,
            batch=w.batch,
            cache=cache,
            cache_reason=reason,
            gbps=spec.link_gbps,
        )
        for name in names
        for policy in spec.policies
        if policy.name == name
        for server in servers
    ]


def measured_cache(spec: Spec, found: Mapping[str, Json]) -> tuple[Cache | None, str]:
    """The census of the base's KV cache, as the engine gave it, and why there is none."""
    c = found.get("conditions", {})
    kv = c.get("kv", {}).get(spec.base.name, {})
    width = _WIDTHS.get(str(c.get("model", {}).get("dtype", "")).removeprefix("torch."))
    if not kv.get("bytes_per_token"):
        return None, "the evaluation has no census of the KV cache"
    if kv.get("dtype", "bf16") != "bf16" or width is None:
        return None, "the base's KV cache is not in the model's dtype"
    return Cache(bytes_per_token=int(kv["bytes_per_token"]), dtype_bytes=width), ""


def steps_text(found: Sequence[Deployment], policy: str) -> str:
    """ "vLLM 8 / 3, SGLang 8 / 3, TensorRT-LLM –": steps to deploy and to roll back."""
    told = [
        f"{d.title} {len(d.steps)} / {len(d.rollback)}{'*' if d.cannot else ''}"
        if d.steps
        else f"{d.title} –"
        for d in found
        if d.policy == policy
    ]
    return ", ".join(told) or MISSING


def link_lines(found: Sequence[Deployment], timing: Json) -> list[str]:
    """What the confirmed gain leaves for the link, by policy: one sentence each."""
    told = []
    for policy in dict.fromkeys(d.policy for d in found if d.link is not None and d.pools):
        link = next(d.link for d in found if d.policy == policy and d.link is not None and d.pools)
        cells = [
            c
            for c in timing.get("map", [])
            if c["staged"] == policy and c["uniform"] == timing.get("reference") and not c["extrapolated"]
        ]
        if not cells:
            continue
        cell = max(cells, key=lambda c: int(c["output"]))
        clear = cell["ci95"] and not cell["ci95"][0] <= 0 <= cell["ci95"][1]
        least = link_worth(link, -cell["delta_ms"]) if clear else None
        at = f"answers of {cell['output']} tokens, against {cell['uniform']}"
        told.append(
            f"{policy} saves no time here that can be told ({cell['delta_ms']:+.1f} ms, {at}): a link only adds to that"
            if least is None
            else f"{policy} saves {-cell['delta_ms']:.1f} ms a request here ({at}), by this engine's times and no server's: a "
            f"link of less than {least:.2g} GB/s takes that alone"
        )
    return told


def deploy_table(found: Sequence[Deployment], timing: Json) -> Table:
    rows = [
        [
            d.policy,
            f"{d.title} {d.version.split(' ')[0]}",
            "yes" if not d.cannot else "no" if not d.pools else "nearest",
            "; ".join(f"{p.role}: {p.scheme}" for p in d.pools) or MISSING,
            f"{d.kv_dtype}" if d.pools else MISSING,
            str(len(d.make)) if d.pools else MISSING,
            f"{len(d.steps)} / {len(d.rollback)}" if d.steps else MISSING,
            "; ".join(d.cannot),
        ]
        for d in found
    ]
    checked = sorted({d.checked for d in found})
    footer = [
        f"tables checked on {', '.join(checked)}: {READ}",
        *dict.fromkeys(f"{d.title}: {d.shared_kv}" for d in found if d.shared_kv),
        *dict.fromkeys(f"the link carries {link_text(d)}" for d in found if d.link is not None and d.pools),
        *link_lines(found, timing),
        "`pdq-tui deploy POLICY --model MODEL` writes commands, files, steps in and back, and what each does otherwise",
    ]
    return Table(
        title="5. what would it take elsewhere? The policy on serving engines",
        columns=["policy", "server", "as it is", "weights", "KV", "to make", "steps in / back", "cannot"],
        rows=rows,
        left=8,
        footer=footer,
    )


def command_table(found: Sequence[Deployment]) -> Table | None:
    """Each pool's command on one line; None where no server can serve any of them."""
    rows = [
        [d.policy, d.title, role, " ".join(command.replace("\\\n", " ").split())]
        for d in found
        for role, command in [
            *((p.role, p.command) for p in d.pools),
            *([("router", d.router)] if d.router else []),
        ]
    ]
    if not rows:
        return None
    return Table(
        title="5. what would it take elsewhere? Commands",
        columns=["policy", "server", "pool", "command"],
        rows=rows,
        left=4,
        footer=[
            "ports, GPUs and hosts are examples; files that commands name are written by `pdq-tui deploy`"
        ],
    )
