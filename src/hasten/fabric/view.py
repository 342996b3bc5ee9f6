"""What a Fabric knows and says: its place in the run, the other processes, callbacks and loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hasten._lib.rank_zero import rank_zero_warn
from hasten.fabric import state as states
from hasten.fabric.compiled import joint_report
from hasten.machine import collectives

if TYPE_CHECKING:
    from hasten.compile.model import CompiledModel
    from hasten.compile.report import CompileReport
    from hasten.runtime import Runtime


class FabricView:
    """The part of Fabric that trains nothing."""

    _runtime: Runtime
    _compiled: list[CompiledModel]
    _callbacks: list[Any]
    _loggers: list[Any]
    _launched: bool

    # -- facts

    @property
    def accelerator(self) -> Any:
        """The kind of device."""
        return self._runtime.accelerator

    @property
    def strategy(self) -> Any:
        """How the model lives on the devices."""
        return self._runtime.strategy

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._runtime.device

    @property
    def compile_report(self) -> CompileReport | None:
        """What ``compile`` has done so far: graphs, seconds, breaks and recompiles; None where it is off."""
        return joint_report(self._compiled)

    @property
    def global_rank(self) -> int:
        """Which process of the run this is, from 0."""
        return self._runtime.global_rank

    @property
    def local_rank(self) -> int:
        """Which process of its machine this is, from 0."""
        return self._runtime.local_rank

    @property
    def node_rank(self) -> int:
        """Which machine this is, from 0."""
        return self._runtime.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._runtime.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return self._runtime.is_global_zero

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Any:
        """The first logger.

        Raises:
            IndexError: there is none.

        """
        if not self._loggers:
            raise IndexError("fabric.logger: there is no logger. Pass Fabric(loggers=...).")
        return self._loggers[0]

    def _require_launch(self, method: str) -> None:
        if not self._launched and self._runtime.strategy.name != "single_device":
            raise RuntimeError(
                f"Fabric.{method}() before Fabric.launch(): with strategy={self.strategy.name!r} the other processes "
                "must be started first. Call fabric.launch() after making the Fabric."
            )

    # -- between processes

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each machine."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all processes are here."""
        self._require_launch("barrier")
        self._runtime.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process ``src``."""
        self._require_launch("broadcast")
        return self._runtime.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked in a new first dimension; as they are for one process.

        Args:
            data: a tensor, a number, or a collection of them.
            group: the processes; all by default.
            sync_grads: let gradients flow back.

        """
        self._require_launch("all_gather")
        return self._runtime.all_gather(self._as_tensors(data), group=group, sync_grads=sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the tensors reduced over all processes.

        Args:
            data: a tensor, a number, or a collection of them.
            group: the processes; all by default.
            reduce_op: "mean", "sum", "max", "min", "product".

        """
        self._require_launch("all_reduce")
        return self._runtime.all_reduce(self._as_tensors(data), op=reduce_op, group=group)

    def _as_tensors(self, data: Any) -> Any:
        def convert(leaf: Any) -> Any:
            return states.as_tensor(leaf, self.device)

        return states.map_leaves(convert, data)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Let the first process run the block before all others, for instance to download data.

        Args:
            local: the first process of each machine.

        """
        self._require_launch("rank_zero_first")
        with collectives.first_one_first(self.local_rank if local else self.global_rank):
            yield

    # -- callbacks and loggers

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it.

        Args:
            hook_name: the name of the method.
            args: for the method.
            kwargs: for the method; those it does not take are left out.

        """
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                rank_zero_warn(
                    f"fabric.call({hook_name!r}): {type(callback).__name__}.{hook_name} is not a method and is skipped."
                )
                continue
            method(*args, **states.accepted(method, kwargs))

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Give one value to all loggers.

        Args:
            name: of the value.
            value: a number or a tensor with one element, which is read from the device now.
            step: where it belongs.

        """
        self.log_dict({name: value}, step=step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Give several values to all loggers; see ``log``."""
        values = {name: states.as_number(name, value) for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(metrics=values, step=step)
