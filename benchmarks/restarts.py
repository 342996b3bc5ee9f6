"""Restart runs whose processes are killed, many times, and compare their weights with those of an undisturbed run.

    python benchmarks/restarts.py --launcher hasten --times 20
    python benchmarks/restarts.py --launcher torchrun --times 20 --json restarts.json
    python benchmarks/restarts.py --lose-node

In each run of two processes on gloo one is killed with SIGKILL in the middle of an epoch, another one at another step
each time. The launcher starts both again, and they resume from ``ckpt_path="last"``. A run passes if it ends with exit
code 0 and with the weights of the undisturbed run, bit for bit.

With ``--lose-node``, two launches on this machine are two nodes, of which one is killed with all its processes. The
other one has to go on alone with the samples of the epoch that were left, each once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.machine.cluster import find_free_port
from hasten.strategies import DDPStrategy

LAUNCHERS = {
    "hasten": ("hasten", "launch", "--procs", "2", "--restarts", "3"),
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"),
}
STEPS, SAMPLES = 24, 64


class Model(L.LightningModule):
    """A classifier with dropout, so that the state of the random generators matters too; notes its samples."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, number = batch
        trainer = self.trainer
        with open(self.folder / f"samples-{trainer.world_size}-{trainer.global_rank}", "a", encoding="utf-8") as file:
            print(json.dumps([trainer.current_epoch, trainer.global_step, number.tolist()]), file=file)
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Killed(L.Callback):
    """Kills the process of one rank after a step, once in the life of a folder."""

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        self.mark, self.rank, self.step = folder / "killed", rank, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        is_meant = trainer.global_rank == self.rank or "LOSE_NODE" in os.environ
        if is_meant and trainer.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            if "LOSE_NODE" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, rank: int, step: int) -> None:
    """Train as one of the processes; the first one writes the digest of the weights."""
    torch.set_num_threads(1)
    L.seed_everything(5, verbose=False)
    x = torch.randn(SAMPLES, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(SAMPLES)), 4, shuffle=True)
    model = Model(folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=DDPStrategy(timeout=timedelta(seconds=60)),
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=3), Killed(folder, rank, step)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        (folder / "digest").write_text(hashlib.sha256(weights.numpy().tobytes()).hexdigest())


def run(launcher: str, folder: Path, rank: int, step: int, seconds: float) -> dict[str, Any]:
    """Launch one run; return its exit code, digest, seconds and how often the processes were restarted."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], __file__]
    began = time.monotonic()
    with open(folder / "output", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, "--worker", str(folder), str(rank), str(step)],
            stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = -1
    digest = folder / "digest"
    text = (folder / "output").read_text(encoding="utf-8")
    return {
        "rank": rank,
        "step": step,
        "exit_code": code,
        "digest": digest.read_text(encoding="utf-8") if digest.exists() else None,
        "seconds": round(time.monotonic() - began, 1),
        "refused_connections": text.count("Connection refused"),
    }


def lose_node(folder: Path, seconds: float) -> bool:
    """Kill one of two nodes; return whether the other one went on with the samples that were left."""
    port = find_free_port()
    words = ["launch", "--procs=1", "--min-nodes=1", "--max-nodes=2", f"--rdzv=127.0.0.1:{port}", "--restarts=3"]
    command = [sys.executable, "-m", "hasten", *words, __file__, "--worker", str(folder)]
    began, nodes = time.monotonic(), []
    for lost in (False, True):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"LOSE_NODE": "1"} if lost else {})}
        output = open(folder / f"node-{lost:d}", "w", encoding="utf-8")  # noqa: SIM115 - for the process
        # Its process is killed whatever its rank is.
        nodes.append(subprocess.Popen([*command, "-1", "5"], stdout=output, stderr=output, env=environment))
        time.sleep(1)
    codes = []
    for node in nodes:
        try:
            codes.append(node.wait(seconds))
        except subprocess.TimeoutExpired:
            node.terminate()
            codes.append(node.wait())

    def noted(world_size: int, rank: int) -> list[Any]:
        text = (folder / f"samples-{world_size}-{rank}").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    together, alone = noted(2, 0) + noted(2, 1), noted(1, 0)
    resumed_at = alone[0][1]
    seen = [row for row in together if row[1] < resumed_at] + [row for row in alone if row[0] == 0]
    numbers = sorted(number for _, _, numbers in seen for number in numbers)
    print(f"exit codes of the node that stayed and of the other one: {codes}, {time.monotonic() - began:.0f} s")
    print(f"both trained to step {max(row[1] for row in together) + 1}, one went on at step {resumed_at}")
    print(f"samples of the epoch trained on once: {sum(numbers.count(n) == 1 for n in range(SAMPLES))} of {SAMPLES}")
    return codes[0] == 0 and numbers == list(range(SAMPLES))


def main() -> None:
    """Run the program given by the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="hasten")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a run counts as stuck")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--lose-node", action="store_true", help="kill one of two nodes, once")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        train(Path(given.worker[0]), *map(int, given.worker[1:]))
        return
    if given.lose_node:
        folder = Path(tempfile.mkdtemp(prefix="restarts-"))
        passed = lose_node(folder, given.seconds)
        print(f"{'passed' if passed else 'FAILED'}: {folder}")
        sys.exit(not passed)
    found = []
    for number in range(given.times + 1):
        # The first run is undisturbed: no process has rank -1.
        rank, step = (-1, 0) if number == 0 else (number % 2, 4 + number % (STEPS - 6))
        folder = Path(tempfile.mkdtemp(prefix="restarts-"))
        found.append(run(given.launcher, folder, rank, step, given.seconds))
        row = found[-1]
        passed = row["exit_code"] == 0 and row["digest"] == found[0]["digest"]
        row["passed"] = passed
        print(f"{number:3d} {'equal' if passed else 'FAILED'} {row} {'' if passed else folder}", flush=True)
        if passed:
            shutil.rmtree(folder)
    print(f"{given.launcher}: {sum(row['passed'] for row in found[1:])} of {given.times} restarted runs end bit-equal")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
