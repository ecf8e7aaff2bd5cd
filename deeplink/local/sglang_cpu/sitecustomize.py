"""Run by every Python that has this folder on its path: lets torchvision be imported beside torch for CPU, and SGLang's
hierarchical cache run there.

The published torchvision links CUDA's torch, so its compiled half does not load, and its Python half, which SGLang's
configurations import whatever is served, misses two operators. They are declared here, and never called by models of
text.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import sglang_cpu_hicache  # type: ignore[import-not-found]  # beside this file, which is on the path itself


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


class _Complete(importlib.abc.MetaPathFinder):
    """Adds to modules, once they are imported, what they do not import on CPU."""

    left: ClassVar[set[str]] = {sglang_cpu_hicache.COMMON, sglang_cpu_hicache.POOLS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.left:
            return None
        self.left.discard(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sglang_cpu_hicache.install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path[:0] = [_Declare(), _Complete()]
