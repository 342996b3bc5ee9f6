"""A run resumed with another accumulation, or with other data, than its checkpoint was written with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.callbacks import GradientAccumulationScheduler
from tests.callbacks.resuming import SaveAt
from tests.models import loader, quiet


class Linear(L.LightningModule):
    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weighs = nn.Linear(8, 2), weighs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        return {"loss": loss, "loss_weight": torch.tensor(1.0)} if self.weighs else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def by_hand(windows: list[range]) -> Tensor:
    """Train on the mean loss of each window; return the weights."""
    module, batches = Linear(), list(loader(40))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for window in windows:
        optimizer.zero_grad()
        for index in window:
            (module.training_step(batches[index], index) / len(window)).backward()
        optimizer.step()
    return module.layer.weight.detach()


# Batches done, accumulation before, accumulation now, batches in the epoch now, the optimizer's steps.
CASES: list[tuple[int, int, int, int, list[range]]] = [
    (6, 3, 4, 10, [range(3), range(3, 6), range(6, 10)]),
    (5, 1, 3, 10, [*(range(i, i + 1) for i in range(5)), range(5, 8), range(8, 10)]),
    # In the middle of an accumulation: it goes on to its new size,
    (7, 3, 4, 10, [range(3), range(3, 6), range(6, 10)]),
    (5, 4, 3, 10, [range(4), range(4, 7), range(7, 10)]),
    # or closes with the next batch where it holds as many already,
    (7, 4, 2, 10, [range(4), range(4, 8), range(8, 10)]),
    (7, 4, 1, 10, [range(4), range(4, 8), range(8, 9), range(9, 10)]),
    # or with the last batch, where that comes sooner or later than before.
    (4, 3, 3, 5, [range(3), range(3, 5)]),
    (7, 3, 3, 7, [range(3), range(3, 6), range(6, 7)]),
    (9, 4, 4, 10, [range(4), range(4, 8), range(8, 10)]),
]


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize(("done", "before", "now", "length", "windows"), CASES)
def test_each_step_is_on_the_mean_of_its_batches(
    tmp_path: Path, done: int, before: int, now: int, length: int, windows: list[range], weighs: bool
) -> None:
    path = tmp_path / "a.ckpt"
    quiet(accumulate_grad_batches=before, callbacks=[SaveAt(path, done)]).fit(Linear(weighs), loader(40))
    module = Linear(weighs)
    trainer = quiet(accumulate_grad_batches=now, limit_train_batches=length)
    trainer.fit(module, loader(40), ckpt_path=path)
    assert trainer.global_step == len(windows)
    torch.testing.assert_close(module.layer.weight.detach(), by_hand(windows), rtol=1e-5, atol=1e-6)


def test_the_size_may_come_from_a_callback(tmp_path: Path) -> None:
    path, module = tmp_path / "a.ckpt", Linear()
    quiet(callbacks=[GradientAccumulationScheduler({0: 3}), SaveAt(path, 7)]).fit(Linear(), loader(40))
    quiet(callbacks=[GradientAccumulationScheduler({0: 4})]).fit(module, loader(40), ckpt_path=path)
    expected = by_hand([range(3), range(3, 6), range(6, 10)])
    torch.testing.assert_close(module.layer.weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_saved_before_training_goes_on_keeps_the_divisor(tmp_path: Path) -> None:
    class SaveFirst(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "b.ckpt")

    quiet(accumulate_grad_batches=3, callbacks=[SaveAt(tmp_path / "a.ckpt", 7)]).fit(Linear(), loader(40))
    quiet(callbacks=[SaveFirst()], accumulate_grad_batches=3).fit(Linear(), loader(40), ckpt_path=tmp_path / "a.ckpt")
    module = Linear()
    quiet(accumulate_grad_batches=4).fit(module, loader(40), ckpt_path=tmp_path / "b.ckpt")
    expected = by_hand([range(3), range(3, 6), range(6, 10)])
    torch.testing.assert_close(module.layer.weight.detach(), expected, rtol=1e-5, atol=1e-6)
