"""Compare ``hasten plan`` with runs of four processes, on all meshes: ``python -m tests.plan [MESH ...]``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.plan import on_four_processes
from tests.plan.on_four_processes import MESHES, peaks_of, planned
from tests.programs import run_python

# As in the test.
LIMIT = 0.005


def main(*names: str) -> int:
    """Print the planned and the measured peak of each stage, and return 1 if one differs by more than the limit."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_python(on_four_processes.__file__, folder, *names, timeout=3600)
        assert ended.returncode == 0, ended.stderr[-3000:]
        found = {int(file.stem): json.loads(file.read_text(encoding="utf-8")) for file in Path(folder).iterdir()}
    largest = 0.0
    print(f"{'mesh':32} rank {'planned':>12} {'measured':>12} difference")
    for name in names or MESHES:
        for rank, peak in peaks_of(planned(name)).items():
            measured = found[rank][name]["peak"]
            difference = peak / measured - 1
            largest = max(largest, abs(difference))
            print(f"{name:32} {rank:4} {peak:12} {measured:12} {difference:10.2%}", flush=True)
    print(f"The largest difference is {largest:.2%}.")
    return int(largest > LIMIT)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
