"""One XLA device: the weights of the plain loop, one compilation for each stage, nothing read between two intervals."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten as L
from tests.refusals import warned
from tests.xla.models import Manual, Net, loader, loss_of, network, optimizer_of, weights

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.skipif("PJRT_DEVICE" not in os.environ, reason="needs PJRT_DEVICE=CPU or TPU")


def trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{"accelerator": "tpu", "devices": 1, "enable_checkpointing": False, **quiet, **options})


def plain(optimizer_name: str, epochs: int, accumulate: int = 1, clip: float = 0.0) -> list[Tensor]:
    """Train by hand on the same device."""
    import torch_xla

    device = torch_xla.device()
    L.seed_everything(3, verbose=False)
    net = network().to(device)
    optimizer = optimizer_of(net, optimizer_name)
    for _ in range(epochs):
        for index, batch in enumerate(loader()):
            loss = loss_of(net, [tensor.to(device) for tensor in batch])
            if index % accumulate == 0:
                optimizer.zero_grad()
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
            torch_xla.sync()
    return weights(net)


def count(name: str) -> int:
    from torch_xla.debug import metrics

    return metrics.counter_value(name) or 0


def reads() -> int:
    """How many times values came from the device to the host."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("TransferFromDeviceTime")
    return 0 if found is None else int(found[0])


@pytest.mark.parametrize("kind", [Net, Manual])
@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 0.0), ("momentum", 0.0), ("adamw", 1e-7)])
def test_weights_are_those_of_the_plain_loop(kind: type[Net], optimizer: str, tolerance: float) -> None:
    wanted = plain(optimizer, epochs=2)
    L.seed_everything(3, verbose=False)
    module = kind(optimizer)
    trainer(max_epochs=2).fit(module, loader())
    for mine, theirs in zip(weights(module), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def test_accumulation_and_clipping_are_those_of_the_plain_loop() -> None:
    wanted = plain("sgd", epochs=2, accumulate=2, clip=0.1)
    L.seed_everything(3, verbose=False)
    module = Net("sgd")
    trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1).fit(module, loader())
    for mine, theirs in zip(weights(module), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


def test_fabric_has_the_weights_of_the_plain_loop() -> None:
    wanted = plain("momentum", epochs=2)
    fabric = L.Fabric(accelerator="tpu", devices=1)
    fabric.launch()
    L.seed_everything(3, verbose=False)
    net = network()
    net, optimizer = fabric.setup(net, optimizer_of(net, "momentum"))
    data = fabric.setup_dataloaders(loader())
    for _ in range(2):
        for batch in data:
            optimizer.zero_grad()
            fabric.backward(loss_of(net, batch))
            optimizer.step()
    assert fabric.device.type == "xla"
    assert fabric.strategy.steps.graphs["train"] <= 2
    for mine, theirs in zip(weights(net), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_compiles_once_and_so_does_validation(optimizer: str) -> None:
    run = trainer(max_epochs=3, log_every_n_steps=5)
    module = Net(optimizer)
    # Widths of its own: graphs of other tests would be found in the cache.
    width = {"sgd": 24, "adamw": 28}[optimizer]
    module.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 2))
    run.fit(module, loader(), loader(12))
    assert run.strategy.steps.graphs == {"train": 1, "validate": 1}


def test_nothing_is_read_between_two_logging_intervals() -> None:
    seen: list[int] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(reads())

    trainer(max_epochs=1, log_every_n_steps=5, callbacks=[Watch()], num_sanity_val_steps=0).fit(Net(), loader(80))
    steps = [after - before for before, after in itertools.pairwise(seen)]
    # The interval after batches 4, 9 and 14 reads once each: the loss and what was logged together.
    assert [index for index, read in enumerate(steps) if read] == [4, 9, 14]
    assert max(steps) == 1


def test_other_shapes_are_told_and_the_last_batch_is_named() -> None:
    with warned(UserWarning, says=("'train'", "(2, 8)", "drop_last=True")):
        trainer(max_epochs=1).fit(Net(dropout=0.0), loader(22))


def test_graphs_that_keep_changing_are_told() -> None:
    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            for _ in range(batch_idx):  # A number of operations that depends on the step.
                loss = loss * 1.5
            return loss

    with pytest.warns(UserWarning, match="though the shapes of its batch are not new"):
        trainer(max_epochs=1).fit(Reads("sgd"), loader())


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    def run(path: Path | None = None, **options: Any) -> Net:
        L.seed_everything(5, verbose=False)
        module = Net("adamw")
        trainer(max_epochs=3, enable_checkpointing=True, default_root_dir=tmp_path, **options).fit(
            module, loader(shuffle=True), ckpt_path=path
        )
        return module

    saves = L.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=13, save_top_k=-1, filename="{step}")
    whole = run(callbacks=[saves])
    path = tmp_path / "step=13.ckpt"
    stored = torch.load(path, weights_only=True)
    assert {tensor.device.type for tensor in stored["state_dict"].values()} == {"cpu"}
    resumed = run(path, callbacks=[L.callbacks.ModelCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=13)])
    for mine, theirs in zip(weights(resumed), weights(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_weights_in_16_bits(precision: Any, dtype: torch.dtype) -> None:
    L.seed_everything(3, verbose=False)
    module = Net("adamw", dropout=0.0)
    run = trainer(max_epochs=4, precision=precision)
    run.fit(module, loader(), loader(8))
    assert module.net[0].weight.dtype == dtype
    assert type(run.runtime.precision).__name__ == "XLAPrecision"
    assert float(run.callback_metrics["val_loss"]) < 2


def test_mixed_precision_computes_in_bfloat16() -> None:
    class Watched(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.kind = self.net(batch[0]).dtype
            return super().training_step(batch, batch_idx)

    module = Watched()
    trainer(max_epochs=1, precision="bf16-mixed").fit(module, loader(8))
    assert (module.kind, module.net[0].weight.dtype) == (torch.bfloat16, torch.float32)


def test_tied_weights_stay_tied_and_predictions_come_to_the_host() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__("adamw")
            self.other = torch.nn.Linear(8, 16)
            self.other.weight = self.net[0].weight

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

    module = Tied()
    run = trainer(max_epochs=1)
    run.fit(module, loader(8))
    assert module.other.weight is module.net[0].weight
    predictions = run.predict(module, loader(8))
    assert [tensor.device.type for tensor in predictions] == ["cpu", "cpu"]


def test_the_profiler_names_what_a_run_does() -> None:
    from hasten.profilers import XLAProfiler

    run = trainer(max_epochs=1, profiler=XLAProfiler(port=9123))
    run.fit(Net(), loader(8))
    assert run.profiler._batches == 2
    assert not run.profiler._open


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ddp"}, "on TPUs use one of 'auto', 'single_xla', 'xla', 'xla_fsdp'"),
        ({"strategy": "single_tpu"}, "Write strategy='single_xla'"),
        ({"strategy": "tpu_spawn"}, "Write strategy='xla'"),
        ({"strategy": "xla_fsdp", "num_nodes": 2}, "one machine"),
        ({"precision": "16-mixed"}, "bf16-mixed"),
        ({"devices": [0, 1]}, r"a list names one device"),
        ({"compile": True}, "compiles each step itself"),
        ({"accelerator": "cpu", "strategy": "xla"}, "Use accelerator='tpu'"),
    ],
)
def test_what_xla_does_not_do_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        trainer(max_epochs=1, **options).fit(Net(), loader(8))


def test_devices_are_found() -> None:
    run = trainer(devices="auto")
    assert type(run.strategy).__name__ == "SingleDeviceXLAStrategy"
    assert type(trainer(accelerator="xla", devices=[0]).strategy).__name__ == "SingleDeviceXLAStrategy"
    assert type(trainer(accelerator="auto", strategy="single_xla").accelerator).__name__ == "XLAAccelerator"


@pytest.mark.tpu
def test_a_tpu_trains() -> None:
    module = Net("adamw")
    module.net = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.Linear(20, 2))
    run = trainer(max_epochs=2, precision="bf16-true")
    run.fit(module, loader(), loader(8))
    assert run.strategy.steps.graphs == {"train": 1, "validate": 1}
