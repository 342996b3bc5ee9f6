"""The exception classes of our own."""

from __future__ import annotations


class MisconfigurationException(ValueError):
    """The program asks for something that cannot work; the message says what to change.

    It is a ``ValueError``, and has the field's name because programs catch it by that name.
    """


class BadLossError(FloatingPointError):
    """The run ended because a loss or its gradient is not finite; the weights are those before that step."""
