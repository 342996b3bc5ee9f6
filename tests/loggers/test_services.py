"""The loggers of services: what W&B's file, Comet's archive and MLflow's store hold afterwards."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import socket
import struct
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import hasten as L
from hasten.loggers import CometLogger, MLFlowLogger, WandbLogger
from tests.loggers.elsewhere import log_elsewhere
from tests.loggers.test_several import fit_with_checkpoints
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned

os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")

pytestmark = pytest.mark.filterwarnings("ignore:::(mlflow|alembic|sqlalchemy)")

KEY = "hasten" + "0" * 30
# What would look at this machine, for seconds.
LOOKS = ("log_code", "log_env_details", "log_git_metadata", "log_git_patch", "parse_args", "auto_log_co2")
FEW: dict[str, Any] = {**dict.fromkeys(LOOKS, False), "display_summary_level": 0, "auto_output_logging": False}
ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_X_DISABLE_STATS": "true",
    "COMET_LOGGING_CONSOLE": "ERROR",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "DO_NOT_TRACK": "true",
}
UNSET = ("WANDB_PROJECT", "COMET_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # Here, as these tests run in one process of several, each of which would import them for 2.8 seconds.
    wandb, comet_ml, mlflow = map(pytest.importorskip, ("wandb", "comet_ml", "mlflow"))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    before = mlflow.get_tracking_uri()
    yield
    mlflow.set_tracking_uri(before)
    wandb.finish()
    if (running := comet_ml.get_running_experiment()) is not None:
        running.end()


# -- the files of W&B


def parsed(data: bytes) -> list[Any]:
    """Return the records in a file of W&B's format.

    It is a LevelDB log: after 7 bytes, blocks of 32 KiB of fragments with checksum, length and kind.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    assert data[:4] in (b"", b":W&B")
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # whole, or the last fragment
            record = Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def of_kind(folder: str | Path, kind: str) -> list[Any]:
    """Return the records of one kind of the one run under ``folder``, when its end has been written."""
    import wandb

    wandb.finish()
    (path,) = Path(folder, "wandb").glob("offline-run-*/run-*.wandb")
    until = time.monotonic() + 600
    while not (found := parsed(path.read_bytes())) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, "W&B did not end the file"
        time.sleep(0.02)
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of values, without W&B's own columns; media are dicts."""
    found = []
    for history in of_kind(folder, "history"):
        row: dict[str, Any] = {}
        for item in history.item:
            *above, name = item.nested_key
            place = row
            for key in above:
                place = place.setdefault(key, {})
            place[name] = json.loads(item.value_json)
        found.append({name: value for name, value in row.items() if not name.startswith("_")})
    return found


# -- each service: its logger, and what its own reader finds; (name, step, value), hyper-parameters, checkpoints as
#    (name, aliases, metadata)

Values = list[tuple[str, int, float]]
Uploads = list[tuple[str, list[str], dict[str, Any]]]


class OfWandb:
    separator = "-"

    def __init__(self, folder: Path, store: Path) -> None:
        self.make = functools.partial(WandbLogger, save_dir=folder, project="digits", id="run1")

    def values(self, logger: WandbLogger) -> Values:
        found = [(dict(row), row["trainer/global_step"]) for row in rows(str(logger.save_dir))]
        return [(name, step, value) for row, step in found for name, value in row.items() if "loss" in name]

    def params(self, logger: WandbLogger) -> dict[str, Any]:
        updates = of_kind(str(logger.save_dir), "config")
        return {item.key: json.loads(item.value_json) for update in updates for item in update.update}

    def checkpoints(self, logger: WandbLogger) -> Uploads:
        found = of_kind(str(logger.save_dir), "artifact")
        assert {(one.name, *(entry.path for entry in one.manifest.contents)) for one in found} <= {
            ("model-run1", "model.ckpt")
        }
        metadata = [json.loads(one.metadata) for one in found]
        return [(m["original_filename"], list(one.aliases), m) for one, m in zip(found, metadata, strict=True)]


class OfComet:
    separator = "_"

    def __init__(self, folder: Path, store: Path) -> None:
        options = {"project": "digits", "online": False, "offline_directory": str(folder), "experiment_key": KEY}
        self.make = functools.partial(CometLogger, **options, **FEW)

    def messages(self, logger: CometLogger, kind: str) -> list[dict[str, Any]]:
        """End the experiment; return what was logged of one kind, in order."""
        logger.experiment.flush()
        logger.experiment.end()
        (path,) = Path(str(logger.save_dir)).glob("*.zip")
        lines = [json.loads(line) for line in zipfile.ZipFile(path).read("messages.json").splitlines()]
        return [line["payload"] for line in lines if line["type"] == kind]

    def values(self, logger: CometLogger) -> Values:
        found = [message["metric"] for message in self.messages(logger, "metric_msg")]
        return [(m["metricName"], m["step"], float(m["metricValue"])) for m in found]

    def params(self, logger: CometLogger) -> dict[str, Any]:
        found = [message["param"] for message in self.messages(logger, "parameter_msg")]
        return {param["paramName"]: param["paramValue"] for param in found}

    def checkpoints(self, logger: CometLogger) -> Uploads:
        found = [m for m in self.messages(logger, "file_upload") if m["upload_type"] == "model-element"]
        assert all(
            m["additional_params"]["groupingName"] + ".ckpt" == m["additional_params"]["fileName"] for m in found
        )
        return [(m["additional_params"]["fileName"], m["metadata"]["aliases"], m["metadata"]) for m in found]


class OfMLFlow:
    separator = "-"

    def __init__(self, folder: Path, store: Path) -> None:
        self.make = functools.partial(MLFlowLogger, "digits", save_dir=store)

    def values(self, logger: MLFlowLogger) -> Values:
        client = logger.experiment
        names = [name for name in client.get_run(logger.run_id).data.metrics if "loss" in name]
        histories = [client.get_metric_history(logger.run_id, name) for name in names]
        return [(one.key, one.step, one.value) for history in histories for one in history]

    def params(self, logger: MLFlowLogger) -> dict[str, Any]:
        return dict(logger.experiment.get_run(logger.run_id).data.params)

    def checkpoints(self, logger: MLFlowLogger) -> Uploads:
        client, found = logger.experiment, []
        for folder in client.list_artifacts(logger.run_id):
            files = {path.name: path for path in Path(client.download_artifacts(logger.run_id, folder.path)).iterdir()}
            metadata = yaml.safe_load(files.pop("metadata.yaml").read_text())
            aliases = yaml.safe_load(files.pop("aliases.txt").read_text())
            (path,) = files.values()
            assert path.name == f"{folder.path}.ckpt" == metadata["original_filename"]
            found.append((path.name, aliases, metadata))
        return found


SERVICES = [OfWandb, OfComet, OfMLFlow]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store of MLflow that all tests share: making one takes seconds."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, tmp_path: Path, store: Path) -> Any:
    return request.param(tmp_path, store)


def test_values_and_hyperparameters_are_read_back(service: Any) -> None:
    logger = service.make(prefix="my")
    logger.log_metrics({"loss": 0.5, "val_loss": torch.tensor(0.25)}, step=3)
    logger.log_hyperparams({"lr": 0.1, "act": torch.relu, "nested": {"path": Path("data")}})
    logger.finalize("success")
    logger.log_metrics({"loss": 0.125}, step=4)  # after the end: the run is still open, or opened again
    logger.finalize("success")
    loss, val_loss = (f"my{service.separator}{name}" for name in ("loss", "val_loss"))
    assert sorted(service.values(logger)) == [(loss, 3, 0.5), (loss, 4, 0.125), (val_loss, 3, 0.25)]
    params = {name: str(value) for name, value in service.params(logger).items()}
    assert {"lr": "0.1", "act": "relu"}.items() <= params.items()
    nested = ("nested", "nested/path", "nested|path")
    assert [params[name] for name in nested if name in params] in (["data"], ["{'path': 'data'}"])


def test_a_fit_logs_values_and_hyperparameters_and_names_its_checkpoints(service: Any) -> None:
    logger = service.make()
    trainer = quiet(logger=logger, enable_checkpointing=True, log_every_n_steps=5)
    trainer.fit(Classifier(), loader(), loader())
    trainer.test(dataloaders=loader(), verbose=False)
    assert trainer.checkpoint_callback is not None
    saved = Path(trainer.checkpoint_callback.best_model_path)
    assert saved.parent == Path(logger.save_dir, logger.name, logger.version, "checkpoints")
    steps = sorted((name, step) for name, step, _ in service.values(logger))
    assert steps == [("test_loss", 10), ("train_loss", 4), ("train_loss", 9), ("val_loss", 9)]
    params = {name: str(value) for name, value in service.params(logger).items()}
    assert {"width": "16", "lr": "0.1", "dropout": "0.0"}.items() <= params.items()


def test_checkpoints_are_uploaded(service: Any, tmp_path: Path) -> None:
    logger = service.make(log_model="all")
    fit_with_checkpoints(logger, tmp_path / "ckpt")
    (first, *_), (second, aliases, metadata) = service.checkpoints(logger)
    assert (first, second) == ("epoch=0.ckpt", "epoch=1.ckpt")
    assert sorted(aliases) == ["best", "latest"]
    assert (metadata["score"], metadata["ModelCheckpoint"]["monitor"]) == (0.5, "val_loss")


@pytest.mark.parametrize("service", [OfWandb, OfComet], indirect=True)
def test_no_checkpoints_after_a_failure(service: Any, tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("weights")
    logger = service.make(log_model=True)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.after_save_checkpoint(SimpleNamespace(best_model_path=tmp_path / "a.ckpt"))
    logger.finalize("failed")
    assert service.checkpoints(logger) == []


@pytest.mark.parametrize("service", [OfWandb, OfMLFlow], indirect=True)
def test_another_process_continues_the_run(service: Any) -> None:
    logger = service.make()
    state = pickle.loads(pickle.dumps(logger)).__dict__  # starts the run, which stays here
    assert state["_experiment"] is None
    logger.log_metrics({"loss": 0.5}, step=0)
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(log_elsewhere, (logger, dict(os.environ))) == logger.version
    logger.finalize("success")
    assert service.values(logger) == [("loss", 0, 0.5), ("loss", 1, 0.25)]


def refuse(error: type[Exception]) -> Any:
    def start(**_: Any) -> None:
        raise error("no API key.")

    return start


def test_a_run_that_cannot_start_is_an_error_that_says_what_to_do(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "init", refuse(wandb.errors.UsageError))
    monkeypatch.setattr("comet_ml.start", refuse(ValueError))
    with refused(RuntimeError, says=("API", "`wandb", "login`", "offline=True")):
        quiet(logger=WandbLogger(save_dir=tmp_path)).fit(Classifier(), loader())
    with refused(RuntimeError, says=("API", "online=False")):
        CometLogger()
    (tmp_path / "file").write_text("")
    with refused(OSError, says=("CometLogger(offline_directory='", "runs')")):
        OfComet(tmp_path / "file" / "runs", store).make()
    with refused(RuntimeError, "tracking_uri", says="run_id='nope'"):
        MLFlowLogger(save_dir=store, run_id="nope").experiment
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    seen: list[int] = []

    class Watched(Classifier):
        def setup(self, stage: str) -> None:
            seen.append(1)

    with refused(RuntimeError, "tracking_uri", says=uri):
        quiet(logger=MLFlowLogger(tracking_uri=uri)).fit(Watched(), loader())
    assert seen == []


# -- W&B


def test_wandb_rows_without_a_step_and_changed_parameters(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, name="first")
    assert (logger.name, logger.version) == ("lightning_logs", None)  # reading them starts no run
    logger.log_hyperparams({"lr": 0.1})
    logger.log_hyperparams({"lr": 0.2})
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.log_metrics({"other": 1.0})
    assert rows(tmp_path)[1] == {"other": 1.0, "trainer/global_step": 3}  # that of the row before
    (run,) = of_kind(tmp_path, "run")
    assert (run.run_id, run.project, run.display_name) == (logger.version, "lightning_logs", "first")
    axes = {(metric.name or metric.glob_name): metric.step_metric for metric in of_kind(tmp_path, "metric")}
    assert axes["*"] == "trainer/global_step"
    assert OfWandb(tmp_path, tmp_path).params(logger)["lr"] == 0.2


def test_wandb_tables_text_and_images(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_table("table", columns=["a", "b"], data=[[1, "x"], [2, "y"]], step=1)
    logger.log_text("text", columns=["said"], data=[["hello"]], step=2)
    logger.log_image("images", [torch.zeros(3, 4, 5), torch.ones(3, 4, 5)], step=3, caption=["zero", "one"])
    table, text, images = rows(tmp_path)
    assert (table["table"]["nrows"], table["table"]["ncols"], table["trainer/global_step"]) == (2, 2, 1)
    assert (text["text"]["nrows"], text["trainer/global_step"]) == (1, 2)
    shown = images["images"]
    assert (shown["count"], shown["width"], shown["height"], shown["captions"]) == (2, 5, 4, ["zero", "one"])
    assert images["trainer/global_step"] == 3


def test_wandb_sounds_and_videos_and_wrong_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # W&B needs further packages to encode these, so that only what is handed to it can be seen here.
    made = []
    for kind in ("Audio", "Video"):
        monkeypatch.setattr(f"wandb.{kind}", lambda item, kind=kind, **options: made.append((kind, item, options)) or 1)
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_audio("sounds", ["a.wav", "b.wav"], step=1, sample_rate=[8000, 16000])
    logger.log_video("videos", ["c.mp4"], step=2, fps=[4])
    assert made == [
        ("Audio", "a.wav", {"sample_rate": 8000}),
        ("Audio", "b.wav", {"sample_rate": 16000}),
        ("Video", "c.mp4", {"fps": 4}),
    ]
    for name in ("image", "audio", "video"):
        with refused(TypeError, f"{name}s", says=f'Expected a list as "{name}s", found <class', fix=f"{name}s=[...]"):
            getattr(logger, f"log_{name}")("key", "a.file")
    with refused(ValueError, "caption", says=("Expected 2 items but only found 1 for caption", "log_image")):
        logger.log_image("image", [torch.zeros(3, 4, 4)] * 2, caption=["one"])
    assert [row["trainer/global_step"] for row in rows(tmp_path)] == [1, 2]


def test_wandb_watches_until_unwatch_in_fabric_too(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    fabric = L.Fabric(accelerator="cpu", loggers=logger)
    layer = torch.nn.Linear(2, 1)
    logger.watch(layer, log="all", log_freq=1, log_graph=False)
    layer(torch.ones(1, 2)).sum().backward()
    fabric.log("loss", torch.tensor(0.5), step=0)
    logger.unwatch(layer)
    layer(torch.ones(1, 2)).sum().backward()
    fabric.log("loss", torch.tensor(0.25), step=7)
    first, second = rows(tmp_path)
    assert first["gradients/weight"]["_type"] == "histogram"
    assert "parameters/weight" in first
    assert second == {"loss": 0.25, "trainer/global_step": 7}


def test_wandb_continues_a_run_that_is_open(tmp_path: Path) -> None:
    import wandb

    run = wandb.init(dir=tmp_path, id="mine")
    given = WandbLogger(experiment=run)
    assert given.experiment is run
    assert given.version == "mine"
    logger = WandbLogger(save_dir=tmp_path)
    with warned(UserWarning, says="There is a wandb run already in progress", fix="wandb.finish()"):
        assert logger.experiment is run


def test_wandb_artifacts_are_used_and_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only W&B's servers hold artifacts; here, what is requested from them.
    asked: list[Any] = []
    artifact = SimpleNamespace(download=lambda root: asked.append(root) or str(root))
    api = SimpleNamespace(artifact=lambda name, type: asked.append(("api", name, type)) or artifact)
    monkeypatch.setattr("wandb.Api", lambda: api)
    assert WandbLogger.download_artifact("net:best", tmp_path, "model") == str(tmp_path)
    logger = WandbLogger(save_dir=tmp_path)
    monkeypatch.setattr(
        logger.experiment, "use_artifact", lambda name, type=None: asked.append(("run", name, type)) or artifact
    )
    logger.use_artifact("net:v1", "model")
    WandbLogger.download_artifact("net:v2", tmp_path)
    WandbLogger.download_artifact("net:v3", use_artifact=False)
    run = [("run", "net:v1", "model"), ("run", "net:v2", None)]
    assert asked == [("api", "net:best", "model"), str(tmp_path), *run, str(tmp_path), ("api", "net:v3", None), None]


# -- Comet


class Started:
    """Stands for an experiment of Comet, and keeps what it was started with."""

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
def test_older_names_of_comets_arguments_still_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, older: dict[str, Any], now: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("comet_ml.start", Started)
    with warned(DeprecationWarning, says=f"The parameter `{list(older)[-1]}` is deprecated", fix=f"{next(iter(now))}="):
        logger = CometLogger(**older)
    assert {name: logger.experiment.options[name] for name in now} == now


def test_comet_gets_what_is_given_and_copies_have_the_same_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comet_ml.start", Started)
    given = {"api_key": "k", "workspace": "w", "project": "p", "mode": "create", "tags": ["a"]}
    logger = CometLogger(**given)  # type: ignore[arg-type]
    assert {name: logger.experiment.options[name] for name in given} == given
    twin = pickle.loads(pickle.dumps(logger))
    assert twin.__dict__["_experiment"] is None
    assert (twin.name, twin.version, twin.experiment.options["experiment_key"]) == ("digits", KEY, KEY)
    logger.finalize("failed")
    assert logger.experiment.flushed


def test_comet_stores_the_epoch_and_the_graph(tmp_path: Path) -> None:
    comet = OfComet(tmp_path, tmp_path)
    logger = comet.make()
    logger.log_metrics({"loss": 0.5, "epoch": 2}, step=7)
    logger.log_graph(torch.nn.Linear(2, 1))
    (value,) = comet.messages(logger, "metric_msg")
    assert (value["metric"]["metricName"], value["metric"]["epoch"]) == ("loss", 2)
    assert [m["graph"] for m in comet.messages(logger, "graph")] == [str(torch.nn.Linear(2, 1))]


# -- MLflow


def values(logger: MLFlowLogger, name: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in logger.experiment.get_metric_history(logger.run_id, name)]


def test_mlflow_runs_experiments_and_where_their_artifacts_are(store: Path, tmp_path: Path) -> None:
    one = MLFlowLogger(save_dir=store, run_name="first", tags={"who": "me"})
    other = MLFlowLogger(save_dir=store)
    assert one.experiment_id == other.experiment_id == one.name
    assert one.run_id != other.run_id
    run = one.experiment.get_run(one.run_id)
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("first", "RUNNING", "me")
    experiment = one.experiment.get_experiment_by_name("lightning_logs")
    assert experiment.experiment_id == one.experiment_id
    assert Path(experiment.artifact_location.removeprefix("file://")) == store / "artifacts"
    elsewhere = MLFlowLogger("elsewhere", save_dir=store, artifact_location=f"file://{tmp_path}/elsewhere")
    location = one.experiment.get_experiment(elsewhere.experiment_id).artifact_location
    assert location == f"file://{tmp_path}/elsewhere"
    unused = MLFlowLogger("unused", save_dir=store)
    unused.finalize("success")  # nothing was logged: no run and no experiment is made
    assert one.experiment.get_experiment_by_name("unused") is None
    for status, stored in (("failed", "FAILED"), ("aborted", "KILLED"), ("success", "FINISHED")):
        one.finalize(status)
        assert one.experiment.get_run(one.run_id).info.status == stored


def test_mlflow_continues_a_run_by_its_id(store: Path) -> None:
    first = MLFlowLogger(save_dir=store)
    first.log_hyperparams({"lr": 0.1, "width": 8})
    first.log_metrics({"loss": 1.0}, step=0)
    first.finalize("failed")
    again = MLFlowLogger(save_dir=store, run_id=first.run_id)
    assert again.experiment_id == first.experiment_id
    assert again.experiment.get_run(first.run_id).info.status == "RUNNING"
    with warned(UserWarning, says=("lr=0.2", "0.1", "run_id=")):
        again.log_hyperparams({"lr": 0.2, "width": 8, "seed": 3})
    again.log_metrics({"loss": 0.5}, step=1)
    again.finalize("success")
    assert values(again, "loss") == [(0, 1.0), (1, 0.5)]
    run = again.experiment.get_run(first.run_id)
    assert run.data.params == {"lr": "0.1", "width": "8", "seed": "3"}
    assert run.info.status == "FINISHED"
    again.log_metrics({"test": 2.0}, step=1)  # after the end: the run is opened again
    assert again.experiment.get_run(first.run_id).info.status == "RUNNING"


def test_mlflow_hyperparameters_long_and_many_and_names_it_does_not_take(store: Path) -> None:
    logger = MLFlowLogger(save_dir=store)
    logger.log_hyperparams({"long": "x" * 400, **{f"p{i}": i for i in range(205)}})
    params = logger.experiment.get_run(logger.run_id).data.params
    assert (len(params), params["p204"], params["long"]) == (206, "204", "x" * 250)
    with warned(RuntimeWarning, says="special characters in metric name. Replacing lo$ss(val) with lossval"):
        logger.log_metrics({"lo$ss(val)": 1.0}, step=0)
    with warned(UserWarning, says="state='ok'"):
        logger.log_metrics({"state": "ok", "a/b-c.d e": 2.0})
    logger.finalize()
    assert logger.experiment.get_run(logger.run_id).data.metrics == {"lossval": 1.0, "a/b-c.d e": 2.0}


def test_mlflow_sends_rows_in_the_background_and_names_those_lost(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.loggers.mlflow._MOST_PENDING", 2)
    logger, may_write = MLFlowLogger(save_dir=store), threading.Event()
    real = logger.experiment.log_batch

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(logger.experiment, "log_batch", slow)
    for step in range(2):
        logger.log_metrics({"loss": 1.0}, step=step)
    assert values(logger, "loss") == []  # we are here, and the rows are not
    may_write.set()
    for step in range(2, 5):
        logger.log_metrics({"loss": 1.0}, step=step)
        assert len(logger._pending) <= 2  # memory does not grow with a slow server
    logger.finalize()
    assert values(logger, "loss") == [(step, 1.0) for step in range(5)]
    at_once = MLFlowLogger(save_dir=store, synchronous=True)
    at_once.log_metrics({"loss": 1.0}, step=0)
    assert values(at_once, "loss") == [(0, 1.0)]
    monkeypatch.setattr(logger.experiment, "log_batch", refuse(OSError))
    with warned(UserWarning, says=("1 row", "row(s)", "API")):
        (logger.log_metrics({"loss": 1.0}, step=5), logger.finalize())


def test_where_mlflows_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def uri(**options: Any) -> str:
        return MLFlowLogger(**options)._tracking_uri

    assert MLFlowLogger(tracking_uri="http://localhost:5000").save_dir is None
    assert MLFlowLogger(tracking_uri="file:/some/folder").save_dir == "/some/folder"
    assert uri(save_dir=tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "meta.yaml").write_text("name: Default")
    assert uri(save_dir=tmp_path) == f"file:{tmp_path}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    assert uri(save_dir=tmp_path) == "sqlite:///other.db"
    assert uri(tracking_uri="sqlite:///mine.db") == "sqlite:///mine.db"
