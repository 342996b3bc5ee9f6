"""What packages beside the core build on: entry points, what is part of hasten (``origin``), what runs (``frames``).

It knows nothing of training, and no package that adds to hasten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.extend.entry_points import GROUPS as GROUPS
    from hasten.extend.entry_points import Command as Command
    from hasten.extend.entry_points import found as found
    from hasten.extend.entry_points import load as load

__getattr__, __dir__, __all__ = attach(__name__, {"hasten.extend.entry_points": ("GROUPS", "Command", "found", "load")})
