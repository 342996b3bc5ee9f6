"""Train the transformer of the test of plans on four processes, on several meshes, and write what a step held and sent.

Run as ``python on_four_processes.py FILE [MESH ...]``, with all meshes by default.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Iterable

import torch.distributed.fsdp  # Before the forks.
import torch.distributed.tensor.parallel  # noqa: F401

from hasten.strategies import MeshStrategy
from tests.plan import on_two_processes
from tests.plan.on_two_processes import SOON, Mixture, Transformer

# The sizes of replicate, shard, tensor, context, pipeline and expert.
MESHES = {
    "2x2x1": (2, 2, 1), "1x2x2": (1, 2, 2), "2x1x2": (2, 1, 2), "1x2x1x2": (1, 2, 1, 2), "1x1x1x4": (1, 1, 1, 4),
    "1x2x1x1x2": (1, 2, 1, 1, 2), "1x1x2x1x2": (1, 1, 2, 1, 2), "1x4x1x1x1x2": (1, 4, 1, 1, 1, 2),
    "2x2x1x1x1x4": (2, 2, 1, 1, 1, 4), "1x2x2x1x1x2": (1, 2, 2, 1, 1, 2), "1x2x1x2x1x2": (1, 2, 1, 2, 1, 2),
}  # fmt: skip
MODULES = {name: Mixture if len(sizes) == 6 else Transformer for name, sizes in MESHES.items()}
PROCESSES = 4
# Processes of a machine, as which two processes of this one count.
PER_MACHINE = 2


def strategies(names: Iterable[str]) -> dict[str, MeshStrategy]:
    sizes = {name: MESHES[name] for name in names}
    return {
        name: MeshStrategy(*each, plan="auto" if each[2] > 1 else None, timeout=SOON) for name, each in sizes.items()
    }


def one_process(rank: int, port: int, file: str, *names: str) -> None:
    # As torchrun starts it.
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "plan",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(PROCESSES),
        "LOCAL_WORLD_SIZE": str(PROCESSES),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    on_two_processes.main(file, strategies(names or MESHES), PROCESSES, PER_MACHINE, MODULES)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    # Imports are most of the time of a short run: the forks find them done.
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=one_process, args=(rank, address[1], *sys.argv[1:])) for rank in range(PROCESSES)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in started))
