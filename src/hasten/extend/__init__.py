"""What other packages build on: entry points, where code comes from (``origin``), what is running (``frames``).

It knows nothing of training, and must not import ``hasten_tools``, ``hasten_lightning``, ``hasten_deepspeed`` or
``hasten_xla``, which it finds by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.lazy import attach

if TYPE_CHECKING:
    from hasten.extend.entry_points import GROUPS as GROUPS
    from hasten.extend.entry_points import Command as Command
    from hasten.extend.entry_points import found as found
    from hasten.extend.entry_points import load as load

__getattr__, __dir__, __all__ = attach(
    __name__, {"hasten.extend.entry_points": ("GROUPS", "Command", "found", "load")}, submodules=("frames",)
)
