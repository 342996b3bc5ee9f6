"""Check that all processes of a run train the same model in the same way; the error names what differs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import platform
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hasten._lib import VERSION
from hasten._lib.errors import make_error
from hasten.extend.origin import full_name, package_of
from hasten.machine import agreement

# By name, what must be the same on all processes: plain data.
Facts = dict[str, Any]

_POLL_SECONDS = (0.001, 0.05)
# How often to check for processes that have left.
_LOOK_SECONDS = 1.0
_MOST_NAMED = 3
# Backends of groups without a store: MPI connects by itself, and a simulated group has no other processes.
_WITHOUT_STORE = ("mpi", "fake")
_ABSENT = "absent"


def require_same(place: str, call: str, facts: Mapping[str, Any]) -> None:
    """Wait for all processes, and compare what they do: one digest each, and all facts only if digests differ.

    ``place`` is a name that is used once; ``call`` is what is called, such as "Trainer.fit()". Facts are plain data.
    """
    if torch.distributed.get_backend() in _WITHOUT_STORE:
        return
    store, rank, size = agreement.store(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = {"call": call, **facts}
    text = json.dumps(own)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        if store.compare_set(f"{place}/digest", "", digest).decode() != digest:
            store.add(f"{place}/others", 1)
        store.set(f"{place}/arrived/{rank}", call)
        if store.add(f"{place}/arrived", 1) == size:
            store.set(f"{place}/all", "1")
        _wait(store, [f"{place}/all"], place, call)
        if store.add(f"{place}/others", 0) == 0:
            return
        store.set(f"{place}/facts/{rank}", text)
        keys = [f"{place}/facts/{other}" for other in range(size)]
        _wait(store, keys, place, call)
        by_rank = [json.loads(store.get(key)) for key in keys]
    except getattr(torch.distributed, "DistError", ConnectionError) as error:
        raise make_error(RuntimeError, f"{call}: the first process has left the run meanwhile.", fix=_ALIKE) from error
    raise RuntimeError(_difference(call, by_rank))


_modules = itertools.count()
_optimizers = itertools.count()


def require_same_module(call: str, module: nn.Module) -> None:
    """Check that all processes give the same module to ``call``; see ``require_same``."""
    require_same(f"given/{next(_modules)}", call, of_module(module))


def require_same_optimizers(call: str, optimizers: Sequence[Any], schedulers: Sequence[Any] = ()) -> None:
    """Check that all processes give the same optimizers and schedulers to ``call``; see ``require_same``."""
    require_same(f"optimizers given/{next(_optimizers)}", call, of_optimizers(optimizers, schedulers))


_START = "Start all of them with the same program, arguments and packages."
_ALIKE = "Call fit, validate, test and predict on all processes, in the same order."


def _wait(store: Any, keys: list[str], place: str, call: str) -> None:
    """Wait until all keys are there; the watchdog ends the run if that lasts too long."""
    pause, longest = _POLL_SECONDS
    next_look = time.monotonic() + _LOOK_SECONDS
    while not store.check(keys):
        time.sleep(pause)
        pause = min(1.5 * pause, longest)
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + _LOOK_SECONDS
        everybody = range(torch.distributed.get_world_size())
        gone = [rank for rank in everybody if agreement.has_left(rank) and not store.check([f"{place}/arrived/{rank}"])]
        if gone:
            verb = "has" if len(gone) == 1 else "have"
            raise make_error(
                RuntimeError,
                f"{call} is called on rank {torch.distributed.get_rank()}, and {agreement.format_ranks(gone)} {verb} "
                "ended the program without it.",
                fix=_ALIKE,
            )


def _difference(call: str, by_rank: list[Facts]) -> str:
    calls = by_value([facts["call"] for facts in by_rank])
    if len(calls) > 1:
        told = " and ".join(f"{value} is called on {agreement.format_ranks(ranks)}" for value, ranks in calls)
        return f"{told}. {_ALIKE}"
    names = list(dict.fromkeys(name for facts in by_rank for name in facts))
    different = [name for name in names if len(by_value([facts.get(name, _ABSENT) for facts in by_rank])) > 1]
    if not different:
        # DDP numbers parameters by their order.
        orders = by_value([list(facts) for facts in by_rank])
        (first, _), (second, ranks) = orders[:2]
        name, other = next(pair for pair in zip(first, second, strict=True) if pair[0] != pair[1])
        return f"{call}: {name} of rank 0 has the place of {other} on {agreement.format_ranks(ranks)}. {_START}"
    told = "; ".join(
        f"{name} is "
        + " and ".join(
            f"{_shown(value)} on {agreement.format_ranks(ranks)}"
            for value, ranks in by_value([facts.get(name, _ABSENT) for facts in by_rank])
        )
        for name in different[:_MOST_NAMED]
    )
    more = f"; and {len(different) - _MOST_NAMED} more differ" if len(different) > _MOST_NAMED else ""
    return f"{call}: the processes of this run differ: {told}{more}. {_START}"


def by_value(values: list[Any]) -> list[tuple[Any, list[int]]]:
    """Return each value with the ranks that have it."""
    found: dict[str, tuple[Any, list[int]]] = {}
    for rank, value in enumerate(values):
        found.setdefault(json.dumps(value, sort_keys=True), (value, []))[1].append(rank)
    return list(found.values())


def _shown(value: Any) -> str:
    text = value if value == _ABSENT else repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


# -- facts


def versions() -> Facts:
    """Return the versions of the packages that a run depends on."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hasten's version": VERSION, "torch's version": torch.__version__, "Python's version": python}


def plain(value: object) -> Any:
    """Return ``value`` as plain data: numbers, strings and collections unchanged, other objects by their class."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value else "nan"
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if package_of(type(value)) in ("datetime", "enum") or isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return name_of(value if isinstance(value, type) else type(value))


def name_of(kind: type) -> str:
    """Return the name of a class, with its module unless that is the program."""
    return full_name(kind).removeprefix("__main__.")


def of_fields(arguments: Any, *, but: Container[str] = ()) -> Facts:
    """Return the fields of a dataclass as plain data, under their names, without some of them."""
    fields = (field.name for field in dataclasses.fields(arguments))
    return {f"`{name}`": plain(getattr(arguments, name)) for name in fields if name not in but}


def of_module(module: nn.Module) -> Facts:
    """Return a description of a module: its class, and dtype and shape of its parameters and buffers."""
    facts: Facts = {"the module": name_of(type(module))}
    for name, parameter in module.named_parameters():
        facts[f"the parameter {name}"] = _tensor(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in module.named_buffers():
        facts[f"the buffer {name}"] = _tensor(buffer)
    return facts


def _tensor(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialized"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def of_optimizers(optimizers: Iterable[Any], schedulers: Iterable[Any] = ()) -> Facts:
    """Return classes of optimizers and schedulers, and the numbers that they step with."""
    facts: Facts = {}
    for index, optimizer in enumerate(optimizers):
        facts[f"optimizer {index}"] = name_of(type(optimizer))
        for position, group in enumerate(optimizer.param_groups):
            # Tensors would have to be read from the device.
            numbers = {
                key: plain(value) for key, value in group.items() if key != "params" and not isinstance(value, Tensor)
            }
            facts |= {f"{key} of group {position} of optimizer {index}": value for key, value in numbers.items()}
    for index, scheduler in enumerate(schedulers):
        facts[f"scheduler {index}"] = name_of(type(scheduler))
        facts |= {f"{key} of scheduler {index}": value for key, value in _settings_of(scheduler).items()}
    return facts


# Only one process may print.
_SCHEDULERS_MAY_DIFFER = ("optimizer", "verbose", "rank", "local_rank", "global_rank")
# Schedulers of schedulers of schedulers; beyond that they are compared by class.
_DEEPEST = 3


def _settings_of(scheduler: Any, depth: int = 0) -> Facts:
    # Not its state_dict: that has no functions, and may be slow where the program defines it.
    attributes = getattr(scheduler, "__dict__", {})
    return {name: _setting(value, depth) for name, value in attributes.items() if name not in _SCHEDULERS_MAY_DIFFER}


def _setting(value: Any, depth: int) -> Any:
    """Return an attribute of a scheduler as plain data: of functions the name, of other schedulers their attributes."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and depth < _DEEPEST:
        return [name_of(type(value)), _settings_of(value, depth + 1)]
    if isinstance(value, functools.partial):
        return [_setting(part, depth) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, (list, tuple)):
        return [_setting(item, depth) for item in value]
    if callable(value) and not isinstance(value, (type, Tensor)) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return plain(value)
