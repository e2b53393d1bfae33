"""Facts that travel inside events: model, device, coverage, weights, cache."""

from __future__ import annotations

import msgspec

from pdq_tui.core.kv import KvGeometry


class ModelInfo(msgspec.Struct, kw_only=True):
    """``kv``: what its cache consists of; ``kv_refused``: why that cannot be quantized as the model was loaded. ``weights``:
    of a quantized checkpoint, what is in its modules; None where it is not quantized."""

    id: str
    path: str = ""
    revision: str | None = None
    sha256: str | None = None
    family: str = ""
    parameters: int = 0
    layers: int = 0
    hidden: int = 0
    vocab: int = 0
    max_positions: int | None = None
    rotary: bool = True
    dtype: str = ""
    chat_template: bool = False
    tied_head: bool = False
    kv: KvGeometry | None = None
    kv_refused: str | None = None
    weights: str | None = None
    notes: list[str] = msgspec.field(default_factory=list)


class DevicePart(msgspec.Struct, kw_only=True):
    """A further device of a model that lies on several."""

    name: str
    index: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    memory_bytes: int | None = None


class DeviceInfo(msgspec.Struct, kw_only=True):
    """``uuid`` and ``bus_id`` are None on CPU. ``features``: of ``core.kernels.FEATURES``, None where nobody looked.
    ``copy_peak_gbps`` counts what is read and what is written. ``driver``: version of the device's driver.
    ``memory_bytes`` is the device's (or the cgroup's / machine's) total. ``peaks_from``: how often and when the peaks were
    looked for, and how far the looks are apart. ``tuned_stamp``: of the tuned kernel table that comes first here; empty where
    none does. ``others``: the further devices that the model lies on; ``name`` and ``memory_bytes`` are of all then,
    ``own_name`` and ``own_memory_bytes`` of the first. ``layers``: in words, which layers lie where; "" on one device."""

    kind: str
    name: str
    index: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    capability: tuple[int, int] | None = None
    features: list[str] | None = None
    memory_bytes: int | None = None
    threads: int = 1
    threads_reason: str = ""
    cpu: str = ""
    isa: list[str] = msgspec.field(default_factory=list)
    memory_method: str = ""
    last_level_cache_bytes: int | None = None
    read_peak_gbps: float | None = None
    read_peak_method: str = ""
    compute_peak_tflops: dict[str, float] = msgspec.field(default_factory=dict)
    copy_peak_gbps: float | None = None
    peaks_from: str = ""
    tuned_stamp: dict[str, str] = msgspec.field(default_factory=dict)
    driver: str | None = None
    others: list[DevicePart] = msgspec.field(default_factory=list)
    own_name: str = ""
    own_memory_bytes: int | None = None
    layers: str = ""

    @property
    def several(self) -> str | None:
        """Why nothing is judged of a run on this: its model lies on several devices. None where it lies on one."""
        return f"layers on {len(self.others) + 1} devices" if self.others else None


class LeftModule(msgspec.Struct, kw_only=True):
    module: str
    parameters: int
    bytes: int
    reason: str


class Coverage(msgspec.Struct, kw_only=True):
    """What one stage of a policy really converted. Parameters are weights of linear layers (and tied heads).

    formats        parameters by format
    kernels        linear layers by kernel
    runner         what runs the decoder layers: "native" (calls of our own: decode's one a layer), "inductor" (one compiled program) or
                   "eager" (transformers' modules)
    runner_reason  why nothing better does; None where nothing better is known here
    source         the checkpoint that the stage's weights come from; "" for the model itself
    rows           prefill: the most rows (tokens × sequences) that run at once, where the workload's longest prompt has more;
                   None: it runs whole
    rows_reason    who says so, or why it runs whole though pieces were asked for; "" where nobody asked
    """

    converted_parameters: int = 0
    total_parameters: int = 0
    converted_bytes: int = 0
    left_bytes: int = 0
    left: list[LeftModule] = msgspec.field(default_factory=list)
    formats: dict[str, int] = msgspec.field(default_factory=dict)
    kernels: dict[str, int] = msgspec.field(default_factory=dict)
    runner: str = "eager"
    runner_reason: str | None = None
    source: str = ""
    rows: int | None = None
    rows_reason: str = ""


class Fallback(msgspec.Struct, kw_only=True):
    stage: str
    module: str
    wanted: str
    used: str
    reason: str
    modules: int = 1


class CandidateTime(msgspec.Struct, kw_only=True):
    """One candidate on one layer shape and row count.

    us        median microseconds of one call; ``us_low`` and ``us_high`` are quartiles, ``n`` samples
    error     relative error (Frobenius) against the float64 product with the unrounded weights
    excluded  why it may not win; None where it may
    best      the fastest of its layout
    shipped   what the kernel tables put first for this layer and row count
    """

    kernel: str
    layout: str
    us: float | None = None
    us_low: float | None = None
    us_high: float | None = None
    n: int = 0
    error: float | None = None
    excluded: str | None = None
    best: bool = False
    shipped: bool = False


class WeightsInfo(msgspec.Struct, kw_only=True):
    """Bytes of one policy. ``extra_bytes`` = union of both stages' packed bytes minus the larger stage alone.

    ``kept_bytes`` stay in the model's dtype (embeddings, head, norms). ``bits_per_weight``: over converted parameters,
    by stage. ``scratch_bytes``: what the largest layer is dequantized into, one at a time, shared by all; 0 where none is.
    ``session_resident_bytes``: everything the engine holds now, all arms. ``by_device``: of a model on several, what stored
    and kept weights take on each; empty on one.
    """

    stored_bytes: int = 0
    prefill_bytes: int = 0
    decode_bytes: int = 0
    shared_bytes: int = 0
    extra_bytes: int = 0
    kept_bytes: int = 0
    bits_per_weight: dict[str, float | None] = msgspec.field(default_factory=dict)
    session_resident_bytes: int = 0
    scratch_bytes: int = 0
    by_device: dict[str, int] = msgspec.field(default_factory=dict)


class KvInfo(msgspec.Struct, kw_only=True):
    """The KV cache of one policy on one model when its arm became ready, as decode reads it and, where the engine said,
    as prefill does.

    bytes_per_token   data and scales of one position of one sequence, over all ``layers``
    sliding_layers    of these, that keep their last ``window`` positions only
    quantized_layers  whose cache is not in the model's dtype
    sequence_bytes    of one sequence beside its positions
    kernel            what reads it in decode; kernel_reason: why nothing faster that is known here
    allocated_bytes   buffers of these formats that the engine keeps for reuse
    free_bytes        what KV of this policy may take: free memory, all such buffers, and what only other policies hold;
                      None where the device does not tell
    reserve_bytes     of that, kept for activations and scratch
    capacity_tokens   tokens of KV that fit into the rest; None with ``capacity_reason``
    """

    dtype: str = "bf16"
    bytes_per_token: int = 0
    allocated_bytes: int = 0
    free_bytes: int | None = None
    reserve_bytes: int = 0
    capacity_tokens: int | None = None
    capacity_reason: str | None = None
    prefill_dtype: str | None = None
    prefill_bytes_per_token: int | None = None
    convert: str = "never"
    layers: int = 0
    quantized_layers: int = 0
    sliding_layers: int = 0
    window: int | None = None
    sequence_bytes: int = 0
    kernel: str | None = None
    kernel_reason: str | None = None
