"""The table of measured factors in docs/speed.md, made from benchmarks/results.

``python -m tests.docs.measured --write`` writes it again.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"

# Column: what was trained, where, and the file with the measurements. Both machines lend two cores of an AMD EPYC.
COLUMNS = {
    "docstrings, bf16 units": "ladder_docstrings.json",
    "film reviews, bf16 units": "ladder_imdb_bf16.json",
    "film reviews, AVX2": "ladder_imdb.json",
    "digits, AVX2": "ladder_digits.json",
}
LINES = [
    "packed=True",
    'packed="first_token"',
    'batching="length"',
    "resident=True",
    'allocator="keep"',
    "fused_optimizer=True",
    'precision="bf16-mixed"',
    'dropout="fast"',
    "compile=True",
]
_PLACE = re.compile(r"(<!-- measured -->\n).*?(\n<!-- /measured -->)", re.DOTALL)


def ladder(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file in ``benchmarks/results``."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return rows


def factors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the factor of each line over the rows kept above it, and of the last line that trains the same."""
    found: dict[str, float] = {}
    best = 1.0
    for row in rows:
        if row["refused"] or not row["same_maths"] or row["line"] == 'L.Trainer(speed="auto")':
            continue
        line = row["line"].removeprefix("L.Trainer(").removesuffix(")")
        if line in LINES:
            found[line] = row["speed"] / best
        if row["kept"] and row["line"] != rows[0]["line"]:
            best = row["speed"]
    return found | {"all": best}


def table() -> str:
    """Return the table as Markdown."""
    measured = {column: factors(ladder(file)) for column, file in COLUMNS.items()}
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for line in LINES:
        cells = [f"{found[line]:.2f}x" if line in found else "" for found in measured.values()]
        lines.append(f"| `{line}` | {' | '.join(cells)} |")
    totals = " | ".join(f"**{found['all']:.2f}x**" for found in measured.values())
    return "\n".join([*lines, f"| all that were kept | {totals} |"])


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        PAGE.write_text(_PLACE.sub(lambda found: found[1] + table() + found[2], text), encoding="utf-8")
    else:
        print(table())
