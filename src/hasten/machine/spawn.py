"""Start copies of this process, for programs that cannot be run again: notebooks, tests, sessions."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch

from hasten.machine import collectives, launch
from hasten.machine.cluster import ClusterEnvironment


@runtime_checkable
class KeepsResults(Protocol):
    """An object that lives in the process that starts a run, while its copies do the work."""

    def export_results(self) -> Any:
        """Return what the object in the starting process must learn; called in the first copy."""

    def import_results(self, results: Any) -> None:
        """Take over what the first copy exported."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, shown as the cause of that exception."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        """Return the traceback."""
        return f"\n{self.text}"


class StartCopies(launch.Launcher):
    """Start all processes of this machine as copies of this one, which waits for them.

    Args:
        start_method: "spawn", "fork" or "forkserver".

    """

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method

    def launch(
        self,
        run: launch.Run,
        function: Callable[..., Any],
        *args: Any,
        cluster: ClusterEnvironment,
        num_processes: int,
        owner: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """See ``Launcher``."""
        if cluster.creates_processes_externally:
            return launch.join_external(run, function, *args, cluster=cluster, kwargs=kwargs)
        if self._start_method == "fork" and torch.cuda.is_initialized():
            raise RuntimeError(
                "start_method='fork': this process has used CUDA already, and a CUDA context does not survive a "
                "fork. Move nothing to the GPU before the launch, or restart the notebook."
            )
        store, address = launch.host_store()
        task: Any = (run, function, args, kwargs, owner)
        if self._start_method != "fork":
            # Pickled here and not by multiprocessing, which would share the memory of the weights.
            task = _pickled(task, self._start_method)
        context = multiprocessing.get_context(self._start_method)
        first_rank = cluster.node_rank() * num_processes
        processes, connections = [], []
        threads = None if "OMP_NUM_THREADS" in os.environ else launch.share_cores(num_processes)
        try:
            for local_rank in range(num_processes):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child,
                    args=(local_rank, address, task, theirs, os.getpid(), threads),
                    name=f"hasten-rank-{first_rank + local_rank}",
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(mine)
            result, results = _wait_for(processes, connections, first_rank)
        finally:
            _end(processes)
            for connection in connections:
                connection.close()
            del store
        if results is not None:
            owner.import_results(results)
        return result


def _pickled(task: Any, start_method: str) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"start_method={start_method!r} sends the function and all it holds to other processes, and something "
            f"cannot be sent: {error}. Define functions and classes at the top of a module, or use "
            "strategy='ddp', which runs the program again instead."
        ) from error


def _child(
    local_rank: int, address: str, task: Any, connection: Connection, parent: int, threads: int | None
) -> None:
    """Do the work of one process, and report how it ended."""
    launch._end_with_parent(parent)
    os.environ["LOCAL_RANK"] = str(local_rank)
    if threads is not None:
        torch.set_num_threads(threads)
    code = 1
    try:
        run, function, args, kwargs, owner = pickle.loads(task) if isinstance(task, bytes) else task
        result = run(local_rank, launch.connect_store(address), function, *args, **kwargs)
        results = None
        if local_rank == 0:
            results = owner.export_results() if isinstance(owner, KeepsResults) else None
        else:
            result = None
        connection.send_bytes(pickle.dumps(("done", (result, results))))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        connection.send_bytes(pickle.dumps(("exit", code)))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        connection.send_bytes(pickle.dumps(("exit", code)))
    except BaseException as error:
        connection.send_bytes(_packed(error))
    finally:
        collectives.leave()
        connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # A forked copy must not run what the original registered for its own end.
        if multiprocessing.get_start_method(allow_none=True) == "fork" or not isinstance(task, bytes):
            os._exit(code)
    sys.exit(code)


def _packed(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(("error", (error, text)))
        pickle.loads(packed)
    except Exception:
        # Exceptions whose arguments are not what their class takes cannot be sent.
        return pickle.dumps(("error", (RuntimeError(f"{type(error).__name__}: {error}"), text)))
    return packed


def _wait_for(processes: list[Any], connections: list[Any], first_rank: int) -> tuple[Any, Any]:
    """Return the first process's result; raise as soon as one of them fails."""
    with _forwarded_signals(processes) as pressed:
        open_ends = {connection: rank for rank, connection in enumerate(connections)}
        first: tuple[Any, Any] = (None, None)
        stopped_with: int | None = None
        while open_ends:
            for ready in wait(list(open_ends), timeout=0.5):
                assert isinstance(ready, Connection)
                rank = open_ends.pop(ready)
                try:
                    kind, content = pickle.loads(ready.recv_bytes())
                except EOFError:
                    processes[rank].join(launch._KILL_SECONDS)
                    code = processes[rank].exitcode
                    raise RuntimeError(
                        launch.describe_death(first_rank + rank, 1 if code is None else code)
                    ) from None
                if kind == "error":
                    error, text = content
                    error.add_note(f"This was raised in the process of rank {first_rank + rank}.")
                    raise error from RemoteTraceback(text)
                if kind == "exit":
                    stopped_with = content
                elif rank == 0:
                    first = content
            if len(pressed) > 1:
                raise KeyboardInterrupt
        if stopped_with == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if stopped_with is not None:
            raise SystemExit(stopped_with)
        return first


@contextmanager
def _forwarded_signals(processes: list[Any]) -> Iterator[list[float]]:
    """Hand Ctrl-C and SIGTERM on to the processes, which stop between two steps; note the former."""
    pressed: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            pressed.append(time.monotonic())
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield pressed
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _end(processes: list[Any]) -> None:
    """Leave no process behind: those that still run have lost a partner."""
    deadline = time.monotonic() + launch._KILL_SECONDS
    failed = sys.exc_info()[0] is not None
    if not failed:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + launch._KILL_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
