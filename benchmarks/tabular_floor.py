"""What a step of the tabular workload cannot do without, each part as bare calls of torch, beside an engineer's loop.

    python -m benchmarks.tabular_floor
    python -m benchmarks.tabular_floor --threads 1 --json tabular_floor.json
    chrt --rr 1 python -m benchmarks.tabular_floor           # before the other programs of a busy machine, as root

The parts run in turns (A B C A B C), each with its results in memory that is there already. A figure is the time of a
step that a tenth of the calls stays under, in microseconds: what other programs of the machine do adds to the rest. A
loop that takes no longer than the sum of the parts has no cost of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from benchmarks.measure import hardware
from benchmarks.workloads.tabular import Tabular
from torch import Tensor, nn

from hasten.report.peaks import measured_peaks

Part = Callable[[], object]

WARM_UP_CALLS = 5
# Other programs run between two turns, not within one.
PAUSE_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=25, help="of each part, in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=25, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: all)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    workload = Tabular(torch.device("cpu"))
    model = workload.model()
    parts = {
        "matrix products": matrix_products(model, workload.batch_size),
        "embeddings and their gradients": embeddings(model, workload),
        "rows of a batch": rows(workload),
        "AdamW over all weights": optimizer(model),
    }
    found = measure({**parts, "an engineer's loop": engineer(workload)}, options.calls, options.rounds)
    flops, peak = workload.useful_flops(), measured_peaks(torch.device("cpu"))["float32"] or math.inf
    found = {f"matrix products at the peak of {peak / 1e9:.0f} GFLOP/s": flops / peak * 1e6, **found}
    found["all parts"] = sum(found[name] for name in parts)
    print("  ".join(f"{name} {value}" for name, value in hardware().items()) + f"  torch {torch.__version__}")
    for name, microseconds in found.items():
        print(f"{name:45} {microseconds:8.0f} us")
    if options.json:
        command = f"python -m benchmarks.tabular_floor --threads {options.threads}"
        facts = {"command": command, "hardware": hardware(), "torch": torch.__version__, "flops": flops, "peak": peak}
        options.json.write_text(json.dumps({**facts, "microseconds": found}, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(parts: dict[str, Part], calls: int, rounds: int) -> dict[str, float]:
    """Run the parts in turns; return the microseconds that a tenth of the calls of each stays under."""
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            for _ in range(WARM_UP_CALLS):
                part()
            for _ in range(calls):
                began = time.perf_counter()
                part()
                taken[name].append((time.perf_counter() - began) * 1e6)
            time.sleep(PAUSE_SECONDS)
    return {name: statistics.quantiles(each, n=10)[0] for name, each in taken.items()}


def matrix_products(model: nn.Module, rows: int) -> Part:
    """Return the products of forward and backward: outputs, gradients of the inputs and of the weights."""
    products: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach()
            inputs, gradient = torch.randn(rows, layer.in_features), torch.randn(rows, layer.out_features)
            for one, other in ((inputs, weight.t()), (gradient, weight), (gradient.t(), inputs)):
                products.append((one, other, torch.mm(one, other)))

    def part() -> None:
        for one, other, out in products:
            torch.mm(one, other, out=out)

    return part


def embeddings(model: nn.Module, workload: Tabular) -> Part:
    """Return the look-ups of a batch in the tables, and the sums of gradients for each of their rows."""
    tables = [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Embedding)]
    columns = [column.contiguous() for column in workload.train_data.tensors[0][: workload.batch_size].unbind(1)]
    given = list(zip(tables, columns, strict=True))
    found = [table[column] for table, column in given]
    sums = [torch.zeros_like(table) for table in tables]

    def part() -> None:
        for (table, column), out, total in zip(given, found, sums, strict=True):
            torch.index_select(table, 0, column, out=out)
            total.zero_().index_add_(0, column, out)

    return part


def rows(workload: Tabular) -> Part:
    """Return the copies of the rows of random batches from the table, 73 MB in memory."""
    tensors = workload.train_data.tensors
    orders = iter(torch.randperm(len(workload.train_data)).split(workload.batch_size)[:-1] * 100)
    outs = [tensor[: workload.batch_size].clone() for tensor in tensors]

    def part() -> None:
        at = next(orders)
        for tensor, out in zip(tensors, outs, strict=True):
            torch.index_select(tensor, 0, at, out=out)

    return part


def optimizer(model: nn.Module) -> Part:
    """Return the fused update of one tensor with as many elements as the model has weights."""
    weights = nn.Parameter(torch.zeros(sum(weight.numel() for weight in model.parameters())))
    weights.grad = torch.randn_like(weights)
    return torch.optim.AdamW([weights], fused=True).step


def engineer(workload: Tabular) -> Part:
    """Return a step of the loop that a good engineer writes."""
    model, batches = workload.model(modern=True).train(), workload.engineers_batches()
    optimizer = workload.optimizer(model, fused=True)

    def part() -> None:
        workload.loss(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return part


if __name__ == "__main__":
    sys.exit(main())
