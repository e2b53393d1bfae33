"""An engine that speaks the protocol and measures nothing: its requests have made-up times.

What it is to do wrong is said in FAKE_ENGINE, words separated by commas; ``word@n`` happens at the n-th request.
Written against the protocol alone, as the real one; dies with its parent in the same way.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

from pdq_tui.core.protocol import (
    ArmReady,
    ArmRefused,
    ArmSwitched,
    CancelTask,
    Coverage,
    DeviceInfo,
    Failure,
    Fallback,
    Hello,
    Interleave,
    KvInfo,
    Load,
    Message,
    ModelInfo,
    ModelReady,
    Ping,
    Pong,
    Progress,
    Request,
    RunBlocks,
    RunEnded,
    RunStarted,
    SelectArm,
    SetArm,
    SetWorkload,
    Shutdown,
    StageSample,
    StartLoop,
    Stop,
    TaskEnded,
    WeightsInfo,
    WorkloadReady,
    decode_command,
    encode,
)
from pdq_tui.core.workload import block_turns

WORDS = {w.partition("@")[0]: w.partition("@")[2] for w in os.environ.get("FAKE_ENGINE", "").split(",") if w}
#: With this file's name given the words hold for the first process only: the replacement behaves.
ONCE = os.environ.get("FAKE_ENGINE_ONCE")
REQUEST_S = float(os.environ.get("FAKE_REQUEST_S", "0.002"))


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


class Fake:
    def __init__(self) -> None:
        self.out = os.dup(1)
        os.dup2(2, 1)
        self.lock = threading.Lock()
        self.commands: queue.Queue[object] = queue.Queue()
        self.stop = threading.Event()
        self.cancel = threading.Event()
        self.arms: dict[str, SetArm] = {}
        self.loop: StartLoop | None = None
        self.requests = 0
        self.loaded = False
        self.workload = None

    def send(self, message: Message) -> None:
        self.raw(encode(message))

    def raw(self, data: bytes) -> None:
        with self.lock:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self.out, rest) :]

    def has(self, word: str) -> bool:
        return word in WORDS and not WORDS[word]

    def at_request(self, word: str) -> bool:
        return WORDS.get(word) == str(self.requests)

    def read(self) -> None:
        if self.has("deaf"):
            time.sleep(3600)
        for line in sys.stdin.buffer:
            command = decode_command(line)
            if isinstance(command, Ping):
                if not self.has("mute"):
                    self.send(Pong(id=command.id))
            elif isinstance(command, Stop):
                self.stop.set()
            elif isinstance(command, CancelTask):
                self.cancel.set()
            elif isinstance(command, Shutdown):
                if not self.has("ignore_shutdown"):
                    os._exit(0)
            else:
                self.commands.put(command)
        if not self.has("ignore_eof"):
            os._exit(0)

    def main(self) -> None:
        die_with_parent()
        if self.has("ignore_term"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if ONCE:
            if Path(ONCE).exists():
                WORDS.clear()
            else:
                Path(ONCE).touch()
        if self.has("exit_at_start"):
            print("Traceback (most recent call last):\nImportError: no libtorch here", file=sys.stderr)
            sys.exit(9)
        if self.has("wrong_version"):
            self.raw(b'{"v":99,"type":"hello","role":"engine","pid":1}\n')
            time.sleep(3600)
        self.send(Hello(role="engine", pid=os.getpid(), python=sys.version.split()[0]))
        if self.has("garbage"):
            self.raw(b"loading: 50%\r100%\n\xff\xfe\x00\n{}\n[1,2]\n" + b"x" * 2_000_000 + b"\n")
        if self.has("unknown"):
            self.raw(b'{"v":1,"type":"from_the_future","what":1}\n')
            self.raw(b'{"v":1,"type":"note","level":"info","text":"known","new_field":3}\n')
        threading.Thread(target=self.read, daemon=True).start()
        while True:
            self.handle(self.commands.get())

    def handle(self, command: object) -> None:
        if isinstance(command, Load):
            self.load(command)
        elif isinstance(command, SetArm):
            self.set_arm(command)
        elif isinstance(command, SetWorkload):
            self.workload = command.workload
            size = command.workload.prompt_tokens or 8
            self.send(
                WorkloadReady(
                    workload=command.workload,
                    prompts=2,
                    lengths=[size, size],
                    prompts_sha256="0" * 64,
                    chat_template_applied=False,
                )
            )
        elif isinstance(command, StartLoop):
            self.run_loop(command)
        elif isinstance(command, RunBlocks):
            self.run_blocks(command)

    def load(self, command: Load) -> None:
        self.send(Progress(task="load", label=command.model, done=1, total=2))
        if self.has("hang_at_load"):
            while not self.cancel.wait(0.05):
                pass
            self.cancel.clear()
            self.send(TaskEnded(task="load", label=command.model, ok=False, seconds=0.1, cancelled=True))
            return
        if self.has("oom_at_load"):
            self.oom("load")
        if command.model == "/no/such/place":
            self.send(Failure(kind="usage", message=f"no such directory: {command.model}"))
            return
        if self.has("memory_error"):
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
            bytearray(8 << 30)
        self.loaded = True
        model = ModelInfo(id=command.model, parameters=1000, layers=2, dtype="bf16")
        device = DeviceInfo(kind="cpu", name="fake", threads=1, memory_bytes=1 << 30, memory_method="rss")
        self.send(TaskEnded(task="load", label=command.model, ok=True, seconds=0.01))
        self.send(ModelReady(model=model, device=device))

    def set_arm(self, command: SetArm) -> None:
        policy = command.policy
        if not self.loaded:
            self.send(ArmRefused(arm=command.arm, policy=policy.name, reason="no model is loaded"))
            return
        if self.has("slow_pack"):
            for n in range(40):
                self.send(Progress(task="pack", label=policy.name, done=n, total=40))
                if self.cancel.wait(0.05):
                    self.cancel.clear()
                    self.send(TaskEnded(task="pack", label=policy.name, ok=False, seconds=1, cancelled=True))
                    self.send(ArmRefused(arm=command.arm, policy=policy.name, reason="cancelled"))
                    return
            self.send(TaskEnded(task="pack", label=policy.name, ok=True, seconds=2.0))
        if policy.prefill.weights == "int4" and self.has("refuse_int4"):
            self.send(
                ArmRefused(
                    arm=command.arm,
                    policy=policy.name,
                    reason="it needs 9 GiB, 1 GiB is free",
                    hint="smaller",
                )
            )
            return
        if self.has("oom_at_pack") and policy.name != "bf16":
            self.oom("pack")
        self.arms[command.arm] = command
        fallbacks = []
        if self.has("fallback") and policy.name != "bf16":
            fallbacks = [
                Fallback(stage="decode", module="layers.0.q", wanted="int8", used="bf16", reason="K % 16")
            ]
        self.send(
            ArmReady(
                arm=command.arm,
                policy=policy,
                weights=WeightsInfo(stored_bytes=1000),
                coverage={
                    s: Coverage(converted_parameters=10, total_parameters=10) for s in ("prefill", "decode")
                },
                kv=KvInfo(bytes_per_token=64),
                fallbacks=fallbacks,
            )
        )

    def oom(self, stage: str) -> None:
        self.send(
            Failure(
                kind="oom",
                message="out of memory",
                stage=stage,
                wanted_bytes=8 << 30,
                free_bytes=1 << 30,
                hint="a smaller batch",
                fatal=True,
            )
        )
        os._exit(1)

    def request(self, arm: str, kind: str, **more: object) -> None:
        self.requests += 1
        policy = self.arms[arm].policy
        if self.at_request("oom") and (self.workload is None or self.workload.batch > 1):
            self.send(
                Request(
                    request=self.requests,
                    arm=arm,
                    policy=policy.name,
                    policy_digest=policy.digest,
                    kind=kind,
                    valid=False,
                    invalid_reason="failed in decode, step 2: out of memory",
                )
            )
            self.oom("decode")
        if self.at_request("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.at_request("segv"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.at_request("exit"):
            print("RuntimeError: device-side assert triggered", file=sys.stderr)
            os._exit(3)
        if self.at_request("hang"):
            with self.lock:  # no Pong either: as an interpreter that does not run
                time.sleep(3600)
        start = time.monotonic_ns()
        time.sleep(REQUEST_S)
        self.send(StageSample(request=self.requests, arm=arm, stage="decode", tokens=3))
        step = 10.0 if policy.name.startswith("bf16") else 5.0
        step *= 1 + 0.002 * (self.requests % 5)
        steps = [step] * 3
        self.send(
            Request(
                request=self.requests,
                arm=arm,
                policy=policy.name,
                policy_digest=policy.digest,
                kind=kind,
                prompt_tokens=8,
                output_tokens=[4],
                prefill_ms=2 * step,
                ttft_ms=2 * step,
                decode_ms=sum(steps),
                tpot_ms=step,
                e2e_ms=2 * step + sum(steps),
                itl_ms=steps,
                bytes_per_step=1000,
                host_start_ns=start,
                host_end_ns=time.monotonic_ns(),
                **more,
            )
        )

    def run_loop(self, command: StartLoop) -> None:
        self.stop.clear()
        self.send(RunStarted(kind="loop", arms=command.arms, interleave=command.interleave))
        if self.has("flood"):
            for n in range(20_000):
                self.send(StageSample(request=n, arm=command.arm, stage="decode", tokens=n))
            for _ in range(200):
                self.request(command.arm, "loop")
        arm, interleave, block = command.arm, command.interleave, 0
        while not self.stop.is_set():
            while not self.commands.empty():
                change = self.commands.get()
                if isinstance(change, SelectArm):
                    arm = change.arm
                    self.send(
                        ArmSwitched(arm=arm, policy=self.arms[arm].policy.name, at_request=self.requests)
                    )
                elif isinstance(change, Interleave):
                    interleave = change.on
                else:
                    self.handle(change)
            if interleave:
                for turn in block_turns(command.arms, block, command.seed):
                    self.request(turn.arm, "loop", block=turn.block, slot=turn.slot, control=turn.control)
                block += 1
            else:
                self.request(arm, "loop")
        self.stop.clear()
        self.send(RunEnded(reason="stopped", requests=self.requests, blocks=block))

    def run_blocks(self, command: RunBlocks) -> None:
        self.stop.clear()
        began = time.monotonic()
        self.send(RunStarted(kind="blocks", arms=command.arms, interleave=True, blocks=command.blocks))
        reason, block = "done", 0
        for block in range(command.blocks):
            for turn in block_turns(command.arms, block, command.seed):
                if self.stop.is_set():
                    self.stop.clear()
                    self.send(RunEnded(reason="stopped", requests=self.requests, blocks=block))
                    return
                self.request(turn.arm, "blocks", block=turn.block, slot=turn.slot, control=turn.control)
            if command.budget_s is not None and time.monotonic() - began > command.budget_s:
                reason = "budget"
                break
        self.send(RunEnded(reason=reason, requests=self.requests, blocks=block + 1))


if __name__ == "__main__":
    Fake().main()
