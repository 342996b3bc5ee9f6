"""DeepSpeed's engine behind Trainer and Fabric: the numbers of one process. ``make deepspeed`` runs all of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten._lib.optional import installed
from hasten.callbacks import BackboneFinetuning, EMAWeightAveraging, ModelCheckpoint
from hasten.checkpoint import files
from hasten.checkpoint.flat import boxes
from hasten.machine.host import LockWatch
from hasten.optim import in_backward
from hasten.plugins import DeepSpeedPrecision, HalfPrecision
from hasten.report import summarize
from hasten.strategies import DeepSpeedStrategy
from hasten_deepspeed.config import CONFIG_VARIABLE, EngineSettings, read_config
from hasten_tools.commands.consolidate import consolidate

needs_deepspeed = pytest.mark.skipif(not installed("deepspeed"), reason="needs deepspeed: make deepspeed")


class Net(L.LightningModule):
    """A model with parameters of uneven sizes, one of them its own, and one that is frozen."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = not manual
        self.optimizer_class = optimizer
        self.embed, self.head = nn.Linear(5, 33), nn.Linear(33, 3)
        self.body = nn.Sequential(nn.Linear(33, 33), nn.Tanh(), nn.LayerNorm(33))
        self.scale = nn.Parameter(torch.ones(3))
        self.embed.bias.requires_grad_(False)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x))) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append("step")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer_class is None:
            return None
        # The biases are in a group of their own.
        groups = [
            {"params": [p for name, p in self.named_parameters() if "bias" not in name]},
            {"params": [p for name, p in self.named_parameters() if "bias" in name], "lr": 0.01, "weight_decay": 0.0},
        ]
        optimizer = self.optimizer_class(groups, lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class SaveEach(L.Callback):
    """Saves a checkpoint at the end of each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def loader(batch_size: int, samples: int) -> DataLoader[Any]:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3] ** 2), batch_size=batch_size)


def fit(
    devices: int, strategy: Any, folder: Path, net: Net | None = None, *, ckpt_path: Path | None = None, **options: Any
) -> tuple[L.Trainer, Net, dict[str, Any]]:
    """Train on the same batches, whatever the number of devices; return the last checkpoint, too."""
    net = Net() if net is None else net
    arguments = {
        "max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "callbacks": [SaveEach(folder)], "default_root_dir": folder,
    } | options  # fmt: skip
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **arguments)
    # Twelve batches of eight are six steps; nine samples are an uneven evaluation on two processes.
    trainer.fit(net, loader(8 // devices, 48), loader(4, 9), ckpt_path=ckpt_path)
    return trainer, net, saved(folder / "1.ckpt")


def saved(path: Path) -> dict[str, Any]:
    checkpoint = files.load(path)
    return checkpoint.whole() if hasattr(checkpoint, "whole") else checkpoint


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    """Compare weights and optimizer states of two checkpoints, entry by entry."""
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name].float(), value.float(), atol=tolerance, rtol=tolerance)
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["state"].keys() == other["state"].keys()
    for index, entries in other["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(
                torch.as_tensor(mine["state"][index][key]).float(), torch.as_tensor(value).float(),
                atol=tolerance, rtol=tolerance, msg=lambda text, at=(index, key): f"{at}: {text}",
            )  # fmt: skip
    for group, expected in zip(mine["param_groups"], other["param_groups"], strict=True):
        assert group["params"] == expected["params"]
        assert group["lr"] == pytest.approx(expected["lr"])
    assert ours["global_step"] == theirs["global_step"]


# -- training


@needs_deepspeed
@pytest.mark.world_size(2)
def test_each_stage_trains_and_saves_as_one_process_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    one, _, expected = fit(1, "auto", tmp_path / "one")
    for stage in (1, 2, 3):
        folder = tmp_path / f"stage{stage}"
        trainer, net, ours = fit(2, f"deepspeed_stage_{stage}", folder)
        assert_close(ours, expected, 1e-6)
        assert net.seen == ["step"] * 6
        for name, value in one.callback_metrics.items():
            torch.testing.assert_close(trainer.callback_metrics[name], value, atol=1e-5, rtol=1e-5)
        # After the run, too; what the program has changed since is saved.
        trainer.save_checkpoint(folder / "after.ckpt")
        assert_close(saved(folder / "after.ckpt"), ours, 0.0)
        # A folder of the first epoch, on two processes, under another stage and without DeepSpeed.
        resumed = fit(2, DeepSpeedStrategy(stage=stage), folder / "again", ckpt_path=folder / "0.ckpt")[2]
        assert_close(resumed, ours, 0.0)
        other = fit(2, DeepSpeedStrategy(stage=stage % 3 + 1), folder / "other", ckpt_path=folder / "0.ckpt")[2]
        assert_close(other, expected, 1e-6)
        if trainer.is_global_zero:
            file = consolidate(str(folder / "1.ckpt"), folder / "whole.ckpt")
            assert_close(torch.load(file, weights_only=True), expected, 1e-6)
    alone = fit(1, "auto", tmp_path / "alone", ckpt_path=tmp_path / "stage3" / "0.ckpt")[2]
    assert_close(alone, expected, 1e-6)


@needs_deepspeed
@pytest.mark.world_size(2)
def test_bfloat16_manual_optimization_and_an_optimizer_of_the_configuration(tmp_path: Path) -> None:
    _, _, expected = fit(2, "deepspeed_stage_1", tmp_path / "bf16-1", precision="bf16-mixed")
    for stage in (2, 3):
        folder = tmp_path / f"bf16-{stage}"
        _, _, ours = fit(2, DeepSpeedStrategy(stage=stage), folder, precision="bf16-mixed")
        # Gradients are summed up in another order, in 16 bits.
        assert_close(ours, expected, 2e-2)
        resumed = fit(
            2, DeepSpeedStrategy(stage=stage), folder / "again", precision="bf16-mixed", ckpt_path=folder / "0.ckpt"
        )[2]
        assert_close(resumed, ours, 0.0)
        assert resumed["state_dict"]["head.weight"].dtype == torch.float32
    plain = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    by_hand = fit(1, "auto", tmp_path / "by_hand", Net(manual=True), **plain)[2]
    for stage in (1, 3):
        ours = fit(2, DeepSpeedStrategy(stage=stage), tmp_path / f"manual{stage}", Net(manual=True), **plain)[2]
        assert_close(ours, by_hand, 1e-6)
    config = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": "auto",
    }
    trainer, _, ours = fit(2, DeepSpeedStrategy(config=config), tmp_path / "config", Net(optimizer=None))
    assert type(trainer.lr_scheduler_configs[0].scheduler).__name__ == "WarmupLR"
    again = fit(
        2, DeepSpeedStrategy(config=config), tmp_path / "config2", Net(optimizer=None),
        ckpt_path=tmp_path / "config" / "0.ckpt",
    )[2]  # fmt: skip
    assert_close(again, ours, 0.0)


class Configured(Net):
    """Makes its parts in ``configure_model``, where stage 3 divides each parameter at once."""

    def __init__(self) -> None:
        super().__init__()
        del self.body

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            torch.manual_seed(4)
            self.body = nn.Sequential(nn.Linear(33, 33), nn.Tanh(), nn.LayerNorm(33))
            self.was_divided = hasattr(self.body[0].weight, "ds_id")


@needs_deepspeed
@pytest.mark.world_size(2)
def test_parts_made_in_configure_model_and_evaluation_alone(tmp_path: Path) -> None:
    expected = fit(2, "deepspeed_stage_2", tmp_path / "two", Configured())[2]
    _, net, ours = fit(2, "deepspeed_stage_3", tmp_path / "three", Configured())
    assert net.was_divided
    # Parameters stay divided after fit, and a second one goes on with them.
    assert summarize(net).total_parameters == summarize(Net()).total_parameters
    again = fit(2, "deepspeed_stage_3", tmp_path / "twice", net)[2]
    first = fit(2, "deepspeed_stage_2", tmp_path / "first", once := Configured())[2]
    assert_close(again, fit(2, "deepspeed_stage_2", tmp_path / "second", once)[2], 1e-6)
    assert_close(first, ours, 1e-6)
    assert_close(ours, expected, 1e-6)
    resumed = fit(2, "deepspeed_stage_3", tmp_path / "r", Configured(), ckpt_path=tmp_path / "three" / "0.ckpt")[2]
    assert_close(resumed, ours, 0.0)
    values = []
    for strategy in ("deepspeed_stage_3", "deepspeed_stage_2", "ddp"):
        quiet = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False)
        result = quiet.validate(Configured(), loader(4, 9), ckpt_path=tmp_path / "three" / "1.ckpt", verbose=False)
        values.append(result[0]["val_loss"])
    assert values == pytest.approx([values[0]] * 3, abs=1e-6)


@needs_deepspeed
@pytest.mark.world_size(2)
def test_fabric_trains_and_saves_with_an_engine(tmp_path: Path) -> None:
    def train(strategy: Any, devices: int, path: Path | None = None) -> tuple[dict[str, Any], Any]:
        fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        fabric.launch()
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.02))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if path is not None:
            fabric.load(path, state)
        batches = list(fabric.setup_dataloaders(loader(8 // devices, 48)))
        for step in range(state["step"], 4):
            for x, y in batches[step * 2 : step * 2 + 2]:
                fabric.backward(nn.functional.mse_loss(model(x), y) / 2)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and path is None:
                fabric.save(tmp_path / f"{strategy}.ckpt", {**state, "step": 2})
        fabric.save(tmp_path / f"{strategy}-end.ckpt", state)
        found = saved(tmp_path / f"{strategy}-end.ckpt")
        fabric.strategy.teardown()
        return found, fabric

    expected, _ = train("single_device", 1)
    for strategy in ("deepspeed_stage_2", "deepspeed_stage_3"):
        found, fabric = train(strategy, 2)
        for name, value in expected["model"].items():
            torch.testing.assert_close(found["model"][name], value, atol=1e-6, rtol=1e-6)
        again, _ = train(strategy, 2, tmp_path / f"{strategy}.ckpt")
        for name, value in found["model"].items():
            assert torch.equal(again["model"][name], value)
    net = Net()
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="deepspeed_stage_3")
    fabric.launch()
    model = fabric.setup_module(net)
    with torch.no_grad():
        assert model(torch.ones(2, 5)).shape == (2, 3)
    with pytest.raises(ValueError, match=r"model, optimizer = fabric.setup\(model, optimizer\)"):
        fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="the engine clips gradients when it steps"):
        fabric.clip_gradients(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), max_norm=1.0)
    fabric.strategy.teardown()


# -- an optimizer whose state is kept on the host


class Kept(Net):
    """Keeps its optimizer and a scheduler, and steps the scheduler itself; the rate is 0 from the fourth step on."""

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.AdamW(self.parameters(), lr=0.02)
        self.own_scheduler = torch.optim.lr_scheduler.LambdaLR(self.own, lambda step: float(step < 3))
        return self.own

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.own_scheduler.step()


class Chained(Net):
    """Has a schedule of two parts; the rate is 0 from the fourth step on."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=torch.tensor(0.02), weight_decay=0.1)
        parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _, rate=rate: rate) for rate in (1.0, 0.0)]
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def of_kind(name: str) -> Any:
    """Return torch's Adam or AdamW with a weight decay, by which they differ."""
    return partial(getattr(torch.optim, name), weight_decay=0.1, betas=(0.8, 0.99), eps=1e-7)


@needs_deepspeed
@pytest.mark.world_size(2)
@pytest.mark.parametrize("adam", ["Adam", "AdamW"])
def test_offload_trains_torchs_adam_as_one_process_does_and_resumes_bit_for_bit(adam: str, tmp_path: Path) -> None:
    _, _, expected = fit(1, "auto", tmp_path / "one", Net(of_kind(adam)))
    for stage in (1, 2, 3):
        folder, strategy = tmp_path / f"stage{stage}", f"deepspeed_stage_{stage}_offload"
        trainer, net, ours = fit(2, strategy, folder, Net(of_kind(adam)))
        assert_close(ours, expected, 2e-6)
        assert [type(each).__name__ for each in trainer.optimizers] == ["DeepSpeedCPUAdam"]
        scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
        assert scheduler.optimizer is trainer.optimizers[0]
        assert net.seen == ["step"] * 6
        resumed = fit(2, strategy, folder / "again", Net(of_kind(adam)), ckpt_path=folder / "0.ckpt")[2]
        assert_close(resumed, ours, 0.0)
    # With and without it, from what the other has saved.
    alone = fit(1, "auto", tmp_path / "alone", Net(of_kind(adam)), ckpt_path=tmp_path / "stage2" / "0.ckpt")[2]
    assert_close(alone, expected, 2e-6)
    offloaded = fit(
        2, "deepspeed_stage_2_offload", tmp_path / "back", Net(of_kind(adam)), ckpt_path=tmp_path / "one" / "0.ckpt"
    )[2]
    assert_close(offloaded, expected, 2e-6)


@needs_deepspeed
@pytest.mark.world_size(2)
def test_offload_follows_the_schedulers_of_the_replaced_optimizer(tmp_path: Path) -> None:
    for kind in (Kept, Chained):
        for stage in (2, 3):
            folder = tmp_path / f"{kind.__name__}{stage}"
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*lr_scheduler.*")
                _, net, ours = fit(2, f"deepspeed_stage_{stage}_offload", folder, kind())
            middle = saved(folder / "0.ckpt")["state_dict"]
            # Three steps an epoch: those of the second have a rate of 0.
            for key, value in ours["state_dict"].items():
                assert torch.equal(value, middle[key])
            assert not torch.equal(middle["head.weight"], Net().head.weight)
            if isinstance(net, Kept):
                assert net.own.param_groups[0]["lr"] == 0.0
                with pytest.raises(RuntimeError, match="DeepSpeedCPUAdam has taken its place"):
                    net.own.step()


@needs_deepspeed
@pytest.mark.world_size(1)
def test_offload_says_once_what_it_has_replaced_and_keeps_what_the_program_wants(tmp_path: Path) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    expected = fit(1, "auto", tmp_path / "one")[2]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hasten").addHandler(handler)
    strategy = DeepSpeedStrategy(stage=2, offload_optimizer=True)
    for again in range(2):
        assert_close(fit(1, strategy, tmp_path / f"offload{again}")[2], expected, 2e-6)
    messages = [text for text in said if "DeepSpeedCPUAdam" in text]
    assert len(messages) == 1
    assert "torch.optim.AdamW was replaced" in messages[0]
    assert "DeepSpeedCPUAdam(self.parameters(), lr=0.02, weight_decay=0.01, adamw_mode=True)" in messages[0]
    # The program's own, and torch's where the configuration says so: nothing is replaced.
    said.clear()
    trainer, _, ours = fit(
        1, "deepspeed_stage_2_offload", tmp_path / "own", Net(partial(DeepSpeedCPUAdam, weight_decay=0.01))
    )
    assert_close(ours, expected, 2e-6)
    kept = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    unforced = DeepSpeedStrategy(
        config={
            "zero_optimization": kept,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
    )
    for kind in (partial(torch.optim.AdamW, amsgrad=True, maximize=True), OwnAdam):
        trainer, _, ours = fit(1, unforced, tmp_path / "torch", Net(kind))
        assert isinstance(trainer.optimizers[0], torch.optim.AdamW)
        assert_close(ours, fit(1, "auto", tmp_path / "torch1", Net(kind))[2], 2e-6)
    assert not [text for text in said if "replaced" in text]
    with pytest.raises(ValueError, match=r"decoupled_weight_decay=True.*Return torch\.optim\.AdamW"):
        fit(
            1, "deepspeed_stage_2_offload", tmp_path / "adam", Net(torch.optim.Adam), ckpt_path=tmp_path / "one/0.ckpt"
        )  # fmt: skip


@needs_deepspeed
@pytest.mark.world_size(2)
def test_fabric_offloads_torchs_adam() -> None:
    weights = []
    for strategy, devices in (("single_device", 1), ("deepspeed_stage_2_offload", 2)):
        fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
        fabric.launch()
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.02, weight_decay=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x, y in fabric.setup_dataloaders(loader(8 // devices, 48)):
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        weights.append({key: value.detach().clone() for key, value in net.state_dict().items()})
        fabric.strategy.teardown()
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, atol=2e-6, rtol=2e-6)


# -- what is refused


def lbfgs(groups: Any, lr: float) -> Any:
    return torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]], lr=lr)


def stepping_in_backward(groups: Any, lr: float) -> Any:
    return in_backward(torch.optim.SGD, groups, lr=lr)


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(self.body.parameters(), lr=0.1)]


class OwnClipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, **how: Any) -> None:
        pass


@needs_deepspeed
@pytest.mark.world_size(1)
def test_one_process_and_what_the_engine_cannot_do(tmp_path: Path) -> None:
    expected = fit(1, "auto", tmp_path / "one")[2]
    assert_close(fit(1, "deepspeed_stage_2", tmp_path / "two")[2], expected, 1e-6)
    for net, options, message in (
        (TwoOptimizers(manual=True), {"accumulate_grad_batches": 1, "gradient_clip_val": None}, "has one optimizer"),
        (Net(lbfgs), {}, "LBFGS and strategy='deepspeed'"),
        (Net(stepping_in_backward), {}, r"in_backward\(SGD\) and strategy='deepspeed'"),
        (OwnClipping(), {}, "configure_gradient_clipping.* the engine clips"),
        (Net(), {"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        (Net(), {"on_bad_loss": "skip"}, "on_bad_loss='skip'"),
        (Net(), {"compile": True}, "compile"),
        (Net(), {"val_check_interval": 3}, "Use a multiple of 2"),
        (Net(), {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging and strategy='deepspeed'"),
        (Net(), {"callbacks": [BackboneFinetuning()]}, "backbone"),
        (Net(), {"precision": "64-true"}, "not DoublePrecision"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            fit(1, "deepspeed_stage_2", tmp_path / "refused", net, **options)

    class SaveAnywhere(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "open.ckpt")

    with pytest.raises(RuntimeError, match="gradients have been computed that no step has used yet"):
        fit(1, "deepspeed_stage_1", tmp_path / "open", callbacks=[SaveAnywhere()])
    # Other strategies read what was saved with weights alone, and this one reads files.
    again = fit(1, "deepspeed_stage_3", tmp_path / "file", ckpt_path=tmp_path / "one" / "0.ckpt")[2]
    assert_close(again, expected, 1e-6)
    every = ModelCheckpoint(dirpath=tmp_path / "timed", train_time_interval={"microseconds": 1}, save_top_k=-1)
    fit(
        1,
        "deepspeed_stage_2",
        tmp_path / "timed2",
        enable_checkpointing=True,
        callbacks=[every, SaveEach(tmp_path / "timed2")],
    )
    assert len(list((tmp_path / "timed").iterdir())) >= 6


# -- without the package


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten_deepspeed.strategy.installed", lambda name: False)
    with refused(ImportError, says="[deepspeed]'"):
        L.Trainer(strategy="deepspeed_stage_2_offload", accelerator="cpu")


@pytest.fixture
def _as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten_deepspeed.strategy.installed", lambda name: True)


TWO, FP16 = {"zero_optimization": {"stage": 2}}, {"fp16": {"enabled": True}}


def trainer(**arguments: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", **arguments)


class OwnAdam(torch.optim.AdamW):
    pass


def with_two_decays(groups: Any, lr: float) -> Any:
    groups[1]["decoupled_weight_decay"] = True
    return torch.optim.Adam(groups, lr=lr)


@pytest.mark.usefixtures("_as_if_installed")
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (partial(torch.optim.Adam, amsgrad=True), r"Adam\(amsgrad=True\) with offload_optimizer"),
        (partial(torch.optim.AdamW, maximize=True), r"AdamW\(maximize=True\) with offload_optimizer"),
        (partial(torch.optim.AdamW, differentiable=True), r"Leave differentiable out\.$"),
        (OwnAdam, r"OwnAdam is a subclass of torch\.optim\.AdamW.* Use torch\.optim\.AdamW, or keep OwnAdam"),
        (torch.optim.SGD, r"SGD is not one of them\. Use torch\.optim\.AdamW, or keep SGD"),
        (with_two_decays, "decoupled_weight_decay differs by parameter group"),
    ],
)
def test_optimizers_that_offload_cannot_step_are_refused_with_what_keeps_them(
    optimizer: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        fit(1, "deepspeed_stage_2_offload", tmp_path, Net(optimizer))
    line = (
        "strategy=DeepSpeedStrategy(config={'zero_optimization': {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}, "
        "'zero_force_ds_cpu_optimizer': False, 'zero_allow_untested_optimizer': True})."
    )
    assert str(refused.value).endswith(line) == ("differentiable=True" not in str(refused.value))


@pytest.mark.usefixtures("_as_if_installed")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeepSpeedStrategy(stage=4), r"DeepSpeedStrategy\(stage=4\)"),
        (lambda: DeepSpeedStrategy(zero_optimization=False), "Use strategy='ddp'"),
        (lambda: DeepSpeedStrategy(offload_parameters=True), "with stage=3 alone"),
        (lambda: DeepSpeedStrategy(config={"zero_optimization": {"stage": 0}}), "strategy='ddp'"),
        (lambda: DeepSpeedStrategy(stage=3, config=TWO), r"config=..., stage=3"),
        (lambda: DeepSpeedStrategy(config=3), "use a dict or the path"),  # type: ignore[arg-type]
        (lambda: DeepSpeedStrategy(config="nowhere.json"), "there is no such file"),
        (
            lambda: trainer(strategy=DeepSpeedStrategy(config=TWO | FP16), precision="bf16-mixed"),
            "contradict each other",
        ),
        (lambda: trainer(strategy="deepspeed_stage_3_offload_nvme"), "'nvme' and accelerator='cpu'"),
        (lambda: trainer(strategy="deepspeed", plugins=HalfPrecision("bf16-true")), "HalfPrecision"),
        (lambda: DeepSpeedPrecision("64-true"), "64-true"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_cannot_be_trained_with_are_refused(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        make()


def test_the_configuration_is_completed_and_contradictions_name_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}))
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    config = read_config(None)
    assert config is not None
    settings = EngineSettings(config)
    settings.set_precision("bf16-mixed")
    settings.take_accumulation(4, "Trainer")
    settings.take_clipping(0.5, "Trainer")
    settings.take_batch_size(None, world_size=2)
    assert settings.take_batch_size(8, world_size=2) == 8
    assert settings.config["bf16"] == {"enabled": True}
    assert settings.config["train_batch_size"] == 8 * 4 * 2
    assert settings.config["gradient_clipping"] == 0.5
    assert config == {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    for said, call, message in (
        ({"gradient_accumulation_steps": 3}, lambda one: one.take_accumulation(4, "Trainer"), "grad_batches=4"),
        ({"gradient_clipping": 1.0}, lambda one: one.take_clipping(0.5, "Trainer"), "gradient_clip_val=0.5.*1.0"),
        ({"train_micro_batch_size_per_gpu": 4}, lambda one: one.take_batch_size(8, 2), "batch_size=8.*: 4"),
        ({"train_batch_size": 4}, lambda one: one.take_batch_size(8, 2), "'train_batch_size': 4"),
        ({"bf16": {"enabled": False}}, lambda one: one.set_precision("bf16-true"), "'enabled': False"),
        ({"optimizer": {"params": {"lr": "auto"}}}, lambda one: one.check(), "optimizer.params.lr is 'auto'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(EngineSettings({"zero_optimization": {"stage": 2}, **said}))
    unclipped = EngineSettings({"zero_optimization": {"stage": 1}, "gradient_clipping": 1.0})
    unclipped.take_clipping(0.0, "Trainer")
    assert unclipped.config["gradient_clipping"] == 1.0


def test_a_range_of_elements_is_parts_with_straight_sides_in_its_order() -> None:
    for shape in ((), (1,), (7,), (3, 4), (2, 3, 4), (2, 1, 3, 2)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for start in range(whole.numel() + 1):
            for stop in range(start, whole.numel() + 1):
                found = [
                    whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].reshape(-1)
                    for offsets, sizes in boxes(shape, start, stop)
                ]
                assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))


@pytest.mark.parametrize("is_old", [True, False])
def test_a_lock_that_a_build_has_left_is_named_and_that_of_another_rank_is_not(
    is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.file_baton import FileBaton

    monkeypatch.setattr("hasten.machine.host._LOCK_SECONDS", 1.0)
    lock = tmp_path / "lock"
    lock.touch()
    if is_old:
        os.utime(lock, (0, 0))
    watch = LockWatch()
    said: list[str] = []

    def remove_when_said() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until and not any("extension" in text for text in said):
            said.append(capsys.readouterr().err)
            time.sleep(0.05)
        lock.unlink()

    thread = threading.Thread(target=remove_when_said)
    thread.start()
    FileBaton(str(lock)).wait()
    thread.join()
    watch.end()
    text = "".join(said)
    assert (f"rm {lock}" in text) == is_old
    assert ("another rank of this run" in text) == (not is_old)


def test_hasten_imports_without_deepspeed() -> None:
    code = "import hasten.strategies, sys; assert not any(n.split('.')[0] == 'deepspeed' for n in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
