"""What a program probably forgot is said once, with the line to write; a program that means it hears nothing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from tests.models import Classifier, loader, quiet
from tests.refusals import warned


@contextmanager
def nothing_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def said(fit: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    return [str(one.message) for one in caught]


class Body(nn.Module):
    """A part with layers of its own, as from_pretrained() returns it: in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)])
        self.eval()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Tuned(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]

    def forward(self, x: Any) -> Any:
        return self.layers(self.body(x))


def test_layers_in_eval_mode_are_named_once_and_the_line_mends_it() -> None:
    model = Tuned()
    (text,) = said(lambda: quiet(max_epochs=3).fit(model, loader()))
    assert text.startswith("Tuned trains 1 layers in eval mode (body.layers.0)")
    assert "Write model.train() before fit" in text
    model.train()
    with nothing_said():
        quiet().fit(model, loader())
    (text,) = said(lambda: quiet().fit(model.eval(), loader()))
    assert text.startswith("Tuned trains 3 layers in eval mode")
    assert not model.training, "the mode is the user's"


def frozen(model: Tuned) -> Tuned:
    model.body.requires_grad_(False)
    return model


class KeepsStatistics(Tuned):
    def __init__(self) -> None:
        super().__init__()
        self.train()
        self.body.layers[1].eval()


class SwitchesItOff(Tuned):
    """Was in train mode until a hook wanted something else, here for a part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.train()

    def on_train_epoch_start(self) -> None:
        self.body.eval()


class HasTrainOfItsOwn(Tuned):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.body.eval()
        return self


class PassesItOn(Body):
    """Defines train() and changes no mode by it, as the models of transformers do."""

    def train(self, mode: bool = True) -> Any:
        return super().train(mode)


class TrainsOfTheLibrary(Tuned):
    def __init__(self) -> None:
        super().__init__()
        self.body = PassesItOn()


class KeepsAnotherPart(TrainsOfTheLibrary):
    """Keeps one part in eval mode by its train(), which says nothing about the others."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.body.layers[2].eval()
        return self


@pytest.mark.parametrize("make", [TrainsOfTheLibrary, KeepsAnotherPart])
def test_a_train_method_that_leaves_a_layer_in_train_mode_does_not_silence_the_warning(make: Any) -> None:
    model = make()
    (text,) = said(lambda: quiet().fit(model, loader()))
    assert text.startswith(f"{make.__name__} trains 1 layers in eval mode (body.layers.0)")
    assert not model.body.layers[0].training, "looking for it changes nothing"
    model.train()
    with nothing_said():
        quiet().fit(model, loader())


class ExtractsFeatures(Tuned):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "make",
    [lambda: frozen(Tuned()), KeepsStatistics, SwitchesItOff, HasTrainOfItsOwn, ExtractsFeatures],
)
def test_what_is_meant_is_not_said(make: Any) -> None:
    with nothing_said():
        quiet(max_epochs=2).fit(make(), loader())


def test_a_validation_step_without_data_is_said_and_either_line_ends_it() -> None:
    class Validated(Classifier): ...

    class Other(Classifier): ...

    (text,) = said(lambda: quiet(max_epochs=2).fit(Validated(), loader()))
    assert text.startswith("You defined a `validation_step` but have no `val_dataloader`")
    assert "trainer.fit(model, train_dataloaders, val_dataloaders)" in text
    (text,) = said(lambda: quiet().fit(Other(), datamodule=Data()))
    assert "define val_dataloader()" in text
    with nothing_said():
        quiet().fit(Validated(), loader())  # The next fold.
        quiet().fit(Classifier(), loader(), loader())
        quiet(limit_val_batches=0).fit(Classifier(), loader())


def test_an_evaluation_of_nothing_is_said_and_the_line_mends_it() -> None:
    class Tested(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch))

    trainer, model = quiet(limit_val_batches=0, limit_test_batches=0), Tested()
    with warned(UserWarning, says=("validate()", "limit_val_batches=0")):
        assert trainer.validate(model, loader()) == []
    with warned(UserWarning, says="limit_test_batches = 1.0"):
        assert trainer.test(model, loader()) == []
    trainer.limit_val_batches = trainer.limit_test_batches = 1.0
    with nothing_said():
        assert "val_loss" in trainer.validate(model, loader(), verbose=False)[0]
        assert "loss" in trainer.test(model, loader(), verbose=False)[0]


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


class LogsSteps(Classifier):
    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]


class LogsEpochs(LogsSteps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


class LogsBoth(LogsSteps):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def test_an_epoch_shorter_than_the_logging_interval_is_said_once(tmp_path: Path) -> None:
    def fit(**options: Any) -> None:
        quiet(logger=True, default_root_dir=tmp_path, max_epochs=3, **options).fit(LogsSteps(), loader(40))

    (text,) = said(fit)
    assert text.startswith("Values logged on steps (train_loss) go to the loggers every 50 steps")
    assert "the first epoch had 10" in text
    assert "or self.log(..., on_epoch=True) for the mean" in text
    both = said(lambda: quiet(logger=True, default_root_dir=tmp_path / "both").fit(LogsBoth(), loader(40)))
    assert [text.partition("Write ")[2] for text in both] == ["Trainer(log_every_n_steps=1)."]
    line = re.search(r"Trainer\((log_every_n_steps)=(\d+)\)", text)
    assert line is not None
    with nothing_said():
        fit(log_every_n_steps=int(line.group(2)))
        fit(log_every_n_steps=10)
        fit(log_every_n_steps=0)
    rows = (tmp_path / "lightning_logs" / "version_1" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 31


@pytest.mark.parametrize(
    "options",
    [{"logger": False}, {"fast_dev_run": True, "logger": True}, {"logger": True, "model": LogsEpochs}],
    ids=str,
)
def test_where_nothing_is_missed_nothing_is_said(options: dict[str, Any], tmp_path: Path) -> None:
    model = options.pop("model", LogsSteps)()
    with nothing_said():
        quiet(default_root_dir=tmp_path, **options).fit(model, loader())


def test_a_resumed_run_does_not_say_it_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"logger": True, "enable_checkpointing": True, "default_root_dir": tmp_path}
    (text,) = said(lambda: quiet(max_epochs=1, **options).fit(LogsSteps(), loader()))
    assert "go to the loggers every 50 steps" in text
    (path,) = tmp_path.rglob("*.ckpt")
    assert not said(lambda: quiet(max_epochs=3, **options).fit(LogsSteps(), loader(), ckpt_path=path))


class Regressor(Classifier):
    """Gives one number for each sample, as (batch, 1)."""

    def __init__(self, loss: Any, values: Any = lambda out: out) -> None:
        super().__init__()
        self.compare, self.values = loss, values

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.compare(self.values(self(batch[0])[:, :1]), batch[1].float())


@pytest.mark.parametrize(
    ("loss", "place"),
    [
        (lambda values, target: nn.functional.mse_loss(values, target), rf" \({re.escape(__file__)}, line \d+\)"),
        (nn.L1Loss(), ""),
    ],
)
def test_a_loss_of_two_shapes_is_mended(loss: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})
    with warnings.catch_warnings(record=True) as caught:
        # As Python has it outside the tests: once for each line.
        warnings.simplefilter("default")
        quiet(max_epochs=2, limit_val_batches=0).fit(Regressor(loss), loader())
    texts = [text for one in caught if "gets predictions" in (text := str(one.message))]
    assert len(texts) == 1
    assert re.match(
        rf"Regressor: a loss{place} gets predictions of shape \(4, 1\) and targets of shape \(4,\)", texts[0]
    )
    assert texts[0].endswith("write y.unsqueeze(-1) for the targets y, or squeeze(-1) for the predictions.")


def test_a_loss_of_one_shape_is_not_mentioned() -> None:
    model = Regressor(nn.MSELoss(), lambda out: out.squeeze(-1))
    assert not any("gets predictions" in text for text in said(lambda: quiet(limit_val_batches=0).fit(model, loader())))
