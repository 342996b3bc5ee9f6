"""Trainer(batch_size="auto"): the largest batch size that trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import hasten as L
from hasten.tuner import automatic
from tests.models import Attempts, Classifier, dataset, loader, quiet, same_weights


class Sized(Classifier):
    """Memory runs out above ``fits`` samples."""

    sizes = Attempts()

    def __init__(self, fits: int = 10**9) -> None:
        super().__init__(dropout=0.5)
        self.fits = fits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            return optimizer
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trained(model: Any, data: Any, **arguments: Any) -> Any:
    L.seed_everything(1, verbose=False)
    trainer = quiet(**arguments)
    trainer.fit(model, data)
    return trainer


def fresh(fits: int = 10**9, kind: type[Any] = Sized) -> Any:
    L.seed_everything(0, verbose=False)
    return kind(fits)


def shuffled(samples: int = 100, size: int = 4) -> DataLoader[Any]:
    return loader(samples, size, shuffle=True, generator=torch.Generator().manual_seed(5))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "batch_size" in record.message]


def test_the_run_is_the_one_with_the_number_that_was_found(caplog: pytest.LogCaptureFixture) -> None:
    found, told = fresh(fits=18), fresh()
    data = shuffled()
    with caplog.at_level(logging.INFO, "hasten"):
        trainer = trained(found, data, batch_size="auto", max_epochs=2)
    trained(told, shuffled(), batch_size=18, max_epochs=2)
    assert same_weights(found, told)
    assert trainer.global_step == 12
    assert found.sizes[-6:] == told.sizes[-6:] == [18, 18, 18, 18, 18, 10]
    assert data.batch_size == 4
    assert said(caplog) == [
        "Trainer(batch_size='auto'): 18 samples a batch; the loader has 4. 19 do not fit into memory."
    ]


@pytest.mark.parametrize(
    ("samples", "size", "why"),
    [
        (100, 100, "The data has 100."),
        (5000, 1024, "No more than 1024 are tried on the CPU, where memory seldom runs out."),
    ],
)
def test_it_says_why_it_is_not_more(
    samples: int, size: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = fresh()
    with caplog.at_level(logging.INFO, "hasten"):
        trained(model, loader(samples, 64), batch_size="auto", limit_train_batches=2)
    assert max(model.sizes) == size
    assert len(said(caplog)) == 1
    assert why in said(caplog)[0]


def test_the_memory_of_the_host_is_never_used_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wide = torch.ones(len(batch[0]), 500_000)  # 2 MB a sample
            return super().training_step(batch, batch_idx) + 0.0 * wide.sum()

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("Linux says how large a process was")
    monkeypatch.setattr(automatic, "available_bytes", lambda: 200_000_000)
    model = fresh(kind=Wide)
    with caplog.at_level(logging.INFO, "hasten"):
        trained(model, loader(200, 8), batch_size="auto", max_steps=1)
    assert max(model.sizes) < 100
    assert "are left on this machine" in said(caplog)[0]


class Plain(Sized):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FromHook(Sized):
    def __init__(self, fits: int) -> None:
        super().__init__(fits)
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(60, self.batch_size)


def test_loaders_of_the_module_and_its_attribute_have_the_size_found() -> None:
    model = fresh(9, FromHook)
    quiet(batch_size="auto").fit(model)
    assert model.batch_size == 9
    assert model.sizes[-7:] == [9, 9, 9, 9, 9, 9, 6]


def test_joined_loaders_and_streams() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = dataset(40)
            return (data[index] for index in range(40))

    class Two(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])

    model = fresh(fits=7)
    trained(model, DataLoader(Stream(), 2), batch_size="auto")
    assert model.sizes[-6:] == [7, 7, 7, 7, 7, 5]
    model = fresh(7, Two)
    trained(model, {"a": loader(40, 2), "b": loader(40, 3)}, batch_size="auto")
    assert model.sizes[-6:] == [7, 7, 7, 7, 7, 5]


def test_a_resumed_run_goes_on_with_the_size_of_its_checkpoint(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    straight, half = fresh(fits=18), fresh(fits=18)
    trained(straight, shuffled(), batch_size="auto", max_epochs=2)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    trained(half, shuffled(), batch_size="auto", max_epochs=2, callbacks=[Save()])
    # More would fit now.
    resumed = fresh(fits=50)
    caplog.clear()
    with caplog.at_level(logging.INFO, "hasten"):
        quiet(batch_size="auto", max_epochs=2).fit(resumed, shuffled(), ckpt_path=tmp_path / "mid.ckpt")
    assert resumed.sizes == [18, 18, 10, 18, 18, 18, 18, 18, 10]
    assert same_weights(resumed, straight)
    assert said(caplog) == []


def test_a_checkpoint_without_a_size_leaves_the_loaders(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trained(fresh(kind=Plain), shuffled(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = fresh(kind=Plain)
    caplog.clear()
    with caplog.at_level(logging.INFO, "hasten"):
        quiet(batch_size="auto", max_epochs=2).fit(resumed, shuffled(), ckpt_path=tmp_path / "plain.ckpt")
    assert set(resumed.sizes) == {4}
    assert "the checkpoint has no batch size" in said(caplog)[0]


def test_nothing_is_tried_with_fast_dev_run() -> None:
    model = fresh()
    trained(model, shuffled(), batch_size="auto", fast_dev_run=2)
    assert model.sizes == [4, 4]


def test_no_file_is_written_and_no_callback_called_while_sizes_are_tried(tmp_path: Any) -> None:
    steps = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            steps.append(trainer.global_step)

    trainer = quiet(
        batch_size="auto",
        logger=True,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        callbacks=[Count()],
    )
    trainer.fit(fresh(fits=50), shuffled())
    assert steps == [1, 2]  # Of 50 samples each.
    assert [path.name for path in tmp_path.rglob("version_*")] == ["version_0"]
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_one_sample_that_does_not_fit() -> None:
    said = (
        r"^Trainer\(batch_size='auto'\): no batch size fits .* a smaller model or precision='bf16-mixed'\.$"
    )
    with pytest.raises(RuntimeError, match=said):
        trained(fresh(fits=0), shuffled(), batch_size="auto")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"micro_batch": "auto"}, "with micro_batch memory is not used up"),
        ({"micro_batch": 4}, "with micro_batch memory is not used up"),
        ({"memory": "auto"}, "with memory memory is not used up"),
        ({"batching": "tokens:64"}, "with max_tokens=64 the tokens say"),
    ],
)
def test_what_contradicts_it_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quiet(batch_size="auto", **arguments)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([dataset(4)[:]], r"batch_size='auto'\): the train dataloader is a list"),
        (
            DataLoader(dataset(4), batch_sampler=type("Odd", (BatchSampler,), {})(range(4), 2, False)),
            r"batch_size='auto'\): the train dataloader has the batch sampler Odd",
        ),
    ],
    ids=["list", "batch-sampler"],
)
def test_a_loader_whose_batches_are_its_own_is_refused(data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trained(fresh(), data, batch_size="auto")


class Apart(Sized):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fits = 9 + 20 * self.global_rank
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


@pytest.mark.world_size(2)
def test_all_processes_train_with_what_fits_on_each() -> None:
    torch.set_num_threads(1)
    model = fresh(9, Apart)
    trainer = trained(model, loader(80, 4), batch_size="auto", devices=2, strategy="ddp")
    sizes = trainer.strategy.gather_objects(model.sizes[-5:])
    assert sizes == [[9, 9, 9, 9, 4]] * 2
    told = fresh()
    trained(told, loader(80, 4), batch_size=9, devices=2, strategy="ddp")
    assert same_weights(model, told)
