"""What a run logged, as arrays: a million rows of twenty values take some hundred megabytes, and seconds to read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hasten_tools.report.text import Block, Flags, Floats, Ints, Text, read_numbers

_ROW = '{"kind": "row", "time": '
_IS_ROW, _END = Text(_ROW.encode()), Text(b"}}\n")
# Numbers of lines, steps, epochs and times of some rows.
_Place = tuple[Ints, Ints, Floats, Floats]
# Doubles hold whole numbers up to here.
LARGEST_STEP = 2**53
# Rows that have other names each are read one by one.
_MOST_FORMS, _NEW_FORMS = 64, 4
# Rows that are read one by one wait for one another.
_TOGETHER = 10_000


@dataclass
class RecordedColumn:
    """Values of a name, and where they were logged; nan stands for epochs and times that were not written."""

    steps: Ints
    epochs: Floats
    times: Floats
    values: Floats


@dataclass(eq=False)
class _Part:
    """Rows with the same names."""

    # Of their lines, growing.
    numbers: Ints
    steps: Ints
    epochs: Floats
    times: Floats
    # By name; in float32 where this holds them exactly.
    values: dict[str, Any]

    def only(self, kept: Flags) -> _Part:
        values = {name: column[kept] for name, column in self.values.items()}
        return _Part(self.numbers[kept], self.steps[kept], self.epochs[kept], self.times[kept], values)


class LoggedRows:
    """The rows of a run: each a step, an epoch, a time and the values that were logged there.

    Example::

        >>> rows = LoggedRows()
        >>> for step in (9, 19):
        ...     rows.add(step, step=step, epoch=0, time=None, values={"loss": 1 / (step + 1)})
        >>> rows.column("loss").values.tolist()
        [0.1, 0.05]

    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._waiting: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
        self._count_waiting = 0
        self._forms: dict[tuple[str, ...], _Form] = {}
        # Where the values of the name asked for last are: most names are logged together.
        self._place: tuple[list[_Part], _Place] | None = None

    # -- adding

    def add(
        self, number: int, *, step: int, epoch: int | None, time: float | None, values: Mapping[str, float]
    ) -> None:
        """Add a row; ``number`` says which comes first, as the number of its line does."""
        place = (number, step, math.nan if epoch is None else epoch, math.nan if time is None else time)
        self._waiting.setdefault(tuple(values), []).append((*place, *values.values()))
        self._count_waiting += 1
        if self._count_waiting >= _TOGETHER:
            self._add_waiting()

    def _add_waiting(self) -> None:
        for names, rows in self._waiting.items():
            numbers, steps, epochs, times, *columns = np.array(rows, np.float64).T
            place = numbers.astype(np.int64), steps.astype(np.int64), epochs, times
            self._add_part(place, names, np.array(columns).reshape(len(names), len(rows)))
        self._waiting, self._count_waiting = {}, 0

    def _add_part(self, place: _Place, names: Sequence[str], columns: Floats) -> None:
        """Add rows with these numbers, steps, epochs and times; ``columns`` has the values of each name."""
        with np.errstate(over="ignore"):
            small = columns.astype(np.float32, order="C")
        holds = (small == columns).all(axis=1)
        # Each with memory of its own, if they are not all of one kind.
        chosen = small if holds.all() else [(small if one else columns)[row].copy() for row, one in enumerate(holds)]
        self._parts.append(_Part(*place, dict(zip(names, chosen, strict=True))))
        self._place = None

    def add_lines(self, block: Block, begin: int, end: int) -> tuple[Ints, float | None, float]:
        """Add the rows among lines of a record.

        Return the lines that are other things, or rows that the record does not write like this; the time of the last
        line if that is a row that was added, and the latest time of those that were.
        """
        lines = np.arange(begin, end)
        is_row = block.has(_IS_ROW, block.begins[begin:end] + _IS_ROW.length)
        rows, others = lines[is_row], [lines[~is_row]]
        before = len(self._parts)
        for form in list(self._forms.values()):
            rows = self._add_rows(form, block, rows)
        for _ in range(_NEW_FORMS):
            if not len(rows) or len(self._forms) >= _MOST_FORMS:
                break
            names = _names(block.line(rows[0]))
            if not names or names in self._forms:
                others.append(rows[:1])
                rows = rows[1:]
                continue
            self._forms[names] = _Form(names)
            rows = self._add_rows(self._forms[names], block, rows)
        added = self._parts[before:]
        last = next((part.times[-1] for part in added if part.numbers[-1] == block.number + end - 1), None)
        latest = max((part.times.max() for part in added), default=-math.inf)
        return np.sort(np.concatenate([*others, rows])), None if last is None else float(last), float(latest)

    def _add_rows(self, form: _Form, block: Block, lines: Ints) -> Ints:
        """Add the lines that have a form; return the others."""
        alike: Flags = block.comma_counts[lines] == form.commas
        values, fits = form.read(block, lines[alike])
        alike[alike] = fits
        if fits.any():
            times, steps, epochs, *_ = columns = (values if fits.all() else values[fits]).T
            place = block.number + lines[alike], steps.astype(np.int64), epochs.copy(), times.copy()
            self._add_part(place, form.names, columns[3:])
        others: Ints = lines[~alike]
        return others

    def add_cells(self, block: Block, begin: int, names: Sequence[str], before: int) -> tuple[Ints, Ints]:
        """Add the lines of a table of comma-separated values without quotation marks.

        The first line of the block that is not the header is number ``begin``; the table has ``before`` rows before
        these. Return the lines that have more or fewer cells than names, and the number of the row that each line is.
        """
        ends = block.ends - (block.text[block.ends - 1] == ord("\r"))
        is_row = ends > block.begins
        is_row[:begin] = False
        is_usual = is_row & (block.comma_counts == len(names) - 1)
        row_numbers = before + np.cumsum(is_row) - 1
        lines = np.flatnonzero(is_usual)
        numbers: Ints = row_numbers[lines]
        none = np.zeros(len(lines)), np.zeros(len(lines), np.bool_)
        columns: dict[str, tuple[Floats, Flags]] = {"step": none, "epoch": none}
        for column, name in enumerate(names):
            comma = block.first_comma[lines] + column
            starts = block.commas[comma - 1] + 1 if column else block.begins[lines]
            stops = block.commas[comma] if column < len(names) - 1 else ends[lines]
            values, is_number = np.zeros(len(lines)), stops > starts
            values[is_number], is_number[is_number] = read_numbers(block, starts[is_number], stops[is_number])
            columns[name] = values, is_number
        (steps, has_step), (epochs, has_epoch) = columns.pop("step"), columns.pop("epoch")
        steps = np.where(has_step, steps, numbers)
        is_kept = np.abs(steps) < LARGEST_STEP
        whole: Ints = np.where(is_kept, steps, 0).astype(np.int64)
        epochs = np.where(has_epoch & np.isfinite(epochs), np.trunc(epochs), math.nan)
        unknown = np.full(len(lines), math.nan)
        # Names that are in the same rows.
        together: dict[bytes, dict[str, Floats]] = {}
        for name, (values, is_number) in columns.items():
            if name and (is_number & is_kept).any():
                together.setdefault((is_number & is_kept).tobytes(), {})[name] = values
        for flags, found in together.items():
            kept: Flags = np.frombuffer(flags, np.bool_)
            place = numbers[kept], whole[kept], epochs[kept], unknown[kept]
            self._add_part(place, list(found), np.stack(list(found.values()))[:, kept])
        return np.flatnonzero(is_row & ~is_usual), row_numbers

    def drop_from(self, step: int) -> None:
        """Drop the rows of a step and of later ones."""
        self._add_waiting()
        self._parts = [part.only(part.steps < step) for part in self._parts if (part.steps < step).any()]
        self._place = None

    def share_times(self) -> None:
        """Give rows that follow each other, of the same step and with other names, the time of the first of them."""
        self._add_waiting()
        if len({frozenset(part.values) for part in self._parts}) < 2:
            return
        names = [frozenset(part.values) for part in self._parts]
        owners = np.repeat(np.arange(len(self._parts)), [len(part.numbers) for part in self._parts])
        order, steps, epochs, times = _in_order(self._parts)
        is_same = (steps[1:] == steps[:-1]) & ((epochs[1:] == epochs[:-1]) | np.isnan(epochs[1:] + epochs[:-1]))
        group: frozenset[str] = frozenset()
        last = -1
        for row in map(int, np.flatnonzero(is_same) + 1):
            if row != last + 1:
                group = names[owners[order[row - 1]]]
            own = names[owners[order[row]]]
            if group.isdisjoint(own):
                group, times[row] = group | own, times[row - 1]
            else:
                group = own
            last = row
        shared = np.empty_like(times)
        shared[order] = times
        begin = 0
        for part in self._parts:
            part.times = shared[begin : begin + len(part.times)]
            begin += len(part.times)
        self._place = None

    # -- reading

    def __bool__(self) -> bool:
        self._add_waiting()
        return bool(self._parts)

    def names(self) -> list[str]:
        """Return the names that were logged, in the order in which they first were."""
        self._add_waiting()
        first: dict[str, tuple[int, int]] = {}
        for part in self._parts:
            for place, name in enumerate(part.values):
                key = int(part.numbers[0]), place
                first[name] = min(key, first.get(name, key))
        return sorted(first, key=first.__getitem__)

    def column(self, name: str) -> RecordedColumn | None:
        """Return the values of a name; None if there are none."""
        self._add_waiting()
        parts = [part for part in self._parts if name in part.values]
        if not parts:
            return None
        if self._place is None or self._place[0] != parts:
            self._place = parts, _in_order(parts)
        order, steps, epochs, times = self._place[1]
        values = np.concatenate([part.values[name] for part in parts]).astype(np.float64)[order]
        return RecordedColumn(steps, epochs, times, values)

    def last(self) -> tuple[int, int | None]:
        """Return the largest step, and the epoch of the last row."""
        self._add_waiting()
        epoch = max(self._parts, key=lambda part: int(part.numbers[-1])).epochs[-1]
        return max(int(part.steps.max()) for part in self._parts), None if math.isnan(epoch) else int(epoch)

    @cached_property
    def began(self) -> float | None:
        """The first time that was written, if there is one; to be asked for when all rows are there."""
        self._add_waiting()
        if not self._parts:
            return None
        times = _in_order(self._parts)[3]
        return next((float(time) for time in times[~np.isnan(times)] if time), None)

    def ends(self) -> dict[int, int]:
        """Return the largest step of each epoch."""
        self._add_waiting()
        found: dict[int, int] = {}
        for part in self._parts:
            known = np.flatnonzero(~np.isnan(part.epochs))
            known = known[np.argsort(part.epochs[known], kind="stable")]
            epochs, first = np.unique(part.epochs[known], return_index=True)
            if len(epochs):
                for epoch, step in zip(epochs, np.maximum.reduceat(part.steps[known], first), strict=True):
                    found[int(epoch)] = max(int(step), found.get(int(epoch), -1))
        return found


def _in_order(parts: Sequence[_Part]) -> _Place:
    """Return the order of all rows of parts; and their steps, epochs and times, in it."""
    order = np.argsort(np.concatenate([part.numbers for part in parts]), kind="stable")
    steps = np.concatenate([part.steps for part in parts])[order]
    epochs, times = (np.concatenate([getattr(part, what) for part in parts])[order] for what in ("epochs", "times"))
    return order, steps, epochs, times


class _Form:
    """Rows with the same names, at least one, in the same order, as the record writes them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        first, *others = (f"{json.dumps(name)}: " for name in names)
        befores = [_ROW, ', "step": ', ', "epoch": ', f', "values": {{{first}', *(f", {other}" for other in others)]
        texts = [Text(before.encode()) for before in befores]
        self._lengths = np.array([text.length for text in texts])
        # Which comma of a line ends the number after each text.
        commas = np.cumsum([text.commas for text in texts])
        self.commas, self._ends = int(commas[-1]), commas[:-1]
        # For each word of the texts, counted from their ends: the texts that have it.
        self._words = []
        for place in range(max(len(text.words) for text in texts)):
            having = [column for column, text in enumerate(texts) if len(text.words) > place]
            masks, words = (np.array([texts[column].words[place][part] for column in having]) for part in (1, 2))
            self._words.append((8 * (place + 1), having, masks, words))

    def read(self, block: Block, lines: Ints) -> tuple[Floats, Flags]:
        """Return the numbers of lines that have as many commas, (lines, numbers), and which lines have the form."""
        lasts = block.ends[lines][:, None]
        ends = np.hstack([block.commas[block.first_comma[lines][:, None] + self._ends], lasts - 2])
        starts = np.hstack([block.begins[lines][:, None], ends[:, :-1]]) + self._lengths
        # Nothing is read beyond the lines, whatever they are.
        np.minimum(starts, lasts, out=starts)
        values, is_right = (found.reshape(starts.shape) for found in read_numbers(block, starts.ravel(), ends.ravel()))
        for back, columns, masks, words in self._words:
            some = starts if len(columns) == starts.shape[1] else starts[:, columns]
            is_word = block.words[some - back] & masks == words
            if not is_word.all():
                is_right[:, columns] &= is_word
        fits = block.has(_END, block.ends[lines] + 1) & (values[:, 1] < LARGEST_STEP)
        return values, fits if is_right.all() else fits & is_right.all(axis=1)


def _names(line: str) -> tuple[str, ...]:
    """Return the names of a row, none if it cannot be read."""
    try:
        values = json.loads(line)["values"]
        return tuple(values) if isinstance(values, dict) else ()
    except (ValueError, KeyError, TypeError):
        return ()
