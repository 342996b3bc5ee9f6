"""ZeRO-1: each process keeps the optimizer state of its part of the parameters, and steps that part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import warn_once
from hasten._lib.tree import move_to, parameters_of
from hasten.checkpoint.contents import load_optimizer
from hasten.checkpoint.snapshots import snapshot_optimizer
from hasten.checkpoint.stored import StoredTensor
from hasten.extend.origin import comes_from, is_builtin
from hasten.machine import collectives
from hasten.optim.fused import unwrapped
from hasten.precision.small_updates import full_precision, leave_steps_to_caller

# These optimizers update each element by itself, so that a parameter can be divided anywhere.
_ELEMENTWISE = frozenset({
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam, optim.RAdam, optim.Adadelta,
    optim.Adamax, optim.ASGD, optim.Rprop,
})  # fmt: skip
# Parts begin at multiples of this many elements, where vector instructions can load them; smaller ones stay whole.
_ALIGNED = 64


class _Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, which process ``owner`` steps."""

    parameter: Tensor
    owner: int
    start: int
    stop: int
    # The tensor that the optimizer steps in place of the parameter: the parameter itself if it is not divided.
    stepped: Tensor

    @property
    def is_whole(self) -> bool:
        return self.stepped is self.parameter

    def elements(self) -> Tensor:
        """Return the elements, in the memory of the parameter."""
        whole = self.parameter.detach()
        return whole if self.is_whole else whole.view(-1)[self.start : self.stop]

    def of(self, value: Any) -> Any:
        """Return the part of an entry of the parameter's state that belongs to this piece."""
        if self.is_whole or not isinstance(value, (Tensor, StoredTensor)) or value.shape != self.parameter.shape:
            return value
        whole = value if isinstance(value, Tensor) else value.full()
        # A copy: a view would keep the whole in memory.
        return whole.reshape(-1)[self.start : self.stop].clone()

    def show(self, *, gradient: bool) -> None:
        """Give ``stepped`` the elements of the parameter, and of its gradient."""
        if self.is_whole:
            return
        self.stepped.data = self.elements()
        grad = self.parameter.grad
        if gradient and grad is not None:
            grad = grad.to_dense() if grad.is_sparse else grad
            self.stepped.grad = grad.detach().reshape(-1)[self.start : self.stop]

    def hide(self) -> None:
        """Release the parameter's memory, which may be moved between two steps."""
        if not self.is_whole:
            self.stepped.grad = None
            self.stepped.data = self.stepped.data.new_empty(0)


class OptimizerShard:
    """The part of an optimizer that this process steps and whose state it keeps.

    The optimizer stays the user's object, with all parameters in its groups. Only while it steps, the groups hold the
    parts of this process; then each process sends its parts to the others. Optimizers that update each element by
    itself have equal parts everywhere; for others, whole parameters are distributed by their size.

    The backend communicates on ``device``. ``exchanges`` is called in each step: whether the processes exchange the
    parts that they stepped.

    Raises:
        ValueError: the optimizer computes with all parameters at once.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.

    """

    def __init__(
        self, optimizer: Optimizer, *, rank: int, world_size: int, device: torch.device, exchanges: Callable[[], bool]
    ) -> None:
        _check(optimizer)
        self._optimizer: Any = optimizer
        self._rank, self._size = rank, world_size
        self._device, self._exchanges = device, exchanges
        self._divides = type(optimizer) in _ELEMENTWISE
        self._pieces: dict[Tensor, list[_Piece]] = {}
        # Elements that each process steps.
        self._loads = [0] * world_size
        self._inside = False
        kind: Any = type(optimizer)
        own = vars(optimizer)
        replaced: Any = own.get("step")
        # A scheduler's wrapper only notices that the optimizer stepped; so does the step below.
        is_users = replaced is not None and not torch_private.is_wrapped_by_scheduler(replaced)
        self._step: Callable[..., Any] = replaced if is_users else functools.partial(unwrapped(kind.step), optimizer)

        def step(optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return self.step(closure, **kwargs)

        # The user's step hooks see all parameters, before and after the step.
        hooked: Any = Optimizer.profile_hook_step(step)
        torch_private.mark_as_wrapped_by_scheduler(hooked)
        leave_steps_to_caller(optimizer)
        own.update(
            _hasten_shard=self,
            step=MethodType(hooked, optimizer),
            state_dict=self._refuse_state_dict,
            load_state_dict=self.load,
        )

    # -- which process steps which parameters

    def _follow(self) -> None:
        """Assign parameters that are new in the groups, or train from now on."""
        state = self._optimizer.state
        self._assign(
            p for p in parameters_of(self._optimizer) if p not in self._pieces and (p.requires_grad or p in state)
        )

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        new = list(parameters)
        if not new:
            return
        divided = [p for p in new if self._divides and p.is_contiguous() and p.numel() >= 2 * _ALIGNED]
        chosen = set(map(id, divided))
        whole = [p for p in new if id(p) not in chosen]
        loads = self._loads
        # The largest first, each to the process with the least.
        for parameter in sorted(whole, key=torch.numel, reverse=True):
            self._add(parameter, loads.index(min(loads)), 0, parameter.numel())
        goal = -(-(sum(loads) + sum(map(torch.numel, divided))) // self._size)
        owner = 0
        for parameter in divided:
            start, end = 0, parameter.numel()
            while start < end:
                while owner < self._size - 1 and loads[owner] >= goal:
                    owner += 1
                room = -(-max(goal - loads[owner], 0) // _ALIGNED) * _ALIGNED
                stop = end if owner == self._size - 1 or end - start - room < _ALIGNED else start + room
                self._add(parameter, owner, start, stop)
                start = stop
        for parameter in new:
            self._divide_state(parameter)

    def _add(self, parameter: Tensor, owner: int, start: int, stop: int) -> None:
        is_whole = stop - start == parameter.numel()
        stepped = parameter if is_whole else nn.Parameter(parameter.detach().new_empty(0))
        self._pieces.setdefault(parameter, []).append(_Piece(parameter, owner, start, stop, stepped))
        self._loads[owner] += stop - start

    def _divide_state(self, parameter: Tensor) -> None:
        """Keep only this process's part of a state that the optimizer has already."""
        states = self._optimizer.state
        if parameter in states:
            entries = states.pop(parameter)
            for piece in self._own_pieces([parameter]):
                states[piece.stepped] = {key: piece.of(value) for key, value in entries.items()}

    def _own_pieces(self, parameters: Iterable[Tensor]) -> list[_Piece]:
        return [piece for p in parameters for piece in self._pieces.get(p, ()) if piece.owner == self._rank]

    @contextmanager
    def own_parts(self, *, gradients: bool = False) -> Iterator[list[_Piece]]:
        """Let the groups hold only what this process steps, inside the block; yield it, in their order."""
        # In place: some optimizers keep a reference to the list.
        before = [(group["params"], list(group["params"])) for group in self._optimizer.param_groups]
        by_group = [self._own_pieces(parameters) for _, parameters in before]
        pieces = [piece for of_group in by_group for piece in of_group]
        self._inside = True
        try:
            for piece in pieces:
                piece.show(gradient=gradients)
            for (listed, _), of_group in zip(before, by_group, strict=True):
                listed[:] = [piece.stepped for piece in of_group]
            yield pieces
        finally:
            self._inside = False
            for listed, parameters in before:
                listed[:] = parameters
            for piece in pieces:
                piece.hide()

    # -- a step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: object) -> Any:
        """Step the parts of this process, and exchange them with the others."""
        optimizer = self._optimizer
        torch_private.note_step(optimizer)
        if closure is not None:
            # The closure needs all parameters, and computes their gradients.
            with torch.enable_grad():
                kwargs["closure"] = _computed_once(closure(), type(optimizer).__name__)
        self._follow()
        with self.own_parts(gradients=True):
            result = full_precision(optimizer, functools.partial(self._step, **kwargs))
        if self._exchanges():
            self._exchange()
        return result

    @torch.no_grad()
    def _exchange(self) -> None:
        parts: list[list[Tensor]] = [[] for _ in range(self._size)]
        parameters = parameters_of(self._optimizer)
        for parameter in parameters:
            for piece in self._pieces.get(parameter, ()):
                parts[piece.owner].append(piece.elements())
        collectives.broadcast_parts(parts)
        # Autograd has not seen that detached tensors were written to.
        increment_version(parameters)

    # -- state

    def collect(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, on the CPU, in process 0, and an empty dict in the others.

        The format is the same as of ``optimizer.state_dict()`` without a strategy. All processes call it together.
        """
        local: dict[str, Any] = {}
        entries: list[_PieceState] = []
        error: Exception | None = None
        try:
            local, entries = self._local_state()
        except Exception as caught:
            error = caught
        # Before anything is sent, so that no process waits for one that failed.
        said = f"{type(error).__name__}: {error}" if error is not None else None
        by_rank = collectives.gather_objects((said, [entry.announced() for entry in entries]))
        if error is not None:
            raise error
        for rank, (said, _) in enumerate(by_rank):
            if said is not None:
                raise RuntimeError(f"the state of {type(self._optimizer).__name__} on rank {rank}: {said}")
        if self._rank > 0:
            for entry in entries:
                if entry.is_sent:
                    collectives.send(entry.value, 0, device=self._device)
            return {}
        parts = self._received(entries, [announced for _, announced in by_rank])
        shapes = [parameter.shape for parameter in parameters_of(self._optimizer)]
        states = {
            index: {key: _joined(each, shapes[index]) for key, each in parts[index].items()} for index in sorted(parts)
        }
        return {**local, "state": states}

    def _received(
        self, own: list[_PieceState], announced_by_rank: list[list[_PieceState]]
    ) -> dict[Any, dict[Any, list[_PieceState]]]:
        """Return the states of all processes, on the CPU, by parameter and key; in process 0."""
        parts: dict[Any, dict[Any, list[_PieceState]]] = {}
        for rank, announced in enumerate(announced_by_rank):
            for number, entry in enumerate(announced):
                if entry.is_sent:
                    shape, dtype = entry.value
                    value = (
                        own[number].value.detach().to("cpu", copy=True)
                        if rank == 0
                        else collectives.receive(shape, dtype, rank, device=self._device)
                    )
                    entry = entry._replace(value=value)
                parts.setdefault(entry.parameter, {}).setdefault(entry.key, []).append(entry)
        return parts

    def _local_state(self) -> tuple[dict[str, Any], list[_PieceState]]:
        """Return the state dict with the groups of the whole optimizer, and the states of the parts of this process."""
        self._follow()
        optimizer = self._optimizer
        index_of = {p: index for index, p in enumerate(parameters_of(optimizer))}
        with self.own_parts() as pieces:
            state_dict = type(optimizer).state_dict(optimizer)
        groups = []
        for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            groups.append({**saved, "params": [index_of[p] for p in group["params"]]})
        entries = []
        for number, state in state_dict["state"].items():
            index, start = index_of[pieces[number].parameter], pieces[number].start
            for key, value in state.items():
                is_sent = isinstance(value, Tensor) and value.numel() > 1
                entries.append(_PieceState(index, start, key, value if is_sent else move_to(value, "cpu"), is_sent))
        return {**state_dict, "param_groups": groups}, entries

    def load(self, state: dict[str, Any]) -> None:
        """Restore this process's part of the state of a whole optimizer."""
        optimizer = self._optimizer
        if self._inside:
            type(optimizer).load_state_dict(optimizer, state)
            return
        saved = state["param_groups"]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            with set_during(self, _inside=True):
                # Raises an error that says what does not fit.
                load_optimizer(optimizer, state)
        keys = dict(zip(parameters_of(optimizer), (key for group in saved for key in group["params"]), strict=True))
        # Also parameters that are frozen now and have trained before.
        self._assign(p for p, key in keys.items() if p not in self._pieces and key in state["state"])
        self._follow()
        groups, states, first = [], {}, 0
        for group, present in zip(saved, optimizer.param_groups, strict=True):
            pieces = self._own_pieces(present["params"])
            groups.append({**group, "params": list(range(first, first + len(pieces)))})
            for number, piece in enumerate(pieces, first):
                if (entries := state["state"].get(keys[piece.parameter])) is not None:
                    states[number] = {key: piece.of(value) for key, value in entries.items()}
            first += len(pieces)
        with self.own_parts():
            load_optimizer(optimizer, {**state, "state": states, "param_groups": groups})

    def keep(self) -> Callable[[], None]:
        """Return a function that gives the optimizer, in this process, the state it has now."""
        self._follow()
        return snapshot_optimizer(self._optimizer, within=self.own_parts)

    def _refuse_state_dict(self) -> dict[str, Any]:
        if self._inside:
            state: dict[str, Any] = type(self._optimizer).state_dict(self._optimizer)
            return state
        raise make_error(
            RuntimeError,
            f"{type(self._optimizer).__name__}.state_dict() with strategy='ddp_sharded': this process has only its "
            "part of the state.",
            fix="Call trainer.save_checkpoint(path) or fabric.save(path, ...) on all processes.",
        )


def shard_of(optimizer: Optimizer) -> OptimizerShard | None:
    """Return the shard of an optimizer that was divided, else None."""
    shard: OptimizerShard | None = getattr(optimizer, "__dict__", {}).get("_hasten_shard")
    return shard


class _PieceState(NamedTuple):
    """One entry of the state of a part of a parameter."""

    parameter: int
    start: int
    key: Any
    value: Any
    # Whether the value is a tensor, which is sent separately.
    is_sent: bool

    def announced(self) -> _PieceState:
        """Return the entry with everything needed to receive the value."""
        return self._replace(value=(tuple(self.value.shape), self.value.dtype)) if self.is_sent else self


def _joined(parts: list[_PieceState], shape: torch.Size) -> Any:
    """Return an entry of the state of a whole parameter."""
    values = [part.value for part in sorted(parts, key=lambda part: part.start)]
    # A number, such as the count of steps, is the same for all parts.
    return torch.cat(values).view(shape) if len(values) > 1 and parts[0].is_sent else values[0]


def _computed_once(loss: Any, optimizer: str) -> Callable[[], Any]:
    losses = [loss]

    def closure() -> Any:
        if not losses:
            what = (
                f"strategy='ddp_sharded' and {optimizer}: its step computes the loss again, with parameters that the "
                "other processes have not stepped."
            )
            raise make_error(RuntimeError, what, fix="Use strategy='ddp'.", argument="strategy")
        return losses.pop()

    return closure


def _check(optimizer: Any) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        what = (
            f"strategy='ddp_sharded': {kind.__name__} is not a torch.optim.Optimizer, whose groups and state it "
            "divides."
        )
        raise make_error(ValueError, what, fix="Use strategy='ddp'.", argument="strategy")
    if isinstance(optimizer, optim.LBFGS):
        what = (
            "strategy='ddp_sharded': a step of LBFGS computes with all parameters at once, and each process has the "
            "state of its part only."
        )
        raise make_error(ValueError, what, fix="Use strategy='ddp' or another optimizer.", argument="strategy")
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        what = (
            f"strategy='ddp_sharded': {kind.__name__} computes the weights to evaluate with from its state, and each "
            "process has only its part of that."
        )
        raise make_error(ValueError, what, fix="Use strategy='ddp'.", argument="strategy")
    if not (is_builtin(kind) or comes_from(kind, "torch")):
        warn_once(
            f"ddp_sharded {kind.__name__}",
            f"strategy='ddp_sharded' and {kind.__name__}: each process steps its own parameters, which is right for "
            "optimizers that update each parameter by itself.",
            fix="If this one computes a value from all of them, such as a norm, use strategy='ddp'.",
        )
