"""Losses that are not finite: reported once values are on the host anyway; on request the step is skipped.

With ``on_bad_loss="warn"``, the default, a step costs nothing more: the latest loss is copied together with the values
for the loggers. Otherwise a ``Guard`` reads, before each optimizer step, whether loss and gradients are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import torch_private
from hasten._lib.errors import BadLossError, make_error
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten._lib.tree import by_kind, is_absent, parameters_of
from hasten.checkpoint.snapshots import SavedBuffers
from hasten.loops.saved_state import StepState
from hasten.loops.user_code import with_batch_idx_if_taken
from hasten.seed import isolate_rng

if TYPE_CHECKING:
    from hasten.loops.run import Run

# Steps skipped in a row, and returns to the same state, after which the run ends.
MOST_IN_A_ROW = 10
MOST_RETURNS = 5
# Optimizer steps between two states saved for "rewind", where no logging interval is set.
SAVE_EVERY = 50

# How bad a step is: everything is finite, a gradient is not finite, or the loss is not finite. The worst of all
# processes counts.
_FINE, _BAD_GRADIENT, _BAD_LOSS = range(3)


class StepSkipped(BaseException):
    """Leaves the closure and the step of a bad loss; a user's ``except Exception`` does not catch it."""


class LossReport:
    """Warns once of a loss that is not finite, and once of each stage's logged losses; of training's unless guarded."""

    def __init__(self, *, guarded: bool) -> None:
        self._reported: set[str] = {"train", "loss"} if guarded else set()
        self._finite_at: int | None = None

    def loss(self, value: float, step: int, epoch: int | None) -> None:
        """Check the loss of a step, as ``training_step`` returned it."""
        if math.isfinite(value):
            self._finite_at = step
        elif "loss" not in self._reported:
            self._reported |= {"loss", "train"}
            where = "" if epoch is None else f" (epoch {epoch + 1})"
            before = "" if self._finite_at is None else f"; at step {self._finite_at} it was finite"
            rank_zero_warn(
                f"The loss of training_step is {value} at step {step}{where}{before}. One such step can make all "
                "weights nan.",
                fix=(
                    "Trainer(on_bad_loss='stop') ends the run before it and names the layer, on_bad_loss='skip' leaves "
                    "it out."
                ),
            )

    def logged(self, hook: str, stage: str, name: str, value: float) -> None:
        """Receive a logged value that is called a loss and is not finite."""
        if stage not in self._reported:
            self._reported.add(stage)
            rank_zero_warn(
                f"{name!r}, logged in {hook}, is {value}. The usual causes are a mean over nothing, a division by 0 "
                "and the logarithm of 0; or the weights are nan, as all outputs are then."
            )


class Guard:
    """Lets an optimizer step only if loss and gradients are finite.

    Before each step one number is read from the device, and with several processes one is exchanged, so that all skip
    the same steps. A skipped step counts as a step: schedules, limits and loggers continue.
    """

    def __init__(self, run: Run, mode: str, state: dict[str, Any] | None) -> None:
        self._run, self._mode = run, mode
        self._every = run.arguments.log_every_n_steps or SAVE_EVERY
        self._before = StepState(run)
        self._is_saved = False
        self._batch: tuple[Any, int] = None, 0
        # (batch_idx, loss) of the accumulation.
        self._losses: list[tuple[int, Tensor]] = []
        self._passes = self._judged = True
        self._end: BadLossError | None = None
        self._last = ""
        self._windows = self._skipped = self._in_a_row = self._returns = self._reported = 0
        self._saved: _SavedTraining | None = None
        # What returns too, such as averages of the weights: functions that give the tensors.
        self._followers: list[Callable[[], list[Tensor]]] = []
        # Buffers at the start of a resumed accumulation, whose first batches may be bad.
        self._buffers_before: dict[str, Tensor] = {}
        if state is not None:
            self._windows, self._skipped = state["windows"], state["left_out"]
            self._in_a_row, self._reported = state["in_a_row"], state["left_out"]
            self._losses = [(index, torch.tensor(value)) for index, value in state["losses"]]
            self._buffers_before = state["buffers"]
        self.keep_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the losses of the accumulation that is open."""
        is_open = self._run.progress.accumulation_index > 0
        return {
            "windows": self._windows,
            "left_out": self._skipped,
            "in_a_row": self._in_a_row,
            "losses": [(index, float(loss)) for index, loss in self._losses] if is_open else [],
            "buffers": self._before.buffers.changed() if is_open else {},
        }

    def keep_state(self) -> None:
        """Save the present state to return to, with "rewind"; a run resumed from here does the same."""
        if self._mode == "rewind":
            self._saved = None  # Free the memory of the old copy first.
            self._saved, self._returns = _SavedTraining(self._run, self._followers), 0
            if self._run.progress.accumulation_index:
                self._saved.buffers.use(self._buffers_before or self._before.buffers.changed())

    def add(self, tensors: Callable[[], list[Tensor]]) -> None:
        """Have more tensors return with the weights, with "rewind"."""
        self._followers.append(tensors)
        self.keep_state()

    # -- around a step

    def watching(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward_backward`` that first saves what it changes besides gradients."""
        window = self._run.window

        def watched(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
            if window.is_start:
                self._losses.clear()
            if window.is_start or not self._is_saved:
                self._before.save()
                if not window.is_start:
                    self._before.buffers.use(self._buffers_before)
                self._is_saved, self._buffers_before = True, {}
            self._batch = batch, batch_idx
            return forward_backward(batch, batch_idx, keep_outputs)

        return watched

    def take(self, loss: Tensor) -> None:
        """Receive a loss that is part of the next step."""
        # A copy: a recorded graph writes the next loss to the same memory.
        self._losses.append((self._batch[1], loss.detach().clone()))

    def around(
        self, optimizer: Optimizer, finish: Callable[[], None], step: Callable[..., Any]
    ) -> tuple[Callable[[], None], Callable[..., Any]]:
        """Return versions of ``finish`` and ``step`` that do nothing if the step is to be skipped."""

        def guarded_finish() -> None:
            self._passes = self._judge(optimizer)
            if self._passes:
                finish()
            else:
                self._rewind()

        return guarded_finish, lambda closure=None: step(closure) if self._passes else None

    def in_closure(self, optimizer: Optimizer, finish: Callable[[], None]) -> Callable[[], None]:
        """Return a ``finish`` that may leave the closure by ``StepSkipped``, the first time that a step calls it."""

        def guarded_finish() -> None:
            judged, self._judged = self._judged, True
            if not judged and not self._judge(optimizer):
                raise StepSkipped
            finish()

        return guarded_finish

    def one_step(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        """Call ``step``, whose closure may leave it by ``StepSkipped``; raise if the weights were changed by then."""
        # Weights of 16 bits are written back in between by the code that keeps their small updates.
        wide = [p for p in parameters_of(optimizer) if p.dtype in (torch.float32, torch.float64)]
        versions = [p._version for p in wide]
        self._judged = False
        try:
            step()
        except StepSkipped:
            if versions != [p._version for p in wide]:
                what = (
                    f"Trainer(on_bad_loss={self._mode!r}): the weights were changed before the closure of "
                    f"{type(optimizer).__name__} was called, so the step cannot be left out. {self._last}"
                )
                raise make_error(RuntimeError, what, fix="Use on_bad_loss='warn'.", argument="on_bad_loss") from None
            # Rewind now and not within the closure, where the optimizer was in the middle of its step.
            self._rewind()

    def judge_losses(self) -> None:
        """End the run if a loss was not finite, where no optimizer steps."""
        self._judge(None)

    def check_manual(self, loss: Tensor) -> None:
        """Raise before the backward of a loss that is not finite on any process, where the user's own code steps."""
        run = self._run
        bad = torch.isfinite(loss.detach()).logical_not().any()
        if run.runtime.several_processes:
            bad = run.runtime.all_reduce(bad.float(), op="max")
        if bad:
            progress = run.progress
            value = loss.detach().sum().item()
            what = f"is {value}" if not math.isfinite(value) else "is not finite on another process"
            # In the middle of a batch: not an error after which the run could be saved and resumed.
            raise FloatingPointError(
                f"The loss given to manual_backward {what}, at step {progress.logged_step} "
                f"(epoch {progress.epoch + 1}, batch {progress.batch}). The run ends here (on_bad_loss='stop')."
            )

    def after_batch(self) -> None:
        """Do what is due between two batches, or raise the error that must end the run."""
        if self._end is not None:
            raise self._end
        progress, saved = self._run.progress, self._saved
        if progress.accumulation_index:
            return
        if progress.logged_step % self._every == 0:
            self._report()
        if saved is not None and self._in_a_row == 0:
            is_old = progress.logged_step - saved.logged_step >= self._every
            if is_old or saved.is_of_other_groups():
                self.keep_state()

    def end_epoch(self) -> None:
        """Report the skipped steps; raise if every step of the run so far was skipped."""
        self._report()
        if self._skipped and self._skipped >= self._windows:
            raise self._error(f"each of the {self._windows} steps so far was left out, so nothing was trained.")

    def _report(self) -> None:
        """Report the steps skipped since the last report."""
        new = self._skipped - self._reported
        if not new:
            return
        say = rank_zero_info if self._reported else rank_zero_warn
        self._reported = self._skipped
        went_back = " and went back to the state kept before" if self._mode == "rewind" else ""
        say(
            f"Trainer(on_bad_loss={self._mode!r}) left out {new} step{'s' if new > 1 else ''}{went_back} "
            f"({self._skipped} of {self._windows} in this run). The last: {self._last}"
        )

    # -- one decision

    def _judge(self, optimizer: Any) -> bool:
        """Return whether the step may be taken; if not, do what ``on_bad_loss`` says, except to rewind."""
        run = self._run
        self._windows += 1
        # A scaler skips the step by itself where a scaled gradient overflows.
        gradients = [] if optimizer is None or run.runtime.scaler is not None else _gradients(optimizer)
        finite = _are_finite([loss for _, loss in self._losses], gradients)
        bad = [entry for entry, is_finite in zip(self._losses, finite, strict=False) if not is_finite]
        here = worst = _BAD_LOSS if bad else _FINE if all(finite) else _BAD_GRADIENT
        if run.runtime.several_processes:
            worst = int(run.runtime.all_reduce(torch.tensor(here, device=run.runtime.device), op="max"))
        if worst == _FINE:
            self._in_a_row = 0
            return True
        self._skipped += 1
        self._in_a_row += 1
        run.window.weight = None
        if optimizer is not None:
            # Schedulers continue, and torch would warn that their optimizer never steps.
            torch_private.note_step(optimizer)
        self._last = self._describe(here, bad)
        place = ""
        if self._mode == "stop":
            is_of_this_batch = bool(bad) and bad[-1][0] == self._batch[1]
            if worst == _BAD_GRADIENT or run.progress.accumulation_index == 0 or is_of_this_batch:
                place = first_bad(run, self._before, *self._batch, backward=worst == _BAD_GRADIENT)
        self._before.undo_statistics()
        if self._mode == "stop":
            self._end = BadLossError(
                f"{self._last} {place}The step was not taken, and the run ends here (on_bad_loss='stop').",
                fix="To continue without that data, resume the run, or use on_bad_loss='skip'.",
            )
        elif self._in_a_row >= MOST_IN_A_ROW:
            self._end = self._too_often(f"{self._in_a_row} steps in a row were left out")
        return False

    def _rewind(self) -> None:
        if self._saved is None or self._end is not None:
            return
        self._returns += 1
        if self._returns > MOST_RETURNS:
            self._end = self._too_often(f"the run went back {MOST_RETURNS} times to the same state")
        else:
            self._saved.restore()

    def _too_often(self, what: str) -> BadLossError:
        return self._error(
            f"{what}, so the run ends here.",
            "on_bad_loss='stop' says whether the data or a layer is the cause; often a smaller learning rate helps.",
        )

    def _error(self, what: str, fix: str = "") -> BadLossError:
        text = f"Trainer(on_bad_loss={self._mode!r}): {what} {self._last}"
        return BadLossError(text, fix=fix, argument="on_bad_loss")

    def _describe(self, here: int, bad: list[tuple[int, Tensor]]) -> str:
        progress = self._run.progress
        batch_idx = bad[0][0] if bad else self._batch[1]
        where = f"at step {progress.logged_step} (epoch {progress.epoch + 1}, batch {batch_idx})"
        if here == _BAD_LOSS:
            return f"The loss of training_step is {float(bad[0][1])} {where}."
        if here == _FINE:
            return f"On another process the loss of training_step or its gradient is not finite {where}."
        gradients = ((name, p.grad) for name, p in self._run.module.named_parameters() if p.grad is not None)
        names = [name for name, gradient in gradients if not all(_are_finite([], [_values(gradient)]))]
        listed = f": {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
        return f"The loss of training_step is finite but its gradient is not, {where}{listed}."


class _SavedTraining:
    """Weights and what follows them, buffers, optimizer states and the scaler's, to return to. Schedules continue."""

    def __init__(self, run: Run, followers: Iterable[Callable[[], list[Tensor]]]) -> None:
        self._run = run
        self.logged_step = run.progress.logged_step
        following = [tensor for follower in followers for tensor in follower()]
        tensors = {id(p): p for p in [*run.module.parameters(), *parameters_of(*run.optimizers), *following]}
        self._weights = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self.buffers = SavedBuffers(run.module)
        self.buffers.save()
        self._of, self._groups = list(run.optimizers), _group_sizes(run.optimizers)
        self._optimizers = [run.runtime.strategy.state.snapshot_optimizer(optimizer) for optimizer in run.optimizers]
        scaler = run.runtime.scaler
        self._scaler = None if scaler is None else scaler.state_dict()

    def is_of_other_groups(self) -> bool:
        """Return whether the run has other optimizers by now, or parameters were added to them."""
        present = self._run.optimizers
        same = list(map(id, present)) == list(map(id, self._of))
        return not same or self._groups != _group_sizes(present)

    @torch.no_grad()
    def restore(self) -> None:
        """Return to the saved state; learning rates and other options of the groups stay."""
        run = self._run
        for tensor, saved in self._weights:
            tensor.copy_(saved)
        self.buffers.restore(all_values=True)
        for optimizer, restore in zip(run.optimizers, self._optimizers, strict=True):
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            restore()
            for group, present_options in zip(optimizer.param_groups, options, strict=True):
                group.update(present_options)
        if run.runtime.scaler is not None and self._scaler is not None:
            run.runtime.scaler.load_state_dict(self._scaler)


def _group_sizes(optimizers: Iterable[Any]) -> list[list[int]]:
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]


def _gradients(optimizer: Any) -> list[Tensor]:
    values = [_values(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    return [value for value in values if value.numel()]


def _values(gradient: Tensor) -> Tensor:
    gradient = torch_private.local_part(gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _are_finite(losses: list[Tensor], gradients: list[Tensor]) -> list[bool]:
    """Return for each loss, and then for all gradients together, whether they are finite: one read from the device."""
    flags: list[Tensor] = []
    if losses:
        device = losses[-1].device
        flags.append(torch.isfinite(torch.stack([loss.reshape(()).to(device) for loss in losses])))
    for alike in by_kind(gradients):
        # The largest element: a sum of squares may overflow where no element is near to it.
        largest = torch._foreach_norm(alike, math.inf)
        flags.append(torch.isfinite(torch.stack(largest)).all().reshape(1))
    if len(flags) > 1:
        flags = [flag.to(flags[0].device) for flag in flags]
        found: list[bool] = torch.cat(flags).tolist()
    else:
        found = flags[0].tolist() if flags else []
    return [*found[: len(losses)], all(found[len(losses) :])]


def guard(run: Run) -> Guard | None:
    """Return the guard of a run's steps; None with ``on_bad_loss="warn"``."""
    mode = run.arguments.on_bad_loss
    return None if mode == "warn" else Guard(run, mode, run.resume.guard)


# -- which layer it was


def name_layer(error: BaseException, run: Run, batch: object, batch_idx: int) -> None:
    """Add to an error of ``detect_anomaly=True`` which layer it was."""
    # With several processes the others do not compute this step again, which may wait for them.
    if "returned nan values" in str(error) and not run.runtime.several_processes:
        note = first_bad(run, None, batch, batch_idx, backward=False)
        if note:
            error.add_note(note.strip())


def first_bad(run: Run, before: StepState | None, batch: Any, batch_idx: int, *, backward: bool) -> str:
    """Compute the batch again, and return a sentence that names the first output that is not finite; or ""."""
    found: list[str] = []
    if (path := _bad_in(batch, "batch")) is not None:
        found.append(f"{path} itself is not finite. ")
    found += [
        f"The parameter {name} was not finite before. "
        for name, parameter in run.module.named_parameters()
        if not is_absent(parameter)
        and not all(_are_finite([], [part] if (part := torch_private.local_part(parameter.detach())).numel() else []))
    ]
    # Of a divided module no process computes a batch alone.
    if not found and run.runtime.engine.computes_alone:
        found = _bad_in_layers(run, before, batch, batch_idx, backward=backward)
    return found[0] if found else ""


def _bad_in_layers(run: Run, before: StepState | None, batch: Any, batch_idx: int, *, backward: bool) -> list[str]:
    """Return what is not finite when the batch is computed again, the first one first."""
    found: list[str] = []

    def check(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if found or _bad_in(output, "") is None:
            return
        side = "output" if _bad_in(inputs, "") is None else "input"
        found.append(f"First not finite: the {side} of {name} ({type(layer).__name__}). ")

    # Hooks run when a call ends: the parts of a module are checked before the module itself.
    handles = [
        layer.register_forward_hook(lambda layer, inputs, output, name=name: check(name, layer, inputs, output))
        for name, layer in run.module.named_modules()
        if name
    ]
    step = with_batch_idx_if_taken(run.module.training_step)
    step = run.runtime.bind(step, module=run.module, wrapped=run.module, training=True)
    # Compiled layers run uncompiled, so that their hooks are called.
    as_written = torch.compiler.set_stance("force_eager")
    try:
        # Anomaly mode is on during forward too, so that it can show the line of the function.
        with isolate_rng(), as_written, torch.enable_grad(), torch.autograd.set_detect_anomaly(backward):
            if before is not None:
                before.restore_random()
            output = step(batch, batch_idx)
            if backward and not found:
                loss = output if isinstance(output, Tensor) else output["loss"]
                trained = [p for p in run.module.parameters() if p.requires_grad]
                torch.autograd.grad(loss, trained, allow_unused=True)
            if not backward and not found:
                found.append("The output of every layer is finite: the loss itself is computed so. ")
    except Exception as error:
        # Anomaly mode ends with the name of the function; other errors say nothing about the loss.
        if "returned nan values" in str(error):
            found.append(f"{str(error).rstrip('.')}. ")
    finally:
        for handle in handles:
            handle.remove()
    return found


def _bad_in(thing: Any, path: str) -> str | None:
    """Return where a structure has a number that is not finite, written as Python would reach it."""
    if isinstance(thing, Tensor):
        floats = thing.is_floating_point() or thing.is_complex()
        return path if floats and thing.numel() and not bool(torch.isfinite(thing).all()) else None
    if isinstance(thing, dict):
        inside: Iterable[tuple[Any, Any]] = thing.items()
    elif isinstance(thing, (list, tuple)):
        inside = enumerate(thing)
    else:
        return None
    return next((found for key, value in inside if (found := _bad_in(value, f"{path}[{key!r}]")) is not None), None)
