"""A wrong command line: the key, the value, what is expected, the nearest key; exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.cli import LightningCLI
from hasten.cli.errors import spelled
from tests.cli.program import Kind, cli

ANY: dict[str, Any] = {"model_class": None}
RUN: dict[str, Any] = {"run": True}

WRONG: list[tuple[list[str], dict[str, Any], str]] = [
    (["--trainer.max_epoch=3"], {}, "--trainer.max_epoch: unknown; did you mean --trainer.max_epochs?"),
    (["--trainer.max_epoch", "3"], {}, "--trainer.max_epoch: unknown; did you mean --trainer.max_epochs?"),
    (
        ["fit", "--trainer.max_epoch=3"],
        RUN,
        "--trainer.max_epoch: unknown; did you mean --trainer.max_epochs?",
    ),
    (
        ["--trainer.max_epoch=3", "fit"],
        RUN,
        "--trainer.max_epoch: unknown; did you mean --trainer.max_epochs?",
    ),
    (["--max_epochs=3"], {}, "--max_epochs: unknown; did you mean --trainer.max_epochs?"),
    (["--modell.width=3"], {}, "--modell.width: unknown; did you mean --model.width?"),
    (["--model.max_epochs=3"], {}, "--model.max_epochs: unknown; did you mean --trainer.max_epochs?"),
    (["--model.qqqqqq=3"], {}, "--model.qqqqqq: unknown"),
    (["--qqqqqq=1"], {}, "--qqqqqq: unknown"),
    (["--model.width=abc"], {}, "--model.width=abc: expected int"),
    (["--model.width=1.5"], {}, "--model.width=1.5: expected int"),
    (["--model.kind=three"], {}, "--model.kind=three: expected one or two"),
    (["--model.mode=mid"], {}, "--model.mode=mid: expected min or max"),
    (["--seed_everything=x"], {}, "--seed_everything=x: expected true, false or int"),
    (["--trainer.barebones=5"], {}, "--trainer.barebones=5: expected true or false"),
    (["--data.batch_size=null"], {}, "--data.batch_size=null: expected int"),
    (["--trainer.max_epochs=abc"], {}, "--trainer.max_epochs got 'abc': write "),
    (["--trainer.max_epochs=-7"], {}, "--trainer.max_epochs=-7: "),
    (["--trainer.accelerator=cdua"], {}, "--trainer.accelerator='cdua': there is no such accelerator. "),
    (
        ["--trainer.logger=CSVLoger"],
        {},
        "--trainer.logger=CSVLoger: no such class; did you mean CSVLogger? Known are ",
    ),
    (["--trainer.callbacks+=EarlyStopping"], {}, "--trainer.callbacks.monitor: required, and not given"),
    (
        ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitr=x"],
        {},
        "--trainer.callbacks.monitr: unknown; did you mean --trainer.callbacks.monitor?",
    ),
    (
        ["--trainer.callbacks=torch.nn.Linear"],
        {},
        "--trainer.callbacks=torch.nn.Linear: expected a subclass of Callback. Known are ",
    ),
    (
        ["--trainer.callbacks=pytorch_lightning.callbacks.Timer"],
        {},
        "--trainer.callbacks=pytorch_lightning.callbacks.Timer: No module named 'pytorch_lightning'. "
        "Write hasten.callbacks.Timer, or start the program with `hasten run`.",
    ),
    (["--trainer.callbacks=none.Such"], {}, "--trainer.callbacks=none.Such: No module named 'none'"),
    (
        ["--model.encoder=DeepEncoder", "--model.encoder.dept=3"],
        {},
        "--model.encoder.dept: unknown; did you mean --model.encoder.depth?",
    ),
    (["--model.encoder=DeepEncoder", "--model.encoder.depth=x"], {}, "--model.encoder.depth=x: expected int"),
    (
        ["--model.encoder=DepEncoder"],
        {},
        "--model.encoder=DepEncoder: no such class; did you mean DeepEncoder? "
        "Known are DeepEncoder; others by their whole path, package.module.Class.",
    ),
    (
        ["--model.encoder.depth=3"],
        {},
        "--model.encoder.depth: unknown to Encoder; name a class with --model.encoder=... Known are DeepEncoder; ",
    ),
    (["--model=WideLineNet", "--model.extr=3"], ANY, "--model.extr: unknown; did you mean --model.extra?"),
    (
        ["--model=WideLineNet", "--model.encoder=DeepEncoder", "--model.encoder.depth=x"],
        ANY,
        "--model.encoder.depth=x: expected int",
    ),
    (["--model=WideLineNt"], ANY, "--model=WideLineNt: no such class; did you mean WideLineNet? Known are "),
    ([], ANY, "--model: required, and not given"),
    (["fit"], {**RUN, **ANY}, "--model: required, and not given"),
    (["--optimizer=Adm"], {}, "--optimizer=Adm: no such class; did you mean Adam? Known are "),
    (["--optimizer=Adam", "--optimizer.lrr=3"], {}, "--optimizer.lrr: unknown; did you mean --optimizer.lr?"),
    (
        ["--optimizer.lr=3"],
        {},
        "--optimizer.lr: unknown to Optimizer; name a class with --optimizer=... Known are ",
    ),
    (
        ["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameter=1"],
        {},
        "--trainer.strategy.find_unused_parameter: unknown; did you mean --trainer.strategy.find_unused_parameters?",
    ),
    (
        ["--trainer.strategy=DDPStrategy", "--trainer.strategy.qqqqq=1"],
        {},
        "--trainer.strategy.qqqqq: unknown. What DDPStrategy takes as **kwargs goes under "
        "--trainer.strategy.dict_kwargs.qqqqq=...",
    ),
    (["fitt"], RUN, "'fitt': no such sub-command; did you mean fit? There are fit, validate, test, predict."),
    ([], RUN, "a sub-command is missing: one of fit, validate, test, predict"),
    (["--config=none.yaml"], {}, "--config: File does not exist: "),
]


@pytest.mark.parametrize(
    ("words", "options", "message"), WRONG, ids=[" ".join(row[0]) or "none" for row in WRONG]
)
def test_a_wrong_command_line(
    words: list[str], options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli(*words, **options)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.startswith(("error:", "All options"))]
    # A message that goes on does so after a space.
    assert (
        lines[0].startswith(f"error: {message}") if message[-1] in " =;" else lines[0] == f"error: {message}"
    )
    assert lines[1].startswith("All options: program.py ")
    assert lines[1].endswith("--help")


def test_the_line_of_a_short_message_is_the_whole_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("fit", "--trainer.max_epoch=3", run=True)
    assert capsys.readouterr().err == (
        "error: --trainer.max_epoch: unknown; did you mean --trainer.max_epochs?\nAll options: program.py fit --help\n"
    )


def test_several_unknown_options_are_all_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--model.widht=3", "--data.sample=4")
    shown = capsys.readouterr().err
    assert "--model.widht: unknown; did you mean --model.width?" in shown
    assert "--data.sample: unknown; did you mean --data.samples?" in shown


CONFIGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"trainer": {"max_epoch": 3}}, {}, "--trainer.max_epoch: unknown; did you mean --trainer.max_epochs?"),
    ({"trainer": {"max_epochs": [1]}}, {}, "--trainer.max_epochs=[1]: expected int, str or null"),
    ({"model": {"width": "x"}}, {}, "--model.width=x: expected int"),
    ({"fit": {"trainer": {"max_epoch": 3}}}, RUN, "--trainer.max_epoch: unknown; did you mean --trainer.max_epochs?"),
    ({"model": {"encoder": 3}}, {}, "--model.encoder=3: expected Encoder or null"),
    (
        {"model": {"class_path": "WideLineNet", "init_args": {"encoder": {"class_path": "DeepEncoder", "init_args": {
            "depht": 4}}}}},
        ANY,
        "--model.encoder.depht: unknown; did you mean --model.encoder.depth?",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "options", "message"), CONFIGS)
def test_a_wrong_config_as_data_and_as_a_file(
    config: dict[str, Any],
    options: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import yaml

    with pytest.raises(SystemExit):
        cli(config, **options)
    assert f"error: {message}\n" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text(yaml.dump(config))
    with pytest.raises(SystemExit) as stopped:
        cli("--config", str(tmp_path / "c.yaml"), **options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_trainer_that_cannot_be_raises_where_python_asked_for_it() -> None:
    with pytest.raises(ValueError, match=r"Trainer\(accelerator='cdua'\)"):
        cli({"trainer": {"accelerator": "cdua"}})


def test_the_users_own_error_is_not_hidden() -> None:
    class Broken(LightningCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            raise ValueError("Trainer of mine")

    with pytest.raises(ValueError, match="Trainer of mine"):
        cli(kind=Broken)


def test_errors_as_exceptions_for_programs_that_ask_for_them() -> None:
    from jsonargparse import ArgumentError

    with pytest.raises(ArgumentError, match=r"--model.widht: unknown; did you mean --model.width\?"):
        cli("--model.widht=3", parser_kwargs={"exit_on_error": False})


def test_types_as_a_user_reads_them() -> None:
    assert spelled(int) == "int"
    assert spelled(None) == "null"
    assert spelled(bool | int) == "true, false or int"
    assert spelled(Kind | None) == "one, two or null"
    assert spelled(list[Kind]) == "list[Kind]"
    assert spelled(dict[str, int] | int | str) == "dict[str, int], int or str"
