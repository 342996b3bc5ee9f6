"""Optimizers that step each parameter as soon as its gradient is there, within backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from hasten.precision.small_updates import full_precision

# Each computes the step of one parameter from that parameter alone.
_KINDS: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
    optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Adafactor, optim.Muon,
)  # fmt: skip


def in_backward(optimizer_class: type[Optimizer], params: Iterable[Any], **options: Any) -> Any:
    """Return an optimizer that steps each parameter during backward, and frees its gradient at once.

    There is never more than a gradient or two: for large models that saves as much memory as the weights take. The
    weights are those of the same optimizer stepped as usual. ``optimizer.step()`` and ``zero_grad()`` then have nothing
    left to do. Gradients exist for no longer than a moment, so nothing can be accumulated or clipped by its norm; the
    Trainer refuses these before training. State and checkpoints are those of ``optimizer_class``.

    Args:
        optimizer_class: of ``torch.optim``: SGD, Adam, AdamW, ...; not LBFGS and not SparseAdam.
        params: parameters or groups of them, as for the class.
        options: for the class: lr, weight_decay, ...

    Raises:
        TypeError: the class is no optimizer.
        ValueError: it needs all gradients at once, or the parameters are on several devices.

    Example::

        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = in_backward(torch.optim.SGD, layer.parameters(), lr=1.0)
        >>> before = layer.weight.item()
        >>> layer(torch.ones(1, 1)).sum().backward()
        >>> round(before - layer.weight.item(), 3), layer.weight.grad
        (1.0, None)

    Source: `How to save memory by fusing the optimizer step into the backward pass
    <https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html>`_.

    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            "in_backward(optimizer_class=...): use a class, such as torch.optim.AdamW, not "
            f"{type(optimizer_class).__name__}. Its options follow: "
            "in_backward(torch.optim.AdamW, model.parameters(), lr=1e-3)."
        )
    if optimizer_class not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise ValueError(
            f"in_backward({optimizer_class.__name__}): it is not known to step each parameter by itself, and during "
            f"backward there is one gradient at a time. Use one of torch.optim: {known}."
        )
    made = _class_of(cast("Any", optimizer_class))(params, **options)
    made.start()
    return made


class InBackward(Optimizer):
    """What the classes that ``in_backward`` makes have beside the optimizer's own."""

    # Limits each element of a gradient just before its step; the Trainer sets it.
    clip_value: float | None = None
    # The class whose arithmetic it is.
    of: type[Optimizer]
    _handles: list[Any]
    # In which group a parameter is: asked once for each in every backward.
    _places: dict[Tensor, int]

    def start(self) -> None:
        """Step parameters during backward, from now on."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        devices = sorted({str(p.device) for p in parameters})
        if len(devices) > 1:
            raise ValueError(
                f"in_backward: the parameters are on {', '.join(devices)}, and backward runs on them at the same time. "
                "Use the optimizer as it is."
            )
        self.stop()
        self._places = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._handles = [
            p.register_post_accumulate_grad_hook(self._step_one) for p in parameters if p.requires_grad
        ]

    def stop(self) -> None:
        """Leave gradients alone, from now on."""
        for handle in self.__dict__.get("_handles", ()):
            handle.remove()
        self._handles = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they, too, step during backward."""
        super().add_param_group(param_group)
        if self.__dict__.get("_handles"):
            self.start()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``closure``, if there is one; the parameters have stepped in its backward."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _step_one(self, parameter: Tensor) -> None:
        if self.clip_value is not None and parameter.grad is not None:
            parameter.grad.clamp_(-self.clip_value, self.clip_value)
        groups = self.param_groups
        own = groups[self._places[parameter]]
        try:
            # A group of this parameter alone, with the options that schedulers change.
            self.param_groups = [{**own, "params": [parameter]}]
            full_precision(self, functools.partial(_arithmetic_of(self.of), self))
        finally:
            self.param_groups = groups
        parameter.grad = None


def to_clip(optimizer: Any, method: str) -> list[Tensor]:
    """Return the parameters whose gradients are to be clipped between backward and step.

    Args:
        optimizer: whose parameters.
        method: what clips, for the message.

    Raises:
        ValueError: the optimizer has stepped in backward.

    """
    if isinstance(optimizer, InBackward):
        raise ValueError(
            f"{method}: in_backward({optimizer.of.__name__}) has stepped in backward, and there are no gradients left "
            "to clip. Set optimizer.clip_value, which limits each element before its step, or use "
            f"torch.optim.{optimizer.of.__name__} as it is."
        )
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@functools.cache
def _class_of(kind: type[Optimizer]) -> Any:
    return type(f"{kind.__name__}InBackward", (InBackward, kind), {"__module__": __name__, "of": kind})


def _arithmetic_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without its hooks, which are for whole steps."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]
