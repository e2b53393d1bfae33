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
from pdq_tui.errors import PdqError

#: Seconds a probing child may take, its import of torch included.
PROBE_TIMEOUT_S: Final = 120.0


#: Before each result, among whatever libraries print.
MARK: Final = "probe: "


def probe_in_child(jobs: list[dict[str, Any]], poll: Callable[[], None]) -> list[str | None]:
    """What does not work, in order, None where it works; as far as the child came. ``poll`` is called all the while; what
    it raises ends the child."""
    _, lines = run_module(
        "pdq_tui.engine.probe",
        [],
        lambda _: poll(),
        given=json.dumps(jobs),
        timeout_s=PROBE_TIMEOUT_S,
    )
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


def _probe(job: dict[str, Any]) -> str | None:
    """Run one kernel on random numbers against the weights in float64; None, or what is wrong."""
    import torch

    from pdq_tui.core.formats import Format
    from pdq_tui.engine import kv_formats, kv_native, native
    from pdq_tui.engine.formats.ops import OPS
    from pdq_tui.engine.formats.pack import pack_all
    from pdq_tui.engine.formats.packed import DTYPE_NAMES, Spec
    from pdq_tui.engine.formats.unpack import Scratch

    dtype = {name: torch_dtype for torch_dtype, name in DTYPE_NAMES.items()}[job["dtype"]]
    if job["native"]:
        native.load(Path(job["native"]))
    if "cache" in job:
        return kv_native.wrong_with(kv_formats.named(job["cache"], job["N"], job["K"], dtype), dtype)
    N, K = job["N"], job["K"]
    torch.manual_seed(0)
    master = torch.randn(N, K).to(dtype)
    # A dense candidate multiplies the model's own dtype.
    fmt = (
        Format()
        if job["weights"] == "dense"
        else Format(job["weights"], job["activations"], job["group_size"])
    )
    k = K + (-K % fmt.group_size if fmt.group_size else 0)
    device = torch.device(job["device"])
    packed = pack_all(Spec(fmt, job["layout"], N, K, k, dtype), master, device, lambda: False)
    layer = OPS[job["op"]](packed, None, Scratch())
    with torch.inference_mode():
        for rows in (1, 5, 17):
            x = torch.randn(rows, K).to(dtype)
            wanted = x.double() @ master.double().t()
            got = layer(x.to(device)).double().cpu()
            error = float((got - wanted).norm() / wanted.norm())
            if not error < 0.2:  # 4 bits by plain rounding are within 0.15; NaN compares false
                return f"with {rows} rows its result is off by {error:.2g}"
    return None


def main() -> None:
    """The child: the jobs on stdin, a word for each on stdout."""
    import torch

    from pdq_tui.engine import faults

    torch.set_num_threads(1)
    for job in json.loads(sys.stdin.read()):
        try:
            why = _probe(job)
        except (
            PdqError,
            RuntimeError,
            OSError,
            ImportError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            why = faults.first_line(error)
        sys.stdout.write(f"\n{MARK}{json.dumps(why)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main()
