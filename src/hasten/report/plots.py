"""plot_logs: loss and accuracy by epoch, as figures for a paper or a slide."""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from hasten._lib.optional import need

# Okabe and Ito's colours, which all kinds of colour vision tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_KINDS = {
    "loss": (re.compile(r"loss", re.IGNORECASE), "Loss"),
    "acc": (re.compile(r"(^|[_/.\- ])(acc|accuracy)($|[_/.\- \d])", re.IGNORECASE), "Accuracy"),
}
_STAGES = {
    "train": "training",
    "training": "training",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
}
# Many points need no mark each.
_MARKED_POINTS = 40


@dataclass
class Curve:
    """The values of one name, by epoch."""

    label: str
    stage: str
    values: dict[int, float]


def plot_logs(log_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> list[Path]:
    """Draw loss and accuracy by epoch, training and validation, to ``loss`` and ``acc`` as pdf and png.

    Values logged at steps are averaged over their epoch, unless the epoch has a value itself.

    Args:
        log_dir: folder of a run, its ``metrics.csv``, or a folder of ``version_N``, of which the latest counts.
        output: folder for the pictures; beside ``metrics.csv`` by default.

    Returns:
        The files written. What was not logged is left out.

    Raises:
        FileNotFoundError: ``metrics.csv`` does not exist.
        ValueError: it contains neither a loss nor an accuracy.

    Example::

        >>> import tempfile
        >>> from hasten.loggers import CSVLogger
        >>> logger = CSVLogger(tempfile.mkdtemp())
        >>> for epoch in range(3):
        ...     logger.log_metrics({"epoch": epoch, "train_loss": 1 / (epoch + 1)}, step=10 * epoch)
        >>> logger.finalize("success")
        >>> [path.name for path in plot_logs(logger.log_dir)]
        ['loss.pdf', 'loss.png']

    """
    source = find_metrics(log_dir)
    rows = _read(source)
    folder = source.parent if output is None else Path(output)
    written: list[Path] = []
    for kind, (pattern, title) in _KINDS.items():
        curves = curves_of(rows, pattern)
        if curves:
            folder.mkdir(parents=True, exist_ok=True)
            written += _draw(curves, title, folder / kind)
    if not written:
        columns = sorted({name for row in rows for name in row} - {"epoch", "step"})
        raise ValueError(
            f"{source} holds no loss and no accuracy to draw: its columns are {columns}. Log them under names "
            "with 'loss' or 'acc' in them, for instance self.log('train_loss', loss)."
        )
    return written


def find_metrics(log_dir: str | os.PathLike[str]) -> Path:
    """Return the ``metrics.csv`` that ``log_dir`` means; ``FileNotFoundError`` without one."""
    path = Path(log_dir)
    if path.is_file():
        return path
    if not path.exists():
        raise FileNotFoundError(f"plot_logs({str(log_dir)!r}): there is no such file or folder.")
    for folder in (path, path / "lightning_logs"):
        if (folder / "metrics.csv").is_file():
            return folder / "metrics.csv"
        numbered = [
            (int(below.name.removeprefix("version_")), below)
            for below in folder.glob("version_*")
            if below.name.removeprefix("version_").isdigit() and (below / "metrics.csv").is_file()
        ]
        if numbered:
            return max(numbered)[1] / "metrics.csv"
    inside = sorted(str(found.parent.relative_to(path)) for found in path.rglob("metrics.csv"))[:5]
    others = f"There is one in {', '.join(inside)}."
    hint = f" {others if inside else 'Train with a CSVLogger (the default) to get one.'}"
    raise FileNotFoundError(f"plot_logs({str(log_dir)!r}): there is no metrics.csv in this folder.{hint}")


def curves_of(rows: list[dict[str, str]], pattern: re.Pattern[str]) -> list[Curve]:
    """Return the curves of all names that match, training before validation."""
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in ("epoch", "step")))
    chosen: dict[str, str] = {}
    for name in columns:
        if not pattern.search(name):
            continue
        plain = re.sub(r"_(step|epoch)(?=$|/dataloader_idx_\d+$)", "", name)
        # Of a name logged both at steps and at epochs, the epoch's own value is the right one.
        if plain not in chosen or _rank(name) < _rank(chosen[plain]):
            chosen[plain] = name
    curves = []
    for plain, column in chosen.items():
        values = _by_epoch(rows, column)
        stage = _stage(plain)
        if values and stage != "test":
            curves.append(Curve(plain, stage, values))
    curves.sort(key=lambda curve: curve.stage)
    stages = [curve.stage for curve in curves]
    for curve in curves:
        if stages.count(curve.stage) == 1:
            curve.label = curve.stage
    return curves


def _rank(name: str) -> int:
    return 0 if re.search(r"_epoch($|/)", name) else 2 if re.search(r"_step($|/)", name) else 1


def _stage(name: str) -> str:
    words = re.split(r"[_/.\- ]", name.lower())
    return next((_STAGES[word] for word in words if word in _STAGES), "training")


def _by_epoch(rows: Iterable[dict[str, str]], column: str) -> dict[int, float]:
    gathered: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        value, epoch = _number(row.get(column)), _number(row.get("epoch"))
        if value is not None and epoch is not None and epoch == epoch:
            gathered[int(epoch)].append(value)
    return {epoch: sum(values) / len(values) for epoch, values in sorted(gathered.items())}


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        rows = [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]
    if not rows:
        raise ValueError(f"{path} has no rows yet. Values are written every 100 steps and at the end of a run.")
    if not any("epoch" in row for row in rows):
        # Written by hand: one row an epoch, or one a step, is drawn against its number.
        for number, row in enumerate(rows):
            row["epoch"] = row.get("step", str(number))
    return rows


def _draw(curves: list[Curve], title: str, stem: Path) -> list[Path]:
    figures = need("matplotlib.figure", purpose="plot_logs")
    ticker = need("matplotlib.ticker", purpose="plot_logs")
    matplotlib = need("matplotlib", purpose="plot_logs")
    style = {
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.labelsize": 12,
        "legend.fontsize": 10.5,
        "pdf.fonttype": 42,  # text stays text in the pdf
        "axes.unicode_minus": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#555555",
        "axes.axisbelow": True,
        "axes.ymargin": 0.08,
        "lines.linewidth": 1.9,
        "lines.markersize": 5,
        "lines.markeredgecolor": "white",
        "lines.markeredgewidth": 0.6,
        "xtick.color": "#333333",
        "ytick.color": "#333333",
        "grid.color": "#d9d9d9",
        "grid.linewidth": 0.7,
        "legend.framealpha": 0.9,
        "legend.edgecolor": "none",
    }
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=(5.6, 3.7), layout="constrained")
        axes = figure.add_subplot()
        for curve, colour, marker in zip(curves, cycle(_COLOURS), cycle(_MARKERS), strict=False):
            axes.plot(
                [epoch + 1 for epoch in curve.values],
                list(curve.values.values()),
                linestyle="-" if curve.stage == "training" else "--",
                marker=marker if len(curve.values) <= _MARKED_POINTS else None,
                label=curve.label,
                color=colour,
                clip_on=False,
                zorder=3,
            )
        epochs = [epoch + 1 for curve in curves for epoch in curve.values]
        margin = max(0.25, 0.02 * (max(epochs) - min(epochs)))
        axes.set(xlabel="Epoch", ylabel=title, xlim=(min(epochs) - margin, max(epochs) + margin))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
        axes.tick_params(length=3.5)
        axes.grid(True, zorder=0)
        axes.legend(loc="best")
        paths = [stem.with_suffix(".pdf"), stem.with_suffix(".png")]
        for path in paths:
            # Without a date, the same values give the same file.
            made = {"CreationDate": None} if path.suffix == ".pdf" else None
            figure.savefig(path, dpi=200, metadata=made)
    return paths
