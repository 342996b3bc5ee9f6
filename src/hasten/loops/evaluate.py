"""Validation and test: every batch of every loader once, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hasten._lib.rank_zero import rank_zero_warn
from hasten.hooks import STEPS, nothing, overrides
from hasten.loops.compiled import compiled_step, recorded_steps
from hasten.loops.run import Run, Stopped
from hasten.loops.run_data import Source
from hasten.loops.signatures import check_takes_loader
from hasten.loops.states import RunningStage, TrainerFn
from hasten.loops.step_errors import add_place, takes
from hasten.loops.transfer import make_transfer
from hasten.module import LightningModule
from hasten.report.results import print_results
from hasten.seed import isolate_rng


def sanity_check(run: Run) -> None:
    """Run a few validation batches before training, so that an error there shows in the first minute."""
    steps = run.arguments.num_sanity_val_steps
    if steps == 0 or run.skip_sanity or run.validation.is_off():
        return
    run.enter(RunningStage.SANITY_CHECKING)
    run.hooks.on_sanity_check_start()
    # Training must not depend on whether the check ran.
    with isolate_rng(), run.validation.limited_to(steps):
        run.watch("run_evaluation", evaluate)(run, run.validation)
    run.hooks.on_sanity_check_end()
    run.logged.forget_callback_values()


def evaluate(
    run: Run, source: Source, before_last_hooks: Callable[[], None] | None = None
) -> list[dict[str, float]]:
    """Evaluate on every loader of ``source``; return the values logged, a dict for each loader.

    In short::

        eval mode, no gradients
        on_validation_start, on_validation_epoch_start
        for each loader, for each batch:
            on_validation_batch_start, validation_step, on_validation_batch_end
        on_validation_epoch_end, values go to the loggers
        on_validation_end, checkpoints
        the modes from before
    """
    testing = source.stage == "test"
    sanity = run.state.stage == RunningStage.SANITY_CHECKING
    if not sanity:
        run.enter(RunningStage.TESTING if testing else RunningStage.VALIDATING)
        if run.state.fn == TrainerFn.FITTING:
            source.reload_if_due(run.progress.epoch)
            source.load()
    hooks, logged, progress = run.hooks, run.logged, run.progress
    stage = "test" if testing else "validate"
    loggers, delivered = logged.loggers, False
    if sanity:
        logged.loggers = ()
    logged.start_epoch(stage)
    try:
        with run.averages.applied(), _modes_kept(run.module, stage), without_gradients(run):
            (hooks.on_test_start if testing else hooks.on_validation_start)()
            (hooks.on_test_epoch_start if testing else hooks.on_validation_epoch_start)()
            several = len(source.loaders) > 1
            for loader_idx in range(len(source.loaders)):
                logged.enter_loader(stage, loader_idx if several else None)
                _evaluate_loader(run, source, loader_idx if several else None)
            logged.enter_loader(stage, None)
            by_loader, values = logged.close_epoch(stage)
            (hooks.on_test_epoch_end if testing else hooks.on_validation_epoch_end)()
            if not testing:
                hooks.on_validation_epoch_end_last()
            late_by_loader, late = logged.close_epoch(stage)
            values |= late
            for result in by_loader:
                result.update(late_by_loader[0])
            step = progress.updates if run.state.fn != "fit" else max(progress.updates - 1, 0)
            logged.log_epoch(values, step, progress.current_epoch)
            delivered = True
            (hooks.on_test_end if testing else hooks.on_validation_end)()
            if before_last_hooks is not None:
                before_last_hooks()
            if not testing:
                hooks.on_validation_end_last()
    finally:
        # Also on the way out of an interrupted evaluation, which starts again when the run is resumed.
        logged.start_epoch(stage)
        logged.loggers = loggers
    assert delivered
    return by_loader[: len(source.loaders)] + [{} for _ in range(len(source.loaders) - len(by_loader))]


def evaluate_and_print(run: Run, *, testing: bool, verbose: bool) -> list[dict[str, float]]:
    """Evaluate, and print the values logged if ``verbose``; what ``validate`` and ``test`` do."""
    source = run.test if testing else run.validation
    if source.is_off():
        call, limit = ("test", "limit_test_batches") if testing else ("validate", "limit_val_batches")
        rank_zero_warn(
            f"Trainer.{call}() evaluates nothing, as {limit}=0. Set trainer.{limit} = 1.0 before it."
        )
        return []
    source.load()
    check_takes_loader(run.module, "test" if testing else "validation", len(source.loaders))
    results = evaluate(run, source)
    run.leave_if_stopped()
    if verbose and run.runtime.is_global_zero:
        print_results(results, "test" if testing else "validate")
    return results


def _evaluate_loader(run: Run, source: Source, loader_idx: int | None) -> None:
    hooks, logged, stop = run.hooks, run.logged, run.stop
    testing = source.stage == "test"
    stage = "test" if testing else "validate"
    step_name = "test_step" if testing else "validation_step"
    context = logged.context_of(STEPS[step_name])
    step = _step(run, step_name, loader_idx)
    transfer = make_transfer(run, source, loader_idx or 0)
    suffix = () if loader_idx is None else (loader_idx,)
    if loader_idx is not None:
        context.enter_loader(loader_idx)
    several_processes = run.runtime.world_size > 1
    graphs = recorded_steps(run)
    for batch_idx, (batch, _) in enumerate(source.batches(loader_idx or 0)):
        if transfer is not None:
            batch = transfer(batch)
        logged.batch, logged.batch_size = batch, 0
        start = hooks.on_test_batch_start if testing else hooks.on_validation_batch_start
        if start is not nothing:
            start(batch, batch_idx, *suffix)
        logged.context = context
        try:
            if graphs is not None:
                graphs.begin()
            output = step(batch, batch_idx)
        except Exception as error:
            add_place(error, step_name, run.module, batch, batch_idx)
            raise
        end = hooks.on_test_batch_end if testing else hooks.on_validation_batch_end
        if end is not nothing:
            end(output, batch, batch_idx, *suffix)
        if logged.logs_evaluation_steps:
            logged.publish_evaluation_step(stage, batch_idx)
        if stop.signal is not None and not several_processes:
            raise Stopped(stop.signal)


def _step(run: Run, name: str, loader_idx: int | None) -> Callable[..., Any]:
    step = getattr(run.module, name)
    bound = run.runtime.bind(compiled_step(run, name, step), module=run.module)
    if loader_idx is not None:
        return lambda batch, batch_idx: bound(batch, batch_idx, loader_idx)
    return bound if takes(step, "batch_idx", at=2) else lambda batch, batch_idx: bound(batch)


def without_gradients(run: Run) -> Any:
    """Return inference mode where it can be used, else ``torch.no_grad``."""
    # DDP's broadcast of buffers and FSDP's views need tensors that may change outside inference mode.
    # Within fit neither: what validation keeps (a cached mask, a buffer) may be used in training next.
    fitting = run.state.fn == TrainerFn.FITTING
    # Nor a compiled step: validation within fit and outside of it would each be compiled.
    plain = fitting or run.compiled is not None
    inference = run.arguments.inference_mode and run.runtime.world_size == 1 and not plain
    return torch.inference_mode() if inference else torch.no_grad()


@contextmanager
def _modes_kept(module: LightningModule, stage: str) -> Iterator[None]:
    """Switch to eval mode, and give every sub-module back the mode it had."""
    modes = [(child, child.training) for child in module.modules()]
    getattr(module, "on_test_model_eval" if stage == "test" else "on_validation_model_eval")()
    try:
        yield
    finally:
        name = "on_test_model_train" if stage == "test" else "on_validation_model_train"
        if overrides(module, LightningModule, name):
            getattr(module, name)()
        else:
            restore_modes(modes)


def restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    """Set each module's own train / eval flag as it was."""
    for child, training in modes:
        child.training = training
