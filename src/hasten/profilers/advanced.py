"""AdvancedProfiler: the functions called in every action, with cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from pathlib import Path
from typing import Any

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import without_unknown
from hasten.profilers.base import Profiler


class AdvancedProfiler(Profiler):
    """Record which functions each action calls, how often and how long, with ``cProfile``.

    An action inside another one has its own profile; the outer one continues when it ends. This is slow and its
    report long: use it for a few batches.

    Args:
        dirpath: folder of what is written; the folder of the logs by default.
        filename: write the report to a file of this name instead of logging it; ``.txt`` is appended.
        line_count_restriction: report so many functions (int) or this share of them (float in [0, 1]).
        dump_stats: also write the profile of each action, for ``pstats`` or a viewer, to ``dirpath``.

    Raises:
        MisconfigurationException: ``line_count_restriction`` is out of range.
        ValueError: an action is stopped without a start.

    Example::

        >>> profiler = AdvancedProfiler()
        >>> with profiler.profile("sort"):
        ...     numbers = sorted([3, 1, 2])
        >>> "built-in method builtins.sorted" in profiler.summary()
        True

    """

    @without_unknown
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        check.declared(AdvancedProfiler.__init__, locals())
        super().__init__(dirpath=dirpath, filename=filename)
        check.number(
            "AdvancedProfiler",
            "line_count_restriction",
            line_count_restriction,
            at_least=0,
            at_most=1 if isinstance(line_count_restriction, float) else None,
            allowed="a whole number of lines, or a share between 0.0 and 1.0",
            error=MisconfigurationException,
        )
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        # The actions that are open, the innermost last: only one profile can run at a time.
        self._open: list[str] = []

    def start(self, action_name: str) -> None:
        """Begin an action."""
        if self._open:
            self.profiled_actions[self._open[-1]].disable()
        self._open.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """End an action, and continue the one around it."""
        profile = self.profiled_actions.get(action_name)
        if profile is None:
            raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started.")
        if action_name not in self._open:
            return  # It has ended before.
        self.profiled_actions[self._open[-1]].disable()
        # The innermost of this name; usually the last one.
        del self._open[len(self._open) - 1 - self._open[::-1].index(action_name)]
        if self._open:
            self.profiled_actions[self._open[-1]].enable()

    def summary(self) -> str:
        """Return the functions of each action, those that took longest first."""
        reports = {}
        for action_name, profile in self.profiled_actions.items():
            if self.dump_stats:
                self._dump(action_name, profile)
            text = io.StringIO()
            profile.create_stats()
            if profile.stats:
                stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative")
                stats.print_stats(self.line_count_restriction)
            reports[action_name] = text.getvalue()
        return self._stats_to_str(reports)

    def teardown(self, stage: str | None) -> None:
        """Forget the run."""
        for profile in self.profiled_actions.values():
            profile.disable()
        self._open.clear()
        self.profiled_actions.clear()
        super().teardown(stage=stage)

    def _dump(self, action_name: str, profile: cProfile.Profile) -> None:
        if not self.dirpath:
            raise MisconfigurationException(
                "AdvancedProfiler(dump_stats=True): no folder is given.", fix="Pass dirpath=...", argument="dump_stats"
            )
        folder = Path(os.fspath(self.dirpath))
        folder.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(folder / self._prepare_filename(action_name=action_name, extension=".prof"))

    def __getstate__(self) -> dict[str, Any]:
        # A profile holds C objects that cannot be sent to another process.
        return {**super().__getstate__(), "profiled_actions": {}, "_open": []}
