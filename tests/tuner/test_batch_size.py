"""The largest batch size that trains: for the Tuner, and for Trainer(batch_size="auto")."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import hasten as L
from hasten.callbacks import BatchSizeFinder
from hasten.tuner import Tuner, batch_size
from tests.fakes import watching
from tests.models import Attempts, Classifier, dataset, loader, quiet, same_weights
from tests.refusals import refused

UNLIMITED = 10**9
OUT_OF_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"


class Sized(Classifier):
    """Runs out of memory above ``fits`` samples a batch; its data comes from ``make``."""

    sizes = Attempts()
    validated = Attempts()

    def __init__(self, fits: int = UNLIMITED, make: Any = None) -> None:
        super().__init__()
        self.batch_size, self.fits, self.make = 2, fits, make or (lambda size: loader(200, size))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append(len(batch[0]))

    def train_dataloader(self) -> Any:
        return self.make(self.batch_size)


class Validates(Sized):
    """Its evaluations run out of memory above 20 samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        if len(batch[0]) > 20:
            raise RuntimeError(OUT_OF_MEMORY)
        return 1

    test_step = predict_step = validation_step

    def val_dataloader(self) -> Any:
        return loader(200, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def scaled(model: Any, **options: Any) -> int | None:
    return Tuner(quiet(limit_val_batches=0)).scale_batch_size(model, **options)


def of(samples: int) -> Any:
    return lambda size: loader(samples, size)


@pytest.mark.parametrize(
    ("options", "fits", "size"),
    [
        ({"init_val": 5}, 50, 40),
        ({"mode": "binsearch"}, 50, 47),
        ({"mode": "binsearch", "margin": 0.0}, 51, 51),
        ({"mode": "BinSearch", "margin": 0.5}, 50, 25),
        ({"max_trials": 3}, 50, 8),
        ({"mode": "binsearch", "margin": 0.0, "max_trials": 7}, 50, 48),
        ({"max_val": 20}, 50, 20),
        ({"init_val": 64}, 10, 8),
        # No larger than the data.
        ({}, UNLIMITED, 200),
        ({"mode": "binsearch", "margin": 0.0, "init_val": 3}, 7, 7),
        ({}, 1, 1),
    ],
)
def test_size_found_is_the_largest_that_trained(options: Any, fits: int, size: int) -> None:
    model = Sized(fits)
    assert scaled(model, **options) == model.batch_size == size
    assert size in model.sizes
    assert not model.validated
    trials = [size for size, before in zip(model.sizes, [0, *model.sizes], strict=False) if size != before]
    assert len(trials) <= options.get("max_trials", 25)


def test_steps_of_a_trial_are_those_of_the_optimizer() -> None:
    model = Sized(4)
    scaled(model, steps_per_trial=5)
    assert model.sizes == [2] * 5 + [4] * 5 + [8]
    model = Sized(2, of(100))
    Tuner(quiet(accumulate_grad_batches=3, limit_train_batches=4)).scale_batch_size(model, steps_per_trial=2)
    assert model.sizes == [2] * 6 + [4]


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_evaluations_must_fit_too(method: str) -> None:
    model = Validates()
    assert Tuner(quiet()).scale_batch_size(model, method=method) == 16  # type: ignore[arg-type]
    assert bool(model.sizes) == (method == "fit")
    assert method != "fit" or set(model.validated) <= set(model.sizes)


def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hasten"):
        scaled(Sized(4, of(40)))
    messages = [record.message.removeprefix("scale_batch_size: ") for record in caplog.records]
    assert messages == ["2 fits.", "4 fits.", "8 does not fit.", "batch_size is 4; it was 2."]


def test_nothing_fits() -> None:
    model = Sized(0)
    with refused(RuntimeError, says=("2 down", "to 1")) as error:
        scaled(model)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    with refused(RuntimeError, says=("64 down", "to 16")):
        scaled(Sized(4, of(100)), init_val=64, max_trials=3)


def test_other_errors_leave_each_holder_its_value() -> None:
    class Broken(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("shapes do not fit")

    model = Broken()
    model.hparams.batch_size = 7
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        scaled(model)
    assert (model.batch_size, model.hparams.batch_size) == (2, 7)


# -- data of every kind


class Endless(IterableDataset[Any]):
    def __init__(self, samples: int = UNLIMITED) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        data = dataset(100)
        return (data[number % 100] for number in range(self.samples))


class Batches:
    """A user's loader: an iterable of batches without a length."""

    def __init__(self, size: int, samples: int = 60) -> None:
        self.size, self.samples = size, samples

    def __iter__(self) -> Any:
        x, y = dataset(self.samples).tensors
        return iter(zip(x.split(self.size), y.split(self.size), strict=True))


def sampled(size: int) -> DataLoader[Any]:
    return DataLoader(dataset(60), batch_sampler=BatchSampler(SequentialSampler(dataset(60)), size, False))


@pytest.mark.parametrize(
    ("make", "fits", "size"),
    [
        (lambda size: DataLoader(Endless(), size), 30, 16),
        # The data ends before memory does.
        (lambda size: DataLoader(Endless(50), size), UNLIMITED, 50),
        (Batches, 20, 16),
        (Batches, UNLIMITED, 60),
        (sampled, 20, 16),
    ],
    ids=["endless", "stream", "iterable", "whole-iterable", "batch-sampler"],
)
def test_data_of_unknown_length_and_other_loaders(make: Any, fits: int, size: int) -> None:
    model = Sized(fits, make)
    assert scaled(model) == model.batch_size == size
    assert max(model.sizes) <= 2 * size


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Sized(make=lambda size: Batches(6)), {}, "with batch_size=2 and batch_size=4 batches have 6 samples"),
        (Sized(make=lambda size: loader(60, 4)), {}, "batch_size is 2, and the loader's batch_size is 4"),
        (type("Skips", (Sized,), {"on_train_batch_start": lambda *_: -1})(), {}, "The tuner ran no batch"),
        (Sized(), {"batch_arg_name": "device"}, r"Sized\.device cannot be set"),
        (Sized(), {"mode": "pow"}, r"mode='pow'.*Did you mean 'power'"),
        (Sized(), {"margin": 1.0}, r"margin=1\.0\): use a number of at least 0 and below 1"),
        (Sized(), {"batch_arg_name": "batch_sise"}, "batch_sise not found.*'batch_size'"),
        (Sized(), {"train_dataloaders": loader()}, r"passed in cannot be changed.*self\.batch_size"),
        (Sized(), {"method": "fitt"}, "method='fitt'.*Did you mean 'fit'"),
        (Sized(), {"dataloaders": loader()}, "for fit, pass train_dataloaders"),
        (Sized(), {"method": "test", "train_dataloaders": loader()}, r"pass dataloaders=\.\.\."),
    ],
)
def test_wrong_use_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaled(model, **options)


def test_manual_optimization_that_steps_seldom() -> None:
    class Manual(Sized):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 10 == 9:
                self.optimizers().step()

    model = Manual(9)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert scaled(model, steps_per_trial=4) == 8
    assert model.sizes == [2] * 4 + [4] * 4 + [8] * 4 + [16]
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(30, self.hparams.batch_size)

    test_dataloader = train_dataloader


def test_size_in_hparams_of_a_datamodule_in_any_argument() -> None:
    data = Data()
    assert Tuner(quiet()).scale_batch_size(Classifier(), datamodule=data) == data.hparams.batch_size == 30
    data.hparams.batch_size = 3
    assert Tuner(quiet()).scale_batch_size(Classifier(), data, max_val=6) == data.hparams.batch_size == 6
    found = Tuner(quiet()).scale_batch_size(Classifier(), dataloaders=data, method="test", max_val=8)
    assert found == data.hparams.batch_size == 8


def test_the_finder_works_from_a_checkpoint(tmp_path: Path) -> None:
    model, resumed, weights = Sized(), Sized(), []
    model.batch_size = resumed.batch_size = 20
    trainer = quiet(max_epochs=2)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    note = watching(
        lambda _, trainer: weights.extend(value.clone() for value in trainer.model.state_dict().values()),
        "on_train_start",
    )
    finder = BatchSizeFinder(max_val=40)
    trainer = quiet(max_epochs=3, callbacks=[finder, note])
    trainer.fit(resumed, ckpt_path=tmp_path / "two.ckpt")
    assert finder.optimal_batch_size == 40
    assert (trainer.current_epoch, trainer.global_step) == (3, 20 + 5)
    assert all(torch.equal(*pair) for pair in zip(weights, model.state_dict().values(), strict=True))


# -- Trainer(batch_size="auto")


class Scheduled(Sized):
    """Its schedule depends on the number of steps."""

    def __init__(self, fits: int = UNLIMITED) -> None:
        super().__init__(fits)
        del self.batch_size

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            return optimizer
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trained(model: Any, data: Any, ckpt_path: Any = None, **arguments: Any) -> Any:
    L.seed_everything(1, verbose=False)
    trainer = quiet(**{"batch_size": "auto", **arguments})
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer


def fresh(fits: int = UNLIMITED, kind: type[Any] = Scheduled) -> Any:
    L.seed_everything(0, verbose=False)
    return kind(fits)


def shuffled() -> DataLoader[Any]:
    return loader(100, 4, shuffle=True, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "hasten")
    return lambda: [record.message for record in caplog.records if "batch_size" in record.message]


def test_the_run_is_the_one_with_the_number_that_was_found(said: Any, tmp_path: Path) -> None:
    """Also after it was resumed, when more would fit."""

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    found, given, resumed, data = fresh(18), fresh(), fresh(50), shuffled()
    trainer = trained(found, data, max_epochs=2, callbacks=[Save()])
    assert said()[0].startswith(
        "Trainer(batch_size='auto'): 18 samples a batch of each process; the loader has 4. 19 do"
    )
    trained(given, shuffled(), batch_size=18, max_epochs=2)
    assert same_weights(found, given)
    assert trainer.global_step == 12
    assert found.sizes[-6:] == given.sizes[-6:] == [18, 18, 18, 18, 18, 10]
    assert data.batch_size == 4
    trained(resumed, shuffled(), tmp_path / "mid.ckpt", max_epochs=2)
    assert resumed.sizes == [18, 18, 10, 18, 18, 18, 18, 18, 10]
    assert same_weights(resumed, found)
    assert len(said()) == 1


def test_a_checkpoint_without_a_size_leaves_the_loaders(tmp_path: Path, said: Any) -> None:
    trainer = trained(fresh(kind=Sized), shuffled(), batch_size=None, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = fresh(kind=Sized)
    trained(resumed, shuffled(), tmp_path / "plain.ckpt", max_epochs=2)
    assert set(resumed.sizes) == {4}
    assert "the checkpoint has no batch size" in said()[0]


@pytest.mark.parametrize(
    ("samples", "size", "why"),
    [
        (100, 100, "That is all of the training data."),
        (5000, 1024, "No more than 1024 are tried on a CPU, where larger ones only make fewer steps of an epoch."),
    ],
)
def test_no_more_than_the_data_or_a_thousand_on_the_cpu(samples: int, size: int, why: str, said: Any) -> None:
    model = fresh()
    trained(model, loader(samples, 64), limit_train_batches=2)
    assert max(model.sizes) == size
    assert said()[0].endswith(f"the loader has 64. {why}")


def test_the_memory_of_the_host_is_never_used_up(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    class Wide(Scheduled):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wide = torch.ones(len(batch[0]), 500_000)  # 2 MB a sample
            return super().training_step(batch, batch_idx) + 0.0 * wide.sum()

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux shows the peak of a process")
    monkeypatch.setattr(batch_size, "available_bytes", lambda: 200_000_000)
    # What earlier tests have freed would be used again, and the process would not grow.
    ctypes.CDLL(None).malloc_trim(0)
    model = fresh(kind=Wide)
    trained(model, loader(200, 8), max_steps=1)
    assert max(model.sizes) < 100
    assert "takes half of the memory that is available on this machine" in said()[0]


class Joined(Scheduled):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])


@pytest.mark.parametrize(
    ("kind", "data", "sizes"),
    [
        (Scheduled, DataLoader(Endless(40), 2), [7, 7, 7, 7, 7, 5]),
        (Joined, {"a": loader(40, 2), "b": loader(40, 3)}, [7, 7, 7, 7, 7, 5]),
        # Of the module, with its attribute.
        (Sized, None, [7] * 28 + [4]),
    ],
)
def test_loaders_of_every_kind_have_the_size_found(kind: Any, data: Any, sizes: list[int]) -> None:
    model = fresh(7, kind)
    trained(model, data)
    assert model.sizes[-len(sizes) :] == sizes
    assert getattr(model, "batch_size", 7) == 7


def test_no_file_is_written_and_no_callback_called_while_sizes_are_tried(tmp_path: Path) -> None:
    steps = []
    count = watching(lambda hook, trainer: steps.append(trainer.global_step), "on_train_batch_end")
    files = {"logger": True, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trained(fresh(50), shuffled(), callbacks=[count], **files)
    assert steps == [1, 2]  # Of 50 samples each.
    assert [path.name for path in tmp_path.rglob("version_*")] == ["version_0"]
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
    model = fresh()
    trained(model, shuffled(), fast_dev_run=2)
    assert model.sizes == [4, 4]


OWN_SAMPLER = DataLoader(dataset(4), batch_sampler=type("Odd", (BatchSampler,), {})(range(4), 2, False))


@pytest.mark.parametrize(
    ("fits", "data", "arguments", "error", "message"),
    [
        (0, None, {}, RuntimeError, r"no batch size fits .* a smaller model or init_val"),
        (9, [dataset(4)[:]], {}, ValueError, "the train dataloader is a list"),
        (9, OWN_SAMPLER, {}, ValueError, "the train dataloader has the batch sampler Odd"),
        (9, None, {"micro_batch": "auto"}, ValueError, "with micro_batch memory is not used up"),
        (9, None, {"micro_batch": 4}, ValueError, "with micro_batch memory is not used up"),
        (9, None, {"memory": "auto"}, ValueError, "with memory memory is not used up"),
        (9, None, {"batching": "tokens:64"}, ValueError, "with max_tokens=64 the tokens say"),
    ],
)
def test_what_contradicts_it_is_refused(
    fits: int, data: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=r"batch_size='auto'.*" + message):
        trained(fresh(fits), data or shuffled(), **arguments)


# -- several processes


class Uneven(Sized):
    """The second process has less memory than the first, which fails in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fits = 9 + 31 * (self.global_rank == 0)
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * (1 + self.global_rank)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > 6 and self.global_rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        # An odd number of samples: the processes have different numbers of batches.
        return loader(3, 1) if self.batch_size < 5 else loader(31, self.batch_size)


@pytest.mark.world_size(2)
def test_processes_decide_alike() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, ddp = Uneven(make=of(80)), {"devices": 2, "strategy": "ddp"}
    trainer = quiet(**ddp, limit_val_batches=0)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert Tuner(trainer).scale_batch_size(model, mode="binsearch", margin=0.0) == model.batch_size == 9
    # Each process has 40 samples.
    assert Tuner(trainer).scale_batch_size(Sized(make=of(80))) == 40
    # If each reads data of another length, the longer one counts for both.
    uneven = Sized(make=lambda size: loader(40 - 10 * trainer.global_rank, size))
    own = quiet(**ddp, limit_val_batches=0, use_distributed_sampler=False)
    assert Tuner(own).scale_batch_size(uneven) == 40
    # In validation, too, one process fails.
    model.batch_size = 2
    assert Tuner(quiet(**ddp)).scale_batch_size(model) == 4
    found = Tuner(trainer).lr_find(model, num_training=15, update_attr=False, early_stop_threshold=None)
    assert found is not None
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    trained(model, loader(80, 4), **ddp, limit_val_batches=0)
    results = found.results, model.sizes[-5:], {k: v.tolist() for k, v in model.state_dict().items()}
    first, second = trainer.strategy.gather_objects(results)
    assert first == second
    assert first[1] == [9, 9, 9, 9, 4]
