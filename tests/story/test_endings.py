"""The exit code of a program on several processes says what became of each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_python

PROGRAM = """
import os, signal, sys, time
from tests.models import Classifier, loader, quiet

class Model(Classifier):
    def validation_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 0 and HOW == f"SIGTERM to rank {self.global_rank}":
            os.kill(os.getpid(), signal.SIGTERM)

HOW = sys.argv[1]
if __name__ == "__main__":
    trainer = quiet(devices=2, strategy="ddp", max_epochs=2)
    trainer.fit(Model(), loader(16), loader(16))
    print("after fit")
    if trainer.global_rank == 1:
        if HOW == "exit":
            sys.exit(3)
        if HOW == "stay":
            time.sleep(100)
    if trainer.global_rank == 1 and HOW == "abort while unloading":
        class Aborts:
            def __del__(self, abort=os.abort):
                abort()
        sys.modules["aborts"] = Aborts()
    if HOW == "stay":
        from hasten.machine import launch
        launch._END_SECONDS = 1.0
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("exit", 3),
        ("stay", 1),
        ("abort while unloading", 0),
        ("SIGTERM to rank 1", 143),
    ],
)
def test_a_program_ends_with_the_code_of_the_process_that_did_not_end_well(how: str, code: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_python(program, how)
    assert done.returncode == code, done.stderr[-3000:]
    assert ("after fit" in done.stdout) == ("SIGTERM" not in how)
    if how in ("exit", "stay"):
        assert "the process of rank 1" in done.stderr
