"""Verdicts kept for the next run of the same program with the same model on the same device."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hasten._lib.rank_zero import rank_zero_warn
from hasten.speed.advice import Advice


def folder() -> Path:
    """Return where verdicts are kept: ``advice`` in ``HASTEN_CACHE``, or in ``hasten`` in the user's cache folder."""
    chosen = os.environ.get("HASTEN_CACHE")
    if chosen:
        return Path(chosen) / "advice"
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is to be ignored.
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "hasten" / "advice"


def remember(key: str | None, advice: Advice) -> Path | None:
    """Keep a verdict; return its file, or None where it cannot be kept.

    Args:
        key: see ``hasten.speed.look.key_of``.
        advice: the verdict.

    """
    if not key:
        return None
    target = folder() / f"{key}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
            file.write(advice.to_json())
        os.replace(file.name, target)
    except OSError:
        # A cache is never worth an error: the next run measures again.
        return None
    return target


def recall(key: str) -> Advice | None:
    """Return the verdict kept under ``key``; None where there is none, or none that can be read."""
    path = folder() / f"{key}.json"
    try:
        return Advice.from_json(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        rank_zero_warn(
            f"{path} cannot be read: the verdict is dropped, and measured again when it is needed."
        )
        with suppress(OSError):
            path.unlink()
        return None
