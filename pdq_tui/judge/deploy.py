"""What a policy means for a serving engine: checkpoints, commands, steps in and back, and what it cannot express.

From the servers' tables (``core.servers``) and a policy alone; nothing is started here. A staged policy becomes two
pools, prefill and decode, since no server holds two precisions of one model in a process by a setting.
"""

from __future__ import annotations

import fnmatch
import json
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from string import Template
from typing import Final

import msgspec

from pdq_tui.core.kv import KvGeometry
from pdq_tui.core.policy import STAGES, Policy, Stage
from pdq_tui.core.servers import KvWay, Maker, NoKv, NoWay, Server, Text, Way

#: Nominal line rates, for those who named no link of their own.
USUAL_LINKS: Final = {"100 Gbit/s": 12.5, "200 Gbit/s": 25.0, "400 Gbit/s": 50.0}
#: A server's dense cache is in the model's dtype, whatever its width.
_DENSE: Final = 16
_HEAD: Final = "lm_head"
#: Of a single server.
PORT: Final = "8000"


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """A model's KV cache in its own dtype. ``windows``: by layer as ``KvGeometry`` has them; None where it is not known
    which layers slide, and the bytes are at most these."""

    bytes_per_token: int
    dtype_bytes: int
    windows: tuple[int | None, ...] | None = None

    def bytes(self, tokens: int, bits: int) -> int:
        """Of one sequence of ``tokens``, each number in ``bits`` (16: the model's dtype)."""
        positions = float(tokens)
        if self.windows:
            positions = sum(min(tokens, w or tokens) for w in self.windows) / len(self.windows)
        share = 1.0 if bits == _DENSE else bits / (8 * self.dtype_bytes)
        return round(self.bytes_per_token * share * positions)


def cache_of(geometry: KvGeometry) -> Cache:
    dense = 2 * geometry.kv_heads * geometry.head_dim * geometry.dtype_bytes * geometry.layers
    return Cache(bytes_per_token=dense, dtype_bytes=geometry.dtype_bytes, windows=geometry.windows)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What crosses from the prefill pool to the decode pool for one pass of ``batch`` prompts, and how long it takes at
    ``gbps`` GB/s (10⁹ bytes) by its bytes alone; ``ms`` None without a link's rate."""

    tokens: int
    batch: int
    bytes: int
    gbps: float | None = None
    ms: float | None = None


def link_worth(link: Link, gain_ms: float) -> float | None:
    """The rate in GB/s at which the link alone takes ``gain_ms``, what a pass gains; None where it gains nothing."""
    return link.bytes / 1e9 / (gain_ms / 1e3) if gain_ms > 0 else None


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """``role``: "one", "prefill" or "decode". ``scheme``: the weights in the server's own words."""

    role: str
    weights: str
    scheme: str
    flags: list[str]
    command: str


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """``cannot``: what the server cannot express, by name; where that is weights there are no ``pools``, where it is the KV
    cache alone they are the nearest. ``differs``: what it does otherwise than was measured. ``steps`` and ``rollback``
    are empty where there is nothing to deploy. ``link`` None with ``link_reason``."""

    server: str
    title: str
    version: str
    checked: str
    sources: list[str]
    policy: str
    cannot: list[str]
    differs: list[str]
    needs: list[str]
    packages: list[str]
    files: list[Text]
    make: list[str]
    pools: list[Pool]
    router: str | None
    kv_dtype: str | None
    shared_kv: str | None
    steps: list[str]
    rollback: list[str]
    code_change: str | None
    link: Link | None
    link_reason: str | None


def is_staged(policy: Policy) -> bool:
    """Whether its stages have weights of their own: by their formats, or by a [[keep]] of one stage."""
    return policy.staged or any(set(keep.stages) != set(STAGES) for keep in policy.keep)


def deployment(
    server: Server,
    policy: Policy,
    model: str,
    *,
    tokens: int,
    batch: int = 1,
    cache: Cache | None = None,
    cache_reason: str = "the model's shapes are not known",
    gbps: float | None = None,
) -> Deployment:
    """``model``: as it is named on the server's command line. ``tokens``: of a prompt."""
    plan = _Plan(server, policy, model)
    staged = plan.staged
    kv = plan.kv()
    stages: Sequence[Stage] = STAGES if staged else ("decode",)
    weights = [plan.stage(stage) for stage in stages]
    ready = all(weights)
    pools = plan.pools([w for w in weights if w], kv) if ready else []
    files = [*plan.made_files, *(plan.server_files(kv, tokens) if ready else [])]
    link, reason = None, cache_reason
    if not staged:
        reason = "one server: nothing crosses a link"
    elif cache is not None and kv is not None:
        size = batch * cache.bytes(tokens, kv.bits)
        ms = None if gbps is None else size / (gbps * 1e9) * 1e3
        link, reason = Link(tokens=tokens, batch=batch, bytes=size, gbps=gbps, ms=ms), ""
    table = server.pools if staged else server.one
    return Deployment(
        server=server.name,
        title=server.title,
        version=server.version,
        checked=server.checked,
        sources=list(server.sources),
        policy=policy.name,
        cannot=plan.cannot,
        differs=[*plan.differs, *(server.pools.differs if staged else ())],
        needs=plan.needs,
        packages=list(table.packages),
        files=files if ready else [],
        make=plan.make if ready else [],
        pools=pools,
        router=server.pools.router.strip() if staged and ready else None,
        kv_dtype=kv.value if kv else None,
        shared_kv=server.kv.shared if staged else None,
        steps=plan.steps(files) if ready else [],
        rollback=[plan.filled(step) for step in table.rollback] if ready else [],
        code_change=server.in_one_process.change if staged else None,
        link=link,
        link_reason=reason or None,
    )


class _Stage(msgspec.Struct, frozen=True, kw_only=True):
    stage: Stage
    weights: str
    scheme: str
    flags: list[str]


class _Plan:
    """One policy on one server, put together stage by stage; what does not fit is told in ``cannot``."""

    def __init__(self, server: Server, policy: Policy, model: str) -> None:
        self.server, self.policy, self.model = server, policy, model
        self.name = PurePath(model).name
        self.staged = is_staged(policy)
        self.cannot: list[str] = []
        self.differs: list[str] = []
        self.needs: list[str] = []
        self.make: list[str] = []
        self.made_files: list[Text] = []
        self._made: dict[str, str] = {}
        if self.staged and policy.storage in ("shared", "nested"):
            self.differs.append(
                f"{policy.storage} storage: both stages read one set of bytes here, two pools hold a copy each"
            )
        if policy.storage == "transient":
            self.differs.append(
                "transient: how the prompt multiplies 4-bit weights is the server's own choice of kernel"
            )

    # -- the cache ----------------------------------------------------------------------------------------------------------

    def kv(self) -> KvWay | None:
        """What the whole deployment's cache is in: decode's dtype where the server has it and, of two pools, can move it;
        else prefill's, else the model's."""
        kv, ways = self.policy.kv, self.server.kv
        if kv.prefill != kv.decode:
            where = ways.shared if self.staged else "a server has one cache dtype for both stages"
            self.cannot.append(f"KV cache {kv.label}: {where}")
        if kv.keys == "channel":
            self.cannot.append(f"KV keys by channel: {ways.other.channel}")
        if kv.group_size:
            self.cannot.append(f"KV groups of {kv.group_size}: {ways.other.groups}")
        for dtype in dict.fromkeys((kv.decode, kv.prefill, "bf16")):
            way = self.server.kv_way(dtype)
            if isinstance(way, NoKv):
                self.cannot.append(f"KV cache in {dtype}: {way.why}")
            elif self.staged and way.pools_why:
                self.cannot.append(f"KV cache in {dtype}: {way.pools_why}")
            else:
                if way.differs:
                    self.differs.append(f"KV cache: {way.differs}")
                return way
        return None

    # -- weights ------------------------------------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> _Stage | None:
        """None, and told why, where the server has no way for this stage's weights."""
        policy, label = self.policy, self.policy.stage(stage).format.label
        where = f" in {stage}" if self.staged else ""
        named = policy.stage(stage).source
        if named and label != "bf16":
            line = f"{named} is served as it is: quantized already, as {label}, or it has to be made so first"
            if line not in self.needs:
                self.needs.append(line)
        if named:
            scheme = "the checkpoint that the policy names"
            return _Stage(stage=stage, weights=named, scheme=scheme, flags=[])
        way = self.server.way(policy.stage(stage).format)
        if isinstance(way, NoWay):
            self.cannot.append(f"{label}{where}: {way.why}")
            return None
        group = str(policy.stage(stage).format.group_size)
        kept = self._kept(stage)
        ignore = [_HEAD, *kept]
        maker = self.server.maker.get(way.make)
        if kept and not self._can_keep(way, maker):
            self.cannot.append(
                f"[[keep]]{where}: {way.scheme.replace('$group', group)} converts every layer but the head"
            )
        for text, where_to in ((way.note, self.needs), (way.differs, self.differs)):
            line = f"{label}: {text}"
            if text and line not in where_to:
                where_to.append(line)
        weights = (
            self.model if maker is None else self._checkpoint(way, maker, self.model, label, group, ignore)
        )
        return _Stage(
            stage=stage,
            weights=weights,
            scheme=Template(way.scheme).substitute(group=group),
            flags=[Template(flag).substitute(group=group) for flag in way.flags],
        )

    def _can_keep(self, way: Way, maker: Maker | None) -> bool:
        if maker is not None:
            return "$ignore" in maker.text
        return not way.flags or way.label in ("bf16", "fp16", "fp32")

    def _kept(self, stage: Stage) -> list[str]:
        """Of the policy's exceptions, those that stay in the model's dtype, as the makers' patterns. The others are told: a
        checkpoint can hold them, but nothing here writes such a recipe."""
        found = []
        for keep in self.policy.keep:
            if stage not in keep.stages:
                continue
            if keep.format.weights == "bf16":
                found += ["re:" + fnmatch.translate(pattern) for pattern in keep.modules if pattern != _HEAD]
            else:
                told = f"[[keep]] {', '.join(keep.modules)} as {keep.format.label}: a second group of the recipe, by hand"
                if told not in self.differs:
                    self.differs.append(told)
        if found:
            fused = "layers that the server fuses (q, k, v; gate, up) have to be kept or converted together"
            if fused not in self.needs:
                self.needs.append(fused)
        return found

    def _checkpoint(
        self, way: Way, maker: Maker, source: str, label: str, group: str, ignore: list[str]
    ) -> str:
        """The directory of a checkpoint that has to be made, once for both stages where both read it."""
        config = {
            key: (value | {"group_size": int(group)} if value.get("strategy") == "group" else value)
            if isinstance(value, dict)
            else value
            for key, value in way.config.items()
        }
        if way.make != "bitsandbytes" and config:
            config = {"targets": ["Linear"], **config}
        key = json.dumps([source, label, ignore])
        if key in self._made:
            return self._made[key]
        checkpoint = f"{PurePath(source).name}-{label}"
        if checkpoint in self._made.values() or f"./{checkpoint}" in self._made.values():
            checkpoint += f"-{len(self._made) + 1}"
        out = f"./{checkpoint}"
        # What is text in a Python file is written as one, and as one word of a shell in a command: a path may hold anything.
        places = {
            "config": repr(config),
            "ignore": repr(ignore),
            "quant": way.quant,
            "checkpoint": checkpoint,
        }
        file = Template(maker.file).substitute(places)
        if maker.text:
            text = Template(maker.text).substitute(places, model=repr(source), out=repr(out))
            self.made_files.append(Text(file, text.strip() + "\n"))
        words = {"model": _word(source), "out": _word(out), "file": _word(file)}
        self.make.append(Template(maker.run).substitute(places | words))
        for package in maker.packages:
            line = f"{package}, in an environment of its own, to make {checkpoint}"
            if line not in self.needs:
                self.needs.append(line)
        self._made[key] = out
        return out

    # -- commands -----------------------------------------------------------------------------------------------------------

    def pools(self, weights: Sequence[_Stage], kv: KvWay | None) -> list[Pool]:
        server, found = self.server, []
        for w in weights:
            role = w.stage if self.staged else "one"
            command = {
                "one": server.one.command,
                "prefill": server.pools.prefill,
                "decode": server.pools.decode,
            }[role]
            flags = [*w.flags]
            if kv is not None and server.kv.flag and kv.value != "auto":
                flags.append(Template(server.kv.flag).substitute(dtype=kv.value))
            # Where there are no flags, the space before them goes too.
            template = command if flags else command.replace(" $flags", "")
            text = Template(template).substitute(
                weights=_word(w.weights), name=_word(self.name), port=PORT, flags=" ".join(flags)
            )
            found.append(
                Pool(role=role, weights=w.weights, scheme=w.scheme, flags=flags, command=text.strip())
            )
        return found

    def server_files(self, kv: KvWay | None, tokens: int) -> list[Text]:
        """Configuration files of the server. An empty one is written too: the command names it."""
        table = self.server.pools.file if self.staged else self.server.one.file
        lines = ""
        if kv is not None and self.server.kv.yaml:
            lines = Template(self.server.kv.yaml).substitute(dtype=kv.value)
        return [
            Text(file.name, Template(file.text).substitute(kv=lines, tokens=tokens).strip() + "\n")
            for file in table
        ]

    def filled(self, text: str) -> str:
        return Template(text).substitute(port=PORT)

    def steps(self, files: Sequence[Text]) -> list[str]:
        table = self.server.pools if self.staged else self.server.one
        configured = [f.name for f in files if f not in self.made_files]
        return [
            f"install {', '.join(table.packages)}",
            *(f"make {out.removeprefix('./')}" for out in self._made.values()),
            *([f"write {', '.join(configured)}"] if configured else []),
            *(self.filled(step) for step in table.deploy),
        ]


def _word(text: str) -> str:
    """One word of a shell, quoted where it has to be."""
    return shlex.quote(text)
