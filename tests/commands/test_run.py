"""`hasten run`: programs written for Lightning, in this process and those they start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.programs import ROOT, fork_python, run_python, started_copies

from hasten.commands import main

PROGRAM = """
import json, os, sys
import pytorch_lightning as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        import hasten, lightning, package

        assert lightning.Trainer is hasten.compat.trainer.Trainer is package.Base
        return torch.full((32,), float(os.getpid() != int(os.environ.get("MAIN", 0))))


class Model(BoringModel):
    def train_dataloader(self):
        context = os.environ.get("CONTEXT")
        return DataLoader(Data(), num_workers=int(context is not None), multiprocessing_context=context)

    def training_step(self, batch, batch_idx):
        self.from_elsewhere = float(batch.mean())
        return super().training_step(batch, batch_idx)

    def on_fit_end(self):
        with open(f"rank{self.trainer.global_rank}.json", "w") as file:
            json.dump([self.trainer.global_step, self.from_elsewhere, sys.argv[1:], __name__], file)


if __name__ == "__main__":
    os.environ.setdefault("MAIN", str(os.getpid()))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=sys.argv[1],
        devices=int(sys.argv[2]),
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
"""

# A package built on Lightning; Lightning itself is "installed" beside it, and must not be found.
PACKAGE = "from lightning.pytorch import Trainer as Base\nclass Own(Base): ...\n"
INSTALLED = "raise RuntimeError('Lightning itself was imported')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "site" / "lightning").mkdir(parents=True)
    (tmp_path / "site" / "lightning" / "__init__.py").write_text(INSTALLED)
    (tmp_path / "site" / "pytorch_lightning.py").write_text(INSTALLED)
    (tmp_path / "site" / "package.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths() -> str:
    return os.pathsep.join([str(ROOT / "src"), str(Path("site").absolute())])


def hasten_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return fork_python("-m", "hasten", "run", *arguments, PYTHONPATH=paths(), **environment)


def said(rank: int) -> list[Any]:
    found: list[Any] = json.loads(Path(f"rank{rank}.json").read_text())
    return found


def test_the_processes_of_a_program_have_the_alias_whether_or_not_lightning_is_installed(folder: Path) -> None:
    """Two ranks, and a worker started by "spawn" for each."""
    done = hasten_run("train.py", "ddp", "2", "--flag", CONTEXT="spawn", **started_copies(2))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert said(rank) == [2, 1.0, ["ddp", "2", "--flag"], "__main__"]


def test_a_module_is_run_again_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    import __main__
    from hasten.machine import launch

    monkeypatch.setattr(launch, "PREFIX", ["-m", "hasten", "run"])
    monkeypatch.setattr(__main__, "__spec__", importlib.util.find_spec("json.tool"))
    monkeypatch.setattr(sys, "argv", ["x", "a", "b"])
    command = launch.command_of_this_program()
    assert (command[0], command[-7:]) == (sys.executable, ["-m", "hasten", "run", "-m", "json.tool", "a", "b"])


def test_install_in_the_program_itself_does_the_same_for_its_children(folder: Path) -> None:
    (folder / "own.py").write_text("import hasten.compat\nhasten.compat.install()\n" + PROGRAM)
    done = fork_python("own.py", "auto", "1", PYTHONPATH=paths(), CONTEXT="forkserver", **started_copies(1))
    assert done.returncode == 0, done.stderr
    assert said(0)[:2] == [4, 1.0]


def test_what_a_program_sees_is_what_python_shows_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("x = 1\n")
    (folder / "sub" / "p.py").write_text(
        "import sys, beside, pickle\n"
        "class A: pass\n"
        "assert type(pickle.loads(pickle.dumps(A()))) is A\n"
        "print(__name__, __file__, sys.argv, sys.path[0], __spec__)\n"
        "import atexit; atexit.register(lambda: print('end', A.__name__))\n"
        "sys.exit(7)\n"
    )
    words = ("sub/p.py", "--help", "-m", "x")
    ours, plain = hasten_run(*words), run_python(*words, PYTHONPATH=paths())
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ours.returncode == 7
    # A folder with a __main__.py.
    (folder / "sub" / "__main__.py").write_text("import sys, beside; print(__name__, sys.argv[1:])\n")
    done = hasten_run("sub", "a")
    assert (done.returncode, done.stdout) == (0, "__main__ ['a']\n")


def test_an_error_is_shown_without_the_frames_of_the_command(folder: Path) -> None:
    text = "import sys\ndef f():\n    raise KeyboardInterrupt if sys.argv[1:] else ValueError('no')\n\nf()\n"
    (folder / "p.py").write_text(text)
    for arguments, code, message in ((("p.py", "x"), 130, "KeyboardInterrupt"), (("-m", "p"), 1, "ValueError: no")):
        done = hasten_run(*arguments)
        first, *_, last = done.stderr.splitlines()
        assert (done.returncode, first, last) == (code, "Traceback (most recent call last):", message)
        assert "commands" not in done.stderr
        assert done.stderr.count("File") == 2
    (folder / "--odd.py").write_text("def (\n")
    done = hasten_run("--", "--odd.py")
    assert done.returncode == 1
    assert re.match(r'  File ".*--odd.py", line 1\n    def \(\n.*\nSyntaxError: ', done.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a program: hasten run train.py"),
        (["trian.py"], r"no file 'trian.py' in .*Did you mean 'train.py'\? For a module: hasten run -m MODULE\."),
        (["rv.py"], r"no file 'rv.py' in \S+ For a module"),
        (["-m", "nothing_here.at_all"], "-m nothing_here.at_all: not found"),
        (["-mnothing_here"], "-m nothing_here: not found"),
        (["-m"], "expected one argument"),
        (["site"], "site is a folder without a __main__.py"),
        (["--yes", "train.py"], "unknown option --yes"),
    ],
)
def test_wrong_use_is_an_error(
    folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert re.search(says, shown.replace("\n", " ")), shown


def test_help_before_the_program_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    assert "Everything after PROGRAM belongs to the program" in capsys.readouterr().out


def test_ctrl_c_is_not_lost_where_python_drops_exceptions(folder: Path) -> None:
    (folder / "p.py").write_text(
        "import os, signal, time\n"
        "class Deleted:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(60)\n"
        "Deleted()\n"
        "print('dropped', flush=True)\n"
        "time.sleep(60)\n"
    )
    done = hasten_run("p.py")
    assert (done.returncode, done.stdout) == (130, "dropped\n")


def test_an_option_after_the_program_is_the_program_s_and_said_to_be(folder: Path) -> None:
    (folder / "p.py").write_text("import sys; print(sys.argv[1:])\n")
    done = hasten_run("p.py", "--packed")
    assert (done.returncode, done.stdout) == (0, "['--packed']\n")
    assert "--packed comes after p.py, so the program gets it. Write it before p.py" in done.stderr
    (folder / "p.py").write_text("import sys; print('--packed' in sys.argv)\n")
    done = hasten_run("p.py", "--packed")
    assert (done.stdout, done.stderr) == ("True\n", "")
