"""plot_logs: loss and accuracy by epoch, as figures for a paper or a slide."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hasten._lib.optional import need
from hasten_tools.report.curves import COLORS, KINDS, MARKERS, Curve, look, on_axis, plain_name, stage_of, suited_names
from hasten_tools.report.read import RecordedRun, find_run, read_run


def plot_logs(log_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> list[Path]:
    """Draw what ``hasten.plot_logs`` returns; it has the documentation."""
    try:
        file = find_run(log_dir)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"plot_logs({str(log_dir)!r}): {error}") from None
    run = read_run(file)
    if not run.rows:
        raise ValueError(f"{file} has no rows yet. Values are written every 100 steps and at the end of a run.")
    folder = run.folder if output is None else Path(output)
    written: list[Path] = []
    for kind, (pattern, title) in KINDS.items():
        curves = curves_by_epoch(run, pattern)
        if curves:
            folder.mkdir(parents=True, exist_ok=True)
            written += _draw(curves, title, folder / kind)
    if not written:
        columns = {"step", *run.rows.names(), *(["epoch"] if run.rows.ends() else [])}
        raise ValueError(
            f"{file} has no loss and no accuracy by epoch: its columns are {sorted(columns)}. Log them under names "
            "with 'loss' or 'acc' in them, for instance self.log('train_loss', loss)."
        )
    return written


def curves_by_epoch(run: RecordedRun, pattern: re.Pattern[str]) -> list[Curve]:
    """Return the curves of all names that match, over epochs that count from 1, training before validation."""
    curves = []
    for name in suited_names(run.rows.names(), pattern, "epoch"):
        column = run.rows.column(name)
        assert column is not None
        known = column.epochs == column.epochs
        if known.any():
            curves.append(on_axis(Curve(name, column.epochs[known].tolist(), column.values[known].tolist()), "epoch"))
    return sorted(curves, key=lambda curve: stage_of(curve.name))


def labels(curves: list[Curve]) -> list[str]:
    """Return what a legend calls curves: their stages, or their names where several are of one stage."""
    stages = [stage_of(curve.name) for curve in curves]
    return [
        stage if stages.count(stage) == 1 else plain_name(curve.name)
        for curve, stage in zip(curves, stages, strict=True)
    ]


def _draw(curves: list[Curve], title: str, stem: Path) -> list[Path]:
    figures, ticker, style = (need(f"matplotlib.{name}", purpose="plot_logs") for name in ("figure", "ticker", "style"))
    # Text stays text in the pdf.
    with style.context(["default", look() | {"pdf.fonttype": 42}]):
        figure = figures.Figure(figsize=(5.6, 3.7), layout="constrained")
        axes = figure.add_subplot()
        for place, (curve, label) in enumerate(zip(curves, labels(curves), strict=True)):
            line = {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 4.5}
            dashes = "-" if stage_of(curve.name) == "training" else (0, (4.5, 2))
            axes.plot(curve.x, curve.y, **line, linestyle=dashes, linewidth=1.7, label=label)
        axes.set(xlabel="Epoch", ylabel=title)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside upper left", ncols=3, handlelength=2.8)
        pdf, png = stem.with_suffix(".pdf"), stem.with_suffix(".png")
        # Without a date, the same values give the same file.
        figure.savefig(pdf, metadata={"CreationDate": None})
        figure.savefig(png, dpi=200)
    return [pdf, png]
