"""``num_workers="auto"``: what is chosen, what it leaves behind, what it refuses."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from multiprocessing import Value
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hasten as L
from hasten.data import auto_workers, with_workers
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused

read = Value("i", 0)


class Slow(Dataset[Any]):
    """Samples for which a disk is waited for; counts in all processes how many were read, and here in this one."""

    def __init__(self, milliseconds: float, samples: int = 4000) -> None:
        self.milliseconds, self.samples = milliseconds, samples
        self.here = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        read.value += 1
        self.here += 1
        random.random(), np.random.rand(), torch.rand(1)
        time.sleep(self.milliseconds / 1000)
        return torch.full((8,), float(index)), torch.tensor(index % 2)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(8), torch.tensor(1))] * 8)


class Broken(Slow):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise KeyError("no such file")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def forks() -> Iterator[None]:
    """Have workers begin as copies of this process: they count in the memory that it reads, and start at once."""
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(usual, force=True)


@pytest.mark.usefixtures("forks")
def test_workers_that_wait_for_a_disk_pay_and_leave_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(1)
    data = Slow(10.0)
    given = DataLoader(data, 8, shuffle=True, generator=generator)
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), generator.get_state())
    found = auto_workers(given, seconds=0.6)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), generator.get_state()
    assert found.num_workers >= 2
    assert given.num_workers == 0
    assert states[:2] == after[:2]
    assert all(map(torch.equal, states[2:], after[2:]))
    assert data.here == 0
    assert read.value > 0
    (line,) = caplog.messages
    assert f"num_workers={found.num_workers}" in line


def test_what_was_found_is_remembered_for_the_same_data_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    measured: list[Any] = []

    def measure(loader: Any, *rest: Any) -> Any:
        measured.append(loader.dataset.milliseconds)
        return {0: 100.0, 5: 10.0}, ""

    def found(milliseconds: float) -> DataLoader[Any]:
        data: Any = Slow(milliseconds)
        data.dataset = 3  # A name of its own.
        return auto_workers(DataLoader(data, 4))

    monkeypatch.setattr("hasten.data.worker_count.measure", measure)
    assert [found(each).num_workers for each in (5.0, 5.0, 0.0)] == [5, 5, 5]
    assert measured == [5.0, 0.0]
    for path in (cache / "workers").iterdir():
        path.write_text("{")  # Cut short by a full disk.
    several = found(5.0)
    assert measured == [5.0, 0.0, 5.0]
    # More workers than cores, and no word of torch's about it: they were seen to pay.
    iter(several)
    assert not [each for each in recwarn if "worker processes" in str(each.message)]


@pytest.mark.parametrize("data", [DataLoader(Endless()), [1, 2]])
def test_what_can_have_no_other_workers_is_refused(data: Any) -> None:
    with refused(TypeError, "num_workers", fix="num_workers='auto'"):
        auto_workers(data)
    with refused(TypeError, "num_workers", fix="num_workers='auto'"):
        quiet(num_workers="auto").fit(Classifier(), data)
    assert auto_workers(data, stage="validate") is data


def test_what_fails_is_reported_by_the_run() -> None:
    with pytest.raises(KeyError, match="no such file"):
        quiet(num_workers="auto").fit(Classifier(), DataLoader(Broken(0.0), 4))
    with refused(TypeError, "num_workers", fix="num_workers=2"):
        quiet(num_workers=2).fit(Classifier(), list(loader(8)))
    quiet(num_workers=0).fit(Classifier(), list(loader(8)))


def test_a_worker_that_runs_the_program_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with refused(RuntimeError, "num_workers", fix='if __name__ == "__main__":'):
        auto_workers(DataLoader(Slow(0.0)))


def test_a_number_changes_neither_weights_nor_the_loader() -> None:
    modules, used = [], []
    for workers in (None, 2):
        torch.manual_seed(0)
        module = Classifier()
        trainer = quiet(num_workers=workers)
        trainer.fit(module, loader(shuffle=True))
        used.append(trainer.train_dataloader.num_workers)
        modules.append(module)
    assert used == [0, 2]
    assert same_weights(*modules)
    kind = type("Own", (DataLoader,), {})
    given = kind(Slow(0.0, samples=400), 4, num_workers=2, persistent_workers=True, timeout=600)
    none = with_workers(given, 0)
    assert (type(none), len(list(none)), given.num_workers) == (kind, 100, 2)
    fabric = L.Fabric(accelerator="cpu", devices=1)
    assert len(list(fabric.setup_dataloaders(auto_workers(loader())))) == 10


def test_an_epoch_goes_on_with_the_number_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(seconds: dict[int, float]) -> None:
        monkeypatch.setattr("hasten.data.worker_count.measure", lambda *_: (seconds, ""))
        monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / str(len(seconds))))  # As on another machine.

    def trained(**options: Any) -> Classifier:
        torch.manual_seed(3)
        module = Classifier()
        trainer = quiet(max_steps=options.pop("max_steps"), num_workers="auto")
        data = DataLoader(Slow(0.0, samples=64), 8, shuffle=True)
        trainer.fit(module, data, **options)
        if "ckpt_path" not in options:
            trainer.save_checkpoint(tmp_path / "middle.ckpt")
        used.append(trainer.train_dataloader.num_workers)
        return module

    used: list[int] = []
    measured({0: 1.0, 2: 0.1})
    trained(max_steps=3)
    measured({0: 1.0})
    trained(max_steps=5, ckpt_path=tmp_path / "middle.ckpt")
    assert used == [2, 2]
