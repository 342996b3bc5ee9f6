"""A step that may be begun again: what it may change before the optimizer does, kept and put back."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hasten.loops.contents import Contents
from hasten.loops.run import Run
from hasten.memory import may_have_changed
from hasten.meter import Meter, is_metric
from hasten.module import LightningModule

# Of a module's parameters and attributes so much is copied before the first step has shown which of them it changes.
_COPIED_BYTES = 1 << 26


class Seen:
    """What the steps of a run have shown so far of what a step changes beside the weights."""

    def __init__(self) -> None:
        self.batch = Contents()
        self.module = Contents(most_bytes=_COPIED_BYTES)
        # Modules whose attributes the first step left alone; not those of the user's own training_step.
        self.unchanged: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.living: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.is_sure = False


class Moment:
    """The state of a run between two batches, to come back to if memory runs out in the next one.

    Kept on the device, without waiting for it: the batch, random generators, buffers that change, attributes of the
    module, values logged, torchmetrics, and the gradients of the batches accumulated so far.

    Args:
        run: whose state.
        seen: what earlier steps have shown of the batch and the module.

    """

    def __init__(self, run: Run, seen: Seen) -> None:
        self._run = run
        self._seen = seen
        self._roots = [
            (f"{type(run.module).__name__}.{name}" if name else type(run.module).__name__, child)
            for name, child in run.module.named_modules()
            if child not in seen.unchanged
        ]
        self._owners = [child for child in run.module.modules() if child._buffers]
        self._metrics = [child for child in run.module.modules() if is_metric(child)]
        self._buffers: dict[tuple[int, str], tuple[nn.Module, str, Tensor, int, Tensor]] = {}
        self._empty: list[tuple[nn.Module, str]] = []

    def keep(self, batch: Any, *, gradients: bool) -> None:
        """Remember the present state.

        Args:
            batch: the batch of the step.
            gradients: also the gradients, which are those of earlier batches of an accumulation.

        """
        run = self._run
        self._seen.batch.note([("batch", batch)])
        self._seen.module.note(self._roots)
        self._random = _generator_states()
        self._keep_buffers()
        self._meters = {
            meter: {
                "value": meter.value,
                "metric": meter.metric,
                # These are added to in place.
                "total": _copied(meter.total),
                "weight": _copied(meter.weight),
            }
            for meter in self._all_meters()
        }
        self._metric_states = [(metric, _state_of(metric)) for metric in self._metrics]
        self._counts = (run.window_weight, run.skipped_batches)
        self._gradients = (
            [(p, None if p.grad is None else p.grad.clone()) for p in self._parameters()]
            if gradients
            else None
        )

    def restore(self) -> None:
        """Bring back what ``keep`` remembered; as often as needed.

        Raises:
            RuntimeError: a tensor was changed in place of which there is no copy; the message names it.

        """
        run = self._run
        self._seen.batch.restore()
        self._seen.module.restore()
        _set_generators(self._random)
        for owner, name, tensor, version, copy in self._buffers.values():
            if may_have_changed(owner, tensor, version):
                tensor.detach().copy_(copy)
            owner._buffers[name] = tensor
        for owner, name in self._empty:
            owner._buffers[name] = None
        for meter in self._all_meters():
            # One that came up in the attempt alone has gathered nothing.
            for name, value in self._meters.get(meter, _NOTHING).items():
                setattr(meter, name, _copied(value) if name in ("total", "weight") else value)
        for metric, state in self._metric_states:
            for name, value in state.items():
                setattr(metric, name, _copied(value))
        run.window_weight, run.skipped_batches = self._counts
        if self._gradients is None:
            # The attempt's own gradients: the step begins with none.
            for parameter in self._parameters():
                parameter.grad = None
        else:
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient.clone()

    def module_was_changed(self) -> None:
        """Take the module as it is now, after ``restore``: recomputing replaces the forward of its blocks."""
        self._seen.module.note(self._roots)

    def succeeded(self) -> None:
        """See what the step changed of the batch and the module: the next ones keep copies of that alone."""
        seen = self._seen
        seen.batch.learn()
        living = seen.module.learn()
        if seen.is_sure:
            return
        seen.living.update(self._roots[index][1] for index in living)
        if seen.module.is_sure:
            seen.is_sure = True
            quiet = [
                child
                for _, child in self._roots
                if child not in seen.living and not isinstance(child, LightningModule)
            ]
            seen.unchanged.update(quiet)
            self._roots = [(name, child) for name, child in self._roots if child not in seen.unchanged]

    def _keep_buffers(self) -> None:
        # A copy stays good as long as nobody writes to its buffer: large ones that never change are copied once.
        kept, self._buffers, self._empty = self._buffers, {}, []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                if tensor is None:
                    self._empty.append((owner, name))
                    continue
                key = (id(owner), name)
                before = kept.get(key)
                if before is None or before[2] is not tensor or may_have_changed(owner, tensor, before[3]):
                    before = (owner, name, tensor, tensor._version, tensor.detach().clone())
                self._buffers[key] = before

    def _all_meters(self) -> Iterator[Meter]:
        yield from self._run.meters._stage("train")

    def _parameters(self) -> Iterator[Any]:
        for optimizer in self._run.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        if not self._run.optimizers:
            yield from self._run.module.parameters()


_NOTHING = {"value": None, "total": None, "weight": 0, "metric": None}


def _state_of(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: _copied(getattr(metric, name)) for name in names}


def _generator_states() -> dict[str, Any]:
    """Return the states of all random generators as they come: packed for a checkpoint they take four times as long."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    # The tensors in a list are never written to, but the list grows.
    return list(value) if isinstance(value, list) else value
