"""Strategies and precisions that a program subclasses: what it overrides is called, and nothing else changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import Classifier, Manual, loader, quiet, same_weights
from tests.refusals import refused

import hasten as L
from hasten.machine.cluster import LightningEnvironment
from hasten.machine.devices import CPUAccelerator
from hasten.plugins import AsyncCheckpointIO, CheckpointIO, MixedPrecision, Precision, TorchCheckpointIO
from hasten.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from hasten.utilities.exceptions import MisconfigurationException


class Notes(SingleDeviceStrategy):  # type: ignore[misc]
    """Notes which of its methods are called, and does what it would do without."""

    restores_after_setup = False
    restores_optimizers = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self.restores_after_setup

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self.restores_optimizers


def _noting(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return getattr(super(Notes, self), name)(*args, **kwargs)

    return method


for _name in (
    "setup_environment", "setup", "training_step", "validation_step", "backward", "optimizer_step", "batch_to_device",
    "save_checkpoint", "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict", "reduce", "teardown",
):  # fmt: skip
    setattr(Notes, _name, _noting(_name))


class NotesPrecision(Precision):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_backward(self, tensor: Any, module: Any) -> None:
        assert isinstance(module, Classifier)
        self.calls.append("pre_backward")

    def backward(self, tensor: Any, model: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.calls.append("backward")
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self.calls.append("optimizer_step")
        return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0, gradient_clip_algorithm: Any = "norm") -> None:
        self.calls.append("clip_gradients")
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)


def trained(**options: Any) -> Classifier:
    L.seed_everything(1, verbose=False)
    model = Classifier()
    options = {"max_epochs": 1, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0, **options}
    quiet(**options).fit(model, loader(8), loader(4))
    return model


def test_hooks_of_a_strategy_are_called() -> None:
    hooks = (
        "on_train_start",
        "on_train_batch_start",
        "pre_backward",
        "post_backward",
        "on_validation_start",
        "on_train_end",
    )
    calls: list[str] = []
    noting = {name: lambda self, *_, name=name: calls.append(name) for name in hooks}
    assert same_weights(trained(strategy=type("Own", (SingleDeviceStrategy,), noting)()), trained())
    batch = ["on_train_batch_start", "pre_backward", "post_backward"]
    assert calls == ["on_train_start", *batch, *batch, "on_validation_start", "on_train_end"]


def test_overridden_methods_are_called_and_change_nothing(tmp_path: Path) -> None:
    expected = trained()
    strategy, precision = Notes(), NotesPrecision()
    assert same_weights(trained(strategy=strategy), expected)
    step = ["batch_to_device", "training_step", "backward", "optimizer_step"]
    assert strategy.calls == [
        "setup_environment", "setup", *step, *step, "batch_to_device", "validation_step", "teardown",
    ]  # fmt: skip
    assert same_weights(trained(plugins=precision), expected)
    # The first closure of a step computes, the optimizer is given one that returns the loss.
    assert precision.calls == ["pre_backward", "backward", "clip_gradients", "optimizer_step"] * 2
    both = Notes(precision_plugin=(precision := NotesPrecision()))
    assert same_weights(trained(strategy=both, accumulate_grad_batches=2), trained(accumulate_grad_batches=2))
    assert both.calls.count("optimizer_step") == precision.calls.count("optimizer_step") == 1


def test_methods_for_the_module_its_data_and_its_checkpoints_are_called(tmp_path: Path) -> None:
    class Own(SingleDeviceStrategy):  # type: ignore[misc]
        def model_to_device(self) -> None:
            assert isinstance(self.model, Classifier)
            moved.append(self.root_device)

        def setup_optimizers(self, trainer: Any) -> None:
            self.optimizers = [torch.optim.SGD(self.lightning_module.parameters(), 0.5)]

        def process_dataloader(self, dataloader: Any) -> Any:
            return [*dataloader][:1]

        def lightning_module_state_dict(self) -> dict[str, Any]:
            return {**super().lightning_module_state_dict(), "extra": torch.ones(1)}

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            return {**super().optimizer_state(optimizer), "extra": 1}

        def remove_checkpoint(self, filepath: Any) -> None:
            removed.append(Path(filepath).name)

    moved: list[Any] = []
    removed: list[str] = []
    saves = L.callbacks.ModelCheckpoint(tmp_path, "{epoch}")
    trainer = quiet(strategy=Own(), max_epochs=2, callbacks=saves, enable_checkpointing=True)
    trainer.fit(Classifier(), loader())
    assert moved == [torch.device("cpu")]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert trainer.global_step == 2
    assert removed == ["epoch=0.ckpt"]
    saved = torch.load(saves.best_model_path, weights_only=True)
    assert "extra" in saved["state_dict"]
    assert saved["optimizer_states"][0]["extra"] == 1


def test_the_state_of_a_precision_is_saved_and_restored(tmp_path: Path) -> None:
    class Counts(Precision):
        done = 0

        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
            self.done += 1
            return super().optimizer_step(optimizer, **kwargs)

        def state_dict(self) -> dict[str, Any]:
            return {"done": self.done}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.done = state_dict["done"]

    trainer, later = quiet(plugins=Counts()), quiet(plugins=(again := Counts()), max_epochs=2)
    trainer.fit(Classifier(), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    later.fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert again.done == 4


def test_a_checkpoint_io_knows_what_is_in_its_places(tmp_path: Path) -> None:
    class Memory(CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            kept[str(path)] = checkpoint

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            return kept[str(path)]

        def remove_checkpoint(self, path: Any) -> None:
            del kept[str(path)]

    kept: dict[str, Any] = {}
    trainer, place = quiet(plugins=Memory(), max_epochs=1), tmp_path / "absent" / "a"
    trainer.fit(Classifier(), loader())
    trainer.save_checkpoint(place)
    later = quiet(plugins=AsyncCheckpointIO(Memory()), max_epochs=2)
    later.fit(Classifier(), loader(), ckpt_path=place)
    assert later.global_step == 2 * trainer.global_step
    with pytest.raises(KeyError):
        later.validate(Classifier(), loader(), ckpt_path=tmp_path / "b")


def test_a_precision_is_connected_to_the_optimizers_and_a_strategy_to_the_module() -> None:
    class Slower(Precision):
        def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
            optimizers[0].param_groups[0]["lr"] = 0.25
            return model, optimizers, lr_schedulers

    class Connected(SingleDeviceStrategy):
        def connect(self, model: Any) -> None:
            modules.append(model)
            super().connect(model)

    modules: list[Any] = []
    trainer = quiet(plugins=[Slower()], max_steps=1, strategy=Connected("cpu"))
    trainer.fit(model := Classifier(), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert modules == [model]


def test_an_accelerator_that_is_not_there_is_refused() -> None:
    class Missing(CPUAccelerator):
        @staticmethod
        def is_available() -> bool:
            return False

    with refused(MisconfigurationException, "accelerator", says="Missing()): it can not run", fix="'cpu'"):
        quiet(accelerator=Missing())


def test_contexts_of_steps_and_the_setup_of_an_accelerator_are_called() -> None:
    class Own(Precision):
        def _noted(self, step: str) -> AbstractContextManager[None]:
            calls.append(step)
            return nullcontext()

        train_step_context = partialmethod(_noted, "train")
        val_step_context = partialmethod(_noted, "val")
        test_step_context = partialmethod(_noted, "test")
        predict_step_context = partialmethod(_noted, "predict")

    class Host(CPUAccelerator):
        def setup(self, trainer: Any) -> None:
            calls.append(trainer.state.fn.value)
            super().setup(trainer)

    calls: list[str] = []
    limits = {f"limit_{stage}_batches": 1 for stage in ("train", "val", "test", "predict")}
    trainer = quiet(accelerator=Host(), plugins=Own(), max_epochs=1, num_sanity_val_steps=0, **limits)
    trainer.fit(Classifier(), loader(), loader())
    trainer.test(trainer.model, loader(8), verbose=False)
    trainer.predict(trainer.model, loader(8))
    assert calls == ["fit", "train", "val", "test", "test", "predict", "predict"]


@pytest.mark.parametrize("after", [False, True])
def test_what_is_restored_and_when(tmp_path: Path, after: bool) -> None:
    strategy, model = Notes(), Classifier()
    trainer = quiet(strategy=strategy, max_epochs=1)
    trainer.fit(model, loader(8))
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert strategy.calls[-1] == "save_checkpoint"
    strategy = Notes()
    strategy.restores_after_setup, strategy.restores_optimizers = after, not after
    again = Classifier()
    quiet(strategy=strategy, max_epochs=1).fit(again, loader(8), ckpt_path=tmp_path / "file.ckpt")
    assert same_weights(again, model)
    loads = ["load_checkpoint", "load_model_state_dict"]
    begin = ["setup", *loads] if after else [*loads, "setup", "load_optimizer_state_dict"]
    assert strategy.calls == ["setup_environment", *begin, "teardown"]


def test_parts_that_are_given_to_a_strategy() -> None:
    io, precision = TorchCheckpointIO(), MixedPrecision("bf16-mixed", "cpu")
    strategy = SingleDeviceStrategy("cpu", CPUAccelerator(), io, precision)
    for make in (quiet, L.Fabric):
        made = make(strategy=strategy, accelerator="auto")
        assert made.strategy is strategy
        assert made.runtime.precision is strategy.precision_plugin is precision
        assert made.runtime.checkpoint_io is strategy.checkpoint_io is io
    for options in ({"precision": "64-true"}, {"plugins": TorchCheckpointIO()}, {"accelerator": "cpu"}):
        with pytest.raises(MisconfigurationException, match="Leave one out"):
            quiet(**{"strategy": strategy, "accelerator": "auto", **options})
    cluster = LightningEnvironment()
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * 3, cluster_environment=cluster)
    trainer = quiet(strategy=strategy, accelerator="auto")
    assert (trainer.num_devices, trainer.runtime.cluster) == (3, cluster)
    with refused(MisconfigurationException, "accelerator"):
        quiet(strategy=DDPStrategy(parallel_devices=[torch.device("cuda", 0)]), accelerator="cpu")


def test_a_method_that_is_patched_after_the_trainer_was_made_is_called() -> None:
    class Twice(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()

            def closure() -> None:
                loss = self.loss(batch)
                self.manual_backward(loss, retain_graph=True)
                self.manual_backward(loss)

            optimizer.step(closure=closure)

    trainer = quiet()
    with mock.patch.object(Strategy, "backward", wraps=trainer.strategy.backward) as backward:
        trainer.fit(Twice(), loader(8))
    assert backward.call_count == 4
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Twice(), loader(8))
    assert (backward.call_count, trainer.global_step) == (4, 4)


def test_devices_of_a_strategy_and_another_accelerator_contradict_each_other() -> None:
    for kind, device in (("cuda", "cpu"), ("tpu", "cuda"), ("cpu", "cuda")):
        with refused(MisconfigurationException, "accelerator"):
            quiet(strategy=DDPStrategy(parallel_devices=[torch.device(device)]), accelerator=kind)
