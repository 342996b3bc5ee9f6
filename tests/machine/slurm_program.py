"""Jobs of two tasks as SLURM starts them, one after another: python slurm_program.py FOLDER.

Prints the exit codes of the tasks of each job, as JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.models import Classifier, loader, quiet

import hasten as L
from hasten.machine.cluster import find_free_port
from hasten.plugins import SLURMEnvironment

# By name: what the tasks of a job do. "in" is the folder, so that jobs with the same one are one job, requeued.
JOBS: dict[str, dict[str, Any]] = {
    "undisturbed": {"in": "a"},
    "signaled": {"in": "b", "send": signal.SIGUSR1},
    "requeued": {"in": "b"},
    "of another signal": {"in": "c", "send": signal.SIGUSR2, "requeue_signal": signal.SIGUSR2, "array": "9"},
    "terminated": {"in": "d", "send": signal.SIGTERM},
    "another job there": {"in": "b", "id": "78", "steps": 3},
    "asked to go on": {"in": "b", "id": "79", "ckpt_path": "hpc", "steps": 3},
}


# The steps that this process trained. Not an attribute of the module: a resume restores those.
STEPS: list[int] = []


class Signaled(Classifier):
    """Sends its process a signal."""

    def __init__(self, number: int | None) -> None:
        super().__init__(dropout=0.3)
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        STEPS.append(self.global_step)
        if self.number is not None and self.global_rank == 1 and self.global_step == 4:
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


def task(name: str, rank: int, port: int, folder: Path) -> None:
    """Train as one task of a job."""
    job = JOBS[name]
    # Not a pipe: what outlives its process would keep it open.
    with open(folder / f"{name}-{rank}.txt", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_JOB_ID": job.get("id", "77"), "SLURM_JOB_NAME": "train",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if "array" in job:
        os.environ |= {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": job["array"]}
    signal.signal(signal.SIGUSR1, lambda *_: print("the user's handler was called", flush=True))
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    model = Signaled(job.get("send"))
    plugins = SLURMEnvironment(requeue_signal=job["requeue_signal"]) if "requeue_signal" in job else None
    trainer = quiet(
        devices=2, strategy="ddp", max_steps=job.get("steps", 60), max_epochs=-1, plugins=plugins,
        default_root_dir=folder / job["in"],
    )  # fmt: skip
    report = folder / f"{name}-{rank}.json"
    try:
        trainer.fit(model, loader(shuffle=True), ckpt_path=job.get("ckpt_path"))
    finally:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        report.write_text(json.dumps([STEPS[0] if STEPS else -1, trainer.global_step, weights.tolist()]))


def main() -> None:
    folder, codes = Path(sys.argv[1]), {}
    warnings.simplefilter("ignore")
    # Imports are most of the time of a short run: the forks find them done.
    torch.set_num_threads(1)
    quiet(max_steps=1).fit(Classifier(), loader())
    importlib.import_module("torch.nn.parallel.distributed")
    context = multiprocessing.get_context("fork")
    for name in JOBS:
        port = find_free_port()
        tasks = [context.Process(target=task, args=(name, rank, port, folder)) for rank in range(2)]
        for one in tasks:
            one.start()
        for one in tasks:
            one.join(60)
            one.kill()
        codes[name] = [one.exitcode for one in tasks]
    print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
