"""Which parts of a module are gathered by themselves: repeated blocks, or those that a policy chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from hasten._lib import check, torch_private
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean

# A set of module classes; a function of FSDP1's form (module, recurse, nonwrapped_numel); an object of
# torch.distributed.fsdp.wrap.
WrapPolicy = Collection[type[nn.Module]] | Callable[..., bool]


def name_of(module: nn.Module) -> str:
    """Return the name of a module's class."""
    return type(module).__name__


def is_manual(module: nn.Module) -> bool:
    """Return whether a module steps its optimizers itself."""
    return getattr(module, "automatic_optimization", True) is False


def gathered_apart(module: nn.Module, parts: Collection[nn.Module]) -> list[nn.Module]:
    """Return those of ``parts`` that can be gathered by themselves, outer parts before the parts inside of them.

    A parameter is gathered in one place: a part that shares a parameter with other parts is left out.
    """
    order = {id(part): place for place, part in enumerate(module.modules())}
    users = _users(module)
    return sorted(
        (
            block
            for block in parts
            if block is not module
            and any(True for _ in block.parameters())
            and all(users[id(p)] == _users(block)[id(p)] for p in block.parameters())
        ),
        key=lambda block: order[id(block)],
    )


def children_apart(module: nn.Module, strategy: str) -> list[nn.Module]:
    """Return the children of a module with parameters, each of which is gathered by itself."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    users = _users(module)
    for name, child in module.named_children():
        shared = [key for key, p in child.named_parameters() if users[id(p)] != _users(child)[id(p)]]
        own += [f"{name}.{key}" for key in shared]
    if own:
        raise make_error(
            ValueError,
            f"strategy={strategy!r} with manual optimization: the parameter {own[0]!r} does not belong to one child "
            f"of {name_of(module)}, and each child is gathered by itself.",
            fix="Move it into the child that uses it, or use automatic optimization.",
            argument="strategy",
        )
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    # A list of modules has no forward of its own.
    return [
        part
        for child in children
        for part in (children_apart(child, strategy) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else [child])
    ]


def _users(module: nn.Module) -> dict[int, int]:
    """Return in how many places of ``module`` each parameter is registered."""
    counts: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def checked_policy(owner: str, argument: str, policy: WrapPolicy | type[nn.Module] | None) -> Any:
    """Return a policy that chooses parts, after checking its type; classes as a frozenset."""
    # Some objects of torch.distributed.fsdp.wrap are not functions.
    if policy is None or torch_private.has_policy(policy) or (callable(policy) and not isinstance(policy, type)):
        return policy
    given: Any = [policy] if isinstance(policy, type) else policy
    is_listed = isinstance(given, (set, frozenset, list, tuple))
    if not is_listed or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in given):
        raise make_error(
            TypeError,
            f"{owner}({argument}={check.shown(policy)}):",
            fix=(
                "use a set of module classes, such as {nn.TransformerEncoderLayer}, or a function of "
                "torch.distributed.fsdp.wrap."
            ),
            argument=argument,
        )
    return frozenset(given)


def chosen(module: nn.Module, policy: WrapPolicy, owner: str, argument: str) -> list[nn.Module]:
    """Return the parts of ``module`` that a policy chooses."""
    function: Any = policy
    classes = torch_private.classes_of_policy(policy)
    if isinstance(classes, (set, frozenset)):
        parts = [part for part in module.modules() if isinstance(part, tuple(classes)) and part is not module]
        for kind in classes:
            if not any(isinstance(part, kind) for part in parts):
                present = sorted({type(part).__name__ for part in module.modules()})
                what = f"{owner}({argument}={{{kind.__name__}}}): {name_of(module)} has no such module."
                fix = f"{did_you_mean(kind.__name__, present)} It has: {', '.join(present[:12])}."
                raise make_error(ValueError, what, fix=fix, argument=argument)
        return parts
    if torch_private.has_policy(policy):
        return [part for part in torch_private.run_policy(policy, module) if part is not module]
    return _by_function(module, function)


def _by_function(module: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Return the parts that a function of FSDP1's form chooses: children first, with their remaining elements."""
    parts: list[nn.Module] = []

    def visit(part: nn.Module, is_root: bool) -> int:
        elements = sum(parameter.numel() for parameter in part.parameters())
        if not policy(module=part, recurse=True, nonwrapped_numel=elements):
            if not is_root and policy(module=part, recurse=False, nonwrapped_numel=elements):
                parts.append(part)
                return elements
            return 0
        wrapped_elements = sum(visit(child, False) for child in part.children())
        if not is_root and policy(module=part, recurse=False, nonwrapped_numel=elements - wrapped_elements):
            parts.append(part)
            return elements
        return wrapped_elements

    visit(module, True)
    return parts
