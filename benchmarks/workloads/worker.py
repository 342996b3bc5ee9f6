"""One column of one workload in a process of its own: ``python -m benchmarks.workloads.worker text best cpu``."""

from __future__ import annotations

import os
import sys
import warnings

from benchmarks.workloads.clock import Clock, end


def main() -> None:
    """Train until no more turns are ordered."""
    name, column, device_name = sys.argv[1:]
    # What libraries print goes where the errors go: the reports have stdout for themselves.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    if name == "forecast":
        from benchmarks.workloads import forecast

        forecast.main(reports)
    else:
        from benchmarks.workloads.columns import COLUMNS, device_of
        from benchmarks.workloads.registry import load

        workload = load(name)(device_of(device_name))
        COLUMNS[column](workload, Clock(sys.stdin, reports, workload.device, workload.quality))
    end()


if __name__ == "__main__":
    main()
