"""Curves: logged values over steps, epochs or time, of one run or of several side by side, as a figure."""

from __future__ import annotations

import functools
import io
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hasten._lib.optional import need

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Axis = Literal["step", "epoch", "time"]

# Okabe and Ito's colors, which color-blind readers tell apart, ordered so that neighbors also differ in brightness.
COLORS = ("#0072B2", "#E69F00", "#000000", "#CC79A7", "#009E73", "#D55E00", "#56B4E9")
# In greyscale, markers and dashes tell curves apart.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", "h", ">")
_DASHES: tuple[Any, ...] = ("-", (0, (4.5, 2)), (0, (1, 1.3)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
_INK, _QUIET, _GRID = "#24292f", "#59636e", "#e3e6ea"
# Points a curve is drawn with at most: more cannot be seen, and make a pdf slow.
_POINTS = 4000
_MARKERS_PER_CURVE = 7
# Curves of more points than this are thinner, unless they are smooth.
_DENSE = 200
# More entries than this stand beside the panels, not above them.
_LEGEND_ABOVE = 8
_LONGEST_NAME = 44

_STAGES = {
    "train": "training", "training": "training", "fit": "training", "val": "validation", "valid": "validation",
    "validation": "validation", "dev": "validation", "eval": "validation", "test": "test",
}  # fmt: skip
_ORDER = ("training", "validation", "test")
# The losses and the accuracies among logged names, and their titles.
KINDS = {
    "loss": (re.compile(r"loss", re.IGNORECASE), "Loss"),
    "acc": (re.compile(r"(^|[_/.\- ])(acc|accuracy)($|[_/.\- \d])", re.IGNORECASE), "Accuracy"),
}
_TITLES = {
    "acc": "Accuracy",
    "lr": "Learning rate",
    "samples_per_sec": "Samples per second",
    "tokens_per_sec": "Tokens per second",
}
# Rates, whose differences are judged against nothing at all.
_FROM_ZERO = frozenset({"samples_per_sec", "tokens_per_sec"})
_X_LABELS = {"step": "Step", "epoch": "Epoch"}


@dataclass(frozen=True)
class Curve:
    """The values of one name in one run.

    Args:
        name: the name under which they were logged, for instance ``"val_loss"``.
        x: steps, epochs (from 0) or seconds.
        y: the values; those that are not finite leave gaps, which are marked.
        run: the name of the run, where several are drawn.

    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    run: str = ""


def draw(
    curves: Iterable[Curve], *, x: Axis = "step", smooth: float | None = None, log: bool = False, dark: bool = False
) -> Figure:
    """Draw curves, one panel for each quantity: training and validation of a loss share one.

    Args:
        curves: what to draw. Runs differ in color and marker, training and validation in the dashes of their lines.
        x: what ``Curve.x`` is. Over epochs, values of the same epoch are averaged.
        smooth: below 1, the weight of neighbors in an exponential mean, such as 0.9; from 2 on, the number of values in
            a moving mean around each one (``smoothed``). The values themselves are drawn faintly behind. Curves of few
            values, such as one for each of ten epochs, stay as they are (``can_smooth``). Default: no smoothing.
        log: a logarithmic vertical axis.
        dark: light lines for a dark page.

    Returns:
        The figure, which notebooks show. ``save`` writes it to a file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: there is nothing to draw, ``smooth`` is neither, or a logarithm is asked for of values that are all
            at most 0.

    Example::

        >>> figure = draw([Curve("train_loss", [0, 10, 20], [2.0, 1.0, 0.5]), Curve("val_loss", [20], [0.7])])
        >>> [axes.get_title("left") for axes in figure.axes]
        ['Loss']

    """
    check_smooth(smooth)
    shown = [on_axis(curve, x) for curve in curves]
    shown = [curve for curve in shown if curve.x]
    if not shown:
        raise ValueError("there are no values to draw.")
    style = need("matplotlib.style", purpose="Drawing curves")
    figures = need("matplotlib.figure", purpose="Drawing curves")
    with style.context(["default", look(dark=dark)]):
        return _Drawing(shown, x, smooth, log, dark).figure(figures)


def plot_history(
    shown: Iterable[tuple[str, list[float], list[float]]],
    *,
    x: Axis,
    smooth: float | None,
    output: str | os.PathLike[str] | None,
) -> Figure:
    """Draw (name, places, values) of a history, and write the figure to ``output``; see ``History.plot``."""
    if output is not None:
        check_format(Path(output))
    figure = draw([Curve(*each) for each in shown], x=x, smooth=smooth)
    if output is not None:
        save(figure, output)
    return figure


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure; the same figure gives the same file.

    Args:
        figure: what ``draw`` returned.
        path: the file, whose suffix names its format: ``.png``, ``.pdf`` or ``.svg``.

    Raises:
        ValueError: another suffix.

    """
    target = Path(path)
    check_format(target)
    style = need("matplotlib.style", purpose="Drawing curves")
    target.parent.mkdir(parents=True, exist_ok=True)
    # No dates, and text that stays text in a pdf.
    metadata = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    suffix = target.suffix.lower()
    with style.context({"svg.hashsalt": "hasten", "pdf.fonttype": 42}):
        figure.savefig(target, dpi=200, metadata=metadata[suffix], facecolor=figure.get_facecolor())
    return target


def check_format(path: Path) -> None:
    """Raise ``ValueError`` for a file name that says no format that ``save`` can write."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{str(path)!r}: use a name that ends in .png, .pdf or .svg.")


def check_smooth(smooth: float | None) -> None:
    """Raise ``ValueError`` for what is neither a weight nor a window."""
    if smooth is None or 0 <= smooth < 1 or (smooth >= 2 and float(smooth).is_integer()):
        return
    raise ValueError(f"smooth={smooth!r}: use a weight below 1, such as 0.9, or a window of 2 or more values.")


def smoothed(y: Sequence[float], smooth: float) -> list[float]:
    """Return the mean of values around each one.

    Below 1, ``smooth`` is the weight of a neighbor: the one after it counts ``smooth`` times as much, and so on. Both
    sides count, so the curve does not lag behind as a mean of earlier values does. From 2 on, it is the number of
    values in a window. Values that are not finite stay as they are and do not enter the mean.

    Example::

        >>> smoothed([4.0, 0.0, 2.0], 3)
        [2.0, 2.0, 1.0]
        >>> smoothed([4.0, 0.0, 2.0], 0.5)
        [2.5714285714285716, 1.5, 1.7142857142857142]

    """
    if smooth >= 1:
        half = int(smooth) // 2
        found = []
        for place, value in enumerate(y):
            near = [each for each in y[max(0, place - half) : place + half + 1] if math.isfinite(each)]
            found.append(sum(near) / len(near) if math.isfinite(value) else value)
        return found
    before, after = _decaying_sums(y, smooth), _decaying_sums(y[::-1], smooth)[::-1]
    return [
        # Both sums contain the value itself.
        (left + right - value) / (left_weight + right_weight - 1) if math.isfinite(value) else value
        for value, (left, left_weight), (right, right_weight) in zip(y, before, after, strict=True)
    ]


def _decaying_sums(y: Sequence[float], weight: float) -> list[tuple[float, float]]:
    """Return for each value the weighted sum of it and those before it, and the sum of the weights."""
    total = weights = 0.0
    found = []
    for value in y:
        total, weights = weight * total, weight * weights
        if math.isfinite(value):
            total, weights = total + value, weights + 1
        found.append((total, weights))
    return found


def can_smooth(y: Sequence[float], smooth: float) -> bool:
    """Return whether a curve has values enough: three windows of them, where a weight of 0.9 reaches over 20 values.

    Means of fewer values would show another curve, not the same one without noise.

    Example::

        >>> can_smooth(range(10), 0.9), can_smooth(range(100), 0.9)
        (False, True)

    """
    window = smooth if smooth >= 1 else 2 / (1 - smooth)
    return len(y) >= 3 * window - 1e-6


def thinned(values: Sequence[float] | NDArray[np.float64], most: int) -> list[int]:
    """Return the places of at most ``most`` values: the smallest and the largest of each stretch, first and last.

    Of a stretch without a finite value, the first place stays, so that a curve has a gap there.

    Example::

        >>> thinned([0, 0, 9, 0, 0, 0, -9, 0], 6)
        [0, 2, 4, 6, 7]

    """
    count = len(values)
    if count <= most:
        return list(range(count))
    import numpy as np

    stretches = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    array = np.asarray(values, np.float64)
    finite = np.isfinite(array)
    low, high = np.where(finite, array, math.inf), np.where(finite, array, -math.inf)
    for stretch in range(stretches):
        begin, end = stretch * count // stretches, (stretch + 1) * count // stretches
        kept |= {begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())}
    return sorted(kept)


def plain_name(name: str) -> str:
    """Return a logged name without the "_step" or "_epoch" that a metric logged at both has.

    Example::

        >>> plain_name("train_loss_epoch"), plain_name("val_acc_step/dataloader_idx_1")
        ('train_loss', 'val_acc/dataloader_idx_1')

    """
    return re.sub(r"_(step|epoch)(?=$|/dataloader_idx_\d+$)", "", name)


def suited_names(names: Iterable[str], pattern: re.Pattern[str], x: Axis) -> list[str]:
    """Return the names of training and validation that match; of one logged at steps and epochs, what suits the axis.

    Example::

        >>> suited_names(["loss_step", "loss_epoch", "test_loss"], KINDS["loss"][0], "epoch")
        ['loss_epoch']

    """
    chosen: dict[str, str] = {}
    for name in names:
        if pattern.search(name) and stage_of(name) != "test":
            plain = plain_name(name)
            if plain not in chosen or _misfit(name, x) < _misfit(chosen[plain], x):
                chosen[plain] = name
    return list(chosen.values())


def _misfit(name: str, x: Axis) -> int:
    if re.search(r"_epoch($|/)", name):
        return 0 if x == "epoch" else 2
    return 2 if x == "epoch" and re.search(r"_step($|/)", name) else 1


def stage_of(name: str) -> str:
    """Return ``"training"``, ``"validation"`` or ``"test"``, as the words of a logged name say; training without any.

    Example::

        >>> stage_of("val/loss")
        'validation'

    """
    return next((_STAGES[word] for word in re.split(r"[_/.\- ]", name.lower()) if word in _STAGES), "training")


def title_of(quantity: str) -> str:
    """Return the title of a quantity or a logged name.

    Example::

        >>> title_of("acc"), title_of("grad_norm"), title_of("F1")
        ('Accuracy', 'Grad norm', 'F1')

    """
    if quantity in _TITLES:
        return _TITLES[quantity]
    if quantity.startswith("lr-"):
        return f"Learning rate, {quantity[3:]}"
    text = quantity.replace("_", " ").strip() or quantity
    return text[:1].upper() + text[1:]


def panel_of(name: str) -> tuple[str, str]:
    """Return the quantity that a logged name is of, and whether it is of training, validation or a test.

    Example::

        >>> panel_of("val_loss"), panel_of("train/acc_epoch")
        (('loss', 'validation'), ('acc', 'training'))

    """
    plain, _, loader = name.partition("/dataloader_idx_")
    plain = re.sub(r"_(step|epoch)$", "", plain)
    parts = re.split(r"([_/.\- ])", plain)
    kept = [place for place in range(0, len(parts), 2) if parts[place].lower() not in _STAGES]
    stage = stage_of(plain)
    # What stands between two kept words stays; "val_loss" and "loss/val" lose theirs.
    quantity = "".join(
        (parts[place - 1] if number and place else "") + parts[place] for number, place in enumerate(kept)
    )
    return quantity or plain, f"{stage}, loader {loader}" if loader else stage


def on_axis(curve: Curve, x: Axis) -> Curve:
    """Return a curve sorted by x; over epochs, with one value for each, counted from 1."""
    points = sorted(
        ((a, b) for a, b in zip(curve.x, curve.y, strict=True) if math.isfinite(a)), key=lambda point: point[0]
    )
    if x == "epoch":
        by_epoch: dict[float, list[float]] = {}
        for epoch, value in points:
            by_epoch.setdefault(math.floor(epoch) + 1, []).append(value)
        points = [(epoch, sum(values) / len(values)) for epoch, values in by_epoch.items()]
    return Curve(curve.name, [a for a, _ in points], [b for _, b in points], curve.run)


def look(*, dark: bool = False) -> dict[str, Any]:
    """Return the settings of matplotlib that all of hasten's plots share."""
    ink, quiet, grid, page = ("#e6edf3", "#9da7b3", "#3a424c", "#0d1117") if dark else (_INK, _QUIET, _GRID, "white")
    return {
        "figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page, "text.color": ink,
        "axes.labelcolor": quiet, "axes.titlecolor": ink, "xtick.color": quiet, "ytick.color": quiet,
        "axes.edgecolor": quiet, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": grid, "grid.linewidth": 0.8, "axes.axisbelow": True,
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.labelsize": 9, "xtick.labelsize": 9,
        "ytick.labelsize": 9, "legend.fontsize": 9, "legend.frameon": False, "lines.solid_capstyle": "round",
        "font.family": ["DejaVu Sans"], "text.usetex": False, "text.parse_math": False,
        "axes.formatter.useoffset": False,
    }  # fmt: skip


def _scale_by_decades(axes: Any, ticker: Any, finite: Sequence[float]) -> None:
    axes.set_yscale("log", nonpositive="mask")
    decades = math.log10(max(finite) / min(value for value in finite if value > 0))
    plain = ticker.FuncFormatter(lambda value, _: f"{value:g}")
    # Over few decades, powers of ten alone would leave the axis almost without numbers.
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,)))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _begin_at_zero(axes: Any, panel: list[tuple[str, Curve]], finite: Sequence[float]) -> None:
    """Let an axis of positive values begin at 0 where that suits them."""
    if min(finite) == max(finite):
        # Around a constant, an axis would have many digits and no meaning.
        axes.set_ylim(0, 1.6 * max(finite))
    elif all(curve.name in _FROM_ZERO for _, curve in panel):
        axes.set_ylim(bottom=0)


def _scale_evenly(axes: Any, ticker: Any, finite: Sequence[float]) -> None:
    axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    if finite and max(map(abs, finite)) >= 1000:
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
    elif finite and 0 < max(map(abs, finite)) < 1e-3:
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.3g}"))


class _Drawing:
    """One figure in the making."""

    def __init__(self, curves: list[Curve], x: Axis, smooth: float | None, log: bool, dark: bool) -> None:
        self.curves, self.x, self.smooth, self.log, self.dark = curves, x, smooth, log, dark
        self.panels = _panels(curves)
        self.runs = list(dict.fromkeys(curve.run for curve in curves))
        self.variants = sorted(
            {variant for panel in self.panels.values() for variant, _ in panel},
            key=lambda variant: (_ORDER.index(variant.partition(",")[0]), variant),
        )
        self.seconds, self.unit = _time_unit(curves) if x == "time" else (1.0, "")
        first = min(curve.x[0] for curve in curves) / self.seconds
        last = max(curve.x[-1] for curve in curves) / self.seconds
        # All panels show the same stretch; that of a single point is as wide as a step.
        room = 0.02 * (last - first) or 0.5
        self.span = (first - room, last + room)
        self.not_finite = False

    def figure(self, figures: Any) -> Figure:
        count = len(self.panels)
        columns = 1 if count == 1 else 2 if count in (2, 4) else 3
        rows = math.ceil(count / columns)
        entries = self._entries()
        beside = len(entries) > _LEGEND_ABOVE
        wide = (6.4 if columns == 1 else 4.1 * columns) + (2.2 if beside else 0)
        figure = figures.Figure(
            figsize=(wide, (3.7 if columns == 1 else 2.75) * rows + (0.3 if entries and not beside else 0)),
            layout="constrained",
        )
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.05, wspace=0.03, hspace=0.06)
        for place, (title, panel) in enumerate(self.panels.items()):
            axes = figure.add_subplot(rows, columns, place + 1)
            self._panel(axes, title, panel, bottom=place + columns >= count)
        if self.not_finite:
            entries.append(("not finite", {"linestyle": "", "marker": "x", "color": self._ink(), "markersize": 5}))
        if len(entries) > 1 or self.runs[0]:
            self._legend(figure, entries, beside)
        # How notebooks ask for a picture: by themselves they draw only figures of pyplot.
        figure._repr_png_ = functools.partial(_png, figure)
        drawn: Figure = figure
        return drawn

    def _panel(self, axes: Any, title: str, panel: list[tuple[str, Curve]], *, bottom: bool) -> None:
        ticker = need("matplotlib.ticker", purpose="Drawing curves")
        finite = [value for _, curve in panel for value in curve.y if math.isfinite(value)]
        if self.log and finite:
            if max(finite) <= 0:
                raise ValueError(f"{panel[0][1].name!r} has no value above 0, which a logarithmic axis needs.")
            _scale_by_decades(axes, ticker, finite)
        for variant, curve in panel:
            self._curve(axes, variant, curve)
        axes.set_title(title, loc="left", pad=8)
        if bottom:
            axes.set_xlabel(_X_LABELS.get(self.x, f"Time ({self.unit})"))
        whole = self.x != "time"
        steps = [1, 2, 2.5, 5, 10] if whole else [1, 2, 5, 10]
        axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=whole, steps=steps))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number(value)))
        axes.grid(visible=False, axis="x")
        if not self.log:
            _scale_evenly(axes, ticker, finite)
        axes.margins(y=0.07)
        axes.set_xlim(*self.span)
        if finite and min(finite) > 0 and not self.log:
            _begin_at_zero(axes, panel, finite)

    def _curve(self, axes: Any, variant: str, curve: Curve) -> None:
        shape = self._style(curve.run, variant)
        x = [value / self.seconds for value in curve.x]
        y = list(curve.y)
        bad = [a for a, b in zip(x, y, strict=True) if not math.isfinite(b)]
        if bad:
            self.not_finite = True
            axes.plot(bad[:50], [0.03] * len(bad[:50]), "x", color=shape["color"], markersize=5, clip_on=False,
                      transform=axes.get_xaxis_transform())  # fmt: skip
        y = [value if math.isfinite(value) else math.nan for value in y]
        front = y
        dense = len(y) > _DENSE
        if self.smooth and can_smooth(y, self.smooth):
            front, dense = smoothed(y, self.smooth), False
            shown = thinned(y, _POINTS)
            behind = [x[place] for place in shown], [y[place] for place in shown]
            axes.plot(*behind, color=shape["color"], linewidth=0.8, alpha=0.28, zorder=1.5)
        shown = thinned(front, _POINTS)
        drawn_x, drawn_y = [x[place] for place in shown], [front[place] for place in shown]
        many = len(drawn_x) > 2 * _MARKERS_PER_CURVE
        place = self.runs.index(curve.run) + 0.5 * self.variants.index(variant)
        marks = _spread(drawn_x, place / (len(self.runs) + 1)) if many else None
        axes.plot(drawn_x, drawn_y, **shape | ({"linewidth": 1.1} if dense else {}), markevery=marks)

    def _style(self, run: str, variant: str) -> dict[str, Any]:
        number_of_run, number_of_variant = self.runs.index(run), self.variants.index(variant)
        # One run: color and marker tell its stages apart. Several: they tell the runs apart, and dashes the stages.
        place = number_of_run if len(self.runs) > 1 else number_of_variant
        color = COLORS[place % len(COLORS)]
        return {
            "color": self._ink() if color == "#000000" else color,
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": _DASHES[number_of_variant % len(_DASHES)],
            "linewidth": 1.7,
            "markersize": 4.5,
            "markeredgewidth": 0.0,
        }

    def _ink(self) -> str:
        return "#e6edf3" if self.dark else "#000000"

    def _entries(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines of the legend: first the runs, then what their dashes mean."""
        if len(self.runs) == 1:
            return [(variant, self._style(self.runs[0], variant)) for variant in self.variants]
        entries = [(run, self._style(run, self.variants[0])) for run in self.runs]
        if len(self.variants) > 1:
            grey = {"color": "#8b949e" if self.dark else _QUIET, "marker": ""}
            entries += [(variant, self._style(self.runs[0], variant) | grey) for variant in self.variants]
        return entries

    def _legend(self, figure: Any, entries: list[tuple[str, dict[str, Any]]], beside: bool) -> None:
        lines = need("matplotlib.lines", purpose="Drawing curves")
        texts = [_short(name) for name, _ in entries]
        longest = max(map(len, texts))
        # A character is about 0.075 inches wide, and the line before it 0.65.
        width = figure.get_figwidth()
        if sum(0.65 + 0.075 * len(text) for text in texts) <= width:
            columns = len(texts)
        else:
            columns = min(len(texts), max(1, int(width / (0.65 + 0.075 * longest))))
        columns = 1 if beside else columns
        # The legend fills columns, and people read rows.
        order = [place for column in range(columns) for place in range(column, len(texts), columns)]
        legend = figure.legend(
            [lines.Line2D([], [], **entries[place][1]) for place in order],
            [str(place) for place in order],
            loc="outside right upper" if beside else "outside upper left",
            ncols=columns,
            handlelength=2.8,
            columnspacing=1.6,
            borderaxespad=0.0,
        )
        # Set here: a label that begins with an underscore would be left out.
        for shown, place in zip(legend.get_texts(), order, strict=True):
            shown.set_text(texts[place])


def _panels(curves: list[Curve]) -> dict[str, list[tuple[str, Curve]]]:
    """Return the curves of each panel, with their variants; two names that say the same get two panels."""
    panels: dict[str, list[tuple[str, Curve]]] = {}
    for curve in curves:
        quantity, variant = panel_of(curve.name)
        title = title_of(quantity)
        taken = any(other == variant and drawn.name != curve.name for other, drawn in panels.get(title, []))
        panels.setdefault(title_of(curve.name) if taken else title, []).append((variant, curve))
    return panels


def _time_unit(curves: list[Curve]) -> tuple[float, str]:
    longest = max(curve.x[-1] for curve in curves)
    for seconds, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if longest >= 2 * seconds:
            return seconds, unit
    return 1.0, "seconds"


def number(value: float) -> str:
    """Return a number as an axis shows it.

    Example::

        >>> number(2500), number(12000), number(1.5e6), number(0.25)
        ('2,500', '12,000', '1.5M', '0.25')

    """
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _short(name: str) -> str:
    """Return a name without its middle if it is long."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}\u2026{name[-half:]}"


def _spread(x: Sequence[float], start: float) -> list[int]:
    """Return the points that get a marker, evenly along the axis; ``start`` keeps those of several curves apart."""
    width = (x[-1] - x[0]) / _MARKERS_PER_CURVE
    places: list[int] = []
    place = 0
    for wanted in (x[0] + (number + start % 1) * width for number in range(_MARKERS_PER_CURVE + 1)):
        while place < len(x) - 1 and x[place] < wanted:
            place += 1
        if x[place] >= wanted:
            places.append(place)
    return sorted(set(places))
