"""The examples of finetuning, averaging and prediction do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
ROOT = Path(__file__).resolve().parents[2]


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run an example as a user does; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_finetuning(tmp_path: Path) -> None:
    printed = run("finetuning.py", tmp_path)
    assert re.search(r"Epoch 2: learning rate 0.003, backbone 0.0003", printed)
    assert re.search(r"Epoch 3: learning rate 0.003, backbone 0.0006", printed)
    found = re.search(r"digits 5-9: accuracy (\S+), 2 parameter groups", printed)
    assert found is not None
    assert float(found[1]) > 0.85


def test_ema_and_swa(tmp_path: Path) -> None:
    printed = run("ema_and_swa.py", tmp_path)
    found = {
        name: (float(a), float(b)) for name, a, b in re.findall(r"(\w+): accuracy (\S+), loss (\S+)", printed)
    }
    assert list(found) == ["plain", "EMA", "SWA"]
    assert all(accuracy > 0.93 for accuracy, _ in found.values())
    assert len(set(found.values())) == 3


def test_prediction_of_two_processes(tmp_path: Path) -> None:
    printed = run("predict_two_processes.py", tmp_path, str(tmp_path / "out"))
    assert "2 processes wrote [51, 50] predictions, equal to those of one: True" in printed
    parts = [torch.load(tmp_path / "out" / f"part-{rank}.pt") for rank in range(2)]
    assert sorted(torch.cat([part["samples"] for part in parts]).tolist()) == list(range(101))


@pytest.mark.parametrize("name", ["finetuning.py", "ema_and_swa.py", "predict_two_processes.py"])
def test_they_are_short(name: str) -> None:
    lines = (ROOT / "examples" / name).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 60
