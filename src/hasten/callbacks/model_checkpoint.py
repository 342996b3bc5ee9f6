"""ModelCheckpoint: when to save, under which name, and which files to keep."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from weakref import proxy

import torch
from torch import Tensor

from hasten._lib.errors import BadLossError
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.callbacks.checkpoint_arguments import check_arguments, check_folder
from hasten.callbacks.checkpoint_files import CheckpointFiles
from hasten.callbacks.checkpoint_folders import checkpoints_in, clean, default_folder
from hasten.callbacks.clock import AgreedClock
from hasten.callbacks.monitored import Origin, not_logged, validates
from hasten.callbacks.silent import silence, unsilence
from hasten.loggers.folders import is_url
from hasten.loops.states import TrainerFn

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

_BOOKS = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
    "_ranked_step",
    "_saved_at",
    "_last_at",
    "_unwanted",
)


class ModelCheckpoint(CheckpointFiles):
    """Save the run while it trains: the best ones by a logged value, and the last.

    A file is written beside its final name and renamed when it is whole; only then is a file that is no
    longer among the best removed. ``last`` is saved whenever saving is due, whatever became of the monitored
    value. On Ctrl-C and SIGTERM the state after the last complete batch is saved as ``last.ckpt``.

    Args:
        dirpath: folder of the files, or a URL; by default ``checkpoints`` in the logger's folder of the run.
        filename: template of the names, such as ``"{epoch}-{val_loss:.2f}"``; ``"{epoch}-{step}"`` by default.
        monitor: name of a logged value that ranks the files; None keeps the newest.
        verbose: say what is saved.
        save_last: also keep ``last.ckpt``; ``"link"`` makes it a symbolic link where a file was just saved.
        save_top_k: how many of the best to keep; -1 for all, 0 for none.
        save_on_exception: save when an exception ends the run.
        save_weights_only: leave out what only training needs; a run cannot go on from such a file.
        mode: "min" when lower is better, "max" when higher is.
        auto_insert_metric_name: write ``name=value`` in file names, not the value alone.
        every_n_train_steps: save after this many optimizer steps.
        train_time_interval: save after this much time.
        every_n_epochs: save after this many epochs; 1 if nothing else says when.
        save_on_train_epoch_end: save when a training epoch ends (True) or when a validation ends (False); by
            default where the monitored value is new.
        enable_version_counter: give a name that exists a version (``-v1``) instead of writing over it.

    Raises:
        MisconfigurationException: an argument is out of range, or two contradict each other; during the run,
            if ``monitor`` was not logged by the time it should be there.

    Example::

        >>> best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
        >>> best.format_checkpoint_name({"epoch": 3, "val_acc": 0.9125})
        'epoch=3-val_acc=0.912.ckpt'

    """

    kth_value: Tensor

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | str | None = None,
        train_time_interval: timedelta | str | dict[str, int] | None = None,
        every_n_epochs: int | str | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        steps, epochs, interval = check_arguments(
            filename=filename,
            monitor=monitor,
            save_last=save_last,
            save_top_k=save_top_k,
            mode=mode,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
        )
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.dirpath: str | None = check_folder(dirpath)
        self.filename = filename
        self._every_n_train_steps = steps
        self._every_n_epochs = epochs
        self._train_time_interval = interval
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        self._default_folder = self.dirpath is None

        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.current_score: Tensor | None = None
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)
        self.last_model_path = ""

        self._last_checkpoint_saved = ""
        self._last_global_step_saved = 0
        self._ranked_step = 0
        # (optimizer steps, batches) at which a file, and ``last``, was saved.
        self._saved_at: tuple[int, int] | None = None
        self._last_at: tuple[int, int] | None = None
        self._unwanted: list[str] = []
        self._found_as_last: str | None = None
        self._resumed = False
        self._deferred = False
        self._origin = Origin(monitor)
        self._clock = AgreedClock()
        self._last_time_checked: float | None = None
        self._hear_batches()

    @property
    def every_n_epochs(self) -> int:
        """Epochs between saves; 0 when epochs do not count."""
        return self._every_n_epochs

    # -- state

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint; two of them differ in ``monitor``, ``mode`` or when they save."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return which files there are and how good they are."""
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
            "books": {
                "last_checkpoint_saved": self._last_checkpoint_saved,
                "last_global_step_saved": self._last_global_step_saved,
                "ranked_step": self._ranked_step,
                "saved_at": None if self._saved_at is None else list(self._saved_at),
                "last_at": None if self._last_at is None else list(self._last_at),
                "unwanted": list(self._unwanted),
                "deferred": self._deferred,
                "origin": self._origin.place,
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned; from another folder only ``best_model_path``."""
        self.best_model_path = state_dict["best_model_path"]
        folder = state_dict.get("dirpath", self.dirpath)
        if folder != self.dirpath:
            if not self._default_folder:
                rank_zero_warn(
                    f"ModelCheckpoint: the dirpath has changed from {folder!r} to {self.dirpath!r}, so the ranking "
                    "of the files starts again; only best_model_path is taken over. Give the same dirpath= to go on "
                    "with it."
                )
            return
        self._resumed = True
        self.best_model_score = state_dict["best_model_score"]
        self.current_score = state_dict.get("current_score", self.current_score)
        self.best_k_models = dict(state_dict.get("best_k_models", self.best_k_models))
        self.kth_best_model_path = state_dict.get("kth_best_model_path", self.kth_best_model_path)
        self.kth_value = torch.as_tensor(state_dict.get("kth_value", self.kth_value))
        self.last_model_path = state_dict.get("last_model_path", self.last_model_path)
        books = state_dict.get("books")
        if books is not None:
            self._last_checkpoint_saved = books["last_checkpoint_saved"]
            self._last_global_step_saved = books["last_global_step_saved"]
            self._ranked_step = books["ranked_step"]
            self._saved_at = None if books["saved_at"] is None else tuple(books["saved_at"])
            self._last_at = None if books["last_at"] is None else tuple(books["last_at"])
            self._unwanted = list(books["unwanted"])
            self._deferred = books["deferred"]
            self._origin.place = books["origin"]

    # -- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Settle the folder, and remove what a killed writer left there."""
        folder = trainer.strategy.broadcast(self.dirpath or default_folder(trainer))
        self.dirpath = folder
        if self.save_last == "link" and is_url(folder):
            raise ValueError(
                f"ModelCheckpoint(save_last='link', dirpath={folder!r}): links need a local folder. "
                "Use save_last=True."
            )
        if trainer.is_global_zero and stage == TrainerFn.FITTING:
            clean(folder)
        self._hear_batches()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and look at what is in the folder."""
        self._last_time_checked = time.monotonic()
        self._origin.start(trainer)
        if not trainer.is_global_zero or not self.dirpath:
            return
        if self._resumed:
            self._remove_unwanted(trainer, keep=trainer.ckpt_path)
        elif (
            not self._default_folder
            and self.save_top_k != 0
            and not self._last_checkpoint_saved
            and checkpoints_in(self.dirpath, self.FILE_EXTENSION)
        ):
            rank_zero_warn(
                f"Checkpoint directory {self.dirpath} exists and is not empty. Its files stay, and a new one of the "
                "same name gets a version such as -v1. Give each run its own dirpath=, or go on with an earlier "
                "run by ckpt_path='last'."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if steps or time say so."""
        if not self._due_after_batch(trainer) or self._should_skip_saving_checkpoint(trainer):
            return
        self._origin.during_training(trainer)
        # Ranking waits for a new value; what is kept whatever its rank does not wait once there is a value.
        waits = self.monitor is not None and self._origin.place != "step" and self.save_top_k != 0
        if waits and self.save_top_k == -1 and self._origin.place is not None:
            waits = False
        self._deferred = self._deferred or waits
        self._save(trainer, ranked=not waits)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn where the monitored value comes from."""
        if not trainer.sanity_checking and trainer.state.fn == TrainerFn.FITTING:
            self._origin.during_training(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if this is where it is due."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._origin.after_validation(trainer)
        if self._deferred and self._origin.place in ("validate", "step"):
            self._save(trainer, ranked=True)
        elif self._saves_after_epochs(trainer) and not self._should_save_on_train_epoch_end(trainer):
            if self._waits_for_epoch_end(trainer):
                return
            self._save(trainer, ranked=self._every_n_epochs > 0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if this is where it is due."""
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._origin.after_train_epoch(trainer)
        if self._deferred and self._origin.place == "epoch":
            self._save(trainer, ranked=True)
        elif self._saves_after_epochs(trainer) and (
            self._should_save_on_train_epoch_end(trainer) or self._waits_for_epoch_end(trainer)
        ):
            self._save(trainer, ranked=self._every_n_epochs > 0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that ``last`` exists."""
        if self.save_last and self._last_at is None and not self._should_skip_saving_checkpoint(trainer):
            self._save(trainer, ranked=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove what a killed run no longer wanted, also where it was resumed with nothing left to train."""
        if self._resumed:
            self._remove_unwanted(trainer, keep=trainer.ckpt_path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state when the run is stopped from outside, and on errors if asked to."""
        if self._should_skip_saving_checkpoint(trainer) or trainer.total_batch_idx < 0:
            return
        here = self._here(trainer)
        if isinstance(exception, (KeyboardInterrupt, SystemExit, BadLossError)):
            if (
                trainer.between_batches
                and self._keeps_stopped_run(trainer)
                and here
                not in (
                    self._saved_at,
                    self._last_at,
                )
            ):
                self._save_stopped(trainer)
        elif self.save_on_exception and self._saved_at != here:
            candidates = self._monitor_candidates(trainer)
            path = self._get_metric_interpolated_filepath_name(candidates, trainer)
            self._save_checkpoint(trainer, path)
            self._save_last_checkpoint(trainer, candidates)
            rank_zero_info(f"{type(exception).__name__}: {exception}. Saved the run as {path}.")

    def _due_after_batch(self, trainer: Trainer) -> bool:
        if self._every_n_train_steps:
            step = trainer.global_step
            # Batches of an accumulation share a step: once is enough.
            return step % self._every_n_train_steps == 0 and step != self._last_global_step_saved
        if self._train_time_interval is None:
            return False
        since = self._last_time_checked
        now = time.monotonic()
        late = since is not None and now - since >= self._train_time_interval.total_seconds()
        if self._clock.late(trainer, late):
            self._last_time_checked = now
            return True
        return False

    def _saves_after_epochs(self, trainer: Trainer) -> bool:
        every = self._every_n_epochs
        if every:
            return (trainer.current_epoch + 1) % every == 0
        # every_n_epochs=0 alone switches off the ranked files, not ``last``.
        return bool(self.save_last) and not self._every_n_train_steps and self._train_time_interval is None

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if self._origin.place == "epoch" or not validates(trainer):
            return True
        return bool(trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval == 1.0)

    def _waits_for_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether the value may still come: at the end of an epoch that does end."""
        if self.monitor is None or self.save_top_k == 0 or self._origin.place is not None:
            return False
        return trainer.num_training_batches != float("inf")

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return bool(trainer.fast_dev_run) or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking

    def _keeps_stopped_run(self, trainer: Trainer) -> bool:
        first = next((one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)), self)
        return bool(self.save_last) or first is self

    def _hear_batches(self) -> None:
        """Listen to batches only if steps or time say when to save: otherwise a step costs nothing."""
        if self._every_n_train_steps or self._train_time_interval is not None:
            unsilence(self, "on_train_batch_end")
        else:
            silence(self, ModelCheckpoint, "on_train_batch_end")

    # -- what

    def _save(self, trainer: Trainer, *, ranked: bool) -> None:
        """Save the ranked file if it is good enough, then ``last``; then remove what they replace."""
        candidates = self._monitor_candidates(trainer)
        if ranked:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)
        self._remove_unwanted(trainer)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k == 0 or self._ranked_step == trainer.global_step:
            self._deferred = False
            return
        if self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
            return
        if self.monitor not in monitor_candidates:
            if not self._origin.validations and validates(trainer):
                return  # the first validation is still to come
            raise not_logged("ModelCheckpoint", self.monitor, trainer.callback_metrics)
        self._deferred = False
        current = monitor_candidates[self.monitor]
        if self.check_monitor_top_k(trainer, current):
            self._update_best_and_save(current, trainer, monitor_candidates)
        elif self.verbose:
            rank_zero_info(
                f"Epoch {trainer.current_epoch}, global step {trainer.global_step}: {self.monitor!r} was not in "
                f"top {self.save_top_k}"
            )

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a value is good enough to be kept."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        better = torch.lt if self.mode == "min" else torch.gt
        return bool(better(current, self.best_k_models[self.kth_best_model_path]))

    def _update_best_and_save(
        self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        books = self._copy_of_books()
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        replaced = self.kth_best_model_path if len(self.best_k_models) == k else ""
        if torch.isnan(current):
            # NaN compares with nothing; as the worst value it is replaced by the first number.
            current = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced)
        self.best_k_models = {name: score for name, score in self.best_k_models.items() if name != replaced}
        self.best_k_models[path] = self.current_score = current
        best, worst = (min, max) if self.mode == "min" else (max, min)
        if len(self.best_k_models) == k:
            self.kth_best_model_path = worst(
                self.best_k_models, key=lambda name: float(self.best_k_models[name])
            )
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = best(self.best_k_models, key=lambda name: float(self.best_k_models[name]))
        self.best_model_score = self.best_k_models[self.best_model_path]
        self._replace(trainer, replaced, path)
        if self.verbose:
            rank_zero_info(
                f"Epoch {trainer.current_epoch}, global step {trainer.global_step}: {self.monitor!r} reached "
                f"{current:0.5f} (best {self.best_model_score:0.5f}), saving model to {path!r} as top {k}"
            )
        self._save_or_undo(trainer, path, books, ranked=True)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        books = self._copy_of_books()
        # With -1 all are kept, so that none may be written over.
        previous = self.best_model_path if self.save_top_k == 1 else ""
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, previous)
        self.best_model_path = path
        self._replace(trainer, previous, path)
        self._save_or_undo(trainer, path, books, ranked=True)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        here = self._here(trainer)
        if not self.save_last or trainer.total_batch_idx < 0:
            return
        just_saved = self._last_checkpoint_saved if self._saved_at == here else ""
        if self._last_at == here and not (just_saved and just_saved != self.last_model_path):
            return
        books = self._copy_of_books()
        previous = self.last_model_path
        path = self._free_name(trainer, monitor_candidates, self.CHECKPOINT_NAME_LAST, previous)
        self.last_model_path, self._last_at = path, here
        self._replace(trainer, previous, path)
        if self.save_last == "link" and just_saved:
            self._link_checkpoint(trainer, just_saved, path)
        else:
            self._save_or_undo(trainer, path, books)

    def _save_stopped(self, trainer: Trainer) -> None:
        """Save a run that was stopped from outside, such that it goes on from here."""
        candidates = self._monitor_candidates(trainer)
        books = self._copy_of_books()
        previous = self.last_model_path
        path = self._free_name(trainer, candidates, self.CHECKPOINT_NAME_LAST, previous)
        self._last_at = self._here(trainer)
        if self.save_last:
            self.last_model_path = path
            self._replace(trainer, previous, path)
        else:
            # It is there to go on from, and no longer wanted once the resumed run has saved again.
            self._unwanted = [*self._unwanted, path]
        self._save_or_undo(trainer, path, books)
        rank_zero_info(f"Saved the run as {path}. To go on, call fit with ckpt_path='last'.")

    def _save_or_undo(
        self, trainer: Trainer, path: str, books: dict[str, Any], *, ranked: bool = False
    ) -> None:
        # The file holds the books as they are once it is there; without the file they are as before.
        if ranked:
            self._ranked_step = trainer.global_step
        try:
            self._save_checkpoint(trainer, path)
        except BaseException:
            self.__dict__.update(books)
            raise

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        self._saved_at = self._here(trainer)
        trainer.save_checkpoint(filepath, self.save_weights_only)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def _copy_of_books(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _BOOKS}

    @staticmethod
    def _here(trainer: Trainer) -> tuple[int, int]:
        return trainer.global_step, trainer.total_batch_idx

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return everything logged, on the host, with ``epoch`` and ``step``; equal on all processes."""
        if trainer.world_size > 1:
            trainer.sync_step_values()
        values = {
            name: torch.as_tensor(value).detach().cpu() for name, value in trainer.callback_metrics.items()
        }
        values = {name: value.clone() for name, value in values.items()}
        for name, count in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            values[name] = values[name].int() if name in values else torch.tensor(count)
        if trainer.world_size > 1:
            # Values differ between processes unless they were logged with sync_dist; names must not.
            values = trainer.strategy.broadcast(values)
        return values
