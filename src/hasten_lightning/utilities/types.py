"""Types for the hints of programs: what steps return, what loaders may be, what ``configure_optimizers`` may give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hasten.optim import LRSchedulerConfig
from hasten.types import (
    LRSchedulerConfigType,
    MapLocation,
    OptimizerConfig,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
    PathLike,
    Plugin,
    PrecisionName,
    Scheduler,
    StepOutput,
)

if torch.distributed.is_available():
    from torch.distributed import ProcessGroup, ReduceOp
else:  # pragma: no cover - a build of torch without it
    ProcessGroup = ReduceOp = object  # type: ignore[misc,assignment]

# What strategies exchange between processes.
TBroadcast = TypeVar("TBroadcast")
TReduce = TypeVar("TReduce")

# What a step returns, and what a run gives back.
STEP_OUTPUT = StepOutput
_NUMBER = int | float
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]

# A process group; Any, as one that this build of torch does not have.
CollectibleGroup = Any

# Any iterable of batches, or a collection of them.
TRAIN_DATALOADERS = EVAL_DATALOADERS = Any

# Learning-rate schedulers: objects, and classes.
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRSchedulerPLType = Scheduler
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]

# Arguments of a Trainer and of Fabric.
_PATH, _MAP_LOCATION_TYPE = PathLike, MapLocation
_DEVICE = torch.device | str | int
_PARAMETERS = Iterator[torch.nn.Parameter]
_LITERAL_WARN = Literal["warn"]
_PLUGIN_INPUT = Plugin | str

# What was logged: for callbacks, and for the progress bar.
_OUT_DICT, _PBAR_DICT = dict[str, Tensor], dict[str, float]
_PRECISION_INPUT = PrecisionName
_PRECISION_INPUT_INT = Literal[64, 32, 16]
_PRECISION_INPUT_STR = Literal[
    "transformer-engine", "transformer-engine-float16", "fp8",
    "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true",
]  # fmt: skip
_PRECISION_INPUT_STR_ALIAS = Literal["64", "32", "16", "bf16"]
_PRECISION_INPUT_STR_ALIAS_CONVERSION = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

_Key = TypeVar("_Key")


@runtime_checkable
class _Stateful(Protocol[_Key]):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[_Key, Any]: ...

    def load_state_dict(self, state_dict: dict[_Key, Any]) -> None: ...


@runtime_checkable
class Steppable(Protocol):
    """An object that steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any: ...


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """An object with the interface of an optimizer."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: dict[Any, Any]

    def state_dict(self) -> dict[str, dict[Any, Any]]: ...

    def load_state_dict(self, state_dict: dict[str, dict[Any, Any]]) -> None: ...


@runtime_checkable
class DistributedDataParallel(Protocol):
    """A module that can skip the exchange of gradients."""

    def no_sync(self) -> AbstractContextManager[None]: ...


class _SizedIterable(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


def __getattr__(name: str) -> Any:
    if name == "_METRIC":
        # When it is asked for: torchmetrics imports transformers, matplotlib and scipy where they are installed.
        from torchmetrics import Metric

        return Metric | Tensor | int | float
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EVAL_DATALOADERS", "STEP_OUTPUT", "TRAIN_DATALOADERS", "DistributedDataParallel",
    "LRScheduler", "LRSchedulerConfig", "LRSchedulerConfigType", "LRSchedulerPLType",
    "LRSchedulerType", "LRSchedulerTypeTuple", "LRSchedulerTypeUnion", "Optimizable",
    "OptimizerConfig", "OptimizerLRScheduler", "OptimizerLRSchedulerConfig", "ProcessGroup",
    "ReduceLROnPlateau", "ReduceOp", "Steppable",
]  # fmt: skip
