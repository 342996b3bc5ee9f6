"""The states that callbacks store in checkpoints: their form is that of files written earlier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, ModelPruning
from hasten.checkpoint import files
from tests.callbacks.resuming import SaveAt, assert_same, fitted, weights
from tests.callbacks.scripted import Scripted, names, run
from tests.models import Classifier


def rewritten(path: Path, callback: L.Callback, state: dict[str, Any]) -> Path:
    """Return a copy of a checkpoint in which the state of a callback is replaced."""
    checkpoint = files.load(path)
    assert callback.state_key in checkpoint["callbacks"]
    checkpoint["callbacks"][callback.state_key] = state
    copy = path.with_name("rewritten.ckpt")
    torch.save(checkpoint, copy)
    return copy


def test_the_ranking_of_a_model_checkpoint(tmp_path: Path) -> None:
    folder, apart = tmp_path / "run", tmp_path / "apart"

    def fit(folder: Path, epochs: int, ckpt_path: Path | None = None) -> ModelCheckpoint:
        checkpoint = ModelCheckpoint(folder, "{epoch}", "val_loss", save_last=True, save_top_k=2)
        run(Scripted(val=[3.0, 1.0, 2.0, 4.0]), checkpoint, max_epochs=epochs, ckpt_path=ckpt_path)
        return checkpoint

    whole, killed = fit(apart, 4), fit(folder, 2)
    first, second, last = (str(folder / f"{name}.ckpt") for name in ("epoch=0", "epoch=1", "last"))
    state: dict[str, Any] = {
        "monitor": "val_loss",
        "best_model_score": torch.tensor(1.0),
        "best_model_path": second,
        "current_score": torch.tensor(1.0),
        "dirpath": str(folder),
        "best_k_models": {first: torch.tensor(3.0), second: torch.tensor(1.0)},
        "kth_best_model_path": first,
        "kth_value": torch.tensor(3.0),
        "last_model_path": last,
        "books": {
            "last_checkpoint_saved": last,
            "last_global_step_saved": 8,
            "ranked_step": 8,
            "saved_at": [8, 7],
            "last_at": [8, 7],
            "unwanted": [],
            "deferred": False,
            "origin": "validate",
        },
    }
    assert_same(killed.state_dict(), state)
    # A process that was killed before it removed a file: the resumed one removes it.
    leftover = folder / "leftover.ckpt"
    leftover.touch()
    state["books"]["unwanted"] = [str(leftover)]
    start = rewritten(folder / "last.ckpt", killed, state).rename(tmp_path / "start.ckpt")
    resumed = fit(folder, 4, start)
    assert names(folder) == names(apart) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    mine, other = (
        {Path(path).name: float(score) for path, score in each.best_k_models.items()} for each in (resumed, whole)
    )
    assert mine == other == {"epoch=1.ckpt": 1.0, "epoch=2.ckpt": 2.0}
    deferred = {**state, "books": {**state["books"], "deferred": True, "origin": "epoch", "saved_at": None}}
    resumed.load_state_dict(deferred)
    assert_same(resumed.state_dict(), deferred)


def test_the_state_of_early_stopping(tmp_path: Path) -> None:
    values = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5]
    saver = ModelCheckpoint(tmp_path, save_last=True)
    stopper = EarlyStopping("val_loss", patience=3)
    run(Scripted(val=values), stopper, saver, max_epochs=3)
    state = {
        "wait_count": 1,
        "stopped_epoch": 0,
        "best_score": torch.tensor(4.0),
        "patience": 3,
        "stopping_reason": 0,
        "stopping_reason_message": None,
        "origin": "validate",
    }
    assert_same(stopper.state_dict(), state)
    start = rewritten(tmp_path / "last.ckpt", stopper, {**state, "wait_count": 2})
    stopper = EarlyStopping("val_loss", patience=3)
    run(Scripted(val=values), stopper, max_epochs=6, ckpt_path=start, enable_checkpointing=False)
    assert (stopper.wait_count, stopper.stopped_epoch) == (3, 3)
    assert stopper.state_dict()["origin"] == "validate"


def test_the_state_of_pruning(tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    look = LambdaCallback(on_train_start=lambda trainer, module: seen.append(weights(trainer)))

    def callbacks() -> list[L.Callback]:
        return [
            ModelPruning(
                "l1_unstructured",
                parameter_names=["weight"],
                amount=lambda epoch: 0.3 if epoch == 0 else 0,
                use_lottery_ticket_hypothesis=lambda epoch: epoch == 2,
            )
        ]

    saver = SaveAt(tmp_path / "a.ckpt", 8)
    fitted(Classifier, callbacks, saver, max_epochs=2)
    pruning = callbacks()[0]
    names = ["layers.0.weight", "layers.3.weight"]
    shapes = {name: value.shape for name, value in Classifier().state_dict().items() if name in names}
    stored = files.load(saver.path)["callbacks"][pruning.state_key]
    assert {key: list(values) for key, values in stored.items()} == dict.fromkeys(
        ("masks", "hidden", "first_values"), names
    )
    masks = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    for mask in masks.values():
        mask[0] = False
    state = {
        "masks": masks,
        "hidden": {name: torch.full((shape[1],), 7.0) for name, shape in shapes.items()},
        "first_values": {name: torch.full(shape, 2.0) for name, shape in shapes.items()},
    }
    start = rewritten(saver.path, pruning, state)
    resumed = fitted(Classifier, lambda: [*callbacks(), look], ckpt_path=start, seed=99, max_epochs=2)
    for name in names:
        assert (seen[0][f"{name}_mask"] == masks[name]).all()
        assert (seen[0][f"{name}_orig"][0] == 7.0).all()
        assert (weights(resumed)[name][0] == 0.0).all()
    callback = resumed.callbacks[0]
    assert isinstance(callback, ModelPruning)
    assert_same(callback.state_dict()["first_values"], state["first_values"])


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
