"""Processes of one run that decide differently agree, or end with an error that names the ranks."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.machine import agreement
from tests.models import loader, quiet
from tests.refusals import refused, warned


class Model(L.LightningModule):
    """A linear model that counts its batches; ``without_loss``: (rank, batch) pairs that are skipped."""

    def __init__(self, without_loss: tuple[tuple[int, int], ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)
        self.without_loss = without_loss
        self.count = 0
        self.batch_is_none = self.loss_is_constant = False

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        is_none = self.batch_is_none and (self.global_rank, self.count) in self.without_loss
        self.count += is_none
        return None if is_none else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.count += 1
        if self.loss_is_constant:
            # A collective, which must not meet the exchange of gradients.
            self.log("batch", float(batch_idx), sync_dist=True)
        if (self.global_rank, batch_idx) in self.without_loss:
            return torch.zeros((), requires_grad=True) if self.loss_is_constant else None
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Stops(L.Callback):
    """Asks to stop at a moment, on some ranks."""

    def __init__(self, moment: str, ranks: tuple[int, ...]) -> None:
        self.moment, self.ranks = moment, ranks

    def _stop(self, trainer: Any, moment: str) -> None:
        if moment == self.moment and trainer.global_rank in self.ranks:
            trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._stop(trainer, "start")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._stop(trainer, f"epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop(trainer, f"batch {batch_idx}")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._stop(trainer, "epoch end")


def two(model: Model, **arguments: Any) -> L.Trainer:
    """Train on two processes, and check that they end with the same weights after the same number of batches."""
    trainer = quiet(devices=2, strategy="ddp", num_sanity_val_steps=0, **arguments)
    trainer.fit(model, loader(40), loader(8))
    for each in (model.layer.weight.detach(), torch.tensor(model.count), torch.tensor(trainer.global_step)):
        first, second = trainer.strategy.all_gather(each)
        assert torch.equal(first, second)
    return trainer


@pytest.mark.world_size(2)
def test_all_processes_that_ask_to_stop_stop_at_once() -> None:
    moments = {"start": 0, "epoch 1": 5, "batch 2": 3, "validation": 5, "epoch end": 5}
    for moment, batches in moments.items():
        model = Model()
        two(model, max_epochs=4, callbacks=[Stops(moment, (0, 1))])
        assert model.count == batches, moment


@pytest.mark.world_size(2)
def test_one_process_that_asks_to_stop_stops_all_of_them() -> None:
    from hasten.loops import processes

    processes._SAME_MOMENT_SECONDS = 0.1
    for moment in ("start", "epoch 1", "batch 2", "validation", "epoch end"):
        model = Model()
        trainer = two(model, max_epochs=2000, callbacks=[Stops(moment, (1,))])
        assert trainer.should_stop
        assert model.count < 5 * 2000
        if moment in ("start", "epoch 1", "epoch end"):
            assert model.count == {"start": 0, "epoch 1": 5, "epoch end": 5}[moment]


class Skips(Model):
    """Leaves epochs before their third batch, on some ranks."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 and self.global_rank in self.ranks else None


@pytest.mark.world_size(2)
def test_minus_one_on_one_process_names_the_ranks() -> None:
    agreement.PATIENCE_SECONDS = 1.0
    expected = r"returned -1 before batch 2 of epoch 1 on rank 1 and not on rank 0"
    if os.environ["LOCAL_RANK"] == "0":
        expected = "the process of rank 1 left the run with RuntimeError|" + expected
    with pytest.raises(RuntimeError, match=expected):
        two(Skips(1))


@pytest.mark.world_size(2)
def test_minus_one_on_all_processes_leaves_the_epoch_and_one_that_comes_late_is_waited_for_and_named() -> None:
    agreement.NOTICE_SECONDS = 0.2
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hasten").addHandler(handler)
    model = Skips(0, 1)

    class Late(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and trainer.global_rank == 1:
                time.sleep(0.5)

    two(model, callbacks=[Late()], max_epochs=2)
    assert model.count == 4
    if os.environ["LOCAL_RANK"] == "0":
        assert [line for line in lines if "rank 0 has waited" in line and "for rank 1" in line]


@pytest.mark.world_size(2)
def test_values_are_logged_after_one_process_has_worked_alone_and_its_error_is_the_error_of_all() -> None:
    agreement.PATIENCE_SECONDS = 0.1

    class Logs(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("index", float(batch_idx), sync_dist=True, on_step=True)
            if self.global_rank == 0 and batch_idx == 0:
                time.sleep(0.5)

    trainer = two(Logs(), log_every_n_steps=1, limit_train_batches=2)
    assert trainer.callback_metrics["index"] == 1

    class Raises(Logs):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("index", float(batch_idx), sync_dist=True, on_step=True)
            if self.global_rank == 1:
                raise ValueError("a file is missing")

    kind = ValueError if os.environ["LOCAL_RANK"] == "1" else RuntimeError
    with refused(kind, says="a file is missing"):
        two(Raises(), log_every_n_steps=1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("accumulate", "nothing"), [(1, "loss"), (2, "loss"), (2, "batch"), (1, "constant"), (2, "constant")]
)
def test_a_batch_without_a_loss_on_one_process_contributes_nothing(accumulate: int, nothing: str) -> None:
    skipped = ((1, 1), (0, 2), (0, 3), (1, 3))
    model = Model(skipped)
    model.batch_is_none, model.loss_is_constant = nothing == "batch", nothing == "constant"
    epochs = 1 if model.batch_is_none else 2
    two(model, accumulate_grad_batches=accumulate, use_distributed_sampler=False, max_epochs=epochs)
    alone = Model()
    optimizer: Any = alone.configure_optimizers()
    batches = list(loader(40))
    for _ in range(epochs):
        for batch_idx, batch in enumerate(batches):
            if batch_idx % accumulate == 0:
                optimizer.zero_grad()
            for rank in (0, 1):
                if (rank, batch_idx) not in skipped:
                    (alone.training_step(batch, -1) / 2 / accumulate).backward()  # type: ignore[operator]
            if (batch_idx + 1) % accumulate == 0:
                optimizer.step()
    torch.testing.assert_close(model.layer.weight, alone.layer.weight, rtol=1e-5, atol=1e-6)


class Signaled(Model):
    """Sends a signal to rank 1 in its third batch of an evaluation, and takes a while for the batches after it."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.number, self.evaluated, self.ended = number, 0, 0
        self.metric = torchmetrics.MeanMetric()

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += 1
        if self.number is not None:
            if self.evaluated == 3 and self.global_rank == 1:
                os.kill(os.getpid(), self.number)
            time.sleep(0.05 * (1 + self.global_rank))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.predict_step(batch, batch_idx)
        self.metric.update(self.layer(batch[0]) + torch.rand(()))
        self.log("metric", self.metric)
        self.log("noise", torch.rand(()), sync_dist=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else loss * torch.rand(())

    def on_validation_epoch_end(self) -> None:
        self.ended += 1

    on_predict_epoch_end = on_validation_epoch_end


@pytest.mark.world_size(2)
def test_a_signal_to_one_process_ends_an_evaluation_on_all_and_the_resumed_run_is_the_same(tmp_path: Path) -> None:
    def trainer(**arguments: Any) -> L.Trainer:
        return quiet(devices=2, strategy="ddp", max_epochs=2, num_sanity_val_steps=0, **arguments)

    def left(model: Signaled, run: Callable[[], object], code: int) -> None:
        with pytest.raises(SystemExit) as caught:
            run()
        assert caught.value.code == code
        assert model.evaluated < 60
        assert model.ended == 0

    many, saves = loader(480), ModelCheckpoint(tmp_path, save_last=True)
    model, interrupted = Signaled(signal.SIGTERM), trainer(callbacks=[saves], enable_checkpointing=True)
    L.seed_everything(1)
    left(model, lambda: interrupted.fit(model, loader(40), many), 143)
    resumed, plain = Signaled(), Signaled()
    trainer().fit(resumed, loader(40), many, ckpt_path=tmp_path / "last.ckpt")
    L.seed_everything(1)
    whole = trainer()
    whole.fit(plain, loader(40), many)
    assert torch.equal(resumed.layer.weight, plain.layer.weight)
    assert resumed.evaluated == plain.evaluated == 120
    assert resumed.trainer.callback_metrics == whole.callback_metrics
    model = Signaled(signal.SIGINT)
    left(model, lambda: trainer().predict(model, many), 130)

    # Steps that exchange something are all made: the others wait in them.
    class Gathers(Signaled):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.all_gather(batch[1])
            self.predict_step(batch, batch_idx)

    model = Gathers(signal.SIGTERM)
    with pytest.raises(SystemExit):
        trainer().test(model, loader(160))
    assert model.evaluated == 20


# -- values logged with sync_dist=True


class Logs(Model):
    """Logs values that depend on the rank."""

    def __init__(self, values: Callable[[int, int], dict[str, Any]]) -> None:
        super().__init__()
        self.values = values
        self.metric = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        for name, reduce_fx in self.values(self.global_rank, self.current_epoch).items():
            value = 10.0 * (self.global_rank + 1) + len(name)
            if reduce_fx == "metric":
                self.metric.update(value)
                self.log(name, self.metric, on_step=False, on_epoch=True)
                continue
            self.log(name, value, sync_dist=True, reduce_fx=reduce_fx, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def other_order(rank: int, epoch: int) -> dict[str, Any]:
    names = {"a": "mean", "bb": "mean", "ccc": "max", "dddd": "sum", "eeeee": "max"}
    return names if rank == 0 else dict(reversed(names.items()))


def on_one_alone(rank: int, epoch: int) -> dict[str, Any]:
    return {"everywhere": "mean"} | ({"here": "mean"} if rank == 1 else {})


def nothing_on_the_other(rank: int, epoch: int) -> dict[str, Any]:
    return {"here": "mean"} if rank == 0 else {}


def a_metric_on_one_alone(rank: int, epoch: int) -> dict[str, Any]:
    return {"everywhere": "mean"} | ({"metric": "metric"} if rank == 1 else {})


def later_on_one_alone(rank: int, epoch: int) -> dict[str, Any]:
    return {"everywhere": "mean"} | ({"later": "mean"} if epoch == 1 and rank == 0 else {})


@pytest.mark.world_size(2)
def test_values_logged_in_another_order_are_reduced_with_their_own() -> None:
    trainer = two(Logs(other_order), log_every_n_steps=1)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert values["a_epoch"] == values["a_step"] == 16
    assert values["bb_epoch"] == values["bb_step"] == 17
    assert values["ccc_epoch"] == values["ccc_step"] == 23
    assert values["dddd_step"] == 38
    assert values["dddd_epoch"] == 5 * 38
    assert values["eeeee_epoch"] == 25


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("values", "logged", "have", "lack", "every"),
    [
        (on_one_alone, "here", 1, 0, 1),
        (nothing_on_the_other, "here", 0, 1, 0),
        (a_metric_on_one_alone, "metric", 1, 0, 0),
        (later_on_one_alone, "later", 0, 1, 1),
    ],
)
def test_a_value_logged_on_one_process_alone_is_an_error_that_names_it(
    values: Any, logged: str, have: int, lack: int, every: int
) -> None:
    expected = rf"{logged}' in training_step.*logged on rank {have} and not on rank {lack}"
    if int(os.environ["LOCAL_RANK"]) != have:
        expected += "|[Cc]onnection|closed"  # what is left of the process that said so
    with pytest.raises(RuntimeError, match=expected):
        two(Logs(values), log_every_n_steps=every, max_epochs=2)


class TenValues(Model):
    """Logs ten values in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        for index in range(10):
            self.log(f"value {index}", float(index), sync_dist=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.world_size(2)
def test_ten_values_cost_one_collective_a_flush_and_none_in_between() -> None:
    model = TenValues()
    collectives: list[tuple[int, int]] = []
    exchanges: list[int] = []
    reduce, exchange = torch.distributed.all_reduce, agreement.exchange

    def counted_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        collectives.append((model.count, tensor.numel()))
        return reduce(tensor, *arguments, **options)

    def counted_exchange(*arguments: Any, **options: Any) -> Any:
        exchanges.append(model.count)
        return exchange(*arguments, **options)

    torch.distributed.all_reduce = counted_reduce
    agreement.exchange = counted_exchange
    try:
        two(model, max_epochs=3, log_every_n_steps=2)
    finally:
        torch.distributed.all_reduce, agreement.exchange = reduce, exchange
    # Five batches an epoch. Those of three numbers agree on whether and where to stop, those of eight before each epoch
    # also on steps and learning rates, those of nine also on the times of both ranks;
    # those of four on what a validation has logged, and at the end on steps and learning rates.
    of_values = [(batch, size) for batch, size in collectives if size >= 10]
    flushes = [(batch, 10) for batch in (2, 4, 6, 8, 10, 12, 14)]
    # The last step's values and the means (sums and weights) at the end of an epoch.
    ends = [(batch, size) for batch in (5, 10, 15) for size in (10, 20)]
    assert sorted(of_values) == sorted(flushes + ends)
    assert {size for _, size in collectives if size < 10} <= {3, 4, 8, 9}
    # Names are compared the first time that they are reduced.
    assert exchanges == [2, 5, 5]


class Scheduled(Model):
    """Logs another value on each rank; ``make``: its scheduler, given the optimizer and the rank."""

    def __init__(self, make: Callable[[Any, int], Any], interval: str = "epoch") -> None:
        super().__init__()
        self.make, self.interval = make, interval

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.log("own", float(self.count if self.global_rank else -self.count), on_step=True, on_epoch=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("own_mean", float(self.count if self.global_rank else -self.count))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        monitor = "own" if self.interval == "step" else "own_mean"
        scheduler = {"scheduler": self.make(optimizer, self.global_rank), "interval": self.interval, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.mark.world_size(2)
def test_schedulers_step_on_the_same_value_and_schedulers_and_optimizers_that_differ_are_named() -> None:
    schedulers = torch.optim.lr_scheduler
    for interval in ("epoch", "step"):
        trainer = two(Scheduled(lambda o, rank: schedulers.ReduceLROnPlateau(o, patience=0), interval), max_epochs=3)
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    differ: dict[str, Callable[[Any, int], Any]] = {
        "step_size of scheduler 0 is 1 on rank 0 and 2 on rank 1": lambda o, rank: schedulers.StepLR(o, 1 + rank),
        "_schedulers of scheduler 0 is .*'T_max': 3, .* on rank 0 and .*'T_max': 4": lambda o, rank: (
            schedulers.ChainedScheduler([schedulers.CosineAnnealingLR(o, 3 + rank)])
        ),
        "lr_lambdas of scheduler 0 is .*first.* on rank 0 and .*second.* on rank 1": lambda o, rank: (
            schedulers.LambdaLR(o, second if rank else first)
        ),
    }
    for message, make in differ.items():
        with pytest.raises(RuntimeError, match=message):
            two(Scheduled(make))
    two(Scheduled(lambda o, rank: schedulers.LambdaLR(o, lambda step: 0.5)), max_epochs=1)

    for epochs, counts in ((1, "5 on rank 0 and 3 on rank 1"), (3, "5 on rank 0 and 3 on rank 1")):
        with refused(RuntimeError, says=f"global_step is {counts}"):
            two(SkipsSteps(), max_epochs=epochs)

    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    layer = nn.Linear(2, 2)
    with refused(RuntimeError, says=("Fabric.setup()", "lr of group 0 of optimizer 0", "0.1 on rank 0", "1.1 on")):
        fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1 + fabric.global_rank))
    layer = nn.Linear(2, 2)
    fabric.setup_module(layer)
    with refused(RuntimeError, says=("Fabric.setup_optimizers()", "lr of group 0")):
        fabric.setup_optimizers(torch.optim.SGD(layer.parameters(), lr=0.1 + fabric.global_rank))


class SkipsSteps(Model):
    """Steps by itself, on rank 1 with every second batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.global_rank == 0 or batch_idx % 2 == 0:
            self.optimizers().step()


def first(step: int) -> float:
    return 1.0


def second(step: int) -> float:
    return 0.5


class SetsRate(L.Callback):
    """Divides the learning rate by 10 after an epoch, on rank 0 alone."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 0 and trainer.current_epoch == self.epoch:
            trainer.optimizers[0].param_groups[0]["lr"] /= 10


@pytest.mark.world_size(2)
def test_a_learning_rate_that_one_process_has_set_ends_the_run_and_after_the_last_step_it_is_warned_of() -> None:
    says = ("lr of group 0 of optimizer 0", "0.01 on rank 0", "0.1 on rank 1")
    with refused(RuntimeError, fix="sync_dist=True", says=says):
        two(Model(), callbacks=[SetsRate(0)], max_epochs=2)
    # The first process alone shows warnings.
    if os.environ["LOCAL_RANK"] == "0":
        with warned(UserWarning, fix="sync_dist=True", says=says):
            two(Model(), callbacks=[SetsRate(1)], max_epochs=2)
    else:
        two(Model(), callbacks=[SetsRate(1)], max_epochs=2)
