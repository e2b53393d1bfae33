"""Steps that ask how policies hold up in use: tasks, abnormal inputs. Each measures through an evaluation's engine and
returns what it found as JSON, like those of ``steps``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pdq_tui.core import protocol as p
from pdq_tui.core.workload import Workload
from pdq_tui.errors import PdqError
from pdq_tui.host.conversation import Conversation
from pdq_tui.host.journal import ReadCounts, read_events
from pdq_tui.judge import abnormal as unusual
from pdq_tui.judge import flips, freerun, harness, logs, quality, taskset
from pdq_tui.judge import load as loads
from pdq_tui.judge import soak as endurance
from pdq_tui.judge.abnormal import Result
from pdq_tui.judge.taskset import Task

if TYPE_CHECKING:
    from pdq_tui.core.policy import Policy
    from pdq_tui.judge.evaluation import Evaluation

Json = dict[str, Any]


def subject(ev: Evaluation) -> Policy:
    """The staged policy that the verdict will be about: of those that were timed, the fastest in the selection."""
    return ev.by_name(ev.found["confirmation"]["staged"][:1])[0]


def ask(ev: Evaluation, policy: Policy, questions: list[p.Question], task: str = "ask") -> list[p.Answered]:
    """Raises PdqError where the engine failed; it is closed then, and the next question opens another."""
    answers: list[p.Answered] = []

    def do(talk: Conversation) -> None:
        ev.arm(policy)
        answers.extend(talk.ask(p.Ask(arm=policy.name, questions=questions, task=task)))

    try:
        ev.talk(do)
    except PdqError:
        ev.close()
        raise
    return answers


def tasks(ev: Evaluation) -> Json:
    """Every task by the base and by every policy that is left, greedy, to its natural end."""
    spec, small = ev.spec, ev.found["small_quality"]
    asked = list(spec.tasks) or taskset.own(spec.plan.tasks, spec.seed)
    names = list(dict.fromkeys([spec.base.name, *small["uniform"], *small["staged"]]))
    groups = _groups(asked, spec.workload.batch)
    answers: dict[str, dict[str, Json]] = {}
    template = False
    for policy in sorted(ev.by_name(names), key=lambda policy: names.index(policy.name)):
        answers[policy.name] = {}
        questions = [_question(number, group) for number, group in enumerate(groups)]
        for group, answer in zip(groups, ask(ev, policy, questions, "tasks"), strict=True):
            template = template or answer.chat_template_applied
            answers[policy.name] |= _graded(group, answer)
    base = answers[spec.base.name]
    limit = flips.DROPS[spec.gate]
    own = _likelihoods(ev, groups, base)
    found: Json = {}
    for name in names:
        both = [t for t in asked if t.id in base and t.id in answers[name]]
        if name == spec.base.name or not both:
            continue
        f = _compared(both, base, answers[name])
        likely = _likelihoods(ev, groups, answers[name])
        agreed = freerun.agreement(base, answers[name], {t: (likely[t], own[t]) for t in likely if t in own})
        kinds = {t.kind: [] for t in both}  # type: dict[str, list[Task]]
        for t in both:
            kinds[t.kind].append(t)
        found[name] = {
            **msgspec.to_builtins(f),
            "agreement": msgspec.to_builtins(agreed),
            "gates": [msgspec.to_builtins(g) for g in (flips.task_gate(f, limit), flips.length_gate(f))],
            "kinds": {
                kind: {
                    "n": len(of),
                    "base": sum(bool(base[t.id]["right"]) for t in of) / len(of),
                    "policy": sum(bool(answers[name][t.id]["right"]) for t in of) / len(of),
                }
                for kind, of in kinds.items()
            },
        }
    staged = [found[n] for n in small["staged"] if n in found]
    open_ = {g["reason"] for f in staged for g in f["gates"][:1] if g["result"] in _UNSETTLED}
    return {
        "set": spec.tasks_name,
        "base": spec.base.name,
        "asked": len(asked),
        "refused": len(asked) - len(base),
        "chat_template": template,
        "policies": found,
        "lm_eval": _lm_eval(ev, names),
        "items": [msgspec.to_builtins(t) for t in asked],
        "answers": answers,
        "unsettled": "no task fits this model" if not staged else "; ".join(sorted(open_)) or None,
        "stop": None,
    }


def _likelihoods(ev: Evaluation, groups: Sequence[Sequence[Task]], answers: Json) -> dict[str, float]:
    """By task that was answered: what the base thinks of this answer, in nats a token."""
    kept = [[t for t in group if t.id in answers] for group in groups]
    kept = [group for group in kept if group]
    questions = [
        msgspec.structs.replace(_question(number, group), forced=[answers[t.id]["ids"] for t in group])
        for number, group in enumerate(kept)
    ]
    rated = ask(ev, ev.spec.base, questions, "tasks")
    return {
        t.id: value
        for group, answer in zip(kept, rated, strict=False)
        for t, value in zip(group, answer.nll, strict=False)
        if value is not None
    }


def _lm_eval(ev: Evaluation, names: Sequence[str]) -> Json | None:
    """lm-eval's tasks, where some were asked for: by policy, each metric against the base's. They are shown, and decide
    nothing: their number and their limits are not this project's."""
    spec = ev.spec
    if not spec.lm_tasks:
        return None
    results: dict[str, list[p.LmEvaluated]] = {}

    def do(talk: Conversation) -> None:
        for policy in sorted(ev.by_name(names), key=lambda policy: names.index(policy.name)):
            ev.arm(policy)
            command = p.LmEval(
                arm=policy.name, tasks=list(spec.lm_tasks), limit=spec.plan.tasks, seed=spec.seed
            )
            results[policy.name] = talk.lm_eval(command)

    try:
        ev.talk(do)
    except PdqError:
        ev.close()
        raise
    base = results[spec.base.name]
    return {
        "tasks": list(spec.lm_tasks),
        "limit": spec.plan.tasks,
        "base": [msgspec.to_builtins(r) for r in base],
        "policies": {n: harness.compared(base, rs) for n, rs in results.items() if n != spec.base.name},
    }


_UNSETTLED = (quality.UNSURE, quality.NOT_INFORMATIVE)


def _groups(asked: Sequence[Task], size: int) -> list[list[Task]]:
    """Tasks with one limit of new tokens, ``size`` at a time."""
    by_most: dict[int, list[Task]] = {}
    for task in asked:
        by_most.setdefault(task.most, []).append(task)
    return [of[at : at + size] for of in by_most.values() for at in range(0, len(of), size)]


def _question(number: int, group: Sequence[Task]) -> p.Question:
    chats = tuple((("user", task.prompt),) for task in group)
    workload = Workload(
        prompt_tokens=None,
        output_tokens=group[0].most,
        batch=len(group),
        prompts="file",
        chats=chats,
        stop="natural",
        distinct=len(group),
    )
    return p.Question(id=f"tasks {number + 1}", workload=workload)


def _graded(group: Sequence[Task], answer: p.Answered) -> dict[str, Json]:
    """By task that was answered; what a model has no positions for is left out."""
    out = {r.number for r in answer.refused}
    ran = [task for number, task in enumerate(group, 1) if number not in out]
    if answer.state == "refused":
        return {}
    return {
        task.id: {
            "right": taskset.right(task, text),
            "tokens": len(tokens),
            "ids": list(tokens),
            "text": text,
        }
        for task, text, tokens in zip(ran, answer.texts, answer.tokens, strict=False)
    }


def _compared(both: Sequence[Task], base: Json, policy: Json) -> flips.Flips:
    return flips.compare(
        [base[t.id]["right"] for t in both],
        [policy[t.id]["right"] for t in both],
        [(base[t.id]["tokens"], policy[t.id]["tokens"]) for t in both],
        sum(base[t.id]["text"] != policy[t.id]["text"] for t in both),
    )


def load(ev: Evaluation) -> Json:
    """Rising concurrency, then arrivals on their own, for the staged policy and the uniform that it was timed against."""
    spec, plan, w = ev.spec, ev.spec.plan, ev.spec.workload
    reference = ev.by_name([ev.found["confirmation"]["reference"]])[0]
    policies = list(dict.fromkeys([reference, subject(ev)]))
    conditions = ev.found["conditions"]
    stored = {policy.name: int(conditions["weights"][policy.name]["stored_bytes"]) for policy in policies}
    a_token = int(conditions["kv"][reference.name]["bytes_per_token"])
    assert w.prompt_tokens is not None
    most = plan.concurrency[-1] * (w.prompt_tokens + w.output_tokens + _PAGE_SLACK)
    points: list[Json] = []
    knees: list[Json] = []
    refused: dict[str, str] = {}
    engine: Json = {}
    for policy in policies:
        budget = loads.kv_tokens(stored[policy.name], max(stored.values()), a_token, most)
        mine: list[loads.Point] = []
        try:
            for concurrency in plan.concurrency:
                mine.append(_point(ev, policy, budget, engine, concurrency=concurrency))
                if loads.saturated(mine):
                    break
            best = max((p.throughput or 0.0 for p in mine), default=0.0)
            for share in plan.rates if best else ():
                mine.append(_point(ev, policy, budget, engine, rate=best * share))
                if loads.overloaded(mine[-1]):
                    break
        except PdqError as error:
            refused[policy.name] = error.message
        points += [msgspec.to_builtins(p) for p in mine]
        if mine:
            knees.append(msgspec.to_builtins(loads.knee(policy.name, mine)))
    flagged = [f"{p['arm']}: {p['flagged']}" for p in points if p["flagged"]]
    return {
        **engine,
        "targets": {"ttft_ms": spec.ttft_target_ms, "tpot_ms": spec.tpot_target_ms, "share": loads.MEET},
        "memory_bytes": max(stored.values()) + most * a_token,
        "knee": next((k for k in knees if k["arm"] == subject(ev).name), None),
        "knees": knees,
        "points": points,
        "refused": refused,
        "unsettled": "; ".join(
            [*(f"{name} could not be loaded: {why}" for name, why in refused.items()), *flagged]
        )
        or None,
        "stop": None,
    }


#: A page of the server's cache belongs to one request: what its last one leaves empty.
_PAGE_SLACK = 64


def _point(
    ev: Evaluation,
    policy: Policy,
    budget: int,
    engine: Json,
    concurrency: int | None = None,
    rate: float | None = None,
) -> loads.Point:
    """One load. ``engine``: gets what served it. Raises PdqError, after which the engine is closed."""
    spec, w = ev.spec, ev.spec.workload
    assert w.prompt_tokens is not None
    command = p.Serve(
        arm=policy.name,
        concurrency=concurrency,
        rate=rate,
        seconds=spec.plan.load_s,
        least=2 * (concurrency or 1),
        prompt_tokens=w.prompt_tokens,
        output_tokens=w.output_tokens,
        kv_tokens=budget,
        rows=spec.plan.concurrency[-1],
        seed=spec.seed,
    )
    found: list[tuple[list[p.Served], p.ServeEnded | None]] = []

    def do(talk: Conversation) -> None:
        ev.arm(policy)
        found.append(talk.serve(command))

    try:
        ev.talk(do)
    except PdqError:
        ev.close()
        raise
    served, ended = found[0]
    if ended is None:
        raise PdqError("the load was given up before its end")
    engine |= {"engine": ended.engine, "attention": ended.attention, "scheduler": ended.scheduler}
    return loads.point(
        served,
        ended,
        concurrency=concurrency,
        rate=rate,
        ttft_target=spec.ttft_target_ms,
        tpot_target=spec.tpot_target_ms,
    )


def abnormal(ev: Evaluation) -> Json:
    policy, w, bottleneck = subject(ev), ev.spec.workload, ev.found["bottleneck"]
    assert w.prompt_tokens is not None
    kv = ev.found["conditions"].get("kv", {}).get(policy.name, {})
    limit = ev.found["conditions"].get("max_positions")
    cases = unusual.cases(
        w.prompt_tokens,
        ev.spec.seed,
        max_positions=limit,
        capacity_tokens=kv.get("capacity_tokens"),
        seconds_a_token=bottleneck["ttft_ms"] / 1e3 / w.prompt_tokens,
        longest_s=ev.spec.plan.longest_request_s,
    )
    usual = p.Question(id="clean", workload=unusual.clean(w.prompt_tokens, ev.spec.seed))

    def clean_tokens() -> list[int]:
        (answer,) = ask(ev, policy, [usual], "abnormal")
        if not answer.tokens:
            raise PdqError(f"the clean request was {answer.state}: {answer.reason}")
        return answer.tokens[0]

    before = clean_tokens()
    found: list[Result] = []
    for case in cases:
        if case.not_tested is not None:
            found.append(unusual.skipped(case))
            continue
        question = p.Question(id=case.name, workload=case.workload, leave=case.leave)
        try:
            answer, after = ask(ev, policy, [question, usual], "abnormal")
        except PdqError as error:
            found.append(unusual.result(case, None, error.message, before, clean_tokens()))
        else:
            found.append(
                unusual.result(case, answer, None, before, after.tokens[0] if after.tokens else None)
            )
    room = (limit or w.prompt_tokens + 1024) - w.prompt_tokens
    seconds = _vanish(ev, policy, msgspec.structs.replace(usual.workload, output_tokens=min(room, 1024)))
    found.append(unusual.disconnected(seconds, before, clean_tokens()))
    return {"policy": policy.name, "abnormal": [msgspec.to_builtins(r) for r in found], "stop": None}


def _vanish(ev: Evaluation, policy: Policy, workload: Any) -> float | None:
    """Leave in the middle of a request, without a word."""
    took: list[float | None] = []

    def do(talk: Conversation) -> None:
        ev.arm(policy)
        question = p.Question(id="disconnect", workload=workload)
        took.append(talk.vanish(p.Ask(arm=policy.name, questions=[question])))

    ev.talk(do)
    ev.close()
    return took[0]


def soak(ev: Evaluation) -> Json:
    policy, spec = subject(ev), ev.spec
    seconds = spec.soak_s or spec.plan.soak_s

    def do(talk: Conversation) -> None:
        ev.arm(policy)
        talk.soak(
            p.Soak(
                arm=policy.name,
                seconds=seconds,
                # Every few minutes; a short soak has a few as well.
                canary_every_s=min(180.0, seconds / 5),
                seed=spec.seed,
            )
        )

    begin = time.monotonic_ns()
    events = ev.talk(do)
    body = endurance.analyse(
        [e for e in events if isinstance(e, p.Request) and e.kind == "soak"],
        [e for e in events if isinstance(e, p.Canary)],
        [e for e in events if isinstance(e, p.SensorSample)],
        begin,
    )
    short = seconds < endurance.HOURS_LONG_S
    return {
        "policy": policy.name,
        "asked_s": seconds,
        "hours_long": not short,
        **body,
        "troubles": endurance.troubles(body),
        "unsettled": f"{endurance.words(seconds)}: not the hours-long test" if short else None,
        "stop": None,
    }


def log_analysis(ev: Evaluation) -> Json:
    """Every journal of this evaluation, of earlier sittings as well."""
    found = logs.Logs()
    journals = sorted(ev.directory.glob("runs/*/events.jsonl"))
    unreadable: dict[str, str] = {}
    for journal in journals:
        counts = ReadCounts()
        try:
            events = list(read_events(journal, counts))
        except (OSError, PdqError) as error:
            unreadable[journal.parent.name] = str(error)
            continue
        found.take(events, counts.torn, counts.unknown)
    found.opened(max(0, len(journals) - 1))
    return {
        "journals": len(journals),
        "unreadable": unreadable,
        "events": found.events,
        "counts": [msgspec.to_builtins(c) for c in found.counts()],
        "stop": None,
    }
