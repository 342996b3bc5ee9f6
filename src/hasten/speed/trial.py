"""The child's side of a trial: a process that trains a few steps at a time, as its parent orders.

The parent writes one order a line to a pipe, the trial answers on another, both as JSON. Between two orders the
trial does nothing, its loader workers included, so that others can be measured. When the parent is gone, however it
ended, the trial ends too.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from hasten.speed.inspect_run import peak_memory_bytes

_SECONDS_BETWEEN_CHECKS = 1.0
# What a user's mistake or a missing part of the machine raises: the trial refuses. Anything else is a failure.
_REFUSALS = ("ValueError", "TypeError", "ModuleNotFoundError", "NotImplementedError")


class Session:
    """Counts and times the steps of a training, and pauses it at the end of each turn until the next order.

    Args:
        read_fd: where orders come from.
        write_fd: where answers go.
        scratch: the parent's folder, removed if the parent dies.

    Attributes:
        handlers: functions that answer the parent's ``TrialProcess.ask``, by name; they return what JSON can hold.
        device: its memory is reported, and it is waited for at the end of a turn.
        scratch: see above.

    """

    def __init__(self, read_fd: int, write_fd: int, scratch: str = "") -> None:
        self._orders = os.fdopen(read_fd, "r", encoding="utf-8")
        self._answers = os.fdopen(write_fd, "w", encoding="utf-8")
        self.scratch = scratch
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def ready(self, **facts: Any) -> None:
        """Say that the training is set up, and wait for the first order; the clock runs from then on.

        Args:
            facts: given to the parent, see ``TrialProcess.ready``.

        """
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

        Tensors are read at the end of the turn: no step waits for the device.

        Args:
            loss: of the step.
            samples: in its batch; None where that is not known.
            tokens: in its batch, without padding.
            slots: places for tokens in its batch, padding included.

        Returns:
            Whether a turn has ended.

        """
        # A copy: where a graph is replayed the next step writes to the same memory.
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else loss)
        self._counts.append((samples, tokens, slots))
        self._times.append(time.perf_counter())
        if len(self._times) < self._steps:
            return False
        self._report()
        self._wait()
        return True

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the parent what went wrong, and end this process."""
        names = [kind.__name__ for kind in type(error).__mro__]
        refused = any(name in _REFUSALS for name in names)
        self.refuse(str(error) if refused else f"{names[0]}: {error}", refused=refused)

    def refuse(self, text: str, *, refused: bool = True) -> NoReturn:
        """Tell the parent why this cannot be measured, and end this process."""
        self._send("error", refused=refused, text=text)
        leave()

    def end(self) -> NoReturn:
        """Tell the parent that the program has ended, and end this process."""
        self._send("ended")
        leave()

    def _report(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
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
            faults=faults - self._faults,
            memory_bytes=peak_memory_bytes(self.device),
        )

    def _wait(self) -> None:
        """Answer the parent's questions until it orders the next turn."""
        _signal_workers(signal.SIGSTOP)
        while (order := self._receive())["do"] == "ask":
            try:
                value = self.handlers[order["name"]](**order["options"])
            except Exception as error:
                _print_traceback()
                self.fail(error)
            self._send("asked", value=value)
        _signal_workers(signal.SIGCONT)
        self._steps = max(1, int(order["steps"]))
        self._times: list[float] = []
        self._losses: list[Tensor | float | None] = []
        self._counts: list[tuple[int | None, Tensor | int | None, int | None]] = []
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._began = time.perf_counter()

    def _receive(self) -> dict[str, Any]:
        line = self._orders.readline()
        if not line:
            leave(self.scratch)
        order: dict[str, Any] = json.loads(line)
        return order

    def _send(self, event: str, **values: Any) -> None:
        try:
            self._answers.write(json.dumps({"event": event, **values}) + "\n")
            self._answers.flush()
        except OSError:
            leave(self.scratch)


# -- the process


def main() -> NoReturn:
    """Be the trial that the command line of this process names."""
    read_fd, write_fd, path = sys.argv[1:]
    del sys.argv[1:]
    run(path, int(read_fd), int(write_fd))


def run(path: str, read_fd: int, write_fd: int) -> NoReturn:
    """Call the function that the parent has written to a file; this process ends when it returns.

    Args:
        path: of the pickled name of the function, its arguments, and the parent's folder.
        read_fd: where orders come from.
        write_fd: where answers go.

    """
    with open(path, "rb") as file:
        # Written by the parent a moment ago, into a folder that only this user can read.
        target, pickled, scratch = pickle.load(file)
    _leave_with_parent(scratch)
    session = Session(read_fd, write_fd, scratch)
    try:
        function_at(target)(session, *pickle.loads(pickled))
    except Exception as error:
        _print_traceback()
        session.fail(error)
    except BaseException:
        leave()
    session.end()


def function_at(place: str) -> Callable[..., Any]:
    """Return the function at "package.module:function".

    Raises:
        ValueError: there is none.

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
    """End this process and its workers at once; nothing of the program runs any more.

    Args:
        scratch: a folder to remove, when the process that made it cannot.

    """
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
            try:
                os.kill(child.pid, number)
            except ProcessLookupError:
                continue


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()
