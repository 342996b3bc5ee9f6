"""One value logged under one name: its latest value and what the epoch has accumulated."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hasten._lib.device import widest_float
from hasten._lib.errors import MisconfigurationException, make_error, with_article
from hasten._lib.tree import children, move_to, whole
from hasten.machine import collectives

if TYPE_CHECKING:
    from hasten.checkpoint.metrics import Gathered
    from hasten.hooks import Hook
    from hasten.logged_values import LoggedValues

# Attributes of a LoggedValue that follow from the options of ``self.log``; a checkpoint keeps them.
SETTINGS = ("on_step", "on_epoch", "prog_bar", "logger", "reduce", "sync")


class LogOptions(NamedTuple):
    """The arguments of ``self.log`` that must stay the same for a name."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str | Callable[..., Any]
    enable_graph: bool
    sync_dist: bool
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool

    def differences(self, other: LogOptions) -> str:
        """Return the arguments in which two calls differ."""
        return ", ".join(
            f"{name}={before!r} then {after!r}"
            for name, before, after in zip(self._fields, self, other, strict=True)
            if before != after
        )


class LoggedValue:
    """One value logged under one name in one hook: its latest value and what the epoch has accumulated."""

    def __init__(self, name: str, owner: LoggedValues, row: Hook) -> None:
        self.name, self.owner, self.row = name, owner, row
        self.options: LogOptions | None = None
        self.loader_suffix = ""
        self.metric: Any = None
        self.on_step = self.on_epoch = True
        self.prog_bar = self.logger = False
        self.reduce = "mean"
        self.sync = self.enable_graph = self.zero_only = False
        self.reset()

    def reset(self) -> None:
        """Start a new epoch."""
        self.value: Any = None
        self.total: Any = None
        self.weight: Any = 0
        # The states of a dataloader that has ended, if the metric starts again for the next one.
        self.gathered: Gathered | None = None
        # Computes in place of the metric if this process had no batch of the dataloader.
        self.stand_in: Any = None
        if self.metric is not None:
            self.metric.reset()

    @property
    def base_name(self) -> str:
        return f"{self.name}{self.loader_suffix}"

    @property
    def step_name(self) -> str:
        return self._forked("_step")

    @property
    def epoch_name(self) -> str:
        return self._forked("_epoch")

    def _forked(self, ending: str) -> str:
        return f"{self.name}{ending if self.on_step and self.on_epoch else ''}{self.loader_suffix}"

    def add(self, value: Any, batch_size: int | float | Tensor | None) -> None:
        """Add one value; it stays on its device."""
        if isinstance(value, Tensor):
            if value.dim() or type(value) is not Tensor:
                value = self._scalar(value)
            # A copy: the caller may change the tensor in place before it is published.
            value = value.clone() if self.enable_graph else value.detach().clone()
        else:
            if type(value) is not float and type(value) is not int:
                value = self._convert(value)
                if value is None:
                    return
            if self.owner.single_precision:
                value = _rounded(value)
        if self.zero_only and not self.owner.on_first_process:
            return
        self.value = value
        if not self.on_epoch:
            return
        if self.reduce == "mean":
            if batch_size is None:
                batch_size = self.owner.batch_size or self.owner.find_batch_size(self.name)
        elif self.reduce == "sum":
            batch_size = 1
        else:
            self.weight += 1
            self.total = self._extreme(value)
            return
        self.weight += batch_size
        total = self.total
        if (
            type(batch_size) is int
            and isinstance(total, Tensor)
            and isinstance(value, Tensor)
            # A device tensor cannot be added to a CPU total in place; the sum is a new tensor on the device.
            and (value.is_cpu or not total.is_cpu)
        ):
            self.owner.add_product(total, value, alpha=batch_size)
        else:
            self.total = self._sum(value, batch_size)

    def _scalar(self, value: Any) -> Tensor:
        """Return a tensor of one element, of any shape or class, as a tensor without dimensions."""
        if type(value) is not Tensor:
            value = whole(value)
        if value.numel() != 1:
            raise _not_scalar(self.name, value)
        scalar: Tensor = value.reshape(()) if value.dim() else value
        return scalar

    def _sum(self, value: Any, weight: Any) -> Any:
        """Return the total with one more value, as a new object."""
        total = self.total
        if total is None and self.owner.upload is not None and _is_on_device(value):
            total = self._uploaded_start(value)
            if type(weight) is int and not self.owner.single_precision:
                return total.add_(value, alpha=weight)
        start = _first(value, weight, self.reduce)
        if not self.owner.single_precision:
            return start if total is None else total + start
        return _rounded(start) if total is None else _rounded(total + _rounded(start))

    def _extreme(self, value: Any) -> Any:
        """Return the largest or smallest value so far."""
        total = self.total
        if total is None and self.owner.upload is not None and _is_on_device(value):
            total = self._uploaded_start(value)
        return _first(value, 1, self.reduce) if total is None else extreme(total, value, self.reduce)

    def _uploaded_start(self, value: Tensor) -> Tensor:
        """Return an empty total, as data, so that the first step of an epoch compiles to the same graph as others."""
        kind = value.dtype if value.dtype in (torch.float32, torch.float64) else torch.float32
        dtype = kind if value.is_floating_point() else torch.float64
        start = {"max": -math.inf, "min": math.inf}.get(self.reduce, 0.0)
        assert self.owner.upload is not None
        return self.owner.upload(torch.tensor(start, dtype=dtype), value.device)

    def _convert(self, value: Any) -> float | None:
        """Return anything but a tensor, float or int as a float; None for a metric, which keeps its own state."""
        if is_metric(value):
            if self.metric is None or self.value is None:
                # The first value of an epoch: the module that is evaluated may have changed.
                self.metric = value
            elif self.metric is not value:
                raise MisconfigurationException(
                    f"self.log({self.name!r}, metric): another {type(value).__name__} object than before.",
                    fix=(
                        "Make it once, as an attribute of the module (self.metric = ... in __init__), and log that "
                        "object."
                    ),
                )
            # The metric may go on in another stage before the value of this step is shown.
            self.value, self.total, self.weight = value, value._forward_cache, 1
            return None
        if getattr(value, "size", 1) != 1:
            raise _not_scalar(self.name, value)
        if isinstance(value, bool) or hasattr(value, "__float__"):
            return float(value.item() if getattr(value, "ndim", 0) else value)
        raise MisconfigurationException(
            f"self.log({self.name!r}, ...): {_kind(value)} cannot be logged; "
            "give a number, a tensor of one element, or a torchmetrics.Metric.",
            fix=_instead(value),
        )

    def step_value(self) -> Any:
        """Return the latest value, or None if there is none."""
        return self.value if self.metric is None else self.total

    def epoch_value(self) -> tuple[Any, Any, str]:
        """Return (numerator, weight, reduction); a metric is computed and has weight None."""
        if self.metric is None:
            return self.total, self.weight, self.reduce
        shown = nullcontext() if self.gathered is None else self.gathered.shown()
        metric = self.metric if self.stand_in is None else self.stand_in
        with _without_update_warning(metric), shown:
            value = metric.compute()
        if value.numel() != 1 if isinstance(value, Tensor) else isinstance(value, Mapping | Sequence):
            raise MisconfigurationException(
                f"self.log({self.name!r}, metric): the `{type(self.metric).__name__}.compute()` return of "
                f"{self.name!r} must be a tensor of one element, and it computes {describe(value)}. Only a value of "
                "one element can be logged:",
                fix="call compute() at the end of the epoch and log its parts.",
            )
        return (value.reshape(()) if isinstance(value, Tensor) else value), None, "metric"

    def published(self, value: float) -> float:
        """Return a value for display: in the precision in which it was logged, also if processes have reduced it."""
        if self.metric is not None or not math.isfinite(value):
            return value
        logged = self.value
        if isinstance(logged, Tensor) and logged.is_floating_point():
            return value if logged.dtype == torch.float64 else ctypes.c_float(value).value
        # Round numbers to single precision if asked. A count stays exact.
        exact = not self.owner.single_precision or (abs(value) > 2**24 and float(value).is_integer())
        return value if exact else ctypes.c_float(value).value

    @property
    def is_on_device(self) -> bool:
        """Whether the latest value is a tensor that the host has to wait for."""
        return _is_on_device(self.value)

    @property
    def has_epoch_value(self) -> bool:
        return self.total is not None if self.metric is None else self.value is not None

    def take_from_others(self, settings: Mapping[str, Any], neutral: tuple[float, float], metric: object) -> None:
        """Take part in the reduction of a value that other processes logged: this one had no batch."""
        for name, setting in settings.items():
            setattr(self, name, setting)
        self.metric = metric
        if metric is None:
            self.total, self.weight = neutral
        else:
            self.value, self.weight = metric, 1

    def state_dict(self) -> dict[str, Any]:
        """Return what an interrupted epoch has accumulated, as plain data and CPU tensors.

        Of a metric, it is the value of the latest step: ``ModuleMetrics`` has the rest.
        """
        entries = {name: getattr(self, name) for name in ("name", *SETTINGS)}
        value = self.value if self.metric is None else self.step_value() if self.on_step else None
        values = {"value": value, "total": self.total, "weight": self.weight}
        return entries | {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in values.items()}

    def load_state_dict(self, state: Mapping[str, Any], metric: object, device: torch.device) -> None:
        """Restore what ``state_dict`` returned; the tensors on ``device``. A ``metric`` has its own state already."""
        for name in SETTINGS:
            setattr(self, name, state[name])
        self.metric = metric
        value = move_to(state["value"], device)
        self.value, self.total = (value, move_to(state["total"], device)) if metric is None else (metric, value)
        self.weight = move_to(state["weight"], device)


class LoggingContext:
    """The hook or step in which values are logged, with its values by name, kept apart by dataloader."""

    __slots__ = ("by_loader", "loader_idx", "row", "values")

    def __init__(self, row: Hook) -> None:
        self.row = row
        self.loader_idx: int | None = None
        self.values: dict[str, LoggedValue] = {}
        self.by_loader: dict[int | None, dict[str, LoggedValue]] = {None: self.values}

    def enter_loader(self, loader_idx: int | None) -> None:
        """Log for this dataloader from now on."""
        self.loader_idx = loader_idx
        self.values = self.by_loader.setdefault(loader_idx, {})


@contextmanager
def _without_update_warning(metric: Any) -> Iterator[None]:
    """Keep torchmetrics from warning that a metric has had no batch where another process has had one."""
    with warnings.catch_warnings():
        if not getattr(metric, "update_called", True) and collectives.world_size() > 1:
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        yield


def mean(total: float | Tensor, weight: float | Tensor) -> Any:
    """Return the mean of an epoch: NaN if all batches were empty."""
    is_number = not isinstance(total, Tensor) and not isinstance(weight, Tensor)
    return math.nan if is_number and not weight else total / weight


def _first(value: Any, weight: Any, reduce: str) -> Any:
    if not isinstance(value, Tensor):
        return value * weight
    start = value
    if not value.is_floating_point():
        # Counts stay exact where the device has doubles.
        start = value.to(widest_float(value.device))
    elif value.dtype not in (torch.float32, torch.float64):
        # A sum of thousands of half-precision values stops growing.
        start = value.to(torch.float32)
    return start * weight if reduce == "mean" else start.clone()


def _rounded(value: Any) -> Any:
    """Return a float rounded to single precision; return counts and tensors unchanged."""
    return ctypes.c_float(value).value if type(value) is float else value


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu


def extreme(total: Any, value: Any, reduce: str) -> Any:
    """Return the larger (``reduce="max"``) or smaller of two numbers or tensors."""
    if not isinstance(total, Tensor) and not isinstance(value, Tensor):
        return max(total, value) if reduce == "max" else min(total, value)
    pick = torch.maximum if reduce == "max" else torch.minimum
    device = value.device if isinstance(value, Tensor) else total.device
    return pick(_as_float(total, device), _as_float(value, device))


def _as_float(value: Any, device: torch.device) -> Tensor:
    """Return a number or tensor as a floating tensor wide enough to keep its value."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(device)
    dtype = widest_float(device)
    return torch.as_tensor(value, dtype=dtype, device=device)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"`{type(value).__name__}` values"


def _instead(value: object) -> str:
    """Return what to write in place of a value that cannot be logged, where that is known."""
    if isinstance(value, type):
        return f"Make an object in __init__, self.metric = {value.__name__}(...), and log that."
    if isinstance(value, Mapping | nn.ModuleDict):  # A MetricCollection is a ModuleDict.
        return "Write self.log_dict(...) for several values by name."
    if isinstance(value, MethodType | FunctionType | BuiltinFunctionType):
        return f"Call it: {value.__name__}()."
    if value is None:
        return "A function without return gives None, and so does metric.update(...): log the metric itself."
    return ""


def _not_scalar(name: str, value: Any) -> ValueError:
    kind = "a tensor" if isinstance(value, Tensor) else with_article(type(value))
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    what = f"self.log({name!r}, ...): the tensor must have a single element, got {kind}{shape}."
    fix = f"Reduce it first, for instance self.log({name!r}, value.mean()), or log each element under its own name."
    return make_error(ValueError, what, fix=fix)


def is_metric(value: object) -> bool:
    """Return whether ``value`` is a ``torchmetrics.Metric``, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def describe(value: object) -> str:
    """Describe a tensor, a dict or another value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict with " + ", ".join(map(repr, list(value)[:8]))
    return with_article(type(value))


def reduction(reduce_fx: object, where: str) -> str:
    """Return the name of a reduction given by name or as a function."""
    named = {"mean": "mean", "avg": "mean", "average": "mean", "sum": "sum", "min": "min", "max": "max"}
    functions: dict[object, str] = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}
    functions |= {max: "max", min: "min", sum: "sum"}
    name = named.get(reduce_fx.lower()) if isinstance(reduce_fx, str) else functions.get(reduce_fx)
    if name is None:
        raise MisconfigurationException(
            f"{where}: Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported, not {reduce_fx!r}.",
            fix="For anything else log a torchmetrics.Metric.",
        )
    return name


def batch_size_of(batch: object) -> tuple[int, bool]:
    """Return (number of samples, whether that is certain).

    It is certain if all tensors in the batch have the same first dimension, or the batch has ``num_graphs``. Otherwise
    it is the first dimension of the first tensor, or 1 without tensors.
    """
    if type(batch) is Tensor:
        return (batch.shape[0], True) if batch.dim() else (1, True)
    if type(batch) is tuple or type(batch) is list:
        # Fast path for (inputs, labels).
        size = -1
        for part in batch:
            if type(part) is not Tensor or not part.dim() or (size >= 0 and part.shape[0] != size):
                break
            size = part.shape[0]
        else:
            if size >= 0:
                return size, True
    graphs = getattr(batch, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs, True
    # Tensors first: a list of texts beside them may hold anything.
    sizes = [size for _, size in sorted(_sizes(batch), key=operator.itemgetter(0))]
    return (sizes[0], all(size == sizes[0] for size in sizes)) if sizes else (1, False)


def _sizes(data: Any) -> Iterator[tuple[bool, int]]:
    """Yield for each tensor, and each list of texts or numbers, whether it is a list, and its size."""
    if isinstance(data, Tensor):
        if data.dim():
            yield False, data.shape[0]
    elif isinstance(data, (list, tuple)) and data and all(isinstance(one, (str, int, float)) for one in data):
        yield True, len(data)
    else:
        is_known = isinstance(data, (Mapping, list, tuple)) or is_dataclass(data)
        # A batch of the program's own class; not an iterator, which can be read once, nor an array or a text.
        iterates = not is_known and hasattr(data, "__iter__") and not hasattr(data, "__next__")
        iterates = iterates and not isinstance(data, (str, bytes)) and not hasattr(data, "shape")
        for child in data if iterates else (child for _, child in children(data)):
            yield from _sizes(child)
