"""The command line: ``LightningCLI`` makes a program with sub-commands, options and YAML configs of your classes.

Needs jsonargparse, which the extra ``cli`` installs. It must not import ``hasten.fabric`` or ``hasten.strategies``.
"""

# ruff: noqa: E402 - missing packages are named before they are imported

from __future__ import annotations

from hasten._lib.errors import make_error
from hasten._lib.optional import install_line, installed

for _name in ("jsonargparse", "docstring_parser", "yaml"):
    if not installed(_name):
        raise make_error(
            ModuleNotFoundError,
            f"hasten.cli needs the package {_name}, which is not installed.",
            fix=f"Run: {install_line('cli')}",
            name=_name,
        )

from jsonargparse import Namespace

from hasten.cli.app import LightningCLI
from hasten.cli.hyperparameters import ModuleType, instantiate_module
from hasten.cli.optimizers import (
    LRSchedulerCallable,
    LRSchedulerType,
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    OptimizerCallable,
    ReduceLROnPlateau,
    instantiate_class,
)
from hasten.cli.parser import ArgsType, LightningArgumentParser
from hasten.cli.save_config import SaveConfigCallback

__all__ = [
    "ArgsType", "LRSchedulerCallable", "LRSchedulerType", "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion", "LightningArgumentParser", "LightningCLI", "ModuleType", "Namespace",
    "OptimizerCallable", "ReduceLROnPlateau", "SaveConfigCallback", "instantiate_class",
    "instantiate_module",
]  # fmt: skip
