"""The command line: hints, exit codes, quick help."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.programs import run_python

import hasten
from hasten.commands import commands, main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("dmeo", "COMMAND 'dmeo' is unknown. Did you mean 'demo'?"),
        ("chekc", "COMMAND 'chekc' is unknown. Did you mean 'check'?"),
        ("--print-completion bsh", "SHELL 'bsh' is unknown. Did you mean 'bash'?"),
        ("--verson", "unknown option --verson. Did you mean '--version'?"),
        ("demo --tsak imdb", "unknown option --tsak. Did you mean '--task'?"),
        ("demo --row-second=3", "unknown option --row-second. Did you mean '--row-seconds'?"),
        ("train.py", "'train.py' is a program, not a command. Write hasten run train.py."),
        ("fabric run --devices 2 train.py", "COMMAND 'fabric' is unknown. Write hasten launch train.py."),
        ("help", "Write hasten --help."),
        ("run --fused train.py", "unknown option --fused. Did you mean '--fused-optimizer'?"),
        ("demo --task imbd", "--task 'imbd' is unknown. Did you mean 'imdb'?"),
        ("demo imdb", "unexpected argument 'imdb'"),
        ("demo --limit many", "argument --limit: 'many' is not a whole number of at least 10."),
        ("demo --limit 9", "'9' is not a whole number of at least 10."),
        ("demo --row-seconds 0", "'0' is not a number above 0."),
        ("demo --learning-rate nan", "'nan' is not a number above 0."),
        ("plot", "name a run: hasten plot lightning_logs/version_0"),
        ("consolidate", "FOLDER"),
        ("consolidate a --weight-only", "Did you mean '--weights-only'?"),
        ("--print-completion xyzzy", "'xyzzy' (choose from "),
        ("--print-completion", "expected one argument"),
        ("migrate", "DIR"),
        ("migrate nowhere", "'nowhere' does not exist"),
        ("migrate --dryrun .", "Did you mean '--dry-run'?"),
        ("run", "name a program: hasten run train.py"),
        ("launch --procs 0 train.py", "argument --procs/--nproc-per-node/"),
        ("check --json nowhere/found.json train.py", "argument --json: the folder nowhere does not exist."),
        ("plan --json nowhere/found.json train.py", "argument --json: the folder nowhere does not exist."),
        ("advise --png nowhere/found.png train.py", "argument --png: the folder nowhere does not exist."),
        ("report -o nowhere/report.html .", "argument -o/--output: the folder nowhere does not exist."),
    ],
)
def test_wrong_words_are_answered_with_the_right_one(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_file_to_migrate_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for name, hint in (("trian.py", " Did you mean 'train.py'?\n"), ("rv.py", "\n")):
        with pytest.raises(SystemExit):
            main(["migrate", name])
        assert f"{name!r} does not exist.{hint}" in capsys.readouterr().err


def test_the_version_and_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hasten {hasten.__version__}\n"
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("advise", "consolidate", "demo", "migrate", "plot", "run"))


def test_each_command_has_a_parser_that_can_be_asked() -> None:
    for name, command in commands().items():
        made = importlib.import_module(command.module).make_parser()
        assert made.prog == f"hasten {name}"
        assert made.description
        assert command.summary[0].islower()
        assert not command.summary.endswith(".")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_complete_commands_options_and_files(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in commands())
    assert "weights-only" in script
    assert {"bash": "_shtab_glob_compgen_", "zsh": "_files -g '(*.py)'", "tcsh": "f:{*.py}"}[shell] in script


def test_bash_offers_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    assert main(["--print-completion=bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    for name in ("train.py", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    asked = {
        ("p",): {"plan", "plot"},
        ("demo", "--ta"): {"--task"},
        ("demo", "--task", "d"): {"docstrings", "digits"},
        ("run", ""): {"train.py", "folder"},
        ("consolidate", ""): {"folder"},
    }
    lines = [f"source {tmp_path / 'completion'}", f"cd {tmp_path}"]
    for words in asked:
        quoted = " ".join(f"'{word}'" for word in ("hasten", *words))
        lines += [f"COMP_WORDS=({quoted}) COMP_CWORD={len(words)} COMPREPLY=()"]
        lines += ['_shtab_hasten hasten "${COMP_WORDS[COMP_CWORD]}"; echo "${COMPREPLY[@]}"']
    done = subprocess.run([bash, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=600, check=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(asked.values()), done.stderr


def test_help_comes_without_loading_torch() -> None:
    program = (
        "import sys\nfrom hasten.commands import main\nfor arguments in (['--help'], ['demo', '--help']):\n"
        "    try: main(arguments)\n    except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "COMMAND" in done.stdout
    assert "--row-seconds" in done.stdout
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
def test_options_of_another_task_are_refused(option: str, tasks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *option.split()]) == 1
    name = option.split()[-1].partition("=")[0]
    assert f"{name} is for {tasks}. Add" in capsys.readouterr().err


def test_a_missing_archive_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--task", "imdb", "--data", "nowhere.tar.gz", "--output", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere.tar.gz" in line


def test_plot_draws_a_csv_and_names_a_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hasten plot: ")
    assert "metrics.csv" in error
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss,val_acc\n0,9,1.0,,\n0,9,,0.9,0.5\n1,19,0.5,,\n1,19,,0.6,0.7\n"
    )
    assert main(["plot", str(tmp_path), "--output", str(tmp_path / "plots")]) == 0
    drawn = [Path(line) for line in capsys.readouterr().out.split()]
    assert {path.name for path in drawn} >= {"loss.pdf", "loss.png", "acc.pdf", "acc.png"}
    assert all(path.stat().st_size > 1000 for path in drawn)
