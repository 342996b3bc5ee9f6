"""The order of an epoch over all processes: draw it again as at its beginning, and divide its rest."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hasten.batching.samplers import PlannedBatches
from hasten.data.divided import NOBODY, GoesOn, Reads, share_of, users_dataset
from hasten.data.loader_parts import (
    ShardSampler,
    has_state,
    index_sampler,
    is_iterable,
    is_plain_shuffle,
    length_of,
    overrides_iter,
    stateful_sampler,
)
from hasten.data.memory.resident import is_resident

State = dict[str, Any]

# Everything that defines a position in the order: samples or batches, how many for each process, and for how many
# processes.
_DIVISION = ("unit", "batch_size", "replicas")
# Samplers whose order depends only on the number of samples and a seed.
_STREAM = "samples of a stream"
_DISTRIBUTED, _SHUFFLED, _IN_SEQUENCE = "distributed", "shuffled", "in sequence"


class NotKnown(Exception):
    """Raised if the order of an epoch, or the position in it, is not known; the message says why."""


@dataclass
class Rest:
    """The rest of an epoch that was begun with another number of processes, or another batch size."""

    # This process's index batches; before the position they are placeholders. None for an ``IterableDataset``.
    batches: list[Any] | None
    # As plain data what ``rest_of`` needs to come to the same again. ``"begun"`` is the position, in batches: as many
    # as an epoch of this loader has more than the rest.
    state: State

    @property
    def goes_on(self) -> GoesOn | None:
        """The position at which an ``IterableDataset`` continues; None for other datasets."""
        if self.batches is not None:
            return None
        drawn = self.state["drawn"]
        rng = drawn["start"]["rng"] if drawn["replicas"] == 1 else None
        by_workers = self.state.get("by_workers")
        return GoesOn(tuple(Reads(*each) for each in self.state["before"]), drawn["seed"], rng, by_workers)


def described(loader: Iterable[Any]) -> State:
    """Return as plain data how the batches of a loader are formed, over all processes."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise NotKnown(f"it is a {kind}")
    own_iterator = type(loader)._get_iterator is not DataLoader._get_iterator and not is_resident(loader)
    if overrides_iter(loader) or own_iterator or has_state(loader):
        raise NotKnown(f"{kind} makes its batches itself")
    if is_iterable(loader):
        return _described_stream(loader)
    sampler = index_sampler(loader)[1]
    if isinstance(sampler, PlannedBatches):
        settings, inner = sampler.settings(), getattr(sampler, "sampler", None)
        return {
            "unit": type(sampler).__name__,
            "sampler": type(inner).__name__,
            "batch_size": settings.get("batch_size", 1),
            "replicas": settings["num_replicas"] or 1,
            "items": len(sampler.lengths),
            "settings": settings,
        }
    return _described_samples(loader)


def _described_samples(loader: DataLoader[Any]) -> State:
    """Describe how the samplers of a loader draw and divide numbered samples."""
    sampler = index_sampler(loader)[1]
    drawing, base = _samplers_of(loader)
    name = type(base).__name__
    if stateful_sampler(loader) is not None or has_state(base):
        raise NotKnown(f"its sampler {name} keeps its position itself")
    length = length_of(base)
    if length is None:
        raise NotKnown(f"its sampler {name} has no length")
    found: State = {
        "unit": "samples" if type(sampler) is BatchSampler else "batches",
        "sampler": name,
        "batch_size": sampler.batch_size if type(sampler) is BatchSampler else 1,
        "replicas": getattr(drawing, "num_replicas", 1),
        "items": length,
    }
    if type(drawing) is DistributedSampler:
        dataset: Any = drawing.dataset
        shuffle, items = drawing.shuffle, len(dataset)
        return {**found, "sampler": _DISTRIBUTED, "items": items, "shuffle": shuffle, "seed": drawing.seed}
    if type(drawing) is ShardSampler:
        found["seed"] = drawing.seed
    elif hasattr(drawing, "num_replicas") and hasattr(drawing, "rank"):
        raise NotKnown(f"its sampler {name} divides the samples itself")
    if is_plain_shuffle(base) and base.generator is None:
        found["sampler"] = _SHUFFLED
    elif type(base) is SequentialSampler:
        found["sampler"] = _IN_SEQUENCE
    return found


def _described_stream(loader: DataLoader[Any]) -> State:
    """Describe how the processes take turns at the samples of an ``IterableDataset``."""
    share = share_of(loader)
    dataset = users_dataset(loader)
    name = type(dataset).__name__
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if share.is_part or share.decision == NOBODY or (several and share.num_replicas == 1):
        raise NotKnown(f"it reads the IterableDataset {name}, which divides its samples itself")
    if has_state(dataset):
        raise NotKnown(f"it reads the IterableDataset {name}, which keeps its position itself")
    return {
        "unit": _STREAM,
        "sampler": name,
        "batch_size": loader.batch_size or 1,
        "replicas": share.num_replicas,
        "items": 0,
        "workers": loader.num_workers,
        "seed": share.seed,
    }


def state_of(loader: Iterable[Any], start: State, last: Any, *, has_workers_from_before: bool) -> State:
    """Return as plain data what draws the order of the current epoch, which began in the random state ``start``.

    ``last`` are the indices of the last batch that is done, if they are known.
    """
    try:
        found = described(loader)
    except NotKnown as why:
        return {"unknown": str(why)}
    assert isinstance(loader, DataLoader)
    if found["unit"] == _STREAM:
        return {"drawn": {**found, "start": start}, "division": found, "by_workers": share_of(loader).by_workers}
    sampler = index_sampler(loader)[1]
    drawing = sampler if isinstance(sampler, PlannedBatches) else _samplers_of(loader)[0]
    drawn = {
        **found,
        "epoch": getattr(drawing, "epoch", None),
        "start": start,
        # How often a loader calls iter() of its sampler; with persistent workers it draws no seed in between.
        "iterations": 2 if loader.num_workers and not has_workers_from_before else 1,
        "draws_seed": not has_workers_from_before,
    }
    state = {"drawn": drawn, "division": {name: found[name] for name in _DIVISION}}
    return state if last is None or "settings" in found else {**state, "last": _checksum(last)}


def state_of_rest(rest: Rest, loader: Any) -> State:
    """Return as plain data what is known of the rest of an epoch by now."""
    known = share_of(loader).by_workers if rest.batches is None else None
    return rest.state if known is None else {**rest.state, "by_workers": known}


def rest_of(
    order: State | None,
    loader: Any,
    done: int,
    begins: Callable[[State], AbstractContextManager[None]],
    *,
    moved: bool = False,
) -> Rest | None:
    """Return the rest of the epoch that a state was saved in; None where the loader itself gives it.

    ``order`` is from ``state_of`` or an earlier ``Rest``; None if the state has none. ``done`` are the batches that
    each process had done, counted as the saved run did. ``begins`` returns a context with the random state in which an
    epoch began. ``moved`` says that another number of processes shared the data.
    """
    try:
        now = described(loader)
        if order is None:
            raise NotKnown("an earlier version wrote the checkpoint")
        if "unknown" in order:
            raise NotKnown(order["unknown"])
    except NotKnown:
        if moved:
            raise
        # As far as is known, nothing has changed.
        return None
    drawn, division = order["drawn"], order["division"]
    is_first = "before" not in order
    if drawn["unit"] == now["unit"] == _STREAM:
        return _rest_of_stream(order, loader, now, done, moved=moved)
    same = all(division[name] == now[name] for name in _DIVISION)
    compared = now.keys() if moved else now.keys() - {"items"}
    if is_first and same and all(drawn.get(name) == now[name] for name in compared):
        return None
    _check_same_data(drawn, now)
    with begins(drawn["start"]):
        items, per_step = _drawn_again(drawn, loader)
    if same and not is_first:
        return Rest([None] * order["begun"] + _divided(items[order["before"] :], loader), order)
    if is_first:
        before = sum(per_step[:done])
        # The state is that of this process, or of the first one if another number of processes saved it. Where the
        # processes could not share the last samples equally, some of them had first ones again.
        rank = 0 if moved else getattr(_samplers_of(loader)[0], "rank", 0)
        is_shared = 0 < done <= len(per_step) and per_step[done - 1] % drawn["replicas"] == 0
        if is_shared and "last" in order:
            last = items[before - per_step[done - 1] + rank : before : drawn["replicas"]]
            if order["last"] != _checksum(last if drawn["unit"] == "samples" else last[0]):
                raise NotKnown(f"its sampler {drawn['sampler']} draws another order than it did")
    else:
        before = order["before"] + (done - order["begun"]) * division["batch_size"] * division["replicas"]
    rest = _divided(items[before:], loader)
    begun = max(0, len(loader) - len(rest))
    division = {name: now[name] for name in _DIVISION}
    return Rest([None] * begun + rest, {"drawn": drawn, "division": division, "before": before, "begun": begun})


def _rest_of_stream(order: State, loader: DataLoader[Any], now: State, done: int, *, moved: bool) -> Rest | None:
    drawn, division, is_first = order["drawn"], order["division"], "before" not in order
    same = all(division[name] == now[name] for name in (*_DIVISION, "workers"))
    if same and not is_first:
        return Rest(None, order)
    if not moved and (not same or drawn["seed"] == now["seed"]):
        # The same amount that was read is read again. The loader says itself that the number of workers has changed.
        return None
    name = type(users_dataset(loader)).__name__
    if drawn["replicas"] == 1 and drawn["workers"]:
        raise NotKnown(f"the workers of one process read the IterableDataset {name}, each with its own random numbers")
    by_workers = order.get("by_workers")
    if division["workers"] > 1 and now["workers"] < 2 and by_workers is not False:
        raise NotKnown(f"the IterableDataset {name} may divide its samples among {division['workers']} workers itself")
    begun, workers = order.get("begun", 0), max(1, division["workers"])
    reads = Reads(division["replicas"], workers, division["batch_size"], done - begun)
    before = [*order.get("before", ()), list(reads)]
    samples = sum(Reads(*each).samples for each in before)
    begun = samples // (now["batch_size"] * now["replicas"])
    return Rest(None, {"drawn": drawn, "division": now, "before": before, "begun": begun, "by_workers": by_workers})


def _check_same_data(drawn: State, now: State) -> None:
    if drawn["unit"] != now["unit"]:
        raise NotKnown(f"its batches come from {now['unit']}, and came from {drawn['unit']}")
    if drawn["items"] != now["items"]:
        raise NotKnown(f"its sampler gives {now['items']} {now['unit']} an epoch, and gave {drawn['items']}")
    known = (_DISTRIBUTED, _SHUFFLED, _IN_SEQUENCE)
    if drawn["sampler"] not in known and drawn["sampler"] != now["sampler"]:
        raise NotKnown(f"its sampler is {now['sampler']}, and was {drawn['sampler']}")


def _drawn_again(drawn: State, loader: DataLoader[Any]) -> tuple[list[Any], list[int]]:
    """Return the samples or batches of all processes, none repeated to have enough, and how many each step reads."""
    sampler, epoch = index_sampler(loader)[1], drawn["epoch"]
    if isinstance(sampler, PlannedBatches):
        planned = sampler.with_settings(drawn["settings"])
        planned.set_epoch(epoch)
        _draw_seed(loader, drawn)
        steps = planned.pieces()
        return list(itertools.chain.from_iterable(steps)), list(map(len, steps))
    count, order = drawn["items"], _samplers_of(loader)[1]
    if drawn["sampler"] == _DISTRIBUTED:
        order = DistributedSampler(range(count), 1, 0, shuffle=drawn["shuffle"], seed=drawn["seed"])  # type: ignore[arg-type]
    elif drawn["sampler"] == _SHUFFLED:
        order = RandomSampler(range(count))
    elif drawn["sampler"] == _IN_SEQUENCE:
        order = range(count)
    elif drawn["replicas"] > 1:
        order = ShardSampler(order, 1, 0, seed=drawn["seed"], repeat=False)
    if epoch is not None and hasattr(order, "set_epoch"):
        order.set_epoch(epoch)
    if drawn["unit"] == "samples":
        # Like the loader's own iterator, it draws nothing before the first batch.
        order = BatchSampler(order, 1024, drop_last=False)
    drawing = iter(order)
    _draw_seed(loader, drawn)
    if drawn["iterations"] == 2:
        drawing = iter(order)
    if drawn["unit"] == "samples":
        drawing = itertools.chain.from_iterable(drawing)
    # Some samplers give more than their length.
    items = list(itertools.islice(drawing, 2 * count + 1))
    if len(items) > 2 * count:
        raise NotKnown(f"its sampler {drawn['sampler']} goes on after its length of {count}")
    each = drawn["batch_size"] * drawn["replicas"]
    return items, [min(each, len(items) - begin) for begin in range(0, len(items), each)]


def _draw_seed(loader: DataLoader[Any], drawn: State) -> None:
    """Draw the seed of the workers, as a loader without any does too."""
    if drawn["draws_seed"]:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _divided(items: list[Any], loader: DataLoader[Any]) -> list[Any]:
    """Return this process's batches of samples or batches, by the rules of an epoch that begins with them."""
    sampler = index_sampler(loader)[1]
    if isinstance(sampler, PlannedBatches):
        return sampler.divided(items)
    drawing = _samplers_of(loader)[0]
    replicas, rank = getattr(drawing, "num_replicas", 1), getattr(drawing, "rank", 0)
    if getattr(drawing, "drop_last", False):
        items = items[: len(items) // replicas * replicas]
    elif items:
        items = list(itertools.islice(itertools.cycle(items), -(-len(items) // replicas) * replicas))
    items = items[rank::replicas]
    return list(BatchSampler(items, sampler.batch_size, sampler.drop_last)) if type(sampler) is BatchSampler else items


def _samplers_of(loader: DataLoader[Any]) -> tuple[Any, Any]:
    """Return the sampler that divides samples, or batches, among processes, and the one that orders them."""
    sampler = index_sampler(loader)[1]
    drawing = sampler.sampler if type(sampler) is BatchSampler else sampler
    return drawing, drawing.sampler if type(drawing) is ShardSampler else drawing


def _checksum(indices: Any) -> int:
    return zlib.crc32(repr(indices).encode())
