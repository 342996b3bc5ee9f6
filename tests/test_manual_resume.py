"""Gradients that wait for an optimizer's step are in a checkpoint, and only those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.checkpoint import files
from tests.callbacks.resuming import SaveAt, assert_resumes_exactly, assert_same, fitted, weights
from tests.models import Classifier, loader, quiet, same_weights


class Accumulating(L.LightningModule):
    """Two optimizers with accumulations of 4 and 3 batches, and a weight that the user steps by hand after 5."""

    def __init__(self, set_to_none: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.set_to_none = False, set_to_none
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.head(torch.tanh(self.body(batch[0]))) * self.scale
        self.manual_backward(nn.functional.cross_entropy(logits, batch[1]))
        for every, optimizer in zip((4, 3), self.optimizers(), strict=True):
            if (batch_idx + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=self.set_to_none)
        if (batch_idx + 1) % 5 == 0:
            assert self.scale.grad is not None
            self.scale.data -= 0.1 * self.scale.grad
            self.scale.grad = None

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)
        return first, torch.optim.Adam(self.head.parameters(), lr=0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_by_hand_goes_on_after_any_batch(tmp_path: Path, set_to_none: bool) -> None:
    assert_resumes_exactly(
        tmp_path,
        lambda: Accumulating(set_to_none),
        list,
        list(range(1, 13)),
        data=loader(24, 2, shuffle=True),
        max_epochs=2,
    )


class Toggling(Accumulating):
    """Trains the body in three batches, then the head in three; toggles between batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx // 3 % 2]
        if batch_idx % 3 == 0:
            self.toggle_optimizer(optimizer)
        loss = nn.functional.cross_entropy(self.head(torch.tanh(self.body(batch[0]))), batch[1])
        self.manual_backward(loss)
        if batch_idx % 3 == 2:
            optimizer.step()
            # Of all parameters: one that was not toggled must have no gradient.
            assert sum(p.grad is not None for p in self.parameters()) == 2
            self.untoggle_optimizer(optimizer)
            self.zero_grad()


def test_an_optimizer_toggled_between_batches_is_toggled_in_the_resumed_run(tmp_path: Path) -> None:
    trainer = assert_resumes_exactly(tmp_path, Toggling, list, [1, 2, 3, 4, 5], data=loader(24, 2, shuffle=True))
    assert all(p.requires_grad for p in trainer.lightning_module.parameters())


class Exact(Classifier):
    """Steps each batch, and clears the gradients after or before."""

    def __init__(self, clears_after: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.clears_after = False, clears_after

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if not self.clears_after:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if self.clears_after:
            optimizer.zero_grad()


def test_gradients_take_room_only_where_they_may_be_needed(tmp_path: Path) -> None:
    def saved(module: L.LightningModule, **arguments: Any) -> Any:
        fitted(lambda: module, list, SaveAt(tmp_path / "a.ckpt", 2), **arguments)
        return files.load(tmp_path / "a.ckpt")["hasten"]["gradients"]

    assert saved(Exact(clears_after=True)) is None
    # The next step may clear them, or add to them: nobody knows.
    assert saved(Exact(clears_after=False)) is not None
    # Left by a step that is done, and cleared before the next.
    assert saved(Classifier()) is None
    assert saved(Classifier(), accumulate_grad_batches=2) is None
    assert saved(Classifier(), accumulate_grad_batches=3) is not None
    zeros = saved(Accumulating(set_to_none=False))
    assert zeros is not None


class GatedExchange(Exact):
    """Accumulates three batches without an exchange between the processes; the fourth exchanges and steps."""

    def __init__(self) -> None:
        super().__init__(clears_after=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, steps = self.optimizers(), (batch_idx + 1) % 4 == 0
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.loss(batch))
        if steps:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("by_hand", [True, False])
def test_each_process_gets_its_own_gradients_back(tmp_path: Path, by_hand: bool) -> None:
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 1 if by_hand else 4}
    options["data"] = loader(64)
    make = GatedExchange if by_hand else Classifier
    path = tmp_path / "a.ckpt"
    whole = fitted(make, list, SaveAt(path, 6), **options)
    assert_same(weights(fitted(make, list, ckpt_path=path, seed=1, **options)), weights(whole))
    assert len(files.load(path)["hasten"]["gradients"]["ranks"]) == 2


def test_gradients_of_two_processes_are_averaged_where_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fitted(Classifier, list, SaveAt(path, 3), accumulate_grad_batches=2)
    checkpoint = files.load(path)
    (first,) = checkpoint["hasten"]["gradients"]["ranks"]
    doubled = {key: {name: 3 * value for name, value in of.items()} for key, of in first.items()}
    checkpoint["hasten"]["gradients"]["ranks"].append(doubled)
    files.save(checkpoint, path)
    seen: list[torch.Tensor] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            seen.extend(p.grad.clone() for p in module.parameters() if p.grad is not None)

    fitted(Classifier, list, Look(), ckpt_path=path, accumulate_grad_batches=2)
    assert_same(seen, [2 * gradient for gradient in first["optimizers"].values()])


class OwnOptimizer(Classifier):
    """Steps an optimizer that the Trainer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def configure_optimizers(self) -> None:
        return None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.optimizer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(checkpoint["own"])


@pytest.mark.parametrize("is_of_lightning", [False, True])
def test_a_module_without_optimizers_of_the_trainer_resumes(tmp_path: Path, is_of_lightning: bool) -> None:
    whole, cut = OwnOptimizer(), OwnOptimizer()
    cut.load_state_dict(whole.state_dict())
    quiet(max_epochs=2).fit(whole, loader(8))
    first = quiet(max_epochs=1)
    first.fit(cut, loader(8))
    path = tmp_path / "cut.ckpt"
    first.save_checkpoint(path)
    if is_of_lightning:  # which writes one empty state; without its counters the epoch counts as complete
        saved = torch.load(path, weights_only=True)
        del saved["hasten"], saved["hasten_version"], saved["loops"]
        torch.save({**saved, "epoch": 0, "optimizer_states": [{}]}, path)
    resumed, trainer = OwnOptimizer(), quiet(max_epochs=2)
    trainer.fit(resumed, loader(8), ckpt_path=path)
    assert trainer.current_epoch == 2
    assert same_weights(resumed, whole)
