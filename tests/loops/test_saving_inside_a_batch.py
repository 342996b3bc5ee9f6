"""A checkpoint saved inside a batch is exact, or refused with the name of the hook to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import hasten as L
from hasten.checkpoint import files
from tests.callbacks.resuming import assert_same, fitted, weights
from tests.models import loader
from tests.refusals import refused


class Moving(L.LightningModule):
    """Moves all that a batch can move: random numbers, buffers, logged values, metrics, the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.mean, self.extremes = (torchmetrics.MeanMetric(), torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()))
        self.seen: dict[str, float] = {}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[1].logical_not_()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.mean.update(loss.detach())
        self.extremes(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("draw", torch.rand(()), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        self.seen |= {name: value.item() for name, value in self.extremes.compute().items()}
        self.seen["mean"] = self.mean.compute().item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Saving(L.Callback):
    """Calls ``save`` in a hook, before certain batches of the run are done."""

    def __init__(self, folder: Path, hook: str, batches: tuple[int, ...]) -> None:
        self.folder, self.batches = folder, batches
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        path = self.folder / f"{trainer.total_batch_idx + 1}.ckpt"
        if trainer.total_batch_idx + 1 in self.batches and not path.exists():
            trainer.save_checkpoint(path)


HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")


def assert_all_resume(folder: Path, whole: L.Trainer, make: Any, **options: Any) -> int:
    """Resume from each checkpoint in a folder; return how many there were."""
    paths = list(folder.iterdir())
    for path in paths:
        resumed = fitted(make, list, ckpt_path=path, seed=7, **options)
        assert_same(weights(resumed), weights(whole))
        assert resumed.lightning_module.seen == whole.lightning_module.seen
        assert resumed.global_step == whole.global_step
    return len(paths)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_the_resumed_run_is_the_same(tmp_path: Path, hook: str, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    # The first and the last batch of an epoch of six, and some in between.
    whole = fitted(Moving, list, Saving(tmp_path, hook, (0, 1, 5, 6, 11)), **options)
    assert assert_all_resume(tmp_path, whole, Moving, **options) >= 2


@pytest.mark.parametrize("data", [[loader(4)], {"a": loader(8), "b": loader(4)}], ids=["one batch", "joined"])
def test_in_short_epochs_and_with_several_loaders(tmp_path: Path, data: Any) -> None:
    class Joined(Moving):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return super().on_after_batch_transfer(batch["a"] if isinstance(batch, dict) else batch[0], 0)

    options: dict[str, Any] = {"max_epochs": 3, "data": data}
    whole = fitted(Joined, list, Saving(tmp_path, "on_before_zero_grad", (0, 1, 2, 3)), **options)
    assert assert_all_resume(tmp_path, whole, Joined, **options) >= 3


@pytest.mark.parametrize("method", ["training_step", "optimizer_step", "configure_gradient_clipping"])
def test_in_methods_of_the_module(tmp_path: Path, method: str) -> None:
    def make() -> Moving:
        class Own(Moving):
            def save_here(self) -> None:
                if self.trainer.total_batch_idx == 2:
                    self.trainer.save_checkpoint(tmp_path / "a.ckpt")

        def saving(self: Own, *args: Any, **options: Any) -> Any:
            if method == "training_step":
                loss = Moving.training_step(self, *args, **options)
                self.save_here()
                return loss
            self.save_here()
            return getattr(Moving, method)(self, *args, **options)

        setattr(Own, method, saving)
        return Own()

    whole = fitted(make, list)
    assert assert_all_resume(tmp_path, whole, make) == 1


class Manual(Moving):
    """Accumulates two batches by hand, and saves before or after its step."""

    def __init__(self, path: Path, saves: str, weights_only: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.path, self.saves, self.weights_only = path, saves, weights_only

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.saves == "before" and batch_idx == 3:
            self.trainer.save_checkpoint(self.path)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        if self.saves == "after" and batch_idx == 3:
            self.trainer.save_checkpoint(self.path, weights_only=self.weights_only)


def test_after_the_step_it_is_refused_but_weights_alone_are_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with refused(RuntimeError, says=("training_step", "batch 3", "on_train_batch_end")):
        fitted(lambda: Manual(path, "after"), list)
    assert not path.exists()
    fitted(lambda: Manual(path, "after", weights_only=True), list)
    assert "state_dict" in files.load(path)


def save_somehow(trainer: L.Trainer, path: Path) -> None:
    trainer.save_checkpoint(path)


def test_before_a_step_by_hand_and_through_a_function_that_a_hook_calls(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"

    class Helped(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if trainer.total_batch_idx == 2:
                save_somehow(trainer, path)

    by_hand = lambda: Manual(path, "before")  # noqa: E731
    assert assert_all_resume(tmp_path, fitted(by_hand, list), by_hand) == 1
    path.unlink()
    assert assert_all_resume(tmp_path, fitted(Moving, list, Helped()), Moving) == 1


def test_what_could_not_be_seen_beforehand_is_refused(tmp_path: Path) -> None:
    class Hidden(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            getattr(trainer, "save_" + "checkpoint")(tmp_path / "a.ckpt")

    with refused(RuntimeError, says=("on_after_backward", "batch 0", "on_train_batch_end")):
        fitted(Moving, list, Hidden())
    assert not list(tmp_path.iterdir())


def test_learning_rates_and_generators_are_those_with_which_the_batch_began(tmp_path: Path) -> None:
    class Scales(Moving):
        """Lowers the learning rate in each batch, and draws from a generator of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.9 + 0.1 * torch.rand((), generator=self.generator).item()

    whole = fitted(Scales, lambda: [Saving(tmp_path, "on_before_optimizer_step", (2, 3))])
    assert assert_all_resume(tmp_path, whole, Scales) == 2
