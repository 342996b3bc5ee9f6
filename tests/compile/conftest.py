"""What each test of the compiler starts with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    # pytest would write out every record of the compiler's trace.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    counters.clear()
    yield
    torch._dynamo.reset()
