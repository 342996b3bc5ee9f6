"""One graph for a whole step of training: forward, loss, backward, clipping and the update of the weights.

The graph uses up its gradients: ``parameter.grad`` stays None. The arithmetic of the optimizers is that of
``torch.optim``, and so is their state: it is read from the optimizer before each step and changed in place, as are the
weights. What changes with the step, such as a learning rate, is in tensors, so that it needs no other graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hasten._lib import torch_private
from hasten._lib.device import is_cuda
from hasten._lib.errors import Parts
from hasten._lib.rank_zero import warn_once
from hasten._lib.tree import map_tensors, parameters_of
from hasten.compile.regions import must_stay_python, own_code
from hasten.compile.report import CompileCounters, without_metric
from hasten.compile.settings import CompileSettings
from hasten.compile.steps import Step
from hasten.optim.fast_step import is_watched
from hasten.optim.fused import unwrapped

# What a graph gets of a group: its weights, their states, weights without state, the learning rate (for Adam on a CPU,
# the factors of each weight), 1, and options.
Group = tuple[list[Tensor], list[list[Tensor]], list[Tensor], Tensor, Tensor, dict[str, Any]]

# The weights without state at the last step: where they are the same again, the loss does not use them.
_without_state: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped in the graph."""

    max_value: float = 0.0  # The largest norm of all gradients together, or the largest element; 0 for no clipping.
    by_value: bool = False  # Limit each element, not the norm.

    def of(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients, clipped as ``torch.nn.utils`` does it; None stays None."""
        given = [gradient for gradient in gradients if gradient is not None]
        if self.max_value <= 0 or not given:
            return list(gradients)
        limit = self.max_value
        if self.by_value:
            return [None if gradient is None else gradient.clamp(-limit, limit) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in given]))
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        return [None if gradient is None else gradient * scale for gradient in gradients]


def why_not_in_graph(optimizer: Optimizer) -> Parts | None:
    """Return why the step of an optimizer cannot be a part of a graph, and what to write; None if it can.

    Example::

        >>> why_not_in_graph(torch.optim.Rprop([nn.Parameter(torch.zeros(2))])).what
        'Rprop cannot be a part of the graph; Adam, AdamW and SGD can.'

    """
    kind, name, instead = type(optimizer), type(optimizer).__name__, "Use compile=True."
    base = next((each for each in (AdamW, Adam, SGD) if isinstance(optimizer, each)), None)
    if base is None or unwrapped(kind.step) is not unwrapped(base.step):
        return Parts(f"{name} cannot be a part of the graph; Adam, AdamW and SGD can.", instead)
    if is_watched(optimizer):
        return Parts(f"there are hooks around the step of {name}, or another step in its place.", instead)
    for group in optimizer.param_groups:
        if group["differentiable"]:
            return Parts(f"{name}(differentiable=True) cannot be a part of the graph.", "Leave differentiable out.")
        on_host = not (base is SGD or group["fused"] or group["capturable"])
        if on_host and any(is_cuda(parameter.device) for parameter in group["params"]):
            return Parts(f"{name} counts its steps on the host.", "Use fused_optimizer=True too.")
    if any(torch_private.has_gradient_hooks(parameter) for parameter in parameters_of(optimizer)):
        return Parts("there are hooks on the gradients of parameters.", instead)
    return None


class Update:
    """The tensors of one Adam, AdamW or SGD that a graph changes.

    ``records`` says whether CUDA graphs are recorded, which need to know that these tensors stay where they are.
    """

    def __init__(self, optimizer: Optimizer, *, records: bool) -> None:
        self.optimizer = optimizer
        # Whether gradients may be left from a step without the graph.
        self.has_gradients = True
        self._records = records
        self._is_sgd = isinstance(optimizer, SGD)
        # For each group, the learning rate that was last read and the tensor that holds it.
        self._rates: dict[int, tuple[float, Tensor]] = {}
        # 1 on each device that has parameters: see ``_update``.
        self._ones: dict[torch.device, Tensor] = {}

    def inputs(self) -> list[Group] | None:
        """Return what the graph needs; None where the optimizer may make states in its next step."""
        groups: list[Group] = []
        without_state: list[Tensor] = []
        for index, group in enumerate(self.optimizer.param_groups):
            weights, lists, idle = self._states(group)
            without_state += idle
            if self._is_sgd or not weights or not all(each.is_cpu and each.is_floating_point() for each in weights):
                rate = self._rate(index, group["lr"], group["params"])
            else:
                rate = _factors(group, lists[2])
            if self._records:
                for tensor in (rate, *(tensor for each in lists for tensor in each)):
                    torch_private.mark_address_as_static(tensor)
            groups.append((weights, lists, idle, rate, self._one(rate.device), self._options(group)))
        return None if without_state and self._may_make_state(groups, without_state) else groups

    def _states(self, group: dict[str, Any]) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """Return the trained weights, a list of each kind of state they have, and the weights without state."""
        names, states = self._names(group), self.optimizer.state
        weights: list[Tensor] = []
        idle: list[Tensor] = []
        rows: list[list[Tensor]] = []
        for weight in (each for each in group["params"] if each.requires_grad):
            state = states.get(weight, {})
            row = [part for name in names if isinstance(part := state.get(name), Tensor)]
            if len(row) < len(names):
                idle.append(weight)
                continue
            weights.append(weight)
            rows.append(row)
        return weights, [list(each) for each in zip(*rows, strict=True)], idle

    def _names(self, group: dict[str, Any]) -> list[str]:
        """Return what the optimizer keeps for each weight."""
        if self._is_sgd:
            return ["momentum_buffer"] if group["momentum"] else []
        return ["exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] if group["amsgrad"] else ())]

    def _may_make_state(self, groups: list[Group], without_state: list[Tensor]) -> bool:
        """Return whether one of these weights may get its first gradient now; the loss may not use the others."""
        known = _without_state.get(self.optimizer)
        found = _without_state[self.optimizer] = {id(weight) for weight in without_state}
        if known is None and any(weights for weights, *_ in groups):
            return False  # A resumed run continues as the one before it.
        return not found <= (known or set())

    def _rate(self, index: int, rate: float | Tensor, parameters: list[Tensor]) -> Tensor:
        if isinstance(rate, Tensor):
            return rate
        if index not in self._rates:
            device = parameters[0].device if parameters else torch.device("cpu")
            # In 64 bits, as torch computes with a number.
            self._rates[index] = rate, torch.tensor(rate, dtype=torch.float64, device=device)
        known, tensor = self._rates[index]
        if known != rate:
            tensor.fill_(rate)
            self._rates[index] = rate, tensor
        return tensor

    def _one(self, device: torch.device) -> Tensor:
        if device not in self._ones:
            self._ones[device] = torch.ones((), device=device)
        return self._ones[device]

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        if self._is_sgd:
            return {name: group[name] for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")}
        # Numbers of the graph, where reading them does not wait for a device.
        beta1, beta2 = (float(b) if isinstance(b, Tensor) and b.is_cpu else b for b in group["betas"])
        options = {name: group[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")}
        decoupled = isinstance(self.optimizer, AdamW) or group.get("decoupled_weight_decay", False)
        return {"beta1": beta1, "beta2": beta2, "decoupled_weight_decay": decoupled, **options}


def _factors(group: dict[str, Any], steps: list[Tensor]) -> Tensor:
    """Return what Adam multiplies each weight and its update with, and divides by: three numbers for each weight.

    In the graph, a CPU would compute these powers and roots again for every few elements.
    """
    rate, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    decay = 1 - rate * group["weight_decay"]
    counts = [step.item() + 1 for step in steps]
    of = {count: (decay, -rate / (1 - beta1**count), (1 - beta2**count) ** 0.5) for count in set(counts)}
    numbers = array("d", [number for count in counts for number in of[count]])
    return torch.frombuffer(numbers, dtype=torch.float64).view(-1, 3)


def _adam_on_cpu(
    weights: list[Tensor], gradients: list[Tensor], lists: list[list[Tensor]], factors: list[Tensor], options: Any
) -> None:
    """Do what ``torch.optim.adam.adam`` does, with factors that are known before."""
    for weight, gradient, numbers, average, square, step, *largest in zip(
        weights, gradients, factors, *lists, strict=True
    ):
        # Beside a weight without dimensions, 64 bits would be those of the result.
        decay, change, root = numbers.unbind() if weight.dim() else numbers.to(weight.dtype).unbind()
        step += 1
        if options["maximize"]:
            gradient = -gradient
        if options["decoupled_weight_decay"]:
            weight *= decay
        elif options["weight_decay"]:
            gradient = gradient.add(weight, alpha=options["weight_decay"])
        average.lerp_(gradient, 1 - options["beta1"])
        square.mul_(options["beta2"]).addcmul_(gradient, gradient, value=1 - options["beta2"])
        if largest:
            square = largest[0].copy_(torch.maximum(largest[0], square))
        weight.addcdiv_(average * change, (square.sqrt() / root).add_(options["eps"]))


def _update(groups: list[Group], gradients: Sequence[Tensor | None], *, is_sgd: bool) -> None:
    """Change weights and state with the arithmetic of ``torch.optim``."""
    remaining = iter(gradients)
    for weights, states, _, rate, one, options in groups:
        # The compiler drops alpha when it fuses a matrix product with add(..., alpha=...), which is how torch adds
        # weight decay. Multiplying the gradient by a one that the compiler does not know prevents that fusion.
        given = [
            None if gradient is None else gradient * one.to(gradient.dtype)
            for gradient in islice(remaining, len(weights))
        ]
        # As torch does, weights are left alone to which the loss has no connection.
        used = [index for index, gradient in enumerate(given) if gradient is not None]
        if not used:
            continue
        changed: list[Tensor] = [weights[index] for index in used]
        with_gradient: list[Any] = [given[index] for index in used]
        lists: list[list[Any]] = [[each[index] for index in used] for each in states]
        # Few kernels on a GPU; loops over one parameter each on a CPU.
        foreach = is_cuda(changed[0].device)
        if is_sgd:
            buffers: list[Any] = lists[0] if lists else [None] * len(used)
            # Of any type: the compiler takes a rate that is a tensor.
            lr: Any = rate
            sgd(changed, with_gradient, buffers, lr=lr, foreach=foreach, fused=False, **options)
        elif rate.dim() == 2:
            _adam_on_cpu(changed, with_gradient, lists, [rate[index] for index in used], options)
        else:
            averages, squares, steps, *largest = lists
            adam(
                changed, with_gradient, averages, squares, largest[0] if largest else [], steps,
                lr=rate, foreach=foreach, fused=False, capturable=True, **options,
            )  # fmt: skip


class WholeStep(Step):
    """``training_step``, backward, clipping and the optimizer's step as one graph.

    Steps that the graph cannot compute are computed in parts: until the optimizer has its state, a last batch of one
    sample, and all of them where the compiler fails.
    """

    _and_more = ", backward and step"

    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        kind: type[Optimizer],
        clipping: Clipping,
        settings: CompileSettings,
        counters: CompileCounters,
        dims: int,
    ) -> None:
        super().__init__("training_step", function, module, settings, counters, dims)
        self._is_sgd = issubclass(kind, SGD)
        self._clipping = clipping

    def _compile(self) -> Callable[..., Any]:
        training_step, clipping, is_sgd = self._function, self._clipping, self._is_sgd

        def step(batch: Any, batch_idx: int, groups: list[Group]) -> Any:
            output = training_step(batch, batch_idx)
            loss = output
            if isinstance(output, Mapping):
                if "loss_weight" in output:
                    raise TypeError("loss_weight may be 0, which is only known after the step.")
                loss = output["loss"]
            weights = [weight for group in groups for weight in group[0]]
            idle = [weight for group in groups for weight in group[2]]
            gradients = torch.autograd.grad(loss, [*weights, *idle], allow_unused=True)
            if any(gradient is not None for gradient in gradients[len(weights) :]):
                raise TypeError("a parameter has a gradient for the first time, and the optimizer no state for it yet.")
            gradients = gradients[: len(weights)]
            with torch.no_grad():
                _update(groups, clipping.of(gradients), is_sgd=is_sgd)
            # An output with a graph of its own would need another backward.
            return map_tensors(Tensor.detach, output)

        return self._settings.compile(own_code(step, self.name), whole=True)

    def train(self, update: Update, in_parts: Callable[..., Any], *args: object) -> tuple[Any, bool]:
        """Train on a batch; return the output of ``training_step`` and True.

        If the graph cannot, the result is the output of ``in_parts``, which trains without it, and False. ``args`` are
        the batch and its index, for both.
        """

        def without_graph() -> Any:
            update.has_gradients = True
            return in_parts(*args)

        if self._stays_python or must_stay_python():
            return without_graph(), False
        groups = update.inputs()
        if groups is None:
            # One step is not worth the graphs of its parts.
            with self._counters.pause():
                return without_graph(), False
        if update.has_gradients:
            update.optimizer.zero_grad()
            update.has_gradients = False
        output, in_graph = self._computed((*args, groups), without_graph)
        if in_graph and "step" in vars(update.optimizer):
            torch_private.note_step(update.optimizer)
        return output, in_graph

    def _failed(self, reason: str) -> None:
        fix = "Use compile=True."
        if self._metrics:
            fix = f"{without_metric(self._metrics[0])} Or use compile=True."
        warn_once(
            f"compile {self.name} {reason}",
            f"Trainer(compile='step'): {self.name} cannot be one graph, and is computed as with compile=True. {reason}",
            fix=fix,
        )
