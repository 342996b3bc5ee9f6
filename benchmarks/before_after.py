"""Has a change made the loop slower? The overhead of two commits, measured in turns.

    python benchmarks/before_after.py 9ab37c6            # that commit against the working tree

Each turn runs ``overhead.py`` of this tree on the one source and then on the other, in processes of their own (before,
after, before, after, ...). The table has the medians of the ratios to the plain loop, and of after to before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Measure and print; return 1 if a case got slower by more than ``--tolerance``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the commit to compare with")
    parser.add_argument("--turns", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--tolerance", type=float, default=0.1, help="allowed growth of a ratio (default: 0.1)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options, passed_on = parser.parse_known_args()

    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.before, "src"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        sources = {"before": Path(folder) / "src", "after": ROOT / "src"}
        turns: dict[str, list[dict[str, dict[str, Any]]]] = {"before": [], "after": []}
        for turn in range(options.turns):
            for name, source in sources.items():
                turns[name].append(_measure(source, passed_on))
            print(f"turn {turn + 1} of {options.turns} done", file=sys.stderr, flush=True)

    rows = []
    print(f"{'case':<13} {'before':>7} {'after':>7} {'after/before':>13}")
    for case in turns["after"][0]:
        if not all(case in turn for turn in turns["before"]):
            continue
        before, after = ([turn[case]["ratio"] for turn in turns[name]] for name in ("before", "after"))
        change = statistics.median(b / a for a, b in zip(before, after, strict=True))
        slower = " !" if change > 1 + options.tolerance else ""
        print(f"{case:<13} {statistics.median(before):>7.2f} {statistics.median(after):>7.2f} {change:>13.2f}{slower}")
        rows.append({"case": case, "before": before, "after": after, "change": round(change, 4)})
    if options.json:
        options.json.write_text(json.dumps({"command": sys.argv, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["change"] > 1 + options.tolerance for row in rows))


def _measure(source: Path, passed_on: list[str]) -> dict[str, dict[str, Any]]:
    """Return the rows of one run of ``overhead.py`` on the package in ``source``, by case."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--rounds", "3", "--steps", "1000",
             *passed_on, "--json", file.name],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(source)},
        )  # fmt: skip
        rows = json.loads(Path(file.name).read_text(encoding="utf-8"))["rows"]
    return {row["case"]: row for row in rows}


if __name__ == "__main__":
    sys.exit(main())
