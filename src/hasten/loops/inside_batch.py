"""Checkpoints that a program saves in the middle of a batch: they hold the state in which the batch began."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from hasten.checkpoint.metrics import metric_states
from hasten.loops.books import Books
from hasten.loops.run import Run

# What is called between fetching a batch and moving the counters.
_CALLED_INSIDE = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
# Here nothing of a batch has begun, or the run is over anyway.
_OUTSIDE = frozenset({"on_train_start", "on_train_epoch_start", "on_exception", "teardown"})


class BatchStart:
    """The state in which the batch in hand began, kept for runs whose hooks save checkpoints inside a batch.

    A resumed run computes that batch again from its beginning: the same weights, gradients and random numbers.

    Args:
        run: the run.

    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._books = Books(run)
        self._counts: tuple[Any, int] = (None, 0)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._metrics: dict[str, Any] = {}
        self._versions: list[int] = []

    def kept(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, with the state of the run kept before each."""
        run = self._run
        for item in batches:
            self._books.keep()
            self._counts = run.window_weight, run.skipped_batches
            # Those of a step that is done are cleared before they are needed.
            pending = run.gradients_may_count()
            self._gradients = [
                (p, None if p.grad is None or not pending else p.grad.clone()) for p in self._parameters()
            ]
            leave_out = run.logged.evaluation_metrics()
            self._metrics = metric_states(run.module, leave_out=leave_out, copied=True)
            self._versions = self._weights()
            # A step may change its batch, and the resumed run needs it whole.
            run.train.replace_held(copy.deepcopy)
            yield item

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the run look as it did then; its tensors are not written to, which a backward may still need."""
        run = self._run
        if self._versions != self._weights() or run.averages:
            raise _refusal(run, "its weights have changed since the batch began")
        if run.guard is not None:
            bad_loss = run.arguments.on_bad_loss
            raise _refusal(run, f"what on_bad_loss={bad_loss!r} has found in it so far would count twice")
        counts, gradients = (
            (run.window_weight, run.skipped_batches),
            [(p, p.grad) for p, _ in self._gradients],
        )
        with self._books.shown():
            run.window_weight, run.skipped_batches = self._counts
            run.metrics_before_validation, run.progress.begun = self._metrics, True
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            try:
                yield
            finally:
                run.window_weight, run.skipped_batches = counts
                run.metrics_before_validation, run.progress.begun = None, False
                for parameter, gradient in gradients:
                    parameter.grad = gradient

    def _parameters(self) -> list[Tensor]:
        """Return all parameters of module and optimizers, each once."""
        run = self._run
        trained = [p for o in run.optimizers for group in o.param_groups for p in group["params"]]
        return list({id(p): p for p in (*trained, *run.module.parameters())}.values())

    def _weights(self) -> list[int]:
        return [parameter._version for parameter in self._parameters()]


def batch_start(run: Run) -> BatchStart | None:
    """Return what keeps the start of each batch, if some hook of the run saves a checkpoint inside one.

    Keeping it takes time in each step, so nobody else pays: the code of the hooks that are called inside a batch, and
    of the methods and functions that they call, is searched for ``save_checkpoint``.
    """
    owners = run.hooks.owners()
    return BatchStart(run) if any(_saves(owner, _CALLED_INSIDE, set()) for owner in owners) else None


def as_saved(run: Run, *, weights_only: bool) -> Any:
    """Return the context in which a checkpoint of the run is collected.

    Raises:
        RuntimeError: the batch in hand has begun, and the run could not go on exactly from there.

    """
    if weights_only or not is_inside(run):
        return nullcontext() if weights_only else _failed_in_first_batch(run)
    if run.batch_start is None:
        raise _refusal(run, "the random numbers and gradients it began with are gone")
    return run.batch_start.shown()


@contextmanager
def _failed_in_first_batch(run: Run) -> Iterator[None]:
    """Mark an epoch as begun where an exception ended it in its first batch: it is not to begin once more."""
    progress = run.progress
    failed = run.logged.context.row.name == "on_exception" and run.training and not run.is_last_batch
    before, progress.begun = (
        progress.begun,
        progress.begun or (failed and run.train.is_in_hand(progress.batch)),
    )
    try:
        yield
    finally:
        progress.begun = before


def is_inside(run: Run) -> bool:
    """Return whether a batch of training has begun and its counters have not moved yet."""
    progress = run.progress
    return (
        run.training
        and not progress.last_batch
        and run.logged.context.row.name not in _OUTSIDE
        and run.train.is_in_hand(progress.batch)
    )


def _refusal(run: Run, why: str) -> RuntimeError:
    return RuntimeError(
        f"Trainer.save_checkpoint() inside a batch (in {run.logged.context.row.name}, batch {run.progress.batch}): a "
        f"resumed run would have to begin the batch again, and {why}. Save in on_train_batch_end, or save the weights "
        "alone: save_checkpoint(path, weights_only=True)."
    )


# -- what the code of a hook calls


def _saves(owner: object, names: Iterable[str], seen: set[str], known: dict[str, Any] | None = None) -> bool:
    """Search the methods of ``owner``, and the functions ``known`` where they are called, by their names."""
    for name in names:
        if name in seen:
            continue
        seen.add(name)
        for found in (vars(owner).get(name, getattr(type(owner), name, None)), (known or {}).get(name)):
            function = _function_of(found)
            if function is not None:
                called = set(_names_in(function.__code__))
                if "save_checkpoint" in called or _saves(owner, called, seen, function.__globals__):
                    return True
    return False


def _function_of(found: Any) -> FunctionType | None:
    """Return the user's function in what was found under a name; None for anything else."""
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        if isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        elif hasattr(found, "__func__"):
            found = found.__func__
        else:
            return None
    return None if str(found.__module__).startswith(("hasten.", "torch.")) else found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
