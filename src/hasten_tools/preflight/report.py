"""The result of a check: rows, and the table that shows them."""

from __future__ import annotations

import html
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import installed
from hasten.report.tables import aligned

Status = Literal["ok", "warning", "error", "not checked"]

_COLOR = {"ok": "green", "warning": "yellow", "error": "red", "not checked": "bright_black"}
# Columns of the table as text.
_STATUS_WIDTH = 13
_MOST_WIDTH = 100
_LEAST_WIDTH = 60


class CheckFailed(MisconfigurationException):
    """Raised by ``CheckReport.raise_if_failed``; its message lists the errors."""


@dataclass(frozen=True)
class CheckRow:
    """One thing that was checked.

    Args:
        name: what was checked.
        status: "ok", "warning", "error" or "not checked".
        seen: what the check saw.
        line: the code or the command to write; "" where nothing is to be done.
        place: the line of the program, as "train.py:12"; "" where there is none.

    """

    name: str
    status: Status
    seen: str
    line: str = ""
    place: str = ""


@dataclass
class CheckReport:
    """What ``Trainer.check`` found.

    Print it for the table; a notebook shows it as one, too.

    Args:
        rows: what was checked, in order.
        title: the first line of the table.

    Example::

        >>> report = CheckReport([CheckRow("loss", "error", "It is nan.", line="lr=1e-3")], title="Check of Net on cpu")
        >>> report.ok, [row.name for row in report.errors]
        (False, ['loss'])
        >>> print(report)
        Check of Net on cpu
        <BLANKLINE>
        error        loss  It is nan.
                           -> lr=1e-3
        <BLANKLINE>
        1 error

    """

    rows: list[CheckRow] = field(default_factory=list)
    title: str = "Check"

    @property
    def ok(self) -> bool:
        """Whether no row is an error."""
        return not self.errors

    @property
    def errors(self) -> list[CheckRow]:
        """The rows that would end the run, or make it worthless."""
        return [row for row in self.rows if row.status == "error"]

    @property
    def warnings(self) -> list[CheckRow]:
        """The rows of what is probably an oversight."""
        return [row for row in self.rows if row.status == "warning"]

    def raise_if_failed(self) -> None:
        """Raise if a row is an error.

        Raises:
            CheckFailed: it lists the errors and the lines to write.

        """
        if self.errors:
            listed = "\n".join(f"- {row.name}: {row.seen}{_in_text(row)}" for row in self.errors)
            raise CheckFailed(f"{self.title}: {self.summary}.\n{listed}")

    @property
    def summary(self) -> str:
        """The numbers of rows, such as "2 errors, 1 warning, 12 ok"."""
        counts = Counter(row.status for row in self.rows)
        words = {"error": ("error", "errors"), "warning": ("warning", "warnings")}
        found = []
        for status in ("error", "warning", "ok", "not checked"):
            if counts[status]:
                one, several = words.get(status, (status, status))
                found.append(f"{counts[status]} {one if counts[status] == 1 else several}")
        return ", ".join(found) or "nothing was checked"

    # -- as text

    def __str__(self) -> str:
        return "\n".join(self.lines(_MOST_WIDTH))

    def lines(self, width: int) -> Iterator[str]:
        """Yield the lines of the table, as far as possible at most ``width`` characters long."""
        yield self.title
        yield ""
        for index, row in enumerate(self.rows):
            if index and self._problems_begin(index):
                yield ""
            for lines in self._row_lines(row, width):
                yield from lines
        yield ""
        yield self.summary

    def _row_lines(self, row: CheckRow, width: int) -> tuple[list[str], list[str]]:
        """Return the lines of a row: what was seen, and what to do."""
        names = self._name_width()
        room = width - _STATUS_WIDTH - names
        remedy = _remedy(row, room)
        text = "\n".join([*wrapped(row.seen, room), *remedy])
        lines = list(aligned([[row.status, row.name, text]], [_STATUS_WIDTH, names, room]))
        seen = len(lines) - len(remedy)
        return lines[:seen], lines[seen:]

    def _problems_begin(self, index: int) -> bool:
        """Return whether a row is a problem and the one before it is not."""
        problems = ("warning", "error")
        return self.rows[index].status in problems and self.rows[index - 1].status not in problems

    def _name_width(self) -> int:
        return max((len(row.name) for row in self.rows), default=0) + 2

    def show(self) -> None:
        """Print the table: in color on a terminal if rich is installed, else as plain text."""
        columns = shutil.get_terminal_size((_MOST_WIDTH, 24)).columns
        width = max(_LEAST_WIDTH, min(columns, _MOST_WIDTH))
        if sys.stdout.isatty() and installed("rich"):
            from rich.console import Console

            # Rich itself leaves colors out where NO_COLOR is set.
            Console(width=width, highlight=False, soft_wrap=True).print(self._colored(width))
        elif sys.stdout.isatty():
            print("\n".join(self.lines(width)))
        else:
            print(self)

    def __rich__(self) -> Any:
        return self._colored(_MOST_WIDTH)

    def _colored(self, width: int) -> Any:
        from rich.text import Text

        shown = Text()
        shown.append(self.title, style="bold")
        shown.append("\n\n")
        begin = _STATUS_WIDTH + self._name_width()
        for index, row in enumerate(self.rows):
            if index and self._problems_begin(index):
                shown.append("\n")
            color = _COLOR[row.status]
            quiet = "bright_black" if row.status == "not checked" else ""
            (first, *more), remedy = self._row_lines(row, width)
            shown.append(first[:_STATUS_WIDTH], style=f"bold {color}" if not quiet else color)
            shown.append(first[_STATUS_WIDTH:begin], style="" if row.status in ("ok", "not checked") else "bold")
            shown.append("\n".join([first[begin:], *more, ""]), style=quiet)
            for line in remedy:
                shown.append(f"{line}\n", style="bright_black" if line[begin:].startswith("at ") else "cyan")
        worst = "red" if self.errors else "yellow" if self.warnings else "green"
        shown.append(f"\n{self.summary}", style=f"bold {worst}")
        return shown

    # -- as a page

    def _repr_html_(self) -> str:
        style = {"ok": "#1a7f37", "warning": "#9a6700", "error": "#cf222e", "not checked": "#6e7781"}
        cell = "style='text-align:left;vertical-align:top;padding:3px 12px 3px 0'"
        rows = []
        for row in self.rows:
            color = style[row.status]
            seen = html.escape(row.seen)
            if row.place:
                seen += f" <span style='color:#6e7781'>({html.escape(row.place)})</span>"
            if row.line:
                seen += f"<br><code style='white-space:pre-wrap'>&rarr; {html.escape(row.line)}</code>"
            rows.append(
                f"<tr><td {cell}><b style='color:{color}'>{row.status}</b></td>"
                f"<td {cell}>{html.escape(row.name)}</td><td {cell}>{seen}</td></tr>"
            )
        return (
            f"<b>{html.escape(self.title)}</b><table style='border-collapse:collapse'><tbody>{''.join(rows)}</tbody>"
            f"</table><b>{html.escape(self.summary)}</b>"
        )


def _remedy(row: CheckRow, width: int) -> list[str]:
    found = [f"at {row.place}"] if row.place else []
    if row.line:
        first, *more = [part for line in row.line.splitlines() for part in wrapped(line, width - 3)]
        found += [f"-> {first}", *(f"   {line}" for line in more)]
    return found


def _in_text(row: CheckRow) -> str:
    place = f" (at {row.place})" if row.place else ""
    return f"{place}{f' -> {row.line}' if row.line else ''}"


def wrapped(text: str, width: int) -> list[str]:
    """Return ``text`` in lines of at most ``width`` characters; words that are longer stay whole.

    Example::

        >>> wrapped("one two three four five six", 20)
        ['one two three four', 'five six']

    """
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, max(width, 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return lines


class Rows:
    """Collects rows; one that says the same as an earlier one is left out."""

    def __init__(self) -> None:
        self.rows: list[CheckRow] = []
        self._said: set[tuple[str, str]] = set()

    def add(self, name: str, status: Status, seen: str, line: str = "", place: str = "") -> None:
        """Add a row."""
        self.take(CheckRow(name, status, seen, line, place))

    def take(self, row: CheckRow) -> None:
        """Add a row that was made elsewhere."""
        key = (row.status, row.seen) if row.status in ("warning", "error") else (row.name, row.seen)
        if key not in self._said:
            self._said.add(key)
            self.rows.append(row)

    def ok(self, name: str, seen: str) -> None:
        """Add a row of something that is as it should be."""
        self.add(name, "ok", seen)

    def warning(self, name: str, seen: str, line: str = "", place: str = "") -> None:
        """Add a row of what is probably an oversight."""
        self.add(name, "warning", seen, line, place)

    def error(self, name: str, seen: str, line: str = "", place: str = "") -> None:
        """Add a row of what ends a run, or makes it worthless."""
        self.add(name, "error", seen, line, place)

    def skipped(self, name: str, why: str) -> None:
        """Add a row of what was not checked."""
        self.add(name, "not checked", why)

    def by_status(self) -> list[CheckRow]:
        """Return the rows with problems last, next to the summary and the prompt; each in the order of a run."""
        order = {"ok": 0, "not checked": 1, "warning": 2, "error": 3}
        return sorted(self.rows, key=lambda row: (order[row.status], _place_in_run(row.name)))


# In the order of a run; rows of other names come between the steps and the end.
_FIRST = (
    "versions", "device", "precision", "processes", "program", "call", "hooks", "setup", "train ", "training_step",
    "optimizer", "learning rate", "loss", "labels", "gradients", "validat", "test", "predict",
)  # fmt: skip
_LAST = ("monitor", "logging", "length", "checkpoints", "logs", "memory", "time")


def _place_in_run(name: str) -> int:
    found = next((place for place, first in enumerate(_FIRST) if name.startswith(first)), None)
    if found is None:
        found = next((len(_FIRST) + 1 + place for place, last in enumerate(_LAST) if name == last), len(_FIRST))
    return found
