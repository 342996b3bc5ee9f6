"""Wait for the processes of other machines, and print which are missing and how to start them."""

from __future__ import annotations

import os
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hasten.machine.launch import stores

# Machines that are started at the same time need no message.
_FIRST_SECONDS = 0.7
_NEXT_SECONDS = 60.0
_HERE = ("127.0.0.1", "localhost")


@contextmanager
def rendezvous(
    command: list[str] | None,
    *,
    node_rank: int,
    num_nodes: int,
    num_processes: int,
    local_rank: int,
    timeout: timedelta,
) -> Iterator[Any]:
    """Yield the store that connects the processes of several machines; print which are missing meanwhile.

    Args:
        command: starts this program on the other machines, for the message; None if something else starts it there.
        node_rank: which machine this is, from 0.
        num_nodes: the number of machines.
        num_processes: on each of them.
        local_rank: which process of its machine this is; the first one prints.
        timeout: how long to wait for the others.

    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    met = threading.Event()
    if local_rank == 0:
        missing = _Missing(address, port, node_rank, num_nodes, num_processes, command)
        threading.Thread(target=missing.print_until, args=[met], name="hasten-meeting", daemon=True).start()
    try:
        store = stores.TCPStore(
            address,
            port,
            is_master=node_rank == 0 and local_rank == 0,
            wait_for_workers=False,
            timeout=timeout,
            multi_tenant=True,
        )
        store.add(_counter_of(node_rank), 1)
        yield stores.PrefixStore("hasten", store)
    finally:
        met.set()


def _counter_of(node_rank: int) -> str:
    return f"hasten-machine-{node_rank}"


@dataclass(frozen=True)
class _Missing:
    """The machines that have not connected, and how to start them."""

    address: str
    port: int
    node_rank: int
    num_nodes: int
    num_processes: int
    command: list[str] | None

    def print_until(self, met: threading.Event) -> None:
        """Print the message soon, and again every minute."""
        wait = _FIRST_SECONDS
        while not met.wait(wait):
            wait = _NEXT_SECONDS
            # Not print: the main thread is inside torch and may hold the lock of its output.
            os.write(2, f"{self._described()}\n".encode())

    def _described(self) -> str:
        place, counts = f"{self.address}:{self.port}", self._counts()
        if counts is None:
            here = " That is this machine: set MASTER_ADDR to the address of the first one."
            return (
                f"NODE_RANK={self.node_rank} waits for the first of num_nodes={self.num_nodes} machines at {place}, "
                f"where nothing answers.{here if self.address in _HERE else ''}{self._start(0)}"
            )
        machines = range(self.num_nodes)
        absent = [node for node in machines if node != self.node_rank and counts[node] < self.num_processes]
        return (
            f"NODE_RANK={self.node_rank} waits at {place} for {len(absent)} of num_nodes={self.num_nodes} machines: "
            f"{sum(counts)} of {self.num_nodes * self.num_processes} processes have come."
            + "".join(self._start(node) for node in absent[:1] if not counts[node])
        )

    def _start(self, node_rank: int) -> str:
        if self.command is None:
            return ""
        address = socket.gethostname() if self.address in _HERE else self.address
        places = f"MASTER_ADDR={address} MASTER_PORT={self.port} NODE_RANK={node_rank}"
        return f"\nStart there: {places} {shlex.join(self.command)}"

    def _counts(self) -> list[int] | None:
        """Return the number of connected processes of each machine; None if the first one does not answer."""
        with suppress(OSError, RuntimeError):
            # First without torch, which prints a stack trace if nothing answers.
            socket.create_connection((self.address, self.port), timeout=0.5).close()
            # A second connection: that of the main thread is waiting.
            store = stores.TCPStore(
                self.address, self.port, wait_for_workers=False, timeout=timedelta(seconds=5)
            )
            return [int(store.add(_counter_of(node), 0)) for node in range(self.num_nodes)]
        return None
