"""The base class of profilers, the one that does nothing, and the choice by name."""

from __future__ import annotations

import importlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.extend.entry_points import found, load


class Profiler(ABC):
    """Base class of profilers: override ``start`` and ``stop``, and ``summary`` for a report.

    A Trainer calls ``setup`` when a run begins, ``start`` and ``stop`` around everything it does, and
    ``describe`` at the end. Actions nest, and end in the reverse order of their beginnings.

    Args:
        dirpath: folder of what is written; the folder of the logs by default.
        filename: write the report to a file of this name instead of logging it; ``.txt`` is appended.

    Example::

        >>> class Count(Profiler):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.started = []
        ...     def start(self, action_name):
        ...         self.started.append(action_name)
        ...     def stop(self, action_name):
        ...         pass
        >>> count = Count()
        >>> with count.profile("load"):
        ...     pass
        >>> count.started
        ['load']

    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        check.declared(Profiler.__init__, locals())
        self.dirpath = dirpath
        self.filename = filename
        self._output_file: TextIO | None = None
        self._write_stream: Callable[[str], Any] | None = None
        self._local_rank: int | None = None
        self._stage: str | None = None
        self.lightning_module: Any = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End an action."""

    def summary(self) -> str:
        """Return the report; empty for none."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Return a context that is one action.

        Args:
            action_name: the name of the action in the report.

        Example::

            >>> with PassThroughProfiler().profile("load training data"):
            ...     data = list(range(10))

        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare for a run.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: which process of its machine this is.
            log_dir: the folder of the logs, where no ``dirpath`` was given.

        """
        self._stage = stage
        self._local_rank = local_rank
        self.dirpath = self.dirpath or log_dir

    def teardown(self, stage: str | None) -> None:
        """Close the file that ``describe`` wrote to."""
        self._write_stream = None
        if self._output_file is not None:
            self._output_file.close()
            self._output_file = None

    def describe(self) -> None:
        """Print the report on the first process, or write it to the file."""
        self._prepare_streams()
        try:
            report = self.summary()
            if report and self._write_stream is not None:
                self._write_stream(report)
        finally:
            self.teardown(stage=self._stage)

    @property
    def local_rank(self) -> int:
        """Which process of its machine this is; 0 outside a run."""
        return self._local_rank or 0

    def __getstate__(self) -> dict[str, Any]:
        # Objects that belong to a run cannot be sent to another process.
        return {**self.__dict__, "_output_file": None, "_write_stream": None, "lightning_module": None}

    # -- third-party profilers use these too

    @property
    def _lightning_module(self) -> Any:
        return self.lightning_module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        self.lightning_module = module

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        rank = None if self._local_rank is None else str(self._local_rank)
        parts = [part for part in (self._stage, self.filename, rank, action_name) if part]
        # Action names hold characters that some file systems refuse.
        name = re.sub(r"_+", "_", re.sub(r"[\\/:*?\"<>|\n\r\t]", "_", "-".join(parts))).strip()
        return (name or "profile") + extension

    def _prepare_streams(self) -> None:
        if self._write_stream is not None:
            return
        if self.filename and self.dirpath:
            folder = Path(os.fspath(self.dirpath))
            folder.mkdir(parents=True, exist_ok=True)
            # Appended to: a Trainer reports each of its runs.
            self._output_file = (folder / self._prepare_filename()).open("a", encoding="utf-8")
            self._write_stream = self._output_file.write
        else:
            self._write_stream = self._print

    def _print(self, report: str) -> None:
        if self.local_rank == 0:
            rank_zero_info("%s", report)

    def _stats_to_str(self, stats: dict[str, str]) -> str:
        rank = "" if self._local_rank is None else f" rank: {self._local_rank}"
        lines = [self._title()]
        for action, text in stats.items():
            lines += [f"Profile stats for: {action}{rank}", text]
        return "\n".join(lines)

    def _title(self) -> str:
        stage = "" if self._stage is None else f"{self._stage.upper()} "
        return f"{stage}Profiler Report"


class PassThroughProfiler(Profiler):
    """The profiler of a Trainer without one: it does nothing, and the loop never calls it.

    Example::

        >>> with PassThroughProfiler().profile("anything"):
        ...     pass

    """

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


# The names for Trainer(profiler=...).
NAMED = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler", "pytorch": "PyTorchProfiler"}


def resolve(profiler: object) -> Profiler:
    """Return the profiler for ``Trainer(profiler=...)``.

    Example::

        >>> type(resolve("simple")).__name__, type(resolve(None)).__name__
        ('SimpleProfiler', 'PassThroughProfiler')

    """
    if profiler is None or profiler is False:
        return PassThroughProfiler()
    if isinstance(profiler, Profiler):
        return profiler
    names = [*NAMED, *found("hasten.profilers")]
    if not isinstance(profiler, str):
        example = f"{profiler.__name__}()" if isinstance(profiler, type) else "SimpleProfiler()"
        check.instance("Trainer", "profiler", profiler, Profiler, f"{example}, a name from {names}, or None")
    name = str(profiler).lower()
    if name not in names:
        what = (
            f"Trainer(profiler={profiler!r}): When passing string value for the `profiler` parameter of `Trainer`, "
            f"it can only be one of {names}."
        )
        fix = did_you_mean(name, names).strip() or "Use one of them, a Profiler, or None."
        raise make_error(MisconfigurationException, what, fix=fix, argument="profiler")
    if name in NAMED:
        make = getattr(importlib.import_module("hasten.profilers"), NAMED[name])
    else:
        make = load("hasten.profilers", name, purpose=f"Trainer(profiler={profiler!r})")
    made: Profiler = make()
    return made


def is_off(profiler: Profiler) -> bool:
    """Return whether nothing is to be profiled."""
    # A user's subclass that overrides something is on.
    names = ("start", "stop", "profile", "setup", "describe", "summary", "teardown")
    kind = type(profiler)
    return kind is PassThroughProfiler or all(
        getattr(kind, name, None) is getattr(PassThroughProfiler, name)
        for name in names  # A Mock has none.
    )
