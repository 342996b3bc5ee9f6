"""GarbageCollection: let Python's garbage collector run after the same steps on all processes."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class GarbageCollection(Callback):
    """Let Python's garbage collector run after the same steps on all processes, and at no other time of a fit.

    Python looks for objects in reference cycles whenever enough objects were made. With many processes, each does that
    in another step, and all others wait for it in the next collective. With this callback, the automatic collection is
    off while a fit trains, and ``gc.collect(generation)`` runs after every ``every_n_steps`` optimizer steps, on all
    processes after the same step. All generations are collected once before the first step. When the fit ends, also
    by an exception, the collector is on again if it was on before.

    Memory of objects in cycles is freed later than without the callback: choose a smaller ``every_n_steps`` if memory
    grows. The technique is that of torchtitan's ``GarbageCollection`` (``torchtitan/tools/utils.py``).

    Args:
        every_n_steps: optimizer steps between two collections.
        generation: the oldest generation that these collect, 0, 1 or 2, as in ``gc.collect``; 2 takes the longest.

    Raises:
        MisconfigurationException: an argument is out of range.

    Example::

        >>> collection = GarbageCollection(every_n_steps=100)
        >>> collection.every_n_steps, collection.generation
        (100, 1)

    """

    def __init__(self, every_n_steps: int = 50, generation: int = 1) -> None:
        error = MisconfigurationException
        self.every_n_steps = check.whole("GarbageCollection", "every_n_steps", every_n_steps, at_least=1, error=error)
        self.generation = check.whole("GarbageCollection", "generation", generation, at_least=0, at_most=2, error=error)
        self._was_on = False
        self._next = 0

    def on_train_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Collect everything, and switch the automatic collection off."""
        self._was_on = gc.isenabled() or self._was_on
        gc.disable()
        gc.collect()
        self._next = self._due_after(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Collect if that is due after this step."""
        # Not a remainder: two optimizers that step for one batch may pass the number.
        if trainer.global_step >= self._next:
            self._next = self._due_after(trainer.global_step)
            gc.collect(self.generation)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Switch the automatic collection on again."""
        self._restore()

    def on_exception(self, *args: object, **kwargs: object) -> None:
        """Switch the automatic collection on again."""
        self._restore()

    def teardown(self, *args: object, **kwargs: object) -> None:
        """Switch the automatic collection on again, whatever the other hooks did."""
        self._restore()

    def _due_after(self, step: int) -> int:
        return (step // self.every_n_steps + 1) * self.every_n_steps

    def _restore(self) -> None:
        if self._was_on:
            self._was_on = False
            gc.enable()
