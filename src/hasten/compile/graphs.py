"""CUDA graphs: what a recorded step may hand out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten._lib.tree import map_tensors


def begin_graphs() -> None:
    """Say that what the last replay of the recorded graphs gave is no longer needed."""
    torch.compiler.cudagraph_mark_step_begin()


def kept_outputs(outputs: Any, *, all_of_them: bool) -> Any:
    """Return ``outputs`` with copies of the tensors that are kept beyond the step: the next replay overwrites them.

    Args:
        outputs: of a recorded graph.
        all_of_them: copy every tensor; else those of one element, such as losses, which are logged and collected.

    Example::

        >>> loss = torch.tensor(1.0)
        >>> kept_outputs({"loss": loss}, all_of_them=False)["loss"] is loss
        False

    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if all_of_them or tensor.numel() == 1 else tensor

    return map_tensors(copy, outputs)
