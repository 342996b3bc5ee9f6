"""The child's side of a trial: a process that trains a few steps at a time, as its parent orders.

The parent writes one order a line to a pipe, and the trial answers on another, both as JSON. Between two orders the
trial does nothing, its loader workers included, so that others can be measured. When the parent is gone, however it
ended, the trial ends too.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from hasten.speed.inspect_run import peak_memory_bytes

_SECONDS_BETWEEN_CHECKS = 1.0
# Raised for a user's mistake or a missing part of the machine: the trial refuses. Anything else is a failure.
_REFUSALS = ("ValueError", "TypeError", "ModuleNotFoundError", "NotImplementedError")
# Start threads or devices when they are imported; or replace hasten in the programs that import them.
_NEVER_PRELOADED = (
    "tensorflow",
    "jax",
    "jaxlib",
    "grpc",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
)


class Session:
    """Counts and times the steps of a training, and pauses it at the end of each turn until the next order.

    Orders come from the pipe ``read_fd``, answers go to ``write_fd``; ``scratch`` is the parent's folder, removed if
    the parent dies.
    """

    def __init__(self, read_fd: int, write_fd: int, scratch: str = "") -> None:
        self._orders = os.fdopen(read_fd, "r", encoding="utf-8")
        self._answers = os.fdopen(write_fd, "w", encoding="utf-8")
        self.scratch = scratch
        # Functions by name that answer ``TrialProcess.ask``; they return values that JSON can hold.
        self.handlers: dict[str, Callable[..., Any]] = {}
        # Its memory is reported, and a turn waits for it at its end.
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def ready(self, **facts: object) -> None:
        """Report that the training is set up, with facts, and wait for the first order; then the clock runs."""
        self._send("ready", facts=facts)
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

        Tensors are read at the end of the turn: no step waits for the device. The counts are those of the step's batch,
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
        self._send("error", refused=refused, text=text)
        leave()

    def end(self) -> NoReturn:
        """Report that the program has ended, and end this process."""
        self._send("ended")
        leave()

    def _report(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        faults = _page_faults() - self._faults
        samples, tokens, slots = (
            None if None in counts else int(sum(counts)) for counts in zip(*self._counts, strict=True)
        )
        starts = [self._began, *self._times]
        self._send(
            "turn",
            seconds=now - self._began,
            step_seconds=[end - start for start, end in zip(starts, self._times, strict=False)],
            losses=[None if loss is None else float(loss) for loss in self._losses],
            samples=samples,
            tokens=tokens,
            slots=slots,
            faults=faults,
            memory_bytes=peak_memory_bytes(self.device),
        )

    def _wait(self) -> None:
        """Answer the parent's questions until it orders the next turn."""
        _signal_workers(signal.SIGSTOP)
        while (order := self._receive())["do"] == "ask":
            try:
                value = self.handlers[order["name"]](**order["options"])
            except Exception as error:
                traceback.print_exc()
                self.fail(error)
            self._send("asked", value=value)
        _signal_workers(signal.SIGCONT)
        self._steps = max(1, int(order["steps"]))
        self._times: list[float] = []
        self._losses: list[Tensor | float | None] = []
        self._counts: list[tuple[int | None, Tensor | int | None, int | None]] = []
        self._faults, self._began = _page_faults(), time.perf_counter()

    def _receive(self) -> dict[str, Any]:
        line = self._orders.readline()
        if not line:
            leave(self.scratch)
        order: dict[str, Any] = json.loads(line)
        return order

    def _send(self, event: str, **values: object) -> None:
        try:
            self._answers.write(json.dumps({"event": event, **values}) + "\n")
            self._answers.flush()
        except OSError:
            leave(self.scratch)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


# -- the process


def main() -> NoReturn:
    """Be the trial that the command line of this process names."""
    read_fd, write_fd, path = sys.argv[1:]
    del sys.argv[1:]
    run(path, int(read_fd), int(write_fd))


def run(path: str, read_fd: int, write_fd: int) -> NoReturn:
    """Call the function that the parent has pickled to a file with its arguments; this process ends when it returns."""
    with open(path, "rb") as file:
        # Written by the parent a moment ago, into a folder that only this user can read.
        target, pickled, scratch = pickle.load(file)
    _leave_with_parent(scratch)
    session = Session(read_fd, write_fd, scratch)
    try:
        function_at(target)(session, *pickle.loads(pickled))
    except Exception as error:
        traceback.print_exc()
        session.fail(error)
    except BaseException:
        leave()
    session.end()


def function_at(place: str) -> Callable[..., Any]:
    """Return the function at "package.module:function".

    Raises:
        ValueError: it does not exist.

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
    return found  # type: ignore[no-any-return]


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
    """Answer the parent's requests until it closes the socket or dies; then end all forks."""
    server, scratch = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    children: set[int] = set()
    del sys.argv[1:]
    while True:
        message, fds, _, _ = socket.recv_fds(server, 1 << 16, 3)
        if not message:
            break
        request = json.loads(message)
        answer: dict[str, object]
        if "preload" in request:
            answer = {"works": _preload(request["preload"])}
        elif "wait" in request:
            answer = {"code": _exit_code(request["wait"], children)}
        else:
            pid = os.fork()
            if not pid:
                server.close()
                _run_fork(request["path"], *fds)
            children.add(pid)
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        server.send(json.dumps(answer).encode())
    for pid in children:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _preload(path: str) -> bool:
    """Import the modules that a file names; return whether forks work: they lose threads, and CUDA that has started."""
    with open(path, encoding="utf-8") as file:
        for name in json.load(file):
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


def _exit_code(pid: int, children: set[int]) -> int | None:
    """Return the exit code of a trial; None while it runs."""
    if pid not in children:
        return 0
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _run_fork(path: str, read_fd: int, write_fd: int, log: int) -> NoReturn:
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        run(path, read_fd, write_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
