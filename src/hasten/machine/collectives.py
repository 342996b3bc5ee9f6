"""Collectives between the processes of a run. Without a process group, every function returns its input."""

from __future__ import annotations

import atexit
import datetime
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hasten._lib import torch_private
from hasten._lib.device import is_cuda, is_host
from hasten._lib.errors import make_error
from hasten._lib.names import unknown_word
from hasten._lib.tree import as_bytes, by_kind, map_leaves, map_tensors
from hasten.extend.origin import package_of
from hasten.machine import agreement
from hasten.machine.rendezvous import Party, meet, store_of_first, store_of_this_attempt

if TYPE_CHECKING:
    from hasten.types import Group, ReduceOperation, Tensors

T = TypeVar("T")

_OPERATIONS = ("mean", "sum", "max", "min", "product")
# Long enough for a thread that waits for the interpreter's lock, also on a busy machine.
_EXIT_SECONDS = 0.1
# How long a process that has lost a partner looks for the reason.
_WORD_SECONDS = 2.0
# Set by `hasten launch`: a file for that reason.
CAUSE_VARIABLE = "HASTEN_CAUSE_FILE"


# The process group that `join` has made. A weak reference: a fork would destroy the group without its threads, and
# crash.
_own_group: Callable[[], Any] = lambda: None  # noqa: E731 - until there is one


def joined() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def joined_before() -> bool:
    """Return whether this process is in a process group that the program has joined by itself."""
    return joined() and dist.group.WORLD is not _own_group()


def world_size() -> int:
    """Return the number of processes in the group, 1 without one."""
    return dist.get_world_size() if joined() else 1


def all_reduce(data: Tensors, op: ReduceOperation = "mean", *, device: torch.device, group: Group = None) -> Any:
    """Reduce each tensor of ``data`` over all processes, in place, and return ``data``.

    Args:
        data: a tensor or a collection of tensors, which keep their types: a mean of whole numbers is cut to one.
        op: "mean" (or "avg"), "sum", "max", "min", "product", or a ``torch.distributed.ReduceOp``.
        device: the device on which the backend communicates.
        group: the processes; all by default.

    Raises:
        ValueError: it is not one of these operations.

    """
    name = operation_name(op)
    if world_size() == 1:
        return data
    return map_tensors(lambda tensor: _reduce(tensor, name, device, group), data)


def operation_name(op: object) -> str:
    """Return "mean", "sum", "max", "min" or "product"."""
    text = "sum" if op is None else str(getattr(op, "name", op)).rpartition(".")[2].lower()
    text = {"avg": "mean", "average": "mean", "prod": "product"}.get(text, text)
    if text not in _OPERATIONS:
        allowed = f"use one of {', '.join(map(repr, _OPERATIONS))}."
        what, fix = unknown_word(f"reduce_op={op!r}", text, _OPERATIONS, allowed)
        raise make_error(ValueError, what, fix=fix, argument="reduce_op")
    return text


def _reduce(tensor: Tensor, name: str, device: torch.device, group: Any) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        data = tensor.detach()
        # Backends have no operations on booleans; a sum or maximum of numbers is their "any".
        sent = data.to(device, torch.int32 if data.dtype == torch.bool else data.dtype).contiguous()
        dist.all_reduce(sent, getattr(dist.ReduceOp, "SUM" if name == "mean" else name.upper()), group=group)
        reduced = sent / dist.get_world_size(group) if name == "mean" else sent
        if reduced is not data:
            data.copy_(reduced)
    return tensor


def all_gather(data: Tensors, *, device: torch.device, group: Group = None, sync_grads: bool = False) -> Any:
    """Return ``data`` with each tensor replaced by the tensors of all processes, stacked in a new first dimension.

    Their shapes are the same on every process. With ``sync_grads``, gradients flow back to the processes that they came
    from.
    """
    # Also of one process: programs index the first dimension wherever a strategy has a group, as in Lightning.
    if not joined():
        return data
    return map_tensors(lambda tensor: _gather(tensor, device, group, sync_grads), data)


def numbers_as_tensors(data: object, device: torch.device) -> Any:
    """Return ``data`` with its numbers, arrays and tensors, also those in collections, as tensors on ``device``."""

    def as_tensor(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, bool, int, float, complex)) or package_of(type(leaf)) == "numpy":
            return torch.as_tensor(leaf, device=device)
        return leaf

    return map_leaves(as_tensor, data)


def _gather(tensor: Tensor, device: torch.device, group: Any, sync_grads: bool) -> Tensor:
    if sync_grads:
        from torch.distributed.nn.functional import all_gather as gather_with_gradients

        parts = gather_with_gradients(tensor.to(device).contiguous(), group or dist.group.WORLD)
        return torch.stack(list(parts)).to(tensor.device)
    sent = tensor.detach().to(device).contiguous()
    if is_host(device):
        _require_one_shape(sent, group)
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, sent, group=group)
    return torch.stack(parts).to(tensor.device)


# Sizes that are compared.
_COMPARED = 7


def _require_one_shape(tensor: Tensor, group: Any) -> None:
    """Raise if processes gather tensors of different sizes: gloo would end the program, or leave parts unset."""
    shape = list(tensor.shape[:_COMPARED])
    own = torch.tensor([tensor.element_size(), tensor.dim(), *shape, *[0] * (_COMPARED - len(shape))])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    shapes = [tuple(each[2 : 2 + int(each[1])].tolist()) for each in found]
    if any(not each.equal(own) for each in found):
        shown = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
        raise make_error(
            ValueError,
            f"all_gather: the processes give tensors of different shapes or types: {shown}.",
            fix=(
                "Pad them to one shape. In an evaluation, processes may have batches of different sizes: log with "
                "sync_dist=True, or a torchmetrics object, which gathers all sizes."
            ),
        )


def broadcast(data: T, src: int = 0, *, device: torch.device) -> T:
    """Return the object that process ``src`` passed; anything that can be pickled."""
    if world_size() == 1:
        return data
    box: list[Any] = [data if dist.get_rank() == src else None]
    dist.broadcast_object_list(box, src=src, device=None if is_host(device) else device)
    received: T = box[0]
    return received


def gather_objects(data: T) -> list[T]:
    """Return the objects of all processes, in the order of their ranks, on every process."""
    if world_size() == 1:
        return [data]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, data)
    return gathered


# Tensors travel together up to this size, because each collective has a latency; larger ones travel without a copy.
_SMALL_BYTES = 1 << 20
_BUCKET_BYTES = 1 << 23


def broadcast_parts(parts: Sequence[Sequence[Tensor]]) -> None:
    """Give the tensors of ``parts[rank]`` on every process the values they have on process ``rank``, in place."""
    own = dist.get_rank()
    # Two at a time: a bucket of small tensors is a copy of them.
    waiting: deque[tuple[Any, list[Tensor], Tensor | None]] = deque()

    def finish() -> None:
        work, targets, received = waiting.popleft()
        work.wait()
        if received is not None:
            values = received.split([target.numel() for target in targets])
            shaped = [value.view(target.shape) for target, value in zip(targets, values, strict=True)]
            torch._foreach_copy_(targets, shaped)

    for source, tensors in enumerate(parts):
        for bucket in _buckets(tensors):
            first, flat = bucket[0], None
            if len(bucket) > 1 or not first.is_contiguous():
                size = sum(map(torch.numel, bucket))
                flat = torch.cat([t.reshape(-1) for t in bucket]) if source == own else first.new_empty(size)
            work = dist.broadcast(first if flat is None else flat, source, async_op=True)
            waiting.append((work, bucket, None if source == own else flat))
            if len(waiting) > 1:
                finish()
    while waiting:
        finish()


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one type; a large tensor is alone."""
    for alike in by_kind(tensors):
        bucket: list[Tensor] = []
        room = _BUCKET_BYTES
        for tensor in alike:
            if tensor.nbytes > _SMALL_BYTES:
                yield [tensor]
                continue
            if tensor.nbytes > room:
                yield bucket
                bucket, room = [], _BUCKET_BYTES
            bucket.append(tensor)
            room -= tensor.nbytes
        if bucket:
            yield bucket


def send(tensor: Tensor, to: int, *, device: torch.device) -> None:
    """Send a tensor to process ``to``, which must call ``receive`` for it."""
    # Sent as bytes: not every backend knows every type.
    dist.send(as_bytes(tensor.detach().to(device)), to)


def receive(shape: Sequence[int], dtype: torch.dtype, source: int, *, device: torch.device) -> Tensor:
    """Return the tensor that process ``source`` sends, on the CPU."""
    values = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(values.view(-1).view(torch.uint8), source)
    return values.cpu()


def barrier(device: torch.device) -> None:
    """Wait for all processes."""
    if world_size() == 1:
        return
    dist.barrier(device_ids=[device.index] if is_cuda(device) else None)


@contextmanager
def first_one_first(rank: int) -> Iterator[None]:
    """Let the process with ``rank`` 0 run the block before the others, however long it takes."""
    if world_size() == 1:
        yield
        return
    # A separate group, without the timeout of the training's collectives: a download may take long.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))
    try:
        if rank > 0:
            dist.barrier(group)
        try:
            yield
        finally:
            if rank == 0:
                dist.barrier(group)
    finally:
        dist.destroy_process_group(group)


def join(party: Party, *, backend: str, device: torch.device, timeout: datetime.timedelta, store: Any = None) -> None:
    """Join the process group, and leave it when the program ends; a collective waits for the others for ``timeout``.

    The processes connect at ``store``; None for MASTER_ADDR and MASTER_PORT.
    """
    if joined():
        if dist.get_world_size() != party.world_size:
            raise make_error(
                RuntimeError,
                f"this process is already in a group of {dist.get_world_size()} processes, but the run asks for "
                f"{party.world_size}.",
                fix="Use the same devices and num_nodes everywhere in one program.",
            )
        # The timeout of the next run, which may be longer than the timeout of the first.
        if any(name in dist.get_backend() for name in ("gloo", "nccl")):
            torch_private.set_timeout(timeout)
        return
    if not dist.is_available():
        raise make_error(RuntimeError, "this build of torch has no torch.distributed:", fix="use devices=1.")
    options: dict[str, Any] = {"rank": party.rank, "world_size": party.world_size, "timeout": timeout}
    if party.world_size > 1:
        if store is None:
            store = store_of_this_attempt(party)
        if store is None:
            store = store_of_first(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), party)
        meet(store, party)
    if store is not None:
        store.set_timeout(timeout)
        options["store"] = store
    if is_cuda(device) and "nccl" in backend:
        options["device_id"] = device
    dist.init_process_group(backend, **options)
    global _own_group
    _own_group = weakref.ref(dist.group.WORLD)
    if is_host(device) or backend == "gloo":
        # gloo connects every pair of processes: a process that leaves early would break the connections of the others.
        dist.barrier()
    # With a group that still exists, the destructors of the backend's threads may abort the process.
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    if joined() and "gloo" in dist.get_backend():
        # The thread that has done the last exchange frees its tensors, for which it waits for the interpreter's lock.
        # If it still waits when the interpreter ends, it aborts the process.
        time.sleep(_EXIT_SECONDS)
    leave()


_before_leaving: list[Callable[[], None]] = []


def before_leaving(function: Callable[[], None]) -> None:
    """Call ``function`` once, before this process leaves its group."""
    _before_leaving.append(function)


def leave() -> None:
    """Leave the process group, if this process is in one."""
    while _before_leaving:
        _before_leaving.pop()()
    if joined():
        agreement.stop_answering()
        dist.destroy_process_group()


def lost_partner(error: BaseException) -> bool:
    """Return whether ``error`` is the consequence of the death of another process."""
    return bool(error.__dict__.get("is_consequence")) or _is_of_connection(error, "gloo", "nccl")


def _is_of_connection(error: BaseException, *words: str) -> bool:
    if isinstance(error, (ConnectionError, getattr(dist, "DistError", ConnectionError))):
        return True
    text = str(error).lower()
    words = ("closed by peer", "reset by peer", "connection refused", *words)
    return isinstance(error, RuntimeError) and any(word in text for word in words)


@contextmanager
def naming_who_ended() -> Iterator[None]:
    """Replace the error of a lost connection by one that says which process has ended, if that is known."""
    if world_size() == 1:
        yield
        return
    agreement.begin_run()
    try:
        yield
    except BaseException as error:
        # Other errors of a backend concern this process.
        if not _is_of_connection(error, "broken pipe", "remote process"):
            agreement.publish_exit_error(error)
            raise
        if (why := agreement.find_dead_peer(_WORD_SECONDS)) is None:
            if isinstance(error, ConnectionError):
                # The program's own, for instance to a bucket.
                agreement.publish_exit_error(error)
            raise
        # What ended the first process is known to the launcher.
        if (file := os.environ.get(CAUSE_VARIABLE)) and not agreement.store_has_ended(agreement.address_of_store()):
            with suppress(OSError):
                Path(file).write_text(why, encoding="utf-8")
        consequence = RuntimeError(f"{why.rstrip('.')}. This run cannot continue without it.")
        consequence.__dict__["is_consequence"] = True
        raise consequence from None


def name_who_ended_at_the_top() -> None:
    """Do the same for errors that end the program: after ``Fabric.launch()`` its own lines run in all processes."""
    shows = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            with naming_who_ended():
                raise error
        except BaseException as named:
            shows(type(named), named.with_traceback(trace), trace)

    sys.excepthook = show
