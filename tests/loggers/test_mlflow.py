"""MLFlowLogger: what MLflow's own client reads back from the store."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hasten.loggers import MLFlowLogger
from tests.loggers.test_several import fit_with_checkpoints
from tests.models import Classifier, loader, quiet

mlflow = pytest.importorskip("mlflow")

pytestmark = pytest.mark.filterwarnings("ignore:::(mlflow|alembic|sqlalchemy)")


@pytest.fixture(autouse=True)
def _no_store_of_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    before = mlflow.get_tracking_uri()
    yield
    mlflow.set_tracking_uri(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store that all tests share: making one takes seconds."""
    return tmp_path_factory.mktemp("runs")


@functools.cache  # making one takes half a second
def client(store: Path) -> Any:
    return mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")


def values(store: Path, run_id: Any, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client(store).get_metric_history(run_id, name)]


def test_values_are_read_back(store: Path) -> None:
    logger = MLFlowLogger("digits", save_dir=store, run_name="first", tags={"who": "me"}, prefix="my")
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(0.25)}, step=1)
    logger.log_metrics({"loss": 0.125}, step=2)
    logger.finalize("success")
    assert values(store, logger.run_id, "my-loss") == [(1, 0.5), (2, 0.125)]
    assert values(store, logger.run_id, "my-acc") == [(1, 0.25)]
    run = client(store).get_run(logger.run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.tags["who"] == "me"
    experiment = client(store).get_experiment_by_name("digits")
    assert (logger.name, logger.experiment_id) == (experiment.experiment_id, experiment.experiment_id)
    assert (logger.version, logger.save_dir) == (run.info.run_id, str(store))
    assert Path(experiment.artifact_location.removeprefix("file://")) == store / "artifacts"


def test_experiments_and_where_their_artifacts_are(store: Path, tmp_path: Path) -> None:
    one, other = MLFlowLogger(save_dir=store), MLFlowLogger(save_dir=store)
    assert one.experiment_id == other.experiment_id
    assert one.run_id != other.run_id
    assert client(store).get_experiment_by_name("lightning_logs").experiment_id == one.experiment_id
    elsewhere = MLFlowLogger("elsewhere", save_dir=store, artifact_location=f"file://{tmp_path}/elsewhere")
    location = client(store).get_experiment(elsewhere.experiment_id).artifact_location
    assert location == f"file://{tmp_path}/elsewhere"


@pytest.mark.parametrize(("status", "stored"), [("success", "FINISHED"), ("failed", "FAILED"), ("aborted", "KILLED")])
def test_how_a_run_ended_is_stored(store: Path, status: str, stored: str) -> None:
    logger = MLFlowLogger(f"ends {status}", save_dir=store)
    logger.finalize(status)  # nothing was logged: there is no run yet, and none is made
    assert client(store).get_experiment_by_name(f"ends {status}") is None
    run_id = logger.run_id
    assert client(store).get_run(run_id).info.status == "RUNNING"
    logger.finalize(status)
    assert client(store).get_run(run_id).info.status == stored


def test_a_run_goes_on_by_its_id(store: Path) -> None:
    first = MLFlowLogger(save_dir=store)
    first.log_hyperparams({"lr": 0.1, "width": 8})
    first.log_metrics({"loss": 1.0}, step=0)
    first.finalize("failed")
    again = MLFlowLogger(save_dir=store, run_id=first.run_id)
    assert again.experiment_id == first.experiment_id
    assert client(store).get_run(first.run_id).info.status == "RUNNING"
    with pytest.warns(UserWarning, match=r"has other hyper-parameters.*: lr=0.2 \(was 0.1\)\. Leave out run_id="):
        again.log_hyperparams({"lr": 0.2, "width": 8, "seed": 3})
    again.log_metrics({"loss": 0.5}, step=1)
    again.finalize("success")
    assert values(store, first.run_id, "loss") == [(0, 1.0), (1, 0.5)]
    run = client(store).get_run(first.run_id)
    assert run.data.params == {"lr": "0.1", "width": "8", "seed": "3"}
    assert run.info.status == "FINISHED"
    again.log_metrics({"test": 2.0}, step=1)  # after the end: the run is opened again
    assert client(store).get_run(first.run_id).info.status == "RUNNING"
    again.finalize()
    assert values(store, first.run_id, "test") == [(1, 2.0)]
    assert client(store).get_run(first.run_id).info.status == "FINISHED"


def test_hyperparameters_nested_long_and_many(store: Path) -> None:
    logger = MLFlowLogger(save_dir=store)
    many = {f"p{i}": i for i in range(205)}
    logger.log_hyperparams({"optimizer": {"lr": 0.1, "act": torch.relu}, "long": "x" * 400, **many})
    params = client(store).get_run(logger.run_id).data.params
    assert len(params) == 208
    assert (params["optimizer/lr"], params["optimizer/act"], params["p204"]) == ("0.1", "relu", "204")
    assert params["long"] == "x" * 250


def test_names_and_values_mlflow_does_not_take(store: Path) -> None:
    logger = MLFlowLogger(save_dir=store)
    with pytest.warns(RuntimeWarning, match=r"Replacing lo\$ss\(val\) with lossval\."):
        logger.log_metrics({"lo$ss(val)": 1.0}, step=0)
    with pytest.warns(UserWarning, match="state='ok' is text"):
        logger.log_metrics({"state": "ok", "a/b-c.d e": 2.0})
    logger.finalize()
    assert values(store, logger.run_id, "lossval") == [(0, 1.0)]
    assert values(store, logger.run_id, "a/b-c.d e") == [(0, 2.0)]
    assert "state" not in client(store).get_run(logger.run_id).data.metrics


def test_a_slow_store_does_not_hold_up_the_caller(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    logger = MLFlowLogger(save_dir=store)
    may_write = threading.Event()
    real = logger.experiment.log_batch

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(logger.experiment, "log_batch", slow)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.log_metrics({"loss": 0.5}, step=1)
    assert values(store, logger.run_id, "loss") == []  # we are here, and the rows are not
    may_write.set()
    logger.finalize()
    assert values(store, logger.run_id, "loss") == [(0, 1.0), (1, 0.5)]
    at_once = MLFlowLogger(save_dir=store, synchronous=True)
    at_once.log_metrics({"loss": 1.0}, step=0)
    assert values(store, at_once.run_id, "loss") == [(0, 1.0)]


def test_rows_that_were_lost_are_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = MLFlowLogger(save_dir=store)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("connection lost")

    monkeypatch.setattr(logger.experiment, "log_batch", broken)
    with pytest.warns(UserWarning, match=r"1 row\(s\) of values could not be written to sqlite.*connection lost"):
        (logger.log_metrics({"loss": 1.0}, step=0), logger.finalize())


def test_no_more_rows_wait_than_memory_should_hold(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.loggers.mlflow._MOST_PENDING", 2)
    logger = MLFlowLogger(save_dir=store)
    for step in range(5):
        logger.log_metrics({"loss": 1.0}, step=step)
        assert len(logger._pending) <= 2
    logger.finalize()
    assert [step for step, _ in values(store, logger.run_id, "loss")] == [0, 1, 2, 3, 4]


def test_checkpoints_are_artifacts(store: Path) -> None:
    logger = MLFlowLogger(save_dir=store, log_model="all")
    keep = fit_with_checkpoints(logger)
    assert logger.experiment_id is not None
    assert logger.run_id is not None
    assert Path(keep.best_model_path).parent == store / logger.experiment_id / logger.run_id / "checkpoints"
    assert [folder.path for folder in client(store).list_artifacts(logger.run_id)] == ["epoch=0", "epoch=1"]
    beside = Path(client(store).download_artifacts(logger.run_id, "epoch=1"))
    assert sorted(path.name for path in beside.iterdir()) == ["aliases.txt", "epoch=1.ckpt", "metadata.yaml"]
    assert (beside / "aliases.txt").read_text() == "['latest', 'best']"
    metadata = yaml.safe_load((beside / "metadata.yaml").read_text())
    assert (metadata["score"], metadata["ModelCheckpoint"]["mode"]) == (0.5, "min")
    assert torch.load(beside / "epoch=1.ckpt", weights_only=True)["epoch"] == 1


def test_a_fit_logs_values_and_hyperparameters(store: Path) -> None:
    logger = MLFlowLogger(save_dir=store)
    trainer = quiet(logger=logger, log_every_n_steps=5)
    trainer.fit(Classifier(), loader(), loader())
    assert [step for step, _ in values(store, logger.run_id, "train_loss")] == [4, 9]
    ((step, loss),) = values(store, logger.run_id, "val_loss")
    assert (step, loss) == (9, pytest.approx(trainer.callback_metrics["val_loss"].item()))
    run = client(store).get_run(logger.run_id)
    assert run.data.params == {"width": "16", "lr": "0.1", "dropout": "0.0"}
    assert run.info.status == "FINISHED"


def log_elsewhere(logger: MLFlowLogger) -> str | None:
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize()
    return logger.run_id


def test_another_process_goes_on_with_the_run(store: Path) -> None:
    logger = MLFlowLogger(save_dir=store)
    logger.log_metrics({"loss": 1.0}, step=0)
    state = pickle.loads(pickle.dumps(logger)).__dict__
    assert (state["_experiment"], state["_run_id"]) == (None, logger.run_id)
    logger.finalize()
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(log_elsewhere, (logger,)) == logger.run_id
    assert values(store, logger.run_id, "loss") == [(0, 1.0), (1, 0.5)]


def test_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MLFlowLogger(tracking_uri="http://localhost:5000").save_dir is None
    assert MLFlowLogger(tracking_uri="file:/some/folder").save_dir == "/some/folder"
    assert MLFlowLogger(save_dir=tmp_path)._tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "meta.yaml").write_text("name: Default")
    assert MLFlowLogger(save_dir=tmp_path)._tracking_uri == f"file:{tmp_path}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert MLFlowLogger(save_dir=tmp_path)._tracking_uri == "sqlite:///other.db"
    assert MLFlowLogger(tracking_uri="sqlite:///mine.db")._tracking_uri == "sqlite:///mine.db"


def test_a_server_that_is_down_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen: list[int] = []

    class Watched(Classifier):
        def setup(self, stage: str) -> None:
            seen.append(1)

    trainer = quiet(logger=MLFlowLogger(tracking_uri=f"http://127.0.0.1:{port}"))
    with pytest.raises(RuntimeError, match=rf"tracking_uri='http://127.0.0.1:{port}'\): MLflow cannot use this store"):
        trainer.fit(Watched(), loader())
    assert seen == []


def test_a_run_that_does_not_exist_is_named(store: Path) -> None:
    with pytest.raises(RuntimeError, match=r"run_id='nope'\): MLflow cannot use this store.*not found"):
        MLFlowLogger(save_dir=store, run_id="nope").experiment
