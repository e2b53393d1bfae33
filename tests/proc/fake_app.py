"""A parent to kill: starts a supervisor with the fake workers, prints the engine's and the sensors' pids, and waits."""

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
    supervisor = Supervisor(run, lambda event: None, engine_argv=ENGINE, sensors_argv=SENSORS)
    supervisor.start()
    while len(supervisor.worker_pids) < 2:
        time.sleep(0.01)
    supervisor.send(Load(model="demo"))
    time.sleep(0.3)
    print(supervisor.worker_pids["engine"], supervisor.worker_pids["sensors"], flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    supervisor.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
