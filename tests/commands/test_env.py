"""hasten env: what a bug report needs, and no secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hasten
from hasten.commands import main
from hasten_tools.commands.env import read_nvidia_smi


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_API_KEY", "very-secret")
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setenv("NCCL_PROXY", "http://me:very-secret@proxy:80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("variables")
def test_text_and_json_say_what_is_installed_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"hasten        {hasten.__version__}")
    assert f"torch         {torch.__version__}" in text
    assert f"torch uses {torch.backends.cpu.get_cpu_capability()}" in text
    assert "torchmetrics==" in text
    assert "  OMP_NUM_THREADS=1\n" in text
    assert "  HASTEN_API_KEY=(set; not shown)\n" in text
    assert "  NCCL_PROXY=http://***@proxy:80\n" in text
    assert "WANDB_API_KEY" not in text

    assert main(["env", "--json"]) == 0
    written = capsys.readouterr().out
    found = json.loads(written)
    assert found["torch"]["config"] == torch.__config__.show()
    assert found["cpu"]["usable_cores"] >= 1
    assert found["memory"]["total_bytes"] > 2**28
    assert found["packages"]["tqdm"]
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    assert "very-secret" not in text + written


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that finds no GPU")
def test_a_gpu_that_torch_cannot_use_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034, 8.9, 550.54.15'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "GPU driver    NVIDIA 550.54.15\n" in text
    assert "GPUs          0: NVIDIA L4, 22.5 GiB, compute capability 8.9\n" in text
    assert "this torch is built without CUDA" in text


def test_an_answer_of_the_driver_that_is_no_table_is_left_out() -> None:
    assert list(read_nvidia_smi(["NVIDIA-SMI has failed because it couldn't communicate", ""])) == []
