"""Warnings that programs silence, all of a kind at once."""

from __future__ import annotations

import os
import warnings

from hasten._lib.rank_zero import PossibleUserWarning
from hasten_lightning.utilities.rank_zero import WarningCache


def disable_if_requested() -> None:
    """Ignore every ``PossibleUserWarning`` if the environment has ``POSSIBLE_USER_WARNINGS=off`` or ``=0``."""
    if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
        disable_possible_user_warnings()


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore every ``PossibleUserWarning``.

    Args:
        module: only those raised in modules whose name this regular expression matches.

    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


__all__ = ["PossibleUserWarning", "WarningCache", "disable_possible_user_warnings"]
