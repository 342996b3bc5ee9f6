"""Processes of trials as copies of one that has imported torch: each that is new would import it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hasten_tools.speed import trial_processes
from tests.programs import Forked


class Copy(Forked):
    """In the place of what ``trial_processes`` starts with ``subprocess.Popen``."""

    def __init__(
        self, function: str, arguments: Sequence[object], environment: Mapping[str, str], *, output: int,
        pass_fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        null = os.open(os.devnull, os.O_WRONLY)
        program = f"from hasten_tools.speed.trial import {function}; {function}()"
        super().__init__(
            ("-c", program, *map(str, arguments)),
            null if output == subprocess.DEVNULL else output,
            pass_fds=pass_fds,
            new_session=True,
            **environment,
        )
        os.close(null)

    def wait(self, seconds: float = 600) -> int:
        if self.returncode is None and not self._is_ready(seconds):
            raise subprocess.TimeoutExpired("the trial", seconds)
        return super().wait()


@pytest.fixture
def trials_are_copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have trials of the tests that name it, and the process that they are forks of, be copies."""
    monkeypatch.setattr(trial_processes, "_python", Copy)
