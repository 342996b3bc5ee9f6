"""Do the tests notice a broken line? A sample of mutants of the trainer and callback packages, and who kills them.

    pip install cosmic-ray pytest-cov
    python scripts/mutants.py --sample 200

cosmic-ray makes the mutants. Each is tried in a copy of the tree, with those tests alone that run its line (known from
one run of the tests under coverage), at most ``--tests`` of them: first those named like the file, then those of its
package, then those that run few other lines. Last come tests of the package that do their work in other processes,
where coverage sees nothing. A mutant that no test fails on has survived.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import queue
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("trainer*.py", "hooks.py", "loops/*.py", "callbacks/*.py", "tuner/*.py")
TESTS = ("tests/test_*.py", "tests/loops", "tests/callbacks", "tests/tuner", "tests/story/test_hook_order.py")

# Annotations are never evaluated here (PEP 563), and `X | None` is a BitOr.
SKIPPED_OPERATORS = ("ReplaceBinaryOperator_BitOr",)
# Letters that a word of a file's name shares with one of a test's: "evaluate" and "evaluation".
WORD_LETTERS = 6


@dataclass(frozen=True)
class Mutant:
    """One changed place."""

    file: str
    line: int
    operator: str
    occurrence: int


def main() -> int:
    """Sample, try and report; return 1 if fewer than ``--least`` percent are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried side by side (default: 2)")
    parser.add_argument("--tests", type=int, default=100, help="tests tried on each (default: 100)")
    parser.add_argument(
        "--tests-elsewhere", type=int, default=6, help="and so many that work in other processes (default: 6)"
    )
    parser.add_argument("--timeout", type=int, default=240, help="seconds for one mutant (default: 240)")
    parser.add_argument("--coverage", type=Path, help="keep the coverage here, and use it if it is there")
    parser.add_argument("--least", type=float, default=80, help="percent that must be killed (default: 80)")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="patterns below src/hasten")
    parser.add_argument(
        "--again",
        type=Path,
        help="the --json of an earlier run: try its survivors alone, with the tests of now",
    )
    parser.add_argument("--json", type=Path, help="write every mutant and what became of it to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        coverage = options.coverage or Path(folder) / "coverage"
        if not coverage.exists():
            _measure_coverage(coverage)
        failing = _failing(coverage)
        files = sorted(path for pattern in options.packages for path in (ROOT / "src" / "hasten").glob(pattern))
        runs = _tests_by_line(coverage, failing)
        elsewhere = [test for test in _tests_that_run_none_of(files, runs) if test not in failing]
        before = json.loads(options.again.read_text(encoding="utf-8")) if options.again else []
        if options.again:
            files = [ROOT / name for name in sorted({one["file"] for one in before if _survived(one)})]
        mutants = _mutants(files, runs)
        random.Random(options.seed).shuffle(mutants)
        chosen = mutants[: options.sample]
        if options.again:
            chosen = _found_again([one for one in before if _survived(one)], mutants)
        print(f"{len(mutants)} mutants on lines that tests run; {len(chosen)} of them are tried", flush=True)
        results = _try_all(chosen, runs, elsewhere, Path(folder), options)
        results += [one for one in before if not _survived(one)]

    killed = sum(not _survived(result) for result in results)
    share = 100 * killed / max(1, len(results))
    print(f"\n{killed} of {len(results)} mutants killed: {share:.0f} %")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(share < options.least)


def _survived(result: dict[str, Any]) -> bool:
    return result["outcome"] in ("survived", "undecided")


def _measure_coverage(data: Path) -> None:
    tests = [str(path) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-n", "2", *tests,
         f"--cov={ROOT / 'src' / 'hasten'}", "--cov-context=test", "--cov-report="],
        cwd=ROOT,
        env=_environment(ROOT) | {"COVERAGE_FILE": str(data)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,  # a test that fails on its own kills nothing: it is left out below
    )  # fmt: skip
    print(done.stdout, flush=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    _notes_of(data).write_text(json.dumps({"sources": _sources(), "failed": failed}, indent=1) + "\n")


def _notes_of(data: Path) -> Path:
    return data.with_name(data.name + ".json")


def _sources() -> dict[str, str]:
    root = ROOT / "src" / "hasten"
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*.py"))
    }


def _failing(data: Path) -> set[str]:
    """Return the tests that failed under coverage; refuse coverage of other sources, which has other lines."""
    notes = json.loads(_notes_of(data).read_text(encoding="utf-8")) if _notes_of(data).exists() else {}
    if notes.get("sources") != _sources():
        raise SystemExit(f"--coverage {data}: it was measured with other sources. Remove it to measure again.")
    return set(notes["failed"])


def _tests_by_line(data: Path, failing: set[str]) -> dict[str, dict[int, list[str]]]:
    """Return the tests that run each line of each file, the likeliest to be about it first."""
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
        if phase != "run" or test in failing:
            continue
        for line in numbits_to_nums(bits):
            # The coverage may be of another checkout.
            lines["src/hasten/" + path.rpartition("/src/hasten/")[2]][line].append(test)
            breadth[test] += 1
    for file, of_file in lines.items():
        for tests in of_file.values():
            tests.sort(
                key=lambda test: (
                    not _is_about(test, file),
                    _folder_of(test) != _tests_of(file),
                    breadth[test],
                    test,
                )
            )
    return lines


def _tests_that_run_none_of(files: list[Path], runs: dict[str, dict[int, list[str]]]) -> list[str]:
    names = [str(path.relative_to(ROOT)) for path in files]
    seen = {test for name in names for tests in runs.get(name, {}).values() for test in tests}
    return [test for test in _collected() if test not in seen]


def _collected() -> list[str]:
    tests = [str(path.relative_to(ROOT)) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=_environment(ROOT),
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def _is_about(test: str, file: str) -> bool:
    """Say whether a test stands in a module named like the file: test_evaluation.py is about loops/evaluate.py."""
    return any(one[:WORD_LETTERS] == other[:WORD_LETTERS] for one in _words(file) for other in _words(test))


@cache
def _words(path: str) -> list[str]:
    stem = Path(path.partition("::")[0]).stem
    return [word for word in re.split("_+", stem.removeprefix("test_")) if len(word) > 2]


def _folder_of(test: str) -> Path:
    return Path(test.partition("::")[0]).parent


def _tests_of(file: str) -> Path:
    """Return the folder of the tests of a file's package."""
    return Path("tests", *Path(file).parts[2:-1])


def _elsewhere(file: str, tests: list[str]) -> list[str]:
    """Return those of ``tests`` that stand in the folder for the file's package, the file's own area first."""
    near = [test for test in tests if _folder_of(test) == _tests_of(file)]
    return sorted(near, key=lambda test: (not _is_about(test, file), test))


def _found_again(survivors: list[dict[str, Any]], mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants that change what the survivors changed; the line may have moved since."""
    found: list[Mutant] = []
    for survivor in survivors:
        near = sorted(
            (one for one in mutants if (one.file, one.operator) == (survivor["file"], survivor["operator"])),
            key=lambda one: (abs(one.line - survivor["line"]), abs(one.occurrence - survivor["occurrence"])),
        )
        same = (one for one in near if one not in found and _change_of(one) == survivor["change"])
        mutant = next(same, None)
        if mutant is None:
            print(f"gone     {survivor['file']}:{survivor['line']} {survivor['change']}", flush=True)
        else:
            found.append(mutant)
    return found


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
    mutants: list[Mutant],
    runs: dict[str, dict[int, list[str]]],
    elsewhere: list[str],
    folder: Path,
    options: argparse.Namespace,
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
            tests = tests + _elsewhere(mutant.file, elsewhere)[: options.tests_elsewhere]
            return {**asdict(mutant), **_try(mutant, tests, copy, options.timeout)}
        finally:
            copies.put(copy)

    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, result in enumerate(pool.map(attempt, mutants), 1):
            results.append(result)
            place = f"{result['file']}:{result['line']} {result['operator'].removeprefix('core/')}"
            print(f"{number:>4} {result['outcome']:<8} {place}", flush=True)
            if _survived(result):
                print(f"     {result['change']}", flush=True)
    return results


def _try(mutant: Mutant, tests: list[str], copy: Path, timeout: int) -> dict[str, Any]:
    path = copy / mutant.file
    before = path.read_text(encoding="utf-8")
    after = _mutated(mutant, copy)
    path.write_text(after, encoding="utf-8")
    try:
        outcome = _outcome(tests, copy, timeout)
    finally:
        path.write_text(before, encoding="utf-8")
    if outcome == "timeout" and _outcome(tests, copy, timeout) == "timeout":
        outcome = "undecided"  # the machine is slow, not the mutant
    return {"outcome": outcome, "change": _change(before, after), "tests": len(tests)}


def _outcome(tests: list[str], copy: Path, timeout: int) -> str:
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
    except subprocess.TimeoutExpired:
        return "timeout"
    return "killed" if done.returncode else "survived"


def _mutated(mutant: Mutant, root: Path) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    before = (root / mutant.file).read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    assert after is not None
    return str(after)


def _change_of(mutant: Mutant) -> str:
    return _change((ROOT / mutant.file).read_text(encoding="utf-8"), _mutated(mutant, ROOT))


def _change(before: str, after: str) -> str:
    for old, new in zip(before.splitlines(), after.splitlines(), strict=False):
        if old != new:
            return f"{old.strip()}  ->  {new.strip()}"
    return ""


def _environment(root: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
