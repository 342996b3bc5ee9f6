"""What a run's record says about its processes: which of them the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

# Fewer reports, or a smaller share of them, say nothing about a process.
_LEAST_REPORTS, _LEAST_SHARE = 3, 0.25


@dataclass(frozen=True)
class RankRow:
    """What the reports that name a process say of it, on the average."""

    rank: int
    slowest: int  # The number of reports in which it was the slowest by so much that it is named.
    own_seconds: float  # Of a step, without waiting for other processes.
    data_share: float  # The share of these in which it waits for data.
    waiting_seconds: float  # Of waiting for other processes, at least.


def rank_rows(lines: Sequence[Mapping[str, Any]]) -> list[RankRow]:
    """Return a row for each process that lines name, the one that was the slowest most often first.

    Example::

        >>> line = {"rank": 1, "slow": True, "ranks": {"1": [0.2, 0.1, 0.0], "0": [0.1, 0.0, 0.1]}}
        >>> [(row.rank, row.slowest, row.data_share) for row in rank_rows([line])]
        [(1, 1, 0.5), (0, 0, 0.0)]

    """
    slow = Counter(line.get("rank") for line in lines if line.get("slow"))
    seconds: dict[int, list[Sequence[float]]] = {}
    for line in lines:
        for rank, numbers in (line.get("ranks") or {}).items():
            seconds.setdefault(int(rank), []).append(numbers)
    rows = []
    for rank, found in seconds.items():
        own, data, waiting = (fmean(column) for column in zip(*found, strict=True))
        rows.append(RankRow(rank, slow[rank], own, data / own if own > 0 else 0.0, waiting))
    return sorted(rows, key=lambda row: (-row.slowest, -row.own_seconds))


def rank_sentence(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the process for which the others waited, "" if they waited for none.

    Example::

        >>> line = {"rank": 3, "slow": True, "ratio": 1.8, "data_share": 0.4}
        >>> rank_sentence([line] * 5)
        'Rank 3 was the slowest in 5 of 5 reports: 1.8 times the median of all ranks; waits for data 40 %.'

    """
    slow = [line for line in lines if line.get("slow")]
    if not slow:
        return ""
    (rank, count), *_ = Counter(line.get("rank") for line in slow).most_common(1)
    if count < max(_LEAST_REPORTS, _LEAST_SHARE * len(lines)):
        return ""
    own = [line for line in slow if line.get("rank") == rank]
    ratio, share = fmean(line["ratio"] for line in own), fmean(line.get("data_share") or 0.0 for line in own)
    return (
        f"Rank {rank} was the slowest in {count:,} of {len(lines):,} reports: {ratio:.1f} times the median of all "
        f"ranks; waits for data {100 * share:.0f} %."
    )
