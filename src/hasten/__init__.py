"""hasten: PyTorch training as fast as the hardware allows, by changing one line.

The public names are loaded when they are first used, so that ``import hasten`` costs almost nothing. The core must not
import ``hasten_tools``, ``hasten_lightning``, ``hasten_deepspeed`` or ``hasten_xla``: it finds them by entry points.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hasten._lib import VERSION
from hasten._lib.lazy import attach
from hasten.extend.moved import install as find_moved_modules

__version__ = VERSION
find_moved_modules()

# ``torch.cuda.is_available()`` then asks the driver's library, and does not begin to use CUDA: a process that has can
# not be copied any more, as notebooks do to train on several GPUs.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

if TYPE_CHECKING:
    import hasten_lightning as compat  # noqa: F401 - The name of its package in programs.
    from hasten import accelerators as accelerators
    from hasten import callbacks as callbacks
    from hasten import cli as cli
    from hasten import data as data
    from hasten import demos as demos
    from hasten import fabric as fabric
    from hasten import loggers as loggers
    from hasten import optim as optim
    from hasten import plugins as plugins
    from hasten import profilers as profilers
    from hasten import strategies as strategies
    from hasten import tuner as tuner
    from hasten import utilities as utilities
    from hasten.fabric import Fabric as Fabric
    from hasten.module import LightningModule as LightningModule
    from hasten.module.callback import Callback as Callback
    from hasten.module.datamodule import LightningDataModule as LightningDataModule
    from hasten.packed.blocks import packed_blocks as packed_blocks
    from hasten.packed.dropout import fast_dropout as fast_dropout
    from hasten.report.logs import plot_logs as plot_logs
    from hasten.seed import seed_everything as seed_everything
    from hasten.trainer import Trainer as Trainer

# Type checkers know the names above alone, and find misspelt ones.
if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "hasten.fabric": ("Fabric",),
            "hasten.module": ("LightningModule",),
            "hasten.module.callback": ("Callback",),
            "hasten.module.datamodule": ("LightningDataModule",),
            "hasten.packed.blocks": ("packed_blocks",),
            "hasten.packed.dropout": ("fast_dropout",),
            "hasten.report.logs": ("plot_logs",),
            "hasten.seed": ("seed_everything",),
            "hasten.trainer": ("Trainer",),
        },
        also=("__version__",),
        submodules=(
            "accelerators",
            "callbacks",
            "cli",
            "compat",
            "data",
            "demos",
            "fabric",
            "loggers",
            "optim",
            "plugins",
            "profilers",
            "pytorch",
            "strategies",
            "tuner",
            "utilities",
        ),
    )
