"""Start the processes of a run as copies of this one, for notebooks, tests and interactive sessions."""

from __future__ import annotations

import math
import multiprocessing.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import torch

from hasten._lib.errors import make_error, shorten
from hasten._lib.explain import explain
from hasten.machine import cluster as clusters
from hasten.machine import collectives, launch
from hasten.machine.rendezvous import note_who_lives
from hasten.machine.signals import handling, leaving
from hasten.seed import collect_rng_state, restore_rng_state

T = TypeVar("T")


@runtime_checkable
class KeepsResults(Protocol):
    """An object in the process that starts a run, whose copies do the work."""

    def export_results(self) -> object:
        """Return the results for the object in the starting process; called in the first copy."""

    def import_results(self, results: Any) -> None:
        """Restore the results of the first copy."""


class RemoteTraceback(Exception):
    """The traceback of an exception in another process, shown as the cause of that exception."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        """Return the traceback."""
        return f"\n{self.text}"


class StartCopies(launch.Launcher):
    """Start all processes of this machine as copies of this one, which waits for them."""

    def __init__(self, start_method: str) -> None:
        self.start_method = self._start_method = start_method

    def launch(
        self, run: launch.Run[T], cluster: clusters.ClusterEnvironment, num_processes: int, owner: KeepsResults | None
    ) -> T:
        """See ``Launcher``."""
        if cluster.creates_processes_externally:
            return launch.join_external(run, cluster)
        if self.start_method == "fork" and torch.cuda.is_initialized():
            raise make_error(
                RuntimeError,
                "start_method='fork': this process has used CUDA already, and a CUDA context does not survive a fork.",
                fix="Move nothing to the GPU before the launch, or restart the notebook.",
                argument="start_method",
            )
        store, address = launch.host_store()
        # Pickled here: multiprocessing would not copy tensors but share their memory.
        task: Any = (run, owner) if self.start_method == "fork" else _pickled((run, owner), self.start_method)
        context: Any = multiprocessing.get_context(self.start_method)
        first_rank = cluster.node_rank() * num_processes
        processes, connections = [], []
        common = launch.threads_for_each(num_processes), clusters.name_of_job(), _settings_of_torch()
        try:
            for local_rank in range(num_processes):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child,
                    args=(local_rank, address, task, sender, *common),
                    name=f"hasten-rank-{first_rank + local_rank}",
                )
                process.start()
                sender.close()
                processes.append(process)
                connections.append(receiver)
            result, results = _wait_for(processes, connections, first_rank)
        finally:
            _end(processes)
            for connection in connections:
                connection.close()
            del store
        if results is not None:
            assert isinstance(owner, KeepsResults)
            owner.import_results(results)
        returned: T = result
        return returned


def _pickled(task: Any, start_method: str) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise make_error(
            TypeError,
            f"start_method={start_method!r} sends the function and its arguments to other processes, and one of them "
            f"cannot be pickled: {error}.",
            fix=(
                "Define functions and classes at the top of a module, or use strategy='ddp', which runs the program "
                "again instead."
            ),
            argument="start_method",
        ) from error


def _settings_of_torch() -> tuple[Any, ...]:
    """Return what a program may have set before the launch, as Lightning's copies have it."""
    # Without the states of GPUs, which would be used in every copy: they begin with the seed.
    states = collect_rng_state(cuda=False)
    return torch.initial_seed(), states, torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark


def _apply_settings(seed: int, states: dict[str, Any], deterministic: int, benchmark: bool) -> None:
    torch.manual_seed(seed)
    restore_rng_state(states)
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=deterministic == 1)
    torch.backends.cudnn.benchmark = benchmark


def _child(
    local_rank: int,
    address: str,
    task: Any,
    connection: Connection,
    threads: int | None,
    name_of_job: str,
    settings: tuple[Any, ...],
) -> None:
    """Run the task in one process, and report how it ended."""
    if (parent := multiprocessing.parent_process()) is not None:
        launch.end_when(parent.join)
    os.environ["LOCAL_RANK"] = str(local_rank)
    launch.mark_rank()
    # A fork server keeps the environment in which it was started.
    os.environ[clusters.JOB_VARIABLE] = name_of_job
    if threads is not None:
        torch.set_num_threads(threads)
    if isinstance(task, bytes):
        _apply_settings(*settings)
    launch.when_ending(lambda code, reason: connection.send_bytes(pickle.dumps(("ended", (code, reason)))))
    code = 1
    try:
        run, owner = pickle.loads(task) if isinstance(task, bytes) else task
        result = run(local_rank, launch.connect_store(address))
        keeps = local_rank == 0 and isinstance(owner, KeepsResults)
        done = (result if local_rank == 0 else None, owner.export_results() if keeps else None)
        connection.send_bytes(pickle.dumps(("done", done)))
        code = 0
    except (SystemExit, KeyboardInterrupt) as error:
        given = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code
        code = given if isinstance(given, int) else int(given is not None)
        connection.send_bytes(pickle.dumps(("exit", (code, traceback.format_exc()))))
    except BaseException as error:
        connection.send_bytes(_packed(error))
    finally:
        collectives.leave()
        connection.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # A forked copy must not run the exit functions of the original, only its own, for instance of its loggers.
        if not isinstance(task, bytes):
            vars(multiprocessing.util)["_run_finalizers"](0)
            os._exit(code)
    sys.exit(code)


def _packed(error: BaseException) -> bytes:
    explain(error)
    shorten(error)
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(("error", (error, text)))
        pickle.loads(packed)
    except Exception:
        # Some exceptions cannot be unpickled, because their ``args`` are not the arguments of their class.
        return pickle.dumps(("error", (RuntimeError(f"{type(error).__name__}: {error}"), text)))
    return packed


@dataclass
class _Outcome:
    """What the processes of a run have reported, from which follows how the call in this process ends."""

    # The result of the first process, the exit code with which processes have left, and the first that left: its rank,
    # exit code and traceback.
    result: tuple[Any, Any] = (None, None)
    code: int | None = None
    left: tuple[int, int, str] | None = None
    # The code and the reason with which a process has ended, and what others saw of the death of a partner.
    ended: tuple[int, str] | None = None
    symptom: BaseException | None = None
    # When those that are silent are no longer waited for.
    deadline: float = math.inf

    def take(self, kind: str, content: Any, rank: int, *, is_first: bool) -> None:
        """Take the last report of a process; an error is the consequence of the death of another process."""
        if kind in ("error", "ended"):
            # The error of the other process will arrive soon; where one ends, all must end at once.
            self.deadline = min(self.deadline, time.monotonic() + launch.GRACE_SECONDS)
        if kind == "error":
            self.symptom = content
        elif kind == "ended":
            self.ended = content
        elif kind == "exit":
            self.code = content[0]
            self.left = self.left or (rank, *content)
        elif is_first:
            self.result = content

    def conclude(self) -> tuple[Any, Any]:
        """Return the result of the first process; raise if the run was stopped or a process has died."""
        code = self.code
        if self.ended is not None:
            code, reason = self.ended
            if code <= 128:
                raise RuntimeError(f"{reason} The places of all ranks are printed above.")
        elif self.symptom is not None:
            self._explain_symptom(self.symptom)
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if code is not None:
            raise leaving(code)
        return self.result

    def _explain_symptom(self, symptom: BaseException) -> NoReturn:
        if self.left is None:
            raise symptom
        rank, code, text = self.left
        if code == 0:
            raise RuntimeError(launch.describe_death(rank, 0)) from RemoteTraceback(text)
        # The others lost a partner that left the run: that is the reason.
        where = f"raised in the process of rank {rank}"
        ending = KeyboardInterrupt(where) if code == 128 + signal.SIGINT else leaving(code)
        raise ending from RemoteTraceback(text)


def _wait_for(processes: list[Any], connections: list[Any], first_rank: int) -> tuple[Any, Any]:
    """Return the first process's result; raise as soon as one of them fails."""
    outcome, presses = _Outcome(), 0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal presses
        presses += number == signal.SIGINT
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    with handling(forward):  # The processes stop between two steps.
        open_ends = {connection: rank for rank, connection in enumerate(connections)}
        while open_ends and time.monotonic() < outcome.deadline:
            for ready in wait(list(open_ends), timeout=0.2):
                assert isinstance(ready, Connection)
                place = open_ends.pop(ready)
                rank = first_rank + place
                kind, content = _received(ready, processes[place], rank)
                if kind == "error" and not collectives.lost_partner(content):
                    note_who_lives(content, {first_rank + i: each.is_alive() for i, each in enumerate(processes)})
                    raise content
                outcome.take(kind, content, rank, is_first=place == 0)
            if presses > 1:
                raise KeyboardInterrupt
    return outcome.conclude()


def _received(connection: Connection, process: Any, rank: int) -> tuple[str, Any]:
    """Return the last report of a process, or an error for one that died without a report."""
    try:
        kind, content = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(launch.KILL_SECONDS)
        code = 1 if process.exitcode is None else process.exitcode
        return "error", RuntimeError(launch.describe_death(rank, code))
    if kind == "error":
        error, text = content
        error.add_note(f"This was raised in the process of rank {rank}.")
        error.__cause__ = RemoteTraceback(text)
        return kind, error
    return kind, content


def _end(processes: list[Any]) -> None:
    """Wait for the processes to end, or stop them if the run has failed."""

    def join_all(seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process for process in processes if process.is_alive()]

    failed = sys.exc_info()[0] is not None
    # Processes that have returned may still write in their own threads, or shut down slowly on a busy machine.
    for process in processes if failed else join_all(launch.UNLOAD_SECONDS):
        process.terminate()
    for process in join_all(launch.KILL_SECONDS):
        process.kill()
        process.join()
