"""Plan the rows of the first table of docs/scaling.md: does each line fit, and what does a GPU hold?

    python benchmarks/scaling.py
    python benchmarks/scaling.py --only 70 --json benchmarks/results/scaling.json

Each row has the number of GPUs, the size of the model, the length of a sequence, the line to write and the memory of a
GPU. The models are the transformers of ``plan_70b.py`` and ``plan_moe.py``, with batches of one sequence, or of one for
each micro-batch of a pipeline. The script fails where the plan of a line does not fit into GPUs of 80 GB, or the page
has another figure.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

import hasten as L
import plan_70b
import plan_moe
from hasten.machine.host import bytes_text
from hasten.strategies import MeshStrategy
from hasten_tools.plan import plan_fit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
MEMORY_BYTES = 80 * 10**9


class Row(NamedTuple):
    """A row of the page."""

    gpus: int
    model: str
    tokens: int
    line: str
    memory: str

    @property
    def key(self) -> str:
        """The name of the model in the two programs."""
        return self.model.lower().replace(" ", "")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the Trainer in its line."""

        class Library:
            Trainer = staticmethod(dict)

        found: dict[str, Any] = eval(self.line, {"L": Library, "MeshStrategy": MeshStrategy})
        return found


def rows() -> Iterator[Row]:
    """Yield the rows of the page."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (code := re.fullmatch(r"`(L\.Trainer\(.*\))`", cells[3])):
            gpus, tokens = (int(cell.split()[0].replace(",", "")) for cell in (cells[0], cells[2]))
            yield Row(gpus, cells[1], tokens, code[1], cells[4])


def planned(row: Row) -> Any:
    """Return the plan of a row."""
    given = row.arguments
    nodes = given.pop("num_nodes", 1)
    assert given.pop("devices", 1) * nodes == row.gpus, row
    strategy = given.pop("strategy", "auto")
    trainer = L.Trainer(accelerator="cpu", max_steps=10, gradient_clip_val=1.0, logger=False, **given)
    if row.key in plan_moe.SIZES:
        module: plan_70b.Llama = plan_moe.Mixtral(plan_moe.SIZES[row.key])
    else:
        module = plan_70b.Llama(plan_70b.SIZES[row.key])
    pipeline = getattr(strategy, "pipeline", None)
    samples = 1 if pipeline is None else pipeline.schedule.micro_batches
    loader = DataLoader(plan_70b.Tokens(row.tokens), batch_size=samples)
    return plan_fit(
        trainer, module, loader, devices=row.gpus, num_nodes=nodes, strategy=strategy, memory_bytes=MEMORY_BYTES,
        budget_seconds=0.1,
    )  # fmt: skip


def main() -> int:
    """Print the table; return 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the name of the models to plan")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    found, wrong = [], False
    for row in rows():
        if options.only not in row.model:
            continue
        began = time.monotonic()
        plan = planned(row)
        memory = bytes_text(plan.measured.on_device)
        is_right = bool(plan.fits) and memory == row.memory
        wrong |= not is_right
        found.append({**row._asdict(), "memory": memory, "parameters": plan.measured.parameters, "fits": plan.fits})
        seconds, mark = time.monotonic() - began, "ok " if is_right else "BAD"
        figures = f"{row.gpus:6,} {row.model:8s} {row.tokens:9,} {memory:>8s}"
        print(f"{mark} {figures} {seconds:4.0f} s here  {row.line}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
