"""Redistribute the per-process state of a checkpoint when a run resumes with another number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hasten.checkpoint.contents import share_of

State = dict[str, Any]


def by_share(ranks: Sequence[State]) -> list[State]:
    """Return the state of the first process that read each share of the data."""
    found = {share_of(state, index, ranks)[0]: state for index, state in reversed(list(enumerate(ranks)))}
    return [found[number] for number in sorted(found)]


def joined(shares: Sequence[State], share: tuple[int, int], join_metrics: Callable[[Sequence[State]], State]) -> State:
    """Return the state of a process that reads a share of the data, of another number of shares than before.

    What the interrupted epoch has gathered is divided among the processes, so that together they have all of it.
    Everything else is taken from one of them. ``share`` is the index of the process's part of the data, and the number
    of parts; ``shares`` come from ``by_share``.
    """
    number, replicas = share
    state = shares[number % len(shares)]
    weights = [one["window_weight"] for one in shares]
    is_weighed = all(weight is not None for weight in weights)
    return {
        **state,
        "data": shares[0]["data"],
        "values": _joined_values([one["values"] for one in shares], number, replicas),
        "metrics": join_metrics([one.get("metrics", {}) for one in shares[number::replicas]]),
        "window_weight": _sum(weights) / replicas if is_weighed else None,
        "evaluations": {},
    }


def _joined_values(states: Sequence[State], number: int, replicas: int) -> State:
    """Return one process's part of what ``self.log`` has accumulated on all."""
    entries: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for state in states:
        for entry in state["train"]:
            entries.setdefault((entry["hook"], entry["name"]), []).append(entry)
    train = []
    for found in entries.values():
        if len(found) == len(states):
            train.append(_joined_value(found, replicas))
        elif number == 0:
            # Logged by some processes only, such as the first.
            train.append(_joined_value(found, 1))
    return {**states[0], "train": train}


def _joined_value(found: Sequence[Mapping[str, Any]], parts: int) -> State:
    totals = [entry["total"] for entry in found]
    if found[0]["metric"] is not None or any(total is None for total in totals):
        return dict(found[0])
    reduce, latest = found[0]["reduce"], found[0]["value"]
    extreme = {"max": max, "min": min}.get(reduce)
    if found[0]["sync"]:
        # The row of the latest step may not be written yet: it has the value of all processes.
        values = [entry["value"] for entry in found]
        latest = extreme(values) if extreme else _sum(values) / (len(values) if reduce == "mean" else parts)
    if extreme:
        return {**found[0], "value": latest, "total": extreme(totals)}
    weights = [entry["weight"] for entry in found]
    weight = None if any(each is None for each in weights) else _sum(weights) / parts
    return {**found[0], "value": latest, "total": _sum(totals) / parts, "weight": weight}


def _sum(values: Iterable[Any]) -> Any:
    first, *others = values
    return sum(others, start=first)
