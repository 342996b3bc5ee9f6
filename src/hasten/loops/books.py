"""What a step changes beside weights and gradients, kept to be put back: random numbers, buffers, values logged."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten.logged_value import LoggedValue, is_metric
from hasten.loops.run import Run
from hasten.memory import may_have_changed


class Books:
    """Random generators, buffers that change, values logged and torchmetrics of a run, between two batches.

    Kept on the device, without waiting for it.

    Args:
        run: whose.

    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._owners = [child for child in run.module.modules() if child._buffers]
        self._metrics = [child for child in run.module.modules() if is_metric(child)]
        self._buffers: dict[tuple[int, str], tuple[nn.Module, str, Tensor, int, Tensor]] = {}
        self._empty: list[tuple[nn.Module, str]] = []

    def keep(self) -> None:
        """Remember the present state."""
        self._random = generator_states()
        self._keep_buffers()
        self._logged = {
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

    def restore(self) -> None:
        """Bring back what ``keep`` remembered; as often as needed."""
        self.draw_again()
        self._restore_buffers()
        for meter in self._all_meters():
            # One that came up since then has gathered nothing.
            for name, value in self._logged.get(meter, _NOTHING).items():
                setattr(meter, name, _copied(value) if name in ("total", "weight") else value)
        self._restore_metrics()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the run look as ``keep`` found it, and then as it does now; no tensor is written to."""
        random = generator_states()
        places = [(owner, name) for owner, name, *_ in self._buffers.values()] + self._empty
        buffers = [(owner, name, owner._buffers[name]) for owner, name in places]
        logged = {meter: {name: getattr(meter, name) for name in _NOTHING} for meter in self._all_meters()}
        self.draw_again()
        for owner, name, tensor, version, copy in self._buffers.values():
            owner._buffers[name] = copy if may_have_changed(owner, tensor, version) else tensor
        for owner, name in self._empty:
            owner._buffers[name] = None
        for meter in logged:
            for name, value in self._logged.get(meter, _NOTHING).items():
                setattr(meter, name, value)
        try:
            yield
        finally:
            set_generators(random)
            for owner, name, present in buffers:
                owner._buffers[name] = present
            for meter, values in logged.items():
                for name, value in values.items():
                    setattr(meter, name, value)

    def leave_out(self) -> None:
        """Take back what the batches since ``keep`` added to buffers, metrics and the means over the epoch.

        Random numbers go on, and the latest values stay: they are what happened.
        """
        self._restore_buffers()
        for meter in self._all_meters():
            before = self._logged.get(meter, _NOTHING)
            meter.total, meter.weight = _copied(before["total"]), before["weight"]
            if meter.metric is not None:
                meter.value = before["value"]
        self._restore_metrics()

    def draw_again(self) -> None:
        """Have the random generators give what they gave after ``keep``."""
        set_generators(self._random)

    def changed_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that changed since ``keep`` as they were then, by their names in the module."""
        paths = {id(child): path for path, child in self._run.module.named_modules()}
        return {
            f"{paths[id(owner)]}.{name}".lstrip("."): copy
            for owner, name, tensor, version, copy in self._buffers.values()
            if may_have_changed(owner, tensor, version)
        }

    def take_buffers(self, copies: dict[str, Tensor]) -> None:
        """Come back to other values of some buffers than they had at ``keep``, by their names in the module."""
        for path, owner in self._run.module.named_modules():
            for name in owner._buffers:
                copy = copies.get(f"{path}.{name}".lstrip("."))
                if copy is not None:
                    tensor = self._buffers[id(owner), name][2]
                    # A version it never has: to be put back in any case.
                    self._buffers[id(owner), name] = (owner, name, tensor, -1, copy.to(tensor))

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

    def _restore_buffers(self) -> None:
        for owner, name, tensor, version, copy in self._buffers.values():
            if may_have_changed(owner, tensor, version):
                tensor.detach().copy_(copy)
            owner._buffers[name] = tensor
        for owner, name in self._empty:
            owner._buffers[name] = None

    def _restore_metrics(self) -> None:
        for metric, state in self._metric_states:
            for name, value in state.items():
                setattr(metric, name, _copied(value))

    def _all_meters(self) -> Iterator[LoggedValue]:
        yield from self._run.logged.of_stage("train")


_NOTHING = {"value": None, "total": None, "weight": 0, "metric": None}


def _state_of(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: _copied(getattr(metric, name)) for name in names}


def generator_states() -> dict[str, Any]:
    """Return the states of all random generators as they come: packed for a checkpoint they take four times as long."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_generators(states: dict[str, Any]) -> None:
    """Put back what ``generator_states`` returned."""
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
