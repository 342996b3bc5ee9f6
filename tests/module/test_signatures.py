"""A hook or step that cannot take its arguments is told before anything runs, with the line to write."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import hasten as L
from tests.models import Classifier, loader, quiet


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
        ("training_step", lambda self, batch, idx, optimizer_idx: None, r"manual optimisation.*not an optimizer_idx"),
        ("on_train_start", 3, r"Net.on_train_start is a int; it must be a method"),
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
    with pytest.raises(ValueError, match=r"WrongData\.setup\(\).*def setup\(self, stage\)"):
        quiet().fit(Classifier(), datamodule=WrongData())


def test_several_loaders_need_their_index() -> None:
    model = Classifier()
    message = r"Classifier.validation_step\(\) does not take `dataloader_idx`, and there are 2 validation loaders"
    with pytest.raises(ValueError, match=message):
        quiet(num_sanity_val_steps=0).fit(model, loader(), [loader(8), loader(8)])
    with pytest.raises(ValueError, match=r"def test_step\(self, batch, batch_idx, dataloader_idx=0\)"):
        quiet().test(model, [loader(8), loader(8)])

    class Takes(Classifier):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

        def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(ValueError, match=r"on_test_batch_end\(self, outputs, batch, batch_idx, dataloader_idx=0\)"):
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


class HookSlip(Classifier):
    def on_train_epoch_endd(self) -> None: ...


class CallbackSlip(L.Callback):
    def on_trian_epoch_end(self, trainer: Any, module: Any) -> None: ...


class DataSlip(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloder(self) -> Any:
        return loader()


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (lambda: quiet().fit(StepSlip(), loader()), r"^StepSlip.validation_stepp\(\) would never be called: .*Rename"),
        (lambda: quiet().fit(HookSlip(), loader()), r"the hook is on_train_epoch_end\(\)"),
        (lambda: quiet(callbacks=[CallbackSlip()]).fit(Classifier(), loader()), "to on_train_epoch_end"),
        (lambda: quiet().fit(Classifier(), datamodule=DataSlip()), "to val_dataloader"),
    ],
)
def test_what_can_only_be_a_misspelt_hook_is_refused(fit: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit()


class Scheme:
    """Not of this library: what it defines may be for another one."""

    def on_train_batch_ends(self) -> None: ...


class Helpers(Scheme, Classifier):
    def on_train_epoch_ends(self) -> None:
        """Is called by name further down in this file."""

    def on_train_epoch_end_(self) -> None:
        """Is switched off by its name."""

    def test_steps(self, count: int) -> None:
        """Takes something else than the hook."""

    def validation_steps(self, batch: Any, batch_idx: int) -> None:
        """Is reached by getattr."""

    def on_fit_start(self) -> None:
        assert getattr(self, "validation_steps")  # noqa: B009

    test_step = L.LightningModule.test_step
    validation_step = L.LightningModule.validation_step


def test_a_method_named_almost_like_a_hook_is_warned_of_where_it_may_be_a_helper() -> None:
    with pytest.warns(UserWarning, match="looks like the hook") as said:
        quiet().fit(Helpers(), loader())
    messages = " ".join(str(one.message) for one in said)
    assert "Helpers.on_train_epoch_ends() looks like the hook on_train_epoch_end() misspelt" in messages
    assert "Rename it to validation_step" in messages
    assert "on_train_epoch_end_()" not in messages


@pytest.mark.parametrize("where", ["another file", "a package"])
def test_a_method_used_elsewhere_or_defined_in_a_package_is_not_refused(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("site-packages" if where == "a package" else "program")
    folder.mkdir()
    (folder / "one_of_theirs.py").write_text(
        "from tests.models import Classifier\n\n\nclass Theirs(Classifier):\n"
        "    predict_step = Classifier.__mro__[1].predict_step\n\n"
        "    def predict_steps(self, batch):\n        return batch\n"
    )
    (folder / "the_user_of_it.py").write_text("def use(model):\n    return model.predict_steps(1)\n")
    monkeypatch.syspath_prepend(folder)
    for name in ("one_of_theirs", "the_user_of_it"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    theirs = importlib.import_module("one_of_theirs")
    if where == "another file":
        with pytest.raises(ValueError, match="if it is a method for your own code, give it a name less alike"):
            quiet().fit(theirs.Theirs(), loader())
        importlib.import_module("the_user_of_it")
    with pytest.warns(UserWarning, match=r"predict_steps\(\) looks like the hook predict_step\(\)"):
        quiet().fit(theirs.Theirs(), loader())


def test_a_hook_of_older_versions_is_said_and_a_method_of_that_name_is_not(recwarn: pytest.WarningsRecorder) -> None:
    class Old(Classifier):
        def on_epoch_start(self) -> None: ...

    class OldCallback(L.Callback):
        def on_batch_end(self, trainer: Any, pl_module: Any) -> None: ...

    quiet(callbacks=[OldCallback()]).fit(Old(), loader(), loader())
    said = [str(one.message) for one in recwarn]
    assert [text.split(" was ")[0] for text in said] == ["Old.on_epoch_start()", "OldCallback.on_batch_end()"]
    assert "Rename it to on_train_epoch_start, with the arguments (self)." in said[0]
    assert "on_train_batch_end, with the arguments (self, trainer, pl_module, outputs, batch" in said[1]

    class OfAnotherLibrary(L.Callback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None: ...

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None: ...

    class Calls(Classifier):
        def on_epoch_end(self) -> None: ...

        def on_train_epoch_end(self) -> None:
            self.on_epoch_end()

    recwarn.clear()
    quiet(callbacks=[OfAnotherLibrary()]).fit(Calls(), loader(), loader())
    assert not recwarn.list
