"""Callbacks of Fabric under Lightning's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.callbacks import spike
from hasten_lightning._classes.callbacks import SpikeStates
from hasten_lightning.facades import Facade

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.fabric import Fabric


class SpikeDetection(SpikeStates, spike.SpikeDetection, metaclass=Facade):
    """Spike detection for ``Fabric(callbacks=...)``, with ``fabric.call("on_train_batch_end", ...)`` for each batch."""

    def _after_batch(self, fabric: Fabric, loss: Tensor, batch: object, batch_idx: int) -> None:
        """Raise ``TrainingSpikeException`` if the loss jumped, on all processes."""
        several = fabric._runtime.several_processes is True
        self._follow(fabric, several, loss.detach().mean(), 1.0, batch_idx, keep=0)

    on_train_batch_end: Any = _after_batch
