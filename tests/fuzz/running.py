"""Run a target: make inputs for it, check each, and count those that are not handled as promised."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, configuration, given, seed, settings
from hypothesis import strategies as st

# Nothing is kept from one run to the next.
configuration.set_hypothesis_home_dir(os.path.join(tempfile.gettempdir(), f"hasten-fuzz-{os.getpid()}"))


class Found(AssertionError):
    """An input that is not handled as promised.

    Args:
        kind: the same for inputs with one cause.
        text: the input, and what became of it.

    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}\n{text}")
        self.kind, self.text = kind, text


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Args:
        title: the row of the table in ``docs/kills.md``.
        inputs: makes the inputs.
        check: raises ``Found`` for an input that is not handled as promised.
        in_suite: how many inputs a run of the tests tries.

    """

    title: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    in_suite: int


@dataclass
class Outcome:
    """How many inputs were tried, and the shortest text of each kind that was found."""

    tried: int = 0
    found: dict[str, str] = field(default_factory=dict)


class _Late(BaseException):
    """Ends a target whose time is over."""


def run(target: Target, examples: int, *, number: int = 0, stops: bool = False, seconds: float = math.inf) -> Outcome:
    """Try inputs.

    Args:
        target: what is fuzzed.
        examples: how many.
        number: seeds the random numbers.
        seconds: end after this time, if it comes before so many examples.
        stops: raise ``Found`` for the simplest input that shows the first problem; else go on and collect them.

    """
    outcome, ends = Outcome(), time.monotonic() + seconds

    def check(value: Any) -> None:
        if time.monotonic() > ends:
            raise _Late
        outcome.tried += 1
        try:
            target.check(value)
        except Found as found:
            if stops:
                raise
            known = outcome.found.get(found.kind)
            if known is None or len(found.text) < len(known):
                outcome.found[found.kind] = found.text

    phases = [Phase.generate, Phase.shrink] if stops else [Phase.generate]
    options = settings(
        max_examples=examples, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    with quietly(), in_empty_folder(), contextlib.suppress(_Late):
        seed(number)(options(given(target.inputs)(check)))()
    return outcome


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Show no warnings and no lines of the log."""
    logger = logging.getLogger("hasten")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def in_empty_folder() -> Iterator[None]:
    """Work in a new folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.chdir(folder):
        yield
