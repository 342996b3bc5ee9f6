"""``Trainer(speed="auto")``: measure levers before training, keep those that win and change rounding at most."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.machine.allocator import preloaded
from hasten.speed.advice import NOT_TRIED, Advice, composed, recall, remember
from hasten.speed.advisor import AdviceError, Plan, TooShortError, measure
from hasten.speed.in_process import program_of
from hasten.speed.inspect_run import key_of
from hasten.speed.levers import Lever, known_levers
from hasten.speed.trial import function_at

# What training before training may cost: fewer turns than the advisor takes when it is asked.
PLAN = Plan(rounds=3, warm_up=2, consent=False, share_of_training=0.2)
# Trainings of fewer steps are over before a process to measure in has started.
_FEW_STEPS = 20
# Of a Trainer, the places of the functions that levers call before each of its trainings.
_changes: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


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
