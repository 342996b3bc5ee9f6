"""16-bit weights that lose no update: the optimizer steps 32-bit weights, which the model's are rounded from.

The neighbours of 1 in bfloat16 are 0.996 and 1.008. A step of 1e-4 is rounded away, and so are all later ones, so
training with small learning rates stands still. Here the optimizer steps weights in 32 bits, which it keeps with its
other states. After the step, the model's weights are these, rounded. Nothing is random, and only the rounding of
forward and backward differs from 32-bit weights. A weight that the program sets is the one that counts: where the
32-bit weight does not round to it, the next step starts from the model's. It costs four bytes per weight and, during
the step, when activations are freed, 32-bit copies of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from hasten._lib.tree import by_kind, leaves, map_leaves, map_tensors

T = TypeVar("T")

KEY = "full_weight"
# What hasten 0.1 saved: the distance from the model's weight, counted in 32-bit floats.
_KEY_OF_0_1 = "low_bits"
_SHORT = (torch.bfloat16, torch.float16)

_attached: WeakKeyDictionary[Optimizer, _FullSteps] = WeakKeyDictionary()
# Whoever steps these calls ``full_precision`` for it.
_stepped_by_caller: WeakSet[Optimizer] = WeakSet()


def keep_small_updates(optimizer: Optimizer) -> None:
    """Make every step of ``optimizer`` compute in 32 bits for parameters of 16 bits.

    It reads ``param.grad`` and changes the tensors of its ``param_groups``. Parameters of other types are not affected.
    A second call has no further effect.

    Its ``state_dict`` gets one more tensor per parameter, and it loads states with and without that tensor.
    """
    if optimizer not in _attached:
        _attached[optimizer] = _FullSteps(optimizer)


def full_precision(optimizer: Optimizer, function: Callable[[], T]) -> T:
    """Call ``function``, which changes the optimizer's parameters, with parameters in 32 bits."""
    steps = _attached.get(optimizer)
    if steps is None:
        return function()
    steps.refresh(optimizer)
    steps.enter(every=True)
    try:
        return function()
    finally:
        steps.leave()


def leave_steps_to_caller(optimizer: Optimizer) -> None:
    """Compute in 32 bits only inside ``full_precision``, which whoever steps the optimizer calls."""
    _stepped_by_caller.add(optimizer)


class _FullSteps:
    """The 32-bit weights of one optimizer, and the hooks that use them."""

    def __init__(self, optimizer: Optimizer) -> None:
        # No reference to the optimizer, which would live as long as its hooks.
        self._groups, self._state = optimizer.param_groups, optimizer.state
        self._full: dict[Tensor, Tensor] = {}
        # During a step: (parameter lists of the groups with their content, parameters with their 32-bit copies).
        self._inside: tuple[list[tuple[list[Tensor], list[Tensor]]], list[tuple[Tensor, Tensor]]] | None
        self._inside = None
        # The versions of the 32-bit copies when they replaced the parameters.
        self._versions: list[int] = []
        self._loading: dict[str, Any] | None = None
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_state_dict_post_hook(self._after_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    # -- around a step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer in _stepped_by_caller:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._inside is not None and getattr(closure, "_stands_in", None) is self:
            return None  # A step that calls the step of its base class.
        self.leave()
        self.refresh(optimizer)
        # Gradients exist only after the closure has run.
        self.enter(every=closure is not None)
        if closure is None:
            return None
        # The first argument is the optimizer itself.
        return args[:1], {**kwargs, "closure": self._with_parameters(closure)}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in _stepped_by_caller:
            self.leave()

    def _with_parameters(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure`` wrapped so that it sees the model's parameters instead of their 32-bit copies."""

        def watched() -> Any:
            if self._unchanged() and getattr(closure, "has_gradients", bool)():
                # The copies have the gradients, too, with any changes by the optimizer.
                return closure()
            self.leave()
            result = closure()
            # From the current parameters: an optimizer may have stepped them in the closure's backward.
            self.enter(every=True)
            return result

        watched._stands_in = self  # type: ignore[attr-defined]
        return watched

    def refresh(self, optimizer: Any) -> None:
        """Use the current groups and state of the optimizer."""
        self._groups, self._state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def enter(self, *, every: bool = False) -> None:
        """Replace 16-bit parameters by 32-bit copies: those with a gradient, or every one."""
        parameters = [p for group in self._groups for p in group["params"] if _is_short(p)]
        pairs = []
        for alike in by_kind(p for p in parameters if every or p.grad is not None):
            pairs += list(zip(alike, self._current(alike), strict=True))
        self._swap(pairs)

    def _current(self, alike: list[Tensor]) -> list[Tensor]:
        """Return the 32-bit weights of parameters of one kind, those that the program has set taken from the model."""
        known = [(p, self._full[p]) for p in alike if p in self._full and self._full[p].shape == p.shape]
        if known:
            # As few, large operations as possible: parameters are many and small.
            high = _flat([p for p, _ in known])
            full = _flat([kept.to(p.device) for p, kept in known])
            full = torch.where(full.to(high.dtype) == high, full, high.to(torch.float32))
            parts = full.split([p.numel() for p, _ in known])
            self._full.update((p, part.view(p.shape)) for (p, _), part in zip(known, parts, strict=True))
        of = dict(known)
        for parameter in alike:
            if parameter not in of:
                self._full[parameter] = parameter.detach().to(torch.float32)
                self._widen_state(parameter)
        return [self._full[p] for p in alike]

    def _widen_state(self, parameter: Tensor) -> None:
        """Keep in 32 bits what the optimizer had before the parameter's 32-bit weight: some fill it when created."""
        state = self._state.get(parameter)
        if not isinstance(state, dict):
            return
        widen = self._filled_again(parameter) if state.get("step", 1) == 0 else _widened
        state.update({name: map_tensors(widen, value) for name, value in state.items() if name != "step"})

    def _filled_again(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        """Return ``_widened`` for a state before the first step: what Adagrad has filled has its argument's value."""
        of = [group for group in self._groups if any(parameter is other for other in group["params"])]
        filled_with = of[0].get("initial_accumulator_value") if of else None
        if filled_with is None:
            return _widened

        def filled_again(value: Tensor) -> Tensor:
            # The argument rounded to 16 bits; other values are not the constructor's.
            untouched = value == torch.full_like(value, filled_with)
            return torch.where(untouched, filled_with, _widened(value))

        return filled_again

    @torch.no_grad()
    def _swap(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        given: list[tuple[Tensor, Tensor]] = []
        for parameter, full in pairs:
            full.grad, gradient = None, parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                given.append((gradient, full))
            elif gradient is not None:
                full.grad = gradient.to(torch.float32)
        # One copy for all of a kind, instead of one small operation and allocation per gradient.
        for alike in by_kind(given, lambda pair: pair[0]):
            gradients = [gradient for gradient, _ in alike]
            sizes = [gradient.numel() for gradient in gradients]
            room = torch.empty(sum(sizes), dtype=torch.float32, device=gradients[0].device)
            parts = [part.view(one.shape) for one, part in zip(gradients, room.split(sizes), strict=True)]
            torch._foreach_copy_(parts, gradients)
            for (_, full), part in zip(alike, parts, strict=True):
                full.grad = part
        instead = dict(pairs)
        before = [(group["params"], list(group["params"])) for group in self._groups]
        for listed, own in before:
            # In place, because some optimizers keep a reference to the list.
            listed[:] = [instead.get(p, p) for p in own]
        for parameter, full in pairs:
            if parameter in self._state:
                self._state[full] = self._state.pop(parameter)
        self._inside = before, pairs
        self._versions = [full._version for _, full in pairs]

    def _unchanged(self) -> bool:
        """Return whether the copies still have their initial values and all gradients."""
        return self._inside is not None and all(
            full._version == version and (full.grad is None) == (parameter.grad is None)
            for version, (parameter, full) in zip(self._versions, self._inside[1], strict=True)
        )

    @torch.no_grad()
    def leave(self) -> list[tuple[Tensor, Tensor]]:
        """Put the parameters back with the values of their copies; return both."""
        if self._inside is None:
            return []
        (before, pairs), self._inside = self._inside, None
        for listed, own in before:
            listed[:] = own
        for parameter, full in pairs:
            full.grad = None
            if full in self._state:
                self._state[parameter] = self._state.pop(full)
        stand_in = dict(pairs)
        for alike in by_kind([p for p, _ in pairs]):
            torch._foreach_copy_(alike, [stand_in[p] for p in alike])
        return pairs

    # -- around state_dict and load_state_dict

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self.leave()  # In case a step raised and left its copies behind.

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = dict(state_dict["state"])
        for index, parameter in enumerate(_all_parameters(optimizer)):
            full = self._full.get(parameter)
            # An optimizer may take any entry as a sign that it has initialized a parameter's state.
            if full is not None and (index in states or not torch.equal(full, parameter.to(full))):
                states[index] = {**states.get(index, {}), KEY: full.clone()}
        return {**state_dict, "state": states}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._loading = state_dict

        def without_weights(state: Any) -> Any:
            return {k: v for k, v in state.items() if k not in (KEY, _KEY_OF_0_1)} if isinstance(state, dict) else state

        states = {key: without_weights(state) for key, state in state_dict["state"].items()}
        return {**state_dict, "state": {key: state for key, state in states.items() if state != {}}}

    def _after_load(self, optimizer: Optimizer) -> None:
        """Restore the saved types of the states: torch converts them to the type of the parameters."""
        loaded, self._loading = self._loading, None
        assert loaded is not None
        self.refresh(optimizer)
        self._full.clear()
        saved_keys = [key for group in loaded["param_groups"] for key in group["params"]]
        for key, parameter in zip(saved_keys, _all_parameters(optimizer), strict=True):
            saved = loaded["state"].get(key)
            if not _is_short(parameter) or not isinstance(saved, dict):
                continue
            for name, value in saved.items():
                if name == KEY:
                    self._full[parameter] = value.to(parameter.device, torch.float32, copy=True)
                elif name == _KEY_OF_0_1:
                    full = self._full[parameter] = parameter.detach().to(torch.float32)
                    full.view(torch.int32).add_(value.to(parameter.device))
                elif name != "step" and name in self._state[parameter]:
                    self._state[parameter][name] = _restored(self._state[parameter][name], value)


def _widened(value: Tensor) -> Tensor:
    return value.to(torch.float32) if _is_short(value) else value


def _restored(loaded: Any, saved: Any) -> Any:
    """Return ``loaded``, a tensor or a collection, with the saved values of the tensors that torch made 16-bit."""
    values = iter(leaves(saved))

    def restored(leaf: Any) -> Any:
        value = next(values)
        if not isinstance(leaf, Tensor) or not _is_short(leaf):
            return leaf
        return value.to(leaf.device, torch.float32 if value.is_floating_point() else value.dtype, copy=True)

    return map_leaves(restored, loaded)


def _is_short(tensor: Tensor) -> bool:
    return tensor.dtype in _SHORT


def _all_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
