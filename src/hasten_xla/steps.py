"""The steps of an XLA device, which records operations and runs them once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import leaves, map_tensors, move_to

T = TypeVar("T")

# Graphs of steps with the same shapes of batches: the first step makes optimizer states and totals, an epoch's last
# window may differ. More of them mean that something changes in every step.
_EXPECTED_GRAPHS = 6


class XLASteps:
    """Runs what an XLA device has recorded, once a step; moves batches to it; warns of graphs that differ.

    Operations on an XLA device are recorded; ``torch_xla.sync()`` compiles what was recorded since the last one and
    starts it, without waiting for it. A graph is compiled once for each sequence of operations and shapes.

    Source: `PyTorch/XLA, Learn about lazy tensors
    <https://docs.pytorch.org/xla/release/r2.9/learn/pytorch-on-xla-devices.html>`_.

    """

    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._seen: dict[str, set[Any]] = {}
        # Graphs compiled in the steps of a stage.
        self.graphs: dict[str, int] = {}
        self._compiled = 0
        self._warned: set[str] = set()
        self._is_synced = True
        self._batch: Any = None
        self._sync: Callable[[], None] | None = None
        self._counter: Callable[[str], int | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sync": None, "_counter": None, "_batch": None}

    def begin(self) -> None:
        """Look up torch_xla's functions, in the process that trains."""
        import torch_xla
        from torch_xla.debug import metrics

        self._sync, self._counter = torch_xla.sync, metrics.counter_value
        self._compiled = self._compilations()

    def end_step(self, stage: str, batch: object = None, is_last: bool = False) -> None:
        """Run what was recorded since the last step; see ``RecordedSteps.end_step``."""
        if self._sync is None:
            self.begin()
        assert self._sync is not None
        before = self._compilations()
        self._sync()
        self._is_synced = True
        compiled = self._compilations()
        if compiled != before:
            self._note(stage, self._batch if batch is None else batch, is_last, compiled - before)
        elif stage not in self._first:
            self._note(stage, self._batch if batch is None else batch, is_last, 0)

    def _compilations(self) -> int:
        assert self._counter is not None
        return self._counter("UncachedCompile") or 0

    def _note(self, stage: str, batch: object, is_last: bool, compiled: int) -> None:
        """Count compiled graphs; warn if shapes have changed, or if the graphs of equal shapes keep changing."""
        shapes = shapes_of(batch)
        number = self.graphs[stage] = self.graphs.get(stage, 0) + compiled
        seen = self._seen.setdefault(stage, set())
        first = self._first.setdefault(stage, shapes)
        if shapes not in seen and seen and compiled:
            cause = "last" if is_last else "shapes"
            advice = (
                "It is the last batch of its epoch: DataLoader(drop_last=True) leaves it out."
                if is_last
                else "Pad batches to a few sizes, for instance with Trainer(batching='length')."
            )
            self._warn(
                f"{stage}-{cause}",
                f"XLA compiled a step of {stage!r} again, {number} graphs so far: the batch has the shapes "
                f"{_told(shapes)}, the first one had {_told(first)}. Each set of shapes is compiled once. {advice}",
            )
        elif number > _EXPECTED_GRAPHS + len(seen):
            self._warn(
                f"{stage}-same",
                f"XLA compiled a step of {stage!r} again, {number} graphs so far, though the shapes of its batch are "
                "not new. Something else changes: a value read in the step (.item(), print, if), or a Python number "
                "that decides a shape or a branch.",
            )
        seen.add(shapes)

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message)

    def to_device(self, data: T, device: torch.device) -> T:
        """Return ``data`` on the device; the copies continue while the host records the step."""
        from torch_xla.core import xla_model

        tensors: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            if type(tensor) is Tensor and tensor.is_cpu:
                tensors[id(tensor)] = tensor
            return tensor

        map_tensors(note, data)
        sent = self._send(list(tensors.values()), device, xla_model.send_cpu_data_to_device) if tensors else []
        moved = dict(zip(tensors, sent, strict=True))
        # Subclasses, and objects that move themselves, follow.
        there: T = move_to(map_tensors(lambda tensor: moved.get(id(tensor), tensor), data), device)
        return there

    def _send(self, tensors: list[Tensor], device: torch.device, send: Callable[..., Any]) -> list[Tensor]:
        sent: list[Tensor] = send(tensors, device)
        return sent

    def to_host(self, data: T) -> T:
        """Return ``data`` with its XLA tensors copied to the CPU; see ``on_host``."""
        return on_host(data)

    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of the host on the device; see the function of this name."""
        return upload(tensor, device)

    def place(self, module: nn.Module, device: torch.device | str) -> nn.Module:
        """Move ``module`` to the device, or back to the CPU: its parameters stay the same objects, tied ones tied.

        ``module.to(device)`` makes new parameters where an XLA device is left or entered.
        """
        device = torch.device(device)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.device.type != device.type:
                    moved = nn.Parameter(upload(parameter.detach(), device), parameter.requires_grad)
                    vars(moved).update(vars(parameter))
                    if parameter.grad is not None:
                        moved.grad = upload(parameter.grad, device)
                    torch.utils.swap_tensors(parameter, moved)
            sent: dict[int, tuple[Tensor, Tensor]] = {}
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None and buffer.device.type != device.type:
                        # With the buffer itself: its id must stay its own.
                        part._buffers[name] = sent.setdefault(id(buffer), (upload(buffer, device), buffer))[0]
        # What is neither, such as the states of metrics.
        return module.to(device)

    def feed(self, batches: Iterable[Any], device: torch.device | None) -> Iterator[Any]:
        """Yield batches on the device; what a batch has recorded runs before the next one, unless a step has run it."""
        for batch in batches:
            self._batch = batch
            self._is_synced = False
            yield batch if device is None else self.to_device(batch, device)
            if not self._is_synced:
                self.end_step("train" if torch.is_grad_enabled() else "validate", batch)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on an XLA device, or on the CPU.

    After a plain ``tensor.to(device)``, XLA does not update it in place in the first step, and compiles the second step
    again.
    """
    if not tensor.is_cpu or device.type != "xla":
        return tensor.to(device)
    from torch_xla.core import xla_model

    sent: Tensor = xla_model.send_cpu_data_to_device([tensor], device)[0]
    return sent


def shapes_of(batch: object) -> tuple[Any, ...]:
    """Return the shapes of the tensors in a batch, in order.

    Example::

        >>> shapes_of({"x": torch.zeros(2, 3), "y": torch.zeros(2)})
        ((2, 3), (2,))

    """
    return tuple(tuple(leaf.shape) for leaf in leaves(batch) if isinstance(leaf, Tensor))


def _told(shapes: tuple[Any, ...]) -> str:
    return ", ".join(map(str, shapes[:4])) + (", ..." if len(shapes) > 4 else "")


def on_host(data: T) -> T:
    """Return ``data`` with its XLA tensors copied to the CPU, for a checkpoint that any machine reads.

    A tensor that occurs several times is copied once, and stays shared.

    """
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if tensor.device.type != "xla":
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().cpu()
        return copies[id(tensor)]

    copied: T = map_tensors(copy, data)
    return copied
