"""Run the first steps of a program's fit without data, and measure them for a plan."""

from __future__ import annotations

import functools
import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException
from hasten._lib.observers import set_during
from hasten._lib.tree import is_absent
from hasten.batching.split import measure as samples_of
from hasten.extend.origin import FOLDERS
from hasten.loggers.base import DummyLogger
from hasten.loops.fit import make_step
from hasten.loops.run import Run
from hasten.loops.run_data import make_transfer
from hasten.strategies.experts import holds_experts
from hasten.strategies.mesh.stages import stages_of_blocks
from hasten.strategies.mesh.strategy import MeshStrategy
from hasten.types import RunningStage
from hasten_tools.plan import blocks, meshes, simulated
from hasten_tools.plan.ledger import (
    ACTIVATIONS,
    BACKWARD,
    BATCH,
    BUFFERS,
    EXCHANGE,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    STEP,
    TEMPORARY,
    WEIGHTS,
    Ledger,
)
from hasten_tools.plan.report import Measured

if TYPE_CHECKING:
    from hasten.trainer import Trainer

# The first makes the optimizers' states.
_STEPS = 2
# What reads values, writes, or cannot be followed without data.
_OFF = {
    "speed": None, "compile": None, "resident": False, "detect_anomaly": False, "sync_batchnorm": False,
    "packed": False, "dropout": None, "profiler": None, "on_bad_loss": "warn", "enable_autolog_hparams": False,
    "allocator": None,
}  # fmt: skip


def _left_out() -> tuple[type, ...]:
    """Return the callbacks that write, show, search or stop, and change nothing in a step."""
    from hasten import callbacks as known

    return (
        *(known.BasePredictionWriter, known.BatchSizeFinder, known.Checkpoint, known.DeviceStatsMonitor),
        *(known.EarlyStopping, known.GarbageCollection, known.LearningRateFinder, known.LearningRateMonitor),
        *(known.MemorySnapshot, known.ModelSummary, known.ProgressBar, known.ThroughputMonitor, known.Timer),
    )


class Done(BaseException):
    """Ends a fit that was planned."""


class Unplannable(Exception):
    """The program cannot be planned; the message says where and why."""


@dataclass(frozen=True)
class Order:
    """What to plan."""

    changes: Mapping[str, Any]  # Arguments of the Trainer to change.
    devices: int  # The number of processes.
    nodes: int  # The number of machines they are on.
    batch_parts: int = 1  # In how many parts each batch is computed, with as many times the accumulation.
    on_gpu: bool = True  # Step optimizers as torch does on GPUs.
    kept: int | None = None  # How many of a module's equal blocks to keep; None for all.
    process: int = 0  # Which of the processes to follow.


def measure(trainer: Trainer, order: Order, fit: Callable[[], None]) -> Measured:
    """Return what two training steps of ``fit`` hold and send; the process is of no other use afterwards.

    Raises:
        Unplannable: a step needs the values of tensors.
        ValueError: an argument does not fit.

    """
    torch.set_num_threads(1)
    simulated.join(order.devices, order.process)
    changes = {**_OFF, **order.changes}
    plugins = changes.pop("plugins", None) or []
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, _left_out())]
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]
    not_fitting = simulated.note_sizes()
    try:
        trainer.change_arguments(
            **changes,
            accelerator="cpu",
            devices=order.devices // order.nodes,
            num_nodes=order.nodes,
            plugins=[*plugins, simulated.SimulatedCluster(order.devices, order.process)],
            accumulate_grad_batches=trainer.accumulate_grad_batches * order.batch_parts,
        )
    except ValueError as error:
        if not not_fitting:
            raise
        raise meshes.wrong_sizes(error, not_fitting[-1], order.devices) from None
    simulated.prepare_strategy(trainer.strategy, on_gpu=order.on_gpu)
    planned = _PlannedFit(order)
    trainer.redirect_fit(planned.take, planned.steps)
    try:
        fit()
    except Done:
        assert planned.measured is not None
        return planned.measured
    except Exception as error:
        raise _explained(error) from error
    finally:
        planned.modes.close()
    raise Unplannable("Trainer.fit returned without training: max_steps, max_epochs or limit_train_batches is 0.")


class _PlannedFit:
    """Follows one fit: the module loses its data before it is divided, and the loop is two steps."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.mode = simulated.fake_mode()
        self.ledger = Ledger(order.devices // order.nodes)
        self.modes = ExitStack()
        self.measured: Measured | None = None
        self._gradient_bytes = 0
        # Of the equal blocks of this process, those in a row; 0 if none was left out.
        self._blocks = 0
        # How many experts each of the modules has that hold some; 1 without them.
        self._experts = 1
        self._samples = 0
        # The parameters between two steps: during a step ``fully_shard`` puts gathered ones in their place.
        self._parameters: list[nn.Parameter] = []

    def take(self, run: Run) -> None:
        """Prepare a run without data."""
        runtime, train = run.runtime, cast(Any, run.data.train)
        init_module, shard = runtime.init_module, runtime.strategy.shard

        def empty_module(empty_init: bool | None = None) -> ExitStack:
            stack = ExitStack()
            stack.enter_context(self.mode)
            stack.enter_context(init_module(empty_init))
            return stack

        def shard_without_data(module: nn.Module, stored: Any = ()) -> None:
            counts: list[Any] = [part.num_experts for part in module.modules() if holds_experts(part)]
            self._experts = math.gcd(*counts) or 1
            if self.order.kept is not None:
                self._leave_out(module, runtime.strategy, self.order.kept)
            simulated.leave_out_metrics(module)
            simulated.without_data(module, self.mode)
            self.modes.enter_context(self.mode)
            self.modes.enter_context(self.ledger)
            self.ledger.phase = EXCHANGE
            for tensor in (*module.parameters(), *module.buffers()):
                self.ledger.see(tensor, WEIGHTS)
            shard(module, stored)

        own_runtime: Any = runtime
        own_runtime.init_module, own_runtime.strategy.shard = empty_module, shard_without_data
        # A program reads the length of its data, and begins it, in configure_optimizers: estimated_stepping_batches.
        with_data = torch_private.without_modes()
        train.load, train.begin = with_data(train.load), with_data(train.begin)

    def _leave_out(self, module: nn.Module, strategy: Any, kept: int) -> None:
        """Leave out all but some of the equal blocks of a module, or of each of its stages."""
        pipeline, stages, own = getattr(strategy, "pipeline", None), {}, [0]
        if pipeline is not None:
            stages = stages_of_blocks(module, pipeline.schedule.stages, pipeline.arguments["split"], strategy.owner)
            own = pipeline.schedule.stages_of(self.order.process * pipeline.processes // self.order.devices)
        # Several stages of a process are alike in all but what is around the blocks.
        self._blocks = blocks.leave_out(module, kept, self.ledger, stages, own[0]) if len(own) == 1 else 0

    def steps(self, run: Run) -> None:
        """Run two training steps, and measure the second."""
        module, hooks, ledger, window = run.module, run.hooks, self.ledger, run.window
        self._parameters = list(module.parameters())
        self._watch_backward(run)
        run.state.stage = RunningStage.TRAINING
        run.logged.start_epoch("train")
        batch = self._first_batch(run)
        transfer = make_transfer(run, run.data.train)
        size = run.window.accumulate_grad_batches
        with torch.enable_grad():
            hooks.on_train_start()
            hooks.on_train_epoch_start()
            step = make_step(run)
            window.size = size
            for number in range(_STEPS):
                if number == _STEPS - 1:
                    self._gradient_bytes = 0
                    ledger.owners = functools.partial(self._owners, run)
                    ledger.restart()
                for index in range(size):
                    ledger.phase = BATCH
                    see = functools.partial(ledger.see, kind=BATCH)
                    own = simulated.batch_without_data(batch, self.mode, see, parts=self.order.batch_parts)
                    own = own if transfer is None else transfer(own)
                    run.logged.batch, run.logged.batch_size = own, 0
                    ledger.phase = ACTIVATIONS
                    ledger.begin(FORWARD)
                    hooks.on_train_batch_start(own, number * size + index)
                    window.is_start, window.is_end = index == 0, index == size - 1
                    step(own, number * size + index)
                    del own
        self.measured = self._measured(run)
        raise Done

    def _first_batch(self, run: Run) -> Any:
        with simulated.on_real_tensors():
            run.data.train.stream.finish()
            for batch, _ in run.data.train.start_epoch():
                with suppress(ValueError):
                    self._samples = samples_of(batch)
                return batch
        raise Unplannable("the training data has no batch.")

    def _watch_backward(self, run: Run) -> None:
        engine: Any = run.runtime.engine
        backward, ledger = engine.backward, self.ledger

        def watched(*args: Any, **kwargs: Any) -> None:
            ledger.begin(BACKWARD)
            with set_during(ledger, phase=TEMPORARY, is_backward=True):
                backward(*args, **kwargs)
            ledger.begin(STEP)
            made = sum(torch_private.local_part(gradient).nbytes for gradient in self._gradients())
            self._gradient_bytes = max(self._gradient_bytes, made)
            # What follows is the optimizer's.
            ledger.phase = TEMPORARY if run.module.automatic_optimization else ACTIVATIONS

        engine.backward = watched

    def _owners(self, run: Run) -> dict[str, Iterable[Tensor]]:
        # The last one counts where a tensor is two of them.
        return {
            BUFFERS: list(run.module.buffers()),
            OPTIMIZER: _states(run),
            GRADIENTS: self._gradients(),
            WEIGHTS: self._parameters,
        }

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _measured(self, run: Run) -> Measured:
        module, strategy = run.module, run.runtime.strategy
        parameters = self._parameters
        offloads, idle = False, None
        mesh: dict[str, int] = {}
        if isinstance(strategy, MeshStrategy):
            offloads, mesh = strategy.offloads, strategy.sizes.named(always=("replicate", "shard", "tensor"))
            if strategy.pipeline is not None:
                idle = strategy.pipeline.schedule.idle_share(strategy.pipeline.parts)
        peak = self.ledger.peak
        return Measured(
            strategy=strategy.name,
            precision=run.runtime.precision.precision,
            tensor_parallel=mesh.get("tensor", 1),
            cpu_offload=offloads,
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            local_elements=sum(torch_private.local_part(p).numel() for p in parameters if not is_absent(p)),
            weights=_bytes(parameters),
            gradients=self._gradient_bytes,
            optimizer=_bytes(_states(run)),
            buffers=_bytes(module.buffers()),
            peak=peak.total,
            peak_parts=dict(peak.parts),
            sent={name: (one.calls, one.payload_bytes, one.ring_bytes) for name, one in self.ledger.sent.items()},
            shards={
                name: tuple(torch_private.local_part(p).shape)
                for name, p in module.named_parameters()
                if not is_absent(p)
            },
            mesh=mesh,
            links={name: tuple(one.links()) for name, one in self.ledger.sent.items()},
            peaks={part: (one.total, dict(one.parts)) for part, one in self.ledger.peaks.items()},
            blocks=self._blocks,
            kept=self.order.kept or 0 if self._blocks else 0,
            process=self.order.process,
            idle=idle,
            flops=self.ledger.flops,
            samples=self._samples,
            experts=self._experts,
        )


def _states(run: Run) -> list[Tensor]:
    """Return the tensors of the optimizers' states that this process holds."""
    states = [list(getattr(optimizer, "state", {}).values()) for optimizer in run.optimizers]
    return [leaf for leaf in torch_private.pytree.tree_leaves(states) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the parts that this process has, tensors that share memory once."""
    storages = {}
    for tensor in tensors:
        part = torch_private.local_part(tensor)
        storages[torch_private.identity_of(part.untyped_storage())] = part.untyped_storage().nbytes()
    return sum(storages.values())


# -- programs that cannot be planned


def _explained(error: Exception) -> Exception:
    """Return the error to show: with the line of the program, and what to write there."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )

    if isinstance(error, Unplannable):
        return error
    where = _place(error)
    if isinstance(error, DataDependentOutputException):
        what = "reads the value of a tensor (.item(), float(), bool(), an `if` on a tensor)"
        return Unplannable(
            f"{where} {what}, and a plan has no values. Leave it out of the training step: keep a tensor, or compare "
            "with torch.where."
        )
    if isinstance(error, DynamicOutputShapeException):
        return Unplannable(
            f"{where} computes a shape from values ({error.func}), and a plan has no values. Use a mask of a fixed "
            "shape (torch.where, or a loss with ignore_index) in place of selected elements."
        )
    text = str(error).strip()
    if ".numpy() is not supported" in text or isinstance(error, UnsupportedFakeTensorException):
        return Unplannable(f"{where} needs the values of a tensor, and a plan has none: {text.splitlines()[0]}")
    if "allreduce_" in text:
        return Unplannable("A plan exchanges no sparse gradients. Leave sparse=True of nn.Embedding out to plan.")
    if type(error) in (ValueError, TypeError) or isinstance(error, MisconfigurationException):
        return error
    return Unplannable(f"{where} failed on tensors without data: {type(error).__name__}: {text.splitlines()[0] if text else ''}")  # fmt: skip # noqa: E501


def _place(error: BaseException) -> str:
    """Return the innermost line of the program in a traceback: neither of torch's nor of hasten's."""
    ours = (*FOLDERS, os.path.join(os.path.dirname(torch.__file__), ""))
    library = os.path.dirname(os.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not os.path.abspath(frame.filename).startswith(ours)
        and not (frame.filename.startswith(library + os.sep) and "site-packages" not in frame.filename)
        and not frame.filename.startswith("<")
    ]
    if not own:
        return "The first step"
    return f"{os.path.relpath(own[-1].filename)}:{own[-1].lineno} ({own[-1].line})"
