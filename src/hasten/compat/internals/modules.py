"""Classes that register themselves, docstrings, and an optimizer that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from inspect import getmembers, isclass
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from hasten._lib.optional import need
from hasten.utilities import rank_zero_warn


class MockOptimizer(Optimizer):
    """An optimizer without parameters, whose step runs the closure alone.

    Example::

        >>> MockOptimizer().step(lambda: 3.0)
        3.0

    """

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``closure``."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool | None = True) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "No Optimizer"


def get_short_description(component: object) -> str | None:
    """Return the first sentence of a docstring; None if there is none."""
    if component.__doc__ is None:
        return None
    parser = need("docstring_parser", purpose="the help of a command line")
    try:
        description: str | None = parser.parse(component.__doc__).short_description
    except (ValueError, parser.ParseError) as error:
        rank_zero_warn(f"The docstring of {component} cannot be parsed: {error}")
        return None
    return description


def register_classes(registry: object, method: str, module: ModuleType, parent: type) -> None:
    """Have the classes of a module register themselves.

    Args:
        registry: what they register in.
        method: the classmethod of theirs that does it.
        module: where they are.
        parent: the class that they inherit from; those that leave its ``method`` as it is do not register.

    """
    for _, kind in getmembers(module, isclass):
        if issubclass(kind, parent) and _function(kind, method) is not _function(parent, method):
            getattr(kind, method)(registry)


def _function(kind: type, method: str) -> Any:
    found = getattr(kind, method, None)
    return getattr(found, "__func__", found)


def load_external_callbacks(group: str) -> list[Any]:
    """Return the callbacks that installed packages offer.

    Args:
        group: the name of their entry points; each is a function that returns a callback or a list of them.

    """
    found: list[Any] = []
    for entry in entry_points(group=group):
        made = entry.load()()
        found += made if isinstance(made, list) else [made]
    return found
