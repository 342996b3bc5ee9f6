"""What a run of four processes loses when something goes wrong, what it says, and whether it resumes bit for bit.

    python benchmarks/scale_faults.py
    python benchmarks/scale_faults.py --only bucket --strategies mesh --show

Each case is a program on four gloo processes that saves every three steps: under ``"ddp"``, whose checkpoints are
files, and under ``MeshStrategy(replicate=2, shard=2)``, whose checkpoints are folders that all processes write. The
fault comes after step 11. Then the cause is taken away, and the program runs again with ``ckpt_path="last"``. "lost" is
the number of steps that it trains again; "equal" says whether it ends with the weights, the optimizer states and the
logged loss of a run without a fault, bit for bit. "exit" is the code of the first process that was not killed.

The processes are forks of this one with the variables that torchrun sets, so a run takes seconds. ``faults.py`` has the
launchers.

The full disk is a small file system in memory, which needs the right to mount it; without that, the system limits the
size of files. The bucket that cannot be reached is a port on which nobody listens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch
import torch._dynamo  # These before the forks: their imports are most of the time of a short run.
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hasten as L
from faults import TIMEOUT_SECONDS
from hasten.callbacks import ModelCheckpoint
from hasten.loggers import CSVLogger
from hasten.plugins import UploadedCheckpointIO
from hasten.strategies import DDPStrategy, MeshStrategy

PROCESSES, STEPS, EVERY, FAULT_STEP = 4, 22, 3, 11
PATIENCE_SECONDS = 600.0
STRATEGIES = ("ddp", "mesh")


class Fault(NamedTuple):
    """What goes wrong, and how the run has to end."""

    what: str
    code: int
    # A part of the output.
    says: str
    # The step at which the run ends.
    step: int = FAULT_STEP


FAULTS = {
    "killed": Fault("kill -9 of rank 2", 1, "process of rank 2"),
    "first killed": Fault("kill -9 of rank 0", 1, "process of rank 0"),
    "killed in a save": Fault("kill -9 of a rank that writes a checkpoint", 1, "process of rank [01]", 12),
    "stuck": Fault("rank 2 never arrives", 1, r"Ranks? [\d, ]*\b2\b[\d, ]* did not arrive"),
    "slow": Fault("rank 3 waits for its data", 0, "Rank 3 takes .* waits for data", STEPS),
    "full disk": Fault("no space for the next checkpoint", 1, "No space left|File too large", 12),
    "bucket": Fault("copies to a bucket that cannot be reached", 1, "only on this machine", STEPS),
    "bucket returns": Fault("the same, reached again later", 0, "tried again with the next checkpoint", STEPS),
    "bucket only": Fault("checkpoints in a bucket that goes away", 1, "does not answer", 12),
}


# -- the program, which each process runs


def train(name: str, strategy: str, folder: Path, *, resumes: bool) -> None:
    """Train to the end; the first process writes a digest of what the run ends with."""
    torch.set_num_threads(1)
    saved, away = folder / "checkpoints", folder / "away"

    class Bucket(DirFileSystem):
        """A folder that answers nothing while the file ``away`` is there."""

        protocol = "bucket"

        def __init__(self, **options: Any) -> None:
            super().__init__(str(folder / "bucket"), LocalFileSystem(auto_mkdir=True), **options)

        def _join(self, path: Any) -> Any:
            if away.exists():
                raise ConnectionError("the bucket does not answer")
            return super()._join(path)

    fsspec.register_implementation("bucket", Bucket, clobber=True)

    class Samples(Dataset[Any]):
        rank = 0

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            if name == "slow" and not resumes and self.rank == 3:
                time.sleep(0.25)
            x = torch.randn(8, generator=torch.Generator().manual_seed(index))
            return x, (x.sum() > 0).long()

    class Network(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = nn.functional.cross_entropy(self.layers(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Faults(L.Callback):
        """Make the fault happen; called before the callback that saves."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            Samples.rank = trainer.global_rank
            if resumes and trainer.is_global_zero:
                (folder / "resumed").write_text(str(trainer.global_step))

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            rank, step = trainer.global_rank, trainer.global_step
            if resumes:
                return
            if name == "bucket returns" and rank == 0 and step in (FAULT_STEP - EVERY, FAULT_STEP + EVERY):
                if step < FAULT_STEP:
                    away.touch()
                else:
                    time.sleep(0.5)  # Longer than both tries of an upload.
                    away.unlink()
            if step != FAULT_STEP:
                return
            if (name, rank) in (("killed", 2), ("first killed", 0)):
                kill_itself()
            elif name == "killed in a save" and rank == (0 if strategy == "ddp" else 1):
                os.fsync = kill_itself  # type: ignore[assignment]
            elif name == "stuck" and rank == 2:
                time.sleep(PATIENCE_SECONDS)
            elif name == "full disk":
                if not saved.is_mount():
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                elif rank == 0:
                    with suppress(OSError), open(saved / "filler", "wb", buffering=0) as file:
                        while file.write(bytes(4096)):
                            pass
                trainer.strategy.barrier()
            elif name == "bucket only" and rank == 0:
                away.touch()

    def digest(trainer: L.Trainer) -> str:
        found = [*trainer.lightning_module.parameters(), trainer.callback_metrics["loss"]]
        for state in trainer.optimizers[0].state_dict()["state"].values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in found]
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in whole)).hexdigest()

    timeout = timedelta(seconds=TIMEOUT_SECONDS if name == "stuck" else PATIENCE_SECONDS)
    plugins: list[Any] = []
    if name == "bucket" and not resumes:
        # The port of "discard", a service of the eighties.
        plugins = [UploadedCheckpointIO("ftp://127.0.0.1:9/run", tries=2, retry_seconds=0.1)]
    elif name == "bucket returns":
        plugins = [UploadedCheckpointIO("bucket://run", tries=2, retry_seconds=0.1)]
    L.seed_everything(5, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
        strategy=DDPStrategy(timeout=timeout)
        if strategy == "ddp"
        else MeshStrategy(replicate=2, shard=2, state_dict_type="sharded", timeout=timeout),
        max_steps=STEPS,
        callbacks=[
            Faults(),
            ModelCheckpoint(
                "bucket://run" if name == "bucket only" else saved,
                every_n_train_steps=EVERY,
                save_last=True,
            ),
        ],
        plugins=plugins,
        logger=CSVLogger(folder / "logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Network(), DataLoader(Samples(), 2, shuffle=True), ckpt_path="last" if resumes else None)
    ends_with = digest(trainer)
    if trainer.is_global_zero:
        (folder / "digest").write_text(ends_with)


def kill_itself(*_: Any) -> None:
    """End this process as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


# -- the runs


def run(name: str, strategy: str, folder: Path, *, resumes: bool = False) -> tuple[int, str]:
    """Run the program; return the exit code of the first process that was not killed, and what all have written."""
    # As torchrun's agent, this process has the store, so it outlives each of them.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said, port = folder / "said", store.port
    processes = [
        get_context("fork").Process(target=one_process, args=(rank, port, said, name, strategy, folder, resumes))
        for rank in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + PATIENCE_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    output = said.read_text(encoding="utf-8", errors="replace")
    said.unlink()
    return next(process.exitcode or 0 for process in processes if process.exitcode != -signal.SIGKILL), output


def one_process(rank: int, port: int, said: Path, name: str, strategy: str, folder: Path, resumes: bool) -> None:
    """Run the program as one of the processes, as torchrun starts it."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "faults", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    train(name, strategy, folder, resumes=resumes)


def measured(name: str, strategy: str, expected: str) -> dict[str, Any]:
    """Return what one fault did, and what the resumed run ends with."""
    fault = FAULTS[name]
    folder = Path(tempfile.mkdtemp(prefix="scale-faults-"))
    saved = folder / "checkpoints"
    saved.mkdir()
    is_mounted = name == "full disk" and mounted(saved)
    try:
        began = time.monotonic()
        code, output = run(name, strategy, folder)
        seconds = time.monotonic() - began
        # The cause is taken away.
        (folder / "away").unlink(missing_ok=True)
        (saved / "filler").unlink(missing_ok=True)
        if name == "bucket returns":
            # What is in the bucket has to do.
            shutil.rmtree(saved)
        ended = (folder / "digest").read_text() if (folder / "digest").exists() else ""
        again, said_again = run(name, strategy, folder, resumes=True)
        resumed = int((folder / "resumed").read_text()) if (folder / "resumed").exists() else fault.step
        digest = (folder / "digest").read_text() if (folder / "digest").exists() else ""
    finally:
        if is_mounted:
            subprocess.run(["umount", saved], check=True)
        shutil.rmtree(folder)
    says = next((line.strip() for line in output.splitlines() if re.search(fault.says, line)), "")
    is_equal = again == 0 and digest == expected and ended in ("", expected)
    lost = fault.step - resumed
    return {
        "fault": name,
        "strategy": strategy,
        "lost": lost,
        "says": says.replace(str(folder), ""),
        "code": code,
        "equal": is_equal,
        "seconds": round(seconds, 1),
        "ok": is_equal and 0 <= lost <= EVERY and code == fault.code and bool(says),
        "output": f"{output}\n-- again, exit {again}\n{said_again}",
    }


def mounted(folder: Path) -> bool:
    """Mount a file system of two megabytes; return whether the system lets this process do so."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    return bool(shutil.which("mount")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


def undisturbed(strategy: str) -> str:
    """Return the digest of a run without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        code, output = run("none", strategy, Path(folder))
        if code:
            raise SystemExit(output)
        return Path(folder, "digest").read_text()


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the names of the cases to run")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--show", action="store_true", help="print the whole output of each run")
    given = parser.parse_args()
    rows = []
    for strategy in given.strategies:
        expected = undisturbed(strategy)
        for name in FAULTS:
            if given.only and given.only not in name:
                continue
            row = measured(name, strategy, expected)
            output = row.pop("output")
            rows.append(row)
            mark, equal = "ok " if row["ok"] else "BAD", "equal" if row["equal"] else "DIFFERS"
            figures = f"{row['seconds']:5.1f} s  exit {row['code']:3d}  lost {row['lost']}  {equal}"
            print(f"{mark} {name:16s} {strategy:4s} {figures}  {row['says'][:140]}", flush=True)
            if given.show or not row["ok"]:
                print(output)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if not all(row["ok"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
