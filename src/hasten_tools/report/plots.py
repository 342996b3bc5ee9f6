"""plot_logs: loss and accuracy by epoch, as figures for a paper or a slide."""

from __future__ import annotations

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hasten._lib.optional import need
from hasten_tools.report.curves import COLORS, MARKERS, look
from hasten_tools.report.read import METRICS, find_run, read_run

# The losses and the accuracies among logged names, and their titles.
KINDS = {
    "loss": (re.compile(r"loss", re.IGNORECASE), "Loss"),
    "acc": (re.compile(r"(^|[_/.\- ])(acc|accuracy)($|[_/.\- \d])", re.IGNORECASE), "Accuracy"),
}
_STAGES = {"val": "validation", "valid": "validation", "validation": "validation", "dev": "validation", "test": "test"}


@dataclass
class EpochCurve:
    """The values of one name, by epoch."""

    label: str
    stage: str
    values: dict[int, float]


def plot_logs(log_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> list[Path]:
    """Draw what ``hasten.plot_logs`` returns; it has the documentation."""
    source = find_metrics(log_dir)
    rows = _read(source)
    folder = source.parent if output is None else Path(output)
    written: list[Path] = []
    for kind, (pattern, title) in KINDS.items():
        curves = curves_of(rows, pattern)
        if curves:
            folder.mkdir(parents=True, exist_ok=True)
            written += _draw(curves, title, folder / kind)
    if not written:
        columns = sorted({name for row in rows for name in row})
        raise ValueError(
            f"{source} has no loss and no accuracy by epoch: its columns are {columns}. Log them under names "
            "with 'loss' or 'acc' in them, for instance self.log('train_loss', loss)."
        )
    return written


def find_metrics(log_dir: str | os.PathLike[str]) -> Path:
    """Return the file with the logged values that ``log_dir`` means: ``metrics.csv``, or the record of the run."""
    path = Path(log_dir)
    if path.is_file():
        return path
    try:
        file = find_run(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"plot_logs({str(log_dir)!r}): {error}") from None
    beside = file.with_name(METRICS)
    return beside if beside.is_file() else file


def curves_of(rows: list[dict[str, str]], pattern: re.Pattern[str]) -> list[EpochCurve]:
    """Return the curves of all names that match, training before validation."""
    columns = dict.fromkeys(name for row in rows for name in row if pattern.search(name))
    chosen: dict[str, str] = {}
    # Of a name logged both at steps and at epochs, the epoch's own value is the right one.
    for name in sorted(columns, key=_rank):
        chosen.setdefault(re.sub(r"_(step|epoch)(?=$|/dataloader_idx_\d+$)", "", name), name)
    curves = []
    for plain, column in chosen.items():
        values = _by_epoch(rows, column)
        stage = _stage(plain)
        if values and stage != "test":
            curves.append(EpochCurve(plain, stage, values))
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
    if path.suffix == ".jsonl":
        # The record of a run has what was logged, whichever logger it had.
        recorded = read_run(path).rows
        rows = [{"epoch": str(row.epoch), **{k: str(v) for k, v in row.values.items()}} for row in recorded]
    else:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]
    if not rows:
        raise ValueError(f"{path} has no rows yet. Values are written every 100 steps and at the end of a run.")
    return rows


def _draw(curves: list[EpochCurve], title: str, stem: Path) -> list[Path]:
    figures, ticker, style = (need(f"matplotlib.{name}", purpose="plot_logs") for name in ("figure", "ticker", "style"))
    # Text stays text in the pdf.
    with style.context(["default", look() | {"pdf.fonttype": 42}]):
        figure = figures.Figure(figsize=(5.6, 3.7), layout="constrained")
        axes = figure.add_subplot()
        for place, curve in enumerate(curves):
            epochs = [epoch + 1 for epoch in curve.values]
            line = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 4.5}
            dashes = "-" if curve.stage == "training" else (0, (4.5, 2))
            axes.plot(epochs, list(curve.values.values()), **line, linestyle=dashes, linewidth=1.7, label=curve.label)
        axes.set(xlabel="Epoch", ylabel=title)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside upper left", ncols=3, handlelength=2.8)
        pdf, png = stem.with_suffix(".pdf"), stem.with_suffix(".png")
        # Without a date, the same values give the same file.
        figure.savefig(pdf, metadata={"CreationDate": None})
        figure.savefig(png, dpi=200)
    return [pdf, png]
