"""The KV cache of a policy: which format each stage reads, where it is converted, what goes together, and exact bytes.

Formats (one row: the keys, or the values, of one head at one position, ``head_dim`` numbers):

bf16  the model's own dtype, whatever it is
fp8   E4M3 with one scale a row
int8  symmetric, one scale a row
int4  two codes a byte; a scale and a minimum a row, or for each group of ``group_size`` numbers of it

Scales and minima are bf16. With ``keys = "channel"`` the hand-off takes mean and spread of every channel of the
prompt's keys and stores what is left; the spread goes into the query, and the mean, equal at all positions, drops out
of the softmax. Each row keeps its own scale on top, so that no later key can be cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

Stage = Literal["prefill", "decode"]

#: "bf16" stands for the model's own dtype.
KV_DTYPES: Final = ("bf16", "fp8", "int8", "int4")
KV_CONVERT: Final = ("write", "handoff", "never")
KV_KEYS: Final = ("token", "channel")
#: 0: one group, the whole row.
KV_GROUP_SIZES: Final = (0, 16, 32, 64, 128)
SCALE_BYTES: Final = 2
#: Mean and spread of one channel of one head, float32.
_CHANNEL_BYTES: Final = 8


class KvPolicy(msgspec.Struct, frozen=True):
    """prefill, decode: what attention of the stage reads. convert: "write" (each write quantizes), "handoff" (prefill
    writes its own format, the hand-off converts), "never" (nothing to convert). keys, group_size: of the quantized
    formats, see above."""

    prefill: str = "bf16"
    decode: str = "bf16"
    convert: str = "never"
    keys: str = "token"
    group_size: int = 0

    def dtype(self, stage: Stage) -> str:
        return self.prefill if stage == "prefill" else self.decode

    @property
    def label(self) -> str:
        """Short name for people, unlike for unlike caches: bf16, int8, bf16/int8 (converted at the hand-off),
        bf16/int8-write, bf16/int4-g32, bf16/int8-channel."""
        decode = self.named("decode")
        if self.prefill == self.decode:
            return decode
        return f"{self.named('prefill')}/{decode}" + ("-write" if self.convert == "write" else "")

    def named(self, stage: Stage) -> str:
        """The format of one stage with what belongs to it."""
        dtype = self.dtype(stage)
        group = f"-g{self.group_size}" if dtype == "int4" and self.group_size else ""
        return dtype + group + ("-channel" if stage == "decode" and self.keys == "channel" else "")

    @property
    def suffix(self) -> str:
        """What the name of a policy made in the app ends in; nothing where the cache is in the model's dtype."""
        if self == KvPolicy():
            return ""
        return "-kv-" + self.label.replace("/", "-")


def of_label(label: str) -> tuple[str, str, int]:
    """(dtype, keys, group_size) of what ``KvPolicy.named`` gave."""
    dtype, *rest = label.split("-")
    keys = "channel" if "channel" in rest else "token"
    return dtype, keys, next((int(word[1:]) for word in rest if word != "channel"), 0)


def natural_convert(prefill: str, decode: str) -> str:
    """Where a file that does not say it converts."""
    if prefill != decode:
        return "handoff"
    return "never" if decode == "bf16" else "write"


class Misfit(msgspec.Struct, frozen=True):
    """A combination that is refused: the key of [kv] to name, why, and what to write instead."""

    key: str
    message: str
    hint: str


def misfit(kv: KvPolicy) -> Misfit | None:
    """What does not go together in ``kv`` whatever the model, None for a legal one."""
    natural = natural_convert(kv.prefill, kv.decode)
    here = f"prefill reads {kv.prefill} and decode reads {kv.decode}"
    instead = f'write convert = "{natural}"'
    if natural == "never" and kv.convert != "never":
        return Misfit(
            "convert", f"is {kv.convert!r}, but nothing is converted: both stages read bf16", instead
        )
    if natural != "never" and kv.convert == "never":
        return Misfit("convert", f"is 'never', but {here}: what is written has to be converted", instead)
    if natural == "write" and kv.convert == "handoff" and kv.keys == "token":
        return Misfit("convert", f"is 'handoff', but {here}: a hand-off has nothing to convert", instead)
    if natural == "handoff" and kv.convert == "write" and kv.prefill != "bf16":
        return Misfit(
            "convert",
            f"is 'write', but {here}: one write makes one format, and only bf16 is at hand before it",
            instead,
        )
    if kv.keys == "channel":
        if kv.decode not in ("int8", "int4"):
            why = (
                "keeps relative precision, so scales by channel change nothing"
                if kv.decode == "fp8"
                else "has no scales"
            )
            return Misfit(
                "keys", f"is 'channel', but {kv.decode} {why}", 'write keys = "token", or decode = "int8"'
            )
        if natural != "handoff" or kv.convert != "handoff":
            return Misfit(
                "keys",
                "is 'channel', which needs a hand-off: a channel's scale is known once the whole prompt was seen",
                'write prefill = "bf16" and convert = "handoff"',
            )
    if kv.group_size and "int4" not in (kv.prefill, kv.decode):
        return Misfit(
            "group_size", f"is {kv.group_size}, but {kv.decode} has no groups", "group_size belongs to int4"
        )
    return None


class KvGeometry(msgspec.Struct, frozen=True):
    """A model's cache. ``dtype_bytes``: of the model's dtype. ``windows``: by layer, over how many positions its
    attention slides, None where it sees all."""

    kv_heads: int
    head_dim: int
    dtype_bytes: int
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def sliding_layers(self) -> int:
        return sum(window is not None for window in self.windows)

    def misfit(self, kv: KvPolicy) -> str | None:
        """Why this model's heads cannot be held as ``kv`` says."""
        if "int4" not in (kv.prefill, kv.decode):
            return None
        if self.head_dim % 2:
            return f"int4 packs two numbers a byte, and this model's heads have {self.head_dim}"
        if kv.group_size and self.head_dim % kv.group_size:
            return f"groups of {kv.group_size} do not divide this model's heads of {self.head_dim}"
        return None

    def row_bytes(self, dtype: str, group_size: int = 0) -> int:
        """Stored bytes of one head's keys, or values, at one position."""
        D = self.head_dim
        if dtype == "bf16":
            return D * self.dtype_bytes
        if dtype == "int4":
            return D // 2 + D // (group_size or D) * 2 * SCALE_BYTES
        return D + SCALE_BYTES

    def layer_bytes(self, kv: KvPolicy, stage: Stage) -> int:
        """Keys and values of one position of one sequence in one layer, as ``stage`` reads them."""
        return 2 * self.kv_heads * self.row_bytes(kv.dtype(stage), kv.group_size)

    def bytes_per_token(self, kv: KvPolicy, stage: Stage) -> int:
        """The same over all layers. A sliding layer takes no more once its window is full."""
        return self.layers * self.layer_bytes(kv, stage)

    def sequence_layer_bytes(self, kv: KvPolicy) -> int:
        """What one layer keeps of a sequence beside its positions: mean and spread of its keys' channels."""
        return self.kv_heads * self.head_dim * _CHANNEL_BYTES if kv.keys == "channel" else 0

    def sequence_bytes(self, kv: KvPolicy, stage: Stage, positions: int) -> int:
        """All layers' bytes of one sequence of ``positions``, windows and channels counted."""
        held = sum(min(positions, window or positions) for window in self.windows)
        beside = self.layers * self.sequence_layer_bytes(kv) if stage == "decode" else 0
        return held * self.layer_bytes(kv, stage) + beside

    def buffer_bytes(self, kv: KvPolicy, batch: int, capacity: int, *, windows: bool = True) -> int:
        """Of the buffers of ``batch`` sequences of up to ``capacity`` positions, which stay from request to request.
        ``windows``: sliding layers keep no more than theirs."""
        slots = sum(min(capacity, (window if windows else None) or capacity) for window in self.windows)
        return batch * slots * self.layer_bytes(kv, "decode")

    def handoff_bytes(self, kv: KvPolicy, batch: int, capacity: int) -> int:
        """The most that a request takes beside the buffers at one time: what prefill wrote for the hand-off, let go layer
        by layer while each layer's channels are taken."""
        if kv.convert != "handoff":
            return 0
        waiting = batch * capacity * self.layer_bytes(kv, "prefill")
        channels = batch * self.sequence_layer_bytes(kv)
        return max(self.layers * waiting + channels, waiting + self.layers * channels)


def windows_of(
    layers: int, window: int | None, used: bool | None, kinds: Sequence[str] | None
) -> tuple[int | None, ...]:
    """By layer, over how many positions its attention slides, from what a config says: its ``sliding_window``, its
    ``use_sliding_window`` (None: not said), and its ``layer_types`` (None: all layers are alike)."""
    if window is None or used is False:
        return (None,) * layers
    return tuple(
        int(window) if kind == "sliding_attention" else None
        for kind in kinds or ["sliding_attention"] * layers
    )


def sliding_words(sliding: int, layers: int, window: int | None) -> str:
    """ "2 of 4 layers keep their last 512 positions only"; nothing for a model without such layers."""
    return f"{sliding} of {layers} layers keep their last {window} positions only" if sliding else ""
