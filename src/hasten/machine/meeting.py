"""The wait for the processes of other machines, said aloud."""

from __future__ import annotations

import os
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed

# Sooner, and machines that are started at the same time would say that they wait.
_FIRST_SECONDS = 0.7
_NEXT_SECONDS = 60.0
_HERE = ("127.0.0.1", "localhost")

# torch's type hints leave the stores out.
_stores: Any = torch.distributed


@contextmanager
def said_aloud(
    command: list[str] | None,
    *,
    node_rank: int,
    num_nodes: int,
    num_processes: int,
    local_rank: int,
    timeout: timedelta,
) -> Iterator[Any]:
    """Give the store where the processes of several machines meet, and say in time who is missing.

    Args:
        command: what starts this program, for whoever has to start it on the other machines; None where something
            else starts it there.
        node_rank: which machine this is, from 0.
        num_nodes: the number of machines.
        num_processes: on each of them.
        local_rank: which process of its machine this is; the first one speaks.
        timeout: how long the others are waited for.

    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    met = threading.Event()
    if local_rank == 0:
        missing = _Missing(address, port, node_rank, num_nodes, num_processes, command)
        threading.Thread(target=_speak, args=(missing, met), name="hasten-meeting", daemon=True).start()
    try:
        store = _stores.TCPStore(
            address,
            port,
            is_master=node_rank == 0 and local_rank == 0,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=True,
        )
        store.add(_came(node_rank), 1)
        yield _stores.PrefixStore("hasten", store)
    finally:
        met.set()


def _came(node_rank: int) -> str:
    return f"hasten-machine-{node_rank}"


def _speak(missing: _Missing, met: threading.Event) -> None:
    wait = _FIRST_SECONDS
    while not met.wait(wait):
        wait = _NEXT_SECONDS
        # The main thread is inside torch and may hold the lock of its output: straight to the terminal.
        os.write(2, f"{missing.described()}\n".encode())


class _Missing:
    """Who has not come yet, and how to start them."""

    def __init__(
        self,
        address: str,
        port: int,
        node_rank: int,
        num_nodes: int,
        num_processes: int,
        command: list[str] | None,
    ) -> None:
        self._address, self._port, self._command = address, port, command
        self._node_rank, self._num_nodes, self._num_processes = node_rank, num_nodes, num_processes

    def described(self) -> str:
        """Return what is waited for, and what to start where."""
        place, counts = f"{self._address}:{self._port}", self._counts()
        if counts is None:
            text = f"NODE_RANK={self._node_rank} waits for the first of num_nodes={self._num_nodes} machines at {place}"
            text += ", where nothing answers."
            if self._address in _HERE:
                text += " That is this machine: set MASTER_ADDR to the address of the first one."
            return text + self._start(0)
        machines = range(self._num_nodes)
        absent = [node for node in machines if node != self._node_rank and counts[node] < self._num_processes]
        return (
            f"NODE_RANK={self._node_rank} waits at {place} for {len(absent)} of num_nodes={self._num_nodes} machines: "
            f"{sum(counts)} of {self._num_nodes * self._num_processes} processes have come."
            + "".join(self._start(node) for node in absent[:1] if not counts[node])
        )

    def _start(self, node_rank: int) -> str:
        if self._command is None:
            return ""
        address = socket.gethostname() if self._address in _HERE else self._address
        places = f"MASTER_ADDR={address} MASTER_PORT={self._port} NODE_RANK={node_rank}"
        return f"\nStart there: {places} {shlex.join(self._command)}"

    def _counts(self) -> list[int] | None:
        """Return how many processes have come from each machine; None where nobody is there to be asked."""
        with suppress(OSError, RuntimeError):
            # First without torch, which prints where it was when nobody answers.
            socket.create_connection((self._address, self._port), timeout=0.5).close()
            # A connection of its own: the main thread's is busy waiting.
            store = _stores.TCPStore(
                self._address,
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=5),
            )
            return [int(store.add(_came(node), 0)) for node in range(self._num_nodes)]
        return None
