"""Finetuning: what is frozen stays as it is, what is unfrozen trains, and a resumed run knows the difference."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hasten as L
from hasten.callbacks import BackboneFinetuning, BaseFinetuning
from hasten.callbacks.finetuning import schedule_new_groups
from tests.callbacks.resuming import SaveAt, assert_resumes_exactly, assert_same, fitted, weights
from tests.models import loader, quiet
from tests.refusals import refused, warned


class Model(L.LightningModule):
    """A backbone with batch normalization, and a head."""

    schedule: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 2)
        self.rates: list[list[float]] = []
        self.seen: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.backbone(x)), y)

    def on_train_epoch_end(self) -> None:
        self.rates.append([round(float(g["lr"]), 6) for g in self.trainer.optimizers[0].param_groups])
        self.seen.append({k: v.detach().clone() for k, v in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


def names(group: dict[str, Any], module: nn.Module) -> list[str]:
    found = {id(p): name for name, p in module.named_parameters()}
    return [found[id(p)] for p in group["params"]]


def backbone(*arguments: Any, **options: Any) -> Any:
    """Return a function that makes a list with the callback."""
    return lambda: [BackboneFinetuning(*arguments, **options)]


class Late(BaseFinetuning):
    """Unfreezes the backbone in the second epoch."""

    def __init__(self, train_bn: bool = True) -> None:
        super().__init__()
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, initial_denom_lr=5)


def test_the_backbone_is_frozen_until_its_epoch_and_trains_from_then_on() -> None:
    trainer = fitted(Model, backbone(2, backbone_initial_ratio_lr=0.5), max_epochs=4)
    model = trainer.lightning_module
    assert isinstance(model, Model)
    changes = [
        {name for name in after if not torch.equal(before[name], after[name])}
        for before, after in itertools.pairwise(model.seen)
    ]
    frozen = ["backbone.0.weight", "backbone.0.bias", "backbone.3.weight", "backbone.3.bias"]
    trained = ["backbone.1.weight", "backbone.1.bias", "head.weight", "head.bias"]
    assert changes == [set(trained), {*trained, *frozen}, {*trained, *frozen}]
    assert model.rates == [[0.1], [0.1], [0.1, 0.05], [0.1, 0.1]]
    assert [names(group, model) for group in trainer.optimizers[0].param_groups] == [trained, frozen]


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"backbone_initial_lr": 0.02}, [0.02, 0.04, 0.08, 0.1]),
        ({"backbone_initial_lr": 0.04, "should_align": False}, [0.04, 0.08, 0.16, 0.32]),
        ({"lambda_func": float, "backbone_initial_ratio_lr": 0.01}, [0.001, 0.003, 0.012, 0.06]),
    ],
)
def test_the_learning_rate_of_the_backbone_follows_the_arguments(options: dict[str, Any], rates: list[float]) -> None:
    trainer = fitted(Model, backbone(1, **options), max_epochs=5)
    assert trainer.lightning_module.rates == [[0.1], *([0.1, rate] for rate in rates)]  # type: ignore[union-attr]


@pytest.mark.parametrize("groups", [["all"], ["backbone", "head"]])
def test_the_learning_rate_of_the_head_stays_if_the_optimizer_had_the_backbone(groups: list[str]) -> None:
    class Whole(Model):
        def configure_optimizers(self) -> Any:
            parts = {"all": self, "backbone": self.backbone, "head": self.head}
            return torch.optim.SGD([{"params": parts[name].parameters()} for name in groups], lr=0.1)

    with warned(UserWarning, fix="configure_optimizers"):
        trainer = fitted(Whole, backbone(1), max_epochs=3)
    assert trainer.lightning_module.rates == [[0.1] * len(groups)] * 3  # type: ignore[union-attr]


def test_it_equals_the_loop_written_by_hand() -> None:
    data = loader(24)
    trainer = fitted(Model, backbone(1), max_epochs=3, data=data)

    L.seed_everything(0, verbose=False)
    model = Model()
    norm = [*model.backbone[1].parameters()]
    late = [*model.backbone[0].parameters(), *model.backbone[3].parameters()]
    optimizer = torch.optim.SGD([*norm, *model.head.parameters()], lr=0.1, momentum=0.9)
    for epoch in range(3):
        for parameter in late:
            parameter.requires_grad = epoch >= 1
        if epoch == 1:
            optimizer.add_param_group({"params": late, "lr": 0.01})
        if epoch == 2:
            optimizer.param_groups[1]["lr"] = 0.02
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.head(model.backbone(x)), y).backward()
            optimizer.step()
    assert_same(weights(trainer), dict(model.state_dict()))


@pytest.mark.parametrize("train_bn", [True, False])
def test_a_resumed_run_goes_on_with_what_trained(tmp_path: Path, train_bn: bool) -> None:
    # 6 batches an epoch: before, in and after the epoch that unfreezes.
    whole = assert_resumes_exactly(tmp_path, Model, backbone(1, train_bn=train_bn), [3, 6, 8, 15], max_epochs=3)
    module = whole.lightning_module
    assert isinstance(module, Model)
    trains = [name for name, p in module.named_parameters() if p.requires_grad]
    assert {"backbone.0.weight", "backbone.1.weight"} <= set(trains)
    stepped = {id(p) for group in whole.optimizers[0].param_groups for p in group["params"]}
    assert (id(module.backbone[1].weight) in stepped) == train_bn  # type: ignore[union-attr]
    # Once the backbone trains, evaluation uses statistics of its outputs.
    assert module.backbone[1].track_running_stats
    assert module.backbone[1].num_batches_tracked == (18 if train_bn else 12)  # type: ignore[union-attr]
    assert len(whole.optimizers[0].param_groups) == 2


def test_a_checkpoint_has_the_options_of_each_group_with_names_in_place_of_parameters(tmp_path: Path) -> None:
    saver = SaveAt(tmp_path / "a.ckpt", 8)
    trainer = fitted(Model, backbone(1), saver, max_epochs=2)
    stored = torch.load(saver.path, weights_only=True)
    (state,) = stored["callbacks"].values()
    (groups,) = state["internal_optimizer_metadata"].values()
    model = trainer.lightning_module
    assert isinstance(model, Model)
    assert [group.pop("params") for group in groups] == [
        names(group, model) for group in trainer.optimizers[0].param_groups
    ]
    expected = stored["optimizer_states"][0]["param_groups"]
    assert groups == [{key: group[key] for key in group if key != "params"} for group in expected]
    assert [group["lr"] for group in groups] == [0.1, pytest.approx(0.01)]


def sequential(optimizer: Any) -> Any:
    first, second = lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [2])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        sequential,
    ],
    ids=["lambda", "step", "cosine", "sequential"],
)
def test_schedulers_drive_a_group_added_later_also_after_a_resume(tmp_path: Path, schedule: Any) -> None:
    scheduled = type("Scheduled", (Model,), {"schedule": staticmethod(schedule)})
    whole = assert_resumes_exactly(tmp_path, scheduled, lambda: [Late()], [8, 14], max_epochs=4)
    rates = whole.lightning_module.rates  # type: ignore[union-attr]
    assert [len(each) for each in rates] == [1, 2, 2, 2]
    for first, late in rates[1:3]:
        assert late == pytest.approx(first / 5, abs=2e-6)


def test_statistics_of_unfrozen_batch_normalization_follow_the_data_after_a_resume(tmp_path: Path) -> None:
    assert_resumes_exactly(tmp_path, Model, lambda: [Late(train_bn=False)], [8], max_epochs=2)


def test_one_cycle_drives_a_group_added_later() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    BaseFinetuning.unfreeze_and_add_param_group(model[1], optimizer)
    schedule_new_groups(scheduler, optimizer)
    schedule_new_groups(scheduler, optimizer)  # A second time nothing is left to do.
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert len(scheduler.base_lrs) == 2
    assert optimizer.param_groups[0]["lr"] > 0.5
    assert optimizer.param_groups[1]["max_lr"] == pytest.approx(0.1)
    assert optimizer.param_groups[1]["momentum"] == optimizer.param_groups[0]["momentum"]
    # A scheduler of another optimizer is left alone.
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    other.add_param_group({"params": nn.Linear(1, 1).parameters()})
    schedule_new_groups(scheduler, other)
    assert len(scheduler.base_lrs) == 2


def test_tools_freeze_and_unfreeze() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
    flat = BaseFinetuning.flatten_modules
    assert [type(m).__name__ for m in flat(model)] == ["Linear", "BatchNorm1d", "Linear", "Dropout"]
    nested = [model[2], {"a": model[0]}, (model[1], model[1])]
    assert [type(m).__name__ for m in flat(nested)] == ["Linear", "Dropout", "Linear", "BatchNorm1d"]

    BaseFinetuning.freeze(model, train_bn=False)
    assert not any(p.requires_grad for p in model.parameters())
    assert model[1].track_running_stats is False
    BaseFinetuning.make_trainable(model)
    assert all(p.requires_grad for p in model.parameters())
    assert model[1].track_running_stats is True
    BaseFinetuning.freeze(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight", "1.bias"]
    assert len(list(BaseFinetuning.filter_params(model))) == 2
    assert len(list(BaseFinetuning.filter_params(model, train_bn=False))) == 0
    assert len(list(BaseFinetuning.filter_params(model, requires_grad=False))) == 4
    BaseFinetuning.make_trainable(model)
    BaseFinetuning.freeze_module(model[2])
    assert all(p.requires_grad for p in model.parameters())  # It has none of its own.


def test_what_the_optimizer_has_is_not_added_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    with torch.no_grad():
        model[2].weight.copy_(model[0].weight)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with warned(UserWarning, says=("2 of", "SGD")):
        BaseFinetuning.unfreeze_and_add_param_group(model[0], optimizer)
    assert len(optimizer.param_groups) == 1
    BaseFinetuning.freeze(model[1:], train_bn=False)
    with warned(UserWarning, fix="configure_optimizers"):
        BaseFinetuning.unfreeze_and_add_param_group(model, optimizer, lr=3, train_bn=False)
    # Equal values make no equal parameters. Batch normalization is not stepped, and has running statistics again.
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in model[2].parameters()]
    assert optimizer.param_groups[1]["lr"] == 3.0
    assert model[1].track_running_stats
    assert model[2].weight.requires_grad


def test_only_fit_freezes() -> None:
    model = Model()
    model.predict_step = lambda batch, batch_idx: model.head(model.backbone(batch[0]))  # type: ignore[method-assign]
    quiet(callbacks=[BackboneFinetuning()]).predict(model, loader(8))
    assert all(p.requires_grad for p in model.parameters())


def test_a_late_start_unfreezes_at_once_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer = fitted(Model, backbone(0, verbose=True, rounding=3))
    assert trainer.lightning_module.rates == [[0.1, 0.01]]  # type: ignore[union-attr]
    assert "Epoch 1: Current lr: 0.1, Backbone lr: 0.01" in caplog.text


def test_a_module_without_backbone_and_missing_methods_are_refused() -> None:
    class Body(Model):
        def __init__(self) -> None:
            super().__init__()
            self.backbon = self.backbone
            del self.backbone

    message = r"Body has no module 'backbone'; its modules are \['head', 'backbon'\]"
    with pytest.raises(ValueError, match=message):
        fitted(Body, backbone())
    with refused(NotImplementedError, says=("BaseFinetuning", "freeze_before_training")):
        fitted(Model, lambda: [BaseFinetuning()])
    half = BaseFinetuning()
    half.freeze_before_training = lambda pl_module: None  # type: ignore[method-assign]
    with refused(NotImplementedError, says=("BaseFinetuning", "finetune_function")):
        fitted(Model, lambda: [half])


@pytest.mark.parametrize("is_known", [True, False])
def test_a_state_with_groups_alone_trains_what_they_hold_if_the_model_has_it(tmp_path: Path, is_known: bool) -> None:
    class Changed(Model):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            (state,) = checkpoint["callbacks"].values()
            del state["trains"], state["tracks"]
            if not is_known:
                state["internal_optimizer_metadata"][0][0]["params"][0] = "backbone.9.weight"

    saver = SaveAt(tmp_path / "a.ckpt", 8)
    whole = fitted(Model, backbone(1), saver, max_epochs=2)
    message = "BackboneFinetuning: the checkpoint has the parameter 'backbone.9.weight'"
    with contextlib.nullcontext() if is_known else pytest.raises(ValueError, match=message):
        resumed = fitted(Changed, backbone(1), ckpt_path=saver.path, max_epochs=2, seed=5)
        assert_same(weights(resumed), weights(whole))
