"""Classes that a command line may name without their module, once they are imported."""

from __future__ import annotations

import functools
import importlib
import inspect

# Packages whose public names are imported when they are first used.
_PACKAGES = ("callbacks", "loggers", "profilers", "strategies", "plugins", "accelerators")


@functools.cache
def load() -> None:
    """Import hasten's own callbacks, loggers, profilers, strategies and plugins."""
    for package in _PACKAGES:
        try:
            module = importlib.import_module(f"hasten.{package}")
        except ModuleNotFoundError:
            continue
        for name in module.__all__:
            try:
                getattr(module, name)
            except ModuleNotFoundError:
                continue  # Its package is not installed.


# Where a class passes its **kwargs: (module, name there, arguments that the class sets itself).
_FORWARDS_TO = {
    "CometLogger": ("comet_ml", "ExperimentConfig", ()),
    "DDPStrategy": ("torch.nn.parallel", "DistributedDataParallel", ("module",)),
    "TensorBoardLogger": ("torch.utils.tensorboard", "SummaryWriter", ("log_dir",)),
    "WandbLogger": ("wandb", "init", ()),
}


def forwarded_arguments(kind: type) -> list[str]:
    """Return the names of the arguments that ``kind`` accepts in its ``**kwargs``."""
    if kind.__name__ not in _FORWARDS_TO or not kind.__module__.startswith("hasten."):
        return []
    module, name, own = _FORWARDS_TO[kind.__name__]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError:
        return []  # The class itself raises.
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [one.name for one in inspect.signature(function).parameters.values() if one.kind in kinds]
    return [one for one in found if one not in own]
