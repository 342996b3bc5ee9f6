"""Parameters that several modules share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names under which each shared parameter appears, a list for each.

    Args:
        module: the module.

    Example::

        >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> tied[1].weight = tied[0].weight
        >>> find_shared_parameters(tied)
        [['0.weight', '1.weight']]

    """
    names: dict[int, list[str]] = {}
    for name, parameter in _all_parameters(module, "", set()):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """Share parameters again, as ``find_shared_parameters`` found them; returns the module.

    Args:
        module: the module, which is changed.
        shared_params: names, a list for each parameter; the first is kept.

    """
    for first, *others in shared_params:
        kept = _owner(module, first)
        parameter = getattr(kept, first.rpartition(".")[2])
        for name in others:
            setattr(_owner(module, name), name.rpartition(".")[2], parameter)
    return module


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _all_parameters(module: nn.Module, prefix: str, above: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    # torch leaves out what it has seen; a module inside itself must still end.
    if id(module) in above:
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{prefix}{name}", parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _all_parameters(child, f"{prefix}{name}.", above | {id(module)})
