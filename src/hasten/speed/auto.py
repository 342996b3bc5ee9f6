"""``Trainer.advise`` and ``Trainer(speed="auto")``: the advisor on a model in hand, which trials train copies of."""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.hooks import overrides
from hasten.loops.user_code import check_call
from hasten.machine.allocator import preloaded
from hasten.speed.advice import NOT_TRIED, Advice, composed, recall, remember
from hasten.speed.advisor import AdviceError, Plan, Program, TooShortError, measure
from hasten.speed.inspect_run import key_of
from hasten.speed.levers import Lever, known_levers
from hasten.speed.trial import function_at

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule

# What training before training may cost: fewer turns than the advisor takes when it is asked.
PLAN = Plan(rounds=3, warm_up=2, consent=False, share_of_training=0.2)
# Trainings of fewer steps are over before a process to measure in has started.
_FEW_STEPS = 20
# Of a Trainer, the places of the functions that levers call before each of its trainings.
_changes: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


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
    found = measure(program, levers=levers, plan=plan, say=_say if verbose else lambda line: None)
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


@contextmanager
def choose_speed(trainer: Any, model: Any, train_dataloaders: Any, datamodule: Any) -> Iterator[None]:
    """Switch on what pays for this training, and say so in one line; what is no argument is off again afterwards.

    Only levers of the classes that ``Safety.is_automatic`` names are among them: the same maths up to rounding. What
    else was measured, or would be worth measuring, is named in a line with its class. A verdict remembered from an
    earlier run, or from ``hasten advise``, is used as it is. What cannot be measured trains unchanged, and one line
    says why.

    Args:
        trainer: the Trainer; its arguments change.
        model: what to train; it stays as it is.
        train_dataloaders: the training data, or None.
        datamodule: the datamodule, or None.

    """
    given = trainer.given_arguments
    if given["speed"] == "auto":
        # Once is enough: a second fit goes on with what the first one chose.
        trainer.change_arguments(speed=None)
        _changes[trainer] = _choose(trainer, given, model, train_dataloaders, datamodule)
    with ExitStack() as undo_all:
        for place in _changes.get(trainer, ()):
            undo = function_at(place)(trainer, model)
            if undo is not None:
                undo_all.callback(undo)
        yield


def _choose(
    trainer: Any, given: Mapping[str, Any], model: Any, train_dataloaders: Any, datamodule: Any
) -> list[str]:
    """Set the arguments that pay; return the places of the functions that other levers call."""
    key = key_of(given, model, trainer.strategy.root_device)
    advice = recall(key)
    if advice is not None:
        return _apply(trainer, advice, "remembered")
    if _is_one_of_several():
        # All processes must do the same, and none can wait for another here.
        rank_zero_info(
            "speed='auto': nothing is remembered for this program; measure it once on one device: hasten advise "
            "program.py. Training goes on unchanged."
        )
        return []
    if trainer.fast_dev_run or 0 <= trainer.max_steps < _FEW_STEPS:
        what = "fast_dev_run" if trainer.fast_dev_run else f"max_steps={trainer.max_steps}"
        rank_zero_info(f"speed='auto': {what} ends before anything could be measured: it goes on unchanged.")
        return []
    levers = [lever for lever in known_levers() if lever.preload in (None, preloaded())]
    automatic = sum(lever.safety.is_automatic for lever in levers)
    share = (
        f" for at most {PLAN.share_of_training:.0%} of the time it takes" if PLAN.share_of_training else ""
    )
    rank_zero_info(
        f"speed='auto': measuring{share} which of {automatic} levers pay; training begins after that."
    )
    try:
        program = program_of(trainer, model, train_dataloaders, datamodule)
        advice = measure(program, levers=levers, plan=PLAN)
    except TooShortError as error:
        rank_zero_info(f"speed='auto': this training goes on unchanged: {error}.")
        return []
    except (TypeError, AdviceError) as error:
        text = str(error).removeprefix("Trainer.advise: ").splitlines()[0]
        rank_zero_warn(f"speed='auto': nothing was measured, training goes on unchanged: {text}")
        return []
    kept = remember(key, advice)
    if kept is None and trainer.world_size > 1:
        rank_zero_warn(
            "speed='auto': the verdict cannot be kept for the other processes: training goes on unchanged."
        )
        return []
    return _apply(
        trainer, advice, f"measured in {advice.seconds:.0f} s" + (f", kept in {kept}" if kept else "")
    )


def _can_be_switched_on(lever: Lever, facts: Mapping[str, Any]) -> bool:
    """Return whether a lever needs neither consent nor a process that was started for it."""
    return lever.safety_in(facts).is_automatic and lever.preload in (None, preloaded())


def _apply(trainer: Any, advice: Advice, origin: str) -> list[str]:
    by_name = {lever.name: lever for lever in known_levers()}
    # Consent was not given, whatever is in the file; and a lever may be gone.
    levers = [by_name[name] for name in advice.winners if name in by_name]
    levers = [lever for lever in levers if _can_be_switched_on(lever, advice.facts)]
    if trainer.given_arguments["batch_size"] == "auto":
        # It finds a size with which memory does not run out: these are for a size that stays.
        levers = [lever for lever in levers if not {"micro_batch", "memory"} & set(lever.arguments)]
    if not levers:
        rank_zero_info(f"speed='auto': nothing pays here, training goes on unchanged ({origin}).")
    else:
        trainer.change_arguments(
            **{name: value for lever in levers for name, value in lever.arguments.items()}
        )
        # Without one of those measured it is another speed.
        known = advice.automatic is not None and len(levers) == len(advice.winners)
        factor = f"{advice.automatic.speed:.2f}x with " if known and advice.automatic is not None else ""
        rank_zero_info(f"speed='auto': {factor}{composed(levers)} ({origin}).")
    _recommend(advice)
    return [place for lever in levers if (place := lever.place) is not None]


def _recommend(advice: Advice) -> None:
    """Name what is not switched on because it changes more than rounding, with its class."""
    measured = [line for line in advice.lines if not line.safety.is_automatic]
    if measured:
        more = "; ".join(f"{line.speed:.2f}x with {line.line} ({line.safety})" for line in measured)
        rank_zero_info(f"speed='auto' leaves out what changes more than rounding. Measured were {more}.")
        return
    left = [row for row in advice.rows if row.verdict == NOT_TRIED]
    if left:
        more = ", ".join(
            f"{row.line.removeprefix('L.Trainer(..., ').removesuffix(')')} ({row.safety})" for row in left
        )
        rank_zero_info(
            f"speed='auto' leaves out what changes more than rounding: {more}. `hasten advise program.py` measures "
            "them."
        )


def _is_one_of_several() -> bool:
    """Return whether other processes of this run exist already, which measure nothing."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or "LOCAL_RANK" in os.environ


def _say(line: str) -> None:
    print(f"advise: {line}", flush=True)
