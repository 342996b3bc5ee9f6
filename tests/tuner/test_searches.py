"""Which sizes and rates are tried, on data and modules of every kind."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import hasten as L
from hasten.tuner import Tuner
from hasten.tuner.lr_find import LRFinder
from tests.models import Classifier, dataset, loader, quiet, same_weights

TRIED: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_tried_yet() -> None:
    TRIED.clear()


class Sized(Classifier):
    """Runs out of memory above ``fits`` samples; its data comes from ``make``."""

    def __init__(self, make: Any, fits: int = 10**9) -> None:
        super().__init__()
        self.batch_size, self.make, self.fits = 2, make, fits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        TRIED.append(len(batch[0]))
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return self.make(self.batch_size)


class Endless(IterableDataset[Any]):
    def __init__(self, samples: int | None) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        data = dataset(100)
        number = 0
        while self.samples is None or number < self.samples:
            yield data[number % 100]
            number += 1


# -- sizes


def test_size_is_no_larger_than_the_data_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hasten"):
        assert Tuner(quiet()).scale_batch_size(Sized(lambda size: loader(40, size)), init_val=16) == 40
    assert "scale_batch_size: no size above 40 is tried: there are 40 samples." in caplog.text
    assert "scale_batch_size: 32 fits." in caplog.text
    assert "scale_batch_size: batch_size is 40; it was 2." in caplog.text
    assert set(TRIED) == {16, 32, 40, 8}  # the rest of 40
    caplog.clear()
    with caplog.at_level(logging.INFO, "hasten"):
        assert Tuner(quiet()).scale_batch_size(Sized(lambda size: loader(40, size)), init_val=64) == 40
        assert Tuner(quiet()).scale_batch_size(Sized(lambda size: loader(40, size)), max_val=12) == 12
    assert max(TRIED) == 40
    assert "no size above 12 is tried: that is max_val." in caplog.text


def test_trials_run_in_silence_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hasten"):
        Tuner(quiet(max_epochs=None)).scale_batch_size(Sized(lambda size: loader(40, size), 4))
    assert [record.message for record in caplog.records] == [
        "scale_batch_size: 2 fits.",
        "scale_batch_size: 4 fits.",
        "scale_batch_size: 8 does not fit.",
        "scale_batch_size: batch_size is 4; it was 2.",
    ]


def test_margin_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Sized(lambda size: loader(100, size), 60)
    with caplog.at_level(logging.INFO, "hasten"):
        assert Tuner(quiet()).scale_batch_size(model, mode="BinSearch", margin=0.1) == 54
    assert TRIED[-1] == 54
    assert "60 fits; with a margin of 10.0% that is 54." in caplog.text


def test_size_of_the_margin_that_does_not_fit_is_not_returned() -> None:
    class Odd(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) == 45:
                raise MemoryError
            return super().training_step(batch, batch_idx)

    model = Odd(lambda size: loader(100, size, drop_last=True), 50)
    assert Tuner(quiet()).scale_batch_size(model, mode="binsearch", margin=0.1) == 22
    assert 22 in TRIED


@pytest.mark.parametrize(("trials", "size"), [(1, 2), (2, 4), (6, 32), (7, 48)])
def test_no_more_trials_than_asked(trials: int, size: int) -> None:
    model = Sized(lambda size: loader(500, size), 50)
    found = Tuner(quiet()).scale_batch_size(
        model, mode="binsearch", margin=0.0, max_trials=trials, steps_per_trial=1
    )
    assert found == size
    assert len(TRIED) == trials


def test_trials_that_end_before_anything_fits() -> None:
    with pytest.raises(RuntimeError, match="no batch size fits into memory; tried from 64 down to 16"):
        Tuner(quiet()).scale_batch_size(Sized(lambda size: loader(100, size), 4), init_val=64, max_trials=3)


def test_data_of_unknown_length() -> None:
    model = Sized(lambda size: DataLoader(Endless(None), size), 30)
    assert Tuner(quiet()).scale_batch_size(model) == 16
    # The data ends before memory does: no more than there is was trained with.
    model = Sized(lambda size: DataLoader(Endless(50), size))
    assert Tuner(quiet()).scale_batch_size(model) == 50
    assert model.batch_size == 50
    assert max(TRIED) == 50


class Batches:
    """A loader of one's own: an iterable of batches without a length."""

    def __init__(self, size: int, samples: int = 60) -> None:
        self.size, self.samples = size, samples

    def __iter__(self) -> Any:
        x, y = dataset(self.samples).tensors
        return iter(zip(x.split(self.size), y.split(self.size), strict=True))


def test_loaders_of_ones_own() -> None:
    assert Tuner(quiet()).scale_batch_size(Sized(Batches, 20)) == 16
    assert Tuner(quiet()).scale_batch_size(Sized(Batches)) == 60
    with pytest.raises(ValueError, match=r"with batch_size=2 and batch_size=4 batches have 6 samples"):
        Tuner(quiet()).scale_batch_size(Sized(lambda size: Batches(6)))
    sampled = Sized(
        lambda size: DataLoader(
            dataset(60), batch_sampler=BatchSampler(SequentialSampler(dataset(60)), size, drop_last=False)
        ),
        20,
    )
    assert Tuner(quiet()).scale_batch_size(sampled) == 16


def test_several_training_loaders_of_which_one_follows() -> None:
    class Two(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            TRIED.append(len(batch["a"][0]))
            if len(batch["a"][0]) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return self.loss(batch["b"])

    assert (
        Tuner(quiet()).scale_batch_size(Two(lambda size: {"a": loader(50, size), "b": loader(40, 5)})) == 16
    )


def test_manual_optimisation_that_steps_seldom() -> None:
    class Manual(Sized):
        def __init__(self, make: Any, fits: int) -> None:
            super().__init__(make, fits)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 10 == 9:
                self.optimizers().step()

    model = Manual(lambda size: loader(200, size), 9)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert Tuner(quiet()).scale_batch_size(model, steps_per_trial=4) == 8
    assert TRIED == [2] * 4 + [4] * 4 + [8] * 4 + [16]
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


def test_steps_are_those_of_the_optimizer() -> None:
    model = Sized(lambda size: loader(100, size), 2)
    Tuner(quiet(accumulate_grad_batches=3, limit_train_batches=4)).scale_batch_size(model, steps_per_trial=2)
    assert TRIED == [2] * 6 + [4]


def test_validation_belongs_to_a_trial() -> None:
    class Validates(Sized):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if len(batch[0]) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        def val_dataloader(self) -> Any:
            return loader(100, self.batch_size)

    assert Tuner(quiet()).scale_batch_size(Validates(lambda size: loader(100, size))) == 8
    model = Validates(lambda size: loader(100, size), 40)
    assert Tuner(quiet(limit_val_batches=0)).scale_batch_size(model) == 32


def test_a_trial_without_a_batch_is_told() -> None:
    class Skips(Sized):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

    with pytest.raises(
        ValueError, match="The tuner ran no batch: there is no data, or the module skips every batch"
    ):
        Tuner(quiet()).scale_batch_size(Skips(lambda size: loader(10, size)))
    with pytest.raises(ValueError, match="lr_find: no step was trained"):
        Tuner(quiet()).lr_find(Skips(lambda size: loader(10, size)), num_training=3)


def test_a_property_that_cannot_be_set_is_told() -> None:
    class Fixed(Classifier):
        @property
        def size(self) -> int:
            return 4

        def train_dataloader(self) -> Any:
            return loader(40, self.size)

    with pytest.raises(ValueError, match=r"Fixed\.size cannot be set"):
        Tuner(quiet()).scale_batch_size(Fixed(), batch_arg_name="size")


def test_every_holder_keeps_its_own_value_after_an_error() -> None:
    class Both(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("broken")

    model = Both(lambda size: loader(40, size))
    model.hparams.batch_size = 7
    with pytest.raises(KeyError):
        Tuner(quiet()).scale_batch_size(model)
    assert (model.batch_size, model.hparams.batch_size) == (2, 7)
    found = Tuner(quiet()).scale_batch_size(Sized(lambda size: loader(40, size), 8))
    assert found == 8


def test_datamodule_in_the_place_of_loaders() -> None:
    class Data(L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 3

        def train_dataloader(self) -> Any:
            return loader(30, self.batch_size)

        test_dataloader = train_dataloader

    data = Data()
    assert Tuner(quiet()).scale_batch_size(Classifier(), data) == 30
    assert data.batch_size == 30
    data.batch_size = 3
    assert Tuner(quiet()).scale_batch_size(Classifier(), dataloaders=data, method="test", max_val=8) == 8
    assert data.batch_size == 8


# -- rates


def test_loss_of_an_accumulation_is_its_mean() -> None:
    one, other = Classifier(), Classifier()
    other.load_state_dict(one.state_dict())
    options: dict[str, Any] = {"num_training": 12, "min_lr": 1e-3, "update_attr": False}
    whole = Tuner(quiet()).lr_find(one, loader(40, 8), **options)
    parts = Tuner(quiet(accumulate_grad_batches=2)).lr_find(other, loader(40, 4), **options)
    assert whole is not None
    assert parts is not None
    assert parts.results["lr"] == whole.results["lr"]
    assert parts.results["loss"] == pytest.approx(whole.results["loss"], rel=1e-5)
    assert same_weights(one, other)


def test_weighted_losses_of_an_accumulation() -> None:
    class Weighted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {
                "loss": self.layers(batch[0]).mean() * 0 + batch_idx % 2,
                "loss_weight": 1.0 + 2 * (batch_idx % 2),
            }

    found = Tuner(quiet(accumulate_grad_batches=2)).lr_find(
        Weighted(), loader(40), num_training=4, update_attr=False, early_stop_threshold=None
    )
    assert found is not None
    assert found.results["loss"] == pytest.approx([0.75] * 4)


def test_skipped_steps_are_no_numbers() -> None:
    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    found = Tuner(quiet()).lr_find(Skips(), loader(40), num_training=6, update_attr=False)
    assert found is not None
    assert [math.isnan(loss) for loss in found.results["loss"]] == [False, True, False, False, False, False]
    assert len(found.results["lr"]) == 6


class Follows(L.LightningModule):
    """Its loss is written down beforehand."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.weight, self.losses = nn.Parameter(torch.zeros(())), losses
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * 0 + self.losses[min(self.global_step, len(self.losses) - 1)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.parametrize(
    ("losses", "threshold", "steps"),
    [
        ((1.0, 1.0, 200.0, 1.0), 4.0, 3),
        ((1.0, 1.0, 200.0, 1.0), None, 20),
        ((1.0, 1.0, float("nan")), 4.0, 3),
        ((1.0, 1.0, float("inf")), 4.0, 3),
        ((float("nan"),), 4.0, 2),
        # A loss below zero may become worse, too.
        ((-1.0, -0.5), 4.0, 20),
        ((-1.0, -1.0, 200.0), 4.0, 3),
        ((1.0, 1.0, 8.0), 1.5, 3),
        ((1.0, 1.0, 8.0), 10.0, 20),
    ],
)
def test_where_a_sweep_ends(losses: tuple[float, ...], threshold: float | None, steps: int) -> None:
    model = Follows(*losses)
    found = Tuner(quiet()).lr_find(
        model, loader(80), num_training=20, early_stop_threshold=threshold, update_attr=False
    )
    assert found is not None
    assert len(found.results["lr"]) == len(found.results["loss"]) == steps
    assert model.lr == 0.1


def test_sweep_goes_over_as_many_epochs_as_it_needs_within_the_limit() -> None:
    indices = []

    class Notes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            indices.append(batch_idx)
            return super().training_step(batch, batch_idx)

    Tuner(quiet(max_epochs=1, limit_train_batches=2)).lr_find(
        Notes(), loader(40), num_training=5, update_attr=False
    )
    assert indices == [0, 1, 0, 1, 0]


def test_all_groups_have_the_rate_and_no_scheduler_steps() -> None:
    rates = []

    class Groups(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rates.append([group["lr"] for group in self.optimizers().param_groups])
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            first, last = self.layers[0], self.layers[-1]
            optimizer = torch.optim.SGD(
                [{"params": first.parameters()}, {"params": last.parameters(), "lr": 3.0}], 0.1
            )
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": plateau, "monitor": "never_logged", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    found = Tuner(quiet()).lr_find(
        Groups(), loader(40), min_lr=1e-3, num_training=12, mode="LINEAR", update_attr=False
    )
    assert found is not None
    assert found.mode == "linear"
    assert rates == [[rate, rate] for rate in found.results["lr"]]


def test_rates_of_a_sweep() -> None:
    assert [LRFinder("linear", 1.0, 5.0, 4).lr_at(step) for step in range(4)] == [1.0, 3.0, 4.0, 5.0]
    found = LRFinder("exponential", 1e-4, 1.0, 4)
    assert [found.lr_at(step) for step in range(4)] == pytest.approx([1e-4, 1e-2, 1e-1, 1.0])


def test_suggestion_by_the_slope_over_the_steps() -> None:
    found = LRFinder("exponential", 1e-4, 1.0, 5)
    found.results = {"lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0], "loss": [3.0, 2.99, 2.5, 1.0, 9.0]}
    # In terms of the rate itself the first step would be the steepest.
    assert found.suggestion(skip_begin=0, skip_end=1) == 1e-1
    assert found.suggestion(skip_begin=0, skip_end=2) == 1e-2
    with pytest.warns(UserWarning, match="1 of 5 losses can be compared"):
        assert found.suggestion(skip_begin=3, skip_end=1) is None
    # NaN is left out.
    found.results = {"lr": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "loss": [9.0, 8.0, math.nan, 4.0, 3.0, 50.0]}
    assert found.suggestion(skip_begin=0, skip_end=1) == 2.0
    assert found.suggestion(skip_begin=2, skip_end=0) == 4.0
    with pytest.warns(UserWarning, match="too few to suggest"):
        assert found.suggestion() is None


def test_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = LRFinder("linear", 0.1, 1.0, 3)
    found.results = {"lr": [0.1, 0.5, 1.0], "loss": [3.0, 2.0, 1.0]}
    figure, axes = pyplot.subplots()
    assert found.plot(ax=axes) is figure
    assert axes.get_xscale() == "linear"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "loss")
    assert len(axes.lines) == 1
    with pytest.warns(UserWarning, match="too few"):
        found.plot(suggest=True, ax=axes)
    assert len(axes.lines) == 2
    found = LRFinder("exponential", 0.1, 1.0, 13)
    found.results = {
        "lr": [0.1 * step for step in range(1, 14)],
        "loss": [float(-(step**2)) for step in range(13)],
    }
    drawn = found.plot(suggest=True).axes[0]
    assert drawn.get_xscale() == "log"
    assert drawn.lines[0].get_ydata().tolist() == found.results["loss"]
    assert drawn.lines[1].get_xdata()[0] == found.suggestion()
    pyplot.close("all")


# -- several processes


class Apart(Sized):
    """The second process has less memory, and other losses, than the first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        size = len(batch[0])
        TRIED.append(size)
        if size > (40 if self.global_rank == 0 else 9):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = self.loss(batch) * (1 + self.global_rank)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > 6 and self.global_rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        # An odd number of samples: the processes have different numbers of batches.
        return loader(3, 1) if self.batch_size < 5 else loader(31, self.batch_size)


@pytest.mark.world_size(2)
def test_processes_decide_alike() -> None:
    torch.manual_seed(0)
    model = Apart(lambda size: loader(80, size))
    trainer = quiet(devices=2, strategy="ddp", limit_val_batches=0)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert Tuner(trainer).scale_batch_size(model, mode="binsearch", margin=0.0) == 9
    assert model.batch_size == 9
    # The 40 samples of each process are all there is.
    assert Tuner(trainer).scale_batch_size(Sized(lambda size: loader(80, size))) == 40
    # Where each reads its own, of another length, the longer one counts for both.
    uneven = Sized(lambda size: loader(40 - 10 * trainer.global_rank, size))
    own = quiet(devices=2, strategy="ddp", limit_val_batches=0, use_distributed_sampler=False)
    assert Tuner(own).scale_batch_size(uneven) == 40
    # In validation, too, one process fails.
    model.batch_size = 2
    assert Tuner(quiet(devices=2, strategy="ddp")).scale_batch_size(model) == 4
    found = Tuner(trainer).lr_find(model, num_training=15, update_attr=False, early_stop_threshold=None)
    assert found is not None
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    model.batch_size = 4
    trainer.fit(model)
    gathered = trainer.strategy.gather_objects(
        (found.results, {key: value.tolist() for key, value in model.state_dict().items()})
    )
    assert gathered[0] == gathered[1]
