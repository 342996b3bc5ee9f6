"""``import hasten`` costs next to nothing beside ``import torch``, and brings along nothing heavy."""

from __future__ import annotations

import json
from typing import Any

from tests.programs import run_python

HEAVY = (
    "torchmetrics",
    "tensorboard",
    "matplotlib",
    "tqdm",
    "transformers",
    "jsonargparse",
    "pandas",
    "sklearn",
    "rich",
    "yaml",
    "fsspec",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
CLI = ("argparse", "hasten.commands", "hasten_tools.demo")

PROGRAM = """
import json, sys
import torch
before, calls = set(sys.modules), 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
{statement}
sys.setprofile(None)
print(json.dumps({{"calls": calls, "new": sorted(set(sys.modules) - before)}}))
"""


def run(statement: str) -> dict[str, Any]:
    """Run a statement after ``import torch`` in a new process; return the modules it imported and its Python calls."""
    done = run_python("-c", PROGRAM.format(statement=statement))
    assert (done.returncode, done.stderr) == (0, ""), "no noise on import"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def heavy(new: list[str], names: tuple[str, ...]) -> list[str]:
    return [name for name in new if any(name == one or name.startswith(one + ".") for one in names)]


def test_importing_hasten_brings_few_light_modules_and_calls_few_functions() -> None:
    imported = run("import hasten")
    new = imported["new"]
    assert heavy(new, HEAVY + CLI) == []
    mine = [name for name in new if name.split(".")[0] == "hasten"]
    assert "hasten" in mine
    assert len(mine) <= 5, mine
    assert len(new) - len(mine) <= 20, new
    # A count, which is the same on a busy machine.
    assert imported["calls"] <= 1000


def test_the_names_a_program_uses_bring_nothing_heavy_either() -> None:
    names = "Trainer, LightningModule, LightningDataModule, Callback, Fabric, seed_everything"
    assert heavy(run(f"from hasten import {names}")["new"], HEAVY + CLI) == []


def test_nor_do_they_under_the_names_of_lightning() -> None:
    alias = "import hasten_lightning; hasten_lightning.install(); import pytorch_lightning as pl; pl.Trainer"
    assert heavy(run(alias)["new"], HEAVY) == []
