"""A fingerprint of a checkpoint: which weights an engine serves, without reading them all.

It covers, in the order of tensor names, each tensor's name, type, shape and a few samples of its bytes, so it does
not depend on how a checkpoint is cut into files. It does not see what lies between the samples: two checkpoints that
differ only there have one fingerprint. Fine-tuning changes practically every tensor practically everywhere.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from deeplink.errors import ConfigError

SAMPLES = 4
SAMPLE_BYTES = 1024
MAX_HEADER = 100 << 20


def fingerprint(folder: Path) -> str:
    """``sampled:`` and 32 hex digits for the ``*.safetensors`` in `folder`. Raises ConfigError naming the file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no *.safetensors, so its weights cannot be told from others",
            field="model.weights",
            remedy="serve a local folder with safetensors files",
        )
    tensors: list[tuple[str, bytes]] = []
    for file in files:
        try:
            with file.open("rb", buffering=0) as stream:
                tensors += _tensors(stream.fileno())
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, msgspec.DecodeError) as exc:
            raise ConfigError(f"{file} is not a safetensors file: {exc!r}", field="model.weights") from exc
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(tensors):
        digest.update(len(name).to_bytes(4, "little") + name.encode() + content)
    return f"sampled:{digest.hexdigest()}"


def _tensors(file: int) -> list[tuple[str, bytes]]:
    """Name and digest of each tensor of one file: type, shape, and evenly spread samples of its bytes."""
    length = int.from_bytes(_read(file, 8, 0), "little")
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes")
    header: dict[str, dict[str, Any]] = msgspec.json.decode(_read(file, length, 8), type=dict[str, dict[str, Any]])
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        digest = hashlib.blake2b(msgspec.json.encode([entry["dtype"], entry["shape"]]), digest_size=16)
        take = min(SAMPLE_BYTES, stop - start)
        for index in range(SAMPLES):
            at = start + (stop - start - take) * index // (SAMPLES - 1)
            digest.update(_read(file, take, 8 + length + at))
        found.append((name, digest.digest()))
    return found


def _read(file: int, length: int, offset: int) -> bytes:
    data = os.pread(file, length, offset)
    if len(data) != length:
        raise ValueError(f"ends at byte {offset + len(data)}, before byte {offset + length}")
    return data
