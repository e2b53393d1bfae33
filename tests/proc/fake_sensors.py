"""Sensors that report a made-up CPU; ``FAKE_SENSORS=die`` ends at once, ``hang`` says nothing and never ends."""

from __future__ import annotations

import os
import sys
import threading
import time

from fake_engine import die_with_parent

from pdq_tui.core.protocol import (
    CpuSample,
    Hello,
    SensorSample,
    SensorState,
    Shutdown,
    Watch,
    decode_command,
    encode,
)


def main() -> None:
    die_with_parent()
    mode = os.environ.get("FAKE_SENSORS", "")
    if mode == "die":
        sys.exit(1)
    out = sys.stdout.buffer
    out.write(encode(Hello(role="sensors", pid=os.getpid())))
    out.write(encode(SensorState(nvml="absent", text="no NVIDIA driver")))
    out.flush()
    if mode == "hang":
        time.sleep(3600)
    watched: list[Watch] = []

    def read() -> None:
        for line in sys.stdin.buffer:
            command = decode_command(line)
            if isinstance(command, Watch):
                watched.append(command)
            if isinstance(command, Shutdown):
                os._exit(0)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        time.sleep(0.05)
        rss = watched[-1].pid if watched else None
        out.write(encode(SensorSample(cpu=CpuSample(load=0.5, engine_rss_bytes=rss))))
        out.flush()


if __name__ == "__main__":
    main()
