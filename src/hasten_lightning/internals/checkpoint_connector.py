"""Saving and restoring a Trainer's run, under the names that Lightning's Trainer keeps them by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hasten._lib import FIELD_FORMAT, VERSION
from hasten.checkpoint import files
from hasten.checkpoint.contents import Phase, from_lightning, load_scheduler
from hasten.loops.resume import RunState
from hasten.module.hparams import StoredHyperParameters
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten import Callback, LightningDataModule, LightningModule
    from hasten.loops.run import Run
    from hasten.types import PathLike, TrainerState

    class Resumes(Protocol):
        """A Trainer."""

        callbacks: list[Callback]
        datamodule: LightningDataModule | None
        state: TrainerState

        @property
        def current_run(self) -> Run:
            """The run."""

        def dump_checkpoint(self, *, weights_only: bool) -> dict[str, Any]:
            """Return the contents of a checkpoint."""

        @property
        def ckpt_path(self) -> PathLike | None:
            """What the call resumes."""


class CheckpointConnector:
    """Saves and restores the run that a Trainer is in; packages do it in the middle of a run."""

    def __init__(self, trainer: Resumes) -> None:
        self.trainer = trainer
        self._loaded_checkpoint: dict[str, Any] = {}
        self._path = ""

    @property
    def resume_checkpoint_path(self) -> PathLike | None:
        """What the call resumes; None for nothing."""
        return self.trainer.ckpt_path

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return what ``Trainer.save_checkpoint`` would write."""
        return self.trainer.dump_checkpoint(weights_only=bool(weights_only))

    def resume_start(self, checkpoint_path: PathLike | None = None, weights_only: bool | None = None) -> None:
        """Read a checkpoint, by default the one that the call resumes.

        ``weights_only=False`` also reads files that hold Python objects: only for files you trust.
        """
        path = self.resume_checkpoint_path if checkpoint_path is None else checkpoint_path
        if path:
            self._path = str(path)
            contents = files.load(path, map_location="cpu", weights_only=weights_only)
            self._loaded_checkpoint = from_lightning(contents, self._path)

    def restore_model(self) -> None:
        """Give the module the weights that were read, after its hook has seen the checkpoint."""
        run, read = self.trainer.current_run, self._loaded_checkpoint
        if read:
            run.module.on_load_checkpoint(read)
            weights, strict = read["state_dict"], run.module.strict_loading
            run.runtime.strategy.state.load_state_dict(run.module, weights, strict=strict, source=self._path)

    def restore_datamodule(self) -> None:
        """Give the datamodule the state that was read."""
        data = self.trainer.datamodule
        if data is not None and (state := self._loaded_checkpoint.get(type(data).__qualname__)) is not None:
            data.load_state_dict(state)

    def restore_callbacks(self) -> None:
        """Give the callbacks the states that were read."""
        states = self._loaded_checkpoint.get("callbacks") or {}
        for callback in self.trainer.callbacks:
            if (state := states.get(callback.state_key)) is not None:
                callback.load_state_dict(dict(state))

    def restore_training_state(self) -> None:
        """Give optimizers, schedulers and counters the states that were read; nothing outside of ``fit``."""
        if self._loaded_checkpoint and self.trainer.state.fn is TrainerFn.FITTING:
            state = RunState(self.trainer.current_run, self.trainer.callbacks, self.trainer.datamodule)
            for phase in (Phase.POSITION, Phase.TRAINING):
                state.restore(self._loaded_checkpoint, phase, self._path)

    def restore_loops(self) -> None:
        """Give the counters of ``fit`` the states that were read."""
        if self._loaded_checkpoint and self.trainer.state.fn is TrainerFn.FITTING:
            state = RunState(self.trainer.current_run, self.trainer.callbacks, self.trainer.datamodule)
            state.restore(self._loaded_checkpoint, Phase.POSITION, self._path)

    def restore_precision_plugin_state(self) -> None:
        """Give the precision the state that was read, such as the scale of losses in 16 bits."""
        precision = self.trainer.current_run.runtime.precision
        if state := self._loaded_checkpoint.get(type(precision).__qualname__):
            precision.load_state_dict(state)

    def restore_optimizers_and_schedulers(self) -> None:
        """Give optimizers and schedulers the states that were read, and nothing else.

        Raises:
            KeyError: the checkpoint has only weights.

        """
        if self._loaded_checkpoint:
            self.restore_optimizers()
            self.restore_lr_schedulers()

    def restore_optimizers(self) -> None:
        """Give the optimizers the states that were read."""
        strategy = self.trainer.current_run.runtime.strategy
        if self._loaded_checkpoint and strategy.lightning_restore_optimizer:
            strategy.load_optimizer_state_dict(self._loaded_checkpoint)

    def restore_lr_schedulers(self) -> None:
        """Give the schedulers the states that were read."""
        if self._loaded_checkpoint:
            states = self._loaded_checkpoint["lr_schedulers"]
            for config, state in zip(self.trainer.current_run.schedulers, states, strict=False):
                load_scheduler(config.scheduler, state)

    def resume_end(self) -> None:
        """Forget the checkpoint that was read."""
        self._loaded_checkpoint = {}

    def restore(self, checkpoint_path: PathLike | None = None, weights_only: bool | None = None) -> None:
        """Bring module, datamodule, callbacks, optimizers, schedulers and counters to what ``resume_start`` reads."""
        self.resume_start(checkpoint_path, weights_only)
        self.restore_model()
        self.restore_datamodule()
        if self._loaded_checkpoint:
            for callback in self.trainer.callbacks:
                callback.on_load_checkpoint(self.trainer, self.trainer.current_run.module, self._loaded_checkpoint)  # type: ignore[arg-type]
        self.restore_callbacks()
        self.restore_training_state()
        self.resume_end()


def without_run(module: LightningModule) -> dict[str, Any]:
    """Return a checkpoint of a module that has not been trained: its weights and hyper-parameters."""
    checkpoint: dict[str, Any] = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": FIELD_FORMAT,
        "hasten_version": VERSION,
        "state_dict": module.state_dict(),
        "loops": {},
        **StoredHyperParameters((module,)).state_dict(),
    }
    module.on_save_checkpoint(checkpoint)
    return checkpoint
