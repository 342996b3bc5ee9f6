"""Fix the order of sums in graphs for CPUs: gradients of embeddings, and of rows that are read by an index.

Several tokens of a batch may be the same row of a table, whose gradient is the sum of theirs. The code that torch's
compiler makes for a CPU adds them from several threads with atomic additions: in another order in each run, so that no
run repeats another bit for bit, and each thread waits for the others. Without compiling, torch adds them in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten._lib import torch_private
from hasten._lib.device import is_host

# Elements of the results of all operations of a graph together. With fewer, one thread computes the graph in less time
# than several that wait for each other.
_SMALL = 4_000_000
# A first batch with fewer samples may be the short one at the end of an epoch: later ones may be much larger. Where the
# width changes too, no batch shows how wide later ones are.
_FEW_SAMPLES = 32


def with_fixed_order(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` for graphs on a CPU, with what fixes the order of sums.

    A number of threads and passes over the graph that they name stay as they are.
    """
    mode, given = options.get("mode"), options.get("options")
    inner = {**(torch_private.compile_modes()[mode] if mode else {}), **(given or {})}
    own = torch_private.pass_over_graphs(fix_order, __file__)
    # torch takes names with dashes too.
    if not own.keys().isdisjoint(name.replace("-", "_") for name in inner):
        return options
    return {**options, "mode": None, "options": {**inner, **own}}


@torch.library.custom_op(
    "hasten::sum_in_order",
    mutates_args=(),
    schema="(Tensor? to, SymInt[] size, Tensor? mask, Tensor?[] at, Tensor values) -> Tensor",
)
def _sum_in_order(
    to: Tensor | None, size: Sequence[int], mask: Tensor | None, at: Sequence[Tensor | None], values: Tensor
) -> Tensor:
    # A gradient begins with zeros, which are not copied.
    total = values.new_zeros(size) if to is None else to.clone()
    if mask is not None:
        # As in torch's own operation: what the mask leaves out may have any index.
        sizes = total.shape[: len(at)]
        at = [None if index is None else index.clamp(-n, n - 1) for index, n in zip(at, sizes, strict=True)]
        values = values.masked_fill(~mask, 0)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.ops.aten.index_put_.default(total, at, values.to(total.dtype), True)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return total


@_sum_in_order.register_fake
def _(to: Tensor | None, size: Sequence[int], mask: Any, at: Any, values: Tensor) -> Tensor:
    return values.new_empty(size) if to is None else torch.empty_like(to)


def fix_order(graph: torch.fx.Graph) -> None:
    """Fix the order of sums: one thread computes a small graph, torch's own operation the sums of a large one."""
    sums = [node for node in graph.nodes if _is_sum(node)]
    if sums and _is_small(graph):
        torch_private.use_one_thread()
        return
    for node in sums:
        to, *mask, at, values = node.args[: 3 + (node.target is _PUT_MASKED)]
        is_zero = to.target is torch.ops.aten.full.default and not to.args[1] and _type(to) == _type(values)
        begin = (None, to.args[0]) if is_zero else (to, [])
        with graph.inserting_before(node):
            given = (*begin, mask[0] if mask else None, at, values)
            total = graph.call_function(torch.ops.hasten.sum_in_order.default, given)
        node.replace_all_uses_with(total, propagate_meta=True)
        graph.erase_node(node)


_PUT, _PUT_MASKED = torch.ops.aten.index_put.default, torch.ops.aten._unsafe_masked_index_put_accumulate.default


def _is_sum(node: torch.fx.Node) -> bool:
    """Return whether threads would add to the same elements of a floating tensor; integers have no rounding."""
    value = node.meta.get("val")
    adds = node.target in (_PUT, torch.ops.aten._unsafe_index_put.default) and True in node.args[3:]
    return (
        (adds or node.target is _PUT_MASKED)
        and isinstance(value, Tensor)
        and is_host(value.device)
        and value.is_floating_point()
    )


def _type(node: torch.fx.Node) -> torch.dtype:
    kind: torch.dtype = node.meta["val"].dtype
    return kind


def _is_small(graph: torch.fx.Graph) -> bool:
    elements = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor):
            changing = [torch_private.example_of(size) for size in value.shape if not isinstance(size, int)]
            if len(changing) > 1 or any(size < _FEW_SAMPLES for size in changing):
                return False
            elements += torch_private.example_of(value.numel())
    return elements <= _SMALL
