"""The script for a machine with a GPU, on a machine without one: it skips with reasons, and what a CPU can is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdq_tui.core.kernels import load_kernels
from pdq_tui.engine.device import CpuDevice
from tests.gpu import check as gpu_check


def test_without_a_gpu_it_skips_with_the_reason_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 0
    body = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert [c["status"] for c in body["checks"]] == ["skip"]
    assert "no CUDA device" in body["checks"][0]["reason"]
    assert "1 skip" in capsys.readouterr().out


@pytest.fixture
def check() -> gpu_check.Check:
    import time

    return gpu_check.Check(CpuDevice(1), time.monotonic() + 100, small=True)


def test_every_kernel_of_this_cpu_is_right_or_skipped_with_a_reason(check: gpu_check.Check) -> None:
    gpu_check.linears(check)
    assert {c["status"] for c in check.found} <= {"ok", "skip"}, check.found
    assert all(c["reason"] for c in check.found if c["status"] == "skip")
    seen = {c["name"].split()[0] for c in check.found if c["part"] == "linear"}
    assert seen == {c.name for c in load_kernels("cpu").candidates}
    assert sum(c["status"] == "ok" for c in check.found) > 20


@pytest.mark.parametrize("wrong", ["values", "nan", "neighbours", "raises"])
def test_a_wrong_kernel_fails(check: gpu_check.Check, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = next(c for c in load_kernels("cpu").candidates if c.name == "linear")
    layer, exact = gpu_check.layer_of(check, candidate, 64)

    def spoiled(x: torch.Tensor) -> torch.Tensor:
        out: Any = layer(x)
        if wrong == "values":
            out[:, 0] *= 3
        elif wrong == "nan":
            out[-1, -1] = float("nan")
        elif wrong == "neighbours" and x.shape[0] == 1:
            out = out * 1.05
        elif wrong == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        return out

    gpu_check.one_linear(check, candidate, spoiled, exact, 8, 64)  # type: ignore[arg-type]
    assert [c["status"] for c in check.found] == ["fail"]
    assert check.found[0]["reason"]


def test_what_breaks_off_takes_no_other_part_with_it(check: gpu_check.Check) -> None:
    def broken() -> None:
        raise RuntimeError("driver gone\nmore")

    assert gpu_check.guarded(check, "stages", broken) is None
    assert check.found[0] == {
        "part": "stages",
        "name": "stages",
        "status": "skip",
        "reason": "broke off: driver gone",
    }
