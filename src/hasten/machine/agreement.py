"""Exchange of messages between processes through the store, without collectives.

For rare events that one process may reach alone: a collective would then wait for processes that wait in another one.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hasten._lib.rank_zero import log

# Every step synchronizes the processes, so they differ only by what one of them does alone after a step. After an
# evaluation they may be minutes apart, because samples differ in size.
PATIENCE_SECONDS = 60.0
PATIENCE_AFTER_EVALUATION_SECONDS = 300.0
NOTICE_SECONDS = 15.0
_POLL_SECONDS = 0.002

# torch has no public name for the default store, and no type hints for stores.
_torch: Any = distributed_c10d


def store() -> Any:
    """Return the part of the store that is for such messages."""
    return _torch.PrefixStore("hasten-agreement", _torch._get_default_store())


def announce_leaving() -> None:
    """Have the others know that this process leaves the group."""
    # The store may be gone already.
    with suppress(RuntimeError):
        store().set(f"left/{dist.get_rank()}", "1")


def has_left(rank: int) -> bool:
    """Return whether a process has left the group."""
    return bool(store().check([f"left/{rank}"]))


def exchange(place: str, own: object, *, what: str = "", patience_seconds: float | None = None) -> list[Any]:
    """Return the values of all processes at ``place``, by rank; None for those that do not arrive in time.

    Args:
        place: a name that is the same on all processes and used once.
        own: the value of this process, plain data, not None.
        what: describes ``place`` in the message about missing processes.
        patience_seconds: how long to wait for the others; ``PATIENCE_SECONDS`` by default.

    """
    messages, size = store(), dist.get_world_size()
    messages.set(f"{place}/{dist.get_rank()}", json.dumps(own))
    keys = [f"{place}/{rank}" for rank in range(size)]
    patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    began = time.monotonic()
    noticed = False
    while not messages.check(keys) and (waited := time.monotonic() - began) < patience_seconds:
        if waited > NOTICE_SECONDS and not noticed:
            noticed = True
            absent = [rank for rank, key in enumerate(keys) if not messages.check([key])]
            log.warning(
                f"rank {dist.get_rank()} has waited {NOTICE_SECONDS:.0f} s for {ranks(absent)} ({what or place}), and "
                f"gives up after {patience_seconds:.0f} s."
            )
        time.sleep(_POLL_SECONDS)
    return [json.loads(messages.get(key)) if messages.check([key]) else None for key in keys]


def all_at(place: str, *, patience_seconds: float) -> bool:
    """Return whether all processes reach ``place`` in time; those that do get the same answer."""
    messages, size = store(), dist.get_world_size()
    decision = f"{place}/decision"
    if messages.add(f"{place}/count", 1) == size:
        return bool(messages.compare_set(decision, "", "all") == b"all")
    deadline = time.monotonic() + patience_seconds
    while not messages.check([decision]):
        if time.monotonic() > deadline:
            return bool(messages.compare_set(decision, "", "some") == b"all")
        time.sleep(_POLL_SECONDS)
    return bool(messages.get(decision) == b"all")


def counted(place: str) -> int:
    """Record that this process reached ``place``, and return how many did so far."""
    return int(store().add(f"{place}/count", 1))


def count(place: str) -> int:
    """Return how many processes reached ``place`` so far."""
    return int(store().add(f"{place}/count", 0))


def require_all(place: str, what: str, own: object, advice: str) -> list[Any]:
    """Return the values of all processes at ``place``.

    Raises:
        RuntimeError: not all processes reach it; the message names the ranks.

    """
    values = exchange(place, own, what=what)
    absent = [rank for rank, value in enumerate(values) if value is None]
    if absent:
        present = [rank for rank, value in enumerate(values) if value is not None]
        raise RuntimeError(f"{what} on {ranks(present)} and not on {ranks(absent)}. {advice}")
    return values


def ranks(numbers: list[int]) -> str:
    """Return ranks as text.

    Example::

        >>> ranks([0]), ranks([1, 2])
        ('rank 0', 'ranks 1, 2')

    """
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
