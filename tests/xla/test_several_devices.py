"""Several XLA devices train as one: a process for each with gloo between them, or one process with SPMD."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hasten as L
from tests.programs import run_python
from tests.xla.models import Net, loader, weights

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.skipif("PJRT_DEVICE" not in os.environ, reason="needs PJRT_DEVICE=CPU or TPU")


def alone(**options: object) -> list[torch.Tensor]:
    """Train on the CPU, without XLA."""
    import torch_xla

    # Before the first backward of this process, which starts the threads for all devices.
    torch_xla.device()
    L.seed_everything(3, verbose=False)
    module = Net("adamw", dropout=0.0)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, **quiet, **options}
    L.Trainer(accelerator="cpu", max_epochs=2, **options).fit(module, loader())
    return weights(module)


@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp"])
def test_two_devices_train_as_one_processor(strategy: str, tmp_path: Path) -> None:
    result = run_python(Path(__file__).with_name("program.py"), strategy, tmp_path, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    kept = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert kept["resumed"], "the resumed run has other weights"
    wanted, accumulated = alone(), alone(accumulate_grad_batches=2, gradient_clip_val=0.5)
    for name, there in (("whole", wanted), ("manual", wanted), ("fabric", wanted), ("accumulated", accumulated)):
        for mine, theirs in zip(kept[name], there, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
