"""Mistakes that programs make most often are named with the line to write, before training where that is possible."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

import hasten as L
from hasten._lib.errors import MisconfigurationException, parts_of
from hasten.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from hasten.loggers import CSVLogger
from tests.models import Classifier, Manual, dataset, loader, quiet
from tests.refusals import refused, warned


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, batch_size=4)  # type: ignore[attr-defined]


class OfAnotherStage(Data):
    def setup(self, stage: str) -> None:
        if stage == "test":
            self.train_set = [1.0]


class InPrepareData(Data):
    def prepare_data(self) -> None:
        if self.prepare_data_per_node is None:
            self.train_set = [1.0]

    def setup(self, stage: str) -> None: ...


class ReadInSetup(Data):
    def prepare_data(self) -> None:
        if self.prepare_data_per_node is None:
            self.train_set = [1.0]

    def setup(self, stage: str) -> None:
        self.part = self.train_set


class Misspelt(Data):
    def setup(self, stage: str) -> None:
        self.trainset = [1.0]


class Empty(Data):
    def setup(self, stage: str) -> None: ...


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Data, "Data has no setup(): write def setup(self, stage), and set self.train_set there"),
        (OfAnotherStage, "OfAnotherStage.setup() sets self.train_set for other stages only"),
        (InPrepareData, "prepare_data() runs in one process of many: set self.train_set in InPrepareData.setup()"),
        (ReadInSetup, "prepare_data() runs in one process of many: set self.train_set in ReadInSetup.setup()"),
        (Misspelt, "Did you mean 'trainset'?"),
        (Empty, "Set self.train_set in Empty.setup()"),
    ],
)
def test_a_datamodule_without_its_data_is_told_where_to_set_it(data: Any, said: str) -> None:
    with pytest.raises(AttributeError) as caught:
        quiet().fit(Classifier(), datamodule=data())
    assert "train_set" in str(caught.value)
    assert said in notes(caught.value)


def test_a_logger_that_is_none_is_explained() -> None:
    class Net(Classifier):
        def on_train_start(self) -> None:
            print(self.trainer.logger.log_dir)  # type: ignore[union-attr]

    with pytest.raises(AttributeError) as caught:
        quiet(logger=False).fit(Net(), loader())
    assert "the Trainer has logger=False" in notes(caught.value)
    assert "trainer.log_dir" in notes(caught.value)


class InList(Classifier):
    blocks: Any

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(8, 8) for _ in range(2)]

    def forward(self, x: Any) -> Any:
        for block in self.blocks.values() if isinstance(self.blocks, dict) else self.blocks:
            x = block(x)
        return self.layers(x)


def test_layers_in_a_list_are_named_before_training() -> None:
    model = InList()
    with warned(UserWarning, fix="self.blocks = nn.ModuleList(...)", says="InList"):
        quiet().fit(model, loader())
    model.blocks = {"first": nn.Linear(8, 8)}
    with warned(UserWarning, fix="nn.ModuleDict"):
        quiet().fit(model, loader())


def frozen(model: InList) -> InList:
    for block in model.blocks:
        block.requires_grad_(False)
    return model


def registered(model: InList) -> InList:
    model.body = nn.Sequential(*model.blocks)
    return model


class InOptimizer(InList):
    def configure_optimizers(self) -> Any:
        blocks = nn.ModuleList(self.blocks)
        return torch.optim.SGD([*self.parameters(), *blocks.parameters()], lr=0.1)


@pytest.mark.parametrize("make", [lambda: frozen(InList()), lambda: registered(InList()), InOptimizer])
def test_layers_in_a_list_that_are_trained_or_frozen_are_not_named(make: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet().fit(make(), loader())
    assert not [each for each in caught if "is a list" in str(each.message)]


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val_acc", "min"), ("val/accuracy", "min"), ("val_BinaryAUROC", "min"), ("f1", "min"), ("val_loss", "max")],
)
def test_a_mode_against_the_name_of_the_value_is_said(kind: Any, monitor: str, mode: str) -> None:
    with warned(UserWarning, fix=f"mode='{'max' if mode == 'min' else 'min'}'"):
        kind(monitor=monitor, mode=mode)


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val_acc", "max"), ("val_loss", "min"), ("acc_gap", "min"), ("neg_loss", "max"), ("score", "min"), ("x", "max")],
)
def test_a_mode_that_may_be_meant_is_not_said(monitor: str, mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EarlyStopping(monitor, mode=mode)
        ModelCheckpoint(monitor=monitor, mode=mode)


def test_two_csv_loggers_of_one_folder_are_refused_before_they_write(tmp_path: Path) -> None:
    with refused(ValueError, "logger", fix="another name="):
        quiet(logger=[CSVLogger(tmp_path), CSVLogger(tmp_path)]).fit(Classifier(), loader())
    assert not list(tmp_path.rglob("*.csv"))
    quiet(logger=[CSVLogger(tmp_path, "first"), CSVLogger(tmp_path, "second")], log_every_n_steps=1).fit(
        Classifier(), loader()
    )
    assert len(list(tmp_path.rglob("*.csv"))) == 2


def test_tensorboards_methods_of_a_csv_logger_name_the_logger_that_has_them(tmp_path: Path) -> None:
    writer = CSVLogger(tmp_path).experiment
    with refused(AttributeError, fix="TensorBoardLogger"):
        writer.add_scalar("loss", 1.0, 0)
    assert not hasattr(writer, "add_scalar")
    assert not hasattr(writer, "other")


def test_a_loader_that_drops_its_only_batch_is_told_what_to_write() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(3, 8), torch.zeros(3).long())
    with refused(ValueError, fix="drop_last=False, or a batch_size of at most 3"):
        quiet().fit(Classifier(), DataLoader(data, batch_size=4, drop_last=True))


def test_a_checkpoint_in_a_missing_folder_names_the_newest_near_it(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "version_0" / "checkpoints" / "last.ckpt")
    with refused(FileNotFoundError, "ckpt_path", says="version_0/checkpoints/last.ckpt"):
        quiet().fit(Classifier(), loader(), ckpt_path=tmp_path / "version_1" / "checkpoints" / "last.ckpt")


def test_a_batch_of_another_number_of_parts_is_described() -> None:
    class Net(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _x, _mask, _y = batch

    with pytest.raises(ValueError) as caught:
        quiet().fit(Net(), loader())
    assert "list of 2 (Tensor (4, 8) float32, Tensor (4,) int64). Write x, y = batch" in notes(caught.value)


def computes_without_gradients(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("seen", self.loss(batch).detach())
    with torch.no_grad():
        return self.loss(batch)


def takes_the_class(self: Any, batch: Any, batch_idx: int) -> Any:
    return self(batch[0]).argmax(1).float().mean()


@pytest.mark.parametrize(
    ("step", "line"),
    [(computes_without_gradients, "with torch.no_grad():"), (takes_the_class, "return self(batch[0]).argmax(1)")],
)
def test_a_loss_without_gradients_names_the_line_that_ends_its_graph(step: Any, line: str) -> None:
    net = type("Net", (Classifier,), {"training_step": step})()
    with pytest.raises(RuntimeError) as caught:
        quiet().fit(net, loader())
    assert line in notes(caught.value)
    assert __file__ in notes(caught.value)


def test_a_model_whose_parameters_are_all_frozen_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        quiet().fit(Classifier().requires_grad_(False), loader())
    assert "every parameter of Classifier has requires_grad=False" in notes(caught.value)
    assert "model.unfreeze()" in notes(caught.value)


def test_a_change_in_place_names_the_layer() -> None:
    class Net(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            x = torch.sigmoid(self.body(x))
            x += 1
            return self.layers(x)

    with pytest.raises(RuntimeError) as caught:
        quiet().fit(Net(), loader())
    assert "Sigmoid keeps for its gradient in or after the layer body" in notes(caught.value)


# -- hooks with other arguments than they are given


class OldEnd(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...


class OldBackward(Classifier):
    def backward(self, loss: Any, optimizer: Any, optimizer_idx: int) -> None:  # type: ignore[override]
        loss.backward()


@pytest.mark.parametrize(
    ("model", "instead"),
    [
        (OldEnd, "def on_train_batch_end(self, outputs, batch, batch_idx)"),
        (OldBackward, "def backward(self, loss)"),
    ],
)
def test_hooks_of_lightning_1_are_refused_before_training(model: Any, instead: str) -> None:
    trainer = quiet()
    with refused(ValueError, fix=instead, says=model.__name__):
        trainer.fit(model(), loader())
    assert trainer.global_step == 0


class OfOneLoader(L.Callback):
    def on_validation_batch_end(  # type: ignore[override]
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...


class OfLoaders(Classifier):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...


def test_a_callback_that_does_not_take_dataloader_idx_is_refused_with_two_loaders_and_runs_with_one() -> None:
    quiet(callbacks=OfOneLoader()).fit(OfLoaders(), loader(), loader())
    with refused(ValueError, fix="dataloader_idx=0", says="OfOneLoader.on_validation_batch_end()"):
        quiet(callbacks=OfOneLoader()).fit(OfLoaders(), loader(), [loader(), loader()])


def test_a_class_among_the_callbacks_is_refused_wherever_it_comes_from() -> None:
    for configured in (EarlyStopping, [EarlyStopping]):
        model = Classifier()
        model.configure_callbacks = lambda given=configured: given  # type: ignore[method-assign]
        with refused(TypeError, "callbacks", fix="EarlyStopping()", says="Classifier.configure_callbacks()"):
            quiet().fit(model, loader())
    model.configure_callbacks = lambda: [5]  # type: ignore[method-assign, list-item, return-value]
    with refused(TypeError, "callbacks", says=("int", "Callback")):
        quiet().fit(model, loader())
    trainer = quiet()
    trainer.callbacks.append(EarlyStopping)  # type: ignore[arg-type]
    with refused(TypeError, "callbacks", fix="EarlyStopping()"):
        trainer.fit(Classifier(), loader())


# -- values that are logged


def logs(value: Any, **options: Any) -> Classifier:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("it", value, **options)
        return self.loss(batch)

    return type("Net", (Classifier,), {"training_step": training_step})()


@pytest.mark.parametrize("size", [-2, "8", torch.Size([8, 4]), torch.ones(2)])
def test_a_batch_size_is_a_number_of_samples(size: Any) -> None:
    with refused(ValueError, "batch_size", fix="batch_size=len(x)", says="'it'"):
        quiet().fit(logs(1.0, batch_size=size, on_epoch=True), loader())


def test_what_cannot_be_logged_is_told_what_to_write() -> None:
    with refused(ValueError, "value", fix="value.abs()"):
        quiet().fit(logs(torch.tensor(1 + 2j)), loader())
    with refused(ValueError, fix="self.log_dict("):
        quiet().fit(logs({"a": 1.0}), loader())
    with refused(ValueError, fix="item()"):
        quiet().fit(logs(torch.ones(1).item), loader())


# -- calls


def test_what_was_given_for_a_logger_or_a_checkpoint_is_named(tmp_path: Path) -> None:
    with refused(TypeError, "logger", fix="True stands alone", says="logger=[True]"):
        quiet(logger=[True])
    with refused(ValueError, fix="log the metric itself"):
        quiet().fit(logs(None), loader())
    torch.save(nn.Linear(2, 2), tmp_path / "whole.ckpt")
    with refused(ValueError, fix="model = torch.load(path, weights_only=False)"):
        Classifier.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=False)


def test_numbers_of_batches_by_epoch_are_told_where_they_belong() -> None:
    with refused(TypeError, "accumulate_grad_batches", fix="GradientAccumulationScheduler(scheduling={0: 2})"):
        quiet(accumulate_grad_batches={0: 2})


def test_a_value_of_another_stage_is_not_proposed() -> None:
    class TwoLoaders(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))

    with refused(ValueError, "monitor", fix="Did you mean 'val_loss/dataloader_idx_0'?"):
        quiet(callbacks=EarlyStopping("val_loss")).fit(TwoLoaders(), loader(), [loader(), loader()])
    with pytest.raises(ValueError) as caught:
        quiet(callbacks=EarlyStopping("val_loss")).fit(Classifier(), loader())
    assert "Did you mean" not in str(caught.value)


def test_a_name_that_only_sounds_like_an_accuracy_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, mode in (("val_accumulated_cost", "min"), ("1-accuracy", "min"), ("loss_reduction", "max")):
            EarlyStopping(name, mode=mode)
    with warned(UserWarning, fix="mode='max'"):
        EarlyStopping("val_acc5", mode="min")


class FlagOfLayer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad = False  # type: ignore[assignment]


class NearFlag(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.layers.parameters():
            parameter.required_grad = False  # type: ignore[attr-defined]


class StaysInEvalMode(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.eval()
        return super().training_step(batch, batch_idx)


class OnPlateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "train_acc"}

    def on_train_epoch_end(self) -> None:
        self.log("train_acc", 0.5)


class Headed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.layers, nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.1)


class NeverResets(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.acc = torchmetrics.Accuracy(task="binary")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.acc.update(batch[1], batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("acc", self.acc.compute())


class Resets(NeverResets):
    """Makes more updates in each epoch, and keeps what is meant for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torchmetrics.MinMaxMetric(torchmetrics.Accuracy(task="binary"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.acc.reset()
        if batch_idx < self.current_epoch:
            self.acc.update(batch[1], batch[1])
        self.both.update(batch[1], batch[1])

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.both.compute()


class Total(torchmetrics.SumMetric):
    """A count over all epochs."""


class Counts(NeverResets):
    def __init__(self) -> None:
        super().__init__()
        self.acc = Total()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.acc.update(1)
        return Classifier.training_step(self, batch, batch_idx)


class Switches(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.train()

    def on_train_batch_end(self, *_: Any) -> None:
        self.eval()


class Flagged(nn.Linear):
    """Has an attribute of the name of torch's, which it reads."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.requires_grad = False

    def forward(self, x: Any) -> Any:
        return super().forward(x.requires_grad_(self.requires_grad))


class OwnFlags(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Flagged()
        for parameter in self.parameters():
            parameter.was_requires_grad = False  # type: ignore[attr-defined]

    def validation_dataloader(self) -> None: ...


class OwnSchedule(torch.optim.lr_scheduler.LRScheduler):
    """Goes on for ever."""

    total_iters = -1

    def __init__(self, optimizer: Any) -> None:
        self.total_iters = -1
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


class Endless(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [OwnSchedule(optimizer)]


class WarmsUp(Classifier):
    """Has a rate of 0 in the first step, by hand."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = self.global_step / 10


class ClipsBoth(Manual):
    """Clips the gradients of an optimizer in steps that leave it out, too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if batch_idx % 2 == 0:
            self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.5)
        optimizer.step()


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]


class StepsTwice(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return super().training_step(batch, batch_idx)


class WithoutSteps(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class IntervalOutside(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "interval": "step"}


class WarmsUpInSteps(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        parts = [LinearLR(optimizer, total_iters=500), CosineAnnealingLR(optimizer, T_max=1000)]
        return [optimizer], [SequentialLR(optimizer, parts, [500])]


class NearHook(Classifier):
    def on_val_epoch_end(self) -> None: ...


class EmptyBackward(Classifier):
    def backward(self, loss: Any) -> None: ...


class SavesForCluster(Classifier):
    def on_hpc_save(self, checkpoint: dict[str, Any]) -> None: ...


class Initial(L.Callback):
    def on_init_end(self, trainer: L.Trainer) -> None: ...


class InitialOfItsOwn(L.Callback):
    def on_init_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "callbacks", "fix"),
    [
        (FlagOfLayer, [], "self.layers.requires_grad_(False)"),
        (NearFlag, [], "requires_grad = False"),
        (StaysInEvalMode, [], "self.train()"),
        (OnPlateau, [], "mode='max'"),
        (Headed, [BackboneFinetuning(unfreeze_backbone_at_epoch=2)], "earlier"),
        (Classifier, [ModelCheckpoint(every_n_epochs=3)], "more often"),
        (Classifier, [GradientAccumulationScheduler({2: 4})], "earlier"),
        (Classifier, [EMAWeightAveraging(update_starting_at_step=1000)], "earlier"),
        (NeverResets, [], "self.acc.reset()"),
        (StepsTwice, [], "automatic_optimization = False"),
        (WithoutSteps, [], "T_max=self.trainer.estimated_stepping_batches"),
        (WarmsUpInSteps, [], "{'scheduler': scheduler, 'interval': 'step'}"),
        (IntervalOutside, [], """{"scheduler": scheduler, "interval": 'step'}"""),
        (NearHook, [], "on_validation_epoch_end"),
        (EmptyBackward, [], "must call loss.backward()"),
        (SavesForCluster, [], "Rename it to on_save_checkpoint"),
        (Classifier, [Initial()], "Rename it to setup"),
    ],
)
def test_what_changes_nothing_is_said(model: Any, callbacks: list[Any], fix: str, tmp_path: Path) -> None:
    with warned((UserWarning, RuntimeWarning), fix=fix):
        fit = quiet(callbacks=callbacks, max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path).fit
        fit(model(), loader())


@pytest.mark.parametrize(("folder", "fix"), [("$HOME/runs", "expandvars"), ("runs/{epoch:02d}", "filename")])
def test_a_folder_that_is_taken_as_it_is_is_said(folder: str, fix: str) -> None:
    with warned(UserWarning, fix=fix):
        ModelCheckpoint(folder)


def test_what_changes_something_is_not_said(tmp_path: Path) -> None:
    saves: Any = {"callbacks": ModelCheckpoint(tmp_path, every_n_epochs=2), "enable_checkpointing": True}
    rare: Any = [BackboneFinetuning(9), GradientAccumulationScheduler({9: 2}), ModelCheckpoint(every_n_epochs=9)]
    rare.append(InitialOfItsOwn())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(max_epochs=2, **saves).fit(Resets(), loader(), loader(4))
        quiet(max_epochs=2, callbacks=BackboneFinetuning(1)).fit(Headed(), loader(), loader(4))
        quiet(fast_dev_run=True, callbacks=rare).fit(Headed(), loader(), loader(4))
        quiet(limit_train_batches=1).fit(WarmsUp(lr=0.0), loader(), loader(4))
        for kind in (Scheduled, Counts, Switches, OwnFlags, Endless, ClipsBoth):
            quiet(max_epochs=2).fit(kind(), loader(), loader(4))


class GrowsLater(Classifier):
    """Makes a layer in its first forward, and a copy that is not to be trained."""

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(2, 2)
            self.copy = copy.deepcopy(self.layers)
        return self.late(super().forward(x))


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize("data", [(loader(),), (loader(), loader(4))])
def test_a_layer_that_no_optimizer_has_is_named(data: Any, sanity_steps: int) -> None:
    with warned(UserWarning, says="(late.weight, late.bias)", fix="in __init__") as said:
        quiet(max_epochs=1, num_sanity_val_steps=sanity_steps).fit(GrowsLater(), *data)
    assert not [each for each in said if "copy." in str(each.message)]


def test_an_average_of_a_fit_before_is_not_missed() -> None:
    trainer = quiet(callbacks=EMAWeightAveraging())
    trainer.fit(Classifier(), loader())
    with warned(UserWarning, says=("is not trained",)) as said:
        trainer.fit(Classifier(), loader())
    assert not [each for each in said if "averaged nothing" in str(each.message)]


class Configured(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        if self.how == "pair":
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if self.how == "layer":
            return torch.optim.SGD(self.layers, 0.1)  # type: ignore[arg-type]
        if self.how == "loader":
            return len(self.trainer.train_dataloader)  # type: ignore[arg-type]
        if self.how == "datamodule":
            return self.trainer.datamodule.classes  # type: ignore[union-attr]
        return torch.optim.SGD(self.state_dict(), 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("pair", "[optimizer], [scheduler]"),
        ("layer", ".parameters()"),
        ("state", ".parameters()"),
        ("loader", "estimated_stepping_batches"),
        ("datamodule", "trainer.fit(model, datamodule=...)"),
    ],
)
def test_an_error_of_configure_optimizers_has_the_line_to_write(how: str, said: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        quiet().fit(Configured(how), loader())
    assert said in str(caught.value) + notes(caught.value)


def test_an_attribute_that_is_nearly_one_of_the_trainer_is_named() -> None:
    trainer = quiet()
    trainer.shoud_stop, trainer.callback, trainer.best = True, [], 0.5  # type: ignore[attr-defined]
    trainer.devices = 2  # type: ignore[attr-defined]
    with warned(UserWarning, fix="trainer.should_stop = True") as said:
        trainer.fit(Classifier(), loader())
    found = [
        parts_of(one.message).fix for one in said if "trainer." in str(one.message) and "was set" in str(one.message)
    ]
    assert found == ["Write trainer.should_stop = True.", "Write Trainer(devices=...)."]


class Broken(L.Trainer):
    @property
    def broken(self) -> Any:
        return [].fti  # type: ignore[attr-defined]


def test_a_misspelt_name_of_a_trainer_or_fabric_is_answered_by_the_nearest() -> None:
    trainer: Any = Broken(**quiet().given_arguments)
    fabric: Any = L.Fabric(accelerator="cpu")
    for owner, name, near in ((trainer, "fti", "'fit'"), (trainer, "curent_epoch", "'current_epoch'"),
                              (fabric, "lauch", "'launch'")):  # fmt: skip
        assert not hasattr(owner, name)
        with refused(AttributeError, fix=near, says=name):
            getattr(owner, name)
    with refused(AttributeError, fix="trainer.validate(model, dataloaders)"):
        trainer.evaluate()
    # What a property raises is not about the trainer, and a private name has no neighbour.
    with refused(AttributeError, says="'list' object has no attribute 'fti'"):
        trainer.broken
    with refused(AttributeError, says="'Fabric' object has no attribute '_lauch'"):
        fabric._lauch
    assert type(copy.copy(fabric)) is L.Fabric


class ReadsScheduler(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.lr_scheduler().step()  # type: ignore[operator]


def test_a_misspelt_method_of_every_module_is_answered_by_its_name() -> None:
    with pytest.raises(AttributeError) as caught:
        quiet().fit(ReadsScheduler(), loader())
    assert "Did you mean 'lr_schedulers'?" in notes(caught.value)


def test_attributes_of_a_program_are_its_own() -> None:
    class Own(L.Trainer):
        def __init__(self, devices: int = 1, **given: Any) -> None:
            super().__init__(devices=devices, **given)
            self.devices = devices  # type: ignore[misc]

    trainers = [quiet(), Own(**quiet().given_arguments)]
    trainers[0].stop_training, trainers[0].n_epochs = False, 3  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainer in trainers:
            trainer.fit(Classifier(), loader(), loader(4))


class Speaks(nn.Module):
    def forward(self, x: Any) -> Any:
        self.log("mean", x.mean())
        return x


def test_what_only_a_lightning_module_has_is_said() -> None:
    model = Classifier()
    model.layers.append(Speaks())
    with pytest.raises(AttributeError) as caught:
        quiet().fit(model, loader())
    assert "log it in the step" in notes(caught.value)


class ReadsParams(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"weights": 1}["params"]


class ReadsNone(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return list(self.trainer.note)  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", [ReadsParams, ReadsNone])
def test_an_error_in_other_code_has_no_advice_on_optimizers_or_loaders(model: Any) -> None:
    trainer = quiet()
    trainer.note = None  # type: ignore[attr-defined]
    with pytest.raises((KeyError, TypeError)) as caught:
        trainer.fit(model(), loader())
    assert "group" not in notes(caught.value)
    assert "loaders" not in notes(caught.value)


def test_a_dataset_that_returns_none_is_named() -> None:
    samples: Any = [(torch.ones(8), 1), None]
    with pytest.raises(TypeError) as caught:
        quiet().fit(Classifier(), DataLoader(samples, 2))
    assert "returned None for a sample" in notes(caught.value)


class Rows(IterableDataset[Any]):
    """Rows of data, all of them in each worker unless it is to divide them."""

    def __init__(self, step: float = 0.1, *, divides: bool = False) -> None:
        self.step, self.divides = step, divides

    def __iter__(self) -> Any:
        worker = get_worker_info() if self.divides else None
        for number in range(0 if worker is None else worker.id, 8, 1 if worker is None else worker.num_workers):
            yield torch.full((8,), number * self.step), number % 2


def test_workers_that_read_the_same_samples_are_warned_of() -> None:
    def fit(data: Any) -> None:
        quiet().fit(Classifier(), DataLoader(data, batch_size=2, num_workers=2))

    with warned(UserWarning, says="2 times", fix="get_worker_info()"):
        fit(Rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Rows(divides=True))


def test_a_sampler_for_other_processes_is_warned_of() -> None:
    data = dataset(8)
    with warned(UserWarning, says="num_replicas=2", fix="Leave the sampler out"):
        quiet().fit(Classifier(), DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)))


def test_lazy_layers_are_made_by_the_first_batch() -> None:
    model = Classifier()
    model.layers[0] = nn.LazyLinear(16)
    quiet(enable_model_summary=True).fit(model, loader())
    assert model.layers[0].weight.shape == (16, 8)


def test_predictions_in_another_order_are_said_where_they_are_returned() -> None:
    data = DataLoader(dataset(8), 4, shuffle=True)
    with warned(UserWarning, fix="shuffle=False"):
        quiet().predict(Classifier(), data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet().predict(Classifier(), data, return_predictions=False)


class Sized(Classifier):
    def __init__(self, width: int = 8) -> None:
        super().__init__()


def test_checkpoints_that_do_not_fit_are_told_apart(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Classifier(), loader())
    path = tmp_path / "whole.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(TypeError) as caught:
        Classifier.load_from_checkpoint(path, hidden=3)
    assert "'hidden' is not an argument of Classifier.__init__. Leave it out." in notes(caught.value)
    with pytest.raises(TypeError) as caught:
        Sized.load_from_checkpoint(path, widht=3)
    assert "'widht' is not an argument of Sized.__init__. Did you mean 'width'?" in notes(caught.value)

    class Other(L.LightningModule):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

    with pytest.raises(RuntimeError) as mixed:
        Other.load_from_checkpoint(path)
    assert "no name in common" in str(mixed.value)
    with refused(FileNotFoundError, says=("empty", "best_model_path")):
        Classifier.load_from_checkpoint("")
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.save(path, {"model": nn.Linear(3, 3)})
    with pytest.raises(RuntimeError) as shapes:
        fabric.load(path, {"model": nn.Linear(4, 3)})
    assert "whole.ckpt" in notes(shapes.value)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("train", "trainer.fit(model, train_dataloaders, val_dataloaders)"),
        ("save", "trainer.save_checkpoint(path)"),
        ("tune", "Tuner(trainer).lr_find(model)"),
        ("from_argparse_args", "LightningCLI"),
        ("lr_schedulers", "trainer.lr_scheduler_configs"),
        ("num_processes", "trainer.num_devices"),
        ("running_sanity_check", "trainer.sanity_checking"),
        ("tested_ckpt_path", "trainer.ckpt_path"),
        ("training_type_plugin", "trainer.strategy"),
    ],
)
def test_names_that_other_libraries_have_are_answered_by_what_to_write(name: str, fix: str) -> None:
    trainer = quiet()
    with refused(AttributeError, fix=fix, says=(name, "'Trainer'")):
        getattr(trainer, name)
    with refused(AttributeError, fix=fix):
        getattr(L.Trainer, name)
    assert not hasattr(trainer, name)
    assert name not in dir(trainer)

    class Own(L.Trainer):
        pass

    setattr(Own, name, property(lambda self: self.max_epochs))
    assert getattr(Own(max_epochs=3, logger=False), name) == 3
    assert name in dir(Own(max_epochs=3, logger=False))


def test_names_of_accelerate_are_answered_with_those_of_fabric() -> None:
    fabric: Any = L.Fabric(accelerator="cpu", devices=1)
    with refused(AttributeError, fix="fabric.all_gather(value)"):
        fabric.gather(1)


def test_a_method_in_the_place_of_automatic_optimization_is_refused() -> None:
    class Net(Classifier):
        def automatic_optimization(self) -> bool:
            return False

    with refused(MisconfigurationException, fix="self.automatic_optimization = False", says="Net"):
        quiet().fit(Net(), loader())
