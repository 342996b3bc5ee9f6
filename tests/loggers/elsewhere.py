"""What another process does with a logger, in a module that imports none of the services."""

from __future__ import annotations

import os
from typing import Any


def log_elsewhere(logger: Any, environment: dict[str, str]) -> str:
    os.environ.update(environment)
    logger.log_metrics({"loss": 0.25}, step=1)
    logger.finalize("success")
    return str(logger.version)
