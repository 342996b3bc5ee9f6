"""Types that appear in the public interface: for annotations, and the status of a Trainer.

Importing this module imports torch and the base classes named here, nothing else. Modules that need the types for
annotations only import them for the type checker::

    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from hasten.types import Batch, StepOutput
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NotRequired, Required, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten._lib.names import LightningEnum
from hasten.checkpoint.files import CheckpointIO
from hasten.loggers.base import Logger
from hasten.machine.cluster import ClusterEnvironment
from hasten.machine.devices import Accelerator
from hasten.optim import LRSchedulerConfig
from hasten.precision.base import Precision
from hasten.strategies.base import Strategy
from hasten.strategies.parallel import LayerSync

if TYPE_CHECKING:
    from torchmetrics import Metric

    from hasten.module.datamodule import LightningDataModule

# Arguments of Trainer and Fabric.

PrecisionName: TypeAlias = Literal[
    "32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true",
    "fp8", "transformer-engine", "transformer-engine-float16",
    16, 32, 64, "16", "32", "64", "bf16", "fp16", "half", "full", "double",
]  # fmt: skip
"""A floating-point format: "16-mixed" computes in it, "16-true" also keeps the weights in it."""

AcceleratorLike: TypeAlias = Accelerator | str
"""A kind of device: "auto", "cpu", "cuda", "gpu", "mps", "tpu", or an object."""

StrategyLike: TypeAlias = Strategy | str
"""How processes share the work: "auto", "single_device", "ddp", "ddp_sharded", "fsdp", ..., or an object."""

Devices: TypeAlias = list[int] | str | int
"""How many devices (2, -1 or "auto" for all) or which ([0, 1] or "0,1") of each machine."""

Plugin: TypeAlias = Precision | CheckpointIO | ClusterEnvironment | LayerSync
"""An object that replaces a part of the run."""

LoggerLike: TypeAlias = Logger | Iterable[Logger] | bool
"""One logger, several, True for the default one, or False for none."""

CompileLike: TypeAlias = bool | Literal["regional", "step"] | dict[str, Any]
"""True for the whole model, "regional" for its repeated blocks, "step" for all that a step
computes, or options of ``torch.compile``."""

SpeedName: TypeAlias = Literal[
    "auto", "exact", "same bits", "same maths up to rounding", "other random draws", "same samples in other batches",
    "lower precision",
]  # fmt: skip
"""What ``Trainer(speed=...)`` may change at most."""

MatmulPrecision: TypeAlias = Literal["highest", "high", "medium"]
"""An argument of ``torch.set_float32_matmul_precision``."""

Duration: TypeAlias = str | timedelta | dict[str, int]
"""A time: "DD:HH:MM:SS", "90min", a timedelta, or the arguments of one."""

# Data, and what steps return.

Batch: TypeAlias = Any
"""A batch of a loader: usually tensors in a tuple, list or dict, with the batch dimension first."""

StepOutput: TypeAlias = Tensor | Mapping[str, Any] | None
"""The return value of a step. In training: the loss, a dict with the key "loss", or None to skip the batch."""

Dataloaders: TypeAlias = "Iterable[Any] | LightningDataModule | None"
"""A DataLoader or any iterable of batches, a list or dict of them, or a datamodule."""

Tensors: TypeAlias = Tensor | float | Sequence[Any] | Mapping[Any, Any]
"""A tensor, a number, or lists, tuples and dicts of them, at any depth."""

MetricValue: TypeAlias = "Metric | Tensor | float"
"""A value to log: a number, a tensor with one element, or a ``torchmetrics.Metric``."""

# Optimizers and schedulers.

Scheduler: TypeAlias = LRScheduler | ReduceLROnPlateau
"""A learning-rate scheduler of torch."""


class LRSchedulerConfigType(TypedDict, total=False):
    """The dict under ``"lr_scheduler"`` in what ``configure_optimizers`` returns."""

    scheduler: Required[Scheduler]
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """The smallest dict that ``configure_optimizers`` may return."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """A dict with a scheduler that ``configure_optimizers`` may return."""

    optimizer: Optimizer
    lr_scheduler: Scheduler | LRSchedulerConfigType
    monitor: NotRequired[str]


OptimizerLRScheduler: TypeAlias = (
    Optimizer
    | Sequence[Optimizer]
    | tuple[Sequence[Optimizer], Sequence[Scheduler | LRSchedulerConfig]]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | Sequence[OptimizerConfig]
    | Sequence[OptimizerLRSchedulerConfig]
    | None
)
"""What ``configure_optimizers`` may return."""

# Files, devices, processes.

PathLike: TypeAlias = str | os.PathLike[str]
"""A path of this machine, or a URL for fsspec."""

StorageOptions: TypeAlias = Mapping[str, Any] | None
"""Options of the storage behind a URL, for fsspec."""

MapLocation: TypeAlias = torch.device | str | Callable[[torch.UntypedStorage, str], Any] | dict[str, str] | None
"""Where ``torch.load`` puts tensors."""

Group: TypeAlias = "torch.distributed.ProcessGroup | None"
"""The processes that take part in a collective; None for all."""

ReduceOperation: TypeAlias = "str | torch.distributed.ReduceOp | None"
"""How the tensors of several processes become one: "mean", "sum", "max", "min" or "product"; None means "sum"."""

# The status of a Trainer.


class TrainerFn(LightningEnum):
    """The call in progress."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """The part of a call in progress: fit also validates."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether validation or test steps run."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """The beginning of the name of the hook that gives this stage's data."""
        return {"validate": "val", "sanity_check": "val"}.get(self.value, self.value)


class TrainerStatus(LightningEnum):
    """How the call went."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the call has ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


@dataclass
class TrainerState:
    """Status, call and stage in one place."""

    status: TrainerStatus = TrainerStatus.INITIALIZING
    fn: TrainerFn | None = None
    stage: RunningStage | None = None

    @property
    def finished(self) -> bool:
        """Whether the last call came to its end."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last call has ended, in whichever way."""
        return self.status.stopped


# Where a call begins.
FIRST_STAGE = {fn: RunningStage("train" if fn == TrainerFn.FITTING else fn.value) for fn in TrainerFn}


__all__ = [
    "AcceleratorLike", "Batch", "CompileLike", "Dataloaders", "Devices", "Duration", "Group",
    "LRSchedulerConfigType", "LoggerLike", "MapLocation", "MatmulPrecision", "MetricValue",
    "OptimizerConfig", "OptimizerLRScheduler", "OptimizerLRSchedulerConfig", "PathLike", "Plugin",
    "PrecisionName", "ReduceOperation", "Scheduler", "SpeedName", "StepOutput", "StorageOptions", "Tensors",
]  # fmt: skip
