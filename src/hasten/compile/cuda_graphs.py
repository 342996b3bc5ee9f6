"""CUDA graphs: mark where a recorded step begins, and copy outputs that outlive it.

A replay overwrites the memory it was recorded with, so torch must know when that memory is free. hasten marks this
once per optimizer step, not once per compiled part: outputs of one part are inputs of the next. Gradients are in that
memory, too, because autograd takes them over from the graph without a copy; those that outlive a step are copied.

Source: https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.tree import by_kind, map_tensors

if TYPE_CHECKING:
    from hasten.compile.model import CompiledModel

T = TypeVar("T")

# Marks a gradient that is a copy already: autograd adds to it in place from then on.
_COPIED = "_hasten_copied"


class CudaGraphSteps:
    """Marks the steps of a run whose graphs are recorded."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Walking through a model takes longer than a replay.
        self._parameters = list(parameters)

    def begin(self) -> None:
        """Begin a step: the graphs may overwrite their earlier outputs; gradients that exist are copied."""
        self.keep_gradients()
        torch.compiler.cudagraph_mark_step_begin()

    def keep_gradients(self) -> None:
        """Copy gradients out of the memory of the graphs, once each: a later backward adds to the copies.

        Then all outputs of a graph are free, and the next batch replays the same graphs. Without the copies, each
        batch of an accumulation would be recorded separately, as a continuation of the one before.
        """
        given = [p for p in self._parameters if p.grad is not None and not hasattr(p.grad, _COPIED)]
        for parameters in by_kind(given, lambda parameter: parameter.grad):
            gradients = [parameter.grad for parameter in parameters]
            with torch.no_grad():
                # One kernel for all of them.
                copies = torch._foreach_mul(gradients, 1.0)  # type: ignore[arg-type]
            for parameter, copy in zip(parameters, copies, strict=True):
                setattr(copy, _COPIED, True)
                parameter.grad = copy


@contextmanager
def marked_by_us() -> Iterator[None]:
    """Restore torch's own detection of steps at the end.

    Once a step was marked, torch waits for marks as long as the process lives: a later loop that marks none would
    record each step again.
    """
    marks = torch_private.step_marks()
    found = marks.mark_step_counter == 0
    try:
        yield
    finally:
        # 0: no step was marked.
        if found:
            marks.mark_step_counter = 0


def recorded_steps(compiled: CompiledModel | None, module: nn.Module) -> CudaGraphSteps | None:
    """Return what marks where a step begins; None where no CUDA graphs are recorded."""
    if compiled is None or not compiled.settings.cuda_graphs:
        return None
    return CudaGraphSteps(module.parameters())


def kept_outputs(outputs: T, *, all_of_them: bool) -> T:
    """Return ``outputs`` with copies of the tensors that are kept beyond the step: the next replay overwrites them.

    Without ``all_of_them``, only tensors of one element are copied, such as losses, which are logged and collected.

    Example::

        >>> loss = torch.tensor(1.0)
        >>> kept_outputs({"loss": loss}, all_of_them=False)["loss"] is loss
        False

    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if all_of_them or tensor.numel() == 1 else tensor

    kept: T = map_tensors(copy, outputs)
    return kept
