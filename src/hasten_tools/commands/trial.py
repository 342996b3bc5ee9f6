"""Run the program in a trial process of ``hasten advise``, ``Trainer.advise`` and ``Trainer(speed="auto")``."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

from hasten import Fabric, Trainer
from hasten._lib.observers import set_during
from hasten.seed import seed_everything
from hasten_lightning.commands import run
from hasten_tools.speed.fit_trial import FitTrial, Orders
from hasten_tools.speed.trial import Session


class _Enough(BaseException):
    """Raised when the program starts to train: all its classes are defined."""


def run_program(session: Session, orders: Orders, words: Sequence[str]) -> None:
    """Run a program up to its first training, which the parent orders in turns."""
    FitTrial(session, orders, Trainer).install()
    _refuse_own_loops(session)
    # A program may not seed itself; all trials begin with the same weights.
    seed_everything(0, verbose=False)
    try:
        code = run.main(words, as_python_does=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    if code:
        session.refuse(f"the program ended with code {code}", refused=False)


def train_copy(session: Session, orders: Orders, path: str) -> None:
    """Train a copy of a model, which the parent has pickled to a file together with its data and Trainer."""
    with open(path, "rb") as file:
        # Written by the parent, into a folder that only this user can read.
        sent = pickle.load(file)
    sys.path[:], sys.argv[:] = sent["path"], sent["argv"]
    if sent["alias"]:
        importlib.import_module("hasten_lightning").install()
    if sent["main"] is not None:
        _load_program(sent["main"])
    given, trainer_class, model, train_dataloaders, datamodule = pickle.loads(sent["payload"])
    FitTrial(session, orders, Trainer).install()
    trainer = trainer_class.__new__(trainer_class)
    # The class may take other arguments; these are those that arrived at the Trainer itself.
    Trainer.__init__(trainer, **given)
    trainer.fit(model, train_dataloaders=train_dataloaders, datamodule=datamodule)


def _refuse_own_loops(session: Session) -> None:
    """Refuse a program with its own training loop before it starts processes: nothing of it would be measured."""
    make = Fabric.__init__

    def refused(method: str) -> Callable[..., NoReturn]:
        def refuse(*args: Any, **given: Any) -> NoReturn:
            session.refuse(
                f"it keeps its own loop (Fabric.{method}), and the advisor measures Trainer.fit. Of the speed-ups, "
                "precision, matmul_precision, fused_optimizer and compile are arguments of Fabric, too: try them there",
                refused=False,
            )

        return refuse

    @functools.wraps(make)
    def __init__(fabric: Any, *args: Any, **given: Any) -> None:  # noqa: N807
        make(fabric, *args, **given)
        # Set on the instance, as Fabric does.
        fabric.backward = refused("backward")

    setattr(Fabric, "__init__", __init__)  # noqa: B010
    for method in ("launch", "setup", "setup_module"):
        setattr(Fabric, method, refused(method))


def _load_program(file: str) -> None:
    """Run a program as an imported file until it trains, measures or ends: it then has its classes."""

    def enough(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Enough

    module = ModuleType("__mp_main__")
    module.__file__ = file
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    methods = dict.fromkeys(("fit", "validate", "test", "predict", "advise"), enough)
    with set_during(Trainer, **methods), suppress(_Enough):
        exec(code, module.__dict__)
