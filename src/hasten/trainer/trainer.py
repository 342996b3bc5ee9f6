"""Trainer: fit, validate, test, predict."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import signal as signals
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch.optim import Optimizer

from hasten._lib.check import clip_algorithm, number
from hasten._lib.errors import MisconfigurationException, make_error, shorten
from hasten._lib.explain import explain
from hasten._lib.names import defined_by_program, explain_absent_names, refuse_unknown, without_unknown
from hasten._lib.observers import WatchedList
from hasten._lib.rank_zero import rank_zero_info, warn_once
from hasten.arguments import check_arguments, require_callback
from hasten.batching.fields import MicroBatch
from hasten.batching.rebatch import LengthBatching
from hasten.checkpoint.contents import check_entries, for_hooks, from_hooks, from_lightning
from hasten.checkpoint.files import hyper_parameters_left_out
from hasten.hooks import Hooks, nothing, overrides
from hasten.logged_values import LoggedValues
from hasten.loops.evaluate import evaluate_and_print, predict
from hasten.loops.fit import fit
from hasten.loops.prepare import prepare, remake_loader
from hasten.loops.processes import check_program
from hasten.loops.resume import RunState, resolve_path
from hasten.loops.run import Observers, Progress, Run, RunData, Window
from hasten.loops.run_data import StageData
from hasten.loops.schedule import Limits, ValidationSchedule
from hasten.loops.user_code import check_call
from hasten.machine import agreement, watchdog
from hasten.machine.collectives import joined
from hasten.machine.signals import LeaveRun, StopRequests, leaving
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.module.signatures import check_signatures
from hasten.optim import HastenOptimizer
from hasten.optim.backward import to_clip
from hasten.profilers.base import PassThroughProfiler, Profiler
from hasten.profilers.base import resolve as resolve_profiler
from hasten.record.history import History
from hasten.report.summary import print_results
from hasten.resolve import runtime as resolve_runtime
from hasten.seed import set_deterministic
from hasten.trainer import limited_runs, parts, requeue
from hasten.trainer.profiling import LOOP, profiled
from hasten.trainer.properties import TrainerView
from hasten.trainer.recording import recorded
from hasten.trainer.tools import advise, check, choose_speed, eject
from hasten.types import (
    FIRST_STAGE,
    AcceleratorLike,
    CompileLike,
    Dataloaders,
    Devices,
    Duration,
    Group,
    LoggerLike,
    MatmulPrecision,
    PathLike,
    Plugin,
    PrecisionName,
    SpeedName,
    StrategyLike,
    Tensors,
    TrainerFn,
    TrainerState,
    TrainerStatus,
)

if TYPE_CHECKING:
    from hasten.runtime import Runtime
    from hasten.trainer.nested import OuterCall
    from hasten.types import StorageOptions

Result = TypeVar("Result")


@explain_absent_names
class Trainer(TrainerView):
    """Run a ``LightningModule``: training, validation, test, prediction.

    Args:
        accelerator: "auto", "cpu", "cuda", "gpu", "mps", "tpu", or an Accelerator.
        strategy: "auto", "single_device", "ddp", "ddp_spawn", ..., or a Strategy.
        devices: how many (int; "auto" or -1 for all) or which (list, "0,1"), on each machine.
        num_nodes: number of machines.
        precision: "32-true" (default), "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8",
            "transformer-engine", or the short spellings 16, 32, 64, "16", "bf16", "fp16".
        logger: True for a CSVLogger (default), False for none, a logger or a list of loggers.
        callbacks: one callback or a list.
        fast_dev_run: run this many batches of each stage (True: 1), without logger and checkpoints.
        max_epochs: epochs to train; -1 for no limit; 1000 when nothing limits the run.
        min_epochs: epochs to train before a callback may stop the run.
        max_steps: optimizer steps to train; -1 for no limit.
        min_steps: optimizer steps to train before a callback may stop the run.
        max_time: time to train: "DD:HH:MM:SS", "90min", timedelta or dict. Arguments that count epochs,
            steps or time also accept "2ep", "500st" and "90min".
        limit_train_batches: batches (int) or share (float) of the training data in an epoch.
        limit_val_batches: the same for validation.
        limit_test_batches: the same for test.
        limit_predict_batches: the same for prediction.
        overfit_batches: train and validate on the same few batches (int) or share (float).
        val_check_interval: batches (int), share of an epoch (float), "500st", "2ep" or time between two validations.
        check_val_every_n_epoch: epochs between two validations; None to count ``val_check_interval`` across epochs.
        num_sanity_val_steps: validation batches run before training; 2 by default, -1 for all.
        log_every_n_steps: optimizer steps between two rows of the loggers; 50 by default.
        enable_checkpointing: save a checkpoint each epoch, unless a checkpoint callback is given; True by default.
        enable_progress_bar: show a bar; True by default.
        enable_model_summary: print a table of the layers; True by default.
        accumulate_grad_batches: batches whose gradients are summed before each optimizer step.
        gradient_clip_val: the largest gradient norm or value; None or 0 for no clipping.
        gradient_clip_algorithm: "norm" (default) or "value".
        deterministic: True for deterministic algorithms only, "warn" to warn where none exists.
        benchmark: ``torch.backends.cudnn.benchmark``.
        inference_mode: evaluate in inference mode instead of ``no_grad``.
        use_distributed_sampler: give each process its own part of the data.
        uneven: what to do if the processes have different numbers of training batches. "stop" (default) ends every
            epoch on all processes when the first has no more batches, "error" raises. See docs/processes.md.
        detect_anomaly: ``torch.autograd.set_detect_anomaly`` during fit: a NaN gradient raises an error that names
            the function and, if known, the layer. Steps take several times as long.
        on_bad_loss: what to do if the loss is NaN or infinite. "warn" (default) warns at the next logging interval
            and costs nothing. The others check loss and gradients before each optimizer step (on a GPU the host then
            waits for the device once per step) and skip a step that is not finite: "stop" ends the run with a
            ``FloatingPointError`` that names the layer, "skip" continues with the next batch, "rewind" continues with
            the weights and optimizer states of up to ``log_every_n_steps`` steps before. Not with optimizers that step
            in backward; "skip" and "rewind" not with manual optimization or ``detect_anomaly``. See
            docs/bad_loss.md.
        barebones: switch off everything except training.
        plugins: a Precision, CheckpointIO or ClusterEnvironment, or a list of them.
        sync_batchnorm: compute batch statistics over all processes.
        reload_dataloaders_every_n_epochs: epochs after which new loaders are requested; 0 for never.
        default_root_dir: where logs and checkpoints go; the working directory by default.
        enable_autolog_hparams: pass hyper-parameters to the loggers.
        profiler: "simple", "advanced", "pytorch" or a Profiler, to report where the time goes; None for none.
        model_registry: must be None; it belongs to a hosted product.
        speed: switch on the arguments below that make this training faster, up to a class of changes: "exact" for
            rounding at most, "auto" for other random draws as well (as if from another seed), "same samples in other
            batches" or "lower precision" to go further; "same bits" for nothing that changes a number. Choosing takes
            at most 3 % of the expected training, and is remembered; see docs/speed/auto.md.
        compile: True, "regional", "step" (with the optimizer's step) or a dict of ``torch.compile`` options.
        batching: "length" to put samples of similar length in one batch, "tokens:4096" for batches of at most that many
            tokens, or a ``hasten.data.LengthBatching``.
        packed: True to skip padding in transformer blocks; "first_token" to also compute the last block for the first
            token only.
        num_workers: worker processes of each loader; "auto" to measure the best number.
        resident: True to hold the data in memory and index whole batches; "auto" if it fits; "device" to hold it in the
            memory of the device.
        matmul_precision: "highest", "high" or "medium", for ``torch.set_float32_matmul_precision``.
        fused_optimizer: True to update all parameters in one kernel, False not to.
        batch_size: samples of a batch on each process, whatever the loader's batches are; "auto" tries which is the
            largest that trains.
        micro_batch: samples of a batch computed at once; "auto" shrinks when memory runs out; or a
            ``hasten.data.MicroBatch``.
        memory: "auto" to recompute activations once memory runs out; "selective" or "full" from the start; "offload"
            to keep them in host memory.
        dropout: "fast" for masks from random bytes.
        allocator: "keep" not to return memory to the system between steps, "tcmalloc" or "jemalloc".

    Raises:
        TypeError: an argument does not exist or has a wrong type.
        ValueError: an argument is out of range, or two contradict each other.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.max_epochs
        1

    """

    @without_unknown
    def __init__(
        self,
        *,
        accelerator: AcceleratorLike = "auto",
        strategy: StrategyLike = "auto",
        devices: Devices | None = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | None = None,
        logger: LoggerLike | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | str | None = None,
        min_epochs: int | str | None = None,
        max_steps: int | str = -1,
        min_steps: int | str | None = None,
        max_time: Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | Duration | None = None,
        check_val_every_n_epoch: int | str | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | str | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        uneven: Literal["stop", "error"] = "stop",
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        on_bad_loss: Literal["warn", "stop", "skip", "rewind"] = "warn",
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int | str = 0,
        default_root_dir: PathLike | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        speed: SpeedName | None = None,
        compile: CompileLike | None = None,
        batching: LengthBatching | str | None = None,
        packed: bool | Literal["first_token"] = False,
        num_workers: int | Literal["auto"] | None = None,
        resident: bool | Literal["auto", "device"] = False,
        matmul_precision: MatmulPrecision | None = None,
        fused_optimizer: bool | None = None,
        batch_size: int | Literal["auto"] | None = None,
        micro_batch: int | Literal["auto"] | MicroBatch | None = None,
        memory: Literal["auto", "selective", "full", "offload"] | None = None,
        dropout: Literal["fast"] | None = None,
        allocator: Literal["keep", "tcmalloc", "jemalloc"] | None = None,
    ) -> None:
        given = locals()
        if model_registry is not None:
            what = "Trainer(model_registry=...): not in this version of hasten."
            raise MisconfigurationException(what, fix="Leave it out.", argument="model_registry")
        self._given = {name: value for name, value in given.items() if name != "self"}
        self._arguments = check_arguments(self._given)
        self.profiler = resolve_profiler(profiler)
        self._runtime = _runtime_for(self._given)
        set_deterministic(deterministic, benchmark=benchmark)
        # Names of the speed-ups that speed=... has switched on; None before it has chosen.
        self.chosen_levers: tuple[str, ...] | None = None
        self.state = TrainerState()
        self._progress = Progress()
        self._logged = LoggedValues(self._runtime)
        if self._arguments.barebones:
            self._logged.switch_off()
        self._history = History()
        self._hooks: Hooks | None = None
        self._run: Run | None = None
        self._should_stop = False
        self._accumulate_grad_batches = self._arguments.accumulate_grad_batches
        self._loggers = parts.loggers(self._arguments)
        self._callbacks = WatchedList(parts.callbacks(self._arguments), self._callbacks_changed)
        self._default_callbacks = [c for c in self._callbacks if c not in self._arguments.callbacks]
        self._module: LightningModule | None = None
        self._datamodule: LightningDataModule | None = None
        self._reads_datamodule = False
        # The call that runs, and the one in whose hook it was made.
        self._inside: TrainerFn | None = None
        self._outer: OuterCall | None = None
        self._ckpt_path: str | None = None
        self._assigned_path: str | None = None
        self._received_sigterm = False
        self._between_batches = True
        self._loops = {}

    advise = advise
    check = check
    eject = eject

    # -- other arguments

    @property
    def given_arguments(self) -> dict[str, Any]:
        """The arguments of ``Trainer(...)`` by name, as they were passed or assigned since; a copy."""
        return dict(self._given)

    def with_arguments(self, **changes: object) -> Trainer:
        """Return a new Trainer with the same callbacks, loggers and arguments, except for those changed.

        The new Trainer has its own counters, metrics and run; this one does not change. Callbacks and loggers are
        the same objects, also those added to this Trainer since it was made. Callbacks that a Trainer adds by itself
        (progress bar, model summary, checkpoints, timer) follow the new arguments and are made again.

        Args:
            changes: arguments of ``Trainer``, with their new values.

        Raises:
            TypeError: an argument does not exist or has a wrong type.
            ValueError: an argument is out of range, or two contradict each other.

        Example::

            >>> import hasten as L
            >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
            >>> trainer.with_arguments(max_epochs=5).max_epochs
            5

        """
        default_ids = set(map(id, self._default_callbacks))
        callbacks = [callback for callback in self._callbacks if id(callback) not in default_ids]
        # Copied, because a subclass may add attributes and its __init__ may have other arguments.
        new = copy.copy(self)
        Trainer.__init__(new, **{**self._given, "callbacks": callbacks, **changes})
        if not {"logger", "barebones", "fast_dev_run", "default_root_dir"} & changes.keys():
            new.loggers = self._loggers
        return new

    def change_arguments(self, **changes: object) -> None:
        """Change arguments of this Trainer between two calls, also those that cannot be assigned.

        ``accelerator``, ``strategy``, ``devices``, ``num_nodes``, ``precision`` and ``plugins`` choose devices and
        precision again. Counters, callbacks and loggers stay.

        Args:
            changes: arguments of ``Trainer`` except ``callbacks`` and ``logger``, with their new values.

        Raises:
            TypeError: an argument does not exist, has a wrong type, or cannot be changed.
            ValueError: an argument is out of range, or two contradict each other.
            RuntimeError: a call is running.

        """
        if fixed := {"callbacks", "logger"} & changes.keys():
            what = f"Trainer.change_arguments({min(fixed)}=...): assign Trainer.callbacks or Trainer.loggers."
            raise make_error(TypeError, what, argument=min(fixed))
        if unknown := {name: value for name, value in changes.items() if name not in self._given}:
            refuse_unknown(unknown, Trainer.__init__, "Trainer")
        if self.state.status is TrainerStatus.RUNNING:
            what = "Trainer.change_arguments(): a call is running."
            raise make_error(RuntimeError, what, fix="Change arguments before or after it.")
        given = {**self._given, **changes}
        arguments = check_arguments(given)
        runtime = _runtime_for(given) if set(_MACHINE) & changes.keys() else None
        self._given, self._arguments = given, arguments
        self._accumulate_grad_batches = arguments.accumulate_grad_batches
        if "profiler" in changes:
            self.profiler = resolve_profiler(changes["profiler"])
        if {"deterministic", "benchmark"} & changes.keys():
            set_deterministic(arguments.deterministic, benchmark=arguments.benchmark)
        if runtime is not None:
            self._runtime = runtime
            self._logged = LoggedValues(runtime)
            if arguments.barebones:
                self._logged.switch_off()

    # -- the four calls

    @without_unknown
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Dataloaders = None,
        val_dataloaders: Dataloaders = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: PathLike | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train a module, and validate it if there is validation data.

        Args:
            model: the module.
            train_dataloaders: the training data: a DataLoader or any iterable of batches; or a datamodule.
            val_dataloaders: the validation data: one or several.
            datamodule: provides the data instead.
            ckpt_path: continue from this checkpoint: a path or URL, "last" (the newest complete one, if any) or
                "best".
            weights_only: False to also read checkpoints with Python objects, which can run code: only for files you
                trust.

        Raises:
            TypeError: ``model`` is not a LightningModule.
            ValueError: something the run needs is missing or does not fit.
            FileNotFoundError: ``ckpt_path`` does not exist.

        Example::

            >>> import hasten as L
            >>> from hasten.demos import BoringModel
            >>> options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
            >>> trainer = L.Trainer(max_epochs=2, limit_train_batches=3, **options)
            >>> trainer.fit(BoringModel())
            >>> trainer.global_step
            6

        """
        if isinstance(train_dataloaders, LightningDataModule):
            datamodule, train_dataloaders = train_dataloaders, None
        model = parts.inner_model(model)
        check_call(self._arguments, "fit", model, datamodule, train_dataloaders, val_dataloaders)
        loaders = {"train": train_dataloaders, "validate": val_dataloaders}
        ckpt_path = parts.given_or_assigned(self, TrainerFn.FITTING, ckpt_path)
        with (
            choose_speed(self, model, train_dataloaders, datamodule, ckpt_path),
            self._batch_size_found(model, loaders, datamodule, ckpt_path),
        ):
            self._call(TrainerFn.FITTING, model, datamodule, loaders, ckpt_path, weights_only, _fit)

    @without_unknown
    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Dataloaders = None,
        ckpt_path: PathLike | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data.

        Args:
            model: the module; by default the module of the last call.
            dataloaders: one or several loaders, or a datamodule.
            ckpt_path: weights to use: a path or URL, "best" or "last"; by default the weights of ``model``, or without
                ``model`` of the best checkpoint of the last fit.
            verbose: print the values.
            datamodule: provides the data instead.
            weights_only: see ``fit``.

        Returns:
            the logged values as numbers, one dict for each loader.

        Raises:
            TypeError: no model was given before, or it is not a LightningModule.
            ValueError: ``validation_step`` or the data is missing.

        """
        body = functools.partial(evaluate_and_print, testing=False, verbose=verbose, show=self._show_results)
        return self._evaluate(TrainerFn.VALIDATING, model, dataloaders, datamodule, ckpt_path, weights_only, body)

    @without_unknown
    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Dataloaders = None,
        ckpt_path: PathLike | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data; see ``validate``."""
        body = functools.partial(evaluate_and_print, testing=True, verbose=verbose, show=self._show_results)
        return self._evaluate(TrainerFn.TESTING, model, dataloaders, datamodule, ckpt_path, weights_only, body)

    @without_unknown
    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Dataloaders = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: PathLike | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Call ``predict_step`` on every batch.

        Args:
            model: the module; by default the module of the last call.
            dataloaders: one or several loaders, or a datamodule.
            datamodule: provides the data instead.
            return_predictions: False not to keep the outputs, for instance where a callback writes them.
            ckpt_path: see ``validate``.
            weights_only: see ``fit``.

        Returns:
            the outputs by batch, with several loaders by loader and batch, of this process's part of the data; where
            copies of this process predicted, of the first one's. None if they are not kept.

        Raises:
            TypeError: no model was given before, or it is not a LightningModule.
            ValueError: the data is missing.

        """
        body = functools.partial(predict, return_predictions=return_predictions is not False)
        found = self._evaluate(TrainerFn.PREDICTING, model, dataloaders, datamodule, ckpt_path, weights_only, body)
        if found and self._runtime.several_processes and not joined():
            what = f"Trainer.predict() returns the predictions of the first of {self.world_size} processes only."
            fix = "Predict with devices=1, or write those of all with a BasePredictionWriter."
            warn_once("predictions of copies", what, fix=fix)
        return found

    def save_checkpoint(
        self, filepath: PathLike, weights_only: bool | None = None, storage_options: StorageOptions = None
    ) -> None:
        """Save everything needed to continue exactly from here; all processes must call it.

        The file is complete when this returns, unless ``plugins=AsyncCheckpointIO()`` writes it.

        Inside a batch (for instance in ``training_step``) the checkpoint holds the state at the beginning of the batch,
        and a resumed run computes the batch again. States of callbacks are the current ones.

        Args:
            filepath: path or URL of the file, or of the folder with strategies that save sharded checkpoints; an
                existing one stays until the new one is complete.
            weights_only: leave out what only training needs.
            storage_options: passed to the file system of a URL.

        Raises:
            AttributeError: no call has attached a model yet.
            OSError: the file could not be written; an existing one is untouched.
            RuntimeError: called inside a batch from which the run could not continue exactly: the optimizer has
                stepped in it, or the Trainer could not know beforehand that a hook saves inside a batch.

        """
        run = self._run
        if run is None:
            what = "Trainer.save_checkpoint(): Saving a checkpoint is only possible if a model is attached."
            raise make_error(AttributeError, what, fix="Call fit, validate, test or predict first.")
        given: Any = filepath
        if not isinstance(given, (str, os.PathLike)):
            what = f"Trainer.save_checkpoint(filepath={given!r}): use a path, not {type(given).__name__}."
            raise make_error(TypeError, what, argument="filepath")
        off = type(self.profiler) is PassThroughProfiler
        aside = run.observers.pace.pause() if run.observers.pace.measures else None
        with nullcontext() if off else self.profiler.profile("save_checkpoint"):
            try:
                checkpoint = self._checkpoint(run, weights_only=bool(weights_only))
                written = from_hooks(checkpoint) if run.conventions.checkpoints_have_loops else checkpoint
                self._runtime.save(filepath, written, storage_options=storage_options)
            except RuntimeError as error:
                agreement.explain_missing(error)
                raise
        if aside is not None:
            run.observers.pace.end_checkpoint(aside, filepath, self.checkpoint_callbacks)

    # Runs for tools that try something out.
    prepared_run = limited_runs.prepared_run
    limited_run = limited_runs.limited_run
    show_run = limited_runs.show_run
    redirect_fit = limited_runs.redirect_fit

    # -- one call, from beginning to end

    @contextmanager
    def _batch_size_found(
        self, model: LightningModule, loaders: dict[str, Any], datamodule: Any, ckpt_path: Any
    ) -> Iterator[None]:
        if self._arguments.speed.batch_size != "auto":
            yield
            return
        from hasten.tuner.batch_size import find_batch_size

        size = find_batch_size(self, model, loaders, datamodule, ckpt_path)
        if size is not None:
            self._set_batch_size(size)
        try:
            yield
        finally:
            # The next fit may have another model.
            self._set_batch_size("auto")

    def _set_batch_size(self, size: int | Literal["auto"]) -> None:
        speed = dataclasses.replace(self._arguments.speed, batch_size=size)
        self._arguments = dataclasses.replace(self._arguments, speed=speed)

    def _call(
        self,
        fn: TrainerFn,
        module: LightningModule,
        datamodule: LightningDataModule | None,
        loaders: dict[str, Any],
        ckpt_path: PathLike | None,
        weights_only: bool | None,
        body: Callable[[Run], Result],
    ) -> Result:
        """Start the other processes if there are any, prepare the run and call ``body`` with it."""
        callbacks = [require_callback("Trainer.callbacks", each) for each in self._callbacks]
        check_signatures(module, datamodule, callbacks)
        outer: OuterCall | None = None
        running: Any = self if self._inside is not None else vars(module).get("_trainer")
        if getattr(running, "_inside", None) is not None:
            from hasten.trainer.nested import outer_call

            outer = outer_call(self, running, fn)
        self.state = TrainerState(TrainerStatus.RUNNING, fn, FIRST_STAGE[fn])
        # Until the next fit, programs see that the last one was stopped.
        self._should_stop = self._should_stop and fn is not TrainerFn.FITTING
        # An earlier datamodule stays, and is set up for later runs; their batches are moved by the hooks of the module.
        self._reads_datamodule = datamodule is not None
        self._module, self._datamodule = module, datamodule or self._datamodule
        if not joined():
            # Copies of this process inherit it, and the program continues with it.
            parts.settle_loggers(self._loggers, self._runtime)
        self._inside, self._outer = fn, outer
        try:
            result: Result = self._runtime.launch(
                self._in_process, loaders, ckpt_path, weights_only, body, trainer=self
            )
            return result
        except BaseException as error:
            if self.state.status is TrainerStatus.RUNNING:
                parts.failed_in_copies(self, error)
            explain(error)
            shorten(error)
            raise
        finally:
            self._inside = self._outer = None
            if outer is not None:
                outer.restore()

    def _in_process(
        self,
        loaders: dict[str, Any],
        ckpt_path: PathLike | None,
        weights_only: bool | None,
        body: Callable[[Run], Result],
    ) -> Result:
        module, runtime = self._module, self._runtime
        assert module is not None
        assert self.state.fn is not None
        runtime.detect_overrides()
        # Before anything else that the processes do together.
        number = check_program(
            self.state.fn, runtime, module, self._arguments, self._accumulate_grad_batches, self._callbacks
        )
        parts.attach(self, module, self._datamodule)
        if self._arguments.max_epochs_assumed and parts.time_is_limited(self):
            self._change("max_epochs", -1)
        runtime.strategy.join_run(runtime, self)
        runtime.strategy.connect(self.lightning_module)
        # The module of the run counts from now on.
        runtime.strategy.connected_module = None
        self._logged.forget_callback_values()
        parts.settle_loggers(self._loggers, runtime)
        requeue.count(self.state.fn)
        also = runtime.cluster.stop_signals
        with StopRequests(runtime.all_reduce if runtime.several_processes else None, also=also) as stop:
            run = self._run = self._make_run(module, loaders, stop)
            run.limits.number = stop.number = number
            watched = watchdog.observing(functools.partial(parts.position, run), lambda: parts.folder_of_logs(self))
            with recorded(self, run) as begin_record:
                try:
                    self._between_batches, self._released = True, False
                    checkpoint = functools.partial(self._read_checkpoint, ckpt_path, weights_only)
                    with watched, profiled(run, self.profiler, lambda: self.log_dir):
                        prepare(run, self._callbacks, self._datamodule, checkpoint)
                        begin_record()
                        result: Result = run.observers.watch(LOOP, body)(run)
                        self._finish(run)
                except LeaveRun as stopped:
                    self._between_batches = stopped.can_save
                    self._leave(run, stopped.signal_number)
                except KeyboardInterrupt as interrupt:
                    # A second Ctrl-C, or one raised by the user's code: the current batch is incomplete.
                    self._between_batches = False
                    self._abort(run, interrupt)
                    parts.leave_program(signals.SIGINT, interrupt)
                except BaseException as error:
                    parts.name_checkpoint(self, run, error)
                    self._abort(run, error)
                    raise
            if stop.signal in also:
                rank_zero_info("The signal to requeue the job came when the run was over: the program continues.")
            elif stop.signal is not None:
                # A signal that came when the run was over still ends the program.
                parts.leave_program(stop.signal, leaving(128 + stop.signal))
        return result

    def _make_run(self, module: LightningModule, loaders: dict[str, Any], stop: StopRequests) -> Run:
        arguments, runtime = self._arguments, self._runtime
        sampler = runtime.distributed_sampler_kwargs if arguments.use_distributed_sampler else None
        strategy: Any = runtime.strategy
        process = strategy.process_dataloader if defined_by_program(strategy, "process_dataloader") else None

        def source(stage: str, limit: Any) -> StageData:
            return StageData(
                stage, given=loaders.get(stage), module=module,
                datamodule=self._datamodule if self._reads_datamodule else None, limit=limit,
                sampler_kwargs=sampler, overfit=bool(arguments.overfit_batches),
                reload_every_n_epochs=arguments.reload_dataloaders_every_n_epochs,
                remake=functools.partial(remake_loader, arguments.speed, device=runtime.device), process=process,
                several_processes=runtime.several_processes and stage != "train", processes=len(runtime.device_ids),
            )  # fmt: skip

        self._logged.loggers = self._called_loggers()
        self._hooks = Hooks(self, module, self._callbacks, self._datamodule, self._logged)
        last_run, fn = self._run, self.state.fn
        data = RunData(
            train=source("train", arguments.limit_train_batches),
            validation=source("validate", arguments.limit_val_batches),
            test=source("test", arguments.limit_test_batches),
            predict=source("predict", arguments.limit_predict_batches),
            validation_schedule=ValidationSchedule(
                arguments.val_check_interval, arguments.check_val_every_n_epoch, self._validation_decided_by
            ),
        )
        run = Run(
            arguments=arguments, runtime=runtime, module=module, wrapped=module, hooks=self._hooks,
            logged=self._logged, progress=self._progress, state=self.state, data=data,
            window=Window(self._progress, self._accumulate_grad_batches), limits=Limits(stop),
            observers=Observers(levers=self.chosen_levers),
        )  # fmt: skip
        if last_run is not None and fn is not TrainerFn.FITTING and last_run.module is module:
            # A checkpoint saved after an evaluation still holds the state of the last fit.
            run.optimizers, run.wrapped_optimizers = last_run.optimizers, last_run.wrapped_optimizers
            run.schedulers, run.data.train, run.averages = last_run.schedulers, last_run.data.train, last_run.averages
            # The loaders of stages that this call does not run stay readable: trainer.test_dataloaders after predict.
            if fn is not TrainerFn.VALIDATING:
                run.data.validation = last_run.data.validation
            if fn is not TrainerFn.TESTING:
                run.data.test = last_run.data.test
            if fn is not TrainerFn.PREDICTING:
                run.data.predict = last_run.data.predict
        return run

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        dataloaders: Any,
        datamodule: LightningDataModule | None,
        ckpt_path: PathLike | None,
        weights_only: bool | None,
        body: Callable[[Run], Result],
    ) -> Result:
        if isinstance(dataloaders, LightningDataModule):
            datamodule, dataloaders = dataloaders, None
        if model is not None:
            module = parts.inner_model(model)
        elif self._module is not None:
            module = self._module
        else:
            raise make_error(
                TypeError,
                f"`Trainer.{fn.value}()` requires a `LightningModule` when it hasn't been passed in a previous run.",
                fix="Pass one, or call fit first.",
            )
        check_call(self._arguments, fn.value, module, datamodule, dataloaders, None)
        path = parts.weights_for(self, fn, model, ckpt_path)
        return self._call(fn, module, datamodule, {fn.value: dataloaders}, path, weights_only, body)

    def _show_results(self, results: list[dict[str, float]], stage: str) -> None:
        """Print what ``validate`` or ``test`` returns."""
        print_results(results, stage)

    def _finish(self, run: Run) -> None:
        """End a run: on_fit_end, teardown, close loggers and loaders."""
        if self.state.fn is TrainerFn.FITTING:
            run.hooks.on_fit_end()
            self._warn_of_near_names()
        self._release(run, "success")
        self.state.status, self.state.stage = TrainerStatus.FINISHED, None

    def _leave(self, run: Run, signal_number: int) -> NoReturn:
        """End the program after a signal, between two batches; checkpoint callbacks save the state."""
        # Also where another process received it.
        run.limits.stop.agreed_signal = signal_number
        self._received_sigterm = signal_number == signals.SIGTERM
        by_keyboard = signal_number == signals.SIGINT
        name = "Ctrl-C" if by_keyboard else signals.Signals(signal_number).name
        saved = "after a complete batch" if self._between_batches else "while a batch was read, and is not saved"
        rank_zero_info(f"{name}: the run ends here, {saved}.")
        error = KeyboardInterrupt() if by_keyboard else leaving(128 + signal_number)
        goes_on = signal_number in self._runtime.cluster.stop_signals
        try:
            if goes_on and self._between_batches:
                requeue.save(self, run)
        finally:
            self._abort(run, error)
        if goes_on:
            requeue.requeue(self)
        parts.leave_program(signal_number, error)

    def _abort(self, run: Run, error: BaseException) -> None:
        self.state.status = TrainerStatus.INTERRUPTED
        try:
            if not self._released:  # Otherwise a teardown has failed, and `_release` has said it.
                try:
                    self._tell(run, error)
                finally:
                    self._release(run, "aborted" if isinstance(error, KeyboardInterrupt) else "failed")
        finally:
            self.state.stage = None

    def _tell(self, run: Run, error: BaseException) -> None:
        self._runtime.finish_saves(failed=True)
        self._runtime.strategy.on_exception(error)
        run.hooks.on_exception(error)

    def _release(self, run: Run, status: str) -> None:
        try:
            self._logged.deliver(wait=True)
            run.observers.pace.end()
            self._logged.loss_report = None
            self._logged.leave()
            self._released = True
            run.hooks.teardown(self.state.fn or "")
        except BaseException as error:
            if self._released and status == "success":
                status = "failed"
                self._tell(run, error)
            raise
        finally:
            if self._outer is not None:
                unwritten = self._outer.release_inner(self, run, status)
            else:
                for source in run.data.all():
                    source.close()
                unwritten = parts.close_loggers(self._called_loggers(), status)
                run.undo.close()
                run.window.loss = None  # The loss holds the graph of the step.
                parts.to_host(run, failed=status != "success")
                self._runtime.teardown()
                parts.let_log(self._callbacks, None)
        if unwritten is not None:
            raise unwritten

    # -- copies of this Trainer in other processes (strategy="ddp_spawn" and its like)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hooks": None, "_run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._callbacks = WatchedList(self._callbacks, self._callbacks_changed)

    export_results = parts.export_results
    import_results = parts.import_results

    # -- checkpoints

    def _checkpoint(self, run: Run, *, weights_only: bool) -> dict[str, Any]:
        state = RunState(run, self._callbacks, self._datamodule)
        # Before any training there is nothing to continue. A module that steps by itself has no optimizers, and trains.
        trains = self.state.fn is TrainerFn.FITTING or run.progress.total_batches > 0 or bool(run.optimizers)
        checkpoint = state.collect(weights_only=weights_only or not trains)
        if run.conventions.checkpoints_have_loops:
            loops = {name: getattr(self, name).state_dict() for name in _LOOPS}
            checkpoint = for_hooks({**checkpoint, "loops": {**checkpoint["loops"], **loops}})
        assert self._hooks is not None
        self._hooks.on_save_checkpoint(checkpoint)
        return checkpoint

    def _read_checkpoint(self, ckpt_path: Any, weights_only: bool | None) -> tuple[dict[str, Any] | None, str | None]:
        path = requeue.resumed_path(self, ckpt_path)
        if path is None:
            fits = self.state.fn is TrainerFn.FITTING
            path = requeue.newest(self) if ckpt_path == "hpc" else resolve_path(self, ckpt_path, fits=fits)
        self._ckpt_path = path
        if path is None:
            return None, None
        # Hyper-parameters are not needed to resume a run.
        with hyper_parameters_left_out():
            checkpoint = self._runtime.load(path, map_location="cpu", weights_only=weights_only)
        assert self._hooks is not None
        if self._hooks.on_load_checkpoint is nothing:
            # Otherwise entries are checked after that hook, which may repair the checkpoint.
            check_entries(checkpoint, path, training=self.state.fn is TrainerFn.FITTING)
        checkpoint = from_lightning(checkpoint, path)
        rank_zero_info(f"Restoring from {path}")
        return checkpoint, path

    # -- optimizers

    def manual_backward(self, loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Run backward and its hooks for a module with manual optimization."""
        run = self._run
        assert run is not None
        is_tensor = isinstance(loss, torch.Tensor)
        run.window.loss = loss if is_tensor and loss.numel() == 1 else None
        if run.observers.guard is not None and is_tensor:
            run.observers.guard.check_manual(loss)
        run.hooks.on_before_backward(loss)
        run.runtime.engine.prepare_backward(loss, run.wrapped)
        if overrides(run.module, LightningModule, "backward"):
            module, scaler = run.module, run.runtime.scaler

            def backward(loss: torch.Tensor, *rest: Any, **options: Any) -> None:
                module.backward(loss if scaler is None else scaler.scale(loss), *rest, **options)

            run.runtime.engine.with_backward(backward)(loss, *args, **kwargs)
        else:
            run.runtime.engine.backward(loss, *args, **kwargs)
        run.hooks.on_after_backward()

    def clip_gradients(self, optimizer: Optimizer, clip_val: float | None, algorithm: str | None) -> None:
        """Clip the gradients of ``optimizer``; None means the argument of the Trainer."""
        own_val, own_algorithm = self._arguments.gradient_clip_val, self._arguments.gradient_clip_algorithm
        number("clip_gradients", "gradient_clip_val", clip_val, allow_none=True)
        algorithm = clip_algorithm("clip_gradients", "gradient_clip_algorithm", algorithm)
        for name, value, own in (("val", clip_val, own_val), ("algorithm", algorithm, own_algorithm)):
            if value is not None and own is not None and value != own:
                raise MisconfigurationException(
                    f"Trainer(gradient_clip_{name}={own!r}) and clip_gradients(gradient_clip_{name}={value!r}): "
                    "both say how to clip.",
                    fix="Use one of them.",
                    argument=f"gradient_clip_{name}",
                )
        clip_val = own_val if clip_val is None else clip_val
        algorithm = algorithm or own_algorithm or "norm"
        if not clip_val:
            return
        parameters = to_clip(optimizer, "clip_gradients()")
        if self._runtime.engine.unscale is not None:
            given: Any = optimizer
            self._runtime.engine.unscale(given.optimizer if isinstance(given, HastenOptimizer) else given)
        if self._runtime.engine.clips_by_program:
            self._runtime.precision.clip_gradients(optimizer, float(clip_val), algorithm)
        elif algorithm == "value":
            self._runtime.engine.clip_value(parameters, float(clip_val))
        else:
            self._runtime.engine.clip_norm(parameters, float(clip_val))

    def all_gather(self, data: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked; see ``LightningModule.all_gather``."""
        return self._runtime.all_gather(data, group=group, sync_grads=sync_grads)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on the first process only, above the progress bar."""
        if not self.is_global_zero:
            return
        write = getattr(self.progress_bar_callback, "print", print)
        write(*args, **kwargs)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which modules are created on the device and in the precision of the run."""
        return self._runtime.init_module(empty_init)

    def _callbacks_changed(self) -> None:
        if self._hooks is not None:
            parts.let_log(self._callbacks, self._module)
            self._hooks.find()


# The loops whose counters Lightning's checkpoints hold.
_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
# Arguments that choose the runtime.
_MACHINE = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins", "sync_batchnorm")


def _runtime_for(values: dict[str, Any]) -> Runtime:
    return resolve_runtime(**{name: values[name] for name in _MACHINE}, owner="Trainer")


def _fit(run: Run) -> None:
    with torch.autograd.set_detect_anomaly(run.arguments.detect_anomaly):
        fit(run)
