"""MemorySnapshot: a fit that runs out of a GPU's memory says what was in it. The GPU is a fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.callbacks import MemorySnapshot, memory_snapshot
from tests.models import Classifier, loader, quiet
from tests.refusals import warned


class Memory:
    """Notes what would be recorded on a GPU, and writes a file where it would write a snapshot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool = True) -> None:
        self.calls: list[Any] = []
        monkeypatch.setattr(memory_snapshot, "is_cuda", lambda device: on_gpu)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump)

    def _record(self, enabled: str | None = "all", **options: Any) -> None:
        self.calls.append((enabled, options))

    def _dump(self, path: str) -> None:
        self.calls.append("dump")
        Path(path).write_text("snapshot")


class Failing(Classifier):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.error is not None:
            raise self.error
        return super().training_step(batch, batch_idx)


RECORDS, ENDS = ("all", {"max_entries": 50, "stacks": "python"}), (None, {})


def fit(tmp_path: Path, error: Exception | None) -> None:
    callback = MemorySnapshot(tmp_path / "snapshots", max_entries=50)
    trainer = quiet(callbacks=[callback], max_epochs=1)
    if error is None:
        trainer.fit(Failing(None), loader(16))
        return
    with pytest.raises(type(error)):
        trainer.fit(Failing(error), loader(16))


def test_a_fit_that_runs_out_of_memory_writes_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(monkeypatch)
    with caplog.at_level("WARNING", "hasten"):
        fit(tmp_path, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert memory.calls == [RECORDS, "dump", ENDS]
    path = tmp_path / "snapshots" / "memory_rank_0.pickle"
    assert path.read_text() == "snapshot"
    assert str(path) in caplog.text


@pytest.mark.parametrize("error", [None, KeyError("a mistake of the program's")])
def test_other_ends_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    memory = Memory(monkeypatch)
    fit(tmp_path, error)
    assert memory.calls == [RECORDS, ENDS]
    assert not (tmp_path / "snapshots").exists()


def test_a_snapshot_that_cannot_be_written_leaves_the_error_of_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    (tmp_path / "snapshots").write_text("a file where the folder should be")
    with warned(UserWarning, says=("MemorySnapshot", "memory_rank_0.pickle")):
        fit(tmp_path, torch.OutOfMemoryError("CUDA out of memory."))
    assert memory.calls == [RECORDS, ENDS]


def test_nothing_is_recorded_on_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, on_gpu=False)
    fit(tmp_path, torch.OutOfMemoryError("CUDA out of memory."))
    assert memory.calls == []


@pytest.mark.gpu
def test_a_gpu_writes_a_snapshot_that_torch_can_read(tmp_path: Path) -> None:
    import pickle

    class Large(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.empty(2**50, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    trainer = quiet(callbacks=[MemorySnapshot(tmp_path)], max_epochs=1, accelerator="gpu", devices=1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Large(), loader(16))
    snapshot = pickle.loads((tmp_path / "memory_rank_0.pickle").read_bytes())
    assert snapshot["segments"]
    assert any(entry["action"] == "oom" for trace in snapshot["device_traces"] for entry in trace)
