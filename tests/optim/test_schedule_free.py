"""Optimizers with ``train`` and ``eval``: averaged weights are validated and saved, others go on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten as L
from hasten._lib.optional import installed
from hasten.optim import schedule_free
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused

SCHEDULEFREE = pytest.mark.skipif(not installed("schedulefree"), reason="needs schedulefree")
KINDS = [("stand-in", "32-true"), pytest.param("real", "32-true", marks=SCHEDULEFREE)]


class Averaging(torch.optim.Optimizer):
    """SGD whose weights for evaluation are a running average: in ``eval`` mode they are in the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    def _exchange(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                group["train_mode"] = train_mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        # Back and forth rounds, as the real one does.
                        z = self.state[p]["z"]
                        p.data.lerp_(z, 0.1) if train_mode else p.data.lerp_(z, 1 - 1 / 0.9)

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Like the real one, it asks the first group alone.
        assert self.param_groups[0]["train_mode"], "stepped in eval mode"
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(p.grad, alpha=-0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])
        return loss


class Trained(Classifier):
    def __init__(self, kind: str = "stand-in") -> None:
        super().__init__()
        self.kind = kind
        self.trained_with: list[Tensor] = []
        self.validated_with: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        if self.kind == "real":
            return schedule_free(self, lr=0.02, warmup_steps=3)
        return Averaging(self.parameters(), lr=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained_with.append(self.layers[0].weight.detach().clone())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.validated_with.append(self.layers[0].weight.detach().clone())
        return super().validation_step(batch, batch_idx)


def train(kind: str, *, ckpt_path: Any = None, seed: int = 0, validate: bool = True, **arguments: Any) -> L.Trainer:
    torch.manual_seed(seed)
    trainer = quiet(**{"max_epochs": 3, **arguments})
    trainer.fit(Trained(kind), loader(), loader(8) if validate else None, ckpt_path=ckpt_path)
    return trainer


def by_hand(kind: str) -> tuple[Trained, list[Tensor]]:
    """Train as the documentation of such optimizers says; return also what each epoch validated with."""
    torch.manual_seed(0)
    module, validated_with = Trained(kind), []
    optimizer = module.configure_optimizers()
    for _ in range(3):
        optimizer.train()
        for batch in loader():
            loss = module.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.eval()
        validated_with.append(module.layers[0].weight.detach().clone())
        optimizer.train()
        for p, q in zip(module.parameters(), before, strict=True):
            p.data.copy_(q)
    optimizer.eval()
    return module, validated_with


@pytest.mark.parametrize(("kind", "precision"), [*KINDS, ("stand-in", "bf16-mixed")])
def test_validation_and_the_end_see_averages_and_training_goes_on_exactly(kind: str, precision: Any) -> None:
    trainer = train(kind, num_sanity_val_steps=1, precision=precision)
    module = trainer.lightning_module
    if precision == "32-true":
        expected, validated_with = by_hand(kind)
        assert same_weights(module, expected)
        assert all(torch.equal(a, b) for a, b in zip(module.validated_with[1:], validated_with, strict=True))
    alone = train(kind, validate=False, precision=precision).lightning_module
    assert same_weights(module, alone), "training must not depend on whether it was validated"
    assert not torch.equal(module.validated_with[-1], module.trained_with[-1])


@pytest.mark.parametrize(("kind", "precision"), [*KINDS, ("stand-in", "bf16-true")])
def test_saved_weights_are_averages_and_a_resumed_run_goes_on_exactly(
    kind: str, precision: Any, tmp_path: Path
) -> None:
    whole = train(kind, precision=precision)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 13:
                before = [p.detach().clone() for p in trainer.lightning_module.parameters()]
                trainer.save_checkpoint(tmp_path / "a.ckpt")
                trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
                now = trainer.lightning_module.parameters()
                assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))

    saving = train(kind, callbacks=[Save()], precision=precision)
    assert same_weights(saving.lightning_module, whole.lightning_module)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert not torch.equal(saved["state_dict"]["layers.0.weight"], saving.lightning_module.trained_with[13])
    bare = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert torch.equal(bare["state_dict"]["layers.0.weight"], saved["state_dict"]["layers.0.weight"])
    resumed = train(kind, ckpt_path=tmp_path / "a.ckpt", seed=1, precision=precision)
    assert torch.equal(resumed.lightning_module.trained_with[0], saving.lightning_module.trained_with[13])
    assert same_weights(resumed.lightning_module, whole.lightning_module)


def test_a_checkpoint_within_validation_and_one_after_the_run(tmp_path: Path) -> None:
    whole = train("stand-in", max_epochs=4)
    saved = L.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", monitor="val_loss", save_top_k=-1)
    trainer = train("stand-in", callbacks=[saved], enable_checkpointing=True)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    for name in ("epoch=1.ckpt", "epoch=2.ckpt", "after.ckpt"):
        resumed = train("stand-in", ckpt_path=tmp_path / name, seed=1, max_epochs=4)
        assert same_weights(resumed.lightning_module, whole.lightning_module), name
    averaged = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(averaged["layers.0.weight"], trainer.lightning_module.layers[0].weight)
    trainer.validate(trainer.lightning_module, loader(8), verbose=False)
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    resumed = train("stand-in", ckpt_path=tmp_path / "later.ckpt", seed=1, max_epochs=4)
    assert same_weights(resumed.lightning_module, whole.lightning_module)


def test_a_run_that_breaks_off_leaves_the_averages_and_can_go_on(tmp_path: Path) -> None:
    class Broken(Trained):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 13:
                raise KeyError("broken")

    torch.manual_seed(0)
    module = Broken()
    callback = L.callbacks.OnExceptionCheckpoint(tmp_path, "broken")
    with pytest.raises(KeyError):
        quiet(max_epochs=3, callbacks=[callback], enable_checkpointing=True).fit(module, loader(), loader(8))
    saved = torch.load(tmp_path / "broken.ckpt", weights_only=True)
    assert torch.equal(module.layers[0].weight, saved["state_dict"]["layers.0.weight"])
    resumed = train("stand-in", ckpt_path=tmp_path / "broken.ckpt", seed=1)
    assert same_weights(resumed.lightning_module, train("stand-in").lightning_module)


@pytest.mark.skipif(installed("schedulefree"), reason="tells that it is not installed")
def test_the_missing_package_is_named() -> None:
    with refused(ModuleNotFoundError, fix="pip install schedulefree"):
        schedule_free(Classifier())


@SCHEDULEFREE
@pytest.mark.parametrize(
    ("kind", "name"), [("adamw", "AdamWScheduleFree"), ("sgd", "SGDScheduleFree"), ("radam", "RAdamScheduleFree")]
)
def test_the_classes_of_the_package(kind: str, name: str) -> None:
    module = Classifier()
    module.layers[0].weight.requires_grad_(False)
    made = schedule_free(module, lr=0.5, kind=kind)
    assert type(made).__name__ == name
    assert made.param_groups[0]["lr"] == 0.5
    assert len(made.param_groups[0]["params"]) == 3


def test_a_group_added_in_a_run_is_validated_with_its_average_too() -> None:
    def make(*, later: bool) -> Trained:
        torch.manual_seed(0)
        model = Trained()

        def optimizer() -> Any:
            first, *rest = list(model.parameters())
            made: Any = Averaging([first], lr=0.2)
            if later:
                adds.append(rest)
            else:
                made.add_param_group({"params": rest})
            return made

        adds: list[Any] = []
        model.configure_optimizers = optimizer  # type: ignore[method-assign]

        def add(trainer: L.Trainer, module: L.LightningModule) -> None:
            while adds:
                trainer.optimizers[0].add_param_group({"params": adds.pop()})

        callback = L.callbacks.LambdaCallback(on_train_epoch_start=add)
        trainer = quiet(callbacks=[callback], num_sanity_val_steps=0)
        trainer.fit(model, loader(), loader(8))
        losses.append(trainer.callback_metrics["val_loss"])
        return model

    losses: list[Tensor] = []
    assert same_weights(make(later=True), make(later=False))
    assert losses[0] == losses[1]
