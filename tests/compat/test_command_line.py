"""`LightningCLI` under Lightning's names: configs and hyper-parameters are Lightning's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import hasten
import hasten_lightning

pytest.importorskip("jsonargparse")

QUIETLY = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0,
    "limit_train_batches": 1, "max_epochs": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["program.py"])
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


class Net(hasten.demos.BoringModel):
    """A model with an argument that a command line sets."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class WideNet(Net):
    """A subclass that the command line names."""


def printed(capsys: pytest.CaptureFixture[str], *words: str, **options: Any) -> dict[str, Any]:
    from lightning.pytorch.cli import LightningCLI

    with pytest.raises(SystemExit):
        LightningCLI(Net, run=False, args=[*words, "--print_config"], **options)
    text = capsys.readouterr().out
    assert text.startswith("# lightning.pytorch==2.6")
    return yaml.safe_load(text)


def test_configs_have_lightnings_class_paths(capsys: pytest.CaptureFixture[str]) -> None:
    from jsonargparse import lazy_instance
    from lightning.pytorch.strategies import DDPStrategy

    class Mine(DDPStrategy):
        pass

    config = printed(
        capsys,
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=loss",
        "--trainer.callbacks+=lightning.pytorch.callbacks.DeviceStatsMonitor",
        "--trainer.callbacks+=LambdaCallback",
        "--trainer.strategy=DDPStrategy",
        "--trainer.strategy.find_unused_parameters=true",
        "--lr_scheduler=ReduceLROnPlateau",
        "--lr_scheduler.monitor=loss",
    )
    trainer = config["trainer"]
    names = ["EarlyStopping", "DeviceStatsMonitor", "LambdaCallback"]
    assert [one["class_path"] for one in trainer["callbacks"]] == [f"lightning.pytorch.callbacks.{n}" for n in names]
    assert trainer["strategy"]["class_path"] == "lightning.pytorch.strategies.DDPStrategy"
    assert trainer["strategy"]["init_args"]["find_unused_parameters"] is True
    assert config["lr_scheduler"]["class_path"] == "lightning.pytorch.cli.ReduceLROnPlateau"
    assert not {"compile", "batch_size", "uneven"} & trainer.keys()
    default = lazy_instance(DDPStrategy, process_group_backend="mine", static_graph=True)
    trainer = printed(capsys, trainer_defaults={"strategy": default})["trainer"]
    assert trainer["strategy"]["init_args"]["process_group_backend"] == "mine"
    # Without the alias they are hasten's again.
    hasten_lightning.uninstall()
    from hasten.cli import LightningArgumentParser

    parser = LightningArgumentParser()
    parser.add_lightning_class_args(hasten.Trainer, "trainer")
    plain = parser.parse_args(["--trainer.strategy=DDPStrategy", "--trainer.callbacks=Timer"])
    assert plain.trainer.strategy.class_path == "hasten.strategies.DDPStrategy"
    assert plain.trainer.callbacks.class_path == "hasten.callbacks.Timer"


def test_a_wrong_option_of_lightnings_class_is_answered_by_the_option_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.cli import LightningCLI

    with pytest.raises(SystemExit):
        LightningCLI(Net, run=False, args=["--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_lst=true"])
    shown = capsys.readouterr().err
    assert "class_path 'lightning.pytorch.callbacks.ModelCheckpoint'" in shown
    assert "Did you mean save_last?\nAll options:" in shown


def test_a_checkpoint_goes_before_the_command_line_and_its_parts_keep_their_marks() -> None:
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.cli import LightningCLI

    early = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "a", "strict": False}}
    options: dict[str, Any] = {"subclass_mode_model": True, "trainer_defaults": {**QUIETLY, "callbacks": early}}
    name = f"{__name__}.WideNet"
    cli = LightningCLI(Net, args=["fit", f"--model={name}", "--model.width=3"], **options)
    assert type(cli.model) is WideNet
    assert any(isinstance(callback, EarlyStopping) for callback in cli.trainer.callbacks)
    assert cli.config_dump["model"] == {"class_path": name, "init_args": {"width": 3}}
    folder = Path(str(cli.trainer.log_dir))
    assert "class_path: tests.compat.test_command_line.WideNet" in (folder / "config.yaml").read_text()
    hparams = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert hparams == {"width": 3, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    checkpoint = next((folder / "checkpoints").glob("*.ckpt"))
    words = ["validate", f"--model={__name__}.Net", "--model.width=5", f"--ckpt_path={checkpoint}"]
    again = LightningCLI(Net, args=words, **options).model
    assert (type(again), again.hparams.width) == (WideNet, 3)


def test_the_trainer_has_no_number_of_epochs_before_it_begins() -> None:
    import lightning as L

    options = {**QUIETLY, "logger": False, "enable_checkpointing": False, "max_epochs": None}
    trainer = L.Trainer(**options, max_steps=1)
    assert trainer.max_epochs is None
    trainer.fit(Net())
    assert trainer.max_epochs == -1
    assert L.Trainer(**{**options, "max_epochs": 2}).max_epochs == 2
    assert L.Trainer(**{**options, "fast_dev_run": True}).max_epochs == 1
