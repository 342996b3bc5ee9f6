"""Exceptions that programs written for Lightning catch by name."""

from hasten._lib.errors import MisconfigurationException
from hasten.machine.signals import SIGTERMException


class _TunerExitException(Exception):
    """Never raised; some programs import it."""


__all__ = ["MisconfigurationException", "SIGTERMException"]
