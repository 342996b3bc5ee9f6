"""Whole programs: their exit code, what they print where, the files they leave; and the commands of docs/cli.md."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program of these tests in ``folder``."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "tests.cli.program", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_program_trains_and_leaves_its_config(tmp_path: Path) -> None:
    done = run(
        tmp_path, "fit", "--model.width=6", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    saved = list(tmp_path.rglob("config.yaml"))
    assert len(saved) == 1
    assert yaml.safe_load(saved[0].read_text())["model"]["width"] == 6


def test_a_wrong_program_ends_with_two_and_one_message(tmp_path: Path) -> None:
    done = run(tmp_path, "fit", "--trainer.max_epoch=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: unrecognized arguments: --trainer.max_epoch=3\n"
        "Did you mean --trainer.max_epochs?\n"
        "All options: program.py fit --help\n"
    )


def test_what_the_command_line_loads(tmp_path: Path) -> None:
    code = (
        "import sys, hasten\n"
        "assert 'jsonargparse' not in sys.modules\n"
        "import hasten.cli\n"
        "heavy = {'wandb', 'mlflow', 'comet_ml', 'tensorboard', 'matplotlib', 'rich', 'onnx', 'torchvision'}\n"
        "from tests.cli.program import cli\n"
        "cli()\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_without_jsonargparse_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import hasten._lib.optional as optional

    monkeypatch.setattr(optional, "installed", lambda name: name != "jsonargparse")
    with pytest.raises(
        ModuleNotFoundError, match=r"needs the package jsonargparse, .*pip install hasten\[cli\]"
    ) as error:
        runpy.run_path(str(ROOT / "src" / "hasten" / "cli" / "__init__.py"))
    assert error.value.name == "jsonargparse"


def commands() -> list[tuple[str, str]]:
    """Return (command, what it prints) of every line of the page's consoles."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.strip()))
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    Path("program.py").write_text(program[1])
    assert len(commands()) == 14
    for command, expected in commands():
        words, _, target = command.partition(" > ")
        python, script, *rest = shlex.split(words)
        assert (python, script) == ("python", "program.py")
        monkeypatch.setattr("sys.argv", [script, *rest])
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path("program.py", run_name="__main__")
            except SystemExit as stopped:
                code = int(stopped.code or 0)
        if target:
            Path(target).write_text(out.getvalue())
        assert code == (2 if expected else 0), (command, err.getvalue())
        if expected:
            assert err.getvalue().startswith(f"{expected}\n"), command
        if "--help" in command:
            assert "usage: program.py" in out.getvalue()
    one, other = (yaml.safe_load(Path(f"logs/mine/version_{n}/config.yaml").read_text()) for n in (0, 1))
    assert (
        one["model"]
        == other["model"]
        == {"encoder": {"class_path": "__main__.Encoder", "init_args": {"dim": 8}}, "lr": 0.1}
    )
    assert Path("logs/mine/version_1/checkpoints").is_dir()
