"""A run that is killed and resumed ends bit for bit like one that never was."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.programs import call_in_file

PROGRAM = Path(__file__).with_name("resumable_program.py")


def one(home: Path, name: str, /, **options: Any) -> dict[str, Any]:
    """Return the options of one run of the program in the folder ``home``."""
    home.mkdir(exist_ok=True)
    ends = -options.get("kill_with", signal.SIGKILL) if "kill_at" in options else 0
    return {
        "folder": str(home / "checkpoints"),
        "trace": str(home / f"{name}.jsonl"),
        "result": str(home / "result.json"),
        "workers": 0,
        "may_end_with": [ends if ends != -signal.SIGINT and ends != -signal.SIGTERM else 128 - ends],
        **options,
    }


def run(home: Path, *runs: dict[str, Any]) -> None:
    """Run the program once for each of ``runs``, and check how each ended."""
    errors, codes_file = home / "errors.txt", home / "codes.json"
    program = multiprocessing.get_context("forkserver").Process(
        target=call_in_file, args=(str(PROGRAM), "run_into", runs, codes_file, errors)
    )
    program.start()
    program.join(200)
    assert program.exitcode == 0, errors.read_text()[-3000:]
    codes = json.loads(codes_file.read_text())
    assert codes == [options["may_end_with"][0] for options in runs], errors.read_text()[-3000:]
    assert "Traceback" not in errors.read_text()


def result(home: Path) -> Any:
    """Return the digests a completed run left."""
    return json.loads((home / "result.json").read_text())


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
    "two-workers": {"workers": 2},
    "persistent-workers": {"workers": 2, "persistent": True, "accumulate": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_batches_and_resumed(case: str, tmp_path: Path) -> None:
    options = CASES[case]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    kills = sorted(random.Random(case).sample(range(3, 33), 3))
    run(
        tmp_path,
        one(whole, "0", **options),
        *(one(broken, str(number), kill_at=at, **options) for number, at in enumerate(kills)),
        one(broken, "last", **options),
    )
    assert result(broken) == result(whole)
    assert trace(broken) == trace(whole)
    left = {path.name for path in (broken / "checkpoints").rglob("*") if path.is_file()}
    expected = {path.name for path in (whole / "checkpoints").rglob("*") if path.is_file()}
    assert left == expected


def test_a_damaged_last_checkpoint_falls_back_to_the_newest_whole_one(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tmp_path, one(whole, "0"), one(broken, "0", kill_at=15, keep_all=True))
    damaged = list((broken / "checkpoints").rglob("last.ckpt"))
    assert damaged
    for last in damaged:
        data = bytearray(last.read_bytes())
        data[len(data) // 2] ^= 0xFF
        last.write_bytes(data)
    run(tmp_path, one(broken, "1", keep_all=True))
    assert result(broken) == result(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_save_exit_with_the_signals_code_and_resume_exactly(number: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = {"every": 1000, "accumulate": 3}
    stopped = {"kill_at": 13, "kill_with": int(number)}
    run(tmp_path, one(whole, "0", **options), one(broken, "0", **options, **stopped), one(broken, "1", **options))
    assert result(broken) == result(whole)
    assert trace(broken) == trace(whole)
