"""What a training costs before and after its steps: the first one of a program, and each one that follows.

    python benchmarks/startup.py
    python benchmarks/startup.py --peers lightning --rounds 9 --json startup.json

Ten steps of a tiny network, so that nearly all of the time is start-up. Each round starts a new process for each
library and setting, in turns with one for the loop written by hand. The clock of the first training begins after
``import torch`` and includes ``import hasten`` (or the peer); what torch imports for its first optimizer is in the
loop as well, and goes away in the difference. Modules are read as bytecode, which pip writes when it installs, also
where this process may not write any. The later trainings are those of a search or a cross-validation: a new
model and a new Trainer each.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import io
import json
import logging
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import plain
from measure import FEATURES, hardware
from overhead import versions

STEPS = 10
REPEATS = 20
# Seconds over the loop by hand: the first training, and each that follows.
AT_MOST = {"first": 0.2, "repeated": 0.010}
SETTINGS = ("off", "default")


class FewBatches:
    """The ten batches of a training."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        for _ in range(STEPS):
            yield torch.ones(4, FEATURES), torch.zeros(4, dtype=torch.long)


def training(library: str, setting: str) -> Callable[[], Any]:
    """Return a function that trains ten steps."""
    batches: Any = FewBatches()
    if library == "loop":
        return lambda: plain.train(batches)
    from trainers import trainer_loops

    module = importlib.import_module(library)
    for name in ("hasten", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    loop = trainer_loops(module)["log" if setting == "off" else "default-log"]
    return lambda: loop(batches)


def child(library: str, setting: str, clock: str) -> None:
    """Time the trainings of one process, and print their seconds."""
    read = time.perf_counter if clock == "wall" else time.process_time
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seconds = []
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        start = read()
        train = training(library, setting)
        for _ in range(1 + REPEATS):
            train()
            now = read()
            seconds.append(now - start)
            start = now
    print(json.dumps(seconds))


def start_child(library: str, setting: str, clock: str, bytecode: str) -> tuple[float, float]:
    """Return the seconds of the first training of a new process, and the median of the later ones.

    ``bytecode`` is the folder in which the processes keep the bytecode of what they import.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables["PYTHONPYCACHEPREFIX"] = bytecode
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--child", library, setting, clock],
            capture_output=True, text=True, check=True, cwd=folder, env=variables,
        )  # fmt: skip
    first, *later = json.loads(done.stdout.splitlines()[-1])
    return first, statistics.median(later)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON file; return 1 if ``--check`` finds a figure too high."""
    options = parse(arguments)
    if options.child:
        child(*options.child)
        return 0
    facts = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]) if arguments is None else "main()",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(["torch", "hasten", *options.peers]),
        "steps": STEPS,
        "repeats": REPEATS,
        "rounds": options.rounds,
        "clock": options.clock,
    }
    for key, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key:>9}  {text}")

    programs = [(library, setting) for library in ("hasten", *options.peers) for setting in SETTINGS]
    turns = [("loop", "off"), *programs]
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="startup-bytecode-") as bytecode:
        # Bytecode that is not written yet, and files that are not in memory.
        for program in turns:
            start_child(*program, options.clock, bytecode)
        for i in range(options.rounds):
            for program in turns if i % 2 == 0 else reversed(turns):
                taken.setdefault(program, []).append(start_child(*program, options.clock, bytecode))

    rows = []
    print("\n" + COLUMNS.format("library", "setting", "first s", "over loop", "repeated ms", "over loop"))
    for library, setting in turns:
        row = row_of(library, setting, taken[library, setting], taken["loop", "off"])
        rows.append(row)
        print(
            COLUMNS.format(
                library,
                "" if library == "loop" else setting,
                f"{row['first_seconds']:.2f}",
                f"{row['first_over_loop']:+.2f}",
                f"{1000 * row['repeated_seconds']:.1f}",
                f"{1000 * row['repeated_over_loop']:+.1f}",
            )
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    over = [
        f"{row['setting']} {what}"
        for row in rows
        for what, seconds in AT_MOST.items()
        if row["library"] == "hasten" and row[f"{what}_over_loop"] > seconds
    ]
    print(f"\nover what is allowed (first {AT_MOST['first']} s, repeated {AT_MOST['repeated']} s): {over or 'none'}")
    return 1 if over and options.check else 0


COLUMNS = "{:<12} {:<9} {:>8} {:>10} {:>12} {:>10}"


def row_of(
    library: str, setting: str, mine: list[tuple[float, float]], loop: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return the medians over the rounds, and those of the difference to the loop of the same round."""
    return {
        "library": library,
        "setting": setting,
        "first_seconds": statistics.median(first for first, _ in mine),
        "first_over_loop": statistics.median(a - b for (a, _), (b, _) in zip(mine, loop, strict=True)),
        "repeated_seconds": statistics.median(later for _, later in mine),
        "repeated_over_loop": statistics.median(a - b for (_, a), (_, b) in zip(mine, loop, strict=True)),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=5, help="new processes of each (default: 5)")
    parser.add_argument("--peers", nargs="*", choices=["lightning"], default=[], help="measure these as well")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for busy machines")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure is over what is allowed")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
