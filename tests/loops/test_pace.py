"""The speed of a fit, the time of its steps and the time to its end: right, and without a trace in what is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.loggers import CSVLogger
from hasten.record import pace
from hasten.record.pace import learning_rates, useful_positions
from hasten.record.step_times import PARTS, DeviceClock
from tests.models import Classifier, Manual, loader, quiet

BATCHES = 24


class Lines(L.Callback):
    """Keeps the lines of the record."""

    writes = True

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.current_run.observers.record = self

    def add(self, kind: str, **fields: Any) -> None:
        self.lines.append((kind, fields))

    def flush(self) -> None: ...

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.lines if name == kind]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a sample of every second step."""
    # Another test may have compiled something in this process: then logging is not timed by itself.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    monkeypatch.delitem(counters, "frames", raising=False)
    for name in ("_FIRST_SECONDS", "_SECONDS", "_SHARE"):
        monkeypatch.setattr(pace, name, 0.0)


class Moments:
    """In the place of perf_counter: a moment passes with each look at it, and ``now`` can be moved on."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Moments:
    clock = Moments()
    for module in ("record.pace", "record.step_times", "loops.run_data"):
        monkeypatch.setattr(f"hasten.{module}.perf_counter", clock)
    return clock


def fit(module: L.LightningModule, lines: Lines | None, **arguments: Any) -> L.Trainer:
    callbacks = [*arguments.pop("callbacks", []), *([] if lines is None else [lines])]
    trainer = quiet(**{"max_epochs": 2, "log_every_n_steps": 3, **arguments}, callbacks=callbacks)
    trainer.fit(module, loader(BATCHES * 4), loader(12))
    return trainer


class Closure(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class SeveralOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        first, second = (torch.optim.SGD(self.layers[index].parameters(), lr=0.1 * (index + 1)) for index in (0, 3))
        return [first, second]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


KINDS: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "automatic": (Classifier, {"gradient_clip_val": 0.5}),
    "accumulation": (Classifier, {"accumulate_grad_batches": 5, "gradient_clip_val": 0.5}),
    "bfloat16": (Classifier, {"precision": "bf16-mixed"}),
    "guarded": (Classifier, {"on_bad_loss": "skip"}),
    "closure": (Closure, {"accumulate_grad_batches": 2}),
    "manual": (Manual, {}),
    "several": (SeveralOptimizers, {}),
    "parts": (Classifier, {"micro_batch": 2}),
}


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", KINDS)
def test_timed_steps_train_the_same_and_say_where_their_time_goes(kind: str) -> None:
    make, arguments = KINDS[kind]
    lines, weights = Lines(), []
    for record in (None, lines):
        L.seed_everything(1)
        module = make()
        trainer = fit(module, record, **arguments)
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    times = lines.of("step_time")
    accumulated = arguments.get("accumulate_grad_batches", 1)
    assert len(times) >= 0.25 * 2 * BATCHES / accumulated - 2
    for line in times:
        assert list(line["parts"]) == list(PARTS)
        assert line["seconds"] == pytest.approx(sum(line["parts"].values()))
        for part in ("data", "forward", "backward", "optimizer"):
            assert line["parts"][part] > 0, part
        assert line["parts"]["logging"] > 0 or kind in ("manual", "several")
        assert line["parts"]["transfer"] == line["parts"]["callbacks"] == line["parts"]["checkpoints"] == 0
    # Nothing is left behind.
    run = trainer.current_run
    assert "bind" not in vars(run.runtime)
    assert "record" not in vars(run.logged)
    assert not {"optimizer_step", "backward", "optimizer_zero_grad"} & set(vars(module))

    speeds = lines.of("speed")
    done = sum(line["steps"] for line in speeds)
    assert done == run.progress.logged_step - (accumulated == 1)  # The first batch is not counted.
    assert sum(line["samples"] for line in speeds) == 4 * (2 * BATCHES - 1)
    assert all(0 <= line["data_seconds"] <= line["seconds"] for line in speeds)
    assert (speeds[-1]["memory_bytes"], speeds[-1]["peak_flops"], speeds[-1]["tokens"]) == (None, None, None)
    if kind == "automatic":
        assert speeds[-1]["lr"] == {"SGD": 0.1}
    assert {line["flops"] for line in speeds} == {None}, "nobody asked to count them"
    assert [line["step"] for line in lines.of("validation")] == [
        run.progress.logged_step // 2 - 1,
        run.progress.logged_step - 1,
    ]


@pytest.mark.usefixtures("often")
def test_hooks_loggers_and_checkpoints_take_time_too(clock: Moments, tmp_path: Any) -> None:
    class Works(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.now += 1.0

        def on_validation_start(self, *_: Any) -> None:
            clock.now += 20.0

        def on_save_checkpoint(self, *_: Any) -> None:
            clock.now += 30.0

    lines = Lines()
    checkpoint = L.callbacks.ModelCheckpoint(
        tmp_path, monitor="val_loss", every_n_train_steps=4, save_top_k=-1, filename="{step}", save_last=True
    )
    fit(
        Classifier(), lines, callbacks=[Works(), checkpoint], enable_checkpointing=True, val_check_interval=4,
        max_epochs=1,
    )  # fmt: skip
    assert all(1.0 <= line["parts"]["callbacks"] < 2.0 for line in lines.of("step_time"))
    assert any(line["parts"]["checkpoints"] >= 30.0 for line in lines.of("step_time"))
    validations, saved = lines.of("validation"), lines.of("checkpoint")
    assert len(validations) == BATCHES / 4
    assert all(20.0 <= line["seconds"] < 21.0 for line in validations)
    # Neither is part of the steps' time.
    assert all(line["seconds"] == pytest.approx(line["steps"], abs=0.1) for line in lines.of("speed"))
    ranked = [line for line in saved if line["monitor"] is not None]
    assert [line["step"] for line in ranked][:2] == [3, 7]
    assert set(ranked[0]["monitor"]) == {"val_loss"}
    assert any(line["best"] for line in ranked)
    assert all(line["bytes"] > 1000 and 30.0 <= line["seconds"] < 31.0 for line in saved)
    assert any(line["path"].endswith("last.ckpt") for line in saved)


@pytest.mark.usefixtures("often")
def test_waiting_for_data_is_measured_in_all_steps(clock: Moments) -> None:
    class Slow:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(8):
                clock.now += 1.0
                yield torch.ones(2, 8), torch.zeros(2, dtype=torch.long)

    lines = Lines()
    quiet(callbacks=[lines], max_epochs=1).fit(Classifier(), Slow())
    speeds = lines.of("speed")
    assert 7.0 <= sum(line["data_seconds"] for line in speeds) < 8.1
    assert all(line["parts"]["data"] >= 1.0 for line in lines.of("step_time"))

    class Fetches(Classifier):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    lines = Lines()
    trainer = quiet(callbacks=[lines], max_epochs=1)
    trainer.fit(Fetches(), Slow())
    assert trainer.current_run.observers.pace.waited >= 7.0
    assert all(line["parts"]["forward"] < 1.0 <= line["parts"]["data"] for line in lines.of("step_time"))


class Event:
    """An event of a device that is always two seconds behind the host."""

    now, made = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1

    def record(self, stream: object) -> None:
        self.at = Event.now + 2.0

    def query(self) -> bool:
        return Event.now >= self.at

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query(), "the device was waited for"
        return 1000 * (later.at - self.at)


def test_on_a_gpu_the_parts_are_read_when_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = DeviceClock(torch.device("cuda", 0))
    assert not clock.ready()
    for _ in range(3):
        clock.begin()
        for part, seconds in (("data", 1.0), ("forward", 2.0)):
            clock.enter(part)
            Event.now += seconds
            if part == "forward":
                clock.enter("logging")
                Event.now += 0.25
                clock.leave()
            clock.leave()
        Event.now += 0.5
        clock.end()
        assert not clock.ready()
        Event.now += 2.0
        assert clock.ready()
        assert clock.seconds() == pytest.approx({"other": 0.5, "data": 1.0, "forward": 2.0, "logging": 0.25})
    assert Event.made == 8  # The same events, again and again.


class Tokens(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.embedding(batch["input_ids"]).square().mean()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": lr} for p, lr in ((self.embedding.weight, 0.1), (nn.Parameter(), 0.2))]
        return torch.optim.Adam(groups)


@pytest.mark.usefixtures("often")
def test_tokens_are_counted_where_batches_have_some() -> None:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 5:] = 0
    batches = [{"input_ids": torch.zeros(2, 10, dtype=torch.long), "attention_mask": mask}] * 9
    lines = Lines()
    trainer = quiet(callbacks=[lines], max_epochs=1)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append(trainer.current_run.observers.pace.speed())

    trainer.callbacks.append(L.callbacks.LambdaCallback(on_train_batch_end=look))
    trainer.fit(Tokens(), batches)
    speeds = lines.of("speed")
    assert sum(line["tokens"] for line in speeds) == 8 * 20
    assert sum(line["useful_tokens"] for line in speeds) == 8 * 15
    assert speeds[0]["lr"] == {"Adam/pg1": 0.1, "Adam/pg2": 0.2}
    assert seen[0] is None
    assert seen[-1].tokens == pytest.approx(10 * seen[-1].samples)
    packed = {"input_ids": torch.zeros(1, 4), "document_ids": torch.tensor([[0, 0, 1, -1]])}
    assert useful_positions(packed).tolist() == [[True, True, True, False]]
    assert useful_positions({"input_ids": torch.zeros(1, 4), "attention_mask": torch.ones(1, 1, 4, 4)}) is None


def test_rates_of_several_optimizers_have_names_of_their_own() -> None:
    makes = [torch.optim.SGD([torch.zeros(1)], lr=0.5), torch.optim.SGD([torch.zeros(1)], lr=0.25)]
    assert learning_rates(makes) == {"SGD": 0.5, "SGD-1": 0.25}
    named = torch.optim.Adam([{"params": [torch.zeros(1)], "name": "head"}, {"params": [torch.ones(1)]}], lr=0.1)
    assert learning_rates([named]) == {"Adam/head": 0.1, "Adam/pg2": 0.1}


class Clock:
    """Time that passes as a test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        # 24 batches of 2 s an epoch, and a validation of 3 batches that takes 4.5 s. After 10 batches:
        ({"max_epochs": 3}, 2 * 62 + 3 * 4.5),
        ({"max_steps": 20, "max_epochs": -1}, 20 + 0.0),
        ({"max_epochs": 3, "accumulate_grad_batches": 2, "max_steps": 20}, 2 * 30 + 4.5),
        ({"max_epochs": 3, "val_check_interval": 6}, 2 * 62 + 11 * 4.5),
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, 2 * 86 + 2 * 4.5),
        ({"max_epochs": 3, "limit_val_batches": 0}, 2 * 62),
        ({"max_epochs": -1}, None),
        ({"max_epochs": -1, "max_time": {"seconds": 50}}, 50 - 20),
        ({"max_epochs": 1}, 28 + 4.5),
    ],
)
def test_the_time_to_the_end(arguments: dict[str, Any], seconds: float | None, monkeypatch: Any) -> None:
    clock, left = Clock(), []
    monkeypatch.setattr(pace, "perf_counter", clock.perf_counter)
    monkeypatch.setattr("hasten.callbacks.timer.time", clock_of_timer := Clock())
    clock_of_timer.monotonic = lambda: 0.0  # type: ignore[attr-defined]

    class Measured(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            clock.now += 2.0
            if trainer.current_run.progress.total_batches == 10:
                # A validation is measured once there was one: here as if.
                trainer.current_run.observers.pace._last_validation = 4.5
                left.append(trainer.current_run.observers.pace.seconds_left())
                trainer.should_stop = True

    arguments = {"max_epochs": None, **arguments}
    fit(Classifier(), Lines(), callbacks=[Measured()], **arguments)
    assert left == [None if seconds is None else pytest.approx(seconds)]


def test_a_long_fit_says_so_once(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock, said = Clock(), []
    monkeypatch.setattr(pace, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(pace, "rank_zero_info", said.append)
    monkeypatch.setattr(pace.sys, "argv", ["/a/train.py", "--lr=1"])

    def late(*_: Any) -> None:
        clock.now += 8.0

    slow = L.callbacks.LambdaCallback(on_train_batch_end=late)
    for epochs, bar in ((5, True), (1, True), (5, False)):
        fit(Classifier(), None, callbacks=[slow], max_epochs=epochs, enable_progress_bar=bar)
    (message,) = said
    # 5 * 24 * 8 s, and validations.
    assert message.startswith("This fit takes about 17 min: it ends ")
    assert message.endswith("To find out what makes it faster: hasten advise train.py")
    now = datetime(2026, 11, 23, 23, 0)
    assert pace.moment(datetime(2026, 11, 24, 1, 5), now) == "tomorrow at 01:05"
    assert (pace.about(30), pace.about(3590), pace.about(7000), pace.about(90_000)) == (
        "1 min", "60 min", "2 h", "1 day 1 h",
    )  # fmt: skip


def test_nothing_stands_between_the_loop_and_its_batches_where_nobody_looks() -> None:
    seen: list[bool] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(trainer.current_run.observers.pace.measures)

    for lines in (None, Lines()):
        fit(Classifier(), lines, callbacks=[Looks()], max_epochs=1)
    assert seen == [False] * BATCHES + [True] * BATCHES


def test_a_small_last_batch_and_large_batches_of_validation_do_not_change_what_is_counted(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(10, 8), torch.zeros(10, dtype=torch.long))
    trainer = quiet(max_epochs=3, logger=CSVLogger(tmp_path))
    trainer.fit(Classifier(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=10))
    lines = [json.loads(line) for line in (Path(trainer.log_dir or "") / "run.jsonl").read_text().splitlines()]
    # The first step may compile, and is not counted.
    assert sum(line["samples"] for line in lines if line["kind"] == "speed") == 3 * 10 - 4
