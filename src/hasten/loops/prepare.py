"""Bring module, data and optimizers to where the loop can start."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hasten import optim
from hasten._lib.errors import MisconfigurationException
from hasten._lib.observers import WatchedList
from hasten._lib.out_of_memory import collect_earlier_models
from hasten.checkpoint.contents import Phase
from hasten.checkpoint.entries import check_entries
from hasten.checkpoint.metrics import remember_metrics
from hasten.hooks import overrides
from hasten.loops.compiled import check_compile, compile_module
from hasten.loops.numbers import set_matmul_precision
from hasten.loops.oversights import warn_about_missing_parts
from hasten.loops.preflight import check_fit, check_parameters
from hasten.loops.resume import RunState, check_left_to_train
from hasten.loops.run import Run
from hasten.loops.speedups import change_module, change_optimizers, go_on_with_batch_size
from hasten.loops.states import TrainerFn
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.module.hparams import logged_hparams
from hasten.optim import HastenOptimizer
from hasten.optim.averaged import AveragedWeights
from hasten.optim.backward import InBackward

# () -> (checkpoint, where it came from), or (None, None) to start from the beginning
Read = Callable[[], tuple[dict[str, Any] | None, str | None]]


def prepare(
    run: Run, callbacks: Iterable[Callback], datamodule: LightningDataModule | None, read_checkpoint: Read
) -> None:
    """Set up module, data and optimizers, and restore a checkpoint if there is one.

    In short::

        prepare_data (once a machine, or once), setup, configure_model
        the strategy shards the module: from here on its parameters stay
        on_load_checkpoint; restore weights, and states of datamodule and callbacks
        module to the device; configure_optimizers; the strategy wraps the module
        on_fit_start; hyper-parameters to the loggers
        restore counters; loaders; restore optimizers, schedulers, data position, values
    """
    module, runtime, hooks, fn = run.module, run.runtime, run.hooks, run.state.fn
    assert fn is not None
    fitting = fn == TrainerFn.FITTING
    set_matmul_precision(run)
    check_compile(run)
    if fitting:
        collect_earlier_models(module)
        warn_about_missing_parts(run.validation, module, wanted=run.arguments.limit_val_batches != 0)
    {"fit": run.train, "validate": run.validation, "test": run.test, "predict": run.predict}[fn].require()
    for logger in run.logged.loggers:
        # One that cannot write says so now, and paths that hold its version are known from here on.
        getattr(logger, "experiment", None)
    owners = [owner for owner in (datamodule, module) if owner is not None]
    once_a_machine = all(owner.prepare_data_per_node for owner in owners)
    if (runtime.local_rank if once_a_machine else runtime.global_rank) == 0:
        hooks.prepare_data()
    runtime.barrier("prepare_data")
    hooks.setup(fn.value)
    with runtime.init_module():
        hooks.configure_model()
        if overrides(module, LightningModule, "configure_sharded_model"):
            module.configure_sharded_model()
    runtime.shard(module)

    if runtime.precision.converts_before_loading:
        runtime.place(module)
    checkpoint, path = read_checkpoint()
    state = RunState(run, callbacks, datamodule)
    if checkpoint is not None:
        hooks.on_load_checkpoint(checkpoint)
        check_entries(checkpoint, str(path), training=fitting)
        if fitting:
            check_left_to_train(checkpoint, str(path), run.arguments)
        if fitting and run.arguments.speed.batch_size == "auto":
            go_on_with_batch_size(run, checkpoint, datamodule)
        # States of callbacks too: on_fit_start may depend on them, and an evaluation may use averaged weights.
        state.restore(checkpoint, Phase.MODEL, str(path))

    if run.arguments.sync_batchnorm and runtime.world_size > 1:
        if fitting and runtime.device.type == "cpu" and _has_batchnorm(module):
            raise MisconfigurationException(
                "Trainer(sync_batchnorm=True): torch's SyncBatchNorm trains on accelerators only, and this run is on "
                "the CPU. Leave it out, or use a normalisation that does not depend on the batch, such as GroupNorm."
            )
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    runtime.place(module)
    change_module(run)
    if fitting:
        configure_optimizers(run)
        run.wrapped = runtime.wrap(module)
    compile_module(run)
    if fitting:
        hooks.on_fit_start()
    if run.arguments.enable_autolog_hparams and runtime.is_global_zero:
        _log_hyperparams(run, datamodule)
    if fitting:
        remember_metrics(module)
        if checkpoint is not None:
            # Before the loaders: which ones a program returns may depend on the epoch.
            state.restore(checkpoint, Phase.POSITION, str(path))
            run.progress.in_epoch = run.progress.mid_epoch
        run.train.load()
        check_fit(run)
        if checkpoint is None:
            _start_training(run)
        else:
            _resume_training(run, state, checkpoint, str(path))


def _has_batchnorm(module: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.modules.batchnorm._BatchNorm) for child in module.modules())


def _start_training(run: Run) -> None:
    if run.progress.mid_epoch:
        # An earlier fit ended in the middle of an epoch; this one begins the next.
        run.progress.epoch_ended = True
    run.progress.in_epoch = False
    run.averages.resume_with(None)


def _resume_training(run: Run, state: RunState, checkpoint: dict[str, Any], path: str) -> None:
    state.restore(checkpoint, Phase.TRAINING, path)
    run.skip_sanity = True
    for source in (run.train, run.validation):
        source.loaded_in(run.progress.epochs_done)
    ranks = (checkpoint.get("hasten") or {}).get("ranks", ())
    if len(ranks) == run.runtime.world_size:
        # Without the rest of the checkpoint, which would stay in memory until then.
        own = {"hasten": {"ranks": ranks}}
        run.restore_random = functools.partial(state.restore, own, Phase.RANDOM, path)
    elif run.progress.mid_epoch:
        run.train.start_at(run.progress.batch)


def configure_optimizers(run: Run) -> None:
    """Make the optimizers and schedulers of a run."""
    module, owner = run.module, type(run.module).__name__
    optimizers, schedulers = optim.parse(module.configure_optimizers(), owner)
    optim.check(optimizers, schedulers, automatic=module.automatic_optimization, owner=owner)
    check_parameters(run, optimizers)
    take_optimizers(run, change_optimizers(run, optimizers), schedulers)


def take_optimizers(run: Run, optimizers: list[Any], schedulers: list[optim.LRSchedulerConfig]) -> None:
    """Have a run train with these optimizers and schedulers; with others from when their lists change."""

    def schedulers_changed() -> None:
        run.changed = True

    run.optimizers = WatchedList(optimizers, lambda: _optimizers_changed(run))
    run.schedulers = WatchedList(schedulers, schedulers_changed)
    run.averages = AveragedWeights(optimizers)
    run.undo.callback(lambda: run.averages.keep_averaged())
    run.wrapped_optimizers = [_counted(run, optimizer) for optimizer in optimizers]
    run.changed = True


def _optimizers_changed(run: Run) -> None:
    """Go on with the optimizers that are in the list now."""
    before = {id(wrapped.optimizer): wrapped for wrapped in run.wrapped_optimizers}
    optim.check_assigned(run.optimizers, automatic=run.module.automatic_optimization)
    new = change_optimizers(run, [one for one in run.optimizers if id(one) not in before])
    gone = before.keys() - {id(one) for one in run.optimizers}
    for key in gone:
        if isinstance(optimizer := before[key].optimizer, InBackward):
            optimizer.stop()
    if new or gone:
        # The weights in the module stay: training goes on from them.
        run.averages = AveragedWeights(run.optimizers)
        run.averages.resume_with(None)
    run.wrapped_optimizers = [before.get(id(one)) or _counted(run, one) for one in run.optimizers]
    run.changed = True


def _counted(run: Run, optimizer: Any) -> HastenOptimizer:
    """Return ``optimizer`` such that its steps count, for manual optimisation and ``optimizer_step``."""
    step, progress = run.runtime.make_step(optimizer), run.progress

    def counted_step(closure: Any = None, **kwargs: Any) -> Any:
        if not run.module.automatic_optimization:
            if run.runtime.unscale is not None:
                run.runtime.unscale(optimizer)
            run.hooks.on_before_optimizer_step(optimizer)
        result = optimizer.step(closure, **kwargs) if kwargs else step(closure)
        progress.global_step += 1
        return result

    @contextmanager
    def toggled(sync_grad: bool) -> Iterator[None]:
        held_back = run.runtime.syncs_gradients and not sync_grad
        local = run.runtime.no_sync(run.wrapped) if held_back else nullcontext()
        with run.module.toggled_optimizer(optimizer), local:
            yield

    return HastenOptimizer(optimizer, counted_step, toggled)


def _log_hyperparams(run: Run, datamodule: LightningDataModule | None) -> None:
    values = logged_hparams(run.module, datamodule)
    for logger in run.logged.loggers:
        if values is not None:
            logger.log_hyperparams(values)
        logger.log_graph(run.module)
        logger.save()
