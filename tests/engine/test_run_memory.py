"""Memory of a policy alone: what others left behind is not charged to it."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from conftest import llama_config, save_tiny
from test_run_worker import Worker, load

from pdq_tui.core import protocol as p
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.workload import Workload
from pdq_tui.engine import memory
from pdq_tui.engine import session as session_module
from pdq_tui.engine.channel import Inbox
from pdq_tui.engine.looks import Looks
from pdq_tui.engine.session import Session

MIB = 1 << 20


def resident(path: Path) -> int:
    """Bytes of this file's mappings that lie in memory, of this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_T12_pages_of_a_file_that_was_only_read_are_given_back(tmp_path: Path) -> None:
    path = tmp_path / "weights with a space.bin"
    content = os.urandom(8 * MIB)
    path.write_bytes(content)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert bytes(mapped) == content
        assert resident(path) == 8 * MIB
        memory.give_back([path])
        assert resident(path) < MIB
        assert bytes(mapped) == content


def test_T12_a_mapping_that_was_written_keeps_its_changes(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[5] = 7
        memory.give_back([path])
        assert mapped[5] == 7


def test_the_peak_of_loading_holds_no_probes(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What measures the device needs hundreds of megabytes; the model here has none."""
    probed = 256 * MIB

    def peaks(*_: object) -> Looks:
        torch.ones(probed // 4)
        return Looks()

    monkeypatch.setattr(session_module, "peaks", peaks)
    sent: list[p.Message] = []
    before = memory.rss_bytes()
    Session(sent.append, Inbox(sent.append)).handle(1, load(tiny_llama, tmp_path))
    gc.unfreeze()
    (ready,) = [e for e in sent if isinstance(e, p.ModelReady)]
    assert ready.load_peak_bytes is not None
    assert before // 2 < ready.load_peak_bytes < before + probed


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for its weights to stand out in a resident set: 75 MB in bf16."""
    config = llama_config(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=9, tie_word_embeddings=False
    )
    return save_tiny(config, tmp_path_factory.mktemp("big"), dtype=torch.bfloat16)


def test_T12_one_policy_under_two_labels_takes_the_same_memory_and_fewer_bytes_take_less(
    big: Path, tmp_path: Path
) -> None:
    worker = Worker(tmp_path / "stderr.log")
    try:
        worker.send(
            load(big, tmp_path),
            p.SetWorkload(
                workload=Workload(prompt_tokens=16, output_tokens=8, batch=1, prompts="short", distinct=1)
            ),
            *(
                p.SetArm(arm=arm, policy=find_policy(name))
                for arm, name in (("dense", "bf16"), ("int4", "int4"), ("again", "bf16"))
            ),
            p.RunBlocks(arms=["dense", "int4", "again"], blocks=1, min_seconds=0.0, warmup_steps=2),
        )
        worker.until(p.RunEnded)
        weights = {e.arm: e.weights.stored_bytes for e in worker.events if isinstance(e, p.ArmReady)}
        solo = {e.arm: e.steady_bytes for e in worker.events if isinstance(e, p.Request) and e.kind == "solo"}
    finally:
        worker.close()
    saved = weights["dense"] - weights["int4"]
    assert saved > 40 * MIB
    assert abs(solo["dense"] - solo["again"]) < 0.1 * saved
    assert 0.7 * saved < solo["dense"] - solo["int4"] < 1.3 * saved
