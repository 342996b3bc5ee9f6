"""Runtime: device, precision and strategy of a run, and the functions of a step that depend on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import defined_by_program, has_parameter
from hasten._lib.tree import by_kind, move_to
from hasten.checkpoint.files import mapped_tensors
from hasten.checkpoint.stored import StoredCheckpoint
from hasten.machine.collectives import numbers_as_tensors
from hasten.optim import fast_step
from hasten.precision.base import Precision
from hasten.xla.steps import on_host

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.strategies.base import Strategy
    from hasten.types import Group, MapLocation, PathLike, ReduceOperation, Tensors

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

        def __class_getitem__(cls, kind: object) -> type:
            return cls


# Methods of a precision that are called only where they do something.
_BY_PRECISION = ("forward_context", "convert_input", "convert_output", "convert_module", "convert_optimizer")


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
    """Device, precision and strategy of one process of a run.

    ``resolve.runtime`` makes it. The functions of a step (``backward``, ``make_step(...)``, ``bind(...)``) are chosen
    once; where nothing has to be added, they are those of torch or of the user.

    Args:
        accelerator: the kind of device.
        strategy: how the model lives on the devices; attached to them.
        precision: the floating-point format.
        cluster: what started the processes.
        checkpoint_io: writes and reads checkpoints.
        device_ids: indices of the devices of this machine.

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
        strategy.use_precision(precision)
        if strategy.saves_folders and not self.checkpoint_io.writes_folders:
            kind = type(self.checkpoint_io).__name__
            raise MisconfigurationException(
                f"plugins={kind}(): {type(strategy).__name__} saves sharded checkpoints, which are folders, and {kind} "
                "writes files only. Leave it out, use AsyncCheckpointIO(), or have the strategy save whole files."
            )
        self.device_ids = device_ids if device_ids is not None else list(range(strategy.num_processes))
        self._choose_functions()

    def _choose_functions(self) -> None:
        scaler = self.precision.scaler
        self.scaler = scaler
        self.steps = self.strategy.steps
        self.syncs_gradients = self.strategy.syncs_gradients and self.strategy.world_size > 1
        # What the precision changes.
        self._changed = {
            name for name in _BY_PRECISION if getattr(type(self.precision), name) is not getattr(Precision, name)
        }
        # Ids of the optimizers whose gradients are unscaled already in this step.
        self.unscaled: set[int] = set()
        # Whether a scaled backward is running; Fabric refuses loss.backward() without scaling.
        self.in_backward = False
        self.unscale: Callable[[Optimizer], None] | None = None if scaler is None else self._unscale
        own_backward = self.strategy.own_backward()
        self.backward: Callable[..., None] = fast_step.backward if scaler is None else self._scaled_backward
        if own_backward is not None:
            self.backward = own_backward
        self._choose_methods_of_program()

    def look_for_methods(self) -> None:
        """Find the methods, and the precision, that a program has given its strategy since; called before each run."""
        precision = self.strategy.precision_plugin
        if precision is not self.precision:
            precision.check_device(self.device)
            self.strategy.take_precision(precision)
            self.precision = precision
            self._choose_functions()
        elif self._methods_of_program() != self._found_methods:
            self.backward = self._engine_backward
            self._choose_methods_of_program()

    def _methods_of_program(self) -> tuple[bool, ...]:
        of_precision = ("pre_backward", "backward", "post_backward", "optimizer_step", "clip_gradients")
        return (
            *(defined_by_program(self.precision, name) for name in of_precision),
            *(defined_by_program(self.strategy, name) for name in ("backward", "optimizer_step", "reduce")),
        )

    def _choose_methods_of_program(self) -> None:
        """Have the functions of a step call the methods that a program has overridden in its strategy or precision."""
        strategy, precision = self.strategy, self.precision
        self._found_methods = self._methods_of_program()
        strategy.engine = self
        self._engine_backward = self.backward
        self._own_backward = defined_by_program(precision, "pre_backward", "backward", "post_backward")
        self._backward_takes_optimizer = has_parameter(precision.backward, "optimizer")
        if self._own_backward or defined_by_program(strategy, "backward"):
            self.backward = self._backward_of_program
        self._own_step = defined_by_program(precision, "optimizer_step")
        # Whether an optimizer steps in a method of the program, with a closure that computes loss and gradients.
        self.steps_by_program = self._own_step or defined_by_program(strategy, "optimizer_step")
        self._engine_steps: dict[int, Callable[..., Any]] = {}
        # Whether the program's precision clips gradients.
        self.clips_by_program = defined_by_program(
            precision, "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value"
        )
        self._reduce = strategy.reduce if defined_by_program(strategy, "reduce") else strategy.all_reduce

    def __getstate__(self) -> dict[str, Any]:
        # Bound functions cannot be pickled; __setstate__ chooses them again.
        chosen = ("backward", "unscale", "scaler", "_engine_backward", "_engine_steps", "_reduce")
        return {name: value for name, value in self.__dict__.items() if name not in chosen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._choose_functions()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads checkpoints: that of the strategy."""
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

    def launch(self, function: Callable[..., T], *args: object, trainer: object = None, **kwargs: object) -> T:
        """Start the other processes, unless they run already, and call ``function`` in each.

        Args:
            function: what to call.
            args: for the function.
            trainer: an object that gets the results of copies of this process; see ``machine.spawn.KeepsResults``.
            kwargs: for the function.

        Returns:
            the result in this process; with copies of this process, that of the first.

        """
        return self.strategy.launch(function, *args, owner=trainer, **kwargs)

    def place(self, module: nn.Module, *, move: bool = True) -> nn.Module:
        """Convert ``module`` to the precision and, with ``move``, move it to the device, in place."""
        if "convert_module" in self._changed:
            module = self.precision.convert_module(module)
        # Shards are where the strategy has put them.
        if not move or self.strategy.shards_parameters:
            return module
        return module.to(self.device) if self.steps is None else self.steps.place(module, self.device)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module to call in training; ``module`` itself on a single device."""
        # A program that was written for Lightning's Fabric may have a method of its own.
        setup_module = getattr(self.strategy, "setup_module", None)
        if setup_module is not None and not _is_ours(setup_module):
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
        """Return a function that runs ``function`` in the precision and the strategy of the run.

        Args:
            function: a step or a forward.
            module: the user's module.
            wrapped: what ``wrap`` returned for it.
            training: whether backward follows, which the strategy may have to prepare.
            convert_outputs: convert floating-point outputs to torch's default dtype.

        Returns:
            ``function`` itself if there is nothing to add.

        """
        if training and wrapped is not None:
            function = self.strategy.route(function, wrapped)
        elif module is not None and not training:
            function = self.strategy.route_evaluation(function, module)
        converts_input = "convert_input" in self._changed
        converts_output = convert_outputs and "convert_output" in self._changed
        has_context = "forward_context" in self._changed
        if not (converts_input or converts_output or has_context):
            return function
        precision, inner = self.precision, function
        context = _Reused(precision.forward_context)

        def bound(*args: Any, **kwargs: Any) -> Any:
            if converts_input:
                args, kwargs = precision.convert_input(args), precision.convert_input(kwargs)
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

        Args:
            empty_init: do not initialize parameters, if weights are loaded afterwards. A strategy that shards
                parameters makes them on the meta device, and initializes them if no weights are loaded.

        """
        place = self.strategy.init_context(empty_init)
        return _together(
            place if place is not None else self._device_context(),
            self.precision.module_init_context(),
            _NoInit() if empty_init and place is None else nullcontext(),
        )

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are created on the device and in the precision of the run."""
        return _together(self._device_context(), self.precision.tensor_init_context())

    def _device_context(self) -> AbstractContextManager[Any]:
        return self.device if self.device.type != "cpu" else nullcontext()

    # -- a step

    def make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Return ``step(closure=None)`` for ``optimizer``."""
        step = self._step_of_engine(optimizer)
        if not self.steps_by_program:
            return step
        self._engine_steps[id(optimizer)] = step
        strategy = self.strategy

        def step_of_program(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None and strategy.lightning_module is not None:
                closure = _nothing
            result = (
                strategy.optimizer_step(optimizer) if closure is None else strategy.optimizer_step(optimizer, closure)
            )
            self.unscaled.clear()
            return result

        return step_of_program

    def step_by_precision(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None, model: nn.Module | None, **kwargs: object
    ) -> object:
        """Step an optimizer as the precision does; what ``Strategy.optimizer_step`` does by default."""
        step = None if self._own_step or kwargs else self._engine_steps.get(id(optimizer))
        if step is not None:
            return step(closure)
        if (module := self.strategy.lightning_module) is not None:
            kwargs["model"] = module if model is None else model
        if closure is not None:
            kwargs["closure"] = closure
        own_step: Callable[..., object] = self.precision.optimizer_step
        return own_step(optimizer, **kwargs)

    def _step_of_engine(self, optimizer: Optimizer) -> Callable[..., Any]:
        self.strategy.take_optimizer(optimizer)
        step = self.strategy.own_step(optimizer) or self._make_step(optimizer)
        if not self.strategy.shards_parameters:
            return step
        reshard = self.strategy.reshard

        def step_and_reshard(closure: Callable[[], Any] | None = None) -> Any:
            result = step(closure)
            # A forward that no backward followed has left the old weights gathered.
            reshard()
            return result

        return step_and_reshard

    def _make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        if "convert_optimizer" in self._changed:
            self.precision.convert_optimizer(optimizer)
        scaler = self.scaler
        if scaler is None:
            return fast_step.make_step(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "precision='16-mixed' with LBFGS: it computes the loss several times a step, which a gradient "
                "scaler cannot follow. Use precision='bf16-mixed' or another optimizer."
            )
        unscaled = self.unscaled

        def scaled_step(closure: Callable[[], Any] | None = None) -> Any:
            result = closure() if closure is not None else None
            # If all batches of a step were skipped, there is nothing to unscale.
            if _has_gradients(optimizer):
                scaler.step(optimizer)
                scaler.update()
            unscaled.clear()
            return result

        return scaled_step

    def check_in_backward(self, owner: str, optimizer_name: str) -> None:
        """Raise unless an optimizer may step each parameter in backward; ``owner`` is "Trainer" or "Fabric"."""
        if self.scaler is not None:
            raise ValueError(
                f"in_backward({optimizer_name}) and {owner}(precision={self.precision.precision!r}): whether a scaled "
                "gradient is finite is known when backward is over. Use precision='bf16-mixed', which scales nothing."
            )
        if self.world_size > 1 and not self.strategy.steps_in_backward:
            raise ValueError(
                f"in_backward({optimizer_name}) and {self.world_size} processes: each parameter would step before its "
                f"gradients are averaged over them. Use one process, or torch.optim.{optimizer_name} as it is."
            )

    def make_zero_grad(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return ``zero_grad()`` for ``optimizer``."""
        strategy = self.strategy
        if strategy.owns_step:
            # The engine clears gradients when it has stepped.
            return _nothing
        zero_grad = fast_step.make_zero_grad(optimizer)
        if not strategy.shards_parameters:
            return zero_grad

        def zero_all() -> None:
            zero_grad()
            strategy.drop_held_gradients(optimizer)

        return zero_all

    def with_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """Return what computes gradients with ``backward`` in place of ``Tensor.backward``: a method of the module."""
        if self.backward != self._backward_of_program:
            return backward
        self._engine_backward = backward
        return self.backward

    def _backward_of_program(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        strategy = self.strategy
        module = strategy.lightning_module
        target = strategy.optimizers[0] if module is not None and module.automatic_optimization else None
        self.in_backward = True
        try:
            strategy.backward(tensor, target, *args, **kwargs)
        finally:
            self.in_backward = False

    def backward_by_precision(self, tensor: Tensor, target: object, *args: object, **kwargs: object) -> None:
        """Compute gradients as the precision does; what ``Strategy.backward`` does by default."""
        if not self._own_backward:
            self._engine_backward(tensor, *args, **kwargs)
            return
        precision: Any = self.precision
        module = self.strategy.lightning_module
        model = target if module is None else module
        changed = precision.pre_backward(tensor, model)
        if isinstance(changed, Tensor):
            tensor = changed
        if self._backward_takes_optimizer:
            args = (target, *args)
        precision.backward(tensor, model, *args, **kwargs)
        precision.post_backward(tensor, model)

    def _scaled_backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        assert self.scaler is not None
        self.in_backward = True
        try:
            fast_step.backward(self.scaler.scale(tensor), *args, **kwargs)
        finally:
            self.in_backward = False

    def _unscale(self, optimizer: Optimizer) -> None:
        # Once per step: a user who clips may unscale before the loop does.
        assert self.scaler is not None
        if id(optimizer) not in self.unscaled and _has_gradients(optimizer):
            self.unscaled.add(id(optimizer))
            self.scaler.unscale_(optimizer)

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm before."""
        return self.strategy.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: Iterable[Tensor], clip_val: float) -> None:
        """Limit each element of the gradients to ``clip_val`` in size."""
        # torch raises if there are no gradients, as after batches that were all skipped.
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        groups = (
            by_kind(parameters, lambda parameter: parameter.grad) if self.strategy.shards_parameters else [parameters]
        )
        for alike in groups if parameters else ():
            torch.nn.utils.clip_grad_value_(alike, clip_val)

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward does not synchronize gradients."""
        return self.strategy.no_sync(wrapped) if self.syncs_gradients else nullcontext()

    def to_device(self, data: T) -> T:
        """Return ``data`` with its tensors on the device; the same object if they are there already."""
        device = self.device
        if self.steps is not None:
            sent: T = self.steps.to_device(data, device)
            return sent
        # Copies from pinned memory are asynchronous; from other memory torch waits by itself.
        moved: T = move_to(data, device, non_blocking=device.type == "cuda")
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

    def save(self, path: PathLike, contents: dict[str, Any], storage_options: object = None) -> None:
        """Write a checkpoint, from the first process or as a folder; all processes must call it, and fail together.

        When they return it is complete, unless ``checkpoint_io`` writes in the background.
        """
        if not _is_ours(self.strategy.save_checkpoint) and self.strategy.lightning_module is not None:
            self.strategy.save_checkpoint(contents, path, storage_options=storage_options)
        else:
            self.write(path, contents, storage_options)

    def write(self, path: PathLike, contents: dict[str, Any], storage_options: object = None) -> None:
        """Do what ``save`` does, unless a program has put something else in its place."""
        if self.strategy.saves_folders:
            self.checkpoint_io.save_folder(contents, path, storage_options=storage_options)
            return
        if self.steps is not None and self.is_global_zero:
            contents = on_host(contents)
        if self.world_size == 1:
            self.checkpoint_io.save_checkpoint(contents, path, storage_options=storage_options)
            return
        error: Exception | None = None
        if self.is_global_zero:
            try:
                self.checkpoint_io.save_checkpoint(contents, path, storage_options=storage_options)
            except Exception as caught:
                error = caught
        # Report a failure to the others: they would wait for this process at the next collective.
        failed = self.broadcast(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if failed is not None:
            # Contents that cannot be stored are a mistake of all processes alike.
            kind = TypeError if failed.startswith("TypeError") else RuntimeError
            raise kind(f"the first process could not write {os.fspath(path)}: {failed}")

    def load(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint; ``weights_only=False`` also reads Python objects: only for files you trust."""
        if not _is_ours(self.strategy.load_checkpoint) and self.strategy.lightning_module is not None:
            return self.strategy.load_checkpoint(path, weights_only=weights_only)
        return self.read(path, map_location, weights_only)

    def read(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Do what ``load`` does, unless a program has put something else in its place."""
        shards = self.strategy.shards_parameters
        with mapped_tensors() if shards else nullcontext():
            checkpoint = self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        if isinstance(checkpoint, StoredCheckpoint) and not shards:
            return checkpoint.whole()
        return checkpoint

    def teardown(self) -> None:
        """Release what the run holds; the process group stays until the program ends."""
        self.checkpoint_io.teardown()
        self.strategy.teardown()
        self.precision.teardown()
        self.accelerator.teardown()


def _nothing() -> None:
    """Do nothing."""


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class _Reused:
    """The context of ``make``, to be entered again and again, also nested; autocasts, slow to create, are kept."""

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


def _is_ours(method: object) -> bool:
    """Return whether a method is hasten's: one that a program has put in its place is called instead of the engine."""
    return str(getattr(method, "__module__", "")).startswith("hasten.")


@contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class _NoInit(TorchFunctionMode):
    """Skip the functions of ``torch.nn.init``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
