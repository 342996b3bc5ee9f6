"""Plan the first ``Trainer.fit`` of a program, instead of running it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from hasten import Fabric, Trainer
from hasten.machine.devices import number_of
from hasten_tools.plan.meshes import processes_of
from hasten_tools.plan.planner import BUDGET_SECONDS, PER_NODE, PlanError, Variants, chosen_mesh, plan_variants
from hasten_tools.plan.report import FitPlan, Speeds

if TYPE_CHECKING:
    from hasten_tools.plan.meshes import Mesh


@dataclass(frozen=True)
class Question:
    """What to plan; None to use the program's own settings."""

    # The number of devices in all; 8 on each machine if the program leaves that to the machine.
    devices: int | None = None
    nodes: int | None = None  # The number of machines.
    strategy: str | None = None
    tensor_parallel: int | None = None  # Split layers over as many processes.
    precision: str | None = None
    memory: int | None = None  # Of a device, in bytes.
    accelerator: str = "gpu"  # "gpu" or "cpu".
    budget_seconds: float = BUDGET_SECONDS  # For the changes or the meshes; none is begun after this time.
    mesh: Mesh | None = None  # Sizes of its axes, or "auto" to find them.
    speeds: Speeds | None = None  # With which seconds are estimated.


class _End(SystemExit):
    """Ends the program when its fit is planned."""


def plan_program(question: Question, run: Callable[[], int]) -> FitPlan:
    """Return the plan of the first ``Trainer.fit`` that a program calls.

    Raises:
        PlanError: the program cannot be planned.
        ValueError: an argument does not fit.

    """
    given: weakref.WeakKeyDictionary[Trainer, dict[str, Any]] = weakref.WeakKeyDictionary()
    found: list[FitPlan | Exception] = []
    make, fit = Trainer.__init__, Trainer.fit

    # Command lines read the arguments of the Trainer from its signature.
    @functools.wraps(make)
    def __init__(trainer: Trainer, *args: Any, **arguments: Any) -> None:  # noqa: N807
        make(trainer, *args, **_on_this_machine(arguments))
        given[trainer] = arguments

    @functools.wraps(fit)
    def plan(trainer: Trainer, model: Any, *args: Any, **arguments: Any) -> NoReturn:
        own = given.get(trainer, {})
        try:
            mesh = chosen_mesh(question.mesh, question.tensor_parallel, question.strategy)
            devices, nodes = _machines(question, own)
            strategy = question.strategy or own.get("strategy")
            variants = Variants(trainer, devices, nodes, strategy, mesh, question.precision, question.accelerator, own)
            first = functools.partial(fit, trainer, model, *args, **arguments)
            name, budget, speeds = type(model).__name__, question.budget_seconds, question.speeds
            found.append(plan_variants(trainer, name, variants, first, question.memory, budget, speeds))
        except Exception as error:
            found.append(error)
        raise _End(0)

    def refuse(what: str) -> Callable[..., NoReturn]:
        def refused(*_: Any, **__: Any) -> NoReturn:
            found.append(PlanError(what))
            raise _End(1)

        return refused

    setattr(Trainer, "__init__", __init__)  # noqa: B010
    setattr(Trainer, "fit", plan)  # noqa: B010
    setattr(Trainer, "prepared_run", refuse("it searches with a Tuner before Trainer.fit. Leave that out for a plan."))  # noqa: B010
    for name in ("launch", "setup", "setup_module"):
        setattr(
            Fabric, name, refuse(f"it keeps its own loop (Fabric.{name}), and a plan follows Trainer.fit. {_FABRIC}")
        )
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if not found:
        raise PlanError(f"the program ended with code {code} before it called Trainer.fit: there is nothing to plan.")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


_FABRIC = "Put the model and its loss into a LightningModule: its needs are the same."


def _machines(question: Question, given: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the number of devices in all and of machines, None for machines of ``PER_NODE`` devices."""
    if question.devices is not None:
        return question.devices, question.nodes
    if (processes := processes_of(question.mesh)) is not None:
        return processes, question.nodes
    nodes: int = question.nodes or given.get("num_nodes") or 1
    return nodes * (number_of(given.get("devices")) or PER_NODE), nodes


def _on_this_machine(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer for one CPU, on which nothing is written and shown."""
    changed = {
        **arguments,
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": 1,
        "strategy": "auto",
        "precision": None,
        "sync_batchnorm": False,
        "plugins": None,
        "speed": None,
        "compile": None,
        "packed": False,
        "dropout": None,
        "fast_dev_run": False,
        "profiler": None,
        "max_time": None,
        "num_sanity_val_steps": 0,
        **_nothing_written(arguments),
    }
    for name in ("limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        # Programs that evaluate before they train must not take long about it.
        changed[name] = 0 if arguments.get(name) == 0 else 2
    if arguments.get("batch_size") == "auto":
        changed["batch_size"] = None
    if arguments.get("barebones"):
        changed["barebones"] = False
    if arguments.get("logger") is not False:
        from hasten.loggers.base import DummyLogger

        # The program may write to its logger.
        changed["logger"] = DummyLogger()
    return changed


def _nothing_written(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Return the arguments that leave the default callbacks out; the program's own callbacks stay until its fit."""
    from hasten.callbacks import Checkpoint, ProgressBar

    given = arguments.get("callbacks") or ()
    given = list(given) if isinstance(given, Iterable) else [given]
    off: dict[str, bool] = {"enable_model_summary": False}
    for name, kind in (("enable_checkpointing", Checkpoint), ("enable_progress_bar", ProgressBar)):
        if not any(isinstance(callback, kind) for callback in given):
            off[name] = False
    return off
