"""CometLogger: what is in the archive of an offline experiment."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.loggers import CometLogger
from tests.loggers.test_several import fit_with_checkpoints
from tests.models import Classifier, loader, quiet

os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
comet_ml = pytest.importorskip("comet_ml")

KEY = "hasten" + "0" * 30
# What would look at this machine, for seconds.
LOOKS = ("log_code", "log_env_details", "log_git_metadata", "log_git_patch", "parse_args", "auto_log_co2")
FEW: dict[str, Any] = {**dict.fromkeys(LOOKS, False), "display_summary_level": 0, "auto_output_logging": False}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    yield
    running = comet_ml.get_running_experiment()
    if running is not None:
        running.end()


def offline(folder: Path, **options: Any) -> CometLogger:
    return CometLogger(**{"project": "digits", "online": False, "offline_directory": str(folder), **FEW, **options})


def archive(logger: CometLogger) -> zipfile.ZipFile:
    logger.experiment.flush()
    logger.experiment.end()
    assert logger.save_dir is not None
    (path,) = Path(logger.save_dir).glob("*.zip")
    return zipfile.ZipFile(path)


def messages(logger: CometLogger, kind: str) -> list[dict[str, Any]]:
    """Return what was logged of one kind, in order."""
    lines = [json.loads(line) for line in archive(logger).read("messages.json").splitlines()]
    return [line["payload"] for line in lines if line["type"] == kind]


def values(logger: CometLogger) -> list[tuple[str, float, int | None, int | None]]:
    found = [message["metric"] for message in messages(logger, "metric_msg")]
    return [(m["metricName"], float(m["metricValue"]), m.get("step"), m.get("epoch")) for m in found]


def test_values_are_read_back(tmp_path: Path) -> None:
    logger = offline(tmp_path, experiment_key=KEY, prefix="my")
    assert (logger.name, logger.version, logger.save_dir) == ("digits", KEY, str(tmp_path))
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(0.25), "epoch": 2}, step=7)
    logger.finalize("success")
    logger.log_metrics({"loss": 0.125}, step=8)  # the experiment is still open
    assert sorted(values(logger), key=str) == [
        ("my_acc", 0.25, 7, 2),
        ("my_loss", 0.125, 8, 2),  # Comet remembers the epoch
        ("my_loss", 0.5, 7, 2),
    ]


def test_hyperparameters_and_graph(tmp_path: Path) -> None:
    logger = offline(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "optimizer": {"act": torch.relu}})
    logger.log_graph(torch.nn.Linear(2, 1))
    logged = {m["param"]["paramName"]: m["param"]["paramValue"] for m in messages(logger, "parameter_msg")}
    assert (logged["lr"], logged["optimizer|act"]) == (0.1, "relu")
    assert [m["graph"] for m in messages(logger, "graph")] == [str(torch.nn.Linear(2, 1))]


def test_a_fit_logs_values_and_names_its_checkpoints(tmp_path: Path) -> None:
    logger = offline(tmp_path, experiment_key=KEY)
    trainer = quiet(logger=logger, enable_checkpointing=True, log_every_n_steps=5)
    trainer.fit(Classifier(), loader(), loader())
    trainer.test(dataloaders=loader(), verbose=False)
    assert trainer.checkpoint_callback is not None
    saved = Path(trainer.checkpoint_callback.best_model_path)
    assert saved.parent == tmp_path / "digits" / KEY / "checkpoints"
    steps = [(name, step) for name, _, step, _ in values(logger)]
    assert steps == [("train_loss", 4), ("train_loss", 9), ("val_loss", 9), ("test_loss", 10)]


def test_checkpoints_are_models_unless_the_run_failed(tmp_path: Path) -> None:
    logger = offline(tmp_path, log_model="all")
    keep = fit_with_checkpoints(logger, tmp_path / "ckpt")
    logger._log_model = True
    os.utime(keep.best_model_path)
    logger.after_save_checkpoint(keep)
    logger.finalize("failed")
    models = [m for m in messages(logger, "file_upload") if m["upload_type"] == "model-element"]
    assert [m["additional_params"]["fileName"] for m in models] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert models[-1]["additional_params"]["groupingName"] == "epoch=1"
    assert models[-1]["metadata"]["aliases"] == ["latest", "best"]
    assert models[-1]["metadata"]["score"] == 0.5


class Started:
    """Stands for an experiment, and keeps what it was started with."""

    project_name = "digits"

    def __init__(self, experiment_config: Any, **options: Any) -> None:
        self.options = {**vars(experiment_config), **options}

    def get_key(self) -> str:
        return str(self.options["experiment_key"] or KEY)

    def log_other(self, *_: Any) -> None:
        pass

    def flush(self) -> None:
        self.flushed = True


@pytest.mark.parametrize(
    ("older", "now"),
    [
        ({"experiment_name": "first"}, {"name": "first"}),
        ({"project_name": "other"}, {"project": "other"}),
        ({"offline": True}, {"online": False}),
        ({"offline": False}, {"online": True}),
        ({"save_dir": "here"}, {"offline_directory": "here"}),
        ({"name": "new", "experiment_name": "old"}, {"name": "new"}),
    ],
)
def test_older_names_of_arguments_still_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, older: dict[str, Any], now: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comet_ml, "start", Started)
    with pytest.warns(DeprecationWarning, match=rf"{list(older)[-1]}=...\) is an older name. Write {next(iter(now))}="):
        logger = CometLogger(**older)
    assert {name: logger.experiment.options[name] for name in now} == now


@pytest.mark.parametrize("status", ["success", "failed"])
def test_everything_is_sent_when_a_run_ends(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    monkeypatch.setattr(comet_ml, "start", Started)
    logger = CometLogger()
    logger.finalize(status)
    assert logger.experiment.flushed


def test_what_is_given_reaches_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comet_ml, "start", Started)
    given = {"api_key": "k", "workspace": "w", "project": "p", "mode": "create", "experiment_key": KEY}
    logger = CometLogger(**given, tags=["a"])  # type: ignore[arg-type]
    options = logger.experiment.options
    assert {name: options[name] for name in given} == given
    assert options["tags"] == ["a"]
    assert (logger.name, logger.version) == ("digits", KEY)


def test_copies_go_on_with_the_same_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comet_ml, "start", Started)
    logger = CometLogger()
    twin = pickle.loads(pickle.dumps(logger))
    assert twin.__dict__["_experiment"] is None
    assert twin.version == KEY
    assert twin.experiment.options["experiment_key"] == KEY


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"CometLogger\(offline_directory='.*runs'\) cannot write to"):
        offline(tmp_path / "file" / "runs")


def test_no_key_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("Comet.ml requires an API key.")

    monkeypatch.setattr(comet_ml, "start", refuse)
    with pytest.raises(RuntimeError, match=r"did not start an experiment: Comet.ml requires an API key.*online=False"):
        CometLogger()
