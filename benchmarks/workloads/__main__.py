"""Six trainings that people really do, as a tutorial writes them, as a good engineer does, and with hasten.

    python -m benchmarks.workloads                           # all, each to its stated quality; at most 40 minutes
    python -m benchmarks.workloads --quick                   # the time of a step only; at most 5 minutes
    python -m benchmarks.workloads text tabular --json workloads.json
    python -m benchmarks.workloads text --columns best consent --profile

Each column trains in a process of its own. All of them take the same few steps in turns (A B C A B C), so that a slow
minute of the machine weighs on all; a factor is the median of the ratios, round by round, without the first round.
The seconds to the stated quality are those of the start and of the turns until then, without the evaluations.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import hardware
from benchmarks.workloads import forecast, table
from benchmarks.workloads.columns import COLUMNS, LOWER_PRECISION, PEER_PACKAGES, QUICK, columns_of, device_of
from benchmarks.workloads.registry import NAMES, load
from benchmarks.workloads.table import Column, Measured

from hasten.report.peaks import measured_peaks

ROOT = Path(__file__).resolve().parents[2]
QUICK_ROUNDS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON file."""
    options = parse(arguments)
    device = device_of(options.device)
    facts: dict[str, Any] = {
        "command": "python -m benchmarks.workloads " + " ".join(sys.argv[1:]),
        "hardware": hardware(),
        "torch": torch.__version__,
        "peaks": measured_peaks(device),
    }
    print(table.heading(facts), flush=True)
    float32, bfloat16 = (facts["peaks"][kind] or 0.0 for kind in ("float32", "bfloat16"))
    # Without bfloat16 instructions a step takes minutes.
    is_slow = bfloat16 < float32 and not options.columns
    left_out = dict.fromkeys(LOWER_PRECISION, "bfloat16 is slower than float32 here") if is_slow else {}
    found = []
    with tempfile.TemporaryDirectory(prefix="workloads-") as cache:
        for name in options.names:
            # What one column finds out or compiles, no other one gets.
            found.append(measure(name, options, device, Path(cache), left_out))
            print(table.text_of(found[-1], facts["peaks"]), flush=True)
            if options.json:
                rows = [each.as_json(facts["peaks"]) for each in found]
                options.json.write_text(json.dumps({**facts, "workloads": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="time a few steps of the columns that matter most")
    parser.add_argument(
        "--columns", nargs="+", choices=list(COLUMNS), help="which columns (default: all, or --quick's)"
    )
    parser.add_argument("--rounds", type=int, help=f"turns at most (default: to the quality; --quick: {QUICK_ROUNDS})")
    parser.add_argument("--steps", type=int, help="steps of a turn (default: the workload's)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--profile", action="store_true", help="show what the time of a step goes to; implies --quick")
    parser.add_argument(
        "--peer-python",
        default=os.environ.get("HASTEN_PEER_PYTHON", sys.executable),
        help="the Python with Lightning and pytorch-forecasting (default: HASTEN_PEER_PYTHON, or this one)",
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}. Use {', '.join(NAMES)}")
    options.names = options.names or list(NAMES)
    options.quick = options.quick or options.profile
    return options


class Worker:
    """The process of a column."""

    def __init__(self, name: str, column: str, options: argparse.Namespace, cache: Path) -> None:
        command = [options.peer_python if name == "forecast" else sys.executable]
        line = forecast.OPTIONS.get(column) if name == "forecast" else None
        if line is not None:
            command += ["-m", "hasten", "run", *line]
        command += ["-m", "benchmarks.workloads.worker", name, column, options.device]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "HASTEN_CACHE": str(cache / f"{name}-{column}"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if column == "lightning":
            environment[PEER_PACKAGES] = packages_of(options.peer_python)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.first = self._read()
        self.first_seconds = time.perf_counter() - began

    def turn(self, **order: Any) -> dict[str, Any]:
        """Let it take some steps; return its report."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"evaluate": False, "profile": False, **order}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            message = self._log.read().strip().splitlines() or ["it ended without a message"]
            raise RuntimeError(message[-1])
        report: dict[str, Any] = json.loads(line)
        return report


@functools.cache
def packages_of(python: str) -> str:
    """Return the folder of the packages that a Python has installed."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(
    name: str, options: argparse.Namespace, device: torch.device, cache: Path, left_out: dict[str, str]
) -> Measured:
    """Run all columns of a workload in turns, but those that are left out."""
    if name == "forecast":
        measured = Measured(name, forecast.TITLE, forecast.GOAL_TEXT, forecast.MAX_STEPS, 0.0)
        turn_steps, names = forecast.QUICK_STEPS if options.quick else forecast.TURN_STEPS, list(forecast.OPTIONS)
        workload = None
    else:
        kind = load(name)
        workload = kind(device)
        measured = Measured(name, kind.title, kind.goal_text, kind.max_steps, workload.useful_flops())
        turn_steps, names = kind.quick_steps if options.quick else kind.turn_steps, columns_of(kind)
        if options.quick and not options.columns:
            names = [column for column in names if column in QUICK]
        measured.left_out |= {column: left_out[column] for column in names if column in left_out}
    turn_steps = options.steps or turn_steps
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else measured.max_steps // turn_steps)
    workers: dict[str, Worker] = {}
    try:
        for column in names:
            if column in measured.left_out or (options.columns and column not in options.columns):
                continue
            try:
                workers[column] = Worker(name, column, options, cache)
            except RuntimeError as error:
                measured.left_out[column] = str(error)
                continue
            first = workers[column].first
            measured.columns[column] = Column(workers[column].first_seconds, list(first["losses"]))
        for turn in range(rounds):
            running = [column for column in workers if measured.columns[column].steps_to_goal is None]
            # Two rounds more than the first are needed for a ratio.
            for column in running if turn >= 3 else list(workers):
                report = workers[column].turn(steps=turn_steps, evaluate=not options.quick)
                quality = report.get("quality")
                if workload is None:
                    mean = sum(report["losses"]) / len(report["losses"])
                    is_reached = not options.quick and mean <= forecast.GOAL
                else:
                    is_reached = quality is not None and workload.is_reached(quality)
                measured.columns[column].add(report, turn_steps, is_reached=is_reached)
            if not options.quick and not running:
                break
        if options.profile:
            for column, worker in workers.items():
                report = worker.turn(steps=turn_steps, profile=True)
                print(table.profile_of(column, report["profile"], turn_steps), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    return measured


if __name__ == "__main__":
    sys.exit(main())
