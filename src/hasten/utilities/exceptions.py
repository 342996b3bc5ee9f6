"""Exceptions that programs of the field catch by name."""

from __future__ import annotations

from hasten._lib.errors import MisconfigurationException

# SIGTERM ends a run with exit code 143: a SystemExit, which is what a program that catches this means.
SIGTERMException = SystemExit


class _TunerExitException(Exception):
    """Raised by nothing here: the tuner ends a trial without exceptions. Programs name it."""


__all__ = ["MisconfigurationException", "SIGTERMException"]
