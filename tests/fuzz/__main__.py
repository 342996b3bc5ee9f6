"""Try many inputs on some targets, or on all, and write the rows of a table::

python -m tests.fuzz --examples 100000 arguments durations
"""

from __future__ import annotations

import argparse
import math
import sys
import time

from tests.fuzz.found import ROWS
from tests.fuzz.running import Found, in_empty_folder, quietly, run
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Try inputs that nobody thought of.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--examples", type=int, default=100_000, help="how many inputs for each target")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    parser.add_argument("--again", action="store_true", help="also try what was found before")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end each target after so long at the latest")
    options = parser.parse_args()
    if unknown := sorted(set(options.targets) - set(TARGETS)):
        parser.error(f"{', '.join(unknown)}: unknown. Use some of {', '.join(TARGETS)}.")
    problems = 0
    print("| target | inputs tried | found now | found and fixed before | seconds |\n|---|---|---|---|---|")
    for name in options.targets or TARGETS:
        began = time.monotonic()
        outcome = run(TARGETS[name], options.examples, number=options.seed, seconds=60 * options.minutes)
        before = [row.value for row in ROWS if row.target == name]
        for value in before if options.again else ():
            try:
                with quietly(), in_empty_folder():
                    TARGETS[name].check(value)
            except Found as again:
                outcome.found[again.kind] = again.text
        seconds = time.monotonic() - began
        print(
            f"| {TARGETS[name].title} | {outcome.tried:,} | {len(outcome.found)} | {len(before)} | {seconds:.0f} |",
            flush=True,
        )
        for kind, text in sorted(outcome.found.items()):
            print(f"\n{name}: {kind}\n{text}", file=sys.stderr, flush=True)
        problems += len(outcome.found)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
