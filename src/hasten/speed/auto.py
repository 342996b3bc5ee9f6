"""``Trainer.advise`` and ``Trainer(speed="auto")``: the advisor on a model in memory, which trials train copies of."""

from __future__ import annotations

import os
import pickle
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.elsewhere import alias
from hasten.hooks import overrides
from hasten.loops.user_code import check_call
from hasten.machine.allocator import preloaded
from hasten.speed.advice import NOT_TRIED, Advice, as_argument, composed, recall, remember
from hasten.speed.advisor import AdviceError, Program, TooShortError, measure
from hasten.speed.inspect_run import key_of
from hasten.speed.levers import Lever, known_levers
from hasten.speed.races import Plan, arguments_of
from hasten.speed.trial import function_at

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule
    from hasten.trainer import Trainer
    from hasten.types import Dataloaders

# What training before training may cost: fewer turns than the advisor takes when it is called.
PLAN = Plan(rounds=3, warm_up=2, consent=False, share_of_training=0.2)
# Trainings of fewer steps are over before a process to measure in has started.
_FEW_STEPS = 20
# By Trainer, the places of the functions that levers call before each of its trainings.
_changes: weakref.WeakKeyDictionary[Trainer, list[str]] = weakref.WeakKeyDictionary()
# By Trainer, what was measured or remembered for it.
verdicts: weakref.WeakKeyDictionary[Trainer, Advice] = weakref.WeakKeyDictionary()


def advise(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
    *,
    levers: Iterable[Lever | str] | None = None,
    rounds: int = 3,
    steps: int | None = None,
    warm_up: int = 3,
    seeds: int = 1,
    combine: bool = True,
    budget_seconds: float | None = 90.0,
    timeout_seconds: float = 900.0,
    verbose: bool = True,
) -> Advice:
    """Measure which switches make this training faster, and recommend the line to write.

    Each switch trains a copy of the model in its own process, in turns with the fastest line so far, until it is
    certain what it gains; its losses must be those of that line within the noise. Model, data, random numbers and
    Trainer are not changed; a result for all switches is kept for ``Trainer(speed="auto")``. If model or data cannot be
    sent to other processes, use ``hasten advise program.py``.

    Args:
        trainer: the Trainer.
        model: the model to train.
        train_dataloaders: the training data, or a datamodule.
        datamodule: gives the data instead.
        levers: switches by name, by the Trainer's argument or as ``hasten.speed.levers.Lever``; all by default.
        rounds: how long a comparison may last: at most 16 times as many turns of each.
        steps: steps of a turn; about half a second's worth by default, 1 to 50.
        warm_up: steps of each before the clock; one if they take long.
        seeds: runs with other seeds, if losses can only be compared by how much they differ by chance.
        combine: put switches on top of one another; else each is compared with the unchanged program.
        budget_seconds: how long everything may take: then it stops, the most promising switches first. None for no
            limit.
        timeout_seconds: how long preparing or a turn may take.
        verbose: print progress and the verdict; ``advice.table()`` has all figures.

    Returns:
        The result: rows, winners, the line to write.

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
    given: Any = SimpleNamespace(**trainer.given_arguments)
    check_call(given, "fit", model, datamodule, train_dataloaders)
    defines_data = overrides(model, LightningModule, "train_dataloader")
    if train_dataloaders is None and datamodule is None and not defines_data:
        raise MisconfigurationException(
            "Trainer.advise(): there is no data. Pass train_dataloaders=..., a datamodule, or define "
            f"{type(model).__name__}.train_dataloader()."
        )
    plan = Plan(rounds, steps, warm_up, seeds, combine, budget_seconds, timeout_seconds)

    def say(line: str) -> None:
        if verbose:
            print(line, flush=True)

    began = time.monotonic()
    program = program_of(trainer, model, train_dataloaders, datamodule)
    found = measure(program, levers=levers, plan=plan, say=lambda line: say(f"advise: {line}"), began=began)
    if levers is None and found.is_worth_keeping:
        # For speed="auto". A result for some levers says nothing about the others.
        remember(key_of(trainer.given_arguments, model, trainer.strategy.root_device), found)
    say(found.summary())
    return found


def program_of(
    trainer: Trainer, model: LightningModule, train_dataloaders: Dataloaders, datamodule: LightningDataModule | None
) -> Program:
    """Return the program of the trials of a model in memory.

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
        for what, value in payload.items():  # noqa: B007
            pickle.dumps(value)
        pickled = pickle.dumps(tuple(payload.values()))
    except Exception as error:
        raise TypeError(
            f"Trainer.advise: {what} cannot be sent to other processes: {error}. Define classes and functions at the "
            "top of a module, without lambdas; or run: hasten advise program.py"
        ) from error
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Classes of the program itself are found by running its file once more, up to where it trains.
    main = os.path.abspath(file) if file is not None and b"__main__" in pickled else None
    if b"__main__" in pickled and main is None:
        raise TypeError(
            "Trainer.advise: the class of the model was typed in here, and other processes cannot find it. Import it "
            "from a file; or run: hasten advise program.py"
        )
    sent = pickle.dumps({
        "path": sys.path[:], "argv": sys.argv[:], "main": main, "alias": alias.active(), "payload": pickled,
    })  # fmt: skip
    # In the order in which they were imported. Those without a file are of Python itself, or Lightning's names.
    modules = [name for name, one in list(sys.modules.items()) if not name.startswith("__") and _has_file(one)]
    return Program(type(model).__name__, "hasten.commands.trial:train_copy", payload=sent, preload=modules)


def _has_file(module: object) -> bool:
    return getattr(module, "__file__", None) is not None


@contextmanager
def choose_speed(
    trainer: Trainer, model: LightningModule, train_dataloaders: Dataloaders, datamodule: LightningDataModule | None
) -> Iterator[None]:
    """Switch on the levers that pay for this training, and log them; changes that are no arguments end with the block.

    Only levers of the classes that ``Safety.is_automatic`` names are among them: the same maths up to rounding. Other
    levers that were measured, or would be worth measuring, are logged with their class. A result kept from an earlier
    run, or from ``hasten advise``, is used without measuring. If a program cannot be measured, it trains unchanged, and
    a message gives the reason. The arguments of the Trainer change; the model does not.
    """
    if trainer.given_arguments["speed"] == "auto":
        # Once is enough: a second fit goes on with what the first one chose.
        key = key_of(trainer.given_arguments, model, trainer.strategy.root_device)
        trainer.change_arguments(speed=None)
        advice, origin = recall(key), "remembered"
        if advice is None and _can_measure(trainer):
            advice = _measured(trainer, model, train_dataloaders, datamodule)
            if advice is not None:
                kept, origin = remember(key, advice), f"measured in {advice.seconds:.0f} s"
                origin += f", kept in {kept}" if kept else ""
                if kept is None and trainer.world_size > 1:
                    advice, text = None, "the result cannot be kept for the other processes"
                    rank_zero_warn(f"speed='auto': {text}: training goes on unchanged.")
        if advice is not None:
            verdicts[trainer] = advice
        _changes[trainer] = [] if advice is None else _apply(trainer, advice, origin)
    with ExitStack() as undo_all:
        for place in _changes.get(trainer, ()):
            undo = function_at(place)(trainer, model)
            if undo is not None:
                undo_all.callback(undo)
        yield


def _can_measure(trainer: Trainer) -> bool:
    """Return whether there is time and place to measure; if not, a message gives the reason."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "LOCAL_RANK" in os.environ:
        # Other processes of this run exist already: all must do the same, and none can wait for another here.
        _log(
            "no result is kept for this program; measure it once on one device: hasten advise program.py. Training "
            "goes on unchanged."
        )
        return False
    if trainer.fast_dev_run or 0 <= trainer.max_steps < _FEW_STEPS:
        what = "fast_dev_run" if trainer.fast_dev_run else f"max_steps={trainer.max_steps}"
        _log(f"{what} ends before anything could be measured: it goes on unchanged.")
        return False
    return True


def _measured(
    trainer: Trainer, model: LightningModule, train_dataloaders: Dataloaders, datamodule: LightningDataModule | None
) -> Advice | None:
    """Return what pays; None if it cannot be measured."""
    levers = [lever for lever in known_levers() if lever.preload in (None, preloaded())]
    automatic, share = sum(lever.safety.is_automatic for lever in levers), PLAN.share_of_training
    limit = f" for at most {share:.0%} of the time it takes" if share else ""
    _log(f"measuring{limit} which of {automatic} levers pay; training begins after that.")
    try:
        program = program_of(trainer, model, train_dataloaders, datamodule)
        return measure(program, levers=levers, plan=PLAN)
    except TooShortError as error:
        _log(f"this training goes on unchanged: {error}.")
    except (TypeError, AdviceError) as error:
        text = str(error).removeprefix("Trainer.advise: ").splitlines()[0]
        rank_zero_warn(f"speed='auto': nothing was measured, training goes on unchanged: {text}")
    return None


def _apply(trainer: Trainer, advice: Advice, origin: str) -> list[str]:
    """Set the arguments that pay; return the places of the functions that other levers call."""
    by_name = {lever.name: lever for lever in known_levers()}
    # Consent was not given, whatever is in the file; a lever may be gone, or need a process that was started for it.
    levers = [
        lever
        for name in advice.winners
        if (lever := by_name.get(name)) is not None
        and lever.safety_in(advice.facts).is_automatic
        and lever.preload in (None, preloaded())
    ]
    if trainer.given_arguments["batch_size"] == "auto":
        # It finds a size that fits into memory: these are for a size that stays.
        levers = [lever for lever in levers if not {"micro_batch", "memory"} & set(lever.arguments)]
    if levers:
        trainer.change_arguments(**arguments_of(levers))
        # The speed was measured with all winners: without one it is another.
        best = advice.automatic if len(levers) == len(advice.winners) else None
        factor = "" if best is None else advice.factor(best)
        _log(f"{f'{factor} with ' if factor else ''}{composed(levers)} ({origin}).")
    else:
        _log(f"nothing pays here, training goes on unchanged ({origin}).")
    _recommend(advice)
    return [place for lever in levers if (place := lever.place) is not None]


def _recommend(advice: Advice) -> None:
    """Log the levers that stay off because they change more than rounding, with their class."""
    measured = [line for line in advice.lines if not line.safety.is_automatic]
    untried = [row for row in advice.rows if row.verdict == NOT_TRIED]
    left_out = "leaves out what changes more than rounding"
    if measured:
        more = "; ".join(f"{advice.factor(line)} with {line.line} ({line.safety})" for line in measured)
        rank_zero_info(f"speed='auto' {left_out}. Measured were {more}.")
    elif untried:
        more = ", ".join(f"{as_argument(row.line)} ({row.safety})" for row in untried)
        rank_zero_info(f"speed='auto' {left_out}: {more}. `hasten advise program.py` measures them.")


def _log(text: str) -> None:
    rank_zero_info(f"speed='auto': {text}")
