"""A hook or step that cannot take its arguments is refused before anything runs, with the line to write."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

import hasten as L
from tests.models import Classifier, loader, quiet
from tests.refusals import refused, warned


class Touched(Classifier):
    ran = False

    def setup(self, stage: str) -> None:
        type(self).ran = True


def module_with(name: str, function: Any) -> Any:
    return type("Net", (Touched,), {name: function, "ran": False})


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("on_train_batch_start", lambda self, batch: None, r"def on_train_batch_start\(self, batch, batch_idx\)"),
        ("optimizer_step", lambda self, epoch: None, r"given \(epoch, batch_idx, optimizer, optimizer_closure\)"),
        ("train_dataloader", lambda self, batch_size: None, r"def train_dataloader\(self\)\."),
        ("transfer_batch_to_device", lambda self, batch: None, r"\(self, batch, device, dataloader_idx\)"),
        ("training_step", lambda self: None, r"Net.training_step\(\) cannot.*given \(batch, batch_idx\)"),
        ("training_step", lambda self, batch, idx, optimizer_idx: None, r"manual optimization.*not an optimizer_idx"),
        ("on_train_start", 3, r"Net.on_train_start is an int; it must be a method"),
        ("setup", lambda self: None, r"Net\.setup\(\) cannot be called: it is given \(stage\)"),
        ("configure_optimizers", lambda self: torch.optim.SGD, r"class SGD, not an object of it \(write SGD\(self"),
    ],
)  # fmt: skip
def test_methods_of_the_module(name: str, function: Any, message: str) -> None:
    model = module_with(name, function)()
    with pytest.raises(ValueError, match=message):
        quiet().fit(model, loader())
    assert type(model).ran == (name == "configure_optimizers" and "class" in message)


class WrongCallback(L.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any) -> None: ...


class WrongData(L.LightningDataModule):
    def setup(self) -> None: ...  # type: ignore[override]

    def train_dataloader(self) -> Any:
        return loader()


def test_callbacks_and_datamodules() -> None:
    expected = r"WrongCallback\.on_train_batch_end.*\(self, trainer, pl_module, outputs, batch, batch_idx\)"
    with pytest.raises(ValueError, match=expected):
        quiet(callbacks=WrongCallback()).fit(Classifier(), loader())
    model = Classifier()
    model.configure_callbacks = lambda: [WrongCallback()]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=expected):
        quiet().fit(model, loader())
    with refused(ValueError, says=("WrongData.setup()", "setup(self")):
        quiet().fit(Classifier(), datamodule=WrongData())


def test_several_loaders_need_their_index() -> None:
    model = Classifier()
    message = (
        r"You provided multiple `val_dataloader`, but no `dataloader_idx` argument in `Classifier.validation_step\(\)`"
    )
    with pytest.raises(ValueError, match=message):
        quiet(num_sanity_val_steps=0).fit(model, loader(), [loader(8), loader(8)])
    with refused(ValueError, fix="test_step"):
        quiet().test(model, [loader(8), loader(8)])

    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any: ...  # type: ignore[override]

    with refused(ValueError, fix="def predict_step(self, batch, batch_idx, dataloader_idx=0)"):
        quiet().predict(Predicts(), [loader(8), loader(8)])

    class Takes(Classifier):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    with refused(ValueError, fix="on_test_batch_end"):
        quiet().test(Takes(), [loader(8), loader(8)])


def test_wider_signatures_mocks_and_helpers_beside_a_hook_are_fine(recwarn: pytest.WarningsRecorder) -> None:
    class Wide(Classifier):
        def setup(self, stage: Any = None) -> None: ...

        def on_train_batch_start(self, batch: Any, batch_idx: int, unused: int = 0) -> None: ...

        def on_train_batch_end(self, *args: Any) -> None: ...

        def train_step(self, batch: Any) -> Any:
            return self.loss(batch)

        def training_step(self, batch: Any) -> Any:
            return self.train_step(batch)

        def on_train_epoch_ends(self) -> None: ...

        def on_train_epoch_end(self) -> None:
            self.on_train_epoch_ends()

    model = Wide()
    model.on_train_start = Mock()  # type: ignore[method-assign]
    quiet(limit_train_batches=1).fit(model, loader())
    model.on_train_start.assert_called_once_with()
    assert not [one for one in recwarn if "looks like the hook" in str(one.message)]


class StepSlip(Classifier):
    def validation_stepp(self, batch: Any, index: int) -> None: ...

    validation_step = L.LightningModule.validation_step


class CallbackSlip(L.Callback):
    def on_trian_epoch_end(self, trainer: Any, module: Any) -> None: ...


class DataSlip(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloder(self) -> Any:
        return loader()


class Old(Classifier):
    def on_epoch_start(self) -> None: ...


class OldCallback(L.Callback):
    def on_batch_end(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.mark.parametrize(
    ("fit", "name", "hook"),
    [
        (lambda: quiet().fit(StepSlip(), loader()), "StepSlip.validation_stepp", "validation_step(self, "),
        (
            lambda: quiet(callbacks=[CallbackSlip()]).fit(Classifier(), loader()),
            "CallbackSlip.on_trian_epoch_end",
            "on_train_epoch_end(self, trainer, pl_module)",
        ),
        (lambda: quiet().fit(Classifier(), datamodule=DataSlip()), "DataSlip.val_dataloder", "val_dataloader(self)"),
        (lambda: quiet().fit(Old(), loader()), "Old.on_epoch_start", "on_train_epoch_start(self)"),
        (
            lambda: quiet(callbacks=[OldCallback()]).fit(Classifier(), loader()),
            "OldCallback.on_batch_end",
            "on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx)",
        ),
    ],
)
def test_a_misspelt_or_renamed_hook_is_warned_of(fit: Any, name: str, hook: str) -> None:
    with warned(UserWarning, says=(f"{name}()", hook)):
        fit()


class OfAnotherLibrary(L.Callback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None: ...

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None: ...


class Helped(Classifier):
    def train_step(self, batch: Any) -> Any:
        return self.loss(batch)

    def on_epoch_end(self) -> None: ...

    def on_train_epoch_ends(self) -> None: ...

    def on_train_epoch_start_(self) -> None:
        """Is switched off by its name."""

    def on_train_epoch_end(self) -> None:
        self.on_train_epoch_ends()


def test_a_helper_beside_the_hook_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    quiet(callbacks=[OfAnotherLibrary()]).fit(Helped(), loader(), loader())
    assert not [one for one in recwarn if "looks like the hook" in str(one.message)]


def test_methods_of_installed_packages_are_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    names: dict[str, Any] = {"L": L}
    source = "class Keeps(L.Callback):\n    def save_checkpoint(self, path): ...\n    def on_epoch_end(self): ...\n"
    exec(compile(source, "/lib/site-packages/package/callbacks.py", "exec"), names)
    quiet(callbacks=[names["Keeps"]()]).fit(Classifier(), loader())
    assert not [one for one in recwarn if "looks like the hook" in str(one.message)]
