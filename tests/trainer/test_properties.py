"""The Trainer's properties, before, during and after a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hasten as L
from tests.fakes import RowLogger, watching
from tests.models import Classifier, Several, loader, quiet
from tests.refusals import refused


def test_properties_before_anything_ran() -> None:
    trainer = quiet()
    assert (trainer.global_step, trainer.current_epoch, trainer.total_batch_idx) == (0, 0, -1)
    assert trainer.lightning_module is trainer.model is trainer.datamodule is None
    assert (trainer.optimizers, trainer.wrapped_optimizers, trainer.lr_scheduler_configs) == ([], [], [])
    assert trainer.train_dataloader is trainer.val_dataloaders is trainer.test_dataloaders is None
    assert trainer.predict_dataloaders is None
    assert trainer.num_training_batches == math.inf
    assert [trainer.num_val_batches, trainer.num_test_batches, trainer.num_predict_batches] == [[], [], []]
    assert trainer.num_sanity_val_batches == []
    assert not trainer.enable_validation
    assert not trainer.is_last_batch
    assert trainer.ckpt_path is None
    assert (trainer.world_size, trainer.num_nodes, trainer.num_devices, trainer.device_ids) == (1, 1, 1, [0])
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (0, 0, 0)
    assert trainer.is_global_zero
    assert trainer.distributed_sampler_kwargs is None
    assert trainer.precision == trainer.precision_plugin.precision == "32-true"
    assert trainer.scaler is None
    assert not trainer.received_sigterm
    assert trainer.callback_metrics == trainer.logged_metrics == trainer.progress_bar_metrics == {}
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy"
    assert type(trainer.accelerator).__name__ == "CPUAccelerator"
    with refused(ValueError, says="estimated_stepping_batches"):
        _ = trainer.estimated_stepping_batches
    with refused(AttributeError, says="save_checkpoint()"):
        trainer.save_checkpoint("x.ckpt")


def test_properties_of_a_run() -> None:
    model, trainer = Several(), quiet(max_epochs=2)
    train, first, second = loader(12), loader(8), loader(4)
    last: list[Any] = []

    def look(_: str, trainer: Any) -> None:
        last.append((trainer.is_last_batch, trainer.total_batch_idx))

    trainer.callbacks.append(watching(look, "on_train_batch_end"))
    trainer.fit(model, train, [first, second])
    assert last == [(False, 0), (False, 1), (True, 2), (False, 3), (False, 4), (True, 5)]
    assert trainer.lightning_module is trainer.model is model
    assert trainer.train_dataloader.dataset is train.dataset
    assert [one.dataset for one in trainer.val_dataloaders] == [first.dataset, second.dataset]
    assert trainer.num_training_batches == 3
    assert trainer.num_val_batches == trainer.num_sanity_val_batches == [2, 1]
    assert trainer.enable_validation
    assert [optimizer.optimizer for optimizer in trainer.wrapped_optimizers] == trainer.optimizers
    trainer.validate(model, first, verbose=False)
    assert trainer.val_dataloaders.dataset is first.dataset
    trainer.test(model, [first], verbose=False)
    assert trainer.test_dataloaders[0].dataset is first.dataset
    trainer.predict(model, [first, second])
    assert [one.dataset for one in trainer.predict_dataloaders] == [first.dataset, second.dataset]
    assert (trainer.test_dataloaders[0].dataset, trainer.num_test_batches) == (first.dataset, [2])
    trainer.validate(model, second, verbose=False)
    assert (trainer.num_val_batches, trainer.num_predict_batches) == ([1], [2, 1])


def test_reading_the_numbers_of_batches_makes_no_loaders() -> None:
    calls: list[str] = []

    class Loads(Classifier):
        def setup(self, stage: str) -> None:
            assert batches(self.trainer) == []
            calls.append("setup")

        def val_dataloader(self) -> Any:
            assert batches(self.trainer) == []
            calls.append("data")
            return loader(8)

        test_dataloader = predict_dataloader = val_dataloader

    def batches(trainer: L.Trainer) -> list[float]:
        evaluations = trainer.num_val_batches + trainer.num_test_batches + trainer.num_predict_batches
        return evaluations + trainer.num_sanity_val_batches

    quiet().fit(Loads(), loader(4))
    quiet().test(Loads(), verbose=False)
    quiet().predict(Loads())
    assert calls == ["setup", "data"] * 3


def test_optimizers_can_be_exchanged_in_a_run() -> None:
    model, weights = Classifier(), []

    def exchange(hook: str, trainer: Any) -> None:
        if hook == "on_train_epoch_end":
            weights.append(model.layers[0].weight.clone())
        elif trainer.current_epoch == 1:
            trainer.optimizers = [torch.optim.SGD(model.parameters(), lr=0.0)]

    exchanges = watching(exchange, "on_train_epoch_start", "on_train_epoch_end")
    trainer = quiet(max_epochs=2, callbacks=exchanges)
    trainer.fit(model, loader(8))
    assert torch.equal(weights[0], weights[1])
    assert len(trainer.optimizers) == 1


def test_properties_are_documented_and_can_be_read_in_a_compiled_function() -> None:
    class Compiles(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            def doubled(x: torch.Tensor) -> torch.Tensor:
                return x * (1 + self.current_epoch + self.trainer.world_size) if self.trainer.training else x

            assert torch.compile(doubled, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2.0
            return self.loss(batch)

    trainer = quiet(max_steps=1)
    trainer.fit(Compiles(), loader())
    assert "Optimizer steps" in str(type(trainer).global_step.__doc__)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": -1}, math.inf),
        ({"max_epochs": -1, "max_steps": 9}, 9),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 15),
        ({"max_epochs": 2, "overfit_batches": 3}, 6),
        ({"max_epochs": 2, "max_steps": 3}, 3),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 9),
        ({"max_epochs": 0}, 10),
    ],
)
def test_estimated_stepping_batches(arguments: dict[str, Any], steps: float) -> None:
    class Enough(Exception):
        pass

    class Asks(Classifier):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == steps
            assert isinstance(self.trainer.estimated_stepping_batches, float if steps == math.inf else int)
            raise Enough

    with pytest.raises(Enough):
        quiet(**arguments).fit(Asks(), loader())


def test_metrics_of_step_and_epoch() -> None:
    seen: list[Any] = []

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
            self.log("b", 2.0, logger=False)
            self.log("c", 3.0, on_step=False, on_epoch=True, prog_bar=True)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert set(outputs) == {"loss"}
            assert not outputs["loss"].requires_grad
            seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    trainer = quiet(logger=RowLogger(), log_every_n_steps=2)
    trainer.fit(Logs(), loader(16))
    assert seen[0] == {"a": 0.0, "a_step": 0.0, "b": 2.0}
    assert seen[3] == {"a": 3.0, "a_step": 3.0, "b": 2.0}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"a": 1.5, "a_step": 3.0, "a_epoch": 1.5, "b": 2.0, "c": 3.0}
    assert all(isinstance(value, torch.Tensor) for value in trainer.callback_metrics.values())
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert logged == trainer.progress_bar_metrics == {"a_step": 3.0, "a_epoch": 1.5, "c": 3.0}


def test_values_that_no_logger_gets_are_not_in_the_results() -> None:
    class Logs(Classifier):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("hidden", 1.0, logger=False)
            self.log("stepwise", float(batch_idx), on_step=True, on_epoch=False)
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            self.log("shown", 2.0)

    trainer = quiet()
    assert trainer.test(Logs(), loader(8), verbose=False) == [{"both_epoch": 0.5, "shown": 2.0}]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {"hidden": 1.0, "both": 0.5, "both_epoch": 0.5, "shown": 2.0}


def test_what_programs_assign_to_imitate_a_run() -> None:
    trainer, data = quiet(), L.LightningDataModule()
    trainer.training = True
    assert trainer.state.stage == "train"
    trainer.sanity_checking = True
    assert (trainer.training, trainer.sanity_checking) == (False, True)
    trainer.sanity_checking = False
    assert trainer.state.stage is None
    trainer.datamodule, trainer.ckpt_path = data, "a.ckpt"
    assert (trainer.datamodule, trainer.ckpt_path) == (data, "a.ckpt")
