"""A headless Chromium over its debugging pipe (file descriptors 3 and 4, messages that end in a zero byte): no driver,
no port, no package."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
_PATIENCE_S = 120.0


class Browser:
    """One page. ``requests``: every URL that was asked for. ``console``: errors and warnings of the page."""

    def __init__(self, home: Path) -> None:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.console: list[str] = []
        self._numbers = itertools.count(1)
        self._rest = b""
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        argv = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            f"--user-data-dir={home}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # bash puts the pipe's ends where Chromium looks for them.
        words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *argv]
        with (home / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen(
                words, pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        target = next(t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = None
        found = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int = 900, *, phone: bool = False) -> None:
        self.requests.clear()
        self.console.clear()
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self._loaded = False
        self._ask("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _PATIENCE_S
        while not self._loaded:
            self._take(end)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; an exception there is one here."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        import base64

        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self._ask("Browser.close")
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)

    # -- messages

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        body: dict[str, Any] = {"id": number, "method": method, "params": params}
        if getattr(self, "_session", None):
            body["sessionId"] = self._session
        os.write(self._out, json.dumps(body).encode() + b"\0")
        end = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._take(end)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _take(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert self.process.poll() is None, "Chromium ended"
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._rest += os.read(self._in, 1 << 16)
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(str(params["args"]))
        elif method == "Page.loadEventFired":
            self._loaded = True
