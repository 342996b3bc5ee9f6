"""One process that trials are forks of, for the tests that use ``one_fork_server``: each start of it imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hasten_tools.speed import trial_processes
from hasten_tools.speed.trial_processes import TrialStarter
from tests.speed import planted
from tests.speed.copies import Copy, trials_are_copies

__all__ = ["trials_are_copies"]


@pytest.fixture(scope="session")
def _server() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, TrialStarter() as started:
        patch.setattr(trial_processes, "_python", Copy)
        server = started._fork_server
        # A model in hand has it import all that this process has imported: of other tests, for ten seconds.
        server.preload = lambda modules: None
        yield server


@pytest.fixture
def one_fork_server(_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialStarter, "_fork_server", _server)


@pytest.fixture
def only_naps_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time the steps of this process with the clock of the planted models."""
    for module, name, clock in planted.TIMING:
        monkeypatch.setattr(module, name, clock)
