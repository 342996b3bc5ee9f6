"""LightningModule: what it shows of a run, the methods a user overrides, and how it comes back from a checkpoint."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from hasten.loggers import CSVLogger
from hasten.runtime import Runtime
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned

# -- what a module shows


def test_a_module_without_a_run() -> None:
    model = Classifier()
    with refused(RuntimeError, fix="__init__"):
        _ = model.trainer
    assert (model.current_epoch, model.global_step, model.global_rank, model.local_rank) == (0, 0, 0, 0)
    assert (model.loggers, model.automatic_optimization, model.strict_loading) == ([], True, True)
    assert model.logger is model.fabric is model.device_mesh is model.example_input_array is None
    for call, on in ((model.freeze, False), (model.unfreeze, True)):
        assert call() is model
        assert {p.requires_grad for p in model.parameters()} == {on}
        assert {child.training for child in model.modules()} == {on}


def test_a_module_in_a_run(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Outer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Classifier()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.inner.log("inner", 3.0)
            assert self.inner.trainer is self.trainer
            gathered = self.all_gather({"a": torch.ones(2), "b": [3.5], "c": 2, "text": "x"})
            seen.append((self.current_epoch, self.global_step, self.global_rank, self.local_rank, gathered))
            return self.inner.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Outer()
    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
    trainer = quiet(max_epochs=2, limit_train_batches=2, logger=loggers)
    trainer.fit(model, loader())
    assert [entry[:4] for entry in seen] == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 2, 0, 0), (1, 3, 0, 0)]
    gathered = seen[0][4]
    assert torch.equal(gathered["a"], torch.ones(2))
    assert (gathered["b"][0].item(), gathered["c"].item(), gathered["text"]) == (3.5, 2, "x")
    assert gathered["c"].shape == ()
    assert trainer.callback_metrics["inner"] == 3.0
    assert model.trainer is trainer
    assert (model.current_epoch, model.global_step) == (2, 4)
    assert model.logger is loggers[0]
    assert model.loggers == loggers
    assert model.loggers is not trainer.loggers
    assert model.device_mesh is None
    trainer.strategy.device_mesh = "a mesh"
    assert model.device_mesh == "a mesh"


def test_device_and_dtype_are_those_of_the_weights() -> None:
    model = Classifier()
    assert (model.device, model.dtype, model.on_gpu) == (torch.device("cpu"), torch.float32, False)
    model.double()
    assert model.dtype is torch.float64
    assert model.to("meta").device == torch.device("meta")

    class Counts(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.zeros(2, dtype=torch.int64, device="meta"))

    assert Counts().device == torch.device("meta")
    # Counts are not what a model computes in.
    assert Counts().dtype is torch.get_default_dtype()
    empty = L.LightningModule()
    assert empty.device == torch.device("cpu")
    empty.to("meta", torch.float64)
    assert (empty.device, empty.dtype, empty.float().dtype) == (torch.device("meta"), torch.float64, torch.float32)


def test_attributes_set_before_init_and_later() -> None:
    class Early(L.LightningModule):
        def __init__(self) -> None:
            self.automatic_optimization = False
            self.strict_loading = False
            self.example_input_array = [1]
            super().__init__()

    model = Early()
    assert (model.automatic_optimization, model.strict_loading) == (False, False)
    assert model.example_input_array == [1]
    model.example_input_array = torch.ones(2, 8)
    # An example is not a part of the model.
    assert list(model.state_dict()) == []
    assert list(model.buffers()) == []


def test_copies_and_pickles_are_the_model_alone() -> None:
    model = Classifier()
    quiet().fit(model, loader(8))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_weights(model, twin)
        assert twin.hparams == model.hparams
        with refused(RuntimeError, fix="__init__"):
            _ = twin.trainer
        quiet().fit(twin, loader(8))


def test_print(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Prints(Classifier):
        def on_train_start(self) -> None:
            self.print("in", "a run", sep="-")

    model = Prints()
    model.print("alone", 1, sep="-")
    quiet().fit(model, loader(8))
    assert capsys.readouterr().out == "alone-1\nin-a run\n"
    monkeypatch.setattr(Runtime, "is_global_zero", property(lambda self: False))
    quiet().print("on another process")
    assert capsys.readouterr().out == ""


@pytest.mark.world_size(2)
def test_all_gather_on_two_processes() -> None:
    class Gathers(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            rank = self.global_rank
            mine = {"a": torch.full((3,), float(rank)), "b": [torch.tensor(rank)], "c": rank + 1}
            found = self.all_gather(mine)
            assert torch.equal(found["a"], torch.tensor([[0.0] * 3, [1.0] * 3]))
            assert found["b"][0].tolist() == [0, 1]
            assert found["c"].tolist() == [1, 2]
            weight = torch.ones((), requires_grad=True)
            with torch.enable_grad(), torch.inference_mode(False):
                both = self.all_gather(weight * (rank + 2), sync_grads=True)
            assert both.requires_grad
            assert not self.all_gather(weight).requires_grad

    trainer = quiet(devices=2, strategy="ddp", limit_val_batches=1)
    trainer.validate(Gathers(), loader(8), verbose=False)
    assert trainer.world_size == 2


@pytest.mark.world_size(2)
def test_all_gather_of_two_shapes_is_refused_on_both_processes() -> None:
    class Gathers(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.all_gather(torch.zeros(2 + self.global_rank))

    trainer = quiet(devices=2, strategy="ddp", limit_val_batches=1)
    with refused(ValueError, fix="sync_dist=True", says=("(2,) on rank 0", "(3,) on rank 1")):
        trainer.validate(Gathers(), loader(8), verbose=False)


# -- what self.log hands on


def test_logging_without_a_trainer_warns_once_for_each_class() -> None:
    class Alone(Classifier):
        pass

    with warned(UserWarning, says="self.log('a'") as caught:
        Alone().log("a", 1.0)
    Alone().log("b", 1.0)
    assert len(caught) == 1


def test_log_and_log_dict_take_the_same_options() -> None:
    given: list[Any] = []

    class Logs(Classifier):
        def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
            given.append((name, value, inspect.signature(super().log).bind(name, value, **kwargs).arguments))

    options: dict[str, Any] = {
        "prog_bar": True, "logger": False, "on_step": True, "on_epoch": False, "reduce_fx": "max",
        "enable_graph": True, "sync_dist": True, "sync_dist_group": "g", "add_dataloader_idx": False,
        "batch_size": 7, "rank_zero_only": True,
    }  # fmt: skip
    Logs().log_dict({"a": 1.0, "b": 2.0}, **options)
    assert [entry[:2] for entry in given] == [("a", 1.0), ("b", 2.0)]
    assert options.items() <= given[0][2].items()


def test_a_module_set_up_by_a_fabric(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
    fabric = L.Fabric(accelerator="cpu", devices=1, loggers=loggers)
    fabric.launch()
    model = Classifier()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    assert model.fabric is fabric
    assert model.logger is loggers[0]
    assert model.loggers == loggers
    assert model.optimizers().param_groups is optimizer.param_groups
    for backward in (model.manual_backward, model.backward):
        optimizer.zero_grad()
        batch = next(iter(loader(4)))
        backward(wrapped.training_step(batch, 0))
        assert model.layers[0].weight.grad is not None
    assert model.all_gather(2.0).item() == 2.0
    fabric.logger.save()
    assert "train_loss" in (Path(loggers[0].log_dir) / "metrics.csv").read_text()


# -- callbacks and layers of the module


class Mine(EarlyStopping):
    pass


def kinds(trainer: L.Trainer) -> list[str]:
    return [type(callback).__name__ for callback in trainer.callbacks]


class Brings(Classifier):
    def __init__(self, callbacks: Any) -> None:
        super().__init__()
        self.brought = callbacks

    def configure_callbacks(self) -> Any:
        return self.brought


def test_callbacks_of_the_module_replace_those_of_their_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [EarlyStopping("train_loss"), Timer(), L.Callback()]
    trainer = quiet(logger=True, callbacks=given, limit_train_batches=1)
    for _ in range(2):
        trainer.fit(Brings([Mine("train_loss"), LearningRateMonitor()]), loader())
        assert kinds(trainer) == ["Timer", "Callback", "Mine", "LearningRateMonitor"]
    # One of a derived class stays.
    trainer = quiet(callbacks=[Mine("train_loss"), Timer()], limit_train_batches=1)
    trainer.fit(Brings(EarlyStopping("train_loss")), loader())
    assert kinds(trainer) == ["Mine", "Timer", "EarlyStopping"]


def test_checkpoints_of_the_module_come_last_and_work(tmp_path: Path) -> None:
    class Saves(ModelCheckpoint):
        pass

    trainer = quiet(enable_checkpointing=True, default_root_dir=tmp_path / "unused")
    trainer.fit(Brings([Saves(tmp_path, "{epoch}"), Timer()]), loader(8))
    assert kinds(trainer) == ["Timer", "Saves"]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0.ckpt"]


class Late(Classifier):
    """Makes a layer in configure_model."""

    def __init__(self, order: list[str] | None = None) -> None:
        super().__init__()
        self.order: list[str] = [] if order is None else order
        self.more: nn.Module | None = None

    def setup(self, stage: str) -> None:
        self.order.append("setup")

    def configure_model(self) -> None:
        self.order.append("configure_model")
        if self.more is None:
            self.more = nn.Linear(2, 2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 3

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(self.more, nn.Module)
        assert checkpoint["mine"] == 3
        self.order.append("on_load_checkpoint")

    def configure_optimizers(self) -> Any:
        self.order.append("configure_optimizers")
        return super().configure_optimizers()


def test_layers_made_in_configure_model_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    model, path = Late(), tmp_path / "late.ckpt"
    trainer = quiet()
    trainer.fit(model, loader(8))
    trainer.save_checkpoint(path)
    assert model.order == ["setup", "configure_model", "configure_optimizers"]
    assert len(trainer.optimizers[0].param_groups[0]["params"]) == 6
    again = Late.load_from_checkpoint(path, order=(order := []))
    assert order == ["configure_model", "on_load_checkpoint"]
    assert same_weights(model, again)
    resumed = Late()
    quiet(max_epochs=2).fit(resumed, loader(8), ckpt_path=path)
    assert resumed.order == ["setup", "configure_model", "on_load_checkpoint", "configure_optimizers"]


def test_layers_made_in_configure_model_have_the_precision_of_the_run() -> None:
    class Late(Classifier):
        def configure_model(self) -> None:
            self.made_in = nn.Linear(2, 2).weight.dtype

    class Sharded(Classifier):
        def configure_sharded_model(self) -> None:
            self.made_in = nn.Linear(2, 2).weight.dtype

    class Both(Late, Sharded):
        pass

    batches = [tuple(t.double() if t.is_floating_point() else t for t in b) for b in loader(8)]
    trainer, late, sharded = quiet(precision="64-true"), Late(), Sharded()
    trainer.test(late, batches, verbose=False)
    with warned(DeprecationWarning, says="configure_model"):
        trainer.test(sharded, batches, verbose=False)
    assert late.made_in is sharded.made_in is torch.float64
    with refused(RuntimeError, says="configure_sharded_model", fix="configure_model"):
        trainer.test(Both(), batches)
