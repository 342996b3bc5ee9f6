"""Replace layers of a module temporarily, for the quantizing precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.observers import set_until


def ignored(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether a module is one of those named, or inside of one.

    Example::

        >>> ignored("blocks.0.linear", {"blocks.0"}), ignored("blocks.01", {"blocks.0"})
        (True, False)

    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def check_names(owner: str, ignore_modules: object) -> None:
    """Refuse one name where a set of names is expected."""
    if isinstance(ignore_modules, str):
        what = f"{owner}(ignore_modules={ignore_modules!r}):"
        raise make_error(TypeError, what, fix=f"use a set of names, {{{ignore_modules!r}}}.", argument="ignore_modules")


def check_ignored(module: nn.Module, prefixes: Iterable[str], owner: str) -> None:
    """Check that each prefix is the name of a module."""
    names = [name for name, _ in module.named_modules()]
    for prefix in prefixes:
        if not any(ignored(name, [prefix]) for name in names):
            what = f"{owner}(ignore_modules={{{prefix!r}}}): {type(module).__name__} has no module of that name."
            fix = did_you_mean(prefix, [name for name in names if name])
            raise make_error(ValueError, what, fix=fix, argument="ignore_modules")


def replace(
    module: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replace modules inside of ``module`` by what ``make(name, module)`` returns; None leaves one as it is.

    Return (parent, attribute name, original module) of each, for ``put_back``.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    # A module that occurs in several places gets one replacement.
    made: dict[int, nn.Module | None] = {}
    for prefix, parent in list(module.named_modules()):
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) not in made:
                made[id(child)] = make(f"{prefix}.{name}" if prefix else name, child)
            new = made[id(child)]
            if new is not None:
                new.train(child.training)
                parent._modules[name] = new
                replaced.append((parent, name, child))
    return replaced


def put_back(replaced: list[tuple[nn.Module, str, nn.Module]]) -> None:
    """Undo ``replace``, and empty its list."""
    while replaced:
        parent, name, module = replaced.pop()
        now = parent._modules.get(name)
        module.train(now.training if now is not None else module.training)
        parent._modules[name] = module


@contextmanager
def classes_replaced(instead: dict[str, Any]) -> Iterator[None]:
    """Replace classes in ``torch.nn`` inside the block, by their names there, for example "Linear"."""
    with ExitStack() as undo:
        for name, kind in instead.items():
            set_until(undo, vars(torch.nn), name, kind)
        yield
