"""The advisor in a program that runs: model, data and Trainer are sent to the trials, which train copies of them."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.errors import MisconfigurationException
from hasten.hooks import overrides
from hasten.loops.preflight import check_call
from hasten.speed import look, remembered
from hasten.speed.advice import Advice
from hasten.speed.advisor import MakeStart, Plan, measure
from hasten.speed.engine import Process
from hasten.speed.levers import Lever
from hasten.speed.race import Start, environment, start_command

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule

# What a trial of a program that runs is told: how to make its Trainer, and what to train.
Payload = dict[str, Any]


def advise(
    trainer: Any,
    model: LightningModule,
    train_dataloaders: Any = None,
    datamodule: LightningDataModule | None = None,
    *,
    levers: Iterable[Lever | str] | None = None,
    rounds: int = 3,
    steps: int | None = None,
    warm_up: int = 3,
    seeds: int = 1,
    combine: bool = True,
    budget_seconds: float | None = None,
    timeout_seconds: float = 900.0,
    verbose: bool = True,
) -> Advice:
    """Measure which switches make this training faster, and say what to write.

    Each switch trains a copy of the model for some tens of steps in a process of its own, in turns with the unchanged
    program; its losses must be those of the unchanged program within the noise. Model, data, random numbers and
    Trainer stay as they are; a verdict on all switches is remembered for ``Trainer(speed="auto")``. For programs whose
    model or data cannot be sent to other processes there is ``hasten advise program.py``.

    Args:
        trainer: the Trainer.
        model: what to train.
        train_dataloaders: the training data, or a datamodule.
        datamodule: gives the data instead.
        levers: which switches, by name, by the Trainer's argument or as ``hasten.speed.levers.Lever``; all by default.
        rounds: turns of each switch.
        steps: of each turn; about a second's worth by default, 3 to 50.
        warm_up: steps of each before the clock.
        seeds: runs of the unchanged program with other seeds: how much losses differ by chance.
        combine: also measure the winners together.
        budget_seconds: about how long all of it may take: turns become shorter and fewer, and what then does not fit
            is left out; as long as it takes by default.
        timeout_seconds: how long preparing or a turn may take.
        verbose: say what is being done, and print the table.

    Returns:
        What was found: rows, winners, the line to write.

    Raises:
        TypeError: model or data cannot be sent to other processes, or are none.
        MisconfigurationException: a step, configure_optimizers or data is missing.
        ValueError: a switch does not exist, or a number is out of range.
        RuntimeError: the unchanged program cannot be measured.

    """
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule

    if isinstance(train_dataloaders, LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    check_call(trainer._arguments, "fit", model, datamodule, train_dataloaders)
    if (
        train_dataloaders is None
        and datamodule is None
        and not overrides(model, LightningModule, "train_dataloader")
    ):
        raise MisconfigurationException(
            f"Trainer.advise(): there is no data. Pass train_dataloaders=..., a datamodule, or define "
            f"{type(model).__name__}.train_dataloader()."
        )
    plan = Plan(
        rounds=rounds,
        steps=steps,
        warm_up=warm_up,
        seeds=seeds,
        combine=combine,
        budget_seconds=budget_seconds,
        timeout_seconds=timeout_seconds,
    )
    say = _say if verbose else _be_silent
    found = measure(
        make_start(trainer, model, train_dataloaders, datamodule),
        f"{type(model).__name__}",
        levers=levers,
        plan=plan,
        say=say,
    )
    if levers is None and found.is_complete:
        # For speed="auto". What only some levers were measured for is no verdict on the others.
        key = look.key_of(trainer.__dict__.get("_given", {}), model, trainer._runtime.device)
        remembered.remember(key, found)
    if verbose:
        print(found.table(), flush=True)
    return found


def make_start(trainer: Any, model: Any, train_dataloaders: Any, datamodule: Any) -> MakeStart:
    """Return what starts trials of a model in hand.

    Raises:
        TypeError: it cannot be sent to other processes, and this process cannot be copied.

    """
    payload: Payload = {
        "trainer_class": type(trainer),
        "given": dict(trainer.__dict__.get("_given", {})),
        "model": model,
        "train_dataloaders": train_dataloaders,
        "datamodule": datamodule,
    }
    try:
        pickled = pickle.dumps(payload)
    except Exception as error:
        if _may_fork():
            return lambda scratch: _fork(payload)
        raise TypeError(
            f"Trainer.advise: {_which(payload)} cannot be sent to other processes: {error}. Define classes and "
            "functions at the top of a module, without lambdas; or run: hasten advise program.py"
        ) from error
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    # Classes of the program itself are found by running its file once more, up to where it trains.
    program = os.path.abspath(file) if file is not None and b"__main__" in pickled else None
    if b"__main__" in pickled and program is None:
        if _may_fork():
            return lambda scratch: _fork(payload)
        raise TypeError(
            "Trainer.advise: the model is of a class that was typed in here, which other processes cannot find. Put it "
            "into a file and import it; or run: hasten advise program.py"
        )

    def make(scratch: Path) -> Start:
        path = scratch / "payload.pickle"
        path.write_bytes(pickle.dumps({"path": list(sys.path), "program": program, "payload": pickled}))
        return start_command([sys.executable, "-m", "hasten.commands.trial", "{trial}", "--live", str(path)])

    return make


def _may_fork() -> bool:
    """Return whether a copy of this process would work: no other threads, neither Python's, OpenMP's nor CUDA's."""
    return (
        hasattr(os, "fork")
        and sys.platform != "darwin"
        and threading.active_count() == 1
        and torch.get_num_threads() == 1
        and not torch.cuda.is_initialized()
    )


def _which(payload: Payload) -> str:
    """Return what it is that cannot be pickled."""
    names = {
        "given": "an argument of the Trainer",
        "model": "the model",
        "train_dataloaders": "the training data",
        "datamodule": "the datamodule",
        "trainer_class": "the class of the Trainer",
    }
    for name, what in names.items():
        try:
            pickle.dumps(payload[name])
        except Exception:
            return what
    return "something"


class _Forked:
    """The process of a trial that is a copy of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                import subprocess

                raise subprocess.TimeoutExpired("trial", timeout or 0.0)
            time.sleep(0.01)
        return code


def _fork(payload: Payload) -> Start:
    # Imported before the copies are made: each would do it again.
    import importlib

    run: Callable[..., Any] = importlib.import_module("hasten.commands.trial").run_copy

    def start(orders: str, read_fd: int, write_fd: int, log: Any) -> Process:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return _Forked(pid)
        code = 1
        try:
            os.setsid()
            os.environ.update(environment(json.loads(orders)["scratch"]))
            tempfile.tempdir = None
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            # The ends that the parent holds, of this trial and of others, would keep pipes open.
            _close_all_but({0, 1, 2, read_fd, write_fd})
            run(orders, read_fd, write_fd, payload)
            code = 0
        finally:
            os._exit(code)

    return start


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        fd = int(name)
        if fd not in kept:
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                    os.close(fd)
            except OSError:
                continue


def _say(line: str) -> None:
    print(f"advise: {line}", flush=True)


def _be_silent(line: str) -> None:
    pass
