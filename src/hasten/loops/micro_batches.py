"""Forward and backward of a batch in parts of fewer samples, and again with fewer still where memory runs out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten._lib.out_of_memory import free_cached_memory, is_out_of_memory
from hasten._lib.rank_zero import rank_zero_info, warn_once
from hasten._lib.split import Fields, join, measure, split
from hasten.hooks import overrides
from hasten.logged_value import LoggedValue, extreme
from hasten.logged_values import LoggedValues
from hasten.loops.retry import Moment, Seen
from hasten.loops.run import Run
from hasten.loops.split_sizes import Fit
from hasten.loops.step_errors import MEMORY_NOTE
from hasten.loops.together import host_group, touch
from hasten.module.datamodule import DataHooks

# As in loops/fit.py: (batch, batch_idx, opens, closes, divisor, keep_outputs) -> outputs
ForwardBackward = Callable[..., Any]

_NEVER = 2**62


def asked(run: Run) -> bool:
    """Return whether a step computes its batch in parts, or may have to."""
    speed = run.arguments.speed
    return speed.micro_batch is not None or speed.memory == "auto"


def computes_alone(run: Run) -> bool:
    """Return whether a process computes without the others, and meets them after backward.

    One that runs out of memory inside a forward or backward would leave them waiting there.
    """
    return asked(run) and _fit(run).may_fail and run.runtime.syncs_gradients


def in_parts(run: Run, once: ForwardBackward) -> ForwardBackward:
    """Return forward and backward of a batch in parts; gradients, outputs and values are those of the whole.

    Args:
        run: the run.
        once: computes one part; it neither exchanges gradients nor calls ``on_after_backward``.

    """
    fit, hooks, parts = _fit(run), run.hooks, _Parts(run, once)
    syncs = run.runtime.syncs_gradients

    def forward_backward(
        batch: Any, batch_idx: int, opens: bool, closes: bool, divisor: int, keep_outputs: bool = False
    ) -> Any:
        outputs = parts.compute(batch, batch_idx, opens, closes, divisor, keep_outputs, fit.samples)
        if parts.any_loss:
            hooks.on_after_backward()
        return outputs

    if not fit.may_fail:
        return forward_backward

    moment, agree = Moment(run, _seen(fit)), _agreement(run)
    sync = sync_gradients(run) if syncs else None

    def forward_backward_again(
        batch: Any, batch_idx: int, opens: bool, closes: bool, divisor: int, keep_outputs: bool = False
    ) -> Any:
        # Asked of the first batch, too, which may fit as a whole: whether it can be split is known before long.
        samples = measure(batch, parts.fields)[0] if fit.shrinks else 1
        moment.keep(batch, gradients=not opens)
        failed = False
        while True:
            attempted = samples if fit.samples is None else min(fit.samples, samples)
            outputs, error = parts.attempt(
                batch, batch_idx, opens, closes, divisor, keep_outputs, fit.samples
            )
            most, kept_is_changed = agree(attempted, error)
            if most == _NEVER:
                break
            failed = True
            moment.restore()
            if not fit.make_smaller(most, keep_less=kept_is_changed):
                raise _nothing_left(fit, most, error)
            moment.module_was_changed()
            # After its tensors were let go of: what the attempt had taken would lie in pieces.
            del error
            free_cached_memory()
        moment.succeeded()
        if failed:
            rank_zero_info(f"Memory ran out, and the step was begun again. From here on: {fit.describe()}.")
        if sync is not None and closes:
            sync()
        if parts.any_loss:
            hooks.on_after_backward()
        return outputs

    return forward_backward_again


def _fit(run: Run) -> Fit:
    if run.fits is None:
        run.fits = Fit(run)
    return run.fits


def _seen(fit: Fit) -> Seen:
    if fit.seen is None:
        fit.seen = Seen()
    return fit.seen


def _hooks_change_batches(run: Run) -> bool:
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    owners = [owner for owner in (run.train.datamodule, run.module) if owner is not None]
    return any(overrides(owner, DataHooks, name) for owner in owners for name in names)


class _Parts:
    """Computes the parts of a batch, one after the other.

    Args:
        run: the run.
        once: computes one part.

    """

    def __init__(self, run: Run, once: ForwardBackward) -> None:
        self._run = run
        self._once = once
        self._alone = computes_alone(run)
        self._holds_back = run.runtime.syncs_gradients and not self._alone
        self._weighs = run.accumulate_grad_batches > 1 or run.runtime.world_size > 1
        self._of_whole: dict[LoggedValue, tuple[bool, bool]] = {}
        self.any_loss = False

    @functools.cached_property
    def fields(self) -> Fields | None:
        """Which elements of a batch run over samples; None where nothing tells."""
        return _fit(self._run).fields_of(self._run.train, _hooks_change_batches(self._run))

    def attempt(self, *step: Any) -> tuple[Any, Exception | None]:
        """Compute the parts; return (outputs, None), or (None, error) where memory ran out."""
        try:
            return self.compute(*step), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and not _kept_is_changed(error):
                raise
            # The frames of the error, and of what it came from, hold the tensors that took the memory.
            error.__context__ = error.__cause__ = None
            return None, error.with_traceback(None)

    def compute(
        self,
        batch: Any,
        batch_idx: int,
        opens: bool,
        closes: bool,
        divisor: int,
        keep_outputs: bool,
        size: int | None,
    ) -> Any:
        """Compute the parts and return their outputs as those of the whole batch."""
        run, once, logged = self._run, self._once, self._run.logged
        # An attempt that failed was in the middle of its parts.
        logged.batch, logged.batch_size = batch, 0
        parts = [(batch, 1)] if size is None else split(batch, size, self.fields)
        skipped = run.skipped_batches
        if len(parts) == 1:
            with self._exchange(closes):
                outputs = once(batch, batch_idx, opens, closes, divisor, keep_outputs)
            self.any_loss = run.skipped_batches == skipped
            return self._joined([outputs], [1])
        _warn_of_batch_norm(run.module)
        samples = sum(count for _, count in parts)
        found = []
        with StepValues(logged, self._of_whole) as values:
            for index, (part, count) in enumerate(parts):
                logged.batch, logged.batch_size = part, count
                with self._exchange(closes and index == len(parts) - 1):
                    # A part counts as much as it has samples of the batch.
                    found.append(
                        once(
                            part,
                            batch_idx,
                            opens and index == 0,
                            closes,
                            divisor * samples / count,
                            keep_outputs,
                        )
                    )
                values.next_part()
        logged.batch, logged.batch_size = batch, 0
        self.any_loss = run.skipped_batches - skipped < len(parts)
        # For the books a batch is skipped as a whole or not at all.
        run.skipped_batches = skipped if self.any_loss else skipped + 1
        return self._joined(found, [count for _, count in parts])

    def _exchange(self, now: bool) -> Any:
        return nullcontext() if now or not self._holds_back else self._run.runtime.no_sync(self._run.wrapped)

    def _joined(self, found: list[Any], sizes: list[int]) -> Any:
        kept = [(outputs, size) for outputs, size in zip(found, sizes, strict=True) if outputs is not None]
        if not kept:
            return None
        # Each is the share of the whole already.
        loss = functools.reduce(torch.add, [outputs["loss"] for outputs, _ in kept])
        rest = [{k: v for k, v in outputs.items() if k not in ("loss", "loss_weight")} for outputs, _ in kept]
        joined = rest[0] if len(rest) == 1 else join(rest, [size for _, size in kept])
        if all(outputs.get("loss_weight") is not None for outputs, _ in kept):
            weight = sum(outputs["loss_weight"] for outputs, _ in kept)
            joined = {"loss_weight": weight, **joined}
            if not self._weighs:
                loss = loss / weight
        return {**joined, "loss": loss}


class StepValues:
    """The values logged in the parts of a batch, put together to those of the whole.

    A ``batch_size`` given to ``self.log`` counts what the part has, its samples or tokens, or is one number for the
    whole batch, such as a hyper-parameter. Of the latter each part counts its share.

    Args:
        logged: who takes the values; inside the context each is noted here as well.
        of_whole: of each meter, (it is given the size of the whole batch, that is certain), as far as batches have
            shown it.

    """

    def __init__(self, logged: LoggedValues, of_whole: dict[LoggedValue, tuple[bool, bool]]) -> None:
        self._logged = logged
        self._of_whole = of_whole
        # Of the part in hand: the value given last and its weight.
        self._part: dict[LoggedValue, Any] = {}
        # (value, weight, samples) of each part.
        self._values: dict[LoggedValue, list[tuple[Any, Any, int]]] = {}
        # Of the epoch before this batch: (total, weight).
        self._before: dict[LoggedValue, tuple[Any, Any]] = {}
        # (value, size given, samples of the part, number of the part) of each call.
        self._given: dict[LoggedValue, list[tuple[Any, Any, int, int]]] = {}
        self._number = 0

    def __enter__(self) -> StepValues:
        self._observed = self._logged.observed(self._note)
        self._observed.__enter__()
        return self

    def _note(self, record: Callable[..., Any], name: str, value: Any, options: Any, batch_size: Any) -> None:
        logged = self._logged
        known, total, weight = logged.context.values.get(name), None, 0
        if batch_size is not None and known is not None and known not in self._given:
            total, weight = known.total, known.weight
            # Values are added to it in place.
            total = total.clone() if isinstance(total, Tensor) else total
        meter = record(name, value, options, batch_size)
        self._part[meter] = size = logged.batch_size if batch_size is None else batch_size
        if isinstance(batch_size, (int, float)) or meter in self._given:
            self._before.setdefault(meter, (total, weight))
            self._given.setdefault(meter, []).append((meter.value, size, logged.batch_size, self._number))

    def next_part(self) -> None:
        """Add what the part just computed has logged."""
        for meter, weight in self._part.items():
            value = meter.step_value()
            if value is None or (isinstance(value, Tensor) and value.numel() != 1):
                continue
            if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                value = value.float()
            self._values.setdefault(meter, []).append((value, weight, self._logged.batch_size))
        self._part.clear()
        self._number += 1

    def __exit__(self, *error: Any) -> None:
        self._observed.__exit__(*error)
        if error[0] is not None:
            return
        for meter, given in self._given.items():
            self._look(meter, given)
            if self._of_whole[meter][0]:
                self._share(meter, given)
        for meter, values in self._values.items():
            if meter.metric is None and meter.reduce != "mean":
                total = values[0][0]
                for value, _, _ in values[1:]:
                    total = total + value if meter.reduce == "sum" else extreme(total, value, meter.reduce)
                meter.value = _like(total, meter.value)
                continue
            by_samples = meter in self._given and self._of_whole[meter][0]
            weights = [samples if by_samples else weight for _, weight, samples in values]
            weighted = [value * weight for (value, _, _), weight in zip(values, weights, strict=True)]
            mean = functools.reduce(operator.add, weighted) / sum(weights)
            if meter.metric is not None:
                meter.metric._forward_cache = mean
            else:
                meter.value = _like(mean, meter.value)

    def _look(self, meter: LoggedValue, given: list[tuple[Any, Any, int, int]]) -> None:
        """Find whether the sizes given are that of the whole batch each, and not of its parts."""
        if any(isinstance(size, Tensor) for _, size, _, _ in given):
            # Counted on the device, of a part.
            self._of_whole[meter] = False, True
            return
        sizes, samples = {size for _, size, _, _ in given}, {part for _, _, part, _ in given}
        if len(sizes) > 1:
            self._of_whole[meter] = False, True
        elif len(samples) > 1 and self._of_whole.get(meter) != (False, True):
            self._of_whole[meter] = True, True
        elif meter not in self._of_whole:
            # Parts of one size, given one number: if the batch has fewer samples, it is the tokens of a part.
            self._of_whole[meter] = sizes != samples and max(sizes) <= _samples(given), False

    def _share(self, meter: LoggedValue, given: list[tuple[Any, Any, int, int]]) -> None:
        """Take the values of this batch again, each with its share of the size of the whole."""
        if meter.metric is not None or meter.reduce != "mean" or meter.total is None:
            return
        last, samples = meter.value, _samples(given)
        meter.total, meter.weight = self._before.get(meter, (None, 0))
        for value, size, part, _ in given:
            meter.add(value, size * part / samples)
        meter.value = last


def _samples(given: list[tuple[Any, Any, int, int]]) -> int:
    return sum({number: part for _, _, part, number in given}.values())


def _like(value: Any, other: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(other, Tensor) and other.is_floating_point():
        return value.to(other.dtype)
    return value


# -- several processes


def _agreement(run: Run) -> Callable[[int, Exception | None], tuple[int, bool]]:
    """Return what tells all processes how the attempt went: (samples that were too many, what was kept is changed).

    The samples are ``_NEVER`` where memory ran out on none. Said between the hosts: no device is waited for.
    """

    def code(attempted: int, error: Exception | None) -> int:
        if error is None:
            return _NEVER
        return 2 * attempted + (0 if _kept_is_changed(error) else 1)

    def decoded(least: int) -> tuple[int, bool]:
        return (_NEVER, False) if least == _NEVER else (least // 2, least % 2 == 0)

    if run.runtime.world_size == 1:
        return lambda attempted, error: decoded(code(attempted, error))

    group = host_group(run)

    def agree(attempted: int, error: Exception | None) -> tuple[int, bool]:
        least = torch.tensor(code(attempted, error))
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        return decoded(int(least))

    return agree


def sync_gradients(run: Run) -> Callable[[], None]:
    """Return what has the strategy exchange the gradients that are there, as after a backward of its own.

    The wrapped module is called with a function that uses each parameter and adds nothing to its gradient: buckets,
    communication hooks and the exchange of buffers are those of DDP.
    """
    module = run.module

    def touch_used() -> Tensor:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Parameters no part has used stay apart, as DDP(find_unused_parameters=True) wants it.
        used = [parameter for parameter in trained if parameter.grad is not None]
        return touch(used or trained)

    routed = run.runtime.strategy.route(touch_used, run.wrapped)

    def sync() -> None:
        routed().backward()

    return sync


# -- what is said


def _kept_is_changed(error: BaseException) -> bool:
    return "cached during selective activation checkpoint has been mutated" in str(error)


def _nothing_left(fit: Fit, attempted: int, error: Exception | None) -> Exception:
    at_once = f"{attempted} sample{'s' if attempted > 1 else ''} at once"
    if error is None:
        return RuntimeError(f"Memory ran out on another process with {at_once}. {fit.advice()}")
    notes = [note for note in getattr(error, "__notes__", ()) if note != MEMORY_NOTE]
    error.__notes__ = notes
    error.add_note(f"Memory ran out{f' with {at_once}' if fit.shrinks else ''}. {fit.advice()}")
    return error


def _warn_of_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
            warn_once(
                f"micro_batch {id(module)}",
                f"micro_batch: {name} ({type(child).__name__}) takes mean and variance of each micro-batch, not of the "
                "whole batch, so training differs from that of the unsplit batch. Use nn.GroupNorm or nn.LayerNorm, "
                f"or set {name} to eval() when its statistics are to stay.",
            )
            return
