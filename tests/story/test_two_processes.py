"""Two processes on gloo train like one on the joined batch, however they are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import copying_python, fork_python, started_copies

PROGRAM = Path(__file__).with_name("distributed_program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(folder: Path, strategy: str, devices: int = 2, launcher: tuple[str, ...] = ()) -> Path:
    output = folder / "output"
    # Copies, but where hasten starts a rank: here, a Python does so as well as anywhere.
    copying = copying_python(folder) if launcher else started_copies(2 if strategy == "ddp_spawn" else 0)
    done = fork_python(*launcher, PROGRAM, strategy, output, str(devices), **copying)
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def read(output: Path, rank: int) -> Any:
    return torch.load(f"{output}.{rank}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read(run(tmp_path_factory.mktemp("alone"), "auto", devices=1), 0)


@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [("ddp", ()), ("ddp", TORCHRUN), ("ddp_spawn", ())],
    ids=["started-by-hasten", "torchrun", "spawn"],
)
def test_weights_equal_the_single_process_run(strategy: str, launcher: Any, alone: Any, tmp_path: Path) -> None:
    output = run(tmp_path, strategy, launcher=launcher)
    first = read(output, 0)
    for key, value in alone["weights"].items():
        torch.testing.assert_close(first["weights"][key], value, rtol=0, atol=1e-6)
    assert first["step"] == alone["step"] == 10
    for name in ("train_loss", "val_loss"):
        assert first["metrics"][name] == pytest.approx(alone["metrics"][name], abs=1e-6)
        assert first["history"][name] == pytest.approx(alone["history"][name], abs=1e-6)
        assert len(first["history"][name]) == 2
    if strategy == "ddp":
        second = read(output, 1)
        assert all(torch.equal(first["weights"][k], second["weights"][k]) for k in first["weights"])
        assert second["metrics"] == first["metrics"]
        # every validation sample exactly once an epoch, over both processes
        assert sorted(first["evaluated"] + second["evaluated"]) == sorted(list(range(11)) * 2)
        assert sorted(first["seen"] + second["seen"]) == sorted(list(range(40)) * 2)


def test_a_rank_that_fails_ends_the_run_and_leaves_no_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os
from tests.models import Classifier, loader, quiet

class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("only here")
        return self.loss(batch)

if __name__ == "__main__":
    open(f"pid-{os.environ.get('LOCAL_RANK', 0)}", "w").write(str(os.getpid()))
    quiet(devices=2, strategy="ddp").fit(Fails(), loader(80))
"""
    )
    done = fork_python(program, cwd=tmp_path, **started_copies(1))
    assert done.returncode not in (0, None)
    assert "only here" in done.stderr
    ids = [(tmp_path / f"pid-{rank}").read_text() for rank in range(2)]
    assert not any(Path("/proc", process).exists() for process in ids)
