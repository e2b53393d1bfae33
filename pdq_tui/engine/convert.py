"""A GGUF file, dequantized once into a safetensors directory in the cache, in a process of its own.

transformers cannot be stopped in the middle of this (5 to 20 s for the demo model), a child can; and its memory does
not count as ours. Started as ``python -m pdq_tui.engine.convert PARENT GGUF TARGET``; says its phases on stdout.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdq_tui.engine.cancel import POLL_S, check
from pdq_tui.engine.process import die_with_parent, run_module
from pdq_tui.errors import PdqError, UsageError

Progress = Callable[[float, float | None, str], None]

PHASES = ("starting", "reading and dequantizing", "writing safetensors", "done")


def converted(gguf: Path, target: Path, progress: Progress, cancelled: Callable[[], bool]) -> Path:
    """``target`` holding the dequantized copy of ``gguf``, made now unless it is there. Waits for another process
    that is making it. Raises UsageError for a file that is no GGUF or cannot be read, PdqError, Cancelled."""
    check_gguf(gguf)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock"), cancelled):
        if not is_converted(target):
            _convert(gguf, target, progress, cancelled)
    return target


def is_converted(target: Path) -> bool:
    """The directory appears by one rename, so it is complete or not there."""
    return (target / "config.json").is_file()


def check_gguf(gguf: Path) -> None:
    if not gguf.is_file():
        raise UsageError(f"no such file: {gguf}")
    with gguf.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise UsageError(f"{gguf} is no GGUF file (it does not begin with GGUF)", "download it again")


def cache_name(gguf: Path) -> str:
    """A directory name for the converted copy: changes when the file does."""
    stat = gguf.stat()
    key = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return f"{gguf.stem}-{hashlib.sha256(key.encode('utf-8', 'replace')).hexdigest()[:12]}"


@contextmanager
def _locked(path: Path, cancelled: Callable[[], bool]) -> Iterator[None]:
    """An advisory lock that a killed process cannot leave behind."""
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check(cancelled)
                time.sleep(POLL_S)
        yield


def _convert(gguf: Path, target: Path, progress: Progress, cancelled: Callable[[], bool]) -> None:
    for left in target.parent.glob(f"{target.name}.*.part"):  # of one that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    working = target.with_name(f"{target.name}.{os.getpid()}.part")

    def poll(words: list[str]) -> None:
        check(cancelled)
        phase = PHASES.index(words[-1]) if words and words[-1] in PHASES else 0
        progress(phase, len(PHASES) - 1, f"{gguf.name}: {PHASES[phase]}")

    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }
    try:
        code, words = run_module(
            "pdq_tui.engine.convert", [str(gguf), str(working)], poll, environment=environment
        )
        if code != 0:
            said = next((w[7:] for w in reversed(words) if w.startswith("error: ")), None)
            raise PdqError(f"{gguf.name} cannot be dequantized: {said or f'the converter ended with {code}'}")
        working.rename(target)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def main(gguf: Path, target: Path) -> int:
    """The child: dequantize ``gguf`` to bf16 and save model and tokenizer in ``target``. Returns the exit code."""
    # Libraries print; the parent reads only what is written to this copy of stdout.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(PHASES[0], file=out)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from pdq_tui.engine import faults

    print(PHASES[1], file=out)
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError, RuntimeError) as error:
        print(f"error: {faults.first_line(error)}", file=out)
        return 1
    print(PHASES[2], file=out)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(PHASES[3], file=out)
    return 0


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.exit(main(Path(sys.argv[2]), Path(sys.argv[3])))
