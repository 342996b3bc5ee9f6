"""Errors of the user's code keep their type and say what usually mends them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.models import Classifier, loader, quiet


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def failing(step: Any) -> str:
    model = type("Net", (Classifier,), {"training_step": step})()
    with pytest.raises(Exception) as caught:
        quiet().fit(model, loader())
    return notes(caught.value)


def test_unknown_keyword_of_log_names_the_nearest() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0, on_steps=True)

    said = failing(step)
    assert "self.log takes: name, value, prog_bar" in said
    assert "Did you mean 'on_step'?" in said
    assert "in Net.training_step, batch 0: list of 2 (Tensor (4, 8) float32, Tensor (4,) int64)" in said


def test_loss_without_gradient() -> None:
    said = failing(lambda self, batch, batch_idx: self.loss(batch).detach())
    assert "does not depend on any parameter" in said


def test_loss_of_several_elements() -> None:
    said = failing(lambda self, batch, batch_idx: self(batch[0]).sum(1))
    assert "Return its mean" in said


def test_graph_that_reaches_back() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.carried = getattr(self, "carried", 0) + self.loss(batch)
        return self.carried

    assert "Detach what you carry over" in failing(step)


def test_batch_of_another_shape() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        _x, _y, _z = batch

    assert "unpacks the batch into another number of parts" in failing(step)


class OneCycle(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=15)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_scheduler_made_for_fewer_steps() -> None:
    with pytest.raises(ValueError, match="total steps is 15") as caught:
        quiet(max_epochs=2).fit(OneCycle(), loader())
    assert "total_steps=self.trainer.estimated_stepping_batches" in notes(caught.value)
    assert "2 epochs of 10 batches" in notes(caught.value)


def test_loss_as_a_number() -> None:
    model = type(
        "Net", (Classifier,), {"training_step": lambda self, batch, batch_idx: self.loss(batch).item()}
    )()
    with pytest.raises(ValueError, match=r"return the loss \(a tensor\).*Do not convert it with \.item\(\)"):
        quiet().fit(model, loader())


class WithAdam(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_resuming_with_another_kind_of_optimizer(tmp_path: Any) -> None:
    trainer = quiet()
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(tmp_path / "sgd.ckpt")
    with pytest.raises(ValueError, match=r"not that of Adam: it has no"):
        quiet(max_epochs=2).fit(WithAdam(), loader(), ckpt_path=tmp_path / "sgd.ckpt")


def test_parts_of_a_batch_that_are_no_tensors() -> None:
    class Breaks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("on purpose")

    batch = (torch.zeros(2, 8), 3, [{"deep": torch.zeros(1)}, "text"])
    with pytest.raises(RuntimeError) as caught:
        quiet().fit(Breaks(), [batch])
    assert "tuple of 3 (Tensor (2, 8) float32, int, list of 2 (dict, str))" in notes(caught.value)


@pytest.mark.parametrize("skipped", [{1}, {1, 3}])
def test_skipped_batches_are_told_once(skipped: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", set())

    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in skipped else self.loss(batch)

    with pytest.warns(UserWarning, match="returned None: the batch is skipped") as caught:
        quiet(limit_val_batches=0).fit(Skips(), loader())
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1, r"'loss_weight': -1\}\. Use how many samples"),
        (math.nan, "'loss_weight': nan"),
        (torch.tensor(-1.0), r"'loss_weight': tensor\(-1\.\)"),
        (torch.ones(2), r"'loss_weight': a tensor of shape \(2,\)"),
        ("mean", "'loss_weight': 'mean'"),
    ],
)
def test_a_weight_that_is_none(weight: Any, message: str) -> None:
    class Weighted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "loss_weight": weight}

    with pytest.raises(ValueError, match=message):
        quiet(accumulate_grad_batches=2).fit(Weighted(), loader())


@pytest.mark.parametrize("weighed", [0, 1])
def test_a_weight_for_some_batches_only(weighed: int) -> None:
    class Sometimes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "loss_weight": 3} if batch_idx % 2 == weighed else loss

    with pytest.raises(ValueError, match="for some batches of an accumulation and not for others"):
        quiet(accumulate_grad_batches=2).fit(Sometimes(), loader())


def test_weights_beside_batches_without_a_loss_are_fine() -> None:
    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            # Windows of (weight, none), (none, weight), (none, none).
            return [
                {"loss": loss, "loss_weight": 3},
                None,
                None,
                {"loss": loss, "loss_weight": 3},
                None,
                None,
            ][batch_idx % 6]

    with pytest.warns(UserWarning, match="returned None: the batch is skipped"):
        quiet(accumulate_grad_batches=2, limit_train_batches=6).fit(Skips(), loader())
