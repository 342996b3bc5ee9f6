"""Do the tests notice a broken line? A sample of mutants of the trainer and callback packages, and who kills them.

    pip install cosmic-ray pytest-cov
    python scripts/mutants.py --sample 200

cosmic-ray makes the mutants. Each is tried in a copy of the tree, with those tests alone that run its line (known from
one run of the tests under coverage), at most ``--tests`` of them. A mutant that no test fails on has survived.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("trainer*.py", "hooks.py", "loops/*.py", "callbacks/*.py", "tuner/*.py")
TESTS = ("tests/test_*.py", "tests/loops", "tests/callbacks", "tests/tuner", "tests/story/test_hook_order.py")

# Annotations are never evaluated here (PEP 563), and `X | None` is a BitOr.
SKIPPED_OPERATORS = ("ReplaceBinaryOperator_BitOr",)


@dataclass(frozen=True)
class Mutant:
    """One changed place."""

    file: str
    line: int
    operator: str
    occurrence: int


def main() -> int:
    """Sample, try and report; return 1 if fewer than ``--least`` percent are killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried side by side (default: 2)")
    parser.add_argument("--tests", type=int, default=25, help="tests tried on each (default: 25)")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one mutant (default: 240)")
    parser.add_argument("--coverage", type=Path, help="keep the coverage here, and use it if it is there")
    parser.add_argument("--least", type=float, default=80, help="percent that must be killed (default: 80)")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="patterns below src/hasten")
    parser.add_argument("--json", type=Path, help="write every mutant and what became of it to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        coverage = options.coverage or Path(folder) / "coverage"
        if not coverage.exists():
            _measure_coverage(coverage)
        runs = _tests_by_line(coverage)
        files = sorted(
            path for pattern in options.packages for path in (ROOT / "src" / "hasten").glob(pattern)
        )
        mutants = _mutants(files, runs)
        random.Random(options.seed).shuffle(mutants)
        print(
            f"{len(mutants)} mutants on lines that tests run; {options.sample} of them are tried", flush=True
        )
        results = _try_all(mutants[: options.sample], runs, Path(folder), options)

    killed = sum(result["outcome"] != "survived" for result in results)
    share = 100 * killed / max(1, len(results))
    print(f"\n{killed} of {len(results)} mutants killed: {share:.0f} %")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(share < options.least)


def _measure_coverage(data: Path) -> None:
    tests = [str(path) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *tests,
         f"--cov={ROOT / 'src' / 'hasten'}", "--cov-context=test", "--cov-report="],
        cwd=ROOT,
        env=_environment(ROOT) | {"COVERAGE_FILE": str(data)},
        check=False,  # a test that fails on its own kills nothing: it is left out below
    )  # fmt: skip


def _tests_by_line(data: Path) -> dict[str, dict[int, list[str]]]:
    """Return the tests that run each line of each file, few-lined tests first: they are about the line."""
    from coverage.numbits import numbits_to_nums

    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    breadth: dict[str, int] = defaultdict(int)
    with sqlite3.connect(data) as database:
        rows = database.execute(
            "select file.path, context.context, line_bits.numbits from line_bits "
            "join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
        ).fetchall()
    for path, context, bits in rows:
        test, _, phase = context.partition("|")
        if phase != "run":
            continue
        for line in numbits_to_nums(bits):
            # The coverage may be of another checkout.
            lines["src/hasten/" + path.rpartition("/src/hasten/")[2]][line].append(test)
            breadth[test] += 1
    for of_file in lines.values():
        for tests in of_file.values():
            tests.sort(key=lambda test: (breadth[test], test))
    return lines


def _mutants(files: list[Path], runs: dict[str, dict[int, list[str]]]) -> list[Mutant]:
    from cosmic_ray.commands.init import _all_work_items

    found = []
    for item in _all_work_items(files, {}):
        for mutation in item.mutations:
            name = str(Path(mutation.module_path).relative_to(ROOT))
            operator = mutation.operator_name
            line = mutation.start_pos[0]
            if any(skipped in operator for skipped in SKIPPED_OPERATORS) or not runs.get(name, {}).get(line):
                continue
            found.append(Mutant(name, line, operator, mutation.occurrence))
    return found


def _try_all(
    mutants: list[Mutant], runs: dict[str, dict[int, list[str]]], folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    copies: queue.Queue[Path] = queue.Queue()
    for job in range(options.jobs):
        copy = folder / f"copy{job}"
        for name in ("src", "tests", "examples", "docs"):
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        copies.put(copy)

    def attempt(mutant: Mutant) -> dict[str, Any]:
        copy = copies.get()
        try:
            tests = runs[mutant.file][mutant.line][: options.tests]
            return {**asdict(mutant), **_try(mutant, tests, copy, options.timeout)}
        finally:
            copies.put(copy)

    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, result in enumerate(pool.map(attempt, mutants), 1):
            results.append(result)
            place = f"{result['file']}:{result['line']} {result['operator'].removeprefix('core/')}"
            print(f"{number:>4} {result['outcome']:<8} {place}", flush=True)
            if result["outcome"] == "survived":
                print(f"     {result['change']}", flush=True)
    return results


def _try(mutant: Mutant, tests: list[str], copy: Path, timeout: int) -> dict[str, Any]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path = copy / mutant.file
    before = path.read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    assert after is not None
    changed = [
        f"{old.strip()}  ->  {new.strip()}"
        for old, new in zip(before.splitlines(), after.splitlines(), strict=False)
        if old != new
    ]
    path.write_text(after, encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
            cwd=copy,
            env=_environment(copy),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
        outcome = "killed" if done.returncode else "survived"
    except subprocess.TimeoutExpired:
        outcome = "timeout"
    finally:
        path.write_text(before, encoding="utf-8")
    return {"outcome": outcome, "change": changed[0] if changed else "", "tests": len(tests)}


def _environment(root: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
