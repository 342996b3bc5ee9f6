"""One value logged under one name: its latest value and what the epoch has gathered of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hasten._lib.errors import MisconfigurationException

if TYPE_CHECKING:
    from hasten.hooks import Hook

Options = tuple[Any, ...]

# Of a call of ``self.log``, for the values that follow a resume.
_KEPT = ("on_step", "on_epoch", "prog_bar", "logger", "reduce", "sync")


class Owner(Protocol):
    """What a meter needs of the meters it belongs to."""

    batch_size: int
    on_first_process: bool

    def find_batch_size(self, name: str) -> int:
        """Return how many samples the batch in hand has."""


class Meter:
    """One value logged under one name in one hook: its latest value and what the epoch has gathered."""

    __slots__ = (
        "enable_graph",
        "loader_suffix",
        "logger",
        "metric",
        "name",
        "on_epoch",
        "on_step",
        "options",
        "owner",
        "prog_bar",
        "reduce",
        "sync",
        "total",
        "value",
        "weight",
        "zero_only",
    )

    def __init__(self, name: str, owner: Owner) -> None:
        self.name = name
        self.owner = owner
        self.options: Options | None = None
        self.loader_suffix = ""
        self.metric: Any = None
        self.on_step = self.on_epoch = True
        self.prog_bar = self.logger = False
        self.reduce = "mean"
        self.sync = self.enable_graph = self.zero_only = False
        self.reset()

    def reset(self) -> None:
        """Forget the epoch."""
        self.value: Any = None
        self.total: Any = None
        self.weight: Any = 0
        if self.metric is not None:
            self.metric.reset()

    @property
    def step_name(self) -> str:
        fork = "_step" if self.on_step and self.on_epoch else ""
        return f"{self.name}{fork}{self.loader_suffix}"

    @property
    def epoch_name(self) -> str:
        fork = "_epoch" if self.on_step and self.on_epoch else ""
        return f"{self.name}{fork}{self.loader_suffix}"

    @property
    def plain_name(self) -> str:
        return f"{self.name}{self.loader_suffix}"

    def add(self, value: Any, batch_size: Any) -> None:
        """Take one value; it stays on its device."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise _not_scalar(self.name, value)
            # A copy: the caller may change the tensor in place before it is published.
            value = value.clone() if self.enable_graph else value.detach().clone()
            if value.dim():
                value = value.reshape(())
        elif type(value) is not float and type(value) is not int:
            value = self._unusual(value)
            if value is None:
                return
        if self.zero_only and not self.owner.on_first_process:
            return
        self.value = value
        if not self.on_epoch:
            return
        reduce = self.reduce
        if reduce == "mean":
            if batch_size is None:
                batch_size = self.owner.batch_size or self.owner.find_batch_size(self.name)
            self.weight += batch_size
        else:
            batch_size = 1
            self.weight += 1
        total = self.total
        if total is None:
            self.total = _first(value, batch_size, reduce)
        elif reduce == "max" or reduce == "min":
            self.total = _extreme(total, value, reduce)
        elif (
            type(batch_size) is int
            and isinstance(total, Tensor)
            and isinstance(value, Tensor)
            # A sum on the CPU takes nothing from a device in place; their sum is a new one, on the device.
            and (value.is_cpu or not total.is_cpu)
        ):
            total.add_(value, alpha=batch_size)
        else:
            self.total = total + _first(value, batch_size, reduce)

    def _unusual(self, value: Any) -> Any:
        if is_metric(value):
            if self.metric is None:
                self.metric = value
            elif self.metric is not value:
                raise MisconfigurationException(
                    f"self.log({self.name!r}, metric): another {type(value).__name__} object than before. The epoch's "
                    "value is in one object: make it once, as an attribute of the module (self.metric = ... in "
                    "__init__), update and log that one."
                )
            self.value = value
            self.weight = 1
            return None
        if getattr(value, "size", 1) != 1:
            raise _not_scalar(self.name, value)
        if isinstance(value, bool) or hasattr(value, "__float__"):
            return float(value)
        raise ValueError(
            f"self.log({self.name!r}, ...): cannot log a value of type {type(value).__name__}; "
            "give a number, a tensor of one element, or a torchmetrics.Metric."
        )

    def step_value(self) -> Any:
        """Return the latest value, or None when there is none."""
        if self.metric is not None:
            return self.metric._forward_cache
        return self.value

    def epoch_value(self) -> tuple[Any, Any, str]:
        """Return (numerator, weight, reduction); a metric is computed and has weight None."""
        if self.metric is not None:
            value = self.metric.compute()
            if (isinstance(value, Tensor) and value.numel() != 1) or isinstance(value, Mapping):
                raise ValueError(
                    f"self.log({self.name!r}, metric): the metric {type(self.metric).__name__} computes "
                    f"{describe(value)}, and only a value of one element can be logged. "
                    "Call compute() yourself at the end of the epoch and log the parts."
                )
            return (value.reshape(()) if isinstance(value, Tensor) else value), None, "metric"
        return self.total, self.weight, self.reduce

    @property
    def has_epoch_value(self) -> bool:
        return self.value is not None if self.metric is not None else self.total is not None

    def state_dict(self) -> dict[str, Any]:
        """Return what an interrupted epoch has gathered, as plain data and tensors on the CPU; no metric."""
        kept = {name: getattr(self, name) for name in ("name", *_KEPT)}
        value = None if self.metric is not None else _plain(self.value)
        return {**kept, "value": value, "total": _plain(self.total), "weight": _plain(self.weight)}

    def load_state_dict(self, state: Mapping[str, Any], metric: Any, device: torch.device) -> None:
        """Take back what ``state_dict`` returned.

        Args:
            state: that.
            metric: the metric that was logged, which has its own state; None where a value was.
            device: where values are from now on.

        """
        for name in _KEPT:
            setattr(self, name, state[name])
        self.enable_graph = self.zero_only = False
        self.metric = metric
        self.value = _on(device, state["value"]) if metric is None else metric
        self.total, self.weight = _on(device, state["total"]), _on(device, state["weight"])


class Context:
    """One hook in which values are logged."""

    __slots__ = ("by_loader", "loader_idx", "meters", "row")

    def __init__(self, row: Hook) -> None:
        self.row = row
        self.loader_idx: int | None = None
        self.by_loader: dict[int | None, dict[str, Meter]] = {}
        self.meters: dict[str, Meter] = self.by_loader.setdefault(None, {})

    def enter_loader(self, loader_idx: int | None) -> None:
        """Keep the values of this dataloader apart from those of the others."""
        self.loader_idx = loader_idx
        self.meters = self.by_loader.setdefault(loader_idx, {})

    def all_meters(self) -> Iterable[Meter]:
        for meters in self.by_loader.values():
            yield from meters.values()


def _first(value: Any, weight: Any, reduce: str) -> Any:
    if isinstance(value, Tensor):
        start = value
        if not value.is_floating_point():
            # Counts stay exact, where the device has doubles.
            start = value.to(_widest(value))
        elif value.dtype not in (torch.float32, torch.float64):
            # At least single precision: a sum of thousands of half-precision values stops growing.
            start = value.to(torch.float32)
        return start * weight if reduce == "mean" else start.clone()
    return value * weight


def _extreme(total: Any, value: Any, reduce: str) -> Any:
    if isinstance(total, Tensor) or isinstance(value, Tensor):
        pick = torch.maximum if reduce == "max" else torch.minimum
        device = value.device if isinstance(value, Tensor) else total.device
        return pick(_comparable(total, device), _comparable(value, device))
    return max(total, value) if reduce == "max" else min(total, value)


def _comparable(value: Any, device: torch.device) -> Tensor:
    """Return a number, or a tensor of whole numbers, such that a fraction beside it keeps its value, and it too."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(device)
    return torch.as_tensor(
        value, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device
    )


def _widest(value: Tensor) -> torch.dtype:
    return torch.float32 if value.device.type == "mps" else torch.float64


def _not_scalar(name: str, value: Any) -> ValueError:
    kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return ValueError(
        f"self.log({name!r}, ...): a logged value must have one element, got {kind}{shape}. Reduce it first, for "
        f"instance self.log({name!r}, value.mean()), or log each element under a name of its own."
    )


def is_metric(value: Any) -> bool:
    # Importing torchmetrics costs most of a second: a value can only be a Metric where it was imported.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict with " + ", ".join(map(repr, list(value)[:8]))
    return f"a {type(value).__name__}"


def reduction(reduce_fx: Any, where: str) -> str:
    """Return the name of a reduction, however it was given."""
    named = {"mean": "mean", "avg": "mean", "average": "mean", "sum": "sum", "min": "min", "max": "max"}
    functions = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}
    functions |= {max: "max", min: "min", sum: "sum"}
    found = named.get(reduce_fx.lower()) if isinstance(reduce_fx, str) else functions.get(reduce_fx)
    if found is None:
        raise MisconfigurationException(
            f"{where}: reduce_fx={reduce_fx!r} is not known. Use 'mean', 'sum', 'min' or 'max'; for anything "
            "else log a torchmetrics.Metric."
        )
    return found


def differences(old: Options, new: Options) -> str:
    """Return in which arguments of ``self.log`` two calls differ."""
    names = (
        "prog_bar",
        "logger",
        "on_step",
        "on_epoch",
        "reduce_fx",
        "enable_graph",
        "sync_dist",
        "sync_dist_group",
        "add_dataloader_idx",
        "metric_attribute",
        "rank_zero_only",
    )
    return ", ".join(
        f"{name}={before!r} then {after!r}"
        for name, before, after in zip(names, old, new, strict=True)
        if before != after
    )


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
