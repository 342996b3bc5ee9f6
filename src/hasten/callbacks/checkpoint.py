"""ModelCheckpoint: when to save, under which name, and which files to keep; OnExceptionCheckpoint."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar
from weakref import proxy

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.durations import Period, parse_duration, parse_interval
from hasten._lib.errors import BadLossError, MisconfigurationException, make_error
from hasten._lib.files import file_system, require_folder
from hasten._lib.names import defined_by_program, warn_of_mode, without_unknown
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn, warn_once
from hasten.callbacks import checkpoint_files
from hasten.callbacks.early_stopping import MetricSource, begins_anew, check_monitor, ends_before, not_logged, validates
from hasten.callbacks.timer import SharedDeadline
from hasten.checkpoint.files import remove
from hasten.elsewhere import conventions
from hasten.extend.origin import is_builtin
from hasten.hooks import use_hooks
from hasten.loggers.folders import exists, is_url, write_whole
from hasten.machine import agreement
from hasten.module.callback import Callback
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.checkpoint.background import BackgroundWriter
    from hasten.types import Batch, StepOutput


T = TypeVar("T")


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints: a Trainer runs them after all others.

    Example::

        >>> issubclass(Checkpoint, Callback)
        True

    """

    runs_last: ClassVar[bool] = True


# The files written and their scores, by the keys of the checkpoint. They are replaced, never changed in place, so that
# a failed save restores them together.
_SCORES = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
# The same for attributes that begin with an underscore, which the key "ranking" stores.
_RANKING = (
    "deferred",
    "last_at",
    "last_checkpoint_saved",
    "last_global_step_saved",
    "ranked_step",
    "saved_at",
    "unwanted",
    "written",
)

_SAVED = (*_SCORES, *(f"_{key}" for key in _RANKING))
_NAMES = ("best_k_models", "best_model_path", "kth_best_model_path", "last_model_path")


_COUNTERS = ("epoch", "step")


class _NamesFiles(Generic[T]):
    """The default of an attribute that names files.

    While these are being written the attribute is not in ``vars(callback)``, so that who asks for it comes here.
    """

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type[ModelCheckpoint], name: str) -> None:
        self._name = name

    def __get__(self, callback: ModelCheckpoint | None, owner: type[ModelCheckpoint]) -> T:
        if callback is None:
            return self._default
        if "_names_aside" in vars(callback):
            callback._show_names()
        value: T = vars(callback).get(self._name, self._default)
        return value


class ModelCheckpoint(Checkpoint):
    """Save the run while it trains: the best ones by a logged value, and the last.

    A file is written under a temporary name and renamed when it is complete; only then is a file that is no
    longer among the best removed. ``last`` is saved whenever saving is due, whatever the monitored value.
    Large files are written in the background while training continues; reading ``best_model_path`` and the other
    names of files waits for them. See ``docs/checkpoints.md``.
    On Ctrl-C and SIGTERM the state after the last complete batch is saved as ``last.ckpt``.

    Args:
        dirpath: folder of the files, or a URL; by default ``checkpoints`` in the logger's folder of the run.
        filename: template of the names, such as ``"{epoch}-{val_loss:.2f}"``; ``"{epoch}-{step}"`` by default.
        monitor: name of a logged value that ranks the files; None keeps the newest.
        verbose: report what is saved.
        save_last: also keep ``last.ckpt``; ``"link"`` makes it a symbolic link to a file that was just saved.
        save_top_k: how many of the best to keep; -1 for all, 0 for none.
        keep_latest_k: with ``save_top_k=-1``, keep this many of the newest files; None for all.
        keep_for: with ``save_top_k=-1``, keep files this long after they are saved, such as ``"7d"``; None for ever.
            With both, a file is removed when neither keeps it. The newest file, the best one by ``monitor`` and the one
            from which this run resumed always stay. Files are removed when the next one has been saved.
        save_on_exception: save when an exception ends the run.
        save_weights_only: leave out what only training needs; such a file cannot resume a run.
        mode: "min" when lower is better, "max" when higher is.
        auto_insert_metric_name: write ``name=value`` in file names, not the value alone; ``val/loss=`` makes a folder.
        every_n_train_steps: save after this many optimizer steps, when the batch ends. In manual optimization, a file
            has the weights before the step for the layer ``self.layer`` if ``training_step`` keeps them:
            ``self.saved_models[batch_idx] = {name: value.clone() for name, value in self.layer.state_dict().items()}``.
        train_time_interval: save after this much time.
        every_n_epochs: save after this many epochs; 1 unless another argument sets the interval.
        save_on_train_epoch_end: save when a training epoch ends (True) or when a validation ends (False); by
            default where the monitored value is new.
        enable_version_counter: add a version (``-v1``) to a name that exists instead of overwriting the file.

    Raises:
        MisconfigurationException: an argument is out of range, or two contradict each other; during the run,
            if ``monitor`` was not logged by the time it should be there.

    Example::

        >>> best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
        >>> best.format_checkpoint_name({"epoch": 3, "val_acc": 0.9125})
        'epoch=3-val_acc=0.912.ckpt'

    """

    CHECKPOINT_JOIN_CHAR: str = "-"
    CHECKPOINT_EQUALS_CHAR: str = "="
    CHECKPOINT_NAME_LAST: str = "last"
    # How to resume a run that was stopped, in a message.
    HOW_TO_RESUME: str = "call fit with ckpt_path='last'"
    FILE_EXTENSION: str = ".ckpt"
    STARTING_VERSION: ClassVar[int] = 1

    best_k_models = _NamesFiles[dict[str, Tensor]]({})
    best_model_path = _NamesFiles("")
    best_model_score: Tensor | None = None
    current_score: Tensor | None = None
    kth_best_model_path = _NamesFiles("")
    kth_value: Tensor = torch.tensor(torch.inf)
    last_model_path = _NamesFiles("")
    _last_checkpoint_saved: str = ""
    _last_global_step_saved: int = 0
    _ranked_step: int = 0
    # [optimizer steps, batches] at which a file, and ``last``, was saved.
    _saved_at: list[int] | None = None
    _last_at: list[int] | None = None
    # Files to remove once their replacement is complete; in checkpoints, so that a resumed run removes them too.
    _unwanted: list[str] = []  # noqa: RUF012 - replaced, never changed in place
    # When each ranked file was saved, in seconds since 1970, the newest last; with keep_latest_k or keep_for
    _written: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed in place
    # Whether a ranked save is due and waits for a new value of the monitored metric.
    _deferred: bool = False
    # The optimizer steps when the last batch had ended.
    _step_before: int | None = None
    # Whether the ranking is that of the checkpoint from which the run was resumed.
    _resumed: bool = False
    # Whether the current call is an evaluation.
    _evaluates: bool = False
    # Whether ``last`` is still to be saved before replaced files are removed.
    _saves_both: bool = False
    # What may still be writing the last save, and names of its files until they are complete.
    _writer: BackgroundWriter | None = None
    _names_aside: dict[str, Any]

    @without_unknown
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
        mode: Literal["min", "max"] = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | str | timedelta | dict[str, int] | None = None,
        train_time_interval: timedelta | str | dict[str, int] | None = None,
        every_n_epochs: int | str | timedelta | dict[str, int] | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        keep_latest_k: int | None = None,
        keep_for: timedelta | str | dict[str, int] | None = None,
    ) -> None:
        check.declared(ModelCheckpoint.__init__, locals())
        super().__init__()
        owner, error = "ModelCheckpoint", MisconfigurationException
        self.mode = check.one_of(owner, "mode", mode, ("min", "max"), error=error)
        self.monitor = None if monitor is None else check_monitor("ModelCheckpoint", monitor)
        if monitor is not None and save_top_k != -1:
            warn_of_mode(owner, monitor, mode)
        if filename is not None:
            checkpoint_files.check_template(filename)
            if filename.endswith(self.FILE_EXTENSION):
                rank_zero_warn(
                    f"ModelCheckpoint(filename={filename!r}): the files end in {self.FILE_EXTENSION * 2}.",
                    fix=f"Leave {self.FILE_EXTENSION} out: it is added to every name.",
                )
        check.one_of(owner, "save_last", save_last, (True, False, "link"), allow_none=True, error=error)
        allowed = "how many to keep, -1 for all, 0 for none"
        check.whole(owner, "save_top_k", save_top_k, at_least=-1, allowed=allowed, error=error)
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise MisconfigurationException(
                f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration. No quantity for "
                "top_k to track.",
                fix="Give monitor=, or save_top_k=-1 to keep all, 1 to keep the newest.",
                argument="save_top_k",
            )
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.keep_latest_k: int | None = None
        self.keep_for: timedelta | None = None
        if keep_latest_k is not None or keep_for is not None:
            self.keep_latest_k, self.keep_for = _retention(keep_latest_k, keep_for, save_top_k)
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.dirpath: str | None = checkpoint_files.resolve(dirpath)
        checkpoint_files.warn_of_file(dirpath, monitor)
        self.filename = filename
        self._every_n_train_steps, self._every_n_epochs, self._train_time_interval = _intervals(
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=train_time_interval,
        )
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        self._default_folder = self.dirpath is None

        self._begin_ranking()
        self._found_as_last: str | None = None
        self._source = MetricSource(monitor)
        if monitor in _COUNTERS:
            # These two are always available, without being logged.
            self._source.stage = "step"
        self._deadline = SharedDeadline()
        self._last_time_checked: float | None = None

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

    @property
    def _fs(self) -> Any:
        """The fsspec file system of the folder, for subclasses of programs for Lightning."""
        return file_system(self.dirpath or "")

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "dirpath": self.dirpath,
            **{key: getattr(self, key) for key in _SCORES},
            "ranking": {**{key: getattr(self, f"_{key}") for key in _RANKING}, "origin": self._source.stage},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the ranking; from another folder only ``best_model_path``."""
        if self._evaluates and self.best_model_path:
            return  # Weights that are tested may be those of another run.
        self.best_model_path = state_dict["best_model_path"]
        # Earlier versions called it "books".
        ranking = state_dict.get("ranking", state_dict.get("books", {}))
        # When the monitored value changes is a fact about the program, not about the folder.
        self._source.stage = ranking.get("origin", self._source.stage)
        self._deferred = ranking.get("deferred", self._deferred)
        folder = state_dict.get("dirpath", self.dirpath)
        if folder != self.dirpath:
            if self._default_folder:
                self.best_model_score = state_dict.get("best_model_score")
            # With save_top_k=0 no files are ranked.
            if self.save_top_k and (self.monitor is not None or not self._default_folder):
                rank_zero_warn(
                    f"The dirpath has changed from {folder!r} to {self.dirpath!r}, so a new ranking "
                    f"starts: the next file that is saved is its best, and until then {self.best_model_path!r} is.",
                    fix="Pass the same dirpath= to continue the old one.",
                )
            return
        self._resumed = True
        for key in _SCORES:
            setattr(self, key, state_dict.get(key, getattr(self, key)))
        self.kth_value = torch.as_tensor(self.kth_value)
        for key in ranking.keys() & set(_RANKING):
            setattr(self, f"_{key}", ranking[key])

    # -- when to save

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder, and remove temporary files of killed writers."""
        folder: str = trainer.strategy.broadcast(self.dirpath or checkpoint_files.default_folder(trainer))
        fits = stage == TrainerFn.FITTING
        self.dirpath, self._evaluates, self._step_before = folder, not fits, None
        if self.save_last == "link" and is_url(folder):
            what = f"ModelCheckpoint(save_last='link', dirpath={folder!r}): links need a local folder."
            raise make_error(ValueError, what, fix="Use save_last=True.", argument="save_last")
        if trainer.is_global_zero and fits:
            if not is_url(folder):
                require_folder("ModelCheckpoint", "dirpath", folder)
            checkpoint_files.clean(folder)
        # Without steps and time to count, no hook runs after each batch.
        is_used = bool(self._every_n_train_steps) or self._train_time_interval is not None
        use_hooks(self, ModelCheckpoint, is_used, "on_train_batch_end")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and check what is in the folder."""
        self._last_time_checked = time.monotonic()
        self._source.start(trainer)
        if self._last_checkpoint_saved and begins_anew(trainer):
            self._begin_ranking()
        if self.save_top_k and not self.save_last and ends_before(trainer, self._every_n_epochs - 1):
            rank_zero_warn(
                f"ModelCheckpoint(every_n_epochs={self._every_n_epochs}): nothing is saved in the epochs of "
                f"Trainer(max_epochs={trainer.max_epochs}).",
                fix="Save more often.",
            )
        if not trainer.is_global_zero or not self.dirpath:
            return
        others = (one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint))
        checkpoint_files.warn_of_shared_names(self, others)
        if self._resumed:
            self._remove_replaced(trainer, keep_start=True)
        elif (
            not self._default_folder
            and self.save_top_k != 0
            and not self._last_checkpoint_saved
            and checkpoint_files.find(self.dirpath, self.FILE_EXTENSION)
        ):
            rank_zero_warn(
                f"Checkpoint directory {self.dirpath} exists and is not empty. Its files are kept; a new file of the "
                "same name gets a version such as -v1.",
                fix="Pass another dirpath=, or resume with ckpt_path='last'.",
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.strategy.engine.holds_gradients:
            return  # When the accumulation is complete.
        if not self._due_after_batch(trainer) or self._should_skip_saving_checkpoint(trainer):
            return
        self._source.update_in_training(trainer)
        source = self._source.stage
        # Ranking waits for a new value; keeping all files only waits for the first, and for one that comes at once.
        waits = self.monitor is not None and source != "step" and self.save_top_k != 0
        if self.save_top_k == -1 and source is not None:
            waits = waits and self._value_follows(trainer)
        self._deferred = self._deferred or waits
        with _weights_before_step(pl_module) as replaced:
            self._save(trainer, ranked=not waits, at_once=replaced)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn is TrainerFn.FITTING:
            self._source.update_in_training(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._source.update_after_validation(trainer)
        if self._deferred and self._source.stage in ("validate", "step"):
            self._save(trainer, ranked=True)
        elif self._due_after_epoch(trainer) and not self._saves_at_epoch_end(trainer):
            self._save(trainer, ranked=self._every_n_epochs > 0)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        self._source.update_after_epoch(trainer)
        if self._deferred and self._source.stage == "epoch":
            self._save(trainer, ranked=True)
        elif self._due_after_epoch(trainer) and self._saves_at_epoch_end(trainer):
            self._save(trainer, ranked=self._every_n_epochs > 0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make sure that ``last`` exists; if it is the only file, that it is the last state."""
        if (
            self.save_last
            and (self._last_at is None or not self.save_top_k)
            and not self._should_skip_saving_checkpoint(trainer)
        ):
            self._save(trainer, ranked=False, at_once=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove files that a killed run had replaced, also if the resumed run had nothing left to train."""
        if self._resumed:
            self._remove_replaced(trainer, keep_start=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state when the run is stopped from outside, and on errors with ``save_on_exception``."""
        if self._should_skip_saving_checkpoint(trainer) or trainer.total_batch_idx < 0:
            return
        position = _position(trainer)
        # Those of signals; a program may raise the first two itself.
        is_stop = isinstance(exception, (KeyboardInterrupt, SystemExit, BadLossError))
        by_program = trainer.current_run.limits.stop.agreed_signal is None and not isinstance(exception, BadLossError)
        if is_stop and not (by_program and self.save_on_exception):
            is_saved = not self.save_weights_only and position in (self._saved_at, self._last_at)
            if trainer.between_batches and self._keeps_stopped_run(trainer):
                if is_saved:
                    self._tell_where(self._last_checkpoint_saved)
                else:
                    self._save_stopped(trainer)
        elif self.save_on_exception and self._saved_at != position and _all_failed(self, trainer):
            candidates = self._monitor_candidates(trainer)
            path = self._get_metric_interpolated_filepath_name(candidates, trainer)
            with self._undo_on_failure():
                self._save_checkpoint(trainer, path)
                self._save_last_checkpoint(trainer, candidates)
            kind = type(exception).__name__
            rank_zero_info(f"{kind} was raised with message: {exception}. Saved checkpoint to {path}.")

    def _due_after_batch(self, trainer: Trainer) -> bool:
        if self._train_time_interval is None:
            step, every = trainer.global_step, self._every_n_train_steps
            before = step - 1 if self._step_before is None else min(self._step_before, step - 1)
            self._step_before = step
            # Not a remainder: in manual optimization, a batch may have several steps. The batches of one accumulation
            # share a step: save once.
            return every > 0 and step // every > before // every and step != self._last_global_step_saved
        since, now = self._last_time_checked, time.monotonic()
        is_late = since is not None and now - since >= self._train_time_interval.total_seconds()
        is_due = self._deadline.passed(trainer, is_late)
        if is_due:
            self._last_time_checked = now
        return is_due

    def _value_follows(self, trainer: Trainer) -> bool:
        """Return whether the monitored value is logged again before another batch is trained."""
        run = trainer.current_run
        if self._source.stage == "validate":
            schedule = run.data.validation_schedule
            return schedule.decided_by is None and schedule.reached(run)
        return run.progress.last_batch

    def _due_after_epoch(self, trainer: Trainer) -> bool:
        every = self._every_n_epochs
        if every:
            return (trainer.current_epoch + 1) % every == 0
        # every_n_epochs=0 alone switches off the ranked files, not ``last``.
        return bool(self.save_last) and not self._every_n_train_steps and self._train_time_interval is None

    def _saves_at_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether to save when a training epoch ends, not when a validation ends."""
        # A value not seen yet may be logged at the end of the epoch, if it has one.
        may_come = self.monitor is not None and self.save_top_k != 0 and self._source.stage is None
        if may_come and trainer.num_training_batches != float("inf"):
            return True
        return self._should_save_on_train_epoch_end(trainer)

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        chosen = self._save_on_train_epoch_end
        return self._source.is_new_after_epoch(trainer) if chosen is None else chosen

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        return bool(trainer.fast_dev_run) or trainer.state.fn is not TrainerFn.FITTING or trainer.sanity_checking

    def _keeps_stopped_run(self, trainer: Trainer) -> bool:
        others = (each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint))
        return bool(self.save_last) or next(others, self) is self

    # -- what to save

    def _save(self, trainer: Trainer, *, ranked: bool, at_once: bool = False) -> None:
        """Save the ranked file if it is good enough, then ``last``; then remove what they replace."""
        writer = trainer.runtime.writer
        if (
            at_once
            or writer is None
            or not (type(self) is ModelCheckpoint or is_builtin(type(self)))
            or checkpoint_files.is_followed(trainer)
        ):
            self._save_files(trainer, ranked=ranked)
            return
        # Large files are written after this, while training continues.
        self._writer = writer
        self._show_names()
        writer.begin(undo=functools.partial(self._set_ranking, self._ranking()))
        try:
            self._save_files(trainer, ranked=ranked)
        finally:
            writer.end()
            self._hide_names()

    def _save_files(self, trainer: Trainer, *, ranked: bool) -> None:
        candidates = self._monitor_candidates(trainer)
        self._saves_both = True
        try:
            if ranked:
                self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        finally:
            self._saves_both = False
        self._remove_replaced(trainer)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        if self.save_top_k == 0 or self._ranked_step == trainer.global_step:
            self._deferred = False
        elif self.monitor is None:
            self._save_none_monitor_checkpoint(trainer, monitor_candidates)
        else:
            self._save_monitor_checkpoint(trainer, monitor_candidates)
        if not self._saves_both:  # A hook of a subclass calls this method.
            self._remove_replaced(trainer)

    def _save_none_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        # With save_top_k=-1 all files are kept: none may be overwritten, except under Lightning's names, where programs
        # expect the newest under a name that stays the same.
        previous = self.best_model_path if self.save_top_k == 1 else ""
        replaceable = self.best_model_path if conventions.current().overwrites_equal_names else previous
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaceable)
        with self._undo_on_failure():
            self.best_model_path = path
            self._save_ranked(trainer, path, previous)

    def _save_monitor_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        assert self.monitor is not None
        if self.monitor not in monitor_candidates:
            if not self._source.validations and validates(trainer):
                return  # the first validation is still to come
            owner = f"`ModelCheckpoint(monitor={self.monitor!r})`"
            what = f"{owner} could not find the monitored key in the returned metrics"
            error = not_logged(what, self.monitor, trainer.callback_metrics)
            if self._source.validations or not conventions.current().mistakes_are_warnings:
                raise error
            warn_once(f"not logged {self.monitor}", error.what, fix=error.fix)
            return
        self._deferred = False
        self._trim(trainer)
        current = monitor_candidates[self.monitor]
        if self.check_monitor_top_k(trainer, current):
            self._update_best_and_save(current, trainer, monitor_candidates)
        else:
            self._report(trainer, f"was not in top {self.save_top_k}")

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a value is good enough for its file to be kept."""
        if current is None:
            return False
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        better = torch.lt if self.mode == "min" else torch.gt
        return bool(better(current, self.best_k_models[self.kth_best_model_path]))

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        k = len(self.best_k_models) + 1 if self.save_top_k == -1 else self.save_top_k
        replaced = self.kth_best_model_path if len(self.best_k_models) == k else ""
        if torch.isnan(current):
            # NaN cannot be compared; as the worst value it is replaced by the first number.
            current = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)
        path = self._get_metric_interpolated_filepath_name(monitor_candidates, trainer, replaced)
        with self._undo_on_failure():
            scores = {name: score for name, score in self.best_k_models.items() if name != replaced}
            scores[path] = current
            self.best_k_models, self.current_score = scores, current
            if len(scores) == k:
                self._note_worst()
            best = min if self.mode == "min" else max
            self.best_model_path = best(scores, key=lambda name: float(scores[name]))
            self.best_model_score = scores[self.best_model_path]
            best_text = f"(best {self.best_model_score:0.5f})"
            self._report(trainer, f"reached {current:0.5f} {best_text}, saving model to {path!r} as top {k}")
            self._save_ranked(trainer, path, replaced)

    def _report(self, trainer: Trainer, text: str) -> None:
        if self.verbose:
            epoch, step = trainer.current_epoch, trainer.global_step
            rank_zero_info(f"Epoch {epoch}, global step {step}: {self.monitor!r} {text}")

    def _save_ranked(self, trainer: Trainer, path: str, previous: str) -> None:
        self._ranked_step = trainer.global_step
        self._replace(trainer, previous, path)
        if self.keep_latest_k is not None or self.keep_for is not None:
            self._give_up_old(trainer, path)
        self._save_checkpoint(trainer, path)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        position = _position(trainer)
        if not self.save_last or trainer.total_batch_idx < 0:
            return
        just_saved = self._last_checkpoint_saved if self._saved_at == position else ""
        if self._last_at == position and not (just_saved and just_saved != self.last_model_path):
            return
        previous = self.last_model_path
        path = self._free_name(trainer, monitor_candidates, self.CHECKPOINT_NAME_LAST, previous)
        with self._undo_on_failure():
            self.last_model_path, self._last_at = path, position
            self._replace(trainer, previous, path)
            if self.save_last == "link" and just_saved:
                self._link_checkpoint(trainer, just_saved, path)
            else:
                self._save_checkpoint(trainer, path)
        if not self._saves_both:
            self._remove_replaced(trainer)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero:
            link = functools.partial(checkpoint_files.link, filepath, linkpath)
            link() if trainer.runtime.writer is None else trainer.runtime.writer.after(link)
        trainer.strategy.barrier()

    def _save_stopped(self, trainer: Trainer) -> None:
        """Save a run that was stopped from outside, so that it can be resumed."""
        previous, candidates = self.last_model_path, self._monitor_candidates(trainer)
        path = self._free_name(trainer, candidates, self.CHECKPOINT_NAME_LAST, previous)
        with self._undo_on_failure():
            self._last_at = _position(trainer)
            if self.save_last:
                self.last_model_path = path
                self._replace(trainer, previous, path)
            else:
                # The file exists only to resume from it: it is removed once the resumed run has saved again.
                self._unwanted = [*self._unwanted, path]
            with set_during(self, save_weights_only=False):
                self._save_checkpoint(trainer, path)
        self._tell_where(path)

    def _tell_where(self, path: str) -> None:
        rank_zero_info(f"Saved the run as {path}. To resume it, {self.HOW_TO_RESUME}.")

    @contextmanager
    def _undo_on_failure(self) -> Iterator[None]:
        """Restore the ranking if the file that it describes cannot be saved."""
        before = self._ranking()
        try:
            yield
        except BaseException:
            self._set_ranking(before)
            raise

    def _ranking(self) -> dict[str, Any]:
        """Return the attributes that say what is saved."""
        return {name: getattr(self, name) for name in _SAVED}

    def _begin_ranking(self) -> None:
        """Forget what is saved; the files stay."""
        own = vars(self)
        own.pop("_names_aside", None)
        own.update(_NOTHING_SAVED, best_k_models={}, _resumed=False)
        self.kth_value = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)

    def _set_ranking(self, ranking: dict[str, Any]) -> None:
        vars(self).pop("_names_aside", None)
        vars(self).update(ranking)

    def _hide_names(self) -> None:
        """Have those who ask for the names of files wait while these are being written."""
        if self._writer is not None and self._writer.paths:
            own = vars(self)
            # A logger that failed may have left some there.
            own.setdefault("_names_aside", {}).update({name: own.pop(name) for name in _NAMES if name in own})

    def _show_names(self, *, wait: bool = True) -> None:
        """Undo ``_hide_names``; wait for the files."""
        names = vars(self).pop("_names_aside", None)
        if names is not None:
            vars(self).update(names)
            if wait and self._writer is not None:
                self._writer.settle()

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        self._saved_at = _position(trainer)
        trainer.save_checkpoint(filepath, self.save_weights_only)
        if trainer.is_global_zero:
            self._hide_names()
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))
            self._show_names(wait=False)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return everything logged, on the host, with ``epoch`` and ``step``; equal on all processes."""
        if trainer.runtime.several_processes:
            trainer.sync_step_values()
        values = {
            name: torch.as_tensor(value).detach().cpu().clone() for name, value in trainer.callback_metrics.items()
        }
        for name, count in zip(_COUNTERS, (trainer.current_epoch, trainer.global_step), strict=True):
            values[name] = values[name].int() if name in values else torch.tensor(count)
        # Values differ between processes unless they were logged with sync_dist; names must not.
        return trainer.strategy.broadcast(values)

    # -- names

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Any],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        template = filename or "{epoch}" + self.CHECKPOINT_JOIN_CHAR + "{step}"
        equals = self.CHECKPOINT_EQUALS_CHAR
        name = checkpoint_files.format_name(template, metrics, equals=equals, insert_names=auto_insert_metric_name)
        return name if prefix is None else self.CHECKPOINT_JOIN_CHAR.join([prefix, name])

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the path of a checkpoint.

        Args:
            metrics: values for the fields of the template.
            filename: another template than ``self.filename``.
            ver: version added at the end, as in ``-v1``.
            prefix: text added at the beginning.

        Example::

            >>> from hasten.callbacks import ModelCheckpoint
            >>> ModelCheckpoint(filename="{epoch:03d}").format_checkpoint_name({"epoch": 5}, ver=1)
            'epoch=005-v1.ckpt'

        """
        filename = filename or self.filename
        name = self._format_checkpoint_name(filename, metrics, prefix, self.auto_insert_metric_name)
        if ver is not None:
            name = self.CHECKPOINT_JOIN_CHAR.join([name, f"v{ver}"])
        name += self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: str | None = None
    ) -> str:
        return self._free_name(trainer, monitor_candidates, previous=del_filepath or "")

    def _free_name(
        self, trainer: Trainer, candidates: dict[str, Tensor], template: str | None = None, previous: str = ""
    ) -> str:
        """Return the first name, counting versions, that is free or ``previous``."""
        checkpoint_files.warn_of_unknown_fields(template or self.filename, candidates)
        path = self.format_checkpoint_name(candidates, template)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != previous and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(candidates, template, ver=version)
            version += 1
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Return whether a file exists, according to the first process."""
        path, writer = os.fspath(filepath), trainer.runtime.writer
        is_coming = writer is not None and path in writer.paths
        return bool(trainer.strategy.broadcast(trainer.is_global_zero and (is_coming or exists(path))))

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the kept files with their scores as YAML.

        Args:
            filepath: the file to write; ``best_k_models.yaml`` in ``dirpath`` by default.

        """
        import yaml

        path = filepath or os.path.join(self.dirpath or "", "best_k_models.yaml")
        scores = {name: float(score) for name, score in self.best_k_models.items()}
        write_whole(os.fspath(path), yaml.safe_dump(scores, sort_keys=False).encode())

    def find_last(self, trainer: Trainer) -> str | None:
        """Return the newest undamaged checkpoint to resume from, or None.

        Searches ``dirpath``; when that is the default, also the folders of earlier runs, the latest first. Under
        Lightning's names only ``dirpath`` is searched, and only for files called ``last``. Damaged files are skipped
        with a warning that names them. With ``UploadedCheckpointIO``, a newer copy behind its URL is returned.
        """
        folders: list[str] = []
        if trainer.is_global_zero:
            folders = [self.dirpath or checkpoint_files.default_folder(trainer)]
            if self._default_folder and not conventions.current().last_is_a_name:
                folders += checkpoint_files.folders_of_earlier_runs(trainer, folders[0])
        reader, strategy = trainer.runtime.checkpoint_io, trainer.strategy
        prefix = self.CHECKPOINT_NAME_LAST if conventions.current().last_is_a_name else ""
        newest = (
            checkpoint_files.newest(each, self.FILE_EXTENSION, reader, strategy, prefix=prefix)
            for each in strategy.broadcast(folders)
        )
        self._found_as_last = checkpoint_files.newest_copy(
            self.FILE_EXTENSION, reader, strategy, instead_of=next(filter(None, newest), None), prefix=prefix
        )
        return self._found_as_last

    # -- replaced files

    def _replace(self, trainer: Trainer, previous: str, path: str) -> None:
        """Mark ``previous`` for removal once ``path`` is complete."""
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._unwanted = [*self._unwanted, previous]

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Return whether a replaced file may go: it is in our folder, and the user did not resume from it by name."""
        if previous == current:
            return False
        if checkpoint_files.is_same(previous, current):
            return False  # Names that differ in case alone, on a file system that does not tell them apart.
        if _is_start(trainer, previous) and trainer.ckpt_path != self._found_as_last:
            return False
        # URLs are compared as if they were paths in this folder.
        folder = os.path.join(os.path.abspath(self.dirpath or ""), "")
        return os.path.abspath(previous).startswith(folder)

    def _give_up_old(self, trainer: Trainer, path: str) -> None:
        """Mark the files for removal, once ``path`` is complete, that neither keep_latest_k nor keep_for keeps."""
        # The clocks of machines differ.
        now = trainer.strategy.broadcast(time.time())
        written = {name: at for name, at in self._written.items() if name != path} | {path: now}
        kept = {*list(written)[-(self.keep_latest_k or 1) :], self.best_model_path}
        since = now if self.keep_for is None else now - self.keep_for.total_seconds()
        # On a clock that was set back, nothing is old.
        old = [name for name, at in written.items() if at <= since and name not in kept]
        old = [name for name in old if not _is_start(trainer, name)]
        for name in old:
            self._replace(trainer, name, path)
        self._written = {name: at for name, at in written.items() if name not in old}
        self.best_k_models = {name: score for name, score in self.best_k_models.items() if name not in old}
        if self.best_k_models:
            self._note_worst()

    def _trim(self, trainer: Trainer) -> None:
        """Give up the files beyond ``save_top_k``, which may have been larger in the run that is continued."""
        scores, count = self.best_k_models, self.save_top_k
        if not 0 < count < len(scores):
            return
        ranked = sorted(scores, key=lambda name: float(scores[name]), reverse=self.mode == "max")
        for name in ranked[count:]:
            self._replace(trainer, name, "")
        self.best_k_models = {name: scores[name] for name in ranked[:count]}
        self._note_worst()

    def _note_worst(self) -> None:
        worst, scores = max if self.mode == "min" else min, self.best_k_models
        self.kth_best_model_path = worst(scores, key=lambda name: float(scores[name]))
        self.kth_value = scores[self.kth_best_model_path]

    def _remove_replaced(self, trainer: Trainer, *, keep_start: bool = False) -> None:
        if not self._unwanted:
            return
        kept = [path for path in self._unwanted if keep_start and _is_start(trainer, path)]
        wanted = {*self.best_k_models, self.best_model_path, self.last_model_path, *kept}
        replaced, self._unwanted = self._unwanted, kept
        for path in replaced:
            if path not in wanted:
                self._remove_checkpoint(trainer, path)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if defined_by_program(trainer.strategy, "remove_checkpoint"):
            trainer.strategy.remove_checkpoint(filepath)
        elif trainer.is_global_zero:
            checkpoint_files.remove(filepath, trainer.runtime.checkpoint_io)


_NOTHING_SAVED: dict[str, Any] = {name: getattr(ModelCheckpoint, name) for name in _SAVED}


class OnExceptionCheckpoint(Checkpoint):
    """Save the run when an exception, Ctrl-C or SIGTERM ends a fit; remove the file when a later fit succeeds.

    A later ``fit`` without ``ckpt_path`` continues from the file, or from a newer one of ``ckpt_path="last"``.
    Only the successful end of a ``fit`` removes it; ``validate``, ``test`` and ``predict`` leave it alone.
    On several processes it is saved if the exception was raised on all of them; one alone cannot save the run.
    A run resumed from it repeats the batch in which the exception was raised. If the run cannot be saved, the
    original exception is still raised.

    Args:
        dirpath: folder of the file; created if it does not exist.
        filename: name of the file, without ``.ckpt``.

    Raises:
        TypeError: ``dirpath`` is not a path.
        ValueError: ``filename`` is empty.

    Example::

        >>> OnExceptionCheckpoint("runs").ckpt_path.replace(os.sep, "/")
        'runs/on_exception.ckpt'

    """

    FILE_EXTENSION: ClassVar[str] = ".ckpt"
    # Whether a fit without ckpt_path continues from the file.
    resumes_fit: ClassVar[bool] = True

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        check.path("OnExceptionCheckpoint", "dirpath", dirpath)
        if not isinstance(filename, str) or not filename:
            raise make_error(
                ValueError,
                f"OnExceptionCheckpoint(filename={check.shown(filename)}):",
                fix=f"give a name without {self.FILE_EXTENSION}, for instance 'on_exception'.",
                argument="filename",
            )
        self.dirpath = dirpath
        self.filename = filename
        self._failed = False

    @property
    def ckpt_path(self) -> str:
        """The file."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def find_last(self, trainer: Trainer) -> str | None:
        """Return the file if it is there and undamaged: ``ckpt_path="last"`` means it if it is the newest."""
        found, failure = checkpoint_files.found_by_first(
            trainer.strategy, lambda: [self.ckpt_path] if exists(self.ckpt_path) else []
        )
        if failure:
            raise OSError(f"ckpt_path='last': {self.ckpt_path} cannot be read: {failure}")
        return checkpoint_files.first_whole(found, trainer.runtime.checkpoint_io, trainer.strategy)

    def setup(self, trainer: Trainer, *_: object, **__: object) -> None:
        self._failed = False

    def on_exception(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Save the run, if it is a fit whose training was set up."""
        self._failed = True
        if trainer.state.fn is not TrainerFn.FITTING or trainer.fast_dev_run or trainer.sanity_checking:
            return
        if not trainer.optimizers:
            return  # not set up yet: there is nothing to resume
        if not _all_failed(self, trainer):
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except Exception as error:
            rank_zero_warn(f"OnExceptionCheckpoint could not write {self.ckpt_path}: {error}")
        else:
            rank_zero_info(f'Saved the run. Resume it with fit(..., ckpt_path="{self.ckpt_path}").')

    def teardown(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Remove the file of an earlier failure once a fit has succeeded."""
        if self._failed or trainer.state.fn is not TrainerFn.FITTING or trainer.fast_dev_run:
            return
        trainer.strategy.barrier("on_exception_checkpoint")
        if trainer.is_global_zero:
            remove(self.ckpt_path)


# How long a process that failed waits for the others.
_PATIENCE_SECONDS = 15.0


def _all_failed(callback: Checkpoint, trainer: Trainer) -> bool:
    """Return whether every process failed, and warn if not: those still training would block a checkpoint."""
    if not trainer.runtime.several_processes:
        return True
    place = f"failure/{trainer.current_run.limits.number}/{trainer.callbacks.index(callback)}"
    failed = agreement.all_at(place, patience_seconds=_PATIENCE_SECONDS)
    if not failed:
        rank_zero_warn(
            f"{type(callback).__name__}: the exception was raised on some processes only, and a checkpoint needs all, "
            "so nothing was saved.",
            fix="ModelCheckpoint(every_n_train_steps=...) saves one in any case.",
        )
    return failed


def _position(trainer: Trainer) -> list[int]:
    return [trainer.global_step, trainer.total_batch_idx]


def _is_start(trainer: Trainer, path: str) -> bool:
    """Return whether the run was resumed from this file, whatever name was given for it."""
    return checkpoint_files.resolve(path) == checkpoint_files.resolve(trainer.ckpt_path)


# -- arguments


@contextmanager
def _weights_before_step(module: LightningModule) -> Iterator[bool]:
    """Give ``module.layer`` the newest weights in ``module.saved_models``, if it has both, during a save."""
    layer: Any = getattr(module, "layer", None)
    kept = None
    if not module.automatic_optimization:
        kept = _newest_weights(getattr(module, "saved_models", None), layer)
        if kept is None and conventions.current().warns_of_settings:
            rank_zero_warn(
                "ModelCheckpoint(every_n_train_steps=...): files of manual optimization have weights after steps.",
                fix="For those before it, keep self.layer.state_dict() in self.saved_models[batch_idx].",
            )
    if kept is None:
        yield False
        return
    now = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(kept)
    try:
        yield True
    finally:
        layer.load_state_dict(now)


def _newest_weights(saved: Any, layer: Any) -> dict[str, Tensor] | None:
    """Return the newest weights of a layer; None if a program uses the names for something else."""
    if isinstance(saved, dict) and saved and isinstance(layer, torch.nn.Module) and all(type(n) is int for n in saved):
        newest = saved[max(saved)]
        if isinstance(newest, dict) and newest.keys() == layer.state_dict().keys():
            return newest
    return None


def _intervals(**arguments: Any) -> tuple[int, int, timedelta | None]:
    """Return the steps, epochs and time between saves; 0 and None where they do not count.

    "2ep", "500st" and "90min" mean the same in each of the three arguments.
    """
    given = [_period(name, value) for name, value in arguments.items() if value is not None]
    if not given:
        return 0, 1, None
    active = [each for each in given if each.steps or each.epochs or each.time is not None]
    if len(active) > 1:
        texts = ", ".join(f"{name}={value}" for name, value in arguments.items())
        what = f"ModelCheckpoint({texts}): these should be mutually exclusive."
        raise MisconfigurationException(what, fix="Use one ModelCheckpoint for each.", argument="every_n_train_steps")
    period = active[0] if active else Period()
    return period.steps or 0, period.epochs or 0, period.time


def _retention(latest: int | None, time_kept: Any, save_top_k: int) -> tuple[int | None, timedelta | None]:
    """Return keep_latest_k and keep_for after checking them."""
    owner, error = "ModelCheckpoint", MisconfigurationException
    check.whole(owner, "keep_latest_k", latest, at_least=1, unit="files", allow_none=True, error=error)
    if time_kept is not None:
        if not isinstance(time_kept, (str, dict, timedelta)):
            raise check.wrong(
                owner, "keep_for", time_kept, "a datetime.timedelta, or a text such as '7d'", error=TypeError
            )
        given, time_kept = time_kept, parse_duration(time_kept, argument=f"{owner}(keep_for=...)")
        if time_kept <= timedelta(0):
            raise check.wrong(owner, "keep_for", given, "a time of more than zero", error=error)
    if save_top_k != -1 and (latest is not None or time_kept is not None):
        name = "keep_for" if latest is None else "keep_latest_k"
        what = f"ModelCheckpoint({name}=..., save_top_k={save_top_k}): save_top_k already removes files."
        fix = "Write save_top_k=-1; to keep the best ones as well, use a second ModelCheckpoint."
        raise MisconfigurationException(what, fix=fix, argument=name)
    return latest, time_kept


def _period(name: str, value: Any) -> Period:
    if isinstance(value, (str, dict, timedelta)):
        return parse_interval(value, argument=f"ModelCheckpoint({name}=...)")
    if name == "train_time_interval":
        allowed = "a datetime.timedelta, or a text such as '90min'"
        raise check.wrong("ModelCheckpoint", name, value, allowed, error=TypeError)
    error = MisconfigurationException if isinstance(value, int) else None
    check.whole("ModelCheckpoint", name, value, at_least=0, error=error)
    return Period(steps=value) if name == "every_n_train_steps" else Period(epochs=value)
