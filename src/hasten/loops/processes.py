"""What processes that train together agree on: where an epoch ends, whether to stop, a batch without a loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten._lib.rank_zero import warn_once
from hasten.machine import agreement, same_program

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run import Run
    from hasten.runtime import Runtime
    from hasten.types import Group

Batches = Iterator[tuple[Any, bool]]

# Processes that all ask to stop after the same batch do so within a moment of each other.
_SAME_MOMENT_SECONDS = 2.0

_END: Any = object()
# Runs of this process alone are not counted: others may not have them.
_numbers = itertools.count(1)
# The state of each process's current batch; the largest counts.
_MORE, _LAST, _NONE = range(3)


# Arguments that may differ: folders, what is shown, how data is read on a machine, and what a process reports alone.
_MAY_DIFFER = (
    "callbacks", "logger", "speed", "default_root_dir", "enable_progress_bar", "enable_model_summary",
    "enable_autolog_hparams", "detect_anomaly", "benchmark", "max_epochs_assumed",
)  # fmt: skip
_SPEED_MAY_DIFFER = ("num_workers", "resident", "allocator")


def check_program(
    call: str, runtime: Runtime, module: object, arguments: Arguments, accumulate: int, callbacks: Iterable[object]
) -> int:
    """Check that all processes call the same function of a Trainer with the same arguments; return the run's number."""
    if runtime.world_size == 1:
        return 0
    number = next(_numbers)
    strategy = runtime.strategy
    facts = {
        **same_program.versions(),
        "the module": same_program.name_of(type(module)),
        "`strategy`": [strategy.name, same_program.name_of(type(strategy))],
        "`precision`": str(runtime.precision.precision),
        **same_program.of_fields(arguments, but=_MAY_DIFFER),
        **same_program.of_fields(arguments.speed, but=_SPEED_MAY_DIFFER),
        "`accumulate_grad_batches`": accumulate,
        "callbacks that all processes must have": [kind for one in callbacks if (kind := _shared_kind(one))],
    }
    same_program.require_same(f"program/{number}", f"Trainer.{call}()", facts)
    return number


# Callbacks that only write or show something; a process may have them alone.
_ALONE = ("progress", "rich_progress", "monitors", "model_summary", "lambda_function", "prediction_writer")


def _shared_kind(callback: object) -> str:
    """Return the name of a callback of hasten that exchanges something with other processes, else ""."""
    for kind in type(callback).__mro__[:-1]:
        if kind.__module__.startswith("hasten.callbacks."):
            file = kind.__module__.rpartition(".")[2]
            return "" if file in _ALONE else type(callback).__qualname__
    return ""


def check_module(run: Run) -> None:
    """Check that all processes train modules of the same parameters."""
    if run.runtime.world_size > 1:
        same_program.require_same(
            f"module/{run.number}", f"Trainer.{run.state.fn}()", same_program.of_module(run.module)
        )


def check_optimizers(run: Run) -> None:
    """Check that all processes train with the same optimizers and schedulers."""
    if run.runtime.world_size > 1:
        facts = same_program.of_optimizers(run.optimizers, [config.scheduler for config in run.schedulers])
        same_program.require_same(f"optimizers/{run.number}", f"Trainer.{run.state.fn}()", facts)


def agree_on_end(run: Run) -> bool:
    """End the epoch to come where the process with the fewest batches does; all processes call it.

    Returns whether the ends are not known beforehand on all processes, so that each batch has to be agreed on.
    """
    run.number = run.number or next(_numbers)
    end = run.train.certain_end
    known = -1.0 if end is None else min(end, 2.0**52)
    asks = run.should_stop or run.stop.asks
    # The smallest of a number and of its negative: all numbers are equal where their sum is 0.
    numbers = torch.tensor([known, -known, run.train.limits[0], -float(asks)], dtype=torch.float64)
    fewest, most, limit, nobody_asks = run.runtime.all_reduce(numbers, op="min").tolist()
    run.train.agreed_limit = limit
    run.stop.granted = nobody_asks < 0
    run.take_agreement()
    if fewest < 0:
        return True
    if fewest != -most:
        lengths = run.runtime.strategy.gather_objects(int(known))
        _warn(lengths.index(min(lengths)), f"has {int(fewest)} batches, and others have up to {int(-most)}")
        run.train.most_batches = int(fewest)
    return False


def batch_by_batch(run: Run, batches: Batches) -> Batches:
    """Yield ``(batch, is_last)`` while all processes have a batch; the last of one is the last of all."""
    group = host_group(run)
    try:
        while True:
            batch, is_last = next(batches, (_END, False))
            state = _NONE if batch is _END else _LAST if is_last else _MORE
            worst = torch.tensor(state)
            # Between the hosts: no device is waited for.
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
            if worst.item() != _MORE:
                everybody: list[Any] = [None] * run.runtime.world_size
                dist.all_gather_object(everybody, state, group=group)
                if len(set(everybody)) > 1:
                    first = everybody.index(max(everybody))
                    _warn(first, f"has no more batches after {run.progress.batch + (state != _NONE)}, and others have")
            if worst.item() == _NONE:
                return
            yield batch, worst.item() == _LAST
            if worst.item() == _LAST:
                return
    finally:
        batches.close()  # type: ignore[attr-defined]


def checked_in_group(run: Run, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Yield batches, after a check of the first one where several processes must read the same."""
    batches, strategy = iter(batches), run.runtime.strategy
    if strategy.shares_batches:
        first = next(batches, _END)
        strategy.check_batch(None if first is _END else first[0])
        if first is _END:
            return
        yield first
    yield from batches


def in_step(run: Run, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Yield batches; where a forward needs all processes, one without batches computes along until all are done."""
    strategy = run.runtime.strategy
    if strategy.computes_alone or run.runtime.world_size == 1:
        yield from batches
        return
    strategy.begin_epoch()
    group, batches, first = host_group(run), checked_in_group(run, batches), True
    while True:
        item = next(batches, _END)
        have = torch.tensor(int(item is not _END))
        dist.all_reduce(have, group=group)
        if not have:
            return
        if item is not _END:
            yield item
        else:
            strategy.compute_along(run.module)
        if first and have < run.runtime.world_size:
            # A process without any batch cannot have seen the order.
            _check_order(run)
        first = False


def _check_order(run: Run) -> None:
    orders = run.runtime.strategy.gather_objects(run.runtime.strategy.forward_order(run.module))
    if len(set(orders)) > 1:
        raise RuntimeError(
            f"{run.state.fn}: a process has no batch, and the parts of {type(run.module).__name__} compute in another "
            "order than they were assigned in. Use a smaller batch_size, so that each process has a batch."
        )


def host_group(run: Run) -> Group:
    """Return a group whose messages go from host to host; made once a run, by all processes at once."""
    if dist.get_backend() == "gloo":
        return None
    if run.host_group is None:
        run.host_group = dist.new_group(backend="gloo")
        run.undo.callback(dist.destroy_process_group, run.host_group)
    return run.host_group


def agree_after_batch(run: Run, *, validated: bool = False) -> int | None:
    """Return the signal that arrived at any process, after a batch; ``should_stop`` is that of all, or put off.

    Where one process wants to stop alone, all stop at the next agreement, about a second later.
    """
    stop, progress, number = run.stop, run.progress, None
    if not validated and stop.due(progress.total_batches):
        stop.asks = stop.asks or run.should_stop
        number = stop.agreed()
        run.take_agreement()
    if run.should_stop and not run.stop_agreed:
        place = f"stop/{run.number}/{progress.total_batches}/{validated}"
        run.stop_agreed = agreement.all_at(place, patience_seconds=_SAME_MOMENT_SECONDS)
        run.should_stop = run.stop_agreed
        stop.asks = True
    return number


def skip_epoch(run: Run) -> None:
    """Check that all processes leave the epoch, as ``on_train_batch_start`` returned -1."""
    progress = run.progress
    agreement.require_all(
        f"skip/{run.number}/{progress.epoch}/{progress.batch}",
        f"on_train_batch_start returned -1 before batch {progress.batch} of epoch {progress.epoch}",
        True,
        "Return it on all processes at the same batch.",
    )


def exchange_without_loss(run: Run) -> None:
    """Exchange the gradients of a window whose last batch has no loss on this process: it contributes none.

    Where no process has any, they stay None, as alone: an optimizer leaves such parameters as they are.
    """
    trained = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    place = f"no-loss/{run.number}/{run.progress.total_batches}"
    if all(parameter.grad is None for parameter in trained):
        agreement.counted(place)
    loss = touch(trained)
    run.runtime.strategy.prepare_backward(loss, run.wrapped)
    loss.backward()
    if run.runtime.device.type == "cuda":
        torch.cuda.synchronize(run.runtime.device)
    # All processes have counted by now: their gradients are here.
    if agreement.count(place) == run.runtime.world_size:
        for parameter in trained:
            parameter.grad = None


def touch(parameters: Sequence[Tensor]) -> Tensor:
    """Return a loss whose backward reaches ``parameters`` and adds nothing to their gradients."""
    result: Tensor = _Touch.apply(*parameters)
    return result


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Zeros that take no memory.
        return tuple(p.new_zeros(()).expand_as(p) for p in ctx.saved_tensors)


def _warn(rank: int, what: str) -> None:
    warn_once(
        "batches-differ-by-rank",
        f"The train dataloader of rank {rank} {what}: every epoch ends there on all processes, and what the others "
        "have left is not read. Give each process the same number of batches to train on all of them.",
    )
