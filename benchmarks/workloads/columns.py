"""How each column of the table trains a workload; all of them call the clock after each step."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from benchmarks.workloads.clock import Clock
from benchmarks.workloads.task import Workload, to_device
from torch import Tensor, nn

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def tutorial(workload: Workload, clock: Clock) -> None:
    """The plain loop in float32 with the defaults of AdamW and of the loader."""
    model = workload.model().to(workload.device).train()
    optimizer = workload.optimizer(model)
    loader = workload.loader()
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss = workload.loss(model, to_device(batch, workload.device))
            loss.backward()
            optimizer.step()
            clock.step(model, loss)


def engineer(bf16: bool) -> Callable[[Workload, Clock], None]:
    """Return the loop that a good engineer writes in an afternoon: a fused optimizer, bf16 where it pays.

    The workload has the rest: attention in one kernel, channels last, and batches that cost nothing twice.
    """

    def train(workload: Workload, clock: Clock) -> None:
        model = workload.model(modern=True).to(workload.device).train()
        optimizer = workload.optimizer(model, fused=True)
        for batch in workload.engineers_batches():
            with torch.autocast(workload.device.type, torch.bfloat16, enabled=bf16):
                loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.step(model, loss)

    return train


def accelerate(workload: Workload, clock: Clock) -> None:
    """The tutorial's loop with the lines that Accelerate changes."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=workload.device.type == "cpu")
    network = workload.model().train()
    model, optimizer, loader = accelerator.prepare(network, workload.optimizer(network), workload.loader())
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            clock.step(network, loss)


def transformers(workload: Workload, clock: Clock) -> None:
    """The Trainer of transformers, whose batches are padded to their longest text by default."""
    import tempfile

    from benchmarks.workloads.text import Text
    from transformers import Trainer, TrainingArguments

    assert isinstance(workload, Text)
    loader = workload.longest_loader()

    class Timed(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

        def training_step(self, model: nn.Module, *arguments: Any, **named: Any) -> Tensor:
            # The optimizer's step comes after this one returns: the clock counts it when the next one begins.
            if self.last_loss is not None:
                clock.step(model, self.last_loss)
            self.last_loss: Tensor | None = super().training_step(model, *arguments, **named)
            return self.last_loss

    network = workload.model()
    with tempfile.TemporaryDirectory(prefix="workloads-") as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=workload.batch_size,
            max_steps=workload.max_steps + 2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=workload.device.type == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            # The order of the given loader, as in the other columns.
            accelerator_config={"use_seedable_sampler": False},
            disable_tqdm=True,
        )
        trainer = Timed(
            network, arguments, optimizers=(workload.optimizer(network), None), train_dataset=loader.dataset
        )
        trainer.last_loss = None
        trainer.train()


def fit(
    L: ModuleType, workload: Workload, clock: Clock, *, modern: bool = False, arguments: Mapping[str, Any] | None = None
) -> None:
    """Train with the Trainer of hasten or Lightning: the tutorial's loader, and arguments of the Trainer."""

    class Module(L.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model(modern=modern)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return workload.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return workload.optimizer(self.model)

    class Turns(L.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.step(pl_module.model, outputs["loss"])

    loader = workload.loader()
    trainer = L.Trainer(
        max_epochs=-(-workload.max_steps // len(loader)) + 1,
        # The first turn is a step beside those of the others.
        max_steps=workload.max_steps + 2,
        accelerator="cpu" if workload.device.type == "cpu" else "gpu",
        devices=1,
        callbacks=[Turns()],
        **QUIET,
        **(arguments or {}),
    )
    trainer.fit(Module(), loader)


def lightning(workload: Workload, clock: Clock) -> None:
    """Lightning's Trainer, with everything else as the other columns have it."""
    sys.path.append(os.environ[PEER_PACKAGES])
    import lightning as L  # type: ignore[import-not-found]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    fit(L, workload, clock)


def hasten(modern: bool, arguments: Callable[[Workload], Mapping[str, Any]]) -> Callable[[Workload, Clock], None]:
    """Return hasten's Trainer with arguments that depend on the workload."""

    def train(workload: Workload, clock: Clock) -> None:
        import hasten as L

        logging.getLogger("hasten").setLevel(logging.WARNING)
        fit(L, workload, clock, modern=modern, arguments=arguments(workload))

    return train


# The variable with the folder in which Lightning is installed.
PEER_PACKAGES = "WORKLOADS_PEER_PACKAGES"
COLUMNS: dict[str, Callable[[Workload, Clock], None]] = {
    "tutorial": tutorial,
    "engineer": engineer(bf16=False),
    "engineer-bf16": engineer(bf16=True),
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "defaults": hasten(False, lambda workload: {}),
    "auto": hasten(True, lambda workload: {"speed": "auto"}),
    "best": hasten(True, lambda workload: workload.best),
    "step": hasten(True, lambda workload: {**workload.best, "compile": "step"}),
    "consent": hasten(True, lambda workload: {**workload.best, **workload.consent}),
}
LOWER_PRECISION = ("engineer-bf16", "consent")
QUICK = ("tutorial", "engineer", "engineer-bf16", "auto", "best", "consent")


def columns_of(workload: type[Workload]) -> list[str]:
    """Return the columns that apply to a workload."""
    other = {"transformers", "accelerate"} - {workload.hugging_face} | (set() if workload.is_small else {"step"})
    return [name for name in COLUMNS if name not in other]


def device_of(name: str) -> torch.device:
    """Return the device: a GPU where there is one, for "auto"."""
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
