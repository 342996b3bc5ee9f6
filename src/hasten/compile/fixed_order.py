"""Graphs for CPUs whose sums have one order: the gradients of embeddings.

Several tokens of a batch may be the same row of a table, whose gradient is the sum of theirs. The code that torch's
compiler makes for a CPU adds them from several threads with atomic additions: in another order in each run, so that no
run repeats another bit for bit, and each thread waits for the others. Without compiling, torch adds them in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten._lib import torch_private
from hasten._lib.device import is_host

# Elements of the results of all operations of a graph together. With fewer, one thread computes the graph in less time
# than several that wait for each other.
_SMALL = 4_000_000


def with_fixed_order(options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` for graphs on a CPU, with what fixes the order of sums.

    Args:
        options: the arguments; a number of threads and passes over the graph that they name stay as they are.

    """
    mode, given = options.get("mode"), options.get("options")
    inner = {**(torch_private.options_of_mode(mode) if mode else {}), **(given or {})}
    own = torch_private.pass_over_graphs(fix_order, __file__)
    if not inner.keys().isdisjoint(own):
        return options
    return {**options, "mode": None, "options": {**inner, **own}}


@torch.library.custom_op("hasten::gradient_of_embedding", mutates_args=())
def _in_order(gradients: Tensor, indices: Tensor, rows: int) -> Tensor:
    total: Tensor = torch.ops.aten.embedding_dense_backward(gradients, indices, rows, -1, False)
    return total


@_in_order.register_fake
def _(gradients: Tensor, indices: Tensor, rows: int) -> Tensor:
    return gradients.new_empty((rows, *gradients.shape[indices.dim() :]))


def fix_order(graph: torch.fx.Graph) -> None:
    """Make the sums of a graph have one order: by one thread, or where the graph is large, by torch's own operation."""
    sums = [node for node in graph.nodes if _is_sum_of_rows(node)]
    if sums and sum(map(_elements, graph.nodes)) <= _SMALL:
        torch_private.use_one_thread()
        return
    for node in filter(_is_gradient_of_embedding, sums):
        table, *mask, (indices,), gradients = node.args[: 3 + (node.target is _MASKED)]
        with graph.inserting_before(node):
            if mask:
                zero = graph.call_function(torch.ops.aten.full.default, ([], 0.0), {"dtype": table.meta["val"].dtype})
                gradients = graph.call_function(torch.ops.aten.where.self, (mask[0], gradients, zero))
            rows = table.meta["val"].shape[0]
            total = graph.call_function(torch.ops.hasten.gradient_of_embedding.default, (gradients, indices, rows))
        node.replace_all_uses_with(total, propagate_meta=True)
        graph.erase_node(node)


_MASKED = torch.ops.aten._unsafe_masked_index_put_accumulate.default
_SUMS = (_MASKED, torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)


def _is_sum_of_rows(node: torch.fx.Node) -> bool:
    """Return whether threads would add to the same elements of a floating tensor; integers have no rounding."""
    value = node.meta.get("val")
    return (
        (node.target is _MASKED or (node.target in _SUMS and True in node.args[3:]))
        and isinstance(value, Tensor)
        and is_host(value.device)
        and value.is_floating_point()
    )


def _is_gradient_of_embedding(node: torch.fx.Node) -> bool:
    # A copy of the operation that was replaced.
    return str(node.meta.get("original_aten")) == "aten.embedding_dense_backward.default"


def _elements(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return 0
    # The size of the first batch stands for those that change.
    return torch_private.example_of(value.numel())
