"""The memory of caches that no engine has made."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from deeplink.kvconnector.relayout.convert import storage_dtype

Elements = npt.NDArray[Any]
"""Of unsigned integers of the size of an element."""
BF16 = storage_dtype("bfloat16")


def memory(shape: tuple[int, ...], dtype: np.dtype[Any] = BF16) -> Elements:
    """As an engine has it: ordinary pages, and beginning on a whole line of the caches, as torch's allocator does.
    numpy would ask for huge pages, and begin 16 bytes into one. Every page is touched."""
    array = np.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
    array[...] = 1
    return array


def filled(array: Elements, rng: np.random.Generator) -> Elements:
    array[...] = rng.integers(0, np.iinfo(array.dtype).max, array.shape, array.dtype, endpoint=True)
    return array
