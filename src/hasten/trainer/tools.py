"""What other packages implement for the Trainer: ``advise``, ``check``, ``eject``, ``speed=`` and the loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from hasten.extend.entry_points import load

if TYPE_CHECKING:
    from hasten import LightningDataModule, LightningModule, Trainer
    from hasten.trainer.properties import TrainerView
    from hasten.types import Dataloaders, PathLike
    from hasten_lightning.internals.results import LoggerConnector
    from hasten_lightning.loops.views import LoopView
    from hasten_tools.preflight.report import CheckReport
    from hasten_tools.speed.advice import Advice
    from hasten_tools.speed.levers import Lever

L = TypeVar("L", bound="LoopView | LoggerConnector")


class LoopOf(Generic[L]):
    """A loop of Lightning's as an attribute of a Trainer: the counters of a run under its names, by an entry point.

    The same object at each look. The core itself reads the run.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> LoopOf[L]: ...

    @overload
    def __get__(self, instance: TrainerView, owner: type) -> L: ...

    def __get__(self, instance: TrainerView | None, owner: type) -> LoopOf[L] | L:
        if instance is None:
            return self
        if self._name not in instance._loops:
            make = load("hasten.trainer", self._name, purpose=f"Trainer.{self._name}")
            instance._loops[self._name] = make(instance)
        loop: L = instance._loops[self._name]
        return loop

    def __set__(self, instance: TrainerView, value: LoopView) -> None:
        ours = self.__get__(instance, type(instance))
        if isinstance(value, type(ours)) and value.replaces(ours):
            instance._loops[self._name] = value
            return
        raise AttributeError(
            f"Trainer.{self._name} cannot be replaced: the loop is a function of hasten, and this is a view of it. To "
            "change what happens in a run, override hooks of the module, write a callback, or use Fabric for a loop "
            "of your own."
        )


def choose_speed(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders,
    datamodule: LightningDataModule | None,
    ckpt_path: PathLike | None,
) -> AbstractContextManager[None]:
    """Return a context in which the speed-ups that ``Trainer(speed=...)`` has chosen are on."""
    speed = trainer._given["speed"]
    if speed is None and trainer.chosen_levers is None:
        return nullcontext()
    purpose = f"Trainer(speed={speed!r})"
    choose: Callable[..., AbstractContextManager[None]] = load("hasten.trainer", "choose_speed", purpose=purpose)
    return choose(trainer, model, train_dataloaders, datamodule, ckpt_path)


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
    """Measure which speed-ups make this training faster, and recommend the line to write.

    Each speed-up trains a copy of the model in its own process, in turns with the fastest combination so far, until
    its gain is certain; the losses of both must agree within the noise. Model, data, random numbers and Trainer are
    not changed; a result for all speed-ups is kept for ``Trainer(speed="auto")``. If model or data cannot be sent to
    other processes, use ``hasten advise program.py``.

    Args:
        trainer: the Trainer.
        model: the model to train.
        train_dataloaders: the training data, or a datamodule.
        datamodule: gives the data instead.
        levers: the speed-ups: names, arguments of the Trainer, or ``hasten_tools.speed.levers.Lever``; default: all.
        rounds: how long a comparison may last: at most 16 times as many turns of each.
        steps: steps of a turn; about half a second's worth by default, 1 to 50.
        warm_up: steps of each before timing; one if they take long.
        seeds: runs with other seeds, if losses can only be compared by how much they differ by chance.
        combine: put speed-ups on top of one another; else each is compared with the unchanged program.
        budget_seconds: how long everything may take: then it stops, the most promising speed-ups first. None for no
            limit.
        timeout_seconds: how long preparing or a turn may take.
        verbose: print progress and the verdict; ``advice.table()`` has all figures.

    Returns:
        The result: rows, winners, the line to write.

    Raises:
        TypeError: model or data have a wrong type, or cannot be sent to other processes.
        MisconfigurationException: a step, configure_optimizers or data is missing.
        ValueError: a speed-up does not exist, or a number is out of range.
        RuntimeError: the unchanged program cannot be measured.

    """
    run: Callable[..., Advice] = load("hasten.trainer", "advise", purpose="Trainer.advise")
    return run(
        trainer, model, train_dataloaders, datamodule, levers=levers, rounds=rounds, steps=steps, warm_up=warm_up,
        seeds=seeds, combine=combine, budget_seconds=budget_seconds, timeout_seconds=timeout_seconds, verbose=verbose,
    )  # fmt: skip


def check(
    self: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    val_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
) -> CheckReport:
    """Check model, data and arguments in seconds, before a long fit.

    Three batches are trained on and one of each other loader is evaluated, in this process. Afterwards model, data,
    random numbers and Trainer are restored, and nothing was written. See docs/check.md.

    Args:
        model: the module.
        train_dataloaders: as for ``fit``; or a datamodule.
        val_dataloaders: as for ``fit``.
        datamodule: provides the data instead, also for test and predict.

    Returns:
        What was found: print it for the table, or call its ``raise_if_failed()``.

    Example::

        >>> import hasten as L
        >>> from hasten.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.check(BoringModel()).ok
        True

    """
    run: Callable[..., CheckReport] = load("hasten.trainer", "check", purpose="Trainer.check")
    return run(self, self._arguments, model, train_dataloaders, val_dataloaders, datamodule)


def eject(
    self: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    val_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
    output: PathLike | None = None,
) -> str:
    """Return the plain PyTorch program that trains ``model`` as ``fit`` would, to the same bits, without hasten.

    In a script it is the whole script, with a training loop in place of the Trainer. In a notebook it has the classes,
    what they use, and a function ``train`` that takes a model and its data. Nothing is trained. The command
    ``hasten eject program.py`` does the same for a program; see docs/eject.md.

    Args:
        model: the module.
        train_dataloaders: the training data; or a datamodule.
        val_dataloaders: the validation data.
        datamodule: provides the data instead.
        output: a file to write the program to.

    Raises:
        EjectError: something has no short equivalent; the message names it, with its line if there is one.

    Example::

        >>> import hasten as L
        >>> from hasten.demos.boring_classes import BoringModel
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> program = trainer.eject(BoringModel())
        >>> "L.LightningModule" in program, "loss.backward()" in program
        (False, True)

    """
    data = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}
    run: Callable[..., str] = load("hasten.trainer", "eject", purpose="Trainer.eject")
    return run(self, model, data, output)
