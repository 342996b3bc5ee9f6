"""What services receive from the loggers under Lightning's names."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hasten.loggers.base import SavedCheckpoint
from hasten_lightning._classes.loggers import CometLogger, MLFlowLogger, WandbLogger


def test_wandb_gets_the_arguments_and_texts_of_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", init := mock.Mock())
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    logger.log_hyperparams({"t": torch.tensor(1.0), "nested": Namespace(a=1), "f": len})
    usual = {"name": None, "project": "lightning_logs", "id": None, "resume": "allow", "anonymous": None}
    init.assert_called_once_with(dir=str(tmp_path), **usual)
    assert os.environ["WANDB_MODE"] == "dryrun"
    written = {"t": "tensor(1.)", "nested": "Namespace(a=1)", "f": "len"}
    init.return_value.config.update.assert_called_once_with(written, allow_val_change=True)


def test_comet_makes_one_configuration_and_has_no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    comet_ml = pytest.importorskip("comet_ml")
    monkeypatch.setattr(comet_ml, "ExperimentConfig", config := mock.Mock())
    monkeypatch.setattr(comet_ml, "start", start := mock.Mock())
    CometLogger(name="n")
    config.assert_called_once_with(name="n")
    start.return_value = None
    with pytest.raises(comet_ml.exceptions.ExperimentNotFound):
        CometLogger()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setattr(tracking, "MlflowClient", mock.Mock())
    monkeypatch.setattr("mlflow.set_tracking_uri", mock.Mock())
    client = tracking.MlflowClient.return_value
    client.create_run.return_value.info.run_id = "new"
    return client


def test_mlflow_is_called_as_values_are_logged(client: Any) -> None:
    logger = MLFlowLogger(tracking_uri="http://x", synchronous=True)
    logger.log_hyperparams({})
    client.create_run.assert_not_called()
    logger.log_metrics({"a": 1.0}, step=3)
    ((_, sent),) = client.log_batch.call_args_list
    assert ([(m.key, m.value, m.step) for m in sent["metrics"]], sent["synchronous"]) == ([("a", 1.0, 3)], True)
    logger.log_hyperparams({"f": len, "n": {"b": 1}})
    assert [(p.key, p.value) for p in client.log_batch.call_args[1]["params"]] == [("f", str(len)), ("n/b", "1")]
    client.get_run.assert_not_called()
    logger.finalize("strange")
    client.set_terminated.assert_called_once_with("new", "strange")


def test_mlflow_leaves_the_status_of_a_run_that_continues(client: Any, tmp_path: Path) -> None:
    logger = MLFlowLogger(tracking_uri="http://x", run_id="old")
    logger.log_metrics({"a": 1.0})
    client.update_run.assert_not_called()
    texts: list[str] = []
    client.log_artifacts.side_effect = lambda run, folder, name: texts.append(Path(folder, "metadata.yaml").read_text())
    options = {"score": 0.5, "original_filename": "a.ckpt", "ModelCheckpoint": {"monitor": "x", "mode": "min"}}
    logger._log_checkpoint(SavedCheckpoint(str(tmp_path / "a.ckpt"), ["latest"], options))
    assert texts == ["Checkpoint:\n  mode: min\n  monitor: x\noriginal_filename: a.ckpt\nscore: 0.5\n"]
