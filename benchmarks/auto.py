"""``Trainer(speed="auto")`` beside the unchanged program and the best line of its class, everything included.

    python benchmarks/auto.py digits mlp --rounds 3
    python benchmarks/auto.py imdb --data aclImdb_v1.tar.gz --limit 600 --max-length 256 --steps 48
    python benchmarks/auto.py docstrings --advise 300       # the advisor finds the line; takes minutes

Tasks are those of ``hasten demo`` (model, data and optimizer as a user writes them), and an MLP on generated rows. Four
trainings take turns: plain, the line, ``speed="auto"`` with an empty cache, and ``speed="auto"`` once more, which
remembers. The seconds are those of ``Trainer.fit``, measuring included; ratios are medians over the rounds.

Without ``--advise`` the line is the one that ``hasten advise`` and ``hasten demo`` have found on a CPU, see
docs/speed.md; "wide" is an MLP whose steps are all matrix products, where hardly anything is to be gained.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten_tools.demo import text_models
from hasten_tools.demo.images import Digits, Vit
from hasten_tools.demo.row import Classifier
from hasten_tools.demo.task import RowVariant, Task
from hasten_tools.demo.text import Docstrings, Imdb
from measure import hardware

# The best lines that change no more than random draws.
LINES: dict[str, dict[str, Any]] = {
    "digits": {"resident": True, "fused_optimizer": True},
    "docstrings": {"packed": "first_token", "fused_optimizer": True, "allocator": "keep"},
    "imdb": {"packed": "first_token", "fused_optimizer": True, "allocator": "keep"},
    "vit": {"resident": True, "fused_optimizer": True, "allocator": "keep"},
    "mlp": {"resident": True, "fused_optimizer": True},
    "wide": {"fused_optimizer": True},
}


class Rows(L.LightningModule):
    """An MLP on generated rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.layers(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Program:
    """A task, made anew for each training."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.steps = name, options.steps
        self.task = self._task(options)
        self.epochs = self.task.epochs if self.task is not None else 5

    def _task(self, options: argparse.Namespace) -> Task | None:
        if self.name in ("mlp", "wide"):
            return None
        if self.name == "digits":
            return Digits()
        if self.name == "vit":
            return Vit(random_images=True, limit=options.limit, side=64, depth=4, width=192)
        source = text_models.find("minilm", random_weights=options.random_weights)
        if self.name == "docstrings":
            return Docstrings(source, max_length=options.max_length)
        return Imdb(options.data, source, limit=options.limit, max_length=options.max_length)

    def model_and_data(self) -> tuple[L.LightningModule, DataLoader[Any]]:
        """Return a new model, and the loader as a user writes it."""
        L.seed_everything(0, verbose=False)
        if self.task is not None:
            return Classifier(self.task, RowVariant()), self.task.users_loader(RowVariant())
        is_wide = self.name == "wide"
        x = torch.randn(2048 if is_wide else 20_000, 32)
        rows = TensorDataset(x, (x.sum(1) > 0).long())
        return Rows(1024 if is_wide else 256), DataLoader(rows, 512 if is_wide else 32, shuffle=True)

    def trainer(self, arguments: Mapping[str, Any]) -> L.Trainer:
        """Return a Trainer that writes and shows nothing."""
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        epochs = 10 * self.epochs if self.name == "wide" else self.epochs
        return L.Trainer(
            max_epochs=epochs, max_steps=self.steps, accelerator="cpu", limit_val_batches=0, **quiet, **arguments
        )

    def fit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Train; return the seconds of the wall clock and of the processor, and what was chosen."""
        model, data = self.model_and_data()
        trainer = self.trainer(arguments)
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.fit(model, data)
        return {
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "steps": trainer.global_step,
            "chosen": list(trainer.chosen_levers or ()),
        }


def measure(program: Program, line: Mapping[str, Any], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each variant, in turns."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HASTEN_CACHE"] = folder
            variants = {"plain": {}, "line": line, "auto": {"speed": "auto"}, "auto again": {"speed": "auto"}}
            # The one that remembers comes after the one that measures; the others change places.
            order = (
                ["plain", "line", "auto", "auto again"] if number % 2 == 0 else ["auto", "auto again", "line", "plain"]
            )
            for name in order:
                found.setdefault(name, []).append(program.fit(variants[name]))
                print(f"  {program.name}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def ratio(found: Mapping[str, list[dict[str, Any]]], name: str, clock: str) -> float:
    """Return how many times as fast as the unchanged program a variant is, as a median over the rounds."""
    pairs = zip(found["plain"], found[name], strict=True)
    return statistics.median(plain[clock] / other[clock] for plain, other in pairs)


def main() -> None:
    """Measure, print a table, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=tuple(LINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=-1, help="of each training; default: all of the task's")
    parser.add_argument("--limit", type=int, default=600, help="imdb and vit: samples; default: 600")
    parser.add_argument("--max-length", type=int, default=256, help="imdb and docstrings: tokens; default: 256")
    parser.add_argument("--random-weights", action="store_true", help="same work, no pretrained weights")
    parser.add_argument("--data", type=Path, help="imdb: aclImdb_v1.tar.gz; default: downloaded")
    parser.add_argument("--advise", type=float, metavar="SECONDS", help="let the advisor find the line")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    logging.getLogger("hasten").setLevel(logging.ERROR)
    results = {}
    for name in options.tasks:
        program, line = Program(name, options), LINES[name]
        # The first training of a process imports what all share.
        warm = Program("mlp", argparse.Namespace(**{**vars(options), "steps": 20}))
        warm.fit({"speed": "auto"})
        if options.advise is not None:
            found = program.trainer({}).advise(*program.model_and_data(), budget_seconds=options.advise, verbose=False)
            line = found.arguments
        results[name] = {"line": line, "runs": measure(program, line, options.rounds)}
    print("| task | steps | the line | auto, first run | auto again | of the line, first run | chosen |")
    print("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        runs = result["runs"]
        line, first, again = (ratio(runs, each, "cpu_seconds") for each in ("line", "auto", "auto again"))
        chosen, steps = ", ".join(runs["auto"][-1]["chosen"]), runs["plain"][0]["steps"]
        print(f"| {name} | {steps} | {line:.2f}x | {first:.2f}x | {again:.2f}x | {first / line:.0%} | {chosen} |")
    if options.json is not None:
        command = shlex.join(["python", "benchmarks/auto.py", *sys.argv[1:]])
        kept = {"command": command, "hardware": hardware(), "torch": torch.__version__, "tasks": results}
        options.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
