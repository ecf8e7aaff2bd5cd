"""The numbers that cases are made of: the same in every run, on every machine and device."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmdeploy_deeplink.conformance.precision import Array

if TYPE_CHECKING:
    from torch import Tensor

TYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


class Inputs:
    """Random tensors of one case. `seed` is its name, so a case stays what it is when others come or go."""

    def __init__(self, seed: str, dtype: str, device: str) -> None:
        self._random = np.random.default_rng(zlib.crc32(seed.encode()))
        self.dtype = TYPES[dtype]
        self.device = device

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Of the case's element type."""
        return self.of(self._random.standard_normal(shape) * scale + mean)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return self.of(self._random.uniform(low, high, shape))

    def int8(self, *shape: int, low: int = -128) -> Tensor:
        return torch.from_numpy(self._random.integers(low, 128, shape, np.int8)).to(self.device)

    def shuffled(self, count: int) -> list[int]:
        return [int(number) for number in self._random.permutation(count)]

    def of(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.float64)).to(self.dtype).to(self.device)

    def float32(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.float32)).to(self.device)

    def int32(self, values: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(self.device)


def exact(tensor: Tensor) -> Array:
    """The values of a tensor as they are, after they were rounded to its element type."""
    values: Array = tensor.detach().cpu().double().numpy()
    return values
