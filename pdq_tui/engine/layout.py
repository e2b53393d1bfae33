"""Over which devices a model's modules lie: the decoder layers in order, each whole on one device.

The first device is *home*: token ids, positions, masks and the embedding lie there, and logits come back to it. How a
pass moves from one device to the next is in ``seams``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pdq_tui.errors import UnfitError


@dataclass(frozen=True)
class Layout:
    """devices  where something lies, in the order a pass visits them; the first is home.
    units    dotted names of modules that lie whole on one device; what is in none of them lies at home.
    layers   by decoder layer, its device; empty where everything lies at home.
    """

    devices: tuple[torch.device, ...]
    units: Mapping[str, torch.device] = field(default_factory=lambda: MappingProxyType({}))
    layers: tuple[torch.device, ...] = ()

    @property
    def home(self) -> torch.device:
        return self.devices[0]

    @property
    def several(self) -> bool:
        return len(self.devices) > 1

    def of(self, name: str) -> torch.device:
        """Device of the module, parameter or buffer of this dotted name."""
        while name:
            if name in self.units:
                return self.units[name]
            name = name.rpartition(".")[0]
        return self.home

    def layer(self, index: int) -> torch.device:
        return self.layers[index] if self.layers else self.home

    def words(self) -> str:
        """ "20 layers on cuda:0, 12 on cuda:1" """
        counts = [(device, self.layers.count(device)) for device in self.devices]
        first, *rest = (f"{n} {'layers ' if not i else ''}on {d}" for i, (d, n) in enumerate(counts))
        return ", ".join([first, *rest])


def on_one(device: torch.device) -> Layout:
    return Layout((device,))


def lay_out(
    model: PreTrainedModel, devices: Sequence[torch.device], free_bytes: Sequence[int | None]
) -> Layout:
    """Consecutive decoder layers for each device, by what is free there; the embedding lies with the first, the final norm
    and the head with the last, a head that is tied to the embedding stays with it. Weights may be on meta.

    free_bytes  by device; where one is not known, all count alike.
    Raises UnfitError where there are fewer layers than devices.
    """
    if len(devices) == 1:
        return on_one(devices[0])
    layers = [(name, _bytes(module)) for name, module in decoder_layers(model)]
    _check_layers(model, len(layers))
    if len(layers) < len(devices):
        raise UnfitError(
            f"this model has {len(layers)} decoder layers, {len(devices)} devices were asked for",
            f"ask for {max(1, len(layers))} of them",
        )
    first, last = devices[0], devices[-1]
    outside: dict[str, torch.device] = {}
    before, after = 0, 0
    embedding = model.get_input_embeddings().weight
    for name, module, behind in _outside(model):
        parameters = [p for p in module._parameters.values() if p is not None]
        tied = any(p is embedding for p in parameters)
        end = behind and bool(parameters) and not tied and not isinstance(module, nn.Embedding)
        outside[name] = last if end else first
        # What is tied is one tensor, counted where it is met first.
        size = 0 if tied and module is not model.get_input_embeddings() else _bytes(module, deep=False)
        before, after = before + (0 if end else size), after + (size if end else 0)
    counts = _shares([size for _, size in layers], before, after, free_bytes)
    places = [device for device, n in zip(devices, counts, strict=True) for _ in range(n)]
    units = {name: place for (name, _), place in zip(layers, places, strict=True)}
    return Layout(tuple(devices), {**units, **outside}, tuple(places))


def layout_of(model: PreTrainedModel) -> Layout:
    """Of a model in memory, as it lies. Raises UnfitError where a decoder layer is spread itself, or a part lies on the disk
    or on devices of another kind than the rest."""
    home: torch.device = cast(Any, model.get_input_embeddings()).weight.device
    units: dict[str, torch.device] = {}
    places: list[torch.device] = []
    for name, module in decoder_layers(model):
        found = sorted({str(t.device) for t in (*module.parameters(), *module.buffers())})
        if len(found) != 1:
            raise UnfitError(
                f"{name} lies on {' and '.join(found)}: a decoder layer has to lie on one device",
                'load it with device_map={"": 0}, or "balanced"',
            )
        units[name] = torch.device(found[0])
        places.append(units[name])
    for name, module, _ in _outside(model):
        held = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        units[name] = held[0].device
    devices = tuple(dict.fromkeys([home, *places, *units.values()]))
    if len(devices) == 1:
        return on_one(home)
    if len({device.type for device in devices}) > 1:
        raise UnfitError(
            f"the model's layers lie on {' and '.join(map(str, devices))}: what is left on the CPU or the disk is moved for"
            " each pass, and that would be measured",
            'load it with a device_map that has GPUs alone, or device_map={"": 0}',
        )
    _check_layers(model, len(places))
    return Layout(devices, units, tuple(places))


def _check_layers(model: PreTrainedModel, found: int) -> None:
    wanted = int(model.config.get_text_config().num_hidden_layers)
    if found != wanted:
        raise UnfitError(
            f"{type(model).__name__}: {found} decoder layers of transformers' kind were found, its config says {wanted}: they"
            " cannot be laid over several devices",
            "choose one GPU",
        )


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(dotted name, module) of the decoder layers, in the model's order."""
    return [
        (f"{name}.{index}" if name else index, child)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, child in module.named_children()
        if isinstance(child, GradientCheckpointingLayer)
    ]


def _outside(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """(dotted name, module, does it stand behind the layers) of what holds tensors outside of the decoder layers."""
    inside = {id(m) for _, layer in decoder_layers(model) for m in layer.modules()}
    behind = False
    for name, module in model.named_modules():
        if id(module) in inside:
            behind = True
        elif any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            yield name, module, behind


def _bytes(module: nn.Module, *, deep: bool = True) -> int:
    held = [*module.parameters(recurse=deep), *module.buffers(recurse=deep)]
    return sum({id(t): t.nbytes for t in held}.values())


def _shares(sizes: Sequence[int], before: int, after: int, free_bytes: Sequence[int | None]) -> list[int]:
    """How many consecutive layers each device gets, at least one."""
    known = [n for n in free_bytes if n is not None]
    weights = (
        [float(n) for n in known] if len(known) == len(free_bytes) and all(known) else [1.0] * len(free_bytes)
    )
    total = before + sum(sizes) + after
    ends = [total * sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]
    counts = [0] * len(weights)
    at = float(before)
    device = 0
    for number, size in enumerate(sizes):
        # A layer belongs to the device in whose share its middle lies, as long as enough are left for those behind.
        left, behind = len(sizes) - number, len(weights) - 1 - device
        while (
            device < len(weights) - 1 and counts[device] and (at + size / 2 > ends[device] or left <= behind)
        ):
            device += 1
            behind -= 1
        counts[device] += 1
        at += size
    return counts
