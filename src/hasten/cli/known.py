"""Classes that a command line may name without their module: they must be imported to be found."""

from __future__ import annotations

import functools
import importlib
import inspect

# Rooms whose public names are imported when they are first used.
_ROOMS = ("callbacks", "loggers", "profilers", "strategies", "plugins", "accelerators")


@functools.cache
def load() -> None:
    """Import hasten's own callbacks, loggers, profilers, strategies and plugins."""
    for room in _ROOMS:
        try:
            module = importlib.import_module(f"hasten.{room}")
        except ModuleNotFoundError:
            continue
        for name in module.__all__:
            try:
                getattr(module, name)
            except ModuleNotFoundError:
                continue  # It needs a package that is not installed.


# What a class of hasten hands its **kwargs to: (module, what it has there, what it does not take from the user).
_HANDED_ON = {
    "CometLogger": ("comet_ml", "ExperimentConfig", ()),
    "DDPStrategy": ("torch.nn.parallel", "DistributedDataParallel", ("module",)),
    "TensorBoardLogger": ("torch.utils.tensorboard", "SummaryWriter", ("log_dir",)),
    "WandbLogger": ("wandb", "init", ()),
}


def handed_on(kind: type) -> list[str]:
    """Return the names of arguments that ``kind`` takes beside those in its signature."""
    if kind.__name__ not in _HANDED_ON or not kind.__module__.startswith("hasten."):
        return []
    module, name, not_taken = _HANDED_ON[kind.__name__]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return []  # Said by the class itself.
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [one.name for one in inspect.signature(function).parameters.values() if one.kind in kinds]
    return [one for one in found if one not in not_taken]
