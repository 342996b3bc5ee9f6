"""Logging never makes the device wait: no value is read on the host between two logging intervals."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from tests.models import quiet

EVERY = 10
STEPS = 45


class HostReads(TorchDispatchMode):
    """Notes each operation that makes the host wait for a value of the device."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default)
    COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

    def __init__(self) -> None:
        super().__init__()
        self.step = -1
        self.steps_with_reads: list[tuple[int, str]] = []

    def note(self, what: str) -> None:
        self.steps_with_reads.append((self.step, what))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self.READS:
            self.note(str(function))
        elif function in self.COPIES:
            source = args[1] if function is self.COPIES[1] else args[0]
            if source.device.type != "cpu" and result.device.type == "cpu":
                self.note(str(function))
        return result


class HostMethods(TorchFunctionMode):
    """Notes the methods that read a value without any dispatched operation, as CPU tensors allow."""

    NAMES = frozenset({"item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__"})

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        # States of random generators, in bytes, are on the host always.
        if name in self.NAMES and getattr(args[0], "dtype", None) is not torch.uint8:
            self.reads.note(name)
        return function(*args, **(kwargs or {}))


class Logs(L.LightningModule):
    """Logs five values each step, in the ways there are."""

    def __init__(self, reads: HostReads | None = None, seconds: float = 0.0, read_at: int = -1) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.reads, self.seconds, self.read_at = reads, seconds, read_at

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.reads is not None:
            self.reads.step = batch_idx
        time.sleep(self.seconds)
        x, y = batch
        error = self.layer(x) - y
        loss: Tensor = error.square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log("error", error.abs().mean(), prog_bar=True, on_step=True, on_epoch=True)
        self.log("largest", error.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("samples", error.new_ones(()), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("batch", float(batch_idx), batch_size=4)
        if batch_idx == self.read_at:
            loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@contextlib.contextmanager
def terminal() -> Iterator[list[bytes]]:
    """Put stdout and stderr on a real terminal; what was drawn is in the list afterwards."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    drawn: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # The end of a terminal is an error on Linux.
            while piece := os.read(master, 65536):
                drawn.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    screen = os.fdopen(slave, "w", buffering=1)
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            yield drawn
    finally:
        screen.close()
        reader.join(timeout=600)
        os.close(master)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(STEPS * 4, 8, generator=generator), torch.randn(STEPS * 4, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def reads_of(folder: Any, *, bar: bool, read_at: int = -1) -> tuple[HostReads, str]:
    reads = HostReads()
    trainer = quiet(default_root_dir=folder, logger=True, log_every_n_steps=EVERY, enable_progress_bar=bar)
    # Long enough for the bar to draw several times.
    module = Logs(reads, seconds=0.02 if bar else 0.0, read_at=read_at)
    with terminal() as drawn, reads, HostMethods(reads):
        trainer.fit(module, data())
    return reads, b"".join(drawn).decode(errors="replace")


def between_intervals(reads: HostReads) -> list[tuple[int, str]]:
    """Return the reads at steps after which nothing is due: not every tenth, not the last of the epoch."""
    return [(step, what) for step, what in reads.steps_with_reads if 0 <= step < STEPS - 1 and (step + 1) % EVERY != 0]


def test_nothing_is_read_between_two_logging_intervals(tmp_path: Any) -> None:
    reads, drawn = reads_of(tmp_path, bar=True)
    assert between_intervals(reads) == []
    assert "loss=" in drawn  # The bar was really on, and shows the values.


def test_at_the_interval_all_values_come_in_one_copy(tmp_path: Any) -> None:
    reads, _ = reads_of(tmp_path, bar=False, read_at=3)
    for due in range(EVERY - 1, STEPS - 1, EVERY):
        at_due = [what for step, what in reads.steps_with_reads if step == due]
        assert at_due.count("tolist") == 1
        assert "item" not in at_due
        assert "__float__" not in at_due
    # The counters see what the module reads itself.
    assert between_intervals(reads) == [(3, "item"), (3, "aten._local_scalar_dense.default")]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "16-mixed", "fused_optimizer": True},
        {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    ],
)
def test_cuda_never_synchronises_between_two_logging_intervals(tmp_path: Any, arguments: dict[str, Any]) -> None:
    class Watched(Logs):
        watched = 0

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            # From here on, any synchronisation raises, until the step at whose end values are due.
            torch.cuda.set_sync_debug_mode("default" if (batch_idx + 1) % EVERY == 0 else "error")
            self.watched += torch.cuda.get_sync_debug_mode() == 2
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            torch.cuda.set_sync_debug_mode("default")

    loader = DataLoader(data().dataset, batch_size=4, pin_memory=True)
    trainer = quiet(
        accelerator="gpu",
        default_root_dir=tmp_path,
        logger=True,
        log_every_n_steps=EVERY,
        limit_train_batches=STEPS - 1,  # Ends on a watched step; the epoch's values are read in its end hook.
        enable_progress_bar=True,
        **arguments,
    )
    module = Watched(seconds=0.02)
    try:
        with terminal() as drawn:
            trainer.fit(module, loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert module.watched == STEPS - 1 - (STEPS - 1) // EVERY
    assert b"loss=" in b"".join(drawn)


def test_a_value_changed_in_place_after_logging_is_published_as_it_was() -> None:
    class Changes(Logs):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.mse_loss(self.layer(x), y)
            value = torch.full((), float(batch_idx))
            self.log("value", value, on_step=True, on_epoch=True)
            value.fill_(-1.0)
            return loss

    trainer = quiet()
    trainer.fit(Changes(), data())
    assert float(trainer.callback_metrics["value_epoch"]) == pytest.approx((STEPS - 1) / 2)
