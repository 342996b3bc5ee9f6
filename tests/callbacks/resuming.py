"""Run a training in one go, and the same training killed after each batch and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hasten as L
from tests.models import loader, quiet


class SaveAt(L.Callback):
    """Save a checkpoint after a batch of the whole run (from 1), and stop there if asked to."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.total_batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)


class SaveLast(SaveAt):
    """The same, after all that other callbacks do."""

    runs_last = True


class Trace(L.Callback):
    """Copies of the weights after each optimizer step and each epoch, as training has them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.epochs: list[dict[str, torch.Tensor]] = []
        self.done = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step > self.done:
            self.done = trainer.global_step
            self.steps.append(weights(trainer))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.epochs.append(weights(trainer))


def fitted(
    make_module: Callable[[], L.LightningModule],
    make_callbacks: Callable[[], list[L.Callback]],
    *extra: L.Callback,
    ckpt_path: Path | str | None = None,
    seed: int = 0,
    data: Any = None,
    validation: Any = None,
    **arguments: Any,
) -> L.Trainer:
    """Fit from a seed; return the Trainer."""
    L.seed_everything(seed, verbose=False)
    module = make_module()
    trainer = quiet(callbacks=[*make_callbacks(), *extra], num_sanity_val_steps=0, **arguments)
    trainer.fit(module, loader(24, shuffle=True) if data is None else data, validation, ckpt_path=ckpt_path)
    return trainer


def weights(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Return a copy of all weights, buffers included."""
    assert isinstance(trainer.lightning_module, nn.Module)
    return {key: value.clone() for key, value in trainer.lightning_module.state_dict().items()}


def assert_same(one: Any, other: Any) -> None:
    """Compare nested dicts and lists of tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), (one - other).abs().max()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Compare weights up to rounding errors."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=1e-6), name


def assert_resumes_exactly(
    folder: Path,
    make_module: Callable[[], L.LightningModule],
    make_callbacks: Callable[[], list[L.Callback]],
    batches: list[int],
    **options: Any,
) -> L.Trainer:
    """Resume from checkpoints after ``batches`` in fresh objects; compare weights and optimizers bit for bit."""
    saving = [SaveAt(folder / f"{batch}.ckpt", batch) for batch in batches]
    whole = fitted(make_module, make_callbacks, *saving, **options)
    for saver in saving:
        assert saver.path.exists(), f"there was no batch {saver.batch}"
        # Another seed: nothing of the first run may be found again by chance.
        resumed = fitted(make_module, make_callbacks, ckpt_path=saver.path, seed=99, **options)
        assert_same(weights(resumed), weights(whole))
        assert_same(
            [optimizer.state_dict() for optimizer in resumed.optimizers],
            [optimizer.state_dict() for optimizer in whole.optimizers],
        )
        assert resumed.global_step == whole.global_step
        for mine, other in zip(resumed.callbacks, whole.callbacks, strict=False):
            if not isinstance(other, SaveAt):
                assert_same(mine.state_dict(), other.state_dict())
    return whole
