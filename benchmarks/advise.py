"""The advisor on tasks of ``hasten demo``: which switches pay on them, measured on this machine.

    python benchmarks/advise.py digits --json benchmarks/results/advice_digits.json
    python benchmarks/advise.py imdb --data aclImdb_v1.tar.gz --budget 480 --json benchmarks/results/advice_imdb.json

Model, data and optimizer are those of the demo's first row: as a user writes them, with no switch on. Each switch
trains them in fresh processes, in turns with the unchanged program; the table, the picture and the JSON are those that
``hasten advise`` makes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import hasten as L
from hasten_tools.demo import text_models
from hasten_tools.demo.images import Digits
from hasten_tools.demo.row import Classifier
from hasten_tools.demo.task import RowVariant, Task
from hasten_tools.demo.text import Docstrings, Imdb
from measure import hardware


def task_of(options: argparse.Namespace) -> Task:
    """Return the demo's task."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.task == "digits":
        return Digits(device=device)
    source = text_models.find(options.model, random_weights=options.random_weights)
    if options.task == "docstrings":
        return Docstrings(source, max_length=options.max_length, device=device)
    return Imdb(options.data, source, limit=options.limit, max_length=options.max_length, device=device)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("docstrings", "digits", "imdb"))
    parser.add_argument("--data", type=Path, help="imdb: aclImdb_v1.tar.gz; default: downloaded")
    parser.add_argument("--model", default="minilm", choices=("minilm", "distilbert"))
    parser.add_argument("--random-weights", action="store_true", help="imdb: same work, no pretrained weights")
    parser.add_argument("--limit", type=int, default=4000, help="imdb: reviews; default: 4000")
    parser.add_argument("--max-length", type=int, default=512, help="imdb: tokens of a review; default: 512")
    parser.add_argument("--levers", help="names, with commas between; default: all")
    parser.add_argument("--budget", type=float, help="seconds that all of it may take, about")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a turn; default: a second's worth, 3 to 50")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()

    task = task_of(options)
    trainer = L.Trainer(max_epochs=task.epochs, logger=False, enable_checkpointing=False)
    module = Classifier(task, RowVariant())
    found = trainer.advise(
        module,
        task.users_loader(RowVariant()),
        levers=options.levers.split(",") if options.levers else None,
        rounds=options.rounds,
        steps=options.steps,
        warm_up=options.warm_up,
        budget_seconds=options.budget,
    )
    if options.json is not None:
        kept: dict[str, Any] = {
            "command": shlex.join(["python", "benchmarks/advise.py", *sys.argv[1:]]),
            "hardware": hardware(),
            "task": task.title,
            **json.loads(found.to_json()),
        }
        options.json.write_text(json.dumps(kept, indent=2) + "\n")
    if options.png is not None:
        found.draw(options.png)


if __name__ == "__main__":
    main()
