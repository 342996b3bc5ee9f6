"""Connect the processes of a run: only processes of this attempt meet, and missing ones are named."""

from __future__ import annotations

import itertools
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed

from hasten._lib.errors import make_error

# torch's type hints leave the stores out.
_torch: Any = torch.distributed
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.1
# When the first line about missing processes is printed, and how often it is repeated.
FIRST_SECONDS, NEXT_SECONDS = 10.0, 60.0
_meetings = itertools.count()


@dataclass(frozen=True)
class Party:
    """The processes that must connect, and the rank of this one among them."""

    rank: int
    world_size: int  # The number of processes.
    timeout: timedelta  # How long it waits for the others.
    per_machine: int | None = None  # The number of processes of one machine; None if it is not known.
    started_by_hasten: bool = False  # Whether one of them has started all others.
    # Returns the ranks of processes that ended without an error, as far as this process knows.
    left: Callable[[], list[int]] = list


def store_of_this_attempt(party: Party) -> Any:
    """Return a store for this start of the processes only; None if no other start has used torch's store.

    The agents of torchrun keep one store for all restarts. A restarted process finds the addresses of dead processes
    in it and connects to them (https://github.com/pytorch/pytorch/issues/135712).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or party.world_size == 1:
        return None
    store = next(_torch.rendezvous("env://", party.rank, party.world_size, timeout=party.timeout))[0]
    store.set_timeout(party.timeout)
    name = agree_on_name(_torch.PrefixStore("hasten-attempt", store), party)
    return _torch.PrefixStore(name, store)


def agree_on_name(store: Any, party: Party) -> str:
    """Return a name that the living processes have in common, and no process that used ``store`` before had.

    The first process invents it. The others cannot tell it from the name of a process that died, so each asks with a
    number of its own, and only a living first process answers that. The number of restarts cannot be used: each agent
    counts the restarts that it began itself.

    Raises:
        RuntimeError: not all processes came.

    """
    own = uuid.uuid4().hex
    if party.rank > 0:
        store.set(f"question/{store.add('questions', 1)}", own)
        _wait_until(lambda: store.check([f"answer/{own}"]), lambda: [0], party)
        name = str(store.get(f"answer/{own}").decode())
        store.set(f"arrived/{name}/{party.rank}", "1")
        store.add(f"arrived/{name}", 1)
        return name
    answered = set()

    def answer_all() -> bool:
        # Answers to processes that have died do no harm.
        for number in range(1, store.add("questions", 0) + 1):
            key = f"question/{number}"
            if number not in answered and store.check([key]):
                answered.add(number)
                store.set(f"answer/{store.get(key).decode()}", own)
        return bool(store.add(f"arrived/{own}", 0) == party.world_size - 1)

    others = range(1, party.world_size)
    _wait_until(answer_all, lambda: [rank for rank in others if not store.check([f"arrived/{own}/{rank}"])], party)
    return own


# -- missing processes


def meet(store: Any, party: Party) -> None:
    """Wait for all processes at ``store``, and print meanwhile who is missing.

    Raises:
        RuntimeError: some did not come; the message names them.

    """
    store = _torch.PrefixStore(f"hasten-meeting/{next(_meetings)}", store)
    store.set(f"here/{party.rank}", "1")
    if store.add("count", 1) == party.world_size:
        store.set("all", "1")

    def absent() -> list[int]:
        return [other for other in range(party.world_size) if not store.check([f"here/{other}"])]

    _wait_until(lambda: store.check(["all"]), absent, party)


def forget_meetings() -> None:
    """Count meetings from the beginning, as processes that are started now do."""
    global _meetings
    _meetings = itertools.count()


def store_of_first(host: str, port: int, party: Party) -> Any:
    """Return the store that the first process serves at ``host:port``."""
    serves = party.rank == 0
    if not serves:
        # torch would wait without a message, and twice as long.
        _wait_until(lambda: _listens(host, port), lambda: [0], party)
    try:
        return _torch.TCPStore(
            host, port, party.world_size, serves, timeout=party.timeout, wait_for_workers=False, multi_tenant=True
        )
    except getattr(_torch, "DistError", RuntimeError) as error:
        if not serves:
            raise
        what = f"rank 0 cannot wait for the others at {host}:{port}: {str(error).splitlines()[0].rstrip('.')}."
        fix = "Set MASTER_ADDR to this machine's address and MASTER_PORT to a free port, the same on all machines."
        raise make_error(RuntimeError, what, fix=fix) from None


def _listens(host: str, port: int) -> bool:
    """Return whether a process takes connections at an address."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _wait_until(met: Callable[[], bool], absent: Callable[[], list[int]], party: Party) -> None:
    """Wait, and print who is absent."""
    began, pause = time.monotonic(), _POLL_SECONDS
    next_line = began + FIRST_SECONDS
    while not met():
        now = time.monotonic()
        if now - began > party.timeout.total_seconds():
            raise _not_come(absent(), party)
        # Looking for those who are absent asks the store once for each process.
        if (left := party.left()) and (lost := sorted(set(left).intersection(absent()))):
            raise make_error(
                RuntimeError,
                f"{named(lost, party.world_size, party.per_machine)} ended without an error, and rank "
                f"{party.rank} waits for all processes.",
                fix="All processes have to make the same calls, such as fit: end none of them before.",
            )
        if now >= next_line:
            next_line += NEXT_SECONDS
            _print_absent(absent(), party, now - began)
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)


def named(ranks: list[int], world_size: int, per_machine: int | None) -> str:
    """Return processes as a string, by machine if there are several.

    Example::

        >>> named([2, 3], 4, 2), named([1], 4, 2), named([1], 2, 2)
        ('all of machine 1 (ranks 2 to 3)', 'rank 1 of machine 0', 'rank 1')

    """
    if per_machine is None or per_machine >= world_size:
        return _span(ranks)
    parts = []
    for machine, group in itertools.groupby(ranks, lambda rank: rank // per_machine):
        absent = list(group)
        whole = len(absent) == per_machine > 1
        parts.append(
            f"all of machine {machine} ({_span(absent)})" if whole else f"{_span(absent)} of machine {machine}"
        )
    return ", ".join(parts)


def _span(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _not_come(absent: list[int], party: Party) -> RuntimeError:
    missing = named(absent, party.world_size, party.per_machine)
    advice = (
        "Start all processes with the same address, port and number of machines, or raise timeout= of the strategy."
    )
    if party.started_by_hasten:
        advice = "If the program needs longer until it makes this call, raise timeout= of the strategy."
    error = make_error(
        RuntimeError,
        f"{missing} did not arrive in {party.timeout.total_seconds():.0f} s; rank {party.rank} waited at {_where()}.",
        fix=advice,
    )
    # The process that has started them knows whether they are alive.
    error.__dict__["absent_ranks"] = absent
    return error


def note_who_lives(error: BaseException, lives: dict[int, bool]) -> None:
    """Add to the error about missing processes whether they are alive, where that is known for a rank."""
    for rank in error.__dict__.get("absent_ranks", ()):
        if rank in lives:
            state = "is alive and has not reached this call" if lives[rank] else "has ended"
            error.add_note(f"The process of rank {rank}, started by this program, {state}.")


def _print_absent(absent: list[int], party: Party, seconds: float) -> None:
    first_of_machine = party.rank % (party.per_machine or party.world_size) == 0
    if party.rank > 0 and not (absent == [0] and (party.rank == 1 or first_of_machine)):
        # The first process prints for all; while it is missing itself, one of each machine does.
        return
    missing = named(absent, party.world_size, party.per_machine)
    # print() is not used: the main thread may hold the lock of its output.
    text = f"hasten: rank {party.rank} has waited {seconds:.0f} s at {_where()} for {missing}.{_why_alone(party)}\n"
    os.write(2, text.encode())


def _why_alone(party: Party) -> str:
    """Return why this program has started no processes, if that may be by mistake."""
    launched = party.started_by_hasten or "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_JOB_ID" in os.environ
    if launched or "LOCAL_RANK" not in os.environ:
        return ""
    return " LOCAL_RANK is set, so this program starts no processes: unset it, unless something else starts the others."


def _where() -> str:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    # Copies of a process get the store from it.
    return f"{address}:{port}" if address and port else socket.gethostname()
