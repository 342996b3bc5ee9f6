"""Every argument of the Trainer is checked before anything starts; the message names it and the fix."""

from __future__ import annotations

from typing import Any

import pytest

import hasten as L
from tests.models import Classifier, loader, quiet

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_epoch": 3}, "max_epochs"),
    ({"gpus": 1}, "accelerator='gpu'"),
    ({"resume_from_checkpoint": "a.ckpt"}, "ckpt_path"),
    ({"max_epochs": "3"}, "max_epochs='3'"),
    ({"max_epochs": 2.5}, "max_epochs=2.5"),
    ({"max_epochs": -2}, "-1 for no limit"),
    ({"max_epochs": True}, "max_epochs=True"),
    ({"max_steps": -5}, "max_steps=-5"),
    ({"min_epochs": 5, "max_epochs": 3}, "min_epochs=5"),
    ({"min_steps": 5, "max_steps": 3}, "min_steps=5"),
    ({"max_time": "soon"}, "max_time"),
    ({"max_time": 90}, "max_time=90"),
    ({"limit_train_batches": 1.5}, "limit_train_batches=1.5"),
    ({"limit_val_batches": -1}, "limit_val_batches=-1"),
    ({"limit_test_batches": "all"}, "limit_test_batches='all'"),
    ({"overfit_batches": 2.0}, "overfit_batches=2.0"),
    ({"val_check_interval": 0}, "val_check_interval=0"),
    ({"val_check_interval": 1.5}, "val_check_interval=1.5"),
    ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "check_val_every_n_epoch=None"),
    ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch=0"),
    ({"num_sanity_val_steps": -3}, "num_sanity_val_steps=-3"),
    ({"log_every_n_steps": -1}, "log_every_n_steps=-1"),
    ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
    ({"accumulate_grad_batches": 2.0}, "accumulate_grad_batches=2"),
    ({"accumulate_grad_batches": {0: 2}}, "GradientAccumulationScheduler"),
    ({"gradient_clip_val": "1"}, "gradient_clip_val='1'"),
    ({"gradient_clip_val": -1.0}, "gradient_clip_val=-1.0"),
    ({"gradient_clip_algorithm": "norms"}, "Did you mean 'norm'"),
    ({"deterministic": "wran"}, "deterministic='wran'"),
    ({"fast_dev_run": -1}, "fast_dev_run=-1"),
    ({"enable_progress_bar": "yes"}, "enable_progress_bar='yes'"),
    ({"enable_checkpointing": 1}, "enable_checkpointing=1"),
    ({"callbacks": [3]}, "Callback"),
    ({"callbacks": [L.Callback]}, r"Callback\(\)"),
    ({"callbacks": "checkpoint"}, "callbacks='checkpoint'"),
    ({"logger": "csv"}, "logger='csv'"),
    ({"default_root_dir": 3}, "default_root_dir=3"),
    ({"precision": "17"}, "precision"),
    ({"precision": "bf16-mix"}, "bf16-mixed"),
    ({"accelerator": "gpuu"}, "accelerator"),
    ({"strategy": "dpp"}, "ddp"),
    ({"devices": 0}, "devices=0"),
    ({"devices": "two"}, "devices='two'"),
    ({"profiler": "simpel"}, "simple"),
    ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1"),
    ({"barebones": True, "logger": True}, "barebones"),
    ({"inference_mode": None}, "inference_mode=None"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        L.Trainer(**{"accelerator": "cpu", **arguments})


def test_a_cuda_device_that_is_not_there_names_what_is() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)cuda"):
        L.Trainer(accelerator="cuda")


def test_float16_autocast_on_the_cpu_names_what_works() -> None:
    with pytest.raises(ValueError, match="bf16-mixed"):
        L.Trainer(accelerator="cpu", precision="16-mixed")


class NoStep(L.LightningModule):
    def trainings_step(self, batch: Any, batch_idx: int) -> Any: ...


class NoOptimizer(L.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any: ...


def test_missing_parts_are_named_before_anything_starts() -> None:
    import torch

    trainer = quiet()
    with pytest.raises(ValueError, match=r"no training_step\(\).*trainings_step"):
        trainer.fit(NoStep(), loader())
    with pytest.raises(ValueError, match=r"no configure_optimizers\(\)"):
        trainer.fit(NoOptimizer(), loader())
    with pytest.raises(ValueError, match="no data"):
        trainer.fit(Classifier())
    with pytest.raises(TypeError, match="LightningModule"):
        trainer.fit(torch.nn.Linear(1, 1), loader())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write Classifier\(\)"):
        trainer.fit(Classifier, loader())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice"):
        trainer.fit(Classifier(), loader(), datamodule=L.LightningDataModule())
    with pytest.raises(TypeError, match="requires a `LightningModule`"):
        quiet().test()
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        trainer.fit(Classifier(), loader(), ckpt_path="nowhere.ckpt")
    with pytest.raises(ValueError, match="best"):
        trainer.fit(Classifier(), loader(), ckpt_path="best")


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda loss: loss.item(), "return the loss"),
        (lambda loss: {"los": loss}, "without the key 'loss'"),
        (lambda loss: {"loss": loss.item()}, "must be a tensor"),
        (lambda loss: loss.detach(), "does not require grad"),
        (lambda loss: loss.repeat(3), "scalar"),
        (lambda loss: None, "return loss"),
        (lambda loss: "loss", "return the loss"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*returned None")
def test_wrong_losses_are_told(returns: Any, words: str) -> None:
    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returns(self.loss(batch))

    with pytest.raises((ValueError, RuntimeError)) as caught:
        quiet().fit(Wrong(), loader())
    text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert words in text
    assert "Wrong.training_step" in text


def test_hooks_that_would_never_run_are_refused() -> None:
    class Old(Classifier):
        def validation_epoch_end(self, outputs: Any) -> None: ...

    with pytest.raises(ValueError, match="on_validation_epoch_end"):
        quiet().fit(Old(), loader())


def test_loading_on_an_instance_and_bare_weights_are_told(tmp_path: Any) -> None:
    import torch

    model = Classifier()
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match="no 'state_dict'"):
        Classifier.load_from_checkpoint(tmp_path / "bare.pt")
    with pytest.raises(TypeError, match=r"Classifier\.load_from_checkpoint\(\) makes a new"):
        model.load_from_checkpoint(tmp_path / "bare.pt")


def test_names_that_are_not_in_this_version_say_so() -> None:
    import hasten.loggers

    with pytest.raises(ValueError, match=r"NeptuneLogger is not in this version.*CSVLogger, CometLogger"):
        hasten.loggers.NeptuneLogger(project="digits")


def test_empty_loaders_are_told() -> None:
    with pytest.raises(ValueError, match=r"(?i)no batches|empty"):
        quiet().fit(Classifier(), [])


def test_an_error_in_a_worker_keeps_its_type_and_names_the_dataset() -> None:
    import torch

    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such column")

    with pytest.raises(KeyError) as caught:
        quiet().fit(Classifier(), torch.utils.data.DataLoader(Broken(), 4, num_workers=1))
    text = str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "no such column" in text
    assert "Broken" in text


def test_a_share_that_is_less_than_a_batch_says_how_much_is() -> None:
    with pytest.raises(ValueError, match="less than one"):
        quiet(limit_train_batches=0.01).fit(Classifier(), loader())


def test_several_optimizers_need_manual_optimisation() -> None:
    import torch

    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    with pytest.raises(ValueError, match="automatic_optimization = False"):
        quiet().fit(Two(), loader())


@pytest.mark.parametrize(
    ("configured", "words"),
    [
        (lambda o, s: {"optimiser": o}, "Did you mean 'optimizer'"),
        (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "intervall": "step"}}, "interval"),
        (
            lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "batch"}},
            "'epoch'|\"epoch\"",
        ),
        (lambda o, s: {"optimizer": "adam"}, "str where an optimizer"),
        (lambda o, s: 3, "returned a int"),
    ],
)
def test_wrong_optimizer_configurations(configured: Any, words: str) -> None:
    import torch

    class Wrong(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return configured(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    with pytest.raises(ValueError, match=words):
        quiet().fit(Wrong(), loader())


def test_a_scheduler_on_a_value_nobody_logs_names_those_logged() -> None:
    import torch

    class Wrong(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_los"}}

    with pytest.raises(ValueError, match="Did you mean 'val_loss'"):
        quiet().fit(Wrong(), loader(), loader())
