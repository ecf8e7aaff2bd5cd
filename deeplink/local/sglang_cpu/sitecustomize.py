"""Run by every Python that has this folder on its path: lets torchvision be imported beside torch for CPU.

The published torchvision links CUDA's torch, so its compiled half does not load, and its Python half, which SGLang's
configurations import whatever is served, misses two operators. They are declared here, and never called by models of
text.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Declare(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            # Kept: what a library has declared goes with it.
            _Declare.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _Declare.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Declare())
