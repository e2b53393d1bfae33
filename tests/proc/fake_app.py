"""A parent to kill: starts a supervisor, prints the engine's and the sensors' pids, and waits.

Arguments: where runs go, and a model for the real workers; without a model the fakes are taken.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

from proc_gear import ENGINE, SENSORS

from pdq_tui.core.protocol import Load
from pdq_tui.host.runs import new_run
from pdq_tui.host.supervisor import Supervisor


def main() -> None:
    run = new_run(Path(sys.argv[1]))
    model = sys.argv[2] if len(sys.argv) > 2 else None
    fakes = {} if model else {"engine_argv": ENGINE, "sensors_argv": SENSORS}
    supervisor = Supervisor(run, lambda event: None, **fakes)
    supervisor.start()
    while len(supervisor.worker_pids) < 2:
        time.sleep(0.01)
    supervisor.send(Load(model=model or "demo"))
    time.sleep(0.3)
    with contextlib.suppress(KeyboardInterrupt):  # it may come as soon as the line is out
        print(supervisor.worker_pids["engine"], supervisor.worker_pids["sensors"], flush=True)
        signal.pause()
    supervisor.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
