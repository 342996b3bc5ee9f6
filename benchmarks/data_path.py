"""The data path: batches from memory, the number of workers that was found, and the gap between epochs.

    python benchmarks/data_path.py
    python benchmarks/data_path.py --rounds 9 --json benchmarks/results/data_path.json

*resident*: an epoch of ``DataLoader`` and of ``hasten.data.ResidentLoader`` over the same tensors of the size of MNIST,
in turns, shuffled, nothing computed with the batches; the figure is the median of the ratios, round by round.

*workers*: ``auto_workers`` is asked once for each data set, and then an epoch is read with 0, 1, 2, 4 and the number it
chose, in turns. ``of the best`` is the time of the best of 0, 1, 2 and 4 by that of the number chosen (median over the
rounds); a number chosen that is one of them is not read twice.

*gap*: with persistent workers and a validation between epochs, how long the first batch of an epoch is waited for: in a
loop written by hand, and in a ``Trainer``, which has it fetched meanwhile.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hasten as L
from hasten.data import ResidentLoader, auto_workers, with_workers
from measure import hardware

NUMBERS = (0, 1, 2, 4)


def images(count: int, dtype: torch.dtype) -> TensorDataset:
    """Return images of the size of MNIST's and their labels."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return TensorDataset(data if dtype == torch.uint8 else data.to(dtype) / 255, labels)


class Cheap(Dataset[Any]):
    """A row of a tensor."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.arange(samples * 32, dtype=torch.float32).view(samples, 32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index % 2


class Decoded(Cheap):
    """A picture whose decoding keeps a core busy for about a millisecond."""

    def __getitem__(self, index: int) -> Any:
        value = index
        for _ in range(16_000):
            value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
        return self.rows[index], value % 2


class Sleepy(Cheap):
    """A file on a slow disk: two milliseconds in which no core has anything to do."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.rows[index], index % 2


def seconds(loader: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Read an epoch."""
    start = clock()
    for _ in loader:
        pass
    return clock() - start


def in_turns(makes: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """Call each in turn, in an order that changes; the first round is for imports, allocator and caches."""
    found: dict[Any, list[float]] = {name: [] for name in makes}
    for turn in range(rounds + 1):
        for name in makes if turn % 2 == 0 else reversed(makes):
            taken = makes[name]()
            if turn:
                found[name].append(taken)
    return found


def resident_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the loaders over tensors."""
    rows = []
    for dtype in (torch.uint8, torch.float32):
        data = images(options.images, dtype)
        plain = DataLoader(data, options.batch_size, shuffle=True)
        mine = ResidentLoader(data, options.batch_size, shuffle=True)
        # One thread that never waits: its processor time is what a machine with other users does not change.
        clock = time.process_time if options.clock == "cpu" else time.perf_counter
        taken = in_turns(
            {
                "plain": lambda p=plain, c=clock: seconds(p, c),
                "mine": lambda m=mine, c=clock: seconds(m, c),
            },
            options.rounds,
        )
        ratios = [p / m for p, m in zip(taken["plain"], taken["mine"], strict=True)]
        rows.append(
            {
                "data": f"{options.images} x 28 x 28 {str(dtype).removeprefix('torch.')}",
                "DataLoader us": round(statistics.median(taken["plain"]) / len(plain) * 1e6, 1),
                "ResidentLoader us": round(statistics.median(taken["mine"]) / len(mine) * 1e6, 1),
                "times faster": round(statistics.median(ratios), 2),
                "seconds": taken,
            }
        )
    return rows


def worker_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the number found with the others."""
    sets = {"cheap": Cheap(20_000), "heavy decode": Decoded(1200), "sleepy I/O": Sleepy(1200)}
    rows = []
    for name, data in sets.items():
        given = DataLoader(data, 32, shuffle=True)
        start = time.perf_counter()
        chosen = auto_workers(given).num_workers
        measuring = time.perf_counter() - start
        loaders = {number: with_workers(given, number) for number in sorted({*NUMBERS, chosen})}
        taken = in_turns({number: lambda each=each: seconds(each) for number, each in loaders.items()}, options.rounds)
        best = min(NUMBERS, key=lambda number: statistics.median(taken[number]))
        ratios = [b / c for b, c in zip(taken[best], taken[chosen], strict=True)]
        rows.append(
            {
                "data": name,
                "chosen": chosen,
                "best": best,
                "of the best": round(statistics.median(ratios), 3),
                "measured in s": round(measuring, 1),
                **{f"{number}: s": round(statistics.median(taken[number]), 3) for number in loaders},
                "seconds": taken,
            }
        )
    return rows


class Waiting(L.LightningModule):
    """Computes next to nothing and notes how long each epoch waits for its first batch."""

    def __init__(self, validation_seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 1)
        self.validation_seconds = validation_seconds
        self.waits: list[float] = []
        self._began = 0.0

    def on_train_epoch_start(self) -> None:
        self._began = time.perf_counter()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.waits.append(time.perf_counter() - self._began)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.validation_seconds)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def gap_row(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the waits at the beginning of an epoch."""
    epochs, validation_seconds = 4, 0.3

    def loader() -> Any:
        return DataLoader(
            Sleepy(256),
            32,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(0),
        )

    def by_hand() -> float:
        given, module, waits = loader(), Waiting(validation_seconds), []
        for _ in range(epochs):
            start = time.perf_counter()
            for number, batch in enumerate(given):
                if number == 0:
                    waits.append(time.perf_counter() - start)
                module.training_step(batch, number).backward()
            time.sleep(validation_seconds)
        return statistics.median(waits[1:])

    def by_trainer() -> float:
        module = Waiting(validation_seconds)
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, loader(), [torch.zeros(1)])
        return statistics.median(module.waits[1:])

    taken = in_turns({"by hand": by_hand, "Trainer": by_trainer}, options.rounds)
    return {
        "by hand ms": round(statistics.median(taken["by hand"]) * 1e3, 2),
        "Trainer ms": round(statistics.median(taken["Trainer"]) * 1e3, 2),
        "seconds": taken,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON file."""
    options = parse(arguments)
    logging.getLogger("hasten").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    facts: dict[str, Any] = {
        "command": sys.argv,
        "hardware": hardware(),
        "torch": torch.__version__,
        "options": {key: str(value) for key, value in vars(options).items()},
    }
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HASTEN_CACHE"] = cache  # What an earlier run found is not what is measured here.
        if "resident" in options.parts:
            facts["resident"] = resident_rows(options)
            _show(facts["resident"])
        if "workers" in options.parts:
            facts["workers"] = worker_rows(options)
            _show(facts["workers"])
        if "gap" in options.parts:
            facts["gap"] = gap_row(options)
            _show([facts["gap"]])
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("   ".join(f"{key} {value}" for key, value in row.items() if key != "seconds"), flush=True)
    print()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000, help="of the resident rows (default: 60000)")
    parser.add_argument("--batch-size", type=int, default=64, help="of the resident rows (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each row (default: 5)")
    parser.add_argument(
        "--parts", nargs="+", default=["resident", "workers", "gap"], choices=("resident", "workers", "gap")
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="of the resident rows (default: wall)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
