"""Runtime: device, precision and strategy of a run, and the functions of a step that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from hasten._lib.device import copies_in_background, is_host
from hasten._lib.names import defined_by_program
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import move_to
from hasten.checkpoint.background import writer_of
from hasten.checkpoint.places import NO_COPIES
from hasten.extend.origin import is_builtin
from hasten.machine.collectives import numbers_as_tensors
from hasten.precision.base import Precision
from hasten.precision.empty_init import NoInit, fill_empty, left_out
from hasten.strategies.program import detect_overrides, own_methods, with_overrides

if TYPE_CHECKING:
    from hasten.checkpoint.background import BackgroundWriter
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.machine.spawn import KeepsResults
    from hasten.strategies.base import Strategy
    from hasten.types import Group, MapLocation, PathLike, ReduceOperation, StorageOptions, Tensors

T = TypeVar("T")


if TYPE_CHECKING:

    class ReadOnly(Generic[T]):
        """A property that shows an attribute of a part, for instance ``"_runtime.device"``."""

        def __init__(self, path: str | Callable[[Any], T], doc: str) -> None: ...
        def __get__(self, instance: object, owner: type) -> T: ...

else:

    class ReadOnly(property):
        """A property that shows an attribute of a part, for instance ``"_runtime.device"``."""

        def __init__(self, path: str | Callable[[Any], T], doc: str) -> None:
            # A plain function: torch.compile does not trace operator.attrgetter.
            super().__init__(eval(f"lambda self: self.{path}") if isinstance(path, str) else path)
            self.__doc__ = doc

        def setter(self, fset: Callable[[Any, Any], None]) -> property:
            """Return a property that can be assigned, for ``@Trainer.current_epoch.setter`` in a subclass."""
            return property(self.fget, fset, None, self.__doc__)

        def __class_getitem__(cls, kind: object) -> type:
            return cls


# Methods of a precision that are called only where they do something.
_BY_PRECISION = ("forward_context", "convert_input", "convert_output", "convert_module")


class RuntimeView:
    """Properties of a run that Trainer and Fabric share."""

    _runtime: Runtime

    runtime = ReadOnly["Runtime"]("_runtime", "Device, strategy, precision and checkpoint files of this run.")
    accelerator = ReadOnly["Accelerator"]("_runtime.accelerator", "The kind of device.")
    strategy = ReadOnly["Strategy"]("_runtime.strategy", "How the model lives on the devices.")
    global_rank = ReadOnly[int]("_runtime.global_rank", "Index of this process among all, from 0.")
    local_rank = ReadOnly[int]("_runtime.local_rank", "Index of this process on its machine, from 0.")
    node_rank = ReadOnly[int]("_runtime.node_rank", "Index of this machine, from 0.")
    world_size = ReadOnly[int]("_runtime.world_size", "Number of processes.")
    is_global_zero = ReadOnly[bool]("_runtime.is_global_zero", "Whether this is the first process.")


class Runtime:
    """Device, precision and strategy of one process of a run; the strategy is attached to the devices.

    ``resolve.runtime`` makes it. ``engine`` has the functions of a step (``backward``, ``make_step(...)``, ...). They
    and ``bind(...)`` are chosen once; where nothing has to be added, they are torch's or the user's functions.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        strategy: Strategy,
        precision: Precision,
        cluster: ClusterEnvironment,
        checkpoint_io: CheckpointIO | None = None,
        device_ids: list[int] | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.strategy = strategy
        self.precision = precision
        self.cluster = cluster
        if checkpoint_io is not None:
            strategy.checkpoint_io = checkpoint_io
        strategy.state.check_checkpoint_io()
        # Writes checkpoints while the fit goes on, where it may; set by ``follow_saves``.
        self.writer: BackgroundWriter | None = None
        # The copies of the checkpoints of a fit.
        self._copies = NO_COPIES
        self.device_ids = device_ids if device_ids is not None else list(range(strategy.num_processes))
        self._choose_functions()

    def _choose_functions(self) -> None:
        strategy, precision = self.strategy, self.precision
        self.scaler = precision.scaler
        self.steps = strategy.steps
        # Whether there are other processes.
        self.several_processes = strategy.world_size > 1
        # What the precision changes.
        self._changed = {
            name for name in _BY_PRECISION if getattr(precision.__class__, name) is not getattr(Precision, name)
        }
        strategy.engine.set_precision(precision)
        strategy.join_run(runtime=self)
        self._choose_engine()

    def _choose_engine(self) -> None:
        strategy = self.strategy
        self._overridden = detect_overrides(strategy, self.precision)
        # Computes a step: the strategy's engine, with the methods that a program has overridden.
        self.engine = with_overrides(strategy.engine, strategy, self.precision, self._overridden)
        self.own_methods = own_methods(strategy, self.precision, self._overridden)
        self._reduce = strategy.reduce if "reduce" in self._overridden.of_strategy else strategy.all_reduce

    def detect_overrides(self) -> None:
        """Find methods, and a precision, that a program has set on its strategy since; called before each run."""
        precision = self.strategy.precision_plugin
        if precision is not self.precision:
            precision.check_device(self.device)
            self.strategy.set_precision(precision)
            self.precision = precision
            self._choose_functions()
        elif detect_overrides(self.strategy, precision) != self._overridden:
            self._choose_engine()

    def __getstate__(self) -> dict[str, Any]:
        # Bound functions cannot be pickled; __setstate__ chooses them again.
        chosen = ("engine", "scaler", "_reduce", "own_methods")
        return {name: value for name, value in self.__dict__.items() if name not in chosen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._choose_functions()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads checkpoints: the strategy's ``checkpoint_io``."""
        return self.strategy.checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self.strategy.checkpoint_io = checkpoint_io

    # -- facts

    device = ReadOnly[torch.device]("strategy.root_device", "The device of this process.")
    global_rank = ReadOnly[int]("strategy.global_rank", "Index of this process among all, from 0.")
    local_rank = ReadOnly[int]("strategy.local_rank", "Index of this process on its machine, from 0.")
    node_rank = ReadOnly[int]("strategy.node_rank", "Index of this machine, from 0.")
    world_size = ReadOnly[int]("strategy.world_size", "Number of processes.")
    num_nodes = ReadOnly[int]("strategy.num_nodes", "Number of machines.")
    num_devices = ReadOnly[int]("strategy.num_processes", "Number of devices of this machine.")
    is_global_zero = ReadOnly[bool]("strategy.is_global_zero", "Whether this is the first process.")
    distributed_sampler_kwargs = ReadOnly["dict[str, int] | None"](
        "strategy.distributed_sampler_kwargs",
        "``num_replicas`` and ``rank`` where each process reads its own part of the data, else None.",
    )

    # -- once

    def launch(
        self, function: Callable[..., T], *args: object, trainer: KeepsResults | None = None, **kwargs: object
    ) -> T:
        """Start the other processes, unless they run already, and call ``function`` in each; return its result here.

        With copies of this process, that is the result of the first, whose other results ``trainer`` gets.
        """
        return self.strategy.launch(function, *args, owner=trainer, **kwargs)

    def shard(self, module: nn.Module, stored: Container[str] = ()) -> None:
        """Initialize what ``init_module`` left empty, and divide ``module``; see ``Strategy.shard``."""
        if left_out:
            fill_empty(module, stored)
        self.strategy.shard(module, stored)

    def place(self, module: nn.Module, *, move: bool = True) -> nn.Module:
        """Convert ``module`` to the precision and, with ``move``, move it to the device, in place."""
        if "convert_module" in self._changed:
            module = self.precision.convert_module(module)
        return self.strategy.sharding.place(module) if move else module

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module to call in training; ``module`` itself on a single device."""
        # A program that was written for Lightning's Fabric may have a method of its own.
        setup_module = getattr(self.strategy, "setup_module", None)
        if setup_module is not None and not is_builtin(setup_module):
            wrapped: nn.Module = setup_module(module)
            return wrapped
        return self.strategy.wrap(module)

    def bind(
        self,
        function: Callable[..., Any],
        *,
        module: nn.Module | None = None,
        wrapped: nn.Module | None = None,
        training: bool = False,
        convert_outputs: bool = False,
    ) -> Callable[..., Any]:
        """Return a function that runs a step or a forward in the precision and the strategy of the run.

        ``wrapped`` is what ``wrap`` returned for ``module``. With ``training``, backward follows, which the strategy
        may have to prepare. With ``convert_outputs``, outputs get torch's default dtype. If there is nothing
        to add, it is ``function`` itself.
        """
        if training and wrapped is not None:
            function = self.strategy.engine.make_forward(function, wrapped)
        elif module is not None and not training:
            function = self.strategy.engine.make_evaluation_forward(function, module)
        changed = self._changed.union(vars(self.precision))  # A program may also assign a method to the object.
        converts_input = "convert_input" in changed
        converts_output = convert_outputs and "convert_output" in changed
        has_context = "forward_context" in changed
        if not (converts_input or converts_output or has_context):
            return function
        precision, inner = self.precision, function
        context = _Reused(precision.forward_context)

        def bound(*args: Any, **kwargs: Any) -> Any:
            if converts_input:
                args = precision.convert_input(args)
                kwargs = precision.convert_input(kwargs) if kwargs else kwargs
            if has_context:
                with context:
                    output = inner(*args, **kwargs)
            else:
                output = inner(*args, **kwargs)
            return precision.convert_output(output) if converts_output else output

        return bound

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for operations in the precision of the run."""
        return self.precision.forward_context()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which modules are created on the device and in the precision of the run.

        ``empty_init`` leaves parameters as they are, where weights are loaded afterwards. Those that are not loaded get
        their initial values when training begins, or in ``Fabric.setup``. A strategy that shards them makes them on the
        meta device.
        """
        return init_module(self.strategy, self.precision, self.device, empty_init)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are created on the device and in the precision of the run."""
        return entered_together(_device_context(self.device), self.precision.tensor_init_context())

    # -- a step

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronize gradients."""
        return self.engine.no_sync(wrapped)

    def to_device(self, data: T) -> T:
        """Return ``data`` with its tensors on the device; the same object if they are there already."""
        device = self.device
        if self.steps is not None:
            sent: T = self.steps.to_device(data, device)
            return sent
        # Copies from pinned memory are asynchronous; from other memory torch waits for them.
        moved: T = move_to(data, device, non_blocking=copies_in_background(device))
        return moved

    # -- between processes

    def all_reduce(self, data: Tensors, op: ReduceOperation = "mean", group: Group = None) -> Any:
        """Return ``data`` with each tensor reduced over all processes; see ``Strategy.all_reduce``."""
        return self._reduce(data, group=group, reduce_op=op)

    def data_parallel_reduce(self, data: Tensors, op: ReduceOperation = "mean") -> Any:
        """Return ``data`` with each tensor reduced over the processes that read different data."""
        return self._reduce(data, group=self.strategy.data_parallel_group, reduce_op=op)

    def all_gather(self, data: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return the tensors and numbers of all processes, stacked; see ``Strategy.all_gather``."""
        data = numbers_as_tensors(data, self.device)
        return self.strategy.all_gather(data, group=group, sync_grads=sync_grads)

    def broadcast(self, data: T, src: int = 0) -> T:
        """Return the object of process ``src``."""
        return self.strategy.broadcast(data, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self.strategy.barrier(name)

    # -- files

    def save(self, path: PathLike, contents: dict[str, Any], storage_options: StorageOptions = None) -> None:
        """Write a checkpoint, from the first process or as a folder; all processes must call it, and fail together.

        When they return it is complete, unless ``checkpoint_io`` writes in the background.
        """
        if "save_checkpoint" in self._overridden.of_strategy and self.strategy.lightning_module is not None:
            self.strategy.save_checkpoint(contents, path, storage_options=storage_options)
        else:
            self.strategy.state.write(path, contents, storage_options)

    def load(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint; ``weights_only=False`` also reads Python objects: only for files you trust."""
        if "load_checkpoint" in self._overridden.of_strategy and self.strategy.lightning_module is not None:
            return self.strategy.load_checkpoint(path, weights_only=weights_only)
        return self.strategy.state.read(path, map_location, weights_only)

    def follow_saves(self, notify: Callable[[], object]) -> None:
        """Raise the error of a checkpoint that could not be written; ``notify`` is called where that happens later."""
        # Where other processes wait for the file, an error has to be theirs too.
        io = self.checkpoint_io
        self.writer = None if self.several_processes else writer_of(io)
        if self.writer is not None:
            self.writer.follow(notify)
        self._copies = io.copies
        self._copies.follow(None if self.several_processes else notify)

    def finish_saves(self, *, failed: bool = False) -> None:
        """Wait until checkpoints are complete that are written in the background, and copied.

        If an exception ends the run (``failed``), it is not replaced, and the error of a save is a warning.
        """
        try:
            if self.writer is not None and not self.writer.is_idle:
                self.writer.wait()
            self._copies.finish()
        except Exception as error:
            if not failed:
                raise
            rank_zero_warn(f"The last checkpoint could not be written: {error}")

    def teardown(self) -> None:
        """Release what the run holds; the process group stays until the program ends."""
        self.strategy.teardown()
        if defined_by_program(self.strategy, "teardown"):
            # It may not call that of its base.
            self.checkpoint_io.teardown()
        self.precision.teardown()
        self.accelerator.teardown()


class _Reused:
    """A reusable and reentrant version of the context of ``make``; autocasts, slow to create, are kept."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._free: list[torch.autocast] = []
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        context = self._free.pop() if self._free else self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        context = self._entered.pop()
        swallowed = context.__exit__(*error)
        if type(context) is torch.autocast:
            self._free.append(context)
        return swallowed


@contextmanager
def entered_together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Return a context that enters several, one after the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _device_context(device: torch.device) -> AbstractContextManager[Any]:
    return device if not is_host(device) else nullcontext()


def init_module(
    strategy: Strategy, precision: Precision, device: torch.device, empty_init: bool | None
) -> AbstractContextManager[Any]:
    """Return a context in which modules are created; see ``Runtime.init_module``."""
    place = strategy.sharding.init_context(empty_init)
    return entered_together(
        place if place is not None else _device_context(device),
        precision.module_init_context(),
        NoInit() if empty_init and place is None else nullcontext(),
    )
