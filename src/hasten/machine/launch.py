"""Start the processes of a run by running the script again, or join those that a launcher started."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed

from hasten._lib import FOLDER_AT_IMPORT
from hasten._lib.errors import make_error
from hasten.machine import collectives
from hasten.machine.cluster import JOB_VARIABLE, ClusterEnvironment, TorchElasticEnvironment
from hasten.machine.host import usable_cores
from hasten.machine.rendezvous import forget_meetings, note_who_lives

if TYPE_CHECKING:
    from hasten.machine.spawn import KeepsResults

# Set in the processes started here: the id of the one that started them, the pipe on which such a process reports its
# calls of `Launcher.launch` and the end of its program, and the address of the store.
_PARENT, _END_PIPE, _STORE = "HASTEN_PARENT_PID", "HASTEN_END_PIPE", "HASTEN_STORE"

# Set in a process that is a rank, for processes that its program starts: they inherit the variables of the rank.
_RANK_PID = "HASTEN_RANK_PID"

# How long the first process may take to fail with its own traceback after another one died.
GRACE_SECONDS = 4.0
# When its program has ended, a process says after this time for which other process it waits.
_SAY_SECONDS = 30.0
# How long a process whose program has ended may take to shut down.
UNLOAD_SECONDS = 300.0
KILL_SECONDS = 3.0
_STORE_TIMEOUT = timedelta(minutes=5)

# Arguments between Python and the program when it is run again; `hasten run` sets them.
PREFIX: list[str] = []

T = TypeVar("T")

# Called with the local rank (None if the cluster sets it) and the store where the processes connect (None for torch's
# own); joins the process group and works.
Run = Callable[[int | None, Any], T]

# torch's type hints leave the stores out.
_stores: Any = torch.distributed


class Launcher(ABC):
    """Starts the other processes of a run."""

    @abstractmethod
    def launch(self, run: Run[T], cluster: ClusterEnvironment, num_processes: int, owner: KeepsResults | None) -> T:
        """Return what ``run(local_rank, store)`` returns in the first process; ``owner`` here gets its state then."""


def mark_rank() -> None:
    """Record that the variables of a rank belong to this process, and not to a process that it starts."""
    os.environ[_RANK_PID] = str(os.getpid())


def forget_other_rank() -> None:
    """Remove the variables of a rank if its program has started this process: they do not apply to this process."""
    owner, parent = os.environ.get(_RANK_PID), os.environ.get(_PARENT)
    if owner is None and parent is not None:
        # A process that a rank has started has another parent than the rank itself.
        is_other = int(parent) != os.getppid()
    else:
        is_other = owner is not None and int(owner) != os.getpid()
    if is_other:
        for name in (
            "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK",
            _RANK_PID, _PARENT, _STORE, _END_PIPE, JOB_VARIABLE,
        ):  # fmt: skip
            os.environ.pop(name, None)


def join_external(run: Run[T], cluster: ClusterEnvironment) -> T:
    """Call ``run`` in a process that was started already."""
    store = None
    if _PARENT in os.environ:
        parent = int(os.environ[_PARENT])

        def wait_for_parent() -> None:
            while os.getppid() == parent:
                time.sleep(0.2)

        end_when(wait_for_parent)
        if (pipe := os.environ.pop(_END_PIPE, None)) is not None:
            _calls.pipe = int(pipe)
            # Registered before the process joins a group, so it is called after the group was left.
            atexit.register(_calls.report, _PROGRAM_ENDS)
        if _STORE in os.environ:
            store = connect_store(os.environ[_STORE])
    elif TorchElasticEnvironment.detect():
        # Without its agent, this process would never be ended.
        agent = os.getppid()

        def wait_for_agent() -> None:
            while os.getppid() == agent:
                time.sleep(0.2)

        end_when(wait_for_agent)
    if store is None:
        _set_main_address(cluster)
    return run(None, store)


def _set_main_address(cluster: ClusterEnvironment) -> None:
    """Set the environment variables from which torch reads the address."""
    os.environ.update(MASTER_ADDR=str(cluster.main_address), MASTER_PORT=str(cluster.main_port))


# Kept as long as this process lives, even if it has left the group: others may still ask it something.
_served: list[Any] = []


def host_store() -> tuple[Any, str]:
    """Return a store served by this process, and its address."""
    # Port 0: the system picks a free one and keeps it from other programs.
    store = _stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
    _served.append(store)
    return _stores.PrefixStore("hasten", store), f"127.0.0.1:{store.port}"


def connect_store(address: str) -> Any:
    """Return the store of another process."""
    host, _, port = address.rpartition(":")
    store = _stores.TCPStore(host, int(port), is_master=False, timeout=_STORE_TIMEOUT)
    return _stores.PrefixStore("hasten", store)


def threads_for_each(num_processes: int) -> int | None:
    """Return the threads with which all processes together use each core once; None if the user has set a number."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // num_processes)


class RunScriptAgain(Launcher):
    """Run the program again, from its first line, once for each other process of this machine."""

    def launch(self, run: Run[T], cluster: ClusterEnvironment, num_processes: int, owner: KeepsResults | None) -> T:
        """See ``Launcher``."""
        if cluster.creates_processes_externally:
            return join_external(run, cluster)
        single_machine = cluster.world_size() == num_processes and "MASTER_PORT" not in os.environ
        store = None
        environment = {"NODE_RANK": str(cluster.node_rank()), "WORLD_SIZE": str(cluster.world_size())}
        if single_machine:
            store, environment[_STORE] = host_store()
            host, _, port = environment[_STORE].rpartition(":")
            environment |= {"MASTER_ADDR": host, "MASTER_PORT": port}
        else:
            _set_main_address(cluster)
        global _children
        before = dict(os.environ)
        if num_processes > 1:
            if (threads := threads_for_each(num_processes)) is not None:
                environment["OMP_NUM_THREADS"] = str(threads)
                torch.set_num_threads(threads)
            _children = _Children(environment, num_processes, cluster.node_rank() * num_processes)
            # All processes then read their ranks from the same variables.
            environment.pop(_STORE, None)
            os.environ.update(environment, LOCAL_RANK="0")
            mark_rank()
        children = _children
        try:
            return run(0, store)
        except Exception as error:
            if children is not None and num_processes > 1 and not collectives.joined():
                # The processes have not connected. A program that tries again starts others, at another port.
                note_who_lives(error, children.lives())
                children.give_up()
                forget_meetings()
                _children = None
                for name in ("LOCAL_RANK", _RANK_PID, *environment):
                    os.environ.pop(name, None)
                    if name in before:
                        os.environ[name] = before[name]
                raise
            # When another process dies, the collectives here fail too, with a message about sockets. The traceback
            # that the other process printed shows the cause; the traceback of this one does not.
            if children is not None and collectives.lost_partner(error) and (cause := children.why_dead()):
                raise RuntimeError(cause) from None
            raise


def quiet_torch() -> dict[str, str]:
    """Return variables for processes started here, which make torch print only errors.

    When a process ends, torch warns in all others that their store does not answer, with the stacks of its own C++
    code: dozens of lines around the one that shows the reason. With TORCH_DISTRIBUTED_DEBUG all of them are printed.
    """
    return {} if "TORCH_DISTRIBUTED_DEBUG" in os.environ else {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def command_of_this_program() -> list[str]:
    """Return the command that runs this program again."""
    import __main__

    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    python = [sys.executable, *flags, *PREFIX]
    spec, file = getattr(__main__, "__spec__", None), getattr(__main__, "__file__", None)
    if spec is not None:
        return [*python, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if file is not None:
        path = os.path.abspath(os.path.join(folder_of_this_program() or "", file))
        if os.path.exists(path):
            return [*python, path, *sys.argv[1:]]
    if "-c" in sys.orig_argv:
        return [sys.executable, *sys.orig_argv[1:]]
    what = "strategy='ddp' runs the program again for each process, and an interactive session cannot be run again."
    raise make_error(RuntimeError, what, fix="Use strategy='ddp_notebook' here.", argument="strategy")


def folder_of_this_program() -> str | None:
    """Return the working directory in which this program was started, for relative arguments; None if unknown."""
    import __main__

    file = getattr(__main__, "__file__", None) or ""
    if file not in sys.orig_argv:
        # Python has put the working directory before the relative path on the command line.
        for word in sys.orig_argv[1:]:
            if word and os.path.isabs(file) and file.endswith(os.sep + word):
                return file.removesuffix(word)
    return FOLDER_AT_IMPORT or None


# Messages of a process to the one that started it.
_CALL_BEGINS, _CALL_ENDS, _PROGRAM_ENDS = b"+-."


class _Calls:
    """The calls of this program that all processes make together, such as ``fit`` and ``barrier``."""

    def __init__(self) -> None:
        self.begun = 0
        # Whether an exception has ended the last one, and the exit code with which it leaves the program.
        self.was_left = False
        self.exit_code = 1
        self.pipe: int | None = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Report the begin and the end of a call."""
        self.begun, self.was_left = self.begun + 1, False
        self.report(_CALL_BEGINS)
        try:
            yield
        except BaseException as error:
            self.was_left = True
            code = error.code if isinstance(error, SystemExit) else None
            self.exit_code = code if isinstance(code, int) and code else 1
            raise
        finally:
            self.report(_CALL_ENDS)

    def report(self, sign: int) -> None:
        """Send a message to the process that started this one."""
        if self.pipe is not None:
            with suppress(OSError):  # That process has ended, or does not read.
                os.write(self.pipe, bytes([sign]))


_calls = _Calls()
# A context for a call that all processes make together.
joint_call = _calls.one


class _Children:
    """The other processes of this machine, and a thread that watches them."""

    def __init__(self, environment: dict[str, str], num_processes: int, first_rank: int) -> None:
        self._first_rank = first_rank
        self._dead: str | None = None
        self._seen, self._ended = threading.Event(), threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._end_pipes: dict[int, int] = {}
        self._reports: dict[int, Counter[int]] = {}
        # From here on calls are counted in all processes.
        _calls.begun = 0
        # The program may have changed its working directory, and will do so again.
        command, folder = command_of_this_program(), folder_of_this_program()
        common = {**quiet_torch(), **os.environ, **environment, _PARENT: str(os.getpid())}
        for local_rank in range(1, num_processes):
            own, passed = {**common, "LOCAL_RANK": str(local_rank)}, []
            if os.name == "posix":  # Windows does not inherit pipes.
                self._end_pipes[local_rank], writes = os.pipe()
                for end in (self._end_pipes[local_rank], writes):
                    os.set_blocking(end, False)
                own[_END_PIPE], passed = str(writes), [writes]
            self._processes[local_rank] = subprocess.Popen(command, env=own, pass_fds=passed, cwd=folder)
            for pipe in passed:
                os.close(pipe)
        atexit.register(self.end)
        threading.Thread(target=self._watch, name="hasten-children", daemon=True).start()

    def _code(self, local_rank: int) -> int | None:
        """Return the exit code of a process; None while it runs."""
        code = self._processes[local_rank].poll()
        reported = self._reported(local_rank)
        if code in (-signal.SIGABRT, -signal.SIGSEGV) and reported[_PROGRAM_ENDS]:
            # Threads of a communication library may abort a process that has finished and unloads the library.
            self._processes[local_rank].returncode = code = 0
        return code

    def _reported(self, local_rank: int) -> Counter[int]:
        """Return how often a process has sent each message."""
        reported = self._reports.setdefault(local_rank, Counter())
        if (pipe := self._end_pipes.get(local_rank)) is not None:
            with suppress(BlockingIOError):
                reported.update(os.read(pipe, 1 << 16))
        return reported

    def _abandoned(self) -> int | None:
        """Return the local rank of a process in a call that this one has left or never made; None if there is none."""
        for local_rank, process in self._processes.items():
            reported = self._reported(local_rank)
            begun = reported[_CALL_BEGINS]
            # In a call that this process has completed, it may have its own work to do, such as writing files.
            is_inside = begun > reported[_CALL_ENDS] and (_calls.was_left or begun > _calls.begun)
            if is_inside and process.poll() is None:
                return local_rank
        return None

    def why_dead(self) -> str | None:
        """Return which process ended, and how; None if none ends within ``GRACE_SECONDS``.

        Called by a process that has lost a partner: then a process that has ended without an error is the reason, too.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while not self._seen.wait(0.1) and time.monotonic() < deadline:
            codes = {self._first_rank + local_rank: self._code(local_rank) for local_rank in self._processes}
            ended = [(not code, rank, code) for rank, code in codes.items() if code is not None]
            if ended:
                _, rank, code = min(ended)
                return self._dead or describe_death(rank, code)
        return self._dead

    def _watch(self) -> None:
        """End the whole run after a process died, unless the main thread does so within ``GRACE_SECONDS``."""
        while self._dead is None:
            if self._ended.wait(0.1):
                return
            for local_rank in self._processes:
                code = self._code(local_rank)
                if code is None or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                    continue
                reported = self._reported(local_rank)
                # os._exit(0) in the middle of a call does not count as an end either.
                if code or reported[_CALL_BEGINS] > reported[_CALL_ENDS]:
                    self._dead = describe_death(self._first_rank + local_rank, code)
                    break
        self._seen.set()
        if not self._ended.wait(GRACE_SECONDS):
            # The main thread waits for the dead process in a collective.
            os.write(2, f"RuntimeError: {self._dead}\n".encode())
            stop_processes(self._processes.values())
            os._exit(1)

    def stop(self) -> None:
        """Stop the others without reporting how they end."""
        self._ended.set()
        stop_processes(self._processes.values())

    def lives(self) -> dict[int, bool]:
        """Return by rank which of them are alive."""
        return {self._first_rank + number: each.poll() is None for number, each in self._processes.items()}

    def left(self) -> list[int]:
        """Return the ranks of those that ended without an error."""
        return [self._first_rank + number for number in self._processes if self._code(number) == 0]

    def give_up(self) -> None:
        """Stop the others, and forget them."""
        atexit.unregister(self.end)
        self.stop()

    def end(self) -> None:
        """Wait for the others to end, stop those that do not, and fail if one of them has failed."""
        failed = self._dead is not None or getattr(sys, "last_value", None) is not None
        code, text = self._wait_for_ends(0.5 if failed else _end_seconds)
        self._ended.set()
        codes = {self._first_rank + local_rank: self._code(local_rank) for local_rank in self._processes}
        stop_processes(self._processes.values())
        rank, died = next(((rank, code) for rank, code in codes.items() if code), (0, 0))
        if died:
            code, text = died, describe_death(rank, died)
        elif failed:
            code = 0
        if code and not _leaving:
            # An exit function can only set the exit code in this way. Functions registered after the processes started,
            # for instance by loggers, have run by now.
            if not failed:
                os.write(2, f"{text}\n".encode())
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(max(code, 1))

    def _wait_for_ends(self, limit_seconds: float) -> tuple[int, str]:
        """Wait until the others have ended; return the exit code and the reason if one has to be stopped at work."""
        began = at_work = time.monotonic()
        said = False
        try:
            while alive := [rank for rank, process in self._processes.items() if process.poll() is None]:
                now = time.monotonic()
                # A process that has reported the end of its program is only shutting down: no work can be lost.
                working = [self._first_rank + rank for rank in alive if not self._reported(rank)[_PROGRAM_ENDS]]
                at_work = now if working else at_work
                if now - at_work >= min(limit_seconds, UNLOAD_SECONDS):
                    break
                if now - began >= limit_seconds and working:
                    return 1, self._late(working[0], limit_seconds)
                if now - began > GRACE_SECONDS and (abandoned := self._abandoned()) is not None:
                    return _calls.exit_code, self._left_behind(abandoned)
                if working and not said and now - began > _SAY_SECONDS:
                    said = True
                    os.write(2, f"hasten: {self._waits_for(working, limit_seconds)}\n".encode())
                time.sleep(0.05)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT, "Ctrl-C arrived while other processes were at work: they were stopped."
        return 0, ""

    def _waits_for(self, ranks: list[int], limit_seconds: float) -> str:
        names = "rank " + str(ranks[0]) if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
        return (
            f"the program of rank {self._first_rank} has ended, and waits for {names}, still at work, for up to "
            f"{limit_seconds / 60:.0f} minutes."
        )

    def _late(self, rank: int, limit_seconds: float) -> str:
        return (
            f"the process of rank {rank} was still at work {limit_seconds:.0f} s after the program of rank "
            f"{self._first_rank} had ended, and was stopped. If it needs longer, raise timeout= of the strategy (the "
            "limit is three times that, at least 30 minutes)."
        )

    def _left_behind(self, local_rank: int) -> str:
        return (
            f"the process of rank {self._first_rank + local_rank} was still in a run or a barrier when the "
            f"program of rank {self._first_rank} had ended, and was stopped. All ranks have to make the same "
            "calls. To end training early, set trainer.should_stop = True."
        )


# How long the others may work for themselves when the program of the first process has ended.
_end_seconds = 1800.0


def allow_at_end(seconds: float) -> None:
    """Give the other processes at least this long to finish their own work after the program of the first has ended."""
    global _end_seconds
    _end_seconds = max(_end_seconds, seconds)


_children: _Children | None = None
_leaving = False


def children_that_left() -> list[int]:
    """Return the ranks of processes that this one has started, and that ended without an error."""
    return [] if _children is None else _children.left()


def leave_with_own_code() -> None:
    """End this program with its own exit code, not with the code of a process it started."""
    global _leaving
    _leaving = True


# Called in a process that ends itself, with its exit code and the reason.
_end_observers: list[Callable[[int, str], object]] = []


def when_ending(function: Callable[[int, str], object]) -> None:
    """Call ``function`` with exit code and reason before ``end_now`` ends this process."""
    _end_observers.append(function)


def end_now(code: int, reason: str) -> NoReturn:
    """End this process and all that it has started at once, from any thread.

    The main thread may be in a call that nothing can interrupt, so no exit function runs.
    """
    # The main thread may return when its partners are gone: its error is a consequence.
    sys.excepthook = lambda *error: None
    if _children is not None:
        _children.stop()
    for function in _end_observers:
        with suppress(Exception):
            function(code, reason)
    for worker in multiprocessing.active_children():
        worker.kill()
    # The main thread may be writing, and never return.
    flush = threading.Thread(target=_flush, name="hasten-flush", daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(code)


def _flush() -> None:
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def describe_death(rank: int, code: int) -> str:
    """Return a sentence about a process that ended unexpectedly."""
    how = f"ended with exit code {code}; its error is printed above"
    if code == 0:
        how = "ended in the middle of the run (exit code 0, without an error)"
    elif code == 128 + signal.SIGINT:
        how = f"was interrupted (KeyboardInterrupt, exit code {code})"
    elif code < 0:
        name = str(-code)
        with suppress(ValueError):
            name = signal.Signals(-code).name
        reason = " (often by the system, because memory ran out)" if name == "SIGKILL" else ""
        how = f"was killed by {name}{reason}"
    return f"the process of rank {rank} {how}. All processes of the run were stopped."


def stop_processes(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Terminate processes, and kill those that do not end within seconds."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + KILL_SECONDS
    while alive and time.monotonic() < deadline:
        alive = [process for process in alive if process.poll() is None]
        time.sleep(0.02)
    for process in alive:
        process.kill()
        process.wait()


_watching_parent = False


def end_when(gone: Callable[[], object]) -> None:
    """End this process when ``gone`` returns; only the first call counts."""
    global _watching_parent
    if _watching_parent:
        return
    _watching_parent = True

    def watch() -> None:
        gone()
        os.write(2, b"The process that started this one is gone: ending.\n")
        os._exit(1)

    threading.Thread(target=watch, name="hasten-parent", daemon=True).start()


# -- several machines

# Machines that are started at the same time need no message.
_FIRST_SECONDS = 0.7


@contextmanager
def print_while_waiting(
    command: list[str] | None, *, node_rank: int, num_nodes: int, local_rank: int
) -> Iterator[None]:
    """Print what to start on the other machines while the first process of this one waits for them.

    ``command`` starts this program there; None if a launcher does it.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    text = f"NODE_RANK={node_rank} waits at {address}:{port} for the others of num_nodes={num_nodes} machines."
    if command is not None:
        first = socket.gethostname() if node_rank == 0 and address in ("127.0.0.1", "localhost") else address
        variables = f"MASTER_ADDR={first} MASTER_PORT={port} NODE_RANK=..."
        text = f"{text}\nStart on each, with its own NODE_RANK from 0: {variables} {shlex.join(command)}"
    met = threading.Event()

    def print_unless_met() -> None:
        # The rendezvous prints which processes are missing, and for how long.
        if not met.wait(_FIRST_SECONDS):
            # print() is not used: the main thread is inside torch and may hold the lock of its output.
            os.write(2, f"{text}\n".encode())

    if local_rank == 0:
        threading.Thread(target=print_unless_met, name="hasten-waiting", daemon=True).start()
    try:
        yield
    finally:
        met.set()
