"""A run that is killed and resumed ends bit for bit like one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("resumable_program.py")


def run(home: Path, name: str, /, **options: Any) -> int:
    options = {
        "folder": str(home / "checkpoints"),
        "trace": str(home / f"{name}.jsonl"),
        "result": str(home / "result.json"),
        "workers": 0,
        **options,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    errors = home / "errors.txt"
    with errors.open("w") as stderr:
        # To files: the workers of a killed process may hold a pipe open for a few seconds.
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(PROGRAM), json.dumps(options)],
            env=environment,
            stdout=stderr,
            stderr=stderr,
            timeout=120,
        )
    if done.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(errors.read_text()[-3000:])
    return done.returncode


def trace(folder: Path) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return (ids and sums by batch number, epoch values); what two runs both did must be the same."""
    batches: dict[int, Any] = {}
    epochs: dict[int, Any] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            first, second, third = json.loads(line)
            place, key, value = (epochs, second, third) if first == "epoch" else (batches, first, [second, third])
            assert place.setdefault(key, value) == value, f"{file.name}: {key} differs"
    return batches, epochs


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3, "every": 1},
    "two-workers": {"workers": 2},
    "persistent-workers": {"workers": 2, "persistent": True, "accumulate": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_batches_and_resumed(case: str, tmp_path: Path) -> None:
    options = CASES[case]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert run(whole, "0", **options) == 0
    kills = sorted(random.Random(case).sample(range(3, 33), 3))
    for number, kill_at in enumerate(kills):
        assert run(broken, str(number), kill_at=kill_at, **options) == -signal.SIGKILL
    assert run(broken, "last", **options) == 0
    assert json.loads((broken / "result.json").read_text()) == json.loads((whole / "result.json").read_text())
    assert trace(broken) == trace(whole)
    left = {path.name for path in (broken / "checkpoints").rglob("*") if path.is_file()}
    expected = {path.name for path in (whole / "checkpoints").rglob("*") if path.is_file()}
    assert left == expected


def test_checkpoints_on_another_file_system_than_tmpdir(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or os.stat(other).st_dev == os.stat(tempfile.gettempdir()).st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        options = {"folder": str(Path(folder) / "checkpoints"), "accumulate": 2, "every": 1}
        whole = tmp_path / "whole"
        broken = tmp_path / "broken"
        whole.mkdir()
        broken.mkdir()
        assert run(whole, "0", accumulate=2, every=1) == 0
        assert run(broken, "0", kill_at=9, **options) == -signal.SIGKILL
        assert run(broken, "1", **options) == 0
        assert json.loads((broken / "result.json").read_text()) == json.loads((whole / "result.json").read_text())


def test_a_damaged_last_checkpoint_falls_back_to_the_newest_whole_one(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert run(whole, "0") == 0
    assert run(broken, "0", kill_at=15, keep_all=True) == -signal.SIGKILL
    for last in (broken / "checkpoints").rglob("last.ckpt"):
        data = bytearray(last.read_bytes())
        data[len(data) // 2] ^= 0xFF
        last.write_bytes(data)
    assert run(broken, "1", keep_all=True) == 0
    assert json.loads((broken / "result.json").read_text()) == json.loads((whole / "result.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_save_exit_with_the_signals_code_and_resume_exactly(number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import sys, os, json, signal
sys.path.insert(0, {str(PROGRAM.parent)!r})
import hasten as L
import resumable_program as program

class Interrupts(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.total_batch_idx + 1 == 13:
            os.kill(os.getpid(), {int(number)})

program.KillsItself = lambda *_: Interrupts()
program.main(json.loads(sys.argv[1]))
"""
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert run(whole, "0", every=1000) == 0
    options = {
        "folder": str(broken / "checkpoints"),
        "trace": str(broken / "0.jsonl"),
        "result": str(broken / "result.json"),
        "workers": 2,
        "every": 1000,
        "kill_at": 1,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), json.dumps({**options, "workers": 0})],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert run(broken, "1", every=1000) == 0
    assert json.loads((broken / "result.json").read_text()) == json.loads((whole / "result.json").read_text())
    assert trace(broken) == trace(whole)
