"""Kill training runs at random moments, look at what they leave, resume them, and compare them with undisturbed runs.

    python benchmarks/kills.py                 # 1,000 kills
    python benchmarks/kills.py --kills 20
    python benchmarks/kills.py --only sharded --json kills.json

A run saves a checkpoint after each step. One of its processes, or all of them, is killed with SIGKILL: most often in
the middle of training or of a save, sometimes while it starts. Then each checkpoint that is there must be whole, equal
to the one that an undisturbed run had at this step (weights, optimizer, schedulers, what hooks keep), and the newest
not older than before. The run is resumed, and killed again, until it ends. Each step must have the samples and the loss
of the undisturbed run.

Processes that have lost one of them must end by themselves, within two minutes: that is much, for a busy machine. Only
while a run starts, before each of its processes has made a step, are the others ended here, as launchers do.

Processes are forked from one that has imported everything, because most of a start is imports.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten._lib.files import SET_ASIDE, TEMPORARY
from hasten.callbacks import ModelCheckpoint
from hasten.checkpoint import background, files
from hasten.machine.cluster import find_free_port
from hasten.machine.collectives import leave
from hasten.plugins import AsyncCheckpointIO
from hasten.strategies import FSDPStrategy

STEPS, SAMPLES, BATCH, WIDTH = 24, 48, 4, 128
# Processes that have lost one of them end within this time, also on a busy machine.
PATIENCE_SECONDS = 120.0
# Before its processes have met, a run has no way to know that one will not come: launchers end the others.
START_SECONDS = 1.0


@dataclass(frozen=True)
class Kind:
    """One kind of run.

    Args:
        share: of all kills.
        processes: how many train together.
        sharded: FSDP, which writes folders; else files.
        background: a thread writes the checkpoints.
        hooks: the model's hooks change it while it trains, and keep state of their own in its checkpoints.

    """

    share: float
    processes: int = 1
    sharded: bool = False
    background: bool = False
    hooks: bool = True


KINDS = {
    "one process, without hooks": Kind(0.2, hooks=False),
    "one process": Kind(0.2),
    "one process, saved in the background": Kind(0.2, background=True),
    "two processes": Kind(0.15, 2),
    "two processes, sharded folders": Kind(0.1, 2, sharded=True),
    "two processes, sharded folders, saved in the background": Kind(0.1, 2, sharded=True, background=True),
    "four processes, sharded folders, saved in the background": Kind(0.05, 4, sharded=True, background=True),
}


@dataclass
class Found:
    """What came out of the kills of a kind."""

    kills: int = 0
    within_a_save: int = 0
    torn: int = 0
    resumed_exactly: int = 0
    hung: int = 0
    slowest_end_seconds: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Model(L.LightningModule):
    """A classifier with dropout, whose samples and losses are noted."""

    def __init__(self, trace: Path) -> None:
        super().__init__()
        self.trace = trace
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, numbers = batch
        hidden = self.dropout(torch.relu(self.second(torch.relu(self.first(x)))))
        loss = nn.functional.cross_entropy(self.last(hidden), y) * self.factor()
        # In one call, which a kill does not cut.
        line = json.dumps([self.global_step, numbers.tolist(), float(loss)]) + "\n"
        descriptor = os.open(f"{self.trace}-{self.global_rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)
        return loss

    def factor(self) -> Any:
        return 1.0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Hooked(Model):
    """Keeps state in its checkpoints by hooks, and freezes, weighs and drops as its hooks say."""

    def __init__(self, trace: Path) -> None:
        super().__init__(trace)
        self.seen: list[int] = []
        self.mean, self.weight = torch.zeros(2), 1.0

    def factor(self) -> Any:
        return self.weight + self.mean.sum() / 100 + len(self.seen) / 1000

    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 + self.current_epoch
        if self.trainer.world_size == 1:
            # Gradients that are divided or averaged need all parameters.
            self.first.requires_grad_(self.current_epoch != 1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The same on all ranks: the first one saves it.
        self.seen.append(batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * torch.tensor([batch_idx, self.current_epoch])
        if batch_idx == 2:
            self.dropout.p = 0.1 + 0.1 * self.current_epoch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"seen": list(self.seen), "mean": self.mean.clone()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen, self.mean = list(checkpoint["kept"]["seen"]), checkpoint["kept"]["mean"]


class Slows(L.Callback):
    """Lowers the learning rate after some steps that it has counted itself."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.count += 1
        if self.count % 5 == 0:
            trainer.optimizers[0].param_groups[0]["weight_decay"] *= 1.5

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train(kind: Kind, folder: Path, rank: int, port: int, *, keep_all: bool) -> None:
    """Train as one of the processes of a run, from its last checkpoint on."""
    if kind.processes > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": kind.processes, "LOCAL_WORLD_SIZE": kind.processes}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="kills")
    if kind.background:
        background.LARGE_BYTES = 0
    L.seed_everything(5, verbose=False)
    x = torch.randn(SAMPLES, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(SAMPLES))
    saves = ModelCheckpoint(
        folder / "saved", "{step}", save_last=True, every_n_train_steps=1, save_top_k=-1 if keep_all else 1
    )
    model = (Hooked if kind.hooks else Model)(folder / "trace")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=kind.processes,
        strategy=strategy_of(kind),
        plugins=[AsyncCheckpointIO()] if kind.sharded and kind.background else None,
        max_steps=STEPS,
        callbacks=[saves, *([Slows()] if kind.hooks else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, BATCH, shuffle=True), ckpt_path="last")


def strategy_of(kind: Kind) -> Any:
    """Return the strategy of a kind of run."""
    if kind.sharded:
        return FSDPStrategy(state_dict_type="sharded")
    return "ddp" if kind.processes > 1 else "auto"


def start(kind: Kind, folder: Path, *, keep_all: bool = False) -> list[int]:
    """Fork the processes of a run; return their ids."""
    port = find_free_port() if kind.processes > 1 else 0
    children = []
    for rank in range(kind.processes):
        child = os.fork()
        if not child:
            code = 1
            try:
                output = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                # Where a process stands that does not end.
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                train(kind, folder, rank, port, keep_all=keep_all)
                code = 0
            except BaseException as error:  # the process ends here, whatever it is
                print(repr(error), file=sys.stderr)
            finally:
                sys.stderr.flush()
                # As at the end of any program.
                leave()
                os._exit(code)
        children.append(child)
    return children


def wait(children: list[int], seconds: float) -> list[int | None]:
    """Return the exit codes of processes, None for those that do not end in time, which are killed."""
    until = time.monotonic() + seconds
    codes: dict[int, int | None] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until:
                    os.kill(child, signal.SIGUSR1)
                    time.sleep(0.2)
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    codes[child] = None
        time.sleep(0.001)
    return [codes[child] for child in children]


def has_ended(child: int) -> bool:
    """Return whether a process has ended; ``wait`` still returns its code."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_until(happens: Callable[[], bool], children: list[int]) -> None:
    """Wait until something happens, or a process has ended."""
    limit = time.monotonic() + 300.0
    while not happens() and not any(map(has_ended, children)) and time.monotonic() < limit:
        # Not more often: the processes need the cores that this one would take.
        time.sleep(0.001)


def digest_of(path: Path) -> tuple[int, str]:
    """Return the step of a checkpoint, and a digest of what it holds; raise if it is not whole."""
    files.verify(path)
    contents: Any = files.load(path)
    contents = contents.whole() if path.is_dir() else contents
    kept = {name: contents[name] for name in ("state_dict", "optimizer_states", "lr_schedulers")}
    kept["hooks"] = (
        contents.get("kept"),
        [state for name, state in contents["callbacks"].items() if not name.startswith("ModelCheckpoint")],
    )
    found = hashlib.sha256()
    for part in parts(kept):
        found.update(part)
    return int(contents["global_step"]), found.hexdigest()


def parts(value: Any) -> Iterator[bytes]:
    """Yield what nested values consist of."""
    if isinstance(value, torch.Tensor):
        yield value.detach().contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for name, each in sorted(value.items(), key=lambda item: str(item[0])):
            yield repr(name).encode()
            yield from parts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from parts(each)
    else:
        yield repr(value).encode()


def trace_of(folder: Path) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield what each process noted at each step."""
    for file in sorted(folder.glob("trace-*")):
        for line in file.read_text(encoding="utf-8").splitlines():
            step, *noted = json.loads(line)
            yield (file.name, step), noted


class Runs:
    """Runs of a kind that are killed.

    Args:
        kind: what they are.
        home: an empty folder.
        chance: decides when, and whom.

    """

    def __init__(self, kind: Kind, home: Path, chance: random.Random) -> None:
        self.kind, self.home, self.chance, self.found = kind, home, chance, Found()
        self.within_a_save = False
        folder = home / "undisturbed"
        folder.mkdir()
        began = time.monotonic()
        codes = wait(start(kind, folder, keep_all=True), 300.0)
        assert set(codes) == {0}, (codes, (folder / "errors-0").read_text(encoding="utf-8")[-3000:])
        self.seconds = time.monotonic() - began
        self.digests = dict(map(digest_of, self.checkpoints(folder)))
        self.trace = dict(trace_of(folder))
        assert len(self.digests) == STEPS

    @staticmethod
    def checkpoints(folder: Path) -> list[Path]:
        """Return the checkpoints that are there."""
        return sorted((folder / "saved").glob("*.ckpt"))

    def kill(self, kills: int) -> None:
        """Kill runs so many times, and resume each to its end."""
        began, number = time.monotonic(), 0
        while self.found.kills < kills:
            folder = self.home / f"run-{number}"
            folder.mkdir()
            number += 1
            before = len(self.found.problems)
            self.run(folder, kills)
            if len(self.found.problems) == before:
                shutil.rmtree(folder)
        self.found.seconds = time.monotonic() - began

    def run(self, folder: Path, kills: int) -> None:
        """Kill one run and resume it, until it has ended."""
        newest, resumed = 0, False
        while True:
            children, noted = start(self.kind, folder), self.noted(folder)
            killed = self.found.kills < kills and self.kill_one(children, folder)
            has_begun = all(map(int.__lt__, noted, self.noted(folder)))
            began = time.monotonic()
            codes = wait(children, 300.0 if not killed else PATIENCE_SECONDS if has_begun else START_SECONDS)
            # It may have ended just before.
            killed = killed and -signal.SIGKILL in codes
            self.found.kills += killed
            self.found.within_a_save += killed and self.within_a_save
            newest, problems = self.look(folder, newest)
            if killed and has_begun:
                self.found.slowest_end_seconds = max(self.found.slowest_end_seconds, time.monotonic() - began)
                hung = [rank for rank, code in enumerate(codes) if code is None]
                self.found.hung += bool(hung)
                problems += [
                    f"rank {rank} did not end when another was killed ({codes}):\n"
                    + (folder / f"errors-{rank}").read_text(encoding="utf-8")[-6000:]
                    for rank in hung
                ]
            if not killed and (set(codes) != {0} or newest != STEPS):
                problems.append(f"a run that was not killed ended with {codes} at step {newest}")
            if not killed and self.has_unfinished_files(folder):
                problems.append("files of a save that was killed are left")
            self.found.problems += [f"{folder}: {problem}" for problem in problems]
            # What was killed before has gone on as it should.
            self.found.resumed_exactly += resumed and not problems
            if problems or not killed:
                return
            resumed = True

    @staticmethod
    def has_unfinished_files(folder: Path) -> bool:
        """Return whether a save was cut short."""
        names = [path.name for path in (folder / "saved").glob("*")]
        return any(name.endswith((TEMPORARY, SET_ASIDE)) for name in names)

    def kill_one(self, children: list[int], folder: Path) -> bool:
        """Kill one process, or all, at a random moment; return False if the run ended before."""
        chance, noted = self.chance.random(), self.noted(folder)
        if chance < 0.1:
            time.sleep(self.chance.uniform(0.0, self.seconds / 4))
        else:
            wait_until(lambda: self.noted(folder) != noted, children)
            time.sleep(self.chance.uniform(0.0, self.seconds / 3))
        if chance > 0.5:
            # In the middle of a save, more often than chance would.
            wait_until(lambda: self.has_unfinished_files(folder), children)
        if all(map(has_ended, children)):
            return False
        for child in children if self.chance.random() < 0.3 else [self.chance.choice(children)]:
            os.kill(child, signal.SIGKILL)
        # Processes that go on remove what they cannot finish.
        self.within_a_save = self.has_unfinished_files(folder)
        return True

    def noted(self, folder: Path) -> list[int]:
        """Return how much each process has noted about steps."""
        files = [folder / f"trace-{rank}" for rank in range(self.kind.processes)]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def look(self, folder: Path, newest: int) -> tuple[int, list[str]]:
        """Return the newest step that was saved, and what differs from the undisturbed run."""
        found, steps = [], [0]
        for path in self.checkpoints(folder):
            try:
                step, digest = digest_of(path)
            except Exception as error:  # whatever reading it raises, it is not whole
                self.found.torn += 1
                found.append(f"{path.name}: {error!r}")
                continue
            steps.append(step)
            if digest != self.digests[step]:
                found.append(f"{path.name}: differs at step {step}")
        if max(steps) < newest:
            found.append(f"step {max(steps)} is the newest, and {newest} was there before")
        differ = sorted({step for (name, step), noted in trace_of(folder) if self.trace[name, step] != noted})
        return max(steps), found + ([f"other samples or losses at steps {differ}"] if differ else [])


def main() -> None:
    """Kill as the command line says, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--only", default="", help="a part of the names of the kinds of runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="kinds of runs that are killed side by side")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    print(shlex.join(["python", *sys.argv]), flush=True)
    warnings.simplefilter("ignore")
    logging.getLogger("hasten").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    kinds = {name: kind for name, kind in KINDS.items() if given.only in name}
    prepare(kinds)
    shares = sum(kind.share for kind in kinds.values())
    rows: dict[str, Found] = {}
    print("| runs | kills | within a save | torn | resumed bit-exact | hung | slowest end, s | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    counts = [max(1, round(given.kills * kind.share / shares)) for kind in kinds.values()]
    # Forked, as the runs are: each has what is imported here.
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("fork")) as processes:
        done = processes.map(runs_that_are_killed, kinds, counts, itertools.repeat(given.seed))
        for name, found in zip(kinds, done, strict=True):
            rows[name] = found
            print(
                f"| {name} | {found.kills:,} | {found.within_a_save:,} | {found.torn} | "
                f"{found.resumed_exactly:,} | {found.hung} | {found.slowest_end_seconds:.1f} | {found.seconds:.0f} |",
                flush=True,
            )
            for problem in found.problems:
                print(problem, file=sys.stderr)
    if given.json:
        given.json.write_text(json.dumps({name: asdict(found) for name, found in rows.items()}, indent=1) + "\n")
    sys.exit(any(found.problems for found in rows.values()))


def runs_that_are_killed(name: str, kills: int, seed: int) -> Found:
    """Kill runs of a kind so many times; return what came out."""
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as home:
        runs = Runs(KINDS[name], Path(home), random.Random(f"{seed} {name}"))
        runs.kill(kills)
    return runs.found


def prepare(kinds: dict[str, Kind]) -> None:
    """Import what the runs need."""
    if any(kind.processes > 1 for kind in kinds.values()):
        import torch.nn.parallel.distributed
    if any(kind.sharded for kind in kinds.values()):
        import torch._dynamo
        import torch.distributed.fsdp  # noqa: F401
    with tempfile.TemporaryDirectory() as folder:
        train(Kind(0), Path(folder), 0, 0, keep_all=False)


if __name__ == "__main__":
    main()
