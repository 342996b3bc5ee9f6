"""Agreements between processes that train together: where an epoch ends, whether to stop, a batch without a loss."""

from __future__ import annotations

import functools
import itertools
import json
import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten._lib.device import synchronize
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten.extend.origin import comes_from, module_of
from hasten.loops.schedule import Stopped, warn_of_idle_schedulers
from hasten.machine import agreement, same_program, watchdog

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run import Run
    from hasten.module import LightningModule
    from hasten.runtime import Runtime
    from hasten.types import Group

Batches = Iterator[tuple[Any, bool]]

# Processes that all ask to stop after the same batch do so at nearly the same time.
_SAME_MOMENT_SECONDS = 2.0

_END: Any = object()
# Stands for an infinite number of batches, which JSON and integers do not have.
_INFINITE = 2.0**52
_MOST_RANKS = 8
_ADVICE = "Give each process the same number of batches, or use uneven='stop'."
# Runs of one process alone are not counted: other processes may not have them.
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
    call: str,
    runtime: Runtime,
    module: LightningModule,
    arguments: Arguments,
    accumulate: int,
    callbacks: Iterable[object],
) -> int:
    """Check that all processes call the same function of a Trainer with the same arguments; return the run's number."""
    if not runtime.several_processes:
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


# Callbacks that only write or show something may exist on one process only.
_ALONE = (
    "progress", "rich_progress", "monitors", "model_summary", "memory_snapshot", "lambda_function", "prediction_writer",
)  # fmt: skip


def _shared_kind(callback: object) -> str:
    """Return the name of a callback of hasten that exchanges something with other processes, else ""."""
    for kind in type(callback).__mro__[:-1]:
        if comes_from(kind, "hasten.callbacks"):
            file = module_of(kind).rpartition(".")[2]
            return "" if file in _ALONE else type(callback).__qualname__
    return ""


def check_module(run: Run) -> None:
    """Check that all processes train modules of the same parameters."""
    if run.runtime.several_processes:
        same_program.require_same(
            f"module/{run.limits.number}", f"Trainer.{run.state.fn}()", same_program.of_module(run.module)
        )


_OF_CONFIG = ("interval", "frequency", "reduce_on_plateau", "monitor", "strict")


def check_optimizers(run: Run) -> None:
    """Check that all processes train with the same optimizers and schedulers."""
    if run.runtime.several_processes:
        facts = same_program.of_optimizers(run.optimizers, [config.scheduler for config in run.schedulers])
        for index, config in enumerate(run.schedulers):
            facts |= {
                f"`{name}` of scheduler {index}": same_program.plain(getattr(config, name)) for name in _OF_CONFIG
            }
        same_program.require_same(f"optimizers/{run.limits.number}", f"Trainer.{run.state.fn}()", facts)


def nothing_to_train(run: Run) -> bool:
    """Return whether there are no batches to train on; the same on all processes, which all call it."""
    is_off = run.data.train.is_off()
    if not run.runtime.several_processes:
        return is_off
    ends = run.runtime.strategy.gather_objects((is_off, None if is_off else run.data.train.certain_end))
    off = [each for each, _ in ends]
    if run.arguments.uneven == "error" and all(end is not None for each, end in ends if not each):
        counts = [0 if each else int(min(end or 0, _INFINITE)) for each, end in ends]
        if len(set(counts)) > 1:
            raise make_error(
                ValueError, f"Trainer(uneven='error'): {_text_of(counts)}.", fix=_ADVICE, argument="uneven"
            )
    return any(off)


def agree_on_end(run: Run) -> Callable[[Batches], Batches] | None:
    """Agree on how the epoch to come ends, where processes may have different numbers of batches; all call it.

    Returns the function through which the batches of the epoch must be read; None if all processes end together anyway.

    """
    run.limits.number = run.limits.number or next(_numbers)
    train = run.data.train
    # The agreement of an earlier epoch may not hold for this one.
    train.most_batches = train.agreed_limit = math.inf
    end = train.certain_end
    length = -1.0 if end is None else min(end, _INFINITE)
    asks = run.limits.should_stop or run.limits.stop.asks
    # The smallest of a number and of its negative: all numbers are equal where their sum is 0.
    numbers = torch.tensor([length, -length, train.limits[0], -float(asks), *_of_steps(run)], dtype=torch.float64)
    fewest, minus_most, train.agreed_limit, nobody_asks, *of_steps = run.runtime.all_reduce(numbers, op="min").tolist()
    if _rates_differ(run, of_steps):
        raise make_error(RuntimeError, _text_of_rates(run), fix=_SAME_RATES)
    run.limits.stop.granted = nobody_asks < 0
    run.limits.apply_agreement()
    if fewest < 0:
        return functools.partial(batch_by_batch, run)
    if fewest == -minus_most:
        return None
    counts = run.runtime.strategy.gather_objects(int(length))
    if run.arguments.uneven == "error":
        raise make_error(ValueError, f"Trainer(uneven='error'): {_text_of(counts)}.", fix=_ADVICE, argument="uneven")
    _warn(_text_of(counts), int(fewest))
    train.most_batches = int(fewest)
    return None


def check_steps(run: Run) -> None:
    """Check at the end of a run that all processes made the same steps, and warn of schedulers that made none.

    ``agree_on_end`` compares the processes before each epoch.
    """
    if not run.module.automatic_optimization:
        warn_of_idle_schedulers(run)
    if not run.runtime.several_processes:
        return
    smallest = run.runtime.all_reduce(torch.tensor(_of_steps(run), dtype=torch.float64), op="min").tolist()
    if _rates_differ(run, smallest):
        # They may have changed after the last step.
        rank_zero_warn(_text_of_rates(run), fix=_SAME_RATES)


def _of_steps(run: Run) -> list[float]:
    """Return the number of steps and a digest of the learning rates, each with its negative."""
    steps = float(run.progress.global_step)
    digest = float(zlib.crc32(json.dumps(_learning_rates(run)).encode()))
    return [steps, -steps, digest, -digest]


def _rates_differ(run: Run, smallest: Sequence[float]) -> bool:
    """Return whether learning rates differ, by the smallest numbers of all processes; raise where numbers of steps do.

    The numbers are those of ``_of_steps``: the smallest of a number and of its negative tell whether all are equal.
    """
    fewest, minus_most, first_digest, minus_last_digest = smallest
    if fewest != -minus_most:
        told = _by_rank(run.runtime.strategy.gather_objects(run.progress.global_step))
        raise make_error(
            RuntimeError,
            f"Trainer.fit(): the processes made different numbers of optimizer steps: global_step is {told}. Their "
            "weights are not the same any more.",
            fix="Call optimizer.step() for the same batches on all processes.",
        )
    return first_digest != -minus_last_digest


_SAME_RATES = "Set it on all processes. If it follows from a logged value, log that with self.log(..., sync_dist=True)."


def _learning_rates(run: Run) -> dict[str, float]:
    # A tensor would have to be read from the device.
    return {
        f"lr of group {position} of optimizer {index}": float(group["lr"])
        for index, optimizer in enumerate(run.optimizers)
        for position, group in enumerate(optimizer.param_groups)
        if isinstance(group.get("lr"), (int, float))
    }


def _text_of_rates(run: Run) -> str:
    """Return which learning rate differs between the processes; all of them call it."""
    rates = run.runtime.strategy.gather_objects(_learning_rates(run))
    name = next(name for name in rates[0] if len({each.get(name) for each in rates}) > 1)
    return (
        f"Trainer.fit(): {name} is {_by_rank([each.get(name) for each in rates])}. Steps with different learning rates "
        "leave each process with other weights."
    )


def _by_rank(values: list[Any]) -> str:
    found = same_program.by_value(values)
    return " and ".join(f"{value} on {agreement.format_ranks(ranks)}" for value, ranks in found[:_MOST_RANKS])


def batch_by_batch(run: Run, batches: Batches) -> Batches:
    """Yield ``(batch, is_last)`` while all processes have a batch; the last of one is the last of all.

    The processes agree before each batch, so none of them is in a backward that others do not come to.
    """
    group = host_group(run)
    try:
        while True:
            batch, is_last = next(batches, (_END, False))
            state = _NONE if batch is _END else _LAST if is_last else _MORE
            worst = torch.tensor(state)
            # Between the hosts, so that no device has to wait.
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
            if worst.item() != _MORE:
                _compare(run, batches, state)
            if worst.item() == _NONE:
                return
            yield batch, worst.item() == _LAST
            if worst.item() == _LAST:
                return
    finally:
        if isinstance(batches, Generator):
            batches.close()


def _compare(run: Run, batches: Batches, state: int) -> None:
    """Report which processes have fewer batches than others, when the first of them has no more."""
    more = state == _MORE
    if more and run.arguments.uneven == "error":
        # Not every loader knows which batch is its last. A batch fetched here is lost, but only with "error".
        more = next(batches, _END) is not _END
    everybody: list[Any] = [None] * run.runtime.world_size
    dist.all_gather_object(everybody, (run.progress.batch + (state != _NONE) + more, more), group=host_group(run))
    counts = [count for count, _ in everybody]
    if len(set(counts)) == 1:
        return
    text = _text_of(counts, [more for _, more in everybody])
    if run.arguments.uneven == "error":
        raise make_error(RuntimeError, f"Trainer(uneven='error'): {text}.", fix=_ADVICE, argument="uneven")
    _warn(text, min(counts))


def in_step(run: Run, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Return the batches of an evaluation, up to a signal at any process: see ``leave_evaluation``.

    If a forward needs all processes, a process without batches takes part until all are done.
    """
    if not run.runtime.several_processes:
        return iter(batches)
    return _alone(run, batches) if run.runtime.strategy.engine.computes_alone else _together(run, batches)


def _alone(run: Run, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Yield the batches; end early if a signal has arrived, unless their steps need the other processes."""
    stop, begun = run.limits.stop, watchdog.collectives_begun()
    for item in batches:
        yield item
        # Steps that exchange something themselves need all processes, up to the last batch.
        if stop.heard is not None and watchdog.collectives_begun() == begun:
            return


def _together(run: Run, batches: Iterable[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
    """Yield the batches, and take part in the forward of other processes until all are done or a signal arrived."""
    strategy, stop = run.runtime.strategy, run.limits.stop
    strategy.sharding.begin_epoch()
    group, first = host_group(run), True
    batches = strategy.sharding.checked(iter(batches), itemgetter(0))
    while True:
        item = next(batches, _END)
        state = torch.tensor([item is not _END, stop.heard is not None], dtype=torch.int64)
        dist.all_reduce(state, group=group)
        have, heard = state.tolist()
        if heard or not have:
            return
        some_have_none = first and have < run.runtime.world_size
        if some_have_none:
            lowest = torch.tensor(run.runtime.world_size if item is _END else run.runtime.global_rank)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
            strategy.sharding.follow(int(lowest), group)
        if item is not _END:
            yield item
        else:
            strategy.sharding.compute_along(run.module)
        if some_have_none:
            _check_order(run)
        first = False


def leave_evaluation(run: Run) -> None:
    """Leave the run if a signal arrived at any process; all processes come here after their last batch."""
    # ``should_stop`` is agreed on after the evaluation.
    number = run.limits.stop.agreed_now() if run.runtime.several_processes else None
    if number is not None:
        raise Stopped(number)


def _check_order(run: Run) -> None:
    orders = run.runtime.strategy.gather_objects(run.runtime.strategy.sharding.forward_order(run.module))
    if len(set(orders)) > 1:
        raise make_error(
            RuntimeError,
            f"{type(run.module).__name__}: a process has no batch, and a step computes the parts in another order than "
            "they were assigned in, or calls the module itself.",
            fix="Use a smaller batch_size, so that each process has a batch.",
        )


def host_group(run: Run) -> Group:
    """Return a group whose messages go from host to host; made once a run, by all processes at once."""
    if dist.get_backend() == "gloo":
        return None
    if run.limits.host_group is None:
        run.limits.host_group = dist.new_group(backend="gloo")
        run.undo.callback(dist.destroy_process_group, run.limits.host_group)
    return run.limits.host_group


def agree_after_batch(run: Run, *, validated: bool = False) -> None:
    """Agree, after a batch, on a signal that arrived at any process; ``should_stop`` is agreed on, or postponed.

    If only one process wants to stop, all stop at the next agreement, about a second later.
    """
    stop, progress = run.limits.stop, run.progress
    if not validated and stop.due(progress.total_batches):
        stop.asks = stop.asks or run.limits.should_stop
        stop.agreed()
        run.limits.apply_agreement()
    if run.limits.should_stop and not run.limits.stop_agreed:
        place = f"stop/{run.limits.number}/{progress.total_batches}/{validated}"
        run.limits.stop_agreed = agreement.all_at(place, patience_seconds=_SAME_MOMENT_SECONDS)
        run.limits.should_stop = run.limits.stop_agreed
        stop.asks = True


def skip_epoch(run: Run) -> None:
    """Check that all processes leave the epoch, as ``on_train_batch_start`` returned -1."""
    progress = run.progress
    agreement.require_all(
        f"skip/{run.limits.number}/{progress.epoch}/{progress.batch}",
        f"on_train_batch_start returned -1 before batch {progress.batch} of epoch {progress.epoch + 1}",
        True,
        "Return it on all processes at the same batch.",
    )


def exchange_without_loss(run: Run) -> None:
    """Exchange the gradients of a window whose last batch has no loss on this process: it contributes none.

    If no process has a gradient, it stays None, as in one process: an optimizer does not change such parameters.
    """
    trained = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    place = f"no-loss/{run.limits.number}/{run.progress.total_batches}"
    if all(parameter.grad is None for parameter in trained):
        agreement.counted(place)
    loss = zero_loss(trained)
    run.runtime.engine.prepare_backward(loss, run.wrapped)
    loss.backward()
    synchronize(run.runtime.device)
    # All processes have counted by now: their gradients are here.
    if agreement.count(place) == run.runtime.world_size:
        for parameter in trained:
            parameter.grad = None


def zero_loss(parameters: Sequence[Tensor]) -> Tensor:
    """Return a loss whose backward reaches ``parameters`` and adds nothing to their gradients."""
    result: Tensor = _ZeroLoss.apply(*parameters)
    return result


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Zeros that take no memory.
        return tuple(p.new_zeros(()).expand_as(p) for p in ctx.saved_tensors)


def _warn(counts: str, fewest: int) -> None:
    warn_once(
        "batches-differ-by-rank",
        f"The train dataloaders of the processes differ in length: {counts}. Every epoch ends after {fewest} on all "
        "of them, and what the others have left is not read.",
        fix="Give each process the same number of batches to train on all of them.",
    )


def _text_of(counts: Sequence[int], at_least: Sequence[bool] = ()) -> str:
    """Return the number of batches of each process as text, "at least" so many where the end is not known.

    Example::

        >>> _text_of([5, 7, 7])
        'rank 0 has 5 batches, ranks 1, 2 have 7'

    """
    by_count: dict[tuple[int, bool], list[int]] = {}
    for rank, count in enumerate(counts):
        by_count.setdefault((count, bool(at_least) and at_least[rank]), []).append(rank)
    parts: list[str] = []
    for (count, more), members in by_count.items():
        named = agreement.format_ranks(members[:_MOST_RANKS]) + (" and others" if len(members) > _MOST_RANKS else "")
        number = f"{'at least ' if more else ''}{count}" + ("" if parts else " batch" if count == 1 else " batches")
        parts.append(f"{named} {'has' if len(members) == 1 else 'have'} {number}")
    return ", ".join(parts)
