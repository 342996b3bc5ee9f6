"""Collectives under Lightning's names: objects that own a process group and exchange tensors within it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.names import unknown_word
from hasten._lib.observers import set_until

# A process group, or what a process outside of it has in its place.
Group: TypeAlias = Any
Self = TypeVar("Self", bound="Collective")
OwnsGroup = TypeVar("OwnsGroup", bound="TorchCollective")


class Collective(ABC):
    """The base of collectives: operations over the processes of a group, which the object owns."""

    def __init__(self) -> None:
        self._group: Any = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """Which process of the group this is, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes of the group."""

    @property
    def group(self) -> Group:
        """The process group.

        Raises:
            RuntimeError: there is none.

        """
        if self._group is None:
            name = type(self).__name__
            raise make_error(RuntimeError, f"`{name}` does not own a group.", fix="Call create_group() first.")
        return self._group

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        """Give all processes the tensor of process ``src``."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Reduce a tensor over the processes, on all of them."""

    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int, op: str) -> Tensor:
        """Reduce a tensor over the processes, on process ``dst``."""

    @abstractmethod
    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        """Gather the tensors of all processes, on all of them."""

    @abstractmethod
    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        """Gather the tensors of all processes, on process ``dst``."""

    @abstractmethod
    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        """Give each process one tensor of a list of process ``src``."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str) -> Tensor:
        """Reduce a list of tensors over the processes, and give each process one of the results."""

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        """Give each process one tensor of the list of each."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send a tensor to process ``dst``."""

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        """Receive a tensor of process ``src``, or of any."""

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None:
        """Wait for all processes."""

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool:
        """Return whether this machine has what the collective needs."""

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool:
        """Return whether the processes have joined."""

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: object) -> None:
        """Join the other processes."""

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: object) -> Group:
        """Return a new group; all processes call it."""

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Group) -> None:
        """Give back a group."""

    @classmethod
    @abstractmethod
    def _convert_to_native_op(cls, op: str) -> Any:
        """Return what the library behind it calls a reduction."""

    def setup(self: Self, **kwargs: object) -> Self:
        """Join the other processes, unless that has happened; the arguments are the same as of ``init_group``."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self: Self, **kwargs: object) -> Self:
        """Create the group of this object; all processes call it.

        Raises:
            RuntimeError: it has one.

        """
        if self._group is not None:
            what = f"`{type(self).__name__}` already owns a group."
            raise make_error(RuntimeError, what, fix="Call teardown() before create_group().")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self: Self) -> Self:
        """Give back the group of this object.

        Raises:
            RuntimeError: it has none.

        """
        if self._group is None:
            raise RuntimeError(f"`{type(self).__name__}` does not own a group to destroy.")
        self.destroy_group(self._group)
        self._group = None
        return self


class TorchCollective(Collective):
    """Collectives of ``torch.distributed``, in the default group unless ``create_group`` makes another.

    Raises:
        RuntimeError: this build of torch has no ``torch.distributed``.

    Example::

        >>> collective = TorchCollective()
        >>> collective.is_initialized()
        False

    Source: https://pytorch.org/docs/stable/distributed.html

    """

    # Whether an object of this class has made the default group, so that the last one gives it back.
    manages_default_group: ClassVar[bool] = False
    addr_key: ClassVar[str] = "MASTER_ADDR"
    port_key: ClassVar[str] = "MASTER_PORT"

    def __init__(self) -> None:
        if not dist.is_available():
            raise RuntimeError("Torch distributed is not available: TorchCollective needs a build of torch with it.")
        super().__init__()

    @property
    def group(self) -> Group:
        if self._group is None:
            self._group = dist.GroupMember.WORLD
        return super().group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        dist.broadcast(tensor, src, group=self.group)
        return tensor

    def all_reduce(self, tensor: Tensor, op: str | dist.ReduceOp = "sum") -> Tensor:
        dist.all_reduce(tensor, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def reduce(self, tensor: Tensor, dst: int, op: str | dist.ReduceOp = "sum") -> Tensor:
        dist.reduce(tensor, dst, op=self._convert_to_native_op(op), group=self.group)
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        dist.all_gather(tensor_list, tensor, group=self.group)
        return tensor_list

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        dist.gather(tensor, gather_list, dst, group=self.group)
        return gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        dist.scatter(tensor, scatter_list, src, group=self.group)
        return tensor

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str | dist.ReduceOp = "sum") -> Tensor:
        dist.reduce_scatter(output, input_list, op=self._convert_to_native_op(op), group=self.group)
        return output

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        dist.all_to_all(output_tensor_list, input_tensor_list, group=self.group)
        return output_tensor_list

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        dist.send(tensor, dst, tag=tag, group=self.group)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        dist.recv(tensor, src, tag=tag, group=self.group)
        return tensor

    def all_gather_object(self, object_list: list[Any], obj: object) -> list[Any]:
        """Gather the objects of all processes into ``object_list``, on all of them."""
        dist.all_gather_object(object_list, obj, group=self.group)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        """Give all processes the objects of process ``src``."""
        dist.broadcast_object_list(object_list, src, group=self.group, device=device)
        return object_list

    def gather_object(self, obj: object, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        """Gather the objects of all processes, on process ``dst``."""
        dist.gather_object(obj, object_gather_list, dst, group=self.group)
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        """Give each process one object of a list of process ``src``."""
        dist.scatter_object_list(scatter_object_output_list, scatter_object_input_list, src, group=self.group)
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        if self.group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group=self.group, device_ids=device_ids)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all processes, and name those that do not come; for the backend "gloo"."""
        dist.monitored_barrier(group=self.group, timeout=timeout, wait_all_ranks=wait_all_ranks)

    def setup(  # type: ignore[override]  # as Lightning's
        self: OwnsGroup, main_address: str | None = None, main_port: str | None = None, **kwargs: object
    ) -> OwnsGroup:
        """Join the other processes, unless that has happened; ``MASTER_ADDR`` and ``MASTER_PORT`` come first."""
        if self.is_initialized():
            return self
        with ExitStack() as undo:
            for name, value in ((self.addr_key, main_address), (self.port_key, main_port)):
                if value is not None and name not in os.environ:
                    set_until(undo, os.environ, name, str(value))
            super().setup(**kwargs)
        TorchCollective.manages_default_group = True
        return self

    def teardown(self: OwnsGroup) -> OwnsGroup:
        is_member = self.group != dist.GroupMember.NON_GROUP_MEMBER
        super().teardown()
        if not TorchCollective.manages_default_group:
            return self
        default: Any = dist.GroupMember.WORLD
        # The last group of a member: what is left is the default group.
        if default is not None and is_member and len(torch_private.groups_of_process()) == 1:
            self.destroy_group(default)
            default = None
        TorchCollective.manages_default_group = default is not None
        return self

    @classmethod
    def is_available(cls) -> bool:
        return dist.is_available()

    @classmethod
    def is_initialized(cls) -> bool:
        return cls.is_available() and dist.is_initialized()

    @classmethod
    def init_group(cls, **kwargs: object) -> None:
        join: Any = dist.init_process_group
        join(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: object) -> Group:
        make: Any = dist.new_group
        return make(**kwargs)

    @classmethod
    def destroy_group(cls, group: Group) -> None:
        # Processes outside of a group have something else in its place.
        if group in torch_private.groups_of_process():
            dist.destroy_process_group(group)

    @classmethod
    def _convert_to_native_op(cls, op: object) -> Any:
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return op
        if not isinstance(op, str):
            raise make_error(
                ValueError,
                f"Unsupported op {op!r} of type {type(op).__name__}:",
                fix="use a name such as 'sum', or torch.distributed.ReduceOp.",
                argument="op",
            )
        native = getattr(dist.ReduceOp, op.upper(), None)
        if native is None:
            known = [name.lower() for name in dist.ReduceOp.RedOpType.__members__]
            listed = ", ".join(map(repr, known))
            owner = f"op {op.upper()!r} is not a member of `ReduceOp`: op={op!r}"
            what, fix = unknown_word(owner, op, known, f"use one of {listed}.")
            raise make_error(ValueError, what, fix=fix, argument="op")
        return native


class SingleDeviceCollective(Collective):
    """The collectives of one process, which exchange nothing.

    Example::

        >>> SingleDeviceCollective().all_reduce(torch.ones(1))
        tensor([1.])

    """

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def broadcast(self, tensor: Tensor, *_: object, **__: object) -> Tensor:
        return tensor

    all_reduce = reduce = recv = broadcast

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, **__: object) -> list[Tensor]:
        return [tensor]

    def gather(self, tensor: Tensor, *_: object, **__: object) -> list[Tensor]:
        return [tensor]

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], *_: object, **__: object) -> Tensor:
        return scatter_list[0]

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], *_: object, **__: object) -> Tensor:
        return input_list[0]

    def all_to_all(
        self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], *_: object, **__: object
    ) -> list[Tensor]:
        return input_tensor_list

    def send(self, *_: object, **__: object) -> None:
        """Do nothing."""

    barrier = send

    @classmethod
    def is_available(cls) -> bool:
        return True

    is_initialized = is_available

    @classmethod
    def init_group(cls, **_: object) -> None:
        """Do nothing."""

    @classmethod
    def new_group(cls, **_: object) -> object:
        return object()

    @classmethod
    def destroy_group(cls, group: Group) -> None:
        """Do nothing."""

    @classmethod
    def _convert_to_native_op(cls, op: str) -> str:
        return op
