"""Experts of a mixture in a plan: their matrices split, or whole experts divided over the processes of a group."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.tree import is_sharded, whole
from hasten.strategies.context import all_to_all

# How the matrices of all experts are split, of shape (experts, out_features, in_features): by column the first, by row
# the second. ``gate_up_proj`` has the rows of two layers, one after the other, and each of them is split.
_COLUMNS, _PACKED, _ROWS = "colwise", "packed_colwise", "rowwise"
_MATRICES = {"gate_up_proj": _PACKED, "gate_proj": _COLUMNS, "up_proj": _COLUMNS, "down_proj": _ROWS}
_WHOLE_EXPERTS = "grouped_gemm"
# The types of hidden states, by the number that says to other processes which one it is.
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ExpertStyle(ParallelStyle):
    """Divides a module that holds the matrices of all experts in parameters of three dimensions.

    The module is called with hidden states (tokens, features), the chosen experts (tokens, k) and their weights
    (tokens, k), and returns the weighted sum of what the experts compute (tokens, features), as the experts of Hugging
    Face do. The router is a separate module, which is not divided.
    """

    # Whether the processes of a group have different tokens, and send them to each other.
    sends_tokens = False
    # What asks for it, and for the number of processes, in messages.
    argument, size_argument = "plan", "the tensor-parallel size"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            divided = distribute_tensor(parameter.detach(), device_mesh, [self.placement(name)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        vars(module)["forward"] = _DividedForward(module, module.forward, self)
        return module

    @abstractmethod
    def placement(self, name: str) -> Placement:
        """Return how a parameter of the module is divided."""

    @abstractmethod
    def takes(self, name: str, style: str) -> bool:
        """Return whether ``style``, in the plan of a Hugging Face model, divides a parameter in the same way."""

    @abstractmethod
    def compute(self, module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, inputs: _Inputs) -> Tensor:
        """Return the result for the tokens of this process; the parameters of ``module`` are its parts."""

    def check(self, module: nn.Module, size: int, where: str) -> None:
        """Refuse a module whose experts ``size`` processes cannot share."""
        parameters = dict(module.named_parameters())
        count = getattr(module, "num_experts", None)
        if not isinstance(count, int) or not any(each.ndim == 3 for each in parameters.values()):
            raise make_error(
                TypeError,
                f"{where} is a {type(module).__name__}, and experts are divided in a module that has num_experts and "
                "their matrices in parameters of three dimensions.",
                fix="Name such a module, or the layers of each expert.",
                argument=self.argument,
            )
        other = next((name for name, each in parameters.items() if not self._divides(name, each, count)), None)
        if other is not None:
            what = f"{where} has the parameter {other!r}, which {type(self).__name__} does not divide."
            raise make_error(ValueError, what, fix=self._instead(), argument=self.argument)
        self._check_sizes(module, size, where)

    @abstractmethod
    def _check_sizes(self, module: Any, size: int, where: str) -> None:
        """Refuse matrices that cannot be divided over ``size`` processes."""

    @abstractmethod
    def _divides(self, name: str, parameter: Tensor, experts: int) -> bool:
        """Return whether a parameter can be divided."""

    @abstractmethod
    def _instead(self) -> str:
        """Return what to do about a parameter that cannot be divided."""


# Hidden states, chosen experts, their weights.
_Inputs = tuple[Tensor, Tensor, Tensor]


class SplitExperts(ExpertStyle):
    """Each process has a part of the matrices of every expert: of its hidden features.

    The processes of a group call the module with the same tokens, and the results are added up.
    """

    def placement(self, name: str) -> Placement:
        """Return how a parameter of the module is divided."""
        by = _MATRICES[name]
        if by == _PACKED:
            packed: Placement = torch_private.shard_of_each_half(1)
            return packed
        return Shard(1 if by == _COLUMNS else 2)

    def takes(self, name: str, style: str) -> bool:
        """Return whether ``style``, in the plan of a Hugging Face model, divides a parameter in the same way."""
        return _MATRICES.get(name) == style

    def compute(self, module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, inputs: _Inputs) -> Tensor:
        """Return the sum of what the processes of the group compute."""
        return _added_up(forward(*_given(inputs, mesh)), mesh)

    def _check_sizes(self, module: Any, size: int, where: str) -> None:
        if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
            what = f"{where} holds matrices that are transposed, or in which the rows of two layers alternate."
            raise make_error(ValueError, what, fix=self._instead(), argument="plan")
        for name, parameter in module.named_parameters():
            by = _MATRICES[name]
            width = parameter.shape[2] if by == _ROWS else parameter.shape[1] // (2 if by == _PACKED else 1)
            if width % size:
                raise make_error(
                    ValueError,
                    f"{where} has {name!r} with {width} hidden features, which {size} processes cannot share equally.",
                    fix=f"Choose a tensor-parallel size that divides {width}, or expert_parallel=True.",
                    argument="plan",
                )

    def _divides(self, name: str, parameter: Tensor, experts: int) -> bool:
        return name in _MATRICES and parameter.ndim == 3

    def _instead(self) -> str:
        return "Divide whole experts: expert_parallel=True, or the style 'expert'."


class _ByExpert(ExpertStyle):
    """Each process has some of the experts, whole."""

    def placement(self, name: str) -> Placement:
        """Return how a parameter of the module is divided."""
        return Shard(0)

    def takes(self, name: str, style: str) -> bool:
        """Return whether ``style``, in the plan of a Hugging Face model, divides a parameter in the same way."""
        return style == _WHOLE_EXPERTS

    def _check_sizes(self, module: Any, size: int, where: str) -> None:
        if module.num_experts % size:
            what = f"{where} has num_experts={module.num_experts}, which {size} processes cannot share equally."
            fix = f"Choose {self.size_argument} so that it divides {module.num_experts}."
            raise make_error(ValueError, what, fix=fix, argument=self.argument)

    def _divides(self, name: str, parameter: Tensor, experts: int) -> bool:
        return "." not in name and parameter.ndim > 0 and parameter.shape[0] == experts

    def _instead(self) -> str:
        return "Leave this module out of the plan: its first dimension is not the experts."


class WholeExperts(_ByExpert):
    """Each process computes for the tokens that chose one of its experts.

    The processes of a group call the module with the same tokens, and the results are added up.
    """

    def compute(self, module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, inputs: _Inputs) -> Tensor:
        """Return the sum of what the processes of the group compute."""
        hidden, chosen, weights = _given(inputs, mesh)
        rows, choices = hidden.reshape(-1, hidden.shape[-1]), chosen.shape[-1]
        with _only_own(module, mesh) as local:
            index = chosen.reshape(-1) - mesh.get_local_rank() * local
            pairs = self.own_pairs((index >= 0) & (index < local), mesh.size())
            share = weights.reshape(-1)
            if not len(pairs):
                # Other processes wait for the backward of each input: one pair that counts nothing.
                pairs, share, index = pairs.new_zeros(1), share * 0, torch.zeros_like(index)
            found = forward(rows[pairs // choices], index[pairs].unsqueeze(1), share[pairs].unsqueeze(1))
        # Each pair has a place of its own, so the order of additions is the same in every run.
        everything = found.new_zeros(len(rows) * choices, rows.shape[-1]).index_copy(0, pairs, found)
        return _added_up(everything.view(len(rows), choices, -1).sum(1).view(hidden.shape), mesh)

    def own_pairs(self, is_own: Tensor, size: int) -> Tensor:
        """Return the places of the pairs of a token and an expert that this process, one of ``size``, computes.

        This reads their number from the device: the only such read of the layer. A plan, which has no values, puts an
        equal share in its place.
        """
        return is_own.nonzero().squeeze(1)


class ExchangedExperts(_ByExpert):
    """The processes of a group have different tokens, which travel to the processes of their experts and back.

    Each process sends a part of the tokens that the processes ``alike`` have, too; None if all have different ones.
    ``scale`` is a factor for the gradients of the experts.
    """

    sends_tokens = True
    argument = size_argument = "expert"

    def __init__(self, alike: DeviceMesh | None, scale: float) -> None:
        super().__init__()
        self._alike, self._scale = alike, scale

    def compute(self, module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, inputs: _Inputs) -> Tensor:
        """Return the result for the tokens of this process."""
        hidden = inputs[0]
        if self._alike is None or not hidden.shape[-1]:
            return self._exchanged(module, forward, mesh, *inputs)
        flat = [whole(each).flatten(0, -2) for each in inputs]
        shared = [DTensor.from_local(each, self._alike, [Replicate()], run_check=False) for each in flat]
        own = [each.redistribute(placements=[Shard(0)]).to_local() for each in shared]
        part = self._exchanged(module, forward, mesh, *own)
        divided = DTensor.from_local(
            part, self._alike, [Shard(0)], run_check=False, shape=flat[0].shape, stride=(part.shape[-1], 1)
        )
        # A copy: ``fully_shard`` warns of results that are views.
        return divided.redistribute(placements=[Replicate()]).to_local().view(hidden.shape).clone()

    def _exchanged(
        self, module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, *inputs: Tensor
    ) -> Tensor:
        hidden, chosen, weights = inputs
        rows = hidden.flatten(0, -2)
        group, size, choices = mesh.get_group(), mesh.size(), chosen.shape[-1]
        with _only_own(module, mesh) as local:
            experts, order = chosen.flatten().sort(stable=True)
            every = torch.arange(size * local + 1, dtype=experts.dtype, device=experts.device)
            # Not ``bincount``, which reads its highest number from the device.
            counts = torch.searchsorted(experts, every).diff().view(size, local)
            # A process without tokens learns from the others how wide they are, and of which type.
            width, kind = rows.shape[-1], _TYPES.index(rows.dtype)
            form = width * len(_TYPES) + kind
            sends = nn.functional.pad(counts, (0, 1), value=form)
            gets = all_to_all(sends, group)
            sent, received, form = self.shares(sends, gets, len(order), form)
            total, (width, kind) = sum(received), divmod(form, len(_TYPES))
            if not width:
                return hidden
            if not rows.shape[-1]:
                rows = rows.new_empty((0, width), dtype=_TYPES[kind])
            tokens = all_to_all(rows[order // choices], group, sent, received)
            index = torch.arange(local, device=gets.device).repeat(size)
            index = index.repeat_interleave(gets[:, :-1].flatten(), output_size=total)
            if not total:
                # Each process has a backward, for which others wait: one token that counts nothing.
                tokens, index = torch.cat((tokens, tokens.new_zeros(1, width))), index.new_zeros(1)
            for part in module._parameters.values():
                if part is not None and part.requires_grad:
                    part.register_hook(self._scaled)
            found = forward(tokens, index.unsqueeze(1), tokens.new_ones((len(tokens), 1)))
        back = all_to_all(found[:total].contiguous(), group, received, sent)
        # Each pair has a place of its own, so the order of additions is the same in every run.
        everything = torch.zeros_like(back).index_copy(0, order, back)
        weights = weights.reshape(*hidden.shape[:-1], choices)
        weighted: Tensor = everything.unflatten(0, weights.shape) * weights.unsqueeze(-1)
        return weighted.sum(-2).to(back.dtype)

    def shares(self, sends: Tensor, gets: Tensor, pairs: int, form: int) -> tuple[list[int], list[int], int]:
        """Return how many tokens go to each process, how many come from each, and what they look like.

        This is the only read from the device. A plan, which has no values, puts equal shares in its place: of ``pairs``
        of a token and one of its experts, and of tokens that look as those of this process do.
        """
        sent, received, forms = torch.stack((sends[:, :-1].sum(1), gets[:, :-1].sum(1), gets[:, -1])).tolist()
        return sent, received, max(forms)

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient * self._scale

    def _instead(self) -> str:
        return "Leave expert out: the first dimension of this parameter is not the experts."


def divide_experts(
    model: nn.Module, mesh: DeviceMesh, alike: DeviceMesh | None, scale: float, owner: str
) -> dict[str, ParallelStyle]:
    """Divide the experts of ``model`` over processes that read different tokens, in place.

    Returned are the names of the modules that hold experts, and how they are divided. The mesh has one dimension; see
    ``ExchangedExperts`` for ``alike`` and ``scale``.
    """
    size, style = mesh.size(), ExchangedExperts(alike, scale)
    found = {name: part for name, part in model.named_modules() if holds_experts(part)}
    if not found:
        raise MisconfigurationException(
            f"{owner}(expert={size}): {type(model).__name__} has no experts: no module with num_experts, matrices of "
            "three dimensions, and forward(hidden_states, top_k_index, top_k_weights).",
            fix="Leave expert out, or write the experts as such a module.",
            argument="expert",
        )
    for name, part in found.items():
        style.check(part, size, f"{owner}(expert={size}): {name!r}")
        if sends_tokens(part):
            continue
        if any(map(is_sharded, part.parameters())):
            what = f"{owner}(expert={size}): {name!r} is divided already, by an earlier run or by the program."
            fix = "Use a new module and a checkpoint, or do not divide experts in configure_model()."
            raise MisconfigurationException(what, fix=fix, argument="expert")
        parallelize_module(part, mesh, style, src_data_rank=None)
    return dict.fromkeys(found, style)


def sends_tokens(module: nn.Module) -> bool:
    """Return whether ``divide_experts`` has divided a module."""
    forward = vars(module).get("forward")
    return isinstance(forward, _DividedForward) and forward.style.sends_tokens


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the matrices of experts, in the form that ``divide_experts`` divides."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    has_matrices = any(each.ndim == 3 for each in module.parameters(recurse=False))
    return has_matrices and len(inspect.signature(module.forward).parameters) == 3


@contextmanager
def _only_own(module: Any, mesh: DeviceMesh) -> Iterator[int]:
    """Let a module compute with the experts of this process, and yield their number."""
    count = module.num_experts
    module.num_experts = count // mesh.size()
    try:
        yield module.num_experts
    finally:
        module.num_experts = count


class _DividedForward:
    """Replaces the forward of experts by one that computes with the parts of this process.

    An object instead of a function: in a deep copy of the module it calls the copied module.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Tensor], style: ExpertStyle) -> None:
        self.module, self.own, self.style = module, own, style

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        parameters: dict[str, Any] = self.module._parameters
        divided = {name: each for name, each in parameters.items() if isinstance(each, DTensor)}
        mesh = next(iter(divided.values())).device_mesh
        # The forward reads the parameters as attributes.
        parameters.update({name: each.to_local() for name, each in divided.items()})
        try:
            return self.style.compute(self.module, self.own, mesh, (hidden_states, top_k_index, top_k_weights))
        finally:
            parameters.update(divided)

    def without_tokens(self) -> None:
        """Take part in a forward of other processes, which may send tokens here."""
        if self.style.sends_tokens:
            device = next(self.module.parameters()).device
            nothing = torch.empty(0, 0, device=device)
            self(nothing, torch.empty(0, 1, dtype=torch.int64, device=device), nothing)


def _added_up(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of what the processes of a group have computed for the same tokens."""
    summed = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return summed.to_local()


def _given(inputs: _Inputs, mesh: DeviceMesh) -> _Inputs:
    """Return inputs that are equal on all processes, whose gradients are the sums of theirs."""
    hidden, chosen, weights = map(whole, inputs)
    shared = [DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in (hidden, weights)]
    hidden, weights = (each.to_local(grad_placements=[Partial()]) for each in shared)
    return hidden, chosen, weights
