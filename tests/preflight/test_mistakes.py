"""Mistakes that a check finds before training.

``python -m tests.preflight.test_mistakes`` writes the table of the documentation.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import hasten as L
from hasten_tools.preflight import CheckReport
from tests.models import Classifier, Manual, dataset, quiet
from tests.refusals import warned

PAGE = Path(__file__).resolve().parents[2] / "docs" / "check.md"
PAGE_TEXT = PAGE.read_text(encoding="utf-8")
# The pages of the table, and the first mistake on each.
TABLE_PAGES = {"check_steps.md": "no `training_step`", "check_settings.md": "no `configure_optimizers`"}
TABLE = "<!-- mistakes -->", "<!-- end of mistakes -->"
OUTPUT = "<!-- output -->", "<!-- end of output -->"


def loader(samples: int = 40, batch_size: int = 4, **options: Any) -> Any:
    return DataLoader(dataset(samples), batch_size, **{"shuffle": True, **options})


class Net(Classifier):
    """Without validation, so that only the mistake is found."""

    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]
    test_step = L.LightningModule.test_step  # type: ignore[assignment]


def net(base: type = Net, parts: dict[str, Any] | None = None, **methods: Any) -> Any:
    """Return a module with these methods and layers."""
    model = type("Net", (base,), methods)()
    for name, part in (parts or {}).items():
        setattr(model, name, part)
    return model


def check(model: Any, train: Any = None, val: Any = None, datamodule: Any = None, **arguments: Any) -> CheckReport:
    if train is None and datamodule is None:
        train = loader()
    return quiet(**arguments).check(model, train, val, datamodule)


def step(function: Callable[..., Any]) -> Any:
    return net(training_step=lambda self, batch, batch_idx: function(self, batch))


def optimizer(make: Callable[..., Any], **methods: Any) -> Any:
    return net(configure_optimizers=make, **methods)


def scheduled(make: Callable[..., Any], **config: Any) -> Any:
    def configure_optimizers(self: Any) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": make(sgd), **config}}

    return net(configure_optimizers=configure_optimizers)


def reaches_back(self: Any, batch: Any) -> Any:
    self.carried = getattr(self, "carried", 0) + self.loss(batch)
    return self.carried


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(16))


def validated(**methods: Any) -> Any:
    return net(Classifier, **{"test_step": L.LightningModule.test_step, **methods})


def tensors(x: Tensor, y: Tensor, **options: Any) -> Any:
    return DataLoader(TensorDataset(x, y), 4, **{"shuffle": True, **options})


def with_nan() -> Any:
    x = torch.randn(40, 8)
    x[0, 3] = float("nan")
    return tensors(x, torch.zeros(40, dtype=torch.int64), shuffle=False)


class Broken(torch.utils.data.Dataset[Any]):
    """One of its samples cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise KeyError("label")
        return torch.randn(8), 0


class Uneven(Broken):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(8 + index % 2), 0


class Repeats(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from [(torch.full((8,), 1.0 * number), 0) for number in range(16)]


class Short(IterableDataset[Any]):
    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[Any]:
        yield from [(torch.randn(8), 0)] * 4


class Locked(Broken):
    def __init__(self) -> None:
        self.read = lambda index: index

    def __getitem__(self, index: int) -> Any:
        return torch.randn(8), 0


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def test_dataloader(self) -> Any:
        return loader()


class Misspelt(L.Callback):
    def on_train_epoch_ends(self, trainer: Any, pl_module: Any) -> None: ...


class WrongArguments(L.Callback):
    def on_train_epoch_end(self, trainer: Any) -> None: ...


class FailsAtTheEnd(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        print(trainer.callback_metrics["val_acc"])


class Held(Net):
    """Keeps its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.blocks[0](x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.blocks[0].parameters()], lr=0.1)


class ManualWithoutBackward(Manual):
    validation_step = Net.validation_step
    test_step = Net.test_step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()


SCHEDULERS = torch.optim.lr_scheduler
CALLBACKS = L.callbacks


def in_eval_mode() -> Any:
    model = Net()
    model.layers.eval()
    return model


def frozen() -> Any:
    model = Net()
    model.requires_grad_(False)
    return model


def trains_one_layer(self: Any) -> Any:
    return torch.optim.SGD(self.layers[0].parameters(), lr=0.1)


def logs_accuracy(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("val_acc", torch.rand(()))


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the row that a check has to print."""

    text: str
    make: Callable[[], CheckReport]
    name: str
    status: str
    said: str


def error(text: str, name: str, said: str, make: Callable[[], CheckReport]) -> Mistake:
    return Mistake(text, make, name, "error", said)


def warning(text: str, name: str, said: str, make: Callable[[], CheckReport]) -> Mistake:
    return Mistake(text, make, name, "warning", said)


MISTAKES = [
    # The step and its loss.
    error("no `training_step`", "call", "No `training_step()` method defined",
          lambda: check(net(training_step=L.LightningModule.training_step))),
    error("`training_step` returns a float", "training_step", "Do not convert it with .item()",
          lambda: check(step(lambda self, batch: self.loss(batch).item()))),
    error("returns a dict without `loss`", "training_step", "the 'loss' key needs to be present",
          lambda: check(step(lambda self, batch: {"value": self.loss(batch)}))),
    error("the loss has an element for each sample", "training_step", "Take its mean",
          lambda: check(step(lambda self, batch: self(batch[0]).sum(1)))),
    error("the loss is detached", "training_step", "does not depend on any parameter",
          lambda: check(step(lambda self, batch: self.loss(batch).detach()))),
    error("every parameter is frozen", "training_step", "every parameter is frozen", lambda: check(frozen())),
    error("`training_step` forgets `return loss`", "training_step", "returned None",
          lambda: check(step(lambda self, batch: None))),
    error("the loss reaches back into the batch before", "training_step", "Detach what you carry over",
          lambda: check(step(reaches_back))),
    error("the batch is unpacked into too many parts", "training_step", "another number of parts",
          lambda: check(step(lambda self, batch: (lambda x, y, z: x)(*batch) if len(batch) > 2 else unpack(batch)))),
    error("a layer gets another number of features", "training_step", "mat1 and mat2 shapes",
          lambda: check(net(parts={"layers": nn.Linear(9, 2)}))),
    error("`self.log` with an argument that does not exist", "training_step", "Did you mean 'on_step'?",
          lambda: check(step(lambda self, batch: self.log("loss", 1.0, on_steps=True)))),
    error("labels that the last layer has no output for", "training_step", "gets the label 2",
          lambda: check(Net(), tensors(torch.randn(40, 8), torch.full((40,), 2)))),
    error("labels that count from 1", "training_step", "Subtract 1 from the labels",
          lambda: check(Net(), tensors(torch.randn(8, 8), torch.tensor([1, 2, 2, 1] * 2)))),
    error("one wrong label, far into the dataset", "labels", "Sample 33 has the label 7",
          lambda: check(Net(), tensors(torch.randn(40, 8), torch.tensor([0] * 33 + [7] + [1] * 6), shuffle=False))),
    error("an index that an embedding has no row for", "training_step", "an embedding of 5 rows",
          lambda: check(net(parts={"words": nn.Embedding(5, 2)},
                            forward=lambda self, x: self.words(torch.full((len(x),), 9))))),
    warning("softmax before `cross_entropy`", "loss", "gets the result of a softmax",
            lambda: check(net(forward=lambda self, x: self.layers(x).softmax(1)))),
    warning("probabilities for `nll_loss`", "loss", "nll_loss gets positive numbers",
            lambda: check(step(lambda self, batch: F.nll_loss(self(batch[0]).softmax(1), batch[1])))),
    warning("sigmoid before `binary_cross_entropy_with_logits`", "loss", "gets the result of a sigmoid",
            lambda: check(step(lambda self, batch: F.binary_cross_entropy_with_logits(
                self(batch[0]).sigmoid(), torch.ones(len(batch[0]), 2))), loader(batch_size=8))),
    warning("`mse_loss` of two shapes", "loss", "target size",
            lambda: check(step(lambda self, batch: F.mse_loss(self(batch[0])[:, :1], batch[1].float())))),
    warning("`.item()` in each step", "training_step", ".item() in each step: a device has to finish",
            lambda: check(step(reads_a_value))),
    warning("`.cpu()` and `.numpy()` in each step", "training_step", ".cpu(), .numpy() in each step",
            lambda: check(step(moves_to_numpy))),
    warning("a tensor is printed in each step", "training_step", "print(tensor) in each step",
            lambda: check(step(prints_the_loss))),
    warning("`empty_cache()` in each step", "training_step", "torch.cuda.empty_cache() in each step",
            lambda: check(step(empties_the_cache))),
    warning("`log_softmax` over the batch", "loss", "log_softmax(logits, dim=1)",
            lambda: check(step(lambda self, batch: F.nll_loss(self(batch[0]).log_softmax(0), batch[1])))),
    warning("a distribution that looks at its values in each step", "training_step", "validate_args=False",
            lambda: check(step(samples_actions))),
    # Values.
    error("the data has nan", "data values", "in 1 of 4 samples, first in sample 0", lambda: check(Net(), with_nan())),
    error("a layer takes the logarithm of negative numbers", "loss", "the output of layers.0 (Log)",
          lambda: check(net(parts={"layers": nn.Sequential(Log(), nn.Linear(8, 2))}))),
    error("the loss divides by 0", "loss", "The outputs of all layers are finite",
          lambda: check(step(lambda self, batch: self.loss(batch) / 0))),
    error("a gradient is nan though the loss is finite", "gradients", "its gradient is not",
          lambda: check(step(lambda self, batch: self.loss(batch) + (self(batch[0]) * 0).sum().abs().sqrt()))),
    warning("every gradient is 0", "gradients", "Every gradient",
            lambda: check(step(lambda self, batch: self.loss(batch) * 0))),
    # Parameters and modes.
    warning("a layer is never used", "gradients", "unused.weight, unused.bias",
            lambda: check(net(parts={"unused": nn.Linear(2, 2)}))),
    warning("layers are left out of the optimizer", "optimizer", "layers.3.weight, layers.3.bias",
            lambda: check(optimizer(trains_one_layer))),
    error("the optimizer has parameters of another module", "configure_optimizers", "would not be trained",
          lambda: check(optimizer(lambda self: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)))),
    warning("layers are kept in a plain list", "optimizer", "nn.ModuleList", lambda: check(Held())),
    warning("a tensor is held in a plain attribute", "buffers", 'self.register_buffer("weights", ...)',
            lambda: check(net(parts={"weights": torch.ones(2)}))),
    warning("a tensor that requires gradients is not a parameter", "buffers", "no optimizer trains it",
            lambda: check(net(parts={"scales": [torch.ones(2, requires_grad=True)]}))),
    warning("layers train in eval mode", "modes", "in eval mode (layers.0", lambda: check(in_eval_mode())),
    warning("dropout that does not end in eval mode", "eval mode", "layers.4 (Noisy)",
            lambda: check(noisy(), loader(), loader(shuffle=False))),
    error("batch norm and a last batch of one sample", "train data", "has one sample",
          lambda: check(BatchNormed(), loader(41))),
    error("manual optimization without `manual_backward`", "gradients", "self.manual_backward(loss)",
          lambda: check(ManualWithoutBackward())),
    # Optimizers and schedules.
    error("data that `resident=True` has no memory for", "resident", "are free", lambda: large_data()),
    error("no `configure_optimizers`", "call", "No `configure_optimizers()` method defined",
          lambda: check(optimizer(L.LightningModule.configure_optimizers))),
    error("`configure_optimizers` returns something else", "configure_optimizers", "Return an optimizer",
          lambda: check(optimizer(lambda self: 3))),
    error("lr=0", "learning rate", "has lr=0",
          lambda: check(optimizer(lambda self: torch.optim.SGD(self.parameters(), lr=0.0)))),
    warning("Adam with the learning rate of SGD", "learning rate", "Adam has lr=1",
            lambda: check(optimizer(lambda self: torch.optim.Adam(self.parameters(), lr=1.0)))),
    error("`OneCycleLR` for fewer steps than the fit has", "learning rate", "step 16 raises",
          lambda: check(scheduled(lambda sgd: SCHEDULERS.OneCycleLR(sgd, 0.1, total_steps=15), interval="step"),
                        max_epochs=2)),
    warning("a schedule of steps that steps once an epoch", "learning rate", '"interval": "step"',
            lambda: check(scheduled(lambda sgd: SCHEDULERS.CosineAnnealingLR(sgd, 100)), max_epochs=10)),
    warning("`StepLR` for more epochs than the fit has", "learning rate", "does not change in this fit",
            lambda: check(scheduled(lambda sgd: SCHEDULERS.StepLR(sgd, 30)), max_epochs=10)),
    warning("a warm-up longer than the fit", "learning rate", '"interval": "step"',
            lambda: check(scheduled(lambda sgd: SCHEDULERS.LambdaLR(sgd, lambda i: min(1, i / 1000))), max_epochs=9)),
    warning("`LambdaLR` with a learning rate for a factor", "learning rate", "return a factor of lr",
            lambda: check(scheduled(lambda sgd: SCHEDULERS.LambdaLR(sgd, lambda epoch: 0.01 * 0.9**epoch)))),
    warning("`ReduceLROnPlateau` waits longer than the fit", "learning rate", "never lowers",
            lambda: check(scheduled(lambda sgd: SCHEDULERS.ReduceLROnPlateau(sgd, patience=10),
                                    monitor="train_loss"), max_epochs=5)),
    error("a scheduler watches what nothing logs", "learning rate", "Available metrics are: ",
          lambda: check(scheduled(SCHEDULERS.ReduceLROnPlateau, monitor="train_los"))),
    warning("a scheduler that steps every 10 epochs of 5", "learning rate", "it never does",
            lambda: check(scheduled(lambda sgd: SCHEDULERS.ExponentialLR(sgd, 0.9), frequency=10), max_epochs=5)),
    # Hooks.
    warning("a misspelt hook of the module", "hooks", "Rename it to on_train_epoch_end",
            lambda: check(net(on_train_epoch_ends=lambda self: None))),
    warning("a misspelt hook of a callback", "hooks", "Misspelt.on_train_epoch_ends",
            lambda: check(Net(), callbacks=Misspelt())),
    error("a hook of a callback with too few arguments", "hooks", "cannot be called",
          lambda: check(Net(), callbacks=WrongArguments())),
    error("a hook that Lightning has removed", "call", "Rename it to on_validation_epoch_end",
          lambda: check(net(validation_epoch_end=lambda self, outputs: None))),
    error("`training_step` takes `optimizer_idx`", "hooks", "Several optimizers need manual optimization",
          lambda: check(net(training_step=lambda self, batch, batch_idx, optimizer_idx: None))),
    error("a callback fails at the end of the epoch", "on_train_epoch_end", "KeyError: 'val_acc'",
          lambda: check(Net(), callbacks=FailsAtTheEnd())),
    error("`validation_step` fails", "validation_step", "AttributeError",
          lambda: check(validated(validation_step=lambda self, batch, batch_idx: self.metric(batch)),
                        loader(), loader(shuffle=False))),
    error("several validation loaders and no `dataloader_idx`", "validat", "dataloader_idx=0",
          lambda: check(validated(), loader(), [loader(shuffle=False), loader(shuffle=False)])),
    # What is watched.
    error("`EarlyStopping` watches a misspelt name", "monitor", 'EarlyStopping(monitor="train_loss")',
          lambda: check(Net(), callbacks=CALLBACKS.EarlyStopping("train_los"))),
    error("`ModelCheckpoint` watches what nothing logs", "monitor", "nothing logs 'val_loss'",
          lambda: check(validated(validation_step=logs_accuracy), loader(), loader(shuffle=False),
                        enable_checkpointing=True, callbacks=CALLBACKS.ModelCheckpoint(monitor="val_loss"))),
    error("a name that several loaders change", "monitor", "val_loss/dataloader_idx_0",
          lambda: check(net(Classifier, validation_step=several_losses), loader(),
                        [loader(shuffle=False), loader(shuffle=False)],
                        callbacks=CALLBACKS.EarlyStopping("val_loss"))),
    warning("accuracy with `mode=\"min\"`", "monitor", 'mode="max"',
            lambda: check(validated(validation_step=logs_accuracy), loader(), loader(shuffle=False),
                          callbacks=CALLBACKS.EarlyStopping("val_acc", mode="min"))),
    warning("a file name with a value that nothing logs", "monitor", "it becomes 0 in every name",
            lambda: check(Net(), enable_checkpointing=True,
                          callbacks=CALLBACKS.ModelCheckpoint(filename="{epoch}-{val_acc:.2f}"))),
    warning("`validation_step` without data", "validation data", "have no `val_dataloader`",
            lambda: check(validated())),
    warning("validation data without `validation_step`", "validation data", "have no `validation_step`",
            lambda: check(Net(), loader(), loader(shuffle=False))),
    warning("a logging interval longer than the fit", "logging", "none gets there",
            lambda: check(Net(), logger=True, max_epochs=2)),
    warning("a fit shorter than `every_n_epochs` of `ModelCheckpoint`", "checkpoints", "saves nothing",
            lambda: check(Net(), enable_checkpointing=True, callbacks=CALLBACKS.ModelCheckpoint(every_n_epochs=5))),
    warning("a fit that never validates", "validation", "never validates",
            lambda: check(validated(), loader(), loader(shuffle=False), check_val_every_n_epoch=5)),
    error("`val_check_interval` longer than an epoch", "validation", "number of the training batches (10)",
          lambda: check(validated(), loader(), loader(shuffle=False), val_check_interval=100)),
    warning("no `max_epochs`", "length", "1000 epochs", lambda: check(Net(), max_epochs=None)),
    # Data.
    error("no data", "train_dataloader", "there is no data", lambda: quiet().check(Net())),
    warning("training data in a fixed order", "train data", "shuffle=False",
            lambda: check(Net(), loader(shuffle=False))),
    warning("validation on training samples", "validation data", "10 of the 20 validation samples",
            lambda: overlapping()),
    warning("shuffled validation data", "validation data", "shuffle=True",
            lambda: check(validated(), loader(), loader())),
    error("`drop_last` leaves no batch", "train data", "drop_last=True. ",
          lambda: check(Net(), loader(3, drop_last=True))),
    error("a sample that cannot be read", "train data", "Broken[2] raises KeyError: 'label'",
          lambda: check(Net(), DataLoader(Broken(), 4))),
    error("the same in a worker process", "train data", "Broken[2] raises KeyError: 'label'",
          lambda: check(Net(), DataLoader(Broken(), 4, num_workers=1))),
    error("samples of different sizes", "train data", "cannot be joined",
          lambda: check(Net(), DataLoader(Uneven(), 4))),
    error("a dataset that cannot be sent to workers", "train data workers", "Locked.read",
          lambda: check(Net(), DataLoader(Locked(), 4, num_workers=1, multiprocessing_context="spawn"))),
    warning("workers that all read the whole `IterableDataset`", "train data", "every sample comes 2 times",
            lambda: check(Net(), DataLoader(Repeats(), 4, num_workers=2))),
    warning("an `IterableDataset` that ends before its length", "train data", "its length says 10",
            lambda: check(Net(), DataLoader(Short(), 4))),
    warning("test data without `test_step`", "test_step", "has no test_step()",
            lambda: check(Net(), datamodule=Data())),
    # Machine and files.
    error("more gradients accumulated than manual optimization knows", "call", "not supported for manual optimization",
          lambda: check(Manual(), loader(), accumulate_grad_batches=2)),
    warning("float16 on a CPU", "precision", "slower than with 32 bits", lambda: check(Net(), precision="16-true")),
    error("a folder for checkpoints that is a file", "checkpoints", "is a file",
          lambda: check(Net(), enable_checkpointing=True, callbacks=CALLBACKS.ModelCheckpoint(dirpath=a_file()))),
    error("a disk that is too small for the checkpoints", "checkpoints", "free", lambda: small_disk()),
    error("torchrun with another number of processes", "processes", "torchrun started 4 processes", lambda: launched()),
    error("a package that is too old", "versions", "older than", lambda: old_torch()),
    error("a model that does not fit into memory", "memory", "are free", lambda: little_memory()),
]  # fmt: skip


def reads_a_value(self: Any, batch: Any) -> Any:
    loss = self.loss(batch)
    self.last = loss.item()
    return loss


def moves_to_numpy(self: Any, batch: Any) -> Any:
    self.guessed = self(batch[0]).detach().cpu().numpy()
    return self.loss(batch)


def prints_the_loss(self: Any, batch: Any) -> Any:
    loss = self.loss(batch)
    print(f"loss {loss:.3f}")
    return loss


def empties_the_cache(self: Any, batch: Any) -> Any:
    torch.cuda.empty_cache()
    return self.loss(batch)


def samples_actions(self: Any, batch: Any) -> Any:
    # By default it does, until something is compiled in this process.
    policy = torch.distributions.Categorical(logits=self(batch[0]), validate_args=True)
    return -policy.log_prob(policy.sample()).mean()


def unpack(batch: Any) -> Any:
    _x, _y, _z = batch


def noisy() -> Any:
    model = validated()
    model.layers.append(Noisy())
    return model


def several_losses(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
    self.log("val_loss", self.loss(batch))


def a_file() -> str:
    path = Path("taken")
    path.write_text("")
    return str(path)


def patched(target: Any, name: str, value: Any, make: Callable[[], CheckReport]) -> CheckReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        return make()


def small_disk() -> CheckReport:
    usage = SimpleNamespace(free=2**20)
    return patched(shutil, "disk_usage", lambda path: usage, lambda: check(Net(), enable_checkpointing=True))


def launched() -> CheckReport:
    trainer = quiet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "4")
        patch.setenv("TORCHELASTIC_RUN_ID", "1")
        return trainer.check(Net(), loader())


def old_torch() -> CheckReport:
    import importlib.metadata

    real = importlib.metadata.version
    old = lambda name: "2.1.0" if name == "torch" else real(name)  # noqa: E731
    return patched(importlib.metadata, "version", old, lambda: check(Net()))


def overlapping() -> CheckReport:
    data = dataset(40)
    first, second = torch.utils.data.Subset(data, range(30)), torch.utils.data.Subset(data, range(20, 40))
    return check(validated(), DataLoader(first, 4, shuffle=True), DataLoader(second, 4))


def large_data() -> CheckReport:
    import hasten_tools.preflight.cost

    def make() -> CheckReport:
        return check(Net(), resident=True, memory="auto")

    return patched(hasten_tools.preflight.cost, "available_memory_bytes", lambda: 1500, make)


def little_memory() -> CheckReport:
    import hasten_tools.preflight.cost

    return patched(hasten_tools.preflight.cost, "available_memory_bytes", lambda: 1000, lambda: check(Net()))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.text)
def test_a_check_finds_it(mistake: Mistake) -> None:
    report = mistake.make()
    rows = [row for row in report.rows if row.status == mistake.status and row.name.startswith(mistake.name)]
    assert any(mistake.said in f"{row.seen} {row.line}" for row in rows), str(report)
    others = [row for row in report.rows if row.status in ("error", "warning") and row not in rows]
    assert not [row for row in others if row.status == "error" and mistake.status == "warning"], str(report)
    assert not [row for row in report.rows if "this part of the check failed" in row.seen], str(report)
    if mistake.status == "error":
        assert all(row.line or row.place for row in rows), "each error says what to write, or where"


def test_a_model_without_mistakes_has_none() -> None:
    report = check(net(Classifier), loader(), loader(shuffle=False))
    assert [row.status for row in report.rows if row.status in ("error", "warning")] == [], str(report)


def test_what_only_some_steps_read_is_no_mistake() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 100 == 0:
            print(loss.item(), loss)
        self.register_buffer("seen", torch.zeros(1))
        # What a metric reads is not the program's, and the example stays on the host.
        self.accuracy(self(batch[0]), batch[1])
        self.log_dict({"loss": loss, "accuracy": self.accuracy}, prog_bar=True)
        return loss

    accuracy = MulticlassAccuracy(num_classes=2)
    parts = {"accuracy": accuracy, "example_input_array": torch.zeros(1, 8)}
    report = check(net(training_step=training_step, parts=parts))
    assert [row.seen for row in report.rows if row.status == "warning"] == [], str(report)


class _TwoOptimizers(Net):
    """Steps two optimizers on each batch, which are two steps of ``max_steps`` and one of the loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("train_loss", self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_an_optimizer_may_step_after_the_batches_of_a_check() -> None:
    model = _TwoOptimizers()
    model.later = nn.Linear(2, 2)
    model.configure_optimizers = lambda: [
        torch.optim.SGD(p, lr=0.1) for p in (model.layers.parameters(), model.later.parameters())
    ]
    model.training_step = lambda batch, batch_idx: model.manual_backward(model.loss(batch))
    rows = [row for row in check(model).rows if row.name == "gradients"]
    assert [row.status for row in rows] == ["not checked"], rows


@pytest.mark.parametrize("name", ["neg_loss", "loss_reduction", "1-accuracy", "fpr_at_recall", "rmse_skill"])
def test_a_name_that_leaves_doubt_is_no_mistake(name: str) -> None:
    log = lambda self, batch, batch_idx: self.log(name, 0.5)  # noqa: E731
    for mode in ("min", "max"):
        stopping = CALLBACKS.EarlyStopping(name, mode=mode)
        report = check(validated(validation_step=log), loader(), loader(shuffle=False), callbacks=stopping)
        assert [row.seen for row in report.rows if row.status == "warning"] == [], str(report)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Net, {"max_epochs": 5}),
        (Net, {"max_epochs": 4}),
        (Net, {"max_epochs": 10, "accumulate_grad_batches": 2}),
        (Net, {"max_epochs": 9, "accumulate_grad_batches": 2}),
        (Net, {"max_epochs": -1, "max_steps": 49}),
        (_TwoOptimizers, {"max_epochs": -1, "max_steps": 60}),
        (_TwoOptimizers, {"max_epochs": -1, "max_steps": 100}),
    ],
)
def test_a_check_counts_steps_as_the_loggers_do(model: Any, arguments: dict[str, Any], tmp_path: Path) -> None:
    logger = L.loggers.CSVLogger(tmp_path)
    warned_of = [row.name for row in check(model(), logger=logger, **arguments).rows if row.name == "logging"]
    quiet(logger=logger, **arguments).fit(model(), loader())
    gets_there = (Path(logger.log_dir) / "metrics.csv").exists()
    assert warned_of == ([] if gets_there else ["logging"])


def test_a_check_knows_what_all_processes_log() -> None:
    shared = {"strategy": "ddp_spawn", "devices": 2, "logger": True}
    for arguments, warnings in (({"max_steps": 60, "max_epochs": -1}, 0), ({"max_epochs": 9}, 1)):
        report = check(Net(), **arguments, **shared)
        assert len([row for row in report.rows if row.name == "logging"]) == warnings, str(report)
    # Values of epochs have no steps to wait for.
    report = check(net(training_step=lambda self, batch, batch_idx: self.loss(batch)), logger=True, max_epochs=2)
    assert "logging" not in [row.name for row in report.rows]


def test_a_missing_monitor_shows_where_only_validation_ran() -> None:
    model = validated(training_step=lambda self, batch, batch_idx: self.loss(batch) / 0)
    stopping = CALLBACKS.EarlyStopping("val_lss")
    assert "nothing logs 'val_lss'" in str(check(model, loader(), loader(shuffle=False), callbacks=stopping))
    with (
        warned(UserWarning, says="EarlyStopping(monitor='val_loss')"),
        pytest.raises(RuntimeError),
    ):
        quiet(callbacks=stopping, num_sanity_val_steps=1).fit(validated(), loader(), loader(shuffle=False))


# -- the table of the documentation


def tables() -> dict[str, str]:
    """Return the tables by their pages."""
    lines: dict[str, list[str]] = {}
    first_on = {text: page for page, text in TABLE_PAGES.items()}
    for mistake in MISTAKES:
        if mistake.text in first_on:
            lines[first_on[mistake.text]] = here = ["| mistake | what the check prints |", "|---|---|"]
        torch.manual_seed(0)
        report = mistake.make()
        row = next(
            row
            for row in report.rows
            if row.status == mistake.status
            and row.name.startswith(mistake.name)
            and mistake.said in f"{row.seen} {row.line}"
        )
        line = row.line or "See the line of the error."
        here.append(f"| {mistake.text} | {row.status}, {_cell(row.name)}: {_cell(row.seen)}<br>→ {_cell(line)} |")
    return {page: "\n".join(rows) for page, rows in lines.items()}


def _cell(text: str) -> str:
    parts = re.sub(r"(/[\w.-]+)+/(?=\w+)", "", text).split("`")
    # Between backticks signs mean themselves. At the end of a cell, braces would be attributes of it.
    parts[::2] = [re.sub(r"([|<_*\[{])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def between(page: str, begin: str, end: str) -> tuple[str, str, str]:
    """Return a page in three parts: until a mark, what is between the marks, and the rest."""
    start, stop = page.index(begin) + len(begin), page.index(end)
    return page[:start], page[start:stop], page[stop:]


def test_the_tables_of_the_documentation_are_those_of_the_tests() -> None:
    rows = []
    for name, first in TABLE_PAGES.items():
        lines = between(PAGE.with_name(name).read_text(encoding="utf-8"), *TABLE)[1].strip().splitlines()[2:]
        assert lines[0].startswith(f"| {first} |")
        rows += [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert rows == [mistake.text for mistake in MISTAKES], "run: python -m tests.preflight.test_mistakes"
    assert _cell('{"a_b": 1} | `a_b`') == '\\{"a\\_b": 1} \\| `a_b`'


def example() -> str:
    """Return what the example of the page prints, on a machine and in a time that are not those of the reader."""
    import contextlib
    import io

    (code,) = re.findall(r"```python[^\n]*\n(.*?)```", PAGE_TEXT, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_example_of_the_documentation_prints_what_is_written_there() -> None:
    printed, shown = example(), between(PAGE_TEXT, *OUTPUT)[1]
    for line in shown.splitlines():
        # Times, versions and the machine differ.
        if line.startswith(("warning", "error")) or "->" in line:
            assert line in printed


def test_workers_of_a_stream_that_are_no_forks_are_looked_at_too() -> None:
    report = check(Net(), DataLoader(Repeats(), 4, num_workers=2, multiprocessing_context="forkserver"))
    assert "every sample comes 2 times" in " ".join(str(report).split())


if __name__ == "__main__":
    import tempfile

    where = PAGE.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        new, shown = tables(), example()
    texts = [(where.with_name(name), TABLE, text) for name, text in new.items()]
    for page, marks, text in [*texts, (where, OUTPUT, f"```text\n{shown.rstrip()}\n```")]:
        before, _, after = between(page.read_text(encoding="utf-8"), *marks)
        page.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
        sys.stdout.write(f"wrote {page}\n")
