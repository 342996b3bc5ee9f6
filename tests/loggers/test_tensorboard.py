"""TensorBoardLogger: what TensorBoard reads back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from hasten.demos import BoringModel
from hasten.loggers import TensorBoardLogger
from tests.refusals import refused, warned

pytest.importorskip("tensorboard")


def events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(folder)
    reader.Reload()
    return reader


def scalars(folder: str, name: str) -> list[tuple[int, float]]:
    return [(event.step, pytest.approx(event.value)) for event in events(folder).Scalars(name)]


def test_values_are_read_back(tmp_path: Path) -> None:
    placed = TensorBoardLogger(tmp_path, name="", version="mine", sub_dir="events", prefix="run")
    placed.log_metrics({"loss": 1.0}, step=0)
    placed.save()
    assert Path(placed.log_dir) == tmp_path / "mine" / "events"
    assert scalars(placed.log_dir, "run-loss") == [(0, 1.0)]
    logger = TensorBoardLogger(tmp_path, name="exp")
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(0.25)}, step=1)
    logger.log_metrics({"loss": 0.125}, step=2)
    logger.finalize("success")
    assert Path(logger.log_dir) == tmp_path / "exp" / "version_0"
    assert scalars(logger.log_dir, "loss") == [(1, 0.5), (2, 0.125)]
    assert scalars(logger.log_dir, "acc") == [(1, 0.25)]
    logger.log_metrics({"test": 2.0}, step=2)  # logging goes on
    logger.finalize("success")
    assert scalars(logger.log_dir, "test") == [(2, 2.0)]
    assert TensorBoardLogger(tmp_path, name="exp").version == 1


def test_hyperparameters_are_shown_and_stored(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "layers": [1, 2], "nested": {"act": torch.relu}})
    logger.save()
    assert scalars(logger.log_dir, "hp_metric") == [(0, -1.0)]
    plugin = events(logger.log_dir).summary_metadata["_hparams_/session_start_info"]
    assert plugin.plugin_data.plugin_name == "hparams"
    assert b"nested/act" in plugin.plugin_data.content
    stored = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert stored == {"lr": 0.1, "layers": [1, 2], "nested": {"act": "relu"}}
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_hyperparams({"lr": 0.1}, {"best_acc": 0.75}, step=4)
    logger.finalize("success")
    assert "hp_metric" not in events(logger.log_dir).Tags()["scalars"]
    assert scalars(logger.log_dir, "best_acc") == [(4, 0.75)]


def test_a_dict_becomes_curves_and_text_an_error(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"both": {"a": 1.0, "b": 2.0}}, step=0)
    with refused(ValueError, says=("'name'", "you tried to log text which is currently not supported")):
        logger.log_metrics({"name": "text"}, step=0)
    logger.finalize("success")
    assert (Path(logger.log_dir) / "both_a").is_dir()


class Net(nn.Module):
    def __init__(self, example: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.example_input_array = example

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Scales(BoringModel):
    """Its batches, and so its example, are bytes."""

    def on_after_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        return batch / 255


def test_graph(tmp_path: Path) -> None:
    off = TensorBoardLogger(tmp_path)
    off.log_graph(Net(torch.zeros(1, 3)))
    assert not Path(off.log_dir).exists()
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own tracing
        logger.log_graph(Net(torch.zeros(1, 3)))
        # A LightningModule without a Trainer, too.
        logger.log_graph(BoringModel(), torch.zeros(1, 32))
        logger.log_graph(Scales(), torch.zeros(1, 32, dtype=torch.uint8))
    logger.finalize("success")
    assert "layer" in str(events(logger.log_dir).Graph())
    with warned(UserWarning, says="`model.example_input_array` attribute is not set"):
        logger.log_graph(Net(None))
    with warned(UserWarning, says="has type <class 'dict'> which can't be traced", fix="self.example_input_array"):
        logger.log_graph(Net({"x": torch.zeros(1, 3)}))
