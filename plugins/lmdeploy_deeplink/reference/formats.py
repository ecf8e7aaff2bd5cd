"""Layouts of matrices, by padding and permuting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deeplink.errors import UnsupportedOperator

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 16
_STRIP_BYTES = 32


def transdata(hidden_states: Tensor, transdata_type: int) -> Tensor:
    if transdata_type != 2 or hidden_states.dtype not in (torch.float16, torch.int8):
        raise UnsupportedOperator(
            f"transdata of {hidden_states.dtype}, type {transdata_type}, is not there",
            field="transdata",
            theirs=f"{hidden_states.dtype} {transdata_type}",
            remedy="float16 and int8, type 2, are",
        )
    matrices = hidden_states if hidden_states.dim() == 3 else hidden_states.unsqueeze(0)
    count, rows, columns = matrices.shape
    strip = _STRIP_BYTES // hidden_states.element_size()
    padded = torch.nn.functional.pad(matrices, (0, -columns % strip, 0, -rows % _ROWS))
    return padded.reshape(count, padded.shape[1], -1, strip).transpose(1, 2).contiguous()
