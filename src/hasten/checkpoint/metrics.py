"""The states of torchmetrics, including wrappers and collections, as part of a checkpoint."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import move_to
from hasten.extend.origin import comes_from, mentions

# The attributes that objects had when their first fit began, by id. The program makes the objects, so a checkpoint
# holds only what has changed since.
_first_seen: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}

# These go on over all epochs, such as the best value so far.
_GO_ON = ("torchmetrics.aggregation", "torchmetrics.wrappers")
# How many epochs are looked at for metrics that are not reset.
_EPOCHS = 3


class ModuleMetrics:
    """The torchmetrics of a module, its sub-modules, and lists and dicts of theirs, as a part of a checkpoint.

    ``start_again`` returns the ids of metrics that are reset before they are used next.
    """

    def __init__(self, module: nn.Module, start_again: Callable[[], set[int]]) -> None:
        self._module = module
        self._start_again = start_again
        # Updates of the metrics that were computed when an epoch ended, by id. Only the first epochs are looked at.
        self._updates: dict[int, int] = {}
        self._epochs = 0

    def end_epoch(self) -> None:
        """Warn of metrics that were computed in two epochs and not reset between: their values mix the epochs."""
        self._epochs += 1
        if self._epochs > _EPOCHS:
            return
        module: Any = self._module
        before, found = self._updates, {name: (id(metric), metric._update_count) for name, metric in self._computed()}
        self._updates = dict(found.values())
        never_reset = [name for name, (key, count) in found.items() if count > before.get(key, count)]
        parts = (each for each in module.modules() if not _is_torchmetrics(each))
        if never_reset and not mentions("reset", *parts, *module.trainer.callbacks):
            self._epochs = _EPOCHS
            rank_zero_warn(
                f"{type(self._module).__name__} calls compute() of {', '.join(never_reset[:6])} after each epoch, and "
                "reset() never: the value is that of all epochs so far.",
                PossibleUserWarning,
                fix=f"Write self.{never_reset[0]}.reset() after compute(), or give the metric itself to self.log.",
            )

    def _computed(self) -> Iterator[tuple[str, Any]]:
        """Yield torchmetrics' own metrics that have a value now, with their names; those of programs may go on."""
        logged, found = self._start_again(), list(metrics_of(self._module))
        go_on = tuple(f"{name}." for name, metric in found if comes_from(type(metric), *_GO_ON))
        for name, metric in found:
            is_own = _is_metric(metric) and comes_from(type(metric), "torchmetrics") and id(metric) not in logged
            # What is in a wrapper goes on, too.
            if is_own and metric._computed is not None and not f"{name}.".startswith(go_on):
                yield name, metric

    def remember(self) -> None:
        """Remember the attributes of the metrics before training changes them; once for each."""
        for _, metric in metrics_of(self._module):
            key = id(metric)
            if key not in _first_seen:
                _first_seen[key] = (
                    weakref.ref(metric, lambda _, key=key: _first_seen.pop(key, None)),  # type: ignore[misc]
                    {name: _copied(value) for name, value in _attributes(metric).items()},
                )

    def state_dict(self, *, copied: bool = False) -> dict[str, Any]:
        """Return the state of each metric, by its name in the module; ``copied``, further updates do not change it.

        A state consists of the states that ``Metric.add_state`` knows, and of every other attribute of plain data that
        has changed since training began, such as the extremes of a ``MinMaxMetric`` or the groups of a
        ``MetricCollection``.
        """
        leave_out = self._start_again()
        starting_again = {
            id(child) for _, metric in metrics_of(self._module) if id(metric) in leave_out for child in metric.modules()
        }
        take = _copied if copied else lambda value: value
        found = {}
        for name, metric in metrics_of(self._module):
            entry: dict[str, Any] = {}
            if changed := _changed(metric):
                entry["attributes"] = {key: take(value) for key, value in changed.items()}
            if isinstance(metric, nn.ModuleList):
                entry["length"] = len(metric)
            if _is_metric(metric) and metric._update_count and id(metric) not in starting_again:
                entry["state"] = {key: take(getattr(metric, key)) for key in metric._defaults}
                entry["update_count"] = metric._update_count
            if id(metric) in leave_out and entry:
                entry["reset"] = True
            if entry:
                found[name] = entry
        return found

    def joined(self, states: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
        """Join the states of several processes into one; also return the names of metrics that cannot be joined.

        These metrics start again. Other states are joined by the ``dist_reduce_fx`` that a metric declares.
        """
        present, lost = dict(metrics_of(self._module)), []
        result: dict[str, Any] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            found = [state[name] for state in states if name in state]
            entry = result[name] = dict(found[0])
            gathered = [one for one in found if "state" in one]
            if not gathered:
                continue
            reductions = getattr(present.get(name), "_reductions", {})
            try:
                entry["state"] = {
                    key: _joined([one["state"][key] for one in gathered], reductions.get(key))
                    for key in gathered[0]["state"]
                }
                entry["update_count"] = sum(one["update_count"] for one in gathered)
            except _CannotJoinError:
                lost.append(name)
                entry.pop("state", None)
        return result, lost

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; metrics it does not name are reset."""
        for name, metric in metrics_of(self._module):
            _grow(metric, stored.get(name, {}).get("length", 0))
        present = dict(metrics_of(self._module))
        for metric in present.values():
            if _is_metric(metric):
                metric.reset()
        for name, metric in present.items():
            entry = stored.get(name, {})
            device = metric.device if _is_metric(metric) else torch.device("cpu")
            for key, value in (entry.get("state", {}) | entry.get("attributes", {})).items():
                setattr(metric, key, move_to(_copied(value), device))
            if "state" in entry:
                metric._update_count = entry["update_count"]
        for name, entry in stored.items():
            if entry.get("reset") and name in present:
                present[name].reset()
        missing = [name for name, entry in stored.items() if "state" in entry and name not in present]
        if missing:
            rank_zero_warn(
                f"The checkpoint holds what the metrics {missing[:6]} have gathered, and "
                f"{type(self._module).__name__} has none of these names: they start again.",
                fix="Make in __init__ or setup() all metrics that the saved run had.",
            )


class Gathered:
    """The state of a metric up to now; the metric may be reset afterwards."""

    def __init__(self, metric: nn.Module) -> None:
        self._metrics = ModuleMetrics(metric, set)
        self._state = self._now()

    def _now(self) -> dict[str, Any]:
        # New lists, of the same tensors: a reset empties the lists and replaces the tensors.
        state: dict[str, Any] = torch_private.pytree.tree_map(lambda leaf: leaf, self._metrics.state_dict())
        return state

    def is_all(self) -> bool:
        """Return whether the metric has gathered nothing since it was reset."""
        return not any("state" in entry for entry in self._metrics.state_dict().values())

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the block, the metric has this state alone; changes made to it then are kept."""
        now = self._now()
        self._metrics.load_state_dict(self._state)
        try:
            yield
        finally:
            self._state = self._now()
            self._metrics.load_state_dict(now)

    def give_back(self, others: Sequence[Gathered] = ()) -> None:
        """Add this state and ``others`` to the metric's present state, if they can be joined."""
        joined, lost = self._metrics.joined([self._state, *(other._state for other in others), self._now()])
        if not lost:
            self._metrics.load_state_dict(joined)


class _CannotJoinError(Exception):
    """Raised for a metric that joins the states of processes in its own way, while it computes."""


def _joined(values: list[Any], reduction: Any) -> Any:
    """Return the joined states of several processes."""
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if reduction is None or not comes_from(reduction, "torchmetrics"):
        raise _CannotJoinError
    if all(value.dim() for value in values) and reduction.__name__ == "dim_zero_cat":
        return torch.cat(values)
    return reduction(torch.stack(values))


# -- which objects


def metrics_of(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield metrics, and torchmetrics' containers of them, with their names."""
    if "torchmetrics" not in sys.modules:
        return
    for name, child in module.named_modules():
        if _is_torchmetrics(child):
            yield name, child
            continue
        # Metrics in a plain list or dict are modules that the module does not know.
        for attribute, value in list(vars(child).items()):
            inside: Iterable[tuple[Any, Any]] = ()
            if isinstance(value, (list, tuple)):
                inside = enumerate(value)
            elif isinstance(value, dict) and attribute not in _MODULE_ATTRIBUTES:
                inside = value.items()
            for key, item in inside:
                if isinstance(item, nn.Module) and _is_torchmetrics(item):
                    place = f"{name}.{attribute}[{key!r}]".lstrip(".")
                    for inner_name, inner in item.named_modules():
                        if _is_torchmetrics(inner):
                            yield f"{place}.{inner_name}".rstrip("."), inner


def _is_torchmetrics(thing: object) -> bool:
    return _made_by_torchmetrics(type(thing))  # type: ignore[arg-type]


@functools.cache
def _made_by_torchmetrics(kind: type) -> bool:
    return any(comes_from(base, "torchmetrics") for base in kind.__mro__)


def _is_metric(thing: Any) -> bool:
    return isinstance(thing, sys.modules["torchmetrics"].Metric)


def _grow(container: Any, length: int) -> None:
    """Restore the metrics that a MetricTracker had made."""
    base = getattr(container, "_base_metric", None)
    if base is not None and isinstance(container, nn.ModuleList):
        while len(container) < length:
            container.append(copy.deepcopy(base))


# -- which attributes

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@functools.cache
def _known_attributes() -> frozenset[str]:
    """Return the attributes that every metric has: of torch, or of torchmetrics' own machinery."""

    class Empty(sys.modules["torchmetrics"].Metric):  # type: ignore[misc]
        def update(self) -> None: ...

        def compute(self) -> None: ...

    return frozenset(vars(Empty())) | _MODULE_ATTRIBUTES


def _attributes(metric: Any) -> dict[str, Any]:
    states = getattr(metric, "_defaults", {})
    return {
        name: value
        for name, value in vars(metric).items()
        if name not in states and name not in _known_attributes() and _is_plain(value)
    }


def _changed(metric: Any) -> dict[str, Any]:
    reference, before = _first_seen.get(id(metric), (None, {}))
    if reference is None or reference() is not metric:
        before = {}
    return {
        name: value
        for name, value in _attributes(metric).items()
        if name not in before or not _equal(value, before[name])
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, (str, int, float)) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str) or type(value) is Tensor


def _equal(one: Any, other: Any) -> bool:
    leaves, structure = torch_private.pytree.tree_flatten(one)
    others, other_structure = torch_private.pytree.tree_flatten(other)
    return structure == other_structure and all(map(_equal_leaves, leaves, others))


def _equal_leaves(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _copied(value: Any) -> Any:
    return torch_private.pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)
