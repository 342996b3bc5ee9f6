"""Count memory, sent bytes and operations of a process, for real tensors or tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hasten._lib import torch_private
from hasten.report.peaks import flop_counter

# What holds memory. The first four stay between two steps, gradients only where they are kept.
WEIGHTS, BUFFERS, GRADIENTS, OPTIMIZER = "weights", "buffers", "gradients", "optimizer states"
BATCH, GATHERED, EXCHANGE = "batch", "gathered weights", "buffers of exchanges"
ACTIVATIONS, TEMPORARY = "activations", "temporary"
CATEGORIES = (WEIGHTS, OPTIMIZER, GRADIENTS, BUFFERS, GATHERED, EXCHANGE, BATCH, ACTIVATIONS, TEMPORARY)

# The parts of a step, of each of which the peak is kept.
FORWARD, BACKWARD, STEP = "forward", "backward", "step"
# The categories of a new peak are found again when it has grown by this share.
_GROWTH = 1.005


class Spread(NamedTuple):
    """How the processes of a group are spread over machines."""

    processes: int  # How many there are.
    crossing: int  # How many of them send to another machine in a ring in the order of ranks.
    elsewhere: int  # How many are on other machines than the first of them.

    @classmethod
    def of(cls, ranks: Sequence[int], per_machine: int | None) -> Spread:
        """Return the spread of a group of ranks, with ``per_machine`` on each machine; None if all are on one.

        Example::

            >>> Spread.of(range(16), 8), Spread.of(range(0, 16, 8), 8)
            (Spread(processes=16, crossing=2, elsewhere=8), Spread(processes=2, crossing=2, elsewhere=1))

        """
        machines = [0 if per_machine is None else rank // per_machine for rank in ranks]
        following = machines[1:] + machines[:1]
        crossing = sum(one != other for one, other in zip(machines, following, strict=True))
        return cls(len(machines), crossing, sum(machine != machines[0] for machine in machines))


@dataclass
class Sent:
    """The collectives of one kind in one step, of one process."""

    calls: int = 0
    # Of the whole tensors: all parts of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce or a
    # broadcast.
    payload_bytes: int = 0
    # What this process sends in a ring: (n - 1) / n of the payload for all-gather and reduce-scatter, twice that for
    # all-reduce; all of it where it sends to one process.
    ring_bytes: int = 0
    # ``ring_bytes`` in parts, by the share of them that goes between machines: (of so many, of how many).
    parts: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, payload: int, spread: Spread, rounds: int, *, in_ring: bool = True) -> None:
        """Add one call, whose payload goes around the ring so many rounds.

        With ``in_ring`` each process sends to the next; else each sends to all others.
        """
        size = spread.processes
        sent = rounds * payload * (size - 1) // max(size, 1)
        self.calls += 1
        self.payload_bytes += payload
        self.ring_bytes += sent
        share = (spread.crossing, size) if in_ring else (spread.elsewhere, size - 1)
        self.parts[share] = self.parts.get(share, 0) + sent

    def links(self) -> list[tuple[int, int]]:
        """Return the bytes that a process sends within its machine and between machines, of each part.

        In a ring over several machines a few processes send to another machine, and not always the same ones: this is
        the mean of all processes.
        """
        found = []
        for (crossing, of), sent in self.parts.items():
            between = sent * crossing // max(of, 1)
            found.append((sent - between, between))
        return found


@dataclass
class Peak:
    """The most memory held at once, in bytes, and by what."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class Ledger(torch_private.TorchDispatchMode):
    """Counts the memory of tensors, the bytes of collectives and the operations while it is entered.

    A tensor counts from the operation that makes it until nothing refers to its memory. It costs a few microseconds an
    operation, and works alike on real tensors and on tensors without data.

    ``per_machine`` processes are on each machine, in the order of ranks; None if all are on one.

    Example::

        >>> with Ledger() as ledger:
        ...     kept = torch.zeros(100)
        ...     twice = kept + kept
        ...     del twice
        >>> ledger.live, ledger.peak.total
        (400, 800)

    Source of the method: `PyTorch, torch_private.TorchDispatchMode and FakeTensor
    <https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html>`_.

    """

    def __init__(self, per_machine: int | None = None) -> None:
        super().__init__()
        self.phase = ACTIVATIONS
        self.is_backward = False
        self.live = 0
        self.growth = _GROWTH
        # The highest memory in each part of the step, and the part that is counted now.
        self.peaks: dict[str, Peak] = {}
        self._now = Peak()
        self.sent: dict[str, Sent] = {}
        # Floating-point operations of matrix products, convolutions and attention.
        self.flops = 0
        self._formulas = flop_counter().flop_registry
        self._per_machine = per_machine
        # By the name of a group; None for texts that name none.
        self._spreads: dict[str, Spread | None] = {}
        # Returns what is known to be weights, gradients, ...
        self.owners: Callable[[], Mapping[str, Iterable[Tensor]]] = dict
        # By the address of the storage: its bytes, its category by when it was made, and what tells its end.
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._next_snapshot = 0.0
        self._resize: Any = None
        self.begin(FORWARD)

    @property
    def peak(self) -> Peak:
        """The highest of all parts of the step."""
        return max(self.peaks.values(), key=lambda one: one.total)

    # -- beginning and end

    def __enter__(self) -> Ledger:
        self._resize = torch.UntypedStorage.resize_
        ledger, resize = self, self._resize

        def resize_(storage: Any, size: int) -> Any:
            # fully_shard frees and allocates gathered weights in this way, which is not an operation of torch.
            result = resize(storage, size)
            ledger._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def restart(self) -> None:
        """Forget peak, collectives and operations; what is held stays known."""
        self.peaks, self.sent, self.flops = {}, {}, 0
        self.begin(FORWARD)

    def begin(self, part: str) -> None:
        """Count for a part of the step from now on; one that comes again keeps its higher peak."""
        self._now = self.peaks.setdefault(part, Peak())
        self._next_snapshot = self._now.total * self.growth
        if self.live > self._now.total:
            self._new_peak()

    # -- tensors

    def see(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a tensor that exists already; ``kind`` is its category."""
        try:
            storage = torch_private.local_part(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # Sparse tensors and others without one storage: their parts are seen.
        key = torch_private.identity_of(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            self._kinds[key] = kind or self.phase
            self._ends[key] = weakref.ref(storage, lambda _: self._end(key))
            self._set(key, storage.nbytes())
        elif kind is not None:
            self._kinds[key] = kind

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        if self.live > self._now.total:
            self._new_peak()

    def _end(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._kinds.pop(key, None)
        self._ends.pop(key, None)

    def _resized(self, storage: Any) -> None:
        key = torch_private.identity_of(storage)
        if key in self._sizes:
            if self._sizes[key] == 0:
                self._kinds[key] = GATHERED
            self._set(key, storage.nbytes())

    def _new_peak(self) -> None:
        self._now.total = self.live
        if self.live > self._next_snapshot:
            self._next_snapshot = self.live * self.growth
            self._now.parts = self.parts()

    def parts(self) -> dict[str, int]:
        """Return the bytes held now, by category."""
        known: dict[int, str] = {}
        for kind, tensors in self.owners().items():
            for tensor in tensors:
                known[torch_private.identity_of(torch_private.local_part(tensor).untyped_storage())] = kind
        found: dict[str, int] = {}
        for key, size in self._sizes.items():
            kind = known.get(key) or self._kinds[key]
            found[kind] = found.get(kind, 0) + size
        return {kind: found[kind] for kind in CATEGORIES if found.get(kind)}

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__name__", "") in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            # Seen again as operations of this process's parts.
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and self.is_backward and args[0].dtype == torch.int32:
            # DistributedDataParallel asks which parameters no process has used. Those keep the gradients they have, and
            # here the ones that are used have theirs.
            return 0
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if isinstance(result, Tensor):
            self.see(result)
        elif result is not None:
            for leaf in torch_private.pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.see(leaf)
        if "c10d" in func.namespace or func.namespace == "_dtensor":
            self._exchange(func, args, result)
        return result

    def _exchange(self, func: Any, args: Any, result: Any) -> None:
        name = torch_private.operator_name(func).partition("::")[2]
        kind = _KINDS.get(name)
        if kind is None:
            return
        what, side, rounds = kind
        tensors = [
            leaf
            for leaf in torch_private.pytree.tree_leaves(result if side == "result" else args[side])
            if isinstance(leaf, Tensor)
        ]
        if what == "all-gather":
            for tensor in tensors:
                self.see(tensor, GATHERED)
        payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if what == "send":
            # To one process: all of the payload, of which ``add`` takes half for each of two.
            self.sent.setdefault(what, Sent()).add(payload, self._spread_to(args[1], args[2]), rounds, in_ring=False)
            return
        in_ring = what != "all-to-all"
        self.sent.setdefault(what, Sent()).add(payload, self._spread(args), rounds, in_ring=in_ring)

    def _spread_to(self, group: torch.ScriptObject, place: int) -> Spread:
        """Return how this process and the one at a place of a group are spread over machines."""
        ranks = torch_private.ranks_of_group(_name_of_group(group) or "")
        assert ranks is not None
        return Spread.of([torch.distributed.get_rank(), ranks[place]], self._per_machine)

    def _spread(self, args: Any) -> Spread:
        """Return how the processes of a collective are spread over machines."""
        for value in reversed(args):
            name = _name_of_group(value) if isinstance(value, torch.ScriptObject) else value
            if not isinstance(name, str):
                continue
            if name not in self._spreads:
                # Other texts name operations, such as "sum".
                ranks = torch_private.ranks_of_group(name)
                self._spreads[name] = None if ranks is None else Spread.of(ranks, self._per_machine)
            if (found := self._spreads[name]) is not None:
                return found
        return Spread.of(range(torch.distributed.get_world_size()), self._per_machine)


# By the name of the operation: kind, where its whole tensors are, and how often the payload goes around the ring.
_KINDS: dict[str, tuple[str, Any, int]] = {
    "allreduce_": ("all-reduce", 0, 2),
    "allreduce_coalesced_": ("all-reduce", 0, 2),
    "all_reduce": ("all-reduce", 0, 2),
    "all_reduce_": ("all-reduce", 0, 2),
    "all_reduce_coalesced": ("all-reduce", 0, 2),
    "all_reduce_coalesced_": ("all-reduce", 0, 2),
    "_allgather_base_": ("all-gather", 0, 1),
    "allgather_": ("all-gather", 0, 1),
    "allgather_coalesced_": ("all-gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 1),
    "all_gather_into_tensor": ("all-gather", "result", 1),
    "all_gather_into_tensor_out": ("all-gather", "result", 1),
    "all_gather_into_tensor_coalesced": ("all-gather", "result", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "reduce_scatter_": ("reduce-scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0, 1),
    "reduce_scatter_tensor_out": ("reduce-scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "broadcast": ("broadcast", 0, 1),
    "alltoall_": ("all-to-all", 1, 1),
    "alltoall_base_": ("all-to-all", 1, 1),
    "all_to_all_single": ("all-to-all", 0, 1),
    "shard_dim_alltoall": ("all-to-all", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "gather_": ("gather", 1, 1),
    "scatter_": ("scatter", 0, 1),
    "send": ("send", 0, 2),
}


def _name_of_group(boxed: torch.ScriptObject) -> str | None:
    """Return the name of the process group in an argument of an operator; None if that is something else."""
    from torch.distributed import ProcessGroup

    try:
        return str(ProcessGroup.unbox(boxed).group_name)
    except (RuntimeError, TypeError):
        return None
