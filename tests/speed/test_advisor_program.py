"""``hasten advise``: programs in processes of their own, and what is left when it is interrupted."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hasten.commands import main
from hasten.machine.host import usable_cores
from hasten_tools.speed import advice, levers, trial, trial_processes
from tests.programs import Forked
from tests.speed.test_trial_processes import gone

PROGRAM = """
import argparse
import os
import time

import lightning as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--nap", type=float)
options = parser.parse_args()
with open("started", "a") as file:
    file.write(f"{os.getpid()}\\n")


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        time.sleep(options.nap)
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.logger.experiment.add_scalar("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedulers = torch.optim.lr_scheduler
        return [optimizer], [
            {"scheduler": schedulers.ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
            {"scheduler": schedulers.OneCycleLR(optimizer, 0.1, total_steps=4), "interval": "step"},
        ]


class Data(pl.LightningDataModule):
    def setup(self, stage):
        x = torch.randn(16, 8)
        self.data = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.data, 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, 4)


callbacks = [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss")]
trainer = pl.Trainer(max_epochs=1, callbacks=callbacks, logger=pl.pytorch.loggers.CSVLogger("logs"))
model, data = Model(), Data()
assert trainer.validate(model, data)[0]["val_loss"] is not None
trainer.fit(model, datamodule=data)
trainer.fit(model, datamodule=data)
with open("trained", "w") as file:
    file.write("the whole program ran")
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    # Where the package is not installed, trials find it where this process did.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


@pytest.mark.slow
@pytest.mark.usefixtures("trials_are_copies")
def test_a_program_written_for_lightning_is_measured_and_nothing_else_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(PROGRAM)
    out = tmp_path / "out"
    # As if there were no others: a verdict on a part of them is not remembered.
    monkeypatch.setattr(levers, "LEVERS", tuple(levers.choose(["fused optimizer"])))
    # What is measured on a busy machine is not remembered either, which test_search.py shows.
    monkeypatch.setattr(advice, "NOISY", math.inf)
    options = ["--rounds", "1", "--steps", "3", "--warm-up", "1", "--alone", "--budget", "600"]
    assert main(["advise", *options, "--out", str(out), "train.py", "--nap", "0.001"]) == 0

    shown = capsys.readouterr()
    assert shown.out.startswith("train.py --nap 0.001: ")
    assert "advise: fused optimizer (1 to try, " in shown.err
    assert {path.name for path in out.iterdir()} == {"advice.txt", "advice.json", "advice.png"}
    found = json.loads((out / "advice.json").read_text())
    assert found["unchanged"]["samples_per_second"] > 0
    assert found["rows"][0]["verdict"] in ("wins", "no gain", "unclear", "slower", "pays back too late")
    assert found["rows"][0]["loss_deviation"] <= found["rows"][0]["loss_noise"]
    # Neither checkpoints, logs nor the rest of the program; its own file only.
    assert {path.name for path in Path().iterdir()} == {"train.py", "started"}
    assert list((tmp_path / "temporary").iterdir()) == []
    assert all(gone(int(pid)) for pid in Path("started").read_text().split())
    # Trainer(speed="auto") in the same program starts with this verdict.
    (kept,) = (tmp_path / "cache" / "advice").iterdir()
    assert kept.stem == found["facts"]["key"]


@pytest.mark.slow
@pytest.mark.usefixtures("trials_are_copies")
def test_a_program_of_several_processes_is_measured_with_the_threads_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text(PROGRAM.replace("max_epochs=1", "max_epochs=1, accelerator='cpu', devices=2"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ["--levers", "fused optimizer", "--rounds", "1", "--steps", "3", "--warm-up", "1", "--budget", "600"]
    assert main(["advise", *options, "--json", str(tmp_path / "found.json"), "train.py", "--nap", "0.001"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["facts"]
    assert found["threads"] == found["cores"] == max(1, usable_cores() // 2)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("print('done')", "ended without calling Trainer.fit"),
        ("import sys; print('no data', file=sys.stderr); sys.exit(3)", "the program ended with code 3"),
        ("import hasten\nhasten.Fabric().backward(None)\n", "it keeps its own loop"),
        (
            "from hasten import Fabric\nFabric(accelerator='cpu', devices=2).launch()\nopen('second', 'w')\n",
            "it keeps its own loop (Fabric.launch)",
        ),
    ],
)
@pytest.mark.usefixtures("one_fork_server")
def test_a_program_that_never_trains_says_so(program: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("train.py").absolute()
    path.write_text(program)
    assert main(["advise", str(path)]) == 1
    shown = capsys.readouterr().err
    assert not Path("second").exists()
    assert text in shown
    assert ("no data" in shown) == ("no data" in program)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "0", "train.py"], "whole number of at least 1"),
        (["tarin.py"], "Did you mean"),
        ([], "name a program"),
    ],
)
def test_wrong_use_is_an_error(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("")
    with pytest.raises(SystemExit) as error:
        main(["advise", *arguments])
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_levers_are_listed_with_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--list"]) == 0
    shown = capsys.readouterr().out
    line = r'^batches by length +same samples in other batches +L\.Trainer\(\.\.\., batching="length"\)$'
    assert re.search(line, shown, re.MULTILINE)
    assert "lower precision: needs consent: products are computed with fewer bits." in shown


READS_WITH_WORKERS = """
import os
import time

import torch

import hasten as L


def tell(number=None):
    with open("started", "a") as file:
        file.write(f"{os.getpid()}\\n")


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        tell()
        time.sleep(60)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# A copy of this process: the trial is one of a process whose fork server is not its own.
options = {"num_workers": 1, "worker_init_fn": tell, "multiprocessing_context": "fork"}
data = torch.utils.data.DataLoader(torch.randn(64, 8), 4, **options)
L.Trainer().fit(Model(), data)
"""


class Server:
    """The process that trials are forks of, as a copy of this one: three fresh ones would import torch each."""

    def __init__(self, function: str, arguments: list[Any], environment: Any, *, pass_fds: Any, **_: Any) -> None:
        self._pid = os.fork()
        if self._pid:
            return
        try:
            os.setsid()
            os.environ |= environment
            _forget_the_temporary_folder()
            sys.argv = ["-c", *map(str, arguments)]
            os.closerange(3, pass_fds[0])
            os.closerange(pass_fds[0] + 1, os.sysconf("SC_OPEN_MAX"))
            getattr(trial, function)()
        finally:
            os._exit(1)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> None:
        os.waitpid(self._pid, 0)


def _forget_the_temporary_folder() -> None:
    """Let TMPDIR be read again: it is another one here than in the process that this one is a copy of."""
    tempfile.tempdir = None
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


def advise() -> None:
    """Run ``hasten advise train.py``; for a program of its own, as a process with threads must not be copied."""
    _forget_the_temporary_folder()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trial_processes._python = Server  # type: ignore[assignment]
    sys.exit(main(["advise", "train.py"]))


@pytest.mark.slow
def test_an_interrupted_advisor_leaves_nothing_behind(tmp_path: Path) -> None:
    codes = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
    runs, temporaries = {}, {}
    for number in codes:
        folder = tmp_path / number.name
        folder.mkdir()
        # Short: the sockets of loader workers lie in it, and their paths may have 107 characters.
        temporaries[number] = temporary = Path(tempfile.mkdtemp(prefix="advise-", dir="/tmp"))
        (folder / "train.py").write_text(READS_WITH_WORKERS)
        words = ("-c", "from tests.speed.test_advisor_program import advise; advise()")
        with open(tmp_path / f"{number.name}.txt", "wb") as output:
            runs[number] = Forked(words, output.fileno(), cwd=folder, TMPDIR=str(temporary))
    try:
        for number, run in runs.items():
            started = tmp_path / number.name / "started"
            until = time.monotonic() + 120
            # A step has begun, and the worker that reads for it.
            while not (started.exists() and started.read_text().count("\n") >= 2):
                assert time.monotonic() < until, (tmp_path / f"{number.name}.txt").read_text()
                time.sleep(0.05)
            run.send_signal(number)
        for number, run in runs.items():
            assert run.wait() == codes[number], (tmp_path / f"{number.name}.txt").read_text()
            pids = [int(pid) for pid in (tmp_path / number.name / "started").read_text().split()]
            until = time.monotonic() + 120
            temporary = temporaries[number]
            # After SIGKILL the trial itself notices that it is alone, and removes what the advisor cannot.
            while not all(map(gone, pids)) or any(temporary.iterdir()):
                assert time.monotonic() < until, (number, pids, list(temporary.iterdir()))
                time.sleep(0.05)
            assert {path.name for path in (tmp_path / number.name).iterdir()} == {"train.py", "started"}
    finally:
        for temporary in temporaries.values():
            shutil.rmtree(temporary, ignore_errors=True)
        for run in runs.values():
            run.kill()
