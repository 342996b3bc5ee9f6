"""``hasten.data.preload``: one copy of the data on a machine, for all processes, with nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from hasten.data import ResidentLoader, preload
from hasten.data.memory import shared
from hasten.data.memory.read import same
from hasten.data.memory.shared import _folder
from hasten.resolve import runtime
from hasten.strategies import DDPStrategy
from tests.models import Classifier, Numbered, quiet
from tests.programs import call_in_file

ROOT = Path(__file__).resolve().parents[2]

FORK = multiprocessing.get_context("fork")

# A program of its own that was handed a dataset, and has another one.
PROGRAM = """
import pickle, sys
import torch
from torch.utils.data import TensorDataset
from hasten.data import preload
handed = pickle.load(open(sys.argv[1], "rb"))
assert handed[1][0].tolist() == [1.0, 1.0]
handed.columns.leaves[0][2] = 5.0
own = preload(TensorDataset(torch.zeros(4)))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _a_job_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HASTEN_JOB", f"{tmp_path.name}-{os.getpid()}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))


class Made(Dataset[Any]):
    classes = ("no", "yes")

    def __init__(self, samples: int = 9) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return {"ids": torch.arange(index % 3), "text": "a" * index, "label": index}


class Keeping(Made):
    """Keeps the number of the sample that it has read."""

    def __getitem__(self, index: int) -> Any:
        self.latest = index
        return super().__getitem__(index)


class Noted(Dataset[Any]):
    """Notes each time a sample is read, and takes its time for it."""

    def __init__(self, reads: Path, seconds: float = 0.0) -> None:
        self.reads, self.seconds = reads, seconds

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        with open(self.reads, "a", encoding="utf-8") as file:
            file.write(f"{index}\n")
        return torch.full((10,), float(index)), index


class Peer:
    """A process that preloads the data by itself and then follows orders."""

    def __init__(self, data: Any) -> None:
        self._orders, theirs = FORK.Pipe()
        self.process = FORK.Process(target=self._live, args=(data, theirs))
        self.process.start()

    def _live(self, data: Any, orders: Any) -> None:
        held = preload(data)
        orders.send("ready")
        while True:
            name, *arguments = orders.recv()
            if name == "write":
                held.columns.leaves[0][arguments[0]] = arguments[1]
            orders.send(held[arguments[0]][0][0].item())

    def waits(self) -> str:
        return str(self._orders.recv())

    def does(self, *order: Any) -> float:
        self._orders.send(order)
        return float(self._orders.recv())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def own_files() -> list[Path]:
    return [path for path in _folder().iterdir() if path.name.startswith(os.environ["HASTEN_JOB"])]


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(torch.rand(7, 3), torch.arange(7)),
        [(torch.full((2,), float(i)).bfloat16(), i, i / 2, i % 2 == 0) for i in range(5)],
        Made(),
        [torch.arange(i) for i in range(4)],
    ],
    ids=["tensors", "alike", "mixed", "ragged"],
)
def test_samples_are_those_of_the_dataset(data: Any) -> None:
    held = preload(data)
    assert len(held) == len(data)
    assert same([held[i] for i in range(len(held))], [data[i] for i in range(len(data))])
    assert same(held[-1], data[len(data) - 1])
    with pytest.raises(IndexError):
        held[len(data)]
    again = pickle.loads(pickle.dumps(held))
    assert same([again[i] for i in range(len(held))], [data[i] for i in range(len(data))])


def test_the_dataset_is_read_once_and_its_samples_are_copies() -> None:
    data = Keeping(6)
    held = preload(data)
    assert preload(data) is preload(held) is held
    assert held.classes == ("no", "yes")
    held = preload(TensorDataset(torch.ones(3, 2)))
    held[0][0].zero_()
    assert held[0][0].tolist() == [1.0, 1.0]
    child = os.fork()
    if not child:
        held.columns.leaves[0][1] = 5.0
        os._exit(0)
    os.waitpid(child, 0)
    assert held[1][0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0, 1, 2, 8], [0, 3, 4, 8]),
        # Of so many indices, the attributes of a dataset show every second one.
        ([*range(10_002)], [0, 3, 2, 1, *range(4, 10_002)]),
    ],
    ids=["folds", "long"],
)
def test_parts_of_a_dataset_with_equal_ends_have_their_own_samples(one: list[int], other: list[int]) -> None:
    kept = [preload(Subset(range(10_002), indices)) for indices in (one, other)]  # type: ignore[arg-type]
    assert [[held[place] for place in range(4)] for held in kept] == [one[:4], other[:4]]


def test_tensors_with_equal_ends_have_their_own_samples() -> None:
    kept = [preload(TensorDataset(torch.tensor([0, inside, 0]))) for inside in (1, 2)]
    assert [held[1][0].item() for held in kept] == [1, 2]


def test_a_reading_that_fails_leaves_nothing() -> None:
    class Broken(Made):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("broken sample")

    with pytest.raises(ValueError, match="broken sample"):
        preload(Broken())
    assert own_files() == []


def test_processes_that_come_by_themselves_share_and_one_reads(tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    peers = [Peer(Noted(reads)) for _ in range(2)]
    try:
        assert [peer.waits() for peer in peers] == ["ready", "ready"]
        # A few samples more than once, to see whether they are random and which dataset it is.
        assert 300 <= len(reads.read_text().split()) < 630  # One process reads each sample twice.
        assert peers[0].does("write", 7, -2.0) == -2.0
        assert peers[1].does("read", 7) == -2.0
        for survivor in (1, 0):
            peers[1 - survivor].kill()
            if survivor:  # One is killed: the other still has the data.
                assert peers[1].does("read", 7) == -2.0
    finally:
        for peer in peers:
            peer.kill()
    # Memory without a name is gone with its processes, and what told of it is swept away by the next who looks.
    assert not list(Path("/dev/shm").glob("*hasten*"))
    assert own_files() == []


def test_another_process_reads_when_the_first_is_killed_in_the_middle(tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    first = Peer(Noted(reads, seconds=0.01))
    deadline = time.monotonic() + 600
    while not reads.exists() or len(reads.read_text().split()) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = Peer(Noted(reads))
    first.kill()
    try:
        assert second.waits() == "ready"
        assert second.does("read", 7) == 7.0
    finally:
        second.kill()


def test_what_a_dead_process_left_does_not_part_those_who_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one waits for the lock, another removes the file as left behind: both still meet at one file."""
    path = tmp_path / "left.json"
    path.write_text("{}")
    flock, waited = shared.fcntl.flock, []

    def removed_meanwhile(file: Any, operation: int) -> None:
        flock(file, operation)
        if not waited:
            waited.append(path.unlink())

    monkeypatch.setattr(shared.fcntl, "flock", removed_meanwhile)
    with shared._locked(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
    assert waited


def test_a_program_of_its_own_attaches_and_leaves_nothing(tmp_path: Path) -> None:
    held = preload(TensorDataset(torch.ones(3, 2)))
    mine = own_files()
    (tmp_path / "handed").write_bytes(pickle.dumps(held))
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "handed")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    assert held[2][0].tolist() == [5.0, 5.0]
    assert len(own_files()) == 2
    program.communicate()
    assert program.returncode == 0
    assert own_files() == mine


@pytest.mark.world_size(2)
def test_processes_of_a_run_train_on_one_copy_of_the_data(tmp_path: Path) -> None:
    held = preload(Numbered())
    seen: list[int] = []

    class Seeing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[2].tolist())
            return super().training_step(batch[:2], batch_idx)

    trainer = quiet(devices=2, strategy="ddp", resident=True)
    trainer.fit(Seeing(), DataLoader(held, 4, shuffle=True))
    assert isinstance(trainer.train_dataloader, ResidentLoader)
    parts: list[Any] = [None, None]
    torch.distributed.all_gather_object(parts, seen)
    assert sorted(parts[0] + parts[1]) == list(range(40))
    # Not a copy: what one writes into the tensor of the loader, the other reads there.
    column = trainer.train_dataloader.dataset._hasten_data.leaves[0]
    if trainer.global_rank == 0:
        column.fill_(7.0)
    torch.distributed.barrier()
    assert bool((column == 7.0).all())
    assert held[3][0].tolist() == [7.0] * 8


def reads_in_its_own_process(reads: Path) -> None:
    held = preload(Noted(reads))
    torch.distributed.barrier()
    assert held[3][0].tolist() == [3.0] * len(held[3][0])


def test_copies_of_a_program_that_held_nothing_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the fork server was started before this job had a name."""
    multiprocessing.get_context("forkserver").Process(target=os.getpid).start()
    monkeypatch.delenv("HASTEN_JOB")
    reads = tmp_path / "reads"
    runtime(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="forkserver")).launch(
        call_in_file, __file__, "reads_in_its_own_process", reads
    )
    assert 300 <= len(reads.read_text().split()) < 630  # One process reads each sample twice.
