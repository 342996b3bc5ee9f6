"""The advisor in a program that runs: model, data and Trainer are sent to the trials, which train copies of them."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten.hooks import overrides
from hasten.loops.preflight import check_call
from hasten.speed.advice import Advice, remember
from hasten.speed.advisor import Plan, Program, measure
from hasten.speed.inspect_run import key_of
from hasten.speed.levers import Lever

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule


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

    Each switch trains a copy of the model in a process of its own, in turns with the fastest line so far, until it is
    certain what it gains; its losses must be those of that line within the noise. Model, data, random numbers and
    Trainer stay as they are; a verdict on all switches is remembered for ``Trainer(speed="auto")``. For programs whose
    model or data cannot be sent to other processes there is ``hasten advise program.py``.

    Args:
        trainer: the Trainer.
        model: what to train.
        train_dataloaders: the training data, or a datamodule.
        datamodule: gives the data instead.
        levers: which switches, by name, by the Trainer's argument or as ``hasten.speed.levers.Lever``; all by default.
        rounds: how long a comparison may go on: at most 16 times as many turns of each.
        steps: of a turn; about half a second's worth by default, 1 to 50.
        warm_up: steps of each before the clock; one where they take long.
        seeds: runs with other seeds, where losses can only be compared by how much they differ by chance.
        combine: put switches on top of one another; else each is compared with the unchanged program.
        budget_seconds: how long all of it may take: then it stops, the most promising switches first. No limit by
            default.
        timeout_seconds: how long preparing or a turn may take.
        verbose: print what is being done, and the table.

    Returns:
        What was found: rows, winners, the line to write.

    Raises:
        TypeError: model or data have a wrong type, or cannot be sent to other processes.
        MisconfigurationException: a step, configure_optimizers or data is missing.
        ValueError: a switch does not exist, or a number is out of range.
        RuntimeError: the unchanged program cannot be measured.

    """
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule

    if isinstance(train_dataloaders, LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    arguments: Any = SimpleNamespace(**trainer.given_arguments)
    check_call(arguments, "fit", model, datamodule, train_dataloaders)
    defines_data = overrides(model, LightningModule, "train_dataloader")
    if train_dataloaders is None and datamodule is None and not defines_data:
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
    program = program_of(trainer, model, train_dataloaders, datamodule)
    found = measure(program, levers=levers, plan=plan, say=_say if verbose else _be_silent)
    if levers is None and found.is_complete:
        # For speed="auto". A verdict on some levers says nothing about the others.
        remember(key_of(trainer.given_arguments, model, trainer.strategy.root_device), found)
    if verbose:
        print(found.table(), flush=True)
    return found


def program_of(trainer: Any, model: Any, train_dataloaders: Any, datamodule: Any) -> Program:
    """Return what trials of a model in hand run.

    Raises:
        TypeError: it cannot be sent to other processes.

    """
    payload = {
        "an argument of the Trainer": trainer.given_arguments,
        "the class of the Trainer": type(trainer),
        "the model": model,
        "the training data": train_dataloaders,
        "the datamodule": datamodule,
    }
    try:
        pickled = pickle.dumps(tuple(payload.values()))
    except Exception as error:
        raise TypeError(
            f"Trainer.advise: {_first_unpicklable(payload)} cannot be sent to other processes: {error}. Define classes "
            "and functions at the top of a module, without lambdas; or run: hasten advise program.py"
        ) from error
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Classes of the program itself are found by running its file once more, up to where it trains.
    main = os.path.abspath(file) if file is not None and b"__main__" in pickled else None
    if b"__main__" in pickled and main is None:
        raise TypeError(
            "Trainer.advise: the model is of a class that was typed in here, which other processes cannot find. Put it "
            "into a file and import it; or run: hasten advise program.py"
        )
    sent = pickle.dumps({"path": sys.path[:], "argv": sys.argv[:], "main": main, "payload": pickled})
    # In the order in which they were imported.
    modules = [name for name in sys.modules if not name.startswith("__")]
    return Program(type(model).__name__, "hasten.commands.trial:train_copy", payload=sent, preload=modules)


def _first_unpicklable(payload: dict[str, Any]) -> str:
    for what, value in payload.items():
        try:
            pickle.dumps(value)
        except Exception:
            return what
    return "something"


def _say(line: str) -> None:
    print(f"advise: {line}", flush=True)


def _be_silent(line: str) -> None:
    pass
