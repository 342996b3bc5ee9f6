"""Tables of text: rows of cells that are aligned in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(
    rows: Sequence[Sequence[str]],
    widths: Sequence[int] | None = None,
    *,
    right_from: int | None = None,
    gap: str = "",
    rule: str = "",
) -> Iterator[str]:
    """Yield the lines of a table, without spaces at their ends.

    Args:
        rows: the texts of each row; a row may have fewer than there are columns. The first row is the heading if there
            is a ``rule``. A text of several lines goes on below in its column.
        widths: characters of each column; texts of further columns are left out. Default: as wide as the texts, of
            which all rows have the same number then.
        right_from: the number of the first column whose texts are aligned on the right: figures. Default: none is.
        gap: stands between columns.
        rule: a line that stands above, below and under the heading.

    Example::

        >>> print(*aligned([["", "time"], ["one\\ntwo", "1.5"]], [5, 6], right_from=1, rule="-" * 11), sep="\\n")
        -----------
               time
        -----------
        one     1.5
        two
        -----------

    """
    if widths is None:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if right_from is None:
        right_from = len(widths)
    if rule:
        yield rule
    for number, row in enumerate(rows):
        parts = [text.split("\n") for text in row[: len(widths)]]
        for line in range(max(map(len, parts), default=0)):
            texts = [part[line] if line < len(part) else "" for part in parts]
            cells = (
                f"{text:>{width}}" if place >= right_from else f"{text:<{width}}"
                for place, (text, width) in enumerate(zip(texts, widths, strict=False))
            )
            yield gap.join(cells).rstrip()
        if rule and not number:
            yield rule
    if rule:
        yield rule
