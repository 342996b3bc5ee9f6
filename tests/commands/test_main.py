"""The command line: hints, exit codes, quick help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hasten
from hasten.commands import main

# As the installed program `hasten` does.
PROGRAM = (sys.executable, "-c", "import sys; from hasten.commands import main; sys.exit(main())")


def stopped(*arguments: str) -> int:
    """Run where argparse itself ends the program; its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["dmeo"],
            "unknown command 'dmeo'. Did you mean 'demo'? Choose one of: advise, demo, migrate, plot, run.",
        ),
        (["--verson"], "unknown option --verson. Did you mean '--version'?"),
        (["demo", "--tsak", "imdb"], "unknown option --tsak. Did you mean '--task'?"),
        (["demo", "--row-second=3"], "unknown option --row-second. Did you mean '--row-seconds'?"),
        (
            ["demo", "--task", "imbd"],
            "argument --task: 'imbd' is not one of docstrings, digits, imdb, vit. Did you mean 'imdb'?",
        ),
        (["demo", "--model", "distilbrt"], "Did you mean 'distilbert'?"),
        (["demo", "imdb"], "unexpected argument 'imdb'"),
        (["demo", "--limit", "many"], "argument --limit: 'many' is not a whole number of at least 10."),
        (["demo", "--limit", "9"], "'9' is not a whole number of at least 10."),
        (["demo", "--row-seconds", "0"], "'0' is not a number above 0."),
        (["demo", "--learning-rate", "nan"], "'nan' is not a number above 0."),
        (["demo", "--accelerator", "gup"], "Did you mean 'gpu'?"),
        (["plot"], "LOGDIR"),
    ],
)
def test_wrong_words_are_answered_with_the_right_one(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopped(*arguments) == 2
    assert said in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hasten {hasten.__version__}\n"


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert "demo " in shown
    assert "plot " in shown


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["--help"], "COMMAND"), (["demo", "--help"], "--row-seconds")]
)
def test_help_comes_without_loading_torch(arguments: list[str], shown: str) -> None:
    code = (
        "import sys\nfrom hasten.commands import main\n"
        f"try: main({arguments})\nexcept SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    done = subprocess.run(
        (sys.executable, "-c", code),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100


@pytest.mark.parametrize(
    ("option", "tasks"),
    [
        ("--data=x", "the imdb task and the vit task"),
        ("--task=digits --limit=100", "the docstrings task and the imdb task and the vit task"),
        ("--task=digits --model=minilm", "the docstrings task and the imdb task"),
        ("--task=digits --random-weights", "the docstrings task and the imdb task"),
        ("--pretrained", "the vit task"),
        ("--task=vit --max-length=64", "the docstrings task and the imdb task"),
        ("--task=imdb --side=64", "the vit task"),
    ],
)
def test_options_of_another_task_are_refused(
    option: str, tasks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *option.split()]) == 1
    name = option.split()[-1].partition("=")[0]
    assert f"{name} is for {tasks}. Add" in capsys.readouterr().err


def test_a_missing_archive_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["demo", "--task", "imdb", "--data", "nowhere.tar.gz", "--output", str(tmp_path)])
    said = capsys.readouterr().err
    assert code == 1
    assert "nowhere.tar.gz" in said
    assert len(said.splitlines()) == 1


def test_plot_draws_what_the_csv_logger_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss,val_acc\n0,9,1.0,,\n0,9,,0.9,0.5\n1,19,0.5,,\n1,19,,0.6,0.7\n"
    )
    assert main(["plot", str(tmp_path), "--output", str(tmp_path / "plots")]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.split()]
    assert {path.name for path in drawn} >= {"loss.pdf", "loss.png", "acc.pdf", "acc.png"}
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_plot_of_an_empty_folder_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("hasten plot: ")
    assert "metrics.csv" in said
