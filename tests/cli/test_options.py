"""What the words of a command line and configs become: options, classes, several configs, the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hasten as L
from hasten.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from hasten.cli import LightningArgumentParser, LightningCLI, instantiate_class
from hasten.loggers import CSVLogger
from tests.cli.program import QUIET, DeepEncoder, Encoder, Kind, LineData, LineNet, WideLineNet, cli


def test_options_reach_the_objects() -> None:
    made = cli("--model.width=6", "--data.batch_size", "8", "--trainer.max_epochs=3", "--seed_everything=7")
    assert (made.model.width, made.datamodule.batch_size, made.trainer.max_epochs) == (6, 8, 3)
    assert made.config["seed_everything"] == 7
    assert made.subcommand is None
    assert isinstance(made.trainer, L.Trainer)
    assert made.config.model.width == 6
    assert made.config_init["model"] is made.model


def test_types_are_converted() -> None:
    made = cli("--model.kind=two", "--model.mode=max", "--model.lr=1e-3", "--model.name=null")
    assert made.model.kind is Kind.two
    assert (made.model.mode, made.model.lr, made.model.name) == ("max", 0.001, None)
    assert cli("--trainer.devices=1", "--trainer.max_time=00:00:10:00").trainer.max_epochs == 1


def test_defaults_of_the_trainer() -> None:
    kept = LearningRateMonitor()
    defaults = {**QUIET, "logger": True, "max_epochs": 5, "callbacks": kept}
    made = cli(
        "--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=a", trainer_defaults=defaults
    )
    assert made.trainer.max_epochs == 5
    assert kept in made.trainer.callbacks
    assert any(isinstance(callback, EarlyStopping) for callback in made.trainer.callbacks)
    assert "callbacks" not in made.config.trainer or "LearningRateMonitor" not in str(
        made.config.trainer.callbacks
    )
    two = cli(trainer_defaults={**defaults, "callbacks": [kept]})
    assert two.trainer.callbacks.count(kept) == 1


def test_an_option_of_a_callback_belongs_to_the_one_added_last() -> None:
    made = cli(
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=a",
        "--trainer.callbacks.patience=5",
        "--trainer.callbacks+=ModelCheckpoint",
        "--trainer.callbacks.filename=x",
        "--trainer.enable_checkpointing=true",
    )
    stopping = next(one for one in made.trainer.callbacks if isinstance(one, EarlyStopping))
    checkpoint = next(one for one in made.trainer.callbacks if isinstance(one, ModelCheckpoint))
    assert (stopping.monitor, stopping.patience, checkpoint.filename) == ("a", 5, "x")
    assert checkpoint.monitor is None


def test_an_option_after_a_config_overrides_it(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: {width: 5, name: from config}\n")
    made = cli("-c", str(config), "--model.width=7")
    assert (made.model.width, made.model.name) == (7, "from config")


def test_the_last_of_several_configs_has_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {width: 5, name: a}\ntrainer: {max_epochs: 4}\n")
    (tmp_path / "b.yaml").write_text("model: {width: 6}\n")
    made = cli("--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert (made.model.width, made.model.name, made.trainer.max_epochs) == (6, "a", 4)
    turned = cli("--config", str(tmp_path / "b.yaml"), "--config", str(tmp_path / "a.yaml"))
    assert turned.model.width == 5


def test_a_part_of_the_config_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "trainer.yaml").write_text("max_epochs: 4\nlimit_train_batches: 3\n")
    made = cli(f"--trainer={tmp_path / 'trainer.yaml'}", "--trainer.max_epochs=9")
    assert (made.trainer.max_epochs, made.trainer.limit_train_batches) == (9, 3)


def test_a_config_with_the_subcommand_in_it(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(yaml.dump({"validate": {"model": {"width": 5}, "verbose": False}}))
    made = cli("--config", str(config), run=True)
    assert (made.subcommand, made.model.width) == ("validate", 5)
    again = cli("--config", str(config), "validate", "--model.width=3", run=True)
    assert again.model.width == 3


def test_arguments_as_data() -> None:
    made = cli({"model": {"width": 3}, "trainer": {"max_epochs": 2}})
    assert (made.model.width, made.trainer.max_epochs) == (3, 2)
    run = cli({"subcommand": "validate", "validate": {"model": {"width": 3}}}, run=True)
    assert run.subcommand == "validate"
    from_namespace = cli(made.config)
    assert from_namespace.model.width == 3


def test_arguments_given_twice_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program.py", "--model.width=9"])
    with pytest.warns(UserWarning, match="not recommended to provide both args and command line arguments"):
        made = cli("--model.width=3")
    assert made.model.width == 3
    assert LightningCLI(LineNet, LineData, trainer_defaults=QUIET, run=False).model.width == 9


def test_short_names_and_paths_of_classes() -> None:
    for name in ("DeepEncoder", "tests.cli.program.DeepEncoder"):
        made = cli(f"--model.encoder={name}", "--model.encoder.dim=3", "--model.encoder.depth=7")
        assert isinstance(made.model.encoder, DeepEncoder)
        assert (made.model.encoder.dim, made.model.encoder.depth) == (3, 7)
    config = {"class_path": "Encoder", "init_args": {"dim": 6}}
    assert type(cli(f"--model.encoder={json.dumps(config)}").model.encoder) is Encoder


def test_any_module_and_any_datamodule() -> None:
    options: dict[str, Any] = {"model_class": None, "datamodule_class": None}
    made = cli("--model=WideLineNet", "--model.extra=2.5", "--data=LineData", "--data.samples=8", **options)
    assert type(made.model) is WideLineNet
    assert made.model.extra == 2.5
    assert made.datamodule.samples == 8
    assert cli("--model=LineNet", **options).datamodule is None


def test_functions_that_make_the_objects() -> None:
    def net(size: int = 3) -> LineNet:
        return LineNet(width=size * 2)

    def trainer(epochs: int, callbacks: list[L.Callback] | None = None) -> L.Trainer:
        return L.Trainer(**{**QUIET, "max_epochs": epochs, "callbacks": callbacks})

    made = cli(
        "--model.size=5", "--trainer.epochs=4", model_class=net, trainer_class=trainer, trainer_defaults=None
    )
    assert (made.model.width, made.trainer.max_epochs) == (10, 4)


def test_a_trainer_without_callbacks_is_told() -> None:
    def trainer(epochs: int = 2) -> L.Trainer:
        return L.Trainer(**{**QUIET, "max_epochs": epochs})

    with pytest.warns(
        UserWarning, match="does not expose the `callbacks` argument so they will not be included"
    ):
        assert cli(trainer_class=trainer, trainer_defaults=None).trainer.max_epochs == 2


def test_a_trainer_of_ones_own() -> None:
    class Own(L.Trainer):
        def __init__(self, *, speed: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.speed = speed

    made = cli("--trainer.speed=3", "--trainer.max_epochs=2", trainer_class=Own)
    assert (made.trainer.speed, made.trainer.max_epochs) == (3, 2)


def test_loggers_by_class(tmp_path: Path) -> None:
    made = cli(
        "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}", "--trainer.logger.name=me"
    )
    assert isinstance(made.trainer.logger, CSVLogger)
    assert made.trainer.logger.name == "me"
    configs = [
        {"class_path": "CSVLogger", "init_args": {"save_dir": str(tmp_path), "name": name}} for name in "ab"
    ]
    two = cli(f"--trainer.logger={json.dumps(configs)}")
    assert [logger.name for logger in two.trainer.loggers] == ["a", "b"]
    assert cli("--trainer.logger=false").trainer.loggers == []
    assert len(cli("--trainer.logger=true", trainer_defaults=None).trainer.loggers) == 1


def test_strategies_accelerators_and_plugins_by_class() -> None:
    made = cli("--trainer.strategy=SingleDeviceStrategy", "--trainer.accelerator=CPUAccelerator")
    assert type(made.trainer.strategy).__name__ == "SingleDeviceStrategy"
    half = cli('--trainer.plugins={"class_path": "HalfPrecision", "init_args": {"precision": "bf16-true"}}')
    assert half.trainer.precision == "bf16-true"
    listed = cli('--trainer.plugins=["LightningEnvironment"]')
    assert listed.trainer.world_size == 1


def test_what_a_class_hands_on_is_an_option(tmp_path: Path) -> None:
    ddp = cli(
        "--trainer.strategy=DDPStrategy",
        "--trainer.strategy.find_unused_parameters=true",
        "--trainer.devices=2",
    )
    assert type(ddp.trainer.strategy).__name__ == "DDPStrategy"
    given = ddp.config.trainer.strategy.init_args
    assert given.find_unused_parameters is True
    assert "static_graph" not in given
    assert "module" not in given
    board = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": str(tmp_path), "flush_secs": 3}}
    logger = cli({"trainer": {"logger": board}}).config.trainer.logger
    assert (logger.class_path, logger.init_args.flush_secs) == ("hasten.loggers.TensorBoardLogger", 3)
    assert "max_queue" not in logger.init_args


def test_a_list_given_on_the_command_line_and_added_to() -> None:
    first = json.dumps([{"class_path": "EarlyStopping", "init_args": {"monitor": "a"}}])
    made = cli(
        f"--trainer.callbacks={first}",
        "--trainer.callbacks+",
        "EarlyStopping",
        "--trainer.callbacks.monitor=b",
    )
    assert [one.monitor for one in made.trainer.callbacks if isinstance(one, EarlyStopping)] == ["a", "b"]


def test_another_trainer_of_the_same_config() -> None:
    made = cli("--trainer.limit_val_batches=3", trainer_defaults={**QUIET, "callbacks": [L.Callback()]})
    kept = EarlyStopping("a")
    other = made.instantiate_trainer(max_epochs=7, callbacks=[kept])
    assert other is not made.trainer
    assert (other.max_epochs, other.limit_val_batches, made.trainer.max_epochs) == (7, 3, 1)
    assert kept in other.callbacks
    assert made.config_init["trainer"]["max_epochs"] == 1
    assert len(other.callbacks) == len(made.trainer.callbacks) + 1


def test_every_argument_of_the_trainer_has_a_type_and_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli("--help")
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    parameters = [name for name in L.Trainer.__init__.__annotations__ if name not in ("return", "unknown")]
    assert len(parameters) > 30
    for name in parameters:
        assert f"--trainer.{name} " in shown
    assert "epochs to train; -1 for no limit; 1000 when nothing limits the run. (type:" in shown
    assert (
        "one callback or a list. (type: Union[list[Callback], Callback, null], default: null, known sub"
        in shown
    )
    assert "features between the layers. (type: int, default: 4)" in shown
    assert "samples in a batch. (type: int, default: 4)" in shown


def test_help_of_a_class_and_of_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--model.encoder.help=DeepEncoder")
    assert "--model.encoder.depth DEPTH" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli("--help", run=True)
    shown = capsys.readouterr().out
    assert "{fit,validate,test,predict}" in shown
    assert "--trainer.max_epochs" not in shown
    with pytest.raises(SystemExit):
        cli("predict", "--help", run=True)
    shown = capsys.readouterr().out
    assert "--return_predictions {true,false,null}" in shown
    assert "--verbose" not in shown


def test_the_config_is_printed_and_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli("fit", "--print_config", "--model.width=6", "--model.encoder=DeepEncoder", run=True)
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("# hasten==")
    config = yaml.safe_load(text)
    assert config["model"]["width"] == 6
    assert config["model"]["encoder"]["class_path"] == "tests.cli.program.DeepEncoder"
    assert config["trainer"]["max_epochs"] == 1
    assert config["ckpt_path"] is None
    (tmp_path / "c.yaml").write_text(text)
    assert cli("fit", "--config", str(tmp_path / "c.yaml"), run=True).model.width == 6


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER__MAX_EPOCHS", "6")
    monkeypatch.setenv("PL_MODEL__WIDTH", "5")
    made = cli("--model.width=7", parser_kwargs={"default_env": True})
    assert (made.trainer.max_epochs, made.model.width) == (6, 7)
    assert cli().trainer.max_epochs == 1
    monkeypatch.setenv("PL_FIT__MODEL__WIDTH", "9")
    assert cli("fit", parser_kwargs={"default_env": True}, run=True).model.width == 9
    monkeypatch.setenv("OWN_MODEL__WIDTH", "11")
    assert cli(parser_kwargs={"default_env": True, "env_prefix": "OWN"}).model.width == 11


def test_default_config_files(tmp_path: Path) -> None:
    config = tmp_path / "defaults.yaml"
    config.write_text("model: {width: 5}\ntrainer: {max_epochs: 3}\n")
    made = cli("--trainer.max_epochs=4", parser_kwargs={"default_config_files": [str(config)]})
    assert (made.model.width, made.trainer.max_epochs) == (5, 4)
    fit = cli("fit", parser_kwargs={"fit": {"default_config_files": [str(config)]}}, run=True)
    assert (fit.model.width, fit.trainer.max_epochs) == (5, 3)
    assert (
        cli("validate", parser_kwargs={"fit": {"default_config_files": [str(config)]}}, run=True).model.width
        == 4
    )


@pytest.mark.parametrize(("word", "seed"), [("true", 0), ("false", False), ("5", 5)])
def test_the_seed(word: str, seed: int | bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(1234)
    before = torch.initial_seed()
    made = cli(f"--seed_everything={word}")
    assert made.config["seed_everything"] is seed or made.config["seed_everything"] == seed
    assert torch.initial_seed() == (before if seed is False else seed)


def test_the_seed_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    made = cli("fit", seed_everything_default=True, run=True)
    assert made.config["fit"]["seed_everything"] == 42


def test_a_parser_alone() -> None:
    parser = LightningArgumentParser(description="Mine.")
    assert "Mine." in parser.format_help()
    assert parser.add_lightning_class_args(LineData, "data") == ["data.batch_size", "data.samples"]
    assert parser.add_lightning_class_args(L.Callback, "callback", subclass_mode=True) == ["callback"]
    assert parser.callback_keys == ["callback"]
    parsed = parser.parse_args(["--data.batch_size=3", "--callback=EarlyStopping", "--callback.monitor=a"])
    assert parsed.data.batch_size == 3
    with pytest.raises(
        ValueError, match=r"add_lightning_class_args\(.*Encoder.*'x'\): give a subclass of Trainer"
    ):
        parser.add_lightning_class_args(Encoder, "x")
    with pytest.raises(TypeError, match=r"add_optimizer_args\(.*Encoder.*\): give a subclass of torch.optim"):
        parser.add_optimizer_args(Encoder)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"add_lr_scheduler_args\(.*ReduceLROnPlateau"):
        parser.add_lr_scheduler_args((torch.optim.Adam,))  # type: ignore[arg-type]


def test_instantiate_class() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    made = instantiate_class((parameters,), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}})
    assert made.param_groups[0]["lr"] == 0.5
    assert instantiate_class((3, 2), {"class_path": "torch.nn.Linear"}).weight.shape == (2, 3)
    assert instantiate_class(4, {"class_path": "tests.cli.program.Encoder", "init_args": None}).dim == 4
    with pytest.raises(
        ValueError, match=r"torch.optim has no Adm; did|torch.optim has no Adm. Did you mean 'Adam'"
    ):
        instantiate_class((), {"class_path": "torch.optim.Adm"})
    with pytest.raises(ValueError, match=r"must be a path like 'torch.optim.Adam'; got 'Adam'"):
        instantiate_class((), {"class_path": "Adam"})
    with pytest.raises(ValueError, match="got None"):
        instantiate_class((), {})
