"""The process of a trial: the program, or a model in hand, under the advisor's orders. Started by the advisor only."""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from hasten.commands import run
from hasten.seed import seed_everything
from hasten.speed.program import leave


class _Enough(BaseException):
    """The program has come to where it trains: all its classes are there."""


def main(arguments: Sequence[str]) -> int:
    """Run ``READ WRITE ORDERS PROGRAM [its arguments]``, or ``READ WRITE ORDERS --live FILE``."""
    read_fd, write_fd, orders, *rest = arguments
    trial, channel = _begin(int(read_fd), int(write_fd), orders)
    if rest[0] == "--live":
        _train_copy(trial, channel, rest[1])
    trial.install()
    _refuse_own_loops(channel)
    # Where a program does not seed itself, all trials still begin with the same weights.
    seed_everything(0, verbose=False)
    try:
        code = run.main(rest)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    if code:
        channel.send(
            "error", kind="", refused=False, text=f"the program ended with code {code}", place="program"
        )
    else:
        channel.send("no_fit")
    return 0


def _refuse_own_loops(channel: Any) -> None:
    """Say so at the first backward of a program that keeps its own loop: nothing of it would be measured."""
    from hasten.fabric import Fabric

    make = Fabric.__init__

    def backward(*args: Any, **given: Any) -> NoReturn:
        text = (
            "it keeps its own loop (Fabric.backward), and the advisor measures Trainer.fit. Of the switches "
            "precision, matmul_precision, fused_optimizer and compile are arguments of Fabric, too: try them there"
        )
        channel.send("error", refused=False, text=text)
        leave()

    @functools.wraps(make)
    def __init__(fabric: Any, *args: Any, **given: Any) -> None:  # noqa: N807
        make(fabric, *args, **given)
        # The instance has a method of its own.
        fabric.backward = backward

    setattr(Fabric, "__init__", __init__)  # noqa: B010


def run_copy(orders: str, read_fd: int, write_fd: int, payload: dict[str, Any]) -> None:
    """Be the trial in a copy of the advisor's own process."""
    trial, channel = _begin(read_fd, write_fd, orders)
    _train(trial, channel, payload)


def _begin(read_fd: int, write_fd: int, orders: str) -> tuple[Any, Any]:
    from hasten.speed.program import Channel, Orders, Trial, leave_with_parent
    from hasten.trainer import Trainer

    channel = Channel(read_fd, write_fd)
    given = Orders(**json.loads(orders))
    leave_with_parent(given.scratch)
    return Trial(channel, given, Trainer), channel


def _train_copy(trial: Any, channel: Any, path: str) -> NoReturn:
    with open(path, "rb") as file:
        # Written by the advisor a moment ago, into a folder that only this user can read.
        sent = pickle.load(file)
    try:
        sys.path[:] = sent["path"]
        if sent["program"] is not None:
            _load_program(sent["program"])
        payload = pickle.loads(sent["payload"])
    except Exception as error:
        channel.fail(error)
    _train(trial, channel, payload)


def _train(trial: Any, channel: Any, payload: dict[str, Any]) -> NoReturn:
    trial.install()
    trainer = payload["trainer_class"].__new__(payload["trainer_class"])
    # The class given may take other arguments; these are those that arrived at the Trainer itself.
    trial._class.__init__(trainer, **payload["given"])
    data = {name: payload[name] for name in ("train_dataloaders", "datamodule")}
    try:
        trainer.fit(payload["model"], **data)
    except Exception as error:
        channel.fail(error)
    raise AssertionError("a training under orders does not return")


def _load_program(file: str) -> None:
    """Run a program as an imported file until it trains, measures or ends: it then has its classes."""
    from hasten.trainer import Trainer

    def enough(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Enough

    names = ("fit", "validate", "test", "predict", "advise")
    before = {name: getattr(Trainer, name) for name in names if hasattr(Trainer, name)}
    module = ModuleType("__mp_main__")
    module.__file__ = file
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    try:
        for name in before:
            setattr(Trainer, name, enough)
        exec(code, module.__dict__)
    except _Enough:
        pass
    finally:
        for name, function in before.items():
            setattr(Trainer, name, function)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
