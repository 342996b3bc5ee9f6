"""Large checkpoints are written while the fit goes on, and nobody who asks for one finds less than a whole file."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import hasten as L
import hasten_lightning
from hasten.callbacks import LambdaCallback, ModelCheckpoint
from hasten.checkpoint import background, files
from hasten.loggers import CSVLogger
from hasten.plugins import AsyncCheckpointIO, TorchCheckpointIO
from hasten.record import history
from hasten.strategies import SingleDeviceStrategy
from tests.callbacks.scripted import names
from tests.loggers.test_several import Uploads
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned


class Large(L.LightningModule):
    """More than 50 MB with the state of its optimizer; two names share one tensor."""

    def __init__(self, size: int = 4_500_000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.tied = self.weight
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("loss", loss := self.layer(batch).mean() + self.weight[:8].sum())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", -float(self.trainer.global_step))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Writes:
    """What the thread writes, in order; a file that ``held`` names waits until it is let go."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.held: dict[str, threading.Event] = {}
        self.fails: dict[str, Exception] = {}
        self.delay = 0.0
        self._save = background.save_unchecked

    def hold(self, name: str) -> threading.Event:
        return self.held.setdefault(name, threading.Event())

    def __call__(self, contents: dict[str, Any], path: Any, **options: Any) -> None:
        name = os.path.basename(path)
        self.seen.append(f"begins {name}")
        if name in self.held:
            assert self.held[name].wait(20)
        time.sleep(self.delay)
        if name in self.fails:
            raise self.fails[name]
        self._save(contents, path, **options)
        self.seen.append(f"ends {name}")


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Have files of any size written in the background, and return what is written there."""
    made = Writes()
    monkeypatch.setattr(background, "save_unchecked", made)
    monkeypatch.setattr(background, "LARGE_BYTES", 0)
    return made


def fit(*callbacks: L.Callback, module: L.LightningModule | None = None, **arguments: Any) -> L.Trainer:
    """Fit on four batches an epoch, with validation."""
    defaults = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = quiet(callbacks=list(callbacks), **(defaults | arguments))
    batches = [torch.ones(1, 2) for _ in range(4)]
    trainer.fit(Large(10) if module is None else module, batches, batches[:1])
    return trainer


def at_step(step: int, action: Callable[[], object]) -> L.Callback:
    """Return a callback that calls ``action`` when a step has ended, before checkpoints are saved."""

    def act(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == step:
            action()

    return LambdaCallback(on_train_batch_end=act)


# -- what is written


@pytest.mark.parametrize("options", [{"save_last": True}, {"save_last": "link", "monitor": "val_loss"}])
def test_files_are_the_same_as_those_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    # The history has the time of each row.
    monkeypatch.setattr(history, "time", SimpleNamespace(time=lambda: 0.0))

    def files_of(**arguments: Any) -> dict[str, str]:
        L.seed_everything(1)
        fit(ModelCheckpoint(tmp_path / "a", "{step}", **options), module=Large(), max_epochs=2, **arguments)
        found = {name: tmp_path / "a" / name for name in names(tmp_path / "a")}
        assert all(path.stat().st_size > 50_000_000 for path in found.values())
        digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
        shutil.rmtree(tmp_path / "a")
        return digests

    at_once = files_of(plugins=TorchCheckpointIO())
    assert sorted(at_once) == ["last.ckpt", "step=8.ckpt"]
    assert files_of() == at_once


def test_a_copy_is_written_as_the_original(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = OrderedDict(weight=base[:6].view(2, 3), transposed=base.view(4, 6).t(), whole=base)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    values = [1, 2]
    contents = {
        "state_dict": state,
        "empty": [torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0)],
        "kinds": (torch.tensor(True), torch.ones(3, dtype=torch.bfloat16), torch.tensor(1j), torch.tensor(7)),
        "parameters": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)],
        "gradient": torch.ones(2, requires_grad=True),
        "same": [values, values, base, base],
        "numpy": {"array": np.arange(3), "number": np.float32(2.5)},
        "others": {"size": torch.Size([1]), "type": torch.float16, "bytes": bytearray(b"x"), 3: (1, "a", None)},
    }
    with torch.inference_mode():
        contents["inference"] = torch.ones(2)
        copies = background.HostCopies()
        copied = copies.of(contents)
    assert copied is not None
    files.save(contents, tmp_path / "a.ckpt")
    before = {name: tensor.clone() for name, tensor in state.items()}
    base.fill_(-1.0)
    values.append(3)
    files.save(copied.contents, tmp_path / "b.ckpt")
    assert (tmp_path / "a.ckpt").read_bytes() == (tmp_path / "b.ckpt").read_bytes()
    # The memory is used again, for contents that have grown too.
    first = copied.contents["state_dict"]["whole"].data_ptr()
    copies.forget_sources()
    again = copies.of(contents)
    assert again is not None
    assert again.contents["state_dict"]["whole"].data_ptr() == first
    assert not torch.equal(again.contents["state_dict"]["whole"], before["whole"])
    copies.forget_sources()
    larger = copies.of({**contents, "more": torch.ones(1000)})
    assert larger is not None
    assert torch.equal(larger.contents["more"], torch.ones(1000))


@pytest.mark.parametrize("what", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), len])
def test_what_cannot_be_copied_to_the_last_bit_is_not(what: object) -> None:
    assert background.HostCopies().of({"weight": torch.ones(2), "what": what}) is None


def test_what_is_not_copied_to_the_last_bit_is_still_of_the_moment_of_the_save(tmp_path: Path) -> None:
    held = threading.Event()

    class Held(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            held.wait(20)
            super().save_checkpoint(*args, **options)

    contents: dict[str, Any] = {"weight": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "epochs": [1]}
    plugin = AsyncCheckpointIO(Held())
    plugin.save_checkpoint(contents, tmp_path / "a.ckpt")
    contents["weight"].zero_()
    contents["epochs"].append(2)
    held.set()
    plugin.teardown()
    saved = files.load(tmp_path / "a.ckpt")
    assert (saved["weight"].tolist(), saved["epochs"]) == ([1.0, 1.0], [1])


def test_where_memory_is_short_files_are_written_at_once(
    tmp_path: Path, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "available_memory_bytes", lambda: 100)
    fit(ModelCheckpoint(tmp_path, "{step}"))
    assert writes.seen == []
    assert files.load(tmp_path / "step=4.ckpt")["global_step"] == 4


def test_tensors_of_other_devices_keep_their_place_in_the_file(tmp_path: Path) -> None:
    copied = background.HostCopies().of({"there": torch.ones(2), "here": torch.zeros(2)})
    assert copied is not None
    assert copied.locations == {}
    storage = copied.contents["there"].untyped_storage()
    with files.located_as({background.torch_private.identity_of(storage): "cuda:3"}):
        files.save(copied.contents, tmp_path / "a.ckpt")
    places: list[str] = []
    torch.load(tmp_path / "a.ckpt", map_location=lambda storage, place: places.append(place) or storage)
    assert places == ["cuda:3", "cpu"]


# -- while it is written


def test_training_goes_on_and_the_older_file_stays_until_the_newer_is_complete(tmp_path: Path, writes: Writes) -> None:
    writes.hold("step=8.ckpt")
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([name for name in names(tmp_path) if not name.startswith(".")])
        writes.held["step=8.ckpt"].set()

    fit(ModelCheckpoint(tmp_path, "{step}"), at_step(10, look), max_epochs=3)
    assert seen == [["step=4.ckpt"]]
    assert names(tmp_path) == ["step=12.ckpt"]


def test_small_files_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "save_unchecked", lambda *_, **__: pytest.fail("in the background"))
    fit(ModelCheckpoint(tmp_path, "{step}"))
    assert names(tmp_path) == ["step=4.ckpt"]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, writes: Writes) -> None:
    slow = writes.hold("step=1.ckpt")
    after_a_moment = LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, index: (
            writes.seen.append(f"batch {index}"), threading.Timer(0.1, slow.set).start() if index == 1 else None
        )
    )  # fmt: skip
    fit(ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1), after_a_moment)
    seen = writes.seen
    assert seen.index("batch 1") < seen.index("ends step=1.ckpt") < seen.index("batch 2")
    assert names(tmp_path) == [f"step={number}.ckpt" for number in (1, 2, 3, 4)]


def test_the_files_of_one_save_do_not_wait_for_one_another(tmp_path: Path, writes: Writes) -> None:
    writes.hold("step=4.ckpt")
    fit(ModelCheckpoint(tmp_path, "{step}", save_last=True), at_step(5, writes.held["step=4.ckpt"].set), max_epochs=2)
    assert writes.seen[:4] == ["begins step=4.ckpt", "ends step=4.ckpt", "begins last.ckpt", "ends last.ckpt"]
    assert names(tmp_path) == ["last.ckpt", "step=8.ckpt"]
    assert [files.load(tmp_path / name)["global_step"] for name in names(tmp_path)] == [8, 8]


def test_two_callbacks_do_not_take_the_same_name(tmp_path: Path, writes: Writes) -> None:
    writes.hold("step=4.ckpt")
    threading.Timer(0.1, writes.held["step=4.ckpt"].set).start()
    with warned(UserWarning, says="-v1"):
        fit(ModelCheckpoint(tmp_path, "{step}", monitor="loss"), ModelCheckpoint(tmp_path, "{step}", save_last=True))
    assert names(tmp_path) == ["last.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]


# -- who asks for a file finds it


def test_who_asks_for_the_path_waits_for_the_file(tmp_path: Path, writes: Writes) -> None:
    steps: list[int] = []

    class Reads(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 0:
                return
            saved = trainer.checkpoint_callback
            assert isinstance(saved, ModelCheckpoint)
            steps.append(torch.load(saved.best_model_path)["global_step"])
            assert list(map(os.path.exists, saved.best_k_models)) == [True]
            assert files.load(saved.last_model_path)["global_step"] == steps[-1]

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            # Without the path, too.
            assert names(tmp_path) == ["last.ckpt", "step=12.ckpt"]

    writes.delay = 0.05
    fit(Reads(), ModelCheckpoint(tmp_path, "{step}", "val_loss", save_last=True), max_epochs=3)
    assert steps == [4, 8]


def test_a_link_is_made_when_its_target_is_complete(tmp_path: Path, writes: Writes) -> None:
    writes.hold("step=8.ckpt")
    seen: list[str] = []

    def look() -> None:
        seen.append(os.readlink(tmp_path / "last.ckpt"))
        writes.held["step=8.ckpt"].set()

    fit(ModelCheckpoint(tmp_path, "{step}", save_last="link"), at_step(9, look), max_epochs=3)
    assert seen == ["step=4.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step=12.ckpt"


def test_a_logger_that_uploads_gets_whole_files(tmp_path: Path, writes: Writes) -> None:
    writes.delay = 0.05
    uploads = Uploads("all")
    fit(ModelCheckpoint(tmp_path, "{step}", save_last=True), logger=uploads, max_epochs=2)
    sent = [os.path.basename(one.path) for one in uploads.sent]
    assert sent == ["step=4.ckpt", "last.ckpt", "step=8.ckpt", "last.ckpt"]
    assert len(writes.seen) == 8


def test_a_program_that_may_expect_the_file_gets_it_at_once(tmp_path: Path, writes: Writes) -> None:
    found: list[bool] = []

    class Own(ModelCheckpoint):
        def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            found.append(os.path.exists(filepath))

    class Follows(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            found.append("step=4.ckpt" in names(tmp_path))

    class Saves(L.Trainer):
        def save_checkpoint(self, filepath: Any, *arguments: Any, **options: Any) -> None:
            super().save_checkpoint(filepath, *arguments, **options)
            found.append(os.path.exists(filepath))

    def save(trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        found.append(files.load(tmp_path / "own.ckpt")["global_step"] == 4)

    def saved(trainer: L.Trainer) -> None:
        trainer.fit(Large(10), [torch.ones(1, 2)] * 4)

    quietly: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 1}
    saved(quiet(callbacks=[Own(tmp_path, "{step}")], enable_checkpointing=True))
    os.remove(tmp_path / "step=4.ckpt")
    saved(
        quiet(
            callbacks=[ModelCheckpoint(tmp_path, "{step}")], logger=Follows(tmp_path / "log"), enable_checkpointing=True
        )
    )
    os.remove(tmp_path / "step=4.ckpt")
    saved(Saves(callbacks=[ModelCheckpoint(tmp_path, "{step}")], logger=False, **quietly))
    assert writes.seen == []
    fit(LambdaCallback(on_train_epoch_end=save), ModelCheckpoint(tmp_path / "b", "{step}"))
    assert found == [True] * 4
    assert writes.seen == ["begins step=4.ckpt", "ends step=4.ckpt"]


@pytest.mark.world_size(2)
def test_several_processes_write_at_once(tmp_path: Path, writes: Writes) -> None:
    found: list[bool] = []
    looks = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: found.append((tmp_path / "step=4.ckpt").exists())
    )
    fit(looks, ModelCheckpoint(tmp_path, "{step}"), max_epochs=2, devices=2, strategy="ddp")
    assert writes.seen == []
    assert found == [False, True]


def test_programs_with_the_names_of_lightning_are_saved_alike(tmp_path: Path, writes: Writes) -> None:
    with mock.patch.dict(sys.modules):
        hasten_lightning.install()
        try:
            from lightning.pytorch import Trainer
            from lightning.pytorch.callbacks import ModelCheckpoint as Saves

            quietly: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = Trainer(accelerator="cpu", max_epochs=2, callbacks=[Saves(tmp_path, "{step}")], **quietly)
            trainer.fit(Large(10), [torch.ones(1, 2)] * 4)
        finally:
            hasten_lightning.uninstall()
    assert names(tmp_path) == ["step=8.ckpt"]
    assert writes.seen == ["begins step=4.ckpt", "ends step=4.ckpt", "begins step=8.ckpt", "ends step=8.ckpt"]
    assert sorted(files.load(tmp_path / "step=8.ckpt")["loops"]) != ["fit"]


# -- errors


def full_disk() -> OSError:
    return OSError(28, "No space left on device")


def test_an_error_ends_the_run_at_the_next_step(tmp_path: Path, writes: Writes) -> None:
    writes.fails["step=100.ckpt"] = full_disk()
    held, ended = writes.hold("step=100.ckpt"), list[int]()

    def slow(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > 100:
            held.set()
            time.sleep(0.01)  # The thread needs a moment, and the next save is far.

    hears = LambdaCallback(
        on_train_batch_end=slow, on_exception=lambda trainer, module, error: ended.append(trainer.global_step)
    )
    with refused(OSError, says="No space left"):
        fit(ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=100), hears, max_epochs=-1)
    assert 100 < ended[0] < 200
    assert names(tmp_path) == []


def test_an_error_leaves_the_files_and_the_ranking_as_they_were(tmp_path: Path, writes: Writes) -> None:
    writes.fails["step=8.ckpt"] = full_disk()
    checkpoint = ModelCheckpoint(tmp_path, "{step}", "val_loss", save_last=True)
    with refused(OSError, says="No space left"):
        fit(checkpoint, max_epochs=100)
    assert "begins step=12.ckpt" not in writes.seen
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert os.path.basename(checkpoint.best_model_path) == "step=4.ckpt"
    assert list(map(os.path.basename, checkpoint.best_k_models)) == ["step=4.ckpt"]
    assert checkpoint.best_model_score == -4.0
    assert files.load(tmp_path / "last.ckpt")["global_step"] == 4


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO])
def test_an_error_of_the_last_save_ends_the_fit(tmp_path: Path, plugin: Any) -> None:
    import resource

    def limited() -> None:
        while not (tmp_path / "step=4.ckpt").exists():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000_000, before[1]))

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    checkpoint, plugins = ModelCheckpoint(tmp_path, "{step}"), None if plugin is None else plugin()
    try:
        with refused(OSError, says="File too large"):
            fit(checkpoint, at_step(6, limited), module=Large(6_000_000), max_epochs=2, plugins=plugins)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["step=4.ckpt"]
    assert os.path.basename(checkpoint.best_model_path) == "step=4.ckpt"


def test_an_error_is_not_lost_where_the_program_asks_for_the_path(tmp_path: Path, writes: Writes) -> None:
    writes.fails["step=8.ckpt"] = full_disk()
    best: list[str] = []
    reads = LambdaCallback(
        on_train_epoch_start=lambda trainer, module: best.append(trainer.checkpoint_callback.best_model_path)
    )
    with refused(OSError, says="No space left"):
        fit(reads, ModelCheckpoint(tmp_path, "{step}", "val_loss"), max_epochs=100)
    assert list(map(os.path.basename, best)) == ["", "step=4.ckpt", "step=4.ckpt"]


def test_another_error_is_raised_and_that_of_the_save_is_a_warning(tmp_path: Path, writes: Writes) -> None:
    writes.fails["step=4.ckpt"] = full_disk()
    writes.hold("step=4.ckpt")

    def fail() -> None:
        writes.held["step=4.ckpt"].set()
        raise ZeroDivisionError

    with warned(UserWarning, says="No space left"), pytest.raises(ZeroDivisionError):
        fit(ModelCheckpoint(tmp_path, "{step}"), at_step(5, fail), max_epochs=2)
    assert names(tmp_path) == []


def test_a_save_of_the_program_is_written_and_then_raises_the_error_before(tmp_path: Path, writes: Writes) -> None:
    writes.fails["step=4.ckpt"] = full_disk()
    writes.hold("step=4.ckpt")

    def save(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            writes.held["step=4.ckpt"].set()
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    with refused(OSError, says="No space left"):
        fit(ModelCheckpoint(tmp_path, "{step}"), LambdaCallback(on_train_batch_end=save), max_epochs=2)
    assert names(tmp_path) == ["own.ckpt"]


# -- stopped and killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_ends_when_its_files_are_complete(tmp_path: Path, writes: Writes, number: int) -> None:
    writes.hold("step=4.ckpt")

    def stop() -> None:
        os.kill(os.getpid(), number)
        threading.Timer(0.1, writes.held["step=4.ckpt"].set).start()

    with pytest.raises(SystemExit) as stopped:
        fit(ModelCheckpoint(tmp_path, "{step}"), at_step(6, stop), max_epochs=3)
    assert stopped.value.code == 128 + number
    assert [files.load(tmp_path / name)["global_step"] for name in names(tmp_path)] == [6, 4]
    again = fit(ModelCheckpoint(tmp_path, "{step}"), max_epochs=3)
    assert again.global_step == 12


def test_a_run_killed_while_it_writes_goes_on_from_the_older_file(tmp_path: Path, writes: Writes) -> None:
    def resumed(*callbacks: L.Callback, ckpt_path: Any = None) -> L.Trainer:
        trainer = quiet(callbacks=list(callbacks), enable_checkpointing=True, max_epochs=3)
        trainer.fit(Large(10), [torch.ones(1, 2)] * 4, ckpt_path=ckpt_path)
        return trainer

    child = os.fork()
    if child == 0:
        # The second file is being written: its name is missing when the process is killed.
        writes._save = _killing(writes._save)
        resumed(ModelCheckpoint(tmp_path, "{step}"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["step=4.ckpt"]
    assert len(names(tmp_path)) == 2
    begun: list[int] = []
    notes = LambdaCallback(on_train_start=lambda trainer, module: begun.append(trainer.global_step))
    resumed(ModelCheckpoint(tmp_path, "{step}"), notes, ckpt_path="last")
    assert begun == [4]
    assert names(tmp_path) == ["step=12.ckpt"]


def _killing(save: Callable[..., None]) -> Callable[..., None]:
    def write(contents: dict[str, Any], path: Any, **options: Any) -> None:
        if contents["global_step"] == 8:
            os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        save(contents, path, **options)

    return write


def test_a_folder_that_becomes_a_file_is_named_with_what_to_move(tmp_path: Path, writes: Writes) -> None:
    folder = tmp_path / "run"

    def replace() -> None:
        while not list(folder.glob("*.ckpt")):
            time.sleep(0.01)
        shutil.rmtree(folder)
        folder.touch()

    kinds = (FileExistsError, NotADirectoryError)
    with refused(kinds, says=(f"{folder} cannot be a folder", f"Move {folder} away")):
        fit(ModelCheckpoint(folder, "{step}"), at_step(6, replace), max_epochs=3)


def test_the_end_of_a_strategy_waits_for_files(tmp_path: Path) -> None:
    written = threading.Event()

    class Waits(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            written.wait()
            super().save_checkpoint(checkpoint, path, storage_options)

    plugin = AsyncCheckpointIO(Waits())
    strategy = quiet(plugins=plugin).strategy
    plugin.save_checkpoint({"weight": torch.ones(2)}, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    threading.Timer(0.05, written.set).start()
    strategy.teardown()
    assert (tmp_path / "a.ckpt").exists()


def test_files_are_complete_after_a_fit_whose_strategy_defines_teardown(tmp_path: Path) -> None:
    class Own(SingleDeviceStrategy):
        def teardown(self) -> None:
            """Release nothing."""

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.1)
            super().save_checkpoint(*args, **kwargs)

    class Watched(AsyncCheckpointIO):
        torn_down = False

        def teardown(self) -> None:
            super().teardown()
            self.torn_down = True

    plugin = Watched(Slow())
    saves = ModelCheckpoint(tmp_path, "{step}")
    trainer = quiet(
        strategy=Own(torch.device("cpu")), plugins=plugin, callbacks=[saves], enable_checkpointing=True, max_steps=2
    )
    trainer.fit(Classifier(), loader())
    assert plugin.torn_down
    assert (tmp_path / "step=2.ckpt").exists()
