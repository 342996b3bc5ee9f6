"""Optimizers that step each parameter during backward, as soon as its gradient is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from hasten._lib.errors import make_error
from hasten._lib.tree import parameters_of
from hasten.optim.fused import unwrapped, use_fused, why_not_fused
from hasten.precision.small_updates import full_precision

# Optimizers whose step of a parameter depends on that parameter only.
_KINDS: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
    optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Adafactor, optim.Muon,
)  # fmt: skip
# Devices where launching ten small kernels takes longer than running them.
KERNELS_TO_JOIN: tuple[str, ...] = ("cuda",)


def in_backward(optimizer_class: type[Optimizer], params: Iterable[Any], **options: object) -> InBackward:
    """Return an optimizer that steps each parameter during backward, and frees its gradient at once.

    Only one or two gradients exist at a time, which saves about as much memory as the weights take. The weights equal
    those of the same optimizer stepped as usual. State and checkpoints have the format of ``optimizer_class``.

    Call ``optimizer.step()`` after each backward as usual; it ends the step. Gradients are freed at once, so they
    cannot be accumulated, discarded or clipped by their norm. The Trainer refuses these before training where
    possible. In your own loop, a second gradient of a parameter before ``step()``, and ``zero_grad()`` between
    backward and ``step()``, raise a RuntimeError.

    On CUDA each parameter steps in one kernel if torch has one; pass ``fused=False`` to disable it.

    Args:
        optimizer_class: from ``torch.optim``: SGD, Adam, AdamW, ...; not LBFGS and not SparseAdam.
        params: parameters or groups of them, as for the class.
        options: for the class: lr, weight_decay, ...

    Raises:
        TypeError: the class is not an optimizer, or ``params`` is a module.
        ValueError: it needs all gradients at once, or the parameters are on several devices.

    Example::

        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = in_backward(torch.optim.SGD, layer.parameters(), lr=1.0)
        >>> before = layer.weight.item()
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> round(before - layer.weight.item(), 3), layer.weight.grad
        (1.0, None)
        >>> optimizer.step()

    Source: `How to save memory by fusing the optimizer step into the backward pass
    <https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html>`_.

    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise make_error(
            TypeError,
            "in_backward(optimizer_class=...):",
            fix=(
                f"use a class, such as torch.optim.AdamW, not {type(optimizer_class).__name__}. Its options follow: "
                "in_backward(torch.optim.AdamW, model.parameters(), lr=1e-3)."
            ),
            argument="optimizer_class",
        )
    if optimizer_class not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise make_error(
            ValueError,
            f"in_backward({optimizer_class.__name__}): it is not known to step each parameter by itself, and during "
            "backward there is one gradient at a time.",
            fix=f"Use one of torch.optim: {known}.",
        )
    if isinstance(params, nn.Module):
        what = f"in_backward(params=...): use parameters or groups of them, not the module {type(params).__name__}."
        fix = f"Pass its parameters(): in_backward(torch.optim.{optimizer_class.__name__}, model.parameters(), ...)."
        raise make_error(TypeError, what, fix=fix, argument="params")
    made: InBackward = _class_of(cast("Any", optimizer_class))(params, **options)
    chosen = any(group.get("fused") is not None or group.get("foreach") is not None for group in made.param_groups)
    # Otherwise the step of each parameter takes about ten kernels.
    launched = all(p.device.type in KERNELS_TO_JOIN for p in parameters_of(made))
    if launched and not chosen and why_not_fused(made) is None:
        use_fused(made)
    made.start()
    return made


class InBackward(Optimizer):
    """Base class, together with the optimizer's class, of the classes that ``in_backward`` creates."""

    # Limits each element of a gradient before its step; set by the Trainer.
    clip_value: float | None = None
    # The optimizer whose step is computed.
    optimizer_class: type[Optimizer]
    _handles: list[Any]
    # The index of each parameter's group.
    _group_index: dict[Tensor, int]
    # The parameters that stepped since the last ``step()``; none may step twice.
    _stepped: set[Tensor]

    def start(self) -> None:
        """Step parameters during backward from now on."""
        parameters = parameters_of(self)
        devices = sorted({str(p.device) for p in parameters})
        if len(devices) > 1:
            raise make_error(
                ValueError,
                f"in_backward: the parameters are on {', '.join(devices)}, and backward runs on them at the same time.",
                fix="Use the optimizer as it is.",
            )
        self.stop()
        self._handles = [handle for p in parameters if (handle := self._hook(p)) is not None]

    def stop(self) -> None:
        """Stop stepping in backward."""
        for handle in self.__dict__.get("_handles", ()):
            handle.remove()
        self._handles = []
        self._stepped = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which step during backward, too."""
        super().add_param_group(param_group)
        own = self.__dict__.setdefault("_group_index", {})
        own.update(dict.fromkeys(self.param_groups[-1]["params"], len(self.param_groups) - 1))
        if self.__dict__.get("_handles"):
            stepped = self._stepped
            self.start()
            self._stepped = stepped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a step: run ``closure`` if given, and step parameters whose gradient was set by hand or in a copy.

        Raises:
            RuntimeError: such a parameter has stepped already.

        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        left = [p for p in self._group_index if p.grad is not None]
        if left:
            for parameter in left:
                self._once(parameter)
            # With 16-bit weights, the groups contain 32-bit copies of them here.
            for parameter in parameters_of(self):
                self._clip(parameter)
            unwrapped(self.optimizer_class.step)(self)
            for parameter in left:
                parameter.grad = None
        self._stepped = set()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Check that no gradient of the last backward was to be discarded."""
        if self._stepped:
            raise make_error(
                RuntimeError,
                f"in_backward({self.optimizer_class.__name__}): zero_grad() after a backward without step() discards "
                f"gradients, but {len(self._stepped)} parameters have stepped with them.",
                fix=self._instead(),
            )
        super().zero_grad(set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has no hooks, and its parameters step in step().
        self._group_index = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._stepped = set()

    def _hook(self, parameter: Tensor) -> Any:
        """Step a parameter as soon as its gradient is computed; None if it cannot have one."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return None
        # Frozen parameters too: they may be trained later, and torch refuses the hook until then.
        trained = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            return parameter.register_post_accumulate_grad_hook(self._step_one)
        finally:
            parameter.requires_grad_(trained)

    def _step_one(self, parameter: Tensor) -> None:
        self._once(parameter)
        self._clip(parameter)
        groups = self.param_groups
        own = groups[self._group_index[parameter]]
        try:
            # A group with only this parameter, and the options that schedulers change.
            self.param_groups = [{**own, "params": [parameter]}]
            full_precision(self, functools.partial(unwrapped(self.optimizer_class.step), self))
        finally:
            self.param_groups = groups
        parameter.grad = None

    def _clip(self, parameter: Tensor) -> None:
        if self.clip_value is not None and parameter.grad is not None:
            parameter.grad.clamp_(-self.clip_value, self.clip_value)

    def _once(self, parameter: Tensor) -> None:
        if parameter in self._stepped:
            raise make_error(
                RuntimeError,
                f"in_backward({self.optimizer_class.__name__}): a parameter of shape {tuple(parameter.shape)} got a "
                "second gradient before optimizer.step(), and has stepped with the first.",
                fix=self._instead(),
            )
        self._stepped.add(parameter)

    def _instead(self) -> str:
        return (
            "Call optimizer.step() after each backward; run the backward of other parameters (a GAN) between "
            "toggle_optimizer(other) and untoggle_optimizer(other); to accumulate gradients, use "
            f"torch.optim.{self.optimizer_class.__name__} as it is."
        )


def to_clip(optimizer: Optimizer, method: str) -> list[Tensor]:
    """Return the parameters of an optimizer, whose gradients are clipped between backward and step."""
    if isinstance(optimizer, InBackward):
        raise make_error(
            ValueError,
            f"{method}: in_backward({optimizer.optimizer_class.__name__}) steps in backward, so there are no "
            "gradients left to clip.",
            fix=(
                "Set optimizer.clip_value, which limits each element before its step, or use "
                f"torch.optim.{optimizer.optimizer_class.__name__} as it is."
            ),
        )
    return parameters_of(optimizer)


@functools.cache
def _class_of(kind: type[Optimizer]) -> Any:
    return type(f"{kind.__name__}InBackward", (InBackward, kind), {"__module__": __name__, "optimizer_class": kind})
