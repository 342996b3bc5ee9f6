"""ModelCheckpoint over kills, stops and resumes: nothing good is lost, nothing is left over."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from hasten.checkpoint import files
from hasten.loggers.folders import exists
from hasten.machine.signals import SIGTERMException
from hasten.plugins import TorchCheckpointIO
from tests.callbacks.scripted import BATCHES, Scripted, names, run
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned

VALUES = [5.0, 3.0, 4.0, 2.0, 6.0, 1.0]


class StopAt(L.Callback):
    """Does something to the process at a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.action()


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def run_and_die(*arguments: Any, **options: Any) -> None:
    """Call ``run`` in a forked process, which kills itself."""
    child = os.fork()
    if child == 0:
        try:
            run(*arguments, **options)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def books(checkpoint: ModelCheckpoint) -> dict[str, Any]:
    """Return the state by file names, without the folder."""
    name = os.path.basename
    return {
        "best": name(checkpoint.best_model_path),
        "score": checkpoint.best_model_score,
        "kept": {name(path): float(score) for path, score in checkpoint.best_k_models.items()},
        "kth": name(checkpoint.kth_best_model_path),
        "last": name(checkpoint.last_model_path),
    }


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"save_last": True},
    {"monitor": "val_loss", "save_top_k": 2},
    {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "mode": "max"},
    {"monitor": "val_loss", "save_last": "link"},
    {"every_n_train_steps": 3, "save_top_k": -1},
    {"every_n_train_steps": 2, "save_last": True, "monitor": "val_loss"},
]


@pytest.mark.parametrize(
    ("options", "step"), [(options, (7, 13)[i % 2]) for i, options in enumerate(CONFIGURATIONS)], ids=str
)
def test_a_killed_and_resumed_run_has_the_files_of_one_never_killed(
    tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    whole = ModelCheckpoint(tmp_path / "whole", "{epoch}-{step}", **options)
    run(Scripted(val=VALUES), whole, max_epochs=6)

    folder = tmp_path / "killed"
    killed = ModelCheckpoint(folder, "{epoch}-{step}", **options)
    run_and_die(Scripted(val=VALUES), killed, StopAt(step, send(signal.SIGKILL)), max_epochs=6)
    again = ModelCheckpoint(folder, "{epoch}-{step}", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Scripted(val=VALUES), again, max_epochs=6, ckpt_path="last")
    assert names(folder) == names(tmp_path / "whole")
    assert books(again) == books(whole)
    for name in names(folder):
        one, other = (files.load(each / name)["global_step"] for each in (folder, tmp_path / "whole"))
        assert one == other


class KilledBeforeRemoving(ModelCheckpoint):
    deadly = True

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if self.deadly and trainer.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._remove_checkpoint(trainer, filepath)


@pytest.mark.parametrize(("epochs", "options"), [(3, {}), (4, {"monitor": "train_value", "mode": "max"})])
def test_what_a_killed_run_no_longer_wanted_is_removed_by_the_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], epochs: int
) -> None:
    def module() -> Scripted:
        return Scripted(train=[1.0, 2.0, 3.0, 2.5])

    run_and_die(module(), KilledBeforeRemoving(tmp_path, "{step}", **options), max_epochs=4)
    assert names(tmp_path) == ["step=12.ckpt", "step=8.ckpt"]
    monkeypatch.setattr(KilledBeforeRemoving, "deadly", False)
    checkpoint = KilledBeforeRemoving(tmp_path, "{step}", **options)
    run(module(), checkpoint, max_epochs=epochs, ckpt_path="last")
    assert names(tmp_path) == [os.path.basename(checkpoint.best_model_path)]


def test_the_file_a_user_named_to_start_from_is_kept_and_what_the_resumed_run_replaces_removed(tmp_path: Path) -> None:
    folder, same = tmp_path / "folder", tmp_path / "same"
    run(Scripted(), ModelCheckpoint(same, "{step}"), max_epochs=1)
    run(Scripted(), ModelCheckpoint(same, "{step}"), max_epochs=2, ckpt_path=same / "step=4.ckpt")
    assert names(same) == ["step=4.ckpt", "step=8.ckpt"]
    for name in ("a", "z"):
        start = tmp_path / name / "start.ckpt"
        run(Scripted(), ModelCheckpoint(start.parent, "start"), max_epochs=1)
        with warned(UserWarning, says="dirpath"):
            run(Scripted(), ModelCheckpoint(folder / name, "{step}"), max_epochs=3, ckpt_path=start)
        assert names(folder / name) == ["step=12.ckpt"]
        assert start.exists()


@pytest.mark.parametrize(("value", "kept"), [(2.0, [8, 16]), (9.0, [8, 12])])
def test_a_resumed_run_that_keeps_fewer_files_removes_the_others(tmp_path: Path, value: float, kept: list[int]) -> None:
    def saver(count: int) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", "val_loss", save_top_k=count)

    values = [5.0, 1.0, 3.0, value]
    run(Scripted(val=values), saver(3), max_epochs=3)
    again = saver(2)
    run(Scripted(val=values), again, max_epochs=4, ckpt_path="last")
    assert names(tmp_path) == sorted(f"step={step}.ckpt" for step in kept)
    assert books(again)["kth"] == f"step={kept[1]}.ckpt"
    assert len(again.best_k_models) == 2


@pytest.mark.parametrize("dirpath", ["checkpoints", "memory://starts"])
def test_the_file_of_another_folder_that_a_run_starts_from_is_kept(tmp_path: Path, dirpath: str) -> None:
    folder = dirpath if "://" in dirpath else str(tmp_path / dirpath)
    first, other = ModelCheckpoint(f"{folder}/a", "{step}"), ModelCheckpoint(f"{folder}/b", "{step}")
    run(Scripted(), first, max_epochs=1)
    with warned(UserWarning, says="dirpath"):
        run(Scripted(), other, max_epochs=2, ckpt_path=first.best_model_path)
    assert other.best_model_path == f"{folder}/b/step=8.ckpt"
    assert exists(first.best_model_path)


@pytest.mark.parametrize("name", ["folder/last.ckpt", "link.ckpt"])
def test_the_file_a_run_starts_from_is_known_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(Scripted(), ModelCheckpoint("folder", "{step}"), StopAt(6, send(signal.SIGINT)), max_epochs=3)
    Path("link.ckpt").symlink_to("folder/last.ckpt")
    with pytest.raises(ZeroDivisionError):
        run(Scripted(), ModelCheckpoint("folder", "{step}"), StopAt(7, fail), max_epochs=3, ckpt_path=name)
    assert names("folder") == ["last.ckpt", "step=4.ckpt"]
    run(Scripted(), ModelCheckpoint("folder", "{step}"), max_epochs=3, ckpt_path=name)
    assert names("folder") == ["step=12.ckpt"]


def test_a_state_that_no_run_can_resume_from_is_refused_at_the_first_save(tmp_path: Path) -> None:
    class Lost(Scripted):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            super().state_dict(*args, **kwargs)

    class Number(L.Callback):
        def state_dict(self) -> Any:
            return 5

    with refused(TypeError, fix="super().state_dict()", says="Lost.state_dict() returned None"):
        run(Lost(), ModelCheckpoint(tmp_path))
    with refused(TypeError, fix="Return a dict", says="Number.state_dict() returned 5"):
        run(Scripted(), ModelCheckpoint(tmp_path), Number())


def test_a_failed_save_leaves_the_files_and_the_ranking_as_they_were(tmp_path: Path) -> None:
    class FullDisk(L.Trainer):
        def save_checkpoint(self, filepath: Any, *arguments: Any, **named: Any) -> None:
            if self.global_step == 8:
                raise OSError(28, "No space left on device", str(filepath))
            super().save_checkpoint(filepath, *arguments, **named)

    checkpoint = ModelCheckpoint(tmp_path, "{step}", "val_loss", save_last=True)
    trainer = FullDisk(callbacks=[checkpoint], accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=3)
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(Scripted(val=[3.0, 2.0, 1.0]), BATCHES, [torch.zeros(2, 1)])
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert books(checkpoint) == {
        "best": "step=4.ckpt",
        "score": 3.0,
        "kept": {"step=4.ckpt": 3.0},
        "kth": "step=4.ckpt",
        "last": "last.ckpt",
    }


def test_temporary_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    def die_while_writing(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]

    killer = LambdaCallback(on_save_checkpoint=die_while_writing)
    run_and_die(Scripted(), ModelCheckpoint(tmp_path, "{step}"), killer, max_epochs=3)
    assert len(names(tmp_path)) == 2
    run(Scripted(), ModelCheckpoint(tmp_path, "{step}"), max_epochs=3, ckpt_path="last")
    assert names(tmp_path) == ["step=12.ckpt"]


# -- stopped from outside, and errors


@pytest.mark.parametrize(
    ("number", "code", "kind"), [(signal.SIGINT, 130, KeyboardInterrupt), (signal.SIGTERM, 143, SIGTERMException)]
)
@pytest.mark.parametrize("save_last", [None, True])
def test_a_stopped_run_is_saved_and_goes_on(
    tmp_path: Path, number: int, code: int, kind: type[BaseException], save_last: Any
) -> None:
    seen: list[BaseException] = []
    hears = LambdaCallback(on_exception=lambda trainer, module, error: seen.append(error))
    checkpoint = ModelCheckpoint(tmp_path, "{step}", save_last=save_last)
    with pytest.raises(SystemExit) as stopped:
        run(Scripted(), checkpoint, hears, StopAt(6, send(number)), max_epochs=3)
    assert stopped.value.code == code
    assert isinstance(seen[0], kind)
    assert getattr(seen[0], "code", code) == code
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert files.load(tmp_path / "last.ckpt")["global_step"] == 6
    run(Scripted(), ModelCheckpoint(tmp_path, "{step}", save_last=save_last), max_epochs=3, ckpt_path="last")
    assert names(tmp_path) == (["last.ckpt"] if save_last else []) + ["step=12.ckpt"]


def test_a_stopped_run_goes_on_beside_files_of_weights_alone(tmp_path: Path) -> None:
    def saver() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", save_weights_only=True)

    with pytest.raises(SystemExit):
        run(Scripted(), saver(), StopAt(6, send(signal.SIGINT)), max_epochs=3)
    for name, time in (("last.ckpt", 10), ("step=4.ckpt", 20)):
        os.utime(tmp_path / name, (time, time))
    trainer = run(Scripted(), saver(), max_epochs=3, ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "last.ckpt")
    assert names(tmp_path) == ["step=12.ckpt"]
    with refused(ValueError, fix="save_weights_only=False"):
        run(Scripted(), saver(), max_epochs=3, ckpt_path="last")


def test_a_stopped_run_is_saved_once_and_only_between_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stopped(folder: str, module: Scripted, *callbacks: ModelCheckpoint) -> list[str]:
        with pytest.raises(SystemExit):
            run(module, *callbacks, StopAt(2, send(signal.SIGINT)))
        kept, said = names(tmp_path / folder), caplog.text
        caplog.clear()
        # Whoever pressed Ctrl-C learns where the state is, also if it was just saved anyway.
        assert [f"Saved the run as {tmp_path / folder / name}. To resume it" in said for name in kept] == [True] * len(
            kept
        )
        assert said.count("Saved the run") == len(kept)
        return kept

    class Impatient(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    two = [ModelCheckpoint(tmp_path / "a", "{step}"), ModelCheckpoint(tmp_path / "a", monitor="val_loss")]
    assert stopped("a", Scripted(val=[1.0]), *two) == ["last.ckpt"]
    due = ModelCheckpoint(tmp_path / "b", "{step}", every_n_train_steps=2)
    assert stopped("b", Scripted(), due) == ["step=2.ckpt"]
    assert stopped("c", Impatient(), ModelCheckpoint(tmp_path / "c")) == []


@pytest.mark.parametrize(
    ("asked", "error"),
    [(True, ZeroDivisionError), (False, ZeroDivisionError), (True, KeyboardInterrupt), (True, SystemExit)],
)
def test_saving_on_an_error(tmp_path: Path, asked: bool, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    checkpoint = ModelCheckpoint(tmp_path, "best", save_on_exception=asked)
    with pytest.raises((ZeroDivisionError, SystemExit)):
        run(Scripted(), checkpoint, StopAt(6, fail), max_epochs=2)
    # A good file of that name is not written over by the state of a failed run.
    assert names(tmp_path) == (["best-v1.ckpt"] if asked else []) + ["best.ckpt"]
    assert files.load(tmp_path / "best.ckpt")["global_step"] == 4


@pytest.mark.parametrize("stopped", [True, False])
def test_a_save_that_fails_does_not_replace_what_ended_the_run(tmp_path: Path, stopped: bool) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    class FullDisk(TorchCheckpointIO):
        def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
            raise OSError(28, "No space left on device")

    def hear(*_: Any) -> None:
        heard.append(True)

    heard: list[bool] = []
    saver, after = ModelCheckpoint(tmp_path, save_on_exception=True), ModelCheckpoint(tmp_path, every_n_epochs=2)
    after.on_exception = hear  # type: ignore[method-assign, assignment]
    ends = StopAt(2, send(signal.SIGINT) if stopped else fail)
    with warned(UserWarning, says="No space left"), pytest.raises((SystemExit, ZeroDivisionError)) as ended:
        run(Scripted(), saver, after, ends, plugins=FullDisk())
    assert getattr(ended.value, "code", None) == (130 if stopped else None)
    assert (heard, saver._saved_at) == ([True], None)


# -- the last one to go on from


def test_last_is_found_in_the_folders_of_earlier_runs(tmp_path: Path) -> None:
    def go(epochs: int, **options: Any) -> L.Trainer:
        return run(Scripted(), default_root_dir=tmp_path, logger=True, max_epochs=epochs, **options)

    go(1)
    second = go(2)
    third = go(3, ckpt_path="last")
    assert third.ckpt_path == str(Path(second.log_dir) / "checkpoints" / "epoch=1-step=8.ckpt")
    assert third.log_dir != second.log_dir
    assert third.global_step == 12
    assert names(Path(second.log_dir) / "checkpoints") == ["epoch=1-step=8.ckpt"]


def test_a_run_resumed_in_the_next_folder_says_that_its_ranking_is_new(tmp_path: Path) -> None:
    def go(epochs: int, **options: Any) -> ModelCheckpoint:
        best = ModelCheckpoint(monitor="val_loss", save_last=True)
        run(Scripted(val=[1.0, 2.0]), best, default_root_dir=tmp_path, logger=True, max_epochs=epochs, **options)
        return best

    first = go(1)
    with warned(UserWarning, fix="dirpath=", says=("version_0", "version_1", repr(first.best_model_path))):
        second = go(2, ckpt_path="last")
    assert "version_1" in second.best_model_path
    assert second.best_model_score == 2
    # Nothing is left to train: path and score are those of the same file.
    with warned(UserWarning, says="nothing is left to train"):
        third = go(2, ckpt_path="last")
    assert (third.best_model_path, third.best_model_score) == (second.best_model_path, 2)


def test_fit_can_be_called_again(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", save_last=True)
    trainer = quiet(callbacks=[checkpoint], enable_checkpointing=True, limit_val_batches=0)
    module = Scripted()
    trainer.fit(module, BATCHES)
    trainer.fit_loop.max_epochs += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(module, BATCHES)
    assert "last.ckpt" in names(tmp_path)
    assert len(names(tmp_path)) == 2


def test_another_trainer_that_begins_anew_has_its_own_ranking_and_patience(tmp_path: Path) -> None:
    saver, stopper = ModelCheckpoint(tmp_path, "{step}", "val_loss"), EarlyStopping("val_loss", patience=2)
    first = run(Scripted(val=[1.0, 2.0]), saver, stopper, max_epochs=2)
    assert (saver.best_model_score, stopper.wait_count) == (1.0, 1)
    # Other weights than those of the same step before, and a worse value.
    run(Scripted(val=[3.0, 4.0]), saver, stopper, max_epochs=2)
    assert (saver.best_model_score, stopper.wait_count) == (3.0, 1)
    assert saver.best_model_path == str(tmp_path / "step=4-v1.ckpt")
    assert names(tmp_path) == ["step=4-v1.ckpt", "step=4.ckpt"]
    # A fit that resumes goes on, and so does one of the same Trainer.
    again = run(Scripted(val=[5.0, 2.0]), saver, stopper, max_epochs=2, ckpt_path=saver.best_model_path)
    assert (saver.best_model_score, stopper.wait_count) == (2.0, 0)
    again.fit_loop.max_epochs = 3
    again.fit(again.lightning_module, BATCHES, [torch.zeros(2, 1)])
    assert (saver.best_model_score, stopper.wait_count) == (2.0, 1)
    assert first.global_step == 8


@pytest.mark.filterwarnings("ignore")
def test_the_best_file_is_that_of_the_fit_whatever_is_tested(tmp_path: Path) -> None:
    model = Classifier()
    other, own = ModelCheckpoint(tmp_path / "a", "{epoch}"), ModelCheckpoint(tmp_path / "b", "{epoch}")
    for saver in (other, own):
        trainer = quiet(callbacks=[saver], enable_checkpointing=True)
        trainer.fit(model, loader(8))
    trainer.test(model, loader(8), ckpt_path=other.best_model_path, verbose=False)
    assert own.best_model_path == str(tmp_path / "b" / "epoch=0.ckpt")
    # One that has saved nothing takes over what a file says.
    fresh = ModelCheckpoint(tmp_path / "c")
    trainer = quiet(callbacks=[fresh], enable_checkpointing=True)
    trainer.test(model, loader(8), ckpt_path=other.best_model_path, verbose=False)
    assert fresh.best_model_path == other.best_model_path


class Added(ModelCheckpoint):
    """Finds no state of its class in the checkpoint."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [ModelCheckpoint, Added])
def test_a_run_that_goes_on_in_an_epoch_ranks_by_steps_in_another_folder(
    tmp_path: Path, kind: type[ModelCheckpoint]
) -> None:
    def fit(callback: ModelCheckpoint, steps: int, ckpt_path: Path | None = None) -> None:
        trainer = quiet(max_steps=steps, max_epochs=-1, callbacks=[callback], enable_checkpointing=True)
        trainer.fit(Classifier(), loader(80), loader(8), ckpt_path=ckpt_path)

    options: Any = {"monitor": "train_loss", "every_n_train_steps": 3, "filename": "{step}"}
    fit(ModelCheckpoint(dirpath=tmp_path / "first", save_top_k=-1, **options), 14)
    # In the middle of an epoch of 20 batches, and it ends there.
    second = kind(dirpath=tmp_path / "second", **options)
    fit(second, 19, tmp_path / "first" / "step=12.ckpt")
    assert Path(second.best_model_path) in (tmp_path / "second" / "step=15.ckpt", tmp_path / "second" / "step=18.ckpt")
