"""The programs in examples/ run, and reach what they say; the GAN equals a plain PyTorch loop."""

from __future__ import annotations

import copy
import importlib.util
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

import hasten as L
from tests.models import quiet, same_weights
from tests.programs import ROOT, run_python

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., str]:
    """Return a function that runs a program in ``tmp_path`` and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [str(EXAMPLES / program), *arguments])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        # Warnings of a slow machine aside, a program to learn from has none.
        said = " ".join(str(one.message) for one in seen)
        for warned in ("no validation data", "in eval mode while", "go to the loggers", "looks like the hook"):
            assert warned not in said
        return "".join([*capsys.readouterr(), caplog.text])

    return run


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


pytest.importorskip("sklearn")
PROGRAMS = sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_are_short_and_listed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL).splitlines()
    assert sum(bool(line.strip()) and not line.strip().startswith("#") for line in code) < 60
    assert "import hasten as L" in text
    listed = re.findall(r"\[(\w+\.py)\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert {shown for shown, link in listed if shown == link} == {path.name for path in PROGRAMS}


def test_gan(run: Callable[..., str]) -> None:
    pattern = r"generated points have radius ([\d.]+) \+- ([\d.]+); real ones 2.00 \+- 0.10"
    radius, spread = result(run("gan.py"), pattern)
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
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            values = trainer.callback_metrics
            losses.append((values["d_loss"].item(), values["g_loss"].item()))
            # The generator's step leaves the discriminator without gradients of its own.
            idle.append(all(p.requires_grad for p in module.parameters()))

    torch.manual_seed(4)
    trainer = quiet(max_epochs=2, callbacks=[Watch()])
    trainer.fit(gan, DataLoader(data, batch_size=64, shuffle=True))
    torch.manual_seed(4)
    assert plain_gan(by_hand, data, epochs=2, accumulate=2) == losses
    assert same_weights(gan, by_hand)
    assert idle == [True] * 10
    assert trainer.global_step == 2 * (2 + 2)  # two optimizers, every second of five batches


def test_kfold(run: Callable[..., str]) -> None:
    printed = run("kfold.py")
    folds = re.findall(r"^fold (\d): trained on (\d+), accuracy on the other (\d+): ([\d.]+)$", printed, re.MULTILINE)
    assert [int(fold) for fold, *_ in folds] == [0, 1, 2, 3, 4]
    assert {int(trained) + int(held_out) for _, trained, held_out, _ in folds} == {1797}
    assert sum(int(held_out) for _, _, held_out, _ in folds) == 1797  # each image is held out once
    reached = torch.tensor([float(accuracy) for *_, accuracy in folds])
    mean, spread = result(printed, r"accuracy ([\d.]+) \+- ([\d.]+) over 5 folds")
    assert mean == pytest.approx(reached.mean().item(), abs=0.0011)
    assert spread == pytest.approx(reached.std().item(), abs=0.0011)
    assert mean > 0.92


def test_folds_do_not_learn_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    example = module("kfold")
    few = torch.utils.data.TensorDataset(*(tensor[:100] for tensor in example.digits().tensors))
    monkeypatch.setattr(example, "digits", lambda: few)
    assert example.cross_validate(folds=2, epochs=1) == example.cross_validate(folds=2, epochs=1)


def test_language_model(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("language_model.py")
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


def test_autoencoder_with_a_command_line(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("autoencoder_cli.py", "fit", "--model.code", "12", "--trainer.max_epochs=2")
    (loss,) = result(printed, r"val_loss ([\d.]+)")
    assert loss < 0.08
    (config,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    written = yaml.safe_load(config.read_text())
    assert (written["model"]["code"], written["model"]["width"]) == (12, 64)
    assert written["trainer"]["max_epochs"] == 2
    (saved,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    printed = run("autoencoder_cli.py", "test", "--model.code=12", "--ckpt_path", str(saved))
    (tested,) = result(printed, r"test_loss ([\d.]+)")
    assert abs(tested - loss) < 0.02


def test_finetuning(run: Callable[..., str]) -> None:
    printed = run("finetuning.py")
    assert re.search(r"Epoch 2: learning rate 0.003, backbone 0.0003", printed)
    assert re.search(r"Epoch 3: learning rate 0.003, backbone 0.0006", printed)
    found = re.search(r"digits 5-9: accuracy (\S+), 2 parameter groups", printed)
    assert found is not None
    assert float(found[1]) > 0.85


def test_ema_and_swa(run: Callable[..., str]) -> None:
    printed = run("ema_and_swa.py")
    found = re.findall(r"(\w+): accuracy (\S+), loss (\S+)", printed)
    assert [name for name, *_ in found] == ["plain", "EMA", "SWA"]
    assert all(float(accuracy) > 0.93 for _, accuracy, _ in found)
    assert len({tuple(values) for _, *values in found}) == 3


def test_prediction_of_two_processes(tmp_path: Path) -> None:
    done = run_python(EXAMPLES / "predict_two_processes.py", tmp_path / "out", cwd=tmp_path)
    assert "2 processes wrote [51, 50] predictions, equal to those of one: True" in done.stdout
    parts = [torch.load(tmp_path / "out" / f"part-{rank}.pt") for rank in range(2)]
    assert sorted(torch.cat([part["samples"] for part in parts]).tolist()) == list(range(101))
