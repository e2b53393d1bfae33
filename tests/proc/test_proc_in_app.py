"""S02 where it happens: workers started, restarted and ended from key presses inside a running Textual app."""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar

from proc_gear import ENGINE, SENSORS, alive
from textual.app import App
from textual.binding import BindingType

from pdq_tui.core.catalog import find_policy
from pdq_tui.core.protocol import Load
from pdq_tui.core.workload import Workload
from pdq_tui.host.live import LiveSession
from pdq_tui.host.runs import new_run


class Small(App[None]):
    BINDINGS: ClassVar[list[BindingType]] = [("s", "begin"), ("R", "again"), ("c", "end")]

    def action_begin(self) -> None:
        self.live = LiveSession(new_run(), engine_argv=ENGINE, sensors_argv=SENSORS)
        self.live.start(Load(model="demo"), find_policy("int8"), find_policy("bf16"), Workload(), loop=True)

    def action_again(self) -> None:
        self.live.restart_engine()

    def action_end(self) -> None:
        self.live.close()


async def test_S02_start_stop_restart_from_keys_inside_the_app() -> None:
    app = Small()
    async with app.run_test() as pilot:
        assert sys.stderr.fileno() == -1  # what makes multiprocessing raise here
        for _ in range(3):
            await pilot.press("s")
            for restarts in (0, 1):
                async with asyncio.timeout(20):
                    while True:
                        view = app.live.view()
                        if view.running and view.engine.restarts == restarts and view.arms["A"].requests > 2:
                            break
                        await asyncio.sleep(0.02)
                if not restarts:
                    await pilot.press("R")
            pids = list(app.live.supervisor.worker_pids.values())
            assert len(pids) == 2
            await pilot.press("c")
            assert not any(alive(pid) for pid in pids)
