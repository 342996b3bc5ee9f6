"""Results of a Trainer's copies in other processes (``strategy="ddp_spawn"`` and similar)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten._lib.tree import move_to

if TYPE_CHECKING:
    from hasten.module.callback import Callback
    from hasten.trainer.properties import TrainerView


def export_results(trainer: TrainerView) -> dict[str, Any]:
    """See ``Trainer.export_results``."""
    assert trainer._module is not None
    logged = trainer._logged
    return {
        "weights": {key: value.cpu() for key, value in trainer._module.state_dict().items()},
        "progress": trainer._progress.state_dict(),
        "callbacks": [
            (move_to(callback.state_dict(), "cpu"), _paths_of(callback)) for callback in trainer._callbacks
        ],
        "values": (logged.callback_values, logged.logger_values, logged.bar_values),
        "state": trainer.state,
        "should_stop": trainer.should_stop,
    }


def import_results(trainer: TrainerView, results: dict[str, Any]) -> None:
    """See ``Trainer.import_results``."""
    assert trainer._module is not None
    trainer._module.load_state_dict(results["weights"])
    trainer._progress.load_state_dict(results["progress"])
    for callback, (state, paths) in zip(trainer._callbacks, results["callbacks"], strict=False):
        callback.load_state_dict(state)
        for name, value in paths.items():
            setattr(callback, name, value)
    logged = trainer._logged
    logged.callback_values, logged.logger_values, logged.bar_values = results["values"]
    trainer.state, trainer._should_stop = results["state"], results["should_stop"]


def _paths_of(callback: Callback) -> dict[str, Any]:
    """Return the attributes of a checkpoint callback that name the files it wrote."""
    names = ("best_model_path", "best_model_score", "best_k_models", "last_model_path", "dirpath")
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}
