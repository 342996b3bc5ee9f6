"""What the words of a command line and configs become: options, classes, several configs, the environment."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hasten as L
from hasten.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from hasten.cli import LightningArgumentParser, LightningCLI, instantiate_class
from tests.cli.program import QUIET, Encoder, Kind, LineData, LineNet, cli
from tests.refusals import refused, warned

ANY: dict[str, Any] = {"model_class": None, "datamodule_class": None}
LOGGER = {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "a"}}
BOARD = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs", "flush_secs": 3}}


def net(size: int = 3) -> LineNet:
    return LineNet(width=size * 2)


def trainer(epochs: int = 2, callbacks: list[L.Callback] | None = None) -> L.Trainer:
    return L.Trainer(**{**QUIET, "max_epochs": epochs, "callbacks": callbacks})


class OwnTrainer(L.Trainer):
    def __init__(self, *, speed: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.speed = speed


# A command line or config, the options of the program, and what is made of it.
BECOMES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    ("--model.width=6 --data.batch_size 8 --trainer.max_epochs=3 --seed_everything=7", {},
     {"model.width": 6, "datamodule.batch_size": 8, "trainer.max_epochs": 3, "config.seed_everything": 7,
      "config.model.width": 6, "subcommand": None}),
    ("--model.kind=two --model.mode=max --model.lr=1e-3 --model.name=null", {},
     {"model.kind": Kind.two, "model.mode": "max", "model.lr": 0.001, "model.name": None}),
    ("--trainer.devices=1 --trainer.max_time=00:00:10:00", {}, {"trainer.max_epochs": 1}),
    # Several configs: the last one counts, and the options after it.
    ("-c one.yaml --model.width=7", {}, {"model.width": 7, "model.name": "one", "trainer.max_epochs": 4}),
    ("--config one.yaml --config two.yaml", {}, {"model.width": 6, "model.name": "one"}),
    ("--config two.yaml --config one.yaml", {}, {"model.width": 5}),
    ("--trainer=trainer.yaml --trainer.max_epochs=9", {},
     {"trainer.max_epochs": 9, "trainer.limit_train_batches": 3}),
    ("--config validate.yaml", {"run": True}, {"subcommand": "validate", "model.width": 5}),
    ("--config validate.yaml validate --model.width=3", {"run": True}, {"model.width": 3}),
    ("--trainer.max_epochs=3", {"parser_kwargs": {"default_config_files": ["one.yaml"]}},
     {"model.width": 5, "trainer.max_epochs": 3}),
    ("fit", {"parser_kwargs": {"fit": {"default_config_files": ["one.yaml"]}}, "run": True}, {"model.width": 5}),
    ("validate", {"parser_kwargs": {"fit": {"default_config_files": ["one.yaml"]}}, "run": True},
     {"model.width": 4}),
    # Data instead of words.
    ({"model": {"width": 3}, "trainer": {"max_epochs": 2}}, {}, {"model.width": 3, "trainer.max_epochs": 2}),
    ({"subcommand": "validate", "validate": {"model": {"width": 3}}}, {"run": True}, {"subcommand": "validate"}),
    # Classes by their name or path.
    ("--model.encoder=DeepEncoder --model.encoder.dim=3 --model.encoder.depth=7", {},
     {"model.encoder.__class__.__name__": "DeepEncoder", "model.encoder.dim": 3, "model.encoder.depth": 7}),
    ("--model.encoder=tests.cli.program.DeepEncoder", {}, {"model.encoder.depth": 2}),
    (["--model.encoder", json.dumps({"class_path": "Encoder", "init_args": {"dim": 6}})], {},
     {"model.encoder.__class__": Encoder, "model.encoder.dim": 6}),
    ("--model=WideLineNet --model.extra=2.5 --data=LineData --data.samples=8", ANY,
     {"model.__class__.__name__": "WideLineNet", "model.extra": 2.5, "datamodule.samples": 8}),
    ("--model=LineNet", ANY, {"datamodule": None}),
    ("--model.size=5 --trainer.epochs=4",
     {"model_class": net, "trainer_class": trainer, "trainer_defaults": None},
     {"model.width": 10, "trainer.max_epochs": 4}),
    ("--trainer.speed=3 --trainer.max_epochs=2", {"trainer_class": OwnTrainer},
     {"trainer.speed": 3, "trainer.max_epochs": 2}),
    ("--trainer.logger=CSVLogger --trainer.logger.save_dir=logs --trainer.logger.name=me", {},
     {"trainer.logger.__class__.__name__": "CSVLogger", "trainer.logger.name": "me"}),
    (["--trainer.logger", json.dumps([LOGGER, LOGGER])], {}, {"trainer.logger.name": "a"}),
    ("--trainer.logger=false", {}, {"trainer.loggers": []}),
    ("--trainer.logger=true", {"trainer_defaults": None}, {"trainer.logger.name": "lightning_logs"}),
    ("--trainer.strategy=SingleDeviceStrategy --trainer.accelerator=CPUAccelerator", {},
     {"trainer.strategy.__class__.__name__": "SingleDeviceStrategy"}),
    ({"trainer": {"plugins": {"class_path": "HalfPrecision", "init_args": {"precision": "bf16-true"}}}}, {},
     {"trainer.precision": "bf16-true"}),
    (['--trainer.plugins=["LightningEnvironment"]'], {}, {"trainer.world_size": 1}),
    # What a class passes on is an option too.
    ("--trainer.strategy=DDPStrategy --trainer.strategy.find_unused_parameters=true --trainer.devices=2", {},
     {"trainer.strategy.__class__.__name__": "DDPStrategy",
      "config.trainer.strategy.init_args.find_unused_parameters": True}),
    ({"trainer": {"logger": BOARD}}, {},
     {"config.trainer.logger.class_path": "hasten.loggers.TensorBoardLogger",
      "config.trainer.logger.init_args.flush_secs": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "options", "expected"), BECOMES)
def test_a_command_line_becomes_objects(
    words: Any, options: dict[str, Any], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text("model: {width: 5, name: one}\ntrainer: {max_epochs: 4}\n")
    Path("two.yaml").write_text("model: {width: 6}\n")
    Path("trainer.yaml").write_text("max_epochs: 4\nlimit_train_batches: 3\n")
    Path("validate.yaml").write_text("validate: {model: {width: 5}, verbose: false}\n")
    made = cli(*(words if isinstance(words, list) else [words]), **options)
    assert {path: attrgetter(path)(made) for path in expected} == expected
    # Of the arguments that a class passes on, only those given are.
    assert not [name for name in ("static_graph=", "module=", "max_queue=") if name in str(made.config)]


def callbacks_of(made: LightningCLI, kind: type) -> list[Any]:
    return [callback for callback in made.trainer.callbacks if isinstance(callback, kind)]


def test_callbacks_of_the_defaults_are_always_added() -> None:
    kept = LearningRateMonitor()
    defaults = {**QUIET, "logger": True, "max_epochs": 5, "callbacks": kept}
    made = cli("--trainer.callbacks=EarlyStopping --trainer.callbacks.monitor=a", trainer_defaults=defaults)
    assert made.trainer.max_epochs == 5
    assert kept in made.trainer.callbacks
    assert callbacks_of(made, EarlyStopping)
    assert "LearningRateMonitor" not in str(made.config.trainer.get("callbacks"))
    two = cli(trainer_defaults={**defaults, "callbacks": [kept]})
    assert two.trainer.callbacks.count(kept) == 1


def test_an_option_of_a_callback_belongs_to_the_one_added_last() -> None:
    made = cli(
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=a --trainer.callbacks.patience=5 "
        "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.filename=x --trainer.enable_checkpointing=true"
    )
    [stopping], [checkpoint] = callbacks_of(made, EarlyStopping), callbacks_of(made, ModelCheckpoint)
    assert (stopping.monitor, stopping.patience, checkpoint.filename) == ("a", 5, "x")
    assert checkpoint.monitor is None
    first = json.dumps([{"class_path": "EarlyStopping", "init_args": {"monitor": "a"}}])
    words = [f"--trainer.callbacks={first}", "--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor=b"]
    assert [one.monitor for one in callbacks_of(cli(*words), EarlyStopping)] == ["a", "b"]


def test_arguments_given_twice_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program.py", "--model.width=9"])
    with warned(UserWarning, says="LightningCLI(args=...)"):
        made = cli("--model.width=3")
    assert made.model.width == 3
    assert LightningCLI(LineNet, LineData, trainer_defaults=QUIET, run=False).model.width == 9
    with warned(UserWarning, says="LightningCLI(args=...)"):
        assert cli(made.config).model.width == 3


def test_a_trainer_without_callbacks_is_named() -> None:
    def bare(epochs: int = 2) -> L.Trainer:
        return trainer(epochs)

    with warned(UserWarning, says="`callbacks`"):
        assert cli(trainer_class=bare, trainer_defaults=None).trainer.max_epochs == 2


def test_another_trainer_of_the_same_config() -> None:
    made = cli("--trainer.limit_val_batches=3", trainer_defaults={**QUIET, "callbacks": [L.Callback()]})
    kept = EarlyStopping("a")
    other = made.instantiate_trainer(max_epochs=7, callbacks=[kept])
    assert other is not made.trainer
    assert (other.max_epochs, other.limit_val_batches, made.trainer.max_epochs) == (7, 3, 1)
    assert kept in other.callbacks
    assert made.config_init["trainer"]["max_epochs"] == 1
    assert len(other.callbacks) == len(made.trainer.callbacks) + 1


def helped(capsys: pytest.CaptureFixture[str], *words: str, **options: Any) -> str:
    """Return what a command line prints before it ends with 0."""
    with pytest.raises(SystemExit) as stopped:
        cli(*words, **options)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_has_types_and_texts(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(helped(capsys, "--help").split())
    # From Python 3.14 on a union is shown as it is written.
    shown = shown.replace("list[Callback] | Callback | null", "Union[list[Callback], Callback, null]")
    parameters = [name for name in L.Trainer.__init__.__annotations__ if name not in ("return", "unknown")]
    assert len(parameters) > 30
    for name in parameters:
        assert f"--trainer.{name} " in shown
    for text in (
        "epochs to train; -1 for no limit; 1000 when nothing limits the run. (type:",
        "one callback or a list. (type: Union[list[Callback], Callback, null], default: null, known sub",
        "features between the layers. (type: int, default: 4)",
        "samples in a batch. (type: int, default: 4)",
    ):
        assert text in shown
    assert "--model.encoder.depth DEPTH" in helped(capsys, "--model.encoder.help=DeepEncoder")
    shown = helped(capsys, "--help", run=True)
    assert "{fit,validate,test,predict}" in shown
    assert "--trainer.max_epochs" not in shown
    shown = helped(capsys, "predict --help", run=True)
    assert "--return_predictions {true,false,null}" in shown
    assert "--verbose" not in shown


def test_the_config_is_printed_and_is_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = helped(capsys, "fit --print_config --model.width=6 --model.encoder=DeepEncoder", run=True)
    assert text.startswith("# hasten==")
    config = yaml.safe_load(text)
    assert config["model"]["width"] == 6
    assert config["model"]["encoder"]["class_path"] == "tests.cli.program.DeepEncoder"
    assert (config["trainer"]["max_epochs"], config["ckpt_path"]) == (1, None)
    (tmp_path / "c.yaml").write_text(text)
    assert cli(f"fit --config {tmp_path / 'c.yaml'}", run=True).model.width == 6


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


@pytest.mark.parametrize(("word", "seed"), [("true", 0), ("false", False), ("5", 5)])
def test_the_seed(word: str, seed: int | bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(1234)
    before = torch.initial_seed()
    made = cli(f"--seed_everything={word}")
    assert made.config["seed_everything"] is seed or made.config["seed_everything"] == seed
    assert torch.initial_seed() == (before if seed is False else seed)
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    assert cli(seed_everything_default=True).config["seed_everything"] == 42


def test_a_parser_alone() -> None:
    parser = LightningArgumentParser(description="Mine.")
    assert "Mine." in parser.format_help()
    assert parser.add_lightning_class_args(LineData, "data") == ["data.batch_size", "data.samples"]
    assert parser.add_lightning_class_args(L.Callback, "callback", subclass_mode=True) == ["callback"]
    assert parser.callback_keys == ["callback"]
    parsed = parser.parse_args(["--data.batch_size=3", "--callback=EarlyStopping", "--callback.monitor=a"])
    assert parsed.data.batch_size == 3
    with refused(ValueError, says="Cannot add arguments from: "):
        parser.add_lightning_class_args(Encoder, "x")
    with refused(TypeError, says=("add_optimizer_args(", "Encoder", "torch.optim")):
        parser.add_optimizer_args(Encoder)  # type: ignore[arg-type]
    with refused(TypeError, says=("add_lr_scheduler_args(", "ReduceLROnPlateau")):
        parser.add_lr_scheduler_args((torch.optim.Adam,))  # type: ignore[arg-type]


def test_instantiate_class() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    made = instantiate_class((parameters,), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}})
    assert made.param_groups[0]["lr"] == 0.5
    assert instantiate_class((3, 2), {"class_path": "torch.nn.Linear"}).weight.shape == (2, 3)
    assert instantiate_class(4, {"class_path": "tests.cli.program.Encoder", "init_args": None}).dim == 4
    for path, message in (
        ("torch.optim.Adm", "torch.optim has no Adm. Did you mean 'Adam'"),
        ("Adam", "must be a path like 'torch.optim.Adam'; got 'Adam'"),
        (None, "got None"),
    ):
        with pytest.raises(ValueError, match=message):
            instantiate_class((), {"class_path": path})
