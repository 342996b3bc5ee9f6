"""ModelCheckpoint: which files there are after which run."""

from __future__ import annotations

import math
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.checkpoint import files
from tests.callbacks.scripted import Scripted, names, run
from tests.models import quiet


def step_of(path: str | Path) -> int:
    return int(files.load(path)["global_step"])


def test_without_a_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path)
    run(Scripted(), checkpoint, max_epochs=3)
    assert names(tmp_path) == ["epoch=2-step=12.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "epoch=2-step=12.ckpt")
    assert step_of(checkpoint.best_model_path) == 12


def test_the_default_folder_is_the_loggers(tmp_path: Path) -> None:
    trainer = run(Scripted(), default_root_dir=tmp_path, logger=True)
    assert names(Path(trainer.log_dir) / "checkpoints") == ["epoch=0-step=4.ckpt"]
    run(Scripted(), default_root_dir=tmp_path / "bare")
    assert names(tmp_path / "bare" / "checkpoints") == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize(
    ("mode", "best", "kept"), [("min", 1.0, {1.0: 1, 2.0: 3}), ("max", 5.0, {5.0: 0, 4.0: 2})]
)
def test_the_best_are_kept(tmp_path: Path, mode: str, best: float, kept: dict[float, int]) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.1f}", "val_loss", save_top_k=2, mode=mode)
    run(Scripted(val=[5.0, 1.0, 4.0, 2.0]), checkpoint, max_epochs=4)
    expected = {
        str(tmp_path / f"epoch={epoch}-val_loss={value:.1f}.ckpt"): value for value, epoch in kept.items()
    }
    assert {path: float(score) for path, score in checkpoint.best_k_models.items()} == expected
    assert names(tmp_path) == sorted(Path(path).name for path in expected)
    assert checkpoint.best_model_score == best
    assert expected[checkpoint.best_model_path] == best
    assert checkpoint.kth_best_model_path != checkpoint.best_model_path
    assert float(checkpoint.kth_value) == expected[checkpoint.kth_best_model_path]
    for path in expected:
        assert files.load(path)["epoch"] == int(Path(path).name.split("=")[1].split("-")[0])


@pytest.mark.parametrize(("keep", "count"), [(-1, 4), (0, 0), (1, 1), (3, 3)])
def test_how_many_are_kept(tmp_path: Path, keep: int, count: int) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=keep)
    run(Scripted(val=[3.0, 1.0, 2.0, 4.0]), checkpoint, max_epochs=4)
    assert len(names(tmp_path)) == count


def test_nan_is_the_worst_value(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", "val_loss")
    run(Scripted(val=[math.nan, 2.0, math.nan]), checkpoint, max_epochs=3)
    assert names(tmp_path) == ["epoch=1.ckpt"]
    assert checkpoint.best_model_score == 2.0


# -- last


def test_last_does_not_depend_on_the_monitor(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_last=True)
    run(Scripted(val=[1.0, 2.0, 3.0]), checkpoint, max_epochs=3)
    assert names(tmp_path) == ["epoch=0.ckpt", "last.ckpt"]
    assert step_of(tmp_path / "last.ckpt") == 12
    assert checkpoint.last_model_path == str(tmp_path / "last.ckpt")


def test_last_is_saved_while_the_monitored_value_is_not_there_yet(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_last=True)
    run(Scripted(val=[1.0]), checkpoint, max_epochs=1, check_val_every_n_epoch=5)
    assert names(tmp_path) == ["last.ckpt"]


def test_last_alone(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, save_last=True, save_top_k=0), max_epochs=2)
    assert names(tmp_path) == ["last.ckpt"]
    assert step_of(tmp_path / "last.ckpt") == 8


def test_last_as_a_link(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_last="link")
    run(Scripted(val=[3.0, 2.0, 1.0]), checkpoint, max_epochs=3)
    last = tmp_path / "last.ckpt"
    assert last.is_symlink()
    assert last.resolve() == tmp_path / "epoch=2.ckpt"
    assert names(tmp_path) == ["epoch=2.ckpt", "last.ckpt"]


def test_a_link_never_points_to_an_older_state(tmp_path: Path) -> None:
    run(
        Scripted(val=[1.0, 2.0]),
        ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_last="link"),
        max_epochs=2,
    )
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert step_of(tmp_path / "last.ckpt") == 8
    assert step_of(tmp_path / "epoch=0.ckpt") == 4


def test_the_name_of_last_can_be_changed(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    checkpoint.CHECKPOINT_NAME_LAST = "{epoch}-last"
    run(Scripted(), checkpoint, max_epochs=2)
    assert names(tmp_path) == ["epoch=1-last.ckpt"]


# -- when


def test_every_n_steps(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3), max_epochs=2)
    assert names(tmp_path) == ["step=3.ckpt", "step=6.ckpt"]


def test_steps_are_optimizer_steps(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    run(Scripted(), checkpoint, accumulate_grad_batches=2)
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt"]


class Notes(ModelCheckpoint):
    """Notes at which (step, batch) it saves, and what it removes."""

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


def test_batches_of_an_accumulation_save_once(tmp_path: Path) -> None:
    checkpoint = Notes(tmp_path, save_last=True, save_top_k=0, every_n_train_steps=1)
    run(Scripted(), checkpoint, accumulate_grad_batches=2)
    assert checkpoint.saved == [(1, 1), (2, 3)]


def test_each_file_is_removed_once(tmp_path: Path) -> None:
    checkpoint = Notes(tmp_path, "{step}")
    run(Scripted(), checkpoint, max_epochs=4)
    assert checkpoint.removed == ["step=4.ckpt", "step=8.ckpt", "step=12.ckpt"]
    assert checkpoint.state_dict()["books"]["unwanted"] == []


def test_last_does_not_stand_for_the_ranked_file_of_its_step(tmp_path: Path) -> None:
    # Due at step 4: ``last`` is saved at once, the ranked file when the validation of that step has its value.
    checkpoint = ModelCheckpoint(tmp_path, "{step}", "val_loss", save_last=True, every_n_train_steps=4)
    run(Scripted(val=[1.0]), checkpoint)
    assert names(tmp_path) == ["last.ckpt", "step=4.ckpt"]


def test_every_n_epochs(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=2)
    run(Scripted(), checkpoint, max_epochs=5)
    assert names(tmp_path) == ["epoch=1.ckpt", "epoch=3.ckpt"]


def test_by_time(tmp_path: Path) -> None:
    always = ModelCheckpoint(tmp_path / "a", "{step}", save_top_k=-1, train_time_interval=timedelta(0))
    never = ModelCheckpoint(tmp_path / "b", "{step}", save_top_k=-1, train_time_interval=timedelta(hours=1))
    run(Scripted(), always, never)
    assert names(tmp_path / "a") == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]
    assert names(tmp_path / "b") == []


def test_several_at_once(tmp_path: Path) -> None:
    callbacks = [
        ModelCheckpoint(tmp_path / "steps", "{step}", save_top_k=-1, every_n_train_steps=4),
        ModelCheckpoint(tmp_path / "best", "{epoch}", "val_loss"),
        ModelCheckpoint(tmp_path / "train", "{epoch}", "train_value", mode="max"),
    ]
    trainer = run(Scripted(val=[2.0, 1.0, 3.0], train=[1.0, 2.0, 3.0]), *callbacks, max_epochs=3)
    assert names(tmp_path) == [
        "best/epoch=1.ckpt",
        "steps/step=12.ckpt",
        "steps/step=4.ckpt",
        "steps/step=8.ckpt",
        "train/epoch=2.ckpt",
    ]
    assert trainer.checkpoint_callback is callbacks[0]
    assert len({callback.state_key for callback in callbacks}) == 3


def test_a_validation_value_is_ranked_after_its_validation_also_when_steps_say_when(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, "{step}-{val_loss:.0f}", "val_loss", save_top_k=2, every_n_train_steps=3
    )
    run(Scripted(val=[7.0, 5.0]), checkpoint, max_epochs=2)
    # Due at steps 3 and 6; validations end at steps 4 and 8.
    assert names(tmp_path) == ["step=4-val_loss=7.ckpt", "step=8-val_loss=5.ckpt"]


def test_all_are_kept_at_each_due_step_once_there_is_a_value(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", "val_loss", save_top_k=-1, every_n_train_steps=3)
    run(Scripted(val=[7.0, 5.0, 3.0]), checkpoint, max_epochs=3)
    assert names(tmp_path) == [f"step={step}.ckpt" for step in (12, 4, 6, 9)]


def test_a_value_of_training_steps_is_ranked_at_once(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", "step_value", mode="max", every_n_train_steps=3)
    run(Scripted(val=[1.0], step=True), checkpoint, max_epochs=2)
    assert names(tmp_path) == ["step=6.ckpt"]
    assert checkpoint.best_model_score == 5.0


def test_an_epoch_value_of_training_is_ranked_when_it_is_new(tmp_path: Path) -> None:
    # Validation twice an epoch: at its ends the training's value is that of the epoch before.
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}-{train_value:.0f}", "train_value", save_top_k=-1)
    run(Scripted(val=[1.0], train=[5.0, 4.0]), checkpoint, max_epochs=2, val_check_interval=0.5)
    assert names(tmp_path) == ["epoch=0-train_value=5.ckpt", "epoch=1-train_value=4.ckpt"]


def test_validation_within_the_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}-{val_loss:.0f}", "val_loss", save_top_k=-1)
    run(Scripted(val=[4.0, 3.0, 2.0, 1.0]), checkpoint, max_epochs=2, val_check_interval=0.5)
    assert names(tmp_path) == [f"step={2 * i}-val_loss={5 - i}.ckpt" for i in (1, 2, 3, 4)]


def test_epochs_without_validation(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.0f}", "val_loss", save_top_k=-1)
    run(Scripted(val=[4.0, 3.0]), checkpoint, max_epochs=4, check_val_every_n_epoch=2)
    assert names(tmp_path) == ["epoch=1-val_loss=4.ckpt", "epoch=3-val_loss=3.ckpt"]


def test_nothing_is_saved_in_a_quick_check(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, save_last=True), fast_dev_run=2)
    assert names(tmp_path) == []


def test_the_sanity_check_saves_nothing(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[ModelCheckpoint(tmp_path, monitor="val_loss")], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Scripted(val=[1.0]), (1 // 0 for _ in range(3)), [torch.zeros(2, 1)])
    assert names(tmp_path) == []


# -- errors


@pytest.mark.parametrize("name", ["val_los", "other"])
def test_a_monitor_that_is_not_logged_is_an_error_naming_what_is(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"monitor='{name}'.*logged so far is 'val_loss'") as caught:
        run(Scripted(val=[1.0]), ModelCheckpoint(tmp_path, monitor=name), max_epochs=3)
    assert ("Did you mean 'val_loss'?" in str(caught.value)) == (name == "val_los")


def test_a_missing_monitor_is_found_out_without_validation_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="could not find the monitored key"):
        run(Scripted(), ModelCheckpoint(tmp_path, monitor="val_loss"), limit_val_batches=0)


def test_links_need_a_local_folder() -> None:
    with pytest.raises(ValueError, match="save_last='link'"):
        run(Scripted(), ModelCheckpoint("memory://here", save_last="link"))


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
    ],
)
def test_names(template: str | None, insert: bool, name: str) -> None:
    checkpoint = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    metrics = {"epoch": 3, "step": 20, "val_loss": torch.tensor(0.123456), "epoch_test": 7, "val/loss": 0.5}
    assert checkpoint.format_checkpoint_name(metrics) == name


def test_version_prefix_and_signs(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}")
    assert checkpoint.format_checkpoint_name({"epoch": 1}, ver=2) == str(tmp_path / "epoch=1-v2.ckpt")
    assert checkpoint.format_checkpoint_name({"epoch": 1}, prefix="test") == str(
        tmp_path / "test-epoch=1.ckpt"
    )
    checkpoint.CHECKPOINT_EQUALS_CHAR, checkpoint.CHECKPOINT_JOIN_CHAR = ":", "_"
    checkpoint.FILE_EXTENSION = ".pt"
    assert checkpoint.format_checkpoint_name({"epoch": 1}, ver=2) == str(tmp_path / "epoch:1_v2.pt")


def test_values_cannot_leave_the_folder(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{name}", auto_insert_metric_name=False)
    path = Path(checkpoint.format_checkpoint_name({"name": "../../etc/pass\0wd"}))
    assert path.parent == tmp_path
    assert path.name == ".._.._etc_pass_wd.ckpt"


def test_a_value_that_has_no_such_format_says_so() -> None:
    with pytest.raises(ValueError, match=r"val_acc is 0.5.*\{val_acc:.2f\}"):
        ModelCheckpoint(filename="{val_acc:d}").format_checkpoint_name({"val_acc": 0.5})


def test_the_same_name_gets_a_version(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, "model", save_top_k=-1), max_epochs=3)
    assert names(tmp_path) == ["model-v1.ckpt", "model-v2.ckpt", "model.ckpt"]


def test_the_same_name_is_written_over_without_versions(tmp_path: Path) -> None:
    run(
        Scripted(),
        ModelCheckpoint(tmp_path, "model", save_top_k=-1, enable_version_counter=False),
        max_epochs=3,
    )
    assert names(tmp_path) == ["model.ckpt"]
    assert step_of(tmp_path / "model.ckpt") == 12


def test_files_of_another_run_are_kept_and_spoken_of(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, save_last=True))
    with pytest.warns(UserWarning, match="exists and is not empty"):
        run(Scripted(), ModelCheckpoint(tmp_path, save_last=True))
    assert names(tmp_path) == ["epoch=0-step=4-v1.ckpt", "epoch=0-step=4.ckpt", "last-v1.ckpt", "last.ckpt"]


def test_files_of_another_run_are_spoken_of_where_more_are_ranked(tmp_path: Path) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, "first"))
    with pytest.warns(UserWarning, match="exists and is not empty"):
        run(Scripted(), ModelCheckpoint(tmp_path, "all", save_top_k=-1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Scripted(), ModelCheckpoint(tmp_path, save_last=True, save_top_k=0))
    assert names(tmp_path) == ["all.ckpt", "first.ckpt", "last.ckpt"]


def test_names_in_folders_below(tmp_path: Path) -> None:
    run(
        Scripted(val=[1.0]),
        ModelCheckpoint(tmp_path, "{epoch}/best", "val_loss", auto_insert_metric_name=False),
    )
    assert names(tmp_path) == ["0/best.ckpt"]


def test_the_ranking_as_yaml(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", "val_loss", save_top_k=2)
    run(Scripted(val=[3.0, 2.0]), checkpoint, max_epochs=2)
    checkpoint.to_yaml()
    checkpoint.to_yaml(tmp_path / "other.yaml")
    ranking = yaml.safe_load((tmp_path / "best_k_models.yaml").read_text())
    assert ranking == {str(tmp_path / "epoch=0.ckpt"): 3.0, str(tmp_path / "epoch=1.ckpt"): 2.0}
    assert (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_only(tmp_path: Path, weights_only: bool) -> None:
    run(Scripted(), ModelCheckpoint(tmp_path, save_weights_only=weights_only))
    (path,) = tmp_path.iterdir()
    assert ("optimizer_states" in files.load(path)) != weights_only


def test_loggers_are_told(tmp_path: Path) -> None:
    from hasten.loggers import CSVLogger

    told: list[str] = []

    class Told(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            told.append(checkpoint_callback.best_model_path)

    run(Scripted(), ModelCheckpoint(tmp_path / "c", "{epoch}"), logger=Told(tmp_path), max_epochs=2)
    assert told == [str(tmp_path / "c" / f"epoch={epoch}.ckpt") for epoch in (0, 1)]


def test_a_step_costs_nothing_unless_steps_or_time_say_when(tmp_path: Path) -> None:
    from hasten.hooks import overrides

    assert not overrides(ModelCheckpoint(), L.Callback, "on_train_batch_end")
    assert overrides(ModelCheckpoint(every_n_train_steps=5), L.Callback, "on_train_batch_end")

    class Mine(ModelCheckpoint):
        def on_train_batch_end(self, *arguments: Any, **named: Any) -> None:
            super().on_train_batch_end(*arguments, **named)

    assert overrides(Mine(), L.Callback, "on_train_batch_end")


def test_remote_folders(tmp_path: Path) -> None:
    import fsspec

    checkpoint = ModelCheckpoint("memory://checks", "{epoch}", "val_loss", save_last=True)
    run(Scripted(val=[3.0, 2.0, 4.0]), checkpoint, max_epochs=3)
    system = fsspec.filesystem("memory")
    assert sorted(path.rsplit("/", 1)[1] for path in system.ls("/checks", detail=False)) == [
        "epoch=1.ckpt",
        "last.ckpt",
    ]
    assert checkpoint.best_model_path == "memory://checks/epoch=1.ckpt"
