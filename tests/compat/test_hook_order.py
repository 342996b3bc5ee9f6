"""Under Lightning's names, hooks are called in Lightning's order, and steps run inside of the optimizer's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten_lightning
from hasten import Callback, LightningModule, Trainer
from hasten.callbacks import ModelCheckpoint
from hasten.strategies import SingleDeviceStrategy
from hasten.utilities.exceptions import MisconfigurationException
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def watched(model: LightningModule, calls: list[str], *names: str) -> LightningModule:
    """Wrap methods of a module as tools do, to note their calls."""
    for name in names:
        method = getattr(model, name)

        @functools.wraps(method)
        def call(*args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            calls.append(_name)
            return _method(*args, **kwargs)

        setattr(model, name, call)
    return model


HOOKS = (
    "prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start", "zero_grad", "train_dataloader",
    "val_dataloader", "on_sanity_check_start", "on_validation_start", "on_validation_model_eval",
    "on_validation_model_train", "on_train_start", "optimizer_step", "training_step", "on_before_zero_grad",
    "on_after_backward", "on_before_optimizer_step", "clip_gradients", "on_train_batch_end", "on_train_epoch_end",
    "teardown",
)  # fmt: skip


class WithData(Classifier):
    def train_dataloader(self) -> Any:
        return loader(8)

    def val_dataloader(self) -> Any:
        return loader(4)


class Stages(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def setup(self, *_: Any, stage: str) -> None:
        self.seen.append(stage)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.num_training_batches)


def test_hooks_of_a_fit() -> None:
    calls: list[str] = []
    stages = Stages()
    model = watched(WithData(), calls, *[name for name in HOOKS if hasattr(WithData, name)])
    quiet(num_sanity_val_steps=1, callbacks=stages).fit(model)
    batch = [
        "optimizer_step", "training_step", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step",
        "clip_gradients", "on_train_batch_end",
    ]  # fmt: skip
    # prepare_data, configure_model and on_validation_model_train have no own code here, and are not called.
    assert calls == [
        "setup", "configure_optimizers", "on_fit_start", "zero_grad", "val_dataloader", "on_validation_model_eval",
        "on_validation_start", "train_dataloader", "on_train_start", *batch, *batch, "zero_grad",
        "on_validation_model_eval", "on_validation_start", "on_train_epoch_end", "teardown",
    ]  # fmt: skip
    # The argument comes by name, and the training data is not there yet in the sanity check.
    assert stages.seen == ["fit", float("inf")]


class Steps(torch.optim.SGD):
    calls: list[str]

    def step(self, closure: Any = None) -> Any:
        self.calls.append("step begins")
        result = super().step(closure)
        self.calls.append("step ends")
        return result


class Forgets(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


def test_an_optimizer_with_its_own_step_computes_the_gradients() -> None:
    calls: list[str] = []

    class Own(WithData):
        kind: Any = Steps

        def configure_optimizers(self) -> Any:
            optimizer = self.kind(self.parameters(), lr=0.1)
            optimizer.calls = calls
            return optimizer

    model = watched(Own(), calls, "training_step", "on_after_backward")
    quiet(limit_train_batches=1, limit_val_batches=0).fit(model)
    assert calls == ["step begins", "training_step", "on_after_backward", "step ends"]
    assert str(model.optimizers()).startswith("LightningSteps (")

    Own.kind = Forgets
    with refused(MisconfigurationException, says="closure"):
        quiet(limit_val_batches=0).fit(Own())


def test_hooks_of_torch_see_gradients_as_in_lightning_and_the_numbers_stay() -> None:
    seen: list[bool] = []

    class Hooked(WithData):
        def __init__(self, *, hooked: bool) -> None:
            super().__init__()
            self.hooked = hooked

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if self.hooked:
                optimizer.register_step_pre_hook(lambda *_: seen.append(next(self.parameters()).grad is None))
            return optimizer

    weights = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = Hooked(hooked=hooked)
        quiet(limit_val_batches=0).fit(model)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert seen[0]
    assert torch.equal(*weights)


def test_a_step_without_a_loss_warns_and_goes_on(tmp_path: Path) -> None:
    outputs: list[Any] = []
    checkpoints: list[dict[str, Any]] = []

    class Nothing(WithData):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def on_train_batch_end(self, outputs_: Any, batch: Any, batch_idx: int) -> None:
            outputs.append(outputs_)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoints.append(checkpoint)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoints.append(checkpoint)

    trainer = quiet(limit_val_batches=0)
    with warned(UserWarning, fix="training_step"):
        trainer.fit(Nothing())
    assert outputs == [{}, {}]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    Nothing.load_from_checkpoint(tmp_path / "a.ckpt")
    trainer = quiet(limit_val_batches=0, max_epochs=2)
    trainer.fit(Nothing(), ckpt_path=tmp_path / "a.ckpt")
    keys = {
        "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states",
        "lr_schedulers", "hyper_parameters", "hparams_name",
    }  # fmt: skip
    assert [set(checkpoint) for checkpoint in checkpoints] == [keys] * 3
    # In the file hasten's own entries are where they always are, and a resumed run goes on with them.
    assert "hasten" in torch.load(tmp_path / "a.ckpt")
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)


def test_evaluation_as_in_lightning(tmp_path: Path) -> None:
    epochs: list[int] = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = loader(8).dataset
    sampled = torch.utils.data.DataLoader(data, batch_size=4, sampler=Sampler(data))  # type: ignore[arg-type]

    class Extra(Classifier):
        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            epochs.append(10 + dataloader_idx)

        def validation_step(self, batch: Any, *_: Any) -> None:
            pass

    trainer = quiet(num_sanity_val_steps=1)
    trainer.fit(Classifier(), loader(8), sampled)
    trainer.validate(Classifier(), sampled)
    assert epochs == [0, 0, 1]
    assert trainer.num_sanity_val_batches == []
    with refused(RuntimeError, says=("`dataloader_idx`", "`Extra.on_validation_batch_start")):
        trainer.validate(Extra(), loader(4))
    epochs.clear()
    trainer.validate(Extra(), [loader(4), loader(4)])
    assert epochs == [10, 11]

    trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt")
    torch.save({**checkpoint, "state_dict": {}}, tmp_path / "empty.ckpt")
    with warned(UserWarning, says="empty.ckpt"):
        Classifier.load_from_checkpoint(tmp_path / "empty.ckpt", strict=False)
    Extra.strict_loading = False
    with refused(ValueError, "strict", says="Extra.strict_loading=False"):
        Extra.load_from_checkpoint(tmp_path / "a.ckpt", strict=True)
    torch.save({**checkpoint, "hyper_parameters": {"_instantiator": "os.system"}}, tmp_path / "bad.ckpt")
    with refused(ValueError, fix="hasten.module.hparams.ALLOWED_INSTANTIATORS"):
        Classifier.load_from_checkpoint(tmp_path / "bad.ckpt")


def test_a_batch_that_is_none_is_skipped() -> None:
    outputs: list[Any] = []

    class Notes(Classifier):
        def on_train_batch_end(self, outputs_: Any, batch: Any, batch_idx: int) -> None:
            outputs.append((batch is None, outputs_ is None))

    with warned(UserWarning, says="train_dataloader"):
        quiet().fit(Notes(), [None, next(iter(loader(4)))])
    assert outputs == [(True, True), (False, False)]


@pytest.mark.parametrize("per_step", [1, 2])
def test_steps_that_fetch_their_batches(per_step: int) -> None:
    given: list[Any] = []
    took: list[Any] = []

    class Fetches(Classifier):
        def fetch(self, dataloader_iter: Any) -> Any:
            batches = [next(dataloader_iter) for _ in range(per_step)]
            took.extend(batch[1:] for batch in batches)
            return self.loss(batches[0][0])

        def training_step(self, dataloader_iter: Any) -> Any:
            return self.fetch(dataloader_iter)

        def validation_step(self, dataloader_iter: Any) -> None:
            self.log("val", self.fetch(dataloader_iter), batch_size=1)

        def predict_step(self, dataloader_iter: Any) -> Any:
            return self.fetch(dataloader_iter)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            given.append((batch is None, batch_idx))

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            given.append((batch_idx, dataloader_idx))

    trainer = quiet(num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(Fetches(), loader(16))
    assert took == [(index, 0) for index in range(4)]
    assert given == [(True, 0), *((False, index) for index in range(per_step - 1, 3, per_step))]
    assert trainer.global_step == 4 // per_step
    # An incomplete step at the end of the data ends the epoch.
    quiet(max_epochs=2, limit_val_batches=0).fit(Fetches(), loader(12))

    took.clear()
    given.clear()
    trainer = quiet()
    trainer.validate(Fetches(), [loader(8), loader(8)], verbose=False)
    assert took == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert given == took[per_step - 1 :: per_step]
    assert len(trainer.predict(Fetches(), loader(8))) == 2 // per_step


def test_a_run_whose_steps_fetch_their_batches_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    took: list[Any] = []

    class Fetches(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            took.append((self.current_epoch, batch_idx))
            return self.loss(batch)

    def saving(**more: Any) -> Trainer:
        return quiet(callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)], max_epochs=2, **more)

    whole, part, rest = Fetches(), Fetches(), Fetches()
    part.load_state_dict(whole.state_dict())
    quiet(max_epochs=2).fit(whole, loader(12))
    took.clear()
    saving(enable_checkpointing=True, max_steps=2).fit(part, loader(12))
    saving(enable_checkpointing=True).fit(rest, loader(12), ckpt_path=tmp_path / "epoch=0-step=2.ckpt")
    assert took == [(epoch, index) for epoch in (0, 1) for index in range(3)]
    assert same_weights(whole, rest)


def test_methods_of_the_base_can_be_called_by_super(caplog: pytest.LogCaptureFixture) -> None:
    class Calls(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = True

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert LightningModule.validation_step(self, batch, batch_idx) is None

    with warned(UserWarning, says="`validation_step`"), caplog.at_level("INFO"):
        quiet(min_steps=2, limit_val_batches=1).fit(Calls(), loader(12), loader(4))
    assert caplog.text.count("`min_steps=2` has not been met") == 1
    with refused(MisconfigurationException, says="train_dataloader"):
        Calls().train_dataloader()
    trainer = quiet()
    trainer.predict(Calls(), loader(4), return_predictions=False)
    assert not trainer.predict_loop.return_predictions


def test_the_last_window_of_an_epoch_and_the_count_of_steps_are_lightnings() -> None:
    seen: list[int] = []

    class Accumulates(WithData):
        def train_dataloader(self) -> Any:
            return loader(12)

        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.step(closure=optimizer_closure)
            seen.append(self.trainer.global_step)

    model = Accumulates()
    plain = copy.deepcopy(model)
    quiet(accumulate_grad_batches=2, limit_val_batches=0).fit(model)
    # A step counts when optimizer_step has ended.
    assert seen == [0, 1]
    optimizer = plain.configure_optimizers()
    batches = list(plain.train_dataloader())
    for window in (batches[:2], batches[2:]):
        optimizer.zero_grad()
        for batch in window:
            (plain.loss(batch) / 2).backward()
        optimizer.step()
    for trained, by_hand in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(trained, by_hand)


def test_hooks_of_a_strategy_run_after_those_of_the_module() -> None:
    calls: list[str] = []

    class Own(SingleDeviceStrategy):
        def on_train_start(self) -> None:
            calls.append("strategy")

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            calls.append(f"strategy {batch_idx}")
            return -1  # Only what the module returns ends an epoch.

    class Model(WithData):
        def on_train_start(self) -> None:
            calls.append("module")

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            calls.append(f"module {batch_idx}")
            return -1 if batch_idx else None

    quiet(strategy=Own(torch.device("cpu")), limit_val_batches=0).fit(Model())
    assert calls == ["module", "strategy", "module 0", "strategy 0", "module 1", "strategy 1"]


def test_what_a_callback_returns_ends_no_epoch() -> None:
    class Ends(Callback):
        def on_train_batch_start(self, *_: Any) -> int:  # type: ignore[override]
            return -1

    trainer = quiet(callbacks=Ends(), limit_val_batches=0)
    trainer.fit(WithData())
    assert trainer.global_step == trainer.num_training_batches


@pytest.mark.parametrize(
    "hook",
    ["on_validation_model_eval", "on_validation_model_train", "on_test_model_eval", "lr_scheduler_step"],
)
def test_hooks_in_which_nothing_can_be_logged(hook: str) -> None:
    def log(self: LightningModule, *_: Any) -> None:
        self.log("x", 1.0)

    optimizers = {
        "configure_optimizers": lambda self: (
            [optimizer := torch.optim.SGD(self.parameters(), 0.1)],
            [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        )
    }
    model = type("Model", (WithData,), {hook: log, **optimizers})()
    run = quiet().test if "test" in hook else quiet().fit
    with refused(MisconfigurationException, says="You can't `self.log()` inside"):
        run(model, loader(4))
