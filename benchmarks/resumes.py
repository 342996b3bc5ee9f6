"""Does a run that resumes under another strategy train on as before? The largest difference of a weight, for all pairs.

    python benchmarks/resumes.py                      # on four processes of this machine's CPU
    python benchmarks/resumes.py --only "tensor" --json resumes.json

Under each strategy a small decoder trains for twelve steps in float64, with AdamW, a scheduler, accumulation, clipping
and shuffled data. After six steps, in the middle of the epoch, a checkpoint is saved, and a run under each of the
strategies resumes from it. The table has the largest difference of a weight at the end to the run that was not
interrupted. A row is the strategy that saved, a column the one that resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from axes import BATCH, PLAN, ROOT, WORDS, Decoder, largest
from hasten.callbacks import ModelCheckpoint
from hasten.strategies import MeshStrategy

PROCESSES, STEPS, SAVED_AT, ACCUMULATED = 4, 12, 6, 2
# The number of processes, that of different batches in a step, and what makes the strategy.
STRATEGIES: dict[str, tuple[int, int, Any]] = {
    "single": (1, 1, lambda: "auto"),
    "ddp": (4, 4, lambda: "ddp"),
    "ddp_sharded": (4, 4, lambda: "ddp_sharded"),
    "fsdp": (4, 4, lambda: "fsdp"),
    "fsdp, folders": (4, 4, lambda: MeshStrategy(state_dict_type="sharded")),
    "fsdp, offload": (4, 4, lambda: "fsdp_cpu_offload"),
    "replicate 2 x shard 2": (4, 4, lambda: MeshStrategy(replicate=2, shard=2)),
    "tensor 4": (4, 1, lambda: MeshStrategy(tensor=4, plan=PLAN)),
    "shard 2 x tensor 2": (4, 2, lambda: MeshStrategy(tensor=2, plan=PLAN, state_dict_type="sharded")),
    "context 4": (4, 1, lambda: MeshStrategy(context=4)),
    "shard 2 x context 2": (4, 2, lambda: MeshStrategy(context=2)),
    "pipeline 4": (4, 1, lambda: MeshStrategy(pipeline=4)),
    "shard 2 x pipeline 2": (4, 2, lambda: MeshStrategy(pipeline=2)),
    "tensor 2 x pipeline 2": (4, 1, lambda: MeshStrategy(tensor=2, pipeline=2, plan=PLAN)),
}


class Scheduled(Decoder):
    """The decoder of ``axes.py``, whose learning rate falls in each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(name: str, folder: Path, resumed_from: Path | None = None) -> list[Tensor]:
    """Train under a strategy to the end, and return the weights; without ``resumed_from``, save half-way."""
    devices, batches, make = STRATEGIES[name]
    tokens = torch.randint(0, WORDS, (STEPS * ACCUMULATED * BATCH, 17), generator=torch.Generator().manual_seed(1))
    L.seed_everything(3, verbose=False)
    module = Scheduled().double()
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy=make(), accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.1, callbacks=[] if resumed_from else [saves], logger=False,
        enable_checkpointing=resumed_from is None, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), BATCH // batches, shuffle=True)
    trainer.fit(module, loader, ckpt_path=resumed_from)
    assert trainer.global_step == STEPS
    assert len(module.losses) == STEPS * ACCUMULATED // (2 if resumed_from else 1)
    # The parameters of other stages are not numbers.
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in module.parameters()]


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference of a weight, on any process."""
    held = [pair for pair in zip(some, others, strict=True) if not any(weight.isnan().any() for weight in pair)]
    found = torch.tensor(largest(*map(list, zip(*held, strict=True))))
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return float(found)


def compare(folder: Path, only: str) -> None:
    """Train all pairs, in each process of torchrun; the first one prints a line of JSON for each."""
    rank = int(os.environ["RANK"])
    # A run of one process trains in each of them, when they have met.
    for saved in (*list(STRATEGIES)[1:], "single"):
        uninterrupted = train(saved, folder / (f"single-{rank}" if saved == "single" else saved))
        torch.distributed.barrier()
        path = folder / ("single-0" if saved == "single" else saved) / f"step={SAVED_AT}.ckpt"
        for resumed in STRATEGIES:
            if only not in saved and only not in resumed:
                continue
            found = train(resumed, folder, path)
            row = {"saved": saved, "resumed": resumed, "weight": difference(found, uninterrupted)}
            if rank == 0:
                print(json.dumps(row), flush=True)


def main() -> int:
    """Print the table; return 1 if a resumed run trains something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the name of one of the two strategies")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compare(options.worker, options.only)
        return 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, __file__, "--worker", folder, "--only", options.only]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    rows.append(json.loads(line))
                    print("{saved:22s} {resumed:22s} {weight:9.1e}".format(**rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(process.returncode != 0 or any(row["weight"] > 1e-9 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
