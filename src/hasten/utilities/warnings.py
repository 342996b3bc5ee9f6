"""Warnings that programs written for Lightning silence; hasten does not raise them."""

from __future__ import annotations

import warnings

from hasten.utilities.rank_zero import WarningCache


class PossibleUserWarning(UserWarning):
    """A warning of something that may be intended."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore every ``PossibleUserWarning``.

    Args:
        module: only those raised in modules whose name this regular expression matches.

    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


__all__ = ["PossibleUserWarning", "WarningCache", "disable_possible_user_warnings"]
