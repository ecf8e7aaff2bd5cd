"""vLLM's packed CPU caches, written by vLLM itself in a process of its own."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SECONDS = 240.0
Elements = npt.NDArray[Any]
"""Of unsigned integers of the size of an element."""


class Unavailable(RuntimeError):
    """The cache cannot be written here; the text says what is missing."""


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    dim: int
    blocks: int
    block: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.blocks * self.block


@dataclass(frozen=True)
class Filled:
    """A cache, the K and V that were written to it as ``[layer, kv, head, token, dim]``, and who wrote it."""

    layers: Elements
    wire: Elements
    by: str


def filled(packing: str, size: Size, table: Sequence[int]) -> Filled:
    """K and V of random numbers in the blocks of `table`. Raises Unavailable."""
    wire = values(size)
    try:
        return Filled(_by_vllm(packing, wire, size, table), wire, "written by vLLM")
    except _Failed as exc:
        # Without vLLM neither is there; with it, its kernel for AMX may need a CPU that has AMX.
        if packing != "amx" or importlib.util.find_spec("vllm") is None:
            raise Unavailable(f"vLLM does not write a cache here: {exc}") from exc
        return Filled(amx(wire, size, table), wire, f"packed as vLLM does it, which cannot here: {exc}")


class _Failed(RuntimeError):
    pass


def _by_vllm(packing: str, wire: Elements, size: Size, table: Sequence[int]) -> Elements:
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/wire.npy", wire)
        np.save(f"{folder}/table.npy", np.array(table))
        path = (
            f"import sys; sys.path[:] = {sys.path!r}; from deeplink.bench.packings import write; write(*sys.argv[1:])"
        )
        command = [sys.executable, "-c", path, packing, folder, str(size.block), size.dtype]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.CalledProcessError as exc:
            last = exc.stderr.strip().splitlines()[-1:] or [f"exit status {exc.returncode}"]
            raise _Failed(last[0]) from exc
        except subprocess.TimeoutExpired as exc:
            raise _Failed(f"not done in {SECONDS:g} s") from exc
        layers: Elements = np.load(f"{folder}/layers.npy")
        return layers


def values(size: Size) -> Elements:
    """Codes of normally distributed numbers."""
    shape = size.layers, 2, size.heads, size.tokens, size.dim
    numbers = np.random.default_rng(0).standard_normal(shape, np.float32)
    if size.dtype == "float16":
        return numbers.astype(np.float16).view(np.uint16)
    codes = numbers.view(np.uint32)
    return codes if size.dtype == "float32" else (codes >> np.uint32(16)).astype(np.uint16)


def amx(wire_LSHTD: Elements, size: Size, table: Sequence[int]) -> Elements:
    """As vLLM's AMX kernel packs it, one layer per row: of each block and head K as ``[token/16, dim/2, 16, 2]``,
    then V as ``[dim/16, token/2, 16, 2]``."""
    L, H, D, N = size.layers, size.heads, size.dim, size.block
    cache = np.zeros((L, size.blocks, H, 2, N * D), np.uint16)
    for at, block in enumerate(table):
        rows = wire_LSHTD[:, :, :, at * N : (at + 1) * N]
        k_LHND, v_LHND = rows[:, 0], rows[:, 1]
        k = k_LHND.reshape(L, H, N // 16, 16, D // 2, 2).transpose(0, 1, 2, 4, 3, 5)
        v = v_LHND.reshape(L, H, N // 2, 2, D // 16, 16).transpose(0, 1, 4, 2, 5, 3)
        cache[:, block, :, 0], cache[:, block, :, 1] = k.reshape(L, H, -1), v.reshape(L, H, -1)
    return cache.reshape(L, -1)


def write(packing: str, folder: str, block: str, dtype: str) -> None:
    """The process itself: one layer after the other through the operation that vLLM's attention layer calls."""
    torch: Any = importlib.import_module("torch")
    importlib.import_module("vllm.platforms")
    ops: Any = importlib.import_module("vllm._custom_ops")
    codes, kind = np.load(f"{folder}/wire.npy"), getattr(torch, dtype)
    signed = {2: torch.int16, 4: torch.int32}[codes.itemsize]
    wire = torch.from_numpy(codes.view(f"i{codes.itemsize}")).view(kind)
    table = torch.from_numpy(np.load(f"{folder}/table.npy"))
    size = int(block)
    slots = (table[:, None] * size + torch.arange(size)).flatten()
    L, _, H, _, D = wire.shape
    cache = torch.zeros((L, len(table), H, size, 2 * D), dtype=kind)
    for layer, (key, value) in zip(cache, wire, strict=True):
        halves = layer.view(len(table), H, 2 * size, D).chunk(2, dim=2)
        rows = [side.transpose(0, 1).contiguous() for side in (key, value)]
        ops.cpu_attn_reshape_and_cache(*rows, *halves, slots, packing)
    np.save(f"{folder}/layers.npy", cache.view(signed).numpy().view(codes.dtype).reshape(L, -1))
