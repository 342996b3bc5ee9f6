"""Optimizers and schedulers on a command line: types for annotations, and classes made from configs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hasten._lib.names import did_you_mean
from hasten.extend.origin import full_name


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's ``ReduceLROnPlateau``, with the name of the value it watches.

    Args:
        optimizer: the optimizer.
        monitor: the logged value to watch, for instance "val_loss".
        args: for torch's scheduler.
        kwargs: for torch's scheduler: mode, factor, patience (checks), ...

    Example::

        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> ReduceLROnPlateau(optimizer, monitor="val_loss", patience=3).monitor
        'val_loss'

    Source: `torch.optim.lr_scheduler.ReduceLROnPlateau
    <https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.ReduceLROnPlateau.html>`_.

    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# The name that configs and saved files have for it.
ReduceLROnPlateau.__module__ = "hasten.cli"

# Classes of schedulers that are accepted here: torch's own ReduceLROnPlateau has no name to monitor.
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]

# For the __init__ of a module that makes its own optimizer: ``optimizer: OptimizerCallable = torch.optim.Adam``.
OptimizerCallable: TypeAlias = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable: TypeAlias = Callable[[Optimizer], LRScheduler | ReduceLROnPlateau]


def instantiate_class(args: Any | tuple[Any, ...], init: Mapping[str, Any]) -> Any:
    """Make an object of the class that a config names.

    Args:
        args: the positional argument, or a tuple of them.
        init: ``{"class_path": "package.module.Class", "init_args": {...}}``.

    Raises:
        ValueError: ``init`` names no class.
        ModuleNotFoundError: the module that it names does not exist.

    Example::

        >>> instantiate_class(torch.zeros(3), {"class_path": "torch.nn.Parameter"}).shape
        torch.Size([3])

    """
    path = init.get("class_path")
    if not isinstance(path, str) or "." not in path:
        raise ValueError(
            f"instantiate_class(): init['class_path'] must be a path like 'torch.optim.Adam'; got {path!r}."
        )
    module_name, _, name = path.rpartition(".")
    module = importlib.import_module(module_name)
    try:
        kind = getattr(module, name)
    except AttributeError:
        raise ValueError(
            f"instantiate_class(): {module_name} has no {name}.{did_you_mean(name, dir(module))}"
        ) from None
    positional = args if isinstance(args, tuple) else (args,)
    return kind(*positional, **(init.get("init_args") or {}))


def plain_config(config: object) -> Any:
    """Return a config as dicts, which an argument annotated as one takes."""
    return config.as_dict() if hasattr(config, "as_dict") else config


def class_config(kind: type, init_args: object) -> dict[str, Any]:
    """Return the config that makes an object of ``kind`` with ``init_args``."""
    return {"class_path": full_name(kind), "init_args": plain_config(init_args) or {}}
