"""The parts of a strategy whose processes have stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.errors import make_error
from hasten._lib.torch_private import with_versions
from hasten._lib.tree import is_absent, parameters_of
from hasten.strategies.sharded import DTensorEngine, DTensorSharding, DTensorState, stored_items

if TYPE_CHECKING:
    from hasten.strategies.mesh.pipeline import Pipeline
    from hasten.types import Group


class StagedSharding(DTensorSharding):
    """Each process has the parameters of its stages, or shards of them."""

    @property
    def shares_batches(self) -> bool:
        """Whether some processes must read the same batches: those of one pipeline."""
        return True

    def on_own_part(
        self, step: Callable[..., Any], *, trains: bool, weighing: Callable[[Tensor], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        """Return ``step`` computed by all stages together, on this process's part of each sequence."""
        pipeline = _pipeline(self)
        on_part = super().on_own_part(step, trains=trains, weighing=pipeline.weighing)
        return pipeline.step(on_part, trains=trains, weighing=weighing)

    def follow(self, rank: int, group: Group) -> None:
        """Do nothing: stages compute in the order of the schedule."""


class StagedEngine(DTensorEngine):
    """Forward and backward of a batch are computed by all stages, within what the loop calls the forward.

    The loss that a step returns has its gradients already: its backward adds them to those of the parameters.
    """

    steps_in_backward = False

    @property
    def needs_loss(self) -> bool:
        """Whether other processes wait for the backward of each batch."""
        return True

    def check_compile(self, owner: str, *, trains: bool) -> None:
        raise make_error(
            ValueError,
            f"{owner}(compile=...) and MeshStrategy(pipeline=...): a step ends where the next stage begins, which a "
            "compiled one does not.",
            fix="Compile blocks in configure_model(), block.compile().",
            argument="compile",
        )

    def make_forward(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return ``function``, whose stages are forwards of the module each."""
        return function

    def make_evaluation_forward(self, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return ``function``, as ``make_forward`` does."""
        return function

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of all stages."""
        return _pipeline(self).norm(parameters, norm_type)


class StagedState(DTensorState):
    """Weights and optimizer states are gathered from all stages into one file, under the names of the whole module."""

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of all stages in the first process, in others none."""
        pipeline, state = _pipeline(self), module.state_dict()
        merged = pipeline.together(self._whole({name: state[name] for name in state if pipeline.first_has(name)}))
        return with_versions({name: merged[name] for name in state if name in merged}, state)

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool | None, source: str) -> None:
        """Restore the weights of this process's stages from those of a whole module."""
        with _pipeline(self).own_only(module) as absent:
            own = {name: value for name, value in stored_items(state) if name not in absent}
            super().load_state_dict(module, with_versions(own, state), strict=strict, source=source)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer of the whole module in the first process."""
        state = super().optimizer_state(optimizer)
        entries = _pipeline(self).together(state["state"])
        return {**state, "state": {key: entries[key] for key in sorted(entries)}}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore the entries of an optimizer for the parameters of this process."""
        absent = {index for index, parameter in enumerate(parameters_of(optimizer)) if is_absent(parameter)}
        entries = {index: entry for index, entry in state.get("state", {}).items() if index not in absent}
        super().load_optimizer_state(optimizer, {**state, "state": entries})

    def collect_gradients(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> Any:
        found = super().collect_gradients(module, optimizers)
        own = {} if found is None else found["ranks"][0]["optimizers"]
        merged = _pipeline(self).together(own)
        return {"ranks": [{"optimizers": merged, "others": {}}]} if merged else None

    def restore_gradients(self, module: nn.Module, optimizers: Iterable[Optimizer], stored: dict[str, Any]) -> None:
        super().restore_gradients(module, optimizers, stored)
        for parameter in module.parameters():
            if is_absent(parameter):
                parameter.grad = None


def _pipeline(part: StagedSharding | StagedEngine | StagedState) -> Pipeline:
    pipeline = part.strategy.pipeline
    assert pipeline is not None
    return pipeline
