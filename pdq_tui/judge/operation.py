"""Steps that ask how the chosen policy holds up in use: abnormal inputs. Each measures through an evaluation's engine and
returns what it found as JSON, like those of ``steps``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdq_tui.core import protocol as p
from pdq_tui.errors import PdqError
from pdq_tui.host.conversation import Conversation
from pdq_tui.judge import abnormal as unusual
from pdq_tui.judge.abnormal import Result

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
