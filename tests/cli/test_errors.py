"""A wrong command line: what is wrong, and the nearest key; exit code 2."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from hasten._lib.errors import MisconfigurationException
from hasten.callbacks import Timer
from hasten.cli import LightningCLI
from hasten.demos.boring_classes import BoringModel
from tests.cli.program import cli
from tests.refusals import refused, warned

ANY: dict[str, Any] = {"model_class": None}
RUN: dict[str, Any] = {"run": True}
DEEP = "--model.encoder=DeepEncoder"

# The words, the options of the program, a part of the message, the nearest there is.
WRONG: list[tuple[list[str] | dict[str, Any], dict[str, Any], str, str | None]] = [
    (["--trainer.max_epoch=3"], {}, "--trainer.max_epoch=3", "--trainer.max_epochs"),
    (["--trainer.max_epoch", "3"], {}, "--trainer.max_epoch 3", "--trainer.max_epochs"),
    (["fit", "--trainer.max_epoch=3"], RUN, "--trainer.max_epoch=3", "--trainer.max_epochs"),
    (["--trainer.max_epoch=3", "fit"], RUN, "--trainer.max_epoch=3", "--trainer.max_epochs"),
    (["--max_epochs=3"], {}, "--max_epochs=3", "--trainer.max_epochs"),
    (["--modell.width=3"], {}, "--modell.width=3", "--model.width"),
    (["--model.max_epochs=3"], {}, "--model.max_epochs=3", "--trainer.max_epochs"),
    (["--qqqqqq=1"], {}, "--qqqqqq=1", None),
    (["model.width=3"], {}, "model.width=3", "--model.width"),
    (["-model.width=3"], {}, "-model.width=3", "--model.width"),
    (["--model.qqqqqq=3"], {}, "Options of model: --model.", None),
    (["--epochs=3"], {}, "--epochs=3", "--trainer.max_epochs"),
    (["train"], RUN, "invalid choice: 'train'", "fit"),
    ({"model": {"class_path": "other.Net", "init_args": {"qqqqqq": 3}}}, {}, "Leave class_path and init_args", None),
    (["--model.width=abc"], {}, "Expected a <class 'int'>. Got value: abc", None),
    (["--model.kind=three"], {}, "{one,two}. Got value: three", None),
    (["--trainer.max_epochs=-7"], {}, "--trainer.max_epochs=-7: use a whole number", None),
    (["--trainer.accelerator=abacus"], {}, "--trainer.accelerator='abacus': use one of ", None),
    (["--trainer.logger=CSVLoger"], {}, "CSVLoger", "CSVLogger"),
    (["--trainer.callbacks+=EarlyStopping"], {}, "required: monitor", None),
    (
        ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitr=x"],
        {},
        "Option 'monitr' is not accepted",
        "monitor",
    ),
    (
        ["--trainer.callbacks=Timer", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr=x"],
        {},
        "Option 'monitr' is not accepted",
        "monitor",
    ),
    ([DEEP, "--model.encoder.dept=3"], {}, "Option 'dept' is not accepted", "depth"),
    ([DEEP, "--model.encoder.depth=x"], {}, "Expected a <class 'int'>. Got value: x", None),
    (["--model.encoder=DepEncoder"], {}, "DepEncoder", "DeepEncoder"),
    (["--model=WideLineNet", "--model.extr=3"], ANY, "Option 'extr' is not accepted", "extra"),
    (["--model=WideLineNt"], ANY, "WideLineNt", "WideLineNet"),
    ([], ANY, "required: model", None),
    (["--optimizer=Adm"], {}, "Adm", "Adam"),
    (["--optimizer.lr=3"], {}, "Choose a class first, as in --optimizer=", None),
    (["--lr_scheduler.gamma=3"], {}, "Choose a class first, as in --lr_scheduler=", None),
    (["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"], {}, "--lr_scheduler=StepLR without --optimizer", None),
    (["--print-config"], {}, "--print-config", "--print_config"),
    (["--trainer.max-epochs=3"], {}, "--trainer.max-epochs=3", "--trainer.max_epochs"),
    (["--trainer.max_epochs=None"], {}, "In YAML, None is written null", None),
    ({"trainer": {"callbacks": [{"class_path": "Timer", "duration": "1h"}]}}, {}, "stand below init_args", None),
    ({"optimizer": {"class_path": "torch.optim.Adamw"}}, {}, "no attribute 'Adamw'", "AdamW"),
    ({"seed": 3}, {}, "'seed'", "--seed_everything"),
    ({"data": {"max_epochs": 3}}, {}, "Options of data: --data.batch_size", "--trainer.max_epochs"),
    (["--optimizer=Adam", "--optimizer.lrr=3"], {}, "Option 'lrr' is not accepted", "lr"),
    (
        ["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameter=1"],
        {},
        "Option 'find_unused_parameter' is not accepted",
        "find_unused_parameters",
    ),
    (["--optimizer=SGD"], {"auto_configure_optimizers": False}, "--optimizer=SGD", "--trainer.fused_optimizer"),
    (["fitt"], RUN, "invalid choice: 'fitt'", "fit"),
    ([], RUN, "{fit,validate,test,predict}", None),
    (["--config=none.yaml"], {}, "File does not exist: ", None),
    ({"trainer": {"max_epoch": 3}}, {}, "does not accept option 'max_epoch'", "--trainer.max_epochs"),
    ({"model": {"width": "x"}}, {}, "Expected a <class 'int'>. Got value: x", None),
    ({"data": {"batch_sise": 3}}, {}, "does not accept option 'batch_sise'", "--data.batch_size"),
    ({"datamodule": {"batch_size": 3}}, {}, "'datamodule.batch_size'", "--data.batch_size"),
    (["--trainer.max_epochs=1", "fit"], RUN, "The subcommand comes before the options", None),
    ({"fit": {"trainer": {"max_epoch": 3}}}, RUN, "'trainer.max_epoch'", "--trainer.max_epochs"),
    (
        {"model": {"class_path": "WideLineNet", "init_args": {"encoder": {"class_path": "DeepEncoder", "init_args": {
            "depht": 4}}}}},
        ANY,
        "Option 'depht' is not accepted",
        "depth",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "options", "message", "near"), WRONG)
def test_a_wrong_command_line_or_config(
    words: Any,
    options: dict[str, Any],
    message: str,
    near: str | None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    lines = [words] if isinstance(words, list) else [[words], ["--config", str(tmp_path / "c.yaml")]]
    (tmp_path / "c.yaml").write_text(yaml.dump(words))
    for line in lines:
        with pytest.raises(SystemExit) as stopped:
            cli(*line, **options)
        assert stopped.value.code == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "error: " in shown.err
        assert message in shown.err
        *_, last, usage = shown.err.splitlines()
        assert (last == f"Did you mean {near}?") if near else ("Did you mean" not in shown.err)
        assert usage.startswith("All options: program.py ")
        assert usage.endswith("--help")


def test_a_section_that_a_config_has_twice_is_said(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("trainer:\n  max_epochs: 1\nmodel:\n  width: 3\ntrainer:\n  accelerator: cpu\n")
    with warned(UserWarning, says=("c.yaml has trainer: twice",)):
        cli("--config", str(config))
    config.write_text("trainer:\n  callbacks:\n  - class_path: hasten.callbacks.Timer\nmodel:\n  width: 3\n")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*twice")
        callbacks = cli("--config", str(config)).trainer.callbacks
    assert any(isinstance(each, Timer) for each in callbacks)


def test_a_class_of_lightning_is_one_of_hasten(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--trainer.callbacks=pytorch_lightning.callbacks.Timer")
    shown = capsys.readouterr().err
    assert "No module named 'pytorch_lightning'" in shown
    assert "Write hasten.callbacks.Timer, or start the program with `hasten run`.\n" in shown


def test_options_of_lightning_1_are_told_what_replaces_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "old.yaml"
    config.write_text("trainer:\n  gpus: 1\n", encoding="utf-8")
    for words in (["--trainer.gpus=1"], [f"--config={config}"]):
        with pytest.raises(SystemExit):
            cli(*words)
        assert "Write Trainer(accelerator='gpu', devices=...)" in capsys.readouterr().err


def test_errors_as_exceptions_for_programs_that_ask_for_them() -> None:
    from jsonargparse import ArgumentError

    with pytest.raises(ArgumentError, match=r"--model.widht=3\nDid you mean --model.width\?"):
        cli("--model.widht=3", parser_kwargs={"exit_on_error": False})


def test_a_config_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli("--config=confg.yaml")
    assert "Give the path of a file, seen from" in capsys.readouterr().err
    Path("config.yaml").write_text("{}")
    with pytest.raises(SystemExit):
        cli("--config=confg.yaml")
    assert "Did you mean '" + str(tmp_path / "config.yaml") in capsys.readouterr().err


def test_an_error_of_syntax_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("right.yaml").write_text("trainer:\n  max_epochs: 1\n")
    Path("wrong.yaml").write_text("trainer:\n  max_epochs: 1\n   max_steps: 2\n")
    with pytest.raises(SystemExit):
        cli("--config=right.yaml", "--config=wrong.yaml")
    assert "in wrong.yaml, line 3" in capsys.readouterr().err
    Path("empty.yaml").touch()
    with pytest.raises(SystemExit):
        cli("--config=empty.yaml")
    assert "empty.yaml has no keys" in capsys.readouterr().err


class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("model.widht", "data.batch_size")


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: cli(model_class=BoringModel()), "give the class BoringModel"),
        (lambda: cli(trainer_defaults={"max_epoch": 3}), "'trainer.max_epochs'"),
        (lambda: cli(kind=Linked), "'model.width'"),
    ],
)
def test_a_mistake_in_the_program_is_an_exception_that_says_what_to_write(make: Any, fix: str) -> None:
    with refused(MisconfigurationException, fix=fix):
        make()
