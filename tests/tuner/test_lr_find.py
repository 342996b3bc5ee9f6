"""The sweep over learning rates: what is tried, what is recorded, and what is suggested."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hasten as L
from hasten.tuner import Tuner
from hasten.tuner.lr_find import LRFinder
from tests.models import Classifier, Manual, loader, quiet, same_weights
from tests.refusals import warned


def swept(model: Any, data: Any = None, trainer: Any = None, **options: Any) -> LRFinder:
    options = {"update_attr": False, "early_stop_threshold": None, **options}
    found = Tuner(trainer or quiet()).lr_find(model, data or loader(40), **options)
    assert found is not None
    return found


def by_hand(model: Classifier, batches: list[Any], found: LRFinder) -> list[float]:
    average, losses = 0.0, []
    optimizer = model.configure_optimizers()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = found.lr_at(step)
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        average = 0.98 * average + 0.02 * float(loss)
        losses.append(average / (1 - 0.98 ** (step + 1)))
    return losses


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_losses_are_those_of_the_sweep_by_hand(mode: str) -> None:
    model = Classifier()
    plain = copy.deepcopy(model)
    found = swept(model, min_lr=1e-4, max_lr=0.5, num_training=20, mode=mode.upper(), update_attr=True)
    rates, batches = found.results["lr"], [*loader(40), *loader(40)]
    assert found.results["loss"] == pytest.approx(by_hand(plain, batches, found), abs=1e-12)
    assert (found.mode, len(rates), rates[0], rates[-1]) == (mode, 20, 1e-4, pytest.approx(0.5))
    steps = np.diff(np.log(rates) if mode == "exponential" else rates)
    assert steps[1:] == pytest.approx(steps[-1])
    assert model.hparams.lr == found.suggestion()


def test_loss_of_an_accumulation_is_its_mean() -> None:
    class Weighted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            odd = batch_idx % 2
            return {"loss": self.layers(batch[0]).mean() * 0 + odd, "loss_weight": 1.0 + 2 * odd}

    one, other = Classifier(), Classifier()
    other.load_state_dict(one.state_dict())
    whole = swept(one, loader(40, 8), num_training=12, min_lr=1e-3)
    parts = swept(other, loader(40, 4), quiet(accumulate_grad_batches=2), num_training=12, min_lr=1e-3)
    assert parts.results["lr"] == whole.results["lr"]
    assert parts.results["loss"] == pytest.approx(whole.results["loss"], rel=1e-5)
    assert same_weights(one, other)
    weighted = swept(Weighted(), trainer=quiet(accumulate_grad_batches=2), num_training=4)
    assert weighted.results["loss"] == pytest.approx([0.75] * 4)


def test_skipped_steps_are_no_numbers_and_a_sweep_takes_the_epochs_it_needs() -> None:
    indices = []

    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            indices.append(batch_idx)
            return None if len(indices) == 2 else super().training_step(batch, batch_idx)

    found = swept(Skips(), trainer=quiet(max_epochs=1, limit_train_batches=2), num_training=5)
    assert indices == [0, 1, 0, 1, 0]
    assert [math.isnan(loss) for loss in found.results["loss"]] == [False, True, False, False, False]


class Follows(L.LightningModule):
    """Its losses are given."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.weight, self.losses = nn.Parameter(torch.zeros(())), losses

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * 0 + self.losses[min(self.global_step, len(self.losses) - 1)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("losses", "threshold", "steps"),
    [
        ((1.0, 1.0, 200.0, 1.0), 4.0, 3),
        ((1.0, 1.0, 200.0, 1.0), None, 20),
        ((1.0, 1.0, float("nan")), 4.0, 3),
        ((float("nan"),), 4.0, 2),
        # A loss below zero may become worse, too.
        ((-1.0, -0.5), 4.0, 20),
        ((-1.0, -1.0, 200.0), 4.0, 3),
        ((1.0, 1.0, 8.0), 1.5, 3),
    ],
)
def test_where_a_sweep_ends(losses: tuple[float, ...], threshold: float | None, steps: int) -> None:
    found = swept(Follows(*losses), loader(80), num_training=20, early_stop_threshold=threshold)
    assert len(found.results["lr"]) == len(found.results["loss"]) == steps


def test_all_groups_have_the_rate_and_no_scheduler_steps() -> None:
    rates = []

    class Groups(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rates.append([group["lr"] for group in self.optimizers().param_groups])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            first, last = self.layers[0], self.layers[-1]
            groups = [{"params": first.parameters()}, {"params": last.parameters(), "lr": 3.0}]
            optimizer = torch.optim.SGD(groups, 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": plateau, "monitor": "never_logged", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    found = swept(Groups(), min_lr=1e-3, num_training=12)
    assert rates == [[rate, rate] for rate in found.results["lr"]]


def test_suggestion_by_the_slope_over_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    found = LRFinder("exponential", 1e-4, 1.0, 5)
    found.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [3.0, 2.99, 2.5, 1.0, 9.0]}
    # In terms of the rate itself the first step would be the steepest.
    assert found.suggestion(skip_begin=0, skip_end=1) == 1e-1
    assert found.suggestion(skip_begin=0, skip_end=2) == 1e-2
    assert found.suggestion(skip_begin=3, skip_end=1) is None
    assert "1 of 5 losses can be compared" in caplog.text
    # NaN is left out.
    found.results = {"lr": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "loss": [9.0, 8.0, math.nan, 4.0, 3.0, 50.0]}
    assert found.suggestion(skip_begin=0, skip_end=1) == 2.0
    assert found.suggestion(skip_begin=2, skip_end=0) == 4.0
    assert found.suggestion() is None
    assert "0 of 6 losses can be compared" in caplog.text


def test_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = LRFinder("exponential", 0.1, 1.0, 13)
    losses = [float(-(step**2)) for step in range(13)]
    found.results = {"lr": [0.1 * step for step in range(1, 14)], "loss": losses}
    figure, axes = pyplot.subplots()
    assert found.plot(suggest=True, ax=axes) is figure
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "loss")
    assert axes.lines[0].get_ydata().tolist() == losses
    assert axes.lines[1].get_xdata()[0] == found.suggestion()
    # Without a suggestion there is nothing to mark.
    found.results = {"lr": [0.1, 0.5, 1.0], "loss": [3.0, 2.0, 1.0]}
    assert len(found.plot(suggest=True).axes[0].lines) == 1
    pyplot.close("all")


class Untrained(Classifier):
    def configure_optimizers(self) -> None:
        return None


class Skips(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Manual(), {}, "manual optimization sets the learning rate itself"),
        (Untrained(), {}, "returned 0 optimizers, and a sweep only works with single"),
        (Follows(1.0), {}, r"should have one of these fields"),
        (Skips(), {"num_training": 3}, "lr_find: no step was trained"),
        (Classifier(), {"mode": "exp"}, "use one of .exponential., .linear."),
        (Classifier(), {"min_lr": 0}, "0 < min_lr < max_lr"),
        (Classifier(), {"num_training": 0}, "at least 1"),
        (Classifier(), {"early_stop_threshold": 0.5}, "a number above 1"),
        (Classifier(), {"method": "test"}, "method='fit' is the only valid"),
        (Classifier(), {"attr_name": "rate"}, "Field rate not found"),
    ],
)
def test_wrong_use_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swept(model, update_attr=True, **options)


def test_fast_dev_run_skips() -> None:
    tuner = Tuner(quiet(fast_dev_run=True))
    with warned(UserWarning, says="scale_batch_size"):
        assert tuner.scale_batch_size(Classifier()) is None
    with warned(UserWarning, says="lr_find"):
        assert tuner.lr_find(Classifier()) is None


def test_a_rate_that_the_optimizer_does_not_take_is_said_by_the_fit() -> None:
    class Fixed(Classifier):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Scaled(Fixed):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr / 10)

    class Absolute(Fixed):
        """The schedule has the rate."""

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: self.lr * 0.9**epoch)]

    class ByHand(Fixed):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = self.lr

    for kind in (Fixed, Scaled, Absolute, ByHand):
        model = kind()
        swept(model, num_training=20, update_attr=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            quiet().fit(model, loader())
        assert [getattr(each.message, "fix", "") for each in said] == (
            ["Write lr=self.lr in configure_optimizers, or update_attr=False in lr_find."] if kind is Fixed else []
        )
