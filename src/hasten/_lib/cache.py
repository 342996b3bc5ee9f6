"""The user's cache folder: what was measured, compiled or downloaded once."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hasten._lib.files import write_atomically


def cache_folder(name: str = "") -> Path:
    """Return the cache folder, or the folder ``name`` in it. It may not exist yet.

    The environment variable ``HASTEN_CACHE`` names it; without that it is ``hasten`` in ``XDG_CACHE_HOME``
    (``~/.cache``).

    Example::

        >>> os.environ["HASTEN_CACHE"] = "/data/cache"
        >>> cache_folder("compile").as_posix()
        '/data/cache/compile'
        >>> del os.environ["HASTEN_CACHE"]

    Source: `XDG base directories <https://specifications.freedesktop.org/basedir-spec/latest/>`_.

    """
    chosen = os.environ.get("HASTEN_CACHE")
    if chosen:
        return Path(chosen).expanduser() / name
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "hasten" / name


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is absent or damaged."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def remember_json(path: Path, content: Any) -> bool:
    """Write a JSON file and the folders it lies in; return whether that worked.

    A full or read-only disk is not an error: what is cached can be made again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content), durable=False)
    except OSError:
        return False
    return True
