"""What lm-eval asks, answered through the staged views: held against whole logits; with lm-eval itself where it is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.engine import harness
from pdq_tui.engine.cancel import Cancelled
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel
from pdq_tui.errors import UnfitError, UsageError

MODEL = p.ModelInfo(id="tiny", vocab=128, max_positions=256)
POLICIES = ("bf16", "int4", "bf16-prefill-int4-decode", "int4-prefill-bf16-decode")


@pytest.fixture(scope="module", autouse=True)
def probes_in_a_folder_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDQ_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def arms(load_tiny: Callable[..., tuple[object, object]], tiny_llama_untied: Path) -> dict[str, Arm]:
    model, masters = load_tiny(tiny_llama_untied)
    staged = StagedModel(model, masters, CpuDevice(), budget_bytes=None, kernels=load_kernels("cpu"))
    return {n: Arm(n, find_policy(n), staged.apply(find_policy(n), rows=[1, 40])) for n in POLICIES}


def asked(arm: Arm, kind: type = harness.StagedRequests, stopped: Callable[[], bool] = lambda: False) -> Any:
    return kind(CpuDevice(), arm, tiny_tokenizer(), MODEL, frozenset({2}), stopped)


def likelihood(arm: Arm, context: str, continuation: str) -> tuple[float, bool]:
    model = asked(arm)
    ids = [model.tok_encode(text) for text in (context, continuation)]
    return model._loglikelihood_tokens([((context, continuation), *ids)])[0]


def whole(arm: Arm, context: str, continuation: str) -> tuple[float, bool]:
    """From single prefills of every length: right for policies whose stages are alike."""
    ids = tiny_tokenizer()(context + continuation)["input_ids"]
    first, total, greedy = len(context), 0.0, True
    for at in range(first, len(ids)):
        row = arm.staged.start(1, at, None).prefill(torch.tensor([ids[:at]]))[0].double().log_softmax(-1)
        total += float(row[ids[at]])
        greedy = greedy and int(row.argmax()) == ids[at]
    return total, greedy


@pytest.mark.parametrize("name", ["bf16", "int4"])
def test_a_likelihood_is_that_of_whole_passes(arms: dict[str, Arm], name: str) -> None:
    got, wanted = (f(arms[name], "The capital of", " France is") for f in (likelihood, whole))
    assert got[0] == pytest.approx(wanted[0], rel=1e-2) and got[1] == wanted[1]


def test_the_first_token_is_prefills_and_the_others_are_decodes(arms: dict[str, Arm]) -> None:
    one = {n: likelihood(arms[n], "The capital of", "x")[0] for n in POLICIES}
    assert one["bf16-prefill-int4-decode"] == one["bf16"] and one["int4-prefill-bf16-decode"] == one["int4"]
    more = {n: likelihood(arms[n], "The capital of", "xyz")[0] for n in POLICIES}
    assert len(set(more.values())) == 4


def test_what_greedy_decoding_gives_is_called_greedy(arms: dict[str, Arm]) -> None:
    prompts = [f"Once upon {c}" for c in "abcdefgh"]
    requests = [SimpleNamespace(args=(text, {"until": [], "max_gen_toks": 6})) for text in prompts]
    answers = dict(zip(prompts, asked(arms["int4"]).generate_until(requests), strict=True))
    # Random weights make special tokens, too, which no text shows.
    prompt, text = next((q, a) for q, a in answers.items() if len(a) == 6)
    assert likelihood(arms["int4"], prompt, text)[1]
    assert not likelihood(arms["int4"], prompt, text[:-1] + ("a" if text[-1] != "a" else "b"))[1]
    stop = SimpleNamespace(args=(prompt, {"until": [text[2]], "max_gen_toks": 6}))
    assert asked(arms["int4"]).generate_until([stop]) == [text[: text.index(text[2])]]


def test_a_rolling_text_counts_each_token_once(arms: dict[str, Arm]) -> None:
    text = "abcdefgh" * 40
    model = asked(arms["bf16"])
    (got,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    ids, total = [1, *model.tok_encode(text, add_special_tokens=False)], 0.0
    for first in range(0, len(ids) - 1, 255):
        window = ids[first : first + 256]
        for at in range(1, len(window)):
            row = arms["bf16"].staged.start(1, at, None).prefill(torch.tensor([window[:at]]))[0]
            total += float(row.double().log_softmax(-1)[window[at]])
    assert got == pytest.approx(total, rel=1e-3)


def test_a_context_that_is_too_long_loses_its_beginning_and_a_sampled_task_is_refused(
    arms: dict[str, Arm],
) -> None:
    long = "z" * 300 + "The capital of"
    assert likelihood(arms["int4"], long, " F") == likelihood(arms["int4"], long[-254:], " F")
    with pytest.raises(UsageError, match="samples its answers"):
        asked(arms["int4"]).generate_until(
            [SimpleNamespace(args=("a", {"do_sample": True, "temperature": 0.7}))]
        )
    with pytest.raises(UsageError, match="positions"):
        asked(arms["int4"]).generate_until([SimpleNamespace(args=("a", {"max_gen_toks": 300}))])
    with pytest.raises(Cancelled):
        asked(arms["int4"], stopped=lambda: True).generate_until([SimpleNamespace(args=("a", {}))])


def test_a_tasks_file_is_asked_for_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# a task\ntask: 'my_task'\nprocess_docs: !function utils.f\n")
    assert harness.is_file(str(file)) and harness.task_name(file) == "my_task"
    file.write_text("group: x\n")
    for path, sentence in ((file, "names no task"), (tmp_path / "none.yaml", "cannot be read")):
        with pytest.raises(UsageError, match=sentence):
            harness.task_name(path)


def test_without_lm_eval_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UnfitError, match="lm-eval cannot be used") as told:
        harness.evaluate(["hellaswag"], 1, 0, lambda kind: kind())
    assert "pdq-tui[lm-eval]" in (told.value.hint or "")


def test_each_filter_of_a_task_has_its_own_documents() -> None:
    """As lm-eval logs a task with two: one sample a document and filter."""
    samples = [
        {"doc_id": d, "filter": f, "exact_match": float(d == 0 or f == "flexible")}
        for f in ("strict", "flexible") for d in (1, 0)
    ]  # fmt: skip
    results = {
        "alias": "x", "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.4,
        "exact_match,flexible": 1.0, "exact_match_stderr,flexible": 0.0,
    }  # fmt: skip
    done = {
        "samples": {"x": samples},
        "results": {"x": results},
        "higher_is_better": {"x": {"exact_match": True}},
    }
    found = harness._of_task(done, "x")
    assert found["documents"] == 2
    assert found["metrics"] == {"exact_match,strict": 0.5, "exact_match,flexible": 1.0}
    assert found["stderr"] == {"exact_match,strict": 0.4, "exact_match,flexible": 0.0}
    assert found["values"] == {"exact_match,strict": [1.0, 0.0], "exact_match,flexible": [1.0, 1.0]}
    assert found["higher_is_better"] == {"exact_match,strict": True, "exact_match,flexible": True}
    plain = {"samples": {"x": [{"doc_id": 0, "acc": 1.0}]}, "results": {"x": {"acc,none": 1.0}}}
    assert harness._of_task(plain, "x")["values"] == {"acc": [1.0]}


def test_lm_eval_runs_a_task_of_this_machine(
    arms: dict[str, Arm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [
        {"q": f"The letter after {c} is", "choices": [" x", " y", " zz"], "answer": i % 3}
        for i, c in enumerate("abcdef")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\ntest_split: test\n"
    choice = tmp_path / "letters.yaml"
    choice.write_text(
        "task: letters\noutput_type: multiple_choice\n" + common
        + 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n'
    )  # fmt: skip
    free = tmp_path / "free.yaml"
    free.write_text(
        "task: free\noutput_type: generate_until\n" + common
        + 'doc_to_text: "{{q}}"\ndoc_to_target: "x"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 3\n'
        + "metric_list:\n  - metric: exact_match\n"
    )  # fmt: skip
    arm = arms["bf16-prefill-int4-decode"]
    found = harness.evaluate([str(choice), str(free)], 5, 0, lambda kind: asked(arm, kind))
    by_task = {f["task"]: f for f in found}
    assert set(by_task) == {"letters", "free"} and all(f["documents"] == 5 for f in found)
    letters = by_task["letters"]
    right = []
    for row in rows[:5]:
        sums = [likelihood(arm, row["q"], c)[0] for c in row["choices"]]
        right.append(float(max(range(3), key=lambda i: sums[i]) == row["answer"]))
    assert letters["values"]["acc"] == right and letters["metrics"]["acc"] == pytest.approx(sum(right) / 5)
    assert letters["higher_is_better"]["acc"] and letters["stderr"]["acc"] >= 0
    event = harness.told(arm, letters)
    assert p.decode_event(p.encode(event)) == event
    with pytest.raises(UsageError, match="lm-eval cannot load no_such_task"):
        harness.evaluate(["no_such_task"], 1, 0, lambda kind: asked(arm, kind))
