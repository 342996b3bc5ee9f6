"""How a run of two processes ends when one of them goes wrong: seconds from the fault to the end, exit code, message.

    python benchmarks/faults.py
    python benchmarks/faults.py --only "asleep" --launchers hasten

Each case is a program on two gloo processes, started by hasten (the program runs again) and by torchrun. Faults are
in rank 1. The clock starts with the fault; where a process only stays away, with the moment when it does, and the time
that the run was allowed to wait (``timeout``, 20 s, or ``grace``, 7 s) is given beside the seconds. A case without a
fault must end with exit code 0 and print what it prints on one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_SECONDS, GRACE_SECONDS = 20.0, 7.0
PATIENCE_SECONDS = 120.0


class Case(NamedTuple):
    """What goes wrong, and how the run has to end."""

    what: str
    # Allowed before the run may end.
    waits: float
    codes: tuple[int, ...]
    # Part of the output.
    says: str
    # The signal that both processes get while one of them is away.
    signal: int | None = None


CASES = {
    "logged on rank 0 only": Case("self.log(sync_dist=True) on rank 0", 0, (1,), "only_here"),
    "logged in another order": Case("x = 1 and y = 10, y first on rank 1", 0, (0,), r"x=1\.0 y=10\.0"),
    "exception": Case("an exception in training_step", 0, (1,), "KeyError|rank 1"),
    "killed": Case("kill -9", 0, (1,), "SIGKILL|Signal 9|signal 9"),
    "asleep": Case("time.sleep in training_step", TIMEOUT_SECONDS, (1,), "rank 1"),
    "asleep, SIGTERM": Case("asleep, then SIGTERM", GRACE_SECONDS, (143,), "rank 1", signal.SIGTERM),
    "asleep, Ctrl-C": Case("asleep, then Ctrl-C", GRACE_SECONDS, (130,), "rank 1", signal.SIGINT),
    "stuck in the loader": Case("a dataset that does not return", TIMEOUT_SECONDS, (1,), "rank 1"),
    "uneven: stop": Case("5 and 7 batches", 0, (0,), "steps=5"),
    "uneven: error": Case('5 and 7 batches, uneven="error"', 0, (1,), "5.*7|7.*5"),
    "iterable": Case("an IterableDataset of 22 samples", 0, (0,), "seen=22 of 22"),
    "one sample to test": Case("test on one sample", 0, (0,), r"loss=5\.0"),
    "other arguments": Case("max_epochs 1 and 3", 0, (1,), "max_epochs"),
    # Machines have ten minutes at least to come: the one that waits says for whom, and can be ended.
    "a node is missing": Case("num_nodes=2, one is started, then SIGTERM", 0, (143, -15), "waits at", signal.SIGTERM),
}


def program(case: str, clock: Path) -> None:
    """Run one case; each process calls it."""
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

    import hasten as L
    from hasten.strategies import DDPStrategy

    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))

    def fault() -> None:
        clock.write_text(repr(time.time()))

    def say(text: str) -> None:
        # In one piece: the other process writes to the same pipe.
        os.write(1, f"rank {rank}: {text}\n".encode())

    class Stuck(Dataset[Any]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Any:
            if rank == 1 and index > 200:
                fault()
                time.sleep(PATIENCE_SECONDS)
            return torch.ones(1) * index, torch.ones(1)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return ((torch.ones(1) * index, torch.ones(1)) for index in range(22))

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[float] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.seen += x.flatten().tolist()
            values = {"x": 1.0, "y": 10.0}
            for name in ("y", "x") if rank == 1 and case == "logged in another order" else ("x", "y"):
                self.log(name, values[name], sync_dist=True)
            if batch_idx == 20 and rank == (0 if case == "logged on rank 0 only" else 1):
                self._go_wrong()
            return (self.layer(x) - y).square().mean()

        def _go_wrong(self) -> None:
            if case == "logged on rank 0 only":
                fault()
                self.log("only_here", 1.0, sync_dist=True)
            elif case == "exception":
                fault()
                raise KeyError("a mistake of the user's")
            elif case == "killed":
                fault()
                os.kill(os.getpid(), signal.SIGKILL)
            elif case.startswith("asleep"):
                fault()
                time.sleep(PATIENCE_SECONDS)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 5.0, sync_dist=True)

    samples = 400
    if case.startswith("uneven"):
        samples = 5 if rank == 0 else 7
    loader: Any = DataLoader(TensorDataset(torch.ones(samples, 1), torch.ones(samples, 1)), 1)
    if case == "stuck in the loader":
        loader = DataLoader(Stuck(), 1)
    elif case == "iterable":
        loader = DataLoader(Stream(), 1)
    elif case == "one sample to test":
        loader = DataLoader(TensorDataset(torch.ones(1, 1), torch.ones(1, 1)), 1)
    options: dict[str, Any] = {"uneven": "error"} if case == "uneven: error" else {}
    epochs = 3 if rank == 1 and case == "other arguments" else 1
    if case in ("other arguments", "a node is missing", "uneven: error"):
        fault()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if case == "a node is missing" else 2,
        num_nodes=2 if case == "a node is missing" else 1,
        strategy=DDPStrategy(timeout=timedelta(seconds=TIMEOUT_SECONDS)),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=5,
        use_distributed_sampler=not case.startswith("uneven"),
        **options,
    )
    model = Model()
    if case == "one sample to test":
        say(f"loss={trainer.test(model, loader, verbose=False)[0]['loss']}")
        return
    trainer.fit(model, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if case == "iterable":
        seen = [number for part in trainer.strategy.gather_objects(model.seen) for number in part]
        say(f"seen={len(seen)} of {len(set(seen))}")
    else:
        say(f"steps={trainer.global_step} x={metrics['x']} y={metrics['y']}")


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def command(launcher: str, case: str, clock: Path) -> list[str]:
    own = [__file__, "--case", case, "--clock", str(clock)]
    if launcher == "hasten":
        return [sys.executable, *own]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *own]


def send_signal_when_due(number: int, process: subprocess.Popen[str], clock: Path) -> None:
    """Send a signal to the group of the process, as a terminal or a scheduler does, once the fault is there."""
    until = time.monotonic() + PATIENCE_SECONDS / 2
    while not clock.exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    time.sleep(2.0)
    clock.write_text(repr(time.time()))
    os.killpg(process.pid, number)


def run(launcher: str, name: str, case: Case) -> dict[str, Any]:
    """Return how one case ended."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Path(folder) / "clock"
        variables = environment()
        if name == "a node is missing":
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731", "NODE_RANK": "0"}
        process = subprocess.Popen(
            command(launcher, name, clock),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
            start_new_session=True,
        )
        if case.signal is not None:
            send_signal_when_due(case.signal, process, clock)
        try:
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        ended = time.time()
        began = float(clock.read_text()) if clock.exists() else None
    codes = case.codes if launcher == "hasten" or 0 in case.codes else (1, *case.codes)
    says = next((line for line in output.splitlines() if re.search(case.says, line)), "")
    return {
        "case": name,
        "launcher": launcher,
        "seconds": None if began is None else round(ended - began, 1),
        "waits": case.waits,
        "code": process.returncode,
        "ok": process.returncode in codes and bool(says),
        "says": says.strip(),
        "output": output,
    }


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the names of the cases to run")
    parser.add_argument("--launchers", nargs="+", default=["hasten", "torchrun"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print the whole output of each run")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--clock", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        program(arguments.case, arguments.clock)
        return
    print(shlex.join([Path(sys.executable).name, *sys.argv]))
    rows = []
    for name, case in CASES.items():
        if arguments.only and arguments.only not in name:
            continue
        for launcher in arguments.launchers:
            # torchrun does not start a program before all of its nodes are there.
            if name == "a node is missing" and launcher == "torchrun":
                continue
            row = run(launcher, name, case)
            rows.append(row)
            seconds = "" if row["seconds"] is None else f"{row['seconds']:5.1f} s"
            waits = f"(waits {case.waits:.0f})" if case.waits else ""
            mark = "ok " if row["ok"] else "BAD"
            print(
                f"{mark} {name:24s} {launcher:9s} {seconds:>8s} {waits:11s} exit {row['code']:4d}  {row['says'][:110]}",
                flush=True,
            )
            if arguments.show or not row["ok"]:
                print(row["output"])
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if not all(row["ok"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
