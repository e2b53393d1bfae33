"""One number for ``tests.benchmarks.engine``: seconds that compiling the decoder layers of one policy took here.

python -m tests.benchmarks.compile MODEL_DIR POLICY
"""

from __future__ import annotations

import sys

from pdq_tui import locations
from pdq_tui.core.catalog import find_policy
from pdq_tui.core.kernels import load_kernels
from pdq_tui.core.protocol import Load
from pdq_tui.engine import native
from pdq_tui.engine.device import CpuDevice
from pdq_tui.engine.loader import load_model
from pdq_tui.engine.staged import StagedModel


def main() -> None:
    native.ensure(locations.cache_dir() / "native", lambda: None)  # as the app does; built by the caller
    device = CpuDevice()
    command = Load(model=sys.argv[1], cache_dir=str(locations.cache_dir()))
    loaded = load_model(command, device, lambda *_: None, lambda: False)
    model = StagedModel(
        loaded.skeleton, loaded.masters, device, budget_bytes=None, kernels=load_kernels("cpu"), layers="auto"
    )
    arm = model.apply(find_policy(sys.argv[2]), rows=(1, 512))
    view = arm.view("decode", 1, 1)
    assert view.runner == "inductor", view.reason
    print(view.seconds)


if __name__ == "__main__":
    main()
