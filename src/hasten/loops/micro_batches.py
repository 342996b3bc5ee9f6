"""Batches computed a few samples at a time, and steps tried again with fewer when memory runs out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from hasten._lib import torch_private
from hasten._lib.device import free_cached_memory, is_host, is_out_of_memory
from hasten._lib.errors import MisconfigurationException, with_article
from hasten._lib.rank_zero import rank_zero_debug, rank_zero_info, warn_once
from hasten.batching.fields import sample_fields
from hasten.batching.split import Fields, join, measure, split
from hasten.data.loader_parts import with_attributes
from hasten.hooks import overrides
from hasten.logged_value import LoggedValue, extreme
from hasten.logged_values import LoggedValues
from hasten.loops.processes import host_group, zero_loss
from hasten.loops.saved_state import SavedBatch, StepState
from hasten.loops.user_code import MEMORY_NOTE
from hasten.memory import nothing_repeated, offloaded, recomputed, repeated_blocks
from hasten.module.datamodule import DataHooks
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.loops.run_data import StageData


# (batch, batch_idx, keep_outputs=False) -> outputs
ForwardBackward = Callable[..., Any]

T = TypeVar("T")

_NEVER = 2**62


def enabled(run: Run) -> bool:
    """Return whether a step computes its batch in parts, or may have to."""
    speed = run.arguments.speed
    return speed.micro_batch is not None or speed.memory == "auto"


def exchanges_afterwards(run: Run) -> bool:
    """Return whether a process computes without the others, which it would leave waiting if it ran out of memory."""
    return enabled(run) and _memory_limits(run).may_fail


def in_parts(run: Run, once: ForwardBackward) -> ForwardBackward:
    """Return forward and backward of a batch in parts; gradients, outputs and values are those of the whole.

    ``once`` computes one part; it neither exchanges gradients nor calls ``on_after_backward``.
    """
    plan, hooks, window, parts = _memory_limits(run), run.hooks, run.window, _Splitter(run, once)

    def forward_backward(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
        outputs = parts.compute(batch, batch_idx, keep_outputs, plan.samples)
        if parts.any_loss:
            hooks.on_after_backward()
        return outputs

    if not plan.may_fail:
        return forward_backward

    state, agree = StepState(run, plan.batch), _agreement(run)
    sync = sync_gradients(run)

    def forward_backward_again(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
        # Asked of the first batch, too, which may fit as a whole: whether it can be split is known before long.
        samples = measure(batch, parts.fields) if plan.shrinks and batch is not None else 1
        failed = False
        while True:
            state.save(batch, gradients=not window.is_start)
            attempted = samples if plan.samples is None else min(plan.samples, samples)
            outputs, error = parts.attempt(batch, batch_idx, keep_outputs, plan.samples)
            most, kept_is_useless = agree(attempted, error)
            if most == _NEVER:
                break
            failed = True
            state.restore()
            if not plan.make_smaller(most, keep_less=kept_is_useless):
                raise _nothing_left(plan, most, error)
            # After its tensors were let go of: what the attempt had taken would lie in pieces.
            del error
            free_cached_memory()
        state.step_succeeded()
        if failed:
            rank_zero_info(f"Memory ran out, and the step was begun again. From here on: {plan.describe()}.")
        if window.is_end:
            sync()
        if parts.any_loss:
            hooks.on_after_backward()
        return outputs

    return forward_backward_again


def _memory_limits(run: Run) -> MemoryLimits:
    if run.memory_limits is None:
        run.memory_limits = MemoryLimits(run)
    return run.memory_limits


class _Splitter:
    """Computes the parts of a batch one after the other, each with ``once``."""

    def __init__(self, run: Run, once: ForwardBackward) -> None:
        self._run, self._once = run, once
        self._holds_back = not exchanges_afterwards(run)
        self._weighs = run.window.accumulate_grad_batches > 1 or run.runtime.several_processes
        self._of_whole: dict[LoggedValue, tuple[bool, bool]] = {}
        self.any_loss = False

    @functools.cached_property
    def fields(self) -> Fields | None:
        """Which elements of a batch run over samples; None where that is not known."""
        run = self._run
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        owners = [owner for owner in (run.data.train.datamodule, run.module) if owner is not None]
        changes = any(overrides(owner, DataHooks, name) for owner in owners for name in names)
        return _memory_limits(run).fields_of(run.data.train, changes)

    def attempt(self, *step: Any) -> tuple[Any, Exception | None]:
        """Compute the parts; return (outputs, None), or (None, error) where memory ran out."""
        try:
            return self.compute(*step), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and not _kept_is_useless(error):
                raise
            # The frames of the error, and of what it came from, hold the tensors that took the memory.
            error.__context__ = error.__cause__ = None
            return None, error.with_traceback(None)

    def compute(self, batch: Any, batch_idx: int, keep_outputs: bool, size: int | None) -> Any:
        """Compute the parts and return their outputs as those of the whole batch."""
        run, once, logged, window = self._run, self._once, self._run.logged, self._run.window
        # An attempt that failed was in the middle of its parts.
        logged.batch, logged.batch_size = batch, 0
        parts = [(batch, 1)] if size is None or batch is None else split(batch, size, self.fields)
        skipped = run.window.skipped_batches
        if len(parts) == 1:
            with self._exchange(window.is_end):
                outputs = once(batch, batch_idx, keep_outputs)
            self.any_loss = run.window.skipped_batches == skipped
            return self._joined([outputs], [1])
        _warn_of_batch_norm(run.module)
        sizes = [count for _, count in parts]
        found = []
        is_start, window_size = window.is_start, window.size
        with LoggedParts(logged, self._of_whole) as values:
            try:
                for index, (part, count) in enumerate(parts):
                    logged.batch, logged.batch_size = part, count
                    # A part counts as much as it has samples of the batch.
                    window.is_start = is_start and index == 0
                    window.size = window_size * sum(sizes) / count
                    with self._exchange(window.is_end and index == len(parts) - 1):
                        found.append(once(part, batch_idx, keep_outputs))
                    values.next_part()
            finally:
                window.is_start, window.size = is_start, window_size
        logged.batch, logged.batch_size = batch, 0
        self.any_loss = run.window.skipped_batches - skipped < len(parts)
        # A batch counts as skipped as a whole or not at all.
        run.window.skipped_batches = skipped if self.any_loss else skipped + 1
        return self._joined(found, sizes)

    def _exchange(self, now: bool) -> AbstractContextManager[Any]:
        return nullcontext() if now or not self._holds_back else self._run.runtime.no_sync(self._run.wrapped)

    def _joined(self, found: list[Any], sizes: list[int]) -> Any:
        kept = [(outputs, size) for outputs, size in zip(found, sizes, strict=True) if outputs]
        if not kept:
            return found[0]
        # Each is the share of the whole already.
        loss = functools.reduce(operator.add, [outputs["loss"] for outputs, _ in kept])
        rest = [{k: v for k, v in outputs.items() if k not in ("loss", "loss_weight")} for outputs, _ in kept]
        joined = rest[0] if len(rest) == 1 else join(rest, [size for _, size in kept])
        if all(outputs.get("loss_weight") is not None for outputs, _ in kept):
            weight = sum(outputs["loss_weight"] for outputs, _ in kept)
            joined = {"loss_weight": weight, **joined}
            if not self._weighs:
                loss = loss / weight
        return {**joined, "loss": loss}


@dataclass(slots=True)
class _ValueOfParts:
    """What the parts of a batch have logged under one name."""

    # (value given last, weight, samples) of each part.
    values: list[tuple[Any, Any, int]] = field(default_factory=list)
    # (value, size, samples of the part, number of the part) of each call with a batch size.
    given: list[tuple[Any, Any, int, int]] = field(default_factory=list)
    # (total, weight) of the epoch before this batch.
    before: tuple[Any, Any] | None = None
    # The weight given last in the part in hand; None if it has not logged the value.
    weight: Any = None

    def samples(self) -> int:
        return sum({number: part for _, _, part, number in self.given}.values())


class LoggedParts:
    """A context in which the values logged in the parts of a batch are put together to those of the whole.

    A ``batch_size`` given to ``self.log`` counts what the part has, its samples or tokens, or is one number for the
    whole batch, such as a hyper-parameter. Of the latter each part counts its share. ``of_whole`` has for each entry
    (it is given the size of the whole batch, that is certain), as far as batches have shown it.
    """

    def __init__(self, logged: LoggedValues, of_whole: dict[LoggedValue, tuple[bool, bool]]) -> None:
        self._logged = logged
        self._of_whole = of_whole
        self._parts: dict[LoggedValue, _ValueOfParts] = {}
        self._number = 0

    def __enter__(self) -> LoggedParts:
        self._observed = self._logged.observed(self._note)
        self._observed.__enter__()
        return self

    def _note(self, record: Callable[..., Any], name: str, value: Any, options: Any, batch_size: Any) -> Any:
        logged, before = self._logged, None
        known = logged.context.values.get(name)
        if batch_size is not None and known is not None:
            # Values are added to it in place.
            total = known.total.clone() if isinstance(known.total, Tensor) else known.total
            before = total, known.weight
        entry = record(name, value, options, batch_size)
        if entry is None:
            return None
        parts = self._parts.setdefault(entry, _ValueOfParts())
        parts.weight = logged.batch_size if batch_size is None else batch_size
        if isinstance(batch_size, (int, float)) or parts.given:
            parts.before = parts.before or before or (None, 0)
            parts.given.append((entry.value, parts.weight, logged.batch_size, self._number))
        return entry

    def next_part(self) -> None:
        """Add what the part just computed has logged."""
        for entry, parts in self._parts.items():
            weight, parts.weight = parts.weight, None
            value = entry.step_value()
            if weight is None or value is None or (isinstance(value, Tensor) and value.numel() != 1):
                continue
            if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                value = value.float()
            parts.values.append((value, weight, self._logged.batch_size))
        self._number += 1

    def __exit__(self, *error: Any) -> None:
        self._observed.__exit__(*error)
        if error[0] is not None:
            return
        for entry, parts in self._parts.items():
            if parts.given:
                self._of_whole[entry] = self._sizes_are_of_whole(entry, parts)
            by_samples = bool(parts.given) and self._of_whole[entry][0]
            if by_samples:
                _share(entry, parts)
            if not parts.values:
                continue
            if entry.metric is None and entry.reduce != "mean":
                total = parts.values[0][0]
                for value, _, _ in parts.values[1:]:
                    total = total + value if entry.reduce == "sum" else extreme(total, value, entry.reduce)
                entry.value = _like(total, entry.value)
                continue
            weights = [samples if by_samples else weight for _, weight, samples in parts.values]
            weighted = [value * weight for (value, _, _), weight in zip(parts.values, weights, strict=True)]
            mean = functools.reduce(operator.add, weighted) / sum(weights)
            if entry.metric is not None:
                entry.total = mean
            else:
                entry.value = _like(mean, entry.value)

    def _sizes_are_of_whole(self, entry: LoggedValue, parts: _ValueOfParts) -> tuple[bool, bool]:
        """Return (each size given is that of the whole batch and not of its part, that is certain)."""
        known = self._of_whole.get(entry)
        sizes = [size for _, size, _, _ in parts.given]
        # One on the device was counted, of a part.
        if any(isinstance(size, Tensor) for size in sizes) or len(set(sizes)) > 1 or known == (False, True):
            return False, True
        samples = {part for _, _, part, _ in parts.given}
        if len(samples) > 1:
            return True, True
        # Parts of one size, given one number: if the batch has fewer samples, it is the tokens of a part.
        return known or (set(sizes) != samples and max(sizes) <= parts.samples(), False)


def _share(entry: LoggedValue, parts: _ValueOfParts) -> None:
    """Take the values of this batch again, each with its share of the size of the whole."""
    if entry.metric is not None or entry.reduce != "mean" or entry.total is None:
        return
    last, samples = entry.value, parts.samples()
    entry.total, entry.weight = parts.before or (None, 0)
    for value, size, part, _ in parts.given:
        entry.add(value, size * part / samples)
    entry.value = last


def _like(value: Any, other: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(other, Tensor) and other.is_floating_point():
        return value.to(other.dtype)
    return value


# -- several processes


def _agreement(run: Run) -> Callable[[int, Exception | None], tuple[int, bool]]:
    """Return what tells all hosts how an attempt went: (samples that were too many or ``_NEVER``, kept is useless)."""

    def code(attempted: int, error: Exception | None) -> int:
        if error is None:
            return _NEVER
        return 2 * attempted + (0 if _kept_is_useless(error) else 1)

    def decoded(least: int) -> tuple[int, bool]:
        return (_NEVER, False) if least == _NEVER else (least // 2, least % 2 == 0)

    if not run.runtime.several_processes:
        return lambda attempted, error: decoded(code(attempted, error))

    group = host_group(run)

    def agree(attempted: int, error: Exception | None) -> tuple[int, bool]:
        least = torch.tensor(code(attempted, error))
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        return decoded(int(least))

    return agree


def sync_gradients(run: Run) -> Callable[[], None]:
    """Return a function by which the strategy exchanges the present gradients, as after a backward.

    The wrapped module is called with a function that uses each parameter and adds nothing to its gradient.
    """
    module = run.module

    def touch_used() -> Tensor:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Parameters no part has used stay apart, as DDP(find_unused_parameters=True) expects.
        used = [parameter for parameter in trained if parameter.grad is not None]
        return zero_loss(used or trained)

    return run.runtime.engine.make_exchange(module, run.wrapped, touch_used)


# -- messages


def _kept_is_useless(error: BaseException) -> bool:
    """Return whether what "selective" keeps was changed in place, or is needed by a second backward, which has none."""
    text = str(error)
    return (
        "cached during selective activation checkpoint has been mutated" in text
        or "only allowed to backward once on any region computed under selective activation checkpoint" in text
    )


def _nothing_left(plan: MemoryLimits, attempted: int, error: Exception | None) -> Exception:
    at_once = f"samples at once: {attempted}"
    if error is None:
        return RuntimeError(f"Memory ran out on another process ({at_once}). {plan.advice()}")
    notes = [note for note in getattr(error, "__notes__", ()) if note != MEMORY_NOTE]
    error.__notes__ = notes
    error.add_note(f"Memory ran out ({at_once}). {plan.advice()}")
    return error


def _warn_of_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, torch_private.BatchNorm) and child.training:
            warn_once(
                "micro_batch",
                f"micro_batch: {name} ({type(child).__name__}) takes mean and variance of each micro-batch, not of the "
                "whole batch, so training differs from that of the unsplit batch.",
                fix=f"Use nn.GroupNorm or nn.LayerNorm, or set {name} to eval() when its statistics are to stay.",
                of=module,
            )
            return


def rebatched(loader: DataLoader[T], batch_size: int, *, name: str = "the train dataloader") -> DataLoader[T]:
    """Return a ``DataLoader`` with the same samples in the same order, in batches of ``batch_size``.

    Sampler, collate function and workers are kept. The last batch may have fewer samples, unless the loader drops it.
    ``name`` is for messages.

    Example::

        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> [batch[0].tolist() for batch in rebatched(loader, 3)]
        [[0, 1, 2], [3, 4]]

    """
    check_rebatched(loader, batch_size, name=name)
    batches: Any = loader.batch_sampler
    if batches.batch_size == batch_size:
        return loader
    sampler = BatchSampler(batches.sampler, batch_size, batches.drop_last)
    return with_attributes(loader, batch_size=batch_size, batch_sampler=sampler)


def check_rebatched(loader: Iterable[Any], batch_size: int | str, *, name: str) -> None:
    """Raise if something else than a ``DataLoader`` decides how large its batches are."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader):
        problem = f"is {with_article(type(loader))}, which makes its batches itself. Give a DataLoader, or leave"
    elif type(batches) is not BatchSampler:
        what = "batch_size=None" if batches is None else f"the batch sampler {type(batches).__name__}"
        problem = f"has {what}, which decides what a batch is. Set the size there and leave"
    else:
        return
    raise MisconfigurationException(
        f"Trainer(batch_size={batch_size!r}): {name} {problem} batch_size out; micro_batch alone splits the batches "
        "that come.",
        argument="batch_size",
    )


def prepare_module(run: Run) -> None:
    """Check that micro-batches and recomputing are possible in this run, and recompute with ``memory=``."""
    speed, module = run.arguments.speed, run.module
    asked = {"micro_batch": speed.micro_batch, "memory": speed.memory}
    named = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
    if not named or run.state.fn is not TrainerFn.FITTING:
        return
    if not module.automatic_optimization and enabled(run):
        raise MisconfigurationException(
            f"Trainer({named[0]}): {type(module).__name__} steps its optimizers itself (manual optimization), so a "
            "step cannot be split or begun again from outside.",
            fix=(
                "Split the batch in training_step and call manual_backward for each part, or use automatic "
                "optimization."
            ),
            argument="micro_batch",
        )
    if run.runtime.several_processes and "auto" in asked.values():
        _check_processes(run, named[0])
    if speed.memory in ("selective", "full"):
        run.undo.enter_context(recomputed(module, speed.memory))
    if speed.memory == "offload":
        _offload(run)
    if speed.memory == "auto":
        rank_zero_debug("Trainer(memory='auto'): nothing is computed twice until memory runs out.")
    run.memory_limits = MemoryLimits(run)


def _offload(run: Run) -> None:
    if is_host(run.runtime.device):
        warn_once("memory-offload", "Trainer(memory='offload') changes nothing on the CPU.", fix="Leave it out.")
    else:
        run.undo.enter_context(offloaded(run.module))


def _check_processes(run: Run, asked: str) -> None:
    """Refuse where one process that runs out of memory leaves the others waiting inside a forward."""
    if any(isinstance(child, nn.SyncBatchNorm) for child in run.module.modules()):
        raise MisconfigurationException(
            f"Trainer({asked}) with SyncBatchNorm on {run.runtime.world_size} processes: its forward waits for the "
            "other processes, and one that runs out of memory would never arrive.",
            fix="Give micro_batch a number, or use sync_batchnorm=False.",
            argument="micro_batch",
        )
    run.runtime.engine.require_alone(
        f"Trainer({asked})", "Give micro_batch a number, and memory='selective' or 'full'."
    )


class MemoryLimits:
    """How many samples were found to fit into memory at once, and what is computed twice; it only ever gets smaller."""

    def __init__(self, run: Run) -> None:
        speed = run.arguments.speed
        self._module = run.module
        self._recomputed = run.undo.enter_context(ExitStack())
        self.shrinks = speed.micro_batch == "auto"
        self.recomputes = speed.memory == "auto"
        # None for the whole batch.
        self.samples: int | None = speed.micro_batch if isinstance(speed.micro_batch, int) else None
        self.memory: str | None = None
        self._blocks = 0
        self._shared = speed.shared_fields
        # Of the loaders read last.
        self._fields: tuple[list[Any], Fields | None] | None = None
        # What steps were seen to change of their batch.
        self.batch = SavedBatch()

    def fields_of(self, source: StageData, changed_later: bool) -> Fields | None:
        """Return which fields of the batches run over samples; with ``changed_later`` hooks may change batches."""
        if self._shared is not None:
            return Fields(shared_names=self._shared)
        loaders = source.streams()
        if self._fields is None or list(map(id, self._fields[0])) != list(map(id, loaders)):
            self._fields = loaders, sample_fields(source.loaders[0], changed_later=changed_later)
        return self._fields[1]

    @property
    def may_fail(self) -> bool:
        """Whether a step is tried again when memory runs out."""
        return self.shrinks or self.recomputes

    def make_smaller(self, attempted: int, *, keep_less: bool = False) -> bool:
        """Need less memory than the attempt that failed; return whether there was something left to try.

        Cheapest first: keep fewer activations, but all that is dear to compute; halve the samples (``attempted`` were
        computed at once), which costs nothing as long as they fill the device; compute everything twice.
        ``keep_less``: what is kept was changed in place, or has no second backward, so it cannot be kept.
        """
        if self.recomputes and self.memory is None and repeated_blocks(self._module):
            self._recompute("selective")
        elif self.memory == "selective" and keep_less:
            self._recompute("full")
        elif self.shrinks and attempted > 1:
            self.samples = attempted // 2
        elif self.memory == "selective":
            self._recompute("full")
        else:
            return False
        return True

    def _recompute(self, how: str) -> None:
        self._recomputed.close()
        self._blocks = self._recomputed.enter_context(recomputed(self._module, how))
        self.memory = how

    def describe(self) -> str:
        """Describe in words what is computed now."""
        parts = []
        if self.shrinks and self.samples is not None:
            parts.append(f"{self.samples} samples at once (micro_batch='auto')")
        if self.memory is not None:
            parts.append(f"{self._blocks} blocks compute again in backward, {self.memory!r} (memory='auto')")
        return ", ".join(parts)

    def advice(self) -> str:
        """Return what else would help when nothing is left to try."""
        if self.recomputes and self.memory is None:
            return nothing_repeated(self._module).what
        missing = [name for name, used in (("micro_batch", self.shrinks), ("memory", self.recomputes)) if not used]
        added = f"Add {missing[0]}='auto', or use" if missing else "Use"
        return f"{added} a smaller model, shorter samples, a precision of fewer bytes, or more devices."

    def state_dict(self) -> dict[str, Any]:
        """Return what was found."""
        return {"samples": self.samples, "memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was found; a size given as a number stays."""
        if self.shrinks and state["samples"] is not None:
            self.samples = state["samples"]
        if self.recomputes and state["memory"] is not None and state["memory"] != self.memory:
            self._recompute(state["memory"])
