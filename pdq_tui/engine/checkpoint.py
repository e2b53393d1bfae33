"""A model's directory, looked at before anything is loaded: what is wrong with it is said in one sentence.

Also the masters: the unquantized weights, read one at a time from the memory-mapped files, so that the whole
unquantized model never has to be in memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open

from pdq_tui.core.formats import Format
from pdq_tui.engine.formats.imported import Imported
from pdq_tui.errors import PdqError, UsageError

INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: Files up to this size together are hashed whole; of larger ones the headers and evenly spaced blocks.
HASH_WHOLE_BYTES = 1 << 30


#: Dtypes by the names that safetensors headers use.
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """Where a tensor lies, and what it is. ``dtype``: as the header names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """A checked directory. ``tensors``: by name; empty where the weights are not safetensors."""

    path: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, Stored]

    def sha256(self) -> tuple[str, str | None]:
        """(digest of config and weights, note where it is a digest of samples)."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        whole = sum(file.stat().st_size for file in self.files) <= HASH_WHOLE_BYTES
        for file in self.files:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size};".encode())
            with file.open("rb") as stream:
                if whole:
                    while block := stream.read(1 << 22):
                        digest.update(block)
                else:
                    for part in range(64):
                        stream.seek(size * part // 64)
                        digest.update(stream.read(1 << 16))
        return (
            digest.hexdigest(),
            None if whole else "sha256 over the sizes and 64 blocks of each weight file",
        )


def inspect(path: Path) -> Checkpoint:
    """Check a local model directory; touches no network and no device memory. Raises PdqError with one sentence."""
    if not path.is_dir():
        raise UsageError(f"no such directory: {path}")
    config = _config(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UsageError(
            f"{path}: there is no tokenizer",
            f"looked for {', '.join(TOKENIZER_FILES)}: copy the model's files",
        )
    for name in TOKENIZER_FILES:
        if (path / name).is_file():
            _not_a_pointer(path / name)
    files = _weight_files(path)
    tensors: dict[str, Stored] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors.update(_header(file))
        else:
            _not_empty(file)
            _not_a_pointer(file)
    return Checkpoint(path, config, tuple(files), tensors)


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise UsageError(f"{path}: there is no config.json, so this is not a model's directory")
    _not_empty(file)
    _not_a_pointer(file)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object")
    return config


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX
    if index.is_file():
        _not_empty(index)
        _not_a_pointer(index)
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"{index} cannot be read: {error}") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise UsageError(
                f"{path}: {len(missing)} of {len(names)} weight files are missing: {few(missing)}",
                "download the model again, the download was not finished",
            )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not files:
        raise UsageError(f"{path}: there are no weights", "looked for *.safetensors and pytorch_model*.bin")
    return files


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _not_empty(file: Path) -> None:
    if file.stat().st_size == 0:
        raise UsageError(f"{file} is empty (0 bytes)", "download it again")


def _not_a_pointer(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(LFS)) == LFS:
            raise UsageError(f"{file} is a Git LFS pointer, not the file itself", "run: git lfs pull")


def _header(file: Path) -> dict[str, Stored]:
    """Tensors by name from a safetensors header, checked against the file's size.

    Layout: 8 bytes little-endian header length, the header as JSON, then the data; data_offsets count from its start.
    """
    _not_empty(file)
    _not_a_pointer(file)
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                raise UsageError(
                    f"{file} is cut off within its header, or is no safetensors file", "download it again"
                )
            header = json.loads(stream.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        found = {
            name: Stored(file, tuple(int(n) for n in entry["shape"]), str(entry["dtype"]))
            for name, entry in entries.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is no readable safetensors file: {error}", "download it again") from error
    if end > size:
        raise UsageError(
            f"{file} is short by {end - size} bytes: the download was not finished", "download it again"
        )
    return found


class Masters(Protocol):
    """The weights that formats are made from, by the parameter's name in the model: unquantized, or as a quantized
    checkpoint holds them."""

    def names(self) -> Sequence[str]: ...
    def get(self, name: str) -> torch.Tensor: ...
    def part(self, name: str, index: int) -> torch.Tensor:
        """One matrix of a parameter that holds several: ``get(name)[index]``, without the others being read."""
        ...

    def shared(self, name: str) -> bool:
        """True where ``get`` hands out memory that stays anyway, not a copy made for the caller."""
        ...

    def format(self, name: str) -> Format | None:
        """What the checkpoint itself holds this linear weight in; None where it is not quantized."""
        ...

    def imported(self, name: str) -> Imported | None:
        """Its numbers, where ``format`` names one; ``get`` dequantizes them."""
        ...

    def files(self) -> Sequence[Path]:
        """Files that are mapped into memory; what was read of them stays resident until it is given back."""
        ...


class MappedMasters:
    """Weights read one at a time from memory-mapped safetensors files, in the model's dtype, on the CPU.

    ``aliases``: a tied parameter's name → the name under which the file holds it.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, aliases: Mapping[str, str]) -> None:
        self._tensors = checkpoint.tensors
        self._aliases = dict(aliases)
        self._dtype = dtype
        self._open: dict[Path, Any] = {}

    def names(self) -> Sequence[str]:
        return [*self._tensors, *self._aliases]

    def files(self) -> Sequence[Path]:
        return list(self._open)

    def get(self, name: str) -> torch.Tensor:
        """The tensor in the model's dtype (linear layers: [N, K]). Raises KeyError for a name that is not there."""
        tensor = self.raw(self._aliases.get(name, name))
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def raw(self, stored: str) -> torch.Tensor:
        """The tensor of the files, in their dtype."""
        file = self._tensors[stored].file
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except OSError as error:
                raise PdqError(f"{file} cannot be read: {error}") from error
            except MemoryError as error:  # the library does not say how much it asked for
                raise MemoryError(f"unable to mmap {file.stat().st_size} bytes from {file}") from error
        tensor: torch.Tensor = self._open[file].get_tensor(stored)
        return tensor

    def part(self, name: str, index: int) -> torch.Tensor:
        return self.get(name)[index]

    def format(self, name: str) -> Format | None:
        return None

    def imported(self, name: str) -> Imported | None:
        return None

    def shared(self, name: str) -> bool:
        return DTYPES.get(self._tensors[self._aliases.get(name, name)].dtype) == self._dtype


class HeldMasters:
    """Weights held in memory, for checkpoints whose files name or cut them differently from the model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def part(self, name: str, index: int) -> torch.Tensor:
        return self._tensors[name][index]

    def format(self, name: str) -> Format | None:
        return None

    def imported(self, name: str) -> Imported | None:
        return None

    def shared(self, name: str) -> bool:
        return True

    def files(self) -> Sequence[Path]:
        return []
