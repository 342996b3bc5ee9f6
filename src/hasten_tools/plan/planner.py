"""Plan a fit, and the same fit with single changes, each in a copy of this process."""

from __future__ import annotations

import os
import pickle
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten.machine.cluster import ClusterEnvironment
from hasten.machine.host import usable_cores
from hasten.machine.launch import end_when
from hasten.resolve import PRECISIONS
from hasten_tools.plan import simulated
from hasten_tools.plan.report import Change, FitPlan, Measured

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.module.datamodule import LightningDataModule
    from hasten.trainer import Trainer
    from hasten.types import Dataloaders, PrecisionName, StrategyLike
    from hasten_tools.plan.step import Order

# No further change is planned after this time.
BUDGET_SECONDS = 45.0
# Machines usually have this many devices.
PER_NODE = 8


class PlanError(RuntimeError):
    """A program that cannot be planned; the message says what to change."""


def plan_fit(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
    *,
    devices: int,
    num_nodes: int | None = None,
    strategy: StrategyLike | None = None,
    tensor_parallel_size: int | None = None,
    precision: PrecisionName | None = None,
    memory_bytes: int | None = None,
    accelerator: str = "gpu",
    budget_seconds: float = BUDGET_SECONDS,
) -> FitPlan:
    """Return what ``trainer.fit(model, ...)`` would need on many devices, without using any.

    Two training steps run in copies of this process, on tensors without data and in a process group that does not
    exist. Nothing of this process changes. Numbers describe the first process, which has the largest shards.

    Args:
        trainer: with the arguments of the program; ``devices``, ``num_nodes`` and ``accelerator`` do not matter.
        model: the module. Made in ``configure_model`` it takes no memory.
        train_dataloaders: the training data; the first batch is read.
        datamodule: provides the data instead.
        devices: the number of devices in all.
        num_nodes: the number of machines; by default machines of 8 devices.
        strategy: a name or an object; by default the Trainer's.
        tensor_parallel_size: split layers over as many processes, by ``ModelParallelStrategy(plan="auto")``.
        precision: by default the Trainer's.
        memory_bytes: of one device; with it the plan says whether it fits, and which single change would make it fit.
        accelerator: "gpu" to step optimizers as torch does there, which takes more memory; "cpu".
        budget_seconds: for the changes; none is begun after this time.

    Raises:
        PlanError: a step needs the values of tensors, or fails without them; the message has the line.
        ValueError: an argument does not fit.
        RuntimeError: this system cannot copy processes.

    Example::

        >>> import hasten as L, torch
        >>> from hasten.demos.boring_classes import BoringModel
        >>> from hasten_tools.plan import plan_fit
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> plan = plan_fit(trainer, BoringModel(), devices=1024, strategy="ddp")
        >>> plan.measured.parameters, plan.measured.sent["all-reduce"][1]
        (66, 264)

    Source: `PyTorch, FakeTensor <https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html>`_.

    """
    variants = Variants(trainer, devices, num_nodes, strategy, tensor_parallel_size, precision, accelerator)

    def fit() -> None:
        trainer.fit(model, train_dataloaders, datamodule=datamodule)

    return plan_variants(trainer, type(model).__name__, variants, fit, memory_bytes, budget_seconds)


def plan_variants(
    trainer: Trainer, model: str, variants: Variants, fit: Callable[[], None], memory: int | None, budget: float
) -> FitPlan:
    """Plan a fit, and single changes where it does not fit; ``budget`` is in seconds."""
    found = _finish(_start(trainer, variants.base(), fit))
    changes: list[Change] = []
    if found.fits(memory) is False:
        changes = _planned(trainer, list(variants.changes(found)), fit, time.monotonic() + budget)
    return FitPlan(variants.devices, variants.nodes, model, found, memory, tuple(changes), variants.notes)


def _planned(trainer: Trainer, asked: list[tuple[str, Order]], fit: Callable[[], None], until: float) -> list[Change]:
    """Plan changes, as many at once as there are cores, and at least one."""
    changes: list[Change] = []
    running: deque[tuple[str, _Copy]] = deque()

    def finish() -> None:
        line, copy = running.popleft()
        try:
            changes.append(Change(line, _finish(copy)))
        except (PlanError, ValueError, TypeError) as error:
            changes.append(Change(line, reason=str(error).partition("\n")[0]))

    late: list[str] = []
    for line, order in asked:
        if len(running) >= usable_cores():
            finish()
        if changes and time.monotonic() > until:
            late.append(line)
        else:
            running.append((line, _start(trainer, order, fit)))
    while running:
        finish()
    return changes + [Change(line, reason="the time is over (--budget)") for line in late]


def _check_machines(devices: int, nodes: int, tensor_parallel: int | None, accelerator: str) -> None:
    check.whole("plan_fit", "devices", devices, at_least=1)
    check.whole("plan_fit", "num_nodes", nodes, at_least=1)
    if devices % nodes:
        raise make_error(
            ValueError, f"{devices} devices on {nodes} machines:", fix="use a multiple of the number of machines."
        )
    if accelerator not in ("gpu", "cpu"):
        raise make_error(ValueError, f"accelerator={accelerator!r}:", fix="use 'gpu' or 'cpu'.", argument="accelerator")
    if tensor_parallel is not None and (tensor_parallel < 1 or devices % tensor_parallel):
        raise make_error(
            ValueError,
            f"layers split over {tensor_parallel} of {devices} devices:",
            fix="use a divisor of the number of devices.",
        )


class Variants:
    """The variants of a plan: the unchanged program, and the program with one change."""

    def __init__(
        self,
        trainer: Trainer,
        devices: int,
        nodes: int | None,
        strategy: StrategyLike | None,
        tensor_parallel: int | None,
        precision: str | int | None,
        accelerator: str,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        if nodes is None:
            nodes = devices // PER_NODE if devices > PER_NODE and devices % PER_NODE == 0 else 1
        _check_machines(devices, nodes, tensor_parallel, accelerator)
        given = {**trainer.given_arguments, **(given or {})}
        self.devices, self.nodes = devices, nodes
        self._gpu = accelerator == "gpu"
        self._plugins = given.get("plugins") or []
        if not isinstance(self._plugins, (list, tuple)):
            self._plugins = [self._plugins]
        self._plugins = [plugin for plugin in self._plugins if not isinstance(plugin, ClusterEnvironment)]
        self._strategy: Any = (
            _tensor_parallel(tensor_parallel) if tensor_parallel else (strategy or given.get("strategy"))
        )
        name = str(self._strategy).lower()
        if name.startswith(("deepspeed", "xla", "single_xla")):
            raise make_error(
                ValueError,
                f"strategy={name!r} runs an engine of its own, which cannot be followed without data.",
                fix="Plan with --strategy fsdp2, ddp_sharded or ddp.",
                argument="strategy",
            )
        self._precision = precision or given.get("precision")
        self._memory = given.get("memory")
        self.notes = tuple(self._noted(given))
        if self._scales():
            # On the CPU there is no gradient scaler; the sizes are the same.
            self._precision = "bf16-mixed"

    def _scales(self) -> bool:
        return str(self._precision).lower() in PRECISIONS["16-mixed"]

    def _noted(self, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield what the plan leaves out, or has otherwise."""
        if self._scales():
            yield f"precision={self._precision!r} is planned as 'bf16-mixed', which has the same sizes."
        for name, without in (
            ("sync_batchnorm", "its exchange of statistics is not counted"),
            ("compile", "compiled steps keep other activations, as a rule fewer"),
            ("packed", "the plan computes padding, too"),
        ):
            if given.get(name):
                yield f"{name}={given[name]!r} is left out: {without}."
        options = getattr(self._strategy, "name", self._strategy)
        if "find_unused_parameters_true" in str(options):
            yield "find_unused_parameters=True is left out: it sends one number a parameter more."

    def _order(self, *, batch_parts: int = 1, **changes: Any) -> Order:
        from hasten_tools.plan.step import Order

        base = {"strategy": self._strategy, "precision": self._precision, "plugins": self._plugins}
        return Order({**base, **changes}, self.devices, self.nodes, batch_parts, self._gpu)

    def base(self) -> Order:
        return self._order()

    def changes(self, found: Measured) -> Iterator[tuple[str, Order]]:
        """Yield single changes that may take less memory: the line to write, and the order."""
        from hasten.strategies.fsdp import FSDPStrategy

        several = self.devices > 1
        replicated = found.strategy.startswith(("ddp", "single"))
        if several and replicated:
            yield "strategy='fsdp2'", self._order(strategy="fsdp2")
        if several and replicated and not found.strategy.startswith("ddp_sharded"):
            yield "strategy='ddp_sharded'", self._order(strategy="ddp_sharded")
        if self._memory not in ("full", "auto"):
            yield "Trainer(memory='full')", self._order(memory="full")
        if self._memory is None:
            yield "Trainer(memory='selective')", self._order(memory="selective")
        yield "half the batch, twice the accumulation", self._order(batch_parts=2)
        if found.precision == "32-true":
            yield "precision='bf16-mixed'", self._order(precision="bf16-mixed")
        if not found.precision.endswith("-true") or found.precision == "32-true":
            yield "precision='bf16-true'", self._order(precision="bf16-true", **self._half())
        if several and not found.cpu_offload:
            yield (
                "strategy=FSDPStrategy(cpu_offload=True)",
                self._order(strategy=FSDPStrategy(cpu_offload=True)),
            )
        size = min(PER_NODE, self.devices)
        if several and found.tensor_parallel == 1 and self.devices % size == 0:
            yield f"--tp {size}", self._order(strategy=_tensor_parallel(size))

    def _half(self) -> dict[str, Any]:
        """Return the plugin with which sharded strategies take 16-bit weights."""
        from hasten.precision.builtin import HalfPrecision

        name = self._strategy if isinstance(self._strategy, str) else getattr(self._strategy, "name", "")
        if not str(name).startswith(("fsdp", "model_parallel")):
            return {}
        return {"plugins": [*self._plugins, HalfPrecision("bf16-true", keep_small_updates=False)]}


def _tensor_parallel(size: int) -> Any:
    from hasten.strategies.model_parallel import ModelParallelStrategy

    return ModelParallelStrategy(tensor_parallel_size=size, plan="auto")


# -- copies of this process


class _Copy(NamedTuple):
    """A copy of this process that measures, and the pipe that it writes to."""

    process: int
    pipe: int


def _start(trainer: Trainer, order: Order, fit: Callable[[], None]) -> _Copy:
    """Start ``measure(...)`` in a copy of this process."""
    if not hasattr(os, "fork"):
        raise RuntimeError("a plan runs in copies of this process (os.fork), which this system does not have.")
    simulated.load()
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads: the copy uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        os.close(reads)
        _copy(trainer, order, fit, writes)
    os.close(writes)
    return _Copy(process, reads)


def _finish(copy: _Copy) -> Measured:
    """Return the measurements of a copy."""
    try:
        with os.fdopen(copy.pipe, "rb") as pipe:
            sent = pipe.read()
    finally:
        _, status = os.waitpid(copy.process, 0)
    if not sent:
        raise PlanError(
            f"the copy of the process that plans ended with code {os.waitstatus_to_exitcode(status)}"
            + (" (often because memory ran out)." if os.WIFSIGNALED(status) else ".")
        )
    # Written by a copy of this process.
    kind, content = pickle.loads(sent)
    if kind == "measured":
        found: Measured = content
        return found
    raise {"value": ValueError, "type": TypeError, "misuse": MisconfigurationException}.get(kind, PlanError)(content)


def _copy(trainer: Trainer, order: Order, fit: Callable[[], None], writes: int) -> Any:
    """Measure, send the result and end: nothing of the program runs in the copy afterwards."""
    code, parent = 1, os.getppid()

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)

    # Tensors without data have no address, and torch warns of it.
    warnings.filterwarnings("ignore", module=r"torch\.")
    try:
        end_when(wait_for_parent)
        answer = _answer(trainer, order, fit)
        with os.fdopen(writes, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    except KeyboardInterrupt:
        pass  # The process that waits for this one got it, too.
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _answer(trainer: Trainer, order: Order, fit: Callable[[], None]) -> tuple[str, Any]:
    from hasten_tools.plan.step import Unplannable, measure

    try:
        return "measured", measure(trainer, order, fit)
    except Unplannable as error:
        return "plan", str(error)
    except MisconfigurationException as error:
        return "misuse", str(error)
    except ValueError as error:
        return "value", str(error)
    except TypeError as error:
        return "type", str(error)
    except Exception as error:
        return "plan", f"{type(error).__name__}: {error}"
    except SystemExit as error:
        return "plan", f"the program ended with {error.code!r} before its first step."
