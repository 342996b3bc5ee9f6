"""LightningDataModule and the data hooks: where data comes from, what moves it, what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

import hasten as L
from tests.models import Classifier, dataset, loader, quiet
from tests.refusals import refused


class Data(L.LightningDataModule):
    """Writes down which of its hooks is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return loader(12)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return loader(8)

    def test_dataloader(self) -> Any:
        self.calls.append("test")
        return [loader(4), loader(8)]

    def predict_dataloader(self) -> Any:
        self.calls.append("predict")
        return loader(4)

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"on_exception {type(exception).__name__}")

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Any_(Classifier):
    """Takes any number of loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("size", float(len(batch[0])))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("index", float(dataloader_idx))


# -- hooks, stage by stage


def test_hooks_of_each_call() -> None:
    data, model = Data(), Any_()
    assert data.trainer is None
    trainer = quiet()
    trainer.fit(model, datamodule=data)
    assert data.trainer is trainer.datamodule.trainer is trainer  # type: ignore[union-attr]
    calls = data.take()
    assert (calls[:2], calls[-1]) == (["prepare_data", "setup fit"], "teardown fit")
    assert sorted(calls[2:-1]) == ["train", "val"]
    results = trainer.validate(model, datamodule=data, verbose=False)
    assert data.take() == ["prepare_data", "setup validate", "val", "teardown validate"]
    assert results == [{"size": 4.0}]
    results = trainer.test(model, data, verbose=False)
    assert data.take() == ["prepare_data", "setup test", "test", "teardown test"]
    assert results == [{"index/dataloader_idx_0": 0.0}, {"index/dataloader_idx_1": 1.0}]
    assert len(trainer.predict(model, data) or ()) == 1
    assert data.take() == ["prepare_data", "setup predict", "predict", "teardown predict"]


def test_an_exception_is_passed_on_and_teardown_runs_also_one_set_during_the_run() -> None:
    heard: list[str] = []

    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer.datamodule is not None
            self.trainer.datamodule.teardown = heard.append  # type: ignore[method-assign]
            raise ZeroDivisionError

    data = Data()
    with pytest.raises(ZeroDivisionError):
        quiet().fit(Fails(), datamodule=data)
    assert data.take()[-1] == "on_exception ZeroDivisionError"
    assert heard == ["fit"]


def test_a_datamodule_given_once_goes_on_preparing_but_moves_only_batches_of_its_own_calls() -> None:
    class Doubles(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.calls.append("moved")
            return batch

    data, model, trainer = Doubles(), Any_(), quiet(limit_train_batches=1, limit_val_batches=0)
    trainer.fit(model, datamodule=data)
    assert "moved" in data.take()
    trainer.test(model, loader(4), verbose=False)
    assert trainer.datamodule is data
    assert data.take() == ["prepare_data", "setup test", "teardown test"]
    # Its loaders are read only in the call it was given to.
    with refused(ValueError, says=("Trainer.validate()", "dataloaders=")):
        trainer.validate(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(4))
    assert trainer.val_dataloaders is None
    other = Data()
    trainer.validate(model, datamodule=other, verbose=False)
    assert trainer.datamodule is other


def test_loaders_that_the_datamodule_lacks_come_from_the_module() -> None:
    class OnlyTrain(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(8)

    class Model(Classifier):
        def val_dataloader(self) -> Any:
            return loader(12)

    trainer = quiet()
    trainer.fit(Model(), datamodule=OnlyTrain())
    assert (trainer.num_training_batches, trainer.num_val_batches) == (2, [3])
    with refused(ValueError, says=("OnlyTrain", "test_dataloader()")):
        quiet().test(Model(), datamodule=OnlyTrain())
    for name in ("val", "test", "predict"):
        with refused(NotImplementedError, says=("OnlyTrain", name, "_dataloader()")):
            getattr(OnlyTrain(), f"{name}_dataloader")()


class Forgets(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        loader(8)


@pytest.mark.parametrize(
    ("call", "arguments", "words"),
    [
        ("fit", {"datamodule": Forgets()}, r"Forgets\.train_dataloader\(\) returned None\. Return a DataLoader"),
        ("fit", {"datamodule": loader()}, r"fit\(datamodule=\.\.\.\): use a LightningDataModule, not"),
        ("fit", {}, r"fit\(\): there is no data. Pass train_dataloaders=.*\.train_dataloader"),
        ("validate", {}, r"validate\(\): there is no data. Pass dataloaders=.*\.val_dataloader"),
        ("predict", {}, r"predict\(\): there is no data. Pass dataloaders=.*\.predict_dataloader"),
    ],
    ids=range(5),
)
def test_what_is_no_data_is_named(call: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        getattr(quiet(), call)(Classifier(), **arguments)


@pytest.mark.parametrize("returned", [None, []], ids=["None", "no loader"])
def test_a_datamodule_that_wants_no_validation_is_told_how_to_write_it(returned: Any) -> None:
    class Forgets(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(8)

        def val_dataloader(self) -> Any:
            return returned

    with refused((ValueError, TypeError), fix="Trainer(limit_val_batches=0)", says="Forgets.val_dataloader()"):
        quiet(max_epochs=1).fit(Classifier(), datamodule=Forgets())
    trainer = quiet(max_epochs=1, limit_val_batches=0)
    trainer.fit(Classifier(), datamodule=Forgets())
    assert trainer.current_epoch == 1


def test_data_of_the_module_itself() -> None:
    calls: list[str] = []

    class Own(Classifier):
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(f"setup {stage}")

        def train_dataloader(self) -> Any:
            return loader(8)

        def predict_dataloader(self) -> Any:
            return {"a": loader(4), "b": loader(8)}

    trainer, model = quiet(), Own()
    trainer.fit(model)
    assert trainer.global_step == 2
    assert [len(part) for part in trainer.predict(model) or ()] == [1, 2]
    assert calls == ["prepare_data", "setup fit", "prepare_data", "setup predict"]


# -- from datasets


class Sized(L.LightningDataModule):
    def __init__(self, batch_size: int = 1, name: str = "n") -> None:
        super().__init__()
        self.batch_size, self.name = batch_size, name


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int = 8) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter([dataset(self.samples)[index] for index in range(self.samples)])


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.samples


def test_from_datasets() -> None:
    data = Sized.from_datasets(
        dataset(8), [dataset(4), dataset(6)], {"a": dataset(2)}, Stream(), batch_size=3, name="m"
    )
    assert isinstance(data, Sized)
    assert (data.batch_size, data.name) == (3, "m")
    train = data.train_dataloader()
    assert (len(train), train.batch_size, train.num_workers) == (3, 3, 0)
    assert isinstance(train.sampler, RandomSampler)
    assert [len(part) for part in data.val_dataloader()] == [2, 2]
    assert all(isinstance(part.sampler, SequentialSampler) for part in data.val_dataloader())
    assert {key: len(part) for key, part in data.test_dataloader().items()} == {"a": 1}
    assert [len(batch[0]) for batch in data.predict_dataloader()] == [3, 3, 2]


def test_from_datasets_makes_only_what_it_was_given() -> None:
    class NoSize(L.LightningDataModule):
        def __init__(self, num_workers: int = 0) -> None:
            super().__init__()
            self.num_workers = num_workers

    made = NoSize.from_datasets(None, dataset(4), batch_size=2, num_workers=1)
    assert isinstance(made, NoSize)
    assert made.num_workers == made.val_dataloader().num_workers == 1
    assert len(made.val_dataloader()) == 2
    with pytest.raises(NotImplementedError):
        made.train_dataloader()
    with pytest.raises(TypeError, match="unknown"):
        NoSize.from_datasets(dataset(4), unknown=3)


def test_a_datamodule_shows_the_sizes_of_its_data() -> None:
    data = Sized.from_datasets([dataset(4), Stream()], dataset(6), {"a": SizedStream(5)})
    assert L.LightningDataModule("folder", shuffle=True).trainer is None, "arguments passed up are taken"
    assert str(data) == (
        "{Train dataloader: 1. size=4 ; 2. size=NA}\n{Validation dataloader: size=6}\n"
        "{Test dataloader: 1. size=5}\n{Predict dataloader: None}"
    )


# -- state


class Remembers(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.loaded = 0, []  # type: ignore[var-annotated]

    def train_dataloader(self) -> Any:
        self.count += 1
        return loader(8)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded.append(state_dict)
        self.count = state_dict["count"]


def test_state_is_in_the_checkpoint_and_comes_back(tmp_path: Path) -> None:
    data, trainer, path = Remembers(), quiet(), tmp_path / "data.ckpt"
    data.count = 4
    trainer.fit(Classifier(), datamodule=data)
    assert data.loaded == []
    trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=True)["Remembers"] == {"count": 5}
    data = Remembers()
    quiet(max_epochs=2).fit(Classifier(), datamodule=data, ckpt_path=path)
    # Before its loaders are made: they may depend on it.
    assert (data.loaded, data.count) == ([{"count": 5}], 6)
    other = quiet()
    other.test(Any_(), Sized.from_datasets(test_dataset=dataset(4)), ckpt_path=path, verbose=False)
    other.save_checkpoint(tmp_path / "other.ckpt")
    assert "Sized" not in torch.load(tmp_path / "other.ckpt", weights_only=True)
    assert Remembers.load_from_checkpoint(path).count == 5


# -- loaders asked for again


class Reloads(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        self.asked.append(("train", self.trainer.current_epoch))
        return loader(8 + 4 * self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        self.asked.append(("val", self.trainer.current_epoch))
        return loader(8)


@pytest.mark.parametrize(
    ("options", "train", "val", "steps"),
    [
        ({"reload_dataloaders_every_n_epochs": 0, "val_check_interval": 0.5}, [0], [0], 10),
        ({"reload_dataloaders_every_n_epochs": 2, "val_check_interval": 0.5}, [0, 2, 4], [0, 2, 4], 2 * 2 + 4 * 2 + 6),
        # For the sanity check, and for the first validation, as Lightning 2.6 asks for them.
        ({"reload_dataloaders_every_n_epochs": 3, "check_val_every_n_epoch": 2}, [0, 3], [0, 1], 2 * 3 + 5 * 2),
    ],
)
def test_reloading(options: dict[str, Any], train: list[int], val: list[int], steps: int) -> None:
    data = Reloads()
    trainer = quiet(max_epochs=5, **options)
    trainer.fit(Classifier(), datamodule=data)
    assert [epoch for who, epoch in data.asked if who == "train"] == train
    assert [epoch for who, epoch in data.asked if who == "val"] == val
    assert trainer.global_step == steps


def test_a_resumed_run_reloads_when_the_whole_one_would_have(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=3, reload_dataloaders_every_n_epochs=2)
    trainer.fit(Classifier(), datamodule=Reloads())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    data = Reloads()
    again = quiet(max_epochs=6, reload_dataloaders_every_n_epochs=2)
    again.fit(Classifier(), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert [epoch for who, epoch in data.asked if who == "train"][1:] == [4]
    assert [epoch for who, epoch in data.asked if who == "val"][1:] == [4]
    without_validation = quiet(max_epochs=4)
    without_validation.fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert without_validation.global_step == trainer.global_step + 2


def test_only_hooks_of_datamodules_are_called_on_them() -> None:
    """As in Lightning: a method called like a hook of modules and callbacks is one of the program's own."""
    called: list[str] = []

    class WithMore(Data):
        def on_train_start(self) -> None:
            called.append("datamodule")

    class Net(Classifier):
        def on_train_start(self) -> None:
            called.append("module")

    class Listens(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            called.append("callback")

    data = WithMore()
    quiet(callbacks=[Listens()]).fit(Net(), datamodule=data)
    assert called == ["callback", "module"]
    assert "setup fit" in data.calls
