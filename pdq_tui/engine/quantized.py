"""Checkpoints whose linear weights are quantized already: which layouts are known, and how each is read.

What a layer is, is told from the tensors that the files hold for it; the configuration says how they are to be understood.
Everything that would be misread is refused with its name before a weight is touched. Layouts: compressed-tensors
(int-quantized, float-quantized, naive-quantized, pack-quantized), GPTQ of 4 bits, AWQ "gemm", and "fp8"; FP8 with one scale
a matrix, a channel or a block of the matrix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pdq_tui.core.formats import Format
from pdq_tui.engine.checkpoint import Checkpoint, MappedMasters, Stored, few
from pdq_tui.engine.formats.imported import Imported, natural
from pdq_tui.errors import UsageError

METHODS: Final = {"compressed-tensors": "compressed-tensors", "gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8"}
_FLOATS: Final = ("BF16", "F16", "F32", "F64")
_HINT: Final = "use the model's unquantized checkpoint, or one in a layout that docs/models.md names"
#: Column of a word's nibble i, lowest first, as AWQ's "gemm" kernels want them.
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class QuantizedLayer:
    """One linear layer of the files. ``name``: dotted, without ``.weight``; ``scale_dtype``: as the header names it;
    ``check`` reads its small tensors and raises UsageError where they belong to another layout."""

    name: str
    fmt: Format
    shape: tuple[int, int]
    scale_dtype: str
    asymmetric: bool
    read: Callable[[Get], Imported]
    check: Callable[[Get], None] = lambda get: None


@dataclass(frozen=True)
class Quantized:
    """``layers`` by the parameter's name (``….weight``)."""

    method: str
    layers: Mapping[str, QuantizedLayer]
    notes: tuple[str, ...] = ()

    def words(self, parameters: Sequence[str]) -> str:
        """What is in the modules, for people: "int4-g128 in 168 of 169 linear layers (GPTQ)"."""
        found = Counter(self.layers[name].fmt.label for name in parameters if name in self.layers)
        each = ", ".join(f"{label} in {count}" for label, count in found.most_common())
        return f"{each or 'none'} of {len(parameters)} linear layers ({self.method})"

    def rounding(self, dtype: torch.dtype) -> list[str]:
        """Sentences where scales and zero points are not held to the last bit in the model's dtype."""
        if dtype == torch.float32:
            return []
        own = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        short = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
        layers = [each for each in self.layers.values() if each.fmt.weights != "fp8"]
        wide = sorted({short[each.scale_dtype] for each in layers if each.scale_dtype != own})
        found = [f"scales of the checkpoint ({', '.join(wide)}) are rounded to {short[own]}"] if wide else []
        if any(each.asymmetric for each in layers):
            part = {"BF16": 64, "F16": 512}[own]
            found.append(f"zero points are held in {short[own]}: to 1/{part} of a step")
        return found


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantization method that ``config.json`` names; None where the checkpoint is not quantized."""
    found = _settings(config)
    if not found:
        return None
    return str(found.get("quant_method") or "unknown method") if isinstance(found, dict) else "unknown method"


def read_quantized(checkpoint: Checkpoint) -> Quantized | None:
    """The quantized layers of a checked directory; None where nothing is quantized. Reads headers only. Raises UsageError
    for what is not known here, with its name."""
    method = method_of(checkpoint.config)
    if method is None:
        return None
    settings = _settings(checkpoint.config)
    refusal = _Refusal(checkpoint.path.name, METHODS.get(method, method))
    if method not in METHODS or not isinstance(settings, dict):
        raise refusal("no layout of this method is read here")
    if not checkpoint.tensors:
        raise refusal("only safetensors files are read")
    notes: list[str] = []
    if method == "gptq":
        _check_gptq(settings, refusal)
        find = _gptq_finder(settings)
    elif method == "awq":
        _check_awq(settings, refusal)
        find = _awq
    else:
        _check_compressed(settings, refusal)
        find = _compressed_finder(_block(settings, refusal))
    layers: dict[str, QuantizedLayer] = {}
    for name in _modules(checkpoint.tensors):
        layer = find(name, checkpoint.tensors, refusal)
        if layer is not None:
            layers[f"{name}.weight"] = layer
    if not layers:
        raise refusal("config.json says so, but no quantized layer is in the files")
    static = [n for n in layers if n.removesuffix("weight") + "input_scale" in checkpoint.tensors]
    if static:
        notes.append(
            f"{len(static)} layers bring activation scales, which are not used: a policy's are by token"
        )
    if settings.get("kv_cache_scheme"):
        notes.append("the checkpoint's KV cache scheme is not used: the policy's [kv] says what is stored")
    return Quantized(METHODS[method], layers, tuple(notes))


class QuantizedMasters(MappedMasters):
    """Masters over quantized files: ``get`` dequantizes one layer for the caller, ``imported`` hands out its numbers."""

    def __init__(
        self, checkpoint: Checkpoint, quantized: Quantized, dtype: torch.dtype, aliases: Mapping[str, str]
    ) -> None:
        super().__init__(checkpoint, dtype, aliases)
        self._layers = quantized.layers

    def names(self) -> Sequence[str]:
        return [*super().names(), *self._layers]

    def get(self, name: str) -> Tensor:
        held = self.imported(name)
        return super().get(name) if held is None else held.dequantized(self._dtype)

    def format(self, name: str) -> Format | None:
        layer = self._layers.get(name)
        return None if layer is None else layer.fmt

    def imported(self, name: str) -> Imported | None:
        layer = self._layers.get(name)
        return None if layer is None else layer.read(self.raw)

    def shared(self, name: str) -> bool:
        return name not in self._layers and super().shared(name)


class _Refusal:
    """Makes the one sentence in which a checkpoint is refused."""

    def __init__(self, name: str, method: str) -> None:
        self.name, self.method = name, method

    def __call__(self, why: str, hint: str = _HINT) -> UsageError:
        return UsageError(f"{self.name}: this checkpoint is already quantized ({self.method}): {why}", hint)


def _settings(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _modules(tensors: Mapping[str, Stored]) -> list[str]:
    leaves = ("weight", "qweight", "weight_packed")
    return sorted({n.rpartition(".")[0] for n in tensors if n.rpartition(".")[2] in leaves})


# -- words of the 4-bit layouts ------------------------------------------------------------------------------------------


def _unpacked(words: Tensor, dim: int, bits: int = 4, order: Sequence[int] | None = None) -> Tensor:
    """int32 words → uint8, 32 / bits values of each along ``dim``, lowest bits first; ``order[i]``: the place of the i-th."""
    count = 32 // bits
    places = list(order or range(count))
    shape = [*words.shape[:dim], words.shape[dim], count, *words.shape[dim + 1 :]]
    out = torch.empty(shape, dtype=torch.uint8)
    for i, place in enumerate(places):
        out.select(dim + 1, place).copy_((words >> (bits * i)) & ((1 << bits) - 1))
    return out.flatten(dim, dim + 1)


def _grouped(name: str, N: int, K: int, groups: int, refusal: _Refusal) -> tuple[Format, int]:
    """(format, how many of its groups share each of the checkpoint's scales)."""
    if groups < 1 or K % groups:
        raise refusal(f"{name}: {groups} groups do not divide its {K} columns")
    fmt = natural("int4", K // groups)
    if fmt is None:
        raise refusal(f"{name}: groups of {K // groups} columns are held by no layout here")
    return fmt, K // groups // fmt.group_size


def _repeated(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, dim=1) if times > 1 else x


def _want(
    name: str, tensors: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], refusal: _Refusal
) -> None:
    for leaf, shape in shapes.items():
        found = tensors.get(f"{name}.{leaf}")
        if found is None:
            raise refusal(f"{name}.{leaf} is missing")
        if found.shape != shape:
            raise refusal(
                f"{name}.{leaf} is {list(found.shape)}, not {list(shape)}: another layout, or other bits"
            )


# -- GPTQ ----------------------------------------------------------------------------------------------------------------


def _check_gptq(settings: Mapping[str, Any], refusal: _Refusal) -> None:
    if settings.get("bits") != 4:
        raise refusal(f"weights of {settings.get('bits')} bits; 4 are read here")
    if settings.get("desc_act"):
        raise refusal(
            "its columns are ordered by activation (desc_act)", "use a checkpoint with desc_act = false"
        )
    form = "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise refusal(f"checkpoint_format {form!r}; gptq and gptq_v2 are read here")


def _gptq_finder(
    settings: Mapping[str, Any],
) -> Callable[[str, Mapping[str, Stored], _Refusal], QuantizedLayer | None]:
    # The first version of the format stores each zero point less one.
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def find(name: str, tensors: Mapping[str, Stored], refusal: _Refusal) -> QuantizedLayer | None:
        words, scales = tensors.get(f"{name}.qweight"), tensors.get(f"{name}.scales")
        if words is None:
            return None
        if scales is None or len(scales.shape) != 2 or len(words.shape) != 2 or words.dtype != "I32":
            raise refusal(f"{name}: its tensors are of another layout")
        K, N = words.shape[0] * 8, words.shape[1]
        groups = scales.shape[0]
        _want(name, tensors, {"scales": (groups, N), "qzeros": (groups, N // 8)}, refusal)
        fmt, times = _grouped(name, N, K, groups, refusal)

        def check(get: Get) -> None:
            if f"{name}.g_idx" in tensors:
                order = get(f"{name}.g_idx")
                if not torch.equal(order.long(), torch.arange(K) // (K // groups)):
                    raise refusal(
                        f"{name}: its columns are out of order (g_idx)", "use one with desc_act = false"
                    )

        def read(get: Get) -> Imported:
            q = _unpacked(get(f"{name}.qweight"), 0).t().contiguous()
            zero = (_unpacked(get(f"{name}.qzeros"), 1).t() + less) & 15
            scale = get(f"{name}.scales").t()
            return Imported(fmt, q, _repeated(scale, times), _repeated(zero, times))

        return QuantizedLayer(name, fmt, (N, K), scales.dtype, not settings.get("sym", False), read, check)

    return find


# -- AWQ -----------------------------------------------------------------------------------------------------------------


def _check_awq(settings: Mapping[str, Any], refusal: _Refusal) -> None:
    bits = settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise refusal(f"weights of {bits} bits; 4 are read here")
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise refusal(f"version {version!r}; gemm is read here")


def _awq(name: str, tensors: Mapping[str, Stored], refusal: _Refusal) -> QuantizedLayer | None:
    words, scales = tensors.get(f"{name}.qweight"), tensors.get(f"{name}.scales")
    if words is None:
        return None
    if scales is None or len(scales.shape) != 2 or len(words.shape) != 2 or words.dtype != "I32":
        raise refusal(f"{name}: its tensors are of another layout")
    K, N = words.shape[0], words.shape[1] * 8
    groups = scales.shape[0]
    _want(name, tensors, {"scales": (groups, N), "qzeros": (groups, N // 8)}, refusal)
    fmt, times = _grouped(name, N, K, groups, refusal)

    def read(get: Get) -> Imported:
        q = _unpacked(get(f"{name}.qweight"), 1, order=AWQ_ORDER).t().contiguous()
        zero = _unpacked(get(f"{name}.qzeros"), 1, order=AWQ_ORDER).t()
        return Imported(fmt, q, _repeated(get(f"{name}.scales").t(), times), _repeated(zero, times))

    return QuantizedLayer(name, fmt, (N, K), scales.dtype, True, read)


# -- compressed-tensors and fp8 ------------------------------------------------------------------------------------------

_FORMATS: Final = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


def _check_compressed(settings: Mapping[str, Any], refusal: _Refusal) -> None:
    if settings.get("quant_method") == "fp8":
        return
    form = settings.get("format")
    if form not in _FORMATS:
        raise refusal(f"format {form!r}; {', '.join(_FORMATS)} are read here")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise refusal(f"its weights are sparse ({sparsity})")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise refusal("its weights are rotated (transform_config)")
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if weights.get("actorder") in ("group", "dynamic", True):
            raise refusal(
                "its columns are ordered by activation (actorder)", "use a checkpoint without actorder"
            )
        kind = (weights.get("type"), weights.get("num_bits"))
        if weights and kind not in (("int", 4), ("int", 8), ("float", 8)):
            raise refusal(f"{kind[0]} weights of {kind[1]} bits; int of 4 and 8 and float of 8 are read here")


#: Rows and columns of the matrix that share a scale.
_Block = tuple[int, int]


def _block(settings: Mapping[str, Any], refusal: _Refusal) -> _Block | None:
    """The size of the blocks that have a scale each; None where there are none."""
    groups = (settings.get("config_groups") or {}).values()
    named = [
        w.get("block_structure")
        for w in (g.get("weights") or {} for g in groups)
        if w.get("strategy") == "block"
    ]
    if settings.get("weight_block_size"):
        named.append(settings["weight_block_size"])
    found = [_edges(each, refusal) for each in named]
    if len(set(found)) > 1:
        sizes = ", ".join(f"{n} × {k}" for n, k in sorted(set(found)))
        raise refusal(f"blocks of several sizes ({sizes}): which layer has which is not read here")
    return found[0] if found else None


def _edges(block: object, refusal: _Refusal) -> _Block:
    parts = block.lower().split("x") if isinstance(block, str) else block  # "128x128", or a list of two
    try:
        rows, columns = (int(edge) for edge in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise refusal(f"a scale for each block of {block!r}: two whole numbers are read here")
    return rows, columns


def _compressed_finder(
    block: _Block | None,
) -> Callable[[str, Mapping[str, Stored], _Refusal], QuantizedLayer | None]:
    def find(name: str, tensors: Mapping[str, Stored], refusal: _Refusal) -> QuantizedLayer | None:
        if f"{name}.weight_packed" in tensors:
            return _packed_words(name, tensors, refusal)
        weight = tensors[f"{name}.weight"]
        leaf = "weight_scale_inv" if f"{name}.weight_scale_inv" in tensors else "weight_scale"
        scale = tensors.get(f"{name}.{leaf}")
        if scale is None:
            if weight.dtype not in _FLOATS:
                raise refusal(f"{name}: {weight.dtype} weights without a scale")
            return None
        weights = {"I8": "int8", "F8_E4M3": "fp8"}.get(weight.dtype)
        if weights is None or len(weight.shape) != 2:
            raise refusal(f"{name}: {weight.dtype} weights {list(weight.shape)} with a scale")
        if scale.dtype not in _FLOATS:
            raise refusal(f"{name}: scales in {scale.dtype}; {', '.join(_FLOATS)} are read here")
        N, K = weight.shape
        if f"{name}.weight_zero_point" in tensors and weights == "int8":
            raise refusal(f"{name}: int8 weights with zero points")
        if block is not None and scale.shape == (-(-N // block[0]), -(-K // block[1])):
            return _blocks(name, weights, (N, K), block, leaf, scale, refusal)
        if scale.shape not in ((N, 1), (N,), (1,), (), (1, 1)) or leaf == "weight_scale_inv":
            blocks = f", or one for a block of {block[0]} × {block[1]}" if block is not None else ""
            raise refusal(
                f"{name}: {weights} scales {list(scale.shape)}; one for a channel or a matrix is read here{blocks}"
            )
        fmt = Format(weights)

        def read(get: Get) -> Imported:
            return Imported(fmt, get(f"{name}.weight"), get(f"{name}.{leaf}").reshape(-1).expand(N))

        return QuantizedLayer(name, fmt, (N, K), scale.dtype, False, read)

    return find


def _blocks(
    name: str,
    weights: str,
    shape: tuple[int, int],
    block: _Block,
    leaf: str,
    scale: Stored,
    refusal: _Refusal,
) -> QuantizedLayer:
    """A layer with a scale for each block: the same scale for each of its rows, and for each group of its columns, which
    is what our format holds."""
    (N, K), (rows, columns) = shape, block
    if weights != "fp8":
        raise refusal(f"{name}: {weights} weights with a scale for each block ({rows} × {columns})")
    # The last block of a row may be cut off: groups divide the blocks and the row.
    fmt = natural("fp8", math.gcd(columns, K))
    if fmt is None:
        raise refusal(
            f"{name}: blocks of {columns} columns over {K} are cut into no groups that a layout here holds",
            "use a checkpoint with a scale per channel, or the model's unquantized one",
        )
    times = columns // fmt.group_size

    def read(get: Get) -> Imported:
        each = get(f"{name}.{leaf}").repeat_interleave(rows, dim=0)[:N]
        groups = _repeated(each, times)[:, : K // fmt.group_size]
        return Imported(fmt, get(f"{name}.weight"), groups)

    return QuantizedLayer(name, fmt, (N, K), scale.dtype, False, read)


def _packed_words(name: str, tensors: Mapping[str, Stored], refusal: _Refusal) -> QuantizedLayer:
    words, scales = tensors[f"{name}.weight_packed"], tensors.get(f"{name}.weight_scale")
    if f"{name}.weight_g_idx" in tensors:
        raise refusal(
            f"{name}: its columns are out of order (weight_g_idx)", "use a checkpoint without actorder"
        )
    if words.dtype != "I32" or len(words.shape) != 2 or scales is None or len(scales.shape) != 2:
        raise refusal(f"{name}: its tensors are of another layout")
    N, groups = words.shape[0], scales.shape[1]
    _want(name, tensors, {"weight_scale": (N, groups)}, refusal)
    K = words.shape[1] * 8
    fmt, times = _grouped(name, N, K, groups, refusal)
    asymmetric = f"{name}.weight_zero_point" in tensors
    if asymmetric:
        _want(name, tensors, {"weight_zero_point": (-(-N // 8), groups)}, refusal)

    def check(get: Get) -> None:
        if f"{name}.weight_shape" in tensors and get(f"{name}.weight_shape").tolist() != [N, K]:
            raise refusal(f"{name}: weight_shape is not {[N, K]}: another layout, or other bits")

    def read(get: Get) -> Imported:
        zero = None
        if asymmetric:
            zero = _repeated(_unpacked(get(f"{name}.weight_zero_point"), 0)[:N], times)
        q = _unpacked(get(f"{name}.weight_packed"), 1)
        return Imported(fmt, q, _repeated(get(f"{name}.weight_scale"), times), zero)

    return QuantizedLayer(name, fmt, (N, K), scales.dtype, asymmetric, read, check)


def check_layers(
    quantized: Quantized,
    linears: Mapping[str, tuple[int, ...]],
    known: Collection[str],
    checkpoint: Checkpoint,
    get: Get,
) -> None:
    """Raises UsageError where a layer is not what the model's configuration describes.

    linears  shapes [N, K] of the model's linear layers by the parameter's name.
    known    names of all parameters of the model.
    get      reads a tensor of the files.
    """
    refusal = _Refusal(checkpoint.path.name, quantized.method)
    strange = [each for each in quantized.layers if each not in linears]
    if strange:
        raise refusal(f"{len(strange)} layers are no linear layers of the model, or tied: {few(strange)}")
    for parameter, layer in quantized.layers.items():
        if linears[parameter] != layer.shape:
            raise refusal(
                f"{layer.name} is {list(layer.shape)}, the model's {list(linears[parameter])}: another layout, or"
                " other bits"
            )
        layer.check(get)
    # Some tools write a bias for every layer.
    beside = [f"{layer.name}.bias" for layer in quantized.layers.values()]
    lost = [b for b in beside if b in checkpoint.tensors and b not in known and bool(get(b).any())]
    if lost:
        raise refusal(f"{len(lost)} layers of the files add a bias, the model's do not: {few(lost)}")
