"""Prepare module, data and optimizers for the loop, and restore a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hasten import optim
from hasten._lib import torch_private
from hasten._lib.device import collect_earlier_models, is_host
from hasten._lib.errors import MisconfigurationException, WrongType, add_note, make_error, with_article
from hasten._lib.names import defined_by_program
from hasten._lib.observers import WatchedList
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_deprecation, rank_zero_info, warn_once
from hasten._lib.tree import move_to
from hasten.arguments import SpeedArguments
from hasten.batching.rebatch import rebatch
from hasten.checkpoint.contents import Phase, check_entries, for_hooks, from_hooks
from hasten.compile.cuda_graphs import marked_by_us
from hasten.compile.settings import CompileSettings, check_possible, users_settings
from hasten.data.memory.resident import is_resident, resident
from hasten.data.worker_count import auto_workers, with_workers
from hasten.extend.origin import comes_from, names_in
from hasten.hooks import nothing, overrides, redefines
from hasten.loggers.base import Logger
from hasten.loops import micro_batches
from hasten.loops.processes import check_module, check_optimizers
from hasten.loops.resume import RunState, check_left_to_train
from hasten.loops.run import Run
from hasten.loops.user_code import (
    check_evaluation,
    check_fit,
    check_in_backward,
    check_parameters,
    check_pipeline,
    warn_about_missing_parts,
    why_not_whole_step,
)
from hasten.machine import allocator
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.module.hparams import logged_hparams
from hasten.optim import HastenOptimizer
from hasten.optim.averaged import AveragedWeights
from hasten.optim.backward import InBackward
from hasten.optim.configure import warn_of_none, warn_of_schedulers
from hasten.optim.fused import check_dense, use_fused
from hasten.precision.matmul import matmul_precision, without_effect
from hasten.strategies.parallel import LayerSync, ParallelStrategy, TorchSyncBatchNorm
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten.optim.manual import FirstGradients

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
    module, runtime, hooks = run.module, run.runtime, run.hooks
    fitting = run.state.fn is TrainerFn.FITTING
    _check_arguments(run)
    _find_data_and_loggers(run)
    _set_up(run, [owner for owner in (datamodule, module) if owner is not None])
    setup_by_program = defined_by_program(runtime.strategy, "setup")
    setup_comes_first = setup_by_program and runtime.strategy.restore_checkpoint_after_setup
    if setup_comes_first:
        runtime.strategy.setup(module.trainer)
    checkpoint, path = read_checkpoint()
    runtime.shard(module, stored=(checkpoint or {}).get("state_dict") or ())

    if runtime.precision.converts_before_loading:
        runtime.place(module)
    state = RunState(run, callbacks, datamodule)
    if checkpoint is not None:
        checkpoint = _restore_model(run, state, checkpoint, str(path), datamodule)

    if defined_by_program(runtime.accelerator, "setup"):
        runtime.accelerator.setup(module.trainer)
    _place_and_wrap(run)
    if setup_by_program and not setup_comes_first:
        runtime.strategy.setup(module.trainer)
    if fitting:
        hooks.on_fit_start()
    if run.arguments.enable_autolog_hparams:
        log_hyperparams(run, datamodule)
    if run.conventions.clears_gradients:
        module.zero_grad()
    if fitting:
        _go_to_start(run, state, checkpoint, str(path))


def _check_arguments(run: Run) -> None:
    """Check and apply arguments that the hooks of ``setup`` may rely on."""
    arguments, runtime, fitting = run.arguments, run.runtime, run.state.fn is TrainerFn.FITTING
    precision = arguments.speed.matmul_precision
    if precision is not None:
        run.undo.enter_context(matmul_precision(precision))
        if (reason := without_effect(precision, runtime.device)) is not None:
            rank_zero_info(f"Trainer(matmul_precision={precision!r}) changes nothing here: {reason}.")
    check_compile(run)
    if fitting and arguments.detect_anomaly:
        runtime.strategy.sharding.check_anomaly_mode()


def _find_data_and_loggers(run: Run) -> None:
    """Find the data and start the loggers; raise if data is missing or a logger cannot write."""
    if run.state.fn is TrainerFn.FITTING:
        collect_earlier_models(run.module)
        warn_about_missing_parts(run.data.validation, run.module, wanted=run.arguments.limit_val_batches != 0)
    assert run.state.fn is not None
    run.data.of(run.state.fn)[0].require()
    loggers = list(run.logged.loggers)
    for place, logger in enumerate(loggers[1:], start=1):
        if isinstance(logger, Logger):
            logger.check_beside(loggers[:place])
    for logger in sorted(loggers, key=lambda each: not getattr(each, "starts_first", False)):
        # A logger that cannot write raises its error now, and paths that contain its version are known from here on.
        getattr(logger, "experiment", None)


def _set_up(run: Run, owners: list[LightningModule | LightningDataModule]) -> None:
    """Call the hooks that load data and make the layers; check the module that they made."""
    module, runtime, hooks, fn = run.module, run.runtime, run.hooks, run.state.fn
    assert fn is not None
    once_a_machine = all(owner.prepare_data_per_node for owner in owners)
    if (runtime.local_rank if once_a_machine else runtime.global_rank) == 0:
        hooks.prepare_data()
    runtime.barrier("prepare_data")
    callbacks = module.trainer.callbacks
    earlier = list(callbacks)
    hooks.setup(fn)
    while len(callbacks) > len(earlier):
        # Callbacks that another one has added are set up as well.
        added = [each for each in callbacks if not any(each is one for one in earlier)]
        earlier = list(callbacks)
        hooks.set_up(added, fn)
    with runtime.init_module(), _explained_mesh(module):
        hooks.configure_model()
        if redefines(module, LightningModule, "configure_sharded_model"):
            owner = type(module).__name__
            if redefines(module, LightningModule, "configure_model"):
                what = f"Both `{owner}.configure_model`, and `{owner}.configure_sharded_model` are overridden."
                raise make_error(RuntimeError, what, fix="Define configure_model alone: the other name is deprecated.")
            rank_zero_deprecation(
                f"You have overridden `{owner}.configure_sharded_model` which is deprecated. Rename it configure_model."
            )
            module.configure_sharded_model()
    check_pipeline(fn.value, module)
    check_module(run)
    if fn is TrainerFn.FITTING and isinstance(runtime.strategy, ParallelStrategy) and runtime.several_processes:
        _sync_layers(run, runtime.strategy.layer_sync)


def _restore_model(
    run: Run, state: RunState, checkpoint: dict[str, Any], path: str, datamodule: LightningDataModule | None
) -> dict[str, Any]:
    """Restore weights, and the states of datamodule and callbacks; return the checkpoint as the hooks have left it."""
    fitting = run.state.fn is TrainerFn.FITTING
    shown = for_hooks(checkpoint) if run.conventions.checkpoints_have_loops else checkpoint
    run.hooks.on_load_checkpoint(shown)
    checkpoint = from_hooks(shown)
    check_entries(checkpoint, path, training=fitting)
    if fitting:
        check_left_to_train(checkpoint, path, run.arguments)
        if run.arguments.speed.batch_size == "auto":
            resume_batch_size(run, checkpoint, datamodule)
    # States of callbacks are restored too: on_fit_start may depend on them, and an evaluation may use averaged weights.
    state.restore(checkpoint, Phase.MODEL, path)
    return checkpoint


def _place_and_wrap(run: Run) -> None:
    """Move the module and the optimizers of a fit to the device, and wrap the module's calls."""
    fitting, runtime = run.state.fn is TrainerFn.FITTING, run.runtime
    strategy: Any = runtime.strategy
    moved_by_program = defined_by_program(strategy, "model_to_device")
    runtime.place(run.module, move=not moved_by_program)
    if moved_by_program:
        strategy.model = run.module
        strategy.model_to_device()
    change_module(run)
    if fitting:
        configure_optimizers(run)
    run.wrapped = runtime.wrap(run.module) if fitting else runtime.strategy.sharding.wrap_for_evaluation(run.module)
    compile_module(run)


def _go_to_start(run: Run, state: RunState, checkpoint: dict[str, Any] | None, path: str) -> None:
    """Load the data of a fit, and go to where it begins: to the position of its checkpoint, if it has one."""
    progress = run.progress
    run.metrics.remember()
    if checkpoint is not None:
        # Before the loaders: the loaders that a program returns may depend on the epoch.
        state.restore(checkpoint, Phase.POSITION, path)
        progress.in_epoch = progress.mid_epoch
    for source in (run.data.train, run.data.validation) if checkpoint is not None else (run.data.train,):
        source.loaded_in(progress.epochs_done)
    if checkpoint is None and not run.runtime.engine.owns_step and run.conventions.opens_loaders_late:
        # After the sanity check.
        run.data.load = functools.partial(_load_data, run)
    else:
        _load_data(run)
        check_evaluation(run)
    if checkpoint is not None:
        _resume_training(run, state, checkpoint, path)
        return
    if progress.mid_epoch and progress.in_epoch:
        # An error or Ctrl-C has ended an earlier fit within an epoch: this one begins that epoch again.
        progress.next_epoch()
    elif progress.mid_epoch:
        # An earlier fit was told to stop in the middle of an epoch; this one begins the next.
        progress.epoch_ended = True
    progress.in_epoch = False
    run.averages.resume_with(None)


def _sync_layers(run: Run, sync: LayerSync | None) -> None:
    """Change layers so that the processes compute them together, until the run ends."""
    if sync is None:
        return
    module, device = run.module, run.runtime.device.type
    normalizes = any(isinstance(part, torch_private.BatchNorm) for part in module.modules())
    on_gpu = not is_host(run.runtime.device) and run.runtime.steps is None
    if isinstance(sync, TorchSyncBatchNorm) and not on_gpu and normalizes:
        raise MisconfigurationException(
            f"Trainer(sync_batchnorm=True): torch's SyncBatchNorm trains on GPUs only, and this run is on {device!r}.",
            fix="Leave it out, or use a normalization that does not depend on the batch, such as GroupNorm.",
            argument="sync_batchnorm",
        )
    changed = sync.apply(module)
    run.undo.callback(sync.revert, module)
    if changed is not module:
        raise WrongType(
            f"{type(sync).__name__}.apply() returned {with_article(type(changed))}.",
            fix="Change the module that it got in place, and return that.",
        )


@contextmanager
def _explained_mesh(module: LightningModule) -> Iterator[None]:
    """If ``configure_model`` failed because it used a device mesh that does not exist, say so in the error."""
    try:
        yield
    except TypeError as error:
        uses_mesh = "device_mesh" in names_in(module.configure_model)
        if "'NoneType' object" in str(error) and uses_mesh and module.device_mesh is None:
            what = f"self.device_mesh is None under strategy={module.trainer.strategy.name!r}, which has no mesh."
            add_note(error, what, fix="Use ModelParallelStrategy.")
        raise


def _load_data(run: Run) -> None:
    """Load the training data and check what depends on it."""
    run.data.load = nothing
    if not run.data.train.is_switched_off:
        run.data.train.load()
        run.runtime.engine.see_loaders(run.data.train.loaders)
    check_fit(run)


def _resume_training(run: Run, state: RunState, checkpoint: dict[str, Any], path: str) -> None:
    state.restore(checkpoint, Phase.TRAINING, path)
    run.resume.from_batch = run.progress.total_batches
    run.resume.skip_sanity = True
    if ranks := (checkpoint.get("hasten") or {}).get("ranks"):
        # Keep only this part of the checkpoint: the rest would stay in memory until then.
        rank_states = {"hasten": {"ranks": ranks}}

        def restore_random() -> None:
            run.resume.restore_random = nothing
            state.restore(rank_states, Phase.RANDOM, path)

        run.resume.restore_random = restore_random
    elif run.progress.mid_epoch:
        # Lightning's checkpoints have no exact position.
        run.data.train.stream.start_at(run.progress.batch)


def configure_optimizers(run: Run) -> None:
    """Make the optimizers and schedulers of a run."""
    module, owner = run.module, type(run.module).__name__
    strategy: Any = run.runtime.strategy
    if defined_by_program(strategy, "setup_optimizers"):
        strategy.setup_optimizers(module.trainer)
        optimizers, schedulers = list(run.optimizers), list(run.schedulers)
    else:
        optimizers, schedulers = optim.parse(
            module.configure_optimizers(),
            owner,
            automatic=module.automatic_optimization,
            steps_schedulers=overrides(module, LightningModule, "lr_scheduler_step"),
        )
    if (connect := run.runtime.own_methods.get("connect")) is not None:
        _, optimizers, schedulers = connect(module, optimizers, schedulers)
    automatic = module.automatic_optimization
    optim.check(optimizers, schedulers, automatic=automatic, owner=owner)
    warn_of_schedulers(optimizers, schedulers, automatic=automatic, owner=owner, max_epochs=run.limits.max_epochs)
    check_parameters(run, optimizers)
    optimizers = change_optimizers(run, optimizers)
    run.optimizers, run.schedulers = optimizers, schedulers
    check_optimizers(run)
    engine, clip_norm = run.runtime.engine, run.arguments.gradient_clip_val or 0.0
    engine.check_beside(functools.partial(_conflicts_with_engine, run))
    accumulation = run.window.accumulate_grad_batches if automatic else None
    engine.prepare(owner="Trainer", accumulation=accumulation, clip_norm=clip_norm)
    optimizers, schedulers = engine.make(module, optimizers, schedulers)
    warn_of_none(optimizers, owner)
    set_optimizers(run, optimizers, schedulers)


def _conflicts_with_engine(run: Run) -> tuple[tuple[object, str, str, str], ...]:
    """Return what an engine that computes backward and steps does not do; see ``StepEngine.check_beside``."""
    arguments, owner = run.arguments, type(run.module).__name__
    own = {
        name: f"{owner}.{name}()"
        for name in ("backward", "configure_gradient_clipping", "clip_gradients")
        if overrides(run.module, LightningModule, name)
    }
    batches, every = run.window.accumulate_grad_batches, arguments.val_check_interval
    splits = isinstance(every, int) and every % batches > 0 and arguments.limit_val_batches != 0
    return (
        (
            "backward" in own,
            own.get("backward", ""),
            " the engine computes backward.",
            "Change the loss in training_step.",
        ),
        (
            len(own.keys() - {"backward"}) > 0,
            next(reversed(own.values()), ""),
            " the engine clips.",
            "Use gradient_clip_val.",
        ),
        (
            bool(arguments.gradient_clip_val) and arguments.gradient_clip_algorithm == "value",
            "Trainer(gradient_clip_algorithm='value')",
            " the engine clips by norm.",
            "Leave it out.",
        ),
        (arguments.on_bad_loss != "warn", f"Trainer(on_bad_loss={arguments.on_bad_loss!r})", "", "use 'warn'."),
        (
            splits,
            f"Trainer(val_check_interval={every}, accumulate_grad_batches={batches})",
            " checkpoints after validation cannot hold an open accumulation.",
            f"Use a multiple of {batches}.",
        ),
        (arguments.speed.memory == "auto", "Trainer(memory='auto')", "", "use 'selective' or 'full'."),
    )


def set_optimizers(run: Run, optimizers: list[Any], schedulers: list[optim.LRSchedulerConfig]) -> None:
    """Make a run train with these optimizers and schedulers, and with others once their lists change."""
    run.optimizers = WatchedList(optimizers, lambda: _optimizers_changed(run))
    run.schedulers = WatchedList(schedulers, lambda: setattr(run, "changed", True))
    run.averages = AveragedWeights(optimizers)
    run.undo.callback(lambda: run.averages.keep_averaged())
    run.wrapped_optimizers = [_counted(run, optimizer) for optimizer in optimizers]
    run.changed = True


def _optimizers_changed(run: Run) -> None:
    """Continue with the optimizers that are in the list now."""
    wrappers = {id(wrapped.optimizer): wrapped for wrapped in run.wrapped_optimizers}
    optim.check_assigned(run.optimizers, automatic=run.module.automatic_optimization)
    new = change_optimizers(run, [one for one in run.optimizers if id(one) not in wrappers])
    removed = wrappers.keys() - {id(one) for one in run.optimizers}
    for key in removed:
        if isinstance(optimizer := wrappers[key].optimizer, InBackward):
            optimizer.stop()
    if new or removed:
        # The weights in the module stay.
        run.averages = AveragedWeights(run.optimizers)
        run.averages.resume_with(None)
    run.wrapped_optimizers = [wrappers.get(id(one)) or _counted(run, one) for one in run.optimizers]
    run.changed = True


def _counted(run: Run, optimizer: Any) -> HastenOptimizer:
    """Return a wrapper of ``optimizer`` whose steps count, for manual optimization and ``optimizer_step``."""
    step, progress = run.runtime.engine.make_step(optimizer), run.progress
    look = None if run.module.automatic_optimization else _first_gradients(run, optimizer)

    def finish_by_hand() -> None:
        if run.runtime.engine.unscale is not None:
            run.runtime.engine.unscale(optimizer)
        run.hooks.on_before_optimizer_step(optimizer)

    def counted_step(closure: Any = None, **kwargs: Any) -> Any:
        nonlocal look
        if look is not None:
            look = look.before_step() if closure is None else None
        elif closure is None and run.module.automatic_optimization:
            _warn_of_second_step(run, optimizer)
        finish = run.window.finish_in_step if run.module.automatic_optimization else finish_by_hand
        if finish is not None and closure is None:
            finish()
        elif finish is not None:
            closure = _then(closure, finish)
        result = step(closure, **kwargs)
        if not run.module.automatic_optimization and "_on_after_step" not in wrapper.around_step:
            # Otherwise the loop counts, once optimizer_step has ended.
            progress.global_step += 1
        return result

    @contextmanager
    def toggled(sync_grad: bool) -> Iterator[None]:
        local = nullcontext() if sync_grad else run.runtime.no_sync(run.wrapped)
        with run.module.toggled_optimizer(optimizer), local:
            yield

    # counted_step reads it.
    wrapper = HastenOptimizer(optimizer, counted_step, toggled)
    return wrapper


def _warn_of_second_step(run: Run, optimizer: Any) -> None:
    """Warn of a program that steps by itself what the Trainer steps, unless its ``optimizer_step`` does."""
    owner = type(run.module)
    if not (run.runtime.engine.steps_by_program or overrides(run.module, LightningModule, "optimizer_step")):
        warn_once(
            f"second step {owner}",
            f"{owner.__name__} calls step() of self.optimizers(), and the Trainer steps {type(optimizer).__name__} as "
            "well: twice per batch.",
            PossibleUserWarning,
            fix="Leave it out, or set self.automatic_optimization = False in __init__.",
        )


def _first_gradients(run: Run, optimizer: Any) -> FirstGradients | None:
    """Return what looks at the gradients of the first steps; None where they are in places of their own."""
    if isinstance(optimizer, InBackward) or not comes_from(type(run.runtime.engine), "hasten.strategies"):
        return None
    from hasten.optim.manual import FirstGradients

    return FirstGradients(optimizer, run.module)


def _then(closure: Callable[[], Any], finish: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls the user's closure and then finishes the gradients."""

    def closure_and_finish() -> Any:
        loss = closure()
        finish()
        return loss

    return closure_and_finish


def log_hyperparams(run: Run, datamodule: LightningDataModule | None) -> None:
    values = logged_hparams(run.module, datamodule) if run.logged.loggers else None
    for logger in run.logged.loggers:
        if values is not None:
            logger.log_hyperparams(values)
        logger.log_graph(run.module)
        logger.save()


def change_optimizers(run: Run, optimizers: list[Any]) -> list[Any]:
    """Make optimizers fused, or step in backward, as the arguments say; return them."""
    fused = run.arguments.speed.fused_optimizer
    for optimizer in optimizers:
        _move_state(optimizer)
        if fused is not None:
            _fuse(run, optimizer, fused)
        if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults.get("fused"):
            torch_private.begin_momentum_at_zero(optimizer)
        run.runtime.engine.check_optimizer(optimizer, "Trainer")
        if isinstance(optimizer, InBackward):
            run.undo.callback(optimizer.stop)
            check_in_backward(run, optimizer)
            optimizer.start()
    return optimizers


def _move_state(optimizer: Any) -> None:
    """Move the state of an optimizer that has stepped to its parameters; an earlier run left it on the CPU."""
    states = getattr(optimizer, "state", None)
    if not states or not isinstance(states, dict):
        return
    for group in optimizer.param_groups:
        # As torch does when it loads a state: the count of steps stays on the CPU unless one of these is set.
        moves_step = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = states.get(parameter)
            if isinstance(state, dict):
                moved = {name: value for name, value in state.items() if moves_step or name != "step"}
                state.update(move_to(moved, parameter.device))
            elif state is not None:
                states[parameter] = move_to(state, parameter.device)


def _fuse(run: Run, optimizer: Any, fused: bool) -> None:
    """Make an optimizer fused or not; one without a fused step stays as it is if ``speed`` has chosen that."""
    owner = f"Trainer(fused_optimizer={fused})"
    try:
        if fused:
            check_dense(optimizer, [run.module], owner)
        use_fused(optimizer, fused, owner=owner)
    except ValueError as error:
        # What is remembered may be from a run with another optimizer.
        if "fused optimizer" not in (run.observers.levers or ()):
            raise
        rank_zero_info(f"The optimizer stays as it is. {error}")


def remake_loader(
    speed: SpeedArguments, loader: Any, stage: str, name: str, *, device: torch.device | None = None
) -> Any:
    """Return the loader to read instead of the user's; the same object where no argument changes it."""
    # "auto" has become a number once it was found; until then the loader's size is used.
    if isinstance(speed.batch_size, int) and stage == "train":
        loader = micro_batches.rebatched(loader, speed.batch_size, name=name)
    if isinstance(speed.num_workers, int):
        loader = with_workers(loader, speed.num_workers, stage=stage, name=name)
    if speed.resident:
        # Before batching, which then cuts padding off whole batches. With "auto", and always in evaluations, data that
        # cannot be held in memory is read as before.
        held_on = device if speed.resident == "device" else None
        as_stage = "validate" if speed.resident == "auto" else stage
        loader = resident(loader, device=held_on, stage=as_stage, name=name)
    if speed.batching is not None:
        loader = rebatch(loader, speed.batching, stage=stage, name=name, few_shapes=bool(speed.compile))
    if speed.num_workers == "auto" and not is_resident(loader):
        loader = auto_workers(loader, stage=stage, name=name)
    return loader


def change_module(run: Run) -> None:
    """Change how the module computes, before the strategy wraps it; ``run.undo`` takes it back."""
    speed, module = run.arguments.speed, run.module
    if speed.allocator is not None:
        run.undo.enter_context(allocator.kept(speed.allocator))
    # Without gradients it would change nothing.
    if speed.packed and run.state.fn is TrainerFn.FITTING:
        # Imported only here: registering its operations with torch takes a tenth of a first fit.
        from hasten.packed.blocks import packed_blocks

        asked = f"Trainer(packed={speed.packed!r})"
        first_token = speed.packed == "first_token"
        run.undo.enter_context(packed_blocks(module, first_token=first_token, asked=asked))
    if speed.dropout is not None:
        from hasten.packed.dropout import fast_dropout

        kind = run.runtime.device.type
        if kind != "cpu":
            what = f"Trainer(dropout='fast'): on {kind} dropout is one kernel already."
            raise MisconfigurationException(what, fix="Leave it out.", argument="dropout")
        if not run.undo.enter_context(fast_dropout(module)) and not speed.packed:
            what = f"Trainer(dropout='fast'): {type(module).__name__} has no nn.Dropout layer."
            fix = "Leave it out; dropout within attention is made cheap by packed=True."
            raise MisconfigurationException(what, fix=fix, argument="dropout")
    micro_batches.prepare_module(run)


def resume_batch_size(run: Run, checkpoint: dict[str, Any], datamodule: LightningDataModule | None) -> None:
    """Give a run with ``batch_size="auto"`` the size of its checkpoint, before its loaders are made."""
    from hasten.tuner.tuned_value import TunedValue

    ranks = (checkpoint.get("hasten") or {}).get("ranks") or [{}]
    size = ranks[min(run.runtime.global_rank, len(ranks) - 1)].get("batch_size")
    if not isinstance(size, int):
        rank_zero_info("Trainer(batch_size='auto'): the checkpoint has no batch size; it stays that of the loader.")
        return
    speed = dataclasses.replace(run.arguments.speed, batch_size=size)
    run.arguments = dataclasses.replace(run.arguments, speed=speed)
    run.data.train.remake_with(functools.partial(remake_loader, speed, device=run.runtime.device))
    TunedValue(run.module, datamodule, "batch_size").set(size)


def check_compile(run: Run) -> None:
    """Check that ``compile`` works on this machine."""
    settings = _settings(run)
    if settings is None:
        return
    if settings.cuda_graphs and run.arguments.speed.packed:
        asked = f"compile={dict(settings.options)}, " if settings.context is None else ""
        raise MisconfigurationException(
            f"Trainer({asked}packed={run.arguments.speed.packed!r}): a CUDA graph is recorded for one number of "
            "tokens, and packed batches have another each time.",
            fix=(
                "Use compile=True with packed, or batching='length' in place of packed: its few widths are recorded "
                "once each."
            ),
            argument="compile",
        )
    run.runtime.engine.check_compile("Trainer", trains=run.state.fn is TrainerFn.FITTING)
    check_possible("Trainer", settings, run.runtime.device)


def compile_module(run: Run) -> None:
    """Compile the module's calls until the run ends; ``run.undo`` restores them."""
    settings = _settings(run)
    if settings is None:
        return
    from hasten.compile.model import Key, compiled_model, for_strategy

    if settings.step and run.state.fn is TrainerFn.FITTING:
        if (reason := why_not_whole_step(run)) is not None:
            raise MisconfigurationException(
                f"Trainer(compile='step'): {reason.what}", fix=reason.fix, argument="compile"
            )
        run.undo.enter_context(torch_private.gradients_in_graphs())
    settings = for_strategy("Trainer", settings, run.module, run.runtime.strategy)

    speed, runtime = run.arguments.speed, run.runtime
    # Batches made by length have several widths; the length of packed rows is their number of tokens.
    dims = 1 if speed.batching is None and not speed.packed else 2
    # The graph differs from the one without them.
    changes = (runtime.precision.precision, speed.dropout, speed.memory)
    autocast = isinstance(runtime.autocast(), torch.autocast)
    steps_by_strategy = defined_by_program(
        runtime.strategy, "training_step", "validation_step", "test_step", "predict_step"
    )
    steps_by = runtime.strategy if steps_by_strategy else None
    key = Key(settings, runtime.device, dims, str(changes), bool(speed.packed), autocast, steps_by)
    model = compiled_model(run.module, key)
    if settings.cuda_graphs:
        run.undo.enter_context(marked_by_us())
    run.compiled = run.undo.enter_context(model.enabled(writes=runtime.is_global_zero))


def _settings(run: Run) -> CompileSettings | None:
    return run.arguments.speed.compile or users_settings(run.module)
