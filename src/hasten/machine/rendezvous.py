"""Where the processes of one attempt meet, if the store of their launcher has served earlier attempts."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed

# torch's type hints leave the stores out.
_torch: Any = torch.distributed
_POLL_SECONDS = 0.005


def store_of_this_attempt(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a store for this start of the processes only; None if nothing else used the one that torch would take.

    The agents of torchrun keep one store for all restarts. A restarted process finds the addresses of dead processes
    in it and connects to them (https://github.com/pytorch/pytorch/issues/135712).

    Args:
        rank: of this process.
        world_size: number of processes.
        timeout: how long to wait for the others.

    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world_size == 1:
        return None
    store = next(_torch.rendezvous("env://", rank, world_size, timeout=timeout))[0]
    store.set_timeout(timeout)
    name = agree_on_name(_torch.PrefixStore("hasten-attempt", store), rank, world_size, timeout)
    return _torch.PrefixStore(name, store)


def agree_on_name(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that the living processes have in common, and no process that used ``store`` before had.

    The first process invents it. The others cannot tell it from the name of a process that died, so each asks with a
    number of its own, and only a living first process answers that. The number of restarts is no such name: each agent
    counts those that it began itself.

    Raises:
        TimeoutError: not all processes came.

    """
    deadline = time.monotonic() + timeout.total_seconds()
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"question/{store.add('questions', 1)}", own)
        # A sync point: it waits for the first process.
        name = str(store.get(f"answer/{own}").decode())
        store.add(f"arrived/{name}", 1)
        return name
    answered = set()
    # Answers to processes that died do no harm.
    while store.add(f"arrived/{own}", 0) < world_size - 1:
        for number in range(1, store.add("questions", 0) + 1):
            key = f"question/{number}"
            if number not in answered and store.check([key]):
                answered.add(number)
                store.set(f"answer/{store.get(key).decode()}", own)
        if time.monotonic() > deadline:
            came = store.add(f"arrived/{own}", 0) + 1
            raise TimeoutError(
                f"{came} of {world_size} processes came within {timeout.total_seconds():.0f} s after they were started."
            )
        time.sleep(_POLL_SECONDS)
    return own
