"""ModelCheckpoint: which files there are after which run."""

from __future__ import annotations

import math
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hasten as L
from hasten.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from hasten.checkpoint import files
from hasten.hooks import overrides
from hasten.loggers import CSVLogger
from hasten.plugins import AsyncCheckpointIO, TorchCheckpointIO
from tests.callbacks.scripted import Scripted, names, run
from tests.models import Classifier, Manual, loader, quiet
from tests.refusals import refused, warned


def steps(folder: Path) -> dict[str, int]:
    """Return the optimizer steps of each checkpoint in a folder and below, by name."""
    return {name: files.load(folder / name)["global_step"] for name in names(folder)}


BY_LOSS = {"filename": "{epoch}", "monitor": "val_loss"}
LAST = {**BY_LOSS, "save_last": True}
ALL_STEPS = {"filename": "{step}", "save_top_k": -1}
FALLING = {"val": [4.0, 3.0, 2.0, 1.0]}
UNNAMED = {"save_top_k": -1, "auto_insert_metric_name": False}
ALL_LOSSES = {**UNNAMED, "filename": "s{step}-{val_loss:.0f}", "monitor": "val_loss"}

# Arguments of the callback, of the module (4 batches an epoch) and of the Trainer; "file@steps" of what there is then.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "the newest, without a monitor": ({}, {}, {"max_epochs": 3}, "epoch=2-step=12@12"),
    "all": ({**BY_LOSS, "save_top_k": -1}, FALLING, {"max_epochs": 3}, "epoch=0@4 epoch=1@8 epoch=2@12"),
    "none": ({**BY_LOSS, "save_top_k": 0}, FALLING, {"max_epochs": 2}, ""),
    "the best": (BY_LOSS, {"val": [3.0, 1.0, 2.0]}, {"max_epochs": 3}, "epoch=1@8"),
    "NaN is the worst": (BY_LOSS, {"val": [math.nan, 2.0, math.nan]}, {"max_epochs": 3}, "epoch=1@8"),
    "last has no monitor": (LAST, {"val": [1.0, 2.0, 3.0]}, {"max_epochs": 3}, "epoch=0@4 last@12"),
    "last before the first value": (LAST, {"val": [1.0]}, {"check_val_every_n_epoch": 5}, "last@4"),
    "last alone": ({"save_last": True, "save_top_k": 0}, {}, {"max_epochs": 2}, "last@8"),
    "steps": ({**ALL_STEPS, "every_n_train_steps": 3}, {}, {"max_epochs": 2}, "step=3@3 step=6@6"),
    "optimizer steps": (
        {**ALL_STEPS, "every_n_train_steps": 1}, {}, {"accumulate_grad_batches": 2}, "step=1@1 step=2@2"
    ),
    "epochs": ({**ALL_STEPS, "every_n_epochs": 2}, {}, {"max_epochs": 5}, "step=8@8 step=16@16"),
    "any time": ({**ALL_STEPS, "train_time_interval": timedelta(0)}, {}, {}, "step=1@1 step=2@2 step=3@3 step=4@4"),
    "no time": ({**ALL_STEPS, "train_time_interval": timedelta(hours=1)}, {}, {}, ""),
    # ``last`` is saved at step 4, the ranked file when the validation of that step has its value.
    "last is not the ranked file": (
        {**LAST, "filename": "{step}", "every_n_train_steps": 4}, {"val": [1.0]}, {}, "last@4 step=4@4"
    ),
    # Due at steps 3 and 6; validations end at steps 4 and 8.
    "a value of validation is ranked after it": (
        {**ALL_LOSSES, "save_top_k": 2, "every_n_train_steps": 3}, FALLING, {"max_epochs": 2}, "s4-4@4 s8-3@8"
    ),
    "all are kept once there is a value": (
        {**ALL_STEPS, "monitor": "val_loss", "every_n_train_steps": 3},
        FALLING, {"max_epochs": 3}, "step=4@4 step=6@6 step=9@9 step=12@12"
    ),
    "of files that are all kept, each has the value that comes at once": (
        {**ALL_LOSSES, "save_top_k": -1, "every_n_train_steps": 2},
        FALLING, {"max_epochs": 2, "val_check_interval": 4}, "s4-4@4 s6-4@6 s8-3@8"
    ),
    "of files that are all kept, the last of an epoch has its value": (
        {**UNNAMED, "filename": "s{step}-{train_value:.0f}", "monitor": "train_value", "every_n_train_steps": 2},
        {"train": [5.0, 4.0]}, {"max_epochs": 2, "limit_val_batches": 0}, "s4-5@4 s6-5@6 s8-4@8"
    ),
    "a value of training steps is ranked at once": (
        {"filename": "{step}-{step_value:.0f}", "monitor": "step_value", "mode": "max", "every_n_train_steps": 3},
        {"val": [1.0], "step": True}, {"max_epochs": 2}, "step=6-step_value=5@6"
    ),
    # At the end of each of the two validations an epoch, the training's value is that of the epoch before.
    "a value of epochs is ranked when it is new": (
        {**UNNAMED, "filename": "e{epoch}-{train_value:.0f}", "monitor": "train_value"},
        {"val": [1.0], "train": [5.0, 4.0]}, {"max_epochs": 2, "val_check_interval": 0.5}, "e0-5@4 e1-4@8"
    ),
    "validation within the epoch": (
        ALL_LOSSES, FALLING, {"max_epochs": 2, "val_check_interval": 0.5}, "s2-4@2 s4-3@4 s6-2@6 s8-1@8"
    ),
    "epochs without validation": (
        ALL_LOSSES, FALLING, {"max_epochs": 4, "check_val_every_n_epoch": 2}, "s8-4@8 s16-3@16"
    ),
    "nothing in a quick check": ({"save_last": True}, {}, {"fast_dev_run": 2}, ""),
    "a version": ({"filename": "a", "save_top_k": -1}, {}, {"max_epochs": 3}, "a@4 a-v1@8 a-v2@12"),
    "no version": (
        {"filename": "a", "save_top_k": -1, "enable_version_counter": False}, {}, {"max_epochs": 3}, "a@12"
    ),
    "a folder below": (
        {"filename": "{epoch}/best", "monitor": "val_loss", "auto_insert_metric_name": False}, FALLING, {}, "0/best@4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_files(tmp_path: Path, name: str) -> None:
    options, module, trainer, expected = RUNS[name]
    run(Scripted(**module), ModelCheckpoint(tmp_path, **options), **trainer)
    assert steps(tmp_path) == {f"{name}.ckpt": int(step) for name, step in re.findall(r"(\S+)@(\d+)", expected)}


def test_the_default_folder_is_the_loggers(tmp_path: Path) -> None:
    trainer = run(Scripted(), default_root_dir=tmp_path, logger=True)
    assert names(Path(trainer.log_dir) / "checkpoints") == ["epoch=0-step=4.ckpt"]
    run(Scripted(), default_root_dir=tmp_path / "bare")
    assert names(tmp_path / "bare" / "checkpoints") == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize(("mode", "best", "kept"), [("min", 1.0, {1.0: 1, 2.0: 3}), ("max", 5.0, {5.0: 0, 4.0: 2})])
def test_the_ranking(tmp_path: Path, mode: Any, best: float, kept: dict[float, int]) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.1f}", "val_loss", save_top_k=2, mode=mode)
    run(Scripted(val=[5.0, 1.0, 4.0, 2.0]), checkpoint, max_epochs=4)
    expected = {str(tmp_path / f"epoch={epoch}-val_loss={value:.1f}.ckpt"): value for value, epoch in kept.items()}
    assert {path: float(score) for path, score in checkpoint.best_k_models.items()} == expected
    assert names(tmp_path) == sorted(Path(path).name for path in expected)
    assert checkpoint.best_model_score == expected[checkpoint.best_model_path] == best
    assert checkpoint.kth_best_model_path != checkpoint.best_model_path
    assert float(checkpoint.kth_value) == expected[checkpoint.kth_best_model_path]
    checkpoint.to_yaml()
    checkpoint.to_yaml(tmp_path / "other.yaml")
    for name in ("best_k_models.yaml", "other.yaml"):
        assert yaml.safe_load((tmp_path / name).read_text()) == expected


@pytest.mark.parametrize(("values", "is_link"), [([3.0, 2.0], True), ([1.0, 2.0], False)])
def test_last_is_a_link_to_a_file_of_its_own_step_only(tmp_path: Path, values: list[float], is_link: bool) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_last="link")
    run(Scripted(val=values), checkpoint, max_epochs=2)
    assert steps(tmp_path) == {"epoch=1.ckpt" if is_link else "epoch=0.ckpt": 8 if is_link else 4, "last.ckpt": 8}
    last = Path(checkpoint.last_model_path)
    assert last == tmp_path / "last.ckpt"
    assert last.is_symlink() == is_link
    with refused(ValueError, "save_last", fix="save_last=True"):
        run(Scripted(), ModelCheckpoint("memory://here", save_last="link"))


class Notes(ModelCheckpoint):
    """Notes at which (step, batch) it saves, and what it removes."""

    CHECKPOINT_NAME_LAST = "{epoch}-last"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.saved: list[tuple[int, int]] = []
        self.removed: list[str] = []

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self.saved.append((trainer.global_step, trainer.total_batch_idx))
        super()._save_checkpoint(trainer, filepath)

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self.removed.append(Path(filepath).name)
        super()._remove_checkpoint(trainer, filepath)


def test_each_file_is_saved_and_removed_once(tmp_path: Path) -> None:
    checkpoint = Notes(tmp_path, save_last=True, save_top_k=0, every_n_train_steps=1)
    run(Scripted(), checkpoint, accumulate_grad_batches=2)
    assert checkpoint.saved == [(1, 1), (2, 3)]
    assert names(tmp_path) == ["epoch=0-last.ckpt"]
    # The only file has the last state, also where the run ends between two saves.
    checkpoint = Notes(tmp_path / "end", save_last=True, save_top_k=0, every_n_train_steps=3)
    run(Scripted(), checkpoint)
    assert checkpoint.saved == [(3, 2), (4, 3)]
    checkpoint = Notes(tmp_path / "more", "{step}")
    run(Scripted(), checkpoint, max_epochs=4)
    assert checkpoint.removed == ["step=4.ckpt", "step=8.ckpt", "step=12.ckpt"]
    assert checkpoint.state_dict()["ranking"]["unwanted"] == []


def test_a_replaced_file_that_is_still_being_written_is_removed(tmp_path: Path) -> None:
    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.1)  # The next one is saved before this is written.
            super().save_checkpoint(*args, **kwargs)

    run(Scripted(val=[1.0, 2.0, 3.0]), ModelCheckpoint(tmp_path), max_epochs=3, plugins=AsyncCheckpointIO(Slow()))
    assert names(tmp_path) == ["epoch=2-step=12.ckpt"]


def test_the_sanity_check_saves_nothing(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[ModelCheckpoint(tmp_path, monitor="val_loss")], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Scripted(val=[1.0]), (1 // 0 for _ in range(3)), [torch.zeros(2, 1)])
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("monitor", "arguments", "argument"),
    [
        ("val_los", {"max_epochs": 3}, "monitor"),
        ("other", {"max_epochs": 3}, "monitor"),
        ("val_loss", {"limit_val_batches": 0}, "monitor"),
    ],
)
def test_a_monitor_that_is_not_logged_is_an_error_that_lists_what_is(
    tmp_path: Path, monitor: str, arguments: dict[str, Any], argument: str
) -> None:
    with refused(ValueError, argument):
        run(Scripted(val=[1.0]), ModelCheckpoint(tmp_path, monitor=monitor), **arguments)


# -- names


@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        (None, True, "epoch=3-step=20.ckpt"),
        ("", True, "epoch=3-step=20.ckpt"),
        ("{epoch:02d}", True, "epoch=03.ckpt"),
        ("{epoch}-{val_loss:.2f}", True, "epoch=3-val_loss=0.12.ckpt"),
        ("e{epoch}-v{val_loss:.1e}", False, "e3-v1.2e-01.ckpt"),
        ("{missing:d}", True, "missing=0.ckpt"),
        ("{epoch_test}-{epoch}", True, "epoch_test=7-epoch=3.ckpt"),
        ("loss{val/loss:.1f}", False, "loss0.5.ckpt"),
        ("plain", True, "plain.ckpt"),
        ("{unsafe}", False, ".._.._etc_pass_wd.ckpt"),
    ],
)
def test_names(template: str | None, insert: bool, name: str) -> None:
    checkpoint = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    metrics = {"epoch": 3, "step": 20, "val_loss": torch.tensor(0.123456), "epoch_test": 7, "val/loss": 0.5}
    assert checkpoint.format_checkpoint_name({**metrics, "unsafe": "../../etc/pass\0wd"}) == name


def test_version_prefix_signs_and_formats(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}")
    assert checkpoint.format_checkpoint_name({"epoch": 1}, ver=2) == str(tmp_path / "epoch=1-v2.ckpt")
    assert checkpoint.format_checkpoint_name({"epoch": 1}, prefix="test") == str(tmp_path / "test-epoch=1.ckpt")
    checkpoint.CHECKPOINT_EQUALS_CHAR, checkpoint.CHECKPOINT_JOIN_CHAR = ":", "_"
    checkpoint.FILE_EXTENSION = ".pt"
    assert checkpoint.format_checkpoint_name({"epoch": 1}, ver=2) == str(tmp_path / "epoch:1_v2.pt")
    with refused(ValueError, says=("val_acc is 0.5", "{val_acc:.2f}")):
        ModelCheckpoint(filename="{val_acc:d}").format_checkpoint_name({"val_acc": 0.5})


def test_files_of_another_run_are_kept_with_a_warning(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, save_last=True))
    for again in (ModelCheckpoint(tmp_path, save_last=True), ModelCheckpoint(tmp_path, "all", save_top_k=-1)):
        with warned(UserWarning, fix="ckpt_path='last'"):
            run(Scripted(), again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Scripted(), ModelCheckpoint(tmp_path, save_last=True, save_top_k=0))
    ranked = ["all.ckpt", "epoch=0-step=4-v1.ckpt", "epoch=0-step=4.ckpt"]
    assert names(tmp_path) == [*ranked, "last-v1.ckpt", "last-v2.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    ("options", "limits", "kept"),
    [
        ({"monitor": "step", "every_n_train_steps": 3, "save_top_k": 2}, {}, ["epoch=1-step=18", "epoch=1-step=15"]),
        ({"monitor": "step", "every_n_train_steps": 3, "save_top_k": 1}, {"limit_val_batches": 0}, ["epoch=1-step=18"]),
        ({"monitor": "step"}, {}, ["epoch=1-step=20"]),
        ({"monitor": "epoch", "save_top_k": -1}, {"max_epochs": 3, "check_val_every_n_epoch": 2}, ["epoch=1-step=20"]),
        ({"monitor": "epoch", "save_top_k": 2}, {"limit_val_batches": 0}, ["epoch=1-step=20", "epoch=0-step=10"]),
    ],
)
def test_the_newest_are_kept_by_the_counters_that_nobody_logs(
    tmp_path: Path, options: dict[str, Any], limits: dict[str, Any], kept: list[str]
) -> None:
    saved = ModelCheckpoint(tmp_path, mode="max", **options)
    quiet(**{"max_epochs": 2, "callbacks": [saved], "enable_checkpointing": True, **limits}).fit(
        Classifier(), loader(), loader()
    )
    assert {path.stem for path in tmp_path.iterdir()} == set(kept)
    assert Path(saved.best_model_path).stem == kept[0]


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_only_and_what_loggers_see(tmp_path: Path, weights_only: bool) -> None:
    seen: list[str] = []

    class Sees(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            seen.append(checkpoint_callback.best_model_path)

    checkpoint = ModelCheckpoint(tmp_path / "c", "{epoch}", save_weights_only=weights_only)
    run(Scripted(), checkpoint, logger=Sees(tmp_path), max_epochs=2)
    assert seen == [str(tmp_path / "c" / f"epoch={epoch}.ckpt") for epoch in (0, 1)]
    assert ("optimizer_states" in files.load(seen[1])) != weights_only


def test_a_step_costs_nothing_unless_steps_or_time_are_due(tmp_path: Path) -> None:
    class Mine(ModelCheckpoint):
        def on_train_batch_end(self, *arguments: Any, **named: Any) -> None:
            super().on_train_batch_end(*arguments, **named)

    for checkpoint, is_called in (
        (ModelCheckpoint(tmp_path), False),
        (ModelCheckpoint(tmp_path, every_n_train_steps=5), True),
        (Mine(tmp_path), True),
    ):
        run(Scripted(), checkpoint, limit_train_batches=1)
        assert overrides(checkpoint, L.Callback, "on_train_batch_end") == is_called


def test_remote_folders() -> None:
    import fsspec

    checkpoint = ModelCheckpoint("memory://checks", "{epoch}", "val_loss", save_last=True)
    run(Scripted(val=[3.0, 2.0, 4.0]), checkpoint, max_epochs=3)
    found = fsspec.filesystem("memory").ls("/checks", detail=False)
    assert sorted(path.rsplit("/", 1)[1] for path in found) == ["epoch=1.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == "memory://checks/epoch=1.ckpt"


# -- what programs and Lightning rely on


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_replaced_files_are_removed_where_a_hook_of_a_program_saves(tmp_path: Path, monitor: str | None) -> None:
    found: list[list[str]] = []

    class Own(ModelCheckpoint):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
            found.append(names(tmp_path))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    run(Scripted(val=[3.0, 2.0, 1.0]), Own(tmp_path, "{epoch}", monitor, save_last=True), max_epochs=3)
    assert found == [[f"epoch={epoch}.ckpt", "last.ckpt"] for epoch in range(3)]


# Methods of ModelCheckpoint that programs override, and those that run with and without a monitor alone.
OVERRIDDEN = {
    "_format_checkpoint_name",
    "_get_metric_interpolated_filepath_name",
    "_monitor_candidates",
    "_remove_checkpoint",
    "_save_checkpoint",
    "_save_last_checkpoint",
    "_save_topk_checkpoint",
    "_should_remove_checkpoint",
    "_should_save_on_train_epoch_end",
    "_should_skip_saving_checkpoint",
}
WITH_MONITOR = {"_save_monitor_checkpoint", "_update_best_and_save", "check_monitor_top_k"}


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_methods_that_programs_override_take_effect(tmp_path: Path, monitor: str | None) -> None:
    called: set[str] = set()

    def noted(name: str) -> Any:
        def method(self: ModelCheckpoint, *arguments: Any, **options: Any) -> Any:
            called.add(name)
            result = getattr(ModelCheckpoint, name)(self, *arguments, **options)
            return f"my-{result}" if name == "_format_checkpoint_name" else result

        return method

    class Linked(ModelCheckpoint):
        @staticmethod
        def _link_checkpoint(trainer: L.Trainer, filepath: str, linkpath: str) -> None:
            Path(linkpath).write_text(Path(filepath).name)

    expected = OVERRIDDEN | ({"_save_none_monitor_checkpoint"} if monitor is None else WITH_MONITOR)
    checkpoint = type("Noted", (Linked,), {name: noted(name) for name in expected})(
        tmp_path, "{epoch}", monitor, save_last="link"
    )
    run(Scripted(val=[2.0, 1.0]), checkpoint, max_epochs=2)
    assert names(tmp_path) == ["my-epoch=1.ckpt", "my-last.ckpt"]
    assert (tmp_path / "my-last.ckpt").read_text() == "my-epoch=1.ckpt"
    assert called == expected
    assert checkpoint._format_checkpoint_name(None, {"epoch": 1, "step": 2}, "p", False) == "my-p-1-2"


def test_states_have_the_keys_of_lightning(tmp_path: Path) -> None:
    best, stopper = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_last=True), EarlyStopping("val_loss")
    run(Scripted(val=[3.0, 1.0]), best, stopper, max_epochs=2)
    states = files.load(tmp_path / "last.ckpt")["callbacks"]
    of_best, of_stopper = states[best.state_key], states[stopper.state_key]
    epoch_1, last = str(tmp_path / "epoch=1.ckpt"), str(tmp_path / "last.ckpt")
    assert {name: value for name, value in of_best.items() if name != "ranking"} == {
        "monitor": "val_loss",
        "best_model_score": 1.0,
        "best_model_path": epoch_1,
        "current_score": 1.0,
        "dirpath": str(tmp_path),
        "best_k_models": {epoch_1: 1.0},
        "kth_best_model_path": epoch_1,
        "kth_value": 1.0,
        "last_model_path": last,
    }
    known = {"wait_count": 0, "stopped_epoch": 0, "best_score": 1.0, "patience": 3}
    assert known.items() <= of_stopper.items()
    # Lightning stores no more than these.
    fresh_best, fresh_stopper = ModelCheckpoint(tmp_path, "{epoch}", "val_loss"), EarlyStopping("val_loss")
    fresh_best.load_state_dict({name: value for name, value in of_best.items() if name != "ranking"})
    fresh_stopper.load_state_dict(known)
    assert (fresh_best.best_model_path, fresh_stopper.best_score) == (epoch_1, 1.0)


# -- files that are kept for a while


class Clock:
    """The time of day: an hour passes at each step."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.hours = 1000.0

    def time(self) -> float:
        self.hours += 1.0
        return self.hours * 3600


STEPS_KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "the newest": ({"keep_latest_k": 3}, "step=6@6 step=7@7 step=8@8"),
    "one": ({"keep_latest_k": 1}, "step=8@8"),
    "more than there are": ({"keep_latest_k": 20}, " ".join(f"step={step}@{step}" for step in range(1, 9))),
    "for a time": ({"keep_for": "150min"}, "step=6@6 step=7@7 step=8@8"),
    "the newest however old": ({"keep_for": timedelta(minutes=1)}, "step=8@8"),
    "what one of the two keeps": ({"keep_for": "90min", "keep_latest_k": 4}, "step=5@5 step=6@6 step=7@7 step=8@8"),
    "beside last": ({"keep_latest_k": 1, "save_last": True}, "last@8 step=8@8"),
}


@pytest.mark.parametrize("name", STEPS_KEPT)
def test_old_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("hasten.callbacks.checkpoint.time", Clock())
    options, expected = STEPS_KEPT[name]
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, **{**ALL_STEPS, **options})
    run(Scripted(), saved, max_epochs=2)
    assert steps(tmp_path) == {f"{name}.ckpt": int(step) for name, step in re.findall(r"(\S+)@(\d+)", expected)}
    assert saved.best_model_path == str(tmp_path / "step=8.ckpt")


def test_the_best_file_stays_however_old(tmp_path: Path) -> None:
    values = [3.0, 1.0, 4.0, 2.0, 5.0]
    saved = ModelCheckpoint(tmp_path, **{**BY_LOSS, "save_top_k": -1, "keep_latest_k": 2})
    run(Scripted(val=values), saved, max_epochs=5)
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=3.ckpt", "epoch=4.ckpt"]
    paths = {int(Path(path).stem[-1]): float(score) for path, score in saved.best_k_models.items()}
    assert paths == {1: 1.0, 3: 2.0, 4: 5.0}
    assert (Path(saved.best_model_path).stem, Path(saved.kth_best_model_path).stem) == ("epoch=1", "epoch=4")
    assert (float(saved.best_model_score or 0), float(saved.kth_value)) == (1.0, 5.0)


def test_a_resumed_run_goes_on_with_the_files_of_the_run_before(tmp_path: Path) -> None:
    def train(epochs: int, resume: Any = None) -> None:
        saved = ModelCheckpoint(tmp_path, **{**ALL_STEPS, "keep_latest_k": 2})
        run(Scripted(), saved, max_epochs=epochs, ckpt_path=resume)

    train(3)
    assert names(tmp_path) == ["step=12.ckpt", "step=8.ckpt"]
    # The one that the run resumed from stays while it lasts.
    train(7, tmp_path / "step=8.ckpt")
    assert names(tmp_path) == ["step=12.ckpt", "step=24.ckpt", "step=28.ckpt", "step=8.ckpt"]
    train(9, "last")
    assert names(tmp_path) == ["step=12.ckpt", "step=28.ckpt", "step=32.ckpt", "step=36.ckpt"]


@pytest.mark.parametrize(
    ("options", "argument", "fix"),
    [
        ({"keep_latest_k": 0}, "keep_latest_k", "at least 1"),
        ({"keep_latest_k": 2, "save_top_k": 1}, "keep_latest_k", "save_top_k=-1"),
        ({"keep_for": "7d", "save_top_k": 1}, "keep_for", "save_top_k=-1"),
        ({"keep_for": "7x"}, "keep_for", "90min"),
        ({"keep_for": timedelta(0)}, "keep_for", "more than zero"),
        ({"keep_for": 7}, "keep_for", "7d"),
    ],
)
def test_how_long_files_are_kept_is_checked(options: dict[str, Any], argument: str, fix: str) -> None:
    with refused((ValueError, TypeError), argument, fix=fix):
        ModelCheckpoint(**{"save_top_k": -1, **options})


def test_a_multiple_of_steps_counts_that_lies_within_a_batch(tmp_path: Path) -> None:
    class StepsThrice(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(3):
                super().training_step(batch, batch_idx)

    saved = ModelCheckpoint(tmp_path, every_n_train_steps=4, **ALL_STEPS)
    average = EMAWeightAveraging(update_every_n_steps=5)
    quiet(callbacks=[saved, average], enable_checkpointing=True).fit(StepsThrice(), loader(16))
    assert steps(tmp_path) == {"step=6.ckpt": 6, "step=9.ckpt": 9, "step=12.ckpt": 12}
    # After the steps 0, 5 and 10, in the first, second and fourth batch.
    assert average._average_model is not None
    assert average._average_model.n_averaged == 3


class KeepsWeights(Manual):
    """Keeps the weights before each step, as the documentation of ``every_n_train_steps`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.layers
        self.saved_models: dict[int, dict[str, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.saved_models[batch_idx] = {name: value.clone() for name, value in self.layer.state_dict().items()}
        super().training_step(batch, batch_idx)


class UsesTheNames(Manual):
    """Has the names for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.layers
        self.saved_models = {"best": "a/path"}


@pytest.mark.parametrize("kind", [KeepsWeights, Manual, UsesTheNames])
def test_files_of_manual_optimization_have_the_weights_that_the_program_kept(tmp_path: Path, kind: Any) -> None:
    after: dict[int, Any] = {}

    def keep(trainer: L.Trainer, module: Any, *_: Any) -> None:
        after[trainer.global_step] = {name: value.clone() for name, value in module.layers.state_dict().items()}

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
    model = kind()
    quiet(callbacks=[L.callbacks.LambdaCallback(on_train_batch_end=keep), saves], enable_checkpointing=True).fit(
        model, loader(16)
    )
    for step in (2, 4):
        stored = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        expected = model.saved_models[step - 1] if kind is KeepsWeights else after[step]
        assert all(torch.equal(stored[f"layers.{name}"], value) for name, value in expected.items())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"].keys() == stored.keys()
    assert all(torch.equal(value, after[4][name]) for name, value in model.layers.state_dict().items())
