"""save_hyperparameters: what is collected, and what ``__init__`` gets when a checkpoint is loaded."""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.module.hparams import AttributeDict
from tests.models import loader, quiet
from tests.refusals import refused, warned


class Base(L.LightningModule):
    """The least that trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def stored(module: L.LightningModule, folder: Path, **call: Any) -> dict[str, Any]:
    """Return the checkpoint of a short fit, as torch alone reads it without running code."""
    trainer = quiet(limit_train_batches=1)
    trainer.fit(module, **({"train_dataloaders": loader()} | call))
    trainer.save_checkpoint(folder / "model.ckpt")
    checkpoint: dict[str, Any] = torch.load(folder / "model.ckpt", weights_only=True)
    return checkpoint


# -- what is collected


class All(Base):
    def __init__(self, width: int = 4, lr: float = 0.1, *rest: Any, name: str = "n", **others: Any) -> None:
        super().__init__()
        local = 3  # noqa: F841 - no argument
        self.save_hyperparameters()


class Some(Base):
    def __init__(self, width: int = 4, lr: float = 0.1, name: str = "n") -> None:
        super().__init__()
        self.save_hyperparameters("lr", "name", ignore=["name"])


class Not(Base):
    def __init__(self, width: int = 4, lr: float = 0.1, name: str = "n", ignore: Any = "lr") -> None:
        super().__init__()
        self.save_hyperparameters(ignore=ignore)


def test_every_argument_or_those_named() -> None:
    assert dict(All(3, name="m", depth=2).hparams) == {"width": 3, "lr": 0.1, "name": "m", "depth": 2}
    assert dict(Some(3).hparams) == {"lr": 0.1}
    assert dict(Not().hparams) == {"width": 4, "name": "n", "ignore": "lr"}
    assert dict(Not(ignore=["lr", "ignore"]).hparams) == {"width": 4, "name": "n"}
    assert dict(Not(ignore=("width", "ignore")).hparams) == {"lr": 0.1, "name": "n"}
    assert dict(Base().hparams) == {}
    nothing = Base()
    nothing.save_hyperparameters(None)
    assert dict(nothing.hparams) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("width", "widht"), r"\['widht'\] not among the arguments of Wrong.__init__: \['width'\]"),
        ((3,), r"cannot read hyper-parameters of Wrong from an int; give names, a dict"),
        ((object,), r"cannot read hyper-parameters of Wrong from a type"),
        (({"a": 1}, {"b": 2}), r"one dict / Namespace / dataclass"),
    ],
    ids=str,
)
def test_objects_without_names_are_refused(arguments: Any, words: str) -> None:
    class Wrong(Base):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters(*arguments)

    with pytest.raises(ValueError, match=words):
        Wrong()


@dataclass
class Config:
    width: int = 4
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 0.5, "betas": [0.9, 0.99]})


class DictConfig(Mapping[str, Any]):
    """A configuration as OmegaConf has it: no dict, read by key and by attribute."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = {k: DictConfig(v) if isinstance(v, dict) else v for k, v in content.items()}

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class Whole(Base):
    def __init__(self, config: Any, other: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.config, self.other = config, other


@pytest.mark.parametrize("config", [{"width": 7}, Namespace(width=7), DictConfig({"width": 7}), AttributeDict(width=7)])
def test_one_object_that_holds_them_all(config: Any, tmp_path: Path) -> None:
    model = Whole(config)
    assert dict(model.hparams) == {"width": 7}
    checkpoint = stored(model, tmp_path)
    assert checkpoint["hyper_parameters"] == {"width": 7}
    assert checkpoint["hparams_name"] == "config"
    path = tmp_path / "model.ckpt"
    again = Whole.load_from_checkpoint(path)
    assert (again.config.width, again.config["width"], again.other) == (7, 7, 0)
    again = Whole.load_from_checkpoint(path, width=8, other=5)
    assert (again.config.width, again.other, dict(again.hparams)) == (8, 5, {"width": 8})
    assert Whole.load_from_checkpoint(path, config={"width": 9}).config == {"width": 9}


def test_a_copy_of_an_argument_counts_as_the_argument(tmp_path: Path) -> None:
    class Copies(Base):
        def __init__(self, other: Any, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(dict(config))
            self.weights = config["weights"]

    # Tensors of several elements do not compare to one truth value.
    given = {"weights": torch.ones(3)}
    assert stored(Copies({"weights": torch.zeros(3)}, given), tmp_path)["hparams_name"] == "config"
    assert Copies.load_from_checkpoint(tmp_path / "model.ckpt", other=1).weights.tolist() == [1.0] * 3


class Nested(Base):
    def __init__(self, config: Any, layers: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = config.optimizer.lr if not isinstance(config, Config) else config.optimizer["lr"]
        self.width = config.width
        self.widths = [layer.width for layer in layers]


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Namespace(width=4, optimizer=Namespace(lr=0.5, betas=[0.9, 0.99])),
        DictConfig({"width": 4, "optimizer": {"lr": 0.5, "betas": [0.9, 0.99]}}),
    ],
    ids=lambda config: type(config).__name__,
)
def test_nested_configurations_come_back_readable_by_attribute(config: Any, tmp_path: Path) -> None:
    checkpoint = stored(Nested(config, [Config(1, {}), Config(2, {})]), tmp_path)
    content = {"width": 4, "optimizer": {"lr": 0.5, "betas": [0.9, 0.99]}}
    layers = [{"width": 1, "optimizer": {}}, {"width": 2, "optimizer": {}}]
    assert checkpoint["hyper_parameters"] == {"config": content, "layers": layers}
    assert type(checkpoint["hyper_parameters"]["config"]["optimizer"]) is dict
    assert checkpoint["hparams_name"] == "kwargs"
    again = Nested.load_from_checkpoint(tmp_path / "model.ckpt")
    assert (again.lr, again.width, again.widths) == (0.5, 4, [1, 2])
    assert again.hparams.config.optimizer.betas == [0.9, 0.99]


def test_dicts_come_back_as_dicts_beside_them(tmp_path: Path) -> None:
    layers = [{"width": 1, "more": {"a": [1]}}]
    checkpoint = stored(Nested(Namespace(width=4, optimizer=Namespace(lr=0.5)), [Config(1)]), tmp_path)
    assert "hyper_parameters_of_dicts" not in checkpoint

    class Plain(Base):
        def __init__(self, config: Any, layers: Any, sizes: Any = (1, 2)) -> None:
            super().__init__()
            self.save_hyperparameters()

    checkpoint = stored(Plain(Namespace(width=4), layers), tmp_path)
    again = Plain.load_from_checkpoint(tmp_path / "model.ckpt")
    kinds = [type(each) for each in (again.hparams.layers[0], again.hparams.layers[0]["more"], again.hparams.config)]
    assert (again.hparams.layers, kinds) == (layers, [dict, dict, AttributeDict])
    # What a file says there is not trusted.
    torch.save({**checkpoint, "hyper_parameters_of_dicts": 3}, tmp_path / "model.ckpt")
    assert Plain.load_from_checkpoint(tmp_path / "model.ckpt").hparams.layers == layers


# -- inheritance


class One(Base):
    def __init__(self, a: int = 1, b: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


class Two(One):
    def __init__(self, b: int = 5, c: int = 6) -> None:
        super().__init__(a=9, b=b + 1)


class Three(Two):
    def __init__(self, d: int = 7, **others: Any) -> None:
        super().__init__(**others)
        self.save_hyperparameters("d")


class Unwilling(One):
    def __init__(self, path: str = "p") -> None:
        super().__init__(a=3)


def test_arguments_of_all_levels_are_kept_and_the_subclass_takes_precedence(tmp_path: Path) -> None:
    class Outer(Base):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.inner = One(a=width)
            self.save_hyperparameters()

    assert dict(One().hparams) == {"a": 1, "b": 2}
    assert dict(Three(d=8, c=4).hparams) == {"a": 9, "b": 5, "c": 4, "d": 8}
    assert dict(Unwilling().hparams) == {"a": 3, "b": 2, "path": "p"}
    assert (dict(Outer().hparams), dict(Outer().inner.hparams)) == ({"width": 3}, {"a": 3, "b": 2})
    assert stored(Two(b=3), tmp_path)["hyper_parameters"] == {"a": 9, "b": 3, "c": 6}
    assert dict(Two.load_from_checkpoint(tmp_path / "model.ckpt").hparams) == {"a": 9, "b": 3, "c": 6}


def test_a_subclass_can_leave_out_what_its_base_kept() -> None:
    class Drops(One):
        def __init__(self, x: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="a")

    class Removes(One):
        def __init__(self, x: int = 1) -> None:
            super().__init__()
            self.remove_ignored_hparams(["b", "nothing"])
            self.save_hyperparameters()

    model = Drops()
    assert dict(model.hparams) == dict(model.hparams_initial) == {"b": 2, "x": 1}
    assert dict(Removes().hparams) == {"a": 1, "x": 1}


def test_collected_later_in_parts_by_a_helper_or_for_a_dataclass() -> None:
    class Parts(Base):
        def __init__(self, a: int = 1, b: int = 2, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters("a")
            self.save_hyperparameters({"more": 3})
            self.save_hyperparameters({})
            self.save_hyperparameters(Config(), ignore=["optimizer"])
            self.helper()

        def helper(self) -> None:
            frame = inspect.currentframe()
            assert frame is not None
            self.save_hyperparameters("lr", frame=frame.f_back)

    @dataclass
    class Data(L.LightningDataModule):
        size: int = 1
        name: str = "x"

        def __post_init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert dict(Parts().hparams) == {"a": 1, "more": 3, "width": 4, "lr": 0.1}
    assert dict(Data(5).hparams) == {"size": 5, "name": "x"}

    @dataclass
    class Later(L.LightningDataModule):
        size: int = 1

    later = Later(7)
    later.save_hyperparameters()
    assert dict(later.hparams) == {"size": 7}


# -- the hyper-parameters themselves


def test_hparams_are_read_by_attribute_and_can_be_changed() -> None:
    model = All(3)
    assert model.hparams.width == 3
    model.hparams.width = 5
    assert model.hparams["width"] == 5
    del model.hparams.lr
    with refused(AttributeError, fix="write self.save_hyperparameters()", says=("'lr'", "['name'", "'width'")):
        _ = model.hparams.lr
    with refused(KeyError, says="'lr'"):
        del model.hparams.lr
    assert repr(model.hparams) == '"name":  n\n"width": 5'
    assert isinstance(copy.deepcopy(model.hparams), AttributeDict)


def test_a_missing_entry_of_the_state_of_a_loop_is_not_called_a_hyper_parameter() -> None:
    state = AttributeDict(iteration=3)
    with refused(AttributeError, fix="Set it first", says=("no entry 'step'", "['iteration']")):
        _ = state.step


def test_initial_hparams_stay_as_they_were() -> None:
    class Holds(Base):
        def __init__(self, config: Any, layer: Any, lines: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    layer, cannot_be_copied = nn.Linear(1, 1), (i for i in range(3))
    with warned(UserWarning, says=("'layer'", "save_hyperparameters(ignore=['layer'])")):
        model = Holds({"a": [1]}, layer, cannot_be_copied)
    model.hparams.config["a"].append(2)
    model.hparams.more = 3
    model.hparams_initial["other"] = 1
    model.hparams_initial.config["a"].append(9)
    assert dict(model.hparams_initial) == {"config": {"a": [1]}, "layer": layer, "lines": cannot_be_copied}
    assert model.hparams.config == {"a": [1, 2]}


class Any_(Base):
    def __init__(self, value: Any = None, other: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
