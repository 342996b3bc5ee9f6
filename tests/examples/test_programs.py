"""The programs in examples/ run, and reach what they say."""

from __future__ import annotations

import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.programs import ROOT, fork_python, started_copies

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


def test_language_model(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("language_model.py")
    loss, choices = result(printed, r"loss ([\d.]+) after 150 steps; guessing has (\d+) choices")
    assert loss < 2.6 < torch.tensor(choices).log().item()
    assert len(list(tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt"))) == 1
    assert (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").exists()


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
    assert re.search(r"Epoch 3: Current lr: 0.003, Backbone lr: 0.0003", printed)
    assert re.search(r"Epoch 4: Current lr: 0.003, Backbone lr: 0.0006", printed)
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
    done = fork_python(EXAMPLES / "predict_two_processes.py", tmp_path / "out", cwd=tmp_path, **started_copies(1))
    assert "2 processes wrote [51, 50] predictions, equal to those of one: True" in done.stdout
    parts = [torch.load(tmp_path / "out" / f"part-{rank}.pt") for rank in range(2)]
    assert sorted(torch.cat([part["samples"] for part in parts]).tolist()) == list(range(101))


def test_a_pipeline_trains_as_one_process(tmp_path: Path) -> None:
    done = fork_python(EXAMPLES / "pipeline_parallel.py", "gpipe", "1f1b", cwd=tmp_path, **started_copies(1))
    assert done.returncode == 0, done.stderr
    reached = result(done.stdout, r"loss gpipe ([\d.]+), 1f1b ([\d.]+)")
    program = runpy.run_path(str(EXAMPLES / "pipeline_parallel.py"))
    model = torch.nn.Sequential(program["layers"]())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = program["loader"]()
    loss = torch.zeros(())
    for _epoch in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    assert reached == pytest.approx([loss.item()] * 2, abs=2e-6)
    for name in ("gpipe", "1f1b"):
        weights = torch.load(tmp_path / f"pipeline-{name}.ckpt")["model"]
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=1e-6)


def test_context_parallel_without_a_gpu_says_so(run: Callable[..., str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="context parallel needs GPUs"):
        run("context_parallel.py", "1")


@pytest.mark.gpu
def test_context_parallel_trains_as_one_gpu(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    losses = []
    for devices in ("1", "2"):
        done = fork_python(EXAMPLES / "context_parallel.py", devices, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses += result(done.stdout, rf"loss ([\d.]+) on {devices} GPU\(s\)")
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


# Runs the code of a notebook as its kernel does: in a session, cell by cell.
AS_NOTEBOOK = """
import code, json, sys
sys.ps1 = ">>> "
session = code.InteractiveInterpreter({"__name__": "__main__"})
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        session.runcode(compile("".join(cell["source"]), "<cell>", "exec"))
"""


def test_notebook(tmp_path: Path) -> None:
    done = fork_python("-c", AS_NOTEBOOK, EXAMPLES / "notebook.ipynb", cwd=tmp_path)
    accuracy, steps = result(done.stdout, r"accuracy ([\d.]+) after (\d+) steps of 2 processes")
    assert accuracy > 0.85, done.stderr
    assert steps == 4 * 29  # 1797 images, of which each process has half
