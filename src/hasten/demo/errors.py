"""What the demo raises when the world is not as it needs it; the command prints these without a traceback."""

from __future__ import annotations


class DemoError(RuntimeError):
    """The demo cannot go on; the message says why and what to do.

    Example::

        >>> raise DemoError("no such archive: reviews.tar.gz. Name one with --data.")
        Traceback (most recent call last):
            ...
        hasten.demo.errors.DemoError: no such archive: reviews.tar.gz. Name one with --data.

    """
