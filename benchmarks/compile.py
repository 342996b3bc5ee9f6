"""What ``compile`` makes of a program: its graphs, what they cost once, and what they give each step.

    python benchmarks/compile.py --json benchmarks/results/compile.json
    python benchmarks/compile.py --models five-metrics digits --steps 60

Three models: a small network that logs five values a step, and the two of ``hasten demo`` (the Vision Transformer of
the digits, MiniLM with random weights on made-up token numbers). Each trains with validation and a short last batch.

The graphs are counted by the compiler itself (``torch._dynamo.utils.counters``) in a process with an empty cache; a
second process of the same program then says what it saved. After that one process holds a plain and a compiled copy
of the model and trains them in turn (A B A B ...): the factor is the median over the turns of plain by compiled, and
the break-even point the steps after which what compiling took is earned back, if ever.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from measure import hardware

MODELS = ("five-metrics", "digits", "minilm")
WAYS: dict[str, Any] = {"True": True, "regional": "regional"}
LABELS = {"five-metrics": "five metrics", "digits": "digits ViT", "minilm": "MiniLM-L6"}


class FiveMetrics(L.LightningModule):
    """A small network that logs five values each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
        )

    def step(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        right = out.argmax(1) == y
        self.log(f"{stage}_loss", loss, prog_bar=True)
        self.log(f"{stage}_accuracy", right.float().mean(), on_epoch=True)
        self.log_dict({f"{stage}_mean": out.mean(), f"{stage}_spread": out.std(), f"{stage}_top": out.max()})
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Texts(L.LightningModule):
    """MiniLM as a classifier, trained as the demo trains it."""

    def __init__(self) -> None:
        super().__init__()
        from hasten_tools.demo.text_models import find

        self.model = find("minilm", random_weights=True).build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.model(**batch)
        self.log("val_acc", (output.logits.argmax(-1) == batch["labels"]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def model(name: str) -> L.LightningModule:
    """Return the module of a row, with the same weights each time."""
    L.seed_everything(0, verbose=False)
    if name == "five-metrics":
        return FiveMetrics()
    if name == "minilm":
        return Texts()
    from hasten_tools.demo.images import Digits
    from hasten_tools.demo.row import Classifier
    from hasten_tools.demo.task import RowVariant

    return Classifier(Digits(), RowVariant())


def data(name: str, batches: int, *, short: bool) -> DataLoader[Any]:
    """Return a loader of made-up batches; ``short`` makes the last one smaller than the others."""
    size = {"five-metrics": 256, "digits": 64, "minilm": 8}[name]
    count = batches * size - (size // 2 + 1 if short else 0)
    generator = torch.Generator().manual_seed(1)
    if name == "five-metrics":
        x = torch.randn(count, 64, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(10, (count,), generator=generator)), size)
    if name == "digits":
        x = torch.randn(count, 1, 8, 8, generator=generator)
        y = torch.randint(10, (count,), generator=generator)
        return DataLoader([{"images": a, "labels": b} for a, b in zip(x, y, strict=True)], size)  # type: ignore[arg-type]
    ids = torch.randint(5, 30_000, (count, 64), generator=generator)
    made = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]
    return DataLoader(made, size)  # type: ignore[arg-type]


def trainer(**arguments: Any) -> L.Trainer:
    """Return a Trainer that shows and keeps nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", enable_model_summary=False, **{**quiet, **arguments})


def count(name: str, way: str) -> dict[str, Any]:
    """Train over two epochs with validation and short last batches, and return what the compiler counted."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    runner = trainer(compile=WAYS[way], max_epochs=2)
    runner.fit(model(name), data(name, 3, short=True), data(name, 2, short=True))
    report = runner.compile_report
    assert report is not None
    return {
        "phases": 2,
        "graphs": int(counters["stats"]["unique_graphs"]),
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompiles": len(report.recompiles),
        "compiled": list(report.compiled),
        "seconds": round(report.seconds, 2),
        "seconds_saved": None if report.seconds_saved is None else round(report.seconds_saved, 2),
    }


class Clock(L.Callback):
    """Takes the time of the steps after the first two."""

    def __init__(self) -> None:
        self.begun = self.seconds = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.begun = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.seconds = time.perf_counter() - self.begun


def race(name: str, way: str, steps: int, turns: int) -> dict[str, Any]:
    """Train a plain and a compiled copy in turn; return the medians."""
    torch.set_num_threads(1)
    sides = {"plain": (model(name), None), "compiled": (model(name), WAYS[way])}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    loader = data(name, steps + 2, short=False)
    for turn in range(turns + 1):
        for side, (module, compile) in sides.items():
            clock = Clock()
            trainer(compile=compile, max_epochs=1, callbacks=[clock]).fit(module, loader)
            if turn:  # The first turn compiles.
                seconds[side].append(clock.seconds / steps)
    plain, compiled = (statistics.median(seconds[side]) for side in ("plain", "compiled"))
    pairs = zip(seconds["plain"], seconds["compiled"], strict=True)
    return {
        "plain_ms": plain * 1e3,
        "compiled_ms": compiled * 1e3,
        "factor": statistics.median(a / b for a, b in pairs),
        "turns_ms": {side: [round(value * 1e3, 3) for value in values] for side, values in seconds.items()},
    }


def child(task: str, name: str, way: str, options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", task, name, way]
    command += ["--steps", str(options.steps), "--turns", str(options.turns)]
    environment = {**os.environ, "HASTEN_CACHE": cache}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{task} of {name} failed:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measured(name: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of a row."""
    with tempfile.TemporaryDirectory() as cache:
        first = child("count", name, way, options, cache)
        second = child("count", name, way, options, cache)
        row = {"model": name, "compile": way, **first, "second_run_seconds": second["seconds"]}
        row["seconds_saved"] = second["seconds_saved"]
        row |= child("race", name, way, options, cache)
    gain = (row["plain_ms"] - row["compiled_ms"]) / 1e3
    row["break_even_steps"] = round(first["seconds"] / gain) if gain > 0 else None
    row["break_even_steps_second_run"] = round(second["seconds"] / gain) if gain > 0 else None
    return row


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["True"])
    parser.add_argument("--steps", type=int, default=20, help="in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        task, name, way = options.child
        print(json.dumps(count(name, way) if task == "count" else race(name, way, options.steps, options.turns)))
        return
    rows = []
    print(
        f"{'model':14}{'compile':>10}{'graphs':>8}{'breaks':>8}{'again':>7}{'first s':>9}{'second s':>10}"
        f"{'plain ms':>10}{'comp. ms':>10}{'factor':>8}{'pays after':>12}"
    )
    for name in options.models:
        for way in options.ways:
            row = measured(name, way, options)
            rows.append(row)
            even = row["break_even_steps"]
            print(
                f"{LABELS[name]:14}{way:>10}{row['graphs']:8}{row['graph_breaks']:8}{row['recompiles']:7}"
                f"{row['seconds']:9.1f}{row['second_run_seconds']:10.1f}{row['plain_ms']:10.2f}"
                f"{row['compiled_ms']:10.2f}{row['factor']:8.2f}"
                f"{'never' if even is None else f'{even:,} steps':>12}",
                flush=True,
            )
            if options.json is not None:
                figures = {
                    "command": shlex.join(["python", "benchmarks/compile.py", *sys.argv[1:]]),
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                    "hardware": hardware(),
                    "torch": torch.__version__,
                    "threads": 1,
                    "load_average": round(os.getloadavg()[0], 1),
                    "rows": rows,
                }
                options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
