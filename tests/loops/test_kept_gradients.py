"""Gradients that the user's zero_grad keeps are there after validation and in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import hasten as L
from tests.models import loader, quiet, same_weights


class ZerosKept(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class TwoHeads(L.LightningModule):
    """Trains one head, then the other, then none: momentum moves those that have gradients of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx % 3 == 2:
            return None
        return nn.functional.cross_entropy(self.heads[batch_idx % 3](batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)

    def zeroed(self, optimizer: Any, batch_idx: int) -> None:
        """By hand, what hasten does in ``optimizer_zero_grad``."""
        optimizer.zero_grad()


class OptimizerKeepsZeros(TwoHeads):
    def configure_optimizers(self) -> Any:
        return ZerosKept(self.parameters(), lr=0.1, momentum=0.9)


class PatchedZeroGrad(TwoHeads):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.zero_grad = lambda set_to_none=True: SGD.zero_grad(optimizer, set_to_none=False)
        return optimizer


class ModuleKeepsZeros(TwoHeads):
    def zeroed(self, optimizer: Any, batch_idx: int) -> None:
        optimizer.zero_grad(set_to_none=False)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zeroed(optimizer, batch_idx)


class EverySecondBatch(ModuleKeepsZeros):
    def zeroed(self, optimizer: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def by_hand(kind: type[TwoHeads]) -> TwoHeads:
    model = kind()
    optimizer = model.configure_optimizers()
    for index, batch in enumerate(loader()):
        loss = model.training_step(batch, index)
        model.zeroed(optimizer, index)
        if loss is not None:
            loss.backward()
        optimizer.step()
    return model


class Saves(L.Callback):
    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.total_batch_idx}.ckpt")


@pytest.mark.filterwarnings("ignore:.*returned None")
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_optimizer_step", "on_validation_end"])
@pytest.mark.parametrize("kind", [OptimizerKeepsZeros, PatchedZeroGrad, ModuleKeepsZeros, EverySecondBatch])
def test_they_train_as_in_the_plain_loop_and_after_resuming(kind: type[TwoHeads], hook: str, tmp_path: Path) -> None:
    expected = by_hand(kind)

    def fit(callbacks: list[Any], path: Path | None = None) -> TwoHeads:
        model = kind()
        trainer = quiet(callbacks=callbacks, val_check_interval=1, num_sanity_val_steps=0)
        trainer.fit(model, loader(), loader(4), ckpt_path=path)
        return model

    assert same_weights(fit([Saves(tmp_path, hook)]), expected)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 10
    for path in paths[1:4]:  # After each of three batches, which differ, in the middle of the epoch.
        assert same_weights(fit([], path), expected), path.name
