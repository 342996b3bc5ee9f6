"""How layers are split over the processes of a group (tensor parallel)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten._lib.tree import is_absent
from hasten.strategies.mesh.blocks import name_of
from hasten.strategies.mesh.sizes import EXPERT, TENSOR, MeshSizes, is_split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from hasten.strategies.plans import Plan


class LayerSplit:
    """How the layers of a module are split over the processes of a group; see ``MeshStrategy`` for the arguments."""

    def __init__(
        self,
        owner: str,
        argument: str,
        plan: Plan | None,
        parallelize_fn: Callable[[Any, DeviceMesh], nn.Module] | None,
        *,
        sequence_parallel: bool,
        loss_parallel: bool,
        expert_parallel: bool,
    ) -> None:
        self._options = {
            "sequence_parallel": sequence_parallel,
            "loss_parallel": loss_parallel,
            "expert_parallel": expert_parallel,
        }
        for name, value in self._options.items():
            check.boolean(owner, name, value)
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise make_error(
                TypeError,
                f"{owner}(parallelize_fn={check.shown(parallelize_fn)}): it is a function of module and mesh.",
                fix="Pass a function, or leave it out.",
                argument="parallelize_fn",
            )
        if not (plan is None or (isinstance(plan, str) and plan == "auto") or (isinstance(plan, dict) and plan)):
            raise check.wrong(owner, "plan", plan, "'auto', a dict {name pattern: ParallelStyle}, or None")
        if plan is not None and parallelize_fn is not None:
            raise MisconfigurationException(
                f"{owner}(parallelize_fn, plan=...): both divide the module.", fix="Leave one out.", argument="plan"
            )
        if plan is None and any(self._options.values()):
            given = next(name for name, on in self._options.items() if on)
            what = f"{owner}({given}=True): it belongs to a plan."
            fix = "Pass plan='auto' or plan={...}, or leave it out."
            raise MisconfigurationException(what, fix=fix, argument=given)
        self._owner, self._argument = owner, argument
        self._plan, self._function = plan, parallelize_fn
        self._loss_context = ExitStack()
        # The modules that the plan has split, and how; empty before.
        self.styles: dict[str, ParallelStyle] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loss_context": ExitStack()}

    @property
    def is_given(self) -> bool:
        """Whether a program says how to split layers."""
        return self._plan is not None or self._function is not None

    @property
    def divides_sequences(self) -> bool:
        """Whether activations between blocks are split along the sequence."""
        return self._options["sequence_parallel"]

    def check_beside_stages(self) -> None:
        """Refuse what knows nothing of stages."""
        if self._plan is None:
            what = f"{self._owner}(pipeline=..., {self._argument}=...): only a plan knows which layers a stage has."
            raise MisconfigurationException(what, fix="Pass plan='auto' or plan={name: style}.", argument="plan")

    def apply(self, module: nn.Module, mesh: DeviceMesh, sizes: MeshSizes) -> None:
        """Split the layers of ``module``, in place, over the mesh of all processes."""
        is_divided = any(map(_is_divided, module.parameters()))
        if self._plan is not None:
            self._apply_plan(module, mesh, sizes.tensor)
        elif self._function is not None and not is_divided:
            returned = self._function(module, mesh)
            if returned is not module:
                raise make_error(
                    TypeError,
                    f"{self._owner}(parallelize_fn): it returned {name_of(returned)}.",
                    fix=(
                        "Divide the module in place, as parallelize_module and fully_shard do, and return the same "
                        "module."
                    ),
                )
        elif self._function is None and sizes.processes > 1 and not is_divided:
            raise MisconfigurationException(
                f"{self._owner}(plan=None) on {sizes.processes} processes: nothing divides {name_of(module)}.",
                fix="Pass plan='auto' or plan={name: style}, or divide it in configure_model() with self.device_mesh.",
            )
        if sizes.tensor > 1 and not self.styles and not any(map(is_split, module.parameters())):
            rank_zero_warn(
                f"{self._owner}({self._argument}={sizes.tensor}): nothing divides the layers of "
                f"{name_of(module)} over a group, so its {sizes.tensor} processes compute the same.",
                fix="Pass plan={name: style}, or use strategy='fsdp'.",
            )

    def _apply_plan(self, module: nn.Module, mesh: DeviceMesh, size: int) -> None:
        from hasten.strategies.plans import apply_plan, resolve

        assert self._plan is not None
        if size == 1:
            # There is nothing to split, but a name that is wrong here is also wrong with more processes.
            resolve(module, self._plan, 1, **self._options)
        else:
            self.styles = {**apply_plan(module, mesh[TENSOR], self._plan, **self._options), **self.styles}
            if self._plan == "auto":
                self._warn_of_little(module)

    def _warn_of_little(self, module: nn.Module) -> None:
        """Warn if a model's plan leaves most of it whole: the plans of some models name the output layer only."""
        parameters = [parameter for parameter in module.parameters() if not is_absent(parameter)]
        places = ((p.numel(), getattr(p, "placements", ())) for p in parameters)
        split = sum(size for size, found in places if not all(place.is_replicate() for place in found))
        total = sum(p.numel() for p in parameters)
        if split < total / 2:
            warn_once(
                f"model parallel auto {name_of(module)}",
                f"{self._owner}(plan='auto') splits {split / total:.0%} of the parameters of {name_of(module)}; the "
                "others are whole in each process of a group. trainer.strategy.styles names what is split.",
                fix="To split more, pass plan={name: style}.",
            )

    def split_losses(self) -> None:
        """Compute cross entropy from split logits until ``close``, if ``loss_parallel`` asks for it."""
        if self._options["loss_parallel"]:
            from torch.distributed.tensor.parallel import loss_parallel

            self.close()
            self._loss_context.enter_context(loss_parallel())

    def close(self) -> None:
        """Compute losses as before."""
        self._loss_context.close()


def _is_divided(parameter: nn.Parameter) -> bool:
    """Return whether a parameter that is not of experts is divided."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and EXPERT not in (mesh.mesh_dim_names or ())
