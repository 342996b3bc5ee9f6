"""The programs in examples/ run, and reach what they say; the GAN equals a plain PyTorch loop."""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hasten as L
from tests.models import same_weights

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(program: str, folder: Path, *arguments: str) -> str:
    """Run a program in ``folder`` as a user would; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / program), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Warnings of a slow machine aside, a program to learn from has none.
    for warned in (
        "no validation data",
        "in eval mode while training",
        "go to the loggers every",
        "looks like the hook",
    ):
        assert warned not in done.stderr
    return done.stdout


def result(printed: str, pattern: str) -> list[float]:
    """Return the numbers of the one line ``result: ...``."""
    (line,) = [line for line in printed.splitlines() if line.startswith("result:")]
    found = re.fullmatch("result: " + pattern, line)
    assert found, line
    return [float(number) for number in found.groups()]


def module(program: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{program}", EXAMPLES / f"{program}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def lines_of_code(path: Path) -> int:
    """Return the lines that are neither empty, nor comments, nor docstrings."""
    text = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in prose
        for number, line in enumerate(text.splitlines(), 1)
    )


PROGRAMS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_are_short_and_listed(path: Path) -> None:
    assert lines_of_code(path) < 60
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert "import hasten as L" in path.read_text(encoding="utf-8")


def test_all_programs_listed_are_there() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in PROGRAMS}


def test_gan(tmp_path: Path) -> None:
    pattern = r"generated points have radius ([\d.]+) \+- ([\d.]+); real ones 2.00 \+- 0.10"
    radius, spread = result(run("gan.py", tmp_path), pattern)
    assert 1.6 < radius < 2.4
    assert spread < 0.8


def plain_gan(gan: Any, data: Any, epochs: int, accumulate: int) -> list[tuple[float, float]]:
    """Train as the example does, without any of hasten; return the losses of each batch."""
    bce = nn.functional.binary_cross_entropy_with_logits
    g_optimizer = torch.optim.Adam(gan.generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(gan.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    losses = []
    for _ in range(epochs):
        for batch_idx, (real,) in enumerate(DataLoader(data, batch_size=64, shuffle=True)):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            with torch.no_grad():
                fake = gan.generator(torch.randn(len(real), 8))
            d_loss = (bce(gan.discriminator(real), ones) + bce(gan.discriminator(fake), zeros)) / 2
            (d_loss / accumulate).backward()
            if (batch_idx + 1) % accumulate == 0:
                d_optimizer.step()
                d_optimizer.zero_grad()
            g_loss = bce(gan.discriminator(gan.generator(torch.randn(len(real), 8))), ones)
            gradients = torch.autograd.grad(g_loss / accumulate, list(gan.generator.parameters()))
            for parameter, gradient in zip(gan.generator.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if (batch_idx + 1) % accumulate == 0:
                g_optimizer.step()
                g_optimizer.zero_grad()
            losses.append((d_loss.item(), g_loss.item()))
    return losses


@pytest.mark.filterwarnings("ignore:.*tensorboard.*")
def test_the_gan_equals_a_plain_loop() -> None:
    example = module("gan")
    torch.manual_seed(3)
    gan, data = example.GAN(accumulate=2), example.points_on_a_ring(samples=320)
    by_hand = copy.deepcopy(gan)
    losses: list[tuple[float, float]] = []
    idle: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            values = trainer.callback_metrics
            losses.append((values["d_loss"].item(), values["g_loss"].item()))
            # The generator's step leaves the discriminator without gradients of its own.
            idle.append(all(p.requires_grad for p in module.parameters()))

    torch.manual_seed(4)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=[Watch()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(gan, DataLoader(data, batch_size=64, shuffle=True))
    torch.manual_seed(4)
    assert plain_gan(by_hand, data, epochs=2, accumulate=2) == losses
    assert same_weights(gan, by_hand)
    assert idle == [True] * 10
    assert trainer.global_step == 2 * (2 + 2)  # two optimizers, every second of five batches


def test_kfold(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    printed = run("kfold.py", tmp_path)
    folds = re.findall(
        r"^fold (\d): trained on (\d+), accuracy on the other (\d+): ([\d.]+)$", printed, re.MULTILINE
    )
    assert [int(fold) for fold, *_ in folds] == [0, 1, 2, 3, 4]
    assert {int(trained) + int(held_out) for _, trained, held_out, _ in folds} == {1797}
    assert sum(int(held_out) for _, _, held_out, _ in folds) == 1797  # each image is held out once
    reached = torch.tensor([float(accuracy) for *_, accuracy in folds])
    mean, spread = result(printed, r"accuracy ([\d.]+) \+- ([\d.]+) over 5 folds")
    assert mean == pytest.approx(reached.mean().item(), abs=0.0011)
    assert spread == pytest.approx(reached.std().item(), abs=0.0011)
    assert mean > 0.92


def test_folds_do_not_learn_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    example = module("kfold")
    few = torch.utils.data.TensorDataset(*(tensor[:100] for tensor in example.digits().tensors))
    monkeypatch.setattr(example, "digits", lambda: few)
    assert example.cross_validate(folds=2, epochs=1) == example.cross_validate(folds=2, epochs=1)


def test_language_model(tmp_path: Path) -> None:
    printed = run("language_model.py", tmp_path)
    loss, choices = result(printed, r"loss ([\d.]+) after 150 steps; guessing has (\d+) choices")
    assert loss < 2.6 < torch.tensor(choices).log().item()
    assert len(list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt"))) == 1
    assert (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").exists()


def test_language_model_reads_blocks_without_end() -> None:
    example = module("language_model")
    blocks = iter(example.Blocks(block=8))
    for _ in range(3):
        characters, following = next(blocks)
        assert torch.equal(characters[1:], following[:-1])
        text = "".join(example.CHARACTERS[i] for i in characters)
        assert text in example.TEXT
    again = iter(example.Blocks(block=8))
    assert torch.equal(next(again)[0], next(iter(example.Blocks(block=8)))[0])


def test_autoencoder_with_a_command_line(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("jsonargparse")
    printed = run("autoencoder_cli.py", tmp_path, "fit", "--model.code", "12", "--trainer.max_epochs=2")
    (loss,) = result(printed, r"val_loss ([\d.]+)")
    assert loss < 0.08
    import yaml

    (config,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    written = yaml.safe_load(config.read_text())
    assert (written["model"]["code"], written["model"]["width"], written["trainer"]["max_epochs"]) == (
        12,
        64,
        2,
    )
    (saved,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    printed = run("autoencoder_cli.py", tmp_path, "test", "--model.code=12", "--ckpt_path", str(saved))
    (tested,) = result(printed, r"test_loss ([\d.]+)")
    assert abs(tested - loss) < 0.02
