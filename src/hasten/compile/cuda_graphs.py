"""CUDA graphs: where a recorded step begins, and what it may hand out.

A replay writes to the memory it was recorded with, and torch has to be told when what lies there is no longer needed.
It is told once an optimizer step, not once a compiled part: outputs of one part are inputs of the next. Gradients lie
there, too, as autograd takes them over from the graph without a copy: those that outlive a step are copied.

Source: https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.kinds import by_kind
from hasten._lib.tree import map_tensors

# On a gradient that is a copy already: autograd adds to it in place from then on.
_COPIED = "_hasten_copied"


def begin_graphs() -> None:
    """Say that what the last replay of the recorded graphs gave is no longer needed."""
    torch.compiler.cudagraph_mark_step_begin()


class RecordedSteps:
    """Where the steps of a run begin, whose graphs are recorded.

    Args:
        parameters: of the model.

    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Walking through a model takes longer than a replay.
        self._parameters = list(parameters)

    def begin(self) -> None:
        """Begin a step: what the graphs gave before may be overwritten; gradients that are there still are kept."""
        self.keep_gradients()
        begin_graphs()

    def keep_gradients(self) -> None:
        """Copy gradients out of the memory of the graphs, once each: a later backward adds to the copies.

        With that all outputs of a graph are dead, and the next batch replays the same graphs: without, it would be
        recorded anew as what follows this one, once for each batch of an accumulation.
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
    """Give torch its own way of finding where a step begins back at the end.

    Once a step was marked, torch waits for marks for as long as the process lives: a loop of the user's that marks
    none would be recorded anew at each step.
    """
    from torch._inductor.cudagraph_trees import MarkStepBox

    found = MarkStepBox.mark_step_counter == 0
    try:
        yield
    finally:
        # 0 is where nobody has marked anything.
        if found:
            MarkStepBox.mark_step_counter = 0


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
