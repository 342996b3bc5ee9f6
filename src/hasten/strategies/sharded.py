"""The parts of strategies under which each process holds a part of the parameters, as ``DTensor``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.torch_private import ShardedPart, with_versions
from hasten._lib.tree import as_bytes, by_kind, is_absent, is_sharded, leaves, map_tensors, parameters_of
from hasten.checkpoint import contents
from hasten.checkpoint.contents import load_optimizer, load_weights
from hasten.checkpoint.files import mapped_tensors
from hasten.extend.origin import comes_from, full_name, is_builtin
from hasten.optim.fused import on_several_meshes
from hasten.precision.base import to_floating
from hasten.strategies.base import Sharding, StateIO, StepEngine, nothing

if TYPE_CHECKING:
    from hasten.strategies.mesh.strategy import MeshStrategy
    from hasten.types import Group, MapLocation, PathLike

T = TypeVar("T")

# Optimizers of torch that compute with whole parameters, or with one of their dimensions.
_NEEDS_WHOLE = ("Adafactor", "LBFGS", "Muon", "MuonAdamW", "Rprop", "SparseAdam")


# In place of the number of a part: a step has no more parts.
_STEP_ENDS = -1


class DividedSharding(Sharding):
    """Sharding for strategies whose processes have parts of parameters."""

    # The order in which the parts compute, as the last evaluation showed it; empty before.
    order: tuple[str, ...] = ()

    def place(self, module: nn.Module) -> nn.Module:
        """Return ``module``: parts are where the strategy has put them."""
        return module

    def check_devices(self, module: nn.Module, owner: str) -> None:
        """Accept parameters on any device: the strategy places them."""

    def to_host(self, module: nn.Module) -> bool:
        """Leave ``module`` where it is: its shards are on the device of the mesh already."""
        return False

    def without_gradients(self) -> torch.no_grad:
        """Return ``torch.no_grad``: views of parts need tensors that may change outside of inference mode."""
        return torch.no_grad()

    def compile_units(self, whole: T, by_block: Callable[[], T]) -> T:
        """Return ``by_block()``: gathering parameters between the layers of a whole module would break its graph."""
        return by_block()

    def advice_on_optimizers(self) -> str:
        return (
            f" strategy={self.strategy.name!r} replaces parameters by parts of them before configure_optimizers(): "
            "make optimizers and lists of parameters there, not in __init__()."
        )

    def require_whole(self, owner: str, why: str, fix: str) -> None:
        raise MisconfigurationException(
            f"{owner}: with strategy={self.strategy.name!r} each process has a part of a parameter, and {why}", fix=fix
        )


class DividedState(StateIO):
    """Processes save and read parts of weights and gradients."""

    def load_module(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool, source: str) -> None:
        """Restore a module, whose own ``load_state_dict`` does not know parts."""
        self.load_state_dict(module, state, strict=strict, source=source)

    def collect_gradients(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> Any:
        strategy = self.strategy
        return contents.collect_gradients(
            module,
            optimizers,
            strategy.gather_objects,
            world_size=strategy.world_size,
            whole=strategy.sharding.to_checkpoint,
        )

    def restore_gradients(self, module: nn.Module, optimizers: Iterable[Optimizer], stored: Any) -> None:
        strategy = self.strategy
        contents.restore_gradients(
            module,
            optimizers,
            stored,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            divided=strategy.sharding.from_checkpoint,
        )

    def read(
        self, path: PathLike, map_location: MapLocation = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint whose tensors are read when they are needed; see ``StateIO.read``."""
        io = self.strategy.checkpoint_io
        with mapped_tensors():
            return io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)


class DTensorSharding(DividedSharding):
    """Parameters are ``DTensor`` objects, of which each process has a part."""

    strategy: MeshStrategy
    # (rank, group): in the next step, this rank tells processes without a batch which parts it computes.
    lead: tuple[int, Group] | None = None

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Return a context in which modules are made: on the host, or with ``empty_init`` on the meta device."""
        # A whole model may not fit on the device.
        return torch.device("meta" if empty_init else "cpu")

    def reshard(self) -> None:
        """Free the parameters that a forward without backward has left gathered."""
        for part in self.strategy._parts:
            part.reshard()
            state = ShardedPart(part)
            if state.is_root is not None:  # None before the first forward.
                state.forget_forwards()

    def forward_order(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the parts in the order in which a step gathers them."""
        return self.order or tuple(sharded_parts(module))

    def compute_along(self, module: nn.Module) -> None:
        """Take part in an evaluation step of other processes, without a batch: gather the same parameters."""
        parts, as_forward = sharded_parts(module), self.strategy.engine.as_forward
        # A step is a forward of the whole module; where it calls the module too, torch frees the parameters.
        root = ("",) if "" in parts else ()
        order = iter(self.forward_order(module)[len(root) :]) if self.lead is None else self._told(list(parts), root)

        def compute() -> None:
            for name in order:
                # Experts take part in an exchange of tokens, too.
                forward = getattr(vars(parts[name]).get("forward"), "without_tokens", nothing)
                as_forward(forward, parts[name])()

        if root:
            as_forward(compute, parts[""])()
        else:
            compute()

    def follow(self, rank: int, group: Group) -> None:
        """Have the next step of ``rank`` tell the others the order of the parts; see ``Sharding.follow``."""
        self.lead = rank, group

    def tell(self, number: int) -> int:
        """Return the number that the leading process calls this with."""
        assert self.lead is not None
        rank, group = self.lead
        told = torch.tensor(number)
        torch.distributed.broadcast(told, rank, group=group)
        return int(told)

    def _told(self, names: list[str], root: tuple[str, ...]) -> Iterator[str]:
        """Yield the names of the parts that the leading process computes after the root, and record them."""
        order = [*root]
        while (number := self.tell(_STEP_ENDS)) != _STEP_ENDS:
            order.append(names[number])
            yield names[number]
        self.order = tuple(order)
        self.lead = None

    @property
    def shares_batches(self) -> bool:
        """Whether some processes must read the same batches."""
        return self.strategy.sizes.alike > 1

    def on_own_part(
        self, step: Callable[..., Any], *, trains: bool, weighing: Callable[[Tensor], AbstractContextManager[None]]
    ) -> Callable[..., Any]:
        """Return ``step`` for the part of each sequence that this process has."""
        context = self.strategy.context
        return step if context is None else context.step(step, trains=trains, weighing=weighing)

    def check_anomaly_mode(self) -> None:
        if self.shares_batches:
            raise MisconfigurationException(
                f"Trainer(detect_anomaly=True, strategy={self.strategy.name!r}): torch's anomaly mode does not know "
                "tensors that are split over processes.",
                fix="Leave it out, or use on_bad_loss='stop'.",
                argument="detect_anomaly",
            )

    def begin_epoch(self) -> None:
        """Give processes that share batches the same batches and dropout masks."""
        self.strategy.equal_generators()
        self.lead = None

    def check_batch(self, batch: object) -> None:
        """Compare the first batch of a pass between processes that must read the same."""
        import torch.distributed as dist

        group = self.strategy.group_alike
        ranks = dist.get_process_group_ranks(group)
        found: list[str] = [""] * len(ranks)
        dist.all_gather_object(found, _digest(batch), group=group)
        if len(set(found)) > 1:
            other = next(rank for rank, digest in zip(ranks, found, strict=True) if digest != found[0])
            raise make_error(
                RuntimeError,
                f"Processes {ranks[0]} and {other} of one group read different batches.",
                fix=(
                    "Give both the same seeds. A dataset that divides itself must do so by "
                    "trainer.strategy.data_parallel_rank and size."
                ),
            )

    # -- values between a run and a checkpoint

    def to_checkpoint(self, value: object) -> Any:
        """Return a value for a folder; for a file of a shard the whole tensor in the first process, None in others."""
        return value if self.strategy.state.saves_folders else self.gathered(value)

    def states_to_checkpoint(self, states: T) -> T:
        converted: T = map_tensors(self.to_checkpoint, states)
        return converted

    def gathered(self, value: object) -> Any:
        """Return a value in the first process as a whole tensor on the host; for a shard, None in the others."""
        if not is_sharded(value):
            return value
        full = value.full_tensor()
        return full.cpu() if self.strategy.keeps_whole else None

    def from_checkpoint(self, value: object, target: object) -> Any:
        """Return a value of a checkpoint as ``target`` is divided; unchanged where their shapes differ."""
        source: Any = value
        like: Any = target
        if not is_sharded(like) or getattr(source, "shape", None) != like.shape:
            if hasattr(source, "read_into"):
                return source.full()
            # A copy: the contents of a file may be mapped into memory.
            return source.clone() if isinstance(source, Tensor) else source
        if hasattr(source, "read_into"):
            empty = torch.empty_like(like, dtype=source.dtype)
            source.read_into(empty)
            return empty
        return source if is_sharded(source) else shard_like(source, like)


class DTensorEngine(StepEngine):
    """A step of ``strategy="fsdp"``, ``MeshStrategy`` and ``ModelParallelStrategy``: what it changes, in order.

    The module is divided before (``MeshStrategy.shard``), and torch's ``fully_shard`` installs what gathers the
    parameters of a block in its forward, frees them after it, gathers them again in its backward and reduces its
    gradients there. (``sharding_strategy="SHARD_GRAD_OP"`` keeps them from the forward to the backward.) The loop is
    the same. It calls:

    - ``make_forward``: the training step runs as a forward of the divided module, which gathers the parameters that
      belong to no block, and what it returns is converted to torch's default type. With manual optimization the
      module itself is not divided, only its children are, and the step runs as it is;
    - ``no_sync`` of the strategy: while gradients accumulate, they stay whole and are not reduced, and
      ``sync_gradients`` reduces them where a checkpoint or an incomplete accumulation needs them;
    - ``clip_norm`` and ``clip_value``: the norm covers the shards of all processes;
    - ``make_step``: the optimizer steps the shards of this process, and frees parameters that are still gathered;
    - ``make_zero_grad``: also forgets gradients that ``no_sync`` has held back;
    - ``needs_loss``: each batch must have a backward, for which the other processes wait.

    For "fsdp" and "fsdp2" precision is part of the division: with "bf16-mixed" and "16-mixed" parameters are converted
    when they are gathered and gradients are reduced in 32 bits; autocast is on as well, for 32-bit buffers that meet
    them. ``mixed_precision=`` takes another policy, and "bf16-true" reduces in 16 bits. Where layers are split,
    there is autocast only. With ``cpu_offload`` the optimizer steps on the host.

    The loop calls these methods for every strategy, in this order: ``_training_step``, ``_zero_grad`` (after the
    forward and before the backward), ``_synced`` and ``_no_loss``, ``_finish_gradients`` (clipping) and
    ``_finish_and_step`` of ``loops/fit.py``; ``make_step`` is chosen before, in ``loops/prepare.py``.
    """

    strategy: MeshStrategy
    syncs_gradients = True
    computes_alone = False

    def __init__(self, strategy: MeshStrategy) -> None:
        super().__init__(strategy)
        # Whether some part may have gradients that ``no_sync`` has held back.
        self.has_held_gradients = False

    @property
    def needs_loss(self) -> bool:
        """Whether other processes wait for the backward of each batch."""
        return self.exchanges

    def check_optimizer(self, optimizer: Optimizer, owner: str) -> None:
        """Refuse an optimizer that needs whole parameters."""
        for kind in type(optimizer).__mro__:
            if (reason := _not_for_shards(kind)) is not None:
                what = f"{full_name(kind)} and strategy={self.strategy.name!r}: {reason}"
                fix = "Use torch.optim.AdamW, or strategy='ddp_sharded', which gives an optimizer whole parameters."
                raise make_error(ValueError, what, fix=fix)
            if kind.__name__ in _NEEDS_WHOLE and (is_builtin(kind) or comes_from(kind, "torch.optim")):
                raise make_error(
                    ValueError,
                    f"{kind.__name__} and strategy={self.strategy.name!r}: it computes with whole parameters, and "
                    "each process has a part of them.",
                    fix=f"Use torch.optim.AdamW, or {owner}(strategy='ddp').",
                )
        fused = any(group.get("fused") for group in optimizer.param_groups)
        if fused and not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            name = type(optimizer).__name__
            raise make_error(
                ValueError,
                f"{name}(fused=True) and strategy={self.strategy.name!r}: torch has no fused {name} for sharded "
                "parameters.",
                fix="Leave fused out; Adam and AdamW have one.",
                argument="fused",
            )
        for group in optimizer.param_groups:
            asked = next((name for name in ("fused", "foreach") if group.get(name)), None)
            if asked is not None and on_several_meshes(group["params"]):
                raise make_error(
                    ValueError,
                    f"{type(optimizer).__name__}({asked}=True) and strategy={self.strategy.name!r}: torch updates "
                    "parameters together only if all are split over the same processes, and some are not.",
                    fix=f"Pass {asked}=False.",
                )

    # -- forward

    def make_forward(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return ``as_forward(function, wrapped)``."""
        return self.as_forward(function, wrapped)

    def as_forward(self, function: Callable[..., Any], wrapped: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` as a forward of ``wrapped``: with its parameters gathered."""
        from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

        if not isinstance(wrapped, FSDPModule) or isinstance(function, nn.Module):
            return function
        name = "_step_of_strategy"
        wrapped.__dict__[name] = function
        try:
            register_fsdp_forward_method(wrapped, name)
            forward: Callable[..., Any] = wrapped.__dict__[name]
        finally:
            wrapped.__dict__.pop(name, None)
        if self.strategy.shards.param_dtype is None:
            return forward

        def in_default_type(*args: Any, **kwargs: Any) -> Any:
            return to_floating(forward(*args, **kwargs), torch.get_default_dtype())

        return in_default_type

    def make_evaluation_forward(self, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return a function that calls ``function`` as a forward, and records the order of its first call."""
        forward, recorded = self.make_forward(function, module), False

        def recording(*args: Any, **kwargs: Any) -> Any:
            nonlocal recorded
            sharding = self.strategy.sharding
            leads = sharding.lead is not None
            if (recorded and not leads) or not self.exchanges:
                return forward(*args, **kwargs)
            recorded = True
            begun: list[str] = []
            with _begun(module, begun, sharding.tell if leads else None):
                output = forward(*args, **kwargs)
            if leads:
                sharding.tell(_STEP_ENDS)
            sharding.order = tuple(begun)
            sharding.lead = None
            return output

        return recording

    # -- gradients

    def drop_held_gradients(self, optimizer: Optimizer) -> None:
        """Forget gradients that ``no_sync`` holds back: ``zero_grad`` sees only the gradients of the shards."""
        if self.has_held_gradients:
            self.drop_all_held_gradients(set(map(id, parameters_of(optimizer))))

    def drop_all_held_gradients(self, of: set[int] | None = None) -> None:
        """Forget the gradients held back, of all parameters or those with these ids."""
        self.has_held_gradients = False
        for part in self.strategy._parts:
            for group in ShardedPart(part).groups:
                for parameter in group.fsdp_params:
                    if of is not None and id(parameter.sharded_param) not in of:
                        self.has_held_gradients = True
                        continue
                    torch_private.drop_gathered_gradient(parameter)

    def sync_gradients(self, module: nn.Module) -> None:
        """Reduce the gradients that ``no_sync`` has held back so far; all processes call it."""
        for root in roots_of(module):
            state = ShardedPart(root)
            if state.is_root is not None:  # None before the first forward.
                state.end_backward()

    def _make_exchange(
        self, module: nn.Module, wrapped: nn.Module, zero_loss: Callable[[], Tensor]
    ) -> Callable[[], None]:
        # What ``no_sync`` has held back so far is reduced.
        return lambda: self.sync_gradients(module)

    def clip_norm(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``; return the norm before, a plain tensor.

        The norm covers all gradients together, over all meshes: gradients of each mesh are reduced over it.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = self.total_norm(parameters, float(norm_type))  # torch takes "inf" as well.
        if error_if_nonfinite and not torch.isfinite(total):
            raise make_error(
                RuntimeError,
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped.",
                fix=(
                    "To disable this error and scale the gradients by the non-finite norm anyway, set "
                    "`error_if_nonfinite=False`"
                ),
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for alike in by_kind(map(local_part, gradients)):
            torch._foreach_mul_(alike, factor.to(alike[0].device))
        return total

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the gradients of all shards together."""
        return total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)

    def clip_value(self, parameters: Iterable[Tensor], clip_val: float) -> None:
        """Limit each element of the gradients to ``clip_val`` in size; those that are divided alike together."""
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        for alike in by_kind(parameters, lambda parameter: parameter.grad):
            nn.utils.clip_grad_value_(alike, clip_val)

    # -- step

    def make_step(self, optimizer: Optimizer) -> Callable[..., Any]:
        step, reshard = super().make_step(optimizer), self.strategy.sharding.reshard

        def step_and_reshard(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = step(closure, **kwargs)
            # A forward without a backward has left the old weights gathered.
            reshard()
            return result

        return step_and_reshard

    def make_zero_grad(self, optimizer: Optimizer) -> Callable[[], None]:
        zero_grad = super().make_zero_grad(optimizer)

        def zero_all() -> None:
            zero_grad()
            self.drop_held_gradients(optimizer)

        return zero_all


def _not_for_shards(kind: type) -> str | None:
    """Return why an optimizer of another package, which keeps its state in few bits, cannot step a ``DTensor``."""
    if comes_from(kind, "bitsandbytes.optim"):
        # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633
        return "its kernels take plain tensors, and do not know that a parameter is divided."
    few_bits = kind.__name__.endswith(("8bit", "4bit", "Fp8"))
    if few_bits and comes_from(kind, "torchao.optim", "torchao.prototype.low_bit_optim"):
        # https://github.com/pytorch/ao/issues/4912
        return "whether it keeps a state in few bits depends on the number of processes, and the training with it."
    return None


class DTensorState(DividedState):
    """Weights and optimizer states of shards: whole tensors in one file, or a folder of shards."""

    strategy: MeshStrategy

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights: shards for a folder; for a file whole tensors in the first process, in others none."""
        state = module.state_dict()
        return state if self.saves_folders else self._whole(state)

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool | None, source: str) -> None:
        """Restore weights from whole tensors, or from the shards of a folder."""
        present = module.state_dict()
        loaded = {
            name: self.strategy.sharding.from_checkpoint(value, present.get(name))
            for name, value in stored_items(state)
        }
        load_weights(module, with_versions(loaded, state), strict=strict, source=source)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer: shards for a folder; for a file whole tensors in the first process."""
        state: dict[str, Any] = optimizer.state_dict()
        if self.saves_folders:
            return state
        entries = {key: self._whole(entry) for key, entry in state["state"].items()}
        return {**state, "state": entries if self.strategy.keeps_whole else {}}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore an optimizer's state from whole tensors, or from the shards of a folder."""
        parameters = parameters_of(optimizer)
        entries: dict[Any, Any] = {}
        for index, entry in state.get("state", {}).items():
            parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
            entries[index] = (
                {key: self.strategy.sharding.from_checkpoint(value, parameter) for key, value in entry.items()}
                if isinstance(entry, Mapping)
                else entry
            )
        load_optimizer(optimizer, {**state, "state": entries})

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        # One after the other: no process holds more than one whole tensor on its device.
        gathered = {name: self.strategy.sharding.gathered(value) for name, value in state.items()}
        return with_versions(gathered, state) if self.strategy.keeps_whole else {}


def shard_like(whole: Tensor, target: Tensor) -> Tensor:
    """Return this process's part of ``whole``, divided as the ``DTensor`` ``target`` is; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    like: Any = target
    # A copy of the part: a view would keep the whole in memory.
    divided = distribute_tensor(whole.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return divided.clone()


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory: of another stage's parameter nothing."""
    value: Any = tensor
    part: Tensor = value.to_local() if is_sharded(value) else value
    return part.new_empty(0) if is_absent(value) else part


def as_shard(part: Tensor, like: Tensor) -> Tensor:
    """Return the ``DTensor`` that is divided as ``like`` is and of which ``part`` is this process's part.

    ``part`` is what ``local_part`` returns, and is moved to the device of ``like``. If that is another tensor, ``part``
    is returned.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    target: Any = like
    local = part.to(target.to_local().device)
    return DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def total_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients together, plain tensors and ``DTensor``s of any meshes, as a plain tensor."""
    if not gradients:
        return torch.tensor(0.0)
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
        groups.setdefault(key, []).append(gradient)
    norms: list[Tensor] = []
    for alike in groups.values():
        if norm_type == math.inf and is_sharded(alike[0]):
            norms.append(_largest(alike))
            continue
        norm: Any = nn.utils.get_total_norm(alike, norm_type=norm_type)
        norms.append(norm.full_tensor() if is_sharded(norm) else norm)
    if len(norms) == 1:
        return norms[0]
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    result: Tensor = torch.linalg.vector_norm(together, norm_type)
    return result


def _largest(gradients: list[Any]) -> Tensor:
    """Return the largest size of an element of gradients divided alike; torch refuses that of an empty part."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = gradients[0].device_mesh
    parts = [part for part in map(local_part, gradients) if part.numel()]
    own = nn.utils.get_total_norm(parts, norm_type=math.inf) if parts else local_part(gradients[0]).new_zeros(())
    largest: Tensor = DTensor.from_local(own, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
    return largest


def stored_items(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values; the tensors of a folder are not read yet."""
    stored = getattr(state, "stored", None)
    yield from (stored() if callable(stored) else state.items())


def roots_of(module: nn.Module) -> list[Any]:
    """Return the outermost parts that ``fully_shard`` was applied to."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in roots_of(child)]


def sharded_parts(module: nn.Module) -> dict[str, Any]:
    """Return the parts that ``fully_shard`` was applied to, by name."""
    from torch.distributed.fsdp import FSDPModule

    return {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}


@contextmanager
def _begun(module: nn.Module, names: list[str], tell: Callable[[int], int] | None) -> Iterator[None]:
    """Append to ``names`` which parts begin a forward, in their order, and ``tell`` their numbers before they do."""
    parts = sharded_parts(module)
    if "" in parts:
        # A step is a forward of the whole module, but not a call of it.
        names.append("")

    def begin(number: int, name: str, *_: object) -> None:
        if tell is not None:
            tell(number)
        names.append(name)

    with ExitStack() as hooks:
        for number, (name, part) in enumerate(parts.items()):
            # Before the hook of torch, which gathers the part.
            hooks.enter_context(part.register_forward_pre_hook(partial(begin, number, name), prepend=True))
        yield


def keep_class_name(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` made the name that the user wrote: it is in messages and keys."""
    sharded_class, user = type(module), user_class(module)
    sharded_class.__name__, sharded_class.__qualname__ = user.__name__, user.__qualname__
    sharded_class.__module__ = user.__module__


# -- attributes and hooks of a program's parameters


def refuse_hooks(module: nn.Module, strategy: str) -> None:
    """Refuse hooks on parameters, which would not run: dividing a module makes new parameters."""
    for name, parameter in module.named_parameters():
        if is_sharded(parameter):
            continue
        if torch_private.has_gradient_hooks(parameter):
            raise make_error(
                ValueError,
                f"strategy={strategy!r}: the parameter {name!r} has a hook (register_hook), which would not run: its "
                "gradient is computed on parts of it.",
                fix="Change gradients in on_after_backward or on_before_optimizer_step, or use strategy='ddp'.",
                argument="strategy",
            )


def _digest(batch: object) -> str:
    """Return a string that is the same for equal batches."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if leaf.layout is torch.strided and not leaf.is_nested:
                values = as_bytes(leaf.detach().cpu())
                digest.update(values.numpy().data if values.numel() else b"")
        elif isinstance(leaf, (str, bytes, int, float, type(None))):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def user_class(module: nn.Module) -> Any:
    """Return the class that the user wrote: ``fully_shard`` gives a module a class of its own."""
    from torch.distributed.fsdp import FSDPModule

    kind = type(module)
    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind
