"""Running kernels that may end the process, in a child process: ``python -m pdq_tui.engine.probe PARENT``.

Nothing that takes long is imported before the child has asked to die with its parent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pdq_tui.engine.process import die_with_parent, run_module

#: Seconds a probing child may take, its import of torch included.
PROBE_TIMEOUT_S: Final = 120.0


def probe_in_child(jobs: list[dict[str, Any]], poll: Callable[[], None]) -> list[bool]:
    """Results in order, as far as the child came. ``poll`` is called all the while; what it raises ends the child."""
    _, lines = run_module(
        "pdq_tui.engine.probe",
        [],
        lambda _: poll(),
        given=json.dumps(jobs),
        timeout_s=PROBE_TIMEOUT_S,
    )
    return [line == "ok" for line in lines if line in ("ok", "wrong")]


def _probe(job: dict[str, Any]) -> bool:
    """Run one kernel on random numbers against its dequantized reference in float64."""
    import torch

    from pdq_tui.core.formats import Format
    from pdq_tui.engine import kv_formats, kv_native, native
    from pdq_tui.engine.formats.native import OPS
    from pdq_tui.engine.formats.pack import pack
    from pdq_tui.engine.formats.packed import DTYPE_NAMES, Spec
    from pdq_tui.engine.formats.unpack import Scratch

    dtype = {name: torch_dtype for torch_dtype, name in DTYPE_NAMES.items()}[job["dtype"]]
    if job["native"]:
        native.load(Path(job["native"]))
    if "cache" in job:
        return kv_native.right(kv_formats.named(job["cache"], job["N"], job["K"], dtype), dtype)
    N, K = job["N"], job["K"]
    torch.manual_seed(0)
    master = torch.randn(N, K).to(dtype)
    # A dense candidate multiplies the model's own dtype.
    fmt = (
        Format()
        if job["weights"] == "dense"
        else Format(job["weights"], job["activations"], job["group_size"])
    )
    spec = Spec(fmt, job["layout"], N, K, K, dtype)
    packed = pack(spec, master, torch.device("cpu"), lambda: False)
    layer = OPS[job["op"]](packed, None, Scratch())
    with torch.inference_mode():
        for rows in (1, 5, 17):
            x = torch.randn(rows, K).to(dtype)
            wanted = x.double() @ master.double().t()
            error = (layer(x).double() - wanted).norm() / wanted.norm()
            if not bool(error < 0.2):  # 4 bits by plain rounding are within 0.1; NaN compares false
                return False
    return True


def main() -> None:
    """The child: the jobs on stdin, a word for each on stdout."""
    import torch

    torch.set_num_threads(1)
    for job in json.loads(sys.stdin.read()):
        sys.stdout.write("ok\n" if _probe(job) else "wrong\n")
        sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main()
