"""Report what was compiled, how long it took and what went wrong, from the compiler's own counters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from hasten._lib import torch_private
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import rank_zero_info


@dataclass(frozen=True)
class CompileReport:
    """The results of compiling a model so far.

    Args:
        compiled: the steps and parts of the model that are compiled, by name.
        left: the steps and parts that stay Python, with the reason.
        seconds: spent compiling.
        graphs: how many the compiler made: ideally one for each phase (training, evaluation).
        graph_breaks: places where a graph had to end: reason and how often.
        recompiles: causes for which a graph had to be made again.
        cache_hit: whether graphs came from an earlier run of the program.
        seconds_saved: against the run that made them; None without a cache.

    """

    compiled: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    graphs: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)
    recompiles: tuple[str, ...] = ()
    cache_hit: bool = False
    seconds_saved: float | None = None

    def line(self) -> str:
        """Return the report in one line.

        Example::

            >>> CompileReport(compiled=("training_step",), seconds=4.2, graphs=1).line()
            'Compiled training_step in 4.2 s. Graphs: 1, graph breaks: 0, recompiles: 0.'

        """
        names = ", ".join(self.compiled) or "nothing"
        line = (
            f"Compiled {names} in {self.seconds:.1f} s. Graphs: {self.graphs}, "
            f"graph breaks: {sum(self.graph_breaks.values())}, recompiles: {len(self.recompiles)}."
        )
        if self.cache_hit and self.seconds_saved:
            line += f" From the cache of an earlier run: {self.seconds_saved:.1f} s saved."
        for reason in self.graph_breaks:
            line += f" Graph break: {reason}"
        for name, reason in self.left.items():
            line += f" {name} stays Python: {reason}"
        return line


class CompileCounters:
    """Counts what the compiler does between ``start`` and ``stop``, which may be called repeatedly."""

    def __init__(self, report: Callable[[], CompileReport]) -> None:
        self._report = report
        self._compiled: dict[str, None] = {}
        self._python: dict[str, str] = {}
        # Seconds spent compiling, by the number of graphs made in that time.
        self.seconds_by_graphs: dict[int, float] = {}
        # Printed in the next step: the first step's backward is compiled after its forward has returned.
        self.unprinted = False
        # While true, every part computes in Python.
        self.paused = False
        self._totals = dict.fromkeys(("seconds", "graphs", "hits", "misses"), 0.0)
        self._breaks: dict[str, int] = {}
        self._recompiles: list[str] = []
        self._seen: set[tuple[Any, Any]] = set()
        self._last: dict[str, Any] | None = None

    def start(self) -> None:
        """Start counting."""
        self._last = _snapshot()
        self._seen.update(map(_key, torch_private.compile_counters().get_compilation_metrics()))

    def stop(self) -> None:
        """Stop counting; the totals stay."""
        self._update()
        self.print_report()
        self._last = None

    def pause(self) -> AbstractContextManager[None]:
        """Make all parts compute in Python."""
        return set_during(self, paused=True)

    def graphs_in_process(self) -> int:
        """Return how many graphs the compiler has made in this process."""
        return int(torch_private.compile_counters().counters["stats"]["unique_graphs"])

    def new_recompiles(self) -> list[str]:
        """Return the causes of the recompiles since the last call."""
        known = len(self._recompiles)
        self._update()
        return self._recompiles[known:]

    def add_compiled(self, name: str) -> None:
        """Add a step or part to those that are compiled."""
        self._compiled[name] = None
        self.unprinted = True

    def add_python(self, name: str, reason: str) -> None:
        """Add a step or part to those that stay Python."""
        self._python[name] = reason
        self._compiled.pop(name, None)

    def print_report(self) -> None:
        """Print what was compiled since the last time."""
        if self.unprinted:
            self.unprinted = False
            rank_zero_info(self._report().line())

    @property
    def graphs_made(self) -> int:
        """How many graphs were made while this was running."""
        return self._total("graphs")

    @property
    def misses(self) -> int:
        """Graphs that were in no cache on disk."""
        return self._total("misses")

    def _total(self, name: str) -> int:
        self._update()
        return int(self._totals[name])

    def report(self, cold_seconds: Mapping[int, float]) -> CompileReport:
        """Return the totals; ``cold_seconds`` is what compiling took without a cache, by the number of graphs."""
        self._update()
        seconds, graphs = self._totals["seconds"], int(self._totals["graphs"])
        self.seconds_by_graphs[graphs] = seconds
        hit = bool(cold_seconds) and self._totals["hits"] > 0
        saved = max(cold_seconds[graphs] - seconds, 0.0) if hit and graphs in cold_seconds else None
        return CompileReport(
            compiled=tuple(self._compiled),
            left=dict(self._python),
            seconds=seconds,
            graphs=graphs,
            graph_breaks=dict(self._breaks),
            recompiles=tuple(self._recompiles),
            cache_hit=hit,
            seconds_saved=saved,
        )

    def _update(self) -> None:
        before = self._last
        if before is None:
            return
        now = self._last = _snapshot()
        for name in self._totals:
            # A program may reset the compiler's counters at any time.
            self._totals[name] += now[name] - before[name] if now[name] >= before[name] else now[name]
        for reason, count in now["breaks"].items():
            if (new := count - before["breaks"].get(reason, 0)) > 0:
                text = brief(reason)
                self._breaks[text] = self._breaks.get(text, 0) + new
        for entry in torch_private.compile_counters().get_compilation_metrics():
            if _key(entry) in self._seen:
                continue
            self._seen.add(_key(entry))
            # Training and evaluation have a graph each; parts of a step that breaks may be shared by both.
            if entry.recompile_reason and "grad_mode" not in entry.recompile_reason:
                self._recompiles.append(f"{entry.co_name}: {brief(_without_id(entry.recompile_reason))}")


def _snapshot() -> dict[str, Any]:
    compiler = torch_private.compile_counters()
    counters = compiler.counters
    cache = counters["inductor"]
    return {
        "seconds": compiler.calculate_time_spent().get("total_wall_time", 0.0),
        "graphs": counters["stats"]["unique_graphs"],
        "hits": cache["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "misses": cache["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"],
        "breaks": dict(counters["graph_break"]),
    }


def _key(entry: Any) -> tuple[Any, Any]:
    return entry.compile_id, entry.start_time_us


def _without_id(reason: str) -> str:
    head, separator, rest = reason.partition(": ")
    return rest if separator and "/" in head and " " not in head.strip() else reason


_PLACE = re.compile(r'File "(.+?)", line (\d+), in \S+\n\s*(.+)')
# Unavoidable, so it is reported without a warning.
FROZEN = "what is trained and what is frozen has a graph each"
_KNOWN = {
    "Could not guard on data-dependent expression": (
        "A number taken from a tensor (.item(), float(), bool()) decides what comes next, which a graph cannot "
        "wait for."
    ),
    # The rest of that message suggests an unrelated setting of the compiler.
    "requires_grad mismatch": FROZEN,
}


def brief(reason: str) -> str:
    """Return the first two lines of a compiler message and the place in the user's program, in one line."""
    message, _, place = str(reason).partition("from user code:")
    lines = [line.strip().removeprefix("Explanation: ") for line in message.splitlines() if line.strip()]
    text = next((known for found, known in _KNOWN.items() if found in message), " ".join(lines[:2]))
    if len(text) > 300:
        text = text[:297] + "..."
    places = _PLACE.findall(place)
    if not places:
        return text
    file, line, code = places[-1]
    return f"{text.removesuffix('.')}. At {os.path.basename(file)}:{line}: {code.strip()}"


def without_metric(metric: str) -> str:
    """Return what to write where a step calls ``metric``, such as "self.accuracy", which counts its calls."""
    return (
        f"Return what {metric} takes from the step, and write {metric}.update(...) and self.log(..., {metric}) in the "
        "hook after it, such as on_train_batch_end."
    )


_SHAPES = "Pad inputs to few shapes (batching='length')."
# What a guard says that does not hold, and what avoids that.
_REMEDIES = (
    (r"\['(?:momentum|beta1)'\]", "Write cycle_momentum=False in OneCycleLR or CyclicLR: a graph has one momentum."),
    (r"(?:size|stride|rank) mismatch|\.(?:size|stride)\(\)|\.shape\b", _SHAPES),
    (r"dtype mismatch", "Give inputs the same dtype in every batch."),
    (r"dispatch key set mismatch|device index mismatch", "Give inputs the same device and layout in every batch."),
)


def remedy_of(recompile: str) -> str:
    """Return what to write so that a graph is not made again.

    Example::

        >>> remedy_of("tensor 'x' size mismatch at index 1. expected 8, actual 9")
        "Pad inputs to few shapes (batching='length')."

    """
    if metric := re.search(r"_modules\['(\w+)'\]\._update_count", recompile):
        return without_metric(f"self.{metric[1]}")
    for found, remedy in _REMEDIES:
        if re.search(found, recompile):
            return remedy
    return "Keep what this names the same in every step, or out of forward and of the step."
