"""A fingerprint of a checkpoint: which weights an engine serves, without reading them all.

It covers, in the order of tensor names, each tensor's name, type, shape and a few samples of its bytes, so it does
not depend on how a checkpoint is cut into files. It does not see what lies between the samples: two checkpoints that
differ only there have one fingerprint. Fine-tuning changes practically every tensor practically everywhere; a single
edited value in a large tensor is what it would miss. `examine` says how much was read.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deeplink.errors import ConfigError

SAMPLES = 4
SAMPLE_BYTES = 1024
MAX_HEADER = 100 << 20
INDEX = "model.safetensors.index.json"

OTHERS = {
    "*.gguf": "GGUF",
    "*.bin": "PyTorch pickle",
    "*.pt": "PyTorch pickle",
    "*.pth": "PyTorch pickle",
    "*.tensors": "tensorizer",
}
"""Forms of checkpoints that are recognised in order to say so."""

OTHERS_LOADED = (
    "other weights are loaded into this engine, and its peers know it by those that it started with: it hands nothing "
    "over any more until it is started again"
)
"""What an engine logs that ends its handoffs, whose caches would be taken for those of its first weights."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`text` is ``sampled:`` and 32 hex digits. Of `size` bytes in `tensors` tensors, `sampled` bytes were read."""

    text: str
    tensors: int
    size: int
    sampled: int

    @property
    def share(self) -> float:
        """Of the bytes, those that were read; the names, types and shapes were, all of them."""
        return self.sampled / self.size if self.size else 1.0

    def __str__(self) -> str:
        return (
            f"{self.text} from {self.tensors} tensors: names, types, shapes and {self.sampled} of {self.size} bytes; "
            f"not seen: the other {self.size - self.sampled} bytes"
        )


def checkpoint(model: str, revision: str | None = None) -> Path:
    """The checkpoint on disk: a folder, or what the hub client, which every engine brings, has already downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def fingerprint(folder: Path) -> str:
    """The text of `examine`."""
    return examine(folder).text


def examine(folder: Path) -> Fingerprint:
    """The fingerprint of the safetensors in `folder`, and what it did not see.

    With a ``model.safetensors.index.json`` those are the files that it names, else all of them. Raises ConfigError
    naming the file that is missing or broken, or the form of a checkpoint that has no safetensors.
    """
    files, names = _files(folder)
    tensors: list[_Tensor] = []
    for path in files:
        try:
            with path.open("rb", buffering=0) as stream:
                tensors += _tensors(stream.fileno())
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, msgspec.DecodeError) as exc:
            raise ConfigError(f"{path} is not a safetensors file: {exc!r}", field="model.weights") from exc
    if missing := sorted(names - {tensor.name for tensor in tensors}):
        raise _incomplete(folder, f"no tensor {missing[0]}, nor {len(missing) - 1} others")
    digest = hashlib.blake2b(digest_size=16)
    for tensor in sorted(tensors, key=lambda tensor: (tensor.name, tensor.content)):
        digest.update(len(tensor.name).to_bytes(4, "little") + tensor.name.encode() + tensor.content)
    size, sampled = sum(tensor.size for tensor in tensors), sum(tensor.sampled for tensor in tensors)
    return Fingerprint(f"sampled:{digest.hexdigest()}", len(tensors), size, sampled)


def _files(folder: Path) -> tuple[list[Path], set[str]]:
    """The files to read, and the names of tensors that must be in them."""
    index = folder / INDEX
    if index.is_file():
        try:
            listed = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (OSError, RecursionError, msgspec.DecodeError) as exc:
            raise ConfigError(f"{index} is not an index of safetensors: {exc}", field="model.weights") from exc
        for name in sorted(set(listed.values())):
            if os.path.basename(name) != name or not os.path.isfile(folder / name):  # False also for impossible names
                raise _incomplete(folder, f"no file {name}")
        return [folder / name for name in sorted(set(listed.values()))], set(listed)
    if files := sorted(folder.glob("*.safetensors")):
        return files, set()
    raise _no_safetensors(folder)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _incomplete(folder: Path, lacks: str) -> ConfigError:
    return ConfigError(
        f"{folder} has {lacks}, which its {INDEX} names",
        field="model.weights",
        remedy="download the checkpoint again; this one is not complete",
    )


def _no_safetensors(folder: Path) -> ConfigError:
    patterns = [pattern for pattern in OTHERS if folder.match(pattern) or any(folder.glob(pattern))]
    if patterns:
        found = " and ".join(dict.fromkeys(OTHERS[pattern] for pattern in patterns))
        message = f"{folder} holds {found} but no *.safetensors, so its weights cannot be told from others"
        remedy = "convert the checkpoint to safetensors (transformers: save_pretrained) and serve that on all engines"
    elif folder.is_dir():
        message = f"{folder} holds no *.safetensors, so its weights cannot be told from others"
        remedy = "serve a local folder with safetensors files"
    else:
        message = f"{folder} is not a folder, so its weights cannot be told from others"
        remedy = "serve a local folder with safetensors files; download a model from a hub before"
    return ConfigError(message, field="model.weights", remedy=remedy)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """`content` is the digest of type, shape, and evenly spread samples of the bytes."""

    name: str
    content: bytes
    size: int
    sampled: int


def _tensors(file: int) -> list[_Tensor]:
    """All tensors of one file."""
    length = int.from_bytes(_read(file, 8, 0), "little")
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, dict[str, Any]] = msgspec.json.decode(_read(file, length, 8), type=dict[str, dict[str, Any]])
    header.pop("__metadata__", None)
    samples = {name: _samples(entry["data_offsets"], 8 + length) for name, entry in header.items()}
    _announce(file, [sample for each in samples.values() for sample in each])
    found = []
    for name, entry in header.items():
        digest = hashlib.blake2b(msgspec.json.encode([entry["dtype"], entry["shape"]]), digest_size=16)
        for offset, take in samples[name]:
            digest.update(_read(file, take, offset))
        start, stop = entry["data_offsets"]
        seen = min(stop - start, sum(take for _, take in samples[name]))
        found.append(_Tensor(name, digest.digest(), stop - start, seen))
    return found


Sample = tuple[int, int]
"""Offset in the file, and length."""


def _samples(offsets: Any, base: int) -> list[Sample]:
    start, stop = offsets
    take = min(SAMPLE_BYTES, stop - start)
    return [(base + start + (stop - start - take) * index // (SAMPLES - 1), take) for index in range(SAMPLES)]


def _announce(file: int, samples: list[Sample]) -> None:
    """Let the disk look for all of them at once; one after the other it takes several times as long."""
    if hasattr(os, "posix_fadvise"):
        for offset, take in samples:
            if take:  # no length means all that follows
                os.posix_fadvise(file, offset, take, os.POSIX_FADV_WILLNEED)


def _read(file: int, length: int, offset: int) -> bytes:
    data = os.pread(file, length, offset)
    if len(data) != length:
        raise ValueError(f"ends at byte {offset + len(data)}, before byte {offset + length}")
    return data
