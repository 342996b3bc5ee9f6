"""What hooks change about a module while it trains is part of its checkpoints: a resumed run goes on with it."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hasten as L
from tests.models import Classifier, loader, quiet, same_weights

EPOCHS, AT = 3, (1, 2)


class Net(Classifier):
    """Has a normalization and dropout, a factor of the loss, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Sequential(nn.Linear(8, 2))
        )
        self.factor, self.steps, self.best = 1.0, 0, float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.factor * super().training_step(batch, batch_idx)


class Frozen(Net):
    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch != 1)


class Modes(Net):
    def on_train_epoch_start(self) -> None:
        self.layers[1].train(self.current_epoch != 1)


class ModesInMidEpoch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (0, 3):
            self.layers[1].eval()
            self.layers[3].eval()


class Factor(Net):
    def on_train_epoch_start(self) -> None:
        self.factor = 0.1 + self.current_epoch


class FactorOnce(Net):
    """Sets it in one hook, which the resumed run does not call again."""

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == 0 and not self.trainer.sanity_checking:
            self.factor = 0.25


class FactorInSanityCheck(Net):
    """The sanity check of the first run is the last validation that sets these."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            self.factor, self.ready = 0.25, True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if getattr(self, "ready", False) else 3 * loss


class FrozenInSanityCheck(Net):
    def on_validation_start(self) -> None:
        if self.trainer.sanity_checking:
            self.layers[0].requires_grad_(False)


class DropoutGrows(Net):
    def on_train_epoch_start(self) -> None:
        self.layers[3].p = 0.1 + 0.2 * self.current_epoch


class ByStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + 0.1 * self.steps)


class Replaced(Net):
    """A function of the module's is used as long as a flag says so."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.use_second = self.global_step > 7

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if getattr(self, "use_second", False) else loss


class Draws(Net):
    """Has generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(3)
        self.of_python, self.of_numpy = random.Random(3), np.random.default_rng(3)
        self.layers[3].older = np.random.RandomState(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = self.of_python.random() + self.of_numpy.random() + self.layers[3].older.random_sample()
        return super().training_step(batch, batch_idx) * drawn * torch.rand((), generator=self.of_torch)


class Unfreeze(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.layers[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            module.layers[0].requires_grad_(True)


class Saves(L.Callback):
    def __init__(self, path: Path, at: tuple[int, int] = AT) -> None:
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.at:
            trainer.save_checkpoint(self.path)


class SavesInValidation(Saves):
    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1 and not self.path.exists():
            trainer.save_checkpoint(self.path)


class SavesInsideABatch(Saves):
    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_before_zero_grad(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.current_epoch == 1 and trainer.progress.batch == 2:
            trainer.save_checkpoint(self.path)


def fit(make: Callable[[], Net], callbacks: list[L.Callback], path: Any = None, **arguments: Any) -> Net:
    torch.manual_seed(0)
    module = make()
    trainer = quiet(**{"max_epochs": EPOCHS, "callbacks": callbacks, "num_sanity_val_steps": 2, **arguments})
    torch.manual_seed(1 if path is None else 5)
    trainer.fit(module, loader(24), loader(8), ckpt_path=path)
    return module


def nothing() -> list[L.Callback]:
    return []


PROGRAMS: dict[str, tuple[Callable[[], Net], Callable[[], list[L.Callback]]]] = {
    **{make.__name__: (make, nothing) for make in (Frozen, Modes, ModesInMidEpoch, Factor, FactorOnce)},
    **{make.__name__: (make, nothing) for make in (DropoutGrows, ByStep, Replaced, Draws)},
    **{make.__name__: (make, nothing) for make in (FactorInSanityCheck, FrozenInSanityCheck)},
    "Unfreeze": (Net, lambda: [Unfreeze()]),
}


@pytest.mark.parametrize("saves", [Saves, SavesInValidation, SavesInsideABatch])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_resumed_run_goes_on_with_what_hooks_have_changed(name: str, saves: type[Saves], tmp_path: Path) -> None:
    make, callbacks = PROGRAMS[name]
    path = tmp_path / "a.ckpt"
    whole = fit(make, [*callbacks(), saves(path)])
    resumed = fit(make, callbacks(), path)
    assert same_weights(whole, resumed)
    assert (whole.factor, whole.steps) == (resumed.factor, resumed.steps)


@pytest.mark.parametrize("interval", [2, 1.0])
def test_a_checkpoint_of_a_validation_holds_the_modes_of_training(interval: Any, tmp_path: Path) -> None:
    def checkpoint() -> L.callbacks.ModelCheckpoint:
        return L.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}")

    whole = fit(ModesInMidEpoch, [checkpoint()], val_check_interval=interval, enable_checkpointing=True)
    found = sorted(tmp_path.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
    assert len(found) >= EPOCHS
    for path in found[:-1]:
        resumed = fit(ModesInMidEpoch, [], path, val_check_interval=interval)
        assert same_weights(whole, resumed), path


def test_a_run_resumed_twice_has_the_changes_of_both_before(tmp_path: Path) -> None:
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    whole = fit(FactorOnce, [Saves(first)])
    fit(FactorOnce, [Saves(second, (2, 1))], first)
    assert same_weights(whole, fit(FactorOnce, [], second))


def test_what_the_program_does_before_training_counts_as_it_is_written_there(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit(Net, [Saves(path)])

    def frozen() -> Net:
        module = Net()
        module.layers[4].requires_grad_(False)
        module.factor = 0.5
        return module

    module = fit(frozen, [], path)
    assert module.factor == 0.5
    assert not module.layers[4][0].weight.requires_grad
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(saved["layers.4.0.weight"], module.layers[4][0].weight)


class Cached(nn.Module):
    """Keeps what it has computed for the longest input beside its length."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length, self.table = x.shape[1], torch.arange(x.shape[1], dtype=torch.float32)
        return x + self.table[: x.shape[1]]


def test_a_number_that_belongs_to_tensors_outside_of_the_checkpoint_is_left(tmp_path: Path) -> None:
    class WithTable(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers.insert(0, Cached())

    path = tmp_path / "a.ckpt"
    whole = fit(WithTable, [Saves(path)])
    assert same_weights(whole, fit(WithTable, [], path))


class Plain(enum.Enum):
    A = 1.0
    B = 2.0


class Whole(enum.IntEnum):
    A = 1
    B = 2


class Text(enum.StrEnum):
    A = "1"
    B = "2"


@pytest.mark.parametrize(
    "values",
    [
        (Plain.A, Plain.B), (Whole.A, Whole.B), (Text.A, Text.B), (np.float32(1), np.float32(0.1)),
        (np.int64(1), np.int64(2)), (np.bool_(True), np.bool_(False)), (1.0, np.float64(2)),
    ],
    ids=lambda values: type(values[1]).__name__,
)  # fmt: skip
def test_members_of_enums_and_numbers_of_numpy_are_restored(values: tuple[Any, Any], tmp_path: Path) -> None:
    class Switched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.switch = values[0]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if (self.current_epoch, batch_idx) == (0, 1):
                self.switch = values[1]

    path = tmp_path / "a.ckpt"
    fit(Switched, [Saves(path)])
    resumed = fit(Switched, [], path)
    assert type(resumed.switch) is type(values[1])
    assert resumed.switch == values[1]
