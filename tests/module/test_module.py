"""LightningModule: what it shows of a run, the methods a user overrides, and how it comes back from a checkpoint."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from hasten.loggers import CSVLogger
from tests.models import Classifier, loader, quiet, same_weights

# -- what a module shows


def test_a_module_on_its_own() -> None:
    model = Classifier()
    with pytest.raises(RuntimeError, match=r"Classifier is not attached to a Trainer\..*exists during fit"):
        _ = model.trainer
    assert (model.current_epoch, model.global_step, model.global_rank, model.local_rank) == (0, 0, 0, 0)
    assert (model.loggers, model.automatic_optimization, model.strict_loading) == ([], True, True)
    assert model.logger is model.fabric is model.device_mesh is model.example_input_array is None


def test_a_module_in_a_run(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append((self.current_epoch, self.global_step, self.global_rank, self.local_rank))

    model = Looks()
    loggers = [CSVLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="b")]
    trainer = quiet(max_epochs=2, limit_train_batches=2, logger=loggers)
    trainer.fit(model, loader())
    assert seen == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 2, 0, 0), (1, 3, 0, 0)]
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
    assert L.LightningModule().device == torch.device("cpu")


def test_the_trainer_is_known_to_modules_inside() -> None:
    class Outer(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Classifier()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.inner.log("inner", 3.0)
            assert self.inner.trainer is self.trainer
            return self.inner.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet()
    trainer.fit(Outer(), loader(8))
    assert trainer.callback_metrics["inner"] == 3.0


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
    # An example is no part of the model.
    assert list(model.state_dict()) == []
    assert list(model.buffers()) == []


def test_copies_and_pickles_are_the_model_alone() -> None:
    model = Classifier()
    quiet().fit(model, loader(8))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_weights(model, twin)
        assert twin.hparams == model.hparams
        with pytest.raises(RuntimeError, match="not attached"):
            _ = twin.trainer
        quiet().fit(twin, loader(8))


def test_freeze_and_unfreeze() -> None:
    model = Classifier()
    for call, on in ((model.freeze, False), (model.unfreeze, True)):
        call()
        assert {p.requires_grad for p in model.parameters()} == {on}
        assert {child.training for child in model.modules()} == {on}


def test_print(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Classifier()
    model.print("alone", 1, sep="-")
    assert capsys.readouterr().out == "alone-1\n"

    class Prints(Classifier):
        def on_train_start(self) -> None:
            self.print("in", "a run", sep="-")

    quiet().fit(Prints(), loader(8))
    assert capsys.readouterr().out == "in-a run\n"
    from hasten.runtime import Runtime

    monkeypatch.setattr(Runtime, "is_global_zero", property(lambda self: False))
    trainer = quiet()
    trainer.print("on another process")
    assert capsys.readouterr().out == ""


def test_all_gather_on_one_process_gives_tensors() -> None:
    seen: list[Any] = []

    class Gathers(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.all_gather({"a": torch.ones(2), "b": [3.5], "c": 2, "text": "x"}))
            return super().training_step(batch, batch_idx)

    quiet(limit_train_batches=1).fit(Gathers(), loader())
    assert torch.equal(seen[0]["a"], torch.ones(2))
    assert (seen[0]["b"][0].item(), seen[0]["c"].item(), seen[0]["text"]) == (3.5, 2, "x")
    assert seen[0]["c"].shape == ()


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


# -- what self.log hands on


class LoggedValues:
    def __init__(self) -> None:
        self.given: list[Any] = []

    def record(self, name: str, value: Any, options: tuple[Any, ...], batch_size: Any) -> None:
        self.given.append((name, value, options, batch_size))


DEFAULTS = (False, None, None, None, "mean", False, False, None, True, None, False)


def test_logging_without_a_trainer_is_told_once_a_class() -> None:
    class Alone(Classifier):
        pass

    with pytest.warns(UserWarning, match=r"self\.log\('a', \.\.\.\) in Alone did nothing") as caught:
        Alone().log("a", 1.0)
    Alone().log("b", 1.0)
    assert len(caught) == 1


def test_log_and_log_dict_hand_on_the_same_options() -> None:
    model, logged = Classifier(), LoggedValues()
    model.__dict__["_run_values"] = logged
    model.log("a", 1.0)
    model.log_dict({"a": 1.0, "b": 2.0})
    assert logged.given == [("a", 1.0, DEFAULTS, None)] * 2 + [("b", 2.0, DEFAULTS, None)]
    logged.given.clear()
    options: dict[str, Any] = {
        "prog_bar": True, "logger": False, "on_step": True, "on_epoch": False, "reduce_fx": "max",
        "enable_graph": True, "sync_dist": True, "sync_dist_group": "g", "add_dataloader_idx": False,
        "batch_size": 7, "rank_zero_only": True,
    }  # fmt: skip
    model.log("a", 1.0, **options)
    model.log_dict({"a": 1.0}, **options)
    expected = (True, False, True, False, "max", True, True, "g", False, None, True)
    assert logged.given == [("a", 1.0, expected, 7)] * 2


def test_a_module_in_fabrics_hands(tmp_path: Path) -> None:
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


def test_callbacks_of_the_module_replace_those_of_their_kind() -> None:
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
    class Sharded(Classifier):
        def configure_sharded_model(self) -> None:
            self.older = nn.Linear(2, 2)

        def configure_model(self) -> None:
            self.made_in = nn.Linear(2, 2).weight.dtype

    model = Sharded()
    batches = [tuple(t.double() if t.is_floating_point() else t for t in b) for b in loader(8)]
    quiet(precision="64-true").test(model, batches, verbose=False)
    assert model.made_in is torch.float64
    assert model.older.weight.dtype is torch.float64
