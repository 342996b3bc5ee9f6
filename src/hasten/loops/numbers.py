"""What the run's numbers and optimizers need around training: matrix products, fused steps, averages."""

from __future__ import annotations

from typing import Any

from hasten._lib.rank_zero import rank_zero_info, warn_once
from hasten.hooks import overrides
from hasten.loops.run import Run
from hasten.module import LightningModule
from hasten.optim.backward import InBackward
from hasten.optim.fused import use_fused
from hasten.precision.matmul import matmul_precision, without_effect


def set_matmul_precision(run: Run) -> None:
    """Multiply 32-bit matrices as asked until the run ends, and say so if that changes nothing here."""
    precision = run.arguments.speed.matmul_precision
    if precision is None:
        return
    run.undo.enter_context(matmul_precision(precision))
    if (reason := without_effect(precision, run.runtime.device)) is not None:
        rank_zero_info(f"Trainer(matmul_precision={precision!r}) changes nothing here: {reason}.")


def fuse(run: Run, optimizers: list[Any]) -> None:
    """Have optimizers update all parameters in one kernel, or not, where that was asked for."""
    fused = run.arguments.speed.fused_optimizer
    if fused is not None:
        for optimizer in optimizers:
            use_fused(optimizer, fused, owner=f"Trainer(fused_optimizer={fused})")


def step_in_backward(run: Run, optimizers: list[Any]) -> None:
    """Let optimizers that step in backward do so until the run ends.

    Raises:
        ValueError: something of the run needs all gradients at once, or several of them.

    """
    for optimizer in optimizers:
        if isinstance(optimizer, InBackward):
            run.undo.callback(optimizer.stop)
            follow_arguments(run, optimizer)
            optimizer.start()


def follow_arguments(run: Run, optimizer: InBackward) -> None:
    """Have an optimizer that steps in backward clip as the arguments say.

    Raises:
        ValueError: something of the run needs gradients after backward.

    """
    _check_in_backward(run, optimizer)
    clip_value = run.arguments.gradient_clip_val
    optimizer.clip_value = float(clip_value) if clip_value else None


def _check_in_backward(run: Run, optimizer: InBackward) -> None:
    """Check that nothing of the run needs gradients after backward.

    Raises:
        ValueError: something does.

    """
    arguments, speed, runtime = run.arguments, run.arguments.speed, run.runtime
    name = optimizer.optimizer_class.__name__
    instead = f"use torch.optim.{name} as it is."
    reason = None
    if run.accumulate_grad_batches > 1:
        reason = (
            f"Trainer(accumulate_grad_batches={run.accumulate_grad_batches}): each batch steps by itself in backward, "
            f"so gradients cannot be summed over several. Use larger batches, or {instead}"
        )
    elif speed.micro_batch is not None:
        reason = (
            f"Trainer(micro_batch={speed.micro_batch!r}): the parts of a batch would each step in backward. Leave it "
            f"out, or {instead}"
        )
    elif arguments.on_bad_loss != "warn":
        reason = (
            f"Trainer(on_bad_loss={arguments.on_bad_loss!r}): whether all gradients are finite is known when backward "
            f"is over, and by then each parameter has stepped. Use on_bad_loss='warn', or {instead}"
        )
    elif speed.memory == "auto":
        reason = (
            "Trainer(memory='auto'): a step that runs out of memory is begun again, and by then some parameters have "
            "stepped. Use memory='selective' or 'full'."
        )
    elif arguments.gradient_clip_val and arguments.gradient_clip_algorithm != "value":
        reason = (
            f"Trainer(gradient_clip_val={arguments.gradient_clip_val}): the norm of all gradients is known when "
            "backward is over, and by then each parameter has stepped. Use gradient_clip_algorithm='value', which "
            f"limits each element, or {instead}"
        )
    elif overrides(run.module, LightningModule, "configure_gradient_clipping"):
        reason = (
            f"{type(run.module).__name__}.configure_gradient_clipping(): there are no gradients left to clip after "
            f"backward. Leave it out, or {instead}"
        )
    elif runtime.scaler is not None:
        reason = (
            f"Trainer(precision={runtime.precision.precision!r}): whether a scaled gradient is finite is known when "
            "backward is over. Use precision='bf16-mixed', which scales nothing."
        )
    elif runtime.world_size > 1 and not runtime.strategy.steps_in_backward:
        reason = (
            f"Trainer(devices=...): with {runtime.world_size} processes each parameter would step before its gradients "
            f"are averaged over them. Use one process, or {instead}"
        )
    if reason is not None:
        raise ValueError(f"in_backward({name}) and {reason}")
    for hook in ("on_after_backward", "on_before_optimizer_step"):
        if overrides(run.module, LightningModule, hook):
            warn_once(
                f"in_backward {hook} {type(run.module).__name__}",
                f"in_backward({name}): each parameter has stepped before {type(run.module).__name__}.{hook}() runs, "
                f"and its gradient is None there. If that hook reads or changes gradients, {instead}",
            )
