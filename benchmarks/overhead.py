"""What a training step costs beside the loop one writes by hand.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --cases train log --rounds 25 --steps 2000
    python benchmarks/overhead.py --peers lightning accelerate --json overhead.json

A tiny network (32-32-2, batch 4, SGD, one thread) on batches made beforehand, so that the arithmetic is small
and what the loop adds is visible. Each case runs in turn with the plain loop that does the same work, in one
process; a figure is the median over the rounds of the ratio of the two.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import logging
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import plain
from measure import WARM_UP_STEPS, Comparison, Loop, compare, hardware, terminal
from peers import PEERS
from trainers import fabric_loops, trainer_loops


@dataclass(frozen=True)
class Case:
    """One row: what is measured, against which loop, and the ratio that must not be exceeded."""

    name: str
    title: str
    at_most: float
    reference: Loop | None = plain.train  # None: hasten's own "train"


CASES = (
    Case("train", "Trainer: logger, bar, checkpoints off", 1.00),
    Case("log", "one value logged each step", 1.05),
    Case("default", "default settings (CSV logger, bar, checkpoint)", 1.15),
    Case("default-log", "default settings, one value logged each step", 1.15),
    Case("metric", "logged value + torchmetrics accuracy + bar", 1.20, plain.train_with_metric_and_bar),
    Case("accumulate", f"accumulation over {plain.ACCUMULATE} batches", 1.00, plain.train_accumulating),
    Case("clip-norm", "clipping by norm", 1.00, plain.train_clipping_norm),
    Case("clip-value", "clipping by value", 1.00, plain.train_clipping_value),
    Case("validate", "validation", 1.10, plain.validate),
    Case("validate-log", "validation, mean loss logged", 1.10, plain.validate_with_mean),
    Case("fabric", "Fabric", 1.03),
    # Nothing is added if this is 1: the 0.03 allow for the noise of the clock, not for a cost.
    Case("callbacks", "80 callbacks that override nothing, against none", 1.03, None),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON file; return 1 if ``--check`` finds a ratio too high."""
    options = parse(arguments)
    torch.set_num_threads(1)
    libraries = load_libraries(options.peers)
    facts = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]) if arguments is None else "main()",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(["torch", "hasten", "torchmetrics", "tqdm", *(PEERS if options.peers else ())]),
        "steps": options.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "rounds": options.rounds,
        "clock": options.clock,
    }
    for key, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key:>14}  {text}")
    print()

    rows: list[dict[str, Any]] = []
    print(HEADER)
    for case in CASES:
        if case.name in options.cases:
            measured = measure(case, libraries, options.steps, options.rounds)
            new = [row_of(case, name, measured, options.clock) for name in measured.others]
            print("\n".join(line_of(row) for row in new), flush=True)
            rows += new

    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    over = [row["case"] for row in rows if is_over(row)]
    print(f"\nover the allowed ratio: {', '.join(over) or 'none'}")
    return 1 if over and options.check else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="which rows (default: all)")
    parser.add_argument("--steps", type=int, default=2000, help="timed steps of one run (default: 2000)")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each loop (default: 15)")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=[], help="measure these as well")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for busy machines")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is over what is allowed")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    return options


def load_libraries(peers: Sequence[str]) -> dict[str, dict[str, Loop]]:
    """Return the loops of hasten and of the peers that are installed, by case."""
    hasten = importlib.import_module("hasten")
    logging.getLogger("hasten").setLevel(logging.WARNING)  # As the peers': no lines between those of the table.
    libraries = {"hasten": {**trainer_loops(hasten), **fabric_loops(hasten)}}
    for name in peers:
        load: Callable[[], dict[str, Loop]] = PEERS[name]
        try:
            libraries[name] = load()
        except ImportError as error:
            print(f"{name} left out: {error}", file=sys.stderr)
    return libraries


def measure(case: Case, libraries: dict[str, dict[str, Loop]], steps: int, rounds: int) -> Comparison:
    """Run one case in a terminal, where bars draw."""
    loops = {name: loops[case.name] for name, loops in libraries.items() if case.name in loops}
    with terminal():
        if case.reference is not None:
            return compare(case.reference, loops, steps=steps, rounds=rounds)
        return compare(libraries["hasten"]["train"], {"hasten": loops["hasten"]}, steps=steps, rounds=rounds)


COLUMNS = "{:<13} {:<11} {:>8} {:>8} {:>6} {:>13} {:>8}  {}"
HEADER = COLUMNS.format("case", "library", "loop us", "us", "ratio", "quartiles", "at most", "weights")


def row_of(case: Case, name: str, measured: Comparison, clock: str) -> dict[str, Any]:
    """Return the figures of one library in one case."""
    ratios = measured.ratios(name, clock)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "case": case.name,
        "title": case.title,
        "library": name,
        "reference_us": round(measured.microseconds(), 2),
        "us": round(measured.microseconds(name), 2),
        "ratio": round(statistics.median(ratios), 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "ratios_wall": [round(r, 4) for r in measured.ratios(name, "wall")],
        "ratios_cpu": [round(r, 4) for r in measured.ratios(name, "cpu")],
        "at_most": case.at_most if name == "hasten" else None,
        "same_weights": measured.same_weights[name],
    }


def line_of(row: dict[str, Any]) -> str:
    """Format one row of the table."""
    low, high = row["quartiles"]
    at_most = row["at_most"]
    return COLUMNS.format(
        row["case"],
        row["library"],
        f"{row['reference_us']:.1f}",
        f"{row['us']:.1f}",
        f"{row['ratio']:.2f}",
        f"{low:.2f}-{high:.2f}",
        "" if at_most is None else f"{at_most:.2f}",
        ("equal" if row["same_weights"] else "differ") + ("" if not is_over(row) else " !"),
    )


def is_over(row: dict[str, Any]) -> bool:
    """Say whether a row is over its allowed ratio."""
    return row["at_most"] is not None and row["ratio"] > row["at_most"]


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of what is installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version({"ignite": "pytorch-ignite"}.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            found[name] = str(getattr(sys.modules.get(name), "__version__", "not installed"))
    return found


if __name__ == "__main__":
    sys.exit(main())
