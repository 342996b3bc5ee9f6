"""WandbLogger: what is in W&B's own file of an offline run."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hasten as L
from hasten.loggers import WandbLogger
from tests.loggers.test_several import fit_with_checkpoints
from tests.models import Classifier, loader, quiet

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    yield
    wandb.finish()


def records(folder: Path) -> list[Any]:
    """Return the records of the one run under ``folder``, when its end has been written."""
    wandb.finish()
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    until = time.monotonic() + 30
    while True:
        found = parsed(path.read_bytes())
        # W&B's process may still be writing when finish() returns.
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < until, "W&B did not end the file"
        time.sleep(0.02)


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


def of_kind(folder: Path, kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records(folder) if record.WhichOneof("record_type") == kind]


def rows(folder: Path) -> list[dict[str, Any]]:
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


def config(folder: Path) -> dict[str, Any]:
    return {item.key: json.loads(item.value_json) for update in of_kind(folder, "config") for item in update.update}


def test_values_are_read_back_with_their_steps(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, project="digits", name="first", id="run1", prefix="my")
    assert (logger.name, logger.version, logger.save_dir) == ("digits", "run1", str(tmp_path))
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(0.25)}, step=3)
    logger.log_metrics({"loss": 0.125}, step=4)
    logger.log_metrics({"other": 1.0})
    assert rows(tmp_path) == [
        {"my-loss": 0.5, "my-acc": 0.25, "trainer/global_step": 3},
        {"my-loss": 0.125, "trainer/global_step": 4},
        {"my-other": 1.0, "trainer/global_step": 4},  # no step was given: that of the row before
    ]
    (run,) = of_kind(tmp_path, "run")
    assert (run.run_id, run.project, run.display_name) == ("run1", "digits", "first")
    axes = {(metric.name or metric.glob_name): metric.step_metric for metric in of_kind(tmp_path, "metric")}
    assert axes["*"] == "trainer/global_step"


def test_hyperparameters_are_plain_and_can_change(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    assert logger.name == "lightning_logs"
    assert logger.version is None  # asking starts no run
    logger.log_hyperparams({"lr": 0.1, "act": torch.relu, "nested": {"path": Path("data")}})
    logger.log_hyperparams({"lr": 0.2})
    found = {key: value for key, value in config(tmp_path).items() if key[0] != "_"}
    assert found == {"lr": 0.2, "act": "relu", "nested": {"path": "data"}}


def test_a_fit_logs_values_hyperparameters_and_names_its_checkpoints(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, project="digits", id="fit1", offline=True)
    trainer = quiet(logger=logger, enable_checkpointing=True, log_every_n_steps=5)
    trainer.fit(Classifier(), loader(), loader())
    assert trainer.checkpoint_callback is not None
    saved = Path(trainer.checkpoint_callback.best_model_path)
    assert saved.parent == tmp_path / "digits" / "fit1" / "checkpoints"
    trainer.test(dataloaders=loader(), verbose=False)  # the run is still open
    written = rows(tmp_path)
    train = [row for row in written if "train_loss" in row]
    assert [row["trainer/global_step"] for row in train] == [4, 9]
    assert train[-1]["epoch"] == 0
    assert [row["trainer/global_step"] for row in written if "val_loss" in row] == [9]
    assert [row["trainer/global_step"] for row in written if "test_loss" in row] == [10]
    assert {"width": 16, "lr": 0.1, "dropout": 0.0}.items() <= config(tmp_path).items()


def test_the_checkpoints_left_are_artifacts_at_the_end(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path, id="model1", log_model=True)
    fit_with_checkpoints(logger, tmp_path / "ckpt")
    (artifact,) = of_kind(tmp_path, "artifact")
    assert (artifact.name, sorted(artifact.aliases)) == ("model-model1", ["best", "latest"])
    assert [entry.path for entry in artifact.manifest.contents] == ["model.ckpt"]
    metadata = json.loads(artifact.metadata)
    assert (metadata["score"], metadata["original_filename"]) == (0.5, "epoch=1.ckpt")
    assert metadata["ModelCheckpoint"]["monitor"] == "val_loss"


def test_no_artifacts_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("weights")
    logger = WandbLogger(save_dir=tmp_path, log_model=True, checkpoint_name="net")
    logger.log_metrics({"loss": 1.0})
    logger.after_save_checkpoint(SimpleNamespace(best_model_path=tmp_path / "a.ckpt"))  # type: ignore[arg-type]
    logger.finalize("failed")
    assert of_kind(tmp_path, "artifact") == []


def test_tables_text_and_images(tmp_path: Path) -> None:
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


def test_sounds_and_videos_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # W&B needs further packages to encode these, so that only what is handed to it can be seen here.
    made = []
    for kind in ("Audio", "Video"):
        monkeypatch.setattr(wandb, kind, lambda item, kind=kind, **options: made.append((kind, item, options)) or 1)
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_audio("sounds", ["a.wav", "b.wav"], step=1, sample_rate=[8000, 16000])
    logger.log_video("videos", ["c.mp4"], step=2, fps=[4])
    assert made == [
        ("Audio", "a.wav", {"sample_rate": 8000}),
        ("Audio", "b.wav", {"sample_rate": 16000}),
        ("Video", "c.mp4", {"fps": 4}),
    ]
    assert [row["trainer/global_step"] for row in rows(tmp_path)] == [1, 2]


def test_media_that_are_no_list_or_lack_options_are_named(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    for kind in ("image", "audio", "video"):
        message = rf"log_{kind}\({kind}s='a.file'\): use {kind}s=\[...\]"
        with pytest.raises(TypeError, match=message):
            getattr(logger, f"log_{kind}")("key", "a.file")
    with pytest.raises(ValueError, match="caption has 1 items for 2 images"):
        logger.log_image("image", [torch.zeros(3, 4, 4)] * 2, caption=["one"])


def test_watch_logs_histograms_until_unwatch(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    layer = torch.nn.Linear(2, 1)
    logger.watch(layer, log="all", log_freq=1, log_graph=False)
    layer(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.unwatch(layer)
    layer(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1.0}, step=1)
    first, second = rows(tmp_path)
    assert first["gradients/weight"]["_type"] == "histogram"
    assert set(first) >= {"gradients/weight", "parameters/weight"}
    assert set(second) == {"loss", "trainer/global_step"}


def test_a_run_that_is_open_is_gone_on_with(tmp_path: Path) -> None:
    run = wandb.init(dir=tmp_path, id="mine")
    given = WandbLogger(experiment=run)
    assert given.experiment is run
    assert given.version == "mine"
    logger = WandbLogger(save_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"the W&B run mine is open .* Call wandb.finish\(\)"):
        assert logger.experiment is run


def log_elsewhere(logger: WandbLogger) -> str:
    logger.log_metrics({"loss": 0.25}, step=1)
    return str(logger.version)


def test_another_process_goes_on_with_the_run(tmp_path: Path) -> None:
    import multiprocessing

    logger = WandbLogger(save_dir=tmp_path, id="shared")
    state = pickle.loads(pickle.dumps(logger)).__dict__  # starts the run, which stays here
    assert (state["_experiment"], state["_attach_id"]) == (None, logger.experiment._attach_id)
    logger.log_metrics({"loss": 0.5}, step=0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(log_elsewhere, (logger,)) == "shared"
    assert [row["loss"] for row in rows(tmp_path)] == [0.5, 0.25]


def test_no_key_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty).")

    monkeypatch.setattr(wandb, "init", refuse)
    trainer = quiet(logger=WandbLogger(save_dir=tmp_path))
    with pytest.raises(RuntimeError, match=r"did not start a run: api_key not configured.*`wandb login`.*offline=True"):
        trainer.fit(Classifier(), loader())


def test_artifacts_of_others_are_used_and_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only W&B's servers hold artifacts; here, what is asked of them.
    asked: list[Any] = []

    class Artifact:
        def download(self, root: str | None) -> str:
            asked.append(root)
            return str(root)

    class Api:
        def artifact(self, name: str, type: str | None) -> Artifact:
            asked.append(("api", name, type))
            return Artifact()

    monkeypatch.setattr(wandb, "Api", Api)
    assert WandbLogger.download_artifact("net:best", tmp_path, "model") == str(tmp_path)
    assert asked == [("api", "net:best", "model"), str(tmp_path)]
    logger = WandbLogger(save_dir=tmp_path)
    run = logger.experiment
    monkeypatch.setattr(run, "use_artifact", lambda name, type: asked.append(("run", name, type)) or Artifact())
    logger.use_artifact("net:v1", "model")
    WandbLogger.download_artifact("net:v2", tmp_path)
    WandbLogger.download_artifact("net:v3", use_artifact=False)
    assert asked[2:] == [
        ("run", "net:v1", "model"),
        ("run", "net:v2", None),
        str(tmp_path),
        ("api", "net:v3", None),
        None,
    ]


def test_fabric_logs_with_it(tmp_path: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", loggers=WandbLogger(save_dir=tmp_path))
    fabric.log("loss", torch.tensor(0.5), step=7)
    assert rows(tmp_path) == [{"loss": 0.5, "trainer/global_step": 7}]
    assert os.environ["WANDB_MODE"] == "offline"
