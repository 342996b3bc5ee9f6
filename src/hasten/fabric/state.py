"""Conversions of Fabric: objects to checkpoint contents and back, values to tensors and numbers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.names import did_you_mean
from hasten.fabric.wrappers import unwrapped


def collect(state: object, filter: Any) -> dict[str, Any]:
    """Return the contents of a checkpoint: the ``state_dict`` of each object that has one, other values unchanged."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"Fabric.save(state=...): use a dict of names and objects, such as {{'model': model}}, not "
            f"{type(state).__name__}."
        )
    if filter is not None:
        _check_filter(filter, state)
    contents: dict[str, Any] = {}
    for name, value in state.items():
        saved = value.state_dict() if _is_stateful(value) else value
        if filter is not None and name in filter and isinstance(saved, Mapping):
            saved = {key: entry for key, entry in saved.items() if filter[name](key, entry)}
        contents[name] = saved
    return contents


def _check_filter(filter: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(filter, dict):
        raise TypeError(f"Fabric.save(filter={filter!r}): use a dict of names and functions.")
    for name, function in filter.items():
        if name not in state:
            raise ValueError(
                f"Fabric.save(filter={{{name!r}: ...}}): state has no {name!r}.{did_you_mean(name, state)} "
                f"It has: {', '.join(map(repr, state))}."
            )
        if not callable(function):
            raise TypeError(
                f"Fabric.save(filter={{{name!r}: {function!r}}}): use a function of (key, value) that says what to "
                "keep."
            )


def restore(
    state: dict[str, Any], contents: dict[str, Any], *, strict: bool, path: str | os.PathLike[str]
) -> dict[str, Any]:
    """Load ``contents`` into the objects of ``state``; return the rest."""
    if not isinstance(state, dict):
        raise TypeError(
            f"Fabric.load(state=...): use a dict of names and objects, such as {{'model': model}}, not "
            f"{type(state).__name__}. For a file that holds one bare state, use fabric.load_raw(path, obj)."
        )
    missing = [name for name in state if name not in contents]
    if missing and strict:
        raise KeyError(
            f"{os.fspath(path)} has no {missing[0]!r}.{did_you_mean(missing[0], contents)} It has: "
            f"{', '.join(map(repr, contents))}. Leave the name out of state, or pass strict=False."
        )
    rest = dict(contents)
    for name, value in list(state.items()):
        if name in missing:
            continue
        saved, target = rest.pop(name), unwrapped(value)
        if isinstance(target, nn.Module):
            target.load_state_dict(saved, strict=strict)
        elif _is_stateful(target):
            target.load_state_dict(saved)
        else:
            state[name] = saved
    return rest


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def as_tensor(leaf: object, device: torch.device) -> Any:
    """Return numbers, arrays and tensors as tensors on ``device``, other objects unchanged."""
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    if isinstance(leaf, (bool, int, float, complex)) or type(leaf).__module__ == "numpy":
        return torch.as_tensor(leaf, device=device)
    return leaf


def as_number(name: str, value: object) -> Any:
    """Return a tensor with one element as a number; waits for the device.

    Raises:
        ValueError: the tensor has several elements.

    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"fabric.log({name!r}, ...): the tensor has the shape {tuple(value.shape)}. Log one number, for instance "
            "its mean: value.mean()."
        )
    return value.item()


def accepted(method: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the ``kwargs`` that ``method`` accepts."""
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return kwargs
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in kwargs.items() if name in names}
