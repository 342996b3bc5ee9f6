"""The exit code of a program on several processes says what became of each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import fork_python, started_copies

PROGRAM = """
import os, signal, sys, time
from tests.models import Classifier, loader, quiet

class Model(Classifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and batch_idx == 1 and HOW.endswith("within fit"):
            if HOW.startswith("exit"):
                sys.exit(3)
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 0 and HOW == f"SIGTERM to rank {self.global_rank}":
            os.kill(os.getpid(), signal.SIGTERM)

HOW = sys.argv[1]
if __name__ == "__main__":
    from hasten.machine import launch
    launch.GRACE_SECONDS, launch.KILL_SECONDS = 1.0, 0.5
    trainer = quiet(devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(Model(), loader(16), loader(16))
    print("after fit")
    if trainer.global_rank == 1:
        if HOW == "exit":
            sys.exit(3)
        if HOW == "stay":
            time.sleep(100)
        if HOW == "work":
            time.sleep(1.5)
            print("written by rank 1")
    if trainer.global_rank == 1 and HOW in ("abort while unloading", "unload slowly"):
        act = os.abort if HOW.startswith("abort") else lambda sleep=time.sleep: sleep(1.5)
        class Acts:
            def __del__(self, act=act):
                act()
        sys.modules["acts"] = Acts()
    if HOW in ("stay", "unload slowly"):
        launch._end_seconds = 1.0
    launch._SAY_SECONDS = 0.5
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exit", 3),
        ("stay", 1),
        ("work", 0),
        ("unload slowly", 0),
        ("abort while unloading", 0),
        ("SIGTERM to rank 1", 143),
        # The others are stopped in the middle of the fit, and the code is that of the first.
        ("exit within fit", 3),
        ("interrupt within fit", 130),
    ],
)
def test_a_program_ends_with_the_code_of_the_process_that_did_not_end_well(how: str, code: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = fork_python(program, how, **started_copies(1))
    assert done.returncode == code, done.stderr[-3000:]
    assert ("after fit" in done.stdout) == ("SIGTERM" not in how and "within fit" not in how)
    if how in ("exit", "stay"):
        assert "the process of rank 1" in done.stderr
    if how == "work":
        assert "written by rank 1" in done.stdout
    assert ("waits for rank 1, still at work" in done.stderr) == (how in ("stay", "work"))
