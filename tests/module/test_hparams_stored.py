"""Hyper-parameters in checkpoints, of datamodules, and in loggers."""

from __future__ import annotations

import enum
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hasten as L
from hasten.loggers import CSVLogger
from tests.fakes import RowLogger
from tests.models import loader, quiet
from tests.module.test_hparams import Any_, Base, Config, One, stored
from tests.refusals import refused


class Color(enum.Enum):
    RED = "red"


class Level(int, enum.Enum):
    LOW = 1


class Text(str):
    pass


KEPT: dict[str, tuple[Any, Any]] = {
    "nothing": (None, None),
    "number": (3, 3),
    "flag": (np.bool_(True), True),
    "numpy": (np.float32(0.5), 0.5),
    "array": (np.array([1, 2]), [1, 2]),
    "complex": (1j, 1j),
    "bytes": (b"x", b"x"),
    "text": (Text("t"), "t"),
    "path": (Path("data") / "x", "data/x"),
    "color": (Color.RED, "red"),
    "level": (Level.LOW, 1),
    "tuple": ((1, (2, Path("a"))), (1, (2, "a"))),
    "set": ({1, 2}, {1, 2}),
    "frozen": (frozenset({3}), {3}),
    "list": ([Color.RED, {"a": Level.LOW}], ["red", {"a": 1}]),
    "dtype": (torch.float16, torch.float16),
    "device": (torch.device("cpu"), torch.device("cpu")),
    "size": (torch.Size([2, 3]), torch.Size([2, 3])),
    "keys": ({1: "a", Level.LOW: "b", "c": Config(1, {})}, {1: "b", "c": {"width": 1, "optimizer": {}}}),
}


def test_what_is_plain_is_kept_as_plain_data(tmp_path: Path) -> None:
    # Objects inside collections are left out.
    left_out = {"a": len, "b": [1, len], "c": (len, 2), "d": {len, 3}, len: 4, "e": {"f": object()}}
    given = {name: value for name, (value, _) in KEPT.items()}
    found = stored(Any_({**given, "tensor": torch.arange(3), "objects": left_out}), tmp_path)["hyper_parameters"][
        "value"
    ]
    for name, (_, expected) in KEPT.items():
        assert found[name] == expected, name
        assert type(found[name]) is type(expected), name
    assert torch.equal(found["tensor"], torch.arange(3))
    assert found["objects"] == {"b": [1], "c": (2,), "d": {3}, "e": {}}


def test_objects_are_left_out_with_one_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = stored(Any_(lambda: 1), tmp_path)
        stored(Any_(lambda: 1), tmp_path)
    assert found["hyper_parameters"] == {"other": 2}
    texts = [str(warning.message) for warning in caught if "Python objects" in str(warning.message)]
    assert len(texts) == 1
    assert "['value'] of Any_ are Python objects" in texts[0]
    assert "Pass them to load_from_checkpoint(path, ...)" in texts[0]
    assert "save_hyperparameters(ignore=['value'])" in texts[0]
    assert Any_.load_from_checkpoint(tmp_path / "model.ckpt", value=3).hparams.value == 3


def test_what_was_changed_is_what_is_saved(tmp_path: Path) -> None:
    model = Any_(1)
    model.hparams.value = 5
    assert stored(model, tmp_path)["hyper_parameters"] == {"value": 5, "other": 2}
    assert Data.load_from_checkpoint(tmp_path / "model.ckpt").seen == 0
    assert not [key for key in stored(Base(), tmp_path) if "hparams" in key or "hyper" in key]


# -- datamodules


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 4, folder: Any = "data", log: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["log"], logger=log)
        self.seen = 0

    def train_dataloader(self) -> Any:
        self.seen += 1
        return loader(8, self.hparams.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_datamodule_keeps_its_own(tmp_path: Path) -> None:
    data = Data(2, Path("other"))
    checkpoint = stored(One(), tmp_path, train_dataloaders=None, datamodule=data)
    assert checkpoint["datamodule_hyper_parameters"] == {"batch_size": 2, "folder": "other"}
    assert checkpoint["datamodule_hparams_name"] == "kwargs"
    assert checkpoint["hyper_parameters"] == {"a": 1, "b": 2}
    path = tmp_path / "model.ckpt"
    again = Data.load_from_checkpoint(path)
    assert (dict(again.hparams), again.seen) == ({"batch_size": 2, "folder": "other"}, 1)
    assert Data.load_from_checkpoint(path, batch_size=3).hparams.batch_size == 3
    (tmp_path / "data.yaml").write_text("batch_size: 8")
    assert Data.load_from_checkpoint(path, hparams_file=tmp_path / "data.yaml").hparams.batch_size == 8
    with refused(TypeError, says="`Data.load_from_checkpoint`"):
        data.load_from_checkpoint(path)


# -- loggers


def logged(module: Any, data: Any = None, **arguments: Any) -> list[Any]:
    loggers = [RowLogger(), RowLogger()]
    trainer = quiet(logger=loggers, limit_train_batches=1, **arguments)
    trainer.fit(module, datamodule=data) if data is not None else trainer.fit(module, loader())
    assert loggers[0].params == loggers[1].params
    return loggers[0].params


class Quiet_(Base):
    def __init__(self, a: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)


def test_loggers_get_them_once_a_call() -> None:
    assert logged(One()) == [{"a": 1, "b": 2}]
    assert logged(One(), Data()) == [{"a": 1, "b": 2, "batch_size": 4, "folder": "data"}]
    assert logged(Base()) == []
    assert logged(Quiet_()) == []
    assert logged(Quiet_(), Data()) == [{"batch_size": 4, "folder": "data"}]
    assert logged(One(), Data(log=False)) == [{"a": 1, "b": 2}]
    assert logged(One(), enable_autolog_hparams=False) == []
    model = One()
    model.hparams.a = 9
    assert logged(model) == [{"a": 1, "b": 2}], "the initial ones"
    logger = RowLogger()
    quiet(logger=logger).validate(One(), loader(), verbose=False)
    assert logger.params == [{"a": 1, "b": 2}]


class Clashes(L.LightningDataModule):
    def __init__(self, a: Any = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(8)


def test_names_that_module_and_datamodule_share_must_agree() -> None:
    assert logged(One(a=2), Clashes()) == [{"a": 2, "b": 2}]
    with refused(RuntimeError, says=("the keys ['a'] are present in both", "1 and 2")):
        logged(One(), Clashes())
    for other in (torch.ones(3), torch.arange(2)):
        with refused(RuntimeError, fix="save_hyperparameters(logger=False)"):
            logged(One(a=torch.ones(2)), Clashes(other))  # type: ignore[arg-type]
    assert len(logged(One(a=torch.ones(2)), Clashes(torch.ones(2)))) == 1  # type: ignore[arg-type]


def test_a_file_of_a_logger_is_read_as_hparams_file(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet(logger=logger, limit_train_batches=1)
    trainer.fit(One(a=7), loader())
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    again = One.load_from_checkpoint(tmp_path / "m.ckpt", hparams_file=Path(logger.log_dir) / "hparams.yaml", b=3)
    assert dict(again.hparams) == {"a": 7, "b": 3}
