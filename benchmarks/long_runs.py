"""What long runs need: memory, open files and threads as they go on, the size of their logs, and the time to read them.

    python benchmarks/long_runs.py steps                      # one fit of 500,000 steps
    python benchmarks/long_runs.py fits                       # 200 fits in one process
    python benchmarks/long_runs.py log                        # 10,000,000 rows in a record and in a metrics.csv
    python benchmarks/long_runs.py report                     # the report of 1,000,000 rows with 20 values each
    python benchmarks/long_runs.py report --rows 100000 --names 5 --csv

The first two print a line at 10, 50 and 100 %. A fit logs every 50 steps with the default CSVLogger, validates, and
saves checkpoints; every tenth of the 200 fits has a worker process for its data. The other two run each reader in a
process of its own, and print its seconds and its largest memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKS = (10, 50, 100)


def state(folder: Path) -> str:
    """Return what this process holds now, and how large the files of its run are."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    descriptors = len(os.listdir("/proc/self/fd")) - 1
    files = [path for path in folder.rglob("*") if path.is_file()]
    logs = sum(path.stat().st_size for path in files if path.suffix in (".jsonl", ".csv")) / 2**20
    return (
        f"{memory:7.1f} MiB  {len(gc.get_objects()):7,} objects  {descriptors} descriptors  "
        f"{threading.active_count()} threads  {len(files)} files  {logs:.2f} MiB of logs"
    )


def small_parts() -> tuple[Any, Any, Any]:
    """Return a module, and a data set of training and of validation."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import hasten as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    x = torch.randn(4000, 16)
    y = (x.sum(1) > 0).long()
    return Model(), TensorDataset(x, y), TensorDataset(x[:40], y[:40])


def steps(count: int, folder: Path) -> None:
    """Make one long fit."""
    from torch.utils.data import DataLoader

    import hasten as L
    from hasten.callbacks import ModelCheckpoint

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            for mark in MARKS:
                if trainer.global_step == count * mark // 100:
                    print(f"{mark:3d} %  {state(folder)}", flush=True)

    model, training, validation = small_parts()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=count, max_epochs=-1, default_root_dir=folder,
        callbacks=[Looks(), ModelCheckpoint(monitor="val_loss", save_last=True, every_n_train_steps=count // 50)],
        enable_progress_bar=False, enable_model_summary=False, val_check_interval=max(1, count // 100),
        check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(model, DataLoader(training, 4, shuffle=True), DataLoader(validation, 4))


def fits(count: int, folder: Path) -> None:
    """Make many fits."""
    from torch.utils.data import DataLoader

    import hasten as L

    for number in range(1, count + 1):
        model, training, validation = small_parts()
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_steps=60, default_root_dir=folder, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        workers = 1 if number % 10 == 0 else 0
        trainer.fit(model, DataLoader(training, 64, num_workers=workers), DataLoader(validation, 4))
        del model, trainer
        for mark in MARKS:
            if number == count * mark // 100:
                print(f"{mark:3d} %  {state(folder)}", flush=True)


def log(rows: int, names: int, folder: Path) -> None:
    """Write many rows, as a fit does, and read them."""
    from hasten.loggers import CSVLogger
    from hasten.record.file import Record

    def values(step: int) -> dict[str, float]:
        return {f"value_{number}": (step * 7919 % 100_003 + number) / 100_003 for number in range(names)}

    record = Record(folder / "record" / "run.jsonl")
    (folder / "record").mkdir()

    def write_record() -> None:
        for step in range(rows):
            record.add("row", step=step, epoch=0, values=values(step))
        record.flush()

    def write_table() -> None:
        for step in range(rows):
            logger.log_metrics(values(step), step=step)
        logger.finalize("success")

    measured(f"record: {rows:,} rows", write_record)
    logger = CSVLogger(folder, name="csv", version="")
    measured(f"CSVLogger: {rows:,} rows", write_table)
    for path in (folder / "record" / "run.jsonl", folder / "csv" / "metrics.csv"):
        print(f"{path.name}: {path.stat().st_size / 2**20:,.0f} MiB", flush=True)
        command(["report", str(path), "-o", str(folder / "page.html")])
    again = "from hasten.loggers import CSVLogger; "
    opened = f"CSVLogger({str(folder)!r}, name='csv', version='').log_metrics({{'value_0': 1.0}}, step={rows})"
    child("a CSVLogger that goes on in this file", [sys.executable, "-W", "ignore", "-c", again + opened])


def measured(what: str, function: Callable[[], object]) -> None:
    """Print how long a function takes, and by how much the memory of this process grows."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    function()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{what}: {time.perf_counter() - began:.1f} s, {grown:.0f} MiB more memory", flush=True)


def report(rows: int, names: int, folder: Path, *, as_table: bool) -> None:
    """Write the file of a run with random values, which hold in float32 as losses do, and make its report."""
    import numpy as np

    random = np.random.default_rng(0)
    path = folder / ("metrics.csv" if as_table else "run.jsonl")
    labels = [f"metric_{number:02d}" for number in range(names)]
    with path.open("w", encoding="utf-8") as file:
        if as_table:
            print(",".join(["epoch", "step", *labels]), file=file)
        for begin in range(0, rows, 1000):
            values = random.random((min(1000, rows - begin), names), np.float32).astype(float).tolist()
            for step, row in enumerate(values, start=begin):
                if as_table:
                    print(step // 10_000, step, *row, sep=",", file=file)
                    continue
                line = {"kind": "row", "time": 1.7e9 + step * 0.0123, "step": step, "epoch": step // 10_000}
                print(json.dumps({**line, "values": dict(zip(labels, row, strict=True))}), file=file)
    print(f"{path.name}: {rows:,} rows, {names} names, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
    command(["report", str(path), "-o", str(folder / "page.html")])
    print(f"page.html: {(folder / 'page.html').stat().st_size / 1e6:.1f} MB")
    command(["plot", str(path), "--key", labels[0], "-o", str(folder / "plot.png")])


def command(words: list[str]) -> None:
    """Run a command of hasten, and measure it."""
    child(f"hasten {words[0]} {Path(words[1]).name}", [sys.executable, "-m", "hasten", *words])


def child(what: str, words: list[str]) -> None:
    """Run a process, and print its seconds and its largest memory."""
    began = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{words} ended with {process.returncode}"
    own = used.ru_utime + used.ru_stime
    print(f"{what}: {seconds:.1f} s ({own:.1f} s of a core), {used.ru_maxrss / 1024:.0f} MiB", flush=True)


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("steps", "fits", "log", "report"))
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--rows", type=int, help="default: 10,000,000 of log, 1,000,000 of report")
    parser.add_argument("--names", type=int, help="values in a row; default: 3 of log, 20 of report")
    parser.add_argument("--csv", action="store_true", help="report: read a metrics.csv instead of a run.jsonl")
    given = parser.parse_args()
    print(shlex.join(["python", *sys.argv]), flush=True)
    warnings.simplefilter("ignore")
    logging.getLogger("hasten").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="long-runs-") as name:
        folder, began = Path(name), time.perf_counter()
        if given.part == "steps":
            steps(given.steps, folder)
        elif given.part == "fits":
            fits(given.fits, folder)
        elif given.part == "log":
            log(given.rows or 10_000_000, given.names or 3, folder)
        else:
            report(given.rows or 1_000_000, given.names or 20, folder, as_table=given.csv)
        print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
