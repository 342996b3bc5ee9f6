"""Files with Python objects: classes are allowed by name, and nothing else of the file runs."""

from __future__ import annotations

import argparse
import io
import os
import sys
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.checkpoint import files
from hasten.checkpoint.files import CheckpointRefused
from hasten.elsewhere import conventions
from hasten.utilities import AttributeDict
from hasten_lightning.conventions import LIGHTNING
from hasten_tools.commands.consolidate import main as consolidate
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


class Part:
    """A part of a model, known by its class."""


class Config(dict[str, Any]):
    """Options, as a kind of dict."""


class Net(Classifier):
    def __init__(self, part: Any = None, options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def lightnings(path: Path, **entries: Any) -> Path:
    """Write a checkpoint as Lightning does, with objects in the hyper-parameters."""
    registry = AttributeDict(cls=Part, width=3)
    contents = {
        "state_dict": Net().state_dict(),
        "hyper_parameters": {"part": registry, "options": Config(lr=0.1)},
        "hparams_name": "kwargs",
        **entries,
    }
    torch.save(contents, path)
    return path


def test_a_registry_of_classes_loads_when_they_are_allowed_by_name(tmp_path: Path) -> None:
    path = lightnings(tmp_path / "a.ckpt")
    for read in (Net.load_from_checkpoint, files.load, L.Fabric(accelerator="cpu", devices=1).load):
        with pytest.raises(CheckpointRefused) as caught:
            read(path)
        for part in (f"from {__name__} import Part", "add_safe_globals([", "weights_only=False"):
            assert part in str(caught.value)
    # What is passed need not be read, and a run needs none of it.
    given = Net.load_from_checkpoint(path, part=1, options=2).hparams
    assert (given.part, given.options) == (1, 2)
    quiet(limit_val_batches=1).validate(Net(), loader(), ckpt_path=path, verbose=False)
    with torch.serialization.safe_globals([Part, Config]):
        for source in (path, io.BytesIO(path.read_bytes())):
            net = Net.load_from_checkpoint(source)
            assert (net.hparams.part.cls, net.hparams.part.width) == (Part, 3)
            assert type(net.hparams.options) is Config
            assert net.hparams.options == {"lr": 0.1}
        assert files.load(path)["hyper_parameters"]["part"]["cls"] is Part
        # They can be saved, too.
        trainer = quiet(limit_train_batches=1)
        trainer.fit(net, loader())
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        assert Net.load_from_checkpoint(tmp_path / "own.ckpt").hparams.part.cls is Part
    with refused(CheckpointRefused, fix="load_from_checkpoint"):
        Net.load_from_checkpoint(tmp_path / "own.ckpt")


def test_objects_elsewhere_in_a_file_are_refused_in_a_run_too(tmp_path: Path) -> None:
    path = lightnings(tmp_path / "a.ckpt", callbacks={"Mine": {"state": Part()}})
    with refused(CheckpointRefused, fix="weights_only=False"):
        quiet(limit_val_batches=1).validate(Net(), loader(), ckpt_path=path, verbose=False)


class Attack:
    """Calls a function when it is read."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = (call, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("place", ["hyper_parameters", "state_dict"])
def test_nothing_in_a_file_runs(tmp_path: Path, place: str) -> None:
    target = tmp_path / "target"
    for number, attack in enumerate(
        [
            Attack(os.system, f"touch {target}"),
            Attack(os.mkdir, str(target)),
            Attack(eval, f"open({str(target)!r}, 'w')"),
            Attack(getattr, "text", "upper"),
        ]
    ):
        path = lightnings(tmp_path / f"{number}.ckpt", **{place: {"part": attack}})
        with pytest.raises(CheckpointRefused) as caught:
            Net.load_from_checkpoint(path)
        # No advice to allow such a function.
        assert "add_safe_globals" not in str(caught.value)
        with torch.serialization.safe_globals([Part]), pytest.raises(CheckpointRefused):
            files.load(path)
    assert not target.exists()


def test_no_way_to_read_a_checkpoint_runs_code_unless_the_file_is_trusted(tmp_path: Path) -> None:
    target = tmp_path / "target"
    attack = Attack(os.mkdir, str(target))
    path = lightnings(tmp_path / "a.ckpt", callbacks={"Mine": {"state": attack}})
    raw = tmp_path / "raw.pt"
    torch.save({**Net().state_dict(), "more": attack}, raw)
    fabric = L.Fabric(accelerator="cpu", devices=1)
    trainer = quiet(limit_train_batches=1, limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1)
    shown: dict[str, Any] = {"ckpt_path": path}
    readers = (
        lambda **more: trainer.fit(Net(), loader(), loader(), **shown, **more),
        lambda **more: trainer.validate(Net(), loader(), verbose=False, **shown, **more),
        lambda **more: trainer.test(Net(), loader(), verbose=False, **shown, **more),
        lambda **more: trainer.predict(Net(), loader(), **shown, **more),
        lambda **more: Net.load_from_checkpoint(path, **more),
        lambda **more: fabric.load(path, **more),
        lambda **more: fabric.load_raw(raw, Net(), **more),
    )
    for read in readers:
        for given in ({}, {"weights_only": True}):
            with refused(CheckpointRefused, says="posix.mkdir"):
                read(**given)
            assert not target.exists()
    fabric.load(path, weights_only=False)
    assert target.exists()


def test_a_file_does_not_change_classes(tmp_path: Path) -> None:
    # A class that may be named, and a state for the class itself.
    program = b"\x80\x02ctorch.nn.parameter\nParameter\n}X\x04\x00\x00\x00evilK\x01s}X\x04\x00\x00\x00evilK\x01s\x86b."
    path = lightnings(tmp_path / "a.ckpt")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "b.ckpt", "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, program if name.endswith("data.pkl") else archive.read(name))
    with pytest.raises(CheckpointRefused):
        files.load(tmp_path / "b.ckpt")
    assert not hasattr(torch.nn.Parameter, "evil")


def test_data_of_older_checkpoints_needs_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A Namespace, a path, the name of a type: as Lightning 1.x wrote them.
    contents = {
        "state_dict": Net().state_dict(),
        "epoch": 0,
        "global_step": 4,
        "pytorch-lightning_version": "1.2.0",
        "hparams_name": "options",
        "hparams_type": "Namespace",
        "hyper_parameters": {"part": argparse.Namespace(lr=0.1), "root": Path("/data")},
    }
    # Classes were the keys of the states of callbacks.
    name = "pytorch_lightning.callbacks.early_stopping"
    module: Any = types.ModuleType(name)
    module.EarlyStopping = type("EarlyStopping", (), {"__module__": name})
    for parent in ("pytorch_lightning", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    torch.save({**contents, "callbacks": {module.EarlyStopping: {"wait_count": 1}}}, tmp_path / "a.ckpt")
    monkeypatch.undo()
    assert files.load(tmp_path / "a.ckpt")["callbacks"] == {"EarlyStopping": {"wait_count": 1}}
    net = Net.load_from_checkpoint(tmp_path / "a.ckpt")
    assert net.hparams.options["part"].lr == 0.1
    assert net.hparams.options["root"] == Path("/data")
    del contents["hyper_parameters"], contents["hparams_name"]
    torch.save({**contents, "module_arguments": {"part": 7}}, tmp_path / "older.ckpt")
    assert Net.load_from_checkpoint(tmp_path / "older.ckpt").hparams.part == 7


def test_consolidate_allows_classes_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conventions.use(LIGHTNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            files.save_folder({"state_dict": {"w": torch.ones(2)}, "mine": Part()}, tmp_path / "a.ckpt")
    finally:
        conventions.use(conventions.HASTEN)
    assert consolidate([str(tmp_path / "a.ckpt")]) == 1
    assert "Part" in capsys.readouterr().err
    try:
        assert consolidate([str(tmp_path / "a.ckpt"), "--allow", f"{__name__}.Part"]) == 0
        (written,) = tmp_path.glob("*consolidated.ckpt")
        assert type(files.load(written)["mine"]) is Part
    finally:
        torch.serialization.clear_safe_globals()
    assert consolidate([str(tmp_path / "a.ckpt"), "--allow", "no.such.Thing"]) == 1
