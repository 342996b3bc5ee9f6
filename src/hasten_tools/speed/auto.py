"""``Trainer.advise`` and ``Trainer(speed=...)``: the advisor on a model in memory, which trials train copies of."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.elsewhere import conventions
from hasten.hooks import overrides
from hasten.loops.resume import resolve_path
from hasten.loops.user_code import check_call
from hasten.machine.allocator import preloaded
from hasten.record.about import verdicts
from hasten_tools.speed.advice import NOT_TRIED, Advice, Line, as_argument, composed, recall, remember
from hasten_tools.speed.advisor import AdviceError, Program, measure
from hasten_tools.speed.changes import use_threads_of
from hasten_tools.speed.first_choice import FEWEST_BATCHES, SHARE, Choice, FirstChoice, InPlace, is_free, others
from hasten_tools.speed.inspect_run import data_shape, key_of
from hasten_tools.speed.levers import Lever, choose, known_levers
from hasten_tools.speed.races import Plan, arguments_of
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial import function_at
from hasten_tools.speed.trial_processes import TrialError

if TYPE_CHECKING:
    from hasten import LightningDataModule, LightningModule, Trainer
    from hasten.types import Dataloaders, PathLike

# What training before training may cost: fewer turns than the advisor takes when it is called.
PLAN = Plan(rounds=3, warm_up=2, share_of_training=SHARE)
# Less is over before processes to measure in have started.
_LEAST_SECONDS_FOR_PROCESSES = 60.0
# Longer than the advisor itself takes by default: more hardly finds more.
_MOST_SECONDS = 300.0
# A verdict that was reached without timing a step is looked at again in a training so many times as long.
_MUCH_LONGER = 3.0
# By Trainer, the places of the functions that speed-ups call before each of its trainings.
_changes: weakref.WeakKeyDictionary[Trainer, list[str]] = weakref.WeakKeyDictionary()


def advise(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders,
    datamodule: LightningDataModule | None,
    *,
    levers: Iterable[Lever | str] | None,
    verbose: bool,
    **amount: Any,
) -> Advice:
    """Measure which speed-ups make this training faster; see ``Trainer.advise``, and ``Plan`` for the amount."""
    from hasten import LightningDataModule, LightningModule

    if isinstance(train_dataloaders, LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    given: Any = SimpleNamespace(**trainer.given_arguments)
    check_call(given, "fit", model, datamodule, train_dataloaders)
    defines_data = overrides(model, LightningModule, "train_dataloader")
    if train_dataloaders is None and datamodule is None and not defines_data:
        raise MisconfigurationException(
            "Trainer.advise(): there is no data.",
            fix=f"Pass train_dataloaders=..., a datamodule, or define {type(model).__name__}.train_dataloader().",
        )
    plan = Plan(**amount)

    def say(line: str) -> None:
        if verbose:
            print(line, flush=True)

    began = time.monotonic()
    program = program_of(trainer, model, train_dataloaders, datamodule)
    found = measure(program, levers=levers, plan=plan, say=lambda line: say(f"advise: {line}"), began=began)
    if levers is None and found.is_worth_keeping:
        # For speed="auto". A result for some speed-ups says nothing about the others.
        remember(_key(trainer, model, train_dataloaders, datamodule), found)
    say(found.summary())
    return found


def program_of(
    trainer: Trainer, model: LightningModule, train_dataloaders: Dataloaders, datamodule: LightningDataModule | None
) -> Program:
    """Return the program of the trials of a model in memory; ``TypeError`` if it cannot be sent to other processes."""
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
        raise make_error(
            TypeError,
            f"Trainer.advise: {what} cannot be sent to other processes: {error}.",
            fix=(
                "Define classes and functions at the top of a module, without lambdas; or run: hasten advise program.py"
            ),
        ) from error
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    # Classes of the program itself are found by running its file once more, up to where it trains.
    main = os.path.abspath(file) if file is not None and b"__main__" in pickled else None
    if b"__main__" in pickled and main is None:
        what = "Trainer.advise: the class of the model was defined interactively, where other processes cannot find it."
        raise make_error(TypeError, what, fix="Import it from a file; or run: hasten advise program.py")
    names = conventions.current() is not conventions.HASTEN
    sent = pickle.dumps({
        "path": sys.path[:], "argv": sys.argv[:], "main": main, "alias": names, "payload": pickled,
    })  # fmt: skip
    # In the order in which they were imported. Those without a file are of Python itself, or Lightning's names.
    imported = [(name, getattr(one, "__file__", None)) for name, one in list(sys.modules.items())]
    modules = [name for name, file in imported if file is not None and not name.startswith("__")]
    return Program(type(model).__name__, "hasten_tools.commands.trial:train_copy", payload=sent, preload=modules)


@contextmanager
def choose_speed(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders,
    datamodule: LightningDataModule | None,
    ckpt_path: PathLike | None = None,
) -> Iterator[None]:
    """Switch on what makes this training faster, and log it; changes that are no arguments end with the block.

    ``Trainer(speed=...)`` names the least safe class of a speed-up that may be among them. Other speed-ups that were
    measured, or would be worth measuring, are logged with their class. A training that continues from a checkpoint has
    those of the run that saved it. A result kept from an earlier run, or from ``hasten advise``, is used without
    measuring. If a program cannot be measured, it trains unchanged, and a message gives the reason. The arguments of
    the Trainer change; the model does not.
    """
    speed = trainer.given_arguments["speed"]
    if speed is not None:
        # Once is enough: a second fit continues with what the first one chose.
        trainer.change_arguments(speed=None)
        choice = _Choosing(trainer, model, train_dataloaders, datamodule, speed)
        trainer.chosen_levers, _changes[trainer] = choice.made(ckpt_path)
    with ExitStack() as undo_all:
        for place in _changes.get(trainer, ()):
            undo = function_at(place)(trainer, model)
            if undo is not None:
                undo_all.callback(undo)
        yield


def _key(trainer: Trainer, model: LightningModule, data: Dataloaders, datamodule: LightningDataModule | None) -> str:
    shape = data_shape(data, datamodule, model)
    return key_of(trainer.given_arguments, model, trainer.strategy.root_device, shape)


class _Choosing:
    """The choice for one call of ``fit``."""

    def __init__(
        self,
        trainer: Trainer,
        model: LightningModule,
        train_dataloaders: Dataloaders,
        datamodule: LightningDataModule | None,
        speed: str,
    ) -> None:
        self._trainer, self._model, self._speed = trainer, model, speed
        self._data, self._datamodule = train_dataloaders, datamodule
        self._most = Safety.of_speed(speed)

    def made(self, ckpt_path: PathLike | None) -> tuple[tuple[str, ...], list[str]]:
        """Switch speed-ups on; return their names, and the places of the functions that some of them call."""
        trainer = self._trainer
        checkpoint = Stored.read(trainer, ckpt_path)
        if checkpoint.levers is not None:
            known = {lever.name: lever for lever in known_levers()}
            levers = [known[name] for name in checkpoint.levers if name in known and self._is_free(known[name])]
            if levers:
                self._log(f"{composed(levers)} (as in the run that this one continues).")
            return self._switch_on(levers)
        # Kept by the advisor for all classes, or by an earlier training for this one.
        key = _key(trainer, self._model, self._data, self._datamodule)
        own = f"{key}-{self._most.name.lower()}"
        advice, origin = recall(key) or self._recalled(own), "remembered"
        if advice is None and self._can_measure():
            advice = self._measured(checkpoint.batches)
            if advice is not None:
                kept, origin = remember(own, advice), f"measured in {advice.seconds:.1f} s"
                if not advice.facts["timed"]:
                    origin = "the training is too short to time them"
                origin += f", kept in {kept}" if kept else ""
                if kept is None and trainer.runtime.several_processes:
                    advice, text = None, "the result cannot be kept for the other processes"
                    rank_zero_warn(f"speed={self._speed!r}: {text}: training continues unchanged.")
        if advice is None:
            return (), []
        verdicts[trainer] = advice
        return self._apply(advice, origin)

    def _recalled(self, key: str) -> Advice | None:
        """Return the verdict of an earlier training, if that was long enough to stand for this one."""
        found = recall(key)
        if found is None or found.facts.get("timed", True):
            return found
        batches = self._known_batches()
        is_longer = math.isfinite(batches) and batches > _MUCH_LONGER * found.facts.get("batches", math.inf)
        return None if is_longer and self._is_alone() else found

    def _known_batches(self) -> float:
        """Return the number of training batches, if it is already known; else infinity."""
        trainer, batches = self._trainer, math.inf
        if trainer.max_steps >= 0:
            batches = trainer.max_steps * trainer.accumulate_grad_batches
        if trainer.max_epochs is not None and trainer.max_epochs >= 0 and isinstance(self._data, DataLoader):
            limit = trainer.given_arguments["limit_train_batches"]
            with suppress(TypeError):
                length, share = len(self._data), 1.0 if limit is None else limit
                batches = min(
                    batches, trainer.max_epochs * (min(length, limit) if isinstance(limit, int) else length * share)
                )
        return batches

    def _is_alone(self) -> bool:
        """Return whether no other process of this run exists yet."""
        return int(os.environ.get("WORLD_SIZE", "1")) <= 1 and "LOCAL_RANK" not in os.environ

    def _can_measure(self) -> bool:
        """Return whether there is time and place to measure; if not, a message gives the reason."""
        trainer = self._trainer
        if not self._is_alone():
            # All must do the same, and none can wait for another here.
            self._log(
                "no result is kept for this program; measure it once on one device: hasten advise program.py. "
                "Training continues unchanged."
            )
            return False
        if trainer.fast_dev_run or self._known_batches() < FEWEST_BATCHES:
            few = f"max_steps={trainer.max_steps}" if trainer.max_steps >= 0 else f"max_epochs={trainer.max_epochs}"
            what = "fast_dev_run" if trainer.fast_dev_run else few
            self._log(f"{what} ends before anything could be measured: it continues unchanged.")
            return False
        return True

    def _measured(self, done: float) -> Advice | None:
        """Return what is faster; None if it cannot be measured."""
        levers = [lever for lever in known_levers() if lever.preload in (None, preloaded())]
        trainer, model = self._trainer, self._model
        # The first optimizer of a process imports a lot, which the training would pay for, too.
        torch.optim.SGD([torch.zeros(1)], lr=0.0)
        place = InPlace(trainer, model, self._data, self._datamodule)
        title, given = type(model).__name__, trainer.given_arguments
        first = FirstChoice(place, self._most, title=title, given=given, levers=levers, done=done)
        undo = use_threads_of(trainer.num_devices)
        try:
            choice = first.choose(self._known_batches())
        except TrialError as error:
            # What is wrong shows when the training begins.
            self._log(f"nothing was measured, training continues unchanged: {error.text}")
            return None
        finally:
            undo()
        if choice is None:
            self._log("this training ends before anything could be measured: it continues unchanged.")
            return None
        rest = others(levers)
        # Of a training without a known end, no share is known either.
        is_long = _LEAST_SECONDS_FOR_PROCESSES <= choice.left_seconds < math.inf or PLAN.share_of_training is None
        return self._with_processes(choice, rest) if rest and is_long else choice.advice

    def _with_processes(self, choice: Choice, levers: list[Lever]) -> Advice:
        """Return what is faster; speed-ups that only other processes can try are compared on top of the choice."""
        trainer, advice = self._trainer, choice.advice
        limit = f" for at most {min(choice.left_seconds, _MOST_SECONDS):.0f} s" if PLAN.share_of_training else ""
        classes = [lever for lever in levers if lever.safety <= self._most]
        self._log(f"measuring{limit} which of {len(classes)} more speed-ups help; training begins after that.")
        budget = min(choice.left_seconds, _MOST_SECONDS) if PLAN.share_of_training else None
        plan = dataclasses.replace(PLAN, most=self._most, budget_seconds=budget, share_of_training=None)
        known = {lever.name: lever for lever in known_levers()}
        chosen = [known[name] for line in advice.lines for name in line.levers]
        on_top = trainer.with_arguments(**arguments_of(chosen)) if chosen else trainer
        try:
            program = program_of(on_top, self._model, self._data, self._datamodule)
            found = measure(program, levers=levers, plan=plan)
        except (TypeError, AdviceError, OSError) as error:
            text = str(error).removeprefix("Trainer.advise: ").splitlines()[0]
            kept = "what was measured before is used" if chosen else "training continues unchanged"
            rank_zero_warn(f"speed={self._speed!r}: nothing more was measured, {kept}: {text}")
            return advice
        return together(advice, found, chosen)

    def _apply(self, advice: Advice, origin: str) -> tuple[tuple[str, ...], list[str]]:
        """Set the arguments that help; return the names of the speed-ups, and the functions that some of them call."""
        by_name = {lever.name: lever for lever in known_levers()}
        best = advice.best_within(self._most)
        wanted = advice.winners if self._speed == "auto" else best.levers if best is not None else []
        # Consent was not given, whatever is in the file; a speed-up may be gone, or need a process started for it.
        levers = [
            lever
            for name in wanted
            if (lever := by_name.get(name)) is not None
            and self._is_free(lever)
            and lever.safety_in(advice.facts) <= self._most
            and lever.preload in (None, preloaded())
        ]
        if self._trainer.given_arguments["batch_size"] == "auto":
            # It finds a size that fits into memory: these are for a size that stays.
            levers = [lever for lever in levers if not {"micro_batch", "memory"} & set(lever.arguments)]
        if levers:
            # The speed was measured with all of them: without one it is another.
            factor = advice.factor(best) if best is not None and len(levers) == len(wanted) else ""
            self._log(f"{f'{factor} with ' if factor else ''}{composed(levers)} ({origin}).")
        else:
            self._log(f"nothing is faster here, training continues unchanged ({origin}).")
        self._recommend(advice)
        return self._switch_on(levers)

    def _is_free(self, lever: Lever) -> bool:
        return is_free(lever, self._trainer.given_arguments)

    def _switch_on(self, levers: list[Lever]) -> tuple[tuple[str, ...], list[str]]:
        arguments = arguments_of(levers)
        if arguments.get("resident") is True:
            # Data that turns out not to be held is read as before, and ends no training.
            arguments["resident"] = "auto"
        if arguments:
            self._trainer.change_arguments(**arguments)
        places = [place for lever in levers if (place := lever.place) is not None]
        return tuple(lever.name for lever in levers), places

    def _recommend(self, advice: Advice) -> None:
        """Log the speed-ups that stay off because they change more than was allowed, with their class."""
        measured = [line for line in advice.lines if line.safety > self._most]
        untried = [row for row in advice.rows if row.verdict == NOT_TRIED]
        left_out = f"leaves out what changes more than {self._most.limit}"
        if measured:
            more = "; ".join(f"{advice.factor(line)} with {line.line} ({line.safety})" for line in measured)
            self._log(f"{left_out}. Measured were {more}.", colon="")
        elif untried:
            more = ", ".join(f"{as_argument(row.line)} ({row.safety})" for row in untried)
            self._log(f"{left_out}: {more}. `hasten advise program.py` measures them.", colon="")

    def _log(self, text: str, *, colon: str = ":") -> None:
        rank_zero_info(f"speed={self._speed!r}{colon} {text}")


def together(first: Advice, found: Advice, chosen: Sequence[Lever]) -> Advice:
    """Return one result of a first choice and of what was measured on top of it."""
    names, lines = [lever.name for lever in chosen], []
    before = next(iter(first.lines), None)
    for line in found.lines:
        added = [lever for lever in choose(line.levers) if lever.name not in names]
        every = [*chosen, *added]
        safety = max(line.safety, before.safety) if before is not None else line.safety
        speed = line.speed if before is None else line.speed * before.speed
        ends = (line.low, line.high) if before is None else (None, None)
        lines.append(Line(safety, composed(every), [lever.name for lever in every], speed, *ends))
    return dataclasses.replace(
        found,
        rows=[*first.rows, *found.rows],
        lines=[*first.lines, *lines],
        winners=[*first.winners, *(name for name in found.winners if name not in first.winners)],
        facts={**found.facts, "timed": True, "batches": first.facts.get("batches")},
        seconds=round(first.seconds + found.seconds, 1),
    )


@dataclasses.dataclass(frozen=True)
class Stored:
    """The names of the speed-ups of the run that saved a checkpoint, and how many batches were done."""

    # None if the run did not choose any, or if there is no checkpoint.
    levers: list[str] | None = None
    batches: float = 0.0

    @classmethod
    def read(cls, trainer: Trainer, ckpt_path: PathLike | None) -> Stored:
        """Read it from the file that a call of ``fit`` continues from; a file that says nothing counts as none."""
        with warnings.catch_warnings(), suppress(Exception):
            # The run reads the file again, and says what is wrong with it.
            warnings.simplefilter("ignore")
            path = resolve_path(trainer, ckpt_path)
            if path is not None and os.path.isfile(path):
                contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                levers = (contents.get("hasten") or {}).get("levers")
                batches = ((contents.get("loops") or {}).get("fit") or {}).get("total_batches", 0)
                return cls(levers, batches)
        return cls()
