"""Initial values of a divided module that was made on the meta device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hasten._lib.errors import make_error
from hasten._lib.tree import as_bytes, is_sharded, map_tensors
from hasten.seed import RandomGenerators
from hasten.strategies.sharded import local_part, named_tensors, shard_like, user_class

if TYPE_CHECKING:
    from hasten.strategies.mesh.strategy import MeshStrategy


def fill(strategy: MeshStrategy, module: nn.Module, stored: Container[str]) -> None:
    """Give a divided module on the meta device memory, and initial values that no checkpoint provides.

    The values are drawn in the first process, part by part and in the order in which the constructors draw them,
    and sent to the others: ``reset_parameters`` on shards would draw other numbers than one process does.
    """
    saved = module.state_dict().keys()
    missing = {
        name for name, tensor in named_tensors(module) if tensor.is_meta and (name not in stored or name not in saved)
    }
    present = {name: local_part(tensor).detach() for name, tensor in named_tensors(module) if not tensor.is_meta}
    module.to_empty(device=strategy.device_of_shards)
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if name in present:
                local_part(tensor).copy_(present[name])
    digests = strategy.gather_objects(_digest())
    with torch.no_grad():
        for prefix, part in _units(module, missing):
            _fill_unit(strategy, prefix, part)
    if len(set(digests)) == 1:
        # The generators advance as if this process had drawn the values, too.
        RandomGenerators().load_state_dict(strategy.broadcast(RandomGenerators().state_dict()))


def _fill_unit(strategy: MeshStrategy, prefix: str, part: nn.Module) -> None:
    values: dict[str, Tensor] = {}
    error: Exception | None = None
    if strategy.is_global_zero:
        try:
            values = dict(named_tensors(_initialized(part)))
        except Exception as caught:
            error = caught
    failed = strategy.broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if failed is not None:
        name = prefix.rstrip(".") or type(part).__name__
        raise ValueError(f"{name} is on the meta device, and its reset_parameters() failed: {failed}") from error
    for name, target in named_tensors(part):
        whole = values.get(name)
        if whole is None:
            whole = torch.empty(target.shape, dtype=target.dtype)
        _send(strategy, whole, target)


def _send(strategy: MeshStrategy, whole: Tensor, target: Tensor) -> None:
    """Give ``target`` its part of the values that ``whole`` has in the first process."""
    if not is_sharded(target):
        target.copy_(whole)
        strategy.send_values(target)
        return
    moved = whole.to(device=strategy._collective_device, dtype=target.dtype)
    strategy.send_values(moved)
    target.copy_(shard_like(moved, target))


def _digest() -> str:
    digest = hashlib.sha256()

    def add(value: Tensor) -> Tensor:
        digest.update(as_bytes(value.cpu()).numpy().data)
        return value

    digest.update(repr(map_tensors(add, RandomGenerators().state_dict())).encode())
    return digest.hexdigest()


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method: Callable[[], None] | None = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _units(module: nn.Module, missing: set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts with ``reset_parameters`` that have tensors among ``missing``; refuse others."""
    names = [prefix + name for name, _ in named_tensors(module) if prefix + name in missing]
    if not names:
        return
    if _reset_of(module) is not None:
        yield prefix, module
        return
    direct = {*module._parameters, *module._buffers}
    if bare := next((name for name in names if name[len(prefix) :] in direct), None):
        kind = user_class(module).__name__
        raise make_error(
            ValueError,
            f"{bare!r} is on the meta device, and {kind} has no reset_parameters() that gives it a value.",
            fix=(
                f"Write {kind}.reset_parameters(), or make the module outside of torch.device('meta') and "
                "empty_init=True."
            ),
        )
    for name, child in module.named_children():
        yield from _units(child, missing, f"{prefix}{name}.")


def _initialized(part: nn.Module) -> nn.Module:
    """Return a whole copy of a part on the host, with new initial values."""
    twin = _twin(part, {})
    for module in _children_first(twin):
        if (reset := _reset_of(module)) is not None:
            reset()
    return twin


def _twin(module: nn.Module, copies: dict[int, Tensor]) -> nn.Module:
    """Return a copy of a module with empty whole tensors on the host, of the class that the user wrote."""

    def empty(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in copies:
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        return copies[id(tensor)]

    twin: nn.Module = nn.Module.__new__(user_class(module))
    twin.__dict__.update(module.__dict__)
    values = twin.__dict__
    values["_parameters"] = {name: empty(tensor) for name, tensor in module._parameters.items()}
    values["_buffers"] = {name: empty(tensor) for name, tensor in module._buffers.items()}
    values["_modules"] = {
        name: None if child is None else _twin(child, copies) for name, child in module._modules.items()
    }
    return twin


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
