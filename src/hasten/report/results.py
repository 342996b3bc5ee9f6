"""Print what validate and test logged."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO


def print_results(results: list[dict[str, float]], stage: str, file: TextIO | None = None) -> None:
    """Print a table of the values of each loader.

    Args:
        results: a dict of values for each loader.
        stage: "validate" or "test", the heading.
        file: where to; standard output by default.

    Example::

        >>> print_results([{"test_acc": 0.91}], "test")
        test metric    value
        -----------  -------
        test_acc      0.9100

    """
    out = sys.stdout if file is None else file
    for index, values in enumerate(results):
        if not values:
            continue
        heading = f"{stage} metric" + (f" (loader {index})" if len(results) > 1 else "")
        rows = [(name, _number(value)) for name, value in sorted(values.items())]
        room = max(20, shutil.get_terminal_size((100, 24)).columns - 16)
        left = min(room, max(len(heading), *(len(name) for name, _ in rows)))
        right = max(7, *(len(value) for _, value in rows))
        print(f"{heading:<{left}}  {'value':>{right}}", file=out)
        print(f"{'-' * left}  {'-' * right}", file=out)
        for name, value in rows:
            print(f"{name:<{left}}  {value:>{right}}", file=out)


def _number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")) or float(value).is_integer():
        return str(value)
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.4e}"
