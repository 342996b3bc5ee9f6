"""Draw docs/images/ladder.png and ladder-dark.png, the first picture of the README, from benchmarks/results.

Run: python scripts/pictures/ladder.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

from hasten_tools.demo.task import ENGINEERS_LOOP

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "benchmarks" / "results" / "ladder_docstrings.json"
TARGET = ROOT / "docs" / "images"
# For a page 600 pixels wide; drawn at twice that.
WIDTH_INCHES, DPI = 6.0, 200
LOOKS = {
    "ladder.png": {"page": "#ffffff", "ink": "#1f2328", "quiet": "#59636e", "bar": "#0072B2", "base": "#b7bec7"},
    "ladder-dark.png": {"page": "#0d1117", "ink": "#e6edf3", "quiet": "#9da7b3", "bar": "#56B4E9", "base": "#4b5560"},
}


def main() -> None:
    """Draw both pictures."""
    rcParams.update({"font.family": "DejaVu Sans", "text.parse_math": False})
    found = json.loads(SOURCE.read_text(encoding="utf-8"))
    for name, look in LOOKS.items():
        # Without the version of matplotlib, the same figures give the same file.
        draw(found, look).savefig(TARGET / name, dpi=DPI, facecolor=look["page"], metadata={"Software": None})
        print(TARGET / name)


def draw(found: dict[str, Any], look: dict[str, str]) -> Figure:
    """Return bars of the speed of each row that is kept, relative to the loop that a good engineer writes."""
    rows = [row for row in found["rows"] if (row["kept"] or row["by_hand"]) and row["same_maths"]]
    # What somebody who knows PyTorch would write is the measure, not the loop of tutorials.
    one = next(row["speed"] for row in rows if row["row"] == ENGINEERS_LOOP)
    rows = [row | {"speed": row["speed"] / one} for row in rows]
    height = 1.28 + 0.34 * len(rows)
    figure = Figure(figsize=(WIDTH_INCHES, height), facecolor=look["page"])
    axes = figure.add_axes((0.385, 0.54 / height, 0.545, 0.34 * len(rows) / height), facecolor=look["page"])
    for place, row in enumerate(rows):
        lower = row["safety"] == "lower precision"
        color = look["bar"] if label(row)[1] else look["base"]
        # Hatched: the only row that computes with fewer bits.
        axes.barh(place, row["speed"], height=0.66, facecolor=look["page"] if lower else color, edgecolor=color,
                  hatch="//////" if lower else None, linewidth=1.2)  # fmt: skip
        axes.text(row["speed"] + 0.03, place, f"{row['speed']:.1f}\u00d7", va="center", ha="left", fontsize=10.5,
                  weight="bold", color=look["ink"])  # fmt: skip
        text, code = label(row)
        axes.text(-0.045, place, text, va="center", ha="right", fontsize=9 if code else 9.5, color=look["ink"],
                  family="DejaVu Sans Mono" if code else "DejaVu Sans")  # fmt: skip
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, max(row["speed"] for row in rows) * 1.09))
    axes.set_axis_off()
    left = 0.035
    place = {"transform": figure.transFigure, "ha": "left", "va": "top"}
    axes.text(left, 1 - 0.14 / height, "One argument after the other", fontsize=13, weight="bold", color=look["ink"],
              **place)  # fmt: skip
    axes.text(left, 1 - 0.42 / height, subtitle(found), fontsize=8.5, color=look["quiet"], **place)
    axes.text(left, 0.46 / height, notes(found, rows), fontsize=7.6, color=look["quiet"], linespacing=1.45,
              **place)  # fmt: skip
    return figure


def label(row: dict[str, Any]) -> tuple[str, bool]:
    """Return the text of a row, and whether it is code: the argument that the row adds."""
    argument = re.fullmatch(r"L\.Trainer\(([^()]*)\)", row["line"])
    return (f"+ {argument[1]}", True) if argument else (row["row"], False)


def subtitle(found: dict[str, Any]) -> str:
    """Return what was trained, and where."""
    model = found["title"].partition(" (")[0]
    hardware = found["hardware"]
    cores = {1: "one core", 2: "two cores"}.get(hardware["cores"], f"{hardware['cores']} cores")
    return f"Training speed of {model}, {cores} of an {hardware['device']}; an engineer's loop = 1"


def notes(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return what a reader has to know to judge the bars."""
    steps = [int(re.findall(r"\d+", row["basis"])[0]) for row in rows]
    share = 1 - rows[0]["pad_share"]
    text = f"{share:.0%} of the tokens are text, the others padding. "
    text += f"The fastest row is {rows[-1]['speed'] / rows[0]['speed']:.1f} times the plain loop."
    lower = any(row["safety"] == "lower precision" for row in rows)
    hatched = " Hatched: bfloat16." if lower else ""
    torch = found["hardware"]["torch"].partition("+")[0]
    return f"{text}\nTimed over {min(steps)} to {max(steps)} steps each by {found['command']}, torch {torch}.{hatched}"


if __name__ == "__main__":
    main()
