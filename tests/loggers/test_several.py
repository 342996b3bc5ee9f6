"""What all loggers share: several at once, one that cannot write, other processes, a resume in the same run."""

from __future__ import annotations

import copy
import csv
import os
import pickle
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten._lib.rank_zero import rank_zero_only
from hasten.callbacks import ModelCheckpoint
from hasten.fabric import loggers as fabric_loggers
from hasten.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from hasten.loggers.base import DummyExperiment, DummyLogger, SavedCheckpoint, UploadingLogger
from hasten.strategies import DDPStrategy
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_all_loggers_get_the_same(tmp_path: Path) -> None:
    recorders = [RowLogger(), RowLogger()]
    trainer = quiet(logger=[*recorders, CSVLogger(tmp_path)], log_every_n_steps=5)
    model = Classifier()
    trainer.fit(model, loader(), loader())
    one, other = recorders
    assert one.rows == other.rows
    assert [(step, sorted(row)) for step, row in one.rows] == [
        (4, ["epoch", "train_loss"]),
        (9, ["epoch", "train_loss"]),
        (9, ["epoch", "val_loss"]),
    ]
    assert one.params == [{"width": 16, "lr": 0.1, "dropout": 0.0}] == other.params
    assert one.graphs == [model]
    assert one.statuses == ["success"]
    written = table(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert [(int(row["step"]), float(row["train_loss"] or row["val_loss"])) for row in written] == [
        (step, row.get("train_loss", row.get("val_loss"))) for step, row in one.rows
    ]
    assert trainer.logger is one
    assert model.loggers == trainer.loggers


def test_none_and_paths_as_config_files_give_them(tmp_path: Path) -> None:
    for logger in (
        CSVLogger(tmp_path, name=Path("exp"), prefix=None),
        TensorBoardLogger(tmp_path, name=Path("exp"), prefix=None, log_graph=None, default_hp_metric=None),
    ):
        logger.log_metrics({"loss": 1.0}, step=0)
        assert logger.log_dir.startswith(str(tmp_path / "exp" / "version_"))
    wandb = WandbLogger(save_dir=tmp_path, prefix=None, offline=None, version=5, log_model=None)
    assert (wandb.version, wandb._offline) == ("5", False)
    with refused(TypeError, "version"):
        WandbLogger(version=[5])  # type: ignore[arg-type]


def test_the_folder_of_a_trainer_is_a_logger_s(tmp_path: Path) -> None:
    class Elsewhere(RowLogger):
        """Writes to a folder of its own, as a logger for Lightning."""

        save_dir, log_dir = "saved", "logged"

    assert quiet(logger=Elsewhere()).log_dir == "saved"
    assert quiet(logger=CSVLogger(tmp_path, version=3)).log_dir == str(tmp_path / "lightning_logs" / "version_3")


def test_two_that_write_the_same_files_are_refused(tmp_path: Path) -> None:
    same = [CSVLogger(tmp_path, version=0), TensorBoardLogger(tmp_path, version=1), CSVLogger(tmp_path, version=0)]
    with refused(ValueError, "logger", fix="version=", says="version_0"):
        quiet(logger=same).fit(Classifier(), loader(16))
    quiet(logger=[same[0], CSVLogger(tmp_path, version=2)]).fit(Classifier(), loader(16))


def test_a_logger_is_asked_about_the_loggers_before_it(tmp_path: Path) -> None:
    class Once(RowLogger):
        def check_beside(self, others: Sequence[object]) -> None:
            asked.append(list(others))
            if any(isinstance(other, Once) for other in others):
                raise ValueError("one is enough")

    asked: list[list[object]] = []
    other, once = CSVLogger(tmp_path), Once()
    quiet(logger=[other, once]).fit(Classifier(), loader(16))
    assert asked == [[other]]
    with refused(ValueError, says="one is enough"):
        quiet(logger=[once, other, Once()]).fit(Classifier(), loader(16))


def test_a_row_belongs_to_one_logger_alone() -> None:
    class Spoils(RowLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            metrics.clear()

    recorder = RowLogger()
    quiet(logger=[Spoils(), recorder], log_every_n_steps=10).fit(Classifier(), loader())
    assert ["train_loss" in row for _, row in recorder.rows] == [True]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("stop"), "failed"), (KeyboardInterrupt(), "aborted")])
def test_loggers_learn_how_a_run_ended(error: BaseException, status: str) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise error

    recorder = RowLogger()
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        quiet(logger=recorder).fit(Fails(), loader())
    assert recorder.statuses == [status]


def test_loggers_are_opened_before_the_module_is_set_up(tmp_path: Path) -> None:
    order: list[str] = []

    class Opens(RowLogger):
        @property
        def experiment(self) -> Any:
            order.append("experiment")
            return self

    class Watched(Classifier):
        def prepare_data(self) -> None:
            order.append("prepare_data")

        def setup(self, stage: str) -> None:
            order.append("setup")

    quiet(logger=Opens(), enable_autolog_hparams=False).fit(Watched(), loader())
    assert order == ["experiment", "prepare_data", "setup"]


# -- a resume in the same version


class KilledError(Exception): ...


class Dies(L.Callback):
    """Ends the process's run at a step, as a kill would: nothing after it happens."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            raise KilledError


def steps(logger: Any) -> list[int]:
    """Return the steps of train_loss as a reader of the logger's files sees them."""
    if isinstance(logger, CSVLogger):
        rows = table(Path(logger.log_dir) / "metrics.csv")
        return [int(row["step"]) for row in rows if row["train_loss"]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(logger.log_dir)
    reader.Reload()
    return [event.step for event in reader.Scalars("train_loss")]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.parametrize(("kind", "every"), [(CSVLogger, 3), (CSVLogger, 5), (TensorBoardLogger, 3)])
def test_each_step_is_there_once_after_a_resume_and_another_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, every: int
) -> None:
    """A checkpoint is written in the middle of a step that validates afterwards."""
    from tensorboard.summary.writer import event_file_writer

    # Files of one second and process are read in the order of this number, as text: all have three digits here.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    checkpoint = tmp_path / "ckpt" / f"step={every}.ckpt"

    def run(folder: Path, *callbacks: Any, resume: bool = False, **arguments: Any) -> list[int]:
        logger = kind(folder, version=0)
        options = {"log_every_n_steps": 1, "val_check_interval": every, "num_sanity_val_steps": 0, **arguments}
        with suppress(KilledError):
            trainer = quiet(logger=logger, callbacks=list(callbacks), **options)
            trainer.fit(Classifier(), loader(), loader(8), ckpt_path=checkpoint if resume else None)
        return steps(logger)

    one, other, whole = tmp_path / "one", tmp_path / "other", list(range(10))
    saves = ModelCheckpoint(checkpoint.parent, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    assert run(one, saves, Dies(8), enable_checkpointing=True) == list(range(7))
    assert run(one, resume=True) == whole
    assert run(other) == whole
    assert sorted(run(other, resume=True)) == sorted([*whole, *range(every, 10)])
    assert steps(kind(one, version=0)) == whole
    if kind is CSVLogger:
        rows = table(one / "lightning_logs" / "version_0" / "metrics.csv")
        assert [int(row["step"]) for row in rows if row["val_loss"]] == list(range(every - 1, 10, every))


class Kept(RowLogger):
    """A logger of the program that goes back."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class OwnState(RowLogger):
    """A logger of a program for Lightning, which never calls this method."""

    def state_dict(self) -> dict[str, Any]:
        return {"cannot be pickled": lambda: None}


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.parametrize("names_classes", [True, False])
def test_a_resume_gives_each_logger_the_state_of_its_class(tmp_path: Path, names_classes: bool) -> None:
    def loggers(folder: Path) -> list[Any]:
        return [CSVLogger(folder, version=0), TensorBoardLogger(folder, version=1), Kept(0), OwnState(), Kept(0)]

    def fit(loggers: list[Any], steps: int, **arguments: Any) -> Any:
        trainer = quiet(logger=loggers, max_steps=steps, log_every_n_steps=1)
        trainer.fit(Classifier(), loader(32), **arguments)
        return trainer

    path, first = tmp_path / "a.ckpt", loggers(tmp_path)
    first[2].place, first[4].place = 1, 2
    trainer = fit(first, 1)
    trainer.save_checkpoint(path)
    first[0].log_metrics({"train_loss": 9.0}, step=1)
    first[0].finalize("failed")
    if not names_classes:
        contents = torch.load(path, weights_only=False)
        del contents["hasten"]["ranks"][0]["logger_classes"]
        torch.save(contents, path)
    again = loggers(tmp_path)
    others = again[::-1] if names_classes else [TensorBoardLogger(tmp_path), CSVLogger(tmp_path), *again[2:]]
    fit(others, 2, ckpt_path=path)
    assert (again[2].place, again[4].place) == ((2, 1) if names_classes else (1, 2))
    if names_classes:
        assert steps(again[0]) == [0, 1]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
@pytest.mark.parametrize("folder", ["memory://back", "disk"])
def test_a_csv_file_goes_back_to_where_it_was(tmp_path: Path, folder: str) -> None:
    import fsspec

    folder = folder if "://" in folder else str(tmp_path)
    logger = CSVLogger(folder, name="exp")
    assert logger.state_dict() == {}
    logger.log_hyperparams({"lr": 0.1})
    for step in range(3):
        logger.log_metrics({"loss": float(step), "text": "a\nb"}, step=step)
    state = logger.state_dict()
    assert state["rows"] == 3
    logger.log_metrics({"loss": 9.0}, step=3)
    logger.finalize("failed")
    again = CSVLogger(folder, name="exp", version=0)
    again.load_state_dict(state)
    again.log_metrics({"loss": 7.0, "acc": 0.5}, step=3)
    again.finalize("success")
    again.load_state_dict({**state, "rows": 100})  # more than there are: nothing to drop
    with fsspec.open(again.experiment.metrics_file_path, "rt", newline="") as file:
        rows = [(row["loss"], row["acc"], row["step"]) for row in csv.DictReader(file)]
    assert rows == [("0.0", "", "0"), ("1.0", "", "1"), ("2.0", "", "2"), ("7.0", "0.5", "3")]
    assert CSVLogger(folder, name="exp").version == 1


# -- other processes than the first


def test_dummies_take_anything() -> None:
    experiment, logger = DummyExperiment(), DummyLogger()
    assert experiment.log({"loss": 1.0}).artifacts.download(root="here") is experiment
    with experiment.train() as inside:
        inside.log_metric("loss", 1.0)
    assert (list(experiment.rows), len(experiment), bool(experiment), experiment.nop(1, key=2)) == ([], 0, True, None)
    for twin in (pickle.loads(pickle.dumps(experiment)), copy.deepcopy(experiment), logger.experiment):
        assert isinstance(twin, DummyExperiment)
    for call in (logger.log_metrics, logger.log_hyperparams, logger.log_image):
        call({"loss": 1.0}, step=3)
    assert (logger[0], list(logger), logger.name, logger.version) == (logger, [], "", "")


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger, CometLogger])
def test_other_processes_than_the_first_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    comet = kind is CometLogger
    folder = {"online": False, "offline_directory": str(tmp_path / "runs")} if comet else {}
    logger = kind(**(folder or {"save_dir": tmp_path / "runs"}))
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.log_hyperparams({"lr": 1.0})
    logger.log_graph(torch.nn.Linear(1, 1))
    if kind is WandbLogger:
        logger.log_image("image", [torch.zeros(3, 2, 2)])
        logger.watch(torch.nn.Linear(1, 1))
    logger.experiment.anything["at all"] = 1
    logger.save()
    logger.finalize("success")
    assert isinstance(logger.experiment, DummyExperiment)
    assert logger.state_dict() == {}
    assert logger.version == (0 if kind in (CSVLogger, TensorBoardLogger) else None)
    assert not (tmp_path / "runs").exists()


@pytest.mark.world_size(2)
def test_two_processes_write_one_run_also_where_they_would_have_named_it_differently(tmp_path: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    loggers = [CSVLogger(tmp_path, name=f"at_{rank}_o_clock"), TensorBoardLogger(tmp_path, name="tb")]
    (tmp_path / "tb" / f"version_{rank}").mkdir(parents=True)
    assert loggers[1].version  # asked for at different times
    trainer = quiet(devices=2, strategy="ddp", logger=loggers, log_every_n_steps=1)
    trainer.fit(Classifier(), loader())
    folders = [logger.log_dir for logger in trainer.loggers]
    if trainer.is_global_zero:
        written = table(Path(folders[0]) / "metrics.csv")
        assert [int(row["step"]) for row in written] == [0, 1, 2, 3, 4]
        assert len(list(Path(folders[1]).glob("events*"))) == 1
    trainer.test(Classifier(), loader(), verbose=False)
    assert [logger.log_dir for logger in trainer.loggers] == folders
    assert trainer.strategy.broadcast(folders) == folders
    assert folders[0] == str(tmp_path / "at_0_o_clock" / "version_0")
    for folder in folders:
        (Path(folder) / f"outputs_{rank}.txt").write_text("a tutorial's last line")


def test_the_process_that_starts_others_knows_where_they_wrote(tmp_path: Path) -> None:
    strategy = DDPStrategy(start_method="forkserver")
    trainer = quiet(devices=2, strategy=strategy, logger=CSVLogger(tmp_path), limit_train_batches=1)
    trainer.fit(Classifier(), loader(16))
    assert trainer.logger is not None
    [run] = (tmp_path / "lightning_logs").iterdir()
    assert trainer.logger.log_dir == str(run)


# -- Fabric


@pytest.mark.parametrize("kind", [fabric_loggers.CSVLogger, fabric_loggers.TensorBoardLogger])
def test_fabric_s_loggers_have_a_root_dir(tmp_path: Path, kind: Any) -> None:
    logger = kind(root_dir=tmp_path, name="exp", version=2, prefix="my")
    assert logger.root_dir == str(tmp_path)
    assert Path(logger.log_dir) == tmp_path / "exp" / "version_2"
    fabric = L.Fabric(accelerator="cpu", loggers=[logger])
    fabric.log_dict({"loss": torch.tensor(0.5)}, step=4)
    logger.finalize("success")
    assert len(list((tmp_path / "exp" / "version_2").iterdir())) >= 1
    assert kind(root_dir=tmp_path, name="exp").version == 3
    if kind is fabric_loggers.CSVLogger:
        assert table(tmp_path / "exp" / "version_2" / "metrics.csv") == [{"my-loss": "0.5", "step": "4"}]


def test_fabric_s_tensorboard_logger_draws_graphs_when_asked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = fabric_loggers.TensorBoardLogger(root_dir=tmp_path, sub_dir="events")
    logger.log_graph(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    logger.finalize("success")
    reader = EventAccumulator(logger.log_dir)
    reader.Reload()
    assert reader.Tags()["graph"] is True


# -- which checkpoints are handed to a service


class Uploads(UploadingLogger):
    """Keeps what it is to upload."""

    name, version = "uploads", 0

    def __init__(self, log_model: Any) -> None:
        super().__init__(log_model)
        self.sent: list[SavedCheckpoint] = []

    def _start(self) -> None:
        return None

    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.sent.append(checkpoint)

    def after(self, callback: Any) -> list[SavedCheckpoint]:
        """Return what is uploaded after ``callback`` has written."""
        self.sent.clear()
        self.after_save_checkpoint(callback)
        return list(self.sent)

    def at_end(self) -> list[SavedCheckpoint]:
        """Return what is uploaded when the run has ended."""
        self.sent.clear()
        self._log_remaining_checkpoints()
        return list(self.sent)

    log_metrics = log_hyperparams = lambda *_, **__: None


class Callback:
    """The attributes of a ModelCheckpoint that uploads read."""

    monitor, mode, save_top_k = "val_loss", "min", 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_model_path = self.best_model_path = ""
        self.current_score = self.best_model_score = None
        self.best_k_models: dict[str, Any] = {}

    def write(self, name: str, score: float, *, best: bool, at: float) -> None:
        path = self.folder / name
        path.write_text(str(score))
        os.utime(path, (at, at))
        self.best_k_models[str(path)] = torch.tensor(score)
        if best:
            self.best_model_path, self.best_model_score = str(path), torch.tensor(score)  # type: ignore[assignment]


class Falling(Classifier):
    """Logs a validation loss that falls: 1, 1/2, 1/3..."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", 1.0 / (1 + self.current_epoch))


def fit_with_checkpoints(logger: Logger, folder: Path | None = None, save_top_k: int = 1) -> ModelCheckpoint:
    """Train two epochs that are each the best so far; return the callback that saved them."""
    keep = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=save_top_k)
    trainer = quiet(logger=logger, callbacks=[keep], enable_checkpointing=True, max_epochs=2, limit_train_batches=1)
    trainer.fit(Falling(), loader(8), loader(8))
    return keep


@pytest.mark.parametrize(
    ("log_model", "save_top_k", "during", "at_end"),
    [(True, 1, [], [1]), ("all", 1, [0, 1], []), (True, -1, [0, 1], []), (False, 1, [], [])],
)
def test_which_checkpoints_of_a_fit_are_uploaded_and_when(
    tmp_path: Path, log_model: Any, save_top_k: int, during: list[int], at_end: list[int]
) -> None:
    uploads = Uploads(log_model)
    fit_with_checkpoints(uploads, tmp_path, save_top_k)
    assert [Path(one.path).name for one in uploads.sent] == [f"epoch={epoch}.ckpt" for epoch in during]
    assert [Path(one.path).name for one in uploads.at_end()] == [f"epoch={epoch}.ckpt" for epoch in at_end]


def test_each_written_checkpoint_is_uploaded_once_in_the_order_of_writing(tmp_path: Path) -> None:
    uploads, callback = Uploads("all"), Callback(tmp_path)
    callback.write("a.ckpt", 0.75, best=True, at=1000.0)
    (first,) = uploads.after(callback)
    assert (first.path, first.is_folder, first.aliases) == (str(tmp_path / "a.ckpt"), False, ["latest", "best"])
    assert first.metadata == {
        "score": 0.75,
        "original_filename": "a.ckpt",
        "Callback": {"monitor": "val_loss", "mode": "min", "save_top_k": 2},
    }
    assert uploads.after(callback) == []
    callback.write("b.ckpt", 0.5, best=False, at=1003.0)
    callback.write("a.ckpt", 0.25, best=True, at=1002.0)  # written again under its name
    callback.write("gone.ckpt", 0.9, best=False, at=1000.0)
    (tmp_path / "gone.ckpt").unlink()
    (tmp_path / "folder.ckpt").mkdir()
    callback.last_model_path, callback.current_score = str(tmp_path / "folder.ckpt"), torch.tensor(0.5)  # type: ignore[assignment]
    again = uploads.after(callback)
    found = [(Path(one.path).name, one.aliases[1:], one.is_folder, one.metadata["score"]) for one in again]
    assert found == [
        ("a.ckpt", ["best"], False, 0.25),
        ("b.ckpt", [], False, 0.5),
        ("folder.ckpt", [], True, 0.5),
    ]
    left = Uploads(True)
    assert left.after(callback) == left.after(callback) == []
    assert pickle.loads(pickle.dumps(left)).at_end() == []  # callbacks stay in their process
    assert [one.path for one in left.at_end()] == [one.path for one in again]
    assert left.at_end() == []


# -- what all refuse, by name

REFUSED: list[tuple[type[Logger], dict[str, Any], type[Exception], str]] = [
    (CSVLogger, {"save_dir": 3}, TypeError, "save_dir=3"),
    (CSVLogger, {"name": "../out"}, ValueError, "name='../out'"),
    (CSVLogger, {"name": "/etc"}, ValueError, "name='/etc'"),
    (CSVLogger, {"name": 3}, TypeError, "name=3"),
    (CSVLogger, {"version": "a/../../b"}, ValueError, "version='a/../../b'"),
    (CSVLogger, {"version": -1}, ValueError, "version=-1"),
    (CSVLogger, {"version": True}, TypeError, "version=True"),
    (CSVLogger, {"version": 1.5}, TypeError, "version=1.5"),
    (CSVLogger, {"flush_logs_every_n_steps": 0}, ValueError, "flush_logs_every_n_steps=0"),
    (TensorBoardLogger, {"name": "../out"}, ValueError, "name='../out'"),
    (WandbLogger, {"offline": True, "log_model": True}, ValueError, "log_model=True, offline=True"),
    (WandbLogger, {"add_file_policy": "copy"}, ValueError, "add_file_policy='copy'): use one of 'mutable'"),
    (CometLogger, {"mode": "new"}, ValueError, "mode='new'): use one of 'get_or_create', 'get', 'create'"),
    (CometLogger, {"colour": "red"}, TypeError, "colour"),
    *(
        (kind, {"log_model": wrong}, ValueError, f"log_model={wrong!r}): use one of True, False, 'all'")
        for kind in (WandbLogger, CometLogger, MLFlowLogger)
        for wrong in ("best", 1)
    ),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), REFUSED)
def test_wrong_arguments_are_named(
    tmp_path: Path, kind: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = {"save_dir": tmp_path} if kind in (CSVLogger, TensorBoardLogger) else {}
    with pytest.raises(error, match=re.escape(message)) as caught:
        kind(**{**folder, **arguments})
    if "colour" not in arguments:
        assert str(caught.value).startswith(f"{kind.__name__}(")


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [
        (TensorBoardLogger, "tensorboard", "tensorboard"),
        (WandbLogger, "wandb", "wandb"),
        (CometLogger, "comet_ml", "comet[-_]ml"),
        (MLFlowLogger, "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"{kind.__name__} needs the package {package}.*pip install {package}"
    with pytest.raises(ModuleNotFoundError, match=message):
        kind(**({"save_dir": tmp_path} if kind is TensorBoardLogger else {}))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger])
def test_a_folder_that_cannot_be_written_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "runs"
    seen: list[int] = []

    class Watched(Classifier):
        def prepare_data(self) -> None:
            seen.append(1)

    with pytest.raises(NotADirectoryError) as caught:
        quiet(logger=kind(save_dir=folder)).fit(Watched(), loader())
    message = str(caught.value)
    assert f"{kind.__name__}(save_dir='" in message
    assert str(tmp_path / "file") in message
    assert "Give a folder" in message
    assert seen == []
    # A superuser, as in many containers, may write anywhere: what the system would say is put in its place.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with refused(PermissionError, says="save_dir='"):
        kind(save_dir=tmp_path).experiment
