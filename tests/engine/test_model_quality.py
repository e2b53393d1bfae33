"""Divergence from the base along both paths, on tiny models in float32, against whole logits computed another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_tokenizer
from torch.nn import functional as F

from pdq_tui.core import corpus
from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.engine import quality
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.runner import Arm
from pdq_tui.engine.staged import StagedModel
from pdq_tui.engine.windows import digest, windows
from pdq_tui.errors import UsageError

MODEL = p.ModelInfo(id="tiny", vocab=128, max_positions=256)
POLICIES = ("bf16", "int8", "int4", "int4-prefill-bf16-decode", "bf16-prefill-int4-decode")


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


def score(
    arms: dict[str, Arm], arm: str, path: str, *, base: str = "bf16", **more: object
) -> tuple[list[p.Scored], list[torch.Tensor]]:
    command = p.Score(arms=[arm], base=base, path=path, windows=3, prompt_tokens=24, **more)  # type: ignore[arg-type]
    cut = windows(command, tiny_tokenizer(), MODEL)
    judge = quality.Judge(CpuDevice(), arms[base], [arms[arm]], command)
    return list(judge.score(cut)), cut


def dense_logits(arm: Arm, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position [T, V], from single prefills of every length."""
    return torch.stack(
        [arm.staged.start(1, n, None).prefill(ids[None, :n])[0].clone() for n in range(1, len(ids) + 1)]
    )


def kld(base: torch.Tensor, arm: torch.Tensor) -> list[float]:
    return (
        F.kl_div(arm.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="none")
        .sum(-1)
        .tolist()
    )


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_prefill_path_agrees_with_whole_logits_of_single_passes(arms: dict[str, Arm], name: str) -> None:
    for scored, ids in zip(*score(arms, name, "prefill"), strict=True):
        base, ours = dense_logits(arms["bf16"], ids), dense_logits(arms[name], ids)
        assert scored.first == 12 and len(scored.kld) == 11
        assert scored.kld == pytest.approx(kld(base[12:-1], ours[12:-1]), rel=1e-2, abs=1e-6)
        assert scored.same_top1 == (base[12:-1].argmax(-1) == ours[12:-1].argmax(-1)).tolist()
        wanted = F.cross_entropy(ours[12:-1], ids[13:], reduction="none").tolist()
        assert scored.nll == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        assert max(scored.kld) > 0


def test_the_base_against_itself_is_zero_on_both_paths(arms: dict[str, Arm]) -> None:
    for path in ("prefill", "decode"):
        for scored in score(arms, "bf16", path, new_tokens=8)[0]:
            assert scored.kld == [0.0] * len(scored.kld) and all(scored.same_top1)
            assert scored.nll == scored.base_nll


@pytest.mark.parametrize("forced", ["text", "sample"])
def test_the_decode_path_tells_the_stages_apart(arms: dict[str, Arm], forced: str) -> None:
    """A cheap decode leaves the prompt's own logits alone; a cheap prefill does not."""
    by_name = {
        n: score(arms, n, "decode", new_tokens=8, forced=forced)[0]
        for n in POLICIES
        if n not in ("bf16", "int8")
    }
    for scored in by_name["bf16-prefill-int4-decode"]:
        assert scored.first == 0 and len(scored.kld) == 8
        assert scored.kld[0] == 0.0 and all(v is not None and v > 0 for v in scored.kld[1:])
    for uniform, staged in zip(by_name["int4"], by_name["int4-prefill-bf16-decode"], strict=True):
        assert staged.kld[0] == uniform.kld[0] and staged.kld[0]
        assert staged.kld[1:] != uniform.kld[1:]


def test_forced_text_is_scored_as_one_pass_would(arms: dict[str, Arm]) -> None:
    for scored, ids in zip(*score(arms, "int4", "decode", new_tokens=8), strict=True):
        base, ours = dense_logits(arms["bf16"], ids), dense_logits(arms["int4"], ids)
        assert scored.kld == pytest.approx(kld(base[23:-1], ours[23:-1]), rel=1e-2, abs=1e-6)


def test_a_sample_is_the_bases_own_and_the_same_again(arms: dict[str, Arm]) -> None:
    one, again = (score(arms, n, "decode", new_tokens=8, forced="sample")[0] for n in ("int8", "int4"))
    assert [s.base_nll for s in one] == [s.base_nll for s in again]
    other = score(arms, "int8", "decode", new_tokens=8, forced="sample", seed=1)[0]
    assert [s.base_nll for s in one] != [s.base_nll for s in other]


def test_the_base_scores_a_window_once_for_all_arms(
    arms: dict[str, Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = quality.Judge._forced

    def counted(self: quality.Judge, arm: Arm, prompt: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        asked.append(arm.label)
        return real(self, arm, prompt, forced)

    monkeypatch.setattr(quality.Judge, "_forced", counted)
    command = p.Score(
        arms=["int8", "int4"], base="bf16", path="decode", windows=2, prompt_tokens=24, new_tokens=4
    )
    cut = windows(command, tiny_tokenizer(), MODEL)
    judge = quality.Judge(CpuDevice(), arms["bf16"], [arms["int8"], arms["int4"]], command)
    both = list(judge.score(cut))
    assert asked == ["bf16", "int8", "int4"] * 2
    assert [(s.window, s.arm) for s in both] == [(0, "int8"), (0, "int4"), (1, "int8"), (1, "int4")]
    alone = score(arms, "int4", "decode", new_tokens=4)[0][:2]
    assert [s.kld for s in both if s.arm == "int4"] == [s.kld for s in alone]


@pytest.mark.parametrize("forced", ["text", "sample"])
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_windows_that_run_together_score_as_they_do_alone(
    arms: dict[str, Arm], path: str, forced: str
) -> None:
    """Three windows in batches of two: the last group is filled up, and that shows nowhere."""
    more = {"new_tokens": 6, "forced": forced}
    alone, together = (score(arms, "int4", path, batch=n, **more)[0] for n in (1, 2))
    assert [s.window for s in together] == [0, 1, 2]
    for one, other in zip(alone, together, strict=True):
        assert other.kld == pytest.approx(one.kld, rel=2e-2, abs=1e-6) and max(other.kld) > 0
        assert other.base_nll == pytest.approx(one.base_nll, rel=1e-3, abs=1e-4)


def test_logits_that_are_not_finite_are_missing_values(
    arms: dict[str, Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = quality.Judge._forced

    def broken(self: quality.Judge, arm: Arm, prompt: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        logits = real(self, arm, prompt, forced)
        if arm.label == "int4":
            logits[:, 5] = float("nan")
        return logits

    monkeypatch.setattr(quality.Judge, "_forced", broken)
    for scored in score(arms, "int4", "decode", new_tokens=8)[0]:
        assert [i for i, v in enumerate(scored.kld) if v is None] == [5]
        assert p.decode_event(p.encode(scored)).kld == scored.kld


def test_tokens_that_the_base_rules_out_add_nothing() -> None:
    values = quality._Values()
    base = torch.tensor([[0.0, 1.0, float("-inf")]])
    values.add(base, torch.tensor([[0.0, 1.0, float("-inf")]]), torch.tensor([1]))
    values.add(base, torch.tensor([[0.0, float("-inf"), 1.0]]), torch.tensor([1]))
    assert values.kld[0] == 0.0 and values.kld[1] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "both"},
        {"path": "decode", "new_tokens": 1},
        {"windows": 100_000},
        {"prompt_tokens": 256},
        {"text": "all"},
        {"skip": -1},
        {"forced": "greedy"},
        {"arms": []},
        {"batch": 0},
    ],
)
def test_what_cannot_be_scored_is_refused(changes: dict[str, object]) -> None:
    fields = {"arms": ["A"], "base": "B", "path": "prefill", "windows": 2, "prompt_tokens": 24} | changes
    with pytest.raises(UsageError):
        windows(p.Score(**fields), tiny_tokenizer(), MODEL)  # type: ignore[arg-type]


def of(text: str, tokenizer: Any = None, **more: Any) -> list[torch.Tensor]:
    fields = {
        "arms": ["A"],
        "base": "B",
        "path": "prefill",
        "windows": 4,
        "prompt_tokens": 24,
        "text": text,
    } | more
    return windows(p.Score(**fields), tokenizer or tiny_tokenizer(), MODEL)


def test_what_selects_and_what_confirms_share_no_text() -> None:
    halves = [corpus.documents(half) for half in corpus.HALVES]
    assert all(sum(map(len, half)) > 100_000 for half in halves)
    parts = [{" ".join(part.split()) for text in half for part in text.split("\n\n")} for half in halves]
    assert not parts[0] & parts[1], "topics quote each other"
    for half, documents in zip(corpus.HALVES, halves, strict=True):
        for path, length in (("prefill", 64), ("decode", 96)):
            for ids in of(half, path=path, prompt_tokens=length, new_tokens=16):
                lines = [
                    line for line in tiny_tokenizer().decode(ids).split("\n")[1:-1] if "<unk>" not in line
                ]
                assert all(any(line in text for text in documents) for line in lines)


def test_windows_never_overlap_and_more_of_them_begin_with_the_same() -> None:
    four, eight = of("selection"), of("selection", windows=8)
    assert [digest(w) for w in eight[:4]] == [digest(w) for w in four]
    assert [digest(w) for w in of("selection", skip=4)] == [digest(w) for w in eight[4:]]
    assert len({digest(w) for w in of("selection", windows=500)}) > 450
    assert [digest(w) for w in of("selection", seed=1)] != [digest(w) for w in four]


def test_each_window_begins_as_a_prompt_does() -> None:
    from tokenizers.processors import TemplateProcessing

    with_bos = tiny_tokenizer()
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    for plain, ids in zip(of("selection"), of("selection", tokenizer=with_bos), strict=True):
        assert len(ids) == len(plain) == 24 and ids[0] == 1 != plain[0]


def test_a_result_names_the_text_that_it_is_of(arms: dict[str, Arm]) -> None:
    scored, cut = score(arms, "int4", "prefill")
    assert [s.text_sha256 for s in scored] == [digest(w) for w in cut] and len(
        {s.text_sha256 for s in scored}
    ) == 3
