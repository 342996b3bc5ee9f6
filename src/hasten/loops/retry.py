"""A step that may be begun again: what it may change before the optimizer does, kept and put back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from hasten.loops.books import Books
from hasten.loops.contents import Contents
from hasten.loops.run import Run
from hasten.module import LightningModule

# Of a module's parameters and attributes so much is copied before the first step has shown which of them it changes.
_COPIED_BYTES = 1 << 26


class Seen:
    """What the steps of a run have shown so far of what a step changes beside the weights."""

    def __init__(self) -> None:
        self.batch = Contents()
        self.module = Contents(most_bytes=_COPIED_BYTES)
        # Modules whose attributes the first step left alone; not those of the user's own training_step.
        self.unchanged: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.living: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.is_sure = False


class Moment:
    """The state of a run between two batches, to come back to if memory runs out in the next one.

    Kept on the device, without waiting for it: the batch, random generators, buffers that change, attributes of the
    module, values logged, torchmetrics, and the gradients of the batches accumulated so far.

    Args:
        run: whose state.
        seen: what earlier steps have shown of the batch and the module.

    """

    def __init__(self, run: Run, seen: Seen) -> None:
        self._run = run
        self._seen = seen
        self._roots = [
            (f"{type(run.module).__name__}.{name}" if name else type(run.module).__name__, child)
            for name, child in run.module.named_modules()
            if child not in seen.unchanged
        ]
        self._books = Books(run)

    def keep(self, batch: Any, *, gradients: bool) -> None:
        """Remember the present state.

        Args:
            batch: the batch of the step.
            gradients: also the gradients, which are those of earlier batches of an accumulation.

        """
        run = self._run
        self._seen.batch.note([("batch", batch)])
        self._seen.module.note(self._roots)
        self._books.keep()
        self._counts = (run.window_weight, run.skipped_batches)
        self._gradients = (
            [(p, None if p.grad is None else p.grad.clone()) for p in self._parameters()]
            if gradients
            else None
        )

    def restore(self) -> None:
        """Bring back what ``keep`` remembered; as often as needed.

        Raises:
            RuntimeError: a tensor was changed in place of which there is no copy; the message names it.

        """
        run = self._run
        self._seen.batch.restore()
        self._seen.module.restore()
        self._books.restore()
        run.window_weight, run.skipped_batches = self._counts
        if self._gradients is None:
            # The attempt's own gradients: the step begins with none.
            for parameter in self._parameters():
                parameter.grad = None
        else:
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient.clone()

    def module_was_changed(self) -> None:
        """Take the module as it is now, after ``restore``: recomputing replaces the forward of its blocks."""
        self._seen.module.note(self._roots)

    def succeeded(self) -> None:
        """See what the step changed of the batch and the module: the next ones keep copies of that alone."""
        seen = self._seen
        seen.batch.learn()
        living = seen.module.learn()
        if seen.is_sure:
            return
        seen.living.update(self._roots[index][1] for index in living)
        if seen.module.is_sure:
            seen.is_sure = True
            quiet = [
                child
                for _, child in self._roots
                if child not in seen.living and not isinstance(child, LightningModule)
            ]
            seen.unchanged.update(quiet)
            self._roots = [(name, child) for name, child in self._roots if child not in seen.unchanged]

    def _parameters(self) -> Iterator[Any]:
        for optimizer in self._run.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        if not self._run.optimizers:
            yield from self._run.module.parameters()
