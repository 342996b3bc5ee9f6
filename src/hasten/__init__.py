"""hasten: PyTorch training as fast as the hardware allows, by changing one line.

The public names are loaded when they are first used, so that ``import hasten`` costs almost nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hasten._lib.version import VERSION as __version__  # noqa: N811 - the name Python looks for

# ``torch.cuda.is_available()`` then asks the driver's library, and does not begin to use CUDA: a process that has can
# not be copied any more, as notebooks do to train on several GPUs.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    from hasten.fabric import Fabric as Fabric
    from hasten.module import LightningModule as LightningModule
    from hasten.module.callback import Callback as Callback
    from hasten.module.datamodule import LightningDataModule as LightningDataModule
    from hasten.packed.blocks import packed_blocks as packed_blocks
    from hasten.packed.dropout import fast_dropout as fast_dropout
    from hasten.report.plots import plot_logs as plot_logs
    from hasten.seed import seed_everything as seed_everything
    from hasten.trainer import Trainer as Trainer

_HOME = {
    "Callback": "hasten.module.callback",
    "Fabric": "hasten.fabric",
    "LightningDataModule": "hasten.module.datamodule",
    "LightningModule": "hasten.module",
    "Trainer": "hasten.trainer",
    "fast_dropout": "hasten.packed.dropout",
    "packed_blocks": "hasten.packed.blocks",
    "plot_logs": "hasten.report.plots",
    "seed_everything": "hasten.seed",
}

_ROOMS = (
    "accelerators",
    "callbacks",
    "cli",
    "compat",
    "data",
    "demos",
    "loggers",
    "optim",
    "plugins",
    "profilers",
    "strategies",
    "tuner",
    "utilities",
)

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "fast_dropout",
    "packed_blocks",
    "plot_logs",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"hasten.{name}")
    from hasten._lib.names import did_you_mean

    raise AttributeError(f"module 'hasten' has no attribute {name!r}.{did_you_mean(name, [*_HOME, *_ROOMS])}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
