"""Exceptions that programs written for Lightning catch by name."""

from hasten._lib.errors import MisconfigurationException

# hasten ends a run with SystemExit(143) on SIGTERM.
SIGTERMException = SystemExit


class _TunerExitException(Exception):
    """Never raised; some programs import it."""


__all__ = ["MisconfigurationException", "SIGTERMException"]
