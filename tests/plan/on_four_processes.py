"""Train the transformer of the test of plans on four processes, on several meshes, and write what a step held and sent.

Run as ``python on_four_processes.py FOLDER [MESH ...]``, with all meshes by default.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hasten.strategies import MeshStrategy
from hasten.strategies.mesh.schedule import NAMES, Schedule
from hasten_tools.plan import plan_fit
from hasten_tools.plan.report import FitPlan
from tests.plan import on_two_processes
from tests.plan.on_two_processes import SOON, loader, trainer


class _OfMomentum:
    """Steps in few operations: torch searches long how each computes with what is divided twice."""

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Transformer(_OfMomentum, on_two_processes.Transformer):
    """Has an optimizer of one number an element."""


class Mixture(_OfMomentum, on_two_processes.Mixture):
    """The same with experts."""


# The sizes of replicate, shard, tensor, context, pipeline and expert.
MESHES = {
    "2x2x1": (2, 2, 1), "1x2x2": (1, 2, 2), "2x1x2": (2, 1, 2), "1x2x1x2": (1, 2, 1, 2), "1x1x1x4": (1, 1, 1, 4),
    "1x2x1x1x2": (1, 2, 1, 1, 2), "1x1x2x1x2": (1, 1, 2, 1, 2), "1x4x1x1x1x2": (1, 4, 1, 1, 1, 2),
    "2x2x1x1x1x4": (2, 2, 1, 1, 1, 4), "1x2x2x1x1x2": (1, 2, 2, 1, 1, 2), "1x2x1x2x1x2": (1, 2, 1, 2, 1, 2),
}  # fmt: skip
MODULES: dict[str, Callable[[], on_two_processes.Transformer]] = {
    name: Mixture if len(sizes) == 6 else Transformer for name, sizes in MESHES.items()
}
# Every schedule, and others than the default with shards. Each process has two blocks, and a batch two micro-batches
# for each. Blocks are named, so that every process is planned.
SCHEDULES = {f"1x1x1x1x4 {name}": name for name in NAMES} | {
    f"1x2x1x1x2 {name}": name for name in ("GPipe", "LoopedBFS", "Interleaved1F1B")
}
for _name in SCHEDULES:
    MESHES[_name] = tuple(map(int, _name.split()[0].split("x")))
    MODULES[_name] = functools.partial(Transformer, 2 * MESHES[_name][4])
PROCESSES = 4
# Processes of a machine, as which two processes of this one count.
PER_MACHINE = 2


def strategies(names: Iterable[str]) -> dict[str, MeshStrategy]:
    found = {}
    for name in names:
        sizes = MESHES[name]
        arguments: dict[str, Any] = {"plan": "auto" if sizes[2] > 1 else None, "timeout": SOON}
        if name in SCHEDULES:
            blocks = 2 * sizes[4]
            stages = Schedule(SCHEDULES[name], sizes[4], None, blocks, "").stages
            split = [f"blocks.layers.{place * blocks // stages}" for place in range(1, stages)]
            arguments |= {"schedule": SCHEDULES[name], "split": split, "micro_batches": blocks}
        found[name] = MeshStrategy(*sizes, **arguments)
    return found


def first_of_stages(name: str) -> list[int]:
    """Return the first rank of each stage of a mesh; without a pipeline, the first of all."""
    stages = MESHES[name][4] if len(MESHES[name]) > 4 else 1
    return [*range(0, PROCESSES, PROCESSES // stages)]


def planned(name: str) -> FitPlan:
    """Return the plan of the same run."""
    return plan_fit(
        trainer(devices=1), MODULES[name](), loader(), devices=PROCESSES, num_nodes=PROCESSES // PER_MACHINE,
        strategy=strategies([name])[name], accelerator="cpu",
    )  # fmt: skip


def peaks_of(plan: FitPlan) -> dict[int, int]:
    """Return the planned bytes by rank, of the first of each stage."""
    return plan.stages or {plan.measured.process: plan.measured.peak}


def main(folder: str, *names: str) -> None:
    chosen = names or tuple(MESHES)
    measured = {name: first_of_stages(name) for name in chosen}
    on_two_processes.main(folder, strategies(chosen), PROCESSES, PER_MACHINE, MODULES, measured)


if __name__ == "__main__":
    sys.exit(on_two_processes.in_copies(PROCESSES, main, *sys.argv[1:]))
