"""History: everything that a fit has logged, by step and by epoch."""

from __future__ import annotations

import bisect
import math
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.names import did_you_mean
from hasten._lib.optional import need
from hasten.extend.entry_points import load
from hasten.report.tables import aligned

if TYPE_CHECKING:
    import os

# The keys of a row that are not values.
_PLACE = ("step", "epoch", "time")
# Values that ``print`` shows of one name: the last ones.
_SHOWN = 5
# From here on it pays to save values in less space.
_MANY = 1000
_DTYPES = {"i": torch.int32, "q": torch.int64, "d": torch.float64}


class Series(Sequence[float]):
    """The values of one name, oldest first, with where each was logged.

    Steps are as loggers count them, times in seconds since 1970.

    Example::

        >>> series = Series("loss", steps=[9, 19], epochs=[0, 0], times=[0.0, 1.0], values=[0.5, 0.25])
        >>> series[-1], min(series), series.steps
        (0.25, 0.25, [9, 19])

    """

    def __init__(
        self, name: str, *, steps: list[int], epochs: list[int], times: list[float], values: list[float]
    ) -> None:
        self.name, self.steps, self.epochs, self.times, self.values = name, steps, epochs, times, values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        return self.values[index]

    def __eq__(self, other: object) -> bool:
        return self.values == (other.values if isinstance(other, Series) else other)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.array(self.values, dtype=dtype)

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.4g}" for value in self.values[-_SHOWN:])
        dots = "..., " if len(self) > _SHOWN else ""
        return f"Series({self.name!r}, {len(self)} values: [{dots}{shown}])"


class History(Sequence[dict[str, Any]]):
    """Everything that a fit has logged, as rows; without a logger, too.

    A row is a dict with ``step``, ``epoch``, ``time`` (seconds since 1970) and the values logged there. There is one
    each time values go to the loggers: every ``log_every_n_steps`` steps, and at the end of training and validation
    epochs. ``history["val_loss"]`` gives the values of one name. A fit that continues from a checkpoint has the rows of
    the runs before, on every process those of process 0; each adds its own values.

    Example::

        >>> history = History()
        >>> history.add(step=49, epoch=0, values={"loss": 0.5})
        >>> history.add(step=99, epoch=1, values={"loss": 0.25, "lr": 0.1})
        >>> history["loss"].values
        [0.5, 0.25]
        >>> [(row["step"], row.get("lr")) for row in history]
        [(49, None), (99, 0.1)]

    """

    def __init__(self) -> None:
        self._steps, self._epochs, self._times = array("q"), array("i"), array("d")
        # By name: in which rows, and the values there.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, *, step: int, epoch: int, values: Mapping[str, float], time: float | None = None) -> None:
        """Add values; if the last row has the same step and epoch, they become part of it.

        Args:
            step: the step, as loggers count them.
            epoch: the epoch.
            values: numbers by name.
            time: when, in seconds since 1970; now by default.

        """
        row = len(self._steps) - 1
        same = row >= 0 and self._steps[row] == step and self._epochs[row] == epoch
        if same:
            same = not any(name in self._columns and self._columns[name][0][-1] == row for name in values)
        if not same:
            row += 1
            self._steps.append(step)
            self._epochs.append(epoch)
            self._times.append(_now() if time is None else time)
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = (array("i"), array("d"))
            rows, column = self._columns[name]
            rows.append(row)
            column.append(value)

    # -- reading

    def keys(self) -> list[str]:
        """Return the names that were logged, in the order in which they first were."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> list[dict[str, Any]]: ...
    @overload
    def __getitem__(self, key: str) -> Series: ...
    def __getitem__(self, key: int | slice | str) -> dict[str, Any] | list[dict[str, Any]] | Series:
        if isinstance(key, str):
            return self._series(key)
        if isinstance(key, slice):
            return [self._row(index) for index in range(*key.indices(len(self)))]
        index = key + len(self) if key < 0 else key
        if not 0 <= index < len(self):
            raise IndexError(f"trainer.history[{key}]: there are {len(self)} rows.")
        return self._row(index)

    def __contains__(self, key: object) -> bool:
        return key in self._columns if isinstance(key, str) else any(row == key for row in self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        following = dict.fromkeys(self._columns, 0)
        for index in range(len(self)):
            row = self._place(index)
            for name, (rows, column) in self._columns.items():
                at = following[name]
                if at < len(rows) and rows[at] == index:
                    row[name] = column[at]
                    following[name] = at + 1
            yield row

    def _place(self, index: int) -> dict[str, Any]:
        return {"step": self._steps[index], "epoch": self._epochs[index], "time": self._times[index]}

    def _row(self, index: int) -> dict[str, Any]:
        row = self._place(index)
        for name, (rows, column) in self._columns.items():
            at = bisect.bisect_left(rows, index)
            if at < len(rows) and rows[at] == index:
                row[name] = column[at]
        return row

    def _series(self, name: str) -> Series:
        if name in _PLACE:
            places: dict[str, Sequence[Any]] = {"step": self._steps, "epoch": self._epochs, "time": self._times}
            every = list(places[name])
            return Series(
                name, steps=list(self._steps), epochs=list(self._epochs), times=list(self._times), values=every
            )
        if name not in self._columns:
            known = f" Logged were: {', '.join(self._columns)}." if self._columns else " Nothing was logged."
            what = f"trainer.history[{name!r}]: no value of this name."
            raise make_error(KeyError, what, fix=f"{did_you_mean(name, self._columns)}{known}")
        rows, column = self._columns[name]
        return Series(
            name,
            steps=[self._steps[row] for row in rows],
            epochs=[self._epochs[row] for row in rows],
            times=[self._times[row] for row in rows],
            values=list(column),
        )

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one line for each row, and nan where a name was not logged.

        Raises:
            ModuleNotFoundError: pandas is not installed.

        Example::

            >>> history = History()
            >>> history.add(step=49, epoch=0, values={"loss": 0.5})
            >>> list(history.to_pandas().columns)
            ['step', 'epoch', 'time', 'loss']

        """
        pandas = need("pandas", purpose="trainer.history.to_pandas()")
        columns: dict[str, Any] = {name: list(self._series(name)) for name in _PLACE}
        for name, (rows, column) in self._columns.items():
            values = [math.nan] * len(self)
            for row, value in zip(rows, column, strict=True):
                values[row] = value
            columns[name] = values
        return pandas.DataFrame(columns)

    def plot(
        self,
        *names: str,
        x: Literal["step", "epoch", "time"] = "step",
        smooth: float | None = None,
        output: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Draw values with matplotlib; in a notebook the figure is shown.

        Args:
            names: which values; by default all.
            x: "step", "epoch" or "time", the seconds since the first row.
            smooth: below 1, the weight of what came before in an exponential mean; from 2 on, the number of values in a
                moving mean. The values themselves stay visible. Default: no smoothing.
            output: a file to write: png, pdf or svg, by its suffix.

        Returns:
            the ``matplotlib.figure.Figure``.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            KeyError: nothing was logged under a name.
            ValueError: ``x``, ``smooth`` or the suffix of ``output`` is wrong, or nothing was logged.

        Example::

            >>> history = History()
            >>> history.add(step=49, epoch=0, values={"loss": 0.5})
            >>> history.add(step=99, epoch=1, values={"loss": 0.25})
            >>> history.plot("loss").axes[0].get_xlabel()
            'Step'

        """
        check.one_of("trainer.history.plot", "x", x, ("step", "epoch", "time"))
        draw = load("hasten.trainer", "plot_history", purpose="trainer.history.plot")
        began = self._times[0] if self._times else 0.0

        def shown() -> Iterator[tuple[str, list[Any], list[float]]]:
            for name in names or self._columns:
                series = self._series(name)
                place: dict[str, list[Any]] = {"step": series.steps, "epoch": series.epochs}
                yield name, place.get(x) or [one - began for one in series.times], series.values

        return draw(shown(), x=x, smooth=smooth, output=output)

    # -- showing

    def __repr__(self) -> str:
        if not len(self):
            return "History: nothing was logged"
        table = [("", "last", "smallest", "at step", "largest", "at step"), *map(self._summary, self._columns)]
        return "\n  ".join([f"History: {self._extent()}", *aligned(table, right_from=1, gap="  ")])

    def _repr_html_(self) -> str:
        if not len(self):
            return "<p>History: nothing was logged</p>"
        right = 'style="text-align: right; padding: 2px 10px; font-variant-numeric: tabular-nums"'
        left = 'style="text-align: left; padding: 2px 10px"'
        titles = ("last", "smallest", "at step", "largest", "at step")
        head = f"<th {left}></th>" + "".join(f"<th {right}>{title}</th>" for title in titles) + "<th></th>"
        body = []
        for name, (_, column) in self._columns.items():
            texts = self._summary(name)[1:]
            cells = "".join(f"<td {right}>{text}</td>" for text in texts)
            body.append(f"<tr><td {left}>{escape(name)}</td>{cells}<td>{_sparkline(column)}</td></tr>")
        began = datetime.fromtimestamp(self._times[0]).strftime("%Y-%m-%d %H:%M")
        caption = f'<caption style="text-align: left; padding: 2px 10px">{self._extent()}, from {began}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"

    def _extent(self) -> str:
        rows, steps, epochs = len(self), self._steps, self._epochs
        where = f"step {steps[0]}" if rows == 1 else f"step {steps[0]} to {steps[-1]}"
        return f"{rows} row{'s' * (rows > 1)}, {where}, epoch {epochs[0]}" + f" to {epochs[-1]}" * (
            epochs[-1] > epochs[0]
        )

    def _summary(self, name: str) -> tuple[str, ...]:
        """Return a name, its last value, and its smallest and largest one with their steps."""
        rows, column = self._columns[name]
        finite = [index for index, value in enumerate(column) if math.isfinite(value)]
        least = min(finite, key=column.__getitem__, default=None)
        most = max(finite, key=column.__getitem__, default=None)
        ends = [
            text
            for index in (least, most)
            for text in (("", "") if index is None else (f"{column[index]:.4g}", str(self._steps[rows[index]])))
        ]
        return (name, f"{column[-1]:.4g}", *ends)

    # -- state

    def mark(self) -> Mapping[str | None, int]:
        """Return how many rows there are (of None), and how many values of each name."""
        return {None: len(self._steps)} | {name: len(rows) for name, (rows, _) in self._columns.items()}

    def state_dict(self, until: Mapping[str | None, int] | None = None) -> dict[str, Any]:
        """Return the rows as two or three tensors, because a checkpoint with many small ones takes long to save.

        Args:
            until: what ``mark`` returned: without what was added since then. None for all rows.

        ``ints`` has steps, epochs, and for each name in which rows it is; ``lengths`` are their lengths, below 0 for
        those saved as runs of equal differences. ``doubles`` has times, and the values of each name, except for
        names of which float32 holds all values: these are in ``floats``.
        """
        if until is not None and until != self.mark():
            return self._until(until).state_dict()
        ints = [_packed(each) for each in (self._steps, self._epochs, *(rows for rows, _ in self._columns.values()))]
        doubles, floats, small = [_tensor(self._times)], [], []
        for name, (_, column) in self._columns.items():
            values = _tensor(column)
            if _fits(values, torch.float32):
                floats.append(values.float())
                small.append(name)
            else:
                doubles.append(values)
        places = torch.cat([each for each, _ in ints])
        return {
            "names": list(self._columns),
            "small": small,
            "lengths": [-len(each) if is_runs else len(each) for each, is_runs in ints],
            "ints": places.int() if _fits(places, torch.int32) else places,
            "doubles": torch.cat(doubles),
            "floats": torch.cat(floats) if floats else None,
        }

    def _until(self, mark: Mapping[str | None, int]) -> History:
        earlier, rows = History(), mark[None]
        earlier._steps, earlier._epochs, earlier._times = self._steps[:rows], self._epochs[:rows], self._times[:rows]
        earlier._columns = {
            name: (places[: mark[name]], column[: mark[name]])
            for name, (places, column) in self._columns.items()
            if name in mark
        }
        return earlier

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; rows that are there are dropped."""
        restored = History()
        try:
            restored._restore(state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            what = f"the entry 'hasten.history' of a checkpoint makes no sense ({type(error).__name__}: {error})."
            raise make_error(ValueError, what, fix="Use an earlier checkpoint.") from error
        vars(self).update(vars(restored))

    def _restore(self, state: Mapping[str, Any]) -> None:
        lengths = state["lengths"]
        ints = [
            _unpacked(stored.long(), is_runs=length < 0)
            for stored, length in zip(state["ints"].split([abs(each) for each in lengths]), lengths, strict=True)
        ]
        self._steps, self._epochs = _array("q", ints[0]), _array("i", ints[1])
        rows = len(self._steps)
        self._times = _array("d", state["doubles"][:rows])
        is_named = isinstance(state["names"], list) and all(isinstance(name, str) for name in state["names"])
        if not is_named or not len(self._epochs) == len(self._times) == rows:
            raise ValueError("its rows have no steps, epochs or times")
        self._columns = {}
        # How far each of the two was read.
        read = {False: rows, True: 0}
        for name, places in zip(state["names"], ints[2:], strict=True):
            is_small = name in state["small"]
            stored = state["floats" if is_small else "doubles"]
            values = stored[read[is_small] : read[is_small] + len(places)]
            read[is_small] += len(places)
            ends = [*places[:1].tolist(), *places[-1:].tolist()]
            if not (len(values) == len(places) and (places.diff() > 0).all() and all(0 <= end < rows for end in ends)):
                raise ValueError(f"the values of {name!r} are in rows that are not there")
            self._columns[name] = (_array("i", places), _array("d", values))


def _now() -> float:
    return time.time()


def _tensor(values: array[Any]) -> Tensor:
    dtype = _DTYPES[values.typecode]
    # The array may grow while a checkpoint is written in the background.
    return torch.frombuffer(values, dtype=dtype).clone() if values else torch.empty(0, dtype=dtype)


def _array(code: str, values: Tensor) -> array[Any]:
    made = array(code, bytes(array(code).itemsize * len(values)))
    if made:
        torch.frombuffer(made, dtype=_DTYPES[code]).copy_(values)
    return made


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` holds ``values`` exactly, and they are so many that it pays."""
    if len(values) < _MANY:
        return False
    return torch.equal(values.to(dtype).to(values.dtype).nan_to_num(0.5), values.nan_to_num(0.5))


def _packed(values: array[int]) -> tuple[Tensor, bool]:
    """Return whole numbers, as runs of equal differences if that is shorter, and whether it is."""
    whole = _tensor(values).long()
    if len(whole) < _MANY:
        return whole, False
    steps, counts = torch.unique_consecutive(whole.diff(prepend=whole.new_zeros(1)), return_counts=True)
    runs = torch.cat([steps, counts])
    return (runs, True) if len(runs) < len(whole) else (whole, False)


def _unpacked(stored: Tensor, *, is_runs: bool) -> Tensor:
    if not is_runs:
        return stored
    steps, counts = stored.chunk(2)
    return steps.repeat_interleave(counts).cumsum(0)


def _sparkline(column: Sequence[float]) -> str:
    """Return a small curve as SVG; it takes the colors of the page."""
    width, height = 120, 24
    values = [value for value in column if math.isfinite(value)]
    if len(values) < 2:
        return ""
    stride = max(1, len(values) // (2 * width))
    values = values[::stride]
    low, high = min(values), max(values)
    span = high - low or 1.0
    points = " ".join(
        f"{1 + index * (width - 2) / (len(values) - 1):.1f},{height - 2 - (value - low) / span * (height - 4):.1f}"
        for index, value in enumerate(values)
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="curve">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
