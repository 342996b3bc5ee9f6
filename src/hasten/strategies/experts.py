"""Experts of a mixture in a plan: their matrices split, or whole experts divided over the processes of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from hasten._lib import torch_private
from hasten._lib.errors import make_error

# How the matrices of all experts are split, of shape (experts, out_features, in_features): by column the first, by row
# the second. ``gate_up_proj`` has the rows of two layers, one after the other, and each of them is split.
_COLUMNS, _PACKED, _ROWS = "colwise", "packed_colwise", "rowwise"
_MATRICES = {"gate_up_proj": _PACKED, "gate_proj": _COLUMNS, "up_proj": _COLUMNS, "down_proj": _ROWS}
_WHOLE_EXPERTS = "grouped_gemm"


class ExpertStyle(ParallelStyle):
    """Divides a module that holds the matrices of all experts in parameters of three dimensions.

    The module is called with hidden states (tokens, features), the chosen experts (tokens, k) and their weights
    (tokens, k), and returns the weighted sum of what the experts compute (tokens, features), as the experts of Hugging
    Face do. The processes of a group call it with the same tokens. Each computes with its parts of the parameters, and
    the results are added up. The router is a module of its own and stays whole.
    """

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
        """Return what this process adds to the result; the parameters of ``module`` are its parts."""

    def check(self, module: nn.Module, size: int, where: str) -> None:
        """Refuse a module whose experts ``size`` processes cannot share.

        Raises:
            TypeError: the module does not hold the matrices of experts.
            ValueError: it has a parameter that cannot be divided, or the sizes do not divide.

        """
        parameters = dict(module.named_parameters())
        count = getattr(module, "num_experts", None)
        if not isinstance(count, int) or not any(each.ndim == 3 for each in parameters.values()):
            raise make_error(
                TypeError,
                f"{where} is a {type(module).__name__}, and experts are divided in a module that has num_experts and "
                "their matrices in parameters of three dimensions.",
                fix="Name such a module, or the layers of each expert.",
                argument="plan",
            )
        other = next((name for name, each in parameters.items() if not self._divides(name, each, count)), None)
        if other is not None:
            raise make_error(
                ValueError,
                f"{where} has the parameter {other!r}, which {type(self).__name__} does not divide.",
                fix=self._instead(),
                argument="plan",
            )
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


# hidden states, chosen experts, their weights
_Inputs = tuple[Tensor, Tensor, Tensor]


class SplitExperts(ExpertStyle):
    """Each process has a part of the matrices of every expert: of its hidden features."""

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
        """Return what this process adds to the result; the parameters of ``module`` are its parts."""
        return forward(*inputs)

    def _check_sizes(self, module: Any, size: int, where: str) -> None:
        if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
            raise make_error(
                ValueError,
                f"{where} holds matrices that are transposed, or in which the rows of two layers alternate.",
                fix=self._instead(),
                argument="plan",
            )
        for name, parameter in module.named_parameters():
            by = _MATRICES[name]
            width = parameter.shape[2] if by == _ROWS else parameter.shape[1] // (2 if by == _PACKED else 1)
            if width % size:
                raise make_error(
                    ValueError,
                    f"{where} has {name!r} with {width} hidden features, which {size} processes cannot share equally.",
                    fix=f"Choose a tensor_parallel_size that divides {width}, or expert_parallel=True.",
                    argument="plan",
                )

    def _divides(self, name: str, parameter: Tensor, experts: int) -> bool:
        return name in _MATRICES and parameter.ndim == 3

    def _instead(self) -> str:
        return "Divide whole experts: expert_parallel=True, or the style 'expert'."


class WholeExperts(ExpertStyle):
    """Each process has some of the experts, whole, and computes for the tokens that chose one of them."""

    def placement(self, name: str) -> Placement:
        """Return how a parameter of the module is divided."""
        return Shard(0)

    def takes(self, name: str, style: str) -> bool:
        """Return whether ``style``, in the plan of a Hugging Face model, divides a parameter in the same way."""
        return style == _WHOLE_EXPERTS

    def compute(self, module: nn.Module, forward: Callable[..., Tensor], mesh: DeviceMesh, inputs: _Inputs) -> Tensor:
        """Return what this process adds to the result; the parameters of ``module`` are its parts."""
        hidden, chosen, weights = inputs
        experts: Any = module
        rows, choices = hidden.reshape(-1, hidden.shape[-1]), chosen.shape[-1]
        count = experts.num_experts
        local = count // mesh.size()
        index = chosen.reshape(-1) - mesh.get_local_rank() * local
        # Reads the number of these pairs from the device: the only such read of the layer.
        pairs = ((index >= 0) & (index < local)).nonzero().squeeze(1)
        share = weights.reshape(-1)
        if not len(pairs):
            # Other processes wait for the backward of each input: one pair that counts nothing.
            pairs, share, index = pairs.new_zeros(1), share * 0, torch.zeros_like(index)
        experts.num_experts = local
        try:
            found = forward(rows[pairs // choices], index[pairs].unsqueeze(1), share[pairs].unsqueeze(1))
        finally:
            experts.num_experts = count
        # Each pair has a place of its own, so the order of additions is the same in every run.
        everything = found.new_zeros(len(rows) * choices, rows.shape[-1]).index_copy(0, pairs, found)
        return everything.view(len(rows), choices, -1).sum(1).view(hidden.shape)

    def _check_sizes(self, module: Any, size: int, where: str) -> None:
        if module.num_experts % size:
            raise make_error(
                ValueError,
                f"{where} has num_experts={module.num_experts}, which {size} processes cannot share equally.",
                fix=f"Choose a tensor_parallel_size that divides {module.num_experts}.",
                argument="plan",
            )

    def _divides(self, name: str, parameter: Tensor, experts: int) -> bool:
        return "." not in name and parameter.ndim > 0 and parameter.shape[0] == experts

    def _instead(self) -> str:
        return "Leave this module out of the plan: its first dimension is not the experts."


class _DividedForward:
    """Replaces the forward of experts by one that computes with the parts of this process, and adds up the results.

    An object instead of a function: in a deep copy of the module it calls the copied module.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Tensor], style: ExpertStyle) -> None:
        self.module, self.own, self.style = module, own, style

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        parameters: dict[str, Any] = self.module._parameters
        divided = {name: each for name, each in parameters.items() if isinstance(each, DTensor)}
        mesh = next(iter(divided.values())).device_mesh
        inputs = _given(hidden_states, mesh), _whole(top_k_index), _given(top_k_weights, mesh)
        # The forward reads the parameters as attributes.
        parameters.update({name: each.to_local() for name, each in divided.items()})
        try:
            part = self.style.compute(self.module, self.own, mesh, inputs)
        finally:
            parameters.update(divided)
        summed = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
        return summed.to_local()


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
    return tensor


def _given(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that is equal on all processes, whose gradient is the sum of theirs."""
    shared = DTensor.from_local(_whole(tensor), mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])
