"""Callbacks and loggers under Lightning's names whose parameters differ from hasten's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.callbacks import checkpoint, lambda_function, spike
from hasten.loggers import comet
from hasten_lightning.facades import Facade, accepted, exactly

if TYPE_CHECKING:
    from torch import Tensor

    from hasten.fabric import Fabric


class LambdaCallback(lambda_function.LambdaCallback, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(**given)


class ModelCheckpoint(checkpoint.ModelCheckpoint, metaclass=Facade):
    pass


class SpikeDetection(spike.SpikeDetection, metaclass=Facade):
    """Spike detection for ``Fabric(callbacks=...)``, with ``fabric.call("on_train_batch_end", ...)`` for each batch."""

    def _after_batch(self, fabric: Fabric, loss: Tensor, batch: object, batch_idx: int) -> None:
        """Raise ``TrainingSpikeException`` if the loss jumped, on all processes."""
        self._follow(fabric, fabric._runtime, loss.detach().mean(), 1.0, batch_idx, keep=0)

    on_train_batch_end: Any = _after_batch


class CometLogger(comet.CometLogger, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**accepted(CometLogger, given), **kwargs)
