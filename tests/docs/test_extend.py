"""What ``docs/extend`` shows works: a package with a command, a strategy and a speed-up, found by its entry points."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.programs import fork_python, started_copies

PROGRAM = """
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.loggers import Logger


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 1))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows(Logger):
    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def name(self):
        return "rows"

    @property
    def version(self):
        return 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics["loss"]))

    def log_hyperparams(self, params, *args, **kwargs):
        pass


def train(change=None, **given):
    torch.manual_seed(0)
    model, rows = Net(), Rows()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(16, 3, 8, 8, generator=generator), torch.randn(16, 1, generator=generator))
    if change is not None:
        change(None, model)
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=rows, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **given)
    trainer.fit(model, DataLoader(data, batch_size=4))
    return model, rows.rows


def same(one, other):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one.parameters(), other.parameters()))


{body}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package of the page, with the metadata that pip would write."""
    files = {block.title: block.text for block in blocks_of("docs/extend/package.md") if block.title}
    assert len(files["myhasten.py"].split("class AverageGradients")[1].partition("\n\n\n")[0].splitlines()) <= 12
    (tmp_path / "myhasten.py").write_text(files["myhasten.py"], encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def run(folder: Path, body: str) -> str:
    (folder / "train.py").write_text(PROGRAM.replace("{body}", body), encoding="utf-8")
    done = fork_python("train.py", cwd=folder, **started_copies(1))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_command_runs_and_is_listed(installed: Path) -> None:
    program = "import sys; from hasten.commands import main; sys.exit(main({}))"
    assert fork_python("-m", "hasten", "devices", cwd=installed).stdout.strip()
    assert "print the devices of this machine" in fork_python("-c", program.format([]), cwd=installed).stdout


def test_its_strategy_trains_by_its_name_as_ddp_does_and_a_logger_has_the_rows(installed: Path) -> None:
    body = (
        "mine, rows = train(devices=2, strategy='average_gradients')\n"
        "ddp, rows_of_ddp = train(devices=2, strategy='ddp')\n"
        "assert same(mine, ddp)\n"
        "if rows:  # Of the first process: two would write into each other's line.\n"
        "    print(len(rows), rows == rows_of_ddp)\n"
    )
    assert "4 True" in run(installed, body)


def test_a_name_that_is_wrong_is_answered_with_that_of_the_package(installed: Path) -> None:
    body = (
        "try:\n    L.Trainer(accelerator='cpu', strategy='average_gradient')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    assert "Did you mean 'average_gradients'?" in run(installed, body)


def test_its_lever_is_known_and_trains_the_same(installed: Path) -> None:
    body = (
        "from hasten_tools.speed.levers import choose\n"
        "from myhasten import channels_last\n"
        "lever, = choose(['channels last'])\n"
        "plain, changed = train()[0], train(channels_last)[0]\n"
        "assert changed.net[0].weight.is_contiguous(memory_format=torch.channels_last)\n"
        "print(lever.place, same(plain, changed))\n"
    )
    assert "myhasten:channels_last True" in run(installed, body)
