"""Callbacks under Lightning's names whose parameters differ from hasten's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.callbacks import checkpoint, checkpoint_files, lambda_function, prediction_writer, spike
from hasten_lightning.facades import Facade, exactly

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer


class LambdaCallback(lambda_function.LambdaCallback, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(**given)


# Tests of programs call hooks with a Mock of a Trainer: it has what Lightning's callbacks read.


def _is_mock(trainer: Trainer) -> bool:
    return not hasattr(type(trainer), "current_run")


class ModelCheckpoint(checkpoint.ModelCheckpoint, metaclass=Facade):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _is_mock(trainer):
            trainer.checkpoint_callbacks, trainer.total_batch_idx, trainer.runtime.writer = [self], 0, None
            trainer.runtime.several_processes = trainer.strategy.engine.holds_gradients = False
        super().on_train_start(trainer, pl_module)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if _is_mock(trainer):
            trainer.runtime.writer = None
        checkpoint.ModelCheckpoint._link_checkpoint(trainer, filepath, linkpath)

    def __resolve_ckpt_dir(self, trainer: Trainer) -> Any:
        return checkpoint_files.default_folder(trainer) if self.dirpath is None else self.dirpath


class OnExceptionCheckpoint(checkpoint.OnExceptionCheckpoint, metaclass=Facade):
    def on_exception(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        if _is_mock(trainer):
            trainer.save_checkpoint(self.ckpt_path)
        else:
            super().on_exception(trainer, *args, **kwargs)

    def teardown(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        if _is_mock(trainer):
            trainer.strategy.remove_checkpoint(self.ckpt_path)
        else:
            super().teardown(trainer, *args, **kwargs)


class BasePredictionWriter(prediction_writer.BasePredictionWriter, metaclass=Facade):
    def on_predict_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_predict_batch_end(_with_run(trainer), *args, **kwargs)

    def on_predict_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_predict_epoch_end(_with_run(trainer), *args, **kwargs)


def _with_run(trainer: Trainer) -> Trainer:
    if _is_mock(trainer):
        done, loop = trainer.current_run.evaluation, trainer.predict_loop
        done.batch_indices, done.epoch_batch_indices = loop.current_batch_indices, loop.epoch_batch_indices
        done.kept_predictions = loop.predictions
    return trainer


class SpikeStates(spike.SpikeDetection):
    """Attributes and states that spike detection of Lightning has."""

    @property
    def last_val(self) -> float:
        """The loss of the last batch of the first process."""
        return self._last[0] if self._last else 0.0

    @property
    def running_mean(self) -> Any:
        """The mean of the losses to which the next one is compared, as a metric of torchmetrics."""
        from torchmetrics.aggregation import MeanMetric
        from torchmetrics.wrappers import Running

        mean = Running(MeanMetric(), window=self.window)
        for loss in self._recent[0] if self._recent else ():
            mean.update(loss)
        return mean

    def state_dict(self) -> dict[str, Any]:
        mean, names = self.running_mean, ("last_val", "mode", "warmup", "atol", "rtol")
        return {
            **{name: getattr(self, name) for name in names},
            "bad_batches_path": self.exclude_batches_path,
            "running": mean.state_dict(),
            "mean": mean.base_metric.state_dict(),
            **super().state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name in ("mode", "warmup", "atol", "rtol"):
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        self.exclude_batches_path = state_dict.get("bad_batches_path", self.exclude_batches_path)


class SpikeDetection(SpikeStates, spike.SpikeDetection, metaclass=Facade):
    pass
