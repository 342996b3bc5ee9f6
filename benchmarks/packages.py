"""Packages that are built on Lightning, unchanged: how long they train under Lightning and under ``hasten run``.

    make packages                       # once: makes the environment with the packages
    python benchmarks/packages.py
    python benchmarks/packages.py pykeen swyft --rounds 5 --json packages.json

The programs are those of ``make packages``. Each column of a program runs in a process of its own, in turns (A B C A B
C). The figure is the time inside ``Trainer.fit``, start of the fit included, imports not; ``--longer`` multiplies the
epochs and steps that a program asks its Trainer for, so that a fit is more than its start.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "packages" / "programs"
AS_THEY_ARE = ("pykeen",)  # Goes on from a checkpoint up to an epoch that stands in the program.
COLUMNS: dict[str, list[str] | None] = {
    "lightning": None,
    "defaults": [],
    "fused": ["--fused-optimizer"],
    "auto": ["--speed", "auto"],
}


def main() -> int:
    """Measure and print; return 1 if no program ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = sorted(path.stem.removeprefix("use_") for path in PROGRAMS.glob("use_*.py"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(found)}")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each column (default: 3)")
    parser.add_argument("--longer", type=int, default=30, help="what epochs and steps are multiplied by (default: 30)")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--python", default=str(ROOT / ".venv-packages" / "bin" / "python"), help="has the packages")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    if unknown := set(options.names) - set(found):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Use {', '.join(found)}")

    rows: dict[str, dict[str, list[float]]] = {}
    print(f"{'package':<20}" + "".join(f"{column:>18}" for column in options.columns), flush=True)
    for name in options.names or found:
        seconds: dict[str, list[float]] = {column: [] for column in options.columns}
        try:
            for _ in range(options.rounds):
                for column in options.columns:
                    seconds[column].append(_measure(name, column, options))
        except RuntimeError as error:
            print(f"{name:<20}  left out: {error}", flush=True)
            continue
        rows[name] = seconds
        cells = [f"{statistics.median(times):.2f} s ({_ratio(seconds, c):.2f})" for c, times in seconds.items()]
        print(f"{name:<20}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    for column in options.columns[1:] if rows else ():
        mean = math.exp(statistics.fmean(math.log(_ratio(row, column)) for row in rows.values()))
        print(f"{column}: {mean:.2f} of Lightning's time, geometric mean over {len(rows)} packages")
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "seconds": rows}, indent=1) + "\n", encoding="utf-8")
    return int(not rows)


def _ratio(seconds: dict[str, list[float]], column: str) -> float:
    """Return the median of the ratios to the first column, round by round."""
    first = next(iter(seconds.values()))
    return statistics.median(own / other for own, other in zip(seconds[column], first, strict=True))


def _measure(name: str, column: str, options: argparse.Namespace) -> float:
    """Return the seconds that a program is in ``fit``."""
    line = COLUMNS[column]
    with tempfile.TemporaryDirectory(prefix="packages-") as folder:
        times = Path(folder, "seconds.json")
        command = [options.python, *(["-m", "hasten", "run", *line] if line is not None else [])]
        command += [str(Path(__file__).resolve()), "--worker", str(PROGRAMS / f"use_{name}.py")]
        command.append("1" if name in AS_THEY_ARE else str(options.longer))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*([str(ROOT / "src")] if line is not None else []), str(PROGRAMS)]),
            "PACKAGE_RESULTS": str(Path(folder, "results.json")),
            "PACKAGE_SECONDS": str(times),
            "HASTEN_CACHE": str(Path(folder, "cache")),
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["it ended without a message"])[-1][:200])
        seconds = float(json.loads(times.read_text()))
        if not seconds:
            raise RuntimeError("it does not call Trainer.fit")
        return seconds


def work(program: str, longer: int) -> None:
    """Run a program, and write the seconds in which a fit ran."""
    import lightning.pytorch
    import pytorch_lightning
    import torch._dynamo  # noqa: F401 (Lightning imports it, and torch's first optimizer: not a part of fit)

    spent = 0.0
    for trainer in {lightning.pytorch.Trainer, pytorch_lightning.Trainer}:
        fit, init = trainer.fit, trainer.__init__

        def timed(self: Any, *args: Any, _fit: Any = fit, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            try:
                return _fit(self, *args, **kwargs)
            finally:
                spent += time.perf_counter() - began

        @functools.wraps(init)  # pytorch-tabular reads the signature.
        def prolonged(self: Any, *args: Any, _init: Any = init, **kwargs: Any) -> None:
            for key in ("max_epochs", "max_steps"):
                if (kwargs.get(key) or -1) > 0:
                    kwargs[key] *= longer
            _init(self, *args, **kwargs)

        trainer.fit, trainer.__init__ = timed, prolonged
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
    Path(os.environ["PACKAGE_SECONDS"]).write_text(json.dumps(spent))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
