"""The child's side of a trial: a process that trains a few steps at a time on its parent's orders.

The trial connects to a socket of its parent, which sends orders and reads answers. Between two orders the trial does
nothing, its loader workers included, so that others can be measured. When the parent is gone, however it ended, the
trial ends too.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Client, Connection
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from hasten._lib.device import synchronize
from hasten.machine.host import resource_usage
from hasten_tools.speed.inspect_run import peak_memory_bytes
from hasten_tools.speed.trial_processes import Turn

_SECONDS_BETWEEN_CHECKS = 1.0
# Raised for a user's mistake or a missing part of the machine: the trial refuses. Anything else is a failure.
_REFUSALS = ("ValueError", "TypeError", "ModuleNotFoundError", "NotImplementedError")
# Start threads or devices when they are imported; or replace hasten in the programs that import them.
_NEVER_PRELOADED = (*("tensorflow", "jax", "jaxlib", "grpc"), *("lightning", "pytorch_lightning", "lightning_fabric"))


class Session:
    """Counts and times the steps of a training, and pauses it at the end of each turn until the next order.

    Orders and answers use ``connection``; ``scratch`` is the parent's folder, removed if the parent dies.
    """

    def __init__(self, connection: Connection, scratch: str = "") -> None:
        self._connection, self.scratch = connection, scratch
        # Functions by name that answer ``TrialProcess.ask``; they return values that can be pickled.
        self.handlers: dict[str, Callable[..., Any]] = {}
        # Its memory is reported, and a turn waits for it at its end.
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def ready(self, **facts: object) -> None:
        """Report that the training is set up, with facts, and wait for the first order; then the clock runs."""
        self._send("ready", facts)
        self._wait()

    def after_step(
        self,
        loss: Tensor | float | None = None,
        *,
        samples: int | None = None,
        tokens: Tensor | int | None = None,
        slots: int | None = None,
    ) -> bool:
        """Note that a step has ended; at the end of a turn answer, and wait for the next order.

        Tensors are read at the end of the turn: no step waits for the device. The counts describe the step's batch,
        None if unknown: ``tokens`` without padding, ``slots`` with it. Returns whether a turn has ended.
        """
        # A copy: the next replay of a graph writes to the same memory.
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        self._counts.append((samples, tokens, slots))
        self._times.append(time.perf_counter())
        if len(self._times) < self._steps:
            return False
        self._report()
        self._wait()
        return True

    def fail(self, error: BaseException) -> NoReturn:
        """Report an error to the parent, and end this process."""
        names = [kind.__name__ for kind in type(error).__mro__]
        refused = any(name in _REFUSALS for name in names)
        self.refuse(str(error) if refused else f"{names[0]}: {error}", refused=refused)

    def refuse(self, text: str, *, refused: bool = True) -> NoReturn:
        """Report why this cannot be measured, and end this process."""
        self._send("error", {"text": text, "refused": refused})
        leave()

    def end(self) -> NoReturn:
        """Report that the program has ended, and end this process."""
        self._send("ended")
        leave()

    def _report(self) -> None:
        synchronize(self.device)
        seconds, faults = time.perf_counter() - self._began, page_faults() - self._faults
        waited = min(seconds, seconds_without_core() - self._waited)
        samples, tokens, slots = (
            None if None in counts else int(sum(counts)) for counts in zip(*self._counts, strict=True)
        )
        steps = [end - start for start, end in pairwise([self._began, *self._times])]
        losses = [None if loss is None else float(loss) for loss in self._losses]
        memory_bytes = peak_memory_bytes(self.device)
        self._send("turn", Turn(seconds, steps, losses, samples, tokens, slots, faults, memory_bytes, waited))

    def _wait(self) -> None:
        """Answer the parent's questions until it orders the next turn."""
        _signal_workers(signal.SIGSTOP)
        while (order := self._receive())[0] == "ask":
            _, name, options = order
            try:
                value = self.handlers[name](**options)
            except Exception as error:
                traceback.print_exc()
                self.fail(error)
            self._send("asked", value)
        _signal_workers(signal.SIGCONT)
        self._steps = max(1, order[1])
        self._times: list[float] = []
        self._losses: list[Tensor | float | None] = []
        self._counts: list[tuple[int | None, Tensor | int | None, int | None]] = []
        self._faults, self._waited, self._began = page_faults(), seconds_without_core(), time.perf_counter()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            leave(self.scratch)

    def _send(self, event: str, value: object = None) -> None:
        try:
            self._connection.send((event, value))
        except ConnectionError:
            leave(self.scratch)


def page_faults() -> int:
    """Return how many pages of memory the operating system has provided to this process so far."""
    return resource_usage("ru_minflt")


def seconds_without_core() -> float:
    """Return how long this thread was ready to run while others had the cores; 0 where the system does not say.

    Linux counts it in ``/proc/thread-self/schedstat`` (Documentation/scheduler/sched-stats.rst of the kernel).
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


# -- the process


def main() -> NoReturn:
    """Run the trial that the command line of this process names."""
    path = sys.argv[1]
    del sys.argv[1:]
    run(path)


def run(path: str) -> NoReturn:
    """Call the function that the parent has pickled to a file with its arguments; this process ends when it returns."""
    scratch = os.path.dirname(path)
    _leave_with_parent(scratch)
    session = Session(Client(f"{path}.socket"), scratch)
    try:
        with open(path, "rb") as file:
            # Written by the parent a moment ago, into a folder that only this user can read.
            target, arguments = pickle.load(file)
        function_at(target)(session, *pickle.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        session.fail(error)
    except BaseException:
        leave()
    session.end()


def function_at(place: str) -> Callable[..., Any]:
    """Return the function at "package.module:function".

    Example::

        >>> function_at("os.path:join").__name__
        'join'

    """
    module_name, _, name = place.partition(":")
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{place!r} is not a function that can be imported: {error}.") from error
    return cast("Callable[..., Any]", found)


def leave(scratch: str = "") -> NoReturn:
    """End this process and its workers at once; remove the folder ``scratch`` if its owner cannot."""
    for child in multiprocessing.active_children():
        child.kill()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_with_parent(scratch: str) -> None:
    """End this process when its parent is gone, also in the middle of a long step."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_CHECKS)
        leave(scratch)

    threading.Thread(target=watch, name="hasten-trial", daemon=True).start()


def _signal_workers(number: int) -> None:
    """Stop or continue the loader's workers: a batch made during another trial's turn would be free."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)


# -- the process that trials are forks of: it has imported what they need


def serve() -> None:
    """Import modules and fork trials as the parent requests, until it closes the connection or dies; then end them."""
    connection, scratch = Connection(int(sys.argv[1])), sys.argv[2]
    del sys.argv[1:]
    # Exit codes by process, None while it runs.
    codes: dict[int, int | None] = {}
    with suppress(EOFError, ConnectionError):
        while True:
            request, *values = connection.recv()
            if request == "preload":
                connection.send(_preload(values))
            elif request == "wait":
                connection.send(_exit_code(codes, *values))
            else:
                pid = os.fork()
                if not pid:
                    connection.close()
                    _run_fork(*values)
                codes[pid] = None
                connection.send(pid)
    for pid in codes:
        if _exit_code(codes, pid, 0) is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _preload(modules: Iterable[str]) -> bool:
    """Import modules; return whether forks work: they lose threads, and CUDA that has started."""
    for name in modules:
        with suppress(Exception, SystemExit):
            _import_installed(name)
    # Imported modules are never collected: their pages stay shared.
    gc.collect()
    gc.freeze()
    if threading.active_count() > 1:
        return False
    pid = os.fork()
    if not pid:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _import_installed(name: str) -> None:
    """Import an installed module; the program's own modules may do more than define things."""
    package = name.partition(".")[0]
    if name in sys.modules or package in _NEVER_PRELOADED:
        return
    spec = importlib.util.find_spec(package)
    origin = (spec.origin if spec is not None else None) or ""
    installed = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
    if package == "hasten" or origin in ("built-in", "frozen") or origin.startswith(installed):
        importlib.import_module(name)


def _exit_code(codes: dict[int, int | None], pid: int, seconds: float) -> int | None:
    """Wait so many seconds for the end of a trial; return its exit code, None while it runs."""
    until = time.monotonic() + seconds
    while codes[pid] is None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            codes[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= until:
            break
        else:
            time.sleep(0.005)
    return codes[pid]


def _run_fork(path: str) -> NoReturn:
    try:
        os.setsid()
        with open(f"{path}.log", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run(path)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
