"""Exchange of messages between processes through the store, without collectives.

For rare events that only one process may reach: a collective would then wait for processes that wait in another
collective.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.rank_zero import log
from hasten.machine.host import process_has_ended

PATIENCE_SECONDS = 60.0
# Where a process may work alone, such as write figures after a step or an evaluation.
PATIENCE_WITH_WORK_SECONDS = 600.0
NOTICE_SECONDS = 15.0
_POLL_SECONDS = 0.002
# After this time, missing processes are asked whether they have passed the place already.
_ASK_AFTER_SECONDS = 1.0
_ANSWER_POLL_SECONDS = 0.05
_END = "end"
# How a process says that it leaves the group: with its work done, or after an error.
_DONE, _FAILED = "1", "error"

# Called with the place where another process waits; returns True if this process has passed it without stopping, False
# if it has not reached it yet, None if it waits there, too.
Passed = Callable[[Any], "bool | None"]

# torch has no public name for the default store, and no type hints for stores.
_stores: Any = dist


def store() -> Any:
    """Return the part of the store that is for these messages."""
    return torch_private.part_of_store("hasten-agreement", torch_private.default_store())


def address_of_store() -> tuple[Any, ...] | None:
    """Return where processes that this one starts find the store of the group; None if they cannot reach it.

    Without a group it is a store for this process and those alone.
    """
    if not dist.is_available():
        return None
    found = torch_private.default_store() if dist.is_initialized() else _own_store()
    while isinstance(found, _stores.PrefixStore):
        found = found.underlying_store
    if isinstance(found, _stores.TCPStore):
        return "tcp", found.host, found.port
    return ("file", found.path) if isinstance(found, _stores.FileStore) else None


@functools.cache
def _own_store() -> Any:
    return _stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_at(address: tuple[Any, ...]) -> Any:
    """Return a new connection to the store at an address."""
    kind, *where = address
    return _stores.FileStore(*where) if kind == "file" else _stores.TCPStore(*where, wait_for_workers=False)


def store_has_ended(address: tuple[Any, ...] | None) -> bool:
    """Return whether no process serves the store at an address any more."""
    if address is not None and address[0] == "tcp":
        try:
            socket.create_connection(address[1:], timeout=1.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            # That machine may be slow, or not be reached for a while.
            return False
    return False


def announce_leaving() -> None:
    """Tell the others that this process leaves the group."""
    # The store may be gone already, or the program has ended the group.
    with suppress(RuntimeError, ValueError):
        store().set(f"left/{dist.get_rank()}", _DONE if getattr(sys, "last_value", None) is None else _FAILED)


def has_left(rank: int) -> bool:
    """Return whether a process has left the group."""
    return bool(store().check([f"left/{rank}"]))


# -- processes that have ended in the middle of a run


def begin_run() -> None:
    """Let the others find out later whether this process is alive, and forget the error that ended an earlier run."""
    with suppress(RuntimeError):
        own = store()
        own.set(f"process/{dist.get_rank()}", f"{_machine()} {os.getpid()}")
        own.set(f"word/{dist.get_rank()}", "")


def publish_exit_error(error: BaseException) -> None:
    """Publish the error that ends this process, so that other ranks can report it."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    with suppress(RuntimeError):
        name = type(error).__name__
        store().set(f"word/{dist.get_rank()}", f"{name}: {first_line}"[:300] if first_line else name)


def last_word(rank: int) -> str:
    """Return the error with which a process has left the run, "" for none."""
    return store().get(f"word/{rank}").decode() if store().check([f"word/{rank}"]) else ""


def find_dead_peer(seconds: float) -> str | None:
    """Return which process has ended in the middle of the run, and how; None if that is not known in time."""
    found: list[str] = []
    address = address_of_store() if dist.is_initialized() else None

    def work() -> None:
        deadline = time.monotonic() + seconds
        try:
            while not found and time.monotonic() < deadline:
                found.extend(_ended() or _done())
                time.sleep(_ANSWER_POLL_SECONDS)
        except (RuntimeError, ValueError):
            if store_has_ended(address):
                found.append("the process that serves the store of the run has ended: rank 0, or its launcher")

    # If the machine of the store does not answer, asking takes longer than this process should wait.
    asking = threading.Thread(target=work, name="hasten-last-words", daemon=True)
    asking.start()
    asking.join(2 * seconds)
    return found[0] if found else None


def _ended() -> list[str]:
    """Return a sentence about each process that has ended; those with an error first."""
    own, machine = store(), _machine()
    with_error, without = [], []
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank() or not own.check([f"process/{rank}"]):
            continue
        if word := last_word(rank):
            with_error.append(f"the process of rank {rank} left the run with {word}")
            continue
        where, _, number = own.get(f"process/{rank}").decode().rpartition(" ")
        if where and where == machine and process_has_ended(int(number)) and not has_left(rank):
            without.append(
                f"the process of rank {rank} ended in the middle of the run, without an error: it was killed, or "
                "called os._exit"
            )
    return with_error + without


def _done() -> list[str]:
    """Return a sentence about each process that has left the group without an error."""
    ranks = [rank for rank in range(dist.get_world_size()) if has_left(rank)]
    done = [rank for rank in ranks if store().get(f"left/{rank}").decode() == _DONE]
    return [f"the process of rank {rank} has ended its program" for rank in done]


def _machine() -> str:
    """Return a name for this machine and its process IDs; empty if there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


# -- messages


def explain_missing(error: RuntimeError) -> None:
    """Raise an error that names the processes which have left, if a save failed because it needs them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    gone = list[int]()
    # The store may be gone with the first process.
    with suppress(RuntimeError):
        gone = [rank for rank in range(dist.get_world_size()) if has_left(rank)]
        # Those may have left because another process was killed, which is then said instead.
        gone = [] if gone and _ended() else gone
    if gone:
        verb = "has" if len(gone) == 1 else "have"
        raise make_error(
            RuntimeError,
            f"Trainer.save_checkpoint() is called on {format_ranks([dist.get_rank()])}, and {format_ranks(gone)} "
            f"{verb} ended the program without it.",
            fix="Call it on all processes.",
        ) from error


def exchange(
    place: str,
    own: object,
    *,
    what: str = "",
    patience_seconds: float | None = None,
    ask: tuple[str, Any] | None = None,
) -> list[Any]:
    """Return the values of all processes at ``place``, by rank; None for those that do not arrive.

    ``place`` is a name that is the same on all processes and used once; messages about missing processes describe it as
    ``what``. Values are plain data, not None. ``ask`` is the kind of a question that the others ``answer``, and where
    this process is: a process that has passed the place is not waited for, as it may be in a collective, waiting for
    this process.
    """
    messages, rank, size = store(), dist.get_rank(), dist.get_world_size()
    messages.set(f"{place}/{rank}", json.dumps(own))
    keys = [f"{place}/{other}" for other in range(size)]
    patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    began = time.monotonic()
    noticed = asked = False
    while not messages.check(keys) and (waited := time.monotonic() - began) < patience_seconds:
        if ask is not None and waited > _ASK_AFTER_SECONDS:
            absent = [other for other, key in enumerate(keys) if not messages.check([key])]
            if not asked:
                asked = True
                for other in absent:
                    _send(messages, other, {"kind": ask[0], "at": ask[1], "place": place})
            if all(
                messages.check([f"{place}/passed/{other}"]) or has_left(other) or last_word(other) for other in absent
            ):
                break
            time.sleep(_ANSWER_POLL_SECONDS)
        if waited > NOTICE_SECONDS and not noticed:
            noticed = True
            absent = [other for other, key in enumerate(keys) if not messages.check([key])]
            log.warning(
                f"rank {rank} has waited {NOTICE_SECONDS:.0f} s for {format_ranks(absent)} ({what or place}), and "
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
    """Return the values of all processes at ``place``."""
    values = exchange(place, own, what=what)
    absent = [rank for rank, value in enumerate(values) if value is None]
    if absent:
        present = [rank for rank, value in enumerate(values) if value is not None]
        raise make_error(
            RuntimeError, f"{what} on {format_ranks(present)} and not on {format_ranks(absent)}.", fix=advice
        )
    return values


def format_ranks(numbers: list[int]) -> str:
    """Return ranks as a string.

    Example::

        >>> format_ranks([0]), format_ranks([1, 2])
        ('rank 0', 'ranks 1, 2')

    """
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


# -- answers to waiting processes, while the main thread of this process is elsewhere


class _Listener:
    """A thread that waits for questions of other processes, and answers them; it costs nothing while there are none."""

    def __init__(self) -> None:
        self.known: dict[str, weakref.WeakMethod[Passed]] = {}
        self.group = id(torch_private.default_store())
        self._store_of_main = self._store = store()
        self._rank = dist.get_rank()
        self._thread = threading.Thread(target=self._listen, name="hasten-agreement", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        # The store may end before this thread does: then no process is left to ask.
        with suppress(RuntimeError):
            # A separate connection, because this thread blocks its connection until a question arrives. It is opened
            # here and not in the main thread: if the store has ended, torch tries to connect for half an hour.
            self._store = self._store_of_main.clone()
            self._answer_all()

    def _answer_all(self) -> None:
        messages, number, waiting = self._store, 0, list[dict[str, Any]]()
        while True:
            letter = f"letters/{self._rank}/{number}"
            if not waiting:
                with suppress(dist.DistStoreError):
                    messages.wait([letter], timedelta(days=1))
            if messages.check([letter]):
                question = json.loads(messages.get(letter))
                number += 1
                if question == _END:
                    return
                waiting.append(question)
            waiting = [question for question in waiting if not self._answers(question)]
            if waiting:
                time.sleep(_ANSWER_POLL_SECONDS)

    def _answers(self, question: dict[str, Any]) -> bool:
        """Return whether a question needs no further answer."""
        reference = self.known.get(question["kind"])
        if reference is None:
            return False  # The run has not begun in this process.
        passed = reference()
        # An object that no longer exists has passed every place.
        answer = True if passed is None else passed(question["at"])
        if answer:
            self._store.set(f"{question['place']}/passed/{self._rank}", "1")
        return answer is not False

    def end(self) -> None:
        """End the thread: a thread that waits in a call when the interpreter ends could abort the process."""
        if self._thread.is_alive():
            with suppress(RuntimeError):
                _send(self._store_of_main, self._rank, _END)
            self._thread.join(timeout=2.0)


_listener: _Listener | None = None


def answer(kind: str, passed: Passed) -> None:
    """Tell waiting processes, from a thread, whether this process has already passed the point where they wait.

    ``passed`` is a method, which a second thread calls; questions of this ``kind`` are answered as long as its object
    lives.
    """
    global _listener
    if _listener is None or _listener.group != id(torch_private.default_store()):
        stop_answering()
        _listener = _Listener()
        atexit.unregister(stop_answering)
        atexit.register(stop_answering)
    _listener.known[kind] = weakref.WeakMethod(passed)


def stop_answering() -> None:
    """End the thread that answers; before the process leaves its group."""
    global _listener
    listener, _listener = _listener, None
    if listener is not None:
        listener.end()


def _send(messages: Any, rank: int, message: object) -> None:
    number = messages.add(f"letters/{rank}/count", 1) - 1
    messages.set(f"letters/{rank}/{number}", json.dumps(message))
