"""Which values of several runs are drawn, and what the runs are called."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten._lib.names import did_you_mean
from hasten_tools.report.curves import KINDS, Axis, Curve, suited_names

if TYPE_CHECKING:
    from hasten_tools.report.read import RecordedRun

# More panels than these cannot be read; the others can be named.
_PANELS = 12
_NOT_VALUES = frozenset({"epoch", "step", "time"})


def curves_of_runs(
    runs: Sequence[RecordedRun],
    *,
    keys: Sequence[str] = (),
    x: Axis = "step",
    say: Callable[[str], None] = lambda line: None,
) -> list[Curve]:
    """Return the curves of runs that are to be compared.

    In ``keys``, ``*`` and ``?`` stand for anything. By default they are losses and accuracies of training and
    validation, or everything logged where there are none. ``say`` gets a line for each run without one of the values,
    and for values left out.
    """
    names = run_names([run.folder for run in runs])
    recorded = [run.keys() for run in runs]
    by_run = [[key for key in keys_of_run if key not in _NOT_VALUES] for keys_of_run in recorded]
    known = list(dict.fromkeys(key for found in by_run for key in found))
    if not known:
        raise ValueError(f"nothing was logged in {_listed([str(run.folder) for run in runs])}.")
    wanted = [key for pattern in keys for key in _matching(pattern, known)] if keys else _usual(known, x, say)
    curves = []
    for key in dict.fromkeys(wanted):
        for name, run, own in zip(names, runs, by_run, strict=True):
            if key not in own:
                say(f"{run.folder} has no {key!r}.")
                continue
            places, values = run.series(key, x=x)
            curves.append(Curve(key, places, values, name))
    return curves


def run_names(folders: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return short names of runs: the parts of their paths that differ. That of a single run is empty.

    Example::

        >>> run_names(["logs/adam/version_0", "logs/sgd/version_0"])
        ['adam', 'sgd']

    """
    if len(folders) < 2:
        return [""] * len(folders)
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    shortest = min(map(len, parts))
    first = next((place for place in range(shortest) if _differ(parts, place)), shortest)
    last = next((place for place in range(shortest - first) if _differ(parts, -1 - place)), 0)
    cut = [each[first : len(each) - last] for each in parts]
    if not all(cut):
        # One folder is inside another.
        cut = [each[max(0, first - 1) :] for each in parts]
    # Parts in the middle that all have say nothing, either.
    if len({len(each) for each in cut}) == 1:
        differing = [place for place in range(len(cut[0])) if _differ(cut, place)]
        cut = [tuple(each[place] for place in differing) for each in cut]
    return ["/".join(each) for each in cut]


def _differ(parts: Sequence[Sequence[str]], place: int) -> bool:
    return len({each[place] for each in parts}) > 1


def _matching(pattern: str, known: Sequence[str]) -> list[str]:
    if pattern in known:
        return [pattern]
    found = [key for key in known if fnmatch.fnmatchcase(key, pattern)]
    if not found and pattern == "lr":
        found = [key for key in known if key.startswith("lr-")]
    if not found:
        raise ValueError(f"--key {pattern}: no run has it.{did_you_mean(pattern, known)} Logged: {_listed(known)}.")
    return found


def _usual(known: Sequence[str], x: Axis, say: Callable[[str], None]) -> list[str]:
    """Return the losses and accuracies; of a name logged at steps and at epochs, the one that suits the axis."""
    suited = [name for pattern, _ in KINDS.values() for name in suited_names(known, pattern, x)]
    usual = list(dict.fromkeys(suited)) or list(known)
    if len(usual) > _PANELS:
        say(f"drawn are {_PANELS} of {len(usual)} values; name others with --key: {_listed(usual[_PANELS:])}.")
    return usual[:_PANELS]


def _listed(names: Sequence[str]) -> str:
    """Return names in one line, of many the first."""
    some = ", ".join(names[:20])
    return some if len(names) <= 20 else f"{some} and {len(names) - 20} more"
