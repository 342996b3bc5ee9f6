"""Whole programs: their exit code, what they print where, the files they leave; and the commands of docs/cli.md."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml

from hasten.cli import hyperparameters, save_config
from tests.cli.program import cli
from tests.programs import ROOT, fork_python
from tests.refusals import refused

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_a_wrong_program_ends_with_two_and_one_message_and_loads_little() -> None:
    code = (
        "import sys, hasten\n"
        "assert 'jsonargparse' not in sys.modules\n"
        "from tests.cli.program import main\n"
        "sys.argv = ['program.py', 'fit', '--trainer.max_epoch=3']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'wandb', 'mlflow', 'comet_ml', 'tensorboard', 'matplotlib', 'rich', 'onnx', 'torchvision'}\n"
        "    print(sorted(heavy & set(sys.modules)))\n"
    )
    done = fork_python("-c", code)
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr
    assert done.stderr == (
        "error: unrecognized arguments: --trainer.max_epoch=3\n"
        "Did you mean --trainer.max_epochs?\n"
        "All options: program.py fit --help\n"
    )


@pytest.mark.filterwarnings("ignore")
def test_an_older_jsonargparse_makes_the_same_objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Its methods are still there, under their older names.
    monkeypatch.setattr(hyperparameters, "RENEWED", False)
    for module in (hyperparameters, save_config):
        monkeypatch.setattr(module, "WITH_NONE", {"skip_none": False})
    options = {"save_config_callback": save_config.SaveConfigCallback, "run": True}
    made = cli("fit", f"--trainer.default_root_dir={tmp_path}", "--model.encoder=DeepEncoder", **options)
    assert made.model.hparams.encoder["class_path"] == "tests.cli.program.DeepEncoder"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["encoder"]["init_args"]["depth"] == 2


def test_without_jsonargparse_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import hasten._lib.optional as optional

    monkeypatch.setattr(optional, "installed", lambda name: name != "jsonargparse")
    with refused(ModuleNotFoundError, says="[cli]'") as error:
        runpy.run_path(str(ROOT / "src" / "hasten" / "cli" / "__init__.py"))
    assert error.value.name == "jsonargparse"


@pytest.mark.filterwarnings("ignore")
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    Path("program.py").write_text(program[1])
    consoles = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    shown = [part for block in consoles for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(shown) == 14
    for part in shown:
        command, _, output = part.partition("\n")
        expected = output.strip()
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
    encoder = {"class_path": "__main__.Encoder", "init_args": {"dim": 8}}
    assert one["model"] == other["model"] == {"encoder": encoder, "lr": 0.1}
    assert Path("logs/mine/version_1/checkpoints").is_dir()
