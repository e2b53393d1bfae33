"""The best policy within limits: sensitivity by group of layers and stage, successive halving, confirmation.

Searched on one half of the text and confirmed on the other; timed in rounds, and what is reported in a fresh interleaved run
with an A/A control. Every candidate that was not chosen has its reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from pdq_tui.core import corpus
from pdq_tui.core import protocol as p
from pdq_tui.core.analysis import collect, run_document
from pdq_tui.core.arms import arm_stats
from pdq_tui.core.caveats import SECONDS_MIN
from pdq_tui.core.comparable import obstacles
from pdq_tui.core.facts import other_load
from pdq_tui.core.formats import Format, of_label
from pdq_tui.core.metrics import PRIMARY
from pdq_tui.core.pairs import noise_floor, ratios
from pdq_tui.core.policy import STAGES, Keep, Policy, StagePolicy, stored_as
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError, UnfitError
from pdq_tui.host.conversation import Conversation, RefusedError
from pdq_tui.judge import halving
from pdq_tui.judge import quality as judged
from pdq_tui.judge.halving import Candidate, Pair, Result, Unit
from pdq_tui.judge.plan import Step
from pdq_tui.judge.sitting import Sitting

Json = dict[str, Any]

BASE: Final = Policy(name="bf16", summary="the model's own dtype")
FORMATS: Final = ("int8", "w8a8", "int4")
#: Arms that score a window together: the base scores it once for all of them.
_TOGETHER: Final = 8
#: How many are confirmed at most, one after the other, each on windows of its own.
_TRIES: Final = 3
_METRICS: Final = (PRIMARY, "ttft_ms", "tpot_ms")
#: The number of a decoder layer in a module's name, in all families.
_LAYER: Final = re.compile(r"(?:^|.*\.)(?:layers|h|blocks)\.(\d+)\.")


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """places: candidates that are measured; windows and blocks of a round, for each round; confirm_*: of the last word."""

    name: str
    groups: int
    places: int
    sensitivity_windows: int
    windows: tuple[int, int, int]
    blocks: tuple[int, int, int]
    window_tokens: int
    new_tokens: int
    confirm_windows: int
    confirm_blocks: int


EFFORTS: Final = {
    e.name: e
    for e in (
        Effort(
            name="quick", groups=4, places=12, sensitivity_windows=2, windows=(2, 4, 8), blocks=(2, 4, 6),
            window_tokens=256, new_tokens=24, confirm_windows=8, confirm_blocks=10,
        ),
        Effort(
            name="full", groups=8, places=32, sensitivity_windows=4, windows=(4, 8, 16), blocks=(3, 6, 10),
            window_tokens=512, new_tokens=96, confirm_windows=20, confirm_blocks=30,
        ),
    )
}  # fmt: skip


class SearchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a resumed search must not change. max_kld: nats on the decode path; max_bytes: of the weights of both
    stages and of what no policy touches; formats: labels that a group may have beside the model's own dtype."""

    model: str
    load: p.Load
    workload: Workload
    effort: Effort
    formats: tuple[str, ...]
    max_kld: float
    max_bytes: int | None
    min_effect: float
    name: str
    seed: int = 0


STEPS: Final = (
    Step(name="conditions", title="Conditions", why="formats that do not run here are named before anything is measured"),
    Step(name="speed", title="Speed of the formats", why="what a group saves is its share of what the whole model saves"),
    Step(
        name="sensitivity",
        title="Sensitivity",
        why="layers differ, and the same layer in prefill and in decode: each group by itself says what it costs",
    ),
    Step(name="candidates", title="Candidates", why="what is estimated to be far off the limits need not be measured"),
    Step(name="round1", title="Halving, round 1", why="many candidates on few windows and blocks"),
    Step(name="round2", title="Halving, round 2", why="half of them on twice as many"),
    Step(name="round3", title="Halving, round 3", why="and again: what is left is measured best"),
    Step(
        name="confirmation",
        title="Confirmation",
        why="the best of many looks better than it is: held-out text, and a fresh interleaved run",
    ),
)  # fmt: skip
ROUNDS: Final = ("round1", "round2", "round3")


class Search(Sitting[SearchSpec]):
    """One search in its directory."""

    command, what, kind, steps, file = "search", "a search", SearchSpec, STEPS, "search-spec.json"

    def do(self, step: Step) -> Json:
        return _DO[step.name](self)

    # -- what steps share ----------------------------------------------------------------------------------------------

    def scored(
        self, policies: Sequence[Policy], windows: int, text: str, skip: int = 0
    ) -> tuple[dict[str, judged.Path], dict[str, str]]:
        """By policy: its decode path on ``windows`` of that half of the text; and why those that cannot run do not."""
        e = self.spec.effort
        found: dict[str, judged.Path] = {}
        refused: dict[str, str] = {}

        def do(talk: Conversation) -> None:
            self.arm(BASE)
            for first in range(0, len(policies), _TOGETHER):
                slots = {}
                for slot, policy in enumerate(policies[first : first + _TOGETHER]):
                    label = f"slot{slot}"
                    try:
                        talk.arm(label, policy)
                        slots[label] = policy.name
                    except RefusedError as error:
                        refused[policy.name] = str(error)
                if not slots:
                    continue
                done = talk.score(
                    p.Score(
                        arms=list(slots), base=BASE.name, path="decode", forced="text", text=text, skip=skip,
                        windows=windows, prompt_tokens=self.prompt_tokens, new_tokens=e.new_tokens,
                        seed=self.spec.seed, batch=self.spec.workload.batch,
                    )
                )  # fmt: skip
                for label, name in slots.items():
                    found[name] = judged.summarize([s for s in done if s.arm == label])

        self.talk(do)
        return found, refused

    @property
    def prompt_tokens(self) -> int:
        """Of a window, or as many as the model has positions for behind the forced ones."""
        most = self.found["conditions"]["max_positions"]
        wanted = self.spec.effort.window_tokens
        return wanted if most is None else min(wanted, int(most) - 1 - self.spec.effort.new_tokens)

    def timed(self, policies: Sequence[Policy], blocks: int, seed: int) -> tuple[dict[str, Json], list[Any]]:
        """By policy: medians of its times and its weights' bytes; and the events behind them."""
        events = self.blocks(policies, blocks, seed, solo=False)
        facts = collect(events)
        ready = {e.arm: e for e in events if isinstance(e, p.ArmReady)}
        found: dict[str, Json] = {}
        for policy in policies:
            stats = arm_stats(facts.of(policy.name), facts.device, facts.model, _METRICS)
            missing = next((m for m in _METRICS if stats[m].median is None), None)
            if missing is not None:
                raise PdqError(f"{policy.name} gave no {missing}: {stats[missing].reason}")
            weights = ready[policy.name].weights
            found[policy.name] = {
                **{m: stats[m].median for m in _METRICS},
                "stored_bytes": weights.stored_bytes,
                "stage_bytes": {"prefill": weights.prefill_bytes, "decode": weights.decode_bytes},
                "bytes": weights.stored_bytes + weights.kept_bytes,
            }
        return found, events


# -- policies ----------------------------------------------------------------------------------------------------------


def groups_of(linears: dict[str, int], groups: int) -> list[Json]:
    """Consecutive decoder layers in at most ``groups`` groups of about equal number: their patterns and parameters. What
    lies outside of decoder layers (the head) is in none. Raises UnfitError where no module's name has a layer's number."""
    layers: dict[int, tuple[str, int]] = {}
    for name, parameters in linears.items():
        match = _LAYER.match(name)
        if match is not None:
            number = int(match.group(1))
            layers[number] = match.group(0) + "*", layers.get(number, ("", 0))[1] + parameters
    if not layers:
        raise UnfitError(
            "no linear layer of this model has a layer's number in its name",
            "evaluate compares whole policies",
        )
    numbers = sorted(layers)
    count = min(groups, len(numbers))
    edges = [round(i * len(numbers) / count) for i in range(count + 1)]
    return [
        {
            "layers": [numbers[a], numbers[b - 1]],
            "patterns": [layers[n][0] for n in numbers[a:b]],
            "parameters": sum(layers[n][1] for n in numbers[a:b]),
        }
        for a, b in itertools.pairwise(edges)
    ]


def _stage(fmt: Format) -> StagePolicy:
    return StagePolicy(fmt.weights, fmt.activations, fmt.group_size)


def policy_of(name: str, pairs: Sequence[Pair], groups: Sequence[Json], summary: str = "") -> Policy:
    """The format that most groups have in a stage is the stage's own, the others are exceptions by name."""
    usual: dict[str, Format] = {}
    keeps: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for at, stage in enumerate(STAGES):
        sizes: dict[str, int] = {}
        for pair, group in zip(pairs, groups, strict=True):
            sizes[pair[at]] = sizes.get(pair[at], 0) + group["parameters"]
        usual[stage] = of_label(max(sizes, key=lambda label: sizes[label]))
    for pair, group in zip(pairs, groups, strict=True):
        odd = [
            (stage, of_label(pair[at]))
            for at, stage in enumerate(STAGES)
            if of_label(pair[at]) != usual[stage]
        ]
        both = len(odd) == 2 and odd[0][1] == odd[1][1]
        for stage, fmt in odd[:1] if both else odd:
            keeps.setdefault((fmt.label, STAGES if both else (stage,)), []).extend(group["patterns"])
    prefill, decode = usual["prefill"], usual["decode"]
    return Policy(
        name=name,
        summary=summary,
        prefill=_stage(prefill),
        decode=_stage(decode),
        storage=stored_as(prefill, decode, "uniform"),
        keep=tuple(
            Keep(tuple(patterns), fmt.weights, fmt.activations, fmt.group_size, stages)  # type: ignore[arg-type]
            for (label, stages), patterns in keeps.items()
            for fmt in (of_label(label),)
        ),
    )


def _uniform(label: str) -> Policy:
    fmt = of_label(label)
    return Policy(name=label, prefill=_stage(fmt), decode=_stage(fmt))


# -- steps -------------------------------------------------------------------------------------------------------------


def conditions(s: Search) -> Json:
    refused: dict[str, str] = {}

    def do(talk: Conversation) -> None:
        for policy in (BASE, *map(_uniform, s.spec.formats)):
            try:
                talk.arm(policy.name, policy)
            except RefusedError as error:
                refused[policy.name] = str(error)

    events = s.talk(do)
    if BASE.name in refused:
        raise PdqError(f"the base cannot run here: {refused[BASE.name]}")
    loaded = next(e for e in events if isinstance(e, p.ModelReady))
    doc = run_document(s.meta, events, BASE.name, s.spec.min_effect)
    from_four = next((note for note in loaded.model.notes if "4 bits" in note), None)
    if from_four:
        # On its own grid 4 bits are too good, off it too bad: neither is a reason to choose or to reject.
        four = [label for label in s.spec.formats if of_label(label).kind.groups]
        refused |= dict.fromkeys(four, f"its quality on this model says nothing: {from_four}")
    runs = [label for label in s.spec.formats if label not in refused]
    most = loaded.model.max_positions
    if most is not None and most - 1 - s.spec.effort.new_tokens < 2:
        raise UnfitError(
            f"this model's {most} positions are too few for {s.spec.effort.new_tokens} forced tokens"
        )
    return {
        **{key: doc[key] for key in ("tool", "host", "device", "libraries", "model", "workload")},
        "formats": [halving.DENSE, *runs],
        "refused": refused,
        "groups": groups_of(loaded.linears, s.spec.effort.groups),
        "outside": [name for name in loaded.linears if not _LAYER.match(name)],
        "max_positions": most,
        "stop": None if runs else "no format that was asked for runs here",
    }


def speed(s: Search) -> Json:
    """Each format in both stages of the whole model; the base among them."""
    labels = s.found["conditions"]["formats"]
    found, _ = s.timed([_uniform(label) for label in labels], s.spec.effort.blocks[0], s.spec.seed + 1)
    return {"formats": found, "stop": None}


def sensitivity(s: Search) -> Json:
    """KLD of each group × format × stage alone."""
    groups, formats = s.found["conditions"]["groups"], s.found["conditions"]["formats"]
    asked: dict[str, tuple[int, str, str]] = {}
    policies = []
    for g, group in enumerate(groups):
        for fmt in formats[1:]:
            for stage in STAGES:
                name = f"g{g}-{stage}-{fmt}"
                # One group alone must not become the stage's own format where there are few groups.
                policies.append(_only(name, group["patterns"], fmt, stage))
                asked[name] = (g, stage, fmt)
    scored, refused = s.scored(policies, s.spec.effort.sensitivity_windows, corpus.SELECTION)
    return {
        "units": [
            {
                "group": g, "layers": groups[g]["layers"], "stage": stage, "format": fmt,
                "kld": msgspec.to_builtins(scored[name].kld), "nonfinite": scored[name].nonfinite,
            }
            for name, (g, stage, fmt) in asked.items() if name in scored
        ],
        "refused": refused,
        "windows": s.spec.effort.sensitivity_windows,
        "stop": None,
    }  # fmt: skip


def _only(name: str, patterns: Sequence[str], label: str, stage: Any) -> Policy:
    fmt = of_label(label)
    return Policy(
        name=name, keep=(Keep(tuple(patterns), fmt.weights, fmt.activations, fmt.group_size, (stage,)),)
    )


def candidates(s: Search) -> Json:
    """Made from the sums; those that are measured get a number, the others a reason."""
    groups = s.found["conditions"]["groups"]
    effort = s.spec.effort
    kept_bytes = s.found["speed"]["formats"][halving.DENSE]
    kept = kept_bytes["bytes"] - kept_bytes["stored_bytes"]
    found = halving.candidates(_units(s), len(groups))
    may, left = halving.worth_measuring(found, s.spec.max_kld, s.spec.max_bytes, effort.places, kept)
    by_pairs = {c.pairs: c for c in found}
    return {
        "made": len(found),
        "measured": [_told(f"c{number:02}", c) for number, c in enumerate(may, 1)],
        "left_out": [_told(_words(c), by_pairs[c]) | {"reason": why} for c, why in left.items()],
        "stop": None if may else "no policy of these formats is estimated to keep to the limits",
    }


def _told(name: str, c: Candidate) -> Json:
    return {
        "name": name,
        "pairs": [list(pair) for pair in c.pairs],
        "estimated": {"kld": c.kld, "ms": c.ms, "weights_bytes": c.bytes},
    }


def _words(pairs: Sequence[Pair]) -> str:
    """ "int8 | w8a8/int4 | …": formats by group, prefill/decode where they differ."""
    return " | ".join(a if a == b else f"{a}/{b}" for a, b in pairs)


def _units(s: Search) -> list[Unit]:
    """From the two measured tables: a group's part of a format's saving, and of its bytes, is its share of the weights."""
    groups, times = s.found["conditions"]["groups"], s.found["speed"]["formats"]
    steps = s.spec.workload.output_tokens - 1
    whole = sum(g["parameters"] for g in groups)
    base = times[halving.DENSE]
    klds = {(u["group"], u["stage"], u["format"]): u["kld"]["value"] for u in s.found["sensitivity"]["units"]}
    units = []
    for g, group in enumerate(groups):
        share = group["parameters"] / whole
        for label, row in times.items():
            fmt = of_label(label)
            saves = {
                "prefill": row["ttft_ms"] - base["ttft_ms"],
                "decode": steps * (row["tpot_ms"] - base["tpot_ms"]),
            }
            for stage in STAGES:
                kld = 0.0 if label == halving.DENSE else klds.get((g, stage, label))
                if kld is None:
                    continue  # it gave no finite logits, or was refused: no policy is made of it
                units.append(
                    Unit(
                        group=g, stage=stage, format=label, kld=kld, ms=share * saves[stage], key=fmt.storage_key,
                        bytes=round(share * row["stage_bytes"][stage]),
                    )
                )  # fmt: skip
    return _in_all_groups(units, len(groups))


def _in_all_groups(units: Sequence[Unit], groups: int) -> list[Unit]:
    """Without the formats that a group cannot have in a stage: policies are made of formats that all groups can."""
    there: dict[tuple[str, str], int] = {}
    for u in units:
        there[u.stage, u.format] = there.get((u.stage, u.format), 0) + 1
    return [u for u in units if there[u.stage, u.format] == groups]


def _round(number: int) -> Callable[[Search], Json]:
    def do(s: Search) -> Json:
        effort, groups = s.spec.effort, s.found["conditions"]["groups"]
        all_ = {c["name"]: c for c in s.found["candidates"]["measured"]}
        names = list(all_) if number == 0 else s.found[ROUNDS[number - 1]]["kept"]
        policies = [policy_of(n, [tuple(x) for x in all_[n]["pairs"]], groups) for n in names]
        scored, refused = s.scored(policies, effort.windows[number], corpus.SELECTION)
        runs = [policy for policy in policies if policy.name in scored]
        times: dict[str, Json] = {}
        if runs:
            # The base is everybody's reference, and its own control.
            times, _ = s.timed([BASE, *runs], effort.blocks[number], s.spec.seed + 10 + number)
        results = [
            Result(
                name=policy.name, kld=scored[policy.name].kld.value, kld_ci95=scored[policy.name].kld.ci95,
                nonfinite=scored[policy.name].nonfinite, bytes=times[policy.name]["bytes"],
                e2e_ms=times[policy.name][PRIMARY],
            )
            for policy in runs
        ]  # fmt: skip
        kept, out = halving.halve(results, s.spec.max_kld, s.spec.max_bytes)
        return {
            "windows": effort.windows[number],
            "blocks": effort.blocks[number],
            "base_e2e_ms": times[BASE.name][PRIMARY] if times else None,
            "results": [msgspec.to_builtins(r) for r in sorted(results, key=lambda r: r.e2e_ms)],
            "kept": kept,
            "rejected": {**out, **refused},
            "stop": None if kept else "no candidate keeps to the limits",
        }

    return do


def confirmation(s: Search) -> Json:
    """The fastest first: held-out text decides whether it keeps to the limit, then it is timed against the uniform policies
    that do. The first that passes wins."""
    effort, groups = s.spec.effort, s.found["conditions"]["groups"]
    all_ = {c["name"]: c for c in s.found["candidates"]["measured"]}
    rejected: dict[str, str] = {}
    tried: list[Json] = []
    chosen: Policy | None = None
    for number, name in enumerate(s.found[ROUNDS[-1]]["kept"]):
        policy = policy_of(s.spec.name, [tuple(x) for x in all_[name]["pairs"]], groups)
        if number == _TRIES:
            rejected[name] = f"{_TRIES} faster ones were tried, and did not pass on held-out text"
        elif chosen is not None:
            rejected[name] = f"slower than {tried[-1]['candidate']} in round 3, which passed"
        else:
            skip = number * effort.confirm_windows
            scored, refused = s.scored([policy], effort.confirm_windows, corpus.CONFIRMATION, skip)
            if policy.name in refused:
                rejected[name] = refused[policy.name]
                continue
            path = scored[policy.name]
            gate = judged.gate(path, s.spec.max_kld)
            tried.append(
                {"candidate": name, "path": msgspec.to_builtins(path), "gate": msgspec.to_builtins(gate)}
            )
            if gate.result == judged.PASS:
                chosen = policy
            else:
                rejected[name] = (
                    f"held-out text: KLD {gate.measured}, which does not lie under {s.spec.max_kld:g}"
                )
    if chosen is None:
        return {
            "winner": None, "tried": tried, "rejected": rejected,
            "stop": "no candidate keeps to the KLD limit on text that it was not selected on",
        }  # fmt: skip
    return {"tried": tried, "rejected": rejected, "stop": None, **_against_uniforms(s, chosen)}


def _against_uniforms(s: Search, chosen: Policy) -> Json:
    """A fresh interleaved run of the winner, the base, and the fastest uniform policy that is not shown to be over them."""
    uniform = _rival(s)
    policies = [BASE, *([] if uniform is None else [_uniform(uniform)]), chosen]
    policies = [x for x in policies if x is chosen or x.digest != chosen.digest]
    first = policies[0]
    events = s.blocks(
        policies, s.spec.effort.confirm_blocks, s.spec.seed + 20, solo=True, min_seconds=SECONDS_MIN
    )
    facts = collect(events)
    doc = run_document(s.meta, events, first.name, s.spec.min_effect)
    names = [policy.name for policy in policies]
    rows = []
    for reference in names[:-1]:
        rows += ratios(
            facts.requests,
            reference,
            [reference, chosen.name],
            s.spec.min_effect,
            device=facts.device,
            model=facts.model,
            metrics=_METRICS,
            conditions=obstacles(facts, [reference, chosen.name]),
            floors=noise_floor(
                facts.requests, first.name, device=facts.device, model=facts.model, metrics=_METRICS
            ),
        )
    ready = next(e for e in events if isinstance(e, p.ArmReady) and e.arm == chosen.name)
    return {
        "winner": msgspec.to_builtins(chosen),
        "digest": chosen.digest,
        "uniform": uniform,
        "bytes": ready.weights.stored_bytes + ready.weights.kept_bytes,
        "arms": doc["arms"],
        "ratios": [msgspec.to_builtins(r) for r in rows],
        "noise_floor": doc["noise_floor"],
        "warnings": doc["warnings"],
        "other_load": other_load(facts, facts.requests),
        "blocks": doc["workload"]["blocks"],
    }


def _rival(s: Search) -> str | None:
    """The fastest uniform policy beside the base that went through a round and is not shown to be over a limit; None where
    none did. The winner may be that one."""
    uniform = {
        c["name"]: c["pairs"][0][0]
        for c in s.found["candidates"]["measured"]
        if halving.is_uniform(c["pairs"]) and c["pairs"][0][0] != halving.DENSE
    }
    for name in reversed(ROUNDS):
        for r in s.found[name]["results"]:
            result = msgspec.convert(r, Result)
            if (
                result.name in uniform
                and halving.over_limit(result, s.spec.max_kld, s.spec.max_bytes) is None
            ):
                return str(uniform[result.name])
    return None


_DO: Final[dict[str, Callable[[Search], Json]]] = {
    "conditions": conditions,
    "speed": speed,
    "sensitivity": sensitivity,
    "candidates": candidates,
    **{name: _round(number) for number, name in enumerate(ROUNDS)},
    "confirmation": confirmation,
}
